"""Counts what fp8 adds to its matmuls: in a layer, a block, the optimizer and the collectives.

Five kinds of programs are compiled for H100, and their final HLO is read:

1.  One Dense 4096x4096 on bfloat16 [8192, 4096], forward and backward. The three GEMMs must be fp8 calls of cuBLASLt
  that
    take the scales as operands. All else (casts, amaxes, transposes) is overhead, and its bytes determine its time:

        in MiB                      x, g [8192, 4096] bf16    W [4096, 4096] f32
        read once                   64 each                   64
        write q and q^T             32 + 32 each              16 + 16             352 in total; 432 if q is read again
                                                                                  to make q^T
    The same after a gelu. The gelu need not be in memory; its gradient reads x and a gradient (64 each) and writes 64.
    The same after a norm, a pass of XLA's. By policy "fp8" a layer without a dtype must move no more.

2.  The optimizer's side of a step with 24 fp8 layers, which updates 72 scales and their histories.
3.  A data-parallel step of these layers on 8 devices: one small all-reduce must carry all flags and amaxes.
4.  A whole transformer block, forward and backward, in bfloat16 and in fp8, on one device and on eight.
5.  A gated MLP, 4096 to 14336, on bfloat16 [8192, 4096] with float32 kernels: three layers, also
    under remat with and without `save_quantized`. Reading x and dy once, each weight once, and gate and up once forward
    and once backward, and writing what the GEMMs read, is 3056 MiB.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterator
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
from benchmarks.lib.tables import holds, markdown
from benchmarks.lib.trees import FP8_SCALES
from benchmarks.lib.versions import H100, versions
from benchmarks.programs.fp8_matmuls import FP8_GEMM, GEMM, OPTIONS, everywhere, gemms, written_in_fp8
from benchmarks.programs.h100 import SMALL
from jaxmp import fp8

ROWS, WIDTH = 8192, 4096
LAYERS = 24
MATMUL = (((1,), (0,)), ((), ()))
FAST, FULL = "ALG_DOT_ANY_F8_ANY_F8_F32_FAST_ACCUM", "ALG_DOT_ANY_F8_ANY_F8_F32"
BLOCK_WIDTH, HEADS, SEQUENCES, LENGTH = 2048, 16, 4, 2048
BLOCKS = ("bf16", "jaxmp.fp8.autocast", "flax Fp8DirectDotGeneralOp")


class Target(NamedTuple):
    """The most that may run beside the three GEMMs."""

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
    rows: int = ROWS


# --- one layer --------------------------------------------------------------------------------------------------------


def layers() -> list[Layer]:
    """The same Dense layer in bfloat16, in jaxmp's recipes, and in flax's own fp8."""
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    scale: Any = jax.ShapeDtypeStruct((), jnp.float32)
    delayed = Target(kernels=13, mib=380)  # seven of them scales: each alone, without value_and_grad
    in_steps = Target(kernels=11, mib=380)  # value_and_grad has all scales computed in one launch
    summed = Target(kernels=13, mib=370)  # and two for the gradient of the bias
    biased = functools.partial(trained, nn.Dense(WIDTH, dtype=jnp.bfloat16))
    # XLA casts x and g (96 MiB each) and transposes them (64 each), and copies y and dx without the zeros (128 each).
    padded = Target(kernels=18, mib=680, after_a_gemm=2)
    behind_gelu = Target(kernels=14, mib=600, after_a_gemm=1)  # the gradient of the gelu
    scales = fp8.Scales(scale, scale, scale)
    return [
        Layer("bf16", by_vjp(lambda w, x: x @ w.astype(x.dtype)), w),
        Layer("jaxmp.fp8.dot_general, DelayedScaling", by_vjp(_delayed), (w, scales), delayed),
        Layer("the same on 8200 rows, padded to 8208", by_vjp(_delayed), (w, scales), padded, rows=8200),
        Layer("linen Dense in jaxmp.fp8.autocast, DelayedScaling", linen_autocast, _params(nn.Dense, True), in_steps),
        Layer("the same with a bias", biased, _params(nn.Dense, True, use_bias=True), summed),
        Layer("jaxmp.fp8.dot_general, CurrentScaling", by_vjp(_current), w, Target(kernels=16, mib=630)),
        Layer("jaxmp.fp8.dot_general, RowwiseScaling", by_vjp(_blocks(fp8.RowwiseScaling())), w),
        Layer("jaxmp.fp8.dot_general, BlockScaling", by_vjp(_blocks(fp8.BlockScaling())), w, rounded=5),
        Layer("jaxmp.fp8.dot_general, MXFP8", by_vjp(_blocks(fp8.MXFP8())), w, rounded=6),
        Layer("linen Dense, flax Fp8DirectDotGeneralOp", by_vjp(_flax), _params(flax_dense, False)),
        Layer('jaxmp.fp8.dot_general(activation="gelu")', by_vjp(_gelu_fused), (w, scales), behind_gelu),
        Layer("gelu, then jaxmp.fp8.dot_general", by_vjp(_behind_gelu(_delayed)), (w, scales)),
        Layer("gelu, then flax Fp8DirectDotGeneralOp", by_vjp(_behind_gelu(_flax)), _params(flax_dense, False)),
        *behind_norms(),
        *qwix_layers(),
    ]


class Normed(nn.Module):
    """A Dense layer after a norm, which is a pass of XLA's."""

    norm: type[nn.Module]
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.Dense(WIDTH, use_bias=False, dtype=self.dtype)(self.norm(dtype=self.dtype)(x))


