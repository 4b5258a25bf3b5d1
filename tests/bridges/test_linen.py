"""flax.linen models: jaxmp's TrainState and flax's own, BatchNorm, Partitioned boxes, and the policy of a state."""

import functools
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state as flax_train_state
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact, assert_moved, assert_same_program
from matmul_dtypes import matmuls
from regimes import BatchNormState, LinenNet, squared_error

F16, F32 = np.float16, np.float32
POLICY = jaxmp.get_policy("fp16", keep_fp32=("*norm*",))


NET = LinenNet(jnp.float16)


class FlaxState(flax_train_state.TrainState):
    batch_stats: Any = None


X, Y = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(F32)
BAD_X = X.copy()
BAD_X[3, 1] = np.inf


@functools.cache
def variables():
    return jax.jit(NET.init)(jax.random.key(0), np.ones((2, 4), F32))


@functools.cache
def optimizer():
    return jaxmp.mixed_precision(optax.adam(1e-2), POLICY, loss_scale=jaxmp.DynamicLossScale(4.0, hysteresis=1))


def make_state(cls=BatchNormState):
    params, batch_stats = variables()["params"], variables()["batch_stats"]
    kwargs = {} if cls is FlaxState else {"policy": POLICY}
    return cls.create(apply_fn=NET.apply, params=params, tx=optimizer(), batch_stats=batch_stats, **kwargs)


def state_of(params, tx, policy=None, cls=jaxmp.linen.TrainState, **fields):
    return cls.create(apply_fn=None, params=params, tx=tx, policy=policy, **fields)


def loss_fn(params, batch_stats, x, y):
    out, new = NET.apply({"params": params, "batch_stats": batch_stats}, x, mutable=["batch_stats"])
    return squared_error(out, y), new["batch_stats"]


@jax.jit
def our_step(state, x):
    (loss, batch_stats), grads = jaxmp.value_and_grad(loss_fn, has_aux=True)(
        state.params, state.batch_stats, x, Y, opt_state=state.opt_state
    )
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss, batch_stats


def test_create_casts_the_params_and_keeps_masters_of_the_initial_values():
    state, params32 = make_state(), variables()["params"]
    assert_exact(state.params, POLICY.cast_to_param(params32))
    assert {str(x.dtype) for x in jax.tree.leaves(state.params["BatchNorm_0"])} == {"float32"}
    assert_moved(jaxmp.get_master_params(state.opt_state, state.params), params32)
    assert np.any(np.asarray(state.params["Dense_0"]["kernel"]) != params32["Dense_0"]["kernel"])
    assert_exact((state.step, state.loss_scale), (np.int32(0), F32(4.0)))
    # without a policy the params are taken as they are
    plain = state_of(state.params, optimizer())
    assert_moved(plain.params, state.params)
    masters = jaxmp.get_master_params(plain.opt_state, plain.params)
    assert_exact(masters, jax.tree.map(lambda x: np.asarray(x).astype(F32), state.params))


@pytest.mark.thorough(0)
def test_flax_s_own_train_state_works_with_keep_if_skipped():
    ours = make_state()
    theirs = make_state(FlaxState).replace(params=POLICY.cast_to_param(variables()["params"]))

    @jax.jit
    def step(state, x):
        (_, batch_stats), grads = jaxmp.value_and_grad(loss_fn, has_aux=True, policy=POLICY)(
            state.params, state.batch_stats, x, Y, opt_state=state.opt_state
        )
        new = state.apply_gradients(grads=grads)
        return new.replace(batch_stats=jaxmp.keep_if_skipped(new.opt_state, batch_stats, state.batch_stats))

    for x in (X, BAD_X, X):
        ours, theirs = our_step(ours, x)[0], step(theirs, x)
        # two programs: Adam and the fused multiply-adds around it may round apart in the last place
        assert_close(theirs.params, ours.params, rtol=2.0**-10, atol=1e-6)
        assert_close(theirs.batch_stats, ours.batch_stats, rtol=1e-5, atol=1e-6)
        assert_exact(theirs.opt_state.scaling, ours.opt_state.scaling)
    # flax's counter counts skipped steps, the optimizer's does not
    assert_exact((jnp.asarray(theirs.step), optax.tree.get(theirs.opt_state, "count")), (np.int32(3), np.int32(2)))
    assert_exact(ours.step, np.int32(2))


def test_a_skip_keeps_minus_zero_in_flax_s_own_train_state():
    """It adds the updates of a skipped step: -0.0 + 0.0 would be 0.0."""
    tx = jaxmp.mixed_precision(optax.sgd(1.0), POLICY, loss_scale=2.0)
    params = {"dense": np.array([-0.0, 0.0, 1.0], F16), "norm": np.array([-0.0, 0.0, 1.0], F32)}
    state = flax_train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    grads = jax.tree.map(lambda p: np.full_like(p, np.inf), params)
    assert_moved(jax.jit(lambda state, grads: state.apply_gradients(grads=grads))(state, grads).params, params)


