"""The result of `suggest_policy`: a proposal, as rules and as code to paste, and its evidence."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxmp._src.base import tables, tree_paths
from jaxmp._src.numerics import formats
from jaxmp._src.precision_search.format_noise import TENSORS, Noise
from jaxmp._src.programs import operations


class TensorEvidence(NamedTuple):
    """One tensor of one matmul in one format.

    Attributes:
      module: path of the module; "" outside of all.
      gemm: the number of its matmul, in the order in which they run.
      tensor: "x" and "w", the operands (w is the param, if there is one); "y", the result; "dy", "dx", "dw", their
        gradients.
      format: "fp8" (scaled; e4m3, for dy e5m2), "fp16" (gradients with the highest loss scale) or "bf16".
      noise: the error.
    """

    module: str
    gemm: int
    tensor: str
    format: str
    noise: Noise


class ModuleEvidence(NamedTuple):
    """One module in one format, all others in float32.

    Attributes:
      module: its path.
      format: the format.
      gradient_sqnr: of the gradient of all params, in dB, compared with float32; inf: the same bits.
      cosine: of the angle between both gradients; NaN if the gradient is not finite.
      loss_difference: the loss minus the loss in float32.
      reason: why it should not run in this format; "" if it may.
    """

    module: str
    format: str
    gradient_sqnr: float
    cosine: float
    loss_difference: float
    reason: str


class Mix(NamedTuple):
    """All modules in their proposed formats, compared with all in float32.

    Attributes:
      gradient_sqnr, cosine: as in `ModuleEvidence`.
      loss, reference_loss: at the params after the measured steps.
    """

    gradient_sqnr: float
    cosine: float
    loss: float
    reference_loss: float


class Param(NamedTuple):
    """One param in the run of a proposal.

    Attributes:
      path: its path.
      dtype: the dtype that the policy casts it to.
      cast_sqnr: of this cast, in dB; inf: nothing was lost.
      gradient_lost: the share of its gradient (of the sum of magnitudes in float32) that became zero.
      cosine: between its gradient and the one in float32; 1 for a gradient that is rounding noise in float32 too.
    """

    path: str
    dtype: str
    cast_sqnr: float
    gradient_lost: float
    cosine: float


class Operation(NamedTuple):
    """One operation with a result in 16 bits in the run of a proposal, compared with itself in float32.

    Attributes:
      place: its name, module, dtype, and whether it is a part of the backward pass.
      beyond: the largest share of its results beyond the range of its dtype.
      lost: the largest share (of the sum of magnitudes) so small that few or no bits are left.
      largest: the largest magnitude, in float32.
    """

    place: operations.Place
    beyond: float
    lost: float
    largest: float


class Problem(NamedTuple):
    """Why a proposal does not train.

    Attributes:
      path: of the param, the module or the scope; "" for the whole run.
      module: the flax module whose format is to blame; None if it is not known.
      message: what was seen.
    """

    path: str
    module: str | None
    message: str


class Run(NamedTuple):
    """What the code of a proposal did on the params and the batch, beside the same steps in float32.

    Attributes:
      steps, skipped: how many steps were taken and skipped.
      losses, reference_losses: of the steps that were taken, and of the same steps in float32.
      loss_scale: after the steps.
      gradient_sqnr, cosine: of the first gradient of all params, compared with float32.
      params: one entry for each param.
      operations: one entry for each operation with a result in 16 bits, forwards and backwards.
      problems: why it does not train; empty for a proposal that is shown.
    """

    steps: int
    skipped: int
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    loss_scale: float
    gradient_sqnr: float
    cosine: float
    params: tuple[Param, ...]
    operations: tuple[Operation, ...]
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        ends = [f"{x[0]:.6g} to {x[-1]:.6g}" for x in (self.losses, self.reference_losses)]
        lines = [
            f"this code ran {self.steps} steps on the batch, {self.skipped} skipped: loss {ends[0]} "
            f"(float32: {ends[1]})"
        ]
        if self.operations:
            lines.append(f"its gradient: {self.gradient_sqnr:.1f} dB, cosine {self.cosine:.6f}; " + self._weakest())
            largest = max(self.operations, key=lambda x: x.largest / float(jnp.finfo(x.place.dtype).max))
            lines.append(
                f"{len(self.operations)} operations give 16 bits; the one nearest to the end of its range is "
                f"{largest.place} ({largest.place.dtype}), with {largest.largest:.3g}"
            )
        return "\n".join(lines)

    def _weakest(self) -> str:
        weakest = min(self.params, key=lambda p: p.cosine)
        return f"of {len(self.params)} params the worst is {weakest.path}, cosine {weakest.cosine:.6f}"


class Rejected(NamedTuple):
    """A proposal whose code was run and does not train: `formats` by module, its `base`, and the `problems`."""

    base: str
    formats: dict[str, str]
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        names = sorted(set(self.formats.values()), key=list(self.formats.values()).count, reverse=True)
        more = f" (and {len(self.problems) - 2} more)" if len(self.problems) > 2 else ""
        return f"{' and '.join(names)}: " + "; ".join(str(p.message) for p in self.problems[:2]) + more


class Suggestion(NamedTuple):
    """A proposal for each module with matmuls, and why; prints as a table.

    Attributes:
      formats: "fp8", "fp16", "bf16" or "fp32" by path of the module.
      base: the policy: the 16-bit format of most operations; "fp32" where there is none.
      keep_fp32: patterns of params, for `get_policy`: those of modules that are in neither `base` nor fp8, and norms.
      fp8_layers: patterns of layers, for `jaxmp.fp8.autocast(filter=)` and `jaxmp.nnx.to_fp8(filter=)`.
      modules: formats by pattern, for `jaxmp.autocast(modules=)`.
      unnamed: scopes outside of `base` that are no flax modules, which no rule reaches.
      is_nnx: whether the model is an nnx module.
      loss_scales: the least loss scale that float16 gradients of these modules need, and the highest with which none
        overflows (a factor of 2 is left). Powers of two.
      tensors: one entry for each tensor and format.
      evidence: one entry for each module and format.
      mix: the whole proposal at once, emulated.
      run: what its code did; None for a proposal that was not run.
      rejected: proposals that were run before it and do not train.
    """

    formats: dict[str, str]
    base: str
    keep_fp32: tuple[str, ...]
    fp8_layers: tuple[str, ...]
    modules: dict[str, str]
    unnamed: tuple[str, ...]
    is_nnx: bool
    loss_scales: tuple[float, float]
    tensors: tuple[TensorEvidence, ...]
    evidence: tuple[ModuleEvidence, ...]
    mix: Mix
    run: Run | None = None
    rejected: tuple[Rejected, ...] = ()

    @property
    def _uses_float16(self) -> bool:
        """Whether anything runs in float16, whose gradients need a loss scale."""
        return "fp16" in (self.base, *self.formats.values())

    @property
    def policy_kwargs(self) -> dict[str, Any]:
        """The arguments of `jaxmp.get_policy`."""
        return {"policy": self.base, "keep_fp32": self.keep_fp32}

    def worst(self, format: str) -> list[str]:
        """The modules, sorted by the gradient's SQNR with only this module in a format, the lowest first.

        Args:
          format: "fp8", "fp16" or "bf16".
        """
        rows = [row for row in self.evidence if row.format == format]
        return [row.module for row in sorted(rows, key=lambda row: row.gradient_sqnr)]

    @property
    def code(self) -> str:
        """The proposal as code; it uses the names `loss_fn` and `optimizer` (for nnx also `model`).

        It makes `policy`, `tx`, and `low_precision_loss_fn`, which replaces `loss_fn`.
        """
        keep = f", keep_fp32={self.keep_fp32!r}" if self.keep_fp32 else ""
        names = "loss_fn, optimizer and model" if self.is_nnx else "loss_fn and optimizer"
        lines = [
            f"# {names} are yours: give them these names.",
            f'policy = jaxmp.get_policy("{self.base}"{keep})',
        ]
        dtypes = {path: jnp.dtype(formats.DTYPES[name]).name for path, name in self.modules.items()}
        others = ", ".join(f'"{path}": jnp.{dtype}' for path, dtype in dtypes.items())
        autocast = f"jaxmp.autocast(loss_fn, policy.compute_dtype{f', modules={{{others}}}' if others else ''})"
        fp8 = f"jaxmp.fp8.CurrentScaling(), filter={self.fp8_layers!r}"
        if self.fp8_layers and not self.is_nnx:
            lines += [
                "",
                "def low_precision_loss_fn(*args):",
                f"    with jaxmp.fp8.autocast({fp8}):",
                f"        return {autocast}(*args)",
                "",
            ]
        else:
            lines += [f"jaxmp.nnx.to_fp8(model, {fp8})"] if self.fp8_layers else []
            lines += [f"low_precision_loss_fn = {autocast}"]
        scale = ""
        if self._uses_float16:
            scale = f", loss_scale=jaxmp.DynamicLossScale({min(self.loss_scales[1], 2.0**16)})"
        lines += [f"tx = jaxmp.mixed_precision(optimizer, policy{scale})"]
        if self.unnamed:
            lines += [
                f"# No flax modules, so no rule can name them; run them in jaxmp.no_autocast: {list(self.unnamed)}"
            ]
        return "\n".join(lines)

    def __str__(self) -> str:
        least, highest = self.loss_scales
        scale = f"float16 gradients need a loss scale of {least:g} or more, and overflow above about {2 * highest:g}"
        mix = self.mix
        all_together = (
            f"emulated, all as proposed: gradient {mix.gradient_sqnr:.1f} dB, cosine {mix.cosine:.6f}, "
            f"loss {mix.loss:.6g} (float32: {mix.reference_loss:.6g})"
        )
        ran = [f"ran, but does not train: {rejected}" for rejected in self.rejected]
        ran += [] if self.run is None else [str(self.run)]
        scales = (scale,) if self._uses_float16 else ()
        return "\n".join([self._table(), "", all_together, *scales, *ran, "", self.code])

    def _table(self) -> str:
        noises = [f"{tensor} dB" for tensor in TENSORS]
        numbers = (*noises, "over", "under", "subn.", "grad dB", "cosine", "loss diff")
        rows: list[tuple[str, ...]] = [("module", "runs in", "format", *numbers, "because of")]
        module = None
        for row in self.evidence:
            first = row.module != module
            module = row.module
            found = [t for t in self.tensors if t.module == module and t.format == row.format]
            noises = [[t.noise for t in found if t.tensor == tensor] for tensor in TENSORS]
            rows.append(
                (
                    (module or "(top)") if first else "",
                    self.formats[module] if first else "",
                    row.format,
                    *(f"{min(n.sqnr for n in noise):.1f}" if noise else "-" for noise in noises),
                    *(f"{100 * max((n[i] for ns in noises for n in ns), default=0):.3g}%" for i in (1, 2, 3)),
                    f"{row.gradient_sqnr:.1f}",
                    f"{row.cosine:.6f}",
                    f"{row.loss_difference:+.1e}",
                    row.reason,
                )
            )
        return tables.columns(rows, "<<<" + ">" * len(numbers))

    __repr__ = __str__


def globs(chosen: list[str], among: list[str], *, below: bool = False) -> tuple[str, ...]:
    """Few patterns that fit `chosen` and nothing else of `among`.

    Args:
      chosen: paths.
      among: all paths.
      below: whether a pattern is for what lies below a path, not for the path itself.
    """

    def fits_no_other(pattern: str) -> bool:
        return all(p in chosen for p in among if tree_paths.matches(f"{p}/x" if below else p, pattern))

    found: dict[str, None] = {}
    for path in chosen:
        parts = path.split("/")
        shorter = ["/".join(parts[:i]) + "/*" for i in range(1, len(parts))]
        own = f"{path}/*" if below else path
        found[next(filter(fits_no_other, [*shorter, own]), f"/{own}")] = None
    return tuple(found)


def exceptions(runs_in: dict[str, str], base: str) -> dict[str, str]:
    """For `jaxmp.autocast(modules=)`: formats by pattern of the modules that do not run in `base`.

    A format of a module holds for all modules that it calls, so those of them with another format are named too.
    """
    among = list(runs_in)
    outside = [path for path in runs_in if runs_in[path] != base]
    found: dict[str, str] = {}
    for name in dict.fromkeys(runs_in[path] for path in outside):
        found |= dict.fromkeys(globs([path for path in outside if runs_in[path] == name], among), name)
    for path in outside:
        inside = [p for p in among if p != path and p.startswith(f"{path}/" if path else "")]
        others = [p for p in inside if runs_in[p] != runs_in[path] and not tree_paths.matches(p, found)]
        found |= {globs([p], among)[0]: runs_in[p] for p in others}
    return found