def behind_norms() -> Iterator[Layer]:
    """A layer after each norm, and the same by policy in place of dtypes, which must move no more."""
    for norm in (nn.RMSNorm, nn.LayerNorm):
        most = Target(kernels=22, mib=880, after_a_gemm=3)  # the norm's gradient
        for name, model, options in (
            (f"{norm.__name__}, then linen Dense", Normed(norm), {}),
            ("the same without a dtype, by policy", Normed(norm, dtype=None), {"policy": "fp8"}),
        ):
            params = _params(functools.partial(_of, model), True)
            yield Layer(name, functools.partial(trained, model, in_order=True, **options), params, most)


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

    params = _params(dense, False)
    return [
        Layer("linen Dense, qwix QtProvider", by_vjp(run), params),
        Layer("gelu, then qwix QtProvider", by_vjp(_behind_gelu(run)), params),
    ]


def by_vjp(f: Callable[[PyTree, Array], Array]) -> Callable[..., Any]:
    """y = f(params, x), and the gradients of sum(y * g)."""

    def run(params: PyTree, x: Array, g: Array) -> Any:
        y, backward = jax.vjp(f, params, x)
        return y, backward(g)

    return run


def _delayed(params: PyTree, x: Array) -> Array:
    w, scales = params
    return fp8.dot_general(x, w, MATMUL, recipe=fp8.DelayedScaling(), scales=scales)


def _gelu_fused(params: PyTree, x: Array) -> Array:
    w, scales = params
    return fp8.dot_general(x, w, MATMUL, recipe=fp8.DelayedScaling(), scales=scales, activation="gelu")


def _behind_gelu(f: Callable[[PyTree, Array], Array]) -> Callable[[PyTree, Array], Array]:
    return lambda params, x: f(params, jax.nn.gelu(x))


def _current(w: Array, x: Array) -> Array:
    return fp8.dot_general(x, w, MATMUL, recipe=fp8.CurrentScaling())


def _blocks(recipe: Any) -> Callable[[PyTree, Array], Array]:
    return lambda w, x: fp8.dot_general(x, w, MATMUL, recipe=recipe)


def flax_dense(*args: Any, **kwargs: Any) -> nn.Module:
    """A Dense layer with flax's own fp8 matmul."""
    return nn.Dense(*args, **kwargs, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)


def _flax(variables: PyTree, x: Array) -> Any:
    return flax_dense(WIDTH, use_bias=False, dtype=x.dtype).apply(variables, x)


def linen_autocast(variables: PyTree, x: Array, g: Array) -> Any:
    """A plain Dense layer as a user trains it: inside the context, with jaxmp's gradients."""
    return trained(nn.Dense(WIDTH, use_bias=False, dtype=x.dtype), variables, x, g)


