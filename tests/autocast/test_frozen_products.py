"""A product with a frozen kernel keeps no copy of it for the backward pass, wherever it stands, and changes no bit."""

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
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact
from matmul_dtypes import matmuls

WIDTH = 48  # of kernels; no activation has it squared
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
LORA = {
    "a": np.random.default_rng(1).normal(size=(WIDTH, 2)).astype(np.float32) / 8,
    "b": np.ones((2, WIDTH), np.float32),
}
POLICIES = ["bf16", "bf16-mixed", "fp16"]
LOOPS = ("dot", "scan", "cond", "transposed", "einsum", "vmap")
LOOPS += ("scan by number", "fori", "take", "split", "joined", "scaled")


def widened(tree):
    """The same values as arrays."""
    is_frozen = lambda x: hasattr(x, "log2_scale")  # noqa: E731
    return jax.tree.map(lambda x: jnp.asarray(x) if is_frozen(x) else x, tree, is_leaf=is_frozen)


def copies(loss, lora, base):
    """The dtypes of arrays of a kernel's shape, or of a stack of kernels, that the backward pass keeps."""
    _, pull = jax.vjp(lambda lora: jax.jit(loss)(lora, base), lora)
    return {x.dtype.name for x in jax.tree.leaves(pull) if x.shape[-2:] == (WIDTH, WIDTH)}


def of_linen(model):
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]
    return params, lambda base, x: model.apply({"params": base}, x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(WIDTH)(nn.tanh(nn.Dense(WIDTH)(nn.LayerNorm()(x)))), None


class Deep(nn.Module):
    wrapped: type = Block

    @nn.compact
    def __call__(self, x):
        return self.wrapped()(self.wrapped()(x)[0])[0]


def stacked(block):
    return nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)


class Stack(nn.Module):
    block: type = Block

    @nn.compact
    def __call__(self, x):
        return stacked(self.block)()(x, None)[0]


def plain(loop):
    base = {"kernel": np.random.default_rng(2).normal(size=(3, WIDTH, WIDTH)).astype(np.float32) / 7}

    def turn(x, kernel):
        return jnp.tanh(x @ kernel), None

    def run(base, x):
        kernels = base["kernel"]
        if loop == "scan":
            return lax.scan(turn, x, kernels)[0]
        if loop == "scan by number":
            return lax.scan(lambda x, i: (jnp.tanh(x @ kernels[i]), None), x, jnp.arange(3))[0]
        if loop == "fori":
            return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ kernels[i]), x)
        if loop == "take":
            return x @ jnp.take(kernels, 1, axis=0)
        if loop == "split":
            return sum(jnp.tanh(x @ k[0]) for k in jnp.split(kernels, 3))
        if loop == "joined":
            return jnp.tanh(x @ jnp.concatenate([kernels[0], kernels[1]], axis=1))[:, :WIDTH]
        if loop == "scaled":
            return x @ jnp.pad(0.5 * kernels[0], ((0, 0), (0, 0)))
        first = jax.tree.map(lambda k: k[0], kernels)
        if loop == "cond":
            return lax.cond(jnp.sum(x) > 0, lambda x: x @ first, lambda x: jnp.tanh(x @ first), x)
        if loop == "transposed":
            return x @ jnp.asarray(first).T
        if loop == "einsum":
            return jnp.einsum("bi,ij->bj", x, first)
        if loop == "vmap":
            return jax.vmap(lambda k: x @ k)(kernels).sum(0)
        return jnp.dot(x, first)

    return base, run


def of_haiku():
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([WIDTH, WIDTH])(x)))
    return net.init(jax.random.key(0), X), net.apply


def of_equinox():
    layers = [eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in jax.random.split(jax.random.key(0))]
    weights = [{"weight": layer.weight, "bias": layer.bias} for layer in layers]

    def run(weights, x):
        parts = lambda layer: (layer.weight, layer.bias)  # noqa: E731
        pairs = zip(layers, weights, strict=True)
        first, last = (eqx.tree_at(parts, layer, (w["weight"], w["bias"])) for layer, w in pairs)
        return jax.vmap(lambda x: last(jax.nn.relu(first(x))))(x)

    return weights, run


