"""Models that others wrote, on data that is on every machine: handwritten digits, and the documentation of Python.

Each is imported from its package and changed in nothing. The weights are random: nothing is downloaded.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import flax_examples
import jax
import jax.numpy as jnp
import numpy as np
import optax

DIGITS = Path(__file__).resolve().parents[1] / "data" / "digits.npz"
LENGTH, MASK = 64, 256  # of a text; the token of BERT's mask


class Model(NamedTuple):
    """What a loop trains.

    Attributes:
      params, state: of the model; `state` is what is no param, such as BatchNorm's statistics.
      loss: `(params, state, batch) -> (loss, state)`.
      batches: `(count, seed) -> batches` to train with.
      held_out: a batch to evaluate with.
    """

    params: Any
    state: Any
    loss: Callable[..., tuple[jax.Array, Any]]
    batches: Callable[[int, int], Iterator[Any]]
    held_out: Any


@functools.cache
def text() -> np.ndarray:
    """Python's language reference, as bytes in rows of one length."""
    found = np.frombuffer("\n\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    return found[: len(found) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(np.int32)


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """8x8 pictures between 0 and 1, and their labels."""
    stored = np.load(DIGITS)
    return stored["images"].astype(np.float32)[..., None] / 16, stored["labels"].astype(np.int32)


def drawn(data: Any, size: int = 32) -> tuple[Callable[[int, int], Iterator[Any]], Any]:
    """A function that draws batches of the first nine tenths of the rows, and some of the last tenth."""
    rows = len(jax.tree.leaves(data)[0])

    def batches(count: int, seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        for _ in range(count):
            yield jax.tree.map(functools.partial(np.take, indices=rng.integers(0, rows * 9 // 10, size), axis=0), data)

    return batches, jax.tree.map(lambda x: x[rows * 9 // 10 :][:128], data)


def cross_entropies(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """In float32, also where a model gives logits of its own dtype."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def gpt2(seed: int, dtype: Any) -> Model:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = FlaxGPT2LMHeadModel(config, seed=seed, input_shape=(1, LENGTH), dtype=dtype)

    def loss(params, state, ids):
        return cross_entropies(model(ids, params=params).logits[:, :-1], ids[:, 1:]).mean(), state

    return Model(model.params, None, loss, *drawn(text()))


def bert(seed: int, dtype: Any) -> Model:
    from transformers import BertConfig, FlaxBertForMaskedLM

    config = BertConfig(
        vocab_size=MASK + 1,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    model = FlaxBertForMaskedLM(config, seed=seed, input_shape=(1, LENGTH), dtype=dtype)
    masked = np.random.default_rng(0).random(text().shape) < 0.15

    def loss(params, state, batch):
        ids, masked = batch
        logits = model(jnp.where(masked, MASK, ids), params=params).logits
        losses = cross_entropies(logits, ids)
        return jnp.sum(losses, where=masked) / jnp.sum(masked), state

    return Model(model.params, None, loss, *drawn((text(), masked)))


def vit(seed: int, dtype: Any) -> Model:
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        num_labels=10,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    model = FlaxViTForImageClassification(config, seed=seed, input_shape=(1, 8, 8, 1), dtype=dtype)
    images, labels = digits()

    def loss(params, state, batch):
        x, y = batch
        return cross_entropies(model(x, params=params).logits, y).mean(), state

    return Model(model.params, None, loss, *drawn((images.transpose(0, 3, 1, 2), labels)))


def resnet(seed: int, dtype: Any) -> Model:
    """The layers have no dtype: autocast chooses it."""
    import haiku as hk

    def forward(x):
        net = hk.nets.ResNet(
            (1, 1, 1, 1), 10, bottleneck=False, channels_per_group=(8, 8, 16, 16), use_projection=(True,) * 4
        )
        return net(x, is_training=True)

    net = hk.transform_with_state(forward)
    images, labels = digits()
    images = images.repeat(2, axis=1).repeat(2, axis=2)
    params, state = jax.jit(net.init)(jax.random.key(seed), images[:2])

    def loss(params, state, batch):
        x, y = batch
        logits, state = net.apply(params, state, None, x)
        return cross_entropies(logits, y).mean(), state

    return Model(params, state, loss, *drawn((images, labels)))


def equinox(seed: int, dtype: Any) -> Model:
    """equinox has layers, and no language model: its attention, norms and MLPs in the usual order."""
    import equinox as eqx

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP
        norms: list[eqx.nn.LayerNorm]

        def __init__(self, key):
            first, second = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(4, 64, key=first)
            self.mlp = eqx.nn.MLP(64, 64, 256, 1, jax.nn.gelu, key=second)
            self.norms = [eqx.nn.LayerNorm(64), eqx.nn.LayerNorm(64)]

        def __call__(self, x):
            h = jax.vmap(self.norms[0])(x)
            x = x + self.attention(h, h, h, mask=jnp.tri(len(x), dtype=bool))
            return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))

    class Transformer(eqx.Module):
        tokens: eqx.nn.Embedding
        places: eqx.nn.Embedding
        blocks: list[Block]
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 5)
            self.tokens, self.places = eqx.nn.Embedding(256, 64, key=keys[0]), eqx.nn.Embedding(LENGTH, 64, key=keys[1])
            self.blocks = [Block(k) for k in keys[2:4]]
            self.head = eqx.nn.Linear(64, 256, key=keys[4])

        def __call__(self, ids):
            x = jax.vmap(self.tokens)(ids) + self.places.weight
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.head)(x)

    params, static = eqx.partition(Transformer(jax.random.key(seed)), eqx.is_inexact_array)

    def loss(params, state, ids):
        logits = jax.vmap(eqx.combine(params, static))(ids)
        return cross_entropies(logits[:, :-1], ids[:, 1:]).mean(), state

    return Model(params, None, loss, *drawn(text()))


def lm1b(seed: int, dtype: Any) -> Model:
    """Its params are boxes with the names of their axes, and stay boxes."""
    module = flax_examples.load("lm1b/models.py")
    config = module.TransformerConfig(
        vocab_size=256,
        output_vocab_size=256,
        dtype=dtype,
        emb_dim=64,
        num_heads=4,
        num_layers=2,
        qkv_dim=64,
        mlp_dim=256,
        max_len=LENGTH,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
    )
    model = module.TransformerLM(config)
    params = jax.jit(model.init)(jax.random.key(seed), text()[:2])["params"]

    def loss(params, state, ids):
        # This model shifts its inputs itself: the logits of a place are about the byte at that place.
        return cross_entropies(model.apply({"params": params}, ids), ids).mean(), state

    return Model(params, None, loss, *drawn(text()))


def mnist(seed: int, dtype: Any) -> Model:
    """The layers have no dtype: autocast chooses it. BatchNorm's statistics and the keys of dropout are the state."""
    from flax import nnx

    model, rngs = flax_examples.load("mnist/train.py").CNN(nnx.Rngs(seed)), nnx.Rngs(seed)
    graph, params, state = nnx.split((model, rngs), nnx.Param, ...)
    images, labels = digits()
    # The model asks for 28 x 28 pixels.
    images = np.pad(images.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2), (0, 0)))

    def loss(params, state, batch):
        x, y = batch
        model, rngs = nnx.merge(graph, params, state, copy=True)
        loss = cross_entropies(model(x, rngs), y).mean()
        return loss, nnx.state((model, rngs), nnx.Not(nnx.Param))

    return Model(params, state, loss, *drawn((images, labels)))


# Each model by the name of its package and class, and the lines that change beside those of the loop. The models of
# transformers get dtype= in their constructor, and a loss of logits in float32.
MODELS: dict[str, tuple[Callable[[int, Any], Model], int]] = {
    "transformers, FlaxGPT2LMHeadModel": (gpt2, 2),
    "transformers, FlaxBertForMaskedLM": (bert, 2),
    "transformers, FlaxViTForImageClassification": (vit, 2),
    "haiku, nets.ResNet": (resnet, 0),
    "equinox, a transformer of its layers": (equinox, 0),
    "flax's examples, lm1b, TransformerLM": (lm1b, 2),
    "flax's examples, mnist, CNN": (mnist, 0),
}
