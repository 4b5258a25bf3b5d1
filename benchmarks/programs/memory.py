"""Training steps whose memory is planned and compiled from shapes, without allocating anything.

The planner's rules (`jaxmp/_src/memory/buffers.py`) were derived from the transformer of examples/train.py and from
GPT-2 small. The models of `benchmarks/programs/autocast.py` were not used for that: they show whether the rules
generalize.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

import jaxmp
from benchmarks.lib.examples import train
from benchmarks.programs.autocast import CNN, LSTM, Cast, Transformer, language_job
from jaxmp._src.memory.plan import Plan

F32 = jnp.float32


class Case(NamedTuple):
    """A step: the arguments of `jaxmp.memory.plan`, and the function that is compiled."""

    model: str
    precision: str
    policy: jaxmp.Policy
    params: PyTree  # float32, abstract
    optimizer: optax.GradientTransformation
    loss_fn: Callable[..., Array]
    batch: tuple[Any, ...]
    is_known: bool = True  # whether the planner's rules were derived from this model
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext  # entered to trace it

    @property
    def name(self) -> str:
        return f"{self.model}, {self.precision}"

    def plan(self) -> Plan:
        """The plan of `jaxmp.memory.plan`."""
        with self.within():
            return jaxmp.memory.plan(
                self.params, self.policy, optimizer=self.optimizer, loss_fn=self.loss_fn, batch=self.batch
            )

    def arguments(self) -> tuple[PyTree, Any, tuple[Any, ...]]:
        """(params, opt_state, batch) of the step."""
        params = jax.eval_shape(self.policy.cast_to_param, self.params)
        return params, jax.eval_shape(self.optimizer.init, self.params), self.batch

    def gradients(self, params: PyTree, opt_state: Any, batch: tuple[Any, ...]) -> Any:
        with self.within():
            return jaxmp.value_and_grad(self.loss_fn)(params, *batch, opt_state=opt_state)

    def step(self, params: PyTree, opt_state: Any, batch: tuple[Any, ...]) -> Any:
        loss, grads = self.gradients(params, opt_state, batch)
        params, opt_state = jaxmp.apply_gradients(self.optimizer, grads, opt_state, params)
        return params, opt_state, loss


class GPT2(nn.Module):
    """GPT-2 with tied embeddings: int32 [B, T] -> float32 logits [B, T, V]; 124.4 million params in its small size."""

    dtype: Any
    is_rematerialized: bool = False  # each block runs its forward pass twice
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    positions: int = 1024

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        embed = functools.partial(nn.Embed, features=self.width, dtype=self.dtype)
        words = embed(self.vocabulary)
        x = words(tokens) + embed(self.positions)(jnp.arange(tokens.shape[1]))[None]
        x = x.reshape(-1, self.width)  # [B*T, D]
        block = nn.remat(GPT2Block) if self.is_rematerialized else GPT2Block
        for _ in range(self.layers):
            x = block(self.heads, tokens.shape[1], self.dtype)(x)
        x = nn.LayerNorm(dtype=F32)(x)
        return words.attend(x).reshape(*tokens.shape, self.vocabulary).astype(F32)


class GPT2Block(nn.Module):
    """12 h^2 + 13 h params: 3 h^2 for q, k, v, h^2 after the attention, 8 h^2 in the MLP; biases 9 h, norms 4 h."""

    heads: int
    length: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        norm = functools.partial(nn.LayerNorm, dtype=F32)
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        width = x.shape[-1]
        qkv = dense(3 * width)(norm()(x)).reshape(-1, self.length, 3, self.heads, width // self.heads)
        x = x + dense(width)(train.attend(qkv).reshape(x.shape))
        return x + dense(width)(nn.gelu(dense(4 * width)(norm()(x))))


def example(precision: str, cfg: train.Config | None = None, name: str = "examples/train.py") -> Case:
    """The example's model, optimizer and precision, with the whole batch on one device."""
    cfg = cfg or train.Config()
    policy, recipe, small_state = train.precision_of(precision)
    model = train.Transformer(cfg.width, cfg.layers, cfg.heads, dtype=policy.compute_dtype)
    bits = 8 if small_state else None
    inner = train.optimizer_of(cfg, small_state)
    tx = jaxmp.mixed_precision(inner, policy, recipe=recipe, remainder_bits=bits)
    within = functools.partial(jaxmp.fp8.autocast, recipe) if recipe else contextlib.nullcontext
    tokens = jax.ShapeDtypeStruct((cfg.batch_size, cfg.seq_len + 1), jnp.uint8)

    def loss_fn(params: PyTree, tokens: Array) -> Array:
        return train.next_byte_loss(model.apply({"params": params}, tokens[:, :-1]), tokens)

    with within():
        params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, cfg.seq_len), jnp.uint8))["params"]
    return Case(name, precision, policy, params, tx, loss_fn, (tokens,), within=within)


