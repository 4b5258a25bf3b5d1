"""Kernels that nobody trains, in fp8: one byte for each element, with a power of two for each column.

    e = ceil(log2(amax / 448))        q = e4m3(w * 2^-e)        w ~ q * 2^e

with amax = max |w| over the axis before the last. A power of two costs no precision, and every q * 2^e is a bfloat16
number, so the product with a 16-bit array is that of the rounded kernel. It is no product in fp8: the activations stay
in 16 bits, and any hardware runs it.

A `FrozenKernel` stands in the params in place of an array, and becomes one where a layer reads it (`jax.numpy.asarray`
calls `__jax_array__`). A derivative would keep that array: two bytes for each element. `jaxmp.autocast` sees by the
name of `widened` what was made of a frozen kernel, and has each product make it again in its backward pass.

References:
  Dettmers et al. 2023, QLoRA (arXiv 2305.14314), which stores the base in 4 bits and widens it in the same places.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxmp._src.base import ambient, tree_paths
from jaxmp._src.numerics import casting, float_bits

_DTYPE = jnp.float8_e4m3fn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrozenKernel:
    """A kernel in fp8, which reads as an array; see `freeze`.

    Attributes:
      q: float8_e4m3fn, of the shape of the kernel.
      log2_scale: int8, of that shape with 1 in place of the axis before the last: the exponent of each column.
      dtype: in which it reads as an array, that of the kernel before.

    Example:
      >>> kernel = freeze({"kernel": jnp.full((4, 2), 0.3)})["kernel"]
      >>> kernel.q.dtype.name, kernel.log2_scale.tolist(), (jnp.ones(4) @ kernel).tolist()
      ('float8_e4m3fn', [[-10, -10]], [1.25, 1.25])
    """

    q: Float[Array, "... k n"]
    log2_scale: Int[Array, "... 1 n"]
    dtype: Any = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the kernel."""
        return self.q.shape

    @property
    def ndim(self) -> int:
        """That of the kernel."""
        return self.q.ndim

    @property
    def size(self) -> int:
        """That of the kernel."""
        return self.q.size

    def __jax_array__(self) -> Array:
        # Autocast traces in float32, and casts afterwards.
        return widened(self.q, self.log2_scale, jnp.float32 if ambient.AUTOCAST.value[1] else self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(jnp.asarray(self), dtype)

    def __getitem__(self, key: Any) -> Any:
        return self if key is ... else jnp.asarray(self)[key]

    def astype(self, dtype: Any) -> Array:
        """The kernel as an array."""
        return jnp.asarray(self).astype(dtype)


def _widened(q: Array, log2_scale: Array, dtype: Any) -> Array:
    scale = float_bits.normal_power_of_two(log2_scale.astype(jnp.float32))
    return (q.astype(jnp.float32) * scale).astype(dtype)


WIDENED = "jaxmp_widened_frozen_kernel"
_widened.__name__ = WIDENED
widened = jax.jit(_widened, static_argnums=2)


def freeze(params: PyTree, patterns: str | Iterable[str] = "*kernel") -> PyTree:
    """`params` with kernels in fp8, for the base under adapters: nobody can train them any more.

    A kernel takes one byte for each element, and one for each column. Layers of linen and nnx and plain functions read
    it as an array. Under `jaxmp.autocast`, so in a loss of `jaxmp.value_and_grad(policy=)`, also in `lax.scan` and
    remat, the backward pass keeps no 16-bit copy of it: each product widens it again. Elsewhere the results are the
    same, and the copy is kept. Differentiate with respect to the adapters alone, and pass the base in another argument
    of the loss; in nnx, `wrt=nnx.LoRAParam` does that.

        base = jaxmp.fp8.freeze(base)                                                        # linen, plain pytrees
        nnx.update(model, jaxmp.fp8.freeze(nnx.state(model, nnx.Param), "*/kernel"))         # nnx

    Args:
      params: a tree of arrays.
      patterns: which leaves, by path patterns; they have two axes or more, and floats of 16 bits or more.

    Returns:
      The tree with a `FrozenKernel` in place of each such leaf. An element that is not finite becomes NaN.

    Raises:
      ValueError: no leaf fits; a leaf that fits has other axes or numbers, named by path.

    Example:
      >>> params = {"base": {"kernel": jnp.ones((64, 32))}, "lora": {"a": jnp.ones((64, 2)), "b": jnp.zeros((2, 32))}}
      >>> def loss_fn(lora, base, x):
      ...     return jnp.mean((x @ base["kernel"] + x @ lora["a"] @ lora["b"]) ** 2)
      >>> base = freeze(params["base"])
      >>> jax.grad(loss_fn)(params["lora"], base, jnp.ones((8, 64)))["b"].shape
      (2, 32)
    """
    found = False

    def frozen(path: str, x: Any) -> Any:
        nonlocal found
        if not tree_paths.matches(path, patterns):
            return x
        found = True
        if not casting.is_float(x) or x.ndim < 2:
            got = f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__
            raise ValueError(f"a frozen kernel must be floats with two axes or more; got {got} at {path}.")
        return kernel_of(x)

    made = tree_paths.map_with_path(frozen, params)
    if not found:
        paths = list(tree_paths.leaves_by_path(params))
        raise ValueError(f"freeze must fit a leaf; got none for {patterns!r}. The params are {', '.join(paths[:4])}.")
    return made


def kernel_of(x: Array) -> FrozenKernel:
    """An array, frozen."""
    q, log2_scale = _quantized(jnp.asarray(x))
    return FrozenKernel(q, log2_scale, np.dtype(x.dtype))


@jax.jit
def _quantized(x: Array) -> tuple[Array, Array]:
    """(q, log2_scale) of a kernel."""
    x = x.astype(jnp.float32)
    magnitude = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    amax = jnp.max(magnitude, axis=-2, keepdims=True)
    log2_scale = -float_bits.exponent_of_largest_scale(jnp.where(amax > 0, amax, 1), float(jnp.finfo(_DTYPE).max))
    log2_scale = jnp.clip(log2_scale, -126, 126)
    y = x * float_bits.normal_power_of_two(-log2_scale.astype(jnp.float32))
    return jnp.where(jnp.isfinite(x), casting.saturating_cast(y, _DTYPE), np.array(np.nan, _DTYPE)), log2_scale.astype(
        jnp.int8
    )
