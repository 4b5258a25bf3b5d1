"""Three ways to carry out a step: an update that the caller adds, a write in place, and a write in host memory.

`unscale_and_skip` calls two methods of each. `measure` runs before the decision: it may compute the norm of the
gradients and whether they are finite. `write` runs after it: it returns the new state, and an update or the new params.

    PlainUpdate      any optax transform; its results are selected against the old state
    InPlaceWrite     a transform with `write`: its kernels read gradients that are still scaled, measure them in one
                     pass, and write params and state in place
    StreamedWrite    the same for state and gradients in host memory, one window at a time
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

import pallas_kernels
from jaxmp._src.base import tree_paths
from jaxmp._src.devices import collectives, host_memory
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.numerics import casting, float_bits
from jaxmp._src.programs import windows
from jaxmp._src.step import boxed_state, extra_arguments, in_place, kept_elements, read_state, state_tuples
from pallas_kernels import flags, write_order


class Gradients(NamedTuple):
    """The gradients of a step, as they came and unscaled.

    Attributes:
      given: still scaled; in host memory if the caller passed them there.
      scaled: the same on the device.
      unscaled: float32, on the device.
      again: makes `unscaled` from `scaled` once more.
      scale: float32[], scaled / unscaled; None if a user's loss-scale object unscales by its own rule.
    """

    given: PyTree
    scaled: PyTree
    unscaled: PyTree
    again: Callable[[], PyTree]
    scale: Float[Array, ""] | None


class Measured(NamedTuple):
    """What a way to write found out about the gradients of this device, before the decision.

    Attributes:
      grads: the gradients that it will write from; grads * inv_scale are the unscaled ones.
      inv_scale: float32[].
      norm: float32[], the global norm of grads * inv_scale; None: not computed.
      nonfinite: bool[], whether a gradient is not finite; None: not checked.
    """

    grads: PyTree
    inv_scale: Float[Array, ""]
    norm: Float[Array, ""] | None = None
    nonfinite: Bool[Array, ""] | None = None


class Written(NamedTuple):
    """The result of a step.

    Attributes:
      updates: what the caller adds to the params; -0.0 if the params are written already.
      state: state of the wrapped transform.
      kept: float32[], how many elements of the params kept their old values in a step that is taken.
      saturated: float32[], how many params stood at the largest value of their dtype before the step; NaN if it was
        not counted.
    """

    updates: PyTree
    state: Any
    kept: Float[Array, ""]
    saturated: Float[Array, ""]


class WayToWrite(Protocol):
    """The two methods that `unscale_and_skip` calls."""

    def measure(self, grads: Gradients, *, look: bool) -> Measured | None:
        """Measures the gradients. `look`: the decision needs to know if they are finite. None: nothing measured."""
        ...

    def write(
        self,
        measured: Measured | None,
        grads: PyTree,
        state: Any,
        params: PyTree,
        taken: Bool[Array, ""],
        extra_args: dict[str, Any],
    ) -> Written:
        """Carries out the step, from `grads` (unscaled) or from `measured`; changes nothing unless `taken`."""
        ...


class PlainUpdate:
    """The update of any optax transform; in a skipped step -0.0 and the old state."""

    def __init__(
        self,
        inner: Any,
        destination: in_place.Destination | None,
        axis_name: collectives.AxisName,
        *,
        as_made: bool,
    ):
        self._inner, self._destination, self._axis_name = inner, destination, axis_name
        self._as_made = as_made

    def measure(self, grads: Gradients, *, look: bool) -> Measured | None:
        """None: `decide` checks the unscaled gradients, and XLA fuses the check with the unscaling."""
        del grads, look

    def write(
        self,
        measured: Measured | None,
        grads: PyTree,
        state: Any,
        params: PyTree,
        taken: Bool[Array, ""],
        extra_args: dict[str, Any],
    ) -> Written:
        """`inner.update`, selected. An element of which `inner` made a number non-finite keeps all its old values.

        With `as_made`, nothing is selected: `check_optimizer` wants to see the results of `inner`.
        """
        del measured
        host_memory.check_on_device(state)
        if self._destination is not None:
            extra_args = extra_args | {"destination": self._destination.closed()}
        if self._as_made and read_state.find(state, state_tuples.MasterState):
            extra_args = extra_args | {"as_made": True}

        # with masters, `master_params` calls the optimizer
        run = extra_arguments.update if read_state.find(state, state_tuples.MasterState) else boxed_state.update

        def update(grads: PyTree, state: Any, params: PyTree) -> tuple[PyTree, Any]:
            with jax.named_scope("jaxmp.optimizer"):
                return run(self._inner, grads, state, params, extra_args)

        if self._as_made:
            nothing = jnp.zeros((), jnp.float32)
            return Written(*update(grads, state, params), nothing, nothing)
        in_order = write_order.pays((grads, state, params))
        if in_order:
            update = jax.jit(update)  # called three times, traced once
        updates, new = update(grads, state, params)
        with jax.named_scope("jaxmp.keep_or_skip"):
            # The update of a param with a master says no more than the master, and would make XLA read the param.
            # Where an update is not finite, the moved weight is not, so updates are looked at only without weights.
            weights = _trained(params, state)
            moved = _moved(weights, updates)
            own = _unmoved(_without_masters(updates, state), weights)
            held = kept_elements.find(updates, (own, moved, new), (kept_elements.no_updates(own), weights, state))
            saturated = read_state.saturated_masters(state, params, updates)
            if in_order:
                held, both, (old, weights) = held.behind(saturated, (state, params))
                adds = self._destination is not None
                updates, sums, new = _in_order(update, grads, old, weights, held, taken, adds=adds)
                if self._destination is not None:
                    self._destination.note_sums(params, updates, sums)
                counts = flags.count(both)
            else:
                updates, new = _selected(updates, new, state, held, taken)
                counts = held.count_beside(saturated, taken)
            kept, saturated = collectives.as_common(counts, self._axis_name)
            return Written(updates, new, jnp.where(taken, kept, 0.0), saturated)


def _selected(
    updates: PyTree, new: Any, old: Any, held: kept_elements.Held, taken: Bool[Array, ""]
) -> tuple[PyTree, Any]:
    """(updates, state) after a step: for held elements, and where the step is not taken, -0.0 and the old state."""
    return held.keep(updates, kept_elements.no_updates(updates), taken=taken), held.keep(new, old, taken=taken)


def _in_order(
    update: Any,
    grads: PyTree,
    state: Any,
    params: PyTree,
    held: kept_elements.Held,
    taken: Bool[Array, ""],
    *,
    adds: bool,
) -> tuple[PyTree, PyTree, Any]:
    """The same as `_selected`, weights before moments (see `write_order`): (updates, params after them, state).

    With `adds`, the weights of trained params without masters are their sums with their updates, and nobody reads
    updates. The other sums are None. Without it, updates are weights, and there are no sums.
    """
    updates, new = update(grads, state, params)
    updates, masters = _selected(updates, _masters(new), _masters(state), held, taken)
    weights = _moved(_trained(_without_masters(params, state), state), updates) if adds else updates
    (weights, masters), others = write_order.behind(((weights, masters), _with_masters(state, None)))
    new = update(grads, _with_masters(others, _masters(state)), params)[1]
    new = _with_masters(held.keep(_with_masters(new, None), others, taken=taken), masters)
    return (updates, weights, new) if adds else (weights, None, new)


def _masters(state: Any) -> list[PyTree]:
    return [part.master_params for part in read_state.find_boxed(state, state_tuples.MasterState)]


def _with_masters(state: Any, masters: list[PyTree] | None) -> Any:
    """`state` with other masters in it; with None in their place."""
    left = iter(masters or [])
    is_part = lambda x: isinstance(x, state_tuples.MasterState)  # noqa: E731
    put = lambda x: x._replace(master_params=next(left) if masters else None) if is_part(x) else x  # noqa: E731
    return jax.tree.map(put, state, is_leaf=is_part)


def _without_masters(tree: PyTree, state: Any) -> PyTree:
    """`tree`, like the params, with None in place of each leaf that has a master in `state`."""
    masters = read_state.masters_of(state, tree)
    keep = lambda x, master: x if master is None else None  # noqa: E731
    return jax.tree.map(keep, tree, masters, is_leaf=tree_paths.is_box)


def _trained(params: PyTree, state: Any) -> PyTree:
    """`params` with None in place of frozen ones: beside masters, those of 16 bits that have none."""
    has_masters = bool(read_state.find(state, state_tuples.MasterState))

    def is_trained(p: Any) -> bool:
        return casting.is_float(p) and not (has_masters and casting.is_low_precision(p.dtype))

    return jax.tree.map(lambda p: p if is_trained(p) else None, params)


def _unmoved(updates: PyTree, weights: PyTree) -> PyTree:
    """`updates` with None in place of those that move one of `weights`."""
    if weights is None:
        return updates
    is_unit = lambda x: x is None or tree_paths.is_box(x)  # noqa: E731
    return jax.tree.map(lambda u, w: None if jax.tree.leaves(w) else u, updates, weights, is_leaf=is_unit)


def _moved(weights: PyTree, updates: PyTree) -> PyTree:
    """`weights`, some of which are None, after `optax.apply_updates`."""
    is_none = lambda x: x is None  # noqa: E731
    return jax.tree.map(lambda w, u: None if w is None else (w + u).astype(w.dtype), weights, updates, is_leaf=is_none)


class InPlaceWrite:
    """A transform that writes params and state itself, into the caller's `destination`."""

    def __init__(
        self, inner: in_place.InPlace, destination: in_place.Destination, axis_name: collectives.AxisName
    ) -> None:
        self._inner, self._destination, self._axis_name = inner, destination, axis_name

    def measure(self, grads: Gradients, *, look: bool) -> Measured | None:
        """Finds the norm, and whether all values are finite, in one pass.

        It reads the gradients that are still scaled. With a user's own unscale rule it reads the unscaled ones.
        """
        found = self._to_write_from(grads)
        if not self._inner.measures and not look:
            return found
        with jax.named_scope("jaxmp.measure_gradients"):
            return self._measured(found)

    def write(
        self,
        measured: Measured | None,
        grads: PyTree,
        state: Any,
        params: PyTree,
        taken: Bool[Array, ""],
        extra_args: dict[str, Any],
    ) -> Written:
        """Puts the new params into the destination. The updates are -0.0: adding them changes nothing."""
        del grads
        assert measured is not None
        norm = jnp.full((), jnp.nan, jnp.float32) if measured.norm is None else measured.norm
        step = in_place.Step(measured.inv_scale, norm, taken, self._inner.backend)
        with jax.named_scope("jaxmp.optimizer"):
            new_params, new_state, counts = self._inner.write(measured.grads, state, params, step, **extra_args)
            self._destination.written = new_params
            nothing = jax.tree.map(lambda p: jnp.full_like(p, -0.0), params)
            saturated, kept = collectives.as_common(counts, self._axis_name)
            return Written(nothing, new_state, jnp.where(taken, kept, 0.0), jnp.where(taken, saturated, jnp.nan))

    def _to_write_from(self, grads: Gradients) -> Measured:
        if grads.scale is None:
            return Measured(grads.unscaled, jnp.ones((), jnp.float32))
        return Measured(grads.scaled, float_bits.reciprocal(grads.scale))

    def _measured(self, found: Measured) -> Measured:
        leaves = scale_leaves.partition(found.grads)[1]
        if not self._inner.measures:  # only the flag is read, which has no derivative; nor has the kernel
            leaves = lax.stop_gradient(leaves)
        norm, finite = pallas_kernels.gradient_norm(leaves, found.inv_scale, backend=self._inner.backend)
        return found._replace(norm=norm, nonfinite=~finite)


class StreamedWrite(InPlaceWrite):
    """The same for gradients in host memory. They are copied in twice, a few at a time: to measure and to write."""

    def _to_write_from(self, grads: Gradients) -> Measured:
        found = super()._to_write_from(grads)
        return found if grads.scale is None else found._replace(grads=grads.given)

    def _measured(self, found: Measured) -> Measured:
        if host_memory.first_on_host(found.grads) is None:
            return super()._measured(found)
        leaves = scale_leaves.partition(found.grads)[1]
        return found._replace(nonfinite=windows.any_nonfinite(leaves, found.inv_scale))


def way_for(
    inner: Any,
    destination: in_place.Destination | None,
    params: PyTree,
    axis_name: collectives.AxisName,
    *,
    as_made: bool = False,
) -> WayToWrite:
    """`inner` writes if it can and if the caller takes the params from `destination`; else it makes an update."""
    if not isinstance(inner, in_place.InPlace) or destination is None or not destination.is_for(params):
        return PlainUpdate(inner, destination, axis_name, as_made=as_made)
    kind = StreamedWrite if inner.streams else InPlaceWrite
    return kind(inner, destination, axis_name)
