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
LENGTH, MASK, PAD = 32, 256, 1  # of a text; the token of BERT's mask; a byte that no text has
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, **SMALL}


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
    """8x8 pictures between 0 and 1, and their labels, a third of which are drawn at random.

    Without these the losses go to zero, and their ratios say nothing.
    """
    stored, rng = np.load(DIGITS), np.random.default_rng(0)
    labels = stored["labels"].astype(np.int32)
    labels = np.where(rng.random(labels.shape) < 1 / 3, rng.integers(0, 10, labels.shape, np.int32), labels)
    return stored["images"].astype(np.float32)[..., None] / 16, labels


def drawn(data: Any, size: int = 16) -> tuple[Callable[[int, int], Iterator[Any]], Any]:
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


def next_bytes(model: Any) -> Model:
    """A language model of transformers that predicts the next byte."""

    def loss(params, state, ids):
        return cross_entropies(model(ids, params=params).logits[:, :-1], ids[:, 1:]).mean(), state

    return Model(model.params, None, loss, *drawn(text()))


def digit_of_picture(model: Any) -> Model:
    """A model of transformers that classifies pictures of 8 x 8 pixels."""
    images, labels = digits()

    def loss(params, state, batch):
        x, y = batch
        return cross_entropies(model(x, params=params).logits, y).mean(), state

    return Model(model.params, None, loss, *drawn((images.transpose(0, 3, 1, 2), labels)))


def masked_bytes(model: Any) -> Model:
    """A language model of transformers that fills in masked bytes."""
    masked = np.random.default_rng(0).random(text().shape) < 0.15

    def loss(params, state, batch):
        ids, masked = batch
        losses = cross_entropies(model(jnp.where(masked, MASK, ids), params=params).logits, ids)
        return jnp.sum(losses, where=masked) / jnp.sum(masked), state

    return Model(model.params, None, loss, *drawn((text(), masked)))


def gpt2(seed: int) -> Model:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return next_bytes(FlaxGPT2LMHeadModel(config, seed=seed, input_shape=(1, LENGTH)))


def opt(seed: int) -> Model:
    from transformers import FlaxOPTForCausalLM, OPTConfig

    config = OPTConfig(
        vocab_size=256,
        hidden_size=64,
        word_embed_proj_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=256,
        max_position_embeddings=LENGTH,
        dropout=0,
        pad_token_id=PAD,
    )
    return next_bytes(FlaxOPTForCausalLM(config, seed=seed, input_shape=(1, LENGTH)))


def llama(seed: int) -> Model:
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    config = LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **SMALL)
    return next_bytes(FlaxLlamaForCausalLM(config, seed=seed, input_shape=(1, LENGTH)))


def bert(seed: int) -> Model:
    from transformers import BertConfig, FlaxBertForMaskedLM

    config = BertConfig(
        vocab_size=MASK + 1,
        max_position_embeddings=LENGTH,
        **WITHOUT_DROPOUT,
    )
    return masked_bytes(FlaxBertForMaskedLM(config, seed=seed, input_shape=(1, LENGTH)))


def roberta(seed: int) -> Model:
    from transformers import FlaxRobertaForMaskedLM, RobertaConfig

    config = RobertaConfig(
        vocab_size=MASK + 1,
        max_position_embeddings=LENGTH + PAD + 1,
        pad_token_id=PAD,
        **WITHOUT_DROPOUT,
    )
    return masked_bytes(FlaxRobertaForMaskedLM(config, seed=seed, input_shape=(1, LENGTH)))


def whisper(seed: int) -> Model:
    """Each byte sounds like two frames of a spectrum of its own, in noise; the model writes the bytes."""
    from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

    config = WhisperConfig(
        vocab_size=256,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=LENGTH,
        max_target_positions=LENGTH,
        dropout=0,
        pad_token_id=PAD,
        bos_token_id=PAD,
        eos_token_id=PAD,
        decoder_start_token_id=PAD,
    )
    model = FlaxWhisperForConditionalGeneration(config, seed=seed)
    rng = np.random.default_rng(0)
    sounds = rng.normal(size=(256, 16)).astype(np.float32)[text()].repeat(2, axis=1).transpose(0, 2, 1)
    sounds += rng.normal(size=sounds.shape).astype(np.float32)

    def loss(params, state, batch):
        sounds, ids = batch
        before = jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=PAD)
        return cross_entropies(model(sounds, before, params=params).logits, ids).mean(), state

    return Model(model.params, None, loss, *drawn((sounds, text())))


