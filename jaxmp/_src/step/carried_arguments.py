"""An argument of the loss that is passed through the microbatches: the loss returns its new value as aux.

BatchNorm's statistics after one microbatch are the input of the next microbatch. Without this file, they would be
stacked like any aux, and each microbatch would start from the same statistics.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmp._src.base import compat, tree_paths
from jaxmp._src.step import microbatches
from pallas_kernels.when import in_dtype_of

_WHERE = "the argument that carry_argnum names"


def chosen(carry_argnum: int | None, n: int, has_aux: bool) -> tuple[int, ...]:
    """The position of the carried argument among `n`, in a tuple that is empty if there is none."""
    if carry_argnum is None:
        return ()
    if not has_aux:
        raise ValueError(
            "with carry_argnum= the loss must return (loss, new_value); got has_aux=False. Pass has_aux=True."
        )
    return microbatches.resolve_argnums(carry_argnum, n, "carry_argnum")


def take(aux: PyTree, carry: dict[int, PyTree]) -> tuple[PyTree, dict[int, PyTree]]:
    """(the rest of aux, the new carry) from the aux of a loss; with an empty `carry`, aux itself."""
    if not carry:
        return aux, carry
    ((i, old),) = carry.items()
    is_pair = isinstance(aux, tuple) and len(aux) == 2 and not hasattr(aux, "_fields")
    has_rest = is_pair and jax.tree.structure(aux) != jax.tree.structure(old)
    new, rest = (aux[0], (aux[1],)) if has_rest else (aux, ())
    tree_paths.check_same_structure(new, old, "aux", _WHERE, "Return its new value as aux, or as aux[0] of two parts.")
    for (path, n), o in zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True):
        if jnp.shape(n) != jnp.shape(o):
            raise ValueError(
                f"aux must have the shapes of {_WHERE}; got {jnp.shape(n)} and {jnp.shape(o)} at "
                f"{tree_paths.path_str(path)}"
            )
    return rest, {i: new}


def put_back(rest: PyTree, carry: dict[int, PyTree]) -> PyTree:
    """The aux for the caller, from what `take` returned."""
    if not carry:
        return rest
    ((_, new),) = carry.items()
    return (new, rest[0]) if rest else new


def as_it_stays(new_carry: Callable[[PyTree], PyTree], carry: PyTree) -> PyTree:
    """`carry`, typed as varying over the axes over which `new_carry` of it varies, and over no others.

    A scan needs a carry of one type. Statistics that the loss averages over an axis do not vary over it before or
    after a microbatch, and `jax.shard_map(check_vma=True)` can return them as replicated. Those of this device's own
    rows vary after the first microbatch, so they are typed as varying before it.
    """
    if not jax.tree.leaves(carry) or not any(map(compat.is_tracked, compat.manual_axes())):
        return carry
    while True:
        new = jax.make_jaxpr(lambda carry: jax.tree.leaves(new_carry(carry)))(carry).out_avals
        leaves, treedef = jax.tree.flatten(carry)
        missing = [compat.varying_axes(n) - compat.varying_axes(o) for n, o in zip(new, leaves, strict=True)]
        if not any(missing):
            return carry
        carry = treedef.unflatten([compat.as_varying(o, tuple(m)) for o, m in zip(leaves, missing, strict=True)])


def typed_like(new: PyTree, carry: PyTree) -> PyTree:
    """`new` in the dtypes of `carry`, typed as varying over its axes too. What `carry` has not stays as it is.

    A policy computes state in 16 bits that was float32, such as the norms of `nnx.SpectralNorm`.
    """
    old = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(carry)}
    is_floating = lambda x: jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)  # noqa: E731

    def like(path: Any, n: Any) -> Any:
        o = old.get(jax.tree_util.keystr(path))
        if o is None:
            return n
        n = in_dtype_of(n, o) if is_floating(n) == is_floating(o) else n
        return compat.as_varying(n, tuple(compat.varying_axes(o)))

    return jax.tree_util.tree_map_with_path(like, new)


def next_carry(new: PyTree, carry: PyTree) -> PyTree:
    """`typed_like`, for a scan: a ValueError if the new carry has other leaves."""
    fix = "With accumulate= a loss cannot add state: take it out by nnx.pop(model, nnx.Intermediate), return it as aux."
    tree_paths.check_same_structure(new, carry, "the state after a microbatch", "that before it", fix)
    return typed_like(new, carry)
