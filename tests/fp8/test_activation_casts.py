"""An activation before an fp8 layer is computed in the pass that casts its result, by a kernel; the numbers stay."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from computed_casts import computed_casts
from helpers import assert_close, assert_same_program
from jaxmp._src.base import ambient
from jaxmp._src.fp8 import fused_casts
from pallas_kernels import backend as backends, passes

needs_kernels = pytest.mark.skipif(backends.why_no_kernels() is not None, reason=str(backends.why_no_kernels()))
POLICY = jaxmp.get_policy("fp8")
SIDE, DEVICES = 64, 8
X = np.random.default_rng(0).normal(size=(2, 32, SIDE)).astype(jnp.bfloat16)
GELU, SILU, EXACT = nn.gelu, nn.silu, lambda a: nn.gelu(a, approximate=False)


def vector(ndim):
    return jnp.linspace(1.0, 2.0, SIDE).reshape((1,) * (ndim - 1) + (SIDE,))


FUNCTIONS = {  # of (a, b); the tensors that a kernel reads, None: it reads the result
    "gelu": (lambda a, b: GELU(a), 1),
    "swiglu": (lambda a, b: SILU(a) * b, 2),
    "relu squared": (lambda a, b: nn.relu(a) ** 2, 1),
    "relu6": (lambda a, b: nn.relu6(a), 1),
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

    function: object = FUNCTIONS["swiglu"][0]
    use_bias: bool = True

    @nn.compact
    def __call__(self, x):
        a, b = (nn.Dense(SIDE, use_bias=self.use_bias, name=name)(x) for name in "ab")
        return x + nn.Dense(SIDE, name="down")(self.function(a, b))


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
        return nn.scan(lambda block, x, _: (block(x), None), **split)(Mlp(), x, None)[0]


class InNnx(nnx.Module):
    """The same in nnx."""

    def __init__(self, function):
        self.function, rngs = function, nnx.Rngs(0)
        self.a, self.b, self.down = (nnx.Linear(SIDE, SIDE, rngs=rngs) for _ in range(3))

    def __call__(self, x):
        return x + self.down(self.function(self.a(x), self.b(x)))


def trained(model, x=X):
    """(loss and gradients as a function of a state and x, the state)."""
    autocast = functools.partial(jaxmp.fp8.autocast, POLICY.recipe, filter="*")
    with autocast():
        params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    state = jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1), policy=POLICY)

    def loss(params, x):
        with autocast():
            return jnp.mean(model.apply({"params": params}, x).astype(jnp.float32) ** 2)

    def run(state, x, argnums=(0, 1), **how):
        return jaxmp.value_and_grad(loss, argnums, **how)(state.params, x, opt_state=state)

    return run, state


def made_of(function):
    """(`function` of two products, the function of a kernel as jax computes it, how the first was made)."""
    how = []

    def trace(x, w, bias):
        with ambient.noting():
            h = function(x @ w + bias[None], x @ (2 * w))
            how.append(fused_casts.find(h, (1,)))
            made = how[-1]
            return h, made and made.function(*made.tensors, *(v.reshape(1, -1) for v in made.columns)).astype(h.dtype)

    rng = np.random.default_rng(1)
    args = (rng.normal(size=shape).astype(np.float32) for shape in ((SIDE, SIDE), (SIDE, SIDE), SIDE))
    return *jax.jit(trace)(*args), how[0]


def test_the_stream_of_a_deep_net_is_not_followed_to_its_first_layer():
    _, _, made = made_of(lambda a, b: functools.reduce(lambda x, _: jnp.tanh(x) + b, range(1000), a))
    assert made is None


@pytest.mark.thorough(4)
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
@pytest.mark.parametrize(
    ("name", "use_bias", "of_gradients"),
    [
        ("gelu", True, [2]),
        ("swiglu", False, [2, 3]),
        ("one tensor twice", True, None),
        ("tanh", True, [2]),
        ("scaled by a vector", False, None),
        ("three tensors", True, None),
    ],
)
def test_a_kernel_reads_the_products(name, use_bias, of_gradients):
    """They are as the matmul wrote them, in bfloat16, and the biases in float32.

    A kernel of a gradient reads that of the result, and the products: their gradients are not written in bfloat16.
    """
    function, tensors = FUNCTIONS[name]
    run, state = trained(Mlp(function, use_bias))
    (operands,) = computed_casts(run, state, X)
    assert operands[:tensors] == ["64x64xbf16"] * tensors
    assert ("64xf32" in operands) == (use_bias or name == "scaled by a vector")
    if of_gradients:
        gradients = computed_casts(run, state, X, backward=True)
        assert sorted(types.count("64x64xbf16") for types in gradients) == of_gradients


VMAPPED = nn.vmap(Mlp, variable_axes={"params": None}, split_rngs={"params": False})


@pytest.mark.thorough(0)
@needs_kernels
@pytest.mark.parametrize(("cls", "count"), [(nn.remat(Mlp), 2), (VMAPPED, 0)])
def test_under_transformations(cls, count):
    """A block under remat runs twice; under vmap the layer casts the result, and its gradient is outside of vmap."""
    assert len(computed_casts(*trained(cls(FUNCTIONS["gelu"][0])), X)) == count


@pytest.mark.thorough(0)
@needs_kernels
def test_in_nnx():
    model = InNnx(FUNCTIONS["swiglu"][0])
    jaxmp.nnx.to_fp8(model, POLICY.recipe, filter="*")
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), policy=POLICY)
    graph, state = nnx.split((model, optimizer))

    def run(state, x):
        model, optimizer = nnx.merge(graph, state)
        loss = lambda model, x: jnp.sum(model(x).astype(jnp.float32) ** 2)  # noqa: E731
        return jaxmp.nnx.value_and_grad(loss)(model, x, opt_state=optimizer)

    (operands,) = computed_casts(run, state, X)
    assert operands[:2] == ["64x64xbf16"] * 2


@pytest.mark.thorough(0)
@needs_kernels
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map(check_vma):
    """Each device's kernel reads its own rows; the loss is that of its part."""
    run, state = trained(Mlp())
    mesh = jax.sharding.Mesh(jax.devices()[:2], "data")
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": check_vma}
    split = jax.shard_map(lambda state, x: run(state, x)[0][None], mesh=mesh, **specs)
    both = np.concatenate([X, X])
    assert len(computed_casts(split, state, both)) == 1
    (operands,) = computed_casts(lambda state, x: run(state, x)[0], state, both)
    assert operands[:2] == ["128x64xbf16"] * 2


