"""Times the optimizer's side of a step, and its compilation, beside versions by hand and other libraries."""

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

import jaxmp
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import failing, markdown
from benchmarks.lib.timing import STAGES, compiled_in_stages
from benchmarks.lib.trees import FP8_SCALES
from benchmarks.lib.versions import on_cpu
from benchmarks.programs.recipes import (
    LEARNING_RATE,
    MAX_NORM,
    Step,
    branched,
    by_hand,
    flax_dynamic_scale,
    jmp_dynamic_scale,
    plain,
    selected,
)

SIDES = {10: 1280, 60: 512, 148: 320, 1000: 128}  # leaves to the width of a layer: 7.6 to 8.2 million params
ROUNDS = {10: 40, 60: 40, 148: 40, 1000: 25}
COMPILATIONS, PATIENCE = 3, 5.0  # compilations of a program, and the seconds after which no other one starts
STEP_TARGET, COMPILE_TARGET = 1.2, 2.0
SCALE = 2.0**16
BY_HAND = ("by hand, select", "by hand, cond")


class Program(NamedTuple):
    """One row of the table."""

    name: str
    init: Callable[[PyTree], Any]  # from float32 params
    step: Step
    dtype: Any = jnp.float32  # of params and gradients
    scale: float = 1.0  # of gradients
    has_target: bool = False
    max_leaves: int = 1000  # less if the time to compile grows with the square of the leaves
    in_fp8: bool = False  # whether each layer has scales beside its kernel and bias


