"""What a cast computes before an fp8 layer is right however the step is split: the kernel gets its own arrays."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from pallas_kernels import backend as backends, passes

pytestmark = pytest.mark.skipif(backends.why_no_kernels() is not None, reason=str(backends.why_no_kernels()))
POLICY = jaxmp.get_policy("fp8")
DEVICES, SIDE = 8, 64
X = np.random.default_rng(0).normal(size=(DEVICES, 64, SIDE)).astype(np.float32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        a, b = (nn.Dense(SIDE, name=name)(h) for name in "ab")
        return x + nn.Dense(SIDE, name="down")(nn.silu(a) * b)


class Net(nn.Module):
    in_scan: bool = False

    @nn.compact
    def __call__(self, x):
        if not self.in_scan:
            return nn.remat(Block)()(Block()(x))
        split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
        return nn.scan(lambda block, x, _: (block(x), None), **split)(Block(), x, None)[0]


def job(in_scan=False):
    """(a loss, a state)."""

    def everywhere(path, layer):
        return True

    def apply(params, x):
        with jaxmp.fp8.autocast(POLICY.recipe, filter=everywhere):
            return model.apply({"params": params}, x)

    model = Net(in_scan)
    with jaxmp.fp8.autocast(POLICY.recipe, filter=everywhere):
        params = jax.jit(model.init)(jax.random.key(0), X)["params"]
    state = jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1), policy=POLICY)
    return lambda params, x: jnp.mean(apply(params, x).astype(jnp.float32) ** 2), state


def step(loss, state, x, **how):
    return jaxmp.value_and_grad(loss, **how)(state.params, x, opt_state=state.opt_state)


def on_a_mesh(loss, state, *, is_split):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

    def placed(x):
        rows = is_split and np.ndim(x) > 0 and x.shape[0] % DEVICES == 0
        return jax.device_put(x, NamedSharding(mesh, P("data") if rows else P()))

    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    return jax.jit(functools.partial(step, loss))(jax.tree.map(placed, state), x)


def in_pmap(loss, state):
    def mean(state, x):
        found, grads = step(loss, state, x)
        return jax.lax.pmean((found, grads), "data")

    copies = jax.tree.map(lambda x: jnp.stack([x] * DEVICES), state)
    return jax.tree.map(lambda x: x[0], jax.pmap(mean, axis_name="data")(copies, X[:, None]))


def in_one(loss, state):
    return jax.jit(functools.partial(step, loss))(state, X)


REGIMES = {
    "plain": in_one,
    "batch split": functools.partial(on_a_mesh, is_split=False),
    "all split": functools.partial(on_a_mesh, is_split=True),
    "pmap": in_pmap,
    "accumulate": lambda loss, state: jax.jit(functools.partial(step, loss, accumulate=2, accumulate_argnums=1))(
        state, X
    ),
}


@pytest.fixture
def computed(monkeypatch):
    """The names of passes that compute what they cast; here XLA computes it from what the kernel would read."""
    names, run_or = [], passes.run_or

    def on_this_device(plan, instead, args, backend="auto", **more):
        if plan.name != "computed_cast_transpose_amax" or passes.why_not(plan, args):
            return run_or(plan, instead, args, "xla", **more)
        names.append("gradient" if plan.dtype == jnp.float8_e5m2 else "operand")
        return passes._reference(plan, *args)

    def switch():
        monkeypatch.setattr(passes, "run_or", on_this_device)
        jax.clear_caches()
        return names

    yield switch
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.thorough(0)
@pytest.mark.parametrize("regime", [*REGIMES, "scan"])
def test_the_numbers_are_those_of_casts_alone(regime, computed):
    """Up to roundings of the activations to bfloat16, which differ by one here and there."""
    run = REGIMES.get(regime, in_one)
    expected = run(*job(regime == "scan"))
    names = computed()
    got = run(*job(regime == "scan"))
    assert {*names} == ({"operand"} if regime == "scan" else {"operand", "gradient"})  # a scan keeps no equations
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 0.1 * np.linalg.norm(b) + 1e-9
