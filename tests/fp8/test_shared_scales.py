"""Layers of one loss that read one array cast it once, with one scale; their params and histories stay their own."""

import functools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import jaxmp
from helpers import assert_exact, assert_within_ulps
from jaxmp._src.base import ambient, tree_paths
from jaxmp._src.fp8 import shared_scales
from jaxmp.fp8 import DelayedScaling, is_scale

RECIPE = DelayedScaling(amax_history_len=2)
SIDE, TIME = 16, 48
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, TIME, SIDE)).astype(np.float32))
EACH = 1 if jax.__version_info__ >= (0, 11) else 2  # XLA for CPUs fused a cast into each of its two readers before
TX = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=RECIPE)


def everywhere(path, layer):
    return True


class Block(nn.Module):
    """q, k and v read one array."""

    @nn.compact
    def __call__(self, x):
        q, k, v = (nn.Dense(SIDE, name=name)(x) for name in "qkv")
        return x + jnp.tanh(q + k) * v


class Scanned(nn.Module):
    body: type[nn.Module] = Block

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            lambda block, x, _: (block(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return scan(self.body(), x, None)[0]


class Vmapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.vmap(Block, variable_axes={"params": None}, split_rngs={"params": False})()(x[:, None])[:, 0]


class Stacked(nn.Module):
    """Each member of a stack has scales of its own."""

    @nn.compact
    def __call__(self, x):
        return nn.vmap(Block, variable_axes={"params": 0}, split_rngs={"params": True})()(x)


MODELS = {
    "plain": Block,
    "remat": nn.remat(Block),
    "save_quantized": nn.remat(Block, policy=jaxmp.fp8.save_quantized),
    "scan": Scanned,
    "scan-remat": functools.partial(Scanned, nn.remat(Block)),
    "vmap": Vmapped,
    "stack": Stacked,
}


@pytest.fixture
def unshared(monkeypatch):
    """A function that switches sharing off."""
    return lambda: monkeypatch.setattr(shared_scales, "leaf_for", lambda leaf, *_: leaf)


def loss_of(model, policy):
    def loss_fn(params, x):
        with jaxmp.fp8.autocast(RECIPE, filter=everywhere):
            return jnp.mean(model.apply({"params": params}, x).astype(jnp.float32) ** 2)

    return jaxmp.value_and_grad(loss_fn, policy=policy)


def init(model):
    with jaxmp.fp8.autocast(RECIPE, filter=everywhere):
        return model.init(jax.random.key(0), X)["params"]


def stepper(model, policy="fp8", *, reduced=False):
    grad_fn = loss_of(model, policy)

    def step(params, opt_state, x):
        loss, grads = grad_fn(params, x, opt_state=opt_state)
        if reduced:  # amaxes are already those of all devices
            loss, grads = jax.lax.pmean((loss, grads), "data")
        return *jaxmp.apply_gradients(TX, grads, opt_state, params), loss

    return step


def compiled(step, params):
    return jax.jit(step).lower(params, TX.init(params), X).compile()


def casts(program):
    """How many casts of arrays as large as X to e4m3 are in a compiled program."""
    shapes = re.findall(r"= f8e4m3fn\[([\d,]+)\]\S* convert\(", program.as_text())
    return sum(math.prod(map(int, shape.split(","))) == X.size for shape in shapes)


def trained(program, params, steps=2):
    opt_state = TX.init(params)
    for i in range(steps):
        params, opt_state, loss = program(params, opt_state, X * (i + 1))
    return params, opt_state, loss


def inputs_of(params):
    """The scales of the inputs of q, k and v, beside each other."""
    found = tree_paths.leaves_by_path(params)
    return [np.asarray(x) for path, x in found.items() if is_scale(path) and "lhs" in path]


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", MODELS)
def test_an_array_is_cast_once(name, unshared):
    """The compiled step casts the array once (remat: once each way), and every leaf moves as without sharing."""
    model, once = MODELS[name](), 2 if "remat" in name else 1
    params = init(model)
    program = compiled(stepper(model), params)
    assert casts(program) == once or EACH > 1
    got = trained(program, params)
    for scales in inputs_of(got[0]):
        assert_exact(scales, inputs_of(got[0])[0])
        assert np.all(scales != 0)
    unshared()
    apart = compiled(stepper(model), params)
    assert casts(apart) >= (3 if EACH == 1 else 2) * casts(program)
    # Gradients differ by ulps; one that lies between two numbers of fp8 may be cast to the other: 2^-10 of a sum.
    assert_within_ulps(got, trained(apart, params), 2**13)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("devices", [1, 4])
def test_in_shard_map(devices):
    """One cast on each device, and amaxes of all devices: the scales are those of one device."""
    model, mesh = Block(), jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    params = init(model)
    step = jax.shard_map(stepper(model, reduced=True), mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    program = compiled(step, params)
    text = program.as_text()
    assert len(re.findall(rf"= f8e4m3fn\[{4 // devices},{TIME},{SIDE}\]\S* convert\(", text)) == EACH
    (alone, *_), (spread, *_) = trained(compiled(stepper(model), params), params), trained(program, params)
    assert_exact(inputs_of(alone), inputs_of(spread))


@pytest.mark.thorough(0)
@pytest.mark.parametrize("policy", ["fp8", "fp32"])
def test_attention_of_flax(policy):
    """linen's and nnx's own attention: one cast for q, k and v, and one for `out`; by autocast and without."""
    x = X.astype(jnp.bfloat16) if policy == "fp32" else X
    dtype = jnp.bfloat16 if policy == "fp32" else None
    linen = nn.MultiHeadDotProductAttention(2, dtype=dtype)
    params = init(linen)
    assert casts(jax.jit(stepper(linen, policy)).lower(params, TX.init(params), x).compile()) == 2 * EACH
    model = nnx.MultiHeadAttention(2, SIDE, dtype=dtype, decode=False, rngs=nnx.Rngs(0))
    jaxmp.nnx.to_fp8(model, RECIPE, filter=everywhere)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    def loss_fn(model, x):
        return jnp.mean(model(x).astype(jnp.float32) ** 2)

    @nnx.jit
    def step(model, optimizer, x):
        _, grads = jaxmp.nnx.value_and_grad(loss_fn, policy=policy)(model, x, opt_state=optimizer.opt_state)
        optimizer.update(model, grads)

    assert casts(step.lower(model, optimizer, x).compile()) == 2 * EACH
    step(model, optimizer, x)
    key, _, query, value = inputs_of(nnx.to_pure_dict(nnx.state(model)))
    assert query == key == value != 0


class Mixed(nn.Module):
    """Layers that read one array in other ways, and layers that read another array."""

    @nn.compact
    def __call__(self, x):
        hidden = nn.Dense(SIDE, name="a")(x) + jax.checkpoint(lambda x: x)(nn.Dense(SIDE, name="b")(jnp.sin(x)))
        experts = self.param("experts", nn.initializers.lecun_normal(), (2, 2, SIDE, SIDE))
        rows, sizes = hidden.reshape(-1, SIDE), jnp.array([X.size // SIDE - 7, 7])
        gate, up = (jaxmp.linen.Fp8RaggedDot(RECIPE, name=f"expert_{i}")(rows, experts[i], sizes) for i in (0, 1))
        gated = jaxmp.linen.GatedMLP(SIDE, recipe=RECIPE, name="gated")(x)
        return gated + (gate * up).reshape(x.shape)


@pytest.mark.thorough(0)
def test_experts_gated_mlp_and_other_arrays():
    """Experts share the rows, a gated MLP the input of a plain layer; sin(x) keeps a scale of its own."""
    params = init(Mixed())
    (params, _, _) = trained(compiled(stepper(Mixed()), params), params, steps=1)
    scale = {p.split("/")[0]: x for p, x in tree_paths.leaves_by_path(params).items() if "lhs" in p and "down" not in p}
    assert scale["a"] == scale["gated"] and scale["expert_0"] == scale["expert_1"]
    assert scale["a"] != scale["b"]


def leaf_of(value):
    return jnp.float32(value)


@pytest.fixture
def notes():
    with ambient.noting() as notes:
        yield notes


def test_what_is_shared(notes):
    """Only the same array, cast alike, to a leaf of the same type; outside of a loss nothing."""
    x, first, second = jnp.ones(3), leaf_of(1), leaf_of(2)
    assert shared_scales.leaf_for(first, "a", x) is first
    assert shared_scales.leaf_for(second, "a", x) == 1
    assert shared_scales.leaf_for(first, "a", x) is first  # a layer that is called twice
    assert shared_scales.leaf_for(second, "b", x) is second  # cast in another way
    assert shared_scales.leaf_for(second, "a", x + 0) is second  # another array
    assert shared_scales.leaf_for(second, "a", x, x) is second  # and more arrays
    assert shared_scales.leaf_for(jnp.ones(2), "a", x).shape == (2,)  # a stack of leaves
    del first
    third = leaf_of(3)
    assert shared_scales.leaf_for(third, "a", x) is third  # nothing is kept alive


def test_nothing_is_shared_outside_of_a_loss():
    x, first, second = jnp.ones(3), leaf_of(1), leaf_of(2)
    assert shared_scales.leaf_for(first, "a", x) is first
    assert shared_scales.leaf_for(second, "a", x) is second


def test_no_tracer_leaves_its_trace(notes):
    """What a layer inside a remat, scan or branch noted serves no layer outside, and none in the next one."""
    x, outer = jnp.ones(3), leaf_of(5)

    def inside(leaf):
        return shared_scales.leaf_for(leaf + 1, "a", x) * jnp.sum(x)

    def f(leaf):
        total = jax.checkpoint(inside)(leaf) + jax.lax.cond(leaf > 0, inside, inside, leaf)
        total += jax.lax.scan(lambda c, _: (c + inside(leaf), None), 0.0, None, length=2)[0]
        return total + shared_scales.leaf_for(outer, "a", x)

    with jax.checking_leaks():
        assert jax.jit(f)(jnp.float32(1)) == 4 * 2 * 3 + 5


def test_what_two_layers_convert_alike_is_one_array(notes):
    x, first, second = X, leaf_of(1), leaf_of(2)
    q, k = (jaxmp.fp8.promote_all_but_kernel(x, x, None, dtype=jnp.bfloat16)[0] for _ in range(2))
    assert q is not k
    assert shared_scales.leaf_for(first, "a", q) is first
    assert shared_scales.leaf_for(second, "a", k) == 1
    assert shared_scales.leaf_for(second, "a", x) is second  # x itself is of another dtype


@pytest.mark.thorough(1)
@pytest.mark.parametrize("stacked", [(True, True), (True, False), (False, True)], ids=str)
def test_amaxes_of_members(stacked):
    """Under vmap each leaf gets the amax of the members that share it, whether or not the leaf has the vmap's axis."""
    members = jnp.stack([X[0] * factor for factor in (1.0, 5.0, 2.0)])
    kernels, first = jnp.ones((3, SIDE, SIDE)), jnp.max(jnp.abs(X[0]))
    names = [f"fp8_{operand}_log2_scale" for operand in ("lhs_e4m3", "rhs_e4m3", "grad_e5m2")]
    layers = [{name: jnp.zeros(3 if has_axis else ()) for name in names} for has_axis in stacked]

    def loss_fn(layers):
        def member(x, kernel, *layers):
            products = (
                jaxmp.fp8.dot_general(x, kernel, (((1,), (0,)), ((), ())), recipe=RECIPE, scales=scales)
                for scales in (jaxmp.fp8.Scales(*(layer[name] for name in names)) for layer in layers)
            )
            return jnp.sum(sum(products))

        axes = (0, 0, *(0 if has_axis else None for has_axis in stacked))
        return jnp.sum(jax.vmap(member, axes)(members, kernels, *layers))

    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp32", recipe=RECIPE).init(layers)
    _, grads = jax.jit(jaxmp.value_and_grad(loss_fn))(layers, opt_state=opt_state)
    amaxes = map(jaxmp.fp8.get_amaxes, grads)
    for layer, has_axis in zip(amaxes, stacked, strict=True):
        assert_exact(layer[names[0]], jnp.array([1.0, 5.0, 2.0]) * first if has_axis else 5 * first)
