"""Common code of the fp8 layers of linen and nnx: scale leaves, switching off, dtypes of inputs."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmp._src.base import ambient
from jaxmp._src.fp8 import matmul, ragged_matmul
from jaxmp._src.programs import jaxprs


def is_enabled() -> bool:
    """Whether fp8 layers that are traced here run in fp8.

    They do not in `with jax.default_matmul_precision("highest")` inside of a region of fp8: a product that must be
    exact. Around a region, it says how exact the products in float32 are.

    Example:
      >>> is_enabled()
      True
    """
    region = ambient.now().fp8_layers
    is_exact = region is not None and not region.is_highest and jaxprs.default_is_highest()
    return ambient.FP8_ENABLED.value and not is_exact


def switched(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """A region in which fp8 layers run in fp8, or in their inputs' dtype; the innermost region counts."""
    return ambient.FP8_ENABLED(enabled)


def calibrating() -> contextlib.AbstractContextManager[Any]:
    """A region in which layers with delayed scaling cast each tensor with the scale of its own amax."""
    return ambient.FP8_CALIBRATING(True)


ROUNDING = "rounding"  # the name of these random numbers, as "dropout" is that of Dropout's


def dot_general(
    recipe: Any,
    leaves: Sequence[Array],
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers: matmul.DimensionNumbers,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    bias: Array | None = None,
    layer: str | None = None,
    key: Array | None = None,
) -> Float[Array, "..."]:
    """The product of a layer: in fp8 if fp8 is on, else in the dtype of its result. `leaves`: see `Recipe.leaves`."""
    scales = matmul.Scales(*leaves) if leaves else None
    if is_enabled():
        return matmul.dot_general(
            lhs,
            rhs,
            dimension_numbers,
            recipe=recipe,
            scales=scales,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            bias=bias,
            layer=layer,
            key=key,
        )
    matmul.note_use()
    out = matmul.plain_dot_general(lhs, rhs, dimension_numbers, preferred_element_type, out_sharding)
    return out if bias is None else matmul.plus(out, bias)


def ragged_dot(
    recipe: Any,
    leaves: Sequence[Array],
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"],
    group_sizes: Array,
    preferred_element_type: Any = None,
) -> Float[Array, "m n"]:
    """The product of a layer of experts: in fp8 if fp8 is on, else in the dtype of its result."""
    scales = matmul.Scales(*leaves) if leaves else None
    if is_enabled():
        options = {"recipe": recipe, "scales": scales, "preferred_element_type": preferred_element_type}
        return ragged_matmul.ragged_dot(lhs, rhs, group_sizes, **options)
    matmul.note_use()
    return ragged_matmul.plain_ragged_dot(lhs, rhs, group_sizes, preferred_element_type)


def promote_all_but_kernel(*args: Any, dtype: Any = None, **kwargs: Any) -> list[Any]:
    """For the `promote_dtype=` of flax layers: inputs and bias in the layer's dtype, the kernel as it is stored.

    An fp8 layer casts a float32 kernel to fp8 with one rounding, and the kernel's gradient is float32. flax's own rule
    first casts the kernel to the layer's dtype, and so the gradient too.

    Args:
      *args: inputs, kernel and bias, or one tuple of them (nnx); the bias may be None.
      dtype: the layer's dtype; None: inputs and kernel are promoted.
      **kwargs: other arguments of flax, not used.

    Returns:
      [inputs, kernel, bias].

    Example:
      >>> x, w, b = promote_all_but_kernel(jnp.ones(2, jnp.bfloat16), jnp.ones(2), jnp.ones(2), dtype=jnp.bfloat16)
      >>> x.dtype.name, w.dtype.name, b.dtype.name
      ('bfloat16', 'float32', 'bfloat16')
    """
    del kwargs
    inputs, kernel, *rest = args[0] if len(args) == 1 else args
    kernel = jnp.asarray(kernel)  # perhaps a `FrozenKernel`
    dtype = dtype or jnp.result_type(inputs, kernel)
    inputs, *rest = (None if x is None else jnp.asarray(x, dtype) for x in (inputs, *rest))
    return [inputs, kernel, *rest]


promote_all_but_kernel.is_in_fp8 = True  # for autocast: under it such a layer returns 16 bits, as others do


@dataclasses.dataclass(frozen=True)
class _Promotion:
    """A `promote_dtype=` that the user gave to a layer which runs in fp8."""

    promote: Callable[..., Any]
    is_in_fp8: ClassVar[bool] = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.promote(*args, **kwargs)


def promotion(own: Callable[..., Any], default: Callable[..., Any]) -> Callable[..., Any]:
    """The `promote_dtype=` of a layer in fp8: the user's own, or `promote_all_but_kernel` in place of flax's."""
    if own is default:
        return promote_all_but_kernel
    return own if getattr(own, "is_in_fp8", False) else _Promotion(own)
