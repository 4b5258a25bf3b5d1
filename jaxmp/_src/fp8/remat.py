"""The tensors that fp8 layers keep for the backward pass of a block under remat.

`jax.checkpoint` computes the forward pass of a block again in its backward pass. The layers in the block then cast
their tensors a second time: they read inputs in 16 bits and weights in 32, and write both forms (`gemms`). The cast
tensors take one byte for each element, so it is cheaper to keep them, and to compute only the GEMMs and the operations
between them again. The remat policy identifies these tensors by name.

jax applies `lax.reduce_precision` to the values that remat keeps, so that XLA does not keep them in a wider dtype. In
float8_e4m3fn this turns numbers of 256 and more into NaN, because it treats the largest exponent as that of inf, as in
IEEE formats. So this file keeps floats of 8 bits or fewer as integers, under any policy.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

_NAME = "jaxmp_fp8"
_POLICY = jax.checkpoint_policies.save_only_these_names(_NAME)


def save_quantized(*args: Any, **params: Any) -> Any:
    """A policy for `jax.checkpoint`, `nn.remat` and `nnx.remat` that keeps the tensors which fp8 layers have cast.

    No cast, transpose or amax is computed twice: one byte is kept for each element, in each form that the backward pass
    reads. Results of layers are computed again from these tensors, by the GEMMs. To keep other values too, name them
    and join the policies: `jax.checkpoint_policies.save_from_both_policies`.

    Example:
      >>> import flax.linen as nn, jax.numpy as jnp, jaxmp
      >>> Block = nn.remat(nn.Dense, policy=save_quantized)
      >>> with jaxmp.fp8.autocast(jaxmp.fp8.CurrentScaling(), filter=("*",)):
      ...     y, params = Block(16).init_with_output(jax.random.key(0), jnp.ones((16, 16)))
      >>> y.shape
      (16, 16)
    """
    return _POLICY(*args, **params)


def named(tensors: PyTree) -> PyTree:
    """A tree of arrays, with the name by which `save_quantized` finds them."""
    return unpacked(jax.tree.map(lambda x: checkpoint_name(x, _NAME), packed(tensors)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Bits:
    """An array of floats of 8 bits or fewer, as integers."""

    bits: Array
    dtype: Any = dataclasses.field(metadata={"static": True})

    def array(self) -> Array:
        return lax.bitcast_convert_type(self.bits, self.dtype)


def _is_bits(x: Any) -> bool:
    return isinstance(x, _Bits)


def packed(residuals: PyTree) -> PyTree:
    """Residuals of a derivative rule, for `unpacked`: floats of 8 bits or fewer as integers."""

    def pack(x: Array) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits > 8:
            return x
        return _Bits(lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")), x.dtype)

    return jax.tree.map(pack, residuals)


def unpacked(residuals: PyTree) -> PyTree:
    """The residuals that were `packed`."""
    return jax.tree.map(lambda x: x.array() if _is_bits(x) else x, residuals, is_leaf=_is_bits)
