"""Kernels in fp8 that nobody trains: their values, and what reads them."""

import copy
import functools
import pickle

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_exact

W = np.random.default_rng(0).normal(size=(48, 32)).astype(np.float32)


def rounded(w, axis=-2):
    """By NumPy: a power of two for each column, and e4m3."""
    amax = np.abs(w).max(axis, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(amax / 448)))
    return (w / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


@pytest.mark.parametrize("factor", [1.0, 3e-30, 2e30])
def test_values_are_those_of_numpy(factor):
    w = W * np.float32(factor)
    kernel = jaxmp.fp8.freeze({"kernel": w})["kernel"]
    assert (kernel.q.dtype, kernel.log2_scale.dtype) == (jnp.float8_e4m3fn, jnp.int8)
    assert kernel.shape == w.shape and kernel.log2_scale.shape == (1, 32)
    assert_exact(jnp.asarray(kernel), rounded(w))
    assert_exact(jnp.asarray(kernel).astype(jnp.bfloat16).astype(jnp.float32), rounded(w))  # no second rounding


def test_a_stack_and_several_axes_have_their_own_columns():
    w = np.stack([W, 100 * W]).reshape(2, 3, 16, 32)
    kernel = jaxmp.fp8.freeze({"kernel": w})["kernel"]
    assert kernel.log2_scale.shape == (2, 3, 1, 32)
    assert_exact(np.asarray(kernel), rounded(w))
    assert_exact(np.asarray(jax.tree.map(lambda x: x[1], kernel)), rounded(w[1]))  # as lax.scan takes it apart


def test_zeros_and_what_is_not_finite():
    w = np.zeros((4, 3), np.float32)
    w[:, 1], w[2, 2], w[1, 2] = [1, np.inf, -np.inf, np.nan], 5, -0.0
    array = np.asarray(jaxmp.fp8.freeze({"kernel": w})["kernel"])
    assert_exact(array[:, 0], np.zeros(4, np.float32))
    assert array[0, 1] == 1 and np.isnan(array[1:, 1]).all()
    assert_exact(array[:, 2], w[:, 2])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_reads_in_the_dtype_it_had(dtype):
    kernel = jaxmp.fp8.freeze({"kernel": W.astype(dtype)})["kernel"]
    assert jnp.asarray(kernel).dtype == dtype and kernel.astype(jnp.float32).dtype == jnp.float32
    x = jnp.ones((2, 48), dtype)
    readings = (x @ kernel, jnp.dot(x, kernel), jnp.einsum("bi,ij->bj", x, kernel), x @ kernel[...])
    assert_exact(readings, (x @ jnp.asarray(kernel),) * 4)
    assert_exact(kernel[3], jnp.asarray(kernel)[3])


def test_only_what_fits_is_frozen():
    params = {"base": {"kernel": W, "bias": W[0]}, "lora": {"kernel": W, "ids": np.arange(3)}}
    frozen = jaxmp.fp8.freeze(params, "base/kernel")
    assert frozen["lora"]["kernel"] is W and frozen["base"]["bias"] is params["base"]["bias"]
    assert not isinstance(frozen["base"]["kernel"], np.ndarray)
    assert jaxmp.get_policy("fp16").cast_to_param(frozen)["base"]["kernel"].q.dtype == jnp.float8_e4m3fn
    shapes = jax.eval_shape(lambda p: jaxmp.fp8.freeze(p, "base/kernel"), params)["base"]["kernel"]
    assert (shapes.q.shape, shapes.log2_scale.shape) == ((48, 32), (1, 32))


@pytest.mark.parametrize(
    ("patterns", "parts"),
    [
        ("nothing", ("freeze must fit a leaf", "got none for 'nothing'", "a/bias, a/frozen, a/kernel")),
        ("*", ("floats with two axes or more", "float32[32] at a/bias")),
        ("a/frozen", ("got one that is frozen at a/frozen",)),
    ],
)
def test_other_leaves_are_refused(patterns, parts):
    frozen = jaxmp.fp8.freeze({"kernel": W})["kernel"]
    with pytest.raises(ValueError, match="freeze|frozen") as e:
        jaxmp.fp8.freeze({"a": {"bias": W[0], "frozen": frozen, "kernel": W}}, patterns)
    assert all(part in str(e.value) for part in parts)


def test_a_pattern_among_others_that_fits_nothing_is_told():
    with pytest.warns(UserWarning, match=r"freeze\(patterns\): the pattern '\*kernels' fits no param"):
        frozen = jaxmp.fp8.freeze({"kernel": W}, ("*kernels", "*kernel"))
    assert frozen["kernel"].q.shape == W.shape


def test_nobody_differentiates_it():
    frozen = jaxmp.fp8.freeze({"kernel": W})
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "bf16").init({"w": jnp.ones(2)})
    with pytest.raises(TypeError, match=r"got float8_e4m3fn at argument 0/kernel/q. Pass it in another argument"):
        jaxmp.value_and_grad(lambda p: jnp.sum(jnp.asarray(p["kernel"])))(frozen, opt_state=opt_state)


