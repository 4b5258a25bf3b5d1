"""One suite over backends for the multi-tensor kernels, against NumPy in float64 and against the "xla" reference.

To the bit where arithmetic is exact: casts, flags, splits, steps that are not taken. Where it rounds, XLA may fuse a
multiplication with an addition: there within a few units of the largest term.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import kernel_oracles as oracles
import pallas_kernels
from helpers import assert_close, assert_exact, assert_moved, assert_same_program, assert_within_ulps
from pallas_kernels import backend as backends, moments, multi_tensor
from pallas_kernels.moments import Quantized
from pallas_kernels.update import AdamW, Lion, Momentum, Weight, multi_tensor_update

MISSING = {"xla": None, "interpret": backends.why_no_kernels(), "mosaic": backends.why_no_kernels(needs_gpu=True)}
BACKENDS = {
    name: pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=str(why))) for name, why in MISSING.items()
}
each_backend = pytest.mark.parametrize("backend", BACKENDS.values())
in_kernel = pytest.mark.parametrize(  # by default interpreted; tests of one rule share the compiled update
    "backend",
    [
        BACKENDS["interpret"],
        *(
            pytest.param(*BACKENDS[name].values, marks=[*BACKENDS[name].marks, pytest.mark.thorough(0)])
            for name in ("xla", "mosaic")
        ),
    ],
)
each_other_backend = pytest.mark.parametrize("backend", [BACKENDS[name] for name in BACKENDS if name != "xla"])
FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32)
E4M3 = jnp.float8_e4m3fn
# Whole blocks of every size, with few elements behind them: each is a block of its own, which takes long to interpret.
SHAPES = [(), (1,), (5,), (128,), (129,), (1925,), (2048,), (8192 + 3,), (2, 3), (0,), (3, 0), (2, 3, 64)]
TINY, MAX = np.finfo(np.float32).tiny, np.finfo(np.float32).max
EDGES = [0.0, -0.0, 1e-40, -1e-40, TINY, -TINY, 2.0**-24, 2.0**-25, 65504.0, 65520.0]
EDGES += [MAX, -MAX, np.inf, -np.inf, np.nan]


def tree_of(dtype: Any, *, finite: bool = True) -> dict[str, np.ndarray]:
    """A tree of every awkward size, one of the three dtypes after the other (`dtype` None), or all of `dtype`."""
    rng = np.random.default_rng(len(str(dtype)))
    with np.errstate(over="ignore"):
        drawn = {f"{i} {shape}": np.asarray(rng.normal(size=shape) * 100) for i, shape in enumerate(SHAPES)}
        tree = {name: x.astype(dtype or FLOATS[i % 3]) for i, (name, x) in enumerate(drawn.items())}
        if not finite:
            tree["edges"] = np.asarray(EDGES, np.float32).astype(dtype or jnp.float32)
            tree["edges in a block"] = np.resize(tree["edges"], 128 + 15)
    return tree


@functools.cache
def compiled(name: str, backend: str) -> Any:
    f = getattr(pallas_kernels, name)
    return jax.jit(lambda tree, scalar: f(tree, scalar, backend=backend))


@functools.cache
def caster(dtype: str, backend: str) -> Any:
    return jax.jit(lambda tree, scale: pallas_kernels.cast_tree(tree, dtype, scale=scale, backend=backend))


# unscale_and_check, gradient_norm


@pytest.mark.thorough(0)
@each_backend
def test_unscale_and_check(backend):
    tree = tree_of(None)
    for scale in (2.0**-10, 1 / 3):  # one rounding each
        unscaled, finite = compiled("unscale_and_check", backend)(tree, np.float32(scale))
        assert_exact(unscaled, {k: x.astype(np.float32) * np.float32(scale) for k, x in tree.items()})
        assert_exact(finite, True)


SMALL = {"scalar": np.ones((), jnp.bfloat16), "block": np.ones(130, np.float32), "none": np.ones(0, np.float16)}


@in_kernel
def test_one_bad_element_anywhere_is_seen(backend):
    """In a scalar, a block and a tail; in an overflow of the unscaling itself."""
    tree, check, norm = SMALL, compiled("unscale_and_check", backend), compiled("gradient_norm", backend)
    assert_close(norm(tree, np.float32(0.5)), (float(np.sqrt(131) / 2), True), rtol=1e-6)
    for name, place, bad in (
        ("scalar", 0, np.inf),
        ("block", 0, np.nan),
        ("block", 127, -np.inf),
        ("block", -1, np.nan),
    ):
        broken = tree[name].copy()
        broken.reshape(-1)[place] = bad
        unscaled, finite = check(tree | {name: broken}, np.float32(0.5))
        assert_exact(finite, False)
        assert_exact(unscaled[name], broken.astype(np.float32) * np.float32(0.5))
        size, finite = norm(tree | {name: broken}, np.float32(0.5))
        assert_exact(finite, False)
        assert not np.isfinite(size)
        assert_exact(norm(tree, np.float32(bad))[1], False)
    assert_exact(check({**tree, "block": tree["block"] * 2}, np.float32(MAX))[1], False)


@pytest.mark.thorough(1)
@each_backend
def test_unscaling_of_edges_is_the_reference_to_the_bit(backend):
    tree = {jnp.dtype(d).name: tree_of(d, finite=False)["edges in a block"] for d in FLOATS}
    expected, _ = compiled("unscale_and_check", "xla")(tree, np.float32(0.5))
    unscaled, finite = compiled("unscale_and_check", backend)(tree, np.float32(0.5))
    assert_exact(unscaled, expected)
    assert_exact(finite, False)
    normal = np.abs(np.asarray(EDGES, np.float32)) > 2 * TINY
    normal |= np.asarray(EDGES, np.float32) == 0
    with np.errstate(invalid="ignore"):
        by_hand = np.asarray(EDGES, np.float32) * np.float32(0.5)
    assert_exact(np.asarray(unscaled["float32"])[:15][normal], by_hand[normal])


@pytest.mark.thorough(0)
@in_kernel
def test_gradient_norm(backend):
    tree = tree_of(None)
    norm, finite = compiled("gradient_norm", backend)(tree, np.float32(0.25))
    exact = 0.25 * np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in tree.values()))
    assert_close(norm, float(exact), rtol=1e-6)
    assert_exact(finite, True)


@in_kernel
def test_gradients_below_2_to_the_48_are_usable(backend):
    """Unscaled, with either sign; their norm is finite. `unscale_and_check` looks for inf and NaN only."""
    below, limit = np.nextafter(np.float32(2.0**48), np.float32(0)), np.float32(2.0**48)
    for x, usable in ((below, True), (-below, True), (limit, False), (-limit, False), (MAX, False)):
        tree = SMALL | {"block": np.full(130, x / 4, np.float32)}
        norm, found = compiled("gradient_norm", backend)(tree, np.float32(4.0))
        assert_exact(found, usable)
        assert np.isfinite(norm) == (abs(x) <= limit)
        assert_exact(compiled("unscale_and_check", backend)(tree, np.float32(4.0))[1], True)


# cast_tree


@pytest.mark.thorough(2)
@each_backend
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2"])
def test_cast_tree(backend, dtype):
    names = ("0 ()", "2 (5,)", "3 (128,)", "6 (2048,)", "8 (2, 3)", "9 (0,)", "edges in a block")
    tree = {name: tree_of(None, finite=False)[name] for name in names}
    for scale in (1.0, 2.0**-6):
        cast = caster(dtype, backend)(tree, np.float32(scale))
        with np.errstate(invalid="ignore"):
            scaled = {k: x.astype(np.float32) * np.float32(scale) for k, x in tree.items()}
        flushed = {k: (x != 0) & (np.abs(x) < TINY) for k, x in scaled.items()}  # XLA does on CPU
        flushed = {k: f | ((tree[k] != 0) & (np.abs(tree[k].astype(np.float32)) < TINY)) for k, f in flushed.items()}
        expected = {k: oracles.saturated(x, dtype) for k, x in scaled.items()}
        assert_exact(
            {k: np.asarray(x)[~flushed[k]] for k, x in cast.items()}, {k: x[~flushed[k]] for k, x in expected.items()}
        )
        assert_exact(cast, caster(dtype, "xla")(tree, np.float32(scale)))


@each_backend
def test_trees_that_hold_nothing(backend):
    for tree in ({}, None, [np.zeros(0, np.float16)], {"a": np.zeros((3, 0), np.float32)}):
        unscaled, finite = pallas_kernels.unscale_and_check(tree, jnp.float32(2.0), backend=backend)
        assert_exact(unscaled, jax.tree.map(lambda x: x.astype(np.float32), tree))
        assert_exact(finite, True)
        assert_exact(pallas_kernels.gradient_norm(tree, jnp.float32(2.0), backend=backend), (np.float32(0.0), True))
        cast = pallas_kernels.cast_tree(tree, jnp.bfloat16, backend=backend)
        assert_exact(cast, jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree))


# many leaves


@pytest.mark.thorough(0)
@each_backend
def test_more_leaves_than_a_launch_takes(backend, monkeypatch):
    """Two kinds, three launches of which two look alike; the sums of all launches add up."""
    monkeypatch.setattr(multi_tensor, "MOST", 8)
    count = 21
    tree = [np.full(128 if i % 2 else 1, i + 1, jnp.bfloat16 if i % 2 else np.float32) for i in range(count)]
    unscaled, finite = compiled("unscale_and_check", backend)(tree, np.float32(0.5))
    assert_exact(unscaled, [x.astype(np.float32) * np.float32(0.5) for x in tree])
    assert_exact(finite, True)
    norm, _ = compiled("gradient_norm", backend)(tree, np.float32(1.0))
    assert_close(norm, float(np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in tree))), rtol=1e-6)
    tree[-1][-1] = np.nan
    assert_exact(compiled("unscale_and_check", backend)(tree, np.float32(0.5))[1], False)


# multi_tensor_update

# shape, where the weight is, dtype of the moments, dtype of the gradient
LEAVES = [
    ((), "own", "float32", "float32"),
    ((1,), "int8", "bfloat16", "bfloat16"),
    ((5,), "float16", "float32", "float16"),
    ((2, 3), "bfloat16", "bfloat16", "bfloat16"),
    ((128,), "int16", "float32", "bfloat16"),
    ((129,), "own", "bfloat16", "float32"),
    ((129,), "float16", "bfloat16", "float16"),
    ((2048,), "int8", "float32", "float32"),
    ((4096 + 3,), "int16", "bfloat16", "bfloat16"),
    ((0,), "own", "float32", "float32"),
    ((3, 256), "own", "int8", "float32"),
    ((5, 256), "int8", "int8", "bfloat16"),
    ((1, 1024), "float16", "float8_e4m3fn", "float16"),
    ((2, 2, 256), "int16", "float8_e5m2", "bfloat16"),
    ((3, 256), "bfloat16", "float8_e5m2", "bfloat16"),
]
ALSO = (2, 3, 4, 10, 11, 12, 13)  # of them, those that the rules after the first are tried on: the loads are the same
RULES = {
    "adamw": (AdamW(0.9, 0.99, 1e-6), functools.partial(oracles.adamw, b1=0.9, b2=0.99, eps=1e-6), (0.6, 0.3)),
    "nadamw": (
        AdamW(0.9, 0.99, 1e-6, nesterov=True),
        functools.partial(oracles.adamw, b1=0.9, b2=0.99, eps=1e-6, nesterov=True),
        (0.6, 0.3, 0.4),
    ),
    "lion": (Lion(0.9, 0.98), functools.partial(oracles.lion, b1=0.9, b2=0.98), ()),
    "momentum": (Momentum(0.9), functools.partial(oracles.momentum, decay=0.9, nesterov=False), ()),
    "nesterov": (Momentum(0.8, True), functools.partial(oracles.momentum, decay=0.8, nesterov=True), ()),
}
each_rule = pytest.mark.parametrize(
    "rule", [rule if rule == "momentum" else pytest.param(rule, marks=pytest.mark.thorough(0)) for rule in RULES]
)
FACTOR, RATE, STEP = 2.0**-8, 0.05, 7
DECAYS = (np.float32(0.1), np.float32(0.0))  # as they come out again: no second compilation


def stored(x: jax.Array, dtype: str, *, signed: bool) -> Any:
    """A moment as it is stored; what it is worth is read from there again."""
    like = moments.zeros(x.shape, dtype, signed=signed)
    return moments.requantize(x, like, jnp.full(x.shape, 0x7FFF, jnp.int32), signed=signed)


def leaves_of(rule: str) -> list[Any]:
    return LEAVES if rule == "adamw" else [LEAVES[i] for i in ALSO]


@functools.cache
def weights_of(rule: str) -> list[Weight]:
    """`LEAVES` as weights for this rule; some of float16's masters are beyond its range."""
    rng = np.random.default_rng(3)
    drawn = []
    for shape, form, _, grad in leaves_of(rule):
        master = rng.normal(size=shape).astype(np.float32)
        master.reshape(-1)[:1] = -0.0
        if form == "float16":
            master.reshape(-1)[1:3] = 7e4, -1e6
        values = [rng.normal(size=shape), rng.uniform(0.1, 2, size=shape)][: len(RULES[rule][0].signed)]
        param = oracles.saturated(master, form) if form in ("float16", "bfloat16") else None
        drawn.append(((rng.normal(size=shape) / FACTOR).astype(grad), master, param, [np.float32(x) for x in values]))

    @jax.jit  # one program, not several for each leaf
    def make(drawn: Any) -> list[Weight]:
        made = []
        for i, ((g, master, param, values), (_, form, state, _)) in enumerate(zip(drawn, leaves_of(rule), strict=True)):
            held = tuple(stored(x, state, signed=s) for x, s in zip(values, RULES[rule][0].signed, strict=True))
            if form in ("int16", "int8"):
                param, master = moments.split(master, form)
            made.append(Weight(g, param, master, held, DECAYS[i % 2]))
        return made

    return make(drawn)


