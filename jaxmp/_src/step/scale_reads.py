"""Warns of gradients that no loss scale can have multiplied, while a step is traced.

An update divides by the scale in its state. Whoever scales a loss reads that scale first: `value_and_grad`, a
`GradScaler`, `get_loss_scale`. So two mistakes show without looking at a number:

- an update with a dynamic scale is traced, and nothing in this process has read one: `jax.value_and_grad` was kept;
- in one trace, an update divides by the scale that an earlier update made, and nothing read that one: the same
  gradients were applied twice, or those of an older `opt_state`.

Gradients that come from elsewhere (another framework, a test) were scaled by somebody who read the scale. If it was
read in another way than by these functions, call `jaxmp.get_loss_scale(opt_state)` once, or ignore the category
`jaxmp.UnreadLossScale`.
"""

import warnings

from jax.core import Tracer
from jaxtyping import Array

from jaxmp._src.base import ambient, compat


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


def check(scale: Array, *, stacklevel: int) -> None:
    """Warns if the gradients of an update that divides by `scale`, a dynamic one, cannot have been scaled by it."""
    reads = ambient.now().scale_reads
    if not isinstance(scale, Tracer):
        return
    if not reads.any and not reads.warned:
        reads.warned = True
        warnings.warn(
            "a loss scale that nobody read cannot have multiplied the gradients, and the update divides them by it: "
            "they come out thousands of times too small. Use jaxmp.value_and_grad(loss_fn)(params, ..., "
            "opt_state=opt_state) in place of jax.value_and_grad. (If the gradients were scaled elsewhere, read the "
            "scale by jaxmp.get_loss_scale(opt_state), or ignore the category jaxmp.UnreadLossScale.)",
            UnreadLossScale,
            stacklevel=stacklevel,
        )
    made, read = reads.made.get(id(scale)) is scale, reads.read.get(id(scale)) is scale
    if made and not read and compat.trace_state() in reads.traces:
        warnings.warn(
            "gradients must be unscaled by the scale that scaled them; got an update by the scale that an earlier "
            "update in this trace made, and no loss was scaled by it: the same gradients twice, or those of an older "
            "opt_state. Compute them by jaxmp.value_and_grad with the opt_state that this update gets.",
            UnreadLossScale,
            stacklevel=stacklevel,
        )
