"""Scale leaves: how the state of fp8 layers travels with the params.

A layer that multiplies in fp8 holds three small leaves beside its weights, one for each tensor that it casts:

    fp8_lhs_e4m3_log2_scale   fp8_rhs_e4m3_log2_scale   fp8_grad_e5m2_log2_scale

They are params, so they are saved, replicated and restored like params, but the inner optimizer never sees them. The
"gradient" of such a leaf is the largest magnitude (*amax*) of its tensor in this step, in the form of `amax_records`,
and `step.scales.update_amax` computes the next scale from it. The leaf holds log2 of a power of two, an integer, in
float32: then `p + (new - p)` is always exact, so every optax loop updates the leaf exactly. (`..._scale`, without log2,
holds a scale that need not be a power of two.)

Two rules apply when the loss is differentiated:

1.  A leaf that is used twice (a shared layer, a scan, remat, microbatches) has the *larger* amax as its gradient, not
    the sum that autodiff makes. So the leaves are differentiated in an extended dtype whose addition is MAX, with -inf
    as its zero: a leaf that was not used has the gradient -inf.
2.  Gradients are scaled by the loss scale S, and S changes. Leaves hold the scale of *unscaled* gradients. log2(S) is
    subtracted from them before the loss is differentiated, and the amax is divided by S afterwards, so the scale that
    a cast uses follows S.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxmp._src.base import compat, tree_paths
from jaxmp._src.devices.collectives import max_over
from jaxmp._src.fp8 import amax_records
from jaxmp._src.numerics import float_bits, formats, reductions

_NAME = re.compile(r"(?:.*/)?fp8_(lhs|rhs|grad)_(e4m3|e5m2)_(log2_scale|scale)")


class Scales(NamedTuple):
    """The scale leaves of one layer: float32[] each, as `jaxmp.fp8.is_scale` names them.

    Example:
      >>> import jax.numpy as jnp
      >>> Scales(lhs=jnp.zeros(()), rhs=jnp.ones(()), grad=jnp.zeros(())).rhs.dtype.name  # log2 of a scale of 2
      'float32'
    """

    lhs: Array
    rhs: Array
    grad: Array


def leaf_name(operand: str, dtype: Any, *, power_of_two: bool) -> str:
    """The name of the leaf that holds the scale of `operand` ("lhs", "rhs" or "grad")."""
    return f"fp8_{operand}_{formats.name_of(dtype)}_{'log2_scale' if power_of_two else 'scale'}"


def refuse(paths: Iterable[str]) -> None:
    """Raises a ValueError if there is a scale among the params of an optimizer that knows no recipe."""
    for path in paths:
        if is_scale(path):
            raise ValueError(
                f"fp8 scales are moved by a recipe, not by the optimizer; got {path} in the params and no recipe for "
                f"it. Pass recipe= of its layer to jaxmp.mixed_precision."
            )


def is_scale(path: Any, leaf: Any = None) -> bool:
    """Whether a leaf of a params tree is the scale of an fp8 tensor. All of jaxmp uses this function to find them.

    Args:
      path: a path such as `"Dense_0/Fp8DotGeneral_0/fp8_lhs_e4m3_log2_scale"`, or a key path of `jax.tree_util`.
      leaf: not used, for `jax.tree_util.tree_map_with_path(is_scale, params)`. Only the name decides, so a label or an
        `optax.MaskedNode()` in place of a scale counts too.

    Returns:
      A Python bool.

    Example:
      >>> is_scale("Dense_0/Fp8DotGeneral_0/fp8_lhs_e4m3_log2_scale"), is_scale("LayerNorm_0/scale")
      (True, False)
    """
    del leaf
    return _NAME.fullmatch(path if isinstance(path, str) else tree_paths.path_str(path)) is not None


def paths_of(params: PyTree) -> list[str]:
    """The paths of the scales of a model, in the order of the amaxes in its state."""
    return [path for path in tree_paths.leaves_by_path(params) if is_scale(path)]


def started(path: str, x: Any) -> Any:
    """A new scale leaf: as it is, or 1 where it is only described."""
    return jnp.full(x.shape, 0.0 if format_of(path)[2] else 1.0, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x


def recipes_of(recipe: Any) -> Mapping[str, Any]:
    """Recipes by pattern: a dict as it is, or a single recipe for all paths."""
    return recipe if isinstance(recipe, Mapping) else {"*": recipe}


def pattern_for(recipes: Mapping[str, Any], path: str, what: str) -> str:
    """The first pattern that fits `path` or a level above it, so that a layer and its scale leaves have one recipe.

    Raises:
      ValueError: none fits; `what` ("fp8 layer", "fp8 scale") is what lies at `path`.
    """
    levels = _levels(path)
    for pattern in recipes:
        if any(tree_paths.matches(level, pattern) for level in levels):
            return pattern
    raise ValueError(f"each {what} needs a recipe; none of {list(recipes)} fits {path}. Add '*' as the last pattern.")


def warn_of_idle(argument: str, recipe: Any, paths: Sequence[str], *, of: str) -> None:
    """Warns of patterns of a dict of recipes that fit none of `paths` and no level above; see `tree_paths`."""
    levels = [*paths, *(level for path in paths for level in _levels(path))]
    tree_paths.warn_of_idle(argument, recipes_of(recipe), levels, of=of)


def _levels(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def has_scales(tree: PyTree) -> bool:
    """Whether there is a scale leaf in `tree`."""
    return any(is_scale(path) for path, _ in tree_paths.boxed_leaves(tree)[0])


def with_scales(params: PyTree, fresh: PyTree) -> PyTree:
    """Weights that were made without fp8, with the fp8 scales of a tree that has them.

    Args:
      params: the weights; scales that are among them stay.
      fresh: the params of the same model with scales: a new initialization in `jaxmp.autocast("fp8")`, or the params
        that `params` will replace.

    Returns:
      The tree of `fresh`, with the leaves of `params` where they have them.

    Raises:
      ValueError: a weight that only one of the two trees has, named by path.

    Example:
      >>> fresh = {"w": jnp.zeros(1), "dot": {"fp8_rhs_e4m3_log2_scale": jnp.float32(3.0)}}
      >>> with_scales({"w": jnp.ones(1)}, fresh)
      {'dot': {'fp8_rhs_e4m3_log2_scale': Array(3., dtype=float32)}, 'w': Array([1.], dtype=float32)}
    """
    by_path = tree_paths.leaves_by_path(params)
    wanted = tree_paths.leaves_by_path(fresh)
    one_sided = [path for path in wanted if path not in by_path and not is_scale(path)]
    one_sided += [path for path in by_path if path not in wanted]
    if one_sided:
        where = "fresh" if one_sided[0] in wanted else "params"
        raise ValueError(
            f"with_scales(params, fresh): both must hold the weights of one model; {one_sided[0]} is in {where} only."
        )
    return tree_paths.map_with_path(lambda path, x: by_path.get(path, x), fresh)


def format_of(path: str) -> tuple[bool, Any, bool]:
    """(belongs to a gradient, fp8 dtype, holds log2) of the scale leaf at `path`."""
    match = _NAME.fullmatch(path)
    assert match is not None  # each caller has asked `is_scale`
    operand, fp8_format, kind = match.groups()
    return operand == "grad", formats.DTYPES[fp8_format], kind == "log2_scale"


def map_scales(f: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """`tree` with `f(path, leaf, *leaves of rest)` in place of each scale leaf; other leaves do not change."""
    return tree_paths.map_with_path(lambda path, x, *xs: f(path, x, *xs) if is_scale(path) else x, tree, *rest)


def partition(tree: PyTree) -> tuple[PyTree, PyTree]:
    """(the scale leaves, all other leaves), each with `optax.MaskedNode()` in place of the other's leaves."""
    units, treedef = tree_paths.boxed_leaves(tree)
    masked = optax.MaskedNode()
    only_scales = [x if is_scale(path) else masked for path, x in units]
    others = [masked if is_scale(path) else x for path, x in units]
    return treedef.unflatten(only_scales), treedef.unflatten(others)