def trained(
    model: nn.Module, variables: PyTree, x: Array, g: Array, *, in_order: bool = False, policy: Any = None
) -> Any:
    """y = model(x), one array or several, and the gradients of sum(y * g), by jaxmp in the context of fp8.

    `in_order`: the gradient of y is made when y is there, as in a network; XLA would fuse forward and backward passes.
    """

    def loss_fn(params: PyTree, x: Array) -> Any:
        y: Any = model.apply({"params": params}, x)
        if in_order:
            y = y.astype(g.dtype)
            return _with_gradient(y, g), y
        return sum(jnp.sum(part.astype(jnp.float32) * g.astype(jnp.float32)) for part in jax.tree.leaves(y)), y

    params = variables["params"]
    opt_state = jaxmp.mixed_precision(optax.identity(), "fp8").init(params)
    with fp8.autocast(filter=everywhere):
        grad_fn = jaxmp.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True, policy=policy)
        (_, y), grads = grad_fn(params, x, opt_state=opt_state)
    return y, grads


@jax.custom_vjp
def _with_gradient(y: Array, g: Array) -> Array:
    """A loss whose gradient with respect to y is g, which is there when y is."""
    del y, g
    return jnp.zeros(())


_with_gradient.defvjp(lambda y, g: (jnp.zeros(()), (y, g)), lambda kept, _: (lax.optimization_barrier(kept)[1], None))


