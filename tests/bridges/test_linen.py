"""flax.linen models: jaxmp's TrainState and flax's own, BatchNorm, Dropout, Partitioned boxes, nn.scan and nn.remat."""

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
from helpers import assert_close, assert_exact, assert_moved, assert_same_program, assert_within_ulps
from matmul_dtypes import matmuls
from regimes import guarded, squared_error

F16, F32 = np.float16, np.float32
POLICY = jaxmp.get_policy("fp16", keep_fp32=("*norm*",))


class Net(nn.Module):
    """BatchNorm and Dropout between two Dense layers."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, dtype=jnp.float16)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.5, dtype=jnp.float16)(x)
        x = nn.Dropout(self.rate, deterministic=False)(x)
        return nn.Dense(2, dtype=jnp.float16)(x)


class OurState(jaxmp.linen.TrainState):
    batch_stats: Any = None


class FlaxState(flax_train_state.TrainState):
    batch_stats: Any = None


X, Y = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(F32)
Y = Y[:, :2]
BAD_X = X.copy()
BAD_X[3, 1] = np.inf


@functools.cache
def variables():
    return jax.jit(Net().init)(jax.random.key(0), jnp.ones((2, 4)))


@functools.cache
def optimizer():
    return jaxmp.mixed_precision(optax.adam(1e-2), POLICY, loss_scale=jaxmp.DynamicLossScale(4.0, hysteresis=1))


def make_state(cls=OurState, **kwargs):
    params, batch_stats = variables()["params"], variables()["batch_stats"]
    if cls is OurState:
        kwargs = {"policy": POLICY} | kwargs
    return cls.create(apply_fn=Net().apply, params=params, tx=optimizer(), batch_stats=batch_stats, **kwargs)


def loss_fn(params, batch_stats, x, y):
    out, new = Net().apply({"params": params, "batch_stats": batch_stats}, x, mutable=["batch_stats"])
    return squared_error(out, y), new["batch_stats"]


@jax.jit
def our_step(state, x):
    (loss, batch_stats), grads = jaxmp.value_and_grad(loss_fn, has_aux=True)(
        state.params, state.batch_stats, x, Y, opt_state=state.opt_state
    )
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss, batch_stats


def test_create_casts_the_params_and_keeps_masters_of_the_initial_values():
    state = make_state()
    assert_exact(state.params, POLICY.cast_to_param(variables()["params"]))
    assert {str(x.dtype) for x in jax.tree.leaves(state.params["BatchNorm_0"])} == {"float32"}
    masters = jaxmp.get_master_params(state.opt_state, state.params)
    assert_moved(masters, variables()["params"])
    assert any(np.any(m != p) for m, p in zip(*map(jax.tree.leaves, (masters, state.params)), strict=True))
    assert_exact(state.step, np.int32(0))
    assert_exact(state.loss_scale, F32(4.0))
    # without a policy the params are taken as they are
    cast = POLICY.cast_to_param(variables()["params"])
    plain = jaxmp.linen.TrainState.create(apply_fn=None, params=cast, tx=optimizer())
    assert_moved(plain.params, cast)
    assert_exact(jaxmp.get_master_params(plain.opt_state, cast), jax.tree.map(lambda x: x.astype(F32), cast))


@pytest.mark.thorough(0)
def test_a_skipped_step_keeps_batch_stats_and_the_step_counter():
    """flax leaves inf in the statistics of BatchNorm, and counts the step."""
    first, loss, _ = our_step(make_state(), X)
    assert np.isfinite(loss)
    assert_exact((first.step, first.metrics["skipped"]), (np.int32(1), np.bool_(False)))
    second, _, bad_stats = our_step(first, BAD_X)
    assert not bool(jaxmp.all_finite(bad_stats))  # what flax's apply_gradients(batch_stats=...) stores
    assert_moved(second.params, first.params)
    assert_moved(second.batch_stats, first.batch_stats)
    assert_moved(second.step, first.step)
    assert_moved(guarded(second.opt_state), guarded(first.opt_state))
    assert_exact((second.loss_scale, second.metrics["skipped_steps"]), (F32(2.0), np.int32(1)))
    third, _, stats = our_step(second, X)
    assert_within_ulps(third.batch_stats, stats, 4)
    assert_exact((third.step, optax.tree.get(third.opt_state, "count")), (np.int32(2), np.int32(2)))
    assert bool(jaxmp.all_finite((third.params, third.batch_stats)))


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
    params = {"dense": jnp.array([-0.0, 0.0, 1.0], F16), "norm": jnp.array([-0.0, 0.0, 1.0], F32)}
    state = flax_train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    grads = jax.tree.map(lambda p: jnp.full_like(p, np.inf), params)
    assert_moved(jax.jit(lambda state, grads: state.apply_gradients(grads=grads))(state, grads).params, params)


def test_extra_arguments_reach_the_optimizer():
    """flax hands them to `replace`, which does not know them; and a NaN loss must not enter the plateau's average."""
    inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    tx = jaxmp.mixed_precision(inner, "fp16", loss_scale=2.0)
    params = {"w": jnp.ones(2)}
    state = jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=tx, policy="fp16")
    good, bad = {"w": jnp.ones(2, F16)}, {"w": jnp.array([1.0, np.nan], F16)}
    step = jax.jit(lambda s, g, value: s.apply_gradients(grads=g, value=value))
    for value, scale in ((1.0, 1.0), (1.0, 0.5)):
        state = step(state, good, jnp.float32(value))
        assert_exact(optax.tree.get(state.opt_state, "scale"), F32(scale))
    skipped = step(state, bad, jnp.float32(np.nan))
    assert_moved(skipped.params, state.params)
    assert_moved(guarded(skipped.opt_state), guarded(state.opt_state))
    assert_exact(skipped.step, np.int32(2))
    theirs = flax_train_state.TrainState.create(apply_fn=None, params=state.params, tx=tx)
    with pytest.raises(TypeError, match="value"):
        theirs.apply_gradients(grads=good, value=1.0)