def test_fields_given_by_hand_are_kept_on_a_skip_as_well():
    class WithEma(jaxmp.linen.TrainState):
        ema: Any = None

    tx = jaxmp.mixed_precision(optax.sgd(1.0), "bf16")
    state = state_of({"w": np.ones(2, F32)}, tx, "bf16", WithEma, ema=np.zeros(2, F32))
    step = jax.jit(lambda s, x: s.apply_gradients(grads={"w": x.astype(jnp.bfloat16)}, ema=x, step=s.step + 10))
    taken = step(state, np.ones(2, F32))
    assert_exact((taken.ema, taken.step), (np.ones(2, F32), np.int32(10)))
    skipped = step(taken, np.full(2, np.inf, F32))
    assert_exact((skipped.ema, skipped.step), (np.ones(2, F32), np.int32(10)))


def test_any_optax_transform_may_be_in_the_train_state():
    state = state_of({"w": np.ones(2, F32)}, optax.sgd(1.0)).apply_gradients(grads={"w": np.ones(2, F32)})
    assert_exact((state.params["w"], state.step, state.loss_scale), (np.zeros(2, F32), np.int32(1), F32(1.0)))


class Partitioned(nn.Module):
    @nn.compact
    def __call__(self, x):
        split = functools.partial(nn.with_partitioning, nn.initializers.lecun_normal())
        x = nn.Dense(8, kernel_init=split((None, "model")), use_bias=False, dtype=jnp.bfloat16)(x)
        norm = nn.LayerNorm(use_bias=False, scale_init=nn.with_partitioning(nn.initializers.ones, ("model",)))
        return nn.Dense(4, kernel_init=split(("model", None)), dtype=jnp.bfloat16)(norm(x))


@pytest.mark.thorough(0)
def test_partitioned_boxes_carry_over_to_masters_and_moments():
    model, policy, x = Partitioned(), jaxmp.get_policy("bf16", keep_fp32=("*norm*",)), np.ones((8, 4), F32)
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), policy)

    def create(key):
        return state_of(model.init(key, x)["params"], tx, policy)

    shapes = jax.eval_shape(create, jax.random.key(0))
    specs = nn.get_partition_spec(shapes)
    expected = {
        "Dense_0": {"kernel": P(None, "model")},
        "LayerNorm_0": {"scale": P("model")},
        "Dense_1": {"kernel": P("model", None), "bias": P()},
    }
    assert specs.params == expected
    assert specs.opt_state.master_params == expected | {"LayerNorm_0": {"scale": optax.MaskedNode()}}
    for moment in ("mu", "nu"):
        assert optax.tree.get(specs.opt_state, moment) == expected
    assert specs.opt_state.scaling.loss_scale == P()

    # as flax's guide does it: the state is born sharded, and a step leaves it so
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    state = jax.jit(create, out_shardings=nn.get_sharding(shapes, mesh))(jax.random.key(0))

    @jax.jit
    def step(state):
        loss_fn = lambda params: jnp.mean(model.apply({"params": params}, x).astype(F32) ** 2)  # noqa: E731
        loss, grads = jaxmp.value_and_grad(loss_fn)(state.params, opt_state=state.opt_state)
        return state.apply_gradients(grads=grads), loss

    first, loss = step(state)
    second, next_loss = step(first)
    assert next_loss < loss
    assert jax.tree.structure(second) == jax.tree.structure(state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(second), strict=True):
        assert before.sharding.is_equivalent_to(after.sharding, before.ndim)
        assert before.dtype == after.dtype
    masters = jaxmp.get_master_params(second.opt_state, second.params)
    for tree in (second.params, second.opt_state.master_params, masters):
        assert isinstance(tree["Dense_1"]["kernel"], nn.Partitioned)
    assert_exact(policy.cast_to_param(masters), second.params)
    assert_moved(nn.unbox(masters), jaxmp.get_master_params(nn.unbox(second.opt_state), nn.unbox(second.params)))


def test_frozen_dicts_are_params_too():
    params = flax.core.freeze({"Dense_0": {"kernel": np.ones((2, 2), F32)}})
    state = state_of(params, jaxmp.mixed_precision(optax.sgd(1.0), "bf16"), "bf16")
    state = state.apply_gradients(grads=jax.tree.map(np.ones_like, state.params))
    assert_exact(state.params, flax.core.freeze({"Dense_0": {"kernel": np.zeros((2, 2), jnp.bfloat16)}}))


