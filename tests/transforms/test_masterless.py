"""16-bit params without masters: moments in float32, and updates that are rounded stochastically."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact, assert_moved, assert_same_program
from regimes import AXIS, DEVICES, REGIMES, mesh_of

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
each_dtype = pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])


@functools.partial(jax.jit, static_argnums=(0, 1))
def steps(seed, n, params, updates):
    """params after n steps of the same updates, each a new draw."""
    tx = jaxmp.stochastic_round_updates(seed)

    def step(carry, _):
        params, state = carry
        moves, state = tx.update(updates, state, params)
        return (optax.apply_updates(params, moves), state), None

    return jax.lax.scan(step, (params, tx.init(params)), None, length=n)[0]


def draws(params, updates, n, seed=0):
    """[n, ...]: n first steps from the same params, with other noise each: that of another count."""
    tx = jaxmp.stochastic_round_updates(seed)

    def draw(count):
        state = tx.init(params)._replace(round_count=count)
        return optax.apply_updates(params, tx.update(updates, state, params)[0])

    return jax.jit(jax.vmap(draw))(jnp.arange(n, dtype=jnp.int32))


@pytest.mark.thorough(1)
@each_dtype
def test_updates_land_on_a_neighbour_and_the_mean_is_right(dtype):
    rng = np.random.default_rng(0)
    p = np.concatenate([rng.normal(size=40), [1.0, -1.0, 0.0, 2.0**-14, 1e-6, -3e-5]]).astype(dtype)
    u = (rng.normal(size=p.size) * 1e-3 * np.abs(p.astype(np.float32))).astype(np.float32)
    u[-2] = 3e-8
    n = 2000
    rounded = draws(p, u, n)
    assert rounded.dtype == dtype
    new = (p.astype(np.float32) + u).astype(np.float64)  # what the weight would be in float32
    values = np.asarray(rounded).astype(np.float64)
    low, high = neighbours(new, dtype)
    assert ((values == low) | (values == high)).all()
    assert ((values - new[None]) != 0).any()
    odds = np.where(high > low, (new - low) / np.where(high > low, high - low, 1.0), 0.0)
    sigma = (high - low) * np.sqrt(odds * (1 - odds) / n)
    assert (np.abs(values.mean(0) - new) <= 5 * sigma + 1e-9 * (high - low)).all()
    # and over all elements together: no common drift
    z = (values.mean(0) - new)[sigma > 0] / sigma[sigma > 0]
    assert abs(z.sum()) < 4 * np.sqrt(z.size) and 0.5 < np.mean(z**2) < 2.0


def neighbours(x, dtype):
    """The values of `dtype` next below and above float64 x (both x, where it is one)."""
    nearest = x.astype(np.float32).astype(dtype)
    bits = nearest.view(np.int16).astype(np.int32)
    ordered = np.where(bits < 0, -(bits & 0x7FFF), bits)

    def value(k):
        return np.where(k < 0, -k | 0x8000, k).astype(np.uint16).view(dtype).astype(np.float64)

    down = value(ordered) > x
    up = value(ordered) < x
    return value(ordered - down), value(ordered + up)


@pytest.mark.thorough(1)
@each_dtype
def test_values_that_need_no_rounding_never_move_and_what_is_not_finite_is_shown(dtype):
    """The largest values saturate."""
    info = jnp.finfo(dtype)
    spacing, largest = float(info.eps), float(info.max)
    p = np.array([1.0, -0.0, 0.0, 3.0, 1.0, -(2.0**-14), largest, -largest, 1.0, 1.0, -1.0], dtype)
    step = largest / 4096
    u = np.array([0.0, 0.0, -0.0, -3.0, spacing, 0.0, step, -step, np.nan, np.inf, -np.inf], np.float32)
    expected = np.array([1.0, -0.0, 0, 0, 1 + spacing, -(2.0**-14), largest, -largest, np.nan, np.inf, -np.inf], dtype)
    assert_exact(draws(p, u, 200), np.broadcast_to(expected, (200, len(p))))
    tx = jaxmp.stochastic_round_updates(0)
    moves = jax.jit(lambda p, u: tx.update(u, tx.init(p), p)[0])(p, u)
    assert_exact(moves[:3], np.full(3, -0.0, np.float32))


def test_float32_params_pass_and_16_bit_updates_are_taken():
    params = {"a": jnp.ones(3), "b": jnp.ones(3, BF16)}
    updates = {"a": jnp.full(3, 1e-9), "b": jnp.full(3, 1e-3, BF16)}
    tx = jaxmp.stochastic_round_updates(0)
    state = tx.init(params)

    def update(updates, state):
        moves, new = tx.update(updates, state, params)
        assert moves["a"] is updates["a"]
        return moves, new

    moves, new = jax.jit(update)(updates, state)
    assert moves["b"].dtype == F32
    assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
    assert int(new.round_count) == 1 and new.round_count.dtype == jnp.int32


def test_noise_hangs_on_seed_step_leaf_and_element():
    p = {name: np.ones(256, BF16) for name in "ab"}
    u = {name: np.full(256, -1e-3, np.float32) for name in "ab"}
    by_seed = {seed: jax.tree.map(np.asarray, draws(p, u, 3, seed)) for seed in (7, 8, 2**32 + 7, -1)}
    first, other, b = by_seed[7]["a"], by_seed[8]["a"], by_seed[7]["b"]
    for x, y in ((first, other), (first[0], first[1]), (first, b), (first[0, :128], first[0, 128:])):
        same = np.mean(x == y)  # of two independent draws with odds of 1/4: 5/8
        assert 0.5 < same < 0.75
    assert_same_program(draws(p, u, 3, np.int64(7))["a"], first)
    assert_exact(by_seed[2**32 + 7]["a"], first)


PARAMS = {"w": np.linspace(0.5, 1.5, 64, dtype=np.float32).reshape(8, 8), "b": np.ones(8, np.float32)}


def placed(spec, mesh=None):
    params = jax.tree.map(lambda x: jnp.asarray(x, BF16), PARAMS)
    if mesh is None:
        return params
    return {"w": jax.device_put(params["w"], NamedSharding(mesh, spec)), "b": params["b"]}


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("spec", "axis_type"),
    [(P(AXIS), AxisType.Auto), (P(None, AXIS), AxisType.Explicit)],
    ids=["rows, auto", "columns, explicit"],
)
def test_the_sharding_does_not_matter_under_jit(spec, axis_type):
    updates = jax.tree.map(lambda x: jnp.full(x.shape, -1e-3), PARAMS)
    expected = jax.tree.map(np.asarray, steps(0, 3, placed(None), updates))
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        updates = {"w": jax.device_put(updates["w"], NamedSharding(mesh, spec)), "b": updates["b"]}
        got = steps(0, 3, placed(spec, mesh), updates)
    assert got[0]["w"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert_exact(jax.tree.map(np.asarray, got), expected)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["pmap", "shard_map", "shard_map_unchecked"])
def test_replicas_draw_the_same_as_one_device(how):
    params, updates = placed(None), jax.tree.map(lambda x: jnp.full(x.shape, -1e-3), PARAMS)
    expected = jax.tree.map(np.asarray, steps(0, 2, params, updates)[0])
    regime = REGIMES[how]
    run = regime.compile(lambda state, x, mean: (steps(0, 2, *state)[0], jnp.sum(x)))
    new, _ = run(regime.place((params, updates)), regime.shard(np.zeros(DEVICES, np.float32)))
    copies = regime.copies(new)
    assert len(copies) == DEVICES
    for copy in copies:
        assert_exact(copy, expected)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_parts_of_a_split_leaf_draw_their_own_noise_where_the_axis_is_named(check_vma):
    params = {"w": jnp.ones((DEVICES, 64), BF16), "b": jnp.ones(64, BF16)}
    updates = jax.tree.map(lambda x: jnp.full(x.shape, -1e-3), params)
    specs = {"w": P(AXIS), "b": P()}
    replicated = None if check_vma else {"w": False, "b": True}

    def once(axis_name):
        tx = jaxmp.stochastic_round_updates(0, axis_name=axis_name, replicated=replicated)

        def step(params, updates):
            return optax.apply_updates(params, tx.update(updates, tx.init(params), params)[0])

        spread = jax.shard_map(step, mesh=mesh_of(), in_specs=(specs, specs), out_specs=specs, check_vma=check_vma)
        return jax.tree.map(np.asarray, jax.jit(spread)(params, updates))

    own, common = once(AXIS), once(None)
    assert all((common["w"][0] == row).all() for row in common["w"])
    assert all(not (own["w"][0] == row).all() for row in own["w"][1:])
    assert_exact(own["b"], common["b"])


def test_a_skipped_step_does_not_count():
    inner = optax.chain(jaxmp.float32_moments(optax.adam(1e-2)), jaxmp.stochastic_round_updates(0))
    tx = jaxmp.unscale_and_skip(inner, 4.0)
    params = placed(None)
    state = tx.init(params)
    update = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
    good = jax.tree.map(np.ones_like, params)
    skipped = update(good | {"b": np.full_like(good["b"], np.inf)}, state, params)
    assert_moved(skipped[0], params)
    assert int(optax.tree.get(skipped[1], "round_count")) == 0 and int(skipped[1].skipped_steps) == 1
    taken = update(good, state, params)
    assert_same_program(update(good, skipped[1], params)[0], taken[0])
    assert int(optax.tree.get(taken[1], "round_count")) == 1


@pytest.mark.parametrize(("dtype", "is_plain"), [(F16, False), (BF16, False), (BF16, True)])
def test_moments_are_float32_whatever_the_params_are(dtype, is_plain):
    """Those of plain optax have the dtype of the param."""
    tx = optax.adam(1e-2) if is_plain else jaxmp.float32_moments(optax.adam(1e-2))
    params = {"w": np.ones((2, 3), dtype), "norm": np.ones(3, np.float32)}
    expected = {"w": dtype if is_plain else F32, "norm": F32}
    state = jax.eval_shape(tx.init, params)
    updates, new = jax.eval_shape(tx.update, params, state, params)
    for tree in (*(optax.tree.get(s, moment) for s in (state, new) for moment in ("mu", "nu")), updates):
        assert {k: x.dtype for k, x in tree.items()} == expected
    types = [[(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)] for tree in (state, new)]
    assert types[0] == types[1]


def test_float32_moments_are_those_of_a_float32_run():
    """The same numbers as the optimizer on float32 views; a second moment of 1e-11, which float16 does not hold."""
    adam, wrapped = optax.adamw(1e-2), jaxmp.float32_moments(optax.adamw(1e-2))
    params = jnp.array([1.0, -2.0], F16)
    grads = jnp.array([1e-4, -1e-4], F16)

    def run(tx, g, p):
        return jax.jit(lambda g, p: tx.update(g, tx.init(p), p))(g, p)

    got = run(wrapped, grads, params)
    assert_close(got, run(adam, grads.astype(F32), params.astype(F32)), rtol=1e-6)
    assert np.isfinite(np.asarray(got[0])).all()
    assert not np.isfinite(np.asarray(adam.update(grads, adam.init(params), params)[0])).all()  # what it is for


def test_a_regression_without_masters_follows_the_float32_one_where_plain_bfloat16_stalls():
    """lr 1e-3 on weights near 1: a step is a quarter of the spacing below 1 and less."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(128, 16)), F32)
    target = jnp.asarray(1 + 0.1 * rng.normal(size=(16,)), F32)

    def loss_fn(w):
        return jnp.mean((x @ (w.astype(F32) - target)) ** 2)

    def train(tx, w):
        def step(carry, _):
            w, state = carry
            moves, state = tx.update(jax.grad(loss_fn)(w), state, w)
            return (optax.apply_updates(w, moves), state), None

        return jax.jit(lambda w: jax.lax.scan(step, (w, tx.init(w)), None, length=600)[0][0])(w)

    start, start16 = np.ones(16, np.float32), np.ones(16, BF16)
    adam = optax.adam(optax.linear_schedule(1e-3, 0.0, 600))
    moments = jaxmp.float32_moments(adam)
    full, plain = train(adam, start), train(adam, start16)
    rounded = train(optax.chain(moments, jaxmp.stochastic_round_updates(0)), start16)
    assert rounded.dtype == BF16
    assert_exact(plain, start16)  # never moved
    assert_exact(train(moments, start16), start16)  # it is the rounding that stalls, not the moments
    full, plain, rounded = (float(loss_fn(w) / loss_fn(start)) for w in (full, plain, rounded))
    assert full < 1e-4
    assert rounded < 5e-3 < 0.9 < plain


