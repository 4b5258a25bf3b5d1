"""Products whose code asks for a float32 result: `preferred_element_type=jnp.float32`, said in a call or by a layer.

    logits = jnp.einsum("qd,kd->qk", q, k, preferred_element_type=jnp.float32)
    probs = jax.nn.softmax(logits / sqrt(d))

Tensor cores sum products of 16-bit numbers in float32. Such code keeps these sums: in float16 the logits of large
queries and keys are beyond 65504, but finite. A jaxpr of the function in float32 does not show it, because the float32
is there in any case. So a call that asks is traced in a region whose lists say so (`CastLists.float32_products`): its
operands are cast to 16 bits as those of all products, and its result is float32, for what reads it, too. jax's own
attention asks in this way. Operands that the code itself casts to 16 bits need no region: the jaxpr shows them.
"""

import contextlib
import inspect
from typing import Any

import jax
from flax import nnx
from jax import lax

from jaxmp._src.autocast import regions, stand_ins
from jaxmp._src.autocast.cast_lists import CastLists, asks_for_float32

_ARGUMENT = "preferred_element_type"


class _Product(stand_ins.StandIn):
    """A function with `preferred_element_type=`."""

    def call(self, lists: CastLists, *args: Any, **kwargs: Any) -> Any:
        """The original, in a region for float32 results if the call asks for them."""
        preferred = kwargs.get(_ARGUMENT)
        # An einsum calls the product that it is given with the dtype of its operands: not as one that asks.
        kwargs = {name: x.original if isinstance(x, _Product) else x for name, x in kwargs.items()}
        if preferred is None and len(args) > _OPERANDS:
            with contextlib.suppress(TypeError):  # the original says what is wrong
                preferred = inspect.signature(self.original).bind(*args, **kwargs).arguments.get(_ARGUMENT)
        with _region(lists, preferred):
            return self.original(*args, **kwargs)


class _Layer(stand_ins.StandIn):
    """The call of a layer of nnx, which has held jax's functions since its class was made."""

    def call(self, lists: CastLists, *args: Any, **kwargs: Any) -> Any:
        """The original, in a region for float32 results if the layer asks for them."""
        with _region(lists, getattr(args[0], _ARGUMENT, None)):
            return self.original(*args, **kwargs)


_OPERANDS = 3  # arguments that come before `preferred_element_type` at least, where it may have a place


def _region(lists: CastLists, preferred: Any) -> contextlib.AbstractContextManager[None]:
    if lists.float32_products == "all" or not asks_for_float32(preferred):
        return contextlib.nullcontext()
    return regions.region(lists._replace(float32_products="all"))


_OF_NUMPY = ("dot", "matmul", "tensordot", "einsum", "convolve", "correlate")  # the others call these
_OF_LAX = (
    *("dot", "dot_general", "ragged_dot", "ragged_dot_general"),
    *("conv", "conv_general_dilated", "conv_transpose", "conv_with_general_padding"),
)

_LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose)

# jax's own code calls those of lax with the dtype of its operands.
FUNCTIONS = (
    *(stand_ins.Function(jax.numpy, name, _Product) for name in _OF_NUMPY),
    *(stand_ins.Function(lax, name, _Product, in_jax=False) for name in _OF_LAX),
    *(stand_ins.Function(layer, "__call__", _Layer) for layer in _LAYERS),
)