def test_fields_given_by_hand_are_kept_on_a_skip_as_well():
    class WithEma(jaxmp.linen.TrainState):
        ema: Any = None

    tx = jaxmp.mixed_precision(optax.sgd(1.0), "bf16")
    params = {"w": jnp.ones(2)}
    state = WithEma.create(apply_fn=None, params=params, tx=tx, policy="bf16", ema=jnp.zeros(2))
    taken = state.apply_gradients(grads={"w": jnp.ones(2)}, ema=jnp.ones(2), step=state.step + 10)
    assert_exact((taken.ema, taken.step), (np.ones(2, F32), np.int32(10)))
    skipped = taken.apply_gradients(grads={"w": jnp.full(2, np.inf)}, ema=jnp.full(2, np.inf), step=taken.step + 10)
    assert_exact((skipped.ema, skipped.step), (np.ones(2, F32), np.int32(10)))


def test_any_optax_transform_may_be_in_the_train_state():
    state = jaxmp.linen.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(1.0))
    state = state.apply_gradients(grads={"w": jnp.ones(2)})
    assert_exact((state.params["w"], state.step, state.loss_scale), (np.zeros(2, F32), np.int32(1), F32(1.0)))


@pytest.mark.thorough(0)
def test_dropout_keys_are_split_over_microbatches():
    model = Net(rate=0.5)
    params, batch_stats = POLICY.cast_to_param(variables()["params"]), variables()["batch_stats"]

    def loss_fn(params, key, x, y):
        variables = {"params": params, "batch_stats": batch_stats}
        out, _ = model.apply(variables, x, rngs={"dropout": key}, mutable=["batch_stats"])
        return squared_error(out, y), out

    key, opt_state = jax.random.key(5), optimizer().init(params)
    compute = jax.jit(jaxmp.value_and_grad(loss_fn, has_aux=True, accumulate=2, accumulate_argnums=(1, 2, 3)))
    x = np.concatenate([X[:4], X[:4]])  # both microbatches are the same, so that only the masks differ
    (loss, out), grads = compute(params, key, x, Y, opt_state=opt_state)
    assert out.shape == (2, 4, 2)
    assert np.any(out[0] != out[1])
    one = jax.jit(jaxmp.value_and_grad(loss_fn, has_aux=True))
    halves = [
        one(params, k, x[:4], y, opt_state=opt_state)
        for k, y in zip(jax.random.split(key, 2), (Y[:4], Y[4:]), strict=True)
    ]
    assert_close(loss, np.asarray((halves[0][0][0] + halves[1][0][0]) / 2), rtol=1e-5)
    mean = jax.tree.map(lambda a, b: (a.astype(F32) + b.astype(F32)) / 2, halves[0][1], halves[1][1])
    assert_close(grads, mean, rtol=1e-2, atol=4 * 2.0**-10)


