"""Guards of params that replace others: they have the leaves, shapes and kinds of numbers that `tx.init` got."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.step import leaf_paths, reload_masters, state as states
from jaxmp._src.step.reload_masters import is_array


@functools.wraps(reload_masters.reload_master_params)
def reload_master_params(opt_state: Any, params: PyTree) -> Any:
    if not states.with_masters(opt_state):
        raise ValueError(
            "opt_state must keep masters; got a state without masters. Make it with jaxmp.mixed_precision or "
            "jaxmp.keep_master_params, and pass (opt_state, params) in this order."
        )
    _check_fits(tree_paths.leaves_by_path(params), _expected_by(opt_state), "reload_master_params")
    return reload_masters.reload_master_params(opt_state, params)


@functools.wraps(reload_masters.follow)
def follow(
    opt_state: Any, params: PyTree, before: PyTree, cast_to_param: Callable[[PyTree], PyTree]
) -> tuple[PyTree, Any]:
    new, old = tree_paths.leaves_by_path(params), tree_paths.leaves_by_path(before)
    if reload_masters.is_followed(opt_state, new, old):
        _check_fits(new, old, "replace(params=)")
    return reload_masters.follow(opt_state, params, before, cast_to_param)


def check_is_state_of(tx: Any, opt_state: Any, params: PyTree) -> None:
    """Raises a ValueError if `tx.init` makes a state of another structure than `opt_state`, for `replace(tx=)`."""
    try:
        wanted = jax.eval_shape(tx.init, params)
    except Exception:  # params without arrays (shardings), or a `tx` that says itself what it cannot take
        return
    if jax.tree.structure(wanted) == jax.tree.structure(opt_state):
        return
    new, old = tree_paths.leaves_by_path(wanted), tree_paths.leaves_by_path(opt_state)
    found = [f" ({path} is in the state of tx only)" for path in new if path not in old]
    found += [f" ({path} is in the opt_state only)" for path in old if path not in new]
    raise ValueError(
        f"replace(tx=): another optimizer needs a state of its own; got a tx that does not fit the opt_state"
        f"{''.join(found[:1])}. Give both: full = jaxmp.get_master_params(state.opt_state, state.params); "
        f"state.replace(tx=tx, opt_state=tx.init(full)). Moments and loss scale then start anew."
    )


def _expected_by(opt_state: Any) -> dict[str, Any]:
    """What the params of a state look like, by path: float32 masters of their shapes; None where there is no master."""
    found: dict[str, Any] = {}
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    for state in states.with_masters(opt_state):
        for key, x in jax.tree_util.tree_leaves_with_path(state.master_params, is_leaf=is_masked):
            path = leaf_paths.param_of(key)
            found[path] = found.get(path) if is_masked(x) else jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return found


def _check_fits(new: dict[str, Any], expected: dict[str, Any], caller: str) -> None:
    """Raises a ValueError unless new params have the leaves, shapes and kinds of numbers that are expected, by path.

    A float of 16 or 32 bits takes any such float, which is cast; other numbers must have the very dtype.
    """
    missing = [path for path in expected if path not in new]
    extra = [path for path in new if path not in expected]
    if missing or extra:
        path, where = (missing[0], "is missing") if missing else (extra[0], "is none of theirs")
        if missing and all(map(scale_leaves.is_scale, missing)) and not extra:
            fix = "Weights without fp8 scales take those that are there: jaxmp.fp8.with_scales(params, old_params)."
        else:
            fix = "Give the whole tree, with the containers and names of the old one."
        raise ValueError(
            f"{caller}: new params must have the leaves of those that tx.init got; {path} {where}. "
            f"{leaf_paths.first_paths(new)} {fix}"
        )
    for path, like in expected.items():
        if like is None:
            continue
        x = new[path]
        if not is_array(x) or np.shape(x) != like.shape:
            got = np.shape(x) if is_array(x) else type(x).__name__
            raise ValueError(
                f"{caller}: new params must be arrays with the shapes of the old ones; got {got} at {path}, expected "
                f"{like.shape}."
            )
        takes_floats = like.dtype in _FLOATS
        if x.dtype != like.dtype and not (takes_floats and x.dtype in _FLOATS):
            wanted = "float32, or the dtype of the old one" if takes_floats else str(like.dtype)
            raise ValueError(
                f"{caller}: a new param must be in {wanted}; got {x.dtype} at {path}. Cast it: "
                f"x.astype({'jnp.float32' if takes_floats else repr(str(like.dtype))})."
            )


_FLOATS = frozenset(map(np.dtype, (jnp.float16, jnp.bfloat16, jnp.float32)))
