"""Three kinds of optimizers, and what a step asks of each: measure the gradients, then move the weights.

    Optax        any optax transform
    Fused        jaxmp's fused ones: kernels that write weights and state in place, and are told whether to
    Streamed     any optax transform whose state is in host memory, one window at a time

`measure` runs before the decision, on every device for itself. `move` runs after it, and returns what was there before
where the step is not taken.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

import pallas_kernels
from jaxmp._src.base import tree_paths
from jaxmp._src.devices import host_memory
from jaxmp._src.numerics import reductions
from jaxmp._src.programs import windows
from jaxmp._src.step import inner_update, masters
from jaxmp._src.step.masters import Pair
from pallas_kernels import backend
from pallas_kernels.backend import as_varying, varying_axes_of
from pallas_kernels.by_platform import by_platform
from pallas_kernels.when import in_dtype_of, known, when


class Gradients(NamedTuple):
    """The gradients of a step: leaves still scaled, and what makes them the unscaled ones.

    Attributes:
      scaled: in the dtypes of the params; in host memory if the caller passed them there.
      inv_scale: float32[]; unscaled = float32(scaled) * inv_scale. None: they come unscaled, and stay as they are.
      treedef: of the tree.
    """

    scaled: list[Array]
    inv_scale: Float[Array, ""] | None
    treedef: Any

    def unscaled(self) -> list[Array]:
        """The gradients that the optimizer sees, on the device."""
        here = host_memory.to_device(self.scaled)
        return here if self.inv_scale is None else [x.astype(jnp.float32) * self.inv_scale for x in here]

    def factor(self) -> Float[Array, ""]:
        """`inv_scale`, 1.0 for None."""
        return jnp.ones((), jnp.float32) if self.inv_scale is None else self.inv_scale

    def tree(self) -> PyTree:
        """The unscaled gradients as the tree that came."""
        return self.treedef.unflatten(self.unscaled())


class Step(NamedTuple):
    """What an optimizer is told about the step.

    Attributes:
      taken: bool[], whether it is taken.
      norm: float32[], global norm of the unscaled gradients; None if the optimizer did not measure it.
      number: int32[], which step this is, for the noise of stochastic rounding.
      adds: whether the caller adds updates (`tx.update`): params that are their own weights are then updates.
      extra: the extra arguments for the optimizer.
    """

    taken: Bool[Array, ""]
    norm: Float[Array, ""] | None
    number: Int[Array, ""] | int
    adds: bool
    extra: dict[str, Any]


class Measured(NamedTuple):
    """What an optimizer sees in the gradients of this device before the decision.

    Attributes:
      bad: bool[], whether one is NaN, inf or 2^48 or more.
      norm: float32[], their global norm; None if it is not measured.
      counts: numbers of `state.MEASURED` by name, float32[]. The step takes the largest of any device.
    """

    bad: Bool[Array, ""]
    norm: Float[Array, ""] | None = None
    counts: Mapping[str, Float[Array, ""]] = MappingProxyType({})


class Moved(NamedTuple):
    """What a step made.

    Attributes:
      pairs: the weights after it. With `Step.adds`, an update in place of a param that is its own weight.
      state: of the optimizer.
      counts: numbers of `state.MEASURED` by name, float32[], of this device.
      others: what `beside` returned.
    """

    pairs: list[Pair]
    state: Any
    counts: Mapping[str, Float[Array, ""]]
    others: Any


class Optimizer(Protocol):
    """What `heart.step` asks of an optimizer."""

    @property
    def inner(self) -> optax.GradientTransformationExtraArgs:
        """The optax transform."""
        ...

    def init(self, weights: PyTree) -> Any:
        """The state for float32 weights."""
        ...

    def measure(self, grads: Gradients) -> Measured:
        """What it sees in the gradients of this device."""
        ...

    def move(
        self, step: Step, grads: Gradients, state: Any, pairs: list[Pair], params: PyTree, beside: "Beside"
    ) -> Moved:
        """The weights and the state after the step. `params`: the tree of the user, for masks and structures."""
        ...


class Beside(NamedTuple):
    """Something else that moves if the step is taken: `move(old)`, a tree like `old`."""

    move: Callable[[PyTree], PyTree]
    old: PyTree


class Optax(NamedTuple):
    """Any optax transform."""

    inner: optax.GradientTransformationExtraArgs

    def init(self, weights: PyTree) -> Any:
        """As the inner transform's."""
        return tree_paths.with_boxes_inside(self.inner.init(weights))

    def measure(self, grads: Gradients) -> Measured:
        """Looks at each gradient; XLA fuses this with the unscaling, or reads what is still scaled."""
        bad, largest = reductions.unusable_and_largest(host_memory.to_device(grads.scaled), grads.inv_scale)
        return Measured(bad, counts={"largest_gradient": largest})

    def move(
        self, step: Step, grads: Gradients, state: Any, pairs: list[Pair], params: PyTree, beside: Beside
    ) -> Moved:
        """One update of the inner transform, in one `when` with all that depends on it."""
        host_memory.check_on_device((state, pairs))

        adds = [step.adds and pair.param is None and pair.master is not None for pair in pairs]

        def update(old: list[Any], state: Any, others: PyTree) -> Any:
            own = [pair if adding else x for adding, pair, x in zip(adds, pairs, old, strict=True)]
            weights = [masters.weight_of(pair) for pair in own]
            with jax.named_scope("jaxmp.optimizer"):
                moves, state = updated(self.inner, grads.tree(), weights, state, params, step.extra)
            with jax.named_scope("jaxmp.update_masters"):
                new = masters.moved(own, weights, moves, step.number)
            new = [u if adding else pair for adding, pair, u in zip(adds, new, moves, strict=True)]
            return new, state, beside.move(others)

        def choose(taken: Array, new: Any, old: Any) -> Any:
            select = lambda n, o: jnp.where(taken, n, o)  # noqa: E731
            parts = zip(adds, new[0], old[0], strict=True)
            with jax.named_scope("jaxmp.keep_or_skip"):
                weights = [select(n, o) if adding else masters.chosen(taken, n, o) for adding, n, o in parts]
                return weights, *jax.tree.map(select, new[1:], old[1:])

        counts, whole = counts_of_masters(pairs, with_stale=step.adds)
        # An update is made from the master: a param beside one does not move here, and is not kept for a skip.
        is_made = lambda q: q.param is not None and q.master is not None and not masters.is_split(q)  # noqa: E731
        left_out = [step.adds and is_made(q) for q in whole]
        pairs = [Pair(None, q.master) if left else q for left, q in zip(left_out, whole, strict=True)]
        old = [-0.0 if adding else pair for adding, pair in zip(adds, pairs, strict=True)]
        # MultiSteps selects each array itself. XLA for CPU copies what a branch and such a select both write.
        branches = not tree_paths.nodes_of(state, optax.MultiStepsState)
        new, state, others = when(step.taken, update, old, state, beside.old, choose=choose, branches=branches)
        like = lambda pair, x: jnp.full_like(pair.master, x, dtype=jnp.float32)  # noqa: E731
        as_pair = lambda x, pair: Pair(None, like(pair, x) if isinstance(x, float) else x)  # noqa: E731
        pairs = [as_pair(x, pair) if adding else x for adding, x, pair in zip(adds, new, pairs, strict=True)]
        pairs = [Pair(q.param, x.master) if left else x for left, q, x in zip(left_out, whole, pairs, strict=True)]
        return Moved(pairs, state, counts, others)