def merge(only_scales: PyTree, others: PyTree) -> PyTree:
    """The inverse of `partition`."""

    def is_unit(x: Any) -> bool:  # where one tree has a box, the other has a MaskedNode
        return isinstance(x, optax.MaskedNode) or tree_paths.is_box(x)

    return jax.tree.map(lambda a, b: b if isinstance(a, optax.MaskedNode) else a, only_scales, others, is_leaf=is_unit)


def shift(path: str, leaf: Float[Array, "..."], gradient_scale: Float[Array, ""]) -> Float[Array, "..."]:
    """The leaf for gradients that are `gradient_scale` times as large; leaves of other tensors do not change.

    The exponent is rounded up, so that values stay in range if `gradient_scale` is not a power of two.
    """
    is_gradient, _, holds_log2 = format_of(path)
    if not is_gradient:
        return leaf
    return leaf - float_bits.ceil_log2(gradient_scale) if holds_log2 else leaf / gradient_scale


def enter(params: PyTree, gradient_scale: Float[Array, ""]) -> PyTree:
    """`params` as they are differentiated: scale leaves shifted, in the dtype whose gradients combine by MAX.

    Gradients will be `gradient_scale` times as large as unscaled ones.

    All scalars come out of one array, so that the scales of all casts and products take one launch.
    """
    shifted: dict[str, Array] = {}
    alike: dict[frozenset[str], list[str]] = {}  # scalars by the axes over which they vary

    def add(path: str, leaf: Array) -> Array:
        shifted[path] = shift(path, leaf.astype(jnp.float32), gradient_scale)
        if not leaf.ndim:
            alike.setdefault(compat.varying_axes(shifted[path]), []).append(path)
        return leaf

    map_scales(add, params)
    for paths in alike.values():
        shifted |= zip(paths, reductions.out_of_one_array([shifted[path] for path in paths]), strict=True)
    return map_scales(lambda path, _: lax.convert_element_type(shifted[path], compat.max_dtype()), params)


