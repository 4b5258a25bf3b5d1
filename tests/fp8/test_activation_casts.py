"""An activation before an fp8 layer is computed in the pass that casts its result, by a kernel; the numbers stay."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxmp
from computed_casts import computed_casts
from helpers import assert_close, assert_same_program
from jaxmp._src.base import ambient
from jaxmp._src.fp8 import fused_casts
from pallas_kernels import backend as backends

HAS_KERNELS = backends.why_no_kernels() is None
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason=str(backends.why_no_kernels()))
POLICY = jaxmp.get_policy("fp8")
SIDE = 64
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 32, SIDE)), jnp.bfloat16)
GELU, SILU, EXACT = nn.gelu, nn.silu, lambda a: nn.gelu(a, approximate=False)


def vector(ndim):
    return jnp.linspace(1.0, 2.0, SIDE).reshape((1,) * (ndim - 1) + (SIDE,))


FUNCTIONS = {  # of (a, b); the tensors that a kernel reads, None: it reads the result
    "gelu": (lambda a, b: GELU(a), 1),
    "swiglu": (lambda a, b: SILU(a) * b, 2),
    "geglu": (lambda a, b: GELU(a) * b, 2),
    "relu": (lambda a, b: nn.relu(a), 1),
    "relu squared": (lambda a, b: nn.relu(a) ** 2, 1),
    "leaky relu": (lambda a, b: nn.leaky_relu(a), 1),
    "relu6": (lambda a, b: nn.relu6(a), 1),
    "sigmoid": (lambda a, b: nn.sigmoid(a), 1),
    "tanh": (lambda a, b: jnp.tanh(b) - 2 * a / 3, 2),
    "one tensor twice": (lambda a, b: a * jnp.exp(-a), 1),
    "scaled by a vector": (lambda a, b: GELU(a) * vector(a.ndim), 1),
    "exact gelu": (lambda a, b: EXACT(a), None),  # Mosaic has no erf
    "a sum": (lambda a, b: a + b, None),  # it is read for other reasons, too
    "a choice by a sign": (lambda a, b: jnp.where(b <= 0, a, b), 2),
    "another choice": (lambda a, b: jnp.where(a > 1, a, b), None),  # rounding may change it
    "softmax": (lambda a, b: nn.softmax(a), None),
    "float16 between": (lambda a, b: GELU(a).astype(jnp.float16).astype(a.dtype), None),
    "three tensors": (lambda a, b: SILU(a) * b * (a @ jnp.ones((SIDE, SIDE))), 3),
    "four tensors": (lambda a, b: SILU(a) * b * (a @ jnp.ones((SIDE, SIDE))) * (b @ jnp.eye(SIDE)), None),
    "no product": (lambda a, b: GELU(jnp.cumsum(a, axis=-1)), None),
    "turned": (lambda a, b: GELU(jnp.swapaxes(a, 0, 1)).reshape(a.shape), None),
}


class Mlp(nn.Module):
    """Two products, an activation of them, and a product of it."""

    function: object
    use_bias: bool = True

    @nn.compact
    def __call__(self, x):
        a, b = (nn.Dense(SIDE, use_bias=self.use_bias, name=name)(x) for name in "ab")
        return x + nn.Dense(SIDE, name="down")(self.function(a, b))


class InNnx(nnx.Module):
    """The same in nnx."""

    def __init__(self, function):
        self.function, rngs = function, nnx.Rngs(0)
        self.a, self.b, self.down = (nnx.Linear(SIDE, SIDE, rngs=rngs) for _ in range(3))

    def __call__(self, x):
        return x + self.down(self.function(self.a(x), self.b(x)))


def everywhere(path, layer):
    return True


def trained(model):
    """(loss and gradients as a function of a state and x, the state)."""

    def apply(params, x):
        with jaxmp.fp8.autocast(POLICY.recipe, filter=everywhere):
            return model.apply({"params": params}, x)

    with jaxmp.fp8.autocast(POLICY.recipe, filter=everywhere):
        params = model.init(jax.random.key(0), X)["params"]
    state = jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1), policy=POLICY)

    def run(state, x):
        loss = lambda params, x: jnp.sum(apply(params, x).astype(jnp.float32) ** 2)  # noqa: E731
        return jaxmp.value_and_grad(loss, (0, 1))(state.params, x, opt_state=state)

    return run, state


def made_of(function, dtype=jnp.float32):
    """(how `function` of two products made its result; the function of a kernel, as jax computes it)."""
    found = []

    def trace(x, w, bias):
        with ambient.noting():
            h = function(x @ w + bias[None], x @ (2 * w))
            found.append(fused_casts.find(h, (1,)))
            made = found[-1]
            return h, made and made.function(*made.tensors, *(v.reshape(1, -1) for v in made.columns)).astype(h.dtype)

    rng = np.random.default_rng(1)
    args = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((SIDE, SIDE), (SIDE, SIDE), (SIDE,)))
    return *jax.jit(trace)(*args), found[0]


def test_the_stream_of_a_deep_net_is_not_followed_to_its_first_layer():
    _, _, made = made_of(lambda a, b: functools.reduce(lambda x, _: jnp.tanh(x) + b, range(1000), a))
    assert made is None


@pytest.mark.thorough(6)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_which_functions_are_found(name):
    """The function that is found computes the same numbers; also of the matmuls and biases alone."""
    function, tensors = FUNCTIONS[name]
    expected, got, made = made_of(function)
    assert (None if made is None else len(made.tensors)) == tensors
    if made is not None:
        assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough(1)
@needs_kernels
@pytest.mark.parametrize("name", [name for name, (_, tensors) in FUNCTIONS.items() if tensors])
def test_a_kernel_reads_the_products(name):
    """They are as the matmul wrote them, in bfloat16, and the biases in float32."""
    function, tensors = FUNCTIONS[name]
    for use_bias in (True, False):
        (found,) = computed_casts(*trained(Mlp(function, use_bias)), X)
        assert found[:tensors] == ["64x64xbf16"] * tensors
        assert ("64xf32" in found) == (use_bias or name == "scaled by a vector")


GRADIENTS = {
    "gelu": [2],
    "swiglu": [2, 3],
    "geglu": [2, 3],
    "tanh": [2],
    "relu": [2],
    "relu squared": [2],
    "leaky relu": [2],
}


@pytest.mark.thorough(2)
@needs_kernels
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_kernel_of_a_gradient_reads_that_of_the_result_and_the_products(name):
    """So the gradients of the products are not written in bfloat16."""
    run, state = trained(Mlp(FUNCTIONS[name][0]))
    found = computed_casts(run, state, X, backward=True)
    assert sorted(types.count("64x64xbf16") for types in found) == GRADIENTS[name]


VMAPPED = nn.vmap(Mlp, variable_axes={"params": None}, split_rngs={"params": False})


@pytest.mark.thorough(1)
@needs_kernels
@pytest.mark.parametrize(("cls", "count"), [(nn.remat(Mlp), 2), (VMAPPED, 0)])
def test_under_transformations(cls, count):
    """A block under remat runs twice; under vmap the layer casts the result, and its gradient is outside of vmap."""
    assert len(computed_casts(*trained(cls(FUNCTIONS["gelu"][0])), X)) == count


@needs_kernels
def test_in_nnx():
    model = InNnx(FUNCTIONS["swiglu"][0])
    jaxmp.nnx.to_fp8(model, POLICY.recipe, filter=everywhere)
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), policy=POLICY)
    graph, state = nnx.split((model, optimizer))

    def run(state, x):
        model, optimizer = nnx.merge(graph, state)
        loss = lambda model, x: jnp.sum(model(x).astype(jnp.float32) ** 2)  # noqa: E731
        return jaxmp.nnx.value_and_grad(loss)(model, x, opt_state=optimizer)

    (found,) = computed_casts(run, state, X)
    assert found[:2] == ["64x64xbf16"] * 2


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", ["swiglu", "gelu", "relu squared"])
def test_without_kernels_the_program_is_that_of_before(name, monkeypatch):
    """XLA drops what only a kernel reads, and autocast rounds nothing for it."""
    run, state = trained(Mlp(FUNCTIONS[name][0]))
    got = jax.jit(run)(state, X)
    monkeypatch.setattr(fused_casts, "find", lambda *args: None)
    jax.clear_caches()
    assert_same_program(got, jax.jit(lambda *args: run(*args))(state, X))


@needs_kernels
@pytest.mark.parametrize("name", ["swiglu", pytest.param("gelu", marks=pytest.mark.thorough(0))])
def test_the_numbers_are_those_of_the_activation_and_its_cast(name, interpreted):
    """The kernel computes in float32 what autocast computes in bfloat16 in part: roundings to fp8 differ by one."""
    run, state = trained(Mlp(FUNCTIONS[name][0]))
    expected = jax.jit(run)(state, X)
    interpreted()
    assert "computed_cast_transpose_amax" in str(jax.make_jaxpr(lambda *args: run(*args))(state, X))
    got = jax.jit(lambda *args: run(*args))(state, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if np.ndim(a):
            assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)
        else:  # an amax, or the loss
            np.testing.assert_allclose(a, b, rtol=2**-6)


@pytest.mark.thorough(0)
@needs_kernels
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map(check_vma):
    """Each device's kernel reads its own rows; the loss is that of its part."""
    run, state = trained(Mlp(FUNCTIONS["swiglu"][0]))
    mesh = jax.sharding.Mesh(jax.devices()[:2], "data")
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": check_vma}
    split = jax.shard_map(lambda state, x: run(state, x)[0][None], mesh=mesh, **specs)
    both = jnp.concatenate([X, X])
    assert len(computed_casts(split, state, both)) == 1
    (found,) = computed_casts(lambda state, x: run(state, x)[0], state, both)
    assert found[:2] == ["128x64xbf16"] * 2
