"""In which way a tensor is cast to fp8 that the GEMMs read in both forms, as it is and transposed.

    one pass      a kernel reads the tensor once, writes both forms, and finds the amax (`pallas_kernels`)
    two passes    XLA casts the tensor and finds the amax, then it transposes the cast

Both give the same numbers. Counted for H100, the three GEMMs of a Dense 4096 x 4096 on 8192 rows move 352 MiB beside
them in one pass, and 432 in two. On an H200 one pass makes the GEMMs of a layer 1.09 times as fast as two.
(TransformerEngine's JAX code calls two passes faster for tensors with one scale, on Hopper where the same pass sums no
gradient of a bias; `_quantize_dbias_impl`.)
`python -m benchmarks gpu --sections casts` measures both at its shapes, and says which is faster: write that into the
table. The cast of what a kernel computes (`fused_casts`) is one pass everywhere.
"""

from jaxmp._src.base import hardware

ONE_PASS, TWO_PASSES = WAYS = "one pass", "two passes"

# By the kind of GPU; of all others, and on a machine without one: one pass.
BY_KIND: dict[str | None, str] = {
    "NVIDIA H100 80GB HBM3": ONE_PASS,  # counted
    "NVIDIA H200": ONE_PASS,  # timed
}


def chosen() -> str:
    """The way for the GPUs of this machine.

    Example:
      >>> chosen()
      'one pass'
    """
    return BY_KIND.get(hardware.gpu_kind(), ONE_PASS)
