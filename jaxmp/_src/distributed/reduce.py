"""Reduces gradients over devices, as an optax transform.

A data-parallel step sums the gradients of its devices. In float16 the sum of finite values can overflow (four times
32768 is inf). In float32 the sum does not overflow, but moves twice the bytes. FairScale and FSDP divide by about the
square root of the number of devices before the sum and by the rest after it, which avoids both overflow and underflow
in float16.

With `wire_dtype`, devices send gradients in 8 bits, and still sum them in float32. Each device keeps its rounding error
and adds it to the gradients of the next step (error feedback), so the errors do not accumulate.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, PyTree

from jaxmp._src.base import compat, tree_paths
from jaxmp._src.devices import collectives
from jaxmp._src.devices.per_device import PerDevice
from jaxmp._src.distributed import gathered_params
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.numerics import casting, few_bytes

OF_ALL = -1  # in place of a device


class UnsentState(NamedTuple):
    """State of `reduce_gradients(wire_dtype=)`.

    Attributes:
      unsent: for each device the part of its gradients that was not sent yet: float32[devices, *shape of the param],
        and `optax.MaskedNode()` for small params.
      unsent_of: int32[devices], the device that each part belongs to. A part that comes to another device (a state that
        was unreplicated and replicated) is dropped there, so that it is never counted twice. -1: it belongs to every
        device, as the only device's, of which the mean over more devices is the part itself.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.reduce_gradients("data", wire_dtype=jnp.int8, devices=8)
      >>> state = tx.init({"w": jnp.ones((128, 256)), "b": jnp.ones(256)})
      >>> state.unsent.by_axis["data"]["w"].shape
      (8, 128, 256)
    """

    unsent: PerDevice
    unsent_of: PerDevice


class ReducedState(optax.EmptyState):
    """The state of `reduce_gradients`: none, in a type of its own, since this transform may stand before the scale."""


def reduce_gradients(
    axis_name: collectives.AxisName = "auto",
    dtype: Any = jnp.float32,
    *,
    predivide: float | None = None,
    wire_dtype: Any = None,
    devices: int = 1,
    min_size: int = 2**14,
) -> optax.GradientTransformation:
    """A transform that replaces gradients by their mean over `axis_name`; chain it *before* `mixed_precision`.

        g <- (sum over devices of g_d / predivide) * (predivide / devices)

    With `wire_dtype`, gradients move in few bytes, with error feedback; then it stands *inside* `mixed_precision`,
    first in the chain: `mixed_precision(optax.chain(reduce_gradients("data", wire_dtype=jnp.int8, devices=8),
    optax.adamw(1e-3)), policy)`. There, overflow is looked for in the gradients as each device computed them, a skipped
    step does not change what is unsent, and a checkpoint of the optimizer's state holds it. With e the unsent part:

        v_d = g_d + e_d,   q_d = round_1(v_d),   m = mean of q_d in float32,   g <- round_2(m)
        e_d <- v_d - q_d (+ devices (m - g), on the device that averaged this part)

    The first rounding is for an all-to-all, the second for an all-gather. Blocks of 128 neighbours share a scale, a
    power of two. int8 moves 2.02 bytes for each param, where an all-reduce moves 8 in float32 and 4 in 16 bits.

    Args:
      axis_name: `"auto"` (every axis bound by pmap or shard_map; under plain jit XLA reduces, and this only casts), or
        names. With `wire_dtype` one name.
      dtype: dtype of the sum and of the result: float32 (default, cannot overflow), float16, bfloat16, or None for the
        gradients' own, which moves half the bytes if they are in 16 bits. With `wire_dtype` float32.
      predivide: divisor of the gradients before the sum; None: 1 in float32, otherwise the power of two next to the
        square root of the number of devices (FSDP's rule). On 4 devices this doubles the range of a float16 sum, no
        more: 4 * 32768 / 2 still overflows. With the number of devices as the divisor the sum never overflows, but
        small gradients underflow. With `wire_dtype` the sum cannot overflow: None.
      wire_dtype: None: gradients move in `dtype`. int8, float8_e4m3fn or float8_e5m2: they move in 8 bits. A pair is
        for the two hops, as `(jnp.bfloat16, jnp.int8)`; a hop may be in bfloat16 or float32 too.
      devices: with `wire_dtype`, the number of devices of the axis where `init` is called on whole params:
        `mesh.shape["data"]` for `jax.shard_map`. 1 under `jax.pmap`, where a copy of the state goes to each device.
      min_size: with `wire_dtype`, params with fewer elements are averaged in float32, and need no state.

    Returns:
      An optax transform; without `wire_dtype` it has no state, else an `UnsentState`: four bytes per param on each
      device. `jaxmp.sharding_of` gives its specs.

    Raises:
      TypeError: another `wire_dtype`.
      ValueError: an axis that is not bound; gradients of params that `jaxmp.fsdp` cuts over one of the axes. With
        `wire_dtype`: more than one axis, or another `dtype` or `predivide`; at `update`, under plain jit, outside of
        `mixed_precision`, or a state that was made for another number of devices or for other params (by path).

    Example:
      >>> tx = reduce_gradients(dtype=jnp.float32)
      >>> grads, _ = tx.update({"w": jnp.ones(1, jnp.float16)}, tx.init({}))
      >>> grads
      {'w': Array([1.], dtype=float32)}

    References:
      FairScale, fairscale/nn/data_parallel/fully_sharded_data_parallel.py; torch FSDP's gradient_predivide_factor. For
      `wire_dtype`: Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, "Error Feedback
      Fixes SignSGD" (arXiv 1901.09847); Wang et al. 2023, "ZeRO++" (arXiv 2306.10209); Li et al. 2024, "Flash
      Communication" (arXiv 2412.04964).
    """
    if wire_dtype is not None:
        hops = _hops_of(wire_dtype)
        return _in_few_bytes(_one_axis(axis_name, dtype, predivide), hops, devices, min_size)

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, ReducedState]:
        del params
        axes = collectives.bound_axes(axis_name)
        gathered_params.check_mean(updates, axes)
        factor = predivide_or_rule(predivide, dtype, axes)
        # value_and_grad has already reduced the amaxes of fp8 scales, with MAX.
        amaxes, grads = scale_leaves.partition(updates)
        return scale_leaves.merge(amaxes, collectives.mean_over(grads, axes, dtype=dtype, predivide=factor)), state

    return optax.GradientTransformation(lambda params: ReducedState(), update_fn)


def _in_few_bytes(
    axis: str, hops: tuple[Any, Any], devices: int, min_size: int
) -> optax.GradientTransformationExtraArgs:
    """The transform of `reduce_gradients(wire_dtype=)`."""

    def init_fn(params: PyTree) -> UnsentState:
        def unsent(path: str, p: Any) -> Any:
            if not casting.is_float(p) or p.size < min_size or scale_leaves.is_scale(path):
                return optax.MaskedNode()
            return jnp.zeros((devices, *p.shape), jnp.float32)

        owners = jnp.arange(devices, dtype=jnp.int32)
        return UnsentState(PerDevice({axis: tree_paths.map_with_path(unsent, params)}), PerDevice({axis: owners}))

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        grads_finite: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, UnsentState]:
        del params, extra_args
        _check_place(axis, grads_finite)
        gathered_params.check_mean(updates, (axis,))
        here = lax.axis_index(axis)
        (unsent,), (owner,) = state.unsent.by_axis.values(), state.unsent_of.by_axis.values()
        is_own = jnp.all((owner == here) | (owner == OF_ALL))

        def reduce(path: str, g: Any, e: Any) -> tuple[Any, Any]:
            if isinstance(e, optax.MaskedNode):
                return (g if scale_leaves.is_scale(path) else collectives.mean_over(g, (axis,))), e
            _check_unsent(path, g, e, axis)
            e = jnp.where(is_own, e, 0.0)
            return collectives.mean_in_few_bytes(g.astype(jnp.float32), e, axis, *hops)

        leaves, treedef = jax.tree_util.tree_flatten_with_path(updates)
        of_leaves = treedef.flatten_up_to(unsent)
        with jax.named_scope("jaxmp.reduce_gradients"):
            pairs = [reduce(tree_paths.path_str(path), g, e) for (path, g), e in zip(leaves, of_leaves, strict=True)]
        grads, unsent = (treedef.unflatten(found) for found in zip(*pairs, strict=True)) if pairs else (updates, unsent)
        owners = jnp.full_like(owner, OF_ALL if lax.axis_size(axis) == 1 else here)
        return grads, UnsentState(PerDevice({axis: unsent}), PerDevice({axis: owners}))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _hops_of(wire_dtype: Any) -> tuple[Any, Any]:
    """The dtypes of the two hops; a TypeError for others than those of `few_bytes`."""
    pair = tuple(wire_dtype) if isinstance(wire_dtype, Sequence) and not isinstance(wire_dtype, str) else (wire_dtype,)
    try:
        hops = [jnp.dtype(given) for given in pair]
    except TypeError:
        hops = []
    known = [jnp.dtype(dtype) for dtype in few_bytes.DTYPES]
    if len(hops) not in (1, 2) or any(hop not in known for hop in hops):
        raise TypeError(
            f"wire_dtype must be one of {', '.join(dtype.name for dtype in known)}, or a pair of them for the two "
            f"hops; got {wire_dtype!r}"
        )
    return hops[0], hops[-1]


def _one_axis(axis_name: collectives.AxisName, dtype: Any, predivide: float | None) -> str:
    """The name of the one axis; a ValueError for arguments that do not go with `wire_dtype`."""
    names = (axis_name,) if isinstance(axis_name, str) or axis_name is None else tuple(axis_name)
    if len(names) != 1 or names[0] in ("auto", None):
        raise ValueError(
            f'wire_dtype= needs one named axis; got axis_name={axis_name!r}. Write reduce_gradients("data", '
            f"wire_dtype=...)."
        )
    if dtype is None or jnp.dtype(dtype) != jnp.float32 or predivide is not None:
        raise ValueError(
            f"dtype= and predivide= must not stand beside wire_dtype=; got {dtype}, {predivide}. Leave both out."
        )
    return str(names[0])


def _check_place(axis: str, grads_finite: Any) -> None:
    """Raises a ValueError if the axis is not bound, or if no transform around this one decides about the step."""
    if axis not in compat.manual_axes():
        raise ValueError(
            f"reduce_gradients(wire_dtype=) needs its axis bound; got {axis!r}, bound axes: "
            f"{', '.join(compat.manual_axes()) or 'none'}. Under plain jit leave it out."
        )
    if grads_finite is None:  # mixed_precision finds an overflow before this rounds it, and keeps the state of a skip
        raise ValueError(
            "reduce_gradients(wire_dtype=) must stand in mixed_precision(optax.chain(reduce_gradients(...), inner), "
            "policy); got a call outside."
        )


def _check_unsent(path: str, g: Array, e: Array, axis: str) -> None:
    """Raises a ValueError unless `e` is this device's unsent part of the gradient `g`."""
    if e.shape != (1, *g.shape):
        raise ValueError(
            f"unsent gradients must have shape {(1, *g.shape)} on each device; got {e.shape} at {path}. Set devices= "
            f"(1 under pmap), and place the state by jaxmp.sharding_of."
        )


def predivide_factor(axes: tuple[str, ...]) -> float:
    """The divisor of FSDP before a sum over `axes`: a power of two near the square root of the device count."""
    devices = math.prod(map(lax.axis_size, axes))
    factor = 1
    while devices % factor == 0 and devices / factor > factor:
        factor *= 2
    return float(factor)


def predivide_or_rule(predivide: float | None, dtype: Any, axes: tuple[str, ...]) -> float:
    """`predivide`; if it is None, 1 for sums in float32 and FSDP's rule in 16 bits (or for `dtype=None`)."""
    if predivide is not None:
        return predivide
    in_float32 = dtype is not None and jnp.dtype(dtype).itemsize >= 4
    return 1.0 if in_float32 else predivide_factor(axes)


def check_branches(optimizer_state: Any) -> None:
    """Raises for `reduce_gradients` inside a transform that runs it in a branch; where axes are bound.

    Before the branch the gradients of a device are its own: what MultiSteps adds up would differ between devices, and
    what apply_if_finite decides too. In pmap, and where jax tracks no axes, MultiSteps decides the same everywhere.
    """
    tracked = any(map(compat.is_tracked, compat.manual_axes()))
    for state in tree_paths.nodes_of(optimizer_state, *_BRANCHES):
        in_few_bytes = bool(tree_paths.nodes_of(state, UnsentState))
        is_multi = isinstance(state, optax.MultiStepsState)
        by_device = isinstance(state, optax.ApplyIfFiniteState) or jax.tree.leaves(getattr(state, "skip_state", ()))
        reduces = bool(tree_paths.nodes_of(state, UnsentState, ReducedState))
        if reduces and (tracked or by_device or (in_few_bytes and is_multi)):
            name = next(name for kind, name in _BRANCHES.items() if isinstance(state, kind))
            raise ValueError(
                f"reduce_gradients must come before {name}; got it inside. Pass it as before= of jaxmp.mixed_precision."
            )


_BRANCHES = {
    optax.MultiStepsState: "optax.MultiSteps",
    optax.ApplyIfFiniteState: "optax.apply_if_finite",
    optax.ConditionallyTransformState: "optax.conditionally_transform",
}
