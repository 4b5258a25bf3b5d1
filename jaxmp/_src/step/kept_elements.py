"""Elements that a step does not change, because the optimizer would make one of their numbers inf or NaN.

Finite gradients can overflow an optimizer: the square of 1e20 is infinite in float32. Adam's second moment must not
store it. If only the second moment kept its old value, the first moment would hold the huge gradient, and the weight
would change by 1e19 times the learning rate. So all numbers of one element of a param are updated together or not at
all:

    the update, the weight (master or param) after it, and every array of the state that belongs to this param.

If one of them would become non-finite, all of them keep their old values, as if this element had not been in the step:

    held = not finite(u)  or  not finite(w + u)  or  not finite(s'_1)  or  not finite(s'_2)  or ...

This is elementwise, so XLA computes it in the optimizer's pass over memory. Where an array of the state has another
shape than its param (rows and columns of Adafactor, a norm of each leaf), one value belongs to many elements: if it is
not finite, the whole array and the whole param keep their old values. In an array that belongs to no param, each
non-finite element keeps its old value. The same holds for an array that differs between devices (`PerDevice`), because
all devices must keep the same elements. A norm that is only reported keeps nothing: it may be inf.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import per_device
from jaxmp._src.step import state_arrays, state_tuples
from pallas_kernels import broken, flags, write_order

_Path = tuple[Any, ...]
_NOTHING = -0.0  # the old value of an update


class _Owner(NamedTuple):
    """To which elements of which param an array belongs."""

    param: int | None  # None: all params, one after the other in a vector, as `optax.flatten` makes
    elementwise: bool  # of the shape of its param


class Held:
    """Which elements of each param keep their old values; made by `find`."""

    def __init__(self, paths: dict[_Path, int], masks: list[Array], whole: list[Array], to_count: list[Array]):
        # masks: bool, of the shape of the param; whole: bool[], whether an array of another shape is held.
        # to_count: the masks, perhaps in other words.
        self._paths, self._masks, self._whole, self._to_count = paths, masks, whole, to_count
        self._shapes = [mask.shape for mask in masks]

    def keep(self, new: PyTree, old: PyTree, *, taken: Bool[Array, ""] | None = None) -> PyTree:
        """`new`; `old` for held elements, and everywhere where the step is not taken. In the dtypes of `old`.

        Args:
          new, old: trees whose leaves have the paths of their params at the end of their own, as in `find`. `old` may
            hold Python floats.
          taken: None: the step is taken.
        """

        def choose(path: _Path, n: Any, o: Any) -> Any:
            if _is_reported(n):
                return type(n)(*(x if taken is None else jnp.where(taken, x, y) for x, y in zip(n, o, strict=True)))
            n, o = _alike(n, o)
            owner = self._owner_of(path, n)
            if owner is None:
                held = broken.is_broken(n, o) if jnp.issubdtype(n.dtype, jnp.inexact) else None
            elif owner.param is None:
                held = jnp.concatenate([mask.reshape(-1) for mask in self._masks])
            else:
                held = (self._masks if owner.elementwise else self._whole)[owner.param]
            # One select after the other: XLA for TPU would write a bool for both to memory.
            n = n if held is None else jnp.where(held, o, n)
            return n if taken is None else jnp.where(taken, n, o)

        return jax.tree_util.tree_map_with_path(choose, new, old, is_leaf=_is_reported)

    def counts(self) -> list[Float[Array, ""]]:
        """How many elements of each param are held, float32[] each."""
        return [jnp.sum(mask, dtype=jnp.float32) for mask in self._to_count]

    def count_beside(
        self, others: Sequence[Array | None], taken: Bool[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """How many elements are held, and how many of the flags `others` are set; float32[] each.

        Args:
          others: for each param None, or bools of its shape.
          taken: whether the step is taken; if not, the counts are undefined.
        """
        if broken.counted_apart():
            # XLA for TPU joins two sums if it can. With a sum that `taken` is made from, this would be a pass before.
            return flags.count_in_pass([mask & taken for mask in self._to_count], others)
        return flags.count_in_pass(self._to_count, others)

    def behind(self, others: Sequence[Array | None], rest: PyTree) -> tuple["Held", flags.Flags, PyTree]:
        """(self, bytes to count, rest): on a CPU they are behind a barrier, and a byte holds both flags of an element.

        Args:
          others: as in `count_beside`.
          rest: any pytree of arrays.
        """
        both = flags.in_bytes(self._masks, others)
        both, whole, rest = write_order.behind((both, self._whole, rest))
        masks = flags.first_of(both)
        return Held(self._paths, masks, whole, masks), both, rest

    def _owner_of(self, path: _Path, x: Array) -> _Owner | None:
        return _owner(self._paths, self._shapes, path, x)


def find(like: PyTree, new: PyTree, old: PyTree) -> Held:
    """The elements of the params `like` for which a number in `new` would be inf or NaN, and is not in `old`.

    Args:
      like: the tree of the params; only paths and shapes are read.
      new, old: two trees of the same structure, such as (updates, weights, state) after and before the step. The path
        of a leaf ends with the path of the param that it belongs to. `old` may hold Python floats.
    """
    leaves = jax.tree_util.tree_leaves_with_path(like)
    paths = {tuple(path): i for i, (path, _) in enumerate(leaves)}
    if isinstance(like, optax.LookaheadParams):  # the optimizer inside knows the fast params alone
        paths |= {tuple(path): i for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(like.fast))}
    shapes = [jnp.shape(x) for _, x in leaves]
    numbers: list[list[tuple[Array, Array]]] = [[] for _ in leaves]
    others: list[list[Array]] = [[] for _ in leaves]
    whole: list[list[Array]] = [[] for _ in leaves]
    ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
    for (path, n), o in zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True):
        _check_shapes(path, n, o)
        n, o = _alike(n, o)
        owner = _owner(paths, shapes, path, n)
        if owner is None or not jnp.issubdtype(n.dtype, jnp.inexact):
            continue
        if owner.param is None:
            breaks = broken.is_broken(n, o)
            for i, shape in enumerate(shapes):
                others[i].append(breaks[ends[i] : ends[i + 1]].reshape(shape))
        elif owner.elementwise:
            numbers[owner.param].append((n, o))
        else:
            whole[owner.param].append(jnp.any(broken.is_broken(n, o)))
    shared = [_any_of(found, ()) for found in whole]
    for i, shape in enumerate(shapes):
        others[i] += [jnp.broadcast_to(shared[i], shape)] if whole[i] else []

    def masks_by(breaks: Callable[..., Array]) -> list[Array]:
        of_numbers = [[breaks(n, o) for n, o in found] for found in numbers]
        return [_any_of(ours + rest, shape) for ours, rest, shape in zip(of_numbers, others, shapes, strict=True)]

    masks = masks_by(broken.is_broken)
    return Held(paths, masks, shared, masks_by(broken.in_other_words) if broken.counted_apart() else masks)


def keep_together(like: PyTree, new: PyTree, old: PyTree, *, taken: Bool[Array, ""] | None = None) -> PyTree:
    """`new` with the old values of held elements (of all, where the step is not taken)."""
    return find(like, new, old).keep(new, old, taken=taken)


def no_updates(updates: PyTree) -> PyTree:
    """The updates that change nothing, to stand for the old value of `updates`: -0.0, as -0.0 + 0.0 is not -0.0."""
    return jax.tree.map(lambda _: _NOTHING, updates)


def is_guarded(extra_args: dict[str, Any]) -> bool:
    """Whether a transform around this one keeps elements together: `unscale_and_skip` passes `grads_finite`."""
    return "grads_finite" in extra_args


def _alike(new: Any, old: Any) -> tuple[Array, Array]:
    new = jnp.asarray(new)
    old = jnp.asarray(old, new.dtype) if isinstance(old, float) else jnp.asarray(old)
    return state_arrays.in_dtype_of(new, old), old


def _check_shapes(path: _Path, new: Any, old: Any) -> None:
    if not isinstance(old, float) and jnp.shape(new) != jnp.shape(old):
        raise ValueError(
            f"a step must not change the shape of an array of the optimizer's state; got {jnp.shape(new)} for "
            f"{jnp.shape(old)} at {tree_paths.path_str(path[1:])}. An optimizer that factors large leaves only "
            f"(optax.adafactor) takes the parts of shard_map for small leaves: use plain jax.jit, where it sees whole "
            f"leaves."
        )


def _is_reported(x: Any) -> bool:
    return isinstance(x, state_tuples.GlobalNormState)


def _any_of(flags: Sequence[Array], shape: tuple[int, ...]) -> Bool[Array, "..."]:
    if not flags:
        return jnp.zeros(shape, bool)
    found = flags[0]
    for flag in flags[1:]:
        found = found | flag
    return found


def _owner(paths: dict[_Path, int], shapes: list[tuple[int, ...]], path: _Path, x: Array) -> _Owner | None:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or per_device.axis_of(path) is not None:
        return None
    for start in range(len(path) + 1):  # the longest end first
        i = paths.get(tuple(path[start:]))
        if i is not None:
            is_scalar = x.ndim == 0 and (shapes[i] or not jnp.issubdtype(x.dtype, jnp.floating))
            if start == len(path) and is_scalar:
                return None  # params are one array, and this is a scalar of the state: a count, a norm
            return _Owner(i, x.shape == shapes[i])
    total = sum(int(np.prod(shape)) for shape in shapes)
    return _Owner(None, elementwise=True) if x.shape == (total,) else None