def updated(
    inner: Any, grads: PyTree, weights: list[Array], state: Any, params: PyTree, extra: dict[str, Any]
) -> tuple[list[Array], Any]:
    """(updates of the weights, state) after `inner.update`, which sees weights in a tree like `params`."""
    full = jax.tree.unflatten(jax.tree.structure(params), weights)
    try:
        moves, new = inner_update.update_stored(inner, grads, state, full, extra)
    except (TypeError, ValueError):  # shapes may differ: one gradient for each example
        tree_paths.check_same_shapes(grads, full)  # raises instead of the error
        raise
    tree_paths.check_same_shapes(moves, full)
    has_structure = jax.tree.structure(new) == jax.tree.structure(state)  # if not, jax says how they differ
    if has_structure and (other_shape := tree_paths.first_of_other_shape(new, state)):
        path, shape, before = other_shape  # optax.adafactor factors large leaves only, and sees parts in shard_map
        raise ValueError(
            f"a step must keep the shapes of opt_state; got {shape} for {before} at {path}. Use jax.jit, not shard_map."
        )
    return jax.tree.leaves(moves), new


def counts_of_masters(pairs: list[Pair], *, with_stale: bool) -> tuple[dict[str, Float[Array, ""]], list[Pair]]:
    """(How many masters of float16 params lie beyond its range, `pairs`), before the step.

    `with_stale`: also how many 16-bit params are not their master, rounded.
    """
    limit = np.float32(np.finfo(np.float16).max)
    names = ["saturated_params", *["stale_masters"] * with_stale]
    is_float16 = lambda q: q.param.dtype == jnp.float16  # noqa: E731
    beside_master = lambda q: q.param is not None and q.master is not None and q.master.dtype == jnp.float32  # noqa: E731
    of = [i for i, q in enumerate(pairs) if beside_master(q) and (with_stale or is_float16(q))]
    if not of:
        return dict.fromkeys(names, jnp.zeros((), jnp.float32)), pairs

    flags = lambda mask: mask.astype(jnp.float32)  # noqa: E731
    beyond = lambda q: flags((jnp.abs(q.master) > limit) & is_float16(q))  # noqa: E731
    stale = lambda q: flags(masters.is_stale(q))  # noqa: E731
    total = lambda arrays: sum(map(jnp.sum, arrays), start=jnp.zeros((), jnp.float32))  # noqa: E731
    stale_ones = lambda own: [total(map(stale, own))] if with_stale else []  # noqa: E731

    def count(own: list[Pair]) -> list[Array]:
        return [total(beyond(q) for q in own if is_float16(q)), *stale_ones(own)]

    def count_if_any(own: list[Pair]) -> list[Array]:
        low = [q for q in own if is_float16(q)]
        if not low or backend.may_be_split(low):  # where devices share arrays, a reduction is a message, a join another
            return count(own)
        # XLA for CPU writes 4 bytes for each number of a sum; and it converts float16 slowly.
        may_saturate = reductions.largest_on_cpu([q.param for q in low], None) >= limit
        saturated = jnp.zeros((), jnp.float32)
        if known(may_saturate) is not False:
            joined = lambda low: jnp.sum(jnp.concatenate([beyond(q).reshape(-1) for q in low]))  # noqa: E731
            axes = varying_axes_of([q.master for q in low])
            saturated = lax.cond(may_saturate, joined, lambda _: as_varying(jnp.zeros((), jnp.float32), axes), low)
        return [saturated, *stale_ones(own)]

    def count_in_pass(own: list[Pair]) -> list[Array]:
        # XLA for GPU sums rows in the pass that writes the masters, but copies them for a second sum of them. To sum an
        # array it needs a second launch, so rows of one shape are added first. (Where devices share arrays, these may
        # be split in different ways.)
        counted = [lax.complex(beyond(q), stale(q)) if with_stale else beyond(q) for q in own]
        rows = lax.optimization_barrier([jnp.sum(jnp.atleast_1d(x), axis=-1) for x in counted])
        alike: dict[tuple[int, ...], Array] = {}
        for x in rows:
            alike[x.shape] = alike[x.shape] + x if x.shape in alike else x
        counts = total(rows if backend.may_be_split(rows) else alike.values())
        return [jnp.real(counts), jnp.imag(counts)] if with_stale else [counts]

    beside = lambda count, pairs: (count([pairs[i] for i in of]), pairs)  # noqa: E731
    on_gpu = lambda _, pairs: beside(count_in_pass, pairs)  # noqa: E731
    # XLA for CPU must be told to count before it overwrites the masters, or it copies them.
    on_cpu = lambda _, pairs: lax.optimization_barrier(beside(count_if_any, pairs))  # noqa: E731
    by_default = lambda _, pairs: beside(count, pairs)  # noqa: E731
    zeros = lambda own: [as_varying(jnp.zeros((), jnp.float32), varying_axes_of(own)) for _ in names]  # noqa: E731
    types = lambda pairs: beside(zeros, pairs)  # noqa: E731
    counts, pairs = by_platform(types, pairs, default=by_default, cpu=on_cpu, cuda=on_gpu, rocm=on_gpu)
    return dict(zip(names, counts, strict=True)), pairs


