"""Warns of gradients that no loss scale can have multiplied, and of scaled gradients that nobody unscales.

An update divides by the scale in its state. Code that scales a loss reads this scale first, by `value_and_grad`, a
`GradScaler` or `get_loss_scale`. So these mistakes are found without any computation:

- an update with a scale other than 1, or of a state that carries its policy, is traced, and nothing has read the scale
  of this state, or the gradients are made without it: `jax.value_and_grad` was kept;
- an update divides gradients, as `value_and_grad` returned them, by another scale than it multiplied by: that of an
  `opt_state` that is older, newer, or closed over;
- in one trace, an update divides by the scale that an earlier update made, and nothing read that one: the same
  gradients were applied twice, or those of an older `opt_state`;
- an optimizer without a loss scale gets gradients that were scaled;
- in one trace, gradients are clipped or normalized between `value_and_grad` and the update, where they are multiplied
  by the scale, or added to what is not; or they are divided or multiplied by the scale itself (`programs.homogeneity`);
- in one trace, the loss that `value_and_grad` gets was multiplied by the scale.

The second and the fourth are found only where the update gets the very arrays that were returned: gradients that were
averaged, cast or clipped, or that left a jitted function, are others. For the first mistake, gradients may come from a
program of their own, where the scale has another name. So a scale that was read, and that no update divided by, speaks
for all updates of as many params of the same ranks; and gradients that are an input of the trace are not asked about.
"""

import collections
import dataclasses
import functools
import weakref
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from jaxmp._src.base import compat
from jaxmp._src.base.by_identity import ByIdentity
from jaxmp._src.base.warn import warn
from jaxmp._src.programs import homogeneity, jaxprs
from jaxmp._src.step import state as states

Ranks = tuple[int, ...]  # of the leaves of gradients: inside shard_map their shapes are those of parts


class UnreadLossScale(UserWarning):
    """The category of the warnings that gradients cannot have been scaled; see `jaxmp.value_and_grad`.

    Example:
      >>> issubclass(UnreadLossScale, UserWarning)
      True
    """


class Scaled(NamedTuple):
    """What is noted of a gradient: a reference to its scale, the trace, the dtype of its loss's policy, if any."""

    scale: weakref.ref
    trace: Any
    compute_dtype: Any


@dataclasses.dataclass
class Reads:
    """Which loss scales were read in this process, to scale a loss. It holds no array.

    Attributes:
      anywhere: whether a program said, by `get_loss_scale(())`, that it scales by itself.
      read: by the scale, the ranks of the gradients of each loss that it scaled, until an update divides by it.
      alone: by these ranks, how many reads there were of scales that no update divided by.
      from_updates: the scales that an update made, in a trace.
      traces: the last traces in which a scale was read.
      scaled: the `Scaled` of each gradient that `value_and_grad` returned.
      unscaled: by each gradient that `unscale` or a `GradScaler` returned, a reference to the scale.
    """

    anywhere: bool = False
    read: ByIdentity = dataclasses.field(default_factory=ByIdentity)
    alone: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    from_updates: ByIdentity = dataclasses.field(default_factory=ByIdentity)
    traces: collections.deque = dataclasses.field(default_factory=lambda: collections.deque(maxlen=16))
    scaled: ByIdentity = dataclasses.field(default_factory=ByIdentity)
    unscaled: ByIdentity = dataclasses.field(default_factory=ByIdentity)


MEMORY = Reads()  # of this process
_MOST = 100_000  # values that are looked at, of one gradient


# What is noted


def get_loss_scale(opt_state: Any) -> Float[Array, ""]:
    """The scale for the next loss.

    Args:
      opt_state: state of `mixed_precision` or of a chain that holds one, or of `shared_loss_scale`.

    Returns:
      float32[]; 1.0 for an optimizer without a loss scale, and for `()`. (A test or a program that scales by hand calls
      `get_loss_scale(())` once, so that no update warns of a scale that nobody read.)

    Raises:
      TypeError: `opt_state` is no state of an optimizer (params, a `tx`).
      ValueError: `opt_state` holds several loss scales, as with two `mixed_precision` in one `optax.multi_transform`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> float(get_loss_scale(optax.sgd(0.1).init(jnp.ones(2))))
      1.0
    """
    if not hasattr(opt_state, "get_scale"):  # a GradScaler
        states.check_is_state(opt_state, "get_loss_scale")
    scale = states.loss_scale_of(opt_state)
    if isinstance(opt_state, tuple) and not opt_state:
        MEMORY.anywhere = True
    else:
        note_read(scale)
    return scale


