"""Versions of the packages that results depend on, and a checksum of the code; they are stored with the results."""

import hashlib
import importlib.metadata
import platform
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CPU = ("jax", "jaxlib", "flax", "optax", "jmp", "jaxmp")
H100 = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "flax", "optax", "jaxmp")
TPU = ("jax", "jaxlib", "libtpu", "flax", "optax", "jaxmp")
GPU = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "torch")


def versions(required: tuple[str, ...], *, optional: tuple[str, ...] = ()) -> dict[str, str]:
    """The versions of Python, of the required packages, and of those optional packages that are installed.

    Raises:
      SystemExit: a required package is missing.
    """
    found = {"python": platform.python_version()}
    for package in (*required, *optional):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError as e:
            if package in required:
                raise SystemExit(
                    f"{package} is missing: `make bench` and `make h100` install what benchmarks need, then run them; "
                    "for `python -m benchmarks tpu` install libtpu"
                ) from e
    return found


def source() -> str:
    """A checksum of the code that is measured: results of other code are not mixed with these."""
    digest = hashlib.sha256()
    for folder in ("jaxmp", "pallas_kernels", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
