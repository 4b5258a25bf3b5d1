"""Runs a captured step again, alone: did the numbers cause the fault, or the machine?

The step is compiled and run several times, and the bits of its results are compared. A hardware fault does not occur
again. A fault in the numbers occurs again, with the same bits each time. If the bits differ each time, the program
depends on something that no capture holds. If the fault occurs again, the step is run operation by operation, with
smaller loss scales, and in float32.
"""

import dataclasses
import hashlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmp._src.base import named_functions
from jaxmp._src.bridges import nnx as nnx_bridge
from jaxmp._src.programs import array_functions, flax_modules, jaxprs
from jaxmp._src.replay import bad_operation, captures, first_bad_op, nonfinite
from jaxmp._src.step import state as states, value_and_grad

# Two compilations of a step may round differently; a spike of the loss is far more.
_SAME_LOSS = 0.05
_NARROW = (jnp.float16, jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Run:
    """One replay.

    Attributes:
      loss: the loss.
      bad: the first value of the gradients that is not finite, or None.
      digest: of all bits of the loss and the gradients.

    Example:
      >>> Run(loss=0.5, bad=None, digest="0f").finite
      True
    """

    loss: float
    bad: nonfinite.NonFinite | None
    digest: str

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return self.bad is None and math.isfinite(self.loss)


@dataclasses.dataclass(frozen=True)
class Replay:
    """The result of replays of a step; prints as a report.

    Attributes:
      verdict: "transient" (the step is finite now), "reproduced" (finite, and as it was observed), "data" (an argument
        is not finite), "loss scale" (finite at a smaller one), "deterministic" (not finite, the same each time) or
        "not reproducible" (the replays differ).
      because: the verdict in a sentence.
      capture: the capture.
      runs: the replays.
      bad_op: the first operation that makes inf or NaN; None if the step is finite, or finite when its operations run
        one by one.
      finite_scale: the largest loss scale, halved again and again, at which the step is finite; None if there is none,
        or if the step is finite.
      float32: whether the step is finite with 16-bit arguments in float32 and a loss scale of 1; None if it was finite
        already, or cannot run in float32.
      notes: other facts to know, such as other versions than in the run.

    Example:
      >>> import tempfile
      >>> path = captures.capture(tempfile.mkdtemp(), jnp.sum, jnp.ones(2), loss_scale=1.0, observed={"loss": jnp.nan})
      >>> found = replay(path, jnp.sum)
      >>> found.verdict, found.clean, [run.loss for run in found.runs]
      ('transient', True, [2.0, 2.0, 2.0])
    """

    verdict: str
    because: str
    capture: captures.Capture
    runs: tuple[Run, ...]
    bad_op: bad_operation.BadOp | None
    finite_scale: float | None
    float32: bool | None
    notes: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Whether the fault did not come back."""
        return self.verdict == "transient"

    def __str__(self) -> str:
        c, runs = self.capture, self.runs
        seen = {name: x for name, x in c.observed.items() if name == "loss" or not math.isnan(x)}  # NaN: not computed
        observed = ", ".join(f"{name} {x:.6g}" for name, x in seen.items())
        lines = [f"{c.path}: loss scale {c.loss_scale:.6g}", f"observed: {observed or 'nothing'}", ""]
        same = "the same bits each time" if len({r.digest for r in runs}) == 1 else "different bits"
        lines.append(f"replayed {len(runs)} times, compiled: {same}" if len(runs) > 1 else "replayed once, compiled")
        for run in {run.digest: run for run in runs}.values():
            lines.append(f"  loss {run.loss:.6g}, " + (f"gradient {run.bad}" if run.bad else "gradients finite"))
        if self.bad_op is not None:
            lines += ["", "operation by operation, the first that is not finite:", str(self.bad_op)]
        elif any(not r.finite for r in runs):
            lines += ["", "operation by operation all is finite: the compiled program computes other numbers"]
        if self.float32 is not None:
            finite = "finite" if self.float32 else "not finite"
            lines += ["", f"with 16-bit arguments in float32 and a loss scale of 1: {finite}"]
        lines += ["", f"{self.verdict}: {self.because}", *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines)


def replay(
    capture: captures.Capture | str | os.PathLike[str],
    loss_fn: Callable[..., Any] | None = None,
    *,
    times: int = 3,
    like: Sequence[Any] | None = None,
) -> Replay:
    """Runs a captured step again, alone.

    Args:
      capture: a `Capture`, its folder, or a directory of several; then the last is taken.
      loss_fn: the loss function; default: the function named in the capture. A region (`jaxmp.autocast`,
        `jaxmp.fp8.autocast`) that was around the call of the step must be in it, or around this call.
      times: how often, >= 1. One run says nothing about reproducibility.
      like: see `load_capture`.

    Returns:
      A `Replay`: `verdict`, `clean`, `bad_op` and more. It prints as a report.

    Raises:
      ValueError: the loss function cannot be imported by its name; the errors of `load_capture`.

    Example:
      >>> import tempfile
      >>> def loss_fn(params, x):
      ...     return jnp.mean((params["w"] * x).astype(jnp.float32))
      >>> params, directory = {"w": jnp.ones(2, jnp.float16)}, tempfile.mkdtemp()
      >>> path = captures.capture(directory, loss_fn, params, jnp.full(2, 4.0, jnp.float16), loss_scale=2.0**16)
      >>> found = replay(path, loss_fn)
      >>> found.verdict, found.finite_scale, found.bad_op.backward
      ('loss scale', 16384.0, True)
    """
    if times < 1:
        raise ValueError(f"times must be a number of replays >= 1; got {times}")
    if loss_fn is None:
        is_loaded = isinstance(capture, captures.Capture)
        name = capture.function if is_loaded else captures.find_capture(capture)[1]["function"]
        try:
            loss_fn = named_functions.function_of(name)
        except ValueError as e:
            raise ValueError(
                f"a replay needs the loss function: {e}, or pass the function to jaxmp.monitor.replay"
            ) from e
    if not isinstance(capture, captures.Capture):
        main = sys.modules.get(getattr(loss_fn, "__module__", ""))
        capture = captures.load_capture(capture, like=like, functions_of=main)
    step = _Step(capture, loss_fn)
    runs = tuple(step.run(capture.loss_scale) for _ in range(times))
    bad_op = finite_scale = in_float32 = None
    if not all(run.finite for run in runs):
        bad_op = step.walk(capture.loss_scale)
        finite_scale = _finite_scale(step, capture.loss_scale) if all(math.isfinite(r.loss) for r in runs) else None
        in_float32 = _is_finite_in_float32(capture, loss_fn)
    verdict, because = _judge(capture, runs, bad_op, finite_scale)
    return Replay(verdict, because, capture, runs, bad_op, finite_scale, in_float32, _notes(capture, in_float32))


class _Step:
    """A step of a capture, traced once: run compiled, or operation by operation."""

    def __init__(self, capture: captures.Capture, loss_fn: Callable[..., Any], dtype: Any = None):
        inputs = array_functions.Inputs(array_functions.leaves_of((capture.args, capture.kwargs)))
        self.paths, self.arrays = inputs.paths, inputs.values
        if dtype is not None:
            self.arrays = [jnp.asarray(x).astype(dtype) if x.dtype in _NARROW else x for x in self.arrays]

        named = flax_modules.named(loss_fn)
        options = capture.options if dtype is None else capture.options | {"policy": None}

        def step(loss_scale: Any, *arrays: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                return _value_and_grad(options, named, args, kwargs, loss_scale)

            return inputs.call(run, arrays)

        self.closed, shapes = jax.make_jaxpr(step, return_shape=True)(jnp.float32(1), *self.arrays)
        self.treedef = jax.tree.structure(shapes)
        self.compiled = jax.jit(jaxprs.jaxpr_as_function(*jaxprs.open_jaxpr(self.closed)))

    def run(self, loss_scale: float) -> Run:
        results = self.compiled(jnp.float32(loss_scale), *self.arrays)
        digest = hashlib.blake2b(digest_size=16)
        for x in results:
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
            digest.update(b"" if is_key else np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8).data)
        loss, gradients = jax.tree.unflatten(self.treedef, results)
        return Run(float(loss), nonfinite.first_nonfinite(gradients), digest.hexdigest())

    def walk(self, loss_scale: float) -> bad_operation.BadOp | None:
        return first_bad_op.walk(self.closed, [jnp.float32(loss_scale), *self.arrays], ["loss_scale", *self.paths])


def _value_and_grad(options: dict[str, Any], loss_fn: Any, args: Any, kwargs: Any, loss_scale: Any) -> Any:
    zero = jnp.zeros((), jnp.int32)
    opt_state = states.LossScaleState(loss_scale, zero, zero)
    common = {name: options[name] for name in ("has_aux", "accumulate", "accumulate_argnums")}
    common["policy"] = options.get("policy")  # captures of older versions hold none
    if options["argnums"] == 0 and array_functions.is_module(args[0]):
        differentiated = nnx_bridge.value_and_grad(loss_fn, wrt=options["wrt"], **common)
    else:
        differentiated = value_and_grad.value_and_grad(loss_fn, options["argnums"], **common)
    value, gradients = differentiated(*args, opt_state=opt_state, **kwargs)
    return value[0] if options["has_aux"] else value, nnx.as_pure(gradients)


def _finite_scale(step: _Step, loss_scale: float) -> float | None:
    """The largest of loss_scale / 2, / 4, ... >= 1 at which the step is finite, by bisection."""
    known_bad, most = 0, max(math.floor(math.log2(max(loss_scale, 1.0))), 0)
    if most == 0 or not step.run(loss_scale / 2**most).finite:
        return None
    while most - known_bad > 1:
        k = (known_bad + most) // 2
        known_bad, most = (known_bad, k) if step.run(loss_scale / 2**k).finite else (k, most)
    return loss_scale / 2**most


def _is_finite_in_float32(capture: captures.Capture, loss_fn: Any) -> bool | None:
    try:
        return _Step(capture, loss_fn, jnp.float32).run(1.0).finite
    except Exception:  # the loss function works in its own dtypes only
        return None


def _judge(
    capture: captures.Capture, runs: tuple[Run, ...], bad_op: bad_operation.BadOp | None, finite_scale: float | None
) -> tuple[str, str]:
    loss = runs[0].loss
    are = f"{len(runs)} replays are" if len(runs) > 1 else "one replay is"
    if len({run.digest for run in runs}) > 1:
        return "not reproducible", (
            f"{len(runs)} replays of the same inputs differ. The step depends on something that is not among its "
            f"inputs (a callback, state of the host, an operation that is not deterministic), or the machine computes "
            f"wrong numbers"
        )
    if all(run.finite for run in runs):
        return _judge_finite(capture.observed, loss, are)
    if bad_op is not None and bad_op.primitive == "argument":
        argnums = capture.options["argnums"]
        among = {str(i) for i in ((argnums,) if isinstance(argnums, int) else argnums)}
        params = " These are the params: an earlier step or the checkpoint made them so."
        is_param = bad_op.module.partition("/")[0] in among
        return "data", f"{bad_op.where()}, before anything is computed.{params if is_param else ''}"
    where = f"at {bad_op.where()}" if bad_op is not None else "and operation by operation it is finite"
    if finite_scale is not None:
        return "loss scale", (
            f"{capture.loss_scale:.6g} is too high for this step, which is finite at {finite_scale:.6g}. It overflows "
            f"{where}. A dynamic scale backs off by itself"
        )
    scale = " at any loss scale down to 1" if capture.loss_scale > 1 else ""
    return "deterministic", f"{are} not finite{scale}, {where}"


def _judge_finite(observed: dict[str, float], loss: float, are: str) -> tuple[str, str]:
    now = f"{are} finite, with equal bits"
    then = observed.get("loss")
    if observed.get("grads_finite", 1.0) == 0 or (then is not None and not math.isfinite(then)):
        return "transient", f"the step was not finite, and {now}"
    if then is not None and abs(then - loss) > _SAME_LOSS * max(abs(then), abs(loss)):
        return "transient", f"the step had a loss of {then:.6g}, and {now}, with a loss of {loss:.6g}"
    if observed.get("skipped") and not observed.get("grads_finite"):
        return "transient", (
            f"the step was skipped, and {now}. (If skip_if skipped it, and not an overflow, pass "
            f"grads_finite=True in observed.)"
        )
    if then is not None:
        return "reproduced", f"{now}, and the loss is {loss:.6g} again, as observed"
    return "transient", f"{now}; nothing was observed of the step itself"


def _notes(capture: captures.Capture, in_float32: bool | None) -> tuple[str, ...]:
    here = captures.about()
    notes = [
        f"{name} was {then!r} in the run, and is {here.get(name)!r} here"
        for name, then in capture.about.items()
        if here.get(name) != then
    ]
    if in_float32 is not None:
        notes.append(
            "modules with their own dtype=, and autocast, compute in that dtype even if the arguments are float32"
        )
    return tuple(notes)