# The policy of a TrainState


class Plain(nn.Module):
    """No dtype anywhere."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(8)(x)))


PLAIN_X = np.concatenate([X, X], 1)  # sums over eight elements: those of four are float32


def plain_step(state, x):
    def loss_fn(params, x):
        return jnp.mean(Plain().apply({"params": params}, x) ** 2)

    loss, grads = jaxmp.value_and_grad(loss_fn)(state.params, x, opt_state=state.opt_state)
    return state.apply_gradients(grads=grads), loss


@functools.cache
def plain_state(policy="fp16", cls=jaxmp.linen.TrainState, before=None):
    tx = jaxmp.mixed_precision(optax.adam(1e-2), policy, before=before)
    return jax.jit(lambda: state_of(Plain().init(jax.random.key(0), PLAIN_X)["params"], tx, policy, cls))()


def test_a_train_state_carries_its_policy_through_every_transformation():
    state = plain_state()
    assert state.policy == jaxmp.get_policy("fp16")
    expected = {"float16": 5}
    assert matmuls(lambda x: plain_step(state, x), PLAIN_X) == expected  # closed over
    assert matmuls(jax.jit(functools.partial(jax.lax.scan, plain_step)), state, PLAIN_X[None]) == expected
    assert matmuls(jax.vmap(plain_step, in_axes=(None, 0)), state, PLAIN_X[None]) == expected
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))
    assert_moved(jax.tree.map(jnp.asarray, restored), state)
    subclass = plain_state(cls=BatchNormState, before=jaxmp.reduce_gradients(None))
    for other in (state.replace(step=state.step + 1), subclass, restored):
        assert matmuls(plain_step, other, PLAIN_X) == expected


def test_the_policy_is_no_part_of_the_pytree_of_the_optimizer():
    state = plain_state("bf16")
    plain = state.tx.init(state.params)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(plain)
    assert not hasattr(plain, "policy")  # the optimizer's own state was not written to
    assert jax.tree.structure(state) != jax.tree.structure(plain_state("fp16"))  # static: another program
    assert set(flax.serialization.to_state_dict(state)) == {"step", "params", "opt_state"}
    without = state_of(state.params, state.tx)
    assert without.policy is None and not hasattr(without.opt_state, "policy")


def test_a_train_state_is_rebuilt_by_jax_with_any_leaves():
    state = plain_state()
    for leaf in (None, 0, "text", object()):
        jax.tree.map(lambda _, leaf=leaf: leaf, state)
    assert jax.eval_shape(plain_step, state, PLAIN_X)[1].dtype == jnp.float32
    compiled, new = jax.jit(plain_step), state
    for _ in range(3):
        new, _ = compiled(new, PLAIN_X)
    assert compiled._cache_size() == 1
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    assert all(len(x.devices()) == 2 for x in jax.tree.leaves(jax.device_put(state, NamedSharding(mesh, P()))))


# replace, reload and fields


def test_the_same_optimizer_with_another_rate_takes_the_state():
    state = state_of({"b": np.ones(2, F32)}, optax.sgd(0.1), "bf16")
    new = state.replace(tx=jaxmp.mixed_precision(optax.sgd(1.0), "bf16"))
    new = new.apply_gradients(grads={"b": np.ones(2, jnp.bfloat16)})
    assert_exact(new.params["b"], np.zeros(2, jnp.bfloat16))


def test_params_in_other_containers_come_into_those_of_the_state():
    params = {"a": {"w": np.linspace(1.0, 2.0, 5, dtype=F32)}, "b": np.ones(2, F32)}
    state = state_of(params, optax.adam(0.1), "bf16", loss_scale=None)
    other = jax.tree.map(lambda x: 2 * x, state.params)
    step = jax.jit(lambda state: state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params)).params)
    expected = step(state.reload(other))
    for boxed in (flax.core.freeze(other), jax.tree.map(lambda x: nn.Partitioned(x, (None,)), other)):
        new = state.reload(boxed)
        assert jax.tree.structure(new) == jax.tree.structure(state)
        assert_same_program(step(new), expected)


def test_a_field_by_nearly_its_name_is_refused():
    """Other names are arguments of the optimizer: they would be dropped."""

    class WithValues(BatchNormState):
        values: Any = None

    state = make_state(WithValues)
    grads = jax.tree.map(np.zeros_like, state.params)
    with pytest.raises(TypeError, match="takes fields of the state; got batch_stat, for batch_stats"):
        state.apply_gradients(grads=grads, batch_stat=state.batch_stats)
    jax.eval_shape(lambda state: state.apply_gradients(grads=grads, value=F32(0.0)), state)  # a name of optax
