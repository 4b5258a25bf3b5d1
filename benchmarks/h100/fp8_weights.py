"""Counts what devices exchange for sharded params whose kernels are stored in fp8.

Three Dense 4096x4096 under jit: params, masters and moments are split over 8 devices along their first axis (FSDP), and
the batch [8192, 4096] over the same devices. Each kernel is gathered for its forward GEMM, and its gradient is
scattered. Counted in each program: the dtype of the gathered weights and their bytes; whether a cast runs on the shards
before they are gathered; the bytes that the gradients' reduce-scatter sends; scratch memory.

Target: kernels stored in fp8 are gathered as one byte per weight, without a cast before.
"""

import re
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, PyTree

import jaxmp
from benchmarks.lib import aot
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import markdown
from benchmarks.lib.versions import H100, versions
from benchmarks.programs.fp8_matmuls import OPTIONS, everywhere

DEVICES, LAYERS, ROWS, WIDTH = 8, 3, 8192, 4096
WEIGHTS = LAYERS * WIDTH * WIDTH
_GATHER = re.compile(r"all-gather(?:-start)?\((%[\w.\-]+)")


class Program(NamedTuple):
    """A policy, and whether its matmuls run in fp8."""

    name: str
    policy: jaxmp.Policy
    in_fp8: bool


PROGRAMS = (
    Program('"bf16": kernels in bfloat16', jaxmp.get_policy("bf16"), False),
    Program('"fp8": kernels in float32, cast in the forward pass', jaxmp.get_policy("fp8"), True),
    Program('"fp8", fp8_weights=True: kernels in fp8', jaxmp.get_policy("fp8", fp8_weights=True), True),
)


class Net(nn.Module):
    """A sequence of Dense layers."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for _ in range(LAYERS):
            x = nn.relu(nn.Dense(WIDTH, use_bias=False, dtype=jnp.bfloat16)(x))
        return x


def measure(program: Program) -> dict[str, Any]:
    """One row of the table."""
    m, model = aot.mesh(DEVICES), Net()
    recipe = jaxmp.fp8.DelayedScaling(amax_history_len=16)
    tx = jaxmp.mixed_precision(optax.adam(1e-3), program.policy, recipe=recipe if program.in_fp8 else None)
    layers = jaxmp.fp8.autocast(recipe, enabled=program.in_fp8, filter=everywhere)

    def init() -> tuple[PyTree, Any]:
        params32 = model.init(jax.random.key(0), jnp.zeros((16, WIDTH)))["params"]
        return program.policy.cast_to_param(params32), tx.init(params32)

    def loss_fn(params: PyTree, x: Array) -> Array:
        return jnp.mean(model.apply({"params": params}, x).astype(jnp.float32) ** 2)

    def step(params: PyTree, opt_state: Any, x: Array) -> tuple[PyTree, Any, Array]:
        loss, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=opt_state)
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        keep = jax.lax.with_sharding_constraint
        return keep(params, shardings[0]), keep(opt_state, shardings[1]), loss

    with layers:
        state = _split(jax.eval_shape(init), m)
        shardings = jax.tree.map(lambda x: x.sharding, state)
        x = aot.spec(m, (ROWS, WIDTH), jnp.bfloat16, P("data"))
        compiled = aot.compile_for(step, *state, x, donate_argnums=(0, 1), compiler_options=OPTIONS)
    report = aot.report(compiled)
    gathers = [line for line in (compiled.as_text() or "").splitlines() if _GATHER.search(line)]
    gathered = report["collectives"].get("all-gather", [])
    return {
        "program": program.name,
        "gathered_dtypes": sorted({re.search(r"= \(*(\w+)\[", line).group(1) for line in gathers}),  # pyright: ignore
        "gathered_bytes_per_weight": round(sum(gathered) * DEVICES / WEIGHTS, 3),
        "gathered_straight_from_params": sum(_GATHER.search(g).group(1).startswith("%param") for g in gathers),  # pyright: ignore
        "gathers": len(gathers),
        "gradient_bytes_per_weight": round(sum(report["collectives"].get("reduce-scatter", [])) / WEIGHTS, 3),
        "temp_mib": round(report["temp_bytes"] / 2**20),
    }


def _split(tree: PyTree, m: Mesh) -> PyTree:
    """Abstract arguments: large matrices are split along their first axis, the rest is replicated."""
    return aot.abstract(m, tree, lambda x: P("data") if x.ndim == 2 and x.size >= WIDTH**2 else P())


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The targets that the last program, with kernels in fp8, misses."""
    row = rows[-1]
    checks = (
        (row["gathered_dtypes"] == ["f8e4m3fn"], f"gathered in {row['gathered_dtypes']}"),
        (row["gathered_bytes_per_weight"] == 1, f"{row['gathered_bytes_per_weight']} bytes a weight gathered"),
        (row["gathered_straight_from_params"] == row["gathers"], "kernels run over weights before they are gathered"),
    )
    return [what for holds, what in checks if not holds]


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    head = [
        "params",
        "gathered as",
        "bytes a weight",
        "without a pass before",
        "gradients, bytes a weight",
        "scratch MiB",
    ]
    cells = [head]
    for row in results["rows"]:
        straight = f"{row['gathered_straight_from_params']} of {row['gathers']}"
        dtypes = ", ".join(row["gathered_dtypes"])
        numbers = (row["gathered_bytes_per_weight"], straight, row["gradient_bytes_per_weight"], row["temp_mib"])
        cells.append([row["program"], dtypes, *map(str, numbers)])
    return markdown(cells)


def measure_all() -> dict[str, Any]:
    """All results."""
    found, rows = versions(H100), []
    for program in PROGRAMS:
        print(f"compiling: {program.name}", file=sys.stderr, flush=True)
        rows.append(measure(program))
    return {
        "device": f"{DEVICES} x H100 (compiled, not run)",
        "versions": found,
        "rows": rows,
        "missed": missed(rows),
    }


BENCHMARK = Benchmark("h100 fp8_weights", "h100_fp8_weights.json", measure_all, render)
