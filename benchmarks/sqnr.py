"""Measures how precisely narrow formats hold gradients that are scaled in different ways.

The model is a residual MLP of six blocks in float32, before and after training. The tensors are the gradients of the
outputs of its matmuls, for one batch of 1024 rows and the mean of their losses: a backward pass in fp8 casts these.
Each tensor is cast to a format and back, and compared with the original. "After a jump" means that all gradients are 16
times as large as in the steps before. This takes half a minute on two idle cores and measures no times.

    SQNR = 10 log10(sum x^2 / sum (x - cast(x))^2), in dB, sums in float64

* unscaled: a plain cast.
* loss-scaled: one power of two for all tensors, the largest without an overflow in the step before. A dynamic loss
  scale searches for this number.
* delayed, current: one power of two for each tensor, from the amaxes of the 16 steps before, or from the tensor itself.
* unit-scaled: another model of the same shape. Its weights start with variance 1, and its operations divide by
  constants, so values and gradients have variance 1 at the start (Blake et al. 2023, arXiv 2303.11257). Its gradients
  are cast without a scale.
* propagated: the scale of each tensor follows from the scales of its operands; only the scale of the gradient of the
  logits is measured (Balança et al. 2024, arXiv 2407.17353, in our reading of the published rules). Weights keep their
  initial scale.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import ROOT, markdown
from benchmarks.lib.versions import versions
from jaxmp import fp8

FEATURES, WIDTH, HIDDEN, CLASSES, BLOCKS, ROWS = 64, 128, 512, 64, 6, 1024
HISTORY, STEPS, TAU, JUMP = 16, 200, 0.1, 16.0
WHEN = ("at the start", "trained", "after a jump")
FORMATS = {"float16": jnp.float16, "e5m2": jnp.float8_e5m2, "e4m3": jnp.float8_e4m3fn}
SHAPES = {"in": (FEATURES, WIDTH), "out": (WIDTH, CLASSES)} | {
    f"{name}{i}": shape for i in range(BLOCKS) for name, shape in (("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH)))
}


def norm(x):
    """A layer norm without params."""
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def plain_loss(params, probes, x, y):
    """The plain model. Probes are zeros added to the outputs of matmuls: their gradients are the ones to measure."""

    def linear(name, x):
        return x @ params[name] + probes[name]

    h = linear("in", x)
    for i in range(BLOCKS):
        h = h + linear(f"down{i}", jax.nn.gelu(linear(f"up{i}", norm(h))))
    return optax.softmax_cross_entropy_with_integer_labels(linear("out", norm(h)), y).mean()


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def scaled(x, forward, backward):
    """x, multiplied by one constant in the forward pass; its gradient, by another in the backward pass."""
    return x * forward


scaled.defvjp(lambda x, forward, backward: (x * forward, None), lambda forward, backward, _, g: (g * backward,))


def unit_loss(params, probes, x, y):
    """The model by the rules of unit scaling; a matmul uses the mean of its forward and backward factor for both."""

    def linear(name, x, *, first=False):
        fan_in, fan_out = SHAPES[name]
        forward, backward = fan_in**-0.5, fan_out**-0.5
        if not first:  # the input of the first matmul needs no gradient
            forward = backward = math.sqrt(forward * backward)
        out = scaled(scaled(x, 1.0, backward) @ scaled(params[name], 1.0, ROWS**-0.5), forward, 1.0)
        return out + probes[name]

    gelu = math.sqrt(1 / 0.588 * 1 / 0.675)  # from the root mean squares of gelu and its derivative
    h = linear("in", x, first=True)
    for i in range(BLOCKS):
        branch, skip = scaled(h, 1.0, TAU**0.5), scaled(h, 1.0, (1 - TAU) ** 0.5)
        inner = scaled(jax.nn.gelu(scaled(linear(f"up{i}", norm(branch)), 1.0, gelu)), gelu, 1.0)
        h = scaled(linear(f"down{i}", inner), TAU**0.5, 1.0) + scaled(skip, (1 - TAU) ** 0.5, 1.0)
    logits = scaled(linear("out", norm(h)), 1.0, CLASSES / math.sqrt(CLASSES - 1))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).sum()


def make_params(key, *, unit):
    """Weights with variance 1 / fan_in, or with variance 1."""
    keys = dict(zip(SHAPES, jax.random.split(key, len(SHAPES)), strict=True))
    return {k: jax.random.normal(keys[k], s) * (1.0 if unit else s[0] ** -0.5) for k, s in SHAPES.items()}


def make_batch(teacher, key, rows=ROWS):
    """Rows of noise, and the labels that another network gives them."""
    x = jax.random.normal(key, (rows, FEATURES))
    return x, jnp.argmax(jnp.tanh(x @ teacher["a"]) @ teacher["b"], axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def gradients_of(loss, params, batch):
    """The gradients of the outputs of all matmuls: float32 arrays by name."""
    probes = {name: jnp.zeros((ROWS, shape[1])) for name, shape in SHAPES.items()}
    return jax.grad(loss, argnums=1)(params, probes, *batch)


def amax(x):
    """max |x|, float32[]."""
    return jnp.max(jnp.abs(x))


def through(x, scale, dtype):
    """x scaled, cast to a format and back, as float32."""
    if dtype == jnp.float16:
        return (x * scale).astype(dtype).astype(jnp.float32) / scale  # not jitted: XLA could remove the cast
    return fp8.dequantize(fp8.quantize(x, scale, dtype), scale, jnp.float32)


def sqnr(x, y):
    """In dB; 300 if y equals x, -300 if a value became inf."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    noise = np.sum((x - y) ** 2)
    if noise == 0 or not np.isfinite(noise):
        return 300.0 if noise == 0 else -300.0
    return float(10 * np.log10(np.sum(x**2) / noise))