@functools.cache
def update_fn(rule: str, backend: str) -> Any:
    """Compiled once for a rule; `decay` is traced with the rest."""

    def update(weights, factor, rate, step, scalars, taken):
        how = {"factor": factor, "learning_rate": rate, "step": step, "scalars": scalars, "taken": taken}
        return multi_tensor_update(weights, RULES[rule][0], **how, backend=backend)

    return jax.jit(update)


def updated(rule: str, backend: str, weights: Any, *, rate: float = RATE, step: int = STEP, taken: bool = True) -> Any:
    scalars = tuple(np.float32(s) for s in RULES[rule][2])
    numbers = np.float32(FACTOR), np.float32(rate), np.int32(step), scalars, np.bool_(taken)
    return update_fn(rule, backend)(weights, *numbers)


def wide(moment: Any, *, signed: bool) -> np.ndarray:
    if isinstance(moment, Quantized):
        return oracles.decoded(moment.codes, moment.scales, signed=signed)
    return np.asarray(moment).astype(np.float64)


def weight_of(w: Weight) -> np.ndarray:
    """The float32 weight of a leaf, wherever it stands."""
    return np.asarray(w.master) if w.master.dtype == jnp.float32 else oracles.joined(w.param, w.master)


@functools.cache
def after_one_step(rule: str, backend: str) -> Any:
    return updated(rule, backend, weights_of(rule))


