"""Warns of transforms before `mixed_precision` in a chain whose results depend on the size of scaled gradients.

`optax.chain(optax.clip_by_global_norm(1.0), mixed_precision(...))` clips gradients that the loss scale has multiplied:
after unscaling, their norm of 1 is 1 / 65536, and nothing trains. Only transforms whose output is proportional to their
input may come before `mixed_precision` (`jaxmp.reduce_gradients`, a cast, a mask). `programs.homogeneity` checks this
in their program.

`apply_gradients` passes the gradients to the chain, and knows which gradients arrive at `mixed_precision`. If these are
other arrays, it traces the transforms in between once more, alone. (With `tx.update`, jaxmp does not know the gradients
before the chain.)
"""

import warnings
from typing import Any

import jax
from jaxtyping import PyTree

from jaxmp._src.base import ambient, tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.programs import homogeneity
from jaxmp._src.step import extra_arguments, in_place, read_state


class _Arrived(Exception):
    """Ends the trace where gradients arrive at `mixed_precision`; holds them."""


@jax.tree_util.register_static
class _Until(in_place.Destination):
    """A destination that ends the update where the scaled gradients arrive."""

    def arrive(self, grads: PyTree) -> None:
        raise _Arrived(grads)


def check(tx: Any, destination: in_place.Destination, opt_state: Any, params: PyTree) -> None:
    """Warns, once for each `tx`, if gradients that arrived do not scale with those that were given."""
    given, arrived = jax.tree.leaves(destination.grads), destination.arrived
    checked = ambient.now().checked_chains
    if arrived is None or tx.update in checked or all(a is b for a, b in zip(given, arrived, strict=False)):
        return
    checked.add(tx.update)
    if not read_state.may_scale(opt_state):
        return
    found = _first_that_knows_its_size(tx, destination.grads, opt_state, params)
    if found is not None:
        warn(
            "clipping-before-unscaling",
            f"what stands before mixed_precision in a chain gets gradients that are multiplied by the loss scale, so "
            f"it must not look at their size: no clipping, no weight decay, no momentum, no noise; got a chain that "
            f"does, at {found}. Put it inside: jaxmp.mixed_precision(optax.chain(clip, inner), policy).",
        )


def _first_that_knows_its_size(tx: Any, grads: PyTree, opt_state: Any, params: PyTree) -> str | None:
    """The path of the first gradient that arrives and does not scale with those given; None also if it is not known."""
    paths: list[str] = []

    def head(grads: PyTree, opt_state: Any, params: PyTree) -> PyTree:
        try:
            extra = {"destination": _Until(params, grads)}
            extra_arguments.update(tx, grads, opt_state, params, extra)
        except _Arrived as e:
            (arrived,) = e.args
            kept = {p: x for p, x in tree_paths.leaves_by_path(arrived).items() if not scale_leaves.is_scale(p)}
            paths.extend(kept)
            return list(kept.values())
        return []

    try:
        with warnings.catch_warnings(action="ignore"):
            program = jax.make_jaxpr(head)(grads, opt_state, params)
    except Exception:  # inside of another transformation, or with arguments that only the caller has
        return None
    others = len(jax.tree.leaves((opt_state, params)))
    inputs = [1.0] * len(jax.tree.leaves(grads)) + [0.0] * others
    found = homogeneity.degrees(program, inputs)
    return next((p for p, d in zip(paths, found, strict=True) if d not in (1.0, *_UNKNOWN)), None)


_UNKNOWN = (homogeneity.EVERY, homogeneity.UNKNOWN)
