"""A product with a frozen kernel keeps no copy of it for the backward pass, wherever it stands, and changes no bit."""

import functools
import itertools

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
from policy_steps import filled

WIDTH = 48  # of kernels; no activation has it squared
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
LORA = {
    "a": np.random.default_rng(1).normal(size=(WIDTH, 2)).astype(np.float32) / 8,
    "b": np.ones((2, WIDTH), np.float32),
}


def widened(tree):
    """The same values as arrays."""
    is_frozen = lambda x: hasattr(x, "log2_scale")  # noqa: E731
    return jax.tree.map(lambda x: jnp.asarray(x) if is_frozen(x) else x, tree, is_leaf=is_frozen)


def copies(loss, lora, base):
    """The dtypes of arrays of a kernel's shape, or of a stack of kernels, that the backward pass keeps."""
    _, pull = jax.vjp(lambda lora: jax.jit(loss)(lora, base), lora)
    return {x.dtype.name for x in jax.tree.leaves(pull) if x.shape[-2:] == (WIDTH, WIDTH)}


def of_linen(model):
    params = filled(model.init, jax.random.key(0), X)["params"]
    return params, lambda base, x: model.apply({"params": base}, x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.tanh(nn.Dense(WIDTH)(nn.LayerNorm()(x))), None


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Block()(Block()(x)[0])[0]


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return stack()(x, None)[0]


def turn(x, kernel):
    return jnp.tanh(x @ kernel), None


def first_of(kernels):
    return jax.tree.map(lambda k: k[0], kernels)


PRODUCTS = {  # of x with a stack of three kernels
    "dot": lambda x, kernels: jnp.dot(x, first_of(kernels)),
    "scan": lambda x, kernels: lax.scan(turn, x, kernels)[0],
    "cond": lambda x, kernels: lax.cond(jnp.sum(x) > 0, jnp.dot, lambda x, k: turn(x, k)[0], x, first_of(kernels)),
    "transposed": lambda x, kernels: x @ jnp.asarray(first_of(kernels)).T,
    "einsum": lambda x, kernels: jnp.einsum("bi,ij->bj", x, first_of(kernels)),
    "vmap": lambda x, kernels: jax.vmap(lambda k: x @ k)(kernels).sum(0),
    "scan by number": lambda x, kernels: lax.scan(lambda x, i: turn(x, kernels[i]), x, jnp.arange(3))[0],
    "take": lambda x, kernels: x @ jnp.take(kernels, 1, axis=0),
    "split": lambda x, kernels: sum(jnp.tanh(x @ k[0]) for k in jnp.split(kernels, 3)),
    "joined": lambda x, kernels: jnp.tanh(x @ jnp.concatenate([kernels[0], kernels[1]], axis=1))[:, :WIDTH],
    "scaled": lambda x, kernels: x @ jnp.pad(0.5 * kernels[0], ((0, 0), (0, 0))),
}


def plain(name):
    base = {"kernel": np.random.default_rng(2).normal(size=(3, WIDTH, WIDTH)).astype(np.float32) / 7}
    return base, lambda base, x: PRODUCTS[name](x, base["kernel"])


def of_haiku():
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([WIDTH, WIDTH])(x)))
    return filled(net.init, jax.random.key(0), X), net.apply


def of_equinox():
    layer = eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0))

    def run(base, x):
        return jax.nn.relu(jax.vmap(eqx.tree_at(lambda layer: layer.weight, layer, base["weight"]))(x))

    return {"weight": layer.weight}, run


MODELS = {  # and the policy under which it is tested
    "linen": ("bf16", lambda: of_linen(Deep())),
    "linen scan": ("bf16-mixed", lambda: of_linen(Stack())),
    "linen lstm": ("bf16", lambda: of_linen(nn.RNN(nn.OptimizedLSTMCell(WIDTH)))),
    **{
        name: (policy, functools.partial(plain, name))
        for name, policy in zip(PRODUCTS, itertools.cycle(["bf16", "fp16", "bf16-mixed"]))
    },
    "haiku": ("fp16", of_haiku),
    "equinox": ("bf16-mixed", of_equinox),
}