ULP = 2.0**-23


def assert_within(actual: Any, exact: Any, tolerance: Any, what: str) -> None:
    error = np.abs(np.asarray(actual, np.float64) - exact)
    assert np.all(error <= tolerance), f"{what}: off by {np.max(error - tolerance)} more than allowed"


def assert_stored(moment: Any, exact: np.ndarray, tolerance: Any, *, signed: bool, what: str) -> None:
    """The moment is one of the two neighbours of the exact value, in the format that it is stored in."""
    if not isinstance(moment, Quantized):
        spacing = np.abs(exact) * 2.0**-7 if moment.dtype == jnp.bfloat16 else 0.0
        assert_within(moment, exact, tolerance + spacing, what)
        return
    assert moment.scales.dtype == jnp.float32
    groups = np.max(np.abs(exact).reshape(*exact.shape[:-1], -1, oracles.GROUP), axis=-1)
    assert_within(moment.scales, groups, 4 * ULP * groups, f"scales of {what}")
    scales = np.repeat(np.asarray(moment.scales, np.float64), oracles.GROUP, axis=-1)
    slack = tolerance / scales + 4 * ULP
    ratio = exact / scales
    name = moment.codes.dtype.name
    low, _ = oracles.neighbours(np.clip(ratio - slack, -1, 1), name, signed=signed)
    _, high = oracles.neighbours(np.clip(ratio + slack, -1, 1), name, signed=signed)
    value = oracles.decoded(moment.codes, np.ones_like(moment.scales), signed=signed)
    assert np.all((value >= low) & (value <= high)), f"codes of {what}"