def leave(grads: PyTree, gradient_scale: Float[Array, ""]) -> PyTree:
    """`grads` of the params from `enter`, with amaxes of unscaled gradients: float32, -inf for leaves not used."""

    def observed(path: str, gradient: Array) -> Array:
        largest = compat.max_dtype_to_float32(gradient)
        return largest / gradient_scale if format_of(path)[0] else largest

    return map_scales(observed, grads)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Adds an explanation to errors about the dtype of scale leaves."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, AssertionError) as e:
        if any(word in str(e) for word in ("fp8_meta", "UndefinedPrimal")):
            e.add_note(
                "jaxmp: fp8 scale leaves (jaxmp.fp8.is_scale) have no arithmetic in a loss. Leave them out of a norm "
                "of all params; slice stacked params with lax.scan or lax.dynamic_index_in_dim, not x[0]; and call "
                "value_and_grad inside a shard_map(check_vma=False), not around it."
            )
        raise


def scale_of(leaf: Float[Array, ""], *, holds_log2: bool) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(scale, 1 / scale) of a leaf, float32.

    Powers of two are clamped to 2^-63 and 2^63, so that the product of two is a power of two in range.
    """
    leaf = compat.max_dtype_to_float32(leaf)
    if not holds_log2:
        return leaf, 1.0 / leaf
    scale = float_bits.normal_power_of_two(lax.clamp(np.float32(-63), leaf, np.float32(63)))
    return scale, float_bits.inverse_of_power_of_two(scale)


def max_of_scales(grads: PyTree, params: PyTree, axes: tuple[str, ...]) -> PyTree:
    """`grads` with records of the amaxes of fp8 scale leaves at their MAX over the bound `axes`, by one collective.

    A leaf of `params` that varies over one of `axes` differs between devices (pipeline stages), so its amax is not
    reduced over that axis. An amax of -inf says that the tensor was not used.

    All amaxes that are reduced alike lie in one array, those of gradients behind the others, as in an `Fp8State`: then
    XLA makes their records at once, and takes them apart and together at no cost.
    """
    flat: dict[tuple[str, ...], list[Array]] = {}
    slots: dict[str, tuple[tuple[str, ...], int]] = {}

    def gather(path: str, amax: Array, param: Array, *, is_gradient: bool) -> Array:
        if format_of(path)[0] == is_gradient:
            shared = tuple(a for a in axes if a not in compat.varying_axes(param))
            leaves = flat.setdefault(shared, [])
            slots[path] = shared, sum(x.size for x in leaves)
            leaves.append(jnp.ravel(amax))
        return amax

    for is_gradient in (False, True):
        map_scales(functools.partial(gather, is_gradient=is_gradient), grads, params)
    largest = {shared: max_over(jnp.concatenate(amaxes), shared) for shared, amaxes in flat.items()}
    records = {shared: amax_records.record(amax, amax != -np.inf) for shared, amax in largest.items()}  # [n, 3]

    def scatter(path: str, amax: Array) -> Array:
        shared, start = slots[path]
        return records[shared][start : start + amax.size].reshape(*amax.shape, amax_records.SIZE)

    return map_scales(scatter, grads)
