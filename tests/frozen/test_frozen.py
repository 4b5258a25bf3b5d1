"""Does a training step give the numbers that it gave when they were recorded?

`frozen.npz` keeps 340 runs of eight steps each (`frozen_cases.py` draws them, `frozen_runs.py` executes them, with
public names only): params, masters, moments, the scales of losses and of fp8, histories, counts and metrics. So the
step can be rewritten without being changed. Each run is compared twice:

- op by op: every bit after every step, by checksums. Where this machine gives other bits for an operation that the run
  uses, or this version of optax for its optimizer (`frozen_canary.py`), it is compared as the compiled one is;
- compiled: each decision of each step exactly (scales, skips, counts), and floats after the last step within bounds
  that follow from arithmetic (`bound_of` in `frozen_files.py`).

Not kept, because it may change: gradients of 2**48 and more that are finite, `ema_params` in skipped steps, transforms
outside of `mixed_precision`, whatever counts single elements that were held, dtypes that autocast chooses.

    python -m pytest tests/frozen --all -n 2                all runs: `make frozen`; beside other tests, a sample
    python tests/frozen/record.py --check --isa AVX2        how many fall back on a CPU with FMA, and whether all hold
    python tests/frozen/record.py --again                   records

One may record again when a change was meant to change numbers and CHANGELOG.md says which; when a new run or a new key
is added; never to make a refactoring pass. Record with the settings that the script sets and the newest jax, flax and
optax, and look at the diff: `record.py --check` against the old file names the runs that changed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import frozen_canary
import frozen_cases
import frozen_files
import frozen_runs
import jax
import jax.numpy as jnp
import optax
import pytest
from frozen_cases import Case
from frozen_runs import Parts

import jaxmp

FILE = frozen_files.load()
RUNS = {frozen_cases.name_of(i, run.case): run for i, run in enumerate(FILE.runs)}


# By number: float16 and bfloat16, masters and halves of them, overflows; few operations to compile.
SHOWN = {(35, "op by op"), (133, "op by op"), (41, "compiled")}
EVERY = 5  # beside other tests: one run of so many, and another one compiled


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is not test_gives_the_frozen_numbers:
        return
    config, here = metafunc.config, Path(__file__).parent
    named = [config.invocation_params.dir.joinpath(argument.partition("::")[0]).resolve() for argument in config.args]
    takes_all = all(path.is_relative_to(here) for path in named)
    cases = []
    for first, mode in ((0, "op by op"), (EVERY // 2, "compiled")):
        for i, name in enumerate(RUNS):
            is_shown = (i, mode) in SHOWN
            if takes_all or is_shown or i % EVERY == first:
                cases.append(pytest.param(name, mode, marks=() if is_shown else pytest.mark.thorough(0)))
    metafunc.parametrize(("name", "mode"), cases)


def test_gives_the_frozen_numbers(name: str, mode: str, request: pytest.FixtureRequest) -> None:
    run = RUNS[name]
    if frozen_canary.is_silent(run.uses):
        pytest.skip("XLA cannot compile float16 for these instructions")
    off_key = [] if mode == "compiled" else frozen_canary.off_key(run.uses, FILE.canary)
    if off_key:
        request.node.user_properties.append(("compared in ulps", ", ".join(off_key)))
    seen = frozen_runs.execute(run.case, compiled=mode == "compiled")
    wrong = frozen_files.differences(run, seen, bits=mode != "compiled" and not off_key)
    assert not wrong, "\n  ".join([f"{name}, {mode}:", *wrong])


def test_the_draw_is_the_recorded_one() -> None:
    assert frozen_cases.draw() == [run.case for run in FILE.runs]
    assert frozen_cases.all_pairs() <= set().union(*(frozen_cases.pairs_of(run.case) for run in FILE.runs))


def unscaled_twice(gradient: jax.Array, scale: jax.Array) -> jax.Array:
    """A given gradient without its scale: the step divides by the scale once more than it ought."""
    return gradient


def from_rounded_masters(inner: Any) -> Any:
    """`inner`, moving masters that have been rounded to bfloat16."""

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), params)
        updates, state = optax.with_extra_args_support(inner).update(updates, state, rounded, **extra_args)
        return jax.tree.map(lambda u, r, p: u + (r - p), updates, rounded, params), state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def rolled_when_skipped(before: Parts, after: Parts) -> Parts:
    """The state after a step; histories of amaxes have moved on in a skipped one, too."""
    skipped = jaxmp.get_metrics(after.opt_state)["skipped"]

    def roll(path: Any, x: Any) -> Any:
        is_history = "amax_history" in jax.tree_util.keystr(path)
        return jnp.where(skipped, jnp.roll(x, 1, axis=0), x) if is_history else x

    return after._replace(opt_state=jax.tree_util.tree_map_with_path(roll, after.opt_state))


def is_unscaled(case: Case) -> bool:
    return case.takes_given_gradients and case.scale != "none" and case.optimizer != "clip"


def has_masters(case: Case) -> bool:
    is_plain = not case.optimizer.startswith("fused")
    return case.takes_given_gradients and case.masters in ("masters", "split16") and is_plain


def has_history(case: Case) -> bool:
    return case.recipe == "delayed" and case.events != "none" and case.tree != "nnx"


# What is replaced in `frozen_runs`, by what, and the runs in which it must be seen, compiled too: there a model's
# gradients may differ by a cast that was rounded the other way, which is as much as these faults do.
FAULTS: dict[str, tuple[str, Callable[..., Any], Callable[[Case], bool]]] = {
    "a scale divided twice": ("scaled", unscaled_twice, is_unscaled),
    "a master rounded before the update": ("wrapped", from_rounded_masters, has_masters),
    "a history rolled on a skip": ("moved_on", rolled_when_skipped, has_history),
}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("mode", ["op by op", "compiled"])
@pytest.mark.parametrize("fault", FAULTS)
def test_sees_a_fault(fault: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, replacement, fits = FAULTS[fault]
    monkeypatch.setattr(frozen_runs, name, replacement)
    run = next(run for run in FILE.runs if fits(run.case) and not frozen_canary.is_silent(run.uses))
    bits = mode != "compiled" and not frozen_canary.off_key(run.uses, FILE.canary)
    frozen_runs.world_of.cache_clear()
    seen = frozen_runs.execute(run.case, compiled=mode == "compiled")
    frozen_runs.world_of.cache_clear()
    assert frozen_files.differences(run, seen, bits=bits), f"{fault} is not seen in {run.case}"
