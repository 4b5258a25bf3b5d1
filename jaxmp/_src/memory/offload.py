"""Puts optimizer state into host memory, and wraps an optimizer so that its update streams this state.

The update runs in `programs.windows`, which copies a few leaves at a time to the device and back. It is inside a
`while_loop` that runs once, or not at all if the step is skipped.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import PyTree

from jaxmp._src.devices import host_memory
from jaxmp._src.programs import windows
from jaxmp._src.step import inner_update, optimizers, state as states
from jaxmp._src.step.optimizers import as_transformation
from jaxmp._src.step.state import StepState

_PARTS = ("masters", "moments")


def put(opt_state: PyTree, *, what: Collection[str] = _PARTS, min_bytes: int = 0) -> PyTree:
    """Moves the large arrays of an optimizer's state to pinned host memory.

    Scalars (counts, the loss scale) stay on the device, and so do the states around the optimizer: amax histories of
    fp8, the state of `unscale_and_skip`. `put` is idempotent: call it again after you restored a checkpoint.

    Args:
      opt_state: the state from `tx.init`, or a tree that contains it: `(params, opt_state)`, a TrainState. Prefer such
        a tree: arrays in host memory are always committed to their device, and on a single device `put` also commits
        the other arrays of the tree. Uncommitted arrays would make jit compile the second step again.
        Inside jit (`jax.jit(lambda p: put(tx.init(p)))`) the whole state is never on the device at once.
      what: "masters": the float32 masters of 16-bit params, or their remainders. "moments": the arrays of the inner
        optimizer.
      min_bytes: smaller arrays stay on the device. A copy takes some microseconds even if it is small.

    Returns:
      The same tree, with the same shardings. Arrays that do not move keep their buffers.

    Raises:
      ValueError: another name in `what`; a device without pinned host memory.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(stream_updates(optax.adamw(1e-3)), "bf16")
      >>> opt_state = put(tx.init({"w": jnp.ones(4)}))
      >>> jaxmp.get_master_params(opt_state, {"w": jnp.ones(4, jnp.bfloat16)})["w"].sharding.memory_kind
      'pinned_host'

    References:
      Ren et al. 2021, "ZeRO-Offload" (arXiv 2101.06840); FairScale's `FullyShardedDataParallel(move_params_to_cpu=)`.
    """
    unknown = sorted(set([what] if isinstance(what, str) else what) - set(_PARTS))
    if isinstance(what, str) or unknown:
        raise ValueError(
            f'what must be a collection of "masters" and "moments"; got {what!r}. Move other trees by '
            f"jaxmp.offload.to_host."
        )

    def moved(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.ndim == 0 or host_memory.is_on_host(x):
            return x
        is_large = not jnp.issubdtype(x.dtype, jax.dtypes.extended) and x.size * x.dtype.itemsize >= min_bytes
        return host_memory.to_host(x) if is_large else x

    def move_state(state: StepState) -> StepState:
        held = jax.tree.map(moved, state.master_params) if "masters" in what else state.master_params
        inner = jax.tree.map(moved, state.optimizer_state) if "moments" in what else state.optimizer_state
        return state._replace(master_params=held, optimizer_state=inner)

    if states.with_masters(opt_state):
        return _committed(states.map_steps(move_state, opt_state))
    return _committed(jax.tree.map(moved, opt_state)) if "moments" in what else opt_state


def to_host(tree: PyTree) -> PyTree:
    """Moves every array of a tree to pinned host memory, with the same sharding; also works inside jit.

    `stream_updates` streams gradients in host memory like the state. (The step also copies them in once before that, to
    check whether they are finite.) So gradients that wait for other microbatches need no device memory.

    Args:
      tree: pytree of arrays.

    Raises:
      ValueError: a device without pinned host memory.

    Example:
      >>> to_host({"w": jnp.ones(2)})["w"].sharding.memory_kind
      'pinned_host'
    """
    return jax.tree.map(lambda x: x if host_memory.is_on_host(x) else host_memory.to_host(jnp.asarray(x)), tree)


def stream_updates(
    inner: optax.GradientTransformation, *, window_bytes: int = 2**28
) -> optax.GradientTransformationExtraArgs:
    """Wraps `inner` so that its update copies state and masters from host memory to the device and back.

    The update of `inner` runs on the device, one window of leaves after the other. Each array in host memory is copied
    in once and out once, or not at all if the step is skipped. Arrays on the device stay there, so without `put` this
    wrapper changes nothing.

    Args:
      inner: any optax transform. If it updates each leaf independently (adam, lion, sgd, also after clipping of the
        gradients), the device has a few leaves at a time. A result that needs all leaves (a norm over all updates)
        brings all of them to the device.
      window_bytes: bytes to copy in for one window, counted in whole arrays, sharded or not. Two windows run at a time,
        each with its inputs and its results: about 4 x `window_bytes` of device memory. Copies are slow if this is
        below some tens of MiB. A leaf is never cut: one that is larger than a window has its own, so keep the layers of
        `stream_layers` in several stacks.

    Returns:
      A transform with the state of `inner`. Inside `jaxmp.mixed_precision` (or `unscale_and_skip`) it works with
      `jaxmp.apply_gradients`; alone, or in an `optax.chain`, with `update`.

    Raises:
      TypeError: `inner` is not an optax transform.
      ValueError: `window_bytes` is not a positive int; `inner` is one of jaxmp's fused optimizers, whose kernels can
        only use device memory. At the step: `tx.update` under `mixed_precision` with state in host memory.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(stream_updates(optax.sgd(0.5, momentum=0.9)), "bf16")
      >>> opt_state, params = put(tx.init(jnp.ones(2))), jnp.ones(2, jnp.bfloat16)
      >>> params, opt_state = jaxmp.apply_gradients(tx, jnp.ones(2, jnp.bfloat16), opt_state, params)
      >>> params, {x.sharding.memory_kind for x in jax.tree.leaves(opt_state.optimizer_state)}
      (Array([0.5, 0.5], dtype=bfloat16), {'pinned_host'})

    References:
      Ren et al. 2021, "ZeRO-Offload" (arXiv 2101.06840).
    """
    if isinstance(window_bytes, bool) or not isinstance(window_bytes, int | np.integer) or window_bytes <= 0:
        raise ValueError(f"window_bytes must be a positive int, the bytes of one window; got {window_bytes!r}")
    plain: Any = as_transformation(inner)
    if isinstance(plain, optimizers.InPlace):  # its kernels use device memory only
        raise ValueError(
            "inner must be an optax optimizer; got one that writes in place. Use optax.adamw(...) for "
            "jaxmp.fused_adamw(...)."
        )

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any) -> tuple[PyTree, Any]:
        if host_memory.first_on_host((updates, state, params)) is None:
            return inner_update.update(plain, updates, state, params, extra_args)
        if "grads_finite" in extra_args:
            host_memory.check_on_device((state, params))

        def update(updates: PyTree, state: Any, params: PyTree) -> tuple[list[Any], tuple[Any, Any]]:
            updates, state_here, params = host_memory.to_device((updates, state, params))
            new_updates, new = inner_update.update(plain, updates, state_here, params, extra_args)
            leaves, treedef = jax.tree.flatten(new_updates)
            return leaves, (jax.tree.map(host_memory.as_before, new, state), _Static(treedef))

        leaves, (new, static) = windows.run(update, updates, state, params, window_bytes=int(window_bytes))
        return jax.tree.unflatten(static.value, leaves), new

    transform = optimizers.Streaming(plain.init, update_fn)
    transform.plain, transform.window_bytes = plain, int(window_bytes)
    return transform


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """A static value inside a tree of arrays."""

    value: Any


def _committed(tree: PyTree) -> PyTree:
    """`tree` with all arrays committed to their device, if all are on one device; else `tree`."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if any(isinstance(x, Tracer) for x in leaves):
        return tree
    if len(set().union(*(x.sharding.device_set for x in leaves))) != 1:
        return tree
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding) if isinstance(x, jax.Array) else x, tree)
