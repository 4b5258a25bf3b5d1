"""fp8 scales beside frozen weights move, or an error says what to do: LoRA, labels, masks, closed-over params."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_moved
from jaxmp._src.base import tree_paths
from jaxmp.fp8 import DelayedScaling

SIDE = 16
RECIPE = DelayedScaling(amax_history_len=4)
X = np.random.default_rng(0).normal(size=(2 * SIDE, SIDE)).astype(np.float32)
MODEL = nn.Sequential([nn.Dense(SIDE) for _ in range(4)])


def init():
    with jaxmp.fp8.autocast(RECIPE, filter="*"):
        return jax.jit(MODEL.init)(jax.random.key(0), X)["params"]


def loss_fn(params, x):
    with jaxmp.fp8.autocast(RECIPE, filter="*"):
        return jnp.mean(MODEL.apply({"params": params}, x) ** 2)


def labels(params):
    """Only the last layer is trained."""
    frozen = jax.tree.map(lambda _: "frozen", params)
    return frozen | {"layers_3": jax.tree.map(lambda _: "train", params["layers_3"])}


def optimizers(tx, params):
    return optax.multi_transform({"train": tx, "frozen": optax.set_to_zero()}, labels(params))


def idle(params):
    return [path for path, scale in jaxmp.fp8.get_scales(params).items() if np.any(np.asarray(scale) == 1)]


def trained(tx, params, steps=4):
    @jax.jit
    def step(params, opt_state):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, X, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    opt_state = tx.init(params)
    for _ in range(steps):
        params, opt_state = step(params, opt_state)
    return params


TX = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=RECIPE)


@pytest.mark.thorough(0)
def test_labels_inside_of_mixed_precision_move_all_scales():
    params = init()
    new = trained(jaxmp.mixed_precision(optimizers(optax.sgd(0.1), params), "fp8", recipe=RECIPE), params)
    assert idle(new) == []
    assert_moved(new["layers_0"]["kernel"], params["layers_0"]["kernel"])


@pytest.mark.parametrize("way", ["multi_transform", "masked"])
def test_labels_outside_are_refused(way):
    with jaxmp.fp8.autocast(RECIPE, filter="*"):
        params = jax.eval_shape(MODEL.init, jax.random.key(0), X)["params"]
    if way == "masked":
        tx = optax.masked(TX, jax.tree.map(lambda label: label == "train", labels(params)))
    else:
        tx = optimizers(TX, params)
    with pytest.raises(ValueError, match=r"must get all fp8 scales; got a part of the params. Put it around optax"):
        jax.eval_shape(tx.init, params)


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("way", "policy"), [("closed over", "fp8"), ("an argument", "fp16")])
def test_layers_whose_scales_are_not_differentiated_cast_each_tensor_with_its_own_scale(way, policy):
    params = init()
    frozen = {name: params.pop(name) for name in ("layers_1", "layers_2", "layers_3")}
    frozen["layers_1"]["kernel"] /= 2**12  # with a scale of 1 the input of layers_2 would be zero, and all gradients
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), policy, recipe=RECIPE).init(params)
    if way == "closed over":
        gradients, args = jaxmp.value_and_grad(lambda trained, x: loss_fn(frozen | trained, x)), (params, X)
    else:
        gradients, args = (
            jaxmp.value_and_grad(lambda trained, x, frozen: loss_fn(frozen | trained, x)),
            (params, X, frozen),
        )
    with pytest.warns(
        UserWarning, match=r"layers_1, layers_2, layers_3 are closed over.*multi_transform.*wrt=nnx\.Any"
    ):
        _, grads = jax.jit(gradients)(*args, opt_state=opt_state)
    got = grads["layers_0"]["bias"] / jaxmp.get_loss_scale(opt_state)

    def in_float32(params):
        with jaxmp.fp8.autocast(enabled=False):
            return jnp.mean(MODEL.apply({"params": frozen | params}, X) ** 2)

    expected = jax.jit(jax.grad(in_float32))(params)["layers_0"]["bias"]
    assert 0 < np.linalg.norm(got - expected) < 0.15 * np.linalg.norm(expected)


class Lora(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.LoRALinear(SIDE, SIDE, lora_rank=SIDE, rngs=nnx.Rngs(i)) for i in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.thorough(0)
def test_nnx_lora_moves_the_scales_of_the_frozen_layers():
    model = Lora()
    jaxmp.nnx.to_fp8(model, RECIPE, filter="*")
    before = jax.tree.map(jnp.array, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    optimizer = jaxmp.nnx.Optimizer(model, TX, wrt=nnx.LoRAParam, policy="fp8")

    @nnx.jit
    def step(model, optimizer):
        mean_square = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
        gradients = jaxmp.nnx.value_and_grad(mean_square, wrt=nnx.LoRAParam)
        optimizer.update(model, gradients(model, X, opt_state=optimizer)[1])

    for _ in range(3):
        step(model, optimizer)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert idle(after) == []
    differs = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)
    moved = {path for path, x in tree_paths.leaves_by_path(differs).items() if x}
    assert {path.rpartition("/")[2] for path in moved if not jaxmp.fp8.is_scale(path)} == {"lora_a", "lora_b"}


def test_flax_optimizers_say_which_filter_to_pass():
    model = Lora()
    jaxmp.nnx.to_fp8(model, RECIPE, filter="*")
    with pytest.raises(ValueError, match=r"wrt=nnx\.Any\(filter, jaxmp\.nnx\.Fp8Scale\)"):
        nnx.Optimizer(model, TX, wrt=nnx.LoRAParam)
