"""Where results are from: the device, the versions of packages, a checksum of the code."""

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

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
    packages = {"python": platform.python_version()}
    for package in (*required, *optional):
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError as e:
            if package in required:
                raise SystemExit(
                    f"{package} is missing: `make bench` and `make h100` install what benchmarks need, then run them; "
                    "for `python -m benchmarks tpu` install libtpu"
                ) from e
    return packages


def on_h100(*, devices: str = "H100", optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """ "device" and "versions" of results that were counted in programs for H100."""
    return {"device": f"{devices} (compiled, not run)", "versions": versions(H100, optional=optional)}


def on_cpu(load_before: float) -> dict[str, Any]:
    """ "device" and "versions" of times on this CPU, with the load of the machine: others make the times noisy."""
    load = f"load {load_before:.1f} to {os.getloadavg()[0]:.1f}"
    return {"device": f"CPU, {os.cpu_count()} cores, {load}", "versions": versions(CPU)}


def source() -> str:
    """A checksum of the code that is measured: results of other code are not mixed with these."""
    digest = hashlib.sha256()
    for folder in ("jaxmp", "pallas_kernels", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
