"""Models with a dtype of their own, whose losses end far from float32 with one seed: chaotic, or close to zero.

A maker takes a seed and the dtype that the model's author computes in; params are float32. As in models.py, nothing is
downloaded and nothing of a package is changed.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import SMALL, WITHOUT_DROPOUT, Model, cross_entropies, digit_of_picture, digits, drawn, resnet, text


def resnet18(seed: int, dtype: Any) -> Model:
    """flaxmodels' ResNet-18, with batches of 4: BatchNorm divides by the deviation of few numbers."""
    import flaxmodels

    model = flaxmodels.ResNet18(output="logits", pretrained=None, normalize=False, num_classes=10, dtype=dtype)
    images, labels = digits()
    images = images.repeat(2, axis=1).repeat(2, axis=2)
    variables = jax.jit(model.init)(jax.random.key(seed), images[:2])

    def loss(params, state, batch):
        x, y = batch
        variables = {"params": params, "batch_stats": state}
        logits, state = model.apply(variables, x, mutable=["batch_stats"])
        return cross_entropies(logits, y).mean(), state["batch_stats"]

    return Model(variables["params"], variables["batch_stats"], loss, *drawn((images, labels), 4))


def haiku_resnet(seed: int, dtype: Any) -> Model:
    """haiku's ResNet, with the policies of haiku's own example: BatchNorm computes in float32."""
    import haiku as hk
    import jmp

    low, norms = jmp.Policy(jnp.float32, dtype, jnp.float32), jmp.Policy(jnp.float32, jnp.float32, dtype)
    model = resnet(seed)

    def loss(params, state, batch):
        with hk.mixed_precision.push_policy(hk.nets.ResNet, low), hk.mixed_precision.push_policy(hk.BatchNorm, norms):
            return model.loss(params, state, batch)

    return model._replace(loss=loss)


def dinov2(seed: int, dtype: Any) -> Model:
    from transformers import Dinov2Config, FlaxDinov2ForImageClassification

    config = Dinov2Config(image_size=8, patch_size=2, num_channels=1, num_labels=10, mlp_ratio=4, **WITHOUT_DROPOUT)
    return digit_of_picture(FlaxDinov2ForImageClassification(config, seed=seed, input_shape=(1, 8, 8, 1), dtype=dtype))


def beit(seed: int, dtype: Any) -> Model:
    from transformers import BeitConfig, FlaxBeitForImageClassification

    config = BeitConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        drop_path_rate=0,
        use_relative_position_bias=True,
        layer_scale_init_value=0.1,
        **WITHOUT_DROPOUT,
    )
    return digit_of_picture(FlaxBeitForImageClassification(config, seed=seed, input_shape=(1, 8, 8, 1), dtype=dtype))


def clip(seed: int, dtype: Any) -> Model:
    """Which text belongs to which picture? The words are the brightnesses of 16 squares; the loss goes to zero."""
    from transformers import CLIPConfig, FlaxCLIPModel

    config = CLIPConfig(
        text_config={"vocab_size": 20, "max_position_embeddings": 17, "eos_token_id": 19, **SMALL},
        vision_config={"image_size": 8, "patch_size": 2, "num_channels": 1, **SMALL},
        projection_dim=64,
    )
    model = FlaxCLIPModel(config, seed=seed, input_shape=((1, 17), (1, 8, 8, 1)), dtype=dtype)
    images, _ = digits()
    words = images.reshape(-1, 4, 2, 4, 2).mean(axis=(2, 4)).reshape(-1, 16)
    words = np.pad((16 * words).astype(np.int32), ((0, 0), (0, 1)), constant_values=19)

    def loss(params, state, batch):
        pictures, words = batch
        logits = model(words, pictures, params=params).logits_per_image
        right = jnp.arange(len(words))
        return (cross_entropies(logits, right) + cross_entropies(logits.T, right)).mean() / 2, state

    return Model(model.params, None, loss, *drawn((images.transpose(0, 3, 1, 2), words)))