class Partitioned(nn.Module):
    @nn.compact
    def __call__(self, x):
        split = functools.partial(nn.with_partitioning, nn.initializers.lecun_normal())
        x = nn.Dense(8, kernel_init=split((None, "model")), use_bias=False, dtype=jnp.bfloat16)(x)
        norm = nn.LayerNorm(use_bias=False, scale_init=nn.with_partitioning(nn.initializers.ones, ("model",)))
        return nn.Dense(4, kernel_init=split(("model", None)), dtype=jnp.bfloat16)(norm(x))


@pytest.mark.thorough(0)
def test_partitioned_boxes_carry_over_to_masters_and_moments():
    model, policy = Partitioned(), jaxmp.get_policy("bf16", keep_fp32=("*norm*",))
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), policy)
    x = jnp.ones((8, 4))

    def create(key):
        params = model.init(key, x)["params"]
        return jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy=policy)

    shapes = jax.eval_shape(create, jax.random.key(0))
    specs = nn.get_partition_spec(shapes)
    expected = {
        "Dense_0": {"kernel": P(None, "model")},
        "LayerNorm_0": {"scale": P("model")},
        "Dense_1": {"kernel": P("model", None), "bias": P()},
    }
    assert specs.params == expected
    master_specs = specs.opt_state.master_params
    assert master_specs == expected | {"LayerNorm_0": {"scale": optax.MaskedNode()}}
    for moment in ("mu", "nu"):
        assert optax.tree.get(specs.opt_state, moment) == expected
    assert specs.opt_state.scaling.loss_scale == P()

    # as flax's guide does it: the state is born sharded, and a step leaves it so
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    shardings = nn.get_sharding(shapes, mesh)
    state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))

    def loss_fn(params, x):
        return jnp.mean(model.apply({"params": params}, x).astype(F32) ** 2)

    @jax.jit
    def step(state):
        loss, grads = jaxmp.value_and_grad(loss_fn)(state.params, x, opt_state=state.opt_state)
        return state.apply_gradients(grads=grads), loss

    first, loss = step(state)
    second, next_loss = step(first)
    assert next_loss < loss
    assert jax.tree.structure(second) == jax.tree.structure(state)
    assert isinstance(second.params["Dense_0"]["kernel"], nn.Partitioned)
    assert isinstance(second.opt_state.master_params["Dense_0"]["kernel"], nn.Partitioned)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(second), strict=True):
        assert before.sharding.is_equivalent_to(after.sharding, before.ndim)
        assert before.dtype == after.dtype
    masters = jaxmp.get_master_params(second.opt_state, second.params)
    assert_exact(policy.cast_to_param(masters), second.params)
    assert isinstance(masters["Dense_1"]["kernel"], nn.Partitioned)
    assert_moved(nn.unbox(masters), jaxmp.get_master_params(nn.unbox(second.opt_state), nn.unbox(second.params)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(4, dtype=jnp.float16)(nn.LayerNorm(dtype=jnp.float16)(x)), None


class Stack(nn.Module):
    """A stack of layers under nn.scan, each rematerialized: params have a leading axis [layers]."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers()(x.astype(jnp.float16), None)[0]


class Tied(nn.Module):
    """The same layer twice, and an embedding that is also the output layer."""

    @nn.compact
    def __call__(self, x):
        embed, dense = nn.Embed(5, 4, dtype=jnp.float16), nn.Dense(4, dtype=jnp.float16)
        return embed.attend(dense(dense(embed(x))))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("model", [Stack(), Tied()], ids=lambda m: type(m).__name__)
def test_lifted_and_shared_modules_train(model):
    x = jnp.arange(5) if isinstance(model, Tied) else jnp.asarray(X)
    y = jnp.eye(5) if isinstance(model, Tied) else jnp.asarray(X[:, ::-1])
    policy = "fp16" if isinstance(model, Tied) else POLICY  # no norms in it
    tx = jaxmp.mixed_precision(optax.adam(0.03), policy, loss_scale=jaxmp.DynamicLossScale(2.0**8, hysteresis=1))
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    state = jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy=policy)
    dtypes = {jax.tree_util.keystr(p): str(v.dtype) for p, v in jax.tree_util.tree_leaves_with_path(state.params)}
    assert {d for p, d in dtypes.items() if "Norm" in p} <= {"float32"}
    assert {d for p, d in dtypes.items() if "Norm" not in p} == {"float16"}

    def loss_fn(params, factor):
        return squared_error(model.apply({"params": params}, x), y) * factor

    @jax.jit
    def step(state, factor):
        loss, grads = jaxmp.value_and_grad(loss_fn)(state.params, factor, opt_state=state.opt_state)
        return state.apply_gradients(grads=grads), loss, grads

    first, loss, grads = step(state, 1.0)
    exact = jax.jit(jax.grad(loss_fn))(params, 1.0)  # the float32 params
    unscaled = jax.tree.map(lambda g: g.astype(F32) / 2.0**8, grads)
    scale = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(exact))
    assert_close(unscaled, exact, atol=0.02 * scale)
    skipped, _, _ = step(first, np.nan)
    assert_moved(skipped.params, first.params)
    assert_moved(guarded(skipped.opt_state), guarded(first.opt_state))
    state = skipped
    for _ in range(20):
        state, last, _ = step(state, 1.0)
    assert last < 0.5 * loss
    assert_exact((state.metrics["skipped_steps"], state.step), (np.int32(1), np.int32(21)))
    masters = jaxmp.get_master_params(state.opt_state, state.params)
    assert_exact(POLICY.cast_to_param(masters), state.params)


def test_frozen_dicts_are_params_too():
    params = flax.core.freeze({"Dense_0": {"kernel": jnp.ones((2, 2))}})
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "bf16")
    state = jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=tx, policy="bf16")
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    assert_exact(state.params, flax.core.freeze({"Dense_0": {"kernel": jnp.zeros((2, 2), jnp.bfloat16)}}))


def test_a_train_state_is_a_pytree_of_arrays():
    state = make_state()
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))
    assert_moved(jax.tree.map(jnp.asarray, restored), state)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    moved = jax.device_put(state, NamedSharding(mesh, P()))
    assert all(len(x.devices()) == 2 for x in jax.tree.leaves(moved))


def test_a_policy_needs_an_optimizer_with_masters():
    with pytest.raises(ValueError, match=r"must keep masters for policy=; got none. Call jaxmp.mixed_precision"):
        jaxmp.linen.TrainState.create(
            apply_fn=None, params={"w": jnp.ones(1)}, tx=jaxmp.unscale_and_skip(optax.sgd(0.1)), policy="fp16"
        )


# The policy of a TrainState


class Plain(nn.Module):
    """No dtype anywhere."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(8)(x)))


PLAIN_X = np.concatenate([X, X], 1)  # sums over eight elements: those of four are float32


def plain_loss(params, x):
    return jnp.mean(Plain().apply({"params": params}, x) ** 2)


def plain_step(state, x):
    loss, grads = jaxmp.value_and_grad(plain_loss)(state.params, x, opt_state=state.opt_state)
    return state.apply_gradients(grads=grads), loss


@functools.cache
def plain_state(policy="fp16", cls=jaxmp.linen.TrainState, chained=False):
    before = jaxmp.reduce_gradients(None) if chained else None
    tx = jaxmp.mixed_precision(optax.adam(1e-2), policy, before=before)
    params = jax.jit(Plain().init)(jax.random.key(0), PLAIN_X)["params"]
    return cls.create(apply_fn=Plain().apply, params=params, tx=tx, policy=policy)


def test_a_train_state_carries_its_policy_through_every_transformation():
    state = plain_state()
    assert state.policy == jaxmp.get_policy("fp16")
    expected = matmuls(lambda x: plain_step(state, x), PLAIN_X)  # closed over
    assert expected == {"float16": 5}
    over_steps = functools.partial(jax.lax.scan, plain_step)
    assert matmuls(plain_step, state, PLAIN_X) == expected
    assert matmuls(jax.jit(plain_step), state, PLAIN_X) == expected
    assert matmuls(over_steps, state, PLAIN_X[None]) == expected
    assert matmuls(jax.vmap(plain_step, in_axes=(None, 0)), state, PLAIN_X[None]) == expected
    assert matmuls(plain_step, state.replace(step=state.step + 1), PLAIN_X) == expected
    assert matmuls(plain_step, plain_state(chained=True), PLAIN_X) == expected
    assert matmuls(plain_step, plain_state(cls=OurState), PLAIN_X) == expected
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))
    assert matmuls(plain_step, restored, PLAIN_X) == expected


