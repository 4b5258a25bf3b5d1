"""`mixed_precision` and `apply_gradients` in whatever they are put, and states of other optimizers moved in."""

import functools
import re

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_close, assert_exact, assert_moved, assert_same_program, assert_within_ulps

PARAMS32 = {"w": jnp.float32([1.0001, -0.0, -2.5]), "norm": jnp.float32([1.0, 3.0])}


def grads_like(params, value=1.0):
    return jax.tree.map(lambda p: np.full(p.shape, value, p.dtype), params)


def cast(tree, policy):
    return jaxmp.get_policy(policy).cast_to_param(tree)


# the parts make the whole


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["fp16", "fp32"])
def test_mixed_precision_is_its_parts(policy):
    inner = optax.chain(jaxmp.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9))
    scaler = jaxmp.DynamicLossScale(4.0, growth_interval=2)
    whole = jaxmp.mixed_precision(inner, policy, loss_scale=scaler)
    parts = jaxmp.unscale_and_skip(jaxmp.keep_master_params(inner, policy), scaler)
    params, state, state_of_parts = cast(PARAMS32, policy), whole.init(PARAMS32), parts.init(PARAMS32)
    held = lambda state: (state.master_params, state.optimizer_state)  # noqa: E731
    decided = lambda state: (state.scaling, state.skipped, state.skipped_steps, state.consecutive_skips)  # noqa: E731
    assert_moved(held(state), held(state_of_parts.optimizer_state))
    for value in (4.0, np.inf, 2.0):
        updates, state = whole.update(grads_like(params, value), state, params)
        updates_of_parts, state_of_parts = parts.update(grads_like(params, value), state_of_parts, params)
        assert_same_program((updates, held(state)), (updates_of_parts, held(state_of_parts.optimizer_state)))
        assert_exact(decided(state), decided(state_of_parts))


@pytest.mark.parametrize(
    "policy, scale",
    [("fp16", 65536.0), ("bf16", 1.0), ("fp32", 1.0), ("params=float32,compute=float16,output=float32", 65536.0)],
)
def test_auto_scales_where_float16_is(policy, scale):
    assert_close(jaxmp.get_loss_scale(jaxmp.mixed_precision(optax.sgd(1.0), policy).init(PARAMS32)), scale)


# apply_gradients

KEEP = jaxmp.get_policy("fp16", keep_fp32=("norm",))


def mixed(inner, **kwargs):
    return jaxmp.mixed_precision(inner, KEEP, loss_scale=4.0, **kwargs)


CHAINS = {
    "alone": lambda: mixed(optax.adam(0.1)),
    "before": lambda: mixed(optax.adam(0.1), before=jaxmp.reduce_gradients()),
    "chain_in_chain": lambda: mixed(optax.chain(optax.identity(), optax.chain(optax.identity(), optax.sgd(0.1)))),
    "inner_multi_transform": lambda: mixed(
        optax.multi_transform({"a": optax.adam(0.1), "s": optax.sgd(0.1)}, {"w": "a", "norm": "s"})
    ),
    "inner_MultiSteps": lambda: mixed(optax.MultiSteps(optax.adam(0.1), 2)),
    "inject_hyperparams": lambda: mixed(optax.inject_hyperparams(optax.adam)(learning_rate=0.1)),
}
LATER = pytest.param("inner_MultiSteps", marks=pytest.mark.thorough(0))
AROUND = {
    "chain": lambda: optax.chain(jaxmp.reduce_gradients(), mixed(optax.adam(0.1))),
    "behind": lambda: optax.chain(mixed(optax.adam(0.1)), optax.scale(0.5)),
    "behind a part": lambda: optax.chain(jaxmp.keep_master_params(optax.sgd(1.0), KEEP), optax.scale(0.0)),
    "multi_transform": lambda: optax.multi_transform(
        {"a": mixed(optax.adam(0.1)), "s": jaxmp.unscale_and_skip(optax.sgd(0.1), 4.0)}, {"w": "a", "norm": "s"}
    ),
    "MultiSteps": lambda: optax.MultiSteps(mixed(optax.adam(0.1)), 2).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(lambda rate: mixed(optax.adam(rate)))(rate=0.1),
}


