"""A norm before fp8 layers is computed in the pass that casts its result, by a kernel; the numbers stay the same."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxmp
from computed_casts import computed_casts
from helpers import assert_close
from jaxmp._src.base import ambient
from jaxmp._src.fp8 import made as made_lib
from jaxmp.fp8 import DelayedScaling
from pallas_kernels import backend as backends

HAS_KERNELS = backends.why_no_kernels() is None
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason=str(backends.why_no_kernels()))
RECIPE = DelayedScaling(amax_history_len=2)
SIDE = 64
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 32, SIDE)) + 1, jnp.bfloat16)
TX = jaxmp.mixed_precision(optax.identity(), "fp8", recipe=RECIPE)


def everywhere(path, layer):
    return True


class Pair(nn.Module):
    """A norm that two layers read."""

    norm: type[nn.Module] = nn.RMSNorm
    options: tuple = ()
    dtype: object = jnp.bfloat16
    between: object = staticmethod(lambda y: y)

    @nn.compact
    def __call__(self, x):
        y = self.between(self.norm(**{"dtype": self.dtype} | dict(self.options))(x))
        dense = functools.partial(nn.Dense, SIDE, dtype=jnp.bfloat16)
        return x + dense(name="a")(y) * dense(name="b", use_bias=False)(y)


class Masked(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x, mask=jnp.ones(x.shape, bool))
        return nn.Dense(SIDE, dtype=jnp.bfloat16)(y)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(lambda block, x, _: (block(x), None), **split, length=2)(Pair(), x, None)[0]


class Vmapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.vmap(Pair, variable_axes={"params": None}, split_rngs={"params": False})()(x)


class Gated(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        return jaxmp.linen.GatedMLP(SIDE, recipe=RECIPE, dtype=jnp.bfloat16)(y)


class OwnNorm(nn.RMSNorm):
    """It does more than flax's, which the kernel does, too."""

    @nn.compact
    def __call__(self, x):
        return super().__call__(x) * 2


class InNnx(nnx.Module):
    """The same in nnx."""

    def __init__(self, norm):
        rngs = nnx.Rngs(0)
        self.norm = norm(SIDE, dtype=jnp.bfloat16, rngs=rngs)
        self.a = nnx.Linear(SIDE, SIDE, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return x + self.a(self.norm(x))


LAYER, RMS = nn.LayerNorm, nn.RMSNorm
MODELS = {  # and how many casts a kernel makes from a norm's input, before XLA merges those that are alike
    "rms": (Pair(), 2),
    "layer": (Pair(LAYER), 2),
    "no scale": (Pair(options=(("use_scale", False),)), 2),
    "no bias": (Pair(LAYER, options=(("use_bias", False), ("use_scale", False))), 2),
    "slow variance": (Pair(LAYER, options=(("use_fast_variance", False),)), 2),
    "16-bit params": (Pair(LAYER, options=(("param_dtype", jnp.bfloat16),)), 2),
    "float32 norm": (Pair(dtype=None), 2),
    "remat": (nn.remat(Pair)(), 4),
    "save_quantized": (nn.remat(Pair, policy=jaxmp.fp8.save_quantized)(), 2),
    "scan": (Scanned(), 2),
    "gated": (Gated(), 1),
    "vmap": (Vmapped(), 0),
    "a class of one's own": (Pair(OwnNorm), 2),
    "16-bit sums": (Pair(options=(("force_float32_reductions", False),)), 2),
    "an operation between": (Pair(between=lambda y: y * 1.5), 2),
    "mask": (Masked(), 0),
    "two axes": (Pair(LAYER, options=(("reduction_axes", (-2, -1)),)), 0),
    "group norm": (Pair(nn.GroupNorm, options=(("num_groups", 4),)), 0),
}


def trained(model, policy=None):
    """(loss and gradients as a function of params and x, params)."""
    with jaxmp.fp8.autocast(RECIPE, filter=everywhere):
        params = model.init(jax.random.key(0), X)["params"]
    keys = iter(jax.random.split(jax.random.key(1), 99))
    params = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(next(keys), p.shape, p.dtype) if p.ndim else p, params)

    def loss_fn(params, x):
        with jaxmp.fp8.autocast(RECIPE, filter=everywhere):
            y = model.apply({"params": params}, x).astype(jnp.float32)
            return jnp.sum(y**2)  # gradients that e5m2 holds by a scale of 1

    grad_fn = jaxmp.value_and_grad(loss_fn, (0, 1), policy=policy)
    return lambda params, x: grad_fn(params, x, opt_state=TX.init(params)), params


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", MODELS)
def test_which_norms_a_kernel_computes(name):
    model, count = MODELS[name]
    assert len(computed_casts(*trained(model), X)) == (count if HAS_KERNELS else 0)