def _of(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`model`, whatever a layer's arguments are."""
    del args, kwargs
    return model


def _params(dense: Callable[..., Any], autocast: bool, *, use_bias: bool = False) -> PyTree:
    layer = dense(WIDTH, use_bias=use_bias, dtype=jnp.bfloat16)
    with fp8.autocast(enabled=autocast, filter=everywhere):
        return jax.eval_shape(layer.init, jax.random.key(0), jax.ShapeDtypeStruct((16, WIDTH), jnp.bfloat16))


def measure_layer(layer: Layer) -> dict[str, Any]:
    """Compiles one layer and returns its row."""
    m = aot.mesh()
    x = aot.spec(m, (layer.rows, WIDTH), jnp.bfloat16)
    compiled = aot.compile_for(layer.run, aot.abstract(m, layer.params), x, x, compiler_options=OPTIONS)
    runs = aot.instructions(compiled)
    names = {i.name for i in runs if i.kind.startswith(GEMM)}
    beside = [i for i in runs if i.name not in names]
    row = {
        "program": layer.name,
        "kernels": len(beside),
        "mib": round(sum(i.bytes_read + i.bytes_written for i in beside) / 2**20, 1),
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
    sums = {gemm["stage"]: gemm["algorithm"] for gemm in row["gemms"]}
    results = {gemm["stage"]: gemm["result"] for gemm in row["gemms"]}
    operands = {gemm["stage"]: gemm["operands"] for gemm in row["gemms"]}
    after = row["kernels_after_a_gemm"]
    checks = (
        (calls == [FP8_GEMM] * 3, f"GEMMs: {', '.join(calls)}"),
        (sums == {"fprop": FAST, "dgrad": FULL, "wgrad": FULL}, f"sums: {sums}"),
        (results == {"fprop": "bf16", "dgrad": "bf16", "wgrad": "f32"}, f"results: {results}"),
        (all(found.count("f32") == 2 for found in operands.values()), f"operands: {operands}"),
        (after <= target.after_a_gemm, f"{after} kernels on the result of a GEMM"),
        (row["kernels"] <= target.kernels, f"over {target.kernels} kernels"),
        (row["mib"] <= target.mib, f"over {target.mib} MiB"),
    )
    return [what for holds, what in checks if not holds]


def measure_split_weight() -> dict[str, Any]:
    """One layer under jit on eight devices, its weight split by rows and x by rows: how the weight is gathered."""
    m, whole, rows = aot.mesh(8), P(), P("data")
    x, w = aot.spec(m, (ROWS, WIDTH), jnp.bfloat16, rows), aot.spec(m, (WIDTH, WIDTH), jnp.float32, rows)
    scales = [aot.spec(m, (), jnp.float32, whole)] * 3

    def run(params: PyTree, x: Array, g: Array) -> Any:
        y, backward = jax.vjp(_delayed, params, x)
        (dw, d_scales), dx = backward(lax.optimization_barrier((y, g))[1])
        return y, lax.with_sharding_constraint(dw, NamedSharding(m, rows)), d_scales, dx

    compiled = aot.compile_for(run, (w, fp8.Scales(*scales)), x, x, compiler_options=OPTIONS)
    report, runs = aot.report(compiled), aot.instructions(compiled)
    gathers = re.findall(r"= \(*(\w+)\[[^\n]* all-gather(?:-start)?\(", compiled.as_text() or "")
    beside = [i for i in runs if not i.kind.startswith(GEMM) and i.kind]
    per_weight = [size * 8 / WIDTH**2 for size in report["collectives"]["all-gather"]]
    checks = (
        (
            set(gathers) == {"f8e4m3fn"} and per_weight == [1.0],
            f"gathers of {gathers}, {per_weight} bytes a weight",
        ),
        (sum("mosaic" in i.kind for i in beside) == 2, "x and g are not cast by the kernel"),
    )
    return {
        "gathered": gathers,
        "bytes_per_weight": per_weight,
        "kernels": len(beside),
        "mib": round(sum(i.bytes_read + i.bytes_written for i in beside) / 2**20, 1),
        "missed": [what for holds, what in checks if not holds],
    }


# --- a transformer block ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

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
    """Counts for one block, forward and backward; data-parallel with reduced gradients on several devices."""
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

        grad_fn = jax.value_and_grad(loss_fn, (0, 1))
        if in_fp8:
            opt_state = jaxmp.mixed_precision(optax.identity(), "fp8").init(variables)
            grad_fn = functools.partial(jaxmp.value_and_grad(loss_fn, (0, 1)), opt_state=opt_state)
        loss, grads = grad_fn(variables, x)
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
    """The rows of the table of blocks."""
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


# --- layers that belong together: q, k and v, a gated MLP -------------------------------------------------------------

HIDDEN = 14336


class GatedLayers(nn.Module):
    """A gated MLP as three Dense layers."""

    hidden: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        h = nn.silu(dense(self.hidden, name="gate")(x)) * dense(self.hidden, name="up")(x)
        return dense(x.shape[-1], name="down")(h)


class Projections(nn.Module):
    """q, k and v: three Dense layers that read one array."""

    hidden: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> list[Array]:
        return [nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name=name)(x) for name in "qkv"]


class Mlp(NamedTuple):
    """One row of the table of layers that belong together."""

    name: str
    module: Any
    most_mib: float | None = None


def mlps() -> list[Mlp]:
    """Three projections; the MLP, without remat and with it."""
    keeps = functools.partial(nn.remat, policy=fp8.save_quantized)
    return [
        Mlp("q, k, v: three linen Dense 4096x4096 of one input", Projections, 1250),
        Mlp("gated MLP, three linen Dense in jaxmp.fp8.autocast", GatedLayers, 3960),
        Mlp("the same, nn.remat", nn.remat(GatedLayers)),
        Mlp("the same, nn.remat(policy=save_quantized)", keeps(GatedLayers), 4410),
    ]


def measure_mlp(mlp: Mlp) -> dict[str, Any]:
    """Counts for one row of the table of layers together, forward and backward."""
    m = aot.mesh()
    x = aot.spec(m, (ROWS, WIDTH), jnp.bfloat16)
    model = mlp.module(HIDDEN, dtype=jnp.bfloat16)
    with fp8.autocast(filter=everywhere):
        variables = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((16, WIDTH), jnp.bfloat16))
    run = functools.partial(trained, model)
    compiled = aot.compile_for(run, aot.abstract(m, variables), x, x, compiler_options=OPTIONS)
    runs = aot.instructions(compiled)
    beside = [i for i in runs if not i.kind.startswith(GEMM)]
    mib = round(sum(i.bytes_read + i.bytes_written for i in beside) / 2**20, 1)
    calls = [i.kind for i in runs if i.kind.startswith(GEMM)]
    missed = [] if mlp.most_mib is None or mib <= mlp.most_mib else [f"over {mlp.most_mib} MiB"]
    missed += [] if set(calls) == {FP8_GEMM} else [f"GEMMs: {', '.join(calls)}"]
    return {
        "mlp": mlp.name,
        "gemms": len(calls),
        "kernels": len(beside),
        "mib": mib,
        "target": mlp.most_mib,
        "missed": missed,
    }


