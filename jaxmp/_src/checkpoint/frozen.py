"""Frozen params of an nnx model that were saved in another precision.

With `wrt=nnx.LoRAParam` the base belongs to the model and not to the optimizer, so `restore` has no masters to convert
it from. It is read in the dtypes of the checkpoint (`as_saved`), then cast to those of the model (`in_dtypes`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.checkpoint import placement
from jaxmp._src.fp8 import stored_kernels
from jaxmp._src.numerics import casting
from jaxmp._src.step import reload_masters


def as_saved(at: str, frozen: PyTree, params: PyTree, saved: Mapping[str, Any], patterns: Sequence[str]) -> PyTree:
    """The tree `frozen`, with what describes the saved leaf in place of each leaf that can be cast from it.

    `at` is the path of the tree in errors, `saved` the leaves of the checkpoint by path, `params` are those of the
    optimizer, with the scales of fp8 layers.

    Raises:
      ValueError: a kernel in fp8, in the checkpoint or here, without its scale: fp8(w * scale) alone is no weight.
    """
    scales = stored_kernels.pairs(_together(frozen, params))

    def leaf(path: str, x: Any) -> Any:
        y: Any = saved.get(path)
        if not _can_cast(x, y) or y.shape != x.shape or y.dtype == x.dtype:
            return x
        in_fp8 = stored_kernels.is_stored(x) or stored_kernels.is_stored(y)
        if in_fp8 and (path not in scales or tree_paths.matches(scales[path], patterns)):
            raise ValueError(
                f"a frozen kernel in fp8 holds w * scale, so it is cast with the scale of its fp8 layer; {at}/{path}, "
                f"which this optimizer does not train, is {y.dtype} in the checkpoint and {x.dtype} in the model, "
                + ("and partial= names its scale" if path in scales else "which has no fp8 layer there")
                + ". Restore into a job with the policy and the fp8 layers (jaxmp.nnx.to_fp8) of the checkpoint, then "
                "take its weights: jaxmp.fp8.load_weights(nnx.state(model, nnx.Param), jnp.float32)."
            )
        return jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=placement.chosen_sharding(x))

    return tree_paths.map_with_path(leaf, frozen)


def in_dtypes(found: PyTree, params: PyTree, like: PyTree) -> tuple[PyTree, PyTree]:
    """(`found` in the dtypes of `like`, `params` with the scales of the kernels that are now in fp8)."""
    leaves, wanted = _together(found, params), tree_paths.leaves_by_path(like)
    cast = [
        p for p, x in tree_paths.leaves_by_path(found).items() if _can_cast(x, wanted[p]) and x.dtype != wanted[p].dtype
    ]
    value, scales = reload_masters.in_float32(leaves), stored_kernels.pairs(leaves)
    new: dict[str, Any] = {}
    for path in cast:
        if stored_kernels.is_stored(wanted[path]):
            pair = {path: value(path), scales[path]: leaves[scales[path]]}
            new |= stored_kernels.store(pair)
        else:
            new[path] = casting.cast_float(value(path), wanted[path].dtype, saturate=True)

    def with_new(tree: PyTree) -> PyTree:
        return tree_paths.map_with_path(lambda path, x: new.get(path, x), tree)

    return (with_new(found), with_new(params)) if new else (found, params)


def _together(frozen: PyTree, params: PyTree) -> dict[str, Any]:
    return tree_paths.leaves_by_path(frozen) | tree_paths.leaves_by_path(params)


def _can_cast(*leaves: Any) -> bool:
    return all(casting.is_float(x) or stored_kernels.is_stored(x) for x in leaves)