MODELS = {
    "linen": lambda: of_linen(Deep()),
    "linen remat": lambda: of_linen(Deep(nn.remat(Block))),
    "linen scan": lambda: of_linen(Stack()),
    "linen scan of remat": lambda: of_linen(Stack(nn.remat(Block))),
    "linen lstm": lambda: of_linen(nn.RNN(nn.OptimizedLSTMCell(WIDTH))),
    **{loop: functools.partial(plain, loop) for loop in LOOPS},
    "haiku": of_haiku,
    "equinox": of_equinox,
}


@functools.cache
def made(name):
    """(the frozen base, a loss of adapters and a base)."""
    base, run = MODELS[name]()
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(base)]
    ends = [end for end in ("kernel", "/w", "weight") if any(name.endswith(end) for name in names)]
    frozen = jaxmp.fp8.freeze(base, [f"*{end}" for end in ends])

    def loss(lora, base):
        return jnp.mean((run(base, X + X @ lora["a"] @ lora["b"]) - 1) ** 2)

    return frozen, loss


FACTORS = {
    "a row of factors": lambda g, w: w * g,
    "divisors of rows": lambda g, w: w / g[0, :, None],
    "a whole array": lambda g, w: jnp.broadcast_to(g, w.shape) * w,
    "in a loop": lambda g, w: jax.lax.fori_loop(0, 2, lambda _, w: w, w * g),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_a_kernel_that_are_trained_keep_no_copy(name, policy):
    base = jaxmp.fp8.freeze({"kernel": jax.random.normal(jax.random.key(5), (WIDTH, WIDTH))})
    g = 1 + jax.random.uniform(jax.random.key(6), (1, WIDTH))

    def loss(g, base):
        return jnp.mean((X @ FACTORS[name](g, jnp.asarray(base["kernel"]))) ** 2)

    run = jaxmp.autocast(loss, policy)
    wide = {"float32", "bfloat16", "float16"}
    assert len(copies(run, g, base) & wide) <= (name == "a whole array")  # the factors themselves
    assert copies(run, g, widened(base)) & wide
    found, expected = (jax.jit(jax.grad(run))(g, tree) for tree in (base, widened(base)))
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-4)