def vit(seed: int) -> Model:
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        **WITHOUT_DROPOUT,
    )
    return digit_of_picture(FlaxViTForImageClassification(config, seed=seed, input_shape=(1, 8, 8, 1)))


def resnet(seed: int) -> Model:
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


def equinox(seed: int) -> Model:
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


def lm1b(seed: int) -> Model:
    """Its params are boxes with the names of their axes, and stay boxes."""
    module = flax_examples.load("lm1b/models.py")
    config = module.TransformerConfig(
        vocab_size=256,
        output_vocab_size=256,
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


def mnist(seed: int) -> Model:
    """BatchNorm's statistics and the keys of dropout are the state."""
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


def imagenet(seed: int) -> Model:
    """Its BatchNorm averages over an axis of devices, here over the halves of a batch."""
    module = flax_examples.load("imagenet/models.py")
    model = module.ResNet(stage_sizes=[1, 1], block_cls=module.BottleneckResNetBlock, num_classes=10, num_filters=16)
    images, labels = digits()
    images = images.repeat(2, axis=1).repeat(2, axis=2)
    variables = jax.jit(model.init)(jax.random.key(seed), images[:2])

    def loss(params, state, batch):
        def of_device(x, y):
            logits, state_ = model.apply({"params": params, "batch_stats": state}, x, mutable=["batch_stats"])
            return cross_entropies(logits, y).mean(), state_["batch_stats"]

        halves = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
        losses, states = jax.vmap(of_device, axis_name="batch")(*halves)
        return losses.mean(), jax.tree.map(lambda x: x[0], states)

    return Model(variables["params"], variables["batch_stats"], loss, *drawn((images, labels)))


def wmt(seed: int) -> Model:
    """It translates a text that is written backwards."""
    module = flax_examples.load("wmt/models.py")
    config = module.TransformerConfig(
        vocab_size=256,
        output_vocab_size=256,
        emb_dim=64,
        num_heads=4,
        num_layers=2,
        qkv_dim=64,
        mlp_dim=256,
        max_len=LENGTH,
        deterministic=True,
    )
    model = module.Transformer(config)
    params = jax.jit(model.init)(jax.random.key(seed), text()[:2], text()[:2])["params"]

    def loss(params, state, ids):
        # This model shifts its targets itself.
        return cross_entropies(model.apply({"params": params}, ids[:, ::-1], ids), ids).mean(), state

    return Model(params, None, loss, *drawn(text()))


def vae(seed: int) -> Model:
    """With the loss of the example. The key of its noise is the state."""
    train = flax_examples.load("vae/train.py")
    model = train.models.model(20)
    images, _ = digits()
    images = np.pad(images.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2), (0, 0)))
    images = (images > 0.5).astype(np.float32).reshape(len(images), -1)
    params = jax.jit(model.init)(jax.random.key(seed), images[:2], jax.random.key(0))["params"]

    def loss(params, key, batch):
        key, z_key = jax.random.split(key)
        recon_x, mean, logvar = model.apply({"params": params}, batch, z_key)
        return train.compute_metrics(recon_x, batch, mean, logvar)["loss"], key

    return Model(params, jax.random.key(seed), loss, *drawn(images))


def ppo(seed: int) -> Model:
    """With the loss of the example, for a game of one step: the digit says which action has an advantage."""
    lib = flax_examples.load("ppo/ppo_lib.py")
    model = lib.models.ActorCritic(num_outputs=4)
    images, labels = digits()
    images = (255 * images.repeat(4, axis=1).repeat(4, axis=2).repeat(4, axis=3)).astype(np.uint8)
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 4, labels.shape, np.int32)
    noise = rng.normal(size=(2, *labels.shape)).astype(np.float32)
    advantages, returns = (actions == labels % 4) + noise[0], labels + 3 * noise[1]
    log_probs = np.full(labels.shape, -np.log(4), np.float32)
    params = jax.jit(model.init)(jax.random.key(seed), images[:2])["params"]

    def loss(params, state, batch):
        return lib.loss_fn(params, model.apply, batch, 0.1, 0.5, 0.01), state

    return Model(params, None, loss, *drawn((images, actions, log_probs, returns, advantages)))