@pytest.mark.parametrize("kind", AROUND)
def test_a_transform_around_it_is_refused(kind):
    tx, params = AROUND[kind](), KEEP.cast_to_param(PARAMS32)
    state, grads = tx.init(PARAMS32), grads_like(params, 4.0)
    with pytest.raises(
        ValueError, match=r"must stand around the whole optimizer; got .* goes inside.*chain\(clip, inner\).*before="
    ):
        jaxmp.apply_gradients(tx, grads, state, params)
    with pytest.raises(ValueError, match=r"must stand around the whole optimizer"):
        train_state = jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=tx)
        train_state.apply_gradients(grads=grads)


def test_updates_that_a_transform_behind_changes_are_named_in_the_metrics():
    tx, params = AROUND["behind"](), KEEP.cast_to_param(PARAMS32)
    state, update, stale = tx.init(PARAMS32), jax.jit(tx.update), []
    for _ in range(3):
        updates, state = update(grads_like(params, 4.0), state, params)
        params = optax.apply_updates(params, updates)
        stale.append(float(jaxmp.get_metrics(state)["stale_masters"]))
    assert stale == [0.0, params["w"].size, params["w"].size]


def test_stale_masters_are_counted_in_one_sum_of_rows_on_a_gpu():
    """XLA for GPU counts them in the pass that moves the masters; with a second sum it copies the masters."""
    params = {"w": jnp.ones((8, 4), jnp.float16), "v": jnp.ones((2, 4), jnp.float16)}
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), "fp16")
    state = jax.eval_shape(lambda: tx.init(jax.tree.map(lambda p: p.astype(jnp.float32), params)))
    traced = jax.jit(tx.update).trace(params, state, params)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    sums = re.findall(r"stablehlo.reduce\(.*dimensions = \[([\d, ]+)\] : \(tensor<(?:8|2)x4x(\S+)>,", text)
    of_gradients, of_masters = ("0, 1", "complex<f32>"), ("1", "complex<f32>")
    assert sums == [of_gradients] * 2 + [of_masters] * 2