@pytest.mark.thorough(12)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_the_backward_pass_keeps_fp8_alone(name, policy):
    frozen, loss = made(name)
    run = jaxmp.autocast(loss, policy)
    assert copies(run, LORA, frozen) == {"float8_e4m3fn"}
    assert copies(run, LORA, widened(frozen)) != {"float8_e4m3fn"}  # what it would keep
    found, expected = (jax.jit(jax.value_and_grad(run))(LORA, base) for base in (frozen, widened(frozen)))
    assert_close(found, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", ["linen", "scan"])
def test_without_a_policy_the_results_are_the_same(name):
    frozen, loss = made(name)
    assert_close(jax.jit(loss)(LORA, frozen), jax.jit(loss)(LORA, widened(frozen)), rtol=1e-5)
    assert_close(loss(LORA, frozen), loss(LORA, widened(frozen)), rtol=1e-5)


def test_a_number_that_scales_a_kernel_is_trained():
    """Its gradient passes through the kernel that is made again."""
    kernel = jaxmp.fp8.freeze({"kernel": np.random.default_rng(4).normal(size=(WIDTH, WIDTH))})["kernel"]

    def loss(factor, kernel):
        return jnp.mean(jnp.tanh(X @ (kernel * factor)) ** 2)

    found, expected = (
        jax.jit(jax.value_and_grad(jaxmp.autocast(loss, "bf16")))(jnp.float32(0.1), k)
        for k in (kernel, jnp.asarray(kernel))
    )
    assert_close(found, expected, rtol=1e-2)
    assert_close(found, jax.value_and_grad(loss)(jnp.float32(0.1), jnp.asarray(kernel)), rtol=3e-2)


def test_a_loop_that_reads_fp8_runs_in_16_bits():
    """A function in a program is autocast although an operand is in fp8."""
    frozen, _ = made("scan")
    run = jaxmp.autocast(lambda kernels, x: lax.scan(lambda x, kernel: (x @ kernel, None), x, kernels)[0], "bf16")
    assert set(matmuls(run, frozen["kernel"], X)) == {"bfloat16"}


@pytest.mark.parametrize("policy", POLICIES)
def test_adapters_train_in_a_step(policy):
    frozen, _ = made("linen scan")

    def trained(base, accumulate=1, steps=30):
        state = jaxmp.linen.TrainState.create(apply_fn=None, params=LORA, tx=optax.adam(1e-2), policy=policy)

        @jax.jit
        def step(state, base, x):
            def of_batch(lora, base, x):
                return jnp.mean((Stack().apply({"params": base}, x + x @ lora["a"] @ lora["b"]) - 1) ** 2)

            grad_fn = jaxmp.value_and_grad(of_batch, accumulate=accumulate, accumulate_argnums=2)
            loss, grads = grad_fn(state.params, base, x, opt_state=state)
            return state.apply_gradients(grads=grads), loss

        losses = []
        for _ in range(steps):
            state, loss = step(state, base, X)
            losses.append(float(loss))
        return losses

    found = trained(frozen)
    assert found[-1] < 0.8 * found[0]
    assert_close(found, trained(widened(frozen)), rtol=1e-2)
    assert_close(found, trained(frozen, accumulate=4), rtol=2e-2)


def test_nnx_trains_its_adapters():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.last = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.relu(self.norm(self.first(x))))

    net = Net(nnx.Rngs(0))
    nnx.update(net, jaxmp.fp8.freeze(nnx.state(net, nnx.Param)))
    optimizer = jaxmp.nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.LoRAParam, policy="bf16")
    base, others = jnp.asarray(net.first.kernel[...]), (net.norm.mean[...], net.first.lora.lora_b[...])

    def loss_fn(net, x):
        return jnp.mean((net(x) - 1) ** 2)

    @nnx.jit
    def step(net, optimizer, x):
        loss, grads = jaxmp.nnx.value_and_grad(loss_fn, wrt=nnx.LoRAParam)(net, x, opt_state=optimizer)
        optimizer.update(net, grads)
        return loss

    losses = [float(step(net, optimizer, X)) for _ in range(10)]
    assert losses[-1] < losses[0]
    assert_exact(jnp.asarray(net.first.kernel[...]), base)
    assert all((x != y).any() for x, y in zip((net.norm.mean[...], net.first.lora.lora_b[...]), others, strict=True))
    graph, lora, rest = nnx.split(net, nnx.LoRAParam, ...)

    def of_lora(lora, rest):
        return jaxmp.autocast(loss_fn, "bf16")(nnx.merge(graph, lora, rest), X)

    assert copies(of_lora, lora, rest) == {"float8_e4m3fn"}


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    frozen, loss = made("linen")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def on_device(lora, base, x):
        def of_rows(lora, base, x):
            return jnp.mean((Deep().apply({"params": base}, x + x @ lora["a"] @ lora["b"]) - 1) ** 2)

        opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "bf16-mixed").init(LORA)
        return lax.pmean(jaxmp.value_and_grad(of_rows, policy="bf16-mixed")(lora, base, x, opt_state=opt_state), "data")

    run = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=check_vma)
    found = jax.jit(run)(LORA, frozen, X)
    assert_close(found, jax.jit(jax.value_and_grad(jaxmp.autocast(loss, "bf16")))(LORA, frozen), rtol=3e-2, atol=1e-3)


def test_arrays_that_are_sharded_stay_so():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    frozen, loss = made("dot")
    whole = widened(frozen)
    split = jax.device_put(whole, NamedSharding(mesh, P(None, None, "model")))
    kernel = jaxmp.fp8.freeze(split)["kernel"]
    assert kernel.q.sharding.spec == kernel.log2_scale.sharding.spec == P(None, None, "model")
    run = jax.jit(jax.value_and_grad(jaxmp.autocast(loss, "bf16")))
    assert_close(run(LORA, {"kernel": kernel}), run(LORA, frozen), rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("way", ["layers", "function"])
def test_fp8_recipes_take_a_frozen_kernel(way):
    frozen, _ = made("linen")
    model = Deep()

    def in_layers(base, x):
        with jaxmp.fp8.autocast(jaxmp.fp8.CurrentScaling(), filter=lambda path, layer: True):
            return jnp.mean(model.apply({"params": base}, x))

    def run(base, x):
        return jnp.mean(model.apply({"params": base}, x))

    if way == "function":
        in_layers = jaxmp.autocast(run, "fp8", recipe=jaxmp.fp8.CurrentScaling())
    assert_close(jax.jit(in_layers)(frozen, X), jax.jit(in_layers)(widened(frozen), X), rtol=0.1, atol=0.02)
