"""A job's params and state as another optimizer keeps them: nothing is lost, and what does not fit is named."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from fp8_model import model_params
from helpers import assert_exact, assert_moved, assert_within_ulps
from jaxmp import reload_master_params
from jaxmp._src.base import tree_paths
from jaxmp._src.step import state as states
from jaxmp.checkpoint import convert

INNER = optax.adamw(1e-2, eps=1e-3)
RECIPE = jaxmp.fp8.DelayedScaling(amax_history_len=4)
PARAMS = model_params()
PLAIN = {name: {k: x for k, x in layer.items() if "fp8" not in k} for name, layer in PARAMS.items()}
WEIGHTS = [("a", "w"), ("b", "w"), ("ln", "scale")]


class Kind:
    """A way to keep a job: policy, optimizer and the params it starts from."""

    def __init__(self, policy, *, fp8=False, **kwargs):
        self.policy, self.params32 = jaxmp.get_policy(policy), PARAMS if fp8 else PLAIN
        self.tx = jaxmp.mixed_precision(INNER, self.policy, recipe=RECIPE if fp8 else None, **kwargs)

    def start(self):
        return self.policy.cast_to_param(self.params32), self.tx.init(self.params32)


KINDS = {
    "fp32": Kind("fp32"),
    "fp16": Kind("fp16"),
    "bf16": Kind("bf16"),
    "split16": Kind("bf16", remainder_bits=16),
    "split8": Kind("bf16", remainder_bits=8),
    "fp8": Kind("fp32", fp8=True),
    "fp16+fp8": Kind("fp16", fp8=True),
}
SCALING = ("fp16", "fp16+fp8")
BY_DEFAULT = ["fp16+fp8-split16", "split16-bf16", "bf16-fp16"]
OTHERS = ["fp16-fp16+fp8", "fp32-split8", "split8-fp16", "split16-split8", "fp32-fp8", "fp8-fp16+fp8", "fp16+fp8-fp16"]


@functools.cache
def job(name):
    """(params, opt_state) after three steps, of which the second overflowed."""
    kind, rng = KINDS[name], np.random.default_rng(0)
    params, opt_state = jax.jit(kind.start)()
    step = jax.jit(lambda params, opt_state, grads: jaxmp.apply_gradients(kind.tx, grads, opt_state, params))
    for factor in (1.0, np.inf, 1.0):
        grads = jax.tree.map(lambda p, f=factor: np.float32(rng.normal(size=p.shape)) * np.float32(f), params)
        grads = jaxmp._src.fp8.scale_leaves.map_scales(lambda _, g: np.abs(g) + np.float32(1), grads)
        params, opt_state = step(params, opt_state, grads)
    return params, opt_state


def quietly(source, target):
    """convert, with the one warning that these kinds ask for."""
    params, opt_state = job(source)
    kind = KINDS[target]
    arguments = {"to": kind.tx, "policy": kind.policy, "like": kind.params32}
    if target in SCALING and source not in SCALING:
        with pytest.warns(UserWarning, match="no loss scale of this kind"):
            return convert(opt_state, params, **arguments)
    return convert(opt_state, params, **arguments)


def inner_leaves(opt_state):
    """Moments and counts, by path."""
    return tree_paths.leaves_by_path(states.map_steps(lambda step: step.optimizer_state, opt_state))


@pytest.mark.thorough(2)
@pytest.mark.parametrize("pair", [*BY_DEFAULT, *(pytest.param(x, marks=pytest.mark.thorough(0)) for x in OTHERS)])
def test_masters_moments_and_counts_go_along_bit_for_bit(pair):
    source, target = pair.split("-")
    (params, opt_state), kind = job(source), KINDS[target]
    new_params, new_state = quietly(source, target)
    fresh_params, fresh = jax.jit(kind.start)()
    assert jax.tree.map(jax.typeof, new_state) == jax.tree.map(jax.typeof, fresh)
    assert jax.tree.map(jax.typeof, new_params) == jax.tree.map(jax.typeof, fresh_params)
    before, after = (jaxmp.get_master_params(*x) for x in ((opt_state, params), (new_state, new_params)))
    for layer, name in WEIGHTS:
        if target != "split8":  # which keeps 24 bits
            assert_exact(after[layer][name], before[layer][name])
        np.testing.assert_allclose(after[layer][name], before[layer][name], rtol=2.0**-16)
        if "split8" not in pair:  # no midway point among the others
            rounded = jaxmp.casting.saturating_cast(before[layer][name], new_params[layer][name].dtype)
            assert_exact(new_params[layer][name], rounded)
    assert_moved(inner_leaves(new_state), inner_leaves(opt_state))
    assert int(optax.tree.get(new_state, "count")) == 2 and int(new_state.skipped_steps) == 1
    assert_exact(new_state.scaling, (opt_state if {source, target} <= {*SCALING} else fresh).scaling)


@pytest.mark.parametrize("name", ["fp16", "split16", pytest.param("fp16+fp8", marks=pytest.mark.thorough(0))])
def test_the_same_optimizer_gets_the_same_bits(name):
    params, opt_state = job(name)
    kind = KINDS[name]
    assert_moved(convert(opt_state, params, to=kind.tx, policy=kind.policy), (params, opt_state))


@pytest.mark.thorough(0)
def test_the_next_step_is_that_of_the_inner_optimizer():
    params, opt_state = job("bf16")
    masters = jaxmp.get_master_params(opt_state, params)
    grads = jax.tree.map(np.ones_like, masters)
    new_params, new_state = quietly("bf16", "fp32")
    updates, _ = jax.jit(KINDS["fp32"].tx.update)(grads, new_state, new_params)
    expected, _ = jax.jit(INNER.update)(grads, opt_state.optimizer_state, masters)
    assert_within_ulps(updates, expected, 4)  # of AdamW, compiled in other parts


def test_masters_midway_between_params_are_kept_exactly_when_split():
    midway = jnp.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 0.0, -0.0], jnp.float32)
    source, target = (jaxmp.mixed_precision(optax.sgd(0.1), "bf16", **k) for k in ({}, {"remainder_bits": 16}))
    params = jaxmp.get_policy("bf16").cast_to_param({"w": midway})
    new_params, new_state = convert(source.init({"w": midway}), params, to=target, policy="bf16")
    assert_exact(jaxmp.get_master_params(new_state, new_params), {"w": midway})


def test_boxes_and_a_place_in_a_chain_go_along():
    params32 = {"w": nn.Partitioned(jnp.full((2, 2), 1.001), ("x", None))}
    source, target = (
        optax.chain(optax.identity(), jaxmp.mixed_precision(optax.adam(1e-3), policy, remainder_bits=bits))
        for policy, bits in (("bf16", 16), ("fp32", None))
    )
    opt_state, params = source.init(params32), jaxmp.get_policy("bf16").cast_to_param(params32)
    params, opt_state = convert(opt_state, params, to=target, policy="fp32")
    assert_exact(params, params32)
    assert_exact(opt_state, target.init(params32))
    alone = jaxmp.mixed_precision(optax.adam(1e-3), "fp32")
    with pytest.raises(ValueError, match="0/count in opt_state is missing in the old job"):  # not at its place
        convert(opt_state, params, to=alone, policy="fp32")


def test_back_to_plain_optax_and_from_it():
    params, opt_state = job("fp16")
    params32, plain = convert(opt_state, params, to=INNER, policy="fp32")
    assert_exact(params32, jaxmp.get_master_params(opt_state, params))
    assert jax.tree.map(jax.typeof, plain) == jax.tree.map(jax.typeof, INNER.init(PLAIN))
    assert_moved(inner_leaves(plain), inner_leaves(opt_state))
    back_params, back = convert(plain, params32, to=KINDS["bf16"].tx, policy="bf16")
    assert_exact(jaxmp.get_master_params(back, back_params), params32)
    assert_moved(inner_leaves(back), inner_leaves(opt_state))


def test_states_beside_mixed_precision_and_two_of_them_go_along():
    def tx(policy):
        inner = [jaxmp.mixed_precision(optax.adam(1e-3), policy, loss_scale=None) for _ in range(2)]
        two = optax.multi_transform(dict(zip("ab", inner, strict=True)), {"w": "a", "v": "b"})
        return optax.chain(optax.scale_by_schedule(lambda count: 1.0), two)

    def changed(x):
        count = x + 1 if x.dtype == np.int32 else x
        return jnp.asarray(np.arange(x.size) + 0.5 if x.shape else count, x.dtype)

    params32 = {"w": jnp.full(3, 1.001), "v": jnp.full(2, 2.002)}
    params = jaxmp.get_policy("bf16").cast_to_param(params32)
    opt_state = jax.tree.map(changed, jax.device_get(jax.jit(tx("bf16").init)(params32)))
    new_params, new_state = convert(opt_state, params, to=tx("fp32"), policy="fp32")
    for name in ("mu", "nu", "count"):
        assert_moved(*([x for _, x in optax.tree.get_all_with_path(state, name)] for state in (new_state, opt_state)))
    assert_exact(new_params, jax.tree.map(lambda x: np.arange(x.size, dtype=np.float32) + np.float32(0.5), params32))
    one = optax.chain(optax.scale_by_schedule(lambda count: 1.0), jaxmp.mixed_precision(optax.adam(1e-3), "fp32"))
    with pytest.raises(ValueError, match="as many mixed_precision; got 2 and 1"):
        convert(opt_state, params, to=one, policy="fp32")


# Loss scales


def scaled(loss_scale):
    return jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=loss_scale)


adjusted = jax.jit(lambda scaling, finite: scaling.adjust(finite))
FELL = adjusted(jaxmp.DynamicLossScale(2.0, hysteresis=1), False)
W16 = {"w": np.ones(2, np.float16)}


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (jaxmp.DynamicLossScale(4.0), jaxmp.DynamicLossScale(8.0), (4.0, 0, 2)),
        (adjusted(jaxmp.DynamicLossScale(4.0), True), jaxmp.DynamicLossScale(8.0), (4.0, 1, 2)),
        (adjusted(jaxmp.DynamicLossScale(8.0, hysteresis=1), False), jaxmp.DynamicLossScale(8.0), (4.0, 0, 0)),
        (FELL, jaxmp.DynamicLossScale(8.0), (1.0, 0, 0)),
        (jaxmp.DynamicLossScale(4.0), 8.0, (8.0, 0, 0)),
        (4.0, jaxmp.DynamicLossScale(8.0), (4.0, 0, 0)),
    ],
    ids=["both-move", "counts", "just-fallen", "fell-to-the-floor", "static-is-told", "static-goes-on-moving"],
)
def test_a_loss_scale_is_kept_where_both_have_one(source, target, expected):
    old = scaled(source).init(W16)
    if source is FELL:
        old = old._replace(skipped=jnp.ones((), bool))
    _, opt_state = convert(old, W16, to=scaled(target), policy="fp16")
    scaling = opt_state.scaling
    assert (float(scaling.loss_scale), int(scaling.growth_count), int(scaling.hysteresis_left)) == expected


def test_a_loss_scale_that_no_step_can_use_starts_anew():
    broken = jaxmp.mixed_precision(optax.sgd(0.1), "fp16").init(W16)
    broken = broken._replace(scaling=broken.scaling._replace(loss_scale=jnp.float32(jnp.inf)))
    with pytest.warns(UserWarning, match="positive and finite; the scale starts from 8.0"):
        _, opt_state = convert(broken, W16, to=scaled(jaxmp.DynamicLossScale(8.0)), policy="fp16")
    assert float(opt_state.scaling.loss_scale) == 8.0


class Halving:
    """A user's own loss scale, with jmp's protocol."""

    def __init__(self, loss_scale, seen):
        self.loss_scale, self.seen = loss_scale, seen

    def scale(self, tree):
        return jax.tree.map(lambda x: x * self.loss_scale, tree)

    def unscale(self, tree):
        return jax.tree.map(lambda x: x / self.loss_scale, tree)

    def adjust(self, grads_finite):
        return Halving(jnp.where(grads_finite, self.loss_scale, self.loss_scale / 2), self.seen + 1)


jax.tree_util.register_pytree_node(Halving, lambda h: ((h.loss_scale, h.seen), None), lambda _, parts: Halving(*parts))


def test_a_loss_scale_of_a_class_of_ones_own():
    tx = scaled(Halving(jnp.float32(8.0), jnp.int32(0)))
    _, old = jax.jit(tx.update)(W16, tx.init(W16), W16)
    _, opt_state = convert(old, W16, to=tx, policy="fp16")
    assert_moved(opt_state, old)
    assert int(opt_state.scaling.scaler_leaves[1]) == 1
    for other in (scaled(4.0), scaled(jaxmp.DynamicLossScale())):
        with pytest.warns(UserWarning, match="no loss scale of this kind .* scale starts from 8.0"):
            _, opt_state = convert(other.init(W16), W16, to=tx, policy="fp16")
        assert_exact(opt_state.scaling, tx.init(W16).scaling)
    with pytest.warns(UserWarning, match="no loss scale of this kind .* scale starts from 65536.0"):
        convert(old, W16, to=scaled(jaxmp.DynamicLossScale()), policy="fp16")


# fp8


def histories(opt_state):
    return [x.amax_history for x in optax.tree.get(opt_state, "amax_states")]


def test_scales_are_kept_by_layer_and_histories_with_the_same_layers():
    params, opt_state = job("fp16+fp8")
    only_b = PARAMS | {"a": PLAIN["a"]}
    tx = jaxmp.mixed_precision(INNER, "bf16", recipe=RECIPE)
    with pytest.warns(UserWarning, match="amax histories start again"):
        new_params, new_state = convert(opt_state, params, to=tx, policy="bf16", like=only_b)
    leaf = "fp8_grad_e5m2_log2_scale"
    assert_exact(new_params["b"][leaf], params["b"][leaf])
    assert float(params["b"][leaf]) != 0 and leaf not in new_params["a"]
    assert not any(x.any() for x in histories(new_state))
    with pytest.warns(UserWarning, match="amax histories start again"):
        new_params, new_state = convert(new_state, new_params, to=KINDS["fp8"].tx, policy="fp32", like=PARAMS)
    assert_exact(new_params["b"][leaf], params["b"][leaf])
    assert float(new_params["a"][leaf]) == 0.0  # as in a new model
    new_params, new_state = convert(opt_state, params, to=KINDS["fp8"].tx, policy="fp32")
    assert_moved(histories(new_state), histories(opt_state))
    described = jax.eval_shape(lambda: PARAMS)
    plain = convert(*job("bf16")[::-1], to=KINDS["fp8"].tx, policy="fp32", like=described)
    assert float(plain[0]["a"][leaf]) == 0.0


def test_histories_do_not_go_to_other_layers_of_the_same_number():
    params, opt_state = job("fp16+fp8")
    names = {k for k in PARAMS["a"] if "fp8" in k}
    moved = PARAMS | {"a": PLAIN["a"], "ln": PARAMS["ln"] | {k: PARAMS["a"][k] for k in names}}
    with pytest.warns(UserWarning, match="amax histories start again"):
        _, new_state = convert(opt_state, params, to=KINDS["fp8"].tx, policy="fp32", like=moved)
    assert [x.shape for x in histories(new_state)] == [x.shape for x in histories(opt_state)]
    assert not any(x.any() for x in histories(new_state))


def test_histories_of_several_recipes_go_along_where_the_layers_are_the_same():
    recipes = {"a*": jaxmp.fp8.DelayedScaling(amax_history_len=3), "*": RECIPE}
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp32", recipe=recipes)
    opt_state = tx.init(PARAMS)
    number = iter(range(1, 99))
    opt_state = tree_paths.map_with_path(
        lambda path, x: jnp.full_like(x, next(number)).at[0].set(0.0) if path.endswith("amax_history") else x, opt_state
    )
    assert_moved(convert(opt_state, PARAMS, to=tx, policy="fp32"), (PARAMS, opt_state))
    one = jaxmp.mixed_precision(optax.sgd(0.1), "fp32", recipe=RECIPE)
    with pytest.warns(UserWarning, match="amax histories start again"):
        params, moved = convert(opt_state, PARAMS, to=one, policy="fp32")
    assert not any(x.any() for x in histories(moved))
    assert_moved(params, PARAMS)


# Shardings


def test_what_is_converted_lies_where_it_lay():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    split, everywhere = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P())
    place = lambda tree: jax.tree.map(  # noqa: E731
        lambda x: jax.device_put(x, split if x.shape == (16, 16) else everywhere), tree
    )
    params, opt_state = place(job("bf16")[0]), place(job("bf16")[1])
    new_params, new_state = convert(opt_state, params, to=KINDS["split16"].tx, policy="bf16")
    for tree in (new_params, optax.tree.get(new_state, "master_params"), optax.tree.get(new_state, "mu")):
        (kernel,) = jax.tree.leaves(tree["a"]["w"])
        assert kernel.sharding.is_equivalent_to(split, 2)
    assert_moved(jax.tree.map(np.asarray, new_state), jax.tree.map(np.asarray, quietly("bf16", "split16")[1]))


# Masters from params


@pytest.mark.parametrize("name", ["split16", pytest.param("fp16+fp8", marks=pytest.mark.thorough(0))])
def test_masters_are_reloaded_from_params(name):
    params, opt_state = job(name)
    loaded = jax.tree.map(lambda p: jnp.asarray(np.asarray(p) * p.dtype.type(2)), params)
    new = reload_master_params(opt_state, loaded)
    masters = jaxmp.get_master_params(new, loaded)
    for layer, weight in WEIGHTS:
        assert_exact(masters[layer][weight], loaded[layer][weight].astype(jnp.float32))
    assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, opt_state)
    assert_moved(inner_leaves(new), inner_leaves(opt_state))
    assert_moved(new.scaling, opt_state.scaling)


def test_masters_are_reloaded_in_full_from_float32():
    full = jax.tree.map(lambda x: jnp.asarray(x * np.float32(1.001)), PLAIN)
    masters = optax.tree.get(reload_master_params(job("bf16")[1], full), "master_params")
    assert_moved(masters, full)
    full["a"]["w"].delete()  # a donated buffer is gone: the masters have their own
    assert np.isfinite(masters["a"]["w"]).all()


def test_reloading_without_masters_is_an_error():
    """What is no such params is in test_reload_masters.py."""
    with pytest.raises(ValueError, match="must keep masters; got none"):
        reload_master_params(optax.sgd(0.1).init(PLAIN), PLAIN)


# What does not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"c": {"w": t["a"]["w"]}}, r"c/w in params is missing in the old job and \(16, 16\)"),
        (lambda t: {"a": t["a"]}, r"b/w in params is \(16, 16\) in the old job and missing"),
        (lambda t: t | {"b": {"w": jnp.ones((4, 4))}}, r"b/w in params is \(16, 16\) in the old job and \(4, 4\)"),
    ],
    ids=["more", "less", "shape"],
)
def test_another_model_is_an_error_that_names_the_leaf(change, message):
    params, opt_state = job("bf16")
    with pytest.raises(ValueError, match=message):
        convert(opt_state, params, to=KINDS["fp32"].tx, policy="fp32", like=change(PLAIN))


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (optax.sgd(0.1, momentum=0.9), "the same model and inner optimizer.*; 0/trace/a/w in opt_state is missing"),
        (optax.sgd(0.1), r"0/count in opt_state is \(\) in the old job and missing"),
        (jaxmp.compress_moments(INNER, jnp.int8), "compress_count in opt_state is missing"),
    ],
    ids=["momentum", "sgd", "compressed"],
)
def test_another_optimizer_is_an_error_that_names_the_leaf(inner, message):
    params, opt_state = job("bf16")
    with pytest.raises(ValueError, match=message):
        convert(opt_state, params, to=jaxmp.mixed_precision(inner, "fp32"), policy="fp32")


def test_moments_go_along_in_the_dtype_of_the_new_optimizer():
    params, opt_state = job("bf16")
    tx = jaxmp.mixed_precision(optax.adamw(1e-2, eps=1e-3, mu_dtype=jnp.bfloat16), "bf16")
    _, new_state = convert(opt_state, params, to=tx, policy="bf16")
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), optax.tree.get(opt_state, "mu"))
    assert_exact(optax.tree.get(new_state, "mu"), rounded)


def test_codes_are_not_taken_for_numbers():
    big = {"w": np.ones((1, 256), np.float32)}
    codes, floats = (
        jaxmp.mixed_precision(jaxmp.fused_adamw(1e-2, state_dtype=d), "fp32") for d in (jnp.int8, jnp.float32)
    )
    with pytest.raises(ValueError, match="0/count in opt_state is missing in the old job"):
        convert(jax.jit(codes.init)(big), big, to=floats, policy="fp32")


def test_split_masters_need_the_params_of_their_step():
    _, opt_state = job("split16")
    with pytest.raises(ValueError, match="must get its bfloat16 param; got float32"):
        convert(opt_state, PLAIN, to=KINDS["fp32"].tx, policy="fp32")


def test_what_was_converted_shares_no_buffer_with_what_it_came_from():
    params, opt_state = (jax.tree.map(jnp.copy, x) for x in job("fp32"))
    new = convert(opt_state, params, to=KINDS["fp32"].tx, policy="fp32")
    jax.tree.map(lambda x: x.delete(), (params, opt_state))
    with warnings.catch_warnings(action="error"):
        assert_moved(new, job("fp32"))