@pytest.mark.thorough(1)
@pytest.mark.parametrize("chain", [*sorted(CHAINS.keys() - {"inner_MultiSteps"}), LATER])
def test_apply_gradients_is_update_and_apply_updates(chain):
    """Good and skipped steps in every place where `mixed_precision` may stand; masters are found in all of them."""
    tx = CHAINS[chain]()
    update, apply = optax.with_extra_args_support(tx).update, functools.partial(jaxmp.apply_gradients, tx)
    if "MultiSteps" in chain:  # its branches are compiled at each eager call
        update, apply = (jax.jit(f, compiler_options={"xla_disable_hlo_passes": "fusion"}) for f in (update, apply))
    params = KEEP.cast_to_param(PARAMS32)
    by_both, by_one = (params, tx.init(PARAMS32)), (params, tx.init(PARAMS32))
    assert_moved(jaxmp.get_master_params(by_one[1], params)["w"], PARAMS32["w"])
    for value in (4.0, np.inf, -8.0):
        grads = grads_like(params, value)
        before = by_one[0]
        updates, state = update(grads, by_both[1], by_both[0])
        assert float(jaxmp.get_metrics(state)["stale_masters"]) == 0.0
        by_both = optax.apply_updates(by_both[0], updates), state
        by_one = apply(grads, by_one[1], by_one[0])
        assert np.isnan(jaxmp.get_metrics(by_one[1])["stale_masters"])  # it does not read the params
        counted = by_one[0], by_one[1]._replace(stale_masters=state.stale_masters)
        if "MultiSteps" in chain:  # moves by 0.0: a master of -0.0 may become 0.0, an added update cannot
            assert_within_ulps(counted, by_both, 8)
        else:
            assert_same_program(counted, by_both)
        if np.isinf(value):
            assert_moved(by_one[0], before)
        assert_exact(by_one[0], KEEP.cast_to_param(jaxmp.get_master_params(by_one[1], by_one[0])))
    assert float(by_one[0]["w"][0]) != float(params["w"][0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_apply_gradients_of_plain_optax_is_plain_optax(dtype):
    tx = optax.sgd(0.1, momentum=0.9)
    params, grads = {"w": jnp.array([1.0, -0.0], dtype)}, {"w": jnp.array([0.5, 1.0], dtype)}
    updates, expected_state = tx.update(grads, tx.init(params), params)
    new, state = jaxmp.apply_gradients(tx, grads, tx.init(params), params, value=jnp.float32(1.0))
    assert_same_program((new, state), (optax.apply_updates(params, updates), expected_state))


def test_a_tree_of_one_array_and_an_empty_one():
    """Params need not be a dict; a device may hold none at all and still takes part."""
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=4.0)
    params, state = jaxmp.apply_gradients(tx, jnp.float16(4.0), tx.init(jnp.float16(1.5)), jnp.float16(1.5))
    assert_exact(params, jnp.float16(0.5))
    params, state = jaxmp.apply_gradients(tx, {}, tx.init({}), {})
    assert params == {} and not bool(jaxmp.get_metrics(state)["skipped"])


def test_params_are_any_tree():
    """A `None` in it stays; its structure is that of the new params and of the masters."""
    builds = (
        flax.core.freeze,
        lambda tree: (tree["w"], [tree["norm"]]),
        lambda tree: tree | {"nothing": None},
        as_nnx_state,
    )
    for build in builds:
        tx, tree32 = jaxmp.mixed_precision(optax.sgd(0.1), "bf16"), build(PARAMS32)
        params, state = cast(tree32, "bf16"), tx.init(tree32)
        new, state = jaxmp.apply_gradients(tx, grads_like(params), state, params)
        assert jax.tree.structure(new) == jax.tree.structure(tree32)
        assert jax.tree.structure(jaxmp.get_master_params(state, new)) == jax.tree.structure(tree32)


# get_master_params


def test_get_master_params_is_float32_everywhere():
    """Masters, kept leaves, a plain optimizer's params and frozen leaves: one float32 tree."""
    tx = mixed(optax.multi_transform({"t": optax.sgd(1.0), "f": optax.set_to_zero()}, {"w": "f", "norm": "t"}))
    params, state = KEEP.cast_to_param(PARAMS32), tx.init(PARAMS32)
    got = jaxmp.get_master_params(state, params)
    assert_exact(got, {"w": params["w"].astype(jnp.float32), "norm": PARAMS32["norm"]})
    assert_moved(jaxmp.get_master_params(optax.sgd(1.0).init(params), params), got)
    assert_moved(jaxmp.get_master_params(mixed(optax.sgd(1.0)).init(PARAMS32), params), PARAMS32)


# a run of plain optax goes on


def train(tx, params, state, steps, seed=0):
    rng = np.random.default_rng(seed)
    step = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
    for _ in range(steps):
        grads = jax.tree.map(lambda p: np.asarray(rng.standard_normal(p.shape), p.dtype), params)
        params, state = step(grads, state, params)
    return params, state


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    "inner",
    [
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0.0, 10))),
        lambda: optax.masked(optax.sgd(0.1, momentum=0.9), {"w": True, "norm": False}),
        lambda: optax.noisy_sgd(0.1, key=0),
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    ],
    ids=["schedule", "masked", "prng_key", "hyperparams"],
)
def test_wrapped_float32_run_goes_on_bit_for_bit(inner):
    plain = inner()
    params, state = train(plain, PARAMS32, plain.init(PARAMS32), 3)
    tx = jaxmp.mixed_precision(inner(), "fp32")
    _, wrapped = jaxmp.checkpoint.convert(state, params, to=tx, policy="fp32")
    assert jax.tree.structure(wrapped) == jax.tree.structure(tx.init(params))
    expected = train(plain, params, state, 3, seed=1)
    got, wrapped = train(tx, params, wrapped, 3, seed=1)
    assert_within_ulps((got, wrapped.optimizer_state), expected, 8)


def test_wrapped_bfloat16_run_has_float32_moments_and_masters():
    """A plain bfloat16 run: moments become float32 with their values, counts stay, masters start from the params."""
    plain, params16 = optax.adam(0.1), cast(PARAMS32, "bf16")
    params16, state = train(plain, params16, plain.init(params16), 3)
    assert optax.tree.get(state, "mu")["w"].dtype == jnp.bfloat16
    tx = jaxmp.mixed_precision(optax.adam(0.1), "bf16")
    _, wrapped = jaxmp.checkpoint.convert(state, params16, to=tx, policy="bf16")
    wide = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float32), tree)  # noqa: E731
    for name in ("mu", "nu"):
        assert_exact(optax.tree.get(wrapped, name), wide(optax.tree.get(state, name)))
    assert_exact(optax.tree.get(wrapped, "count"), jnp.int32(3))
    assert_exact(jaxmp.get_master_params(wrapped, params16), wide(params16))
    params, wrapped = train(tx, params16, wrapped, 2)
    assert int(optax.tree.get(wrapped, "count")) == 5 and params["w"].dtype == jnp.bfloat16


