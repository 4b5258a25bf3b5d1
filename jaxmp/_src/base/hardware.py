"""What the target device of a program can do.

The platform is chosen when the program is lowered (`pallas_kernels.by_platform`): a function that is compiled on a CPU
for a GPU gets the way of GPUs. The lowering does not know the generation of the GPU, so this file assumes the oldest
GPU of this machine, or Hopper if there is none.
"""

from collections.abc import Callable
from typing import Any

from pallas_kernels import backend
from pallas_kernels.by_platform import by_platform

# Compute capabilities
_FIRST_WITH_FP8 = 8.9  # Ada
_HOPPER = 9.0
_FIRST_WITH_BLOCKS = 10.0  # Blackwell


def on_fp8_hardware(in_fp8: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `in_fp8` in programs for NVIDIA GPUs with fp8 tensor cores, else `otherwise`."""
    return _on_cuda(in_fp8, otherwise) if _oldest_gpu() >= _FIRST_WITH_FP8 else otherwise


def on_block_scaled_hardware(in_blocks: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `in_blocks` in programs for NVIDIA GPUs whose tensor cores multiply MXFP8, else `otherwise`."""
    return _on_cuda(in_blocks, otherwise) if _oldest_gpu() >= _FIRST_WITH_BLOCKS else otherwise


def _on_cuda(on_gpu: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    # A jaxpr shows what runs on a GPU; its types are those of `otherwise`, too.
    ways: dict[str, Any] = {"cuda": lambda f, *args: f(*args), "default": lambda _, *args: otherwise(*args)}
    return lambda *args: by_platform(on_gpu, *args, maps=True, **ways)


def why_not_fp8_gemms() -> str | None:
    """Why matmuls cannot run in fp8 on this machine; None if they can."""
    return _why_not(_FIRST_WITH_FP8, "fp8 tensor cores come with", "Ada")


def why_not_block_scaled_gemms() -> str | None:
    """Why matmuls of MXFP8 blocks cannot run in fp8 on this machine; None if they can."""
    return _why_not(_FIRST_WITH_BLOCKS, "block scales come with", "Blackwell")


def _why_not(first: float, what: str, generation: str) -> str | None:
    capability = backend.oldest_gpu()
    if capability is None:
        return "there is no NVIDIA GPU"
    if capability < first:
        return f"{what} compute capability {first} ({generation}); a GPU here has {capability}"
    return None


def capability() -> float:
    """The compute capability that programs for GPUs are traced for: where it differs, no trace may be used again."""
    return _oldest_gpu()


def gpu_kind() -> str | None:
    """The name of the first GPU of this machine, such as "NVIDIA H100 80GB HBM3"; None without a GPU."""
    return next((gpu.device_kind for gpu in backend.gpus()), None)


def _oldest_gpu() -> float:
    """The lowest compute capability of this machine's GPUs; Hopper's if there are none."""
    capability = backend.oldest_gpu()
    return _HOPPER if capability is None else capability
