"""Which module can run in which format: measured in a few steps, decided by named thresholds, and checked.

Without measurements, a policy is a guess: one layer has activations above float16's range, another has gradients below
it, and in a third, outliers leave no fp8 numbers for the other values. So `suggest_policy` runs these steps:

    1. a few steps in float32, in which every matmul measures the error of each format in its operands, its result and
       its gradient (`format_noise`); twice, because float16's loss scale is known only after the first time
    2. for each module and format, the gradient of the whole model with only this module in the format, compared with
       the gradient in float32 (`fake_quantize`): one compiled program, the roundings are arguments
    3. a decision for each module, then a run of the whole proposal in the same way
    4. a run of the proposal's code, compared with float32 (`rehearsal`). A proposal that does not train is never shown:
       the modules that cause the failure get a wider format, then the whole model gets another format, and the new
       proposal is run

Five programs are compiled, for any number of modules, and one more for each proposal that does not train.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import optax
from jaxtyping import PyTree

from jaxmp._src.autocast import explain
from jaxmp._src.base import tree_paths
from jaxmp._src.base.progress import Progress
from jaxmp._src.precision_search import fake_quantize, format_noise
from jaxmp._src.precision_search.fake_quantize import Roundings
from jaxmp._src.precision_search.format_noise import BACKWARD, CAST_TO_FP8, FORMATS, TENSORS, Noise
from jaxmp._src.precision_search.rehearsal import Rehearsal
from jaxmp._src.precision_search.subject import Gemm, Subject
from jaxmp._src.precision_search.suggestion import (
    Mix,
    ModuleEvidence,
    Problem,
    Rejected,
    Suggestion,
    TensorEvidence,
    exceptions,
    globs,
)
from jaxmp._src.precision_search.trials import Trial, measure
from jaxmp._src.step.policy import get_policy

_MOST_ATTEMPTS = 4  # proposals with one base; each moves the modules to blame to a wider format


class Thresholds(NamedTuple):
    """Limits for a module in a format: `thresholds` of `suggest_policy`, which says what each is.

    Example:
      >>> Thresholds(mix_sqnr=20.0).gradient_sqnr["fp8"]
      15.0
    """

    tensor_sqnr: Mapping[str, float] = {"fp8": 20.0, "fp16": 40.0, "bf16": 40.0}
    gradient_sqnr: Mapping[str, float] = {"fp8": 15.0, "fp16": 30.0, "bf16": 30.0}
    overflow: float = 0.0
    underflow: Mapping[str, float] = {"fp8": 0.05, "fp16": 0.01, "bf16": 0.01}
    mix_sqnr: float = 10.0


def suggest_policy(
    model: Any,
    batch: Any,
    formats: Sequence[str] = FORMATS,
    *,
    params: PyTree = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    steps: int = 4,
    has_aux: bool = False,
    thresholds: Mapping[str, Any] | None = None,
    time_budget: float | None = None,
    progress: Callable[[str], Any] | Literal["terminal"] | None = "terminal",
) -> Suggestion:
    """Measures a model for a few steps and proposes which modules run in fp8, float16, bfloat16 or float32.

    The model trains `steps` steps on `batch` in float32. Each matmul and convolution measures the error of every format
    in its operands (fp8: e4m3, with a scale for each tensor), its result, and its gradient (fp8: e5m2; float16: with
    the best loss scale, which is found first). Then each module alone is rounded to each format, forward and backward,
    and the gradient of the whole model is compared with float32. The policy is the 16-bit format in which most of the
    model keeps the thresholds. A module that also keeps them in fp8 runs in fp8, if it can (Dense, DenseGeneral, Einsum
    and 1x1 Conv, of linen or nnx). A module that does not keep them in the policy's format runs in the other 16-bit
    format, or stays float32. The whole proposal is run too; its gradient and loss are reported.

    The table is an emulation: operands and results of matmuls are rounded; everything else, and the sums inside a
    matmul, is float32. So the printed code itself is run at last: some steps on the params and the batch (cast params,
    scaled loss, autocast, fp8) beside float32. Each param, its gradient, and each operation with a result in 16 bits
    are compared. If it does not train, the modules to blame get a wider format, then all modules, and the new code is
    run. What is shown has trained.

    Modules in `cond`, `while` and functions with their own derivatives are not measured and not named; layers
    in one `scan` are one module. A few steps at the beginning say little about step 10,000: measure a trained
    checkpoint too.

    Args:
      model: a loss function `loss_fn(params, *batch) -> f32[]` in float32, as for `jaxmp.autocast`; or
        an nnx module.
      batch: a tuple of the loss's other arguments: pytrees of arrays. If `batch` is no tuple or list (an array, a
        dict), it is the only other argument.
      formats: those of "fp8", "fp16" and "bf16" to try. If two 16-bit formats are equally good, the first is taken.
      params: pytree of params, for a loss function; floats are measured in float32.
      loss_fn: for an nnx module, `loss_fn(model, *batch) -> f32[]`. Only `nnx.Param`s are trained.
      optimizer: an optax optimizer for the steps; default `optax.adam(1e-3)`.
      steps: how many.
      has_aux: whether the loss function returns `(loss, aux)`.
      thresholds: limits other than the usual ones, by name, such as `{"mix_sqnr": 20.0}`. SQNRs are in dB; without
        overflow and underflow e4m3 has 32, e5m2 26. By format: `tensor_sqnr`, the least SQNR of each tensor of a
        module's matmuls; `gradient_sqnr`, of the gradient of the whole model with only this module in the format;
        `underflow`, the largest share of the nonzero values of a tensor that may become zero. Numbers: `overflow`, the
        largest share of a tensor that may lie beyond the range; `mix_sqnr`, the least SQNR of the gradient with all
        modules as proposed. If it is lower, the module that costs most moves to the next wider format.
      time_budget: seconds after which no further module and no second proposal is tried; None: no limit. The
        measurement and the runs of float32 and of one proposal are always done.
      progress: "terminal": the stage and the seconds, on one line of a terminal, which is removed at the end; nothing
        in a log or a notebook. A function, such as `print`: it gets a line of text at each stage. None: no progress.

    Returns:
      A `Suggestion`. Printed, it is a table of the evidence with the reasons, what was run, and code to paste. `code`
      is only the code; `run` is what it did, `rejected` what was run before and does not train. `policy_kwargs`,
      `fp8_layers` and `modules` are the rules as data; `worst("fp8")` lists the modules that cost most.

    Raises:
      ValueError: an unknown format, or one without thresholds; no steps; a negative `time_budget`; a model without
        matmuls; a loss or gradient that is not finite in float32; params with fp8 scales; no params, or no loss
        function for a module.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> net, x = nn.Dense(16, name="out"), jax.random.normal(jax.random.key(0), (16, 16))
      >>> params = net.init(jax.random.key(1), x)["params"]
      >>> suggestion = suggest_policy(lambda p, x: jnp.mean(net.apply({"params": p}, x) ** 2), (x,), params=params)
      >>> suggestion.base, suggestion.mix.gradient_sqnr > 20
      ('fp16', True)
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats or isinstance(formats, str):
        raise ValueError(f"suggest_policy: formats must be some of {FORMATS}; got {formats!r}")
    if not isinstance(steps, int | np.integer) or steps < 1:
        raise ValueError(f"suggest_policy: steps must be a whole number, at least 1; got {steps!r}")
    if unknown := set(thresholds or ()) - set(Thresholds._fields):
        known = ", ".join(Thresholds._fields)
        raise ValueError(f"suggest_policy: thresholds must be some of {known}; got {', '.join(sorted(unknown))}")
    limits = Thresholds(**(thresholds or {}))
    for field in ("tensor_sqnr", "gradient_sqnr", "underflow"):
        missing = [name for name in formats if name not in getattr(limits, field)]
        if missing:
            raise ValueError(
                f"suggest_policy: thresholds.{field} needs a number for each format in formats; it has none for "
                f"{missing}. Add them, or remove these formats."
            )
    if not (progress is None or progress == "terminal" or callable(progress)):
        raise ValueError(
            f'suggest_policy: progress must be "terminal", a function of a line, or None; got {progress!r}'
        )
    if time_budget is not None and not time_budget >= 0:
        raise ValueError(f"suggest_policy: time_budget must be seconds, at least 0, or None; got {time_budget!r}")
    optimizer = optimizer or optax.adam(1e-3)
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(Progress("suggest_policy")) if isinstance(progress, str) else progress
        clock = Clock(line, time_budget)
        with get_policy("fp32").default_matmul_precision():
            subject = Subject(model, batch, params, loss_fn, has_aux)
            clock.say(f"measuring {len(subject.gemms)} matmuls and convolutions in {steps} steps")
            measured, loss_scale, trained = measure(subject, optimizer, steps)
            clock.say("compiling the trials")
            trial = Trial(subject, trained)
            decision = _Decision(subject, measured, loss_scale, trial, tuple(formats), limits, clock)
            first = decision.suggestion()
        return _certified(decision, first, Rehearsal(subject, optimizer, decision.in_float32().code), clock)


