"""`compress_moments` round optax's optimizers: what is stored, what is kept, and that training goes on as it did."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_exact, assert_moved, assert_same_program
from jaxmp._src.transforms import compress
from pallas_kernels.moments import Quantized

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2),
    "adam with mu in bfloat16": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "nadam": optax.nadam(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "lion": optax.lion(1e-3),
    "sgd momentum": optax.sgd(1e-2, momentum=0.9),
    "sgd nesterov": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "rmsprop": optax.rmsprop(1e-3, momentum=0.9),
    "centered rmsprop": optax.rmsprop(1e-3, centered=True),
    "adagrad": optax.adagrad(1e-2),
    "clip and adam": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
}
SHAPES = {"kernel": (16, 256), "bias": (256,), "odd": (33, 130), "scalar": ()}


def normal(seed: int, *names: str, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.normal(size=SHAPES[name]), dtype) for name in names or SHAPES}


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("name", "dtype"), [("adam", dtype) for dtype in DTYPES] + [(name, "int8") for name in OPTIMIZERS if name != "adam"]
)
def test_what_is_stored(name, dtype):
    """Moments in their dtypes, small and odd leaves in float32 where there are scales; all else as it was; and the
    same after an update: structure, shapes, dtypes.
    """
    inner, params = OPTIMIZERS[name], normal(0)
    tx = compress.compress_moments(inner, dtype)
    state, plain = jax.jit(tx.init)(params), jax.eval_shape(inner.init, params)
    assert state.compress_count.dtype == jnp.int32 and state.compress_count == 0
    moments = []

    def look(x: Any, signed: bool, number: int) -> Any:
        moments.append((x, signed))
        return jnp.zeros(x.codes.shape if isinstance(x, Quantized) else x.shape)

    as_plain = compress.map_moments(look, state.compressed)
    assert jax.tree.structure(as_plain) == jax.tree.structure(plain)
    assert len(moments) % len(params) == 0 and moments
    for x, signed in moments:
        if dtype in ("float32", "bfloat16"):
            assert x.dtype == dtype
        elif isinstance(x, Quantized):
            assert x.codes.shape == (16, 256)
            assert x.codes.dtype == ("uint8" if dtype == "int8" and not signed else dtype)
            assert (x.scales.shape, x.scales.dtype) == ((16, 1), jnp.float32)
        else:
            assert x.dtype == jnp.float32 and x.shape != (16, 256)
    updates, after = jax.eval_shape(tx.update, normal(1), state, params)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, jax.eval_shape(lambda: state))
    assert jax.tree.map(lambda u: (u.shape, u.dtype), updates) == jax.tree.map(lambda p: (p.shape, p.dtype), params)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", ["adamw", "adagrad"])
def test_float32_changes_nothing(name):
    inner, params = OPTIMIZERS[name], normal(0, "bias")
    tx = compress.compress_moments(inner, jnp.float32)
    state, plain = tx.init(params), inner.init(params)
    assert_exact(state.compressed, plain)  # an accumulator that starts above zero, too
    for i in range(2):
        grads = normal(i, "bias")
        updates, state = tx.update(grads, state, params)
        expected, plain = inner.update(grads, plain, params)
        assert_same_program((updates, state.compressed), (expected, plain))
    assert_exact(state.compress_count, np.int32(2))


TARGET = np.random.default_rng(5).normal(size=(16, 256)).astype(np.float32)


@functools.cache
def losses_of(name: str, dtype: str | None) -> np.ndarray:
    """Sixty steps on a quadratic; without a dtype, of optax's own optimizer."""
    tx = compress.compress_moments(OPTIMIZERS[name], dtype) if dtype else OPTIMIZERS[name]

    def step(carry, _):
        params, state = carry
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((p["kernel"] - TARGET) ** 2))(params)
        updates, state = tx.update(jax.tree.map(lambda g: g * 500, grads), state, params)
        return (optax.apply_updates(params, updates), state), loss

    params = normal(0, "kernel")
    return np.asarray(jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), length=60)[1])(params))


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("adamw", dtype) for dtype in DTYPES] + [(name, "int8") for name in ("lion", "sgd momentum", "rmsprop")],
)
def test_training_goes_on_as_it_did(name, dtype):
    """Beside optax's own moments, in float32."""
    rtol = {"float32": 1e-6, "bfloat16": 0.02}.get(dtype, 0.1)
    np.testing.assert_allclose(losses_of(name, dtype), losses_of(name, None), rtol=rtol, atol=2e-3)


