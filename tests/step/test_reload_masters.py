"""Params that were replaced by hand: their masters follow, and the next step goes on from them."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_exact, assert_moved
from policy_steps import filled

F32 = np.float32
RNG = np.random.default_rng(5)
START = {"a": F32(RNG.normal(size=(3, 4))), "norm": F32(RNG.normal(size=4))}
OTHER = {"a": F32(RNG.normal(size=(3, 4))), "norm": F32(RNG.normal(size=4))}
KINDS = {"fp16": {}, "bf16": {}, "split16": {"remainder_bits": 16}, "split8": {"remainder_bits": 8}}


class State(jaxmp.linen.TrainState):
    """A subclass, for which flax writes `replace` anew."""

    extra: Any = None


def start(kind, rate=0.25, cls=State):
    policy = jaxmp.get_policy("fp16" if kind == "fp16" else "bf16", keep_fp32=("norm",))
    tx = jaxmp.mixed_precision(optax.sgd(rate), policy, loss_scale=None if kind != "fp16" else 4.0, **KINDS[kind])
    return cls.create(apply_fn=None, params=START, tx=tx, policy=policy), policy


def stepped(state, grad):
    scale = jaxmp.get_loss_scale(state.opt_state)
    grads = jax.tree.map(lambda p: jnp.full(p.shape, grad * scale, p.dtype), state.params)
    return state.apply_gradients(grads=grads)


def masters(state):
    return jaxmp.get_master_params(state.opt_state, state.params)


@pytest.mark.thorough(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_train_state_trains_on_from_replaced_params(kind):
    """Eager, or under jit."""
    state, policy = start(kind)
    loaded = policy.cast_to_param(OTHER)
    reload = lambda state: state.reload(loaded)  # noqa: E731
    new = (jax.jit(reload) if kind in ("fp16", "split8") else reload)(state)
    assert_exact(masters(new), jax.tree.map(lambda x: np.asarray(x).astype(F32), loaded))
    # a step of 0.25 * 1.0 from the loaded weights
    expected = jax.tree.map(lambda x: np.asarray(x).astype(F32) - F32(0.25), loaded)
    assert_exact(masters(stepped(new, 1.0)), expected)
    assert_moved(masters(state), START if kind != "split8" else masters(start(kind)[0]))  # the old state is as it was


@pytest.mark.thorough(1)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_not_changed_keeps_its_master(kind):
    state, _ = start(kind)
    state = stepped(state, 2.0**-11)
    before = masters(state)
    halved = state.params["a"].at[0].multiply(0.5)
    new = state.reload(state.params | {"a": halved})
    expected = np.array(before["a"])
    expected[0] = np.asarray(halved[0]).astype(F32)
    assert_exact(masters(new), before | {"a": expected})
    same = state.reload(jax.tree.map(lambda x: x, state.params)).replace(extra=1)
    assert all(a is b for a, b in zip(jax.tree.leaves(same.opt_state), jax.tree.leaves(state.opt_state), strict=True))
    assert same.extra == 1


@pytest.mark.thorough(1)
@pytest.mark.parametrize("kind", ["bf16", "split16"])
def test_weights_that_are_clipped_between_steps_still_move_by_less_than_their_rounding(kind):
    """The rule of a projected optimizer: 64 steps of 2^-13 each, of weights near 1."""
    state, _ = start(kind, rate=1.0)

    def step(state, _):
        state = stepped(state, 2.0**-13)
        return state.reload(jax.tree.map(lambda p: jnp.clip(p, -1, 1), state.params)), None

    state, _ = jax.jit(lambda state: jax.lax.scan(step, state, length=64))(state)
    a, norm = START["a"].copy(), START["norm"].copy()
    for _ in range(64):
        a, norm = a - F32(2.0**-13), np.clip(norm - F32(2.0**-13), -1, 1)
        a = np.where(np.abs(a) > 1 + 2.0**-8, np.sign(a).astype(F32), a)
    got = masters(state)
    inside = np.abs(START["a"]) < 0.9
    assert inside.sum() > 3
    assert_exact(np.asarray(got["a"])[inside], a[inside])
    assert_exact(got["norm"], norm)
    assert np.max(np.abs(np.asarray(state.params["a"], F32))) <= 1


@pytest.mark.parametrize("kind", ["fp16", "bf16", "without a policy"])
def test_loaded_float32_params_are_cast_and_their_masters_keep_the_full_precision(kind):
    """Without a policy, to the dtypes of the params that the state has."""
    state, policy = start("bf16" if kind == "without a policy" else kind)
    state = state.replace(policy=None) if kind == "without a policy" else state
    loaded = state.reload(OTHER)
    assert_exact(loaded.params, policy.cast_to_param(OTHER))
    assert_moved(masters(loaded), OTHER)


def test_replace_is_that_of_flax_and_warns_of_params_without_their_masters():
    state, policy = start("bf16")
    loaded = policy.cast_to_param(OTHER)
    for params in (loaded, OTHER):
        with pytest.warns(UserWarning, match=r"got params alone.*state\.reload\(params\).*#params-without-masters"):
            alone = state.replace(params=params)
        assert alone.params is params and alone.opt_state is state.opt_state
    mesh = jax.make_mesh((1,), ("x",))
    shapes = jax.eval_shape(lambda: start("bf16")[0])
    float32 = State.create(apply_fn=None, params=START, tx=optax.sgd(0.1), policy="fp32")
    with warnings.catch_warnings(action="error"):
        both = state.replace(params=loaded, opt_state=state.opt_state)
        assert both.params is loaded and both.opt_state is state.opt_state
        for other in (NamedSharding(mesh, P()), jax.tree.map(lambda _: NamedSharding(mesh, P()), state.params), None):
            assert state.replace(params=other).params is other
        assert shapes.replace(params=shapes.params).params is shapes.params
        assert float32.replace(params=OTHER).params is OTHER
        assert state.replace(params=jax.tree.map(lambda x: x, state.params), extra=1).extra == 1
    assert_exact(float32.reload(OTHER).params, OTHER)


@pytest.mark.parametrize("policy", ["16-mixed", "bf16"])
@pytest.mark.parametrize(
    ("junk", "message"),
    {
        "None": (None, "a is missing"),
        "a part": ({"a": OTHER["a"]}, "norm is missing. There are a"),
        "more": (OTHER | {"other": F32(OTHER["a"])}, "other is none of theirs"),
        "another shape": (OTHER | {"a": OTHER["a"][:, :1]}, r"got \(3, 1\) at a, expected \(3, 4\)"),
        "a number": (OTHER | {"norm": 1.0}, "got float at norm"),
        "int32": (OTHER | {"norm": np.arange(4, dtype=np.int32)}, "got int32 at norm"),
        "float64": (OTHER | {"a": OTHER["a"].astype(np.float64)}, "got float64 at a"),
    }.values(),
    ids=["None", "a part", "more", "another shape", "a number", "int32", "float64"],
)
def test_what_is_no_such_params_is_refused(policy, junk, message):
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
    state = State.create(apply_fn=None, params=START, tx=tx, policy=policy)
    with pytest.raises(ValueError, match=message):
        state.reload(junk)
    if policy == "bf16" or "at" not in message:  # masters alone know shapes and dtypes
        with pytest.raises(ValueError, match=message):
            jaxmp.reload_master_params(state.opt_state, junk)


def test_weights_without_fp8_scales_get_those_of_the_state():
    model = nn.Sequential([nn.Dense(16), nn.Dense(16), nn.Dense(16)])
    params = filled(jaxmp.autocast(model.init, "fp8"), jax.random.key(0), jnp.ones((16, 16)))["params"]
    state = jaxmp.linen.TrainState.create(
        apply_fn=model.apply, params=params, tx=jaxmp.mixed_precision(optax.sgd(0.1), "fp8"), policy="fp8"
    )
    plain = jax.tree.map(jnp.zeros_like, filled(model.init, jax.random.key(0), jnp.ones((16, 16)))["params"])
    for refused in (lambda: state.reload(plain), lambda: jaxmp.reload_master_params(state.opt_state, plain)):
        with pytest.raises(ValueError, match=r"log2_scale is missing.*jaxmp\.fp8\.with_scales"):
            refused()
    new = state.reload(jaxmp.fp8.with_scales(plain, state.params)).params
    assert jax.tree.structure(new) == jax.tree.structure(params) and not np.any(new["layers_1"]["kernel"])
    with pytest.raises(ValueError, match="layers_2/bias is in fresh only"):
        jaxmp.fp8.with_scales(plain | {"layers_2": {"kernel": plain["layers_2"]["kernel"]}}, state.params)


def test_params_and_masters_stay_where_they_are():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    cut, whole = NamedSharding(mesh, P(None, "x")), NamedSharding(mesh, P())
    state, policy = start("bf16")
    params = jax.device_put(state.params, whole)
    placed = jax.tree.map(lambda x: jax.device_put(x, cut if x.ndim == 2 else whole), state.opt_state)
    state = state.replace(params=params, opt_state=placed)
    loaded = jax.device_put(policy.cast_to_param(OTHER), whole)
    for opt_state in (state.reload(loaded).opt_state, jaxmp.reload_master_params(placed, loaded)):
        assert optax.tree.get(opt_state, "master_params")["a"].sharding == cut
    params = jax.tree.map(lambda x: jax.device_put(x, cut if x.ndim == 2 else whole), params)
    sharded = state.replace(params=params, opt_state=placed)
    on_one = jax.device_put(policy.cast_to_param(OTHER), jax.devices()[1])
    for params in (OTHER, policy.cast_to_param(OTHER), on_one, loaded):  # NumPy's; no place; one device; whole on each
        new = sharded.reload(params).params
        assert {k: x.sharding for k, x in new.items()} == {"a": cut, "norm": whole}
        assert_exact(new, policy.cast_to_param(OTHER))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "flax"])
def test_an_nnx_optimizer_reloads_its_masters(ours):
    model, other = (nnx.Linear(3, 4, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    policy = jaxmp.get_policy("bf16")
    tx = jaxmp.mixed_precision(optax.sgd(0.25), policy)
    optimizer: Any = (jaxmp.nnx.Optimizer if ours else nnx.Optimizer)(model, tx, wrt=nnx.Param)
    jaxmp.nnx.cast_to_param(model, policy)
    nnx.update(model, nnx.state(other, nnx.Param))  # float32
    if ours:
        optimizer.reload_master_params(model)
    else:
        optimizer.opt_state = jaxmp.reload_master_params(optimizer.opt_state, nnx.state(model, nnx.Param))
    jaxmp.nnx.cast_to_param(model, policy)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))

    step(model, optimizer)
    expected = np.asarray(other.kernel[...]) - F32(0.25)
    assert_exact(model.kernel[...], expected.astype(jnp.bfloat16))
    assert_exact(optax.tree.get(nnx.as_pure(optimizer.opt_state), "master_params")["kernel"], expected)


@pytest.mark.parametrize("bits", [None, 16])
def test_a_layer_named_value_has_params_of_its_own(bits):
    """Its path without "value" is that of another layer, whose params it got."""
    zeros = {"w": np.zeros(2, F32), "value": {"w": np.zeros(2, F32)}}
    new = {"w": F32([1.0, 2.0]), "value": {"w": F32([16.0, 32.0])}}
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "bf16", remainder_bits=bits)
    state = jaxmp.linen.TrainState.create(apply_fn=None, params=zeros, tx=tx, policy="bf16")
    assert_exact(masters(state.reload(new)), new)
    cast = jaxmp.get_policy("bf16").cast_to_param(new)
    assert_exact(jaxmp.get_master_params(jaxmp.reload_master_params(state.opt_state, cast), cast), new)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
def test_params_of_another_dtype_are_the_masters(traced):
    """1.0026 rounds to 1.0 in bfloat16: only a param in bfloat16 that stayed 1.0 may keep this master."""
    tx = jaxmp.mixed_precision(optax.sgd(0.5), "bf16")
    state = jaxmp.linen.TrainState.create(apply_fn=None, params={"w": F32([1.0026, 2.0])}, tx=tx, policy="bf16")
    reload = lambda state, new: state.reload(new)  # noqa: E731
    for dtype, master in ((jnp.bfloat16, 1.0026), (jnp.float16, 1.0), (jnp.float32, 1.0)):
        new = (jax.jit(reload) if traced else reload)(state, {"w": np.array([1.0, 3.0], dtype)})
        assert_exact(masters(new), {"w": F32([master, 3.0])})
        assert_exact(new.params, {"w": np.array([1.0, 3.0], jnp.bfloat16)})
