"""Optimizers that write params and state themselves, in place.

In optax, a transform returns an *update*, and the caller adds it to the params. For 16-bit params, the update is a
float32 tree that is written to memory and read again, and a skip is a selection over the whole state. A transform made
by `in_place` can do all of this in one pass: it gets the scaled gradients and the decision, and returns params and
state.

`jaxmp.apply_gradients` passes a `Destination` down as the extra argument `destination`. The outermost transform that
can write, `unscale_and_skip`, puts the new params there. Plain optax transforms in a chain pass the argument on or
ignore it, and work unchanged.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxmp._src.base import compat
from pallas_kernels.update import Counts


class Step(NamedTuple):
    """What a `write` is told about the step.

    Attributes:
      inv_scale: float32[], 1 / loss scale.
      grad_norm: float32[], global norm of the unscaled gradients; NaN if the transform does not need it (`measures`).
      taken: bool[], whether the step is taken.
      backend: which kernels to use; see `pallas_kernels.backend`.
      number: int32[], which step this is, for the noise of stochastic rounding.
    """

    inv_scale: Float[Array, ""]
    grad_norm: Float[Array, ""]
    taken: Bool[Array, ""]
    backend: str = "auto"
    number: Int[Array, ""] | int = 0


# (grads still scaled, state, params, step, **extra_args) -> (params, state, counts)
Write = Callable[..., tuple[PyTree, Any, Counts]]


class InPlace(optax.GradientTransformationExtraArgs):
    """An optax transform with `write` beside `init` and `update`.

    Attributes:
      write: params and state after a step.
      measures: whether `write` needs the global norm of the gradients.
      backend: which kernels to use; see `pallas_kernels.backend`.
      streams: whether `write` accepts state and masters in host memory.
    """

    write: Write
    measures: bool
    backend: str
    streams: bool


def in_place(
    init: Any, update: Any, write: Write, *, measures: bool = False, backend: str = "auto", streams: bool = False
) -> InPlace:
    """An optax transform that can also write in place."""
    made = InPlace(init, update)
    made.write, made.measures, made.backend, made.streams = write, measures, backend, streams
    return made


def in_place_of(init: Any, update: Any, write: Write, inner: Any) -> InPlace:
    """`in_place` for a wrapper of `inner`: takes `measures`, `backend`, `streams` from an `inner` that can write."""
    if not isinstance(inner, InPlace):
        return in_place(init, update, write)
    return in_place(init, update, write, measures=inner.measures, backend=inner.backend, streams=inner.streams)


@jax.tree_util.register_static  # some optax wrappers treat extra arguments as a tree of arrays
class Destination:
    """Where an optimizer that writes in place puts the new params. `apply_gradients` makes it and reads it.

    Attributes:
      grads: the gradients of the caller, before transforms that stand in front.
      arrived: the leaves of the gradients that arrived at `unscale_and_skip`; None until then.
      written: the new params; None until then.
    """

    def __init__(self, params: PyTree | None, grads: PyTree) -> None:
        self.grads = grads
        self.arrived: list[Any] | None = None
        self.written: PyTree | None = None
        self._sums: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
        self._noted: list[Any] | None = None
        self._expected = params
        self._trace_state = compat.trace_state()

    def is_for(self, params: PyTree) -> bool:
        """Whether `params` are all params of the caller, at the same level of the trace.

        Inside `optax.multi_transform` an optimizer sees only some params. Inside `optax.MultiSteps` it runs in a
        branch, and an array that was made in a branch must be returned by it.
        """
        if self._expected is None:
            return False
        expected, given = jax.tree.leaves(self._expected), jax.tree.leaves(params)
        same = len(expected) == len(given) and all(a is b for a, b in zip(expected, given, strict=True))
        return same and self._trace_state == compat.trace_state()

    def arrive(self, grads: PyTree) -> None:
        """Called where scaled gradients arrive; those of an inner trace stay there."""
        if self._trace_state == compat.trace_state():
            self.arrived = jax.tree.leaves(grads)

    def note(self, updates: PyTree) -> None:
        """Called by a transform with masters: it returns these updates, and `apply_gradients` may not need them."""
        if self._trace_state == compat.trace_state():
            self._noted = [*(self._noted or []), *jax.tree.leaves(updates)]

    def note_sums(self, params: PyTree, updates: PyTree, sums: PyTree) -> None:
        """Called by a transform that has added its updates to the params already; a sum may be None."""

        def note(x: Any, p: Any, u: Any) -> None:
            if x is not None:
                self._sums[id(p), id(u)] = p, u, x  # held here, so no other array gets their ids

        if self._trace_state == compat.trace_state():
            jax.tree.map(note, sums, params, updates, is_leaf=lambda x: x is None)

    def sum_of(self, param: Any, update: Any) -> Any:
        """`param` after `update`: of just these two arrays, as noted, or added here."""
        _, _, noted = self._sums.get((id(param), id(update)), (None, None, None))
        return optax.apply_updates(param, update) if noted is None else noted

    def is_last(self, updates: PyTree, opt_state: Any, kinds: tuple[type, ...]) -> bool:
        """Whether no transform behind or around one with masters has made other updates.

        Args:
          updates: of params with masters, as `apply_gradients` got them.
          opt_state: state of the whole optimizer.
          kinds: the states of transforms that write. If such a transform runs in a branch (`optax.MultiSteps`), its
            updates are other arrays when they arrive here, and only `opt_state` shows what follows.
        """
        if self._noted is None:
            return not _has_follower(opt_state, kinds)
        noted = {id(x) for x in self._noted}
        return all(id(u) in noted for u in jax.tree.leaves(updates))

    def closed(self) -> "Destination":
        """For transforms inside `unscale_and_skip`: `apply_gradients` called, but they must not write."""
        return Destination(None, self.grads)


def _has_follower(state: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a state of one of `kinds` has a state behind it in an `optax.chain`, whose state is a plain tuple.

    (The state of `optax.named_chain` is a dict, which jax sorts.)
    """

    def holds(x: Any) -> bool:
        return any(isinstance(y, kinds) for y in jax.tree.leaves(x, is_leaf=lambda y: isinstance(y, kinds)))

    if isinstance(state, kinds) or not holds(state):
        return False
    if isinstance(state, dict):
        return any(_has_follower(x, kinds) for x in state.values())
    if isinstance(state, tuple):
        is_chain = not hasattr(state, "_fields")
        if is_chain and any(holds(x) for x in state[:-1]):
            return True
        return any(_has_follower(x, kinds) for x in state)
    return False


def as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """`inner` as an optax transform that gets extra arguments. (`optax.MultiSteps` is an object that makes one.)

    The `update` of MultiSteps takes all, but its type says that it takes none, and optax would drop them.
    """
    made = inner.gradient_transformation() if hasattr(inner, "gradient_transformation") else inner
    if not isinstance(made, optax.GradientTransformation):
        raise TypeError(
            f"inner must be an optax.GradientTransformation such as optax.adamw(1e-3); got {type(inner).__name__}"
        )
    if isinstance(getattr(made.update, "__self__", None), optax.MultiSteps):
        return optax.GradientTransformationExtraArgs(made.init, made.update)
    return optax.with_extra_args_support(made)