def note_read(scale: Array, grads: PyTree = None) -> None:
    """Notes that `scale` was read, to scale the loss of `grads`; None: of gradients that are not known yet.

    Without gradients an array is read to be shown, and so is the scale that an update made.
    """
    ranks = None if grads is None else _ranks(grads)
    is_traced = isinstance(scale, Tracer)
    if is_traced:
        MEMORY.traces.append(compat.trace_state())
    read_for = MEMORY.read.get(scale)
    was_used = read_for == []  # by an update: what reads it now shows it
    counts = ranks is not None or (is_traced and not MEMORY.from_updates.get(scale) and not was_used)
    MEMORY.read.set(scale, [*(read_for or ()), *([ranks] if counts else ())])
    MEMORY.alone[ranks] += counts


def note_scaled(grads: PyTree, scale: Array, compute_dtype: Any) -> None:
    """Notes that `value_and_grad` read `scale` and multiplied `grads` by it, and the dtype of its policy, if any."""
    note_read(scale, grads)
    if isinstance(scale, jax.Array):
        noted = Scaled(weakref.ref(scale), compat.trace_state(), compute_dtype)
        for g in jax.tree.leaves(grads):
            if isinstance(g, jax.Array):
                MEMORY.scaled.set(g, noted)
                MEMORY.scaled.set(compat.of_all_rows(g), noted)


def note_update(scale: Array, *, before: Array) -> None:
    """Notes that an update made `scale` from the scale `before`."""
    if isinstance(scale, Tracer) and scale is not before:
        MEMORY.from_updates.set(scale, True)


def note_unscaled(grads: PyTree, scale: Array) -> None:
    """Notes that `unscale` or a `GradScaler` returned `grads`, divided by `scale`."""
    for g in jax.tree.leaves(grads) if isinstance(scale, jax.Array) else ():
        MEMORY.unscaled.set(g, weakref.ref(scale))


def _ranks(tree: PyTree) -> Ranks:
    return tuple(x.ndim for x in jax.tree.leaves(tree) if hasattr(x, "ndim"))


def _first_of(tree: PyTree) -> Any:
    """The first leaf, which speaks for all; None of an empty tree."""
    return next(iter(jax.tree.leaves(tree)), None)


# What is asked


def holds_gradients(tree: PyTree) -> bool:
    """Whether `tree` is one that `value_and_grad` returned as gradients, by its first array."""
    return MEMORY.scaled.get(_first_of(tree)) is not None


def _scale_of(gradient: Any) -> Array | None:
    """The scale that multiplied it, if it was made here: in a branch or a loop each array has another name."""
    noted = MEMORY.scaled.get(gradient)
    return noted.scale() if noted is not None and noted.trace == compat.trace_state() else None


def _is_unscaled_by(scale: Array, gradient: Any) -> bool:
    by = MEMORY.unscaled.get(gradient)
    return by is not None and by() is scale


def check_not_unscaled(grads: PyTree, scale: Array) -> None:
    """Raises a ValueError if a `GradScaler` with this very scale has unscaled these very gradients before."""
    if _is_unscaled_by(scale, _first_of(grads)):
        raise ValueError(
            "gradients must be unscaled once; got those of unscale, and the scaler from before. Use what it returned: "
            "grads, scaler = scaler.unscale(grads)."
        )


def check_not_scaled(grads: PyTree) -> None:
    """Warns if `grads`, of an optimizer that unscales nothing, were scaled."""
    scale = _scale_of(_first_of(grads))
    if scale is not None and (isinstance(scale, Tracer) or float(scale) != 1.0):
        warn_of_unread(
            "scaled gradients must be unscaled by the optimizer's loss scale; got an optimizer that has none. The step "
            "is thousands of times too large. Wrap it: jaxmp.mixed_precision(tx, policy)."
        )


