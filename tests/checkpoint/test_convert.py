"""A job's params and state as another optimizer keeps them: nothing is lost, and what does not fit is named."""

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
from jaxmp._src.base import tree_paths
from jaxmp._src.checkpoint import job_leaves
from jaxmp.checkpoint import convert, reload_master_params

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
SAMPLE = ["fp16-fp16+fp8", "fp16+fp8-split16", "split16-bf16", "bf16-fp16"]
BITS = ["fp16", "split16", "fp16+fp8"]
EVERY = [f"{a}-{b}" for a in KINDS for b in KINDS]
_JOBS = {}


def job(name):
    """(params, opt_state) after three steps, of which the second overflowed."""
    if name not in _JOBS:
        params, opt_state = KINDS[name].start()
        rng = np.random.default_rng(0)

        @jax.jit
        def step(params, opt_state, grads):
            return jaxmp.apply_gradients(KINDS[name].tx, grads, opt_state, params)

        for factor in (1.0, np.inf, 1.0):
            grads = jax.tree.map(lambda p, f=factor: np.float32(rng.normal(size=p.shape)) * np.float32(f), params)
            grads = jaxmp._src.fp8.scale_leaves.map_scales(lambda _, g: np.abs(g) + np.float32(1), grads)
            params, opt_state = step(params, opt_state, grads)
        _JOBS[name] = params, opt_state
    return _JOBS[name]


def quietly(source, target, **kwargs):
    """convert, with the one warning that these kinds ask for."""
    params, opt_state = job(source)
    kind = KINDS[target]
    arguments = {"to": kind.tx, "policy": kind.policy, "like": kind.params32} | kwargs
    if target in SCALING and source not in SCALING:
        with pytest.warns(UserWarning, match="no loss scale of the kind"):
            return convert(opt_state, params, **arguments)
    return convert(opt_state, params, **arguments)


def inner_leaves(opt_state):
    """Moments and counts, by path."""
    leaves = job_leaves.inner_leaves(job_leaves.of_trees(PARAMS, opt_state, "").state)
    return {str(path): x for path, x in leaves.items()}


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    "pair", [pytest.param(x, marks=() if x in SAMPLE else pytest.mark.thorough(0), id=x) for x in EVERY]
)
def test_masters_moments_and_counts_go_along_bit_for_bit(pair):
    source, target = pair.split("-")
    (params, opt_state), kind = job(source), KINDS[target]
    new_params, new_state = quietly(source, target)
    fresh_params, fresh = kind.start()
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
    kept = target in SCALING and source in SCALING
    assert_exact(new_state.scaling, opt_state.scaling if kept else fresh.scaling)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in BITS else pytest.mark.thorough(0)) for x in KINDS])
def test_the_same_optimizer_gets_the_same_bits(name):
    params, opt_state = job(name)
    kind = KINDS[name]
    assert_moved(convert(opt_state, params, to=kind.tx, policy=kind.policy), (params, opt_state))


@pytest.mark.thorough(0)
def test_the_next_step_is_that_of_the_inner_optimizer():
    params, opt_state = job("bf16")
    masters, inner = jaxmp.get_master_params(opt_state, params), opt_state.optimizer_state
    grads = jax.tree.map(jnp.ones_like, masters)
    updates, _ = INNER.update(grads, inner, masters)
    new_params, new_state = quietly("bf16", "fp32")
    got, _ = KINDS["fp32"].tx.update(grads, new_state, new_params)
    assert_within_ulps(got, updates, 4)  # of AdamW, compiled in other parts


def test_masters_midway_between_params_are_kept_exactly_when_split():
    midway = jnp.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 0.0, -0.0], jnp.float32)
    source, target = (jaxmp.mixed_precision(optax.sgd(0.1), "bf16", **k) for k in ({}, {"remainder_bits": 16}))
    params = jaxmp.get_policy("bf16").cast_to_param({"w": midway})
    new_params, new_state = convert(source.init({"w": midway}), params, to=target, policy="bf16")
    assert_exact(jaxmp.get_master_params(new_state, new_params), {"w": midway})


