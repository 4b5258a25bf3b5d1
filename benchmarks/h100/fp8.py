"""Counts what fp8 adds to the matmuls of a layer: casts, amaxes, transposes; and how its split weight is gathered."""

import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.linen import fp8_ops
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, PyTree

import jaxmp
import jaxmp.linen
from benchmarks.lib import aot
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import failing, holds, markdown
from benchmarks.lib.versions import on_h100
from benchmarks.programs.fp8_matmuls import FP8_GEMM, GEMM, OPTIONS, everywhere, gemms, written_in_fp8
from jaxmp import fp8

ROWS, WIDTH = 8192, 4096
MATMUL = (((1,), (0,)), ((), ()))
FAST, FULL = "ALG_DOT_ANY_F8_ANY_F8_F32_FAST_ACCUM", "ALG_DOT_ANY_F8_ANY_F8_F32"
Apply = Callable[[PyTree, Array], Array]


class Target(NamedTuple):
    """The most that may run beside the three GEMMs: casts, amaxes and transposes, whose bytes determine their time.

    In MiB: x and g in bfloat16 are read once (64 each) and written in both orders (32 + 32 each), the float32 weight
    likewise (64, 16 + 16). That is 352 in total; 432 if q is read again to make its transpose.
    """

    kernels: int
    mib: float
    after_a_gemm: int = 0  # kernels that may read the result of a GEMM


class Layer(NamedTuple):
    """One row of the first table: a function (params, x, g) -> (y, gradients), and the shapes of its params."""

    name: str
    run: Callable[[PyTree, Array, Array], Any]
    params: PyTree
    target: Target | None = None
    rounded: int = 0  # tensors that must be written in fp8, if the GEMMs are not in fp8


def layers() -> list[Layer]:
    """The same Dense layer in bfloat16, in jaxmp's recipes, and in the fp8 of flax and qwix; also after a gelu."""
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    scale: Any = jax.ShapeDtypeStruct((), jnp.float32)
    delayed, of_flax = (w, fp8.Scales(scale, scale, scale)), linen_params(flax_dense, in_fp8=False)
    alone = Target(kernels=13, mib=380)  # seven of them scales: each alone, without value_and_grad
    in_steps = Target(kernels=11, mib=380)  # value_and_grad has all scales computed in one launch
    summed = Target(kernels=13, mib=370)  # and two for the gradient of the bias
    after_gelu = Target(kernels=14, mib=600, after_a_gemm=1)  # the gradient of the gelu
    return [
        Layer("bf16", by_vjp(lambda w, x: x @ w.astype(x.dtype)), w),
        Layer("jaxmp.fp8.dot_general, DelayedScaling", by_vjp(in_delayed), delayed, alone),
        Layer("linen Dense in jaxmp.fp8.autocast, DelayedScaling", trained(use_bias=False), linen_params(), in_steps),
        Layer("the same with a bias", trained(use_bias=True), linen_params(use_bias=True), summed),
        Layer("jaxmp.fp8.dot_general, CurrentScaling", by_vjp(in_recipe(fp8.CurrentScaling())), w, Target(16, 630)),
        Layer("jaxmp.fp8.dot_general, RowwiseScaling", by_vjp(in_recipe(fp8.RowwiseScaling())), w),
        Layer("jaxmp.fp8.dot_general, BlockScaling", by_vjp(in_recipe(fp8.BlockScaling())), w, rounded=5),
        Layer("jaxmp.fp8.dot_general, MXFP8", by_vjp(in_recipe(fp8.MXFP8())), w, rounded=6),
        Layer("linen Dense, flax Fp8DirectDotGeneralOp", by_vjp(in_flax), of_flax),
        Layer('jaxmp.fp8.dot_general(activation="gelu")', by_vjp(gelu_in_the_cast), delayed, after_gelu),
        Layer("gelu, then jaxmp.fp8.dot_general", by_vjp(gelu_then(in_delayed)), delayed),
        Layer("gelu, then flax Fp8DirectDotGeneralOp", by_vjp(gelu_then(in_flax)), of_flax),
        *qwix_layers(),
    ]