@in_kernel
@each_rule
def test_update_is_the_oracles(backend, rule):
    weights = weights_of(rule)
    kind, oracle, scalars = RULES[rule]
    after, _ = after_one_step(rule, backend)
    jax.tree.map(lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), after, weights)
    for i, (w, new) in enumerate(zip(weights, after, strict=True)):
        what = f"leaf {i} {leaves_of(rule)[i]}"
        assert_moved(new.grad, w.grad)
        g, old = np.asarray(w.grad, np.float64) * FACTOR, weight_of(w).astype(np.float64)
        held = [wide(m, signed=s) for m, s in zip(w.moments, kind.signed, strict=True)]
        u, exact = oracle(g, held, scalars)
        moved = old - RATE * (u + w.decay * old)
        tolerance = 4 * ULP * (np.abs(old) + RATE * (8 * np.abs(u) + np.abs(g) + np.abs(held[0])))
        unit = 2.0**-15 if w.master.dtype == jnp.int8 else 0.0  # the last of 24 bits: up or down
        assert_within(weight_of(new), moved, tolerance + unit * np.abs(moved), f"weight of {what}")
        if w.param is not None and w.master.dtype == jnp.float32:
            cast = oracles.saturated(new.master, w.param.dtype)  # XLA may compute the master again to cast it
            assert_within_ulps(new.param, cast, 1, of=np.maximum(np.abs(np.float32(cast)), np.float32(2.0**-14)))
        if w.master.dtype == jnp.int16:  # the param is the nearest bfloat16, ties aside
            assert_exact(np.asarray(new.param), weight_of(new).astype(jnp.bfloat16))
        for n, (m, x, signed) in enumerate(zip(new.moments, exact, kind.signed, strict=True)):
            slack = 4 * ULP * (np.abs(g) + g**2 + np.abs(held[n]))
            assert_stored(m, x, slack, signed=signed, what=f"moment {n} of {what}")