def mlp_cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of the table of layers together."""
    cells = [["layers together, forward and backward", "fp8 GEMMs", "kernels beside", "MiB beside", "target", "holds"]]
    for row in rows:
        target = "" if row["target"] is None else f"{row['target']:.0f}"
        counts = [str(row["gemms"]), str(row["kernels"]), f"{row['mib']:.0f}"]
        cells.append([row["mlp"], *counts, target, holds(row, has_target=bool(target))])
    return cells


# --- the optimizer's side, and a step on eight devices ----------------------------------------------------------------


def stack_of(n: int, *, in_fp8: bool) -> PyTree:
    """Float32 params of `n` small layers."""
    scales = dict.fromkeys(FP8_SCALES, jnp.zeros(())) if in_fp8 else {}
    return {f"layer_{i}": {"kernel": jnp.zeros((256, 256)), **scales} for i in range(n)}


def loss_of_stack(params: PyTree, x: Array) -> Array:
    """A sequence of layers: in fp8 if they have scales, otherwise in bfloat16."""
    for layer in params.values():
        if FP8_SCALES[0] in layer:
            scales = fp8.Scales(*(layer[name] for name in FP8_SCALES))
            x = fp8.dot_general(x, layer["kernel"], MATMUL, recipe=fp8.DelayedScaling(), scales=scales)
        else:
            x = x @ layer["kernel"].astype(x.dtype)
        x = jnp.tanh(x)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def optimizer_of(*, in_fp8: bool) -> optax.GradientTransformationExtraArgs:
    """AdamW on float32 params in `jaxmp.mixed_precision`."""
    return jaxmp.mixed_precision(optax.adamw(1e-3), "fp8" if in_fp8 else "fp32")


def measure_update(n: int) -> dict[str, Any]:
    """The kernels of the optimizer's side for `n` layers, and those that fp8 adds."""
    kernels, copies = [], []
    for in_fp8 in (False, True):
        m, params, tx = aot.mesh(), stack_of(n, in_fp8=in_fp8), optimizer_of(in_fp8=in_fp8)

        def step(params: PyTree, opt_state: Any, grads: PyTree, tx: Any = tx) -> tuple[PyTree, Any]:
            return jaxmp.apply_gradients(tx, grads, opt_state, params)

        shapes = aot.abstract(m, params), aot.abstract(m, jax.eval_shape(tx.init, params))
        compiled = aot.compile_for(step, *shapes, shapes[0], donate_argnums=(0, 1), keep_unused=True)
        runs = aot.instructions(compiled)
        kernels.append(len(runs))
        copies.append(sum(i.op == "copy" and i.bytes_written <= 4 for i in runs))
    added = kernels[1] - kernels[0]
    return {
        "layers": n,
        "scales": 3 * n,
        "kernels": kernels[1],
        "without_fp8": kernels[0],
        "added": added,
        "of_them_scalar_copies": copies[1] - copies[0],
    }


def measure_exchange(n: int, *, in_fp8: bool) -> dict[str, Any]:
    """Collectives of a whole data-parallel step on eight devices, `reduce_gradients` in the chain."""
    m, params = aot.mesh(8), stack_of(n, in_fp8=in_fp8)
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), "fp8" if in_fp8 else "fp32", before=jaxmp.reduce_gradients())

    def step(params: PyTree, opt_state: Any, x: Array) -> tuple[PyTree, Any, Array]:
        loss, grads = jaxmp.value_and_grad(loss_of_stack)(params, x, opt_state=opt_state)
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, lax.pmean(loss, "data")

    spread = jax.shard_map(step, mesh=m, in_specs=(P(), P(), P("data")), out_specs=P())
    shapes = aot.abstract(m, params), aot.abstract(m, jax.eval_shape(tx.init, params))
    x = aot.spec(m, (8 * 256, 256), jnp.bfloat16, P("data"))
    compiled = aot.compile_for(spread, *shapes, x, donate_argnums=(0, 1), keep_unused=True, compiler_options=OPTIONS)
    report = aot.report(compiled)
    reduces = report["collectives"].get("all-reduce", [])
    return {
        "layers": n,
        "scales": 3 * n if in_fp8 else 0,
        "small_all_reduces": [size for size in reduces if size <= SMALL],
        "other_all_reduces": [size for size in reduces if size > SMALL],
        "other_collectives": sorted(set(report["collectives"]) - {"all-reduce"}),
    }