class InPlace(optax.GradientTransformationExtraArgs):
    """An optax transform with a `write` beside `init` and `update`: it moves weights and state itself, if told so.

    Attributes:
      write: `(grads: Gradients, state, params, pairs, step: Step) -> (pairs, state, saturated)`.
      measures: whether `write` needs the global norm of the gradients.
      backend: which kernels to use; see `pallas_kernels.backend`.
    """

    write: Callable[..., tuple[list[Pair], Any, Float[Array, ""]]]
    measures: bool
    backend: str


class Fused(NamedTuple):
    """An `InPlace` in `apply_gradients`; `tx.update` takes its update, as `Optax`."""

    inner: InPlace

    def init(self, weights: PyTree) -> Any:
        """As the inner transform's."""
        return Optax(self.inner).init(weights)

    def measure(self, grads: Gradients) -> Measured:
        """The flag and the norm in one pass over gradients that are still scaled."""

        def on_cpu(_: Any, leaves: list[Array], factor: Array) -> tuple[Array, Array]:
            # XLA for CPU writes 4 bytes for each number of a sum: a largest number costs less than a sum of flags.
            bad, _ = reductions.unusable_and_largest(leaves, factor)
            squares = reductions.sums_of_squares([x.astype(jnp.float32) * factor for x in leaves])
            return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32))), ~bad

        measure = functools.partial(pallas_kernels.gradient_norm, backend=self.inner.backend)
        with jax.named_scope("jaxmp.measure_gradients"):
            leaves = grads.scaled if self.inner.measures else lax.stop_gradient(grads.scaled)
            ways: dict[str, Any] = {"cpu": on_cpu} if self.inner.backend in ("auto", "xla") else {}
            norm, usable = by_platform(measure, leaves, grads.factor(), **ways)
        return Measured(~usable, norm)

    def move(
        self, step: Step, grads: Gradients, state: Any, pairs: list[Pair], params: PyTree, beside: Beside
    ) -> Moved:
        """One pass that reads gradients that are still scaled."""
        host_memory.check_on_device((state, pairs))
        with jax.named_scope("jaxmp.optimizer"):
            new, state, saturated = self.inner.write(grads, state, params, pairs, step)
        return Moved(new, state, {"saturated_params": saturated}, when(step.taken, beside.move, beside.old))