def as_nnx_state(tree):
    return nnx.State({name: nnx.Param(x) for name, x in tree.items()})


@pytest.mark.parametrize(
    "old_form, new_form",
    [(flax.core.freeze, dict), (dict, as_nnx_state), (as_nnx_state, dict)],
    ids=["frozen_to_dict", "dict_to_nnx", "nnx_to_dict"],
)
def test_a_plain_state_is_taken_by_path(old_form, new_form):
    """dict, FrozenDict and nnx.State hold the same leaves under the same paths. Masters are the float32 params."""
    old_params, new_params = old_form(PARAMS32), new_form(PARAMS32)
    state = optax.adam(0.1).init(old_params)
    _, state = jax.jit(optax.adam(0.1).update)(jax.tree.map(jnp.ones_like, old_params), state, old_params)
    tx = jaxmp.mixed_precision(optax.adam(0.1), "bf16")
    _, wrapped = jaxmp.checkpoint.convert(state, new_params, to=tx, policy="bf16")
    assert jax.tree.structure(wrapped) == jax.tree.structure(jax.eval_shape(tx.init, new_params))
    values = lambda tree: [np.asarray(x) for x in jax.tree.leaves(tree)]  # noqa: E731
    assert_moved(values(optax.tree.get(wrapped, "mu")), values(optax.tree.get(state, "mu")))
    assert int(optax.tree.get(wrapped, "count")) == 1
    assert_moved(jaxmp.get_master_params(wrapped, cast(new_params, "bf16")), new_params)


# gradients of another shape

STEPS = {
    "mixed_precision": lambda: jaxmp.mixed_precision(optax.adam(0.1), "bf16"),
    "fused": lambda: jaxmp.mixed_precision(jaxmp.fused_adamw(0.1), "bf16"),
    "split": lambda: jaxmp.mixed_precision(optax.adam(0.1), "bf16", remainder_bits=16),
    "unscale": lambda: jaxmp.unscale_and_skip(optax.adam(0.1)),
    "masters": lambda: jaxmp.keep_master_params(optax.adam(0.1), "bf16"),
    "plain": lambda: optax.adam(0.1),
}
WRONG_SHAPES = [(), (1,), (1, 5), (3, 1), (2, 5), (1, 5)]


@pytest.mark.parametrize(("name", "shape"), list(zip(STEPS, WRONG_SHAPES, strict=True)))
def test_a_gradient_of_another_shape_than_its_param_is_refused(name, shape):
    """Also one that would be repeated to that shape."""
    tx, dtype = STEPS[name](), jnp.float32 if name in ("unscale", "plain") else jnp.bfloat16
    params = {"bias": jnp.ones(2, dtype), "w": jnp.ones((3, 5), dtype)}
    grads = {"bias": jnp.ones(2), "w": jnp.ones(shape)}
    ways = [lambda: jaxmp.apply_gradients(tx, grads, tx.init(params), params)]
    if name not in ("split", "plain"):
        ways.append(lambda: tx.update(grads, tx.init(params), params))
    if name in ("masters", "plain"):
        scaler = jaxmp.GradScaler(4.0)
        scaler.scale(jnp.float32(1.0))
        ways.append(lambda: scaler.step(tx, grads, tx.init(params), params))
    expected = re.escape(f"grads and params must have the same shapes; got {shape} and (3, 5) at w")
    for way in ways:
        with pytest.raises(ValueError, match=expected):
            jax.eval_shape(way)


# optimizers that move params themselves