def test_the_policy_is_no_part_of_the_pytree_of_the_optimizer():
    state = plain_state("bf16")
    plain = state.tx.init(state.params)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(plain)
    assert not hasattr(plain, "policy")  # the optimizer's own state was not written to
    assert jax.tree.structure(state) != jax.tree.structure(plain_state("fp16"))  # static: another program
    assert set(flax.serialization.to_state_dict(state)) == {"step", "params", "opt_state"}
    without = jaxmp.linen.TrainState.create(apply_fn=None, params=state.params, tx=state.tx)
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


# ---------------------------------------------------------------------------------------------------------------------
# replace


def started(policy="bf16", inner=None):
    params = {"a": {"w": jnp.linspace(1.0, 2.0, 5)}, "b": jnp.ones(2)}
    tx = jaxmp.mixed_precision(optax.adam(0.1) if inner is None else inner, policy, loss_scale=None)
    return jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=tx, policy=policy)


def test_the_same_optimizer_with_another_rate_takes_the_state():
    state = started(inner=optax.sgd(0.1))
    new = state.replace(tx=jaxmp.mixed_precision(optax.sgd(1.0), "bf16"))
    new = new.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    assert_exact(new.params["b"], jnp.zeros(2, jnp.bfloat16))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["bf16", "fp32"])