def check_scaled(grads: PyTree, params: PyTree, scale: Array, *, is_checked: bool, is_static: bool = False) -> None:
    """Warns if `grads` of an update that divides by `scale` cannot have been scaled by it.

    A static scale may be that of another state, with the same value. The scale then is used: it speaks for no other
    update.
    """
    first = _first_of(grads)
    scaled_by = _scale_of(first)
    message = ""
    if not is_checked or (is_static and any(_noted(first))):
        pass
    elif _is_unscaled_by(scale, first) and not isinstance(first, Tracer):
        message = _UNSCALED
    elif scaled_by is not None and scaled_by is not scale:
        message = (
            "gradients must be unscaled by the scale that scaled them; got the opt_state of value_and_grad, and "
            "another opt_state of the update. Pass the same to both; compute new gradients for each update."
        )
    elif not isinstance(scale, Tracer):
        pass
    elif MEMORY.from_updates.get(scale) and MEMORY.read.get(scale) is None and compat.trace_state() in MEMORY.traces:
        message = (
            "gradients must be unscaled by the scale that scaled them; got the scale that an earlier update in this "
            "trace made. Compute new gradients by jaxmp.value_and_grad with the opt_state that this update gets."
        )
    elif not may_be_of(grads, scale, params):
        what = "nobody read" if MEMORY.read.get(scale) is None else "no loss used"
        message = (
            f"a loss scale that {what} cannot have multiplied the gradients, and the update divides by it. Use "
            "jaxmp.value_and_grad(loss_fn)(params, ..., opt_state=opt_state) in place of jax.value_and_grad. If they "
            "were scaled elsewhere, call jaxmp.get_loss_scale(()) once."
        )
    if message:
        warn_of_unread(message)
    if (read_for := MEMORY.read.get(scale)) is not None:
        MEMORY.alone.subtract(read_for)
        read_for.clear()


def check_loss(loss: Any, scale: Array) -> None:
    """Warns of a loss that was multiplied, in this trace, by the scale that multiplies it again."""
    factors = _ancestors(loss, through=("mul", "convert_element_type", "neg"))
    if any(compat.closed_over(x) is scale for x in factors):
        warn_of_unread(_LOSS_SCALED_TWICE)


def check_not_changed(grads: PyTree, params: PyTree, scale: Array) -> None:
    """Warns of gradients that were changed, in this trace, by what depends on the scale that they are multiplied by.

    And of sums of them with what is not scaled, such as a multiple of `params`, noise, and constants; and of those that
    `unscale` divided by `scale`, by which the update divides them again.
    """
    leaves = [g for g in jax.tree.leaves(grads) if isinstance(g, Tracer)]
    changed = [g for g in leaves if MEMORY.scaled.get(g) is None and not compat.is_input(g)]
    if not changed:
        return
    own = _tree_of_leaves(params)

    def without(x: Any) -> bool:
        is_number = compat.is_input(x) and not jnp.issubdtype(x.dtype, jnp.floating)  # a key, a step
        return is_number or own.get(x) is not None

    most = 1000 + 20 * len(changed)
    look = functools.partial(homogeneity.degrees_while_traced, changed, without=without, most=most)

    def unscaled(g: Any) -> float | None:
        return 0.0 if _is_unscaled_by(scale, g) else None

    degrees, cause = look(lambda g: unscaled(g) if MEMORY.scaled.get(g) is None else 1.0)
    if all(degree in (1.0, homogeneity.EVERY, homogeneity.UNKNOWN) for degree in degrees):
        if homogeneity.UNKNOWN in degrees:
            degrees, _ = look(lambda g: 1.0 if g is scale or MEMORY.scaled.get(g) is not None else unscaled(g))
        if homogeneity.UNKNOWN in degrees and _is_read_by_hand(scale) and all(_sources(changed[0], scale, params)):
            degrees, _ = look(lambda g: 1.0 if g is scale else 0.0 if compat.is_input(g) else None)
        powers = {degree for degree in degrees if isinstance(degree, float)} - {1.0}
        if powers:  # divided by the scale itself, or multiplied by it
            warn_of_unread(_UNSCALED if min(powers) < 1 else _SCALED_TWICE)
        return
    from_unscaled, _ = look(lambda g: unscaled(g) if MEMORY.scaled.get(g) is None else homogeneity.UNKNOWN)
    if homogeneity.UNKNOWN not in from_unscaled:
        warn_of_unread(_UNSCALED)
    else:
        by = "" if cause is None else f" by {jaxprs.function_name(cause)}{jaxprs.place_of(cause)}"
        warn_of_unread(
            f"scaled gradients must not be clipped or normalized, nor added to what is not scaled; got gradients that "
            f"were changed{by} between value_and_grad and the update. Put the clip inside: "
            f"jaxmp.mixed_precision(optax.chain(clip, inner), policy)."
        )


