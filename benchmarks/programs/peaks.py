"""22 models whose planned peak is compared with XLA's: eleven that the planner's rules are tuned on, and eleven others.

All are written in flax.linen with a `dtype`, and trained by AdamW under bf16 or fp32; nothing is allocated.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

import jaxmp
from benchmarks.programs.memory import Case, gpt2

F32 = jnp.float32
TUNED, OTHERS = "tuned on", "not tuned on"


class MLP(nn.Module):
    """[B, D] -> [B, 10], in layers with a norm."""

    dtype: Any
    width: int = 1024
    layers: int = 6

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for _ in range(self.layers):
            x = nn.gelu(nn.Dense(self.width, dtype=self.dtype)(nn.LayerNorm(dtype=F32)(x)))
        return nn.Dense(16, dtype=F32)(x)


class CNN(nn.Module):
    """[B, H, W, 3] -> [B, 16]: convolutions with strides, without statistics."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in (64, 128, 256):
            x = nn.relu(nn.Conv(width, (3, 3), dtype=self.dtype)(x))
            x = nn.relu(nn.Conv(width, (3, 3), strides=2, dtype=self.dtype)(x))
        return nn.Dense(16, dtype=F32)(x.mean((1, 2)))


class Bottleneck(nn.Module):
    """A block of a ResNet, with batch statistics."""

    width: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), strides=self.stride)(y)))
        y = norm()(conv(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.width, (1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """[B, H, W, 3] -> [B, 16]: bottlenecks in stages of a width and a number of blocks."""

    dtype: Any
    stages: tuple[tuple[int, int], ...] = ((64, 2), (128, 2), (256, 2))

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(64, (7, 7), strides=2, use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for i, (width, blocks) in enumerate(self.stages):
            for j in range(blocks):
                x = Bottleneck(width, 2 if i and not j else 1, self.dtype)(x)
        return nn.Dense(16, dtype=F32)(x.mean((1, 2)))


class LSTM(nn.Module):
    """[B, T, D] -> [B, 16]: two layers, each a scan over time."""

    dtype: Any
    width: int = 512

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
        return nn.Dense(16, dtype=F32)(x[:, -1])


class Attention(nn.Module):
    """Softmax attention in plain operations: `x` asks, `memory` answers."""

    heads: int
    dtype: Any
    is_causal: bool = False

    @nn.compact
    def __call__(self, x: Array, memory: Array) -> Array:
        width = x.shape[-1]
        split = (*x.shape[:-1], self.heads, width // self.heads)
        q = nn.Dense(width, dtype=self.dtype)(x).reshape(split)
        kv = nn.Dense(2 * width, dtype=self.dtype)(memory)
        k, v = jnp.split(kv.reshape(*memory.shape[:-1], self.heads, 2 * width // self.heads), 2, -1)
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(F32) * split[-1] ** -0.5
        if self.is_causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
        y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(self.dtype), v)
        return nn.Dense(width, dtype=self.dtype)(y.reshape(x.shape))


class Block(nn.Module):
    """A transformer's block; with `memory` it also reads that of an encoder."""

    heads: int
    dtype: Any
    is_causal: bool = False

    @nn.compact
    def __call__(self, x: Array, memory: Array | None = None) -> Array:
        norm = functools.partial(nn.LayerNorm, dtype=F32)
        h = norm()(x).astype(self.dtype)
        x = x + Attention(self.heads, self.dtype, self.is_causal)(h, h)
        if memory is not None:
            x = x + Attention(self.heads, self.dtype)(norm()(x).astype(self.dtype), memory)
        width = x.shape[-1]
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(norm()(x)))
        return x + nn.Dense(width, dtype=self.dtype)(y)


class ViT(nn.Module):
    """[B, H, W, 3] -> [B, 16]: patches of 16 x 16."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(384, (16, 16), strides=16, dtype=self.dtype)(x).reshape(x.shape[0], -1, 384)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:]).astype(self.dtype)
        for _ in range(6):
            x = Block(6, self.dtype)(x)
        return nn.Dense(16, dtype=F32)(x.mean(1))


class ScannedGPT(nn.Module):
    """int32 [B, T] -> [B, T, V]: the blocks are one scan over stacked params."""

    dtype: Any

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = nn.Embed(8192, 512, dtype=self.dtype)(tokens)
        block = Block(8, self.dtype, is_causal=True)
        blocks = nn.scan(
            lambda module, x, _: (module(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=6
        )
        x, _ = blocks(block, x, None)
        return nn.Dense(8192, dtype=self.dtype)(nn.LayerNorm(dtype=F32)(x)).astype(F32)


class EncoderDecoder(nn.Module):
    """(int32 [B, S], int32 [B, T]) as one array [B, S + T] -> [B, T, V]."""

    dtype: Any

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        embed = nn.Embed(8192, 512, dtype=self.dtype)
        source, target = jnp.split(embed(tokens), 2, axis=1)
        for _ in range(3):
            source = Block(8, self.dtype)(source)
        for _ in range(3):
            target = Block(8, self.dtype, is_causal=True)(target, source)
        return nn.Dense(8192, dtype=self.dtype)(target).astype(F32)


class Experts(nn.Module):
    """int32 [B, T] -> [B, T, V]: each token goes to two of eight experts, all of which see all tokens, weighted."""

    dtype: Any
    experts: int = 8

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = nn.Embed(4096, 512, dtype=self.dtype)(tokens)
        init = nn.initializers.lecun_normal(batch_axis=0)
        for i in range(3):
            h = nn.LayerNorm(dtype=F32)(x).astype(self.dtype)
            x = x + Attention(8, self.dtype, is_causal=True)(h, h)
            h = nn.LayerNorm(dtype=F32)(x)
            top, chosen = jax.lax.top_k(jax.nn.softmax(nn.Dense(self.experts, dtype=F32)(h)), 2)
            gates = jnp.sum(jax.nn.one_hot(chosen, self.experts) * top[..., None], -2).astype(self.dtype)
            up = self.param(f"up_{i}", init, (self.experts, 512, 1024)).astype(self.dtype)
            down = self.param(f"down_{i}", init, (self.experts, 1024, 512)).astype(self.dtype)
            y = nn.gelu(jnp.einsum("btd,edf->ebtf", h.astype(self.dtype), up)) * jnp.moveaxis(gates, -1, 0)[..., None]
            x = x + jnp.einsum("ebtf,efd->btd", y, down)
        return nn.Dense(4096, dtype=self.dtype)(x).astype(F32)


class UNet(nn.Module):
    """[B, H, W, 3] -> [B, H, W, 16]: down and up again, with skips between."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        def twice(x: Array, width: int) -> Array:
            for _ in range(2):
                x = nn.Conv(width, (3, 3), dtype=self.dtype)(x)
                x = nn.silu(nn.GroupNorm(num_groups=8, dtype=F32)(x)).astype(self.dtype)
            return x

        skips = []
        for width in (32, 64, 128):
            x = twice(x, width)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = twice(x, 256)
        for width, skip in zip((128, 64, 32), reversed(skips), strict=True):
            x = nn.ConvTranspose(width, (2, 2), strides=(2, 2), dtype=self.dtype)(x)
            x = twice(jnp.concatenate([x, skip], -1), width)
        return nn.Conv(16, (1, 1), dtype=F32)(x)


class LoRA(nn.Module):
    """int32 [B, T] -> [B, T, V]: frozen matrices with trained factors of rank 16."""

    dtype: Any

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = nn.Embed(8192, 512, dtype=self.dtype, name="base_embed")(tokens)
        for i in range(4):
            h = nn.LayerNorm(dtype=F32)(x).astype(self.dtype)
            y = nn.Dense(2048, dtype=self.dtype, name=f"base_up_{i}")(h)
            low = nn.Dense(16, dtype=self.dtype, name=f"down_{i}")(h)
            y = nn.gelu(y + nn.Dense(2048, dtype=self.dtype, name=f"up_{i}")(low))
            x = x + nn.Dense(512, dtype=self.dtype, name=f"base_down_{i}")(y)
        return nn.Dense(8192, dtype=self.dtype, name="base_logits")(x).astype(F32)


class VGG(nn.Module):
    """[B, H, W, 3] -> [B, 16]: convolutions, each pair behind a max pool, without norms; two wide layers at the end."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in (64, 128, 256, 256):
            for _ in range(2):
                x = nn.relu(nn.Conv(width, (3, 3), dtype=self.dtype)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        for _ in range(2):
            x = nn.relu(nn.Dense(1024, dtype=self.dtype)(x.reshape(x.shape[0], -1)))
        return nn.Dense(16, dtype=F32)(x)


class ConvNeXt(nn.Module):
    """[B, H, W, 3] -> [B, 16]: depthwise convolutions of 7 x 7, LayerNorm, and an MLP at each pixel."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        norm = functools.partial(nn.LayerNorm, dtype=F32)
        for width in (96, 192, 384):
            size = 2 if x.shape[-1] > 3 else 4
            x = nn.Conv(width, (size, size), strides=size, dtype=self.dtype)(x)
            for _ in range(2):
                y = nn.Conv(width, (7, 7), feature_group_count=width, dtype=self.dtype)(x)
                y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(norm()(y)), approximate=False)
                x = x + nn.Dense(width, dtype=self.dtype)(y)
        return nn.Dense(16, dtype=F32)(norm()(x.mean((1, 2))))


class Llama(nn.Module):
    """int32 [B, T] -> [B, T, V]: RMSNorm, rotated queries and keys, two heads of keys for eight queries, SwiGLU."""

    dtype: Any
    width: int = 512

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        batch, length = tokens.shape
        angles = jnp.arange(length, dtype=F32)[:, None] / 10000 ** (jnp.arange(0, 64, 2, dtype=F32) / 64)

        def rotate(x: Array) -> Array:
            a, b = jnp.split(x.astype(F32), 2, -1)
            cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
            return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(self.dtype)

        def attend(h: Array) -> Array:
            q = rotate(dense(self.width)(h).reshape(batch, length, 8, 64)).reshape(batch, length, 2, 4, 64)
            k = rotate(dense(128)(h).reshape(batch, length, 2, 64))
            v = dense(128)(h).reshape(batch, length, 2, 64)
            scores = jnp.einsum("btghd,bsgd->bghts", q, k).astype(F32) * 64**-0.5
            scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
            y = jnp.einsum("bghts,bsgd->btghd", jax.nn.softmax(scores).astype(self.dtype), v)
            return dense(self.width)(y.reshape(batch, length, self.width))

        norm = functools.partial(nn.RMSNorm, dtype=F32)
        x = nn.Embed(8192, self.width, dtype=self.dtype)(tokens)
        for _ in range(4):
            x = x + attend(norm()(x).astype(self.dtype))
            h = norm()(x).astype(self.dtype)
            x = x + dense(self.width)(nn.silu(dense(1408)(h)) * dense(1408)(h))
        return dense(8192)(norm()(x)).astype(F32)


class BERT(nn.Module):
    """int32 [B, T] -> [B, T, V]: norms behind the sums, gelu by its error function."""

    dtype: Any

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        dense, norm = functools.partial(nn.Dense, dtype=self.dtype), functools.partial(nn.LayerNorm, dtype=F32)
        x = nn.Embed(8192, 512, dtype=self.dtype)(tokens)
        for _ in range(4):
            x = norm()(x + Attention(8, self.dtype)(x, x)).astype(self.dtype)
            y = dense(512)(nn.gelu(dense(2048)(x), approximate=False))
            x = norm()(x + y).astype(self.dtype)
        x = norm()(nn.gelu(dense(512)(x), approximate=False))
        return dense(8192)(x).astype(F32)


class WaveNet(nn.Module):
    """[B, T, C] -> [B, T, 64]: causal convolutions over time with growing dilation, and gates."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        conv = functools.partial(nn.Conv, dtype=self.dtype, padding="CAUSAL")
        x, total = conv(128, (2,))(x), 0
        for i in range(6):
            y = nn.tanh(conv(128, (2,), kernel_dilation=2**i)(x)) * nn.sigmoid(conv(128, (2,), kernel_dilation=2**i)(x))
            total = total + conv(256, (1,))(y)
            x = x + conv(128, (1,))(y)
        return nn.Conv(64, (1,), dtype=F32)(nn.relu(total))


class GAN(nn.Module):
    """[B, 64, 64, 3] -> [B, 3]: what a discriminator says of real images, and of a generator's for either loss."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        up = functools.partial(nn.ConvTranspose, kernel_size=(4, 4), strides=(2, 2), dtype=self.dtype)
        made = nn.Dense(8 * 8 * 256, dtype=self.dtype)(x.reshape(x.shape[0], -1)[:, :128]).reshape(-1, 8, 8, 256)
        for width in (128, 64):
            made = nn.relu(nn.GroupNorm(num_groups=8, dtype=F32)(up(width)(made))).astype(self.dtype)
        made = nn.tanh(up(3)(made))
        judge = Discriminator(self.dtype)
        return jnp.concatenate([judge(x), judge(jax.lax.stop_gradient(made)), judge(made)], -1)


class Discriminator(nn.Module):
    """[B, H, W, 3] -> [B, 1]."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in (64, 128, 256):
            x = nn.leaky_relu(nn.Conv(width, (4, 4), strides=2, dtype=self.dtype)(x), 0.2)
        return nn.Dense(1, dtype=F32)(x.reshape(x.shape[0], -1))


class Diffusion(nn.Module):
    """[B, D] -> [B, 16]: an MLP with residuals, scaled and shifted by an embedding of the time, the first column."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        angles = x[:, :1] * jnp.exp(jnp.linspace(0.0, 8.0, 128))
        time = nn.silu(dense(512)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)))
        x = dense(512)(x)
        for _ in range(4):
            scale, shift = jnp.split(dense(1024)(time), 2, -1)
            h = nn.LayerNorm(dtype=F32)(x).astype(self.dtype) * (1 + scale) + shift
            x = x + dense(512)(nn.silu(dense(2048)(h)))
        return nn.Dense(16, dtype=F32)(x)


class Conv1d(nn.Module):
    """[B, T, C] -> [B, 16]: convolutions over time, with strides."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in (64, 128, 256, 256):
            x = nn.Conv(width, (9,), strides=2, dtype=self.dtype)(x)
            x = nn.gelu(nn.GroupNorm(num_groups=8, dtype=F32)(x)).astype(self.dtype)
            x = nn.gelu(nn.Conv(width, (3,), dtype=self.dtype)(x))
        return nn.Dense(16, dtype=F32)(x.mean(1))


class Mamba(nn.Module):
    """int32 [B, T] -> [B, T, V]: gated state spaces whose decay depends on the input, by an associative scan."""

    dtype: Any
    width: int = 256
    states: int = 8

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        x = nn.Embed(4096, self.width, dtype=self.dtype)(tokens)
        for i in range(3):
            u, gate = jnp.split(dense(4 * self.width)(nn.RMSNorm(dtype=F32)(x).astype(self.dtype)), 2, -1)
            wide = u.shape[-1]
            u = nn.silu(nn.Conv(wide, (4,), padding="CAUSAL", feature_group_count=wide, dtype=self.dtype)(u))
            step = nn.softplus(nn.Dense(wide, dtype=F32)(u))[..., None]
            come, go = jnp.split(dense(2 * self.states)(u).astype(F32)[:, :, None], 2, -1)
            rates = self.param(f"rates_{i}", nn.initializers.ones, (wide, self.states))
            decays, inputs = jnp.exp(-step * jnp.exp(rates.astype(F32))), step * come * u[..., None].astype(F32)
            _, h = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (decays, inputs), axis=1)
            x = x + dense(self.width)(jnp.sum(h * go, -1).astype(self.dtype) * nn.silu(gate))
        return dense(4096)(nn.RMSNorm(dtype=F32)(x)).astype(F32)


def case(name: str, precision: str, model: Callable[[Any], nn.Module], x: Any, labels: Any, **kwargs: Any) -> Case:
    """A step of AdamW on the mean cross-entropy."""
    policy = jaxmp.get_policy(precision)
    net = model(policy.compute_dtype)
    variables: Any = jax.eval_shape(net.init, jax.random.key(0), x)
    rest = {key: variables[key] for key in variables if key != "params"}
    inner = kwargs.pop("inner", optax.adamw(1e-3))

    def loss_fn(params: PyTree, rest: PyTree, x: Array, labels: Array) -> Any:
        logits = net.apply({"params": params, **rest}, x, mutable=list(rest))[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    tx = jaxmp.mixed_precision(inner, policy)
    return Case(name, precision, policy, variables["params"], tx, loss_fn, (rest, x, labels), **kwargs)


def _frozen(params: PyTree) -> PyTree:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if "base" in jax.tree_util.keystr(path) else "train", params
    )


def cases() -> Iterator[tuple[str, Case]]:
    """(whether the rules were tuned on it, the step); in float32 those whose operations differ there."""
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    images, labels = jax.ShapeDtypeStruct((32, 128, 128, 3), F32), i32((32,))
    words, pairs = i32((8, 512)), i32((8, 1024))
    for precision in ("bf16", "fp32"):
        make = functools.partial(case, precision=precision)
        rows, sequences = jax.ShapeDtypeStruct((8192, 1024), F32), jax.ShapeDtypeStruct((64, 128, 512), F32)
        yield TUNED, make("MLP, 6 x 1024", model=MLP, x=rows, labels=i32((8192,)))
        yield TUNED, make("CNN", model=CNN, x=images, labels=labels)
        yield TUNED, make("ResNet with BatchNorm", model=ResNet, x=images, labels=labels)
        yield TUNED, make("U-Net", model=UNet, x=images, labels=i32((32, 128, 128)))
        waves = jax.ShapeDtypeStruct((16, 8192, 64), F32)
        yield OTHERS, make("BERT, 4 blocks", model=BERT, x=words, labels=words)
        yield TUNED, make("WaveNet", model=WaveNet, x=waves, labels=i32((16, 8192)))
        yield OTHERS, make("VGG", model=VGG, x=images, labels=labels)
        yield TUNED, make("ConvNeXt", model=ConvNeXt, x=images, labels=labels)
        yield OTHERS, make("Llama, 4 blocks", model=Llama, x=words, labels=words)
        fifty = functools.partial(ResNet, stages=((64, 3), (128, 4), (256, 6), (512, 3)))
        yield OTHERS, make("ResNet-50", model=fifty, x=images, labels=labels)
        yield OTHERS, make("GAN", model=GAN, x=jax.ShapeDtypeStruct((128, 64, 64, 3), F32), labels=i32((128,)))
        yield OTHERS, make("diffusion, MLP", model=Diffusion, x=rows, labels=i32((8192,)))
        yield OTHERS, make("convolutions over time", model=Conv1d, x=waves, labels=i32((16,)))
        yield OTHERS, make("Mamba, 3 blocks", model=Mamba, x=i32((4, 512)), labels=i32((4, 512)))
        if precision == "fp32":
            continue
        yield TUNED, make("LSTM, 2 layers", model=LSTM, x=sequences, labels=i32((64,)))
        yield TUNED, make("GPT, scan over 6 blocks", model=ScannedGPT, x=words, labels=words)
        sizes = {"batch": 8, "length": 512, "layers": 4, "width": 512, "heads": 8, "vocabulary": 8192}
        yield TUNED, gpt2(precision, **sizes)._replace(model="GPT, tied")
        yield OTHERS, gpt2(f"{precision}+remat", **sizes)._replace(model="GPT, blocks under remat")
        yield OTHERS, make("ViT", model=ViT, x=jax.ShapeDtypeStruct((64, 224, 224, 3), F32), labels=i32((64,)))
        yield OTHERS, make("encoder and decoder", model=EncoderDecoder, x=pairs, labels=words)
        yield TUNED, make("mixture of experts", model=Experts, x=words, labels=words)
        frozen = optax.multi_transform({"train": optax.adamw(1e-3), "frozen": optax.set_to_zero()}, _frozen)
        yield TUNED, make("LoRA, rank 16", model=LoRA, x=words, labels=words, inner=frozen)
