"""Gathers cut params inside the loss, and reduces their gradients, by the layout of `param_layout`.

Each leaf is gathered by a function with its own gradient (`jax.custom_vjp`): collectives in shard_map, sharding
constraints under plain jit.
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
from jaxmp._src.distributed import gathered_params, param_layout
from jaxmp._src.distributed.param_layout import Cut, Layout
from jaxmp._src.distributed.reduce import check_sum, predivide_or_rule
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.numerics import casting

GATHERED = "jaxmp.gathered"  # the name of gathered params
_GATHERS = ("all_gather", "all_gather_invariant", "sharding_constraint", "reshard")


def gather(
    params: PyTree, layout: Layout, *, dtype: Any = None, reduce_dtype: Any = None, predivide: float | None = None
) -> PyTree:
    """Gathers the whole params from the parts on the devices; differentiable. Call it inside the loss.

    Forward: cast, all-gather, trim. Backward: each device gets its part of the mean of the gradients over the axis,

        (sum over devices of g_d / predivide) * (predivide / devices).

    Under plain jit XLA does both; there, gradients are the mean over devices if the loss is.

    Leaves that are not cut are only cast. In shard_map their gradients are this device's own, so always call
    `reduce_gradients` after `value_and_grad`.

    With `jaxmp.value_and_grad(..., accumulate=k)` the gradients are reduced in every microbatch, and a device stores
    only its part of their sum. To reduce once for all microbatches, gather before `value_and_grad`: this moves 1 / k of
    the bytes, but each device then stores whole gradients in float32.

    Args:
      params: this device's part (in shard_map), or arrays with `layout.shardings` (under jit). For evaluation in full
        precision, pass the masters (`jaxmp.get_master_params`).
      layout: the layout of these params.
      dtype: dtype that floats are cast to *before* the all-gather; None: no cast. Integers and fp8 scales are
        not cast.
      reduce_dtype: dtype of the sum of gradients; None: the gradient's own. The result is rounded to the dtype of the
        param (`reduce_gradients` keeps float32). Only in shard_map.
      predivide: divisor of the gradients before the sum; None: 1 in float32, otherwise FSDP's rule, a power of two near
        the square root of the number of devices. Only in shard_map.

    Returns:
      The tree with whole leaves, the same on every device of the axis.

    Raises:
      ValueError: params that do not have the tree or the lengths of the layout, by path; `reduce_dtype` or `predivide`
        under jit; another dtype, or a divisor that is not positive and finite.

    Example:
      >>> import jaxmp
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((4,), ("fsdp",))
      >>> params = {"w": jnp.arange(8.0)}
      >>> layout = jaxmp.fsdp.layout_of(params, mesh, min_size=1)
      >>> params = jax.device_put(jaxmp.fsdp.pad(params, layout), layout.shardings)
      >>> def loss_fn(params, x):
      ...     return jnp.sum(gather(params, layout)["w"] * x)
      >>> step = jax.shard_map(jax.grad(loss_fn), mesh=mesh, in_specs=(layout.specs, P()), out_specs=layout.specs)
      >>> step(params, jnp.ones(8))["w"].shape
      (8,)

    References:
      Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054); Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277);
      FairScale, fully_sharded_data_parallel.py.
    """
    param_layout.check_is_layout(layout, "gather(params, layout)")
    check_sum(reduce_dtype, predivide)
    manual, devices = layout.axis_name in compat.manual_axes(), layout.mesh.shape[layout.axis_name]
    here = jax.sharding.get_abstract_mesh()
    auto_axes = {*here.axis_names} - {*here.manual_axes}  # XLA splits arrays over these
    if not manual and compat.manual_axes() and layout.axis_name not in auto_axes:
        raise ValueError(
            f"the layout's axis must be bound; got {layout.axis_name!r} in a shard_map over "
            f"{', '.join(compat.manual_axes())}. Use a layout of this mesh."
        )
    if not manual and (reduce_dtype is not None or predivide is not None):
        raise ValueError(
            f"reduce_dtype= and predivide= need jax.shard_map; got {reduce_dtype}, {predivide} where "
            f"{layout.axis_name!r} is not bound. Leave both out."
        )
    parts, what = (devices, "a device's part of a") if manual else (1, "a padded")

    def whole(path: str, x: Any, cut: Cut) -> Any:
        param_layout.check_length(path, x, cut, cut.padded // parts, what)
        if scale_leaves.is_scale(path):
            return x
        if dtype is not None and casting.is_float(x):
            x = x.astype(dtype)
        if cut.dim is None:
            return x
        dim, own_dtype = cut.dim, x.dtype
        if manual:  # all-gather; reduce-scatter of the mean
            forward = lambda x: collectives.gather_over(x, layout.axis_name, dim)  # noqa: E731
            backward = lambda g: _mean_part(g, layout, dim, reduce_dtype, predivide).astype(own_dtype)  # noqa: E731
        else:  # whole along the layout's axis, and cut again, by constraints
            uncut = PartitionSpec(*cut.spec[:dim], None, *cut.spec[dim + 1 :])
            is_explicit = AxisType.Explicit in getattr(layout.mesh, "axis_types", ())
            place = jax.sharding.reshard if is_explicit else lax.with_sharding_constraint
            forward = lambda x: place(x, NamedSharding(layout.mesh, uncut))  # noqa: E731
            backward = lambda g: place(g, NamedSharding(layout.mesh, cut.spec))  # noqa: E731
        gathered = jax.custom_vjp(forward)
        gathered.defvjp(lambda x: (forward(x), None), lambda _, g: (backward(g),))
        return checkpoint_name(param_layout.trimmed((gathered if casting.is_float(x) else forward)(x), cut), GATHERED)

    with jax.named_scope("jaxmp.gather_params"):
        gathered = param_layout.map_leaves(whole, params, layout)
    cuts = jax.tree.leaves(layout.cuts)
    if manual:
        dims = [None if cut.dim is None else (cut.dim,) for cut in cuts]
        gathered_params.note(params, layout.axis_name, cut=dims)
    else:
        padded = [(cut.dim, cut.size) if cut.padding else None for cut in cuts]
        gathered_params.note(params, layout.axis_name, padded=padded)
    return gathered


def reduce_gradients(
    grads: PyTree, layout: Layout, *, dtype: Any = jnp.float32, predivide: float | None = None
) -> PyTree:
    """This device's part of the mean of the gradients over the axis; in shard_map, after `value_and_grad`.

    It does in this step what `jax.lax.pmean` does in a data-parallel step. The shape of each leaf says what to do:

    -   the backward pass of `gather` has reduced it already: cast it;
    -   it is whole, because the param was gathered before `value_and_grad`: reduce-scatter it;
    -   the param is not cut: take the mean.

    It reduces only over the layout's axis. For other data axes use `jaxmp.reduce_gradients` with their names (not with
    `"auto"`, which would average the parts of different devices).

    Args:
      grads: the gradients from `jaxmp.value_and_grad`. Amaxes of fp8 scales are reduced already and do not change.
      layout: the layout of the params.
      dtype: dtype of the sum and of the result: float32 (cannot overflow), float16, bfloat16, or None for the
        gradients' own.
      predivide: as for `gather`.

    Returns:
      Gradients for `tx.update`: the tree of the params as on this device, padded, in `dtype`.

    Raises:
      ValueError: the layout's axis is not bound; gradients that do not fit the layout, by path; another dtype, or a
        divisor that is not positive and finite.

    Example:
      >>> import jaxmp
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((4,), ("fsdp",))
      >>> layout = jaxmp.fsdp.layout_of({"w": jnp.arange(8.0)}, mesh, min_size=1)
      >>> def step(x):  # x is the same on every device, so the mean is x
      ...     return reduce_gradients({"w": jax.lax.pcast(x, "fsdp", to="varying")}, layout)
      >>> jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=layout.specs)(jnp.arange(8.0))["w"].tolist()
      [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    param_layout.check_is_layout(layout, "reduce_gradients(grads, layout)")
    check_sum(dtype, predivide)
    collectives.named_axes(layout.axis_name)
    devices = layout.mesh.shape[layout.axis_name]

    def part(path: str, g: Any, cut: Cut) -> Any:
        if scale_leaves.is_scale(path) or not casting.is_float(g):
            return g
        if cut.dim is None:
            bound = compat.manual_axes()
            sizes = {name: size if name in bound else 1 for name, size in layout.mesh.shape.items()}
            split = shardings.devices_per_dim(cut.spec, len(cut.shape), sizes)
            expected = tuple(n // k for n, k in zip(cut.shape, split, strict=True))
            if g.shape != expected:
                raise ValueError(
                    f"an uncut leaf must have shape {expected}; got {g.shape} at {path}. Use one layout everywhere."
                )
            factor = predivide_or_rule(predivide, dtype or g.dtype, (layout.axis_name,))
            return collectives.mean_over(g, (layout.axis_name,), dtype=dtype, predivide=factor)
        if g.shape[cut.dim] == cut.padded // devices:
            axis = layout.axis_name
            if compat.is_tracked(axis) and axis not in compat.varying_axes(g):
                raise ValueError(
                    f"gradients cut over {axis!r} must not be averaged over it; got {path} averaged. Remove "
                    f"jax.lax.pmean."
                )
            return g.astype(dtype or g.dtype)
        param_layout.check_length(path, g, cut, cut.size, "a whole")
        return _mean_part(param_layout.padded(g, cut), layout, cut.dim, dtype, predivide)

    with jax.named_scope("jaxmp.reduce_gradients"):
        return param_layout.map_leaves(part, grads, layout)


def save_all_but_gathered(policy: Any = None) -> Any:
    """A policy for `jax.checkpoint` that frees gathered params and gathers them again in the backward pass.

    Args:
      policy: the policy for all other values, one of `jax.checkpoint_policies`; None: save them.

    Returns:
      A policy.

    Example:
      >>> loss_fn = jax.checkpoint(lambda w: jnp.sum(w**2), policy=save_all_but_gathered())
      >>> float(jax.grad(loss_fn)(3.0))
      6.0
    """

    return lambda primitive, *args, **params: (
        primitive.name not in _GATHERS
        and params.get("name") != GATHERED
        and (policy is None or policy(primitive, *args, **params))
    )


def _mean_part(g: Array, layout: Layout, dim: int, dtype: Any, predivide: float | None) -> Array:
    """This device's part of the mean over the layout's axis of `g`, which is whole and padded."""
    factor = predivide_or_rule(predivide, dtype or g.dtype, (layout.axis_name,))
    return collectives.mean_part_over(g, layout.axis_name, dim, dtype=dtype, predivide=factor)
