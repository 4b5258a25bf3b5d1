"""Params cut over devices, gathered where a layer needs them: FSDP, by sharding.

Each device of a mesh axis keeps one part of every large param, of its master and of its moments, and its own rows of
the batch. A step then moves two things:

    forward, backward   part --all-gather--> param          in the dtype that the model computes in, never the master
    backward            gradient --reduce-scatter--> part   the mean over devices, in a dtype of your choice

    def loss_fn(params, batch):
        params = jaxmp.fsdp.gather(params, layout)
        ...
    loss, grads = jaxmp.value_and_grad(loss_fn)(params, batch, opt_state=opt_state)
    grads = jaxmp.fsdp.reduce_gradients(grads, layout)      # in shard_map: of what is not cut, the mean; all in float32

What was gathered is freed after the layer, and gathered again in the backward pass if the loss is wrapped in
`jax.checkpoint(loss_fn, policy=jaxmp.fsdp.save_all_but_gathered())`.

`gather` serves both ways of writing such a step. Inside of `jax.shard_map` it is the two collectives above. Under plain
`jax.jit` with `NamedSharding` it says how arrays lie, and XLA inserts the same collectives; the gradients are then
summed in the dtype in which the backward pass makes them.

A sum of float16 gradients overflows where their mean does not. FSDP's rule is to divide by about the square root of the
number of devices before the sum and by the rest after it: `predivide`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxmp._src.base import compat
from jaxmp._src.devices import collectives, shardings
from jaxmp._src.distributed import cut_params, param_layout
from jaxmp._src.distributed.param_layout import Cut, Layout
from jaxmp._src.distributed.reduce import predivide_or_rule
from jaxmp._src.fp8 import scale_leaves, stored_kernels
from jaxmp._src.numerics import casting

_GATHERED = "jaxmp.gathered"
_GATHERS = ("all_gather", "all_gather_invariant", "sharding_constraint", "reshard")


def gather(
    params: PyTree, layout: Layout, *, dtype: Any = None, reduce_dtype: Any = None, predivide: float | None = None
) -> PyTree:
    """The whole params, from the part that each device holds; differentiable. Call it inside of the loss.

    Forward: cast, then all-gather, then trim. Backward: the mean of the gradients over the axis,

        (sum over devices of g_d / predivide) * (predivide / devices),

    of which each device gets its part. Under plain jit both are XLA's, and the mean is that of the loss.

    Leaves that are not cut are only cast. In shard_map their gradients are this device's own, and `reduce_gradients`
    is to be called after `value_and_grad` in any case.

    With `jaxmp.value_and_grad(..., accumulate=k)` the gradients are reduced in every microbatch, and a device holds its
    part of their sum only. To reduce once for a window, gather before `value_and_grad`: a k-th of the bytes, for the
    memory of whole gradients in float32.

    Args:
      params: what this device holds (in shard_map), or arrays that lie as `layout.shardings` says (under jit). Masters
        (`jaxmp.get_master_params`) give the full precision, for evaluation.
      layout: of these params.
      dtype: dtype to which floats are cast *before* they move; None: as they are. Kernels that stand in fp8 move as
        fp8. Integers and fp8 scales are not cast.
      reduce_dtype: dtype in which gradients are summed; None for the gradient's own. The result is rounded to the
        dtype of the param: `reduce_gradients` leaves it in float32. In shard_map only.
      predivide: what gradients are divided by before the sum; None for 1 in float32, and otherwise FSDP's rule, a power
        of two near the square root of the number of devices. In shard_map only.

    Returns:
      The tree with whole leaves, the same on every device of the axis.

    Raises:
      ValueError: params that are no tree of the layout, or lie otherwise, by path; `reduce_dtype` or `predivide` under
        jit.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((4,), ("fsdp",))
      >>> params = {"w": jnp.arange(8.0)}
      >>> layout = layout_of(params, mesh, min_size=1)
      >>> params = jax.device_put(pad(params, layout), layout.shardings)
      >>> def loss_fn(params, x):
      ...     return jnp.sum(gather(params, layout)["w"] * x)
      >>> step = jax.shard_map(jax.grad(loss_fn), mesh=mesh, in_specs=(layout.specs, P()), out_specs=layout.specs)
      >>> step(params, jnp.ones(8))["w"].shape
      (8,)

    References:
      Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054); Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277);
      FairScale, fully_sharded_data_parallel.py.
    """
    manual, devices = layout.axis_name in compat.manual_axes(), layout.mesh.shape[layout.axis_name]
    if not manual and compat.manual_axes() and layout.axis_name not in _auto_axes():
        raise ValueError(
            f"the axis that params are cut over must be bound where they are gathered; got {layout.axis_name!r} inside "
            f"of a shard_map over {', '.join(compat.manual_axes())}. Make the layout with a mesh of these names."
        )
    if not manual and (reduce_dtype is not None or predivide is not None):
        raise ValueError(
            f"under plain jit XLA reduces the gradients, in their own dtype; got reduce_dtype={reduce_dtype}, "
            f"predivide={predivide} where {layout.axis_name!r} is not bound. Use jax.shard_map over the mesh, or leave "
            f"them out."
        )
    if manual:
        cut_params.note(params, layout.axis_name)
    carriers = stored_kernels.marked_kernels(params)
    parts, what = (devices, "a device's part of a") if manual else (1, "a padded")

    def whole(path: str, x: Any, cut: Cut) -> Any:
        param_layout.check_length(path, x, cut, cut.padded // parts, what)
        if scale_leaves.is_scale(path):
            return x
        if dtype is not None and casting.is_float(x) and path not in carriers:
            x = x.astype(dtype)
        if cut.dim is None:
            return x
        if manual:
            forward, backward = _collectives(x, layout, cut, reduce_dtype, predivide)
        else:
            forward, backward = _placements(layout, cut)
        moved = _moved(x, forward, backward, jnp.float8_e4m3fn if path in carriers else x.dtype)
        return checkpoint_name(param_layout.trimmed(moved, cut), _GATHERED)

    with jax.named_scope("jaxmp.gather_params"):
        return param_layout.map_leaves(whole, params, layout)


def reduce_gradients(
    grads: PyTree, layout: Layout, *, dtype: Any = jnp.float32, predivide: float | None = None
) -> PyTree:
    """This device's part of the mean of the gradients over the axis; in shard_map, after `value_and_grad`.

    Every leaf is brought to the same end, told apart by its shape: one that the backward pass of `gather` has reduced
    is only cast; a whole one, of params that were gathered before `value_and_grad`, is reduced and scattered; that of a
    param that is not cut is averaged. So it stands where `jax.lax.pmean` stands in a data-parallel step. It reduces
    over this axis only: other data axes are `jaxmp.reduce_gradients`'s, by name (not `"auto"`, which would average the
    parts of different devices).

    Args:
      grads: as `jaxmp.value_and_grad` returns them. The amaxes of fp8 scales are common already and pass through.
      layout: of the params.
      dtype: dtype of the sum and of the result: float32 (cannot overflow), float16, bfloat16, or None for the
        gradients' own.
      predivide: as for `gather`.

    Returns:
      The tree of the params as devices hold them, padded, in `dtype`: gradients for `tx.update`.

    Raises:
      ValueError: the layout's axis is not bound; gradients that do not fit the layout, by path.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((4,), ("fsdp",))
      >>> layout = layout_of({"w": jnp.arange(8.0)}, mesh, min_size=1)
      >>> def step(x):  # the same on every device: its mean is itself
      ...     return reduce_gradients({"w": jax.lax.pcast(x, "fsdp", to="varying")}, layout)
      >>> jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=layout.specs)(jnp.arange(8.0))["w"].tolist()
      [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    collectives.named_axes(layout.axis_name)
    devices = layout.mesh.shape[layout.axis_name]

    def part(path: str, g: Any, cut: Cut) -> Any:
        if scale_leaves.is_scale(path) or not casting.is_float(g):
            return g
        if cut.dim is None:
            _check_whole(path, g, layout, cut)
            factor = predivide_or_rule(predivide, dtype or g.dtype, (layout.axis_name,))
            return collectives.mean_over(g, (layout.axis_name,), dtype=dtype, predivide=factor)
        if g.shape[cut.dim] == cut.padded // devices:
            _check_own(path, g, layout)
            return g.astype(dtype or g.dtype)
        param_layout.check_length(path, g, cut, cut.size, "a whole")
        return _mean_part(param_layout.padded(g, cut), layout, cut.dim, dtype, predivide)

    with jax.named_scope("jaxmp.reduce_gradients"):
        return param_layout.map_leaves(part, grads, layout)


def save_all_but_gathered(policy: Any = None) -> Any:
    """A policy for `jax.checkpoint`: gathered params are freed, and gathered again in the backward pass.

    Args:
      policy: what is said of everything else, one of `jax.checkpoint_policies`; None saves it.

    Returns:
      A policy.

    Example:
      >>> loss_fn = jax.checkpoint(lambda w: jnp.sum(w**2), policy=save_all_but_gathered())
      >>> float(jax.grad(loss_fn)(3.0))
      6.0
    """

    def saveable(primitive: Any, *args: Any, **params: Any) -> Any:
        if primitive.name in _GATHERS or params.get("name") == _GATHERED:
            return False
        return True if policy is None else policy(primitive, *args, **params)

    return saveable


def _auto_axes() -> tuple[str, ...]:
    """Axes of the mesh at hand over which XLA spreads arrays, also inside of a shard_map over others."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)


def _check_whole(path: str, g: Array, layout: Layout, cut: Cut) -> None:
    """Raises a ValueError for a part of a leaf that the layout does not cut."""
    bound = compat.manual_axes()
    sizes = {name: size if name in bound else 1 for name, size in layout.mesh.shape.items()}
    devices = shardings.ways(cut.spec, len(cut.shape), sizes)
    expected = tuple(n // k for n, k in zip(cut.shape, devices, strict=True))
    if g.shape != expected:
        raise ValueError(
            f"a leaf that is not cut must have shape {expected} with this layout; got {g.shape} at {path}. All calls "
            f"of a step take one layout, with the same min_size."
        )


def _check_own(path: str, g: Array, layout: Layout) -> None:
    """Raises a ValueError for a part that was averaged over devices, where jax keeps track of it."""
    axis = layout.axis_name
    if compat.is_tracked(axis) and axis not in compat.varying_axes(g):
        raise ValueError(
            f"gradients of params that are cut over {axis!r} must not be averaged over it: the parts of different "
            f"devices are different params; got a common one at {path}. Leave out jax.lax.pmean over {axis!r}."
        )


def _moved(x: Array, forward: Any, backward: Any, dtype: Any) -> Array:
    """`forward(x)`, which moves `x` in `dtype` (which holds its values exactly), with `backward` for its gradient."""
    if not casting.is_float(x):
        return forward(x)

    def there(x: Array) -> Array:
        return forward(x.astype(dtype)).astype(x.dtype)

    move = jax.custom_vjp(there)
    move.defvjp(lambda x: (there(x), None), lambda _, g: (backward(g),))
    return move(x)


def _collectives(x: Array, layout: Layout, cut: Cut, reduce_dtype: Any, predivide: float | None) -> tuple[Any, Any]:
    dtype, dim = x.dtype, cut.dim
    assert dim is not None

    def backward(g: Array) -> Array:
        return _mean_part(g, layout, dim, reduce_dtype, predivide).astype(dtype)

    return lambda x: collectives.gather_over(x, layout.axis_name, dim), backward


def _placements(layout: Layout, cut: Cut) -> tuple[Any, Any]:
    assert cut.dim is not None
    whole = PartitionSpec(*cut.spec[: cut.dim], None, *cut.spec[cut.dim + 1 :])
    is_explicit = AxisType.Explicit in getattr(layout.mesh, "axis_types", ())
    place = jax.sharding.reshard if is_explicit else lax.with_sharding_constraint
    return (
        lambda x: place(x, NamedSharding(layout.mesh, whole)),
        lambda g: place(g, NamedSharding(layout.mesh, cut.spec)),
    )


def _mean_part(g: Array, layout: Layout, dim: int, dtype: Any, predivide: float | None) -> Array:
    """This device's part of the mean of `g`, whole and padded, over the layout's axis."""
    factor = predivide_or_rule(predivide, dtype or g.dtype, (layout.axis_name,))
    return collectives.mean_part_over(g, layout.axis_name, dim, dtype=dtype, predivide=factor)
