"""Whole training steps of a GPT-like and a Llama-like stack, to be compiled: forward, backward, optimizer."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn, nnx
from jaxtyping import Array, PyTree

import jaxmp
from benchmarks.programs.fp8_matmuls import everywhere
from benchmarks.programs.recipes import LEARNING_RATE, MAX_NORM

HEAD = 128  # of attention
BY_HAND = "bf16 by hand"
RECIPES = {
    "fp8 delayed": jaxmp.fp8.DelayedScaling(),
    "fp8 current": jaxmp.fp8.CurrentScaling(),
    "fp8 block": jaxmp.fp8.BlockScaling(),
    "fp8 rowwise": jaxmp.fp8.RowwiseScaling(),
}
PRECISIONS = (BY_HAND, "bf16", "fp8 delayed", "fp16", "fp8 current", "fp8 block", "fp8 rowwise")
FRAMEWORKS = ("linen", "nnx")
OPTIMIZER = "optimizer"  # the scope of its operations


class Stack(NamedTuple):
    """Layers of a large model without its ends, and the activations that go in.

    These are 16-bit [B, T, D], and the stream between the layers keeps their dtype (x + layer(x) of a model without
    `dtype=` would be float32). The loss is the mean of the squares that come out.
    """

    kind: str  # "GPT" or "Llama"
    width: int
    layers: int
    sequences: int = 4
    length: int = 2048

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Kernels of a layer, [in, out]: at a width of 4096 those of Llama 8B. A GPT's MLP has four times the width."""
        w = self.width
        if self.kind == "GPT":
            return {"qkv": (w, 3 * w), "out": (w, w), "up": (w, 4 * w), "down": (4 * w, w)}
        hidden, kv = w * 7 // 2, max(w // 4, HEAD)
        attention = {"q": (w, w), "k": (w, kv), "v": (w, kv), "out": (w, w)}
        return attention | {"gate": (w, hidden), "up": (w, hidden), "down": (hidden, w)}


STACKS = (Stack("GPT", 2048, 2), Stack("Llama", 4096, 1))


class Step(NamedTuple):
    """A row: what is trained, and how.

    `BY_HAND` is what a user writes: `dtype=` in every layer, bfloat16 params, float32 masters, no check of gradients.
    The others name the precision once (`jaxmp.linen.TrainState`, `jaxmp.nnx.Optimizer`). In fp8 all matmuls with
    weights are in fp8, also those of the first and the last layer: the stack is the middle of a model.
    """

    stack: Stack
    precision: str
    framework: str = "linen"
    remat: bool = False
    flash: bool = True  # cuDNN's attention, else XLA's

    @property
    def row(self) -> str:
        """The name of the row."""
        return f"{self.stack.kind}, {self.framework}, {self.precision}{', remat' * self.remat}"


def steps() -> list[Step]:
    """All rows: in linen every precision; in nnx and under remat those to compare with, which come first."""
    first = [Step(stack, precision) for stack in STACKS for precision in PRECISIONS[:3]]
    under_remat = [step._replace(remat=True) for step in first]
    in_nnx = [step._replace(framework="nnx") for step in first]
    others = [Step(stack, precision) for stack in STACKS for precision in PRECISIONS[3:]]
    return [*first, *others, *under_remat, *in_nnx]


# --- models -----------------------------------------------------------------------------------------------------------


def forward(kind: str, flash: bool, layer: Callable[[str], Callable[[Array], Array]], x: Array) -> Array:
    """One layer, [B, T, D] -> [B, T, D]; `layer` gives its parts by name: Dense layers and norms."""
    heads = (*x.shape[:2], -1, HEAD)
    y = layer("norm_1")(x)
    if kind == "GPT":
        q, k, v = jnp.split(layer("qkv")(y).reshape(heads), 3, axis=2)
    else:
        q, k, v = (layer(name)(y).reshape(heads) for name in "qkv")
        q, k = rotated(q), rotated(k)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if flash else "xla")
    x = x + layer("out")(y.reshape(x.shape)).astype(x.dtype)
    y = layer("norm_2")(x)
    hidden = nn.gelu(layer("up")(y)) if kind == "GPT" else nn.silu(layer("gate")(y)) * layer("up")(y)
    return x + layer("down")(hidden).astype(x.dtype)