def qwix_layers() -> list[Layer]:
    """The same layer in qwix's fp8, if qwix is installed."""
    try:
        import qwix
    except ImportError:
        return []
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    provider = qwix.QtProvider([qwix.QtRule(weight_qtype=e4m3, act_qtype=e4m3, bwd_qtype=e5m2)])

    def dense(*args: Any, **kwargs: Any) -> Any:
        return qwix.quantize_model(nn.Dense(*args, **kwargs), provider)

    def run(variables: PyTree, x: Array) -> Any:
        return dense(WIDTH, use_bias=False, dtype=x.dtype).apply(variables, x)

    params = linen_params(dense, in_fp8=False)
    return [
        Layer("linen Dense, qwix QtProvider", by_vjp(run), params),
        Layer("gelu, then qwix QtProvider", by_vjp(gelu_then(run)), params),
    ]


def by_vjp(f: Apply) -> Callable[..., Any]:
    """y = f(params, x), and the gradients of sum(y * g)."""

    def run(params: PyTree, x: Array, g: Array) -> Any:
        y, backward = jax.vjp(f, params, x)
        return y, backward(g)

    return run


def in_delayed(params: PyTree, x: Array, **activation: Any) -> Array:
    w, scales = params
    return fp8.dot_general(x, w, MATMUL, recipe=fp8.DelayedScaling(), scales=scales, **activation)


def gelu_in_the_cast(params: PyTree, x: Array) -> Array:
    return in_delayed(params, x, activation="gelu")


def gelu_then(f: Apply) -> Apply:
    return lambda params, x: f(params, jax.nn.gelu(x))


def in_recipe(recipe: Any) -> Apply:
    return lambda w, x: fp8.dot_general(x, w, MATMUL, recipe=recipe)


def flax_dense(*args: Any, **kwargs: Any) -> nn.Module:
    """A Dense layer with flax's own fp8 matmul."""
    return nn.Dense(*args, **kwargs, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)


def in_flax(variables: PyTree, x: Array) -> Any:
    return flax_dense(WIDTH, use_bias=False, dtype=x.dtype).apply(variables, x)


def trained(*, use_bias: bool) -> Callable[..., Any]:
    """y of a plain Dense layer and the gradients of sum(y * g), as a user trains it: in the context of fp8."""
    model = nn.Dense(WIDTH, use_bias=use_bias, dtype=jnp.bfloat16)

    def run(variables: PyTree, x: Array, g: Array) -> Any:
        def loss_fn(params: PyTree, x: Array) -> Any:
            y: Any = model.apply({"params": params}, x)
            return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32)), y

        params = variables["params"]
        opt_state = jaxmp.mixed_precision(optax.identity(), "fp8").init(params)
        with fp8.autocast(filter=everywhere):
            grad_fn = jaxmp.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)
            (_, y), grads = grad_fn(params, x, opt_state=opt_state)
        return y, grads

    return run


def linen_params(dense: Callable[..., Any] = nn.Dense, *, in_fp8: bool = True, use_bias: bool = False) -> PyTree:
    layer = dense(WIDTH, use_bias=use_bias, dtype=jnp.bfloat16)
    with fp8.autocast(enabled=in_fp8, filter=everywhere):
        return jax.eval_shape(layer.init, jax.random.key(0), jax.ShapeDtypeStruct((16, WIDTH), jnp.bfloat16))


# --- counts -----------------------------------------------------------------------------------------------------------


def measure_layer(layer: Layer) -> dict[str, Any]:
    """Compiles one layer and returns its row."""
    print(f"compiling: {layer.name}", file=sys.stderr, flush=True)
    m = aot.mesh()
    x = aot.spec(m, (ROWS, WIDTH), jnp.bfloat16)
    compiled = aot.compile_for(layer.run, aot.abstract(m, layer.params), x, x, compiler_options=OPTIONS)
    runs = aot.instructions(compiled)
    names = {i.name for i in runs if i.kind.startswith(GEMM)}
    beside = [i for i in runs if i.name not in names]
    row = {
        "program": layer.name,
        "kernels": len(beside),
        "mib": aot.mib(aot.moved(beside)),
        "gemms": gemms(compiled),
        "kernels_after_a_gemm": sum(bool(i.sources & names) for i in beside),
        "written_in_fp8": written_in_fp8(compiled),
        "target": layer.target._asdict() if layer.target else None,
    }
    row["missed"] = _missed(row, layer.target) if layer.target else []
    if row["written_in_fp8"] < layer.rounded:
        row["missed"].append(f"{row['written_in_fp8']} of {layer.rounded} tensors rounded to fp8")
    return row