def seq2seq(seed: int) -> Model:
    """With the data and the loss of the example: sums of numbers, written as text."""
    train = flax_examples.load("seq2seq/train.py")
    table = train.CTable("0123456789+= ", 3)
    model = train.models.Seq2seq(teacher_force=True, hidden_size=64, vocab_size=table.vocab_size)
    shapes = jnp.ones(table.encoder_input_shape), jnp.ones(table.decoder_input_shape)
    keys = dict(zip(("params", "lstm"), jax.random.split(jax.random.key(seed)), strict=True))
    numbers = np.random.default_rng(0).integers(0, 1000, (2000, 2))
    query = table.encode_onehot([f"{a}+{b}" for a, b in numbers])
    answer = table.encode_onehot([f"={a + b}" for a, b in numbers])

    def loss(params, state, batch):
        query, answer = batch
        logits, _ = model.apply({"params": params}, query, answer, rngs={"lstm": jax.random.key(0)})
        labels = answer[:, 1:]
        lengths = train.get_sequence_lengths(labels, table.eos_id)
        return train.cross_entropy_loss(logits, labels, lengths), state

    return Model(jax.jit(model.init)(keys, *shapes)["params"], None, loss, *drawn((query, answer)))


def gemma(seed: int) -> Model:
    """Gemma 3's layers: norms of queries and keys, local and global attention, grouped queries."""
    from flax import nnx

    module = flax_examples.load("gemma/transformer.py")
    kinds = module.modules.AttentionType
    config = module.TransformerConfig(
        num_layers=2,
        num_embed=256,
        embed_dim=64,
        hidden_dim=256,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL),
        sliding_window_size=16,
    )
    model = module.Transformer(config, rngs=nnx.Rngs(seed))
    graph, params, state = nnx.split(model, nnx.Param, ...)

    def loss(params, state, ids):
        model = nnx.merge(graph, params, state, copy=True)
        mask = jnp.ones(ids.shape, bool)
        positions = module.build_positions_from_mask(mask)
        logits, _ = model(ids, positions, None, module.make_causal_attn_mask(mask))
        return cross_entropies(logits[:, :-1], ids[:, 1:]).mean(), nnx.state(model, nnx.Not(nnx.Param))

    return Model(params, state, loss, *drawn(text()))


# Each model by the name of its package and class.
MODELS: dict[str, Callable[[int], Model]] = {
    "transformers, FlaxGPT2LMHeadModel": gpt2,
    "transformers, FlaxOPTForCausalLM": opt,
    "transformers, FlaxLlamaForCausalLM": llama,
    "transformers, FlaxBertForMaskedLM": bert,
    "transformers, FlaxRobertaForMaskedLM": roberta,
    "transformers, FlaxViTForImageClassification": vit,
    "transformers, FlaxWhisperForConditionalGeneration": whisper,
    "haiku, nets.ResNet": resnet,
    "equinox, a transformer of its layers": equinox,
    "flax's examples, mnist, CNN (nnx)": mnist,
    "flax's examples, imagenet, ResNet": imagenet,
    "flax's examples, lm1b, TransformerLM": lm1b,
    "flax's examples, wmt, Transformer": wmt,
    "flax's examples, vae, VAE": vae,
    "flax's examples, ppo, ActorCritic": ppo,
    "flax's examples, seq2seq, Seq2seq": seq2seq,
    "flax's examples, gemma, Transformer (nnx)": gemma,
}

# In these the layers hold fp8 scales, where they are made under the policy "fp8".
WITH_LINEN_LAYERS = tuple(
    name
    for name, make in MODELS.items()
    if make in (opt, llama, bert, roberta, vit, whisper, imagenet, lm1b, wmt, vae, ppo, seq2seq)
)
