"""Models in float32, the same models cast by hand, and under autocast."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

import jaxmp

F32 = jnp.float32
UNCAST, BY_HAND, AUTOCAST, NARROW = "uncast", "by hand", "jaxmp.autocast", "by hand, 16-bit residuals"
KINDS = (UNCAST, BY_HAND, AUTOCAST, NARROW)
POWERS = 'jaxmp.autocast(allow=["integer_pow"])'  # the cube in a gelu: autocast keeps it in float32, as torch does


class Cast(NamedTuple):
    """The dtypes that a careful user writes into the layers of a model: norms, softmax and loss are in float32.

    A narrow one rounds more often than torch.autocast and jaxmp.autocast, and moves fewer bytes.
    """

    dtype: Any  # of matmuls and convolutions
    narrow: bool = False  # whether residuals have this dtype too

    @property
    def residual(self) -> Any:
        return self.dtype if self.narrow else F32


def attend(qkv: Array, cast: Cast | None) -> Array:
    """Causal attention, [B, T, 3, H, D/H] -> [B, T, H, D/H]."""
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    past = jnp.tril(jnp.ones((1, 1, q.shape[1], q.shape[1]), bool))
    scores = scores.astype(F32) if cast else scores
    weights = jax.nn.softmax(jnp.where(past, scores, -1e30))  # [B, H, T, T]
    weights = weights.astype(cast.dtype) if cast else weights
    return jnp.einsum("bhts,bshd->bthd", weights, v)


class Block(nn.Module):
    """Attention and an MLP, each after a norm; x is [B*T, D]: CPUs multiply 16 bits fast only in 2 dimensions."""

    heads: int
    length: int
    cast: Cast | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        norm = functools.partial(nn.LayerNorm, dtype=F32 if self.cast else None)
        dense = functools.partial(nn.Dense, dtype=self.cast.dtype if self.cast else None)
        width = x.shape[-1]
        qkv = dense(3 * width)(norm()(x)).reshape(-1, self.length, 3, self.heads, width // self.heads)
        x = x + dense(width)(attend(qkv, self.cast).reshape(x.shape))
        return x + dense(width)(nn.gelu(dense(4 * width)(norm()(x))))


class ScannedBlock(Block):
    """The same with the signature of `nn.scan`: one iteration of a loop."""

    @nn.compact
    def __call__(self, x: Array) -> Any:
        return Block(self.heads, self.length, self.cast)(x), None


class Transformer(nn.Module):
    """A language model, int32 [B, T] -> logits [B * T, V]; `scan` makes one loop of its layers."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    scan: bool = False
    cast: Cast | None = None

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        length = tokens.shape[1]
        embed = functools.partial(nn.Embed, features=self.width, dtype=self.cast.residual if self.cast else None)
        x = embed(self.vocabulary)(tokens) + embed(length)(jnp.arange(length))[None]
        x = x.reshape(-1, self.width)  # [B*T, D]
        if self.scan:
            stack = nn.scan(ScannedBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
            x, _ = stack(self.heads, length, self.cast)(x)
        else:
            for _ in range(self.layers):
                x = Block(self.heads, length, self.cast)(x)
        x = nn.LayerNorm(dtype=F32 if self.cast else None)(x)
        logits = nn.Dense(self.vocabulary, dtype=self.cast.dtype if self.cast else None)(x)
        return logits.astype(F32) if self.cast else logits


class CNN(nn.Module):
    """Residual blocks with BatchNorm, [B, H, W, 3] -> logits [B, 10]."""

    widths: tuple[int, ...]
    cast: Cast | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.cast.dtype if self.cast else None)
        residual = self.cast.residual if self.cast else None
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=residual)
        x = nn.relu(norm()(conv(self.widths[0], (3, 3))(x)))
        for width in self.widths:
            y = nn.relu(norm()(conv(width, (3, 3), strides=2)(x)))
            y = norm()(conv(width, (3, 3))(y))
            x = nn.relu(y + norm()(conv(width, (1, 1), strides=2)(x)))
        logits = nn.Dense(10, dtype=self.cast.dtype if self.cast else None)(x.mean((1, 2)))
        return logits.astype(F32) if self.cast else logits


class LSTM(nn.Module):
    """flax's LSTM over [B, T, D], logits [B, 10] from its last state; each iteration uses the same weights."""

    width: int
    cast: Cast | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        dtype = self.cast.dtype if self.cast else None
        carry_dtype = self.cast.residual if self.cast else F32
        rnn = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=dtype), return_carry=True)
        zeros = jnp.zeros((len(x), self.width), carry_dtype)
        (_, h), _ = rnn(x, initial_carry=(zeros, zeros))
        logits = nn.Dense(10, dtype=dtype)(h)
        return logits.astype(F32) if self.cast else logits


class Job(NamedTuple):
    """A model and the shapes of its batch."""

    name: str
    model: Callable[..., nn.Module]  # of `cast`
    x: jax.ShapeDtypeStruct
    y: jax.ShapeDtypeStruct


def language_job(name: str, *, batch: int, length: int, **sizes: Any) -> Job:
    """A `Transformer` with these `sizes`, on `batch` sequences of `length` tokens."""
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return Job(
        name, functools.partial(Transformer, **sizes), tokens, jax.ShapeDtypeStruct((batch * length,), jnp.int32)
    )


def h100_jobs() -> list[Job]:
    """The models that are compiled for H100."""
    sizes = {"width": 1024, "heads": 16, "vocabulary": 4096}
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    images, sequences = jax.ShapeDtypeStruct((64, 64, 64, 3), F32), jax.ShapeDtypeStruct((64, 64, 1024), F32)
    return [
        language_job("transformer, 2 layers", batch=8, length=512, layers=2, **sizes),
        language_job("transformer, scan over 4 layers", batch=8, length=512, layers=4, scan=True, **sizes),
        Job("CNN with BatchNorm", functools.partial(CNN, (64, 128, 256)), images, labels),
        Job("LSTM, scan over 64 steps", functools.partial(LSTM, 1024), sequences, labels),
    ]


def example_job() -> Job:
    """A transformer in the sizes of examples/train.py."""
    return language_job("transformer", batch=16, length=64, width=96, layers=2, heads=4, vocabulary=256)


def initial(job: Job) -> PyTree:
    """The model's variables in float32."""
    return job.model().init(jax.random.key(0), jnp.zeros(job.x.shape, job.x.dtype))


def program(job: Job, kind: str, dtype: Any) -> Callable[[PyTree, Array, Array], Any]:
    """`(variables, x, y) -> ((loss, statistics), gradients)`: forward and backward, in one of `KINDS`."""
    casts = {BY_HAND: Cast(dtype), NARROW: Cast(dtype, narrow=True)}
    model = job.model(cast=casts.get(kind))

    def loss_fn(params: PyTree, rest: PyTree, x: Array, y: Array) -> tuple[Array, PyTree]:
        logits, rest = model.apply({"params": params, **rest}, x, mutable=list(rest))
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), rest

    allowed = {AUTOCAST: (), POWERS: ("integer_pow",)}
    loss = jaxmp.autocast(loss_fn, dtype, allow=allowed[kind]) if kind in allowed else loss_fn

    def run(variables: PyTree, x: Array, y: Array) -> Any:
        rest = {name: collection for name, collection in variables.items() if name != "params"}
        return jax.value_and_grad(loss, has_aux=True)(variables["params"], rest, x, y)

    return run
