"""Sections of the GPU run: the optimizer's side of a step, in jaxmp, by hand, in flax, in optax; and its many launches.

A program of the first section takes several steps: the host needs longer to queue one of 148 leaves than the GPU to run
it. In a training step, which takes longer, that work is hidden.

The fewest bytes are those of one pass: 30 for a param in 16 bits with a float32 master and Adam's moments, 28 for
float32 params (gradient 4, param 8, moments 16).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jaxmp
from benchmarks.lib import trees
from benchmarks.lib.timing import Bench, LeftOut, Variant, advanced, carried
from benchmarks.programs import h100 as programs

STEP = "optimizer step, {}"
STEPS = 8  # in a program
FIRST = ("jaxmp.fused_adamw, fp16", "jaxmp.apply_gradients", "by hand, select", "optax.clip + adamw")


def optimizer(bench: Bench) -> None:
    """All programs that `python -m benchmarks h100 optimizer` counts on one device, on GPT-2 small, timed."""
    chosen = on_one_device()
    if bench.tiny:
        chosen = [p for p in chosen if p.name.startswith(("jaxmp.apply_gradients", "by hand, select"))]
    tree = tiny_tree() if bench.tiny else programs.GPT2
    bench.compare(STEP.format(tree.name), {p.name: functools.partial(variant, bench, p, tree, STEPS) for p in chosen})


def launches(bench: Bench) -> None:
    """Steps of hundreds of launches, which command buffers may make cheaper: plain optax inside, and fused."""
    tree = tiny_tree() if bench.tiny else programs.GPT2
    names = ("jaxmp.apply_gradients", "jaxmp.fused_adamw, fp16", "by hand, select")
    chosen = [p for p in on_one_device() if p.name.startswith(names)]
    if bench.tiny:
        chosen = [p for p in chosen if p.name.startswith("jaxmp.apply_gradients")]
    what = f"{STEP.format(tree.name)}, launches"
    bench.compare(what, {p.name: functools.partial(variant, bench, p, tree) for p in chosen})


def on_one_device() -> list[Any]:
    """The programs for the params of GPT-2 small on one device: first those that are compared with each other."""
    found = [*programs.fused_programs(), *programs.jaxmp_programs(), *programs.baseline_programs()]
    found = [p for p in found if p.mode == "1 device" and p.tree is programs.GPT2]
    return sorted(found, key=lambda p: not p.name.startswith(FIRST))


def tiny_tree() -> Any:
    """Two leaves."""
    return programs.Tree("two leaves", {"kernel": trees.leaf(16, 256), "bias": trees.leaf(5)})


def variant(bench: Bench, program: Any, tree: Any, steps: int = 1) -> Variant:
    """The program on this tree, with so many steps in it; its state is carried from step to step."""
    if bench.tiny and "fused" in program.name:
        raise LeftOut("on a CPU this is XLA's version, as elsewhere")
    params32 = jax.jit(lambda: jax.tree.map(lambda x: jnp.full(x.shape, 0.01), tree.shapes))()
    state = jax.jit(program.init)(params32)
    params = jax.jit(lambda p: jax.tree.map(lambda x: x.astype(program.params_dtype), p))(params32)
    grads = jax.tree.map(lambda p: jnp.full_like(p, 1e-3), params)
    count = trees.size(tree.shapes)
    step = advanced(lambda held, grads: program.step(*held, grads), steps)
    compiled = jax.jit(step, donate_argnums=0).lower((params, state), grads).compile()
    call = carried(compiled, (params, state), grads)
    del params32, params, state

    def notes() -> dict[str, Any]:
        skipped = jaxmp.get_metrics(call()[1])["skipped_steps"] if program.name.startswith("jaxmp") else 0
        return {"params": count, "skipped_steps": int(skipped)}

    small = "int8" in program.name
    least = 14 if small else 28 if program.params_dtype == jnp.float32 else 26 if "remainder" in program.name else 30
    return Variant(call, copies=steps, work={"bytes": float(least * count)}, notes=notes)