@pytest.mark.thorough(0)
@each_other_backend
@each_rule
def test_backends_agree(backend, rule):
    """On all but the codes whose odds a last bit has tipped."""
    (after, counts), (reference, expected) = (after_one_step(rule, b) for b in (backend, "xla"))
    assert_exact(counts, expected)
    for a, b in zip(after, reference, strict=True):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert x.dtype == y.dtype
            if x.dtype in (jnp.float32, jnp.float16):
                assert_close(x, y, rtol=2e-3 if x.dtype == jnp.float16 else 2e-5, atol=2e-6)
            elif x.size > 100 and x.dtype not in (jnp.int16, jnp.int8):
                assert np.mean(np.asarray(x) != np.asarray(y)) < 0.01


@in_kernel
@pytest.mark.parametrize("rule", ["momentum", pytest.param("adamw", marks=pytest.mark.thorough(0))])
def test_a_step_not_taken_changes_no_bit(backend, rule):
    """Neither where the gradients are numbers nor where they are NaN."""
    weights = [w._replace(grad=np.full_like(w.grad, np.nan)) if i % 2 else w for i, w in enumerate(weights_of(rule))]
    assert_moved(updated(rule, backend, weights, taken=False)[0], weights)


@in_kernel
def test_masters_beyond_float16_are_counted(backend):
    """Before the step; a master in float32, and one of bfloat16, is none of them."""
    weights = weights_of("momentum")
    counted = sum(2 for w in weights if w.param is not None and w.param.dtype == jnp.float16)
    assert counted == 4
    assert_exact(after_one_step("momentum", backend)[1], np.float32(counted))
    back = [w._replace(grad=np.zeros_like(w.grad), moments=jax.tree.map(np.zeros_like, w.moments)) for w in weights]
    decayed, before = updated("momentum", backend, [w._replace(decay=np.float32(2.0)) for w in back], rate=0.25)
    assert_exact(before, np.float32(counted))
    standing = [w._replace(decay=np.float32(0.0)) for w in decayed]
    assert_exact(updated("momentum", backend, standing)[1], np.float32(counted / 2))  # 7e4 is 3.5e4 now, -1e6 beyond


