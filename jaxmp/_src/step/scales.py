"""Delayed scaling in the optimizer: the gradients of scale leaves hold amaxes, their updates give the next scales.

    h, scale = recipe.update(h, amax)          update = leaf(scale) - leaf          (the leaf holds log2 of the scale)

A step parts the scale leaves of params and gradients off, for `update_amax`. All others go to the optimizer, which sees
`optax.MaskedNode()` in place of scale leaves, so clipping, moments, weight decay, masks and schedules never touch them.

All histories of a model lie in one array [len, n], not in one array for each leaf: a step then launches a few kernels
for any number of layers. The n scales are in the order of the tree.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from jaxmp._src.base import ambient, tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.fp8 import amax_records, scale_equations, scale_leaves
from jaxmp._src.fp8.delayed import AmaxState, DelayedScaling
from jaxmp._src.fp8.recipe import has_state
from jaxmp._src.numerics import reductions
from jaxmp._src.numerics.float_bits import log2_of_power_of_two, power_of_two
from jaxmp._src.step.state import Fp8State, find

Recipe = Any  # DelayedScaling, a stateless recipe, or {path glob: recipe}

_LARGEST_STEP = np.float32(2.0**12)  # of a leaf that holds no log2: p + (new - p) is then close to new


class MovesScales(optax.GradientTransformation):
    """The transform of scale leaves, whose `update` has two parts.

    Attributes:
      recipe: what it was made with.
      observe: `(updates, params) -> [Observed of n leaves for each group]`.
      move: `(observed, state, params, adds=) -> (leaves, state)`, or with `adds` what a caller adds to the leaves. In
        a step it stands in a branch: it gets a few arrays, not one for each leaf.
    """

    recipe: Any
    observe: Any
    move: Any


class _Group(NamedTuple):
    """Leaves that are updated together: of one recipe, and either of gradients or of the other tensors."""

    recipe: DelayedScaling
    backward: bool
    indices: tuple[int, ...]  # among the leaves of the tree


def update_amax(recipe: Recipe) -> MovesScales:
    """An optax transform for scale leaves only: their gradients hold amaxes, their updates give the next scales.

    A gradient is what `value_and_grad` returns in the place of the leaf (`jaxmp.fp8.get_amaxes` reads it), or the amax
    itself, of the leaf's shape; 0.0 says that the tensor was not used.

    Args:
      recipe: a `DelayedScaling`, or a dict from patterns to several; the first that fits the path
        of a leaf, or of a level above it, counts.

    Returns:
      A transform with `Fp8State`. All other leaves of the tree must be `optax.MaskedNode()`.

    Raises:
      ValueError: no scale leaves; a leaf whose format is not the recipe's; a history of another length (see
        `resize_history`).

    Example:
      >>> tx = update_amax(DelayedScaling(amax_history_len=4))
      >>> params = {"fp8_lhs_e4m3_log2_scale": jnp.float32(0.0)}
      >>> updates, state = tx.update({"fp8_lhs_e4m3_log2_scale": jnp.float32(7.0)}, tx.init(params), params)
      >>> updates
      {'fp8_lhs_e4m3_log2_scale': Array(6., dtype=float32)}
    """

    def init_fn(params: PyTree) -> Fp8State:
        leaves = jax.tree.leaves(params)
        states = []
        for group in groups_of(recipe, params):
            start = [scale_leaves.scale_of(leaves[i], holds_log2=group.recipe.power_of_two)[0] for i in group.indices]
            scale = _flat(start)
            states.append(group.recipe.init(scale.shape, backward=group.backward)._replace(scale=scale))
        delayed = {k: v for k, v in scale_leaves.recipes_of(recipe).items() if has_state(v)}
        paths = [path for path, _ in tree_paths.boxed_leaves(params)[0]]
        scale_leaves.warn_of_idle("mixed_precision(recipe=)", delayed, paths, of="fp8 scale")
        return Fp8State(tuple(states), *(jnp.zeros((), jnp.float32) for _ in range(4)))

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Fp8State]:
        return move(observe(updates, params), state, params, adds=True)

    def observe(updates: PyTree, params: PyTree) -> list[amax_records.Observed]:
        pairs = list(zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True))
        return [amax_records.observe([pairs[i] for i in group.indices]) for group in groups_of(recipe, params)]

    def move(
        observed: list[amax_records.Observed], state: Any, params: PyTree, *, adds: bool
    ) -> tuple[PyTree, Fp8State]:
        groups = groups_of(recipe, params)
        leaves, treedef = jax.tree.flatten(params)
        moves: list[Any] = [None] * len(leaves)
        amaxes: list[Any] = [None] * len(leaves)
        states, saturated, unused, spoiled = [], *(jnp.zeros((), jnp.float32) for _ in range(3))
        for group, seen, old in zip(groups, observed, state.amax_states, strict=True):
            # [n]; of a record that was spoiled, the largest that is known
            amax = jnp.where(seen.is_spoiled, jnp.maximum(seen.amax, old.amax_history.max(0)), seen.amax)
            before = _flat([leaves[i] for i in group.indices])
            # Trust the leaf, not the state: the leaf may come from a checkpoint.
            old = old._replace(scale=power_of_two(before) if group.recipe.power_of_two else before)
            new = group.recipe.update(old, amax, backward=group.backward)
            limit = float(jnp.finfo(group.recipe.dtype(backward=group.backward)).max)
            saturated += jnp.sum(scale_equations.saturates(amax, old.scale, limit) & (amax < jnp.inf)).astype(
                jnp.float32
            )
            casts = not group.backward or bool(group.recipe.narrow("grad"))  # else no product reads a gradient in fp8
            unused += jnp.sum(~seen.is_used).astype(jnp.float32) if casts else 0
            spoiled += jnp.sum(seen.is_spoiled | (seen.is_used & ~seen.is_record)).astype(jnp.float32)
            if group.recipe.power_of_two:
                move = log2_of_power_of_two(new.scale) - before
            elif not adds:
                move = new.scale
            else:
                highest = np.float32(np.inf) if ambient.FP8_CALIBRATING.value else before * _LARGEST_STEP
                move = jnp.clip(new.scale, before / _LARGEST_STEP, highest) - before
                new = new._replace(scale=before + move)  # the new value of the leaf
            if adds:
                move = jnp.where(move == 0, -0.0, move)
            elif group.recipe.power_of_two:
                move = before + move  # exact, of integers
            move = reductions.computed_once(move)  # once for all, and not again in the code of each leaf
            states.append(new)
            ends = np.cumsum([leaves[i].size for i in group.indices])
            parts = zip(group.indices, jnp.split(move, ends[:-1]), jnp.split(amax, ends[:-1]), strict=True)
            for i, part, its_amax in parts:
                moves[i], amaxes[i] = part.reshape(leaves[i].shape), its_amax if casts else None
        lost = _lost_gradients(params, amaxes)
        return jax.tree.unflatten(treedef, moves), Fp8State(tuple(states), saturated, unused, lost, spoiled)

    transform = MovesScales(init_fn, update_fn)
    transform.recipe, transform.observe, transform.move = recipe, observe, move
    return transform


def is_delayed(recipe: Recipe) -> bool:
    """Whether a recipe keeps scales in the params. Other recipes need nothing from the optimizer."""
    return any(has_state(part) for part in scale_leaves.recipes_of(recipe).values())


def resize_history(opt_state: Any, recipe: DelayedScaling) -> Any:
    """`opt_state` with amax histories of the recipe's length, for a checkpoint with another length.

    Args:
      opt_state: state of `mixed_precision`, as restored.
      recipe: the recipe that training continues with.

    Returns:
      The same state, histories float32[recipe.amax_history_len, n] with the newest amaxes; empty slots hold 0. The
      replicas of pmap stay.

    Warns:
      UserWarning: a history was cut or lengthened.

    Example:
      >>> short, long = DelayedScaling(amax_history_len=2), DelayedScaling(amax_history_len=4)
      >>> state = update_amax(short).init({"fp8_lhs_e4m3_log2_scale": jnp.float32(0.0)})
      >>> import warnings
      >>> with warnings.catch_warnings(action="ignore"):
      ...     resize_history(state, long).amax_states[0].amax_history.shape
      (4, 1)
    """

    length = recipe.amax_history_len

    def resize(group: AmaxState) -> AmaxState:
        history = group.amax_history  # [..., old, n]; pmap's copies have an axis of their own before them
        newest = history[..., max(1, history.shape[-2] - length + 1) :, :]  # slot 0 is where the next one goes
        empty = [(0, 0)] * (history.ndim - 2) + [(length - newest.shape[-2], 0), (0, 0)]
        return group._replace(amax_history=jnp.pad(newest, empty))

    def visit(node: Any) -> Any:
        if not isinstance(node, Fp8State):
            return node
        return node._replace(amax_states=tuple(resize(group) for group in node.amax_states))

    groups = [group for fp8_state in find(opt_state, Fp8State) for group in fp8_state.amax_states]
    for old in sorted({group.amax_history.shape[-2] for group in groups} - {length}):
        warn(
            "history-resized",
            f"an amax history of length {old} becomes one of length {length}; the newest amaxes are kept",
        )
    return jax.tree.map(visit, opt_state, is_leaf=lambda x: isinstance(x, Fp8State))


def get_scales(params: PyTree) -> dict[str, Float[Array, "..."]]:
    """The scale of each fp8 tensor by the path of its leaf, float32, as the next step will use it.

    Args:
      params: the model's params.

    Example:
      >>> get_scales({"fp8_lhs_e4m3_log2_scale": jnp.float32(3.0)})
      {'fp8_lhs_e4m3_log2_scale': Array(8., dtype=float32)}
    """
    _check_numbers(params, "get_scales", "params")
    return {
        path: scale_leaves.scale_of(x, holds_log2=scale_leaves.format_of(path)[2])[0]
        for path, x in tree_paths.leaves_by_path(params).items()
        if scale_leaves.is_scale(path)
    }


def get_amaxes(grads: PyTree) -> dict[str, Float[Array, "..."]]:
    """The largest magnitude of each fp8 tensor in a step by the path of its scale leaf, float32; 0.0 if it had none.

    The gradient of a scale leaf of shape [...] is float32[..., 3]: the amax, its square root and a constant, in units
    so small that no norm notices them. So the step divides a common factor out, if gradients were clipped, summed or
    scaled on their way.

    Args:
      grads: gradients of `value_and_grad`.

    Raises:
      ValueError: gradients of another function, such as `jax.grad`: it adds the amaxes of a layer that is used twice.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8")
      >>> leaves = {f"fp8_{name}_log2_scale": jnp.float32(0.0) for name in ("lhs_e4m3", "rhs_e4m3", "grad_e5m2")}
      >>> params = {"w": jnp.full((16, 16), 3.0)} | leaves
      >>> def loss_fn(params, x):
      ...     w, *scales = (params[name] for name in ("w", *leaves))
      ...     scales, matmul = jaxmp.fp8.Scales(*scales), (((1,), (0,)), ((), ()))
      ...     recipe = jaxmp.fp8.DelayedScaling()
      ...     return jnp.mean(jaxmp.fp8.dot_general(x, w, matmul, recipe=recipe, scales=scales))
      >>> _, grads = jaxmp.value_and_grad(loss_fn)(params, jnp.ones((16, 16)), opt_state=tx.init(params))
      >>> halves = jax.tree.map(lambda g: g / 2, grads)
      >>> float(get_amaxes(halves)["fp8_rhs_e4m3_log2_scale"])
      3.0
    """
    _check_numbers(grads, "get_amaxes", "grads")
    records = {path: g for path, g in tree_paths.leaves_by_path(grads).items() if scale_leaves.is_scale(path)}
    for path, g in records.items():
        if jnp.shape(g)[-1:] != (amax_records.SIZE,):
            raise ValueError(
                f"grads must hold {amax_records.SIZE} numbers for each fp8 scale; got shape {jnp.shape(g)} at {path}. "
                f"Use jaxmp.value_and_grad, not jax.grad."
            )
    return {path: amax_records.read(g).amax for path, g in records.items()}


def _check_numbers(tree: PyTree, reader: str, of: str) -> None:
    for path, x in tree_paths.leaves_by_path(tree).items():
        if isinstance(x, jax.ShapeDtypeStruct) and scale_leaves.is_scale(path):
            raise TypeError(
                f"{reader} reads numbers; got a jax.ShapeDtypeStruct at {path}. Call "
                f"jax.eval_shape(jaxmp.fp8.{reader}, {of})."
            )


def check_scales(recipe: Recipe, params: PyTree, state: Any = None) -> None:
    """Raises a ValueError unless `params` are scale leaves of this recipe, and `state`, if it is given, is theirs."""
    leaves = tree_paths.boxed_leaves(params)[0]
    if not leaves:
        raise ValueError(
            'params must hold fp8 scales; got none. In linen, call jaxmp.autocast(model.init, "fp8"); in nnx, '
            "jaxmp.nnx.to_fp8(model) and pass wrt=nnx.Any(filter, jaxmp.nnx.Fp8Scale). The first and the last layer "
            'have none: filter= chooses others. Else use the policy "bf16", and '
            'jaxmp.autocast(loss_fn, "fp8", recipe=jaxmp.fp8.CurrentScaling()).'
        )
    recipes = scale_leaves.recipes_of(recipe)
    for path, _ in leaves:
        own = recipes[scale_leaves.pattern_for(recipes, path, "fp8 scale")]
        backward, dtype, holds_log2 = scale_leaves.format_of(path)
        wanted = (jnp.dtype(own.dtype(backward=backward)), own.power_of_two) if has_state(own) else None
        if wanted != (jnp.dtype(dtype), holds_log2):
            kind = "powers of two" if holds_log2 else "any scale"
            raise ValueError(
                f"the recipe must be the one of the layer; got {own!r} for {path}, which holds {kind} for "
                f"{jnp.dtype(dtype)}. Pass both the same recipe."
            )
    if state is None:
        return
    sizes = [jnp.size(x) for x in jax.tree.leaves(params)]
    groups = groups_of(recipe, params)
    expected = [sum(sizes[i] for i in group.indices) for group in groups]
    got = [jnp.size(amax_state.scale) for amax_state in state.amax_states]
    if got != expected:
        raise ValueError(
            f"opt_state must fit recipe and params; got groups of {got} fp8 scales, not {expected}. Call "
            f"tx.init(params)."
        )
    for group, amax_state in zip(groups, state.amax_states, strict=True):
        length = amax_state.amax_history.shape[0]
        if length != group.recipe.amax_history_len:
            raise ValueError(
                f"the amax history must have the length {group.recipe.amax_history_len}; got {length}. Call "
                f"jaxmp.fp8.resize_history(opt_state, recipe)."
            )


def _lost_gradients(params: PyTree, amaxes: list[Array | None]) -> Float[Array, ""]:
    """How many gradients came to a layer as zeros, of layers that ran; None: the amax of one that is not cast."""
    paths = [path for path, _ in tree_paths.boxed_leaves(params)[0]]
    cast = [(path, amax) for path, amax in zip(paths, amaxes, strict=True) if amax is not None]
    inputs = {path.rpartition("/")[0]: amax for path, amax in cast if "fp8_lhs_" in path}
    lost = jnp.zeros((), jnp.float32)
    for path, amax in cast:
        layer = path.rpartition("/")[0]
        if scale_leaves.format_of(path)[0] and layer in inputs:
            lost += jnp.sum((amax <= 0) & (inputs[layer] > 0)).astype(jnp.float32)
    return lost


def _flat(leaves: list[Array]) -> Float[Array, "n"]:
    return jnp.concatenate([jnp.ravel(jnp.asarray(x, jnp.float32)) for x in leaves])


def groups_of(recipe: Recipe, params: PyTree) -> list[_Group]:
    recipes = scale_leaves.recipes_of(recipe)
    members: dict[tuple[str, bool], list[int]] = {}
    for i, (path, _) in enumerate(tree_paths.boxed_leaves(params)[0]):
        pattern = scale_leaves.pattern_for(recipes, path, "fp8 scale")
        members.setdefault((pattern, scale_leaves.format_of(path)[0]), []).append(i)
    return [_Group(recipes[pattern], backward, tuple(indices)) for (pattern, backward), indices in members.items()]
