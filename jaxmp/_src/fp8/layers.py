"""Common code of the fp8 layers of linen and nnx: scale leaves, switching off, dtypes of inputs, choice by path."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmp._src.base import ambient, tree_paths
from jaxmp._src.fp8 import (
    block_matmul,
    gated_mlp as gated_mlp_lib,
    matmul,
    ragged_matmul,
    scale_leaves,
    stored_kernels,
    told,
)
from jaxmp._src.fp8.gated_mlp import GatedScales
from jaxmp._src.fp8.scheme import Recipe

Filter = Callable[[str, Any], bool] | Sequence[str] | None


def is_enabled() -> bool:
    """Whether fp8 layers that are traced here run in fp8.

    Example:
      >>> is_enabled()
      True
    """
    return ambient.FP8_ENABLED.value


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
    dimension_numbers: block_matmul.DimensionNumbers,
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
    dtype = jnp.dtype(preferred_element_type or matmul.result_dtype(lhs, rhs))
    out = matmul.plain_dot_general(lhs, rhs, dimension_numbers, dtype, out_sharding, scales=scales)
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
    dtype = jnp.dtype(preferred_element_type or matmul.result_dtype(lhs, rhs))
    if is_enabled():
        given = {"recipe": recipe, "scales": scales, "preferred_element_type": dtype}
        return ragged_matmul.ragged_dot(lhs, rhs, group_sizes, **given)
    matmul.note_use()
    return ragged_matmul.plain_ragged_dot(lhs, rhs, group_sizes, dtype, scales)


def gated_mlp(
    recipe: Any,
    leaves: Sequence[Sequence[Array]],
    x: Float[Array, "... K"],
    kernels: Sequence[Array],
    dtype: Any,
    *,
    layer: str | None = None,
    key: Array | None = None,
) -> Float[Array, "... N"]:
    """The gated MLP of a layer whose parts are gate, up and down: in fp8 if fp8 is on, else as three products.

    `dtype` is that of x and the result; None: that of x and the kernels, and under autocast its dtype.
    """
    known = [jnp.bfloat16 if stored_kernels.is_stored(kernel) else kernel for kernel in kernels]
    x = jnp.asarray(x, dtype or matmul.traced_for(jnp.result_type(x, *known)))  # autocast: of what lies between
    if is_enabled():
        scales = GatedScales(*(matmul.Scales(*part) for part in leaves)) if leaves[0] else None
        return gated_mlp_lib.gated_mlp(x, *kernels, recipe=recipe, scales=scales, layer=layer, key=key)

    def dot(x: Array, kernel: Array, name: str) -> Array:
        own = leaves[GatedScales._fields.index(name)]
        return dot_general(recipe, own, x, kernel, gated_mlp_lib.last_by_first(x))

    return gated_mlp_lib.of_layers(dot, x, kernels)


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
    dtype = dtype or jnp.result_type(inputs, jnp.bfloat16 if stored_kernels.is_stored(kernel) else kernel)
    cast = [None if x is None else jnp.asarray(x, dtype) for x in (inputs, *rest)]
    told.note_converted(inputs, cast[0])
    return [cast[0], kernel, *cast[1:]]


promote_all_but_kernel.is_in_fp8 = True  # for autocast: under it such a layer returns 16 bits, as others do


@dataclasses.dataclass(frozen=True)
class _Promotion:
    """A `promote_dtype=` that the user gave to a layer which runs in fp8. A kernel that is stored in fp8 stays so."""

    promote: Callable[..., Any]
    is_in_fp8: ClassVar[bool] = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _, kernel, *_ = args[0] if len(args) == 1 else args
        inputs, promoted, *rest = self.promote(*args, **kwargs)
        return [inputs, promoted.astype(kernel.dtype) if stored_kernels.is_stored(kernel) else promoted, *rest]


def promotion(given: Callable[..., Any], default: Callable[..., Any]) -> Callable[..., Any]:
    """The `promote_dtype=` of a layer in fp8: the user's own, or `promote_all_but_kernel` in place of flax's."""
    if given is default:
        return promote_all_but_kernel
    return given if getattr(given, "is_in_fp8", False) else _Promotion(given)


def wants_fp8(path: str, layer: Any, chosen: Filter) -> bool:
    """Whether the filter chooses the layer at `path`."""
    if chosen is None:
        return True
    if callable(chosen):
        return bool(chosen(path, layer))
    return tree_paths.matches(path, chosen)


def identity_of(chosen: Filter) -> Any:
    """Equal for filters that choose alike, as a part of the key under which `jax.jit` caches a trace.

    A function is its code and the values in it, so one that a loop writes again is the same filter.
    """
    if isinstance(chosen, functools.partial):
        return (identity_of(chosen.func), _values(chosen.args), _values(chosen.keywords.items()))
    if inspect.isfunction(chosen):
        cells = [cell.cell_contents for cell in chosen.__closure__ or ()]
        named = (chosen.__kwdefaults__ or {}).items()
        return (chosen.__code__, _values(cells), _values(chosen.__defaults__ or ()), _values(named))
    return _values([chosen])


def _values(values: Any) -> tuple[Any, ...]:
    return tuple(_values(x) if isinstance(x, (tuple, list)) else _Same.if_unhashable(x) for x in values)


class _Same:
    """A value without a hash, equal only to itself."""

    def __init__(self, value: Any):
        self._value = value

    @classmethod
    def if_unhashable(cls, value: Any) -> Any:
        """`value`, in a `_Same` if it has no hash."""
        try:
            hash(value)
        except TypeError:
            return cls(value)
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def warn_of_idle(function: str, recipe: Any, chosen: Filter, paths: Sequence[str]) -> bool:
    """Warns of patterns of a filter and of a dict of recipes that fit no layer. Returns whether the filter's did.

    `function` is the user's, `paths` are those of all layers that can run in fp8.
    """
    patterns = () if chosen is None or callable(chosen) else chosen
    warned = tree_paths.warn_of_idle(f"{function}(filter=)", patterns, paths, of="layer")
    scale_leaves.warn_of_idle(f"{function}(recipe)", recipe, paths, of="layer")
    return warned


def recipe_at(recipe: Any, path: str) -> Any:
    """The recipe for the layer at `path`: `recipe` itself, or the first entry of a dict whose pattern fits."""
    recipes = scale_leaves.recipes_of(recipe)
    return recipes[scale_leaves.pattern_for(recipes, path, "fp8 layer")]


def check_recipe(recipe: Any) -> None:
    """Raises a TypeError unless `recipe` is a recipe or a dict of recipes."""
    for part in scale_leaves.recipes_of(recipe).values():
        if not isinstance(part, Recipe):
            raise TypeError(
                f"a recipe is jaxmp.fp8.DelayedScaling(), CurrentScaling() or another one of jaxmp.fp8, or a dict from "
                f"path patterns to them; got {part!r}. Layers are chosen by filter=."
            )