def test_no_two_moments_share_noise():
    """Two transforms of a chain with moments of one sign, and the leaves of each."""
    tx = compress.compress_moments(optax.chain(optax.trace(0.9), optax.trace(0.9)), jnp.bfloat16)
    numbers = []
    state = jax.eval_shape(tx.init, normal(0))
    compress.map_moments(lambda x, signed, number: numbers.append((signed, number)), state.compressed)
    assert len(set(numbers)) == len(numbers) == 8


def test_the_first_codes_are_computed_by_the_program():
    """Not by XLA while it compiles: it folds zeros element by element, minutes for the embedding of a GPT-2."""
    tx = compress.compress_moments(optax.adam(1e-2), jnp.int8)
    size = 64 * 256
    cost = jax.jit(tx.init).lower({"w": jnp.zeros((64, 256))}).compile().cost_analysis()
    assert cost["bytes accessed"] >= 2 * 2 * size * 4  # both moments are written and read in float32


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("policy", "dtype"), [("fp16", "int8"), ("fp16", "float8_e5m2"), ("bf16", "bfloat16"), ("bf16", "float32")]
)
def test_skipped_steps_keep_codes_and_scales(policy, dtype):
    params = jaxmp.get_policy(policy).cast_to_param(normal(0, "kernel", "bias"))
    loss_scale = {"fp16": "auto", "bf16": 4.0}[policy]
    tx = jaxmp.mixed_precision(compress.compress_moments(optax.adamw(1e-2), dtype), policy, loss_scale=loss_scale)
    step = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
    good = normal(1, "kernel", "bias", dtype=params["bias"].dtype)
    params, state = step(good, jax.jit(tx.init)(params), params)
    bad = good | {"kernel": good["kernel"].copy()}
    bad["kernel"][3, 3] = np.inf
    same, skipped = step(bad, state, params)
    assert bool(jaxmp.get_metrics(skipped)["skipped"])
    assert_moved(same, params)
    for name in ("compressed", "compress_count", "master_params"):
        assert_moved(optax.tree.get(skipped, name), optax.tree.get(state, name))
    moved, after = step(good, skipped, same)
    assert step._cache_size() == 1
    assert_exact(optax.tree.get(after, "compress_count"), np.int32(2))
    assert np.any(np.asarray(moved["kernel"]) != np.asarray(params["kernel"]))


# Errors


def test_an_unknown_dtype():
    with pytest.raises(ValueError, match="state_dtype must be float32, bfloat16, int8, .*float8_e5m2; got int4"):
        compress.compress_moments(optax.adam(1e-3), "int4")


def test_nothing_to_compress():
    tx = compress.compress_moments(optax.sgd(0.1), jnp.int8)
    message = r"needs an optimizer with moments \(mu, trace, .*sum_of_squares\); got \w+. Wrap"
    with pytest.raises(ValueError, match=message):
        tx.init(normal(0))


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    "make",
    [lambda: jaxmp.compress_moments(optax.adam(1e-3), jnp.int8), lambda: jaxmp.fused_adamw(1e-3, state_dtype=jnp.int8)],
    ids=["compress", "fused"],
)
def test_a_large_param_that_keeps_float32_moments_is_named(make):
    shapes = {"head": (64, 5001), "odd": (300001,), "body": (64, 4096), "b": (5001,)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    tx = jaxmp.mixed_precision(make(), "bf16")
    with pytest.warns(UserWarning, match=r"got \(64, 5001\) at head and 1 more.* 5024 in place of 5001"):
        jax.eval_shape(tx.init, params)
    del params["head"], params["odd"]
    jax.eval_shape(tx.init, params)


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("int8", "int8"),
        ("float32", "int8"),
        ("int8", "float32"),
        ("bfloat16", "float32"),
        ("float8_e4m3fn", "float8_e5m2"),
    ],
)
def test_moments_in_another_dtype_than_the_optimizers_are_refused(stored, wanted):
    """They would keep their own dtype from step to step, without a word."""
    params = {"w": np.ones((64, 64), np.float32)}

    def fused(dtype):
        return jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3, state_dtype=dtype), "fp32")

    def wrapped(dtype):
        return jaxmp.compress_moments(optax.adam(1e-3), dtype)

    for way in (
        lambda: jaxmp.apply_gradients(fused(wanted), params, fused(stored).init(params), params),
        lambda: fused(wanted).update(params, fused(stored).init(params), params),
        lambda: wrapped(wanted).update(params, wrapped(stored).init(params), params),
    ):
        if stored == wanted:
            jax.eval_shape(way)
            continue
        with pytest.raises(ValueError, match=rf"moments must have the optimizer's state_dtype, {wanted}; got ") as e:
            jax.eval_shape(way)
        assert "CompressedState" in str(e.value) or f"got {stored} at" in str(e.value)