@functools.cache
def base_and_loss(name):
    """(the frozen base, a loss of adapters and a base)."""
    base, run = MODELS[name][1]()
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(base)]
    ends = [end for end in ("kernel", "/w", "weight") if any(name.endswith(end) for name in names)]
    frozen = jaxmp.fp8.freeze(base, [f"*{end}" for end in ends])

    def loss(lora, base):
        return jnp.mean((run(base, X + X @ lora["a"] @ lora["b"]) - 1) ** 2)

    return frozen, loss


def losses_and_gradients(run, adapters, base):
    """Of a frozen base, and of one of arrays."""
    grad = jax.value_and_grad(run)
    both = jax.jit(lambda adapters, base, array: (grad(adapters, base), grad(adapters, array)))
    return both(adapters, base, widened(base))


FACTORS = {
    "a row of factors": ("bf16", lambda g, w: w * g),
    "divisors of rows": ("fp16", lambda g, w: w / g[0, :, None]),
    "a whole array": ("bf16-mixed", lambda g, w: jnp.broadcast_to(g, w.shape) * w),
    "in a loop": ("fp16", lambda g, w: lax.fori_loop(0, 2, lambda _, w: w, w * g)),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_a_kernel_that_are_trained_keep_no_copy(name):
    policy, product = FACTORS[name]
    rng = np.random.default_rng(5)
    base = jaxmp.fp8.freeze({"kernel": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32)})
    g = 1 + rng.uniform(size=(1, WIDTH)).astype(np.float32)

    def loss(g, base):
        return jnp.mean((X @ product(g, jnp.asarray(base["kernel"]))) ** 2)

    run = jaxmp.autocast(loss, policy)
    wide = {"float32", "bfloat16", "float16"}
    assert len(copies(run, g, base) & wide) <= (name == "a whole array")  # the factors themselves
    assert copies(run, g, widened(base)) & wide
    (_, grad), (_, expected) = losses_and_gradients(run, g, base)
    np.testing.assert_allclose(grad, expected, rtol=1e-2, atol=1e-4)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", MODELS)
def test_the_backward_pass_keeps_fp8_alone(name):
    frozen, loss = base_and_loss(name)
    run = jaxmp.autocast(loss, MODELS[name][0])
    assert copies(run, LORA, frozen) == {"float8_e4m3fn"}
    assert copies(run, LORA, widened(frozen)) != {"float8_e4m3fn"}  # what it would keep
    assert_close(*losses_and_gradients(run, LORA, frozen), rtol=2e-2, atol=2e-3)


def test_without_a_policy_the_results_are_the_same():
    frozen, loss = base_and_loss("scan")
    assert_close(loss(LORA, frozen), loss(LORA, widened(frozen)), rtol=1e-5)
    assert_close(jax.jit(loss)(LORA, frozen), jax.jit(loss)(LORA, widened(frozen)), rtol=1e-5)


def test_a_number_that_scales_a_kernel_is_trained():
    """Its gradient passes through the kernel that is made again."""
    kernel = jaxmp.fp8.freeze({"kernel": np.random.default_rng(4).normal(size=(WIDTH, WIDTH))})["kernel"]

    def loss(factor, kernel):
        return jnp.mean(jnp.tanh(X @ (kernel * factor)) ** 2)

    frozen, array = losses_and_gradients(jaxmp.autocast(loss, "bf16"), np.float32(0.1), kernel)
    assert_close(frozen, array, rtol=1e-2)
    assert_close(frozen, jax.jit(jax.value_and_grad(loss))(np.float32(0.1), jnp.asarray(kernel)), rtol=3e-2)


def test_a_loop_that_reads_fp8_runs_in_16_bits():
    """A function in a program is autocast although an operand is in fp8."""
    frozen, _ = base_and_loss("scan")
    run = jaxmp.autocast(lambda kernels, x: lax.scan(lambda x, kernel: (x @ kernel, None), x, kernels)[0], "bf16")
    assert set(matmuls(run, frozen["kernel"], X)) == {"bfloat16"}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16"])