@pytest.mark.thorough(0)
@needs_kernels
@pytest.mark.parametrize("name", ["rms", "float32 norm"])
def test_by_autocast_the_kernel_reads_what_arrives(name):
    """The loss is traced in float32; a bfloat16 input of the norm is not widened for the kernel."""
    found = computed_casts(*trained(MODELS[name][0], policy="fp8"), X)
    assert [reads[0] for reads in found] == ["64x64xbf16"] * 2


@pytest.mark.thorough(1)
@needs_kernels
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map(check_vma):
    """Each device's kernel reads its own rows, their numbers, and the vectors that all devices have."""
    run, params = trained(MODELS["layer"][0])
    mesh = jax.sharding.Mesh(jax.devices()[:2], "data")
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": check_vma}
    split = jax.shard_map(lambda params, x: run(params, x)[0][None], mesh=mesh, **specs)
    found = computed_casts(split, params, jnp.concatenate([X, X]))
    assert found == [["64x64xbf16", *["64xf32"] * 4, "1xf32"]] * 2


@pytest.mark.thorough(0)
@pytest.mark.optimized  # the last bit of a sum decides a rounding
@needs_kernels
@pytest.mark.parametrize(
    "name",
    [
        "rms",
        *(pytest.param(x, marks=pytest.mark.thorough(0)) for x in ("layer", "16-bit params", "float32 norm", "gated")),
    ],
)
def test_the_numbers_are_those_of_the_norm_and_its_cast(name, interpreted):
    """A sum in another order moves 1 in 1000 roundings to bfloat16 by its last bit: 2^-8, also of the amax.

    Both round where they say that they do, as on a GPU, where a kernel reads the rounded tensor from memory.
    """
    run, params = trained(MODELS[name][0])
    as_written = {"compiler_options": {"xla_allow_excess_precision": False}}
    expected = jax.jit(run, **as_written)(params, X)
    interpreted()
    assert "computed_cast_transpose_amax" in str(jax.make_jaxpr(lambda *args: run(*args))(params, X))
    got = jax.jit(lambda *args: run(*args), **as_written)(params, X)
    amaxes, others = [], []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        (others if a.ndim else amaxes).append((np.asarray(a, np.float64), np.asarray(b, np.float64)))
    for a, b in amaxes:  # and the loss
        np.testing.assert_allclose(a, b, rtol=2**-8)
    for a, b in others:
        assert np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(b)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("norm", [nnx.RMSNorm, nnx.LayerNorm])
def test_in_nnx(norm):
    model = InNnx(norm)
    jaxmp.nnx.to_fp8(model, RECIPE, filter=everywhere)
    graph, state = nnx.split(model)

    def run(state, x):
        grad_fn = jaxmp.nnx.value_and_grad(lambda model, x: jnp.mean(model(x).astype(jnp.float32) ** 2))
        return grad_fn(nnx.merge(graph, state), x, opt_state=TX.init(state))

    assert [reads[0] for reads in computed_casts(run, state, X)] == (["64x64xbf16"] if HAS_KERNELS else [])


WEIGHT = jnp.linspace(0.5, 1.5, SIDE)
EPSILON = 1e-5


def mean(x):
    return jnp.mean(x, axis=-1, keepdims=True)


def llama(x, weight=WEIGHT):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(mean(wide**2) + EPSILON)).astype(x.dtype) * weight[None].astype(x.dtype)


def standardized(x):
    return (x - mean(x)) / jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + EPSILON)


def trained_params(params):
    return jax.tree.map(lambda p: p + WEIGHT, params)


def by_haiku(norm):
    f = hk.transform(norm)
    return lambda x: f.apply(trained_params(f.init(jax.random.key(0), x)), None, x)


def product(x):
    return x @ jnp.eye(SIDE, dtype=x.dtype)