@in_kernel
def test_zeros_keep_their_sign(backend):
    """A weight of -0.0 with no gradient stays -0.0, master and param."""
    weights = [
        w._replace(
            grad=np.zeros_like(w.grad),
            param=None if w.param is None else np.full_like(w.param, -0.0),
            master=np.full_like(w.master, -0.0) if w.master.dtype == jnp.float32 else np.zeros_like(w.master),
            moments=jax.tree.map(np.zeros_like, w.moments),
        )
        for w in weights_of("momentum")
    ]
    assert_exact(updated("momentum", backend, weights)[0], weights)


@pytest.mark.thorough(0)
@in_kernel
def test_steps_and_leaves_differ_in_their_noise(backend):
    weights = weights_of("momentum")
    twice = [after_one_step("momentum", backend)[0]]
    twice += [updated("momentum", backend, weights, step=step)[0] for step in (STEP, STEP + 1)]
    assert_same_program(twice[0], twice[1])
    for w, again in zip(twice[0], twice[2], strict=True):
        if w.master.dtype == jnp.int8:  # the last of 24 bits is rounded by it too
            assert w.grad.size < 100 or np.mean(weight_of(w) != weight_of(again)) > 0.1
        else:
            assert_same_program(weight_of(w), weight_of(again))
        (m,), (n,) = w.moments, again.moments
        if isinstance(m, Quantized):
            assert np.mean(np.asarray(m.codes) != np.asarray(n.codes)) > 0.1


# Whole blocks of 1024, with one group behind them or none; groups of 64 with a rest, which the reference takes.
GROUPED = {(2, 2048): 256, (17, 256): 256, (11, 384): 128, (64, 64): 64, (65, 64): 64, (128, 32): 32}


@pytest.mark.thorough(1)
@each_backend
@pytest.mark.parametrize("state", ["int8", "float8_e4m3fn"])
def test_groups_of_every_size(backend, state):
    """Moments that are the gradient itself: the scales are exactly the largest of each group, the codes beside it."""
    rng = np.random.default_rng(5)
    grads = [rng.normal(size=shape).astype(np.float32) for shape in GROUPED]
    weights = [Weight(g, None, np.ones_like(g), (moments.zeros(g.shape, state, signed=True),)) for g in grads]
    run = functools.partial(multi_tensor_update, rule=Momentum(0.0), step=1, backend=backend)
    step = jax.jit(lambda w, one: run(w, factor=one, learning_rate=one, taken=one > 0)[0])
    for g, new, group in zip(grads, step(weights, np.float32(1)), GROUPED.values(), strict=True):
        (moment,) = new.moments
        assert moment.group == group
        largest = np.max(np.abs(g).reshape(*g.shape[:-1], -1, group), axis=-1)
        assert_exact(moment.scales, largest)
        ratio = g / np.repeat(largest.astype(np.float64), group, axis=-1)
        low, _ = oracles.neighbours(ratio - 4 * ULP, state, signed=True)
        _, high = oracles.neighbours(ratio + 4 * ULP, state, signed=True)
        value = oracles.table(state, signed=True)[np.asarray(moment.codes).view(np.uint8)]
        assert np.all((value >= low) & (value <= high))


# errors


def calls() -> dict[str, Any]:
    """Functions of a backend, and of whether the tree is empty."""
    one, w = jnp.float32(1.0), Weight(jnp.ones(2), None, jnp.ones(2), (jnp.ones(2),))
    how = {"factor": one, "learning_rate": one, "step": 1, "taken": jnp.bool_(True), "rule": Momentum()}

    def call(f, leaf, *args, **kwargs):
        return lambda backend, empty=False: f([] if empty else [leaf], *args, backend=backend, **kwargs)

    return {
        "unscale_and_check": call(pallas_kernels.unscale_and_check, w.grad, one),
        "gradient_norm": call(pallas_kernels.gradient_norm, w.grad, one),
        "cast_tree": call(pallas_kernels.cast_tree, w.grad, jnp.float16),
        "multi_tensor_update": call(multi_tensor_update, w, **how),
    }


@pytest.mark.parametrize("name", calls())
def test_an_unknown_backend(name):
    for empty in (False, True):
        with pytest.raises(ValueError, match="one of 'auto', 'xla', 'mosaic', 'interpret'; got 'triton'"):
            calls()[name]("triton", empty)


