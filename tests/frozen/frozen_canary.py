"""What a machine computes for the operations whose last bits are not defined, on fixed inputs: the canary.

A single IEEE operation (add, multiply, divide, sqrt, a cast) has the same bits everywhere. A pow, an exp, the order of
a sum, an FMA inside a matmul depend on the CPU and on the version of XLA; an update of an optimizer on the version of
optax. The canary holds what was computed where the runs were recorded. Where a machine gives other bits for something
that a run uses, this run cannot have the recorded bits there, whatever jaxmp does.
"""

import functools
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import frozen_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
from frozen_cases import Case, dyadic, full
from jax import lax

# Primitives that only move bits, compare, count, or round once as IEEE says. What is neither here nor in
# `_BY_PRIMITIVE` stops the recorder.
EXACT = frozenset(
    """abs add add_any and argmax argmin bitcast_convert_type broadcast broadcast_in_dim ceil clamp concatenate copy
    create_token device_put dynamic_slice dynamic_update_slice eq expand_dims floor from_edtype gather ge get gt
    iota is_finite layout_cast layout_constraint le lt max min mul name ne neg nextafter not
    optimization_barrier or pad population_count pvary random_bits random_unwrap random_wrap reduce_and
    reduce_max reduce_min reduce_or reduce_precision rem reshape rev round scatter select_and_n select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign slice split square squeeze
    stack stop_gradient sub swap to_edtype transpose unstack xor""".split()
)  # fmt: skip
_BY_PRIMITIVE = {
    "pow": "pow", "cos": "cos", "sqrt": "sqrt", "div": "div", "integer_pow": "integer_pow", "reduce_sum": "sum",
}  # fmt: skip
# Optimizers whose sums round. Other sums of given gradients (norms) are exact: their elements have few bits.
_INEXACT_SUMS = ("lamb", "adafactor")
# In which a run with an optimizer of jaxmp rounds as plain optax does.
_PLAIN = {
    "fused_adamw": "adamw", "fused_lion": "lion", "fused_sgd": "sgd", "int8": "adamw", "fused_int8": "adamw",
    "fused_e4m3": "sgd", "bf16_moments": "sgd", "ema": "adamw", "clip": "adamw", "masked": "adamw",
    "multi_transform": "adamw sgd", "multisteps": "multisteps",
}  # fmt: skip
_RATE = 2.0**-6
SILENT = -1


def uses(case: Case, primitives: Iterable[str]) -> list[str]:
    """The names of the canaries of a run, from its primitives as `frozen_runs.primitives_of` gives them."""
    found = {f"optimizer:{name}" for name in _PLAIN.get(case.optimizer, case.optimizer).split()}
    for primitive in primitives:
        name, *dtypes = primitive.split(":")
        is_float = any(dtype.startswith(("float", "bfloat")) for dtype in dtypes)
        if name == "convert_element_type":
            found |= {f"cast:{dtypes[-1]}"} if dtypes[-1] in _CASTS and is_float else set()
        elif name == "dot_general":
            found.add(f"dot:{dtypes[0]}")
        elif not is_float or name in EXACT:
            continue
        elif _BY_PRIMITIVE[name] == "sum" and case.takes_given_gradients and case.optimizer not in _INEXACT_SUMS:
            continue
        else:
            found.add(_BY_PRIMITIVE[name])
    return sorted(found)


@functools.cache
def heard(name: str) -> int:
    """The checksum of a canary on this machine; SILENT where XLA cannot compile it."""
    with jax.disable_jit():
        try:
            results = jax.tree.leaves(CANARIES[name]())
        except jax.errors.JaxRuntimeError:  # float16 without F16C: "Symbols not found: [ __truncsfhf2 ]"
            return SILENT
    checksum = 0
    for x in map(np.asarray, results):
        checksum = zlib.crc32(np.where(np.isnan(x), np.zeros_like(x), x).tobytes(), checksum)
    return checksum


def off_key(uses: Iterable[str], recorded: dict[str, int]) -> list[str]:
    """The canaries among `uses` that this machine sings otherwise than the one that recorded."""
    return [name for name in uses if heard(name) != recorded[name]]


def is_silent(uses: Iterable[str]) -> bool:
    """Whether XLA cannot compile something that a run uses for this machine."""
    return any(heard(name) == SILENT for name in uses)


_CASTS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_SHAPES = ((8, 8), (8, 4), (16, 8), (16, 4), (4, 8), (4, 4), (8,), (16,), (4,), (64,), (128,), (16, 256), (4096,))


