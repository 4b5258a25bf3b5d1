"""fp8 scales from one batch before the first step: at any depth, and in every way to run a step."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_exact, assert_moved
from jaxmp._src.base import tree_paths
from jaxmp.fp8 import DelayedScaling, is_scale
from policy_steps import filled, nothing_read
from regimes import DEVICES, REGIMES

SIDE, DEPTH = 16, 4
RECIPE = DelayedScaling(amax_history_len=4)
X = np.random.default_rng(0).normal(size=(8 * SIDE, SIDE)).astype(np.float32)
W = [np.random.default_rng(i).normal(size=(SIDE, SIDE)).astype(np.float32) / 6 for i in range(DEPTH)]
FP8 = functools.partial(jaxmp.linen.Fp8DotGeneral, recipe=RECIPE)


class Stack(nn.Module):
    dtype: object = jnp.bfloat16

    @nn.compact
    def __call__(self, x):
        for _ in range(DEPTH):
            x = nn.Dense(SIDE, use_bias=False, dtype=self.dtype, dot_general_cls=FP8)(x)
        return x


MODEL = Stack()


def loss_fn(params, x):
    return 1e-4 * jnp.mean(MODEL.apply({"params": params}, x).astype(jnp.float32) ** 2)


@functools.cache
def params32():
    params = filled(MODEL.init, jax.random.key(0), X)["params"]
    return {name: layer | {"kernel": w} for (name, layer), w in zip(sorted(params.items()), W, strict=True)}


def make(policy="fp8", **kwargs):
    """(tx, params, opt_state)."""
    tx = jaxmp.mixed_precision(optax.sgd(1e-3), policy, recipe=RECIPE, **kwargs)
    return tx, jaxmp.get_policy(policy).cast_to_param(params32()), tx.init(params32())


@functools.cache
def calibrated():
    """The params and state of one device, by the compiled calibration."""
    tx, params, opt_state = make()
    run = jax.jit(lambda params, x, opt_state: jaxmp.fp8.calibrate(loss_fn, params, x, tx=tx, opt_state=opt_state))
    return jax.device_get(run(params, X, opt_state))


def exact_amaxes():
    """Amaxes of all tensors of the stack in float64, without a rounding, by layer: lhs, rhs, grad."""
    inputs = [X.astype(np.float64)]
    for w in W:
        inputs.append(inputs[-1] @ w)
    grad = 2e-4 * inputs[-1] / inputs[-1].size
    amaxes = []
    for w, x in zip(reversed(W), reversed(inputs[:-1]), strict=True):
        amaxes.append(tuple(np.max(np.abs(t)) for t in (x, w, grad)))
        grad = grad @ w.T
    return amaxes[::-1]


def scales(params):
    return {path: x for path, x in tree_paths.leaves_by_path(params).items() if is_scale(path)}


def check(params, opt_state):
    """Each scale is that of the exact amax, or its neighbour where the amax lies close to a power of two."""
    for i, amaxes in enumerate(exact_amaxes()):
        leaves = {name.split("_")[1]: x for name, x in params[f"Dense_{i}"]["Fp8DotGeneral_0"].items()}
        for name, amax, limit in zip(("lhs", "rhs", "grad"), amaxes, (448.0, 448.0, 57344.0), strict=True):
            low, high = (np.floor(np.log2(limit / (amax * slack))) for slack in (1.2, 0.8))
            assert low <= float(leaves[name]) <= high, (i, name, float(leaves[name]), amax)
    metrics = jaxmp.get_metrics(opt_state)
    assert float(metrics["fp8/unused"]) == float(metrics["fp8/lost_gradients"]) == 0


@pytest.mark.thorough(0)
def test_one_pass_fills_all_histories_and_changes_nothing_else():
    """Without it the metrics count the gradients that are lost."""
    tx, params, opt_state = make()
    new, state = calibrated()
    check(new, state)
    is_history = lambda path: "fp8_scales" in path or is_scale(path)  # noqa: E731
    for before, after in ((params, new), (opt_state, state)):
        before, after = tree_paths.leaves_by_path(before), tree_paths.leaves_by_path(after)
        assert list(before) == list(after)
        others = [path for path in before if not is_history(path)]
        assert others
        assert_moved([after[path] for path in others], [before[path] for path in others])

    @jax.jit
    def step(params, opt_state):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, X, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, grads, opt_state, params)[1]

    assert float(jaxmp.get_metrics(step(params, opt_state))["fp8/lost_gradients"]) == DEPTH - 1
    assert float(jaxmp.get_metrics(step(new, state))["fp8/lost_gradients"]) == 0


@pytest.mark.thorough(0)
def test_weights_that_were_loaded_are_evaluated_within_the_rounding_of_fp8():
    tx, params, opt_state = make()
    x = X / np.float32(2**10)  # most of it is subnormal in e4m3
    exact = functools.reduce(np.matmul, W, x.astype(np.float64))
    evaluate = jax.jit(lambda params: MODEL.apply({"params": params}, x).astype(jnp.float32))

    def error(params):
        return np.linalg.norm(evaluate(params) - exact) / np.linalg.norm(exact)

    new, _ = jax.jit(lambda p, s: jaxmp.fp8.calibrate(loss_fn, p, x, tx=tx, opt_state=s))(params, opt_state)
    of_roundings = np.sqrt(2 * DEPTH / 3) * 2.0**-4  # of the inputs and weights of all layers, each uniform within 2^-4
    assert error(new) < of_roundings < 0.5 < error(params)


def test_a_loss_scale_that_overflows_is_lowered_and_stays():
    tx, params, opt_state = make("fp16", loss_scale=jaxmp.DynamicLossScale(2.0**40, max_scale=2.0**60))
    model = Stack(jnp.float16)

    def loss(params, x):
        return 1e-4 * jnp.mean(model.apply({"params": params}, x).astype(jnp.float32) ** 2)

    with nothing_read():  # and nothing warns of a scale that no loss read
        new, state = jax.jit(functools.partial(jaxmp.fp8.calibrate, loss, tx=tx))(params, X, opt_state=opt_state)
    check(new, state)
    assert float(jaxmp.get_loss_scale(state)) == 2.0**40
    assert int(jaxmp.get_metrics(state)["skipped_steps"]) == 0


@pytest.mark.thorough(0)
def test_scales_that_are_no_powers_of_two_arrive_in_one_call():
    recipe = DelayedScaling(amax_history_len=4, power_of_two=False)
    layer = nn.Dense(SIDE, dot_general_cls=functools.partial(jaxmp.linen.Fp8DotGeneral, recipe=recipe))
    params = jax.jit(layer.init)(jax.random.key(0), X)["params"]
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=recipe)

    def loss(params, x):
        return 1e-9 * jnp.mean(layer.apply({"params": params}, x) ** 2)

    new, _ = jax.jit(functools.partial(jaxmp.fp8.calibrate, loss, tx=tx))(params, X, opt_state=tx.init(params))
    y = jax.jit(layer.apply)({"params": params}, X)
    scale = float(new["Fp8DotGeneral_0"]["fp8_grad_e5m2_scale"])
    expected = 57344 / (2e-9 * np.max(np.abs(y)) / y.size)
    np.testing.assert_allclose(scale, expected, rtol=0.05)


@pytest.mark.thorough(0)
def test_under_accumulation_and_with_aux():
    tx, params, opt_state = make()

    def loss(params, x, weight):
        return loss_fn(params, x) * weight, jnp.sum(x)

    run = jax.jit(functools.partial(jaxmp.fp8.calibrate, loss, tx=tx, has_aux=True, accumulate=4, accumulate_argnums=1))
    check(*run(params, X, 1.0, opt_state=opt_state))


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("how", "axis_name"),
    [("shard_map", "auto"), ("shard_map_unchecked", "auto"), ("jit_data", "auto"), ("pmap", "auto"), ("pmap", "data")],
)
def test_all_devices_get_the_scales_of_one(how, axis_name):
    """In pmap the axis is found, or named."""
    tx, params, opt_state = make()
    regime = REGIMES[how]

    def step(state, x, mean):
        new = jaxmp.fp8.calibrate(loss_fn, state[0], x, tx=tx, opt_state=state[1], axis_name=axis_name)
        return new, jnp.sum(x)

    new, _ = regime.compile(step)(regime.place((params, opt_state)), regime.shard(X))
    copies = regime.copies(new)
    assert len(copies) == DEVICES
    for copy in copies:
        assert_exact(scales(copy[0]), scales(calibrated()[0]))
    check(*copies[0])


@pytest.mark.thorough(0)
def test_nnx():
    model = nnx.Sequential(*(nnx.Linear(SIDE, SIDE, dtype=jnp.bfloat16, rngs=nnx.Rngs(i)) for i in range(DEPTH)))
    jaxmp.nnx.to_fp8(model, RECIPE, filter=("*",))
    optimizer = jaxmp.nnx.Optimizer(model, make()[0], policy="fp8")

    def loss(model, x):
        return 1e-6 * jnp.mean(model(x).astype(jnp.float32) ** 2)

    nnx.jit(lambda model, optimizer, x: optimizer.calibrate(model, loss, x))(model, optimizer, X)
    metrics = jaxmp.get_metrics(optimizer.opt_state)
    assert float(metrics["fp8/lost_gradients"]) == float(metrics["fp8/unused"]) == 0
    moved = [float(x) for path, x in tree_paths.leaves_by_path(nnx.state(model)).items() if is_scale(path)]
    assert len(moved) == 3 * DEPTH and all(moved)


@pytest.mark.thorough(0)
def test_what_cannot_be_calibrated_is_refused():
    tx, params, opt_state = make()
    with pytest.raises(ValueError, match="opt_state must hold amax histories; got none"):
        jaxmp.fp8.calibrate(loss_fn, params, X, tx=tx, opt_state=optax.adam(1e-3).init(params))
    many = optax.MultiSteps(tx, 2).gradient_transformation()
    with pytest.raises(ValueError, match=r"must stand around MultiSteps; got it inside"):
        jaxmp.fp8.calibrate(loss_fn, params, X, tx=many, opt_state=many.init(params))
    with pytest.raises(ValueError, match=r"amaxes must be finite; got (inf|nan) at Dense_0/.*lhs"):
        jaxmp.fp8.calibrate(loss_fn, params, np.full_like(X, np.inf), tx=tx, opt_state=opt_state)


def test_a_train_state_runs_the_loss_under_its_policy():
    """As the README writes it: no `policy=` in the call, and a model without a dtype."""
    model = nn.Sequential([nn.Dense(SIDE) for _ in range(3)])
    params = filled(jaxmp.autocast(model.init, "fp8"), jax.random.key(0), X)["params"]
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8")
    state = jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy="fp8")

    def loss(params, x):
        return jnp.mean(model.apply({"params": params}, x) ** 2)

    new = jax.jit(lambda state: state.calibrate(loss, X))(state)
    assert int(new.step) == 0
    assert float(new.metrics["fp8/unused"]) == float(new.metrics["fp8/lost_gradients"]) == 0