def ctc(seed: int, dtype: Any) -> Model:
    """Each byte sounds like 64 numbers of its own, in noise; Wav2Vec2 writes the bytes, with the loss of CTC."""
    from transformers import FlaxWav2Vec2ForCTC, Wav2Vec2Config

    config = Wav2Vec2Config(
        vocab_size=256,
        conv_dim=(32, 32),
        conv_stride=(4, 4),
        conv_kernel=(8, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        do_stable_layer_norm=True,
        feat_extract_norm="layer",
        hidden_dropout=0,
        attention_dropout=0,
        activation_dropout=0,
        feat_proj_dropout=0,
        final_dropout=0,
        layerdrop=0,
        mask_time_prob=0,
        pad_token_id=0,
        **SMALL,
    )
    model = FlaxWav2Vec2ForCTC(config, seed=seed, input_shape=(1, 512), dtype=dtype)
    ids = text()[:, :8]
    rng = np.random.default_rng(0)
    sounds = rng.normal(size=(256, 64)).astype(np.float32)[ids].reshape(len(ids), -1)
    sounds += rng.normal(size=sounds.shape).astype(np.float32) / 4

    def loss(params, state, batch):
        sounds, ids = batch
        logits = model(sounds, params=params).logits.astype(jnp.float32)
        return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), ids, jnp.zeros(ids.shape)).mean(), state

    return Model(model.params, None, loss, *drawn((sounds, ids)))


def stylegan2(seed: int, dtype: Any) -> Model:
    """flaxmodels' StyleGAN2 on digits: one loss of two players, each of which is a constant for the other."""
    from flaxmodels import stylegan2

    small = {"resolution": 16, "num_channels": 1, "fmap_max": 32, "num_fp16_res": 4}
    sizes = {"z_dim": 32, "w_dim": 32, "mapping_layer_features": 32, "num_mapping_layers": 2}
    generator = stylegan2.Generator(dtype=dtype, **sizes, **small)
    # The discriminator takes a root of NumPy in its dtype, which NumPy does not have for bfloat16.
    discriminator = stylegan2.Discriminator(dtype="float32" if dtype == "bfloat16" else dtype, **small)
    images, _ = digits()
    images = 2 * images.repeat(2, axis=1).repeat(2, axis=2) - 1

    def apply(module, *args, **kwargs):
        with mock.patch.object(jnp, "reshape", lambda x, newshape: x.reshape(newshape)):  # jax has renamed the argument
            return module.apply(*args, **kwargs)

    keys = jax.random.split(jax.random.key(seed), 3)
    statistics, of_generator = flax.core.pop(
        apply(generator, {}, jnp.ones((2, 32)), rngs={"params": keys[0]}, mutable=True)[1], "params"
    )
    of_discriminator = apply(discriminator, {}, images[:2], rngs={"params": keys[1]}, mutable=True)[1]["params"]
    params = {"G": of_generator, "D": of_discriminator}

    def judged(params, x):
        return apply(discriminator, {"params": params}, x).astype(jnp.float32)

    def loss(params, state, batch):
        key, statistics = state
        key, of_z, of_noise = jax.random.split(key, 3)
        z = jax.random.normal(of_z, (len(batch), 32))
        variables = {"params": params["G"], **statistics}
        fakes, statistics = apply(generator, variables, z, rng=of_noise, mutable=list(statistics))
        for_generator = jax.nn.softplus(-judged(jax.lax.stop_gradient(params["D"]), fakes))
        fakes = jax.lax.stop_gradient(fakes)
        for_discriminator = jax.nn.softplus(judged(params["D"], fakes)) + jax.nn.softplus(-judged(params["D"], batch))
        return (for_generator + for_discriminator).mean(), (key, statistics)

    return Model(params, (keys[2], statistics), loss, *drawn(images))


# Each family by the name of its package and class.
FAMILIES: dict[str, Callable[[int, Any], Model]] = {
    "haiku, nets.ResNet": haiku_resnet,
    "transformers, FlaxCLIPModel": clip,
    "transformers, FlaxDinov2ForImageClassification": dinov2,
    "transformers, FlaxBeitForImageClassification": beit,
    "transformers, FlaxWav2Vec2ForCTC": ctc,
    "flaxmodels, StyleGAN2": stylegan2,
    "flaxmodels, ResNet18, batches of 4": resnet18,
}