@pytest.mark.parametrize("change", [lambda p: p, lambda p: jax.tree.map(lambda x: 2 * x, p)], ids=["same", "other"])
def test_params_in_other_containers_come_into_those_of_the_state(policy, change):
    state = started(policy)
    plain = state.reload(change(state.params))
    boxed = jax.tree.map(lambda x: nn.Partitioned(x, (None,)), change(state.params))
    for given in (flax.core.freeze(change(state.params)), boxed):
        new = state.reload(given)
        assert jax.tree.structure(new) == jax.tree.structure(state)
        grads = jax.tree.map(jnp.ones_like, state.params)
        assert_same_program(new.apply_gradients(grads=grads).params, plain.apply_gradients(grads=grads).params)


def test_a_field_by_nearly_its_name_is_refused():
    """Other names are arguments of the optimizer: they would be dropped."""
    state = make_state()
    grads = jax.tree.map(jnp.zeros_like, state.params)
    with pytest.raises(TypeError, match="takes fields of the state; got batch_stat, for batch_stats"):
        state.apply_gradients(grads=grads, batch_stat=state.batch_stats)
    assert state.apply_gradients(grads=grads, value=jnp.float32(0.0)).step == 1

    class WithValues(OurState):
        values: Any = None

    state = make_state(WithValues, policy=POLICY)
    assert state.apply_gradients(grads=grads, value=jnp.float32(0.0)).step == 1
