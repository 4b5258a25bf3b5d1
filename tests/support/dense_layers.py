"""A dense layer `x @ w + b`, or a convolution of 1x1 with the same params, as each framework writes it."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
from flax import nnx


def linen(x: Any, w: Any, b: Any = None, **options: Any) -> Any:
    params = {"kernel": w} if b is None else {"kernel": w, "bias": b}
    layer = nn.Dense if w.ndim == 2 else nn.Conv
    options |= {} if w.ndim == 2 else {"kernel_size": (1, 1)}
    return layer(w.shape[-1], use_bias=b is not None, **options).apply({"params": params}, x)


def of_nnx(x: Any, w: Any, b: Any = None, **options: Any) -> Any:
    layer = nnx.Linear if w.ndim == 2 else nnx.Conv
    options |= {} if w.ndim == 2 else {"kernel_size": (1, 1)}
    layer = layer(*w.shape[-2:], use_bias=b is not None, rngs=nnx.Rngs(0), **options)
    layer.kernel.set_value(w)
    if b is not None:
        layer.bias.set_value(b)
    return layer(x)


def haiku(x: Any, w: Any, b: Any = None, **options: Any) -> Any:
    def net(x: Any) -> Any:
        if w.ndim == 2:
            return hk.Linear(w.shape[-1], with_bias=b is not None, name="layer")(x, **options)
        return hk.Conv2D(w.shape[-1], 1, with_bias=b is not None, name="layer")(x, **options)

    params = {"w": w} if b is None else {"w": w, "b": b}
    return hk.without_apply_rng(hk.transform(net)).apply({"layer": params}, x)


def equinox(x: Any, w: Any, b: Any = None) -> Any:
    """A convolution takes images [n, channels, height, width]."""
    key, size = jax.random.key(0), w.shape[-2:]
    if w.ndim == 2:
        layer, w = eqx.nn.Linear(*size, use_bias=b is not None, key=key), w.T
    else:
        layer, w = eqx.nn.Conv2d(*size, 1, use_bias=b is not None, key=key), w[0, 0].T[:, :, None, None]
        b = None if b is None else b[:, None, None]
    return jax.vmap(eqx.tree_at(lambda m: (m.weight, m.bias), layer, (w, b), is_leaf=lambda x: x is None))(x)