def rotated(x: Array) -> Array:
    """Rotary positions, [B, T, H, 128]."""
    angles = jnp.arange(x.shape[1])[:, None] * 5e5 ** -jnp.linspace(0.0, 1.0, HEAD // 2, endpoint=False)[None]
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Layer(nn.Module):
    """One layer in linen."""

    step: Step
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        stack = self.step.stack
        has_bias = stack.kind == "GPT"

        def layer(name: str) -> nn.Module:
            if name.startswith("norm"):
                return (nn.LayerNorm if has_bias else nn.RMSNorm)(dtype=self.dtype, name=name)
            return nn.Dense(stack.matrices[name][1], use_bias=has_bias, dtype=self.dtype, name=name)

        return forward(stack.kind, self.step.flash, layer, x)


class Model(nn.Module):
    """The stack in linen."""

    step: Step
    dtype: Any = None  # None: the policy's

    @nn.compact
    def __call__(self, x: Array) -> Array:
        cls = nn.remat(Layer) if self.step.remat else Layer
        for i in range(self.step.stack.layers):
            x = cls(self.step, self.dtype, name=f"layer_{i}")(x)
        return x


class NnxLayer(nnx.Module):
    """One layer in nnx; scopes name its parts, as linen does."""

    def __init__(self, step: Step, dtype: Any, rngs: nnx.Rngs):
        stack = step.stack
        self.kind, self.flash = stack.kind, step.flash
        has_bias = stack.kind == "GPT"
        norm = nnx.LayerNorm if has_bias else nnx.RMSNorm
        self.norm_1, self.norm_2 = (norm(stack.width, dtype=dtype, rngs=rngs) for _ in range(2))
        for name, (n_in, n_out) in stack.matrices.items():
            setattr(self, name, nnx.Linear(n_in, n_out, use_bias=has_bias, dtype=dtype, rngs=rngs))

    def __call__(self, x: Array) -> Array:
        part = lambda name: jax.named_scope(name)(getattr(self, name))  # noqa: E731
        return forward(self.kind, self.flash, part, x)


class NnxModel(nnx.Module):
    """The stack in nnx."""

    def __init__(self, step: Step, dtype: Any = None):
        rngs, self.remat = nnx.Rngs(0), step.remat
        self.layers = nnx.List([NnxLayer(step, dtype, rngs) for _ in range(step.stack.layers)])

    def __call__(self, x: Array) -> Array:
        def run(layer: NnxLayer, x: Array) -> Array:
            return layer(x)

        for i, layer in enumerate(self.layers):
            x = jax.named_scope(f"layer_{i}")(nnx.remat(run) if self.remat else run)(layer, x)
        return x


# --- steps ------------------------------------------------------------------------------------------------------------


class Program(NamedTuple):
    """A step to compile: `state, loss = run(state, x)`."""

    init: Callable[[], Any]
    run: Callable[[Any, Array], Any]


def program(step: Step) -> Program:
    """The step of a row."""
    if step.precision == BY_HAND:
        return by_hand(step)
    return in_linen(step) if step.framework == "linen" else in_nnx(step)


def example(step: Step) -> jax.ShapeDtypeStruct:
    """What goes in."""
    shape = (step.stack.sequences, step.stack.length, step.stack.width)
    return jax.ShapeDtypeStruct(shape, jnp.float16 if step.precision == "fp16" else jnp.bfloat16)


def mean_of_squares(y: Any) -> Array:
    """The loss, float32 []."""
    return jnp.mean(y.astype(jnp.float32) ** 2)


def by_hand(step: Step) -> Program:
    """bfloat16 by hand: params in bfloat16, and float32 masters."""
    optimizer = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE))
    half = functools.partial(jax.tree.map, lambda w: w.astype(jnp.bfloat16))
    start, apply = _functions(step, jnp.bfloat16)

    def init() -> Any:
        masters = start()
        return half(masters), masters, optimizer.init(masters)

    def run(state: Any, x: Array) -> Any:
        params, masters, opt_state = state
        loss, grads = jax.value_and_grad(lambda params: mean_of_squares(apply(params, x)))(params)
        with jax.named_scope(OPTIMIZER):
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            updates, opt_state = optimizer.update(grads, opt_state, masters)
            masters = optax.apply_updates(masters, updates)
            return (half(masters), masters, opt_state), loss

    return Program(init, run)


