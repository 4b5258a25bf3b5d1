"""Runs the code of a proposal for some steps before it is shown: does it train, and how much precision does it lose?

The search emulates matmuls only. The emulation does not include 16-bit operations between the matmuls, the cast of
params, and the loss scale in a real backward pass. So this file executes the code that will be printed, on the params
and the batch:

    policy, tx, low_precision_loss_fn = exec(code)
    params = policy.cast_to_param(params32)
    loss, grads = jaxmp.value_and_grad(low_precision_loss_fn)(params, *batch, opt_state=opt_state)
    params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)          some steps

It also runs the same steps in float32, and compares four things:

    steps       all are finite, few are skipped, and the loss falls as in float32
    params      each survives its cast
    gradients   of each param, against float32: nothing lost, the same direction
    operations  each result in 16 bits, forwards and backwards (`operations`), against the same operation in float32 on
                the same operands: no finite value beyond the range, and not much of it so small that few bits are left
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.bridges import nnx as nnx_bridge
from jaxmp._src.numerics import casting
from jaxmp._src.precision_search import format_noise
from jaxmp._src.precision_search.subject import Subject
from jaxmp._src.precision_search.suggestion import Operation, Param, Problem, Run, Suggestion
from jaxmp._src.programs import flax_modules, jaxprs, operations
from jaxmp._src.step import state as states, transform, value_and_grad as grads_lib
from jaxmp._src.step.policy import get_policy

STEPS = 10  # taken steps
_SKIPS = 20  # skipped steps, until a run is given up: the default scale of 2^16 falls to its floor
_HEALTHY_SKIPS = 2  # a dynamic scale of two overflows' patience may find its value once
_LOST = 0.1  # of a tensor's sum of magnitudes: a tenth with few or no bits left
_PARAM_SQNR = 20.0  # dB, of the cast of a param
_COSINE = 0.7  # between the gradients of a param; fp8 in all layers leaves 0.95 or more
_NOISE = 2.0**-18  # relative change of params that shows which gradients are rounding noise in float32 too
_AMPLIFIED = 2.0**10

# Operations that hand on, choose or order values: they make no new ones.
_NO_NEW_VALUES = (
    jaxprs.REARRANGES
    | jaxprs.HANDS_ON
    | frozenset(
        "abs argmax argmin broadcast_in_dim bitcast_convert_type clamp concatenate cummax cummin device_put "
        "dynamic_slice dynamic_update_slice expand_dims gather iota max min neg optimization_barrier pad pvary "
        "reduce_max reduce_min select_n sign slice sort split stop_gradient top_k reduce_precision nextafter".split()
    )
)


class Start(NamedTuple):
    """A run before its first step.

    Attributes:
      step: `(params, rest, opt_state) -> (params, rest, opt_state, grads, loss, skipped, what was seen)`.
      params, rest, opt_state: what it starts from; `rest` is the other state of an nnx module.
      look: knows the places of what was seen, once the step was traced.
    """

    step: Callable[..., Any]
    params: PyTree
    rest: PyTree
    opt_state: Any
    look: operations.Look


class Trained(NamedTuple):
    """The steps of a run.

    Attributes:
      start, params: before and after the steps.
      losses: of the steps that were taken.
      skipped: how many steps were skipped.
      loss_scale: after the steps.
      grads: unscaled, float32, of the first step that was taken; None if there was none.
      seen: by operation, the largest [share beyond the range, share lost, magnitude] of all steps.
    """

    start: Start
    params: PyTree
    losses: list[float]
    skipped: int
    loss_scale: float
    grads: PyTree
    seen: dict[Any, np.ndarray]


class _Gradient(NamedTuple):
    """The gradient of a param: its share that became zero, and sums of squares and products with float32."""

    lost: float
    own: float
    signal: float
    product: float
    noise: float
    is_noise: bool  # it is rounding noise in float32 too

    @property
    def cosine(self) -> float:
        return self.product / np.sqrt(self.own * self.signal) if self.own * self.signal > 0 else 0.0


class Rehearsal:
    """Runs proposals for a model beside the same steps in float32, which are run once.

    A loss that is not finite in float32 is a ValueError.
    """

    def __init__(self, subject: Subject, optimizer: Any, float32_code: str, steps: int = STEPS):
        self.subject, self.optimizer, self.steps = subject, optimizer, steps
        with get_policy("fp32").default_matmul_precision():
            start = self._start(float32_code)
            self.reference = self._train(start)
            if self.reference.grads is None or not np.all(np.isfinite(self.reference.losses)):
                raise ValueError(
                    f"suggest_policy: the code in float32 does not train: of {steps} steps {self.reference.skipped} "
                    f"were skipped, with losses {self.reference.losses}. Pass another optimizer=, or check the batch."
                )
            nudged = jax.tree.map(_nudged, start.params)
            _, _, _, self._nudged_grads, _, _, _ = start.step(nudged, start.rest, start.opt_state)

    def run(self, proposal: Suggestion) -> Run:
        """Runs the code of a proposal. The result says what it did, and names the problems."""
        try:
            found = self._train(self._start(proposal.code))
        except Exception as error:
            return self._failed(f"the code raises {type(error).__name__}: {str(error)[:300]}")
        gradients = {} if found.grads is None else self._gradients(found)
        params = self._params(found, gradients)
        seen = [Operation(place, *map(float, found.seen[key])) for key, place in found.start.look.places.items()]
        sums = np.sum([g[1:5] for g in gradients.values()] or [[np.nan] * 4], axis=0)
        own, signal, product, noise = map(float, sums)
        all_of = _Gradient(0.0, own, signal, product, noise, False)
        run = Run(
            steps=len(found.losses),
            skipped=found.skipped,
            losses=tuple(found.losses),
            reference_losses=tuple(self.reference.losses[: len(found.losses)]),
            loss_scale=found.loss_scale,
            gradient_sqnr=format_noise.decibel(all_of.noise / all_of.signal),
            cosine=float(all_of.cosine),
            params=tuple(params),
            operations=tuple(seen),
            problems=(),
        )
        modules = found.start.look.modules
        problems = [*_of_steps(run, self.steps), *_of_params(run.params, modules), *_of_operations(run.operations)]
        return run._replace(problems=tuple(problems))

    def of_float32(self) -> Run:
        """The run in float32, which every other is compared with."""
        losses = tuple(self.reference.losses)
        return Run(len(losses), self.reference.skipped, losses, losses, 1.0, np.inf, 1.0, (), (), ())

    def _failed(self, message: str) -> Run:
        return Run(0, 0, (), (), 1.0, -np.inf, np.nan, (), (), (Problem("", None, message),))

    def _start(self, code: str) -> Start:
        """Executes the code, as it would be pasted, and makes a step of it."""
        subject = self.subject
        names: dict[str, Any] = {"loss_fn": subject.given_loss_fn, "optimizer": self.optimizer}
        if subject.is_nnx:
            names["model"] = subject.new_model()
        with _quietly():
            exec(f"import jax.numpy as jnp\nimport jaxmp\n{code}", names)
        policy, tx, loss_fn = names["policy"], names["tx"], flax_modules.named(names["low_precision_loss_fn"])
        if subject.is_nnx:
            graphdef, variables, rest = nnx.split(names["model"], nnx.Param, ...)
            params32, rest = nnx.as_pure(variables), nnx.as_pure(rest)
        else:
            graphdef, params32, rest = None, subject.params, ()

        def forward(params: PyTree, rest: PyTree, opt_state: Any, batch: Any) -> Any:
            if graphdef is None:
                differentiated = grads_lib.value_and_grad(loss_fn, has_aux=subject.has_aux)
                out, grads = differentiated(params, *batch, opt_state=opt_state)
            else:
                model = nnx.merge(graphdef, params, rest, copy=True)
                differentiated = nnx_bridge.value_and_grad(loss_fn, has_aux=subject.has_aux)
                out, grads = differentiated(model, *batch, opt_state=opt_state)
                grads, rest = nnx.as_pure(grads), nnx.as_pure(nnx.split(model, nnx.Param, ...)[2])
            return (out[0] if subject.has_aux else out), grads, rest

        look = operations.Look(_measure)

        @jax.jit
        def step(params: PyTree, rest: PyTree, opt_state: Any) -> Any:
            given = (params, rest, opt_state, subject.given_batch)
            closed, shapes = jax.make_jaxpr(forward, return_shape=True)(*given)
            results = look.run(closed, jax.tree.leaves(given))
            loss, grads, new_rest = jax.tree.unflatten(jax.tree.structure(shapes), results)
            inverse = 1 / states.get_loss_scale(opt_state)
            unscaled = jax.tree.map(lambda g: g.astype(jnp.float32) * inverse, grads)
            params, opt_state = transform.apply_gradients(tx, grads, opt_state, params)
            skipped = states.was_skipped(opt_state)
            rest = jax.tree.map(lambda new, old: jnp.where(skipped, old, new), new_rest, rest)
            return params, rest, opt_state, unscaled, loss, skipped, look.found

        with _quietly():
            opt_state, params = tx.init(params32), policy.cast_to_param(params32)
        return Start(step, params, rest, opt_state, look)

    def _train(self, start: Start) -> Trained:
        params, rest, opt_state = start.params, start.rest, start.opt_state
        losses: list[float] = []
        seen: dict[Any, np.ndarray] = {}
        skips, first = 0, None
        with _quietly():
            while len(losses) < self.steps and skips < _SKIPS:
                params, rest, opt_state, grads, loss, skipped, found = start.step(params, rest, opt_state)
                if skipped:
                    skips += 1
                    if skips < _SKIPS:
                        continue
                else:
                    losses.append(float(loss))
                    first = grads if first is None else first
                for key, x in jax.device_get(found).items():
                    seen[key] = np.maximum(seen.get(key, 0), x)
        scale = float(states.get_loss_scale(opt_state))
        return Trained(start, params, losses, skips, scale, first, seen)

    def _gradients(self, found: Trained) -> dict[str, _Gradient]:
        """How the gradient of each param compares with float32."""
        trees = [tree_paths.leaves_by_path(x) for x in (found.grads, self.reference.grads, self._nudged_grads)]
        low, exact, nudged = map(jax.device_get, trees)
        return {path: _of_gradient(low[path], exact[path], nudged[path]) for path in exact if path in low}

    def _params(self, found: Trained, gradients: dict[str, _Gradient]) -> list[Param]:
        """Each param: the error of its cast, and how its gradient compares with float32."""
        cast = tree_paths.leaves_by_path(found.start.params)
        rows = []
        for path, x in tree_paths.leaves_by_path(self.subject.params).items():
            if casting.is_float(x):
                error = _relative_error(cast[path], x) if cast[path].dtype != jnp.float32 else 0.0
                g = gradients.get(path)
                lost, cosine = (0.0, 1.0) if g is None or g.is_noise else (g.lost, g.cosine)
                rows.append(Param(path, cast[path].dtype.name, format_noise.decibel(error), lost, cosine))
        return rows


def _of_steps(run: Run, steps: int) -> list[Problem]:
    if run.steps < steps:
        return [Problem("", None, f"{run.skipped} of {run.skipped + run.steps} steps were skipped")]
    if run.skipped > _HEALTHY_SKIPS:
        seen = f"{run.skipped} steps were skipped until the loss scale was {run.loss_scale:g}"
        return [Problem("loss_scale", None, seen)]
    if not np.all(np.isfinite(run.losses)):
        return [Problem("", None, f"the loss is {run.losses[int(np.argmin(np.isfinite(run.losses)))]}")]
    (first, last), (first32, last32) = ((x[0], x[-1]) for x in (run.losses, run.reference_losses))
    seen = f"the loss goes from {first:.6g} to {last:.6g}, in float32 from {first32:.6g} to {last32:.6g}"
    known = 2 * abs(first - first32) + 1e-3 * abs(first32)
    starts_elsewhere = abs(first - first32) > 0.1 * abs(first32) + 1e-30
    falls_less = first32 - last32 > known and first - last < 0.5 * (first32 - last32)
    rises = last > max(first32, last32) + 0.5 * max(abs(first32), abs(last32))
    return [Problem("", None, seen)] if starts_elsewhere or falls_less or rises else []


def _of_params(params: tuple[Param, ...], modules: set[str]) -> list[Problem]:
    found = []
    for p in params:
        if p.cast_sqnr < _PARAM_SQNR:
            message = f"its cast to {p.dtype} has {p.cast_sqnr:.1f} dB, less than {_PARAM_SQNR:g}"
        elif p.gradient_lost > _LOST:
            message = f"{100 * p.gradient_lost:.3g}% of its gradient become zero"
        elif p.cosine < _COSINE:
            message = f"its gradient has a cosine of {p.cosine:.3f} with the one in float32"
        else:
            continue
        folder = p.path.rpartition("/")[0]
        found.append(Problem(p.path, folder if folder in modules else None, f"{p.path}: {message}"))
    return found


def _of_operations(seen: tuple[Operation, ...]) -> list[Problem]:
    found: dict[str, Problem] = {}  # the first of each module
    for x in seen:
        place, limit = x.place, float(jnp.finfo(x.place.dtype).max)
        if x.beyond > 0:
            message = f"{100 * x.beyond:.3g}% of {place} exceed {place.dtype}, which ends at {limit:.5g}"
            message += f": they reach {x.largest:.3g}" if limit < x.largest < 3e38 else ""
        elif x.lost > _LOST:
            message = f"{100 * x.lost:.3g}% of {place}, at most {x.largest:.3g}, are below the numbers of {place.dtype}"
        else:
            continue
        found.setdefault(place.path, Problem(place.path, place.module, message))
    return list(found.values())


def _measure(eqn: Any, operands: list[Any], results: list[Any]) -> Float[Array, "3"] | None:
    """Of a 16-bit result: the shares beyond its range and below it, and its largest magnitude; None for others."""
    out = results[0]
    name = eqn.primitive.name
    if len(results) != 1 or out.size == 0 or not casting.is_low_precision(out.dtype) or name in _NO_NEW_VALUES:
        return None
    info = jnp.finfo(out.dtype)
    floats = [x for x in operands if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    if name == "convert_element_type":
        if not floats:
            return None
        exact = floats[0].astype(jnp.float32)
    elif jaxprs.is_elementwise(eqn):
        wide = [x.astype(jnp.float32) if casting.is_low_precision(x.dtype) else x for x in map(jnp.asarray, operands)]
        exact = eqn.primitive.bind(*wide, **eqn.params)
    else:
        exact = out.astype(jnp.float32)
        given = [jnp.all(jnp.isfinite(x)) for x in floats if x.dtype.itemsize > 1]
        exact = jnp.where(jnp.isfinite(exact) | ~jnp.all(jnp.stack(given)), exact, np.finfo(np.float32).max)
    size = jnp.abs(exact)
    size = jnp.where(jnp.isfinite(size), size, 0)
    limit, few_bits = float(info.max), max(float(info.smallest_normal) * 2.0 ** (4 - info.nmant), 2.0**-126)
    terms = (
        jnp.minimum(size, 1e30),
        jnp.where(size < few_bits, size, 0),
        (size >= limit * (1 + float(info.eps) / 4)).astype(jnp.float32),
        size,
    )
    zero = np.float32(0)

    def join(a: Any, b: Any) -> Any:
        return (*(x + y for x, y in zip(a[:3], b[:3], strict=True)), jnp.maximum(a[3], b[3]))

    total, small, beyond, largest = jax.lax.reduce(terms, (zero,) * 4, join, tuple(range(size.ndim)))
    return jnp.stack([beyond / size.size, jnp.where(total > 0, small / jnp.where(total > 0, total, 1), 0), largest])


# On the host: a program for each shape would take longer to compile than the numbers to read.


def _nudged(x: Any) -> Any:
    """`x` with relative changes of the size of a few roundings."""
    if not casting.is_float(x):
        return x
    signs = np.random.default_rng(x.size).choice([-1.0, 1.0], x.shape)
    return (np.asarray(x) * (1 + _NOISE * signs)).astype(x.dtype)


def _relative_error(low: Any, exact: Any) -> float:
    """Noise to signal of a rounded tensor."""
    low, exact = np.asarray(low).astype(np.float64), np.asarray(exact, np.float64)
    signal = np.sum(exact**2)
    return float(np.sum((low - exact) ** 2) / signal) if signal > 0 else 0.0


def _of_gradient(low: Any, exact: Any, nudged: Any) -> _Gradient:
    low, exact, nudged = (np.asarray(x, np.float64) for x in (low, exact, nudged))
    size, signal = np.abs(exact), float(np.sum(exact**2))
    lost = float(np.sum(size[low == 0]) / max(np.sum(size), 1e-300))
    is_noise = float(np.sum((nudged - exact) ** 2)) >= (_NOISE * _AMPLIFIED) ** 2 * signal
    squares = (float(np.sum(x)) for x in (low**2, low * exact, (low - exact) ** 2))
    own, product, noise = squares
    return _Gradient(lost, own, signal, product, noise, is_noise)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without warnings: the code that a user pastes gives its own, and those of a rejected proposal help nobody."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
