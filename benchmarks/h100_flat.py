"""Does a flat buffer pay? Accumulated gradients, and an optimizer's state, in one buffer and leaf by leaf; for H100.

Megatron-LM and DeepSpeed keep gradients of all microbatches in one contiguous float32 buffer, so that zeroing it,
adding to it, reducing it over devices and looking at it are one kernel each, whatever the number of leaves. Under XLA a
buffer is not something that a matmul can be told to write into. So there is a price: each gradient is written once by
its matmul and copied once to its place. Compiled here, for the blocks of GPT-2 small's tree:

    accumulate    g of a microbatch is added to the float32 sum: leaf by leaf, or flat
    step          AdamW with masters, clipped: leaf by leaf, flat (gradients raveled, params cut out), and jaxmp's fused
                  one, which is a few launches on leaves as they are

    python benchmarks/h100_flat.py            compile, write the results and the table in README.md
    python benchmarks/h100_flat.py --table    only the table, from the results that are there
"""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

import h100_aot as aot  # first: it pins the local platform
import jaxmp
import trees
from h100 import versions
from tables import HERE, markdown, run

RESULTS = HERE / "results" / "h100_flat.json"
MARKERS = "<!-- h100_flat: written by h100_flat.py -->", "<!-- h100_flat: end -->"
MAX_NORM = 1.0


class Program(NamedTuple):
    """One row: a function of abstract arguments, some donated."""

    name: str
    run: Callable[..., Any]
    arguments: tuple[PyTree, ...]
    donated: tuple[int, ...]


def blocks() -> PyTree:
    """The twelve blocks of GPT-2 small: 144 leaves, 85 million values; float16."""
    tree = {name: block for name, block in trees.gpt2().items() if name.startswith("h_")}
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float16), tree)


def in_float32(tree: PyTree) -> PyTree:
    """The same shapes in float32."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), tree)


def ravel(tree: PyTree) -> Array:
    """All leaves as one float32 vector."""
    return jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in jax.tree.leaves(tree)])


def programs() -> list[Program]:
    """Accumulation and step, each leaf by leaf and flat."""
    params = blocks()
    full = in_float32(params)
    flat = jax.ShapeDtypeStruct((sum(math.prod(x.shape) for x in jax.tree.leaves(params)),), jnp.float32)
    unravel = ravel_pytree(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float16), params))[1]
    plain = optax.chain(jaxmp.clip_by_global_norm(MAX_NORM), optax.adamw(1e-3))
    by_leaf = jaxmp.mixed_precision(plain, "fp16")
    fused = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3, max_norm=MAX_NORM), "fp16")

    def add(total: PyTree, grads: PyTree) -> PyTree:
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads)

    def add_flat(total: Array, grads: PyTree) -> Array:
        return total + ravel(grads)

    def step(tx: Any) -> Callable[..., Any]:
        return lambda params, state, grads: jaxmp.apply_gradients(tx, grads, state, params)

    def step_flat(params: PyTree, state: Any, grads: PyTree) -> Any:
        del params
        master, inner = state
        g = ravel(grads)
        finite = jnp.all(jnp.isfinite(g))
        updates, new_inner = plain.update(g, inner, master)
        master = jnp.where(finite, master + updates, master)
        inner = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new_inner, inner)
        return unravel(master.astype(jnp.float16)), (master, inner)

    flat_state = (flat, jax.eval_shape(plain.init, flat))
    return [
        Program("accumulate, leaf by leaf", add, (full, params), (0,)),
        Program("accumulate, flat buffer", add_flat, (flat, params), (0,)),
        Program("step, leaf by leaf", step(by_leaf), (params, jax.eval_shape(by_leaf.init, full), params), (0, 1)),
        Program("step, flat buffers", step_flat, (params, flat_state, params), (0, 1)),
        Program("step, jaxmp.fused_adamw", step(fused), (params, jax.eval_shape(fused.init, full), params), (0, 1)),
    ]


def measure(program: Program) -> dict[str, Any]:
    """One row of the table."""
    m = aot.mesh()
    arguments = aot.abstract(m, program.arguments)
    compiled = aot.compile_for(program.run, *arguments, donate_argnums=program.donated, keep_unused=True)
    n = sum(math.prod(x.shape) for x in jax.tree.leaves(blocks()))
    return {"program": program.name} | aot.report(compiled, n)


def table(results: dict[str, Any]) -> str:
    """The results as markdown."""
    cells = [["program", "kernels", "bytes/param", "copies", "scratch MB"]]
    for row in results["rows"]:
        counts = f"{row['bytes_per_param']:.2f}", str(row["copies"]), f"{row['temp_bytes'] / 1e6:.1f}"
        cells.append([row["program"], str(row["kernels"]), *counts])
    return markdown(cells)


def measure_all() -> dict[str, Any]:
    """All results."""
    found, rows = versions(), []
    for program in programs():
        print(f"compiling: {program.name}", file=sys.stderr, flush=True)
        rows.append(measure(program))
    return {
        "command": "python benchmarks/h100_flat.py",
        "device": "H100 (compiled, not run)",
        "versions": found,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(run(__doc__, RESULTS, MARKERS, table, measure_all))
