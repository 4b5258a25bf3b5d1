"""Finds params that differ from their rounded masters: changed by hand, or by a transform after `mixed_precision`.

A step computes 16-bit params from their masters, so it reverts any other change of the params. Two functions that read
the params report such a change: the statistics of `jaxmp.monitor`, and `check_progress`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import host_memory
from jaxmp._src.numerics import casting
from jaxmp._src.step import state as states

MANY = 0.01  # the share of a param that is named; optax.apply_updates leaves a few elements a step behind

CAUSE = (
    "the param was changed by hand (loaded, pruned, averaged), and the next step computes it from its master again. "
    "Call opt_state = jaxmp.reload_master_params(opt_state, params) after the change. Or a transform behind or around "
    "mixed_precision changes its updates: put it inside, jaxmp.mixed_precision(optax.chain(inner, transform), policy)."
)


def pairs(opt_state: Any, params: PyTree) -> dict[str, tuple[Array, Array]]:
    """(param, float32 master) of each 16-bit param that has one, by path."""
    found = {}
    masters = tree_paths.leaves_by_path(states.masters_of(opt_state, params))
    for path, p in tree_paths.leaves_by_path(params).items():
        master = masters.get(path)
        is_split_or_none = master is None or master.dtype != jnp.float32
        if not is_split_or_none and casting.is_low_precision(p.dtype):
            found[path] = p, master
    return found


def share(param: Array, master: Array) -> Float[Array, ""]:
    """The share of `param` that is not its master, rounded."""
    rounded = casting.round_to(host_memory.to_device(master), param.dtype)
    is_stale = (rounded != param.astype(jnp.float32)) & jnp.isfinite(rounded)
    return jnp.mean(is_stale.astype(jnp.float32))


def first(opt_state: Any, params: PyTree) -> str | None:
    """The path of the first param of which more than a share of `MANY` is stale; outside of a trace.

    Arrays of which this process holds a part are not read: the others would have to take part.
    """
    for path, (param, master) in pairs(opt_state, params).items():
        is_here = all(getattr(x, "is_fully_addressable", True) for x in (param, master))  # NumPy arrays are
        if param.size and is_here and float(_share(param, master)) > MANY:
            return path
    return None


_share = jax.jit(share)