def programs(*, clips: bool = True) -> list[Program]:
    """jaxmp, the same work by hand, and other libraries: AdamW, with clipping by the global norm or without.

    Only jaxmp in fp16 and the versions by hand do the same: float16 params and gradients, float32 masters and moments,
    a dynamic loss scale, no step after an overflow.
    """
    adamw = optax.adamw(LEARNING_RATE)
    tx = optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw) if clips else adamw
    ours = optax.chain(jaxmp.clip_by_global_norm(MAX_NORM), adamw) if clips else adamw
    fp16 = jaxmp.mixed_precision(ours, "fp16")
    fused = jaxmp.fused_adamw(LEARNING_RATE, max_norm=MAX_NORM if clips else None)

    def apply(tx: optax.GradientTransformation, params: PyTree, opt_state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    def applied(kind: str, tx: optax.GradientTransformation, **fields: Any) -> Program:
        step = functools.partial(apply, tx)
        return Program(f"jaxmp.apply_gradients{kind}", tx.init, step, **fields, has_target=True)

    in_fp16 = {"dtype": jnp.float16, "scale": SCALE}
    split = jaxmp.mixed_precision(ours, "bf16", remainder_bits=16)
    return [
        applied("", fp16, **in_fp16),
        Program("jaxmp update + optax.apply_updates", *plain(fp16), **in_fp16),
        Program(BY_HAND[0], *by_hand(selected, clips=clips), **in_fp16, max_leaves=148),
        Program(BY_HAND[1], *by_hand(branched, clips=clips), **in_fp16),
        applied(", bf16", jaxmp.mixed_precision(ours, "bf16"), dtype=jnp.bfloat16),
        applied(", bf16, remainders", split, dtype=jnp.bfloat16),
        applied(", fused, fp16", jaxmp.mixed_precision(fused, "fp16"), **in_fp16),
        applied(", fp32", jaxmp.mixed_precision(ours, "fp32")),
        applied(", fp8", jaxmp.mixed_precision(ours, "fp8"), in_fp8=True),
        Program("flax DynamicScale, f32 params", *flax_dynamic_scale(tx), max_leaves=148),
        Program("jmp DynamicLossScale, f32 params", *jmp_dynamic_scale(tx), scale=SCALE, max_leaves=148),
        Program("optax.apply_if_finite, f32", *plain(optax.apply_if_finite(tx, 10))),
        Program("optax, f32, nothing scaled or skipped", *plain(tx)),
    ]


def make_params(n_leaves: int, side: int) -> PyTree:
    """Layers of a kernel and a bias, with `n_leaves` leaves in total, float32."""
    rng = np.random.default_rng(0)
    return {
        f"layer_{i:03}": {
            "kernel": jnp.asarray(rng.normal(size=(side, side)) / side**0.5, jnp.float32),
            "bias": jnp.asarray(rng.normal(size=side), jnp.float32),
        }
        for i in range(n_leaves // 2)
    }


def start(program: Program, params: PyTree) -> tuple[PyTree, Any, PyTree]:
    """Params, state and gradients of a program, in its own buffers."""
    if program.in_fp8:
        params = {name: layer | {x: jnp.zeros(()) for x in FP8_SCALES} for name, layer in params.items()}
    opt_state = jax.tree.map(jnp.copy, program.init(params))
    grads = jax.tree.map(lambda p: (p * (1e-2 * program.scale / SCALE * 2.0**10)).astype(program.dtype), params)
    return jax.tree.map(lambda p: jnp.array(p, program.dtype, copy=True), params), opt_state, grads


# --- measuring --------------------------------------------------------------------------------------------------------


def compile_step(program: Program, arguments: PyTree) -> tuple[Any, list[float]]:
    """A step compiled with empty caches, and the seconds of each stage."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    jax.clear_caches()
    return compiled_in_stages(jax.jit(program.step, donate_argnums=(0, 1)), *shapes)


def time_steps(steps: list[Any], arguments: list[Any], rounds: int) -> np.ndarray:
    """Seconds of each step in each round, [rounds, steps]. `arguments` are donated."""
    seconds = np.zeros((rounds, len(steps)))
    for r in range(-3, rounds):  # the first three warm up
        order = np.random.default_rng(r + 3).permutation(len(steps))
        for i in order:
            params, opt_state, grads = arguments[i]
            before = time.perf_counter()
            params, opt_state = jax.block_until_ready(steps[i](params, opt_state, grads))
            if r >= 0:
                seconds[r, i] = time.perf_counter() - before
            arguments[i] = params, opt_state, grads
    return seconds


def measure(n_leaves: int, side: int, rounds: int, *, clips: bool = True) -> list[dict[str, Any]]:
    """The rows for one tree."""
    todo = [program for program in programs(clips=clips) if n_leaves <= program.max_leaves]
    params = make_params(n_leaves, side)
    arguments = [start(program, params) for program in todo]
    steps, spent = [], []
    for program, args in zip(todo, arguments, strict=True):
        print(f"{n_leaves} leaves, compiling: {program.name}", file=sys.stderr, flush=True)
        begun = time.perf_counter()
        step, first = compile_step(program, args)
        runs = [first]
        while len(runs) < COMPILATIONS and sum(first) + time.perf_counter() - begun < PATIENCE:
            runs.append(compile_step(program, args)[1])
        steps.append(step)
        spent.append(dict(zip(STAGES, np.min(runs, axis=0).tolist(), strict=True)))
    print(f"{n_leaves} leaves, {rounds} rounds", file=sys.stderr, flush=True)
    seconds = time_steps(steps, arguments, rounds)

    names = [program.name for program in todo]
    hands = [names.index(name) for name in BY_HAND if name in names]
    best = min(hands, key=lambda i: np.median(seconds[:, i]))
    ratios = np.median(seconds / seconds[:, [best]], axis=0)
    least = min(sum(spent[i].values()) for i in hands)
    return [
        {
            "leaves": n_leaves,
            "clips": clips,
            "params": sum(x.size for x in jax.tree.leaves(params)),
            "program": program.name,
            "step_ms": round(1e3 * statistics.median(seconds[:, i]), 2),
            "least_step_ms": round(1e3 * seconds[:, i].min(), 2),
            "step_ratio": round(float(ratios[i]), 3),
            **{f"{part}_s": round(spent[i][part], 3) for part in STAGES},
            "compile_ratio": round(sum(spent[i].values()) / least, 2),
            "missed": _missed(program, n_leaves, ratios[i], sum(spent[i].values()) / least),
        }
        for i, program in enumerate(todo)
    ]


def _missed(program: Program, n_leaves: int, step_ratio: float, compile_ratio: float) -> list[str]:
    """The targets that a row misses, in words."""
    if not program.has_target:
        return []
    checks = (
        (step_ratio <= STEP_TARGET, f"a step of {step_ratio:.2f}"),
        (compile_ratio <= COMPILE_TARGET or n_leaves < 1000, f"trace + compile of {compile_ratio:.2f}"),
    )
    return failing(checks)


# --- out --------------------------------------------------------------------------------------------------------------


def render(results: dict[str, Any]) -> str:
    """One markdown table for each tree, with clipping and without. Ratios alone: times depend on the machine's load."""
    rows = results["rows"]
    head = ["step, of by hand", "trace + lower + compile, of by hand"]
    texts = []
    for n_leaves, clips in dict.fromkeys((row["leaves"], row["clips"]) for row in rows):
        cells = [[f"{n_leaves} leaves, {'clipping' if clips else 'no clipping'}", *head]]
        for row in rows:
            if (row["leaves"], row["clips"]) == (n_leaves, clips):
                cells.append([row["program"], f"{row['step_ratio']:.2f}", f"{row['compile_ratio']:.2f}"])
        texts.append(markdown(cells))
    return "\n\n".join(texts)


def measure_all() -> dict[str, Any]:
    """All results."""
    measure(2, 8, 1)  # imports and first uses
    before, rows = os.getloadavg()[0], []
    for n, side in SIDES.items():
        for clips in (True, False):
            rows += measure(n, side, ROUNDS[n], clips=clips)
    missed = [f"{row['program']}, {row['leaves']} leaves: {what}" for row in rows for what in row["missed"]]
    return {**on_cpu(before), "rows": rows, "missed": missed}


BENCHMARK = Benchmark("cpu step", "cpu.json", measure_all, render, lambda: {"rows": measure(2, 8, 1)})