def _missed(row: dict[str, Any], target: Target) -> list[str]:
    """The parts of `target` that the row misses, in words."""
    calls = [gemm["call"] for gemm in row["gemms"]]
    sums, results, operands = (
        {gemm["stage"]: gemm[key] for gemm in row["gemms"]} for key in ("algorithm", "result", "operands")
    )
    after = row["kernels_after_a_gemm"]
    return failing(
        (
            (calls == [FP8_GEMM] * 3, f"GEMMs: {', '.join(calls)}"),
            (sums == {"fprop": FAST, "dgrad": FULL, "wgrad": FULL}, f"sums: {sums}"),
            (results == {"fprop": "bf16", "dgrad": "bf16", "wgrad": "f32"}, f"results: {results}"),
            (all(dtypes.count("f32") == 2 for dtypes in operands.values()), f"operands: {operands}"),
            (after <= target.after_a_gemm, f"{after} kernels on the result of a GEMM"),
            (row["kernels"] <= target.kernels, f"over {target.kernels} kernels"),
            (row["mib"] <= target.mib, f"over {target.mib} MiB"),
        )
    )


def measure_split_weight() -> dict[str, Any]:
    """One layer under jit on eight devices, its weight split by rows and x by rows: how the weight is gathered."""
    print("compiling: a layer with its weight split", file=sys.stderr, flush=True)
    m, whole, rows = aot.mesh(8), P(), P("data")
    x, w = aot.spec(m, (ROWS, WIDTH), jnp.bfloat16, rows), aot.spec(m, (WIDTH, WIDTH), jnp.float32, rows)
    scales = [aot.spec(m, (), jnp.float32, whole)] * 3

    def run(params: PyTree, x: Array, g: Array) -> Any:
        y, backward = jax.vjp(in_delayed, params, x)
        (dw, d_scales), dx = backward(lax.optimization_barrier((y, g))[1])
        return y, lax.with_sharding_constraint(dw, NamedSharding(m, rows)), d_scales, dx

    compiled = aot.compile_for(run, (w, fp8.Scales(*scales)), x, x, compiler_options=OPTIONS)
    report, runs = aot.report(compiled), aot.instructions(compiled)
    gathers = re.findall(r"= \(*(\w+)\[[^\n]* all-gather(?:-start)?\(", compiled.as_text() or "")
    beside = [i for i in runs if not i.kind.startswith(GEMM) and i.kind]
    per_weight = [size * 8 / WIDTH**2 for size in report["collectives"]["all-gather"]]
    in_one_byte = set(gathers) == {"f8e4m3fn"} and per_weight == [1.0]
    checks = (
        (in_one_byte, f"gathers of {gathers}, {per_weight} bytes a weight"),
        (sum("mosaic" in i.kind for i in beside) == 2, "x and g are not cast by the kernel"),
    )
    return {
        "gathered": gathers,
        "bytes_per_weight": per_weight,
        "kernels": len(beside),
        "mib": aot.mib(aot.moved(beside)),
        "missed": failing(checks),
    }


# --- out --------------------------------------------------------------------------------------------------------------


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    cells = [["one layer, forward and backward", "GEMMs", "kernels beside", "MiB beside", "target", "holds"]]
    for row in results["layers"]:
        target = row["target"]
        in_fp8 = sum(gemm["call"] == FP8_GEMM for gemm in row["gemms"])
        cells.append(
            [
                row["program"],
                f"{in_fp8} fp8" if in_fp8 else f"{len(row['gemms'])} bf16",
                str(row["kernels"]),
                f"{row['mib']:.0f}",
                f"{target['kernels']} and {target['mib']}" if target else "",
                holds(row, has_target=target is not None),
            ]
        )
    (row,) = results["split_weight"]
    head = [
        "8 devices, jit: one layer with its weight split",
        "bytes a weight",
        "kernels beside",
        "MiB beside",
        "holds",
    ]
    gathered = f"gathered in {', then '.join(row['gathered'])}"
    sizes = ", then ".join(f"{size:.0f}" for size in row["bytes_per_weight"])
    split = [head, [gathered, sizes, str(row["kernels"]), f"{row['mib']:.0f}", holds(row)]]
    return f"{markdown(cells)}\n\n{markdown(split)}"


def measure_all() -> dict[str, Any]:
    """All results."""
    return {
        **on_h100(optional=("qwix",)),
        "layer": {"x": [ROWS, WIDTH], "kernel": [WIDTH, WIDTH]},
        "layers": [measure_layer(layer) for layer in layers()],
        "split_weight": [measure_split_weight()],
    }


BENCHMARK = Benchmark("h100 fp8", "h100_fp8.json", measure_all, render)
