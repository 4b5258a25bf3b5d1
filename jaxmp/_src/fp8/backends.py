"""Which backend runs each operation on this machine, and why: the table of `python -m jaxmp doctor`.

The answers come from the functions that choose the backend (`pallas_kernels.backend`, `hardware`), so they cannot
differ from what runs. They hold for programs that run on this machine.
"""

from typing import NamedTuple

import jax

from jaxmp._src.base import hardware
from pallas_kernels import backend as kernel_backend


class Row(NamedTuple):
    """One operation.

    Attributes:
      operation: what is done.
      backend: what does it: "mosaic" (a kernel of `pallas_kernels`), "xla", "cublasLt fp8", "cudnn mxfp8",
        "cudnn nvfp4", "emulated".
      reason: why no better backend does it, or the conditions; "" if there are none.
    """

    operation: str
    backend: str
    reason: str


# Operations with kernels in `pallas_kernels`: name, conditions, further conditions with several devices
_OF_TREES, _OF_LAYERS = "xla outside of shard_map", "xla where only some mesh axes are manual, or any is explicit"
_KERNELS = (
    ("unscale, norm and finite flag of gradients", "with jaxmp.fused_*, in apply_gradients", _OF_TREES),
    (
        "fused optimizer update",
        "with jaxmp.fused_*, in apply_gradients",
        f"split params in shard_map(check_vma=False); {_OF_TREES}",
    ),
    ("cast of params (pallas_kernels.cast_tree)", "", _OF_TREES),
    ("fp8 cast, transpose and amax", "sides that are multiples of 64", _OF_LAYERS),
    ("activation and fp8 cast", "sides that are multiples of 64", _OF_LAYERS),
)


def backends() -> list[Row]:
    """Which backend serves each operation on this machine, and why not a better one.

    Returns:
      A row for each operation: what is done, what does it, and the reason.

    Example:
      >>> {row.operation: row.backend for row in backends()}["fused optimizer update"]  # on a CPU
      'xla'
    """
    rows = [_kernel(*kernel) for kernel in _KERNELS]
    why_not = hardware.why_not_fp8_gemms()
    rows.append(_gemm("fp8 matmul", "cublasLt fp8", why_not, "float32", "other sides than multiples of 16 are padded"))
    exact = "float32" if why_not else "bfloat16"
    why_not = hardware.why_not_block_scaled_gemms()
    rows.append(_gemm("block-scaled matmul, MXFP8", "cudnn mxfp8", why_not, exact, ""))
    rows.append(_gemm("four-bit matmul, NVFP4", "cudnn nvfp4", why_not, exact, ""))
    rows.append(_gemm("block-scaled matmul, BlockScaling", "", "jax calls no matmul of such blocks", exact, ""))
    return rows


def _kernel(operation: str, condition: str, if_several: str) -> Row:
    why_not = kernel_backend.why_no_kernels(needs_gpu=True)
    if why_not:
        return Row(operation, "xla", why_not)
    if jax.device_count() > 1:
        condition = "; ".join(filter(None, (condition, if_several)))
    return Row(operation, "mosaic", condition)


def _gemm(operation: str, backend: str, why_not: str | None, exact: str, condition: str) -> Row:
    if why_not is None:
        return Row(operation, backend, condition)
    return Row(operation, "emulated", f"{why_not}; the rounded numbers are multiplied exactly, in {exact}")