@pytest.mark.parametrize("name", calls())
def test_what_cannot_serve_says_why(name):
    for backend in ("mosaic", "interpret"):
        if not MISSING[backend]:
            continue
        with pytest.raises(ValueError) as error:
            calls()[name](backend)
        assert str(error.value) == (
            f'backend="{backend}" cannot run here: {MISSING[backend]}. Use backend="auto", or "xla".'
        )


@pytest.mark.parametrize("f", [pallas_kernels.unscale_and_check, pallas_kernels.gradient_norm])
def test_leaves_of_other_dtypes(f):
    for leaf, got in ((np.ones(2, np.int32), "int32"), (np.ones(2, E4M3), "float8_e4m3fn"), (1.5, "float")):
        message = f"leaves must be float16, bfloat16 or float32; got {got} at"
        with pytest.raises(TypeError, match=rf"{message} \['deep'\]\[0\]"):
            f({"w": jnp.ones(2), "deep": [leaf]}, jnp.float32(1.0))
        with pytest.raises(TypeError, match=f"{message} the root"):
            f(leaf, jnp.float32(1.0))


def test_cast_tree_to_other_dtypes():
    with pytest.raises(ValueError, match="dtype must be float16, .*, float8_e4m3fn or float8_e5m2; got int8"):
        pallas_kernels.cast_tree([jnp.ones(2)], jnp.int8)
    with pytest.raises(TypeError, match=r"got int32 at \[1\]"):
        pallas_kernels.cast_tree([jnp.ones(2), jnp.arange(2)], jnp.float16)


ONES, HALVES = np.ones(4, np.float32), np.ones(4, jnp.bfloat16)
FITTING = Weight(ONES, HALVES, ONES, (ONES, ONES))
UNFIT = [
    ({"moments": (ONES,)}, "AdamW needs 2 moments; leaf 1 has 1"),
    (
        {"master": ONES[:3]},
        r"all parts of a leaf must have the shape of its gradient; leaf 1 has master of \(3,\) and grad of \(4,\)",
    ),
    ({"param": HALVES.reshape(2, 2)}, r"leaf 1 has param of \(2, 2\) and grad of \(4,\)"),
    ({"moments": (ONES, np.ones((), np.float32))}, r"leaf 1 has moment 1 of \(\) and grad of \(4,\)"),
    (
        {"param": ONES.astype(np.float16), "master": ONES.astype(np.int16)},
        "a master must be float32, or int16 or int8 beside a bfloat16 param; leaf 1 has a master of int16 and a "
        "param of float16",
    ),
    ({"param": None, "master": ONES.astype(np.int8)}, "leaf 1 has a master of int8 and a param of None"),
    ({"master": HALVES}, "leaf 1 has a master of bfloat16"),
    (
        {"moments": (ONES, ONES.astype(np.float16))},
        "state_dtype must be float32, bfloat16, int8, float8_e4m3fn or float8_e5m2; got float16",
    ),
]


@pytest.mark.parametrize(("parts", "message"), UNFIT)
def test_parts_that_do_not_fit(parts, message):
    one = jnp.float32(1.0)
    how = {"factor": one, "learning_rate": one, "step": 1, "scalars": (one, one), "taken": jnp.bool_(True)}
    with pytest.raises(ValueError, match=message):
        multi_tensor_update([FITTING, FITTING._replace(**parts)], AdamW(), **how)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("spec", [P("x"), P()], ids=["all-cut", "cut-and-whole"])
def test_checked_shard_map_leaves_to_xla_what_varies_over_other_axes(spec):
    """Leaves share the branches of a kernel, whose types must agree; a named backend says so."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tree, specs = {"a": jnp.full((8, 512), 1.5), "b": jnp.full((8, 512), 2.5)}, {"a": P("x"), "b": spec}

    def spread(backend):
        cast = functools.partial(pallas_kernels.cast_tree, dtype=jnp.bfloat16, scale=2.0, backend=backend)
        return jax.jit(jax.shard_map(cast, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=True))

    assert_exact(spread("auto")(tree), jax.tree.map(lambda x: (2 * x).astype(jnp.bfloat16), tree))
    text = spread("auto").trace(tree).lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) == (spec == P("x") and MISSING["interpret"] is None)
    if spec == P() and MISSING["interpret"] is None:
        with pytest.raises(
            ValueError, match=r'"interpret" cannot run here: leaves differ in the axes .*check_vma=False'
        ):
            spread("interpret")(tree)