def test_a_state_of_plain_optax_is_taken_as_wrap_state_takes_it():
    params16 = jaxmp.get_policy("bf16").cast_to_param(PLAIN)
    old = INNER.init(params16)  # moments in bfloat16
    old = jax.tree.map(lambda x: x + 1, old)
    params, opt_state = convert(old, params16, to=KINDS["bf16"].tx, policy="bf16")
    assert_exact(opt_state, jaxmp.wrap_state(KINDS["bf16"].tx, old, params16))
    assert_moved(params, params16)


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
    assert_exact(convert(opt_state, params, to=alone, policy="fp32")[1], alone.init(params32))


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
    got = opt_state.scaling
    assert (float(got.loss_scale), int(got.growth_count), int(got.hysteresis_left)) == expected


def test_a_loss_scale_that_no_step_can_use_starts_anew():
    broken = jaxmp.mixed_precision(optax.sgd(0.1), "fp16").init(W16)
    broken = broken._replace(scaling=broken.scaling._replace(loss_scale=jnp.float32(jnp.inf)))
    with pytest.warns(UserWarning, match="positive and finite; the state to convert has inf. It starts again from 8.0"):
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
        with pytest.warns(UserWarning, match="no loss scale of the kind .* scale starts from 8.0"):
            _, opt_state = convert(other.init(W16), W16, to=tx, policy="fp16")
        assert_exact(opt_state.scaling, tx.init(W16).scaling)
    with pytest.warns(UserWarning, match="no loss scale of the kind .* scale starts from 65536.0"):
        convert(old, W16, to=scaled(jaxmp.DynamicLossScale()), policy="fp16")


# fp8


def group_columns(params, opt_state):
    """{path of a scale leaf: its history}"""
    leaves = tree_paths.leaves_by_path(params)
    histories = jaxmp._src.checkpoint.fp8_history.of(job_leaves.of_trees(params, opt_state, ""))
    return {
        path: histories[jaxmp._src.checkpoint.fp8_history.key_of(path)] for path in leaves if jaxmp.fp8.is_scale(path)
    }


def test_scales_and_histories_go_along_by_layer():
    params, opt_state = job("fp16+fp8")
    only_b = PARAMS | {"a": PLAIN["a"]}
    longer = jaxmp.fp8.DelayedScaling(amax_history_len=6)
    tx = jaxmp.mixed_precision(INNER, "bf16", recipe=longer)
    new_params, new_state = convert(opt_state, params, to=tx, policy="bf16", like=only_b)
    before, after = group_columns(params, opt_state), group_columns(new_params, new_state)
    assert list(after) == [path for path in before if path.startswith("b/")]
    for path, history in after.items():
        assert_moved(history[-3:], before[path][-3:])
        assert not history[:-3].any()
    leaf = "fp8_grad_e5m2_log2_scale"
    assert_exact(new_params["b"][leaf], params["b"][leaf])
    assert float(params["b"][leaf]) != 0
    new_params, new_state = convert(new_state, new_params, to=KINDS["fp8"].tx, policy="fp32", like=PARAMS)
    assert_exact(new_params["b"][leaf], params["b"][leaf])
    assert float(new_params["a"][leaf]) == 0.0  # as in a new model
    assert [x.scale.shape for x in optax.tree.get(new_state, "amax_states")] == [(2,), (4,)]


@pytest.mark.thorough(0)
def test_a_scale_of_another_format_is_made_of_its_amaxes():
    params, opt_state = job("fp16+fp8")
    recipe = jaxmp.fp8.DelayedScaling(amax_history_len=4, fp8_format="E4M3", power_of_two=False)
    rename = {"fp8_lhs_e4m3_log2_scale": "fp8_lhs_e4m3_scale", "fp8_rhs_e4m3_log2_scale": "fp8_rhs_e4m3_scale",
              "fp8_grad_e5m2_log2_scale": "fp8_grad_e4m3_scale"}  # fmt: skip
    like = {name: {rename.get(k, k): x for k, x in layer.items()} for name, layer in PARAMS.items()}
    tx = jaxmp.mixed_precision(INNER, "fp16", recipe=recipe)
    new_params, new_state = convert(opt_state, params, to=tx, policy="fp16", like=like)
    largest = float(jnp.max(group_columns(params, opt_state)["a/fp8_grad_e5m2_log2_scale"]))
    assert float(new_params["a"]["fp8_grad_e4m3_scale"]) == pytest.approx(448 / largest, rel=1e-6)
    assert jax.tree.map(jax.typeof, new_state) == jax.tree.map(jax.typeof, tx.init(like))