_UNSCALED = (
    "gradients are unscaled once, by the update; got gradients that were divided by the loss scale before (those of "
    "jaxmp.unscale are to look at). The step is thousands of times too small. Pass those of value_and_grad, and "
    "put a clip inside: jaxmp.mixed_precision(optax.chain(clip, inner), policy)."
)
_SCALED_TWICE = (
    "gradients are scaled once, by value_and_grad; got gradients that the loss scale multiplied again. The step "
    "is thousands of times too large. Pass the gradients of value_and_grad."
)
_LOSS_SCALED_TWICE = (
    "a loss is scaled once, by value_and_grad; got a loss that its loss scale multiplied before. The loss that it "
    "returns and the step are thousands of times too large. Return the loss itself."
)


def may_be_of(grads: PyTree, scale: Array, params: PyTree) -> bool:
    """Whether a loss of `params` that read `scale` can have made `grads`."""
    first = _first_of(grads)
    comes_in = isinstance(first, Tracer) and compat.is_input(first)
    if _is_read_by_hand(scale) and not MEMORY.anywhere and _sources(first, scale, params) == [False, True]:
        return False  # it was read to be shown
    return (
        MEMORY.read.get(scale) is not None
        or comes_in
        or MEMORY.anywhere
        or any(MEMORY.alone[ranks] > 0 for ranks in (_ranks(grads), None))
    )


def _is_read_by_hand(scale: Array) -> bool:
    """Whether a scale was read, and by no `value_and_grad`."""
    read_for = MEMORY.read.get(scale)
    return read_for is not None and not any(read_for)


def ran_in(compute_dtype: Any, grads: PyTree) -> bool:
    """Whether `grads` are, or were made in this trace of, gradients of `value_and_grad` with a policy of this dtype."""
    return any(scaled.compute_dtype == compute_dtype for scaled in _noted(_first_of(grads)))


def _noted(gradient: Any) -> Iterator[Scaled]:
    """What is noted of a gradient, and of those of `value_and_grad` that it was computed from in this trace."""
    return (scaled for x in _ancestors(gradient) if (scaled := MEMORY.scaled.get(x)) is not None)


def _sources(gradient: Any, *trees: PyTree) -> list[bool]:
    """Of which of these trees a gradient was computed in this trace, by the equations; of all, if they are too many."""
    tree_of, is_source, count = _tree_of_leaves(*trees), [False] * len(trees), 0
    for x in _ancestors(gradient):
        count += 1
        if (k := tree_of.get(x)) is not None:
            is_source[k] = True
    return [True] * len(trees) if count == _MOST else is_source


def _tree_of_leaves(*trees: PyTree) -> ByIdentity:
    """By each traced leaf of these trees, the number of its tree."""
    tree_of = ByIdentity()
    for k, tree in enumerate(trees):
        for x in jax.tree.leaves(tree):
            if isinstance(x, Tracer):
                tree_of.set(x, k)
    return tree_of


def _ancestors(value: Any, through: Collection[str] | None = None) -> Iterator[Any]:
    """A value, and what it was computed from in this trace, by these primitives or any; `_MOST` of them at most."""
    seen, count, open_ = ByIdentity(), 0, [value]
    while open_ and count < _MOST:
        x = open_.pop()
        if seen.get(x):
            continue
        if isinstance(x, Tracer):
            seen.set(x, True)
        count += 1
        yield x
        equation, _ = compat.equation_of(x) or (None, 0)
        if equation is not None and (through is None or equation.primitive.name in through):
            open_ += (v for v in equation.invars if isinstance(v, Tracer))


def warn_of_unread(message: str) -> None:
    warn("unread-loss-scale", message, UnreadLossScale)