@pytest.mark.thorough(0)
def test_without_kernels_the_program_is_that_of_before(monkeypatch):
    """XLA drops what only a kernel reads, and autocast rounds nothing for it."""
    run, state = trained(Mlp())
    got = jax.jit(run)(state, X)
    monkeypatch.setattr(fused_casts, "find", lambda *args: None)
    jax.clear_caches()
    assert_same_program(got, jax.jit(lambda *args: run(*args))(state, X))


def assert_near(got, want, tolerance):
    """Roundings to bfloat16 and fp8 differ by one here and there."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= (tolerance if np.ndim(a) else 2**-6) * np.linalg.norm(b) + 1e-9


@pytest.mark.thorough(0)
@needs_kernels
def test_the_numbers_are_those_of_the_activation_and_its_cast(interpreted):
    """The kernel computes in float32 what autocast computes in bfloat16 in part."""
    run, state = trained(Mlp())
    expected = jax.jit(run)(state, X)
    interpreted()
    assert "computed_cast_transpose_amax" in str(jax.make_jaxpr(lambda *args: run(*args))(state, X))
    assert_near(jax.jit(lambda *args: run(*args))(state, X), expected, 0.05)


# However the step is split, a kernel gets its own arrays


def on_a_mesh(run, state, x):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

    def placed(x):
        rows = np.ndim(x) > 0 and x.shape[0] % DEVICES == 0
        return jax.device_put(x, NamedSharding(mesh, P("data") if rows else P()))

    return jax.jit(run)(*jax.tree.map(placed, (state, x)))


def in_pmap(run, state, x):
    def mean(state, x):
        loss, (grads, _) = run(state, x)
        return jax.lax.pmean((loss, grads), "data")

    copies = jax.tree.map(lambda x: np.stack([x] * DEVICES), state)
    return jax.tree.map(lambda x: x[0], jax.pmap(mean, axis_name="data")(copies, x[:, None]))


def in_microbatches(run, state, x):
    return jax.jit(functools.partial(run, argnums=0, accumulate=2, accumulate_argnums=1))(state, x)


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


def in_one(run, state, x):
    return jax.jit(run)(state, x)


REGIMES = {"mesh": on_a_mesh, "pmap": in_pmap, "accumulate": in_microbatches, "scan": in_one}


@pytest.mark.thorough(0)
@needs_kernels
@pytest.mark.parametrize("regime", REGIMES)
def test_the_numbers_are_those_of_casts_alone(regime, computed):
    x = np.random.default_rng(0).normal(size=(DEVICES, 64, SIDE)).astype(np.float32)
    model = Scanned() if regime == "scan" else nn.remat(Mlp)()
    expected = REGIMES[regime](*trained(model, x), x)
    names = computed()
    assert_near(REGIMES[regime](*trained(model, x), x), expected, 0.1)
    assert {*names} == ({"operand"} if regime == "scan" else {"operand", "gradient"})  # a scan keeps no equations