class Streaming(optax.GradientTransformationExtraArgs):
    """An optax transform whose state may lie in host memory, as `jaxmp.offload.stream_updates` makes it.

    Attributes:
      plain: the transform itself.
      window_bytes: see `stream_updates`.
    """

    plain: optax.GradientTransformationExtraArgs
    window_bytes: int


class Streamed(NamedTuple):
    """A `Streaming` in `apply_gradients`: each array in host memory is copied in once and out once, or not at all."""

    inner: Streaming

    def init(self, weights: PyTree) -> Any:
        """As the inner transform's."""
        return Optax(self.inner).init(weights)

    def measure(self, grads: Gradients) -> Measured:
        """Looks at gradients in host memory a few at a time."""
        if host_memory.first_on_host(grads.scaled) is None:
            return Optax(self.inner).measure(grads)
        bad, largest = windows.unusable_and_largest(grads.scaled, grads.factor())
        return Measured(bad, counts={"largest_gradient": largest})

    def move(
        self, step: Step, grads: Gradients, state: Any, pairs: list[Pair], params: PyTree, beside: Beside
    ) -> Moved:
        """One update of the inner transform, window by window."""
        if step.adds:
            return Optax(self.inner).move(step, grads, state, pairs, params, beside)
        plain, saturated = self.inner.plain, _saturated_params(pairs)

        def update(scaled: list[Array], state: Any, pairs: list[Pair]) -> tuple[list[Any], Any]:
            scaled, here, own = host_memory.to_device((scaled, state, pairs))
            weights = [masters.weight_of(pair) for pair in own]
            tree = grads._replace(scaled=scaled).tree()
            moves, new_state = updated(plain, tree, weights, here, params, step.extra)
            new_state = jax.tree.map(lambda n, o: host_memory.as_before(in_dtype_of(n, o), o), new_state, state)
            new = masters.moved(own, weights, moves, step.number, apart=True)
            return [jax.tree.map(host_memory.as_before, n, old) for n, old in zip(new, pairs, strict=True)], new_state

        def run_once(carry: Any) -> Any:
            _, pairs, state = carry
            new = windows.run(update, grads.scaled, state, pairs, window_bytes=self.inner.window_bytes)
            return jnp.zeros((), bool), *new

        # A loop that runs once or never, instead of `when`: XLA keeps the sharding of a loop's carry and updates it in
        # place. It replicates the results of a cond, unless each has a sharding constraint.
        with jax.named_scope("jaxmp.stream"):
            _, pairs, state = lax.while_loop(lambda carry: carry[0], run_once, (step.taken, pairs, state))
        return Moved(pairs, state, {"saturated_params": saturated}, when(step.taken, beside.move, beside.old))


def _saturated_params(pairs: Sequence[Pair]) -> Float[Array, ""]:
    """As `counts_of_masters`, counted in the params: the masters are in host memory."""
    limit = float(jnp.finfo(jnp.float16).max)
    low = [host_memory.to_device(q.param) for q in pairs if q.param is not None and q.param.dtype == jnp.float16]
    return sum((jnp.sum(jnp.abs(p) >= limit, dtype=jnp.float32) for p in low), start=jnp.zeros((), jnp.float32))


def optimizer_of(inner: optax.GradientTransformationExtraArgs) -> Optimizer:
    """The kind of an optax transform."""
    if isinstance(inner, InPlace):
        return Fused(inner)
    return Streamed(inner) if isinstance(inner, Streaming) else Optax(inner)


def as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """`inner` as an optax transform that gets extra arguments. (`optax.MultiSteps` is an object that makes one.)

    The `update` of MultiSteps takes all, but its type says that it takes none, and optax would drop them.
    """
    transform = inner.gradient_transformation() if hasattr(inner, "gradient_transformation") else inner
    if not isinstance(transform, optax.GradientTransformation):
        raise TypeError(
            f"inner must be an optax.GradientTransformation such as optax.adamw(1e-3); got {type(inner).__name__}"
        )
    if isinstance(getattr(transform.update, "__self__", None), optax.MultiSteps):
        return optax.GradientTransformationExtraArgs(transform.init, transform.update)
    return optax.with_extra_args_support(transform)