def lookahead_job(policy, inner, how, sync=3):
    start = optax.LookaheadParams.init_synced({"w": np.float32([0.3, -1.0, 2.0])})
    tx = jaxmp.mixed_precision(optax.lookahead(inner, sync, 0.5), policy, loss_scale=None if policy == "bf16" else 4.0)
    params, opt_state = jaxmp.get_policy(policy).cast_to_param(start), tx.init(start)

    @jax.jit
    def step(params, opt_state, target):
        loss = lambda p: jnp.sum(p["w"].astype(jnp.float32) * target)  # noqa: E731
        _, grads = jaxmp.value_and_grad(loss)(params.fast, opt_state=opt_state)
        if how == "apply":
            return jaxmp.apply_gradients(tx, grads, opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return params, opt_state, step


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("policy", "how"), [("bf16", "update"), ("fp16", "apply"), ("fp32", "apply")])
def test_lookahead_inside_moves_both_copies_of_the_masters(policy, how):
    """Against NumPy: fast = fast - rate g; every third step slow = slow + (fast - slow) / 2, and fast = slow."""
    params, opt_state, step = lookahead_job(policy, optax.sgd(0.01), how)
    fast = slow = np.float32([0.3, -1.0, 2.0])
    target = np.float32([1.0, -0.5, 0.25])
    for i in range(1, 9):
        if i == 5 and policy == "fp16":  # a step that is skipped is none
            params, opt_state = step(params, opt_state, jnp.float32(np.inf))
        params, opt_state = step(params, opt_state, target)
        fast = fast - np.float32(0.01) * target
        if i % 3 == 0:
            fast = slow = slow + np.float32(0.5) * (fast - slow)
        masters = jaxmp.get_master_params(opt_state, params)
        np.testing.assert_allclose(masters.fast["w"], fast, rtol=1e-6)
        np.testing.assert_allclose(masters.slow["w"], slow, rtol=1e-6)
        assert_exact(params, jaxmp.get_policy(policy).cast_to_param(masters))


def test_lookahead_with_split_masters_is_refused():
    start = optax.LookaheadParams.init_synced({"w": jnp.ones(3)})
    tx = jaxmp.mixed_precision(optax.lookahead(optax.sgd(0.1), 2, 0.5), "bf16", remainder_bits=16)
    with pytest.raises(ValueError, match="got optax.lookahead. .* leave remainder_bits=None"):
        jax.eval_shape(lambda: jaxmp.apply_gradients(tx, {"w": jnp.ones(3)}, tx.init(start), cast(start, "bf16")))


MOVERS = {
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.1),
    "mechanize": optax.contrib.mechanize,
    "sam": lambda tx: optax.contrib.sam(tx, optax.sgd(0.1)),
}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", MOVERS)
def test_what_moves_params_itself_is_refused_around_masters_and_works_inside(name):
    params32 = {"w": np.ones(2, np.float32)}

    def steps(tx, policy):
        def step(carry, _):
            params, opt_state = carry
            loss = lambda p: jnp.sum((p["w"].astype(jnp.float32) - 3) ** 2)  # noqa: E731
            _, grads = jaxmp.value_and_grad(loss)(params, opt_state=opt_state)
            return jaxmp.apply_gradients(tx, grads, opt_state, params), None

        first = cast(params32, policy), tx.init(params32)
        (params, opt_state), _ = jax.jit(lambda first: jax.lax.scan(step, first, length=3))(first)
        return jaxmp.get_master_params(opt_state, params)

    with pytest.raises(ValueError, match="must stand around the whole optimizer"):
        steps(MOVERS[name](jaxmp.mixed_precision(optax.sgd(0.1), "bf16")), "bf16")
    inside = [steps(jaxmp.mixed_precision(MOVERS[name](optax.sgd(0.1)), p), p) for p in ("bf16", "fp32")]
    assert_close(inside[0], inside[1], rtol=1e-2)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("policy", "around"), [("fp16", "labels"), ("bf16", "masks")])
def test_labels_and_masks_around_may_be_prefixes(policy, around):
    params32 = {"a": {"w": jnp.ones(2), "v": jnp.ones(2)}, "b": {"w": jnp.ones(2), "v": {"u": jnp.ones(2)}}}
    params = cast(params32, policy)

    def step(spread):
        mixed = jaxmp.mixed_precision(optax.sgd(0.125), policy, loss_scale=4.0)
        label = lambda tree: jax.tree.map(spread, tree, params32)  # noqa: E731
        if around == "labels":
            transforms = {"train": mixed, "frozen": optax.set_to_zero()}
            tx = optax.multi_transform(transforms, label({"a": "train", "b": "frozen"}))
        else:
            mine, others = label({"a": True, "b": False}), label({"a": False, "b": True})
            tx = optax.chain(optax.masked(optax.set_to_zero(), others), optax.masked(mixed, mine))
        updates, opt_state = jax.jit(lambda s, p: tx.update(grads_like(p), s, p))(tx.init(params32), params)
        new = optax.apply_updates(params, updates)
        return new, jaxmp.get_master_params(opt_state, new)

    whole = step(lambda label, subtree: jax.tree.map(lambda _: label, subtree))
    assert_same_program(step(lambda label, subtree: label), whole)
    assert_exact(whole[0]["b"], params["b"])
    assert not np.array_equal(whole[1]["a"]["w"], params32["a"]["w"])