NORMS = {  # of x; how many tensors, numbers of rows and vectors a kernel reads; None: it reads the result
    "haiku layer": (by_haiku(lambda x: hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)), (1, 2, 2)),
    "haiku rms": (by_haiku(lambda x: hk.RMSNorm(-1)(x)), (1, 1, 1)),
    "equinox layer": (lambda x: jax.vmap(trained_params(eqx.nn.LayerNorm(SIDE)))(x), (1, 2, 2)),
    "equinox rms": (lambda x: jax.vmap(trained_params(eqx.nn.RMSNorm(SIDE, use_bias=False)))(x), (1, 1, 1)),
    "llama": (llama, (1, 1, 1)),
    "gemma": (lambda x: llama(x, 1 + WEIGHT), (1, 1, 1)),
    "quotient": (standardized, (1, 2, 0)),
    "power": (lambda x: x * (mean(x * x) + EPSILON) ** -0.5, (1, 1, 0)),
    "unit vectors": (lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True), (1, 1, 0)),
    "of a sum": (lambda x: llama(x + product(x)), (1, 1, 1)),
    "of a norm": (lambda x: llama(standardized(x) + product(x)), (1, 1, 1)),
    "with an activation": (lambda x: nn.gelu(llama(x)), (1, 1, 1)),
    "gated": (lambda x: llama(x) * nn.silu(product(x)), (2, 1, 1)),
    "scaled rows": (lambda x: llama(x) * jnp.arange(1.0, 33)[:, None].astype(x.dtype), (1, 2, 1)),
    "a function of its own": (jax.jit(lambda x: llama(x)), None),
    "no root": (lambda x: x - mean(x), None),
    "a norm beside a product": (lambda x: llama(x) + product(x), None),  # a sum is read for other reasons, too
    "the first axis": (lambda x: x / jnp.linalg.norm(x, axis=0, keepdims=True), None),
    "rounded twice": (lambda x: llama(x.astype(jnp.float32)).astype(jnp.float16).astype(jnp.bfloat16), None),
}


@pytest.mark.thorough(6)
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_any_framework_are_found(name):
    """The function that is found computes the same numbers."""
    norm, expected = NORMS[name]
    found = []

    def trace(x):
        with ambient.noting(), jax.numpy_rank_promotion("allow"):
            y = norm(x)
            found.append(made_lib.found(y, (1,)))
            made = found[0]
            if made is None:
                return y, y
            *tensors, _ = [*made.arguments(), None]
            n, m = len(made.tensors), len(made.of_rows)
            vectors = [v[:, None] for v in tensors[n : n + m]], [v[None] for v in tensors[n + m :]]
            wide = (x.astype(jnp.float32) for x in made.tensors)
            return y, made.function(*wide, *vectors[0], *vectors[1]).astype(y.dtype)

    y, got = jax.jit(trace)(X[0].astype(jnp.float32) - 0.5)
    made = found[0]
    kinds = made and tuple(map(len, (made.tensors, made.of_rows, made.of_columns)))
    assert kinds == expected
    assert_close(got, y, rtol=1e-5, atol=1e-5)


def test_what_is_found():
    """What a layer sums over the last axis, in a loss; also where jax differentiates while it traces."""

    def tensors(x, summed=(1,)):
        made = made_lib.found(llama(x), summed)
        return None if made is None else [jnp.shape(t) for t in made.tensors]

    @jax.jit
    def trace(x):
        assert tensors(x) is None
        with ambient.noting():
            assert tensors(x) == [x.shape] and tensors(x, (0,)) is None
            assert tensors(x.astype(jnp.int32).astype(x.dtype)) == [x.shape]
            jax.vjp(lambda x: (llama(x), seen.append(tensors(x)))[0], x)
            jax.vmap(lambda x: seen.append(tensors(x)))(x[None])
        return x

    seen = []
    trace(X[0])
    assert seen == [[X[0].shape], None]
    with ambient.noting():
        assert tensors(X[0]) is None  # nothing is traced


def test_no_tracer_leaves_its_trace():
    def inside(x):
        return jnp.sum(made_lib.found(llama(x), (1,)).tensors[0])

    def f(x):
        total = jax.checkpoint(inside)(x) + jax.lax.cond(x[0, 0] > 0, inside, inside, x)
        return total + jax.lax.scan(lambda c, _: (c + inside(x), None), 0.0, None, length=2)[0]

    x = jnp.ones((4, SIDE))
    with jax.checking_leaks(), ambient.noting():
        assert jax.jit(f)(x) == 4 * 4 * SIDE