def gpt2(precision: str, *, batch: int = 2, length: int = 1024, **sizes: Any) -> Case:
    """GPT-2 small under clipped AdamW; "+remat" rematerializes its blocks."""
    policy = jaxmp.get_policy(precision.removesuffix("+remat"))
    model = GPT2(policy.compute_dtype, precision.endswith("+remat"), **sizes)
    tx = jaxmp.mixed_precision(optax.chain(jaxmp.clip_by_global_norm(1.0), optax.adamw(1e-3)), policy)

    def loss_fn(params: PyTree, tokens: Array) -> Array:
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, length), jnp.int32))["params"]
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    return Case(f"GPT-2 small, {batch} x {length}", precision, policy, params, tx, loss_fn, (tokens,))


def others(precision: str) -> Iterator[Case]:
    """Models that the rules were not derived from: loops, convolutions, batch statistics."""
    policy = jaxmp.get_policy(precision)
    cast = None if precision == "fp32" else Cast(policy.compute_dtype)
    sizes: dict[str, Any] = {"width": 512, "layers": 4, "heads": 8, "vocabulary": 4096, "scan": True}
    words = language_job("scan", batch=8, length=256, **sizes)
    images, sequences = jax.ShapeDtypeStruct((32, 64, 64, 3), F32), jax.ShapeDtypeStruct((32, 64, 512), F32)
    labels = jax.ShapeDtypeStruct((32,), jnp.int32)
    yield _other("transformer, scan over 4 layers", precision, Transformer(**sizes, cast=cast), words.x, words.y)
    yield _other("CNN with BatchNorm", precision, CNN((64, 128, 256), cast), images, labels)
    yield _other("LSTM, scan over 64 steps", precision, LSTM(512, cast), sequences, labels)


def _other(name: str, precision: str, model: nn.Module, x: Any, y: Any) -> Case:
    policy = jaxmp.get_policy(precision)
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), policy)
    variables: Any = jax.eval_shape(model.init, jax.random.key(0), x)
    collections = [key for key in variables if key != "params"]

    def loss_fn(params: PyTree, rest: PyTree, x: Array, y: Array) -> Array:
        logits, _ = model.apply({"params": params, **rest}, x, mutable=collections)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    rest = {key: variables[key] for key in collections}
    return Case(name, precision, policy, variables["params"], tx, loss_fn, (rest, x, y), is_known=False)


def cases() -> list[Case]:
    """All steps that `h100 memory` compiles."""
    wide = train.Config(width=256, seq_len=256)
    found = [example(p) for p in ("fp32", "bf16", "fp16", "fp8", "bf16+8bit")]
    found += [example(p, wide, "the same, width 256, 16 x 256") for p in ("fp32", "bf16", "fp16")]
    found += [gpt2(p) for p in ("fp32", "fp32+remat", "bf16", "bf16+remat", "fp16")]
    return found + [case for p in ("fp32", "bf16") for case in others(p)]