def test_histories_of_several_recipes_go_along_where_the_layers_are_the_same():
    recipes = {"a*": jaxmp.fp8.DelayedScaling(amax_history_len=3), "*": RECIPE}
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp32", recipe=recipes)
    opt_state = tx.init(PARAMS)
    number = iter(range(1, 99))
    opt_state = tree_paths.map_with_path(
        lambda path, x: jnp.full_like(x, next(number)).at[0].set(0.0) if path.endswith("amax_history") else x, opt_state
    )
    assert_moved(convert(opt_state, PARAMS, to=tx, policy="fp32"), (PARAMS, opt_state))
    with pytest.warns(UserWarning, match="these jobs differ. The histories start again"):
        one = jaxmp.mixed_precision(optax.sgd(0.1), "fp32", recipe=RECIPE)
        params, moved = convert(opt_state, PARAMS, to=one, policy="fp32")
    assert not any(group.amax_history.any() for group in optax.tree.get(moved, "amax_states"))
    assert_moved(params, PARAMS)


def dense(kernel, *, scales=True):
    leaves = {"fp8_lhs_e4m3_log2_scale": 0.0, "fp8_rhs_e4m3_log2_scale": 0.0, "fp8_grad_e5m2_log2_scale": 0.0}
    return {"kernel": kernel} | ({"op": jax.tree.map(jnp.float32, leaves)} if scales else {})


def test_kernels_stored_in_fp8_come_from_masters_and_go_back():
    kernel = jnp.asarray(np.random.default_rng(1).normal(size=(16, 16)), jnp.float32)
    stored = jaxmp.get_policy("bf16", fp8_weights=True)
    to_stored = jaxmp.mixed_precision(optax.adam(1e-3), stored, recipe=RECIPE)
    plain = jaxmp.mixed_precision(optax.adam(1e-3), "bf16")
    params32 = dense(kernel)
    opt_state, params = plain.init({"kernel": kernel}), jaxmp.get_policy("bf16").cast_to_param({"kernel": kernel})
    new_params, new_state = convert(opt_state, params, to=to_stored, policy=stored, like=params32)
    assert_exact(new_params, stored.cast_to_param(params32))
    assert new_params["kernel"].dtype == jnp.float8_e4m3fn
    moved_in = ("master_params", "rounding_count", "fp8_scales", "optimizer_state")
    fresh = to_stored.init(params32)
    assert_exact(new_state, fresh._replace(**{name: getattr(new_state, name) for name in moved_in}))
    assert_moved(jaxmp.get_master_params(new_state, new_params)["kernel"], kernel)
    (group,) = [x for x in optax.tree.get(new_state, "amax_states") if x.scale.shape == (2,)]
    assert float(group.scale[1]) == 2.0 ** float(new_params["op"]["fp8_rhs_e4m3_log2_scale"]) > 1
    fresh = stored.cast_to_param(params32), to_stored.init(params32)  # whose state does not know the kernel's scale yet
    assert_moved(convert(fresh[1], fresh[0], to=to_stored, policy=stored), fresh)
    back_params, back_state = convert(new_state, new_params, to=plain, policy="bf16", like={"kernel": kernel})
    assert_exact((back_params, back_state), (params, opt_state))


# Shardings


def test_masters_and_moments_lie_where_their_params_are_to_lie():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    split, everywhere = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P())
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split if x.shape == (16, 16) else everywhere), PLAIN
    )
    params, opt_state = quietly("bf16", "fp16", like=like)
    _, fp32_state = quietly("bf16", "fp32", like=like)
    for tree in (params, optax.tree.get(opt_state, "master_params"), optax.tree.get(opt_state, "mu")):
        assert tree["a"]["w"].sharding == split and tree["ln"]["scale"].sharding == everywhere
    assert all(x.sharding in (split, everywhere) for x in jax.tree.leaves((opt_state, fp32_state)))
    assert_exact(jax.tree.map(np.asarray, params), jax.tree.map(np.asarray, quietly("bf16", "fp16")[0]))