class Clock:
    """Says what is being done, and knows when a time budget (seconds, or None) is spent."""

    def __init__(self, progress: Progress | Callable[[str], Any] | None = None, budget: float | None = None):
        self._progress, self._budget, self._start = progress, budget, time.perf_counter()
        self._said = 0.0

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return self._budget is not None and self.spent > self._budget

    def say(self, what: str, *, often: bool = False) -> None:
        """Reports what begins now; what is said `often`, every five seconds at most."""
        if isinstance(self._progress, Progress):
            self._progress.say(what)
        elif self._progress is not None and (not often or self.spent > self._said + 5):
            self._said = self.spent
            self._progress(f"suggest_policy, {self.spent:.0f} s: {what}")


def _certified(decision: "_Decision", proposal: Suggestion, rehearsal: Rehearsal, clock: Clock) -> Suggestion:
    """The first proposal whose code trains: `proposal`, then others with wider formats; float32 is the last."""
    rejected: list[Rejected] = []
    for base in decision.bases():
        banned: set[tuple[str, str]] = set()
        scale: float | None = None
        for _ in range(_MOST_ATTEMPTS):
            if rejected or base != proposal.base:
                proposal = decision.suggestion(base, frozenset(banned), scale)
            if (clock.is_over and rejected) or set(proposal.formats.values()) == {"fp32"}:
                break
            clock.say(f"running the code of a proposal: {', '.join(dict.fromkeys(proposal.formats.values()))}")
            run = rehearsal.run(proposal)
            if not run.problems:
                return proposal._replace(run=run, rejected=tuple(rejected))
            clock.say(f"it does not train: {run.problems[0].message}")
            rejected.append(Rejected(base, proposal.formats, run.problems))
            more = decision.to_ban(proposal, run.problems) - banned
            lower = run.loss_scale if [p.path for p in run.problems] == ["loss_scale"] else scale
            if not more and lower == scale:
                break
            banned, scale = banned | more, lower
    return decision.in_float32()._replace(run=rehearsal.of_float32(), rejected=tuple(rejected))