@pytest.mark.parametrize(("dtype", "largest"), [(jnp.float16, 65504.0), (jnp.bfloat16, 3.3e38)])
def test_no_finite_weight_becomes_infinite(dtype, largest):
    """e4m3 would round it up to 2^16 or 2^128: the number of e4m3 below is 1.875 times half of that."""
    kernel = jaxmp.fp8.freeze({"kernel": jnp.array([[largest, -largest], [1.0, 0.0]], dtype)})["kernel"]
    below = 1.875 * 2.0**15 if dtype == jnp.float16 else 1.875 * 2.0**127
    assert_exact(jnp.asarray(kernel).astype(jnp.float32)[0], np.float32([below, -below]))
    wide = jaxmp.fp8.freeze({"kernel": jnp.array([[65504.0], [1.0]])})["kernel"]  # float32 that a policy casts
    assert np.isfinite(np.asarray(wide).astype(np.float16)).all()
    between = np.float32([[65519.0], [1.0]])  # which float16 rounds down
    wide = jaxmp.fp8.freeze({"kernel": between})["kernel"]
    assert np.isfinite(between.astype(np.float16)).all() and np.isfinite(np.asarray(wide).astype(np.float16)).all()


BY_NUMBERS = {  # these change the dtype of the lock
    "halved": lambda a: a * 0.5,
    "average": lambda a: optax.incremental_update(a, a, 0.5),
    "cast": lambda a: a.astype(jnp.bfloat16),
    "twice": lambda a: 2 * a,
    "plus one": lambda a: a + 1,
    "minus itself": lambda a: a - 1 * a,
    "bounds": lambda a: jnp.clip(a, -1, 1),
    "pruned": lambda a: jnp.where(jnp.abs(a) < 1e-2, 0 * a, a),
    "running sums": lambda a: jnp.cumsum(a, 0),
}
IN_ITS_DTYPES = {
    "abs": jnp.abs,
    "ones": jnp.ones_like,
    "bounds, and back": lambda a: jnp.clip(a, -1, 1).astype(a.dtype),
    "noise": lambda a: (a + 0.3 * jax.random.normal(jax.random.key(0), a.shape).astype(a.dtype)).astype(a.dtype),
    "unlocked": lambda a: jnp.zeros_like(a) if a.dtype == bool else a,
}


@pytest.mark.thorough(5)
@pytest.mark.parametrize(
    ("change", "scale"),
    [*((name, 1.0) for name in BY_NUMBERS | IN_ITS_DTYPES), ("plus one", 300.0), ("bounds", 300.0)],
)
def test_a_kernel_that_others_computed_with_is_refused(change, scale):
    """By an error, or by NaN in a program where the dtypes stayed; also where exponents are 0 and more."""
    kernel = jaxmp.fp8.freeze({"kernel": W * np.float32(scale)})["kernel"]
    changed = jax.tree.map((BY_NUMBERS | IN_ITS_DTYPES)[change], kernel)
    says = "parts in" if change in BY_NUMBERS else "other numbers"
    for read in (jnp.asarray, np.asarray, lambda k: jnp.ones(48) @ k, lambda k: k[0], lambda k: k.astype(jnp.float32)):
        with pytest.raises(TypeError, match=f"a frozen kernel must stay as freeze made it; got {says}"):
            read(changed)
    autocast = jaxmp.autocast(lambda kernel: jnp.ones((2, 48)) @ kernel, "bf16")
    run = jax.jit(lambda kernel: (jnp.asarray(kernel), autocast(kernel)))
    if change in BY_NUMBERS:
        with pytest.raises(TypeError, match="got parts in"):
            run(changed)
    else:
        assert all(np.isnan(y).all() for y in run(changed))


@pytest.mark.parametrize("name", ["lion", "sgd"])
def test_an_optimizer_over_it_spoils_it_or_leaves_it(name):
    """Gradients of zeros, as one writes them to freeze a part of a tree; sgd changes nothing."""
    base = jaxmp.fp8.freeze({"kernel": W})
    tx = getattr(optax, name)(1e-3)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, base), state, params)
        return optax.apply_updates(params, updates), state

    params, state = base, jax.jit(tx.init)(base)
    for _ in range(3):
        params, state = step(params, state)
    if name == "sgd":
        assert_exact(params, base)
    else:
        assert np.isnan(jax.jit(jnp.asarray)(params["kernel"])).all()
        with pytest.raises(TypeError, match="train adapters by an optimizer of their own"):
            _ = params["kernel"] @ jnp.ones(32)


