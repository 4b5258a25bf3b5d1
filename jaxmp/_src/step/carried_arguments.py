"""An argument of the loss that is passed through the microbatches: what the loss returns anew as aux.

BatchNorm's statistics after a microbatch are those before the next. Without this they would be stacked like any aux,
one for each microbatch, and each would start from the same.
"""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmp._src.base import compat, tree_paths
from jaxmp._src.numerics import casting
from jaxmp._src.step import microbatches, state_arrays

_WHERE = "the argument that carry_argnum names"


def chosen(carry_argnum: int | None, n: int, has_aux: bool) -> tuple[int, ...]:
    """The position of the carried argument among `n`, in a tuple that is empty if there is none."""
    if carry_argnum is None:
        return ()
    if not has_aux:
        raise ValueError(
            "the loss must return the new value of the argument that carry_argnum names; got has_aux=False. Return "
            "(loss, new_value), or (loss, (new_value, others)), and pass has_aux=True."
        )
    return microbatches.resolve_argnums(carry_argnum, n, "carry_argnum")


def take(aux: PyTree, carry: dict[int, PyTree]) -> tuple[PyTree, dict[int, PyTree]]:
    """(the rest of aux, the new carry) from the aux of a loss; with an empty `carry`, aux itself."""
    if not carry:
        return aux, carry
    ((i, old),) = carry.items()
    new, rest = (aux, ()) if not _has_rest(aux, old) else (aux[0], (aux[1],))
    tree_paths.check_same_structure(new, old, "aux", _WHERE, "Return its new value as aux, or as aux[0] of two parts.")
    for (path, n), o in zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True):
        if jnp.shape(n) != jnp.shape(o):
            raise ValueError(
                f"aux must have the shapes of {_WHERE}; got {jnp.shape(n)} and {jnp.shape(o)} at "
                f"{tree_paths.path_str(path)}"
            )
    return rest, {i: jax.tree.map(lambda n, o: state_arrays.in_dtype_of(n, jnp.asarray(o)), new, old)}


def put_back(rest: PyTree, carry: dict[int, PyTree]) -> PyTree:
    """The aux for the caller, from what `take` returned."""
    if not carry:
        return rest
    ((_, new),) = carry.items()
    return (new, rest[0]) if rest else new


def as_varying(carry: PyTree, axes: tuple[str, ...]) -> PyTree:
    """`carry` as it is after a microbatch of this device's own rows: its arrays of floats vary over `axes`."""
    return jax.tree.map(lambda x: compat.as_varying(x, axes) if casting.is_float(x) else x, carry)


def _has_rest(aux: PyTree, old: PyTree) -> bool:
    is_pair = isinstance(aux, tuple) and len(aux) == 2 and not hasattr(aux, "_fields")
    return is_pair and jax.tree.structure(aux) != jax.tree.structure(old)