def missed_by_step(updates: list[dict[str, Any]], exchanges: list[dict[str, Any]]) -> list[str]:
    """The targets that a step with fp8 layers misses, in words."""
    added = [row["added"] - row["of_them_scalar_copies"] for row in updates]
    checks = [
        (added[0] <= 20, f"over 20 kernels to move the scales of {LAYERS} layers: {added[0]}"),
        (added[1] <= 30, f"over 30 kernels to move the scales of {2 * LAYERS} layers: {added[1]}"),
    ]
    for row in exchanges:
        small = row["small_all_reduces"]
        checks.append((len(small) == 1, f"{len(small)} small all-reduces for {row['scales']} scales, not 1"))
        checks.append((not row["other_collectives"], f"collectives: {', '.join(row['other_collectives'])}"))
    return [what for holds, what in checks if not holds]


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
    head = ["fp8 layers", "scales", "kernels of the optimizer's side", "without fp8", "added", "of them scalar copies"]
    updates = [head, *([str(n) for n in row.values()] for row in results["updates"])]
    exchanges = [["8 devices, shard_map: layers", "scales", "small all-reduces", "all-reduces of gradients"]]
    exchanges += [
        [str(r["layers"]), str(r["scales"]), *(_sizes(r[key]) for key in ("small_all_reduces", "other_all_reduces"))]
        for r in results["exchanges"]
    ]
    row = results["split_weight"][0]
    split = [
        ["8 devices, jit: one layer with its weight split", "bytes a weight", "kernels beside", "MiB beside", "holds"]
    ]
    split += [
        [
            f"gathered in {', then '.join(row['gathered'])}",
            ", then ".join(f"{size:.0f}" for size in row["bytes_per_weight"]),
            str(row["kernels"]),
            f"{row['mib']:.0f}",
            holds(row),
        ]
    ]
    tables = (cells, split, mlp_cells(results["mlps"]), block_cells(results["blocks"]), updates, exchanges)
    return "\n\n".join(markdown(part) for part in tables)


def _sizes(sizes: list[int]) -> str:
    return ", ".join(f"{size} B" for size in sizes) or "none"


def measure_all() -> dict[str, Any]:
    """All results."""
    found, rows = versions(H100, optional=("qwix",)), []
    for layer in layers():
        print(f"compiling: {layer.name}", file=sys.stderr, flush=True)
        rows.append(measure_layer(layer))
    print("compiling: a layer with its weight split", file=sys.stderr, flush=True)
    split = [measure_split_weight()]
    gated = []
    for mlp in mlps():
        print(f"compiling: a gated MLP, {mlp.name}", file=sys.stderr, flush=True)
        gated.append(measure_mlp(mlp))
    blocks = []
    for name, devices in [(name, devices) for devices in (1, 8) for name in BLOCKS]:
        print(f"compiling: a block, {name}, {devices} devices", file=sys.stderr, flush=True)
        blocks.append(measure_block(name, devices))
    print(f"compiling: a step with {LAYERS} layers", file=sys.stderr, flush=True)
    updates = [measure_update(n) for n in (LAYERS, 2 * LAYERS)]
    exchanges = [measure_exchange(LAYERS, in_fp8=in_fp8) for in_fp8 in (True, False)]
    return {
        "device": "H100 (compiled, not run)",
        "layer": {"x": [ROWS, WIDTH], "kernel": [WIDTH, WIDTH]},
        "versions": found,
        "layers": rows,
        "split_weight": split,
        "mlps": gated,
        "blocks": blocks,
        "updates": updates,
        "exchanges": exchanges,
        "missed": missed_by_step(updates, exchanges),
    }


BENCHMARK = Benchmark("h100 fp8", "h100_fp8.json", measure_all, render)