def test_what_moves_a_kernel_moves_its_guard():
    kernel = jaxmp.fp8.freeze({"kernel": np.stack([W, 3 * W, W / 5])})["kernel"]
    changes = [lambda a: a[1], lambda a: a[::-1], lambda a: jnp.flip(a, -1), lambda a: jnp.concatenate([a, a])]

    @jax.jit
    def run(kernel):
        moved = [jax.tree.map(change, kernel) for change in changes]
        return [jnp.asarray(k) for k in moved], [change(jnp.asarray(kernel)) for change in changes]

    assert_exact(*run(kernel))


def test_every_exponent_has_its_guard():
    sizes = 2.0 ** np.arange(-125, 127, dtype=np.float32)
    kernel = jaxmp.fp8.freeze({"kernel": np.stack([sizes, -sizes / 2])})["kernel"]
    assert_exact(jnp.asarray(kernel), np.stack([sizes, -sizes / 2]))
    guard = np.asarray(kernel.guard).astype(np.float32)
    assert np.all(guard < 0) and np.all(guard * 2**9 % 2 == 1)
    by_exponent = dict(zip(np.asarray(kernel.log2_scale)[0].tolist(), guard[0].tolist(), strict=True))
    assert by_exponent[-1] == by_exponent[0] == by_exponent[1]
    assert all(by_exponent[e] != by_exponent[e + 1] for e in by_exponent.keys() - {-1, 0, 118})


@functools.cache
def frozen_mlp():
    return jaxmp.fp8.freeze(eqx.nn.MLP(8, 4, 32, 1, key=jax.random.key(0)), "*weight")


@pytest.mark.thorough(1)
@pytest.mark.parametrize("under", [lambda f: f, lambda f: jax.jit(jaxmp.autocast(f, "bf16")), jax.checkpoint])
def test_a_derivative_by_it_is_refused(under):
    frozen, x = frozen_mlp(), np.ones((3, 8), np.float32)

    def loss(model, x):
        return jnp.mean(under(lambda x: jax.vmap(model)(x))(x) ** 2)

    with pytest.raises(TypeError, match="a frozen kernel has no gradient"):
        eqx.filter_eval_shape(eqx.filter_grad(loss), frozen, x)
    assert jnp.isfinite(jax.jit(jax.grad(lambda x: loss(frozen, x)))(x)).all()


def test_it_is_a_sequence_of_rows_and_takes_arithmetic():
    kernel = jaxmp.fp8.freeze({"kernel": W})["kernel"]
    array = np.asarray(kernel)
    assert len(kernel) == 48

    def results(k):
        numbers = 2 * k, k + k, 1 - k, k / 2, -k, k.T, k**2, abs(k)
        return numbers, (k > 0, k == kernel, k != array)

    assert_exact(jax.jit(lambda k: jnp.stack(list(k)))(kernel), array)
    assert_exact(jax.tree.map(np.asarray, results(kernel)), results(array))
    with pytest.raises(TypeError, match=r"cannot be written into; .*in nnx, param.set_value\(array\)"):
        kernel[0] = 1.0
    with pytest.raises(AttributeError, match=r"a frozen kernel is no array; got .reshape. Write jnp.asarray"):
        kernel.reshape(-1)
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = kernel.other


def test_descriptions_and_empty_kernels():
    kernel = jaxmp.fp8.freeze({"kernel": jax.ShapeDtypeStruct((4, 2), jnp.float16)})["kernel"]
    assert (kernel.q.shape, kernel.log2_scale.shape, kernel.dtype) == ((4, 2), (1, 2), jnp.float16)
    assert np.asarray(jaxmp.fp8.freeze({"kernel": np.ones((0, 2), np.float32)})["kernel"]).shape == (0, 2)


def test_serialization():
    """By flax's msgpack, pickle and copy; not from a kernel that is not frozen."""
    frozen = jaxmp.fp8.freeze({"kernel": W})
    text = flax.serialization.to_bytes(frozen)
    like = jaxmp.fp8.freeze({"kernel": np.zeros_like(W)})
    for copied in (
        flax.serialization.from_bytes(like, text),
        pickle.loads(pickle.dumps(frozen)),
        copy.deepcopy(frozen),
    ):
        assert_exact(np.asarray(copied["kernel"]), np.asarray(frozen["kernel"]))
    with pytest.raises(ValueError, match="must come from a frozen one; got"):
        flax.serialization.from_bytes(frozen, flax.serialization.to_bytes({"kernel": W}))
