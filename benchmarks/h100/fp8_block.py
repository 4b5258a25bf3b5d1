"""A whole transformer block, forward and backward, in bfloat16 and in fp8: counted on one device and on eight.

Part of `h100_fp8.py`, which writes the table.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import fp8_ops
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from benchmarks.lib import aot
from benchmarks.programs.fp8_matmuls import FP8_GEMM, GEMM, OPTIONS, everywhere
from jaxmp import fp8

BLOCK_WIDTH, HEADS, SEQUENCES, LENGTH = 2048, 16, 4, 2048
BLOCKS = ("bf16", "jaxmp.fp8.autocast", "flax Fp8DirectDotGeneralOp")


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        cls = self.dot_general_cls
        y = nn.RMSNorm(dtype=x.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(
            HEADS, dtype=x.dtype, use_bias=False, qkv_dot_general_cls=cls, out_dot_general_cls=cls
        )(y)
        y = nn.RMSNorm(dtype=x.dtype)(x)
        y = nn.gelu(nn.Dense(4 * BLOCK_WIDTH, use_bias=False, dtype=x.dtype, dot_general_cls=cls)(y))
        return x + nn.Dense(BLOCK_WIDTH, use_bias=False, dtype=x.dtype, dot_general_cls=cls)(y)


def measure_block(name: str, devices: int) -> dict[str, Any]:
    """Counts of one block, forward and backward; on several devices data-parallel, gradients reduced."""
    in_fp8 = name == "jaxmp.fp8.autocast"
    model = Block(fp8_ops.Fp8DirectDotGeneralOp if name.startswith("flax") else None)
    m = aot.mesh(devices)
    x = aot.spec(m, (devices * SEQUENCES, LENGTH, BLOCK_WIDTH), jnp.bfloat16, P("data") if devices > 1 else None)
    with fp8.autocast(enabled=in_fp8, filter=everywhere):
        variables = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct(x.shape, x.dtype))

    def run(variables: PyTree, x: Array) -> Any:
        def loss_fn(variables: PyTree, x: Array) -> Array:
            with fp8.autocast(enabled=in_fp8, filter=everywhere):
                y: Any = model.apply(variables, x)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_fn, (0, 1))(variables, x)
        return (lax.pmean((loss, grads[0]), "data"), grads[1]) if devices > 1 else (loss, grads)

    if devices > 1:
        out_specs = (P(), P("data"))
        run = jax.shard_map(run, mesh=m, in_specs=(P(), P("data")), out_specs=out_specs, check_vma=False)
    compiled = aot.compile_for(run, aot.abstract(m, variables), x, compiler_options=OPTIONS)
    report, runs = aot.report(compiled), aot.instructions(compiled)
    gemms = [i for i in runs if i.kind.startswith(GEMM)]
    moved = sum(i.bytes_read + i.bytes_written for i in gemms)
    return {
        "block": name,
        "devices": devices,
        "fp8_gemms": sum(i.kind == FP8_GEMM for i in gemms),
        "gemms": len(gemms),
        "kernels": report["kernels"] - len(gemms),
        "pallas": sum("mosaic" in i.kind for i in runs),
        "mib": round((report["bytes_read"] + report["bytes_written"] - moved) / 2**20, 1),
        "collectives": {kind: len(sizes) for kind, sizes in report["collectives"].items()},
    }


def block_cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The rows as cells of a table."""
    head = ["transformer block", "devices", "GEMMs", "of them fp8", "kernels beside", "of them Pallas", "MiB beside"]
    cells = [[*head, "collectives"]]
    cells += [
        [
            *(str(r[key]) for key in ("block", "devices", "gemms", "fp8_gemms", "kernels", "pallas")),
            f"{r['mib']:.0f}",
            ", ".join(f"{n} {kind}" for kind, n in r["collectives"].items()) or "none",
        ]
        for r in rows
    ]
    return cells
