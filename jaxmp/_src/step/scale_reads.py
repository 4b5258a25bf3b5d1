"""Warns of gradients that no loss scale can have multiplied, and of scaled gradients that nobody unscales.

An update divides by the scale in its state. Code that scales a loss reads this scale first, by `value_and_grad`, a
`GradScaler` or `get_loss_scale`. So jaxmp finds four mistakes without any computation:

- an update with a dynamic scale is traced, and nothing in this process has read one: `jax.value_and_grad` was kept;
- an update gets gradients as `value_and_grad` returned them, and divides them by another scale than it multiplied by:
  that of an `opt_state` that is older, newer, or closed over;
- in one trace, an update divides by the scale that an earlier update made, and nothing read that one: the same
  gradients were applied twice, or those of an older `opt_state`;
- an optimizer without a loss scale gets gradients as `value_and_grad` returned them with a scale.

jaxmp finds the second and the fourth mistake only if the update gets the same array objects that were returned.
Gradients that were averaged, cast or clipped in between, or that left a jitted function, are other arrays of unknown
origin. (A trace does not show that two scales are equal, so a copy of a state counts as another state.)

If your own code (another framework, a test) scales the loss and reads the scale in another way, call
`jaxmp.get_loss_scale(opt_state)` once, or ignore the category `jaxmp.UnreadLossScale`.
"""

import weakref

import jax
from jax.core import Tracer
from jaxtyping import Array, PyTree

from jaxmp._src.base import ambient, compat
from jaxmp._src.base.warn import warn


class UnreadLossScale(UserWarning):
    """The category of the warnings that gradients cannot have been scaled; see `jaxmp.value_and_grad`.

    Example:
      >>> issubclass(UnreadLossScale, UserWarning)
      True
    """


def note_read(scale: Array) -> None:
    """Notes that `scale` was read, to scale a loss with it."""
    reads = ambient.now().scale_reads
    reads.any = True
    if isinstance(scale, Tracer):
        reads.read[id(scale)] = scale
        reads.traces.append(compat.trace_state())


def note_made(scale: Array, *, before: Array) -> None:
    """Notes that an update made `scale` from the scale `before`."""
    if isinstance(scale, Tracer) and scale is not before:
        ambient.now().scale_reads.made[id(scale)] = scale


def note_scaled(grads: PyTree, scale: Array) -> None:
    """Notes that `scale` has multiplied `grads`. Holds neither."""
    scaled, leaves = ambient.now().scale_reads.scaled, jax.tree.leaves(grads)
    if leaves and isinstance(leaves[0], jax.Array) and isinstance(scale, jax.Array):
        key = id(leaves[0])
        scaled[key] = weakref.ref(leaves[0], lambda _: scaled.pop(key, None)), weakref.ref(scale), compat.trace_state()


def note_unscaled(grads: PyTree, scale: Array) -> None:
    """Notes that a `GradScaler` returned `grads`, divided by `scale`. Holds neither."""
    unscaled, leaves = ambient.now().scale_reads.unscaled, jax.tree.leaves(grads)
    if leaves and isinstance(scale, jax.Array):
        key = id(leaves[0])
        unscaled[key] = weakref.ref(leaves[0], lambda _: unscaled.pop(key, None)), weakref.ref(scale)


def check_not_unscaled(grads: PyTree, scale: Array) -> None:
    """Raises a ValueError if a `GradScaler` with this very scale has unscaled these very gradients before."""
    leaves = jax.tree.leaves(grads)
    leaf, by = ambient.now().scale_reads.unscaled.get(id(leaves[0]) if leaves else 0, (None, None))
    if leaf is not None and by is not None and leaf() is leaves[0] and by() is scale:
        raise ValueError(
            "gradients are unscaled once; got those that unscale returned, and a scaler from before. Use the scaler "
            "that it returned with them: grads, scaler = scaler.unscale(grads)."
        )


def holds_gradients(tree: PyTree) -> bool:
    """Whether `tree` is one that `value_and_grad` returned as gradients, by its first array."""
    leaves = jax.tree.leaves(tree)
    leaf, *_ = ambient.now().scale_reads.scaled.get(id(leaves[0]) if leaves else 0, (None,))
    return leaf is not None and leaf() is leaves[0]


def _scale_of(grads: PyTree) -> Array | None:
    """The scale that multiplied `grads`, if they were made here: in a branch or a loop each array has another name."""
    leaves = jax.tree.leaves(grads)
    leaf, scale, trace = ambient.now().scale_reads.scaled.get(id(leaves[0]) if leaves else 0, (None, None, None))
    is_known = leaf is not None and leaf() is leaves[0] and trace == compat.trace_state()
    return scale() if is_known and scale is not None else None


def check_not_scaled(grads: PyTree) -> None:
    """Warns if `grads`, of an optimizer that unscales nothing, were scaled."""
    scale = _scale_of(grads)
    if scale is None or (not isinstance(scale, Tracer) and float(scale) == 1.0):
        return
    warn(
        "unread-loss-scale",
        "gradients that are multiplied by a loss scale must be divided by it; got gradients that jaxmp.value_and_grad "
        "scaled by the loss scale of an opt_state, and an optimizer that has none: the step is thousands of times too "
        "large. Wrap this optimizer, tx = jaxmp.mixed_precision(tx, policy), or pass its own opt_state to "
        "value_and_grad.",
        UnreadLossScale,
    )


def check(grads: PyTree, scale: Array) -> None:
    """Warns if `grads` of an update that divides by `scale`, a dynamic one, cannot have been scaled by it."""
    reads = ambient.now().scale_reads
    scaled_by = _scale_of(grads)
    if scaled_by is not None and scaled_by is not scale:
        warn(
            "unread-loss-scale",
            "gradients must be unscaled by the scale that scaled them; got gradients that jaxmp.value_and_grad scaled "
            "by the loss scale of one opt_state, and an update by that of another: an older or newer one, or one that "
            "the step closes over. Pass the same opt_state to value_and_grad and to the update. (A copy of it is "
            "another one: pass the copy to both.)",
            UnreadLossScale,
        )
        return
    if not isinstance(scale, Tracer):
        return
    if not reads.any and not reads.warned:
        reads.warned = True
        warn(
            "unread-loss-scale",
            "a loss scale that nobody read cannot have multiplied the gradients, and the update divides them by it: "
            "they come out thousands of times too small. Use jaxmp.value_and_grad(loss_fn)(params, ..., "
            "opt_state=opt_state) in place of jax.value_and_grad. (If the gradients were scaled elsewhere, read the "
            "scale by jaxmp.get_loss_scale(opt_state), or ignore the category jaxmp.UnreadLossScale.)",
            UnreadLossScale,
        )
    made, read = reads.made.get(id(scale)) is scale, reads.read.get(id(scale)) is scale
    if made and not read and compat.trace_state() in reads.traces:
        warn(
            "unread-loss-scale",
            "gradients must be unscaled by the scale that scaled them; got an update by the scale that an earlier "
            "update in this trace made, and no loss was scaled by it: the same gradients twice, or those of an older "
            "opt_state. Compute them by jaxmp.value_and_grad with the opt_state that this update gets.",
            UnreadLossScale,
        )
