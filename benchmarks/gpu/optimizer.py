"""A section of the GPU run: the optimizer's side of a step, in jaxmp, by hand, in flax and in optax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jaxmp
from benchmarks.gpu.sections import OPTIMIZER
from benchmarks.lib import trees
from benchmarks.lib.timing import Bench, LeftOut, Variant, advanced, carried
from benchmarks.programs import h100

STEPS = 8  # in a program: the host needs longer to queue one of 148 leaves than the GPU to run it
FIRST = ("jaxmp.fused_adamw, fp16", "jaxmp.apply_gradients", "by hand, select", "optax.clip + adamw")


def optimizer(bench: Bench) -> None:
    """All programs that `python -m benchmarks h100 optimizer` counts on one device, on GPT-2 small, timed."""
    programs, shapes = on_one_device(), h100.GPT2
    if bench.tiny:
        programs = [p for p in programs if p.name.startswith(("jaxmp.apply_gradients", "by hand, select"))]
        shapes = {"kernel": trees.leaf(16, 256), "bias": trees.leaf(5)}
    bench.compare(OPTIMIZER, {p.name: functools.partial(variant, bench, p, shapes) for p in programs})


def on_one_device() -> list[h100.Program]:
    """The programs for one device: first those that are compared with each other."""
    programs = [*h100.fused_programs(), *h100.jaxmp_programs(), *h100.baseline_programs()]
    return sorted((p for p in programs if p.mode == "1 device"), key=lambda p: not p.name.startswith(FIRST))


def variant(bench: Bench, program: h100.Program, shapes: Any) -> Variant:
    """The program on params of these shapes; its state is carried from step to step."""
    if bench.tiny and "fused" in program.name:
        raise LeftOut("on a CPU this is XLA's version, as elsewhere")
    params32 = jax.jit(lambda: jax.tree.map(lambda x: jnp.full(x.shape, 0.01), shapes))()
    opt_state = jax.jit(program.init)(params32)
    params = jax.jit(lambda p: jax.tree.map(lambda x: x.astype(program.params_dtype), p))(params32)
    grads = jax.tree.map(lambda p: jnp.full_like(p, 1e-3), params)
    count = trees.size(shapes)
    step = advanced(lambda state, grads: program.step(*state, grads), STEPS)
    compiled = jax.jit(step, donate_argnums=0).lower((params, opt_state), grads).compile()
    call = carried(compiled, (params, opt_state), grads)
    del params32, params, opt_state

    def notes() -> dict[str, Any]:
        skipped = jaxmp.get_metrics(call()[1])["skipped_steps"] if program.name.startswith("jaxmp") else 0
        return {"params": count, "skipped_steps": int(skipped)}

    # The fewest bytes are those of one pass: a gradient, and the param's parts and two moments, read and written.
    small = "int8" in program.name
    least = 14 if small else 28 if program.params_dtype == jnp.float32 else 26 if "remainder" in program.name else 30
    return Variant(call, copies=STEPS, work={"bytes": float(least * count)}, notes=notes)