def test_it_is_the_masters_that_are_float32_inside_of_mixed_precision():
    """There it has nothing to do: the optimizer's params are float32."""
    with_it = jaxmp.mixed_precision(optax.chain(optax.sgd(1e-2), jaxmp.stochastic_round_updates(0)), "bf16")
    without = jaxmp.mixed_precision(optax.sgd(1e-2), "bf16")
    params = placed(None)
    grads = jax.tree.map(jnp.ones_like, params)
    a, b = (
        jax.jit(lambda tx=tx: jaxmp.apply_gradients(tx, grads, tx.init(PARAMS), params))() for tx in (with_it, without)
    )
    assert_exact(a[0], b[0])
    assert_exact(jaxmp.get_master_params(a[1], a[0]), jaxmp.get_master_params(b[1], b[0]))


def test_errors_say_the_rule_and_the_fix():
    tx = jaxmp.stochastic_round_updates(0)
    params = {"w": jnp.ones(2, BF16)}
    with pytest.raises(ValueError, match=r"needs the params; got none. Call tx.update\(grads, opt_state, params\)"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match="updates and params must have the same tree structure; b is in updates only"):
        tx.update({"b": jnp.ones(2)}, tx.init(params), params)
    with pytest.raises(ValueError, match="axis name 'model' is not bound here"):
        jaxmp.stochastic_round_updates(0, axis_name="model").update(params, tx.init(params), params)
