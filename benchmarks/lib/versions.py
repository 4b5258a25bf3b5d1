"""Versions of the packages that results depend on; they are stored with the results."""

import importlib.metadata
import platform

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