@pytest.mark.thorough(0)
@pytest.mark.parametrize("remainder_bits", [None, 8])
def test_a_step_keeps_its_dtypes_where_64_bits_are_on(remainder_bits):
    """`jax_enable_x64` changes the dtype of what is made without one; the step is in float32."""

    def trained():
        tx = jaxmp.mixed_precision(optax.adam(0.1), "bf16", remainder_bits=remainder_bits)
        params32 = {"w": jnp.linspace(-1.0, 1.0, 8, dtype=jnp.float32)}
        params, state = jaxmp.get_policy("bf16").cast_to_param(params32), tx.init(params32)

        @jax.jit
        def step(params, state):
            loss_fn = lambda p, x: jnp.mean((p["w"].astype(jnp.float32)[None] - x) ** 2)  # noqa: E731
            loss, grads = jaxmp.value_and_grad(loss_fn, accumulate=2)(
                params, jnp.ones((2, 8), jnp.float32), opt_state=state
            )
            return loss, *jaxmp.apply_gradients(tx, grads, state, params)

        return step(params, state)

    def floats(tree):
        return [x for x in jax.tree.leaves(jax.device_get(tree)) if jnp.issubdtype(x.dtype, jnp.floating)]

    with jax.enable_x64(True):
        with_64_bits = floats(trained())
    assert_close(
        with_64_bits, floats(trained()), rtol=2e-6, atol=1e-5
    )  # optax corrects the bias of Adam in float64 there


# params that were loaded in 16 bits


HALF = {"w": jnp.full((2, 3), 1.001, jnp.bfloat16), "norm": jnp.ones(3, jnp.bfloat16)}
FROM_16_BITS = {
    "masters": (lambda: jaxmp.mixed_precision(optax.sgd(1.0), "bf16"), HALF, 2),
    "one leaf": (lambda: jaxmp.mixed_precision(optax.sgd(1.0), "bf16"), HALF | {"norm": jnp.ones(3)}, 1),
    "split masters": (lambda: jaxmp.mixed_precision(optax.sgd(1.0), "bf16", remainder_bits=16), HALF, 2),
    "masters alone": (lambda: jaxmp.keep_master_params(optax.sgd(1.0), "bf16"), HALF, 2),
    "another dtype": (lambda: jaxmp.mixed_precision(optax.sgd(1.0), "fp16"), HALF, 2),
    "frozen": (
        lambda: jaxmp.mixed_precision(
            optax.multi_transform({"a": optax.sgd(1.0), "b": optax.set_to_zero()}, {"w": "a", "norm": "b"}), "bf16"
        ),
        HALF,
        1,
    ),
}


@pytest.mark.parametrize("name", FROM_16_BITS)
def test_masters_that_start_from_16_bits_are_warned_of(name):
    make, params, count = FROM_16_BITS[name]
    init = jax.jit(make().init) if name == "masters" else make().init
    with pytest.warns(
        UserWarning, match=rf"from float32 params; got {count} in 16 bits, the first at (w|norm)"
    ) as caught:
        state = init(params)
    assert len(caught) == 1 and 'get_policy("fp32").cast_to_param(params)' in str(caught[0].message)
    of_float32 = init(cast(params, "fp32"))  # no warning, which would be an error
    assert_exact(of_float32.master_params, state.master_params)


def test_params_that_need_no_master_may_have_16_bits():
    jaxmp.mixed_precision(optax.sgd(1.0), "bf16").init({"w": jnp.ones(2)})
    jaxmp.mixed_precision(optax.sgd(1.0), "bf16-mixed").init({"w": jnp.ones(2)})
    frozen = optax.multi_transform({"a": optax.sgd(1.0), "b": optax.set_to_zero()}, {"w": "a", "norm": "b"})
    jaxmp.mixed_precision(frozen, "bf16").init({"w": jnp.ones(2), "norm": HALF["norm"]})
    jaxmp.unscale_and_skip(optax.sgd(1.0)).init(HALF)