def test_adapters_train_in_a_step(policy):
    frozen, _ = base_and_loss("linen scan")

    def trained(base, accumulate=1):
        state = jaxmp.linen.TrainState.create(apply_fn=None, params=LORA, tx=optax.adam(1e-2), policy=policy)

        @jax.jit
        def step(state, base, x):
            def of_batch(lora, base, x):
                return jnp.mean((Stack().apply({"params": base}, x + x @ lora["a"] @ lora["b"]) - 1) ** 2)

            grad_fn = jaxmp.value_and_grad(of_batch, accumulate=accumulate, accumulate_argnums=2)
            loss, grads = grad_fn(state.params, base, x, opt_state=state)
            return state.apply_gradients(grads=grads), loss

        losses = []
        for _ in range(30):
            state, loss = step(state, base, X)
            losses.append(float(loss))
        return losses

    losses = trained(frozen)
    assert losses[-1] < 0.8 * losses[0]
    assert_close(losses, trained(widened(frozen), accumulate=4), rtol=2e-2)


@pytest.mark.thorough(0)
def test_nnx_trains_its_adapters():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.last = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.relu(self.norm(self.first(x))))

    net = nnx.jit(lambda: Net(nnx.Rngs(0)))()
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
    for before, after in zip(others, (net.norm.mean[...], net.first.lora.lora_b[...]), strict=True):
        assert (before != after).any()
    graph, lora, rest = nnx.split(net, nnx.LoRAParam, ...)

    def of_lora(lora, rest):
        return jaxmp.autocast(loss_fn, "bf16")(nnx.merge(graph, lora, rest), X)

    assert copies(of_lora, lora, rest) == {"float8_e4m3fn"}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    frozen, loss = base_and_loss("linen")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def on_device(lora, base, x):
        def of_rows(lora, base, x):
            return jnp.mean((Deep().apply({"params": base}, x + x @ lora["a"] @ lora["b"]) - 1) ** 2)

        opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "bf16-mixed").init(LORA)
        return lax.pmean(jaxmp.value_and_grad(of_rows, policy="bf16-mixed")(lora, base, x, opt_state=opt_state), "data")

    run = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=check_vma)
    loss_and_grads = jax.jit(run)(LORA, frozen, X)
    assert_close(
        loss_and_grads, jax.jit(jax.value_and_grad(jaxmp.autocast(loss, "bf16")))(LORA, frozen), rtol=3e-2, atol=1e-3
    )


def test_arrays_that_are_sharded_stay_so():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    frozen, loss = base_and_loss("dot")
    whole = widened(frozen)
    split = jax.device_put(whole, NamedSharding(mesh, P(None, None, "model")))
    kernel = jaxmp.fp8.freeze(split)["kernel"]
    assert kernel.q.sharding.spec == kernel.log2_scale.sharding.spec == P(None, None, "model")
    run = jax.jit(jax.value_and_grad(jaxmp.autocast(loss, "bf16")))
    assert_close(run(LORA, {"kernel": kernel}), run(LORA, frozen), rtol=2e-2, atol=1e-4)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("way", ["layers", "function"])
def test_fp8_recipes_take_a_frozen_kernel(way):
    frozen, _ = base_and_loss("linen")
    model = Deep()

    def in_layers(base, x):
        with jaxmp.fp8.autocast(jaxmp.fp8.CurrentScaling(), filter=lambda path, layer: True):
            return jnp.mean(model.apply({"params": base}, x))

    def run(base, x):
        return jnp.mean(model.apply({"params": base}, x))

    if way == "function":
        in_layers = jaxmp.autocast(run, "fp8", recipe=jaxmp.fp8.CurrentScaling(), filter="*")
    assert_close(jax.jit(in_layers)(frozen, X), jax.jit(in_layers)(widened(frozen), X), rtol=0.1, atol=0.02)