class _Decision:
    """The proposals for a model, from its measured sums [matmul, tensor, n] and the highest loss scale."""

    def __init__(
        self,
        subject: Subject,
        measured: np.ndarray,
        loss_scale: float,
        trial: Trial,
        formats: tuple[str, ...],
        thresholds: Thresholds,
        clock: Clock | None = None,
    ):
        self.subject, self.measured, self.loss_scale = subject, measured, loss_scale
        self.trial, self.formats, self.thresholds = trial, formats, thresholds
        self.clock = clock or Clock()
        self.gemms: dict[str, list[int]] = {}  # of each module
        for i, gemm in enumerate(subject.gemms):
            self.gemms.setdefault(gemm.module, []).append(i)
        self.noises = [dict(zip(TENSORS, (format_noise.read(m) for m in of_gemm), strict=True)) for of_gemm in measured]
        self.widest = next((name for name in ("bf16", "fp16") if name in formats), "fp32")
        wide_first = sorted(formats, key="fp8".__eq__)
        tried = {(path, name): self._try(path, name) for name in wide_first for path in self.gemms}
        self.evidence = {(path, name): tried[path, name] for path in self.gemms for name in formats}

    def suggestion(
        self, base: str | None = None, banned: frozenset[tuple[str, str]] = frozenset(), scale: float | None = None
    ) -> Suggestion:
        """A proposal, emulated as a whole.

        Args:
          base: the format of most operations; None: the best one.
          banned: formats that a module must not run in, as (path, format); its modules without matmuls too.
          scale: the highest loss scale, if it is lower than the one that was measured.
        """
        base = self.bases()[0] if base is None else base
        wide = [base, *(name for name in self.formats if name not in ("fp8", base))] if base != "fp32" else []
        chosen = {}
        for path in self.gemms:
            chosen[path] = self._first(path, wide, banned)
            if chosen[path] == base and "fp8" in self.formats:
                chosen[path] = self._first(path, ["fp8", *wide], banned)
        mix = self._mix(chosen, base)
        while mix.gradient_sqnr < self.thresholds.mix_sqnr and set(chosen.values()) != {"fp32"}:
            lowered = [path for path in chosen if chosen[path] != "fp32"]
            worst = min(lowered, key=lambda path: self.evidence[path, chosen[path]].gradient_sqnr)
            chosen[worst] = self._first(worst, wide, banned) if chosen[worst] == "fp8" else "fp32"
            mix = self._mix(chosen, base)
        without_matmuls = {path for path, _ in banned} - set(self.gemms)
        others = {
            path: next((name for name in wide[1:] if (path, name) not in banned), "fp32") for path in without_matmuls
        }
        modules, unnamed = self._exceptions(chosen, others, base)
        return Suggestion(
            formats=chosen,
            base=base,
            keep_fp32=self._kept(chosen | others, base),
            fp8_layers=globs([path for path in chosen if chosen[path] == "fp8"], list(chosen)),
            modules=modules,
            unnamed=unnamed,
            is_nnx=self.subject.is_nnx,
            loss_scales=(self._least_loss_scale(chosen, base), scale or self.loss_scale),
            tensors=tuple(self._tensors()),
            evidence=tuple(self.evidence.values()),
            mix=mix,
        )

    def in_float32(self) -> Suggestion:
        """Everything in float32."""
        return self.suggestion("fp32", frozenset((path, "fp8") for path in self.gemms))

    def to_ban(self, proposal: Suggestion, problems: Sequence[Problem]) -> set[tuple[str, str]]:
        """The formats of modules that problems are to blame on."""
        found = set()
        for module in {p.module for p in problems if p.module is not None}:
            own = proposal.formats.get(module, proposal.base)
            found |= {(module, own), (module, "fp8"), *({(module, proposal.base)} if own == "fp8" else ())}
        return found

    def _try(self, path: str, name: str) -> ModuleEvidence:
        """A module alone in a format, and the reason against it, if any."""
        if self.clock.is_over:
            return ModuleEvidence(path, name, np.nan, np.nan, np.nan, "the time budget was spent before it was tried")
        self.clock.say(f"trying {path or '(top)'} in {name}", often=True)
        results = self.widest if name == "fp8" else name
        mix = self._mix({path: name}, results)
        reason = self._why_not(path, name)
        least = self.thresholds.gradient_sqnr[name]
        if not reason and mix.gradient_sqnr < least:
            reason = f"the gradient has {mix.gradient_sqnr:.1f} dB, less than {least:g}"
        difference = mix.loss - mix.reference_loss
        return ModuleEvidence(path, name, mix.gradient_sqnr, mix.cosine, difference, reason)

    def _why_not(self, path: str, name: str) -> str:
        limits = self.thresholds
        for i in self.gemms[path]:
            if name == "fp8" and self.subject.gemms[i].why_not_fp8:
                return self.subject.gemms[i].why_not_fp8
            for tensor, by_format in self.noises[i].items():
                if (name == "fp8" and tensor not in CAST_TO_FP8) or (tensor == "dx" and self.subject.gemms[i].is_data):
                    continue
                if name not in by_format:
                    return "no gradient comes back to it, so nothing was measured"
                noise = by_format[name]
                if noise.overflow > limits.overflow:
                    return f"{100 * noise.overflow:.3g}% of {tensor} overflow"
                if noise.underflow > limits.underflow[name]:
                    return f"{100 * noise.underflow:.3g}% of {tensor} become zero"
                if noise.sqnr < limits.tensor_sqnr[name]:
                    return f"{tensor} has {noise.sqnr:.1f} dB, less than {limits.tensor_sqnr[name]:g}"
        return ""

    def _first(self, path: str, names: Sequence[str], banned: frozenset[tuple[str, str]]) -> str:
        may = (name for name in names if (path, name) not in banned and not self.evidence[path, name].reason)
        return next(may, "fp32")

    def bases(self) -> list[str]:
        """The 16-bit formats by the operations that may run in each, most first; and float32."""
        flops = {}
        for name in self.formats:
            may = [path for path in self.gemms if name != "fp8" and not self.evidence[path, name].reason]
            flops[name] = sum(self._flops(i) for path in may for i in self.gemms[path])
        return [*sorted((name for name in flops if flops[name]), key=lambda name: -flops[name]), "fp32"]

    def _flops(self, i: int) -> float:
        """The operations of a matmul in all its calls: one in a scan runs once for each layer."""
        return self.measured[i, 0, 0] * explain.flops_of(self.subject.gemms[i].site.eqn)

    def _mix(self, chosen: dict[str, str], base: str) -> Mix:
        """The model with modules in formats, others in float32; fp8 has results in `base`."""

        def of(gemm: Gemm) -> Roundings:
            name = chosen.get(gemm.module, "fp32")
            return fake_quantize.roundings(name, loss_scale=self.loss_scale, results=base if name == "fp8" else None)

        return self.trial.run([of(gemm) for gemm in self.subject.gemms])

    def _least_loss_scale(self, chosen: dict[str, str], base: str) -> float:
        """The loss scale that float16 gradients need; those of fp8 modules are float16 if `base` is."""
        in_fp16 = [path for path, name in chosen.items() if name == "fp16" or (name == "fp8" and base == "fp16")]
        histograms = format_noise.exponents(self.measured)[:, [TENSORS.index(name) for name in BACKWARD]]
        found = [h for path in in_fp16 for i in self.gemms[path] for h in histograms[i]]
        if not found:
            return 1.0
        return max(format_noise.least_loss_scale(h, self.thresholds.underflow["fp16"]) for h in found)

    def _exceptions(
        self, chosen: dict[str, str], others: dict[str, str], base: str
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """Formats by glob of the flax modules outside `base`; and the scopes outside `base` that are no modules."""
        runs_in = {path: base if name == "fp8" else name for path, name in chosen.items()}
        named = [path for path in chosen if self.subject.gemms[self.gemms[path][0]].site.module is not None]
        found = exceptions({path: runs_in[path] for path in named} | others, base)
        return found, tuple(path for path in chosen if path not in named and runs_in[path] != base)

    def _kept(self, formats: dict[str, str], base: str) -> tuple[str, ...]:
        """Patterns of the params that stay float32: of modules in neither `base` nor fp8, and of norms."""
        if base == "fp32":
            return ()
        of_param = {g.param: formats[g.module] for g in self.subject.gemms if g.param is not None}
        paths = list(tree_paths.leaves_by_path(self.subject.params))
        for path in paths:  # of modules without matmuls
            folder = path.rpartition("/")[0]
            if folder in formats and folder not in self.gemms:
                of_param[path] = formats[folder]
        kept = [param for param, name in of_param.items() if name not in (base, "fp8")]
        folders = [param.rpartition("/")[0] for param in of_param if "/" in param]
        chosen_folders = [param.rpartition("/")[0] for param in kept if "/" in param]
        top = [param for param in kept if "/" not in param]
        norms = ("*norm*",) if any(tree_paths.matches(path, "*norm*") for path in paths) else ()
        return (*norms, *globs(chosen_folders, folders, below=True), *globs(top, paths))

    def _tensors(self) -> list[TensorEvidence]:
        found: list[tuple[str, int, str, dict[str, Noise]]] = [
            (path, n, tensor, by_format)
            for path, numbers in self.gemms.items()
            for n, i in enumerate(numbers)
            for tensor, by_format in self.noises[i].items()
        ]
        return [
            TensorEvidence(path, n, tensor, name, noise)
            for path, n, tensor, by_format in found
            for name, noise in by_format.items()
            if name in self.formats and (name != "fp8" or tensor in CAST_TO_FP8)
        ]