# Masters from params


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["fp16", "split16", "fp16+fp8"])
def test_masters_are_reloaded_from_params(name):
    params, opt_state = job(name)
    loaded = jax.tree.map(lambda p: p * 2, params)
    new = reload_master_params(opt_state, loaded)
    for layer, weight in WEIGHTS:
        got = jaxmp.get_master_params(new, loaded)[layer][weight]
        assert_exact(got, loaded[layer][weight].astype(jnp.float32))
    assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, opt_state)
    assert_moved(inner_leaves(new), inner_leaves(opt_state))
    assert_moved(new.scaling, opt_state.scaling)


def test_masters_are_reloaded_in_full_from_float32():
    _, opt_state = job("bf16")
    full = jax.tree.map(lambda x: jnp.asarray(x) * np.float32(1.001), PLAIN)
    new = reload_master_params(opt_state, full)
    assert_moved(optax.tree.get(new, "master_params"), full)
    full["a"]["w"].delete()  # a donated buffer is gone: the masters have their own
    assert bool(jnp.isfinite(optax.tree.get(new, "master_params")["a"]["w"]).all())


def test_reloading_what_does_not_fit_is_an_error():
    _, opt_state = job("bf16")
    with pytest.raises(ValueError, match="b/w is missing. There are a/w"):
        reload_master_params(opt_state, {"a": PLAIN["a"], "ln": PLAIN["ln"]})
    with pytest.raises(ValueError, match=r"shapes of the old ones; got \(3,\) at a/w, expected \(16, 16\)"):
        reload_master_params(opt_state, PLAIN | {"a": {"w": jnp.ones(3)}})
    with pytest.raises(ValueError, match="got a state without masters"):
        reload_master_params(optax.sgd(0.1).init(PLAIN), PLAIN)


# What does not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"c": {"w": t["a"]["w"]}}, "c/w is in the model and not in the state to convert"),
        (lambda t: {"a": t["a"]}, "b/w is in the state to convert and not in the model"),
        (lambda t: t | {"b": {"w": jnp.ones((4, 4))}}, r"b/w has shape \(16, 16\) in .* and \(4, 4\) in the model"),
    ],
    ids=["more", "less", "shape"],
)
def test_another_model_is_an_error_that_names_the_leaf(change, message):
    params, opt_state = job("bf16")
    with pytest.raises(ValueError, match=message):
        convert(opt_state, params, to=KINDS["fp32"].tx, policy="fp32", like=change(PLAIN))


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (optax.sgd(0.1, momentum=0.9), "the same inner optimizer.* 0/trace/a/w is missing"),
        (optax.sgd(0.1), "0/count is in its optimizer state and not in the new one. The new one has no leaves."),
        (jaxmp.compress_moments(INNER, jnp.int8), "compress_count is missing"),
        (jaxmp.fused_adamw(1e-2, state_dtype=jnp.int8), "the same inner optimizer"),
    ],
    ids=["momentum", "sgd", "compressed", "codes"],
)
def test_another_optimizer_is_an_error_that_names_the_leaf(inner, message):
    params, opt_state = job("bf16")
    with pytest.raises(ValueError, match=message):
        convert(opt_state, params, to=jaxmp.mixed_precision(inner, "fp32"), policy="fp32")


def test_codes_are_not_taken_for_numbers():
    big = {"w": jnp.ones((16, 256))}
    codes, floats = (
        jaxmp.mixed_precision(jaxmp.fused_adamw(1e-2, state_dtype=d), "fp32") for d in (jnp.int8, jnp.float32)
    )
    with pytest.raises(ValueError, match="0/count is missing from its optimizer state. There are compress_count"):
        convert(jax.jit(codes.init)(big), big, to=floats, policy="fp32")


def test_split_masters_need_the_params_of_their_step():
    _, opt_state = job("split16")
    with pytest.raises(ValueError, match="so the params must be bfloat16; got float32 at a/w"):
        convert(opt_state, PLAIN, to=KINDS["fp32"].tx, policy="fp32")


def test_what_was_converted_shares_no_buffer_with_what_it_came_from():
    params, opt_state = (jax.tree.map(jnp.copy, x) for x in job("fp32"))
    new = convert(opt_state, params, to=KINDS["fp32"].tx, policy="fp32")
    jax.tree.map(lambda x: x.delete(), (params, opt_state))
    with warnings.catch_warnings(action="error"):
        assert_moved(new, job("fp32"))