def _functions(step: Step, dtype: Any) -> tuple[Callable[[], PyTree], Callable[[PyTree, Array], Any]]:
    """What makes the params, and the model as a function of them."""
    if step.framework == "linen":
        small = Model(step._replace(flash=False), dtype)  # the params are the same
        return lambda: small.init(jax.random.key(0), zeros(step))["params"], _applied(Model(step, dtype))
    graph, _ = jax.eval_shape(lambda: nnx.split(NnxModel(step, dtype)))
    return lambda: nnx.state(NnxModel(step, dtype)), lambda params, x: nnx.merge(graph, params)(x)


def _applied(model: nn.Module) -> Callable[[PyTree, Array], Any]:
    return lambda params, x: model.apply({"params": params}, x)


def zeros(step: Step) -> Array:
    """A small input to make params with."""
    return jnp.zeros((1, 16, step.stack.width), jnp.bfloat16)


def policy_of(precision: str) -> jaxmp.Policy:
    """The policy of a precision of jaxmp."""
    policy = jaxmp.get_policy(precision.split()[0])
    if precision not in RECIPES:
        return policy
    return dataclasses.replace(policy, recipe=RECIPES[precision])


def optimizer_of() -> optax.GradientTransformation:
    """What the policy wraps."""
    return optax.chain(jaxmp.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE))


def in_linen(step: Step) -> Program:
    """jaxmp in linen."""
    policy, model = policy_of(step.precision), Model(step)
    apply = _applied(model)

    def in_fp8() -> Any:
        return jaxmp.fp8.autocast(policy.recipe, filter=everywhere) if policy.recipe else contextlib.nullcontext()

    def init() -> Any:
        small = step._replace(flash=False)  # cuDNN's attention takes no float32
        with in_fp8():
            params = Model(small).init(jax.random.key(0), zeros(step))["params"]
        return jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=optimizer_of(), policy=policy)

    def run(state: Any, x: Array) -> Any:
        def loss_fn(params: PyTree, x: Array) -> Array:
            return mean_of_squares(apply(params, x))

        with in_fp8():
            loss, grads = jaxmp.value_and_grad(loss_fn)(state.params, x, opt_state=state)
        with jax.named_scope(OPTIMIZER):
            return state.apply_gradients(grads=grads), loss

    return Program(init, run)


def in_nnx(step: Step) -> Program:
    """jaxmp in nnx."""
    policy = policy_of(step.precision)

    def start() -> Any:
        model = NnxModel(step)
        if policy.recipe is not None:
            jaxmp.nnx.to_fp8(model, policy.recipe, filter=everywhere)
        return nnx.split((model, jaxmp.nnx.Optimizer(model, optimizer_of(), policy=policy)))

    graph, _ = jax.eval_shape(start)

    def run(state: Any, x: Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        grad_fn = jaxmp.nnx.value_and_grad(lambda model, x: mean_of_squares(model(x)))
        loss, grads = grad_fn(model, x, opt_state=optimizer)
        with jax.named_scope(OPTIMIZER):
            optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return Program(lambda: start()[1], run)
