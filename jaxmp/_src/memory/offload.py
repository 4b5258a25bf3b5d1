"""Optimizer state, and layers, in the memory of the host.

With Adam a 16-bit parameter has 12 bytes of float32 beside it, master and moments, that nobody reads between two
updates. They can lie in the host's memory (pinned, so that the device copies from it on its own), and pass through the
device a few leaves at a time while they are updated:

    host:     master, moments ──copy in──> device: inner update, cast to the model's params ──copy out──> host

Where an array lies is part of its type in JAX, so nothing has to be told what is offloaded. `put` places the state,
`stream_updates` round the optimizer makes the update bring each leaf to the device and put it back where it came from,
and the state stays the plain arrays it was: the same tree, dtypes and shardings, one memory kind further away.

The update is a loop of no turn or one: a step that is skipped copies nothing, and leaves the host's arrays alone. In
the loop the leaves go in windows (see `_windows`), so that the device never holds more than a few of them. The
arithmetic is that of the optimizer on the device, which does it: FairScale and DeepSpeed's ZeRO-Offload run Adam on the
CPU instead, moving gradients and 16-bit params (4 bytes per parameter) rather than the state (24).

`stream_layers` does the same to the layers of a model, forward and backward.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from jaxmp._src.devices import host_memory
from jaxmp._src.programs import windows
from jaxmp._src.step import in_place, write_masters
from jaxmp._src.step.in_place import as_transformation
from jaxmp._src.step.states import MasterState

_PARTS = ("masters", "moments")


def put(opt_state: PyTree, *, what: Collection[str] = _PARTS, min_bytes: int = 0) -> PyTree:
    """The state of an optimizer, with its large parts in pinned host memory.

    Scalars stay on the device (counts, the loss scale), and so does all that stands round the optimizer: amax
    histories of fp8, the state of `unscale_and_skip`. It is idempotent: after a checkpoint was restored, call it again.

    Args:
      opt_state: as `tx.init` made it, or a tree that has it inside: `(params, opt_state)`, a TrainState. Such a tree
        is better: arrays in host memory are always committed to their device, and on a single device `put` commits all
        others of the tree with them. Those that are left uncommitted make jit compile the second step once more.
        Inside jit (`jax.jit(lambda p: put(tx.init(p)))`) the state need never be on the device as a whole.
      what: "masters": of 16-bit params, or what these are short of them. "moments": the arrays of the inner optimizer.
      min_bytes: smaller arrays stay on the device. A copy takes some microseconds, whatever its size.

    Returns:
      The same tree, with the same shardings. Arrays that are not moved keep their buffers.

    Raises:
      ValueError: `what` names something else; a device without pinned host memory.

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
            f'what must be a collection of "masters" and "moments"; got {what!r}. Gradients and params are no part of '
            f"the state: move them with jaxmp.offload.to_host."
        )

    def move(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: host_memory.to_host(x) if _is_large(x, min_bytes) else x, tree)

    def move_state(node: Any) -> Any:
        if not isinstance(node, MasterState):
            return node
        masters = move(node.master_params) if "masters" in what else node.master_params
        inner = move(node.master_inner) if "moments" in what else node.master_inner
        return MasterState(masters, inner)

    def is_master_state(x: Any) -> bool:
        return isinstance(x, MasterState)

    if any(is_master_state(x) for x in jax.tree.leaves(opt_state, is_leaf=is_master_state)):
        return _committed(jax.tree.map(move_state, opt_state, is_leaf=is_master_state))
    return _committed(move(opt_state)) if "moments" in what else opt_state


def to_host(tree: PyTree) -> PyTree:
    """Every array of a tree in pinned host memory, sharded as it was; inside of jit too.

    Gradients that lie there are streamed by `stream_updates` as the state is (and copied in once more before, where
    the step looks whether they are finite). Gradients that wait for other microbatches take no device memory so.

    Raises:
      ValueError: a device without pinned host memory.

    Example:
      >>> to_host({"w": jnp.ones(2)})["w"].sharding.memory_kind
      'pinned_host'
    """
    return jax.tree.map(lambda x: x if host_memory.is_on_host(x) else host_memory.to_host(jnp.asarray(x)), tree)


def to_device(tree: PyTree) -> PyTree:
    """Every array of a tree in device memory; inside of jit too.

    Example:
      >>> to_device(to_host({"w": jnp.ones(2)}))["w"].sharding.memory_kind
      'device'
    """
    return host_memory.to_device(tree)