def lost(x, y):
    """The fraction of values that are nonzero in x and zero in y."""
    return float(np.mean(np.asarray((x != 0) & (y == 0))))


def floor_pow2(x):
    """The largest power of two up to x."""
    return 2.0 ** math.floor(math.log2(x))


def propagated_scales(gradients):
    """The magnitude of each gradient by the rules of scale propagation, from the logits backward."""
    weight = {name: floor_pow2(shape[0] ** -0.5) for name, shape in SHAPES.items()}
    stream = [1.0]  # the scale of h before each block, and after the last
    for _ in range(BLOCKS):
        stream.append(floor_pow2(math.hypot(stream[-1], 1.0)))

    def back(name, scale):
        return scale * weight[name] * floor_pow2(SHAPES[name][1] ** 0.5)

    found = {"out": floor_pow2(float(jnp.sqrt(jnp.mean(gradients["out"] ** 2))))}  # measured
    h = back("out", found["out"]) / stream[-1]
    for i in reversed(range(BLOCKS)):
        found[f"down{i}"] = h
        found[f"up{i}"] = back(f"down{i}", h)
        h = floor_pow2(math.hypot(h, back(f"up{i}", found[f"up{i}"]) / stream[i]))
    return found | {"in": h}


def scales_of(gradients, earlier, dtype):
    """The scale of each tensor for each way of scaling; `earlier` are the gradients of the steps before."""
    largest = float(jnp.finfo(dtype).max)
    one = floor_pow2(largest / max(float(amax(g)) for g in earlier[-1].values()))
    ways = {"unscaled": dict.fromkeys(gradients, 1.0), "loss-scaled": dict.fromkeys(gradients, one)}
    if dtype != jnp.float16:
        form = "HYBRID" if dtype == jnp.float8_e5m2 else "E4M3"
        delayed = fp8.DelayedScaling(amax_history_len=HISTORY, fp8_format=form)
        current = fp8.CurrentScaling(fp8_format=form)
        states = {name: delayed.init(backward=True) for name in gradients}
        for step in earlier:
            states = {name: delayed.update(s, amax(step[name]), backward=True) for name, s in states.items()}
        ways["delayed"] = {name: s.scale for name, s in states.items()}
        ways["current"] = {name: current.scale(amax(g), backward=True) for name, g in gradients.items()}
    ways["propagated"] = {name: 1 / scale for name, scale in propagated_scales(gradients).items()}
    return ways


