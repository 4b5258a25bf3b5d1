"""The order in which a compiled step on a CPU writes: it copies no donated buffer, and its results stay the same."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from pallas_kernels import backend

SIDE = 64
HUGE = 3e38  # its square is infinite: Adam's second moment cannot take it


OPTIMIZERS = {
    "fp32": lambda: jaxmp.mixed_precision(optax.adamw(1e-2), "fp32"),
    "fp16": lambda: jaxmp.mixed_precision(optax.adamw(1e-2), "fp16", loss_scale=1.0),
    "bf16": lambda: jaxmp.mixed_precision(optax.adamw(1e-2), "bf16"),
    "no masters": lambda: jaxmp.unscale_and_skip(optax.adamw(1e-2)),
    "split": lambda: jaxmp.mixed_precision(optax.adamw(1e-2), "bf16", remainder_bits=16),
    "fused": lambda: jaxmp.mixed_precision(jaxmp.fused_adamw(1e-2), "bf16"),
    "fused, split": lambda: jaxmp.mixed_precision(jaxmp.fused_adamw(1e-2), "bf16", remainder_bits=16),
}


def start(name, tx):
    rng = np.random.default_rng(0)
    params32 = {x: jnp.asarray(rng.normal(size=(SIDE, SIDE)), jnp.float32) for x in "ab"}
    dtype = {"fp16": jnp.float16, "fp32": jnp.float32, "no masters": jnp.float32}.get(name, jnp.bfloat16)
    params = jax.tree.map(lambda p: p.astype(dtype), params32)
    grads = {x: jnp.asarray(rng.normal(size=(SIDE, SIDE)), jnp.float32) for x in "ab"}
    return params, tx.init(params32), grads


def step(tx):
    return lambda params, opt_state, grads: jaxmp.apply_gradients(tx, grads, opt_state, params)


def numbers(params, opt_state):
    """All float arrays, with whole masters in place of remainders."""
    arrays = params, jaxmp.get_master_params(opt_state, params), opt_state
    return [x for x in jax.tree.leaves(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kept_elements_and_the_others_are_those_of_the_step_without_jit(name):
    tx = OPTIMIZERS[name]()
    params, opt_state, grads = start(name, tx)
    compiled = jax.jit(step(tx))
    eager = step(tx)
    found = expected = params, opt_state
    for huge in (False, True, False):
        given = grads | {"a": grads["a"].at[0, :3].set(HUGE)} if huge else grads
        found, expected = compiled(*found, given), eager(*expected, given)
        metrics = jaxmp.get_metrics(found[1])
        assert metrics["kept_elements"] == (3 if huge else 0) and metrics["skipped_steps"] == 0
        for got, x in zip(jax.tree.leaves(numbers(*found)), jax.tree.leaves(numbers(*expected)), strict=True):
            assert got.dtype == x.dtype
            rtol = 2e-5 if got.dtype == jnp.float32 else 2**-7
            np.testing.assert_allclose(np.float64(got), np.float64(x), rtol=rtol, atol=1e-6)
    skipped = compiled(*found, grads | {"b": grads["b"].at[1, 1].set(jnp.nan)})
    for got, x in zip(jax.tree.leaves(skipped[0]), jax.tree.leaves(found[0]), strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(x))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["fp16", "bf16", "split"])
def test_a_step_traced_for_a_gpu_counts_and_keeps_the_same_elements(name, monkeypatch):
    monkeypatch.setattr(backend, "default_platform", lambda: "gpu")
    given = {"remainder_bits": 16} if name == "split" else {"loss_scale": 1.0} if name == "fp16" else {}
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), "fp16" if name == "fp16" else "bf16", **given)
    rng = np.random.default_rng(0)
    shapes = {"m": (300, 128), "n": (300, 128), **{f"b{i}": (8,) for i in range(9)}}
    params32 = {x: jnp.asarray(rng.normal(size=shape), jnp.float32) for x, shape in shapes.items()}
    if name == "fp16":
        params32 |= {"n": params32["n"].at[0].set(1e5), "b8": params32["b8"].at[1:3].set(-1e6)}
    params = jaxmp.get_policy("fp16" if name == "fp16" else "bf16").cast_to_param(params32)
    ordinary = {x: jnp.asarray(rng.normal(size=shape), jnp.float32) for x, shape in shapes.items()}
    huge = ordinary | {"m": ordinary["m"].at[5:7].set(1e20), "b3": ordinary["b3"].at[2].set(-1e25)}
    broken = ordinary | {"n": ordinary["n"].at[299, 127].set(-jnp.inf)}
    found, compiled = (params, tx.init(params32)), jax.jit(step(tx))
    for grads, kept, skips in ((ordinary, 0, 0), (huge, 2 * 128 + 1, 0), (broken, 0, 1)):
        before, found = found, compiled(*found, grads)
        metrics = jaxmp.get_metrics(found[1])
        assert (metrics["kept_elements"], metrics["skipped_steps"]) == (kept, skips)
        assert metrics["saturated_params"] == (128 + 2 if name == "fp16" else 0)
        old, new = (jaxmp.get_master_params(state, params) for params, state in (before, found))
        stays = jax.tree.map(lambda o, n: np.asarray(o == n), old, new)
        for x in grads:
            np.testing.assert_array_equal(stays[x], np.full(shapes[x], True) if skips else np.abs(grads[x]) > 1e18)


@pytest.mark.thorough(2)
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA for CPU of jax 0.10 drops barriers too early")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the order is XLA's for CPU")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_donated_buffer_is_copied(name):
    tx = OPTIMIZERS[name]()
    args = start(name, tx)
    compiled = jax.jit(step(tx), donate_argnums=(0, 1)).lower(*args).compile()
    entry = compiled.as_text().partition("ENTRY")[2]
    copies = re.findall(rf"= \S*\[{SIDE},{SIDE}\]\S* copy\(", entry)
    assert not copies, entry
    size = sum(x.size for x in jax.tree.leaves(args[0]))
    # a byte of flags, half a byte of their sums, and either squares of gradients or the two halves of a master
    assert compiled.memory_analysis().temp_size_in_bytes <= 5.5 * size + 2000


def test_updates_are_added_to_the_params_of_the_caller():
    """A transform around the optimizer may pass other params, or change the updates."""
    params, grads = {"w": jnp.array([1.0, -2.0])}, {"w": jnp.array([0.5, 4.0])}
    inner = jaxmp.unscale_and_skip(optax.chain(optax.add_decayed_weights(1.0), optax.sgd(0.5)))

    def look_ahead(updates, state, params, **extra_args):
        return inner.update(updates, state, jax.tree.map(lambda p: 3 * p, params), **extra_args)

    ahead = optax.GradientTransformationExtraArgs(inner.init, look_ahead)
    doubled = optax.chain(inner, optax.scale(2.0))
    for tx, expected in ((inner, [0.25, -3]), (ahead, [-0.75, -1]), (doubled, [-0.5, -4])):
        new, _ = jax.jit(step(tx))(params, tx.init(params), grads)
        np.testing.assert_array_equal(new["w"], expected)


BOXED = {
    "masters": (lambda: optax.adamw(1e-2), None),
    "fused": (lambda: jaxmp.fused_adamw(1e-2), None),
    "fused int8": (lambda: jaxmp.fused_adamw(1e-2, state_dtype=jnp.int8), 8),
    "ema": (lambda: optax.chain(optax.sgd(0.1), jaxmp.ema_params(0.9)), None),
    "frozen": (lambda: frozen(optax.adam(1e-2)), None),
    "frozen, compressed": (lambda: frozen(jaxmp.compress_moments(optax.adam(1e-2), jnp.bfloat16)), None),
    "compressed, frozen": (lambda: jaxmp.compress_moments(frozen(optax.adam(1e-2)), jnp.bfloat16), None),
    "frozen, split": (lambda: frozen(optax.adam(1e-2)), 16),
}


def frozen(inner):
    return optax.multi_transform({"t": inner, "f": optax.set_to_zero()}, labels_of)


def labels_of(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "f" if "bias" in str(path) else "t", params)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", BOXED)
def test_state_keeps_the_boxes_of_nnx(name):
    """A step of nnx.split and merge: a lost box would stop the next step, or a scan. The numbers are those of dicts."""
    make, remainder_bits = BOXED[name]
    tx, policy = jaxmp.mixed_precision(make(), "bf16", remainder_bits=remainder_bits), jaxmp.get_policy("bf16")
    boxed = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    results = []
    for params32 in (boxed, nnx.to_pure_dict(boxed)):
        given = policy.cast_to_param(params32), tx.init(params32)
        new = jax.jit(step(tx))(*given, jax.tree.map(jnp.ones_like, params32))
        assert jax.tree.structure(new) == jax.tree.structure(given)
        of_average = [jaxmp.get_ema_params(new[1], new[0])] if name == "ema" else []
        results.append(jax.tree.leaves((jaxmp.get_master_params(new[1], new[0]), of_average)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=2**-20)


def test_boxes_without_masters():
    tx, params = jaxmp.unscale_and_skip(frozen(optax.adam(1e-2))), nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    given = params, tx.init(params)
    new = jax.eval_shape(step(tx), *given, params)
    assert jax.tree.structure(new) == jax.tree.structure(given)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("bits", [8, 16])
def test_a_skipped_step_keeps_the_bits_of_split_masters(bits):
    """Also of NaN, inf, -0.0 and subnormal params, and of remainders that no step has made."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "bf16", remainder_bits=bits)
    uppers = np.array([0x7FC0, 0xFF80, 0x8000, 0x0001, 0x3F80, 0x7F7F, 0x0000], np.uint16)
    lows = np.array([0, 1, -1, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1], f"int{bits}")
    params = {"w": jnp.asarray(np.repeat(uppers, len(lows))).view(jnp.bfloat16)}
    remainder = jnp.asarray(np.tile(lows, len(uppers)))
    opt_state = tx.init({"w": jnp.zeros(params["w"].shape)})
    opt_state = jax.tree.map(lambda x: remainder if x.dtype == remainder.dtype else x, opt_state)
    grads = {"w": jnp.full(params["w"].shape, jnp.nan)}
    new_params, new_state = jax.jit(step(tx))(params, opt_state, grads)
    assert jaxmp.get_metrics(new_state)["skipped_steps"] == 1
    np.testing.assert_array_equal(new_params["w"].view(jnp.uint16), params["w"].view(jnp.uint16))
    kept = [x for x in jax.tree.leaves(new_state) if x.dtype == remainder.dtype]
    np.testing.assert_array_equal(kept, [remainder])
