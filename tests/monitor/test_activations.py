"""Statistics of activations: of linen, nnx and named scopes, under every transformation, and the gradients stay."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxmp
from helpers import assert_within_ulps
from jaxmp.monitor import watch_activations
from regimes import AXIS, mesh_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)


class Block(nn.Module):
    factor: float = 1.0

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(4, use_bias=False, dtype=jnp.float16, name="up")(jnp.sin(x)) * self.factor


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Block(name="zebra")(x.astype(jnp.float16))
        x = Block(factor=6e4, name="middle")(x)
        return Block(name="apple")(x).astype(jnp.float32)


BLOCKS = ("zebra", "middle", "apple")
PARAMS = {name: {"up": {"kernel": RNG.normal(size=(4, 4)).astype(np.float32)}} for name in BLOCKS}


def loss_fn(params, x):
    return jnp.mean(Net().apply({"params": params}, x))


watched_loss = jax.jit(watch_activations(loss_fn))
watched_up = jax.jit(
    lambda params, x, step: watch_activations(loss_fn, filter=("*/up",), when=step % 10 == 0)(params, x)[1]
)


def test_modules_in_the_order_of_computation():
    """With the numbers that flax's intermediates show."""
    out, stats = watched_loss(PARAMS, X)
    order = [f"{block}{layer}" for block in BLOCKS for layer in ("/up", "")]
    assert [name for name in stats.names if name] == order
    assert set(stats.dtypes) == {"float16"}
    _, state = jax.jit(lambda params, x: Net().apply({"params": params}, x, capture_intermediates=True))(PARAMS, X)
    for block in BLOCKS:
        seen = np.asarray(state["intermediates"][block]["__call__"][0], np.float32)
        finite = seen[np.isfinite(seen)]
        np.testing.assert_allclose(stats[block]["amax"], np.abs(finite).max(initial=0.0), rtol=2e-2)
        assert stats[block]["nonfinite"] == np.mean(~np.isfinite(seen))
    assert not np.isfinite(out)  # a factor of 6e4 overflows


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.thorough(0)), 2])
def test_gradients_stay_as_they_are(accumulate):
    def small(params, x):
        return loss_fn(params, x * 1e-4)  # nothing overflows

    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp16").init(PARAMS)
    options = {"accumulate": accumulate, "accumulate_argnums": (1,)} if accumulate > 1 else {}

    @jax.jit
    def plain(params, x):
        return jaxmp.value_and_grad(small, **options)(params, x, opt_state=opt_state)

    @jax.jit
    def watching(params, x):
        watched = watch_activations(small)
        (loss, stats), grads = jaxmp.value_and_grad(watched, has_aux=True, **options)(params, x, opt_state=opt_state)
        return (loss, grads), jaxmp.monitor.step_stats({}, (), {}, activations=stats)

    watched, stats = watching(PARAMS, X)
    assert_within_ulps(watched, plain(PARAMS, X), 4 * 2**13)  # roundings of float16, as ulps of float32
    assert stats.activations.amax.shape == (len(stats.activations.names),)
    whole = watched_loss(PARAMS, X * np.float32(1e-4))[1]
    np.testing.assert_allclose(stats.activations.amax, whole.amax, rtol=1e-3)


def test_a_condition_and_a_filter():
    on, off = watched_up(PARAMS, X, 0), watched_up(PARAMS, X, 1)
    assert on.names == off.names == ("zebra/up", "middle/up", "apple/up")
    assert on.sampled and not off.sampled and float(on.amax[0]) > 0 and not np.any(off.amax)
    of_zebra = watch_activations(loss_fn, filter=lambda path: path == "zebra")
    assert jax.eval_shape(of_zebra, PARAMS, X)[1].names == ("zebra",)


def test_off_it_is_not_in_the_program():
    def program(f):
        return jax.jit(lambda *args: f(*args)).lower(PARAMS, X).as_text()

    off = watch_activations(loss_fn, when=False)
    assert off(PARAMS, X)[1] is None
    assert program(lambda *args: off(*args)[0]) == program(loss_fn)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            nn.remat(Step), variable_axes={"params": 0}, split_rngs={"params": True}, length=3, in_axes=nn.broadcast
        )
        return body(name="layers")(x, None)[0]


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(4, use_bias=False, name="dense")(x) * 3.0, None


def test_layers_in_a_scan_are_one_tensor():
    params = {"layers": {"dense": {"kernel": RNG.normal(size=(3, 4, 4)).astype(np.float32)}}}
    _, stats = jax.jit(watch_activations(lambda p, x: Scanned().apply({"params": p}, x)))(params, X)
    expected, x = 0.0, np.asarray(X)
    for kernel in np.asarray(params["layers"]["dense"]["kernel"]):
        y = x @ kernel
        expected, x = max(expected, np.abs(y).max()), 3 * y
    np.testing.assert_allclose(stats["layers/dense"]["amax"], expected, rtol=1e-5)


def test_nnx_modules_and_named_scopes():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.second = nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x):
            x = self.first(x)
            with jax.named_scope("gate"):
                x = x * 3
            return self.second(x)

    model = Model(nnx.Rngs(0))
    watched = watch_activations(lambda model, x: jnp.mean(model(x)))
    run = nnx.jit(lambda model, x: (watched(model, x)[1], nnx.value_and_grad(watched, has_aux=True)(model, x)[0][1]))
    stats, of_gradient = run(model, X)
    assert [name for name in stats.names if name] == ["first", "gate", "second"]
    np.testing.assert_allclose(stats["gate"]["amax"], 3 * stats["first"]["amax"], rtol=1e-6)
    assert "second" in of_gradient.names and float(of_gradient["second"]["amax"]) > 0


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["pmap", "shard_map"])
def test_parts_of_a_batch_give_the_whole(how):
    def look(params, x):
        return watch_activations(loss_fn)(params, x)[1]

    whole = jax.device_get(watched_loss(PARAMS, X)[1])
    if how == "pmap":
        run = jax.pmap(look, AXIS, in_axes=(None, 0), out_axes=None, devices=jax.devices()[:4])
        stats = run(PARAMS, X.reshape(4, 2, 4))
    else:
        stats = jax.jit(jax.shard_map(look, mesh=mesh_of(), in_specs=(P(), P(AXIS)), out_specs=P()))(PARAMS, X)
    assert stats.names == whole.names
    for name in ("amax", "zeros", "nonfinite", "overflow"):
        np.testing.assert_allclose(getattr(stats, name), getattr(whole, name), rtol=2e-3, err_msg=name)


def test_a_filter_that_matches_nothing_warns():
    with pytest.warns(UserWarning, match=r"filter=\): the pattern '\*dense_of_another_name\*' fits no module"):
        stats = jax.eval_shape(watch_activations(loss_fn, filter=("*dense_of_another_name*",)), PARAMS, X)[1]
    assert stats is not None and stats.names == ()
    with pytest.warns(UserWarning, match="chooses no module; leave it out to see all"):
        jax.eval_shape(watch_activations(loss_fn, filter=lambda path: False), PARAMS, X)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="fn must be a function; got ArrayImpl. Pass loss_fn itself, not its result"):
        watch_activations(jnp.ones(()))  # pyright: ignore[reportArgumentType]