def stream_updates(
    inner: optax.GradientTransformation, *, window_bytes: int = 2**28, split_leaves: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Wraps `inner` so that state and masters in host memory pass through the device while they are updated.

    The update of `inner` runs on the device as ever, a window of leaves after the other; each array that lies in host
    memory is copied in once and out once, and nothing at all if the step is skipped. What lies on the device stays
    there, so that without `put` this changes nothing.

    Args:
      inner: any optax transform. Leaves that it updates apart (adam, lion, sgd, with clipping of the gradients before)
        are on the device apart; see `_windows` for what couples them.
      window_bytes: how much is copied in for one window, in bytes of whole arrays, however they are sharded. Two
        windows are under way at a time, each with what comes in and what goes out: about 4 x `window_bytes` of device
        memory. Below some tens of MiB copies get slow.
      split_leaves: whether leaves that are larger than a window go through it a piece of their leading axis at a time,
        as the stacked params of `stream_layers` need it. Only where the update is elementwise in them (adam, lion, sgd;
        not lamb, whose norm is over the leaf), and only under `apply_gradients`. False, as a leading axis that is
        sharded over a mesh must not be cut: XLA would gather it.

    Returns:
      A transform with the state of `inner`. Inside `jaxmp.mixed_precision` (or `unscale_and_skip`) it works with
      `jaxmp.apply_gradients`; alone, or in an `optax.chain`, with `update`.

    Raises:
      TypeError: `inner` is no optax transform.
      ValueError: `window_bytes` that is no positive int; `inner` is one of jaxmp's fused optimizers, whose kernels
        read and write the device's memory. At the step: `tx.update` under `mixed_precision` with state in host memory;
        masters in host memory of kernels that are stored in fp8.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(stream_updates(optax.sgd(0.5, momentum=0.9)), "bf16")
      >>> params = jnp.ones(2, jnp.bfloat16)
      >>> opt_state = put(tx.init(params))
      >>> params, opt_state = jaxmp.apply_gradients(tx, jnp.ones(2, jnp.bfloat16), opt_state, params)
      >>> params, {x.sharding.memory_kind for x in jax.tree.leaves(opt_state.guarded)}
      (Array([0.5, 0.5], dtype=bfloat16), {'pinned_host'})

    References:
      Ren et al. 2021, "ZeRO-Offload" (arXiv 2101.06840).
    """
    if isinstance(window_bytes, bool) or not isinstance(window_bytes, int | np.integer) or window_bytes <= 0:
        raise ValueError(f"window_bytes must be a positive int, the bytes of a window; got {window_bytes!r}")
    plain: Any = optax.with_extra_args_support(as_transformation(inner))
    if isinstance(plain, in_place.InPlace):
        raise ValueError(
            "a state in host memory needs an optimizer made of JAX operations; got one that writes params and state in "
            "place, by kernels that see the device's memory only. Use optax's own (optax.adamw for jaxmp.fused_adamw), "
            "and put stream_updates inside of mixed_precision, not round it."
        )

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any) -> tuple[PyTree, Any]:
        if host_memory.first_on_host((updates, state, params)) is None:
            return plain.update(updates, state, params, **extra_args)
        if "grads_finite" in extra_args:
            host_memory.check_on_device((state, params))

        def update(updates: PyTree, state: Any, params: PyTree) -> tuple[list[Any], tuple[Any, Any]]:
            moves, new = plain.update(*host_memory.to_device((updates, state, params)), **extra_args)
            leaves, treedef = jax.tree.flatten(moves)
            return leaves, (jax.tree.map(host_memory.as_before, new, state), _Static(treedef))

        leaves, (new, static) = windows.run(update, updates, state, params, window_bytes=int(window_bytes))
        return jax.tree.unflatten(static.value, leaves), new

    def write_fn(
        grads: list[Array],
        state: Any,
        params: PyTree,
        pairs: list[write_masters.Pair],
        step: in_place.Step,
        **extra_args: Any,
    ) -> tuple[list[write_masters.Pair], Any, Float[Array, ""]]:
        # Of the params that come in, not of masters on the host; so the sum over a mesh joins that of the norm.
        saturated = sum((_saturated(p) for p, _ in pairs), start=jnp.zeros((), jnp.float32))
        taken_step = step._replace(taken=jnp.ones((), bool))

        def update(grads: list[Array], state: Any, pairs: list[write_masters.Pair]) -> tuple[list[Any], Any]:
            here = host_memory.to_device((grads, state, pairs))
            new, new_state = write_masters.by_updates(plain, here[0], here[1], params, here[2], taken_step, extra_args)
            new = [jax.tree.map(host_memory.as_before, n, old) for n, old in zip(new, pairs, strict=True)]
            return new, jax.tree.map(host_memory.as_before, new_state, state)

        def turn(carry: Any) -> Any:
            _, pairs, state = carry
            into = (pairs, state) if split_leaves else None
            new = windows.run(update, grads, state, pairs, window_bytes=int(window_bytes), into=into)
            return jnp.zeros((), bool), *new

        # A loop of one turn or none, where a cond would do as well: XLA keeps the sharding of what a loop carries, and
        # updates it where it stands. The results of a cond it lays on every device, unless they are told otherwise.
        with jax.named_scope("jaxmp.stream"):
            _, pairs, state = lax.while_loop(lambda carry: carry[0], turn, (step.taken, pairs, state))
        return pairs, state, saturated

    return in_place.in_place(plain.init, update_fn, write_fn, streams=True)


@jax.tree_util.register_static
class _Static:
    """A value that is no array, in a tree of arrays."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


def _committed(tree: PyTree) -> PyTree:
    """`tree`, committed to its device where that is only one."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if any(isinstance(x, Tracer) for x in leaves):
        return tree
    if len(set().union(*(x.sharding.device_set for x in leaves))) != 1:
        return tree
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding) if isinstance(x, jax.Array) else x, tree)


def _is_large(x: Any, min_bytes: int) -> bool:
    if not isinstance(x, jax.Array) or x.ndim == 0 or host_memory.is_on_host(x):
        return False
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended) and x.size * x.dtype.itemsize >= min_bytes


def _saturated(param: Any) -> Float[Array, ""]:
    """How many numbers of a float16 param stand at the end of its range, where masters that lie beyond leave them."""
    if param is None or param.dtype != jnp.float16:  # bfloat16 has the range of float32
        return jnp.zeros((), jnp.float32)
    param = host_memory.to_device(param)
    return jnp.sum(jnp.abs(param) >= jnp.finfo(jnp.float16).max).astype(jnp.float32)