def _numbers(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jnp.asarray(full(9000 + seed, shape))


def _powers() -> Any:
    counts = jnp.arange(1, 10, dtype=jnp.int32)
    bases = (0.9, 0.999, 0.99, 0.95)
    of_counts = [jnp.asarray(base, jnp.float32) ** n for base in bases for n in counts]
    return of_counts, [n.astype(jnp.float32) ** -0.8 for n in counts], [base**n for base in bases for n in counts]


def _elementwise(function: Callable[..., Any], *, positive: bool = False) -> Any:
    xs = [_numbers(shape, i) for i, shape in enumerate(((), (8,), (8, 8), (16, 256)))]
    return [function(jnp.abs(x) if positive else x) for x in xs]


def _sums() -> Any:
    xs = [_numbers(shape, i) for i, shape in enumerate(_SHAPES)]
    xs += [_numbers((rows, n), rows).astype(dtype) for dtype in _CASTS[:2] for rows in (4, 16) for n in (4, 8)]
    along = [jnp.sum(x, axis) for x in xs for axis in range(x.ndim)]
    return along, [jnp.sum(x) for x in xs], [jnp.sum(x * x) for x in xs], [jnp.mean(x) for x in xs]


def _dots(dtype: str) -> Any:
    results = []
    outs = sorted({jnp.float32, jnp.bfloat16 if dtype.startswith("float8") else jnp.dtype(dtype)}, key=str)
    for rows, n in ((4, 4), (4, 8), (16, 4), (16, 8), (128, 128)):
        x, w, g = (_numbers(shape, i).astype(dtype) for i, shape in enumerate(((rows, 8), (8, n), (rows, n)), 1))
        for a, b, axes in ((x, w, (1, 0)), (g, w, (1, 1)), (x, g, (0, 0)), (w, g, (1, 1))):
            numbers = (((axes[0],), (axes[1],)), ((), ()))
            results += [lax.dot_general(a, b, numbers, preferred_element_type=out) for out in outs]
    return results


def _casts(dtype: str) -> Any:
    x = _numbers((16, 256))
    return [(x * 2.0**k).astype(dtype) for k in (-12, -6, 0, 6, 8)]


def _optimizer(tx: Any) -> Any:
    params = {"w": _numbers((8, 8)), "b": _numbers((8,)), "s": _numbers(())}
    state, results = tx.init(params), []
    for i in range(4):
        grads = {"w": dyadic(i, (8, 8)), "b": dyadic(i + 50, (8,)), "s": dyadic(i + 90, ())}
        updates, state = tx.update(jax.tree.map(jnp.asarray, grads), state, params)
        params = optax.apply_updates(params, updates)
        results.append((params, state))
    return results


CANARIES: dict[str, Callable[[], Any]] = {
    "pow": _powers,
    "cos": lambda: [jnp.cos(jnp.pi * n / k) for k in (5, 8) for n in jnp.arange(9, dtype=jnp.float32)],
    "sqrt": partial(_elementwise, jnp.sqrt, positive=True),
    "div": partial(_elementwise, lambda x: (1 / x, x / 3, 0.7 / x)),
    "integer_pow": partial(_elementwise, lambda x: [lax.integer_pow(x, n) for n in (2, 3, 4, -1, -2)]),
    "sum": _sums,
    **{f"dot:{dtype}": partial(_dots, dtype) for dtype in ("float32", *_CASTS)},
    **{f"cast:{dtype}": partial(_casts, dtype) for dtype in _CASTS},
    "optimizer:adamw": partial(_optimizer, optax.adamw(_RATE, weight_decay=0.01)),
    "optimizer:sgd": partial(_optimizer, optax.sgd(_RATE, 0.9)),
    "optimizer:lion": partial(_optimizer, optax.lion(_RATE, 0.9, 0.99, weight_decay=0.01)),
    "optimizer:lamb": partial(_optimizer, optax.lamb(_RATE)),
    "optimizer:adafactor": partial(_optimizer, optax.adafactor(_RATE, min_dim_size_to_factor=4)),
    "optimizer:schedule": partial(_optimizer, optax.adamw(optax.warmup_cosine_decay_schedule(0.0, _RATE, 3, 8))),
    "optimizer:multisteps": partial(_optimizer, optax.MultiSteps(optax.adamw(_RATE), 2)),
}
assert {n for name in frozen_cases.FEATURES["optimizer"] for n in _PLAIN.get(name, name).split()} <= {
    name.removeprefix("optimizer:") for name in CANARIES
}