def rows_of(when, plain, earlier, unit):
    """A row for each format and each way of scaling."""
    rows = []
    for format_name, dtype in FORMATS.items():
        ways = {way: (plain, scales) for way, scales in scales_of(plain, earlier, dtype).items()}
        ways["unit-scaled"] = (unit, dict.fromkeys(unit, 1.0))
        for way, (gradients, scales) in ways.items():
            back = {name: through(g, jnp.float32(scales[name]), dtype) for name, g in gradients.items()}
            found = [sqnr(gradients[name], back[name]) for name in gradients]
            zeros = [lost(gradients[name], back[name]) for name in gradients]
            row = {"when": when, "format": format_name, "way": way}
            row |= {"worst_db": round(min(found), 1), "median_db": round(float(np.median(found)), 1)}
            rows.append(row | {"most_lost": round(max(zeros), 4)})
    return rows


def train(loss, params, teacher, learning_rate, steps):
    """Trains with Adam in float32; returns the final params and all losses."""
    probes = {name: jnp.zeros((1, shape[1])) for name, shape in SHAPES.items()}
    tx = optax.adam(learning_rate)
    key = jax.random.key(7)

    @jax.jit
    def step(i, params, state):
        value, grads = jax.value_and_grad(loss)(params, probes, *make_batch(teacher, jax.random.fold_in(key, i)))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for i in range(steps):
        params, state, value = step(i, params, state)
        losses.append(float(value))
    return params, losses


def measure(steps: int = STEPS) -> dict[str, Any]:
    """All results, after training for that many steps."""
    first, second, third = jax.random.split(jax.random.key(0), 3)
    teacher = {"a": jax.random.normal(first, (FEATURES, 64)) / 8, "b": jax.random.normal(second, (64, CLASSES))}
    batches = [make_batch(teacher, jax.random.key(100 + i)) for i in range(HISTORY + 1)]
    models = {}
    for name, loss, rate in (("plain", plain_loss, 1e-3), ("unit", unit_loss, 1e-3 * WIDTH**0.5)):
        params = make_params(third, unit=name == "unit")
        trained, losses = train(loss, params, teacher, rate, steps)
        models[name] = (loss, {"at the start": params, "trained": trained}, losses)
    rows, size = [], {}
    for when in ("at the start", "trained"):
        loss, params, _ = models["plain"]
        *earlier, plain = (gradients_of(loss, params[when], batch) for batch in batches)
        unit = gradients_of(unit_loss, models["unit"][1][when], batches[-1])
        rows += rows_of(when, plain, earlier, unit)
        if when == "trained":
            jumped = ({name: JUMP * g for name, g in gradients.items()} for gradients in (plain, unit))
            rows += rows_of("after a jump", next(jumped), earlier, next(jumped))
        for name, gradients in (("plain", plain), ("unit", unit)):
            found = [float(jnp.sqrt(jnp.mean(g**2))) for g in gradients.values()]
            size[f"{name}, {when}"] = {"least_rms": min(found), "most_rms": max(found)}
    loss = {name: [losses[0], losses[-1]] for name, (_, _, losses) in models.items()}
    loss["unit"] = [value / ROWS for value in loss["unit"]]  # a sum over rows
    return {
        "device": "CPU",
        "versions": versions(("jax", "jaxlib", "optax", "jaxmp")),
        "gradients": size,
        "loss": loss,
        "rows": rows,
    }


def render(results: dict[str, Any]) -> str:
    """A table for each format: for each way of scaling the worst tensor, and the most that a tensor lost to zero."""
    tables = []
    for format_name in FORMATS:
        cells = [[format_name, *WHEN]]
        rows = [row for row in results["rows"] if row["format"] == format_name]
        for way in dict.fromkeys(row["way"] for row in rows):
            found = {row["when"]: row for row in rows if row["way"] == way}
            cells.append([way, *(cell(found[when]) for when in WHEN)])
        tables.append(markdown(cells))
    return "\n\n".join(tables)


def cell(row: dict[str, Any]) -> str:
    """Decibels, and the fraction lost."""
    return "overflows" if row["worst_db"] == -300 else f"{row['worst_db']:.1f} dB ({row['most_lost']:.0%})"


BENCHMARK = Benchmark(
    "sqnr",
    "sqnr.json",
    measure,
    render,
    functools.partial(measure, steps=2),
    page=ROOT / "docs" / "explanation" / "alternatives.md",
)
