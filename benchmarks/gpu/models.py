"""Sections of the GPU run: fp8 beside bfloat16 in the GEMMs of a layer, and in whole training steps."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxmp
from benchmarks.gpu import sections
from benchmarks.lib.timing import Bench, Variant, planned
from benchmarks.programs import steps

RECIPES = {name: steps.RECIPES[name] for name in ("fp8 delayed", "fp8 current", "fp8 block")}
MATMUL = (((1,), (0,)), ((), ()))
FIRST = ("bf16", "fp8 delayed", steps.BY_HAND)  # of a whole step, as a reader asks


# --- matmuls ----------------------------------------------------------------------------------------------------------


def dense(bench: Bench) -> None:
    """y = x w and both gradients, in bfloat16 outside the GEMMs: one Dense, then the other GEMMs of a layer."""
    rows, sides = (64, ((64, 64),)) if bench.tiny else (sections.ROWS, sections.SIDES)
    for n_in, n_out in sides:
        build = {name: functools.partial(dense_variant, rows, n_in, n_out, name) for name in ("bf16", *RECIPES)}
        bench.compare(sections.DENSE.format(rows, n_in, n_out), build)


def dense_variant(rows: int, n_in: int, n_out: int, precision: str) -> Variant:
    """One Dense, forward and backward."""
    call = functools.partial(jax.jit(functools.partial(both_passes, precision)), *operands(rows, n_in, n_out))
    notes = {"gemms_in": gemms_in(precision)}
    return Variant(call, work={"flops": 6.0 * rows * n_in * n_out}, notes=lambda: notes)


def gemms_in(precision: str) -> str:
    """What the matmuls with weights multiply: bfloat16 for `fp8 block` too, as a Hopper has no block scales."""
    return "bf16" if precision == "fp8 block" else precision.split()[0]


def operands(rows: int, n_in: int, n_out: int) -> tuple[Any, ...]:
    """w, x and the gradient of y in bfloat16, and scales that fill fp8's range: log2, exact powers of two."""
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[0], (n_in, n_out), jnp.bfloat16) * jnp.bfloat16(n_in**-0.5)
    x, g = (jax.random.normal(k, (rows, n), jnp.bfloat16) for k, n in zip(keys[1:], (n_in, n_out), strict=True))
    largest = ((x, 448.0), (w, 448.0), (g, 57344.0))  # e4m3, e4m3, e5m2
    scales = [jnp.floor(jnp.log2(most / jnp.max(jnp.abs(t)).astype(jnp.float32))) for t, most in largest]
    return w, x, g, jaxmp.fp8.Scales(*scales)


def both_passes(precision: str, w: jax.Array, x: jax.Array, g: jax.Array, scales: Any) -> Any:
    """y [M, N] and the gradients of its operands: of w [K, N] and x [M, K], and, with scales, the amaxes."""
    recipe = RECIPES.get(precision)

    def dot(w: jax.Array, x: jax.Array, scales: Any) -> jax.Array:
        if recipe is None:
            return x @ w
        delayed = scales if isinstance(recipe, jaxmp.fp8.DelayedScaling) else None
        return jaxmp.fp8.dot_general(x, w, MATMUL, recipe=recipe, scales=delayed)

    y, backward = jax.vjp(dot, w, x, scales)
    return y, backward(g)


# --- whole steps ------------------------------------------------------------------------------------------------------


def gpt(bench: Bench) -> None:
    """A whole training step of GPT-like layers."""
    whole_step(bench, "GPT", FIRST)


def llama(bench: Bench) -> None:
    """A whole training step of a Llama-like layer."""
    whole_step(bench, "Llama", FIRST)


def policies(bench: Bench) -> None:
    """The same steps in the other recipes, and in fp16."""
    for kind in sections.STEPS:
        whole_step(bench, kind, [name for name in steps.PRECISIONS if name not in FIRST])


def crossover(bench: Bench) -> None:
    """The step of a Llama layer in bf16 and fp8 at smaller widths, to find the width from which fp8 is faster."""
    for width in sections.WIDTHS[:1] if bench.tiny else sections.WIDTHS:
        whole_step(bench, "Llama", FIRST[:2], width)


def whole_step(bench: Bench, kind: str, precisions: Sequence[str], width: int | None = None) -> None:
    """Loss, gradients and optimizer of the programs that `python -m benchmarks h100 steps` counts."""
    stack = next(stack for stack in steps.STACKS if stack.kind == kind)
    stack = stack._replace(width=width or stack.width)
    what = sections.STEP.format(kind, stack.width, stack.layers)
    if bench.tiny:
        stack, precisions = stack._replace(width=128, layers=1, sequences=1, length=16), precisions[:2]
    bench.compare(what, {name: functools.partial(_step, bench, stack, name) for name in precisions})


def _step(bench: Bench, stack: steps.Stack, precision: str) -> Variant:
    rows = stack.sequences * stack.length
    weights = sum(n_in * n_out for n_in, n_out in stack.matrices.values())
    # 6 for each weight of a matmul and token, and as many for each past position: causal, forward and backward.
    flops = 6.0 * rows * stack.layers * (weights + stack.length * stack.width)

    def build(flash: bool) -> Variant:
        step = steps.Step(stack, precision, flash=flash)
        program, shape = steps.program(step), steps.example(step)
        x = jax.random.normal(jax.random.key(0), shape.shape, shape.dtype)
        carry = [jax.jit(program.init)()]
        compiled = jax.jit(program.run, donate_argnums=0).lower(carry[0], x).compile()

        def call() -> Any:
            carry[0], loss = compiled(carry[0], x)
            return loss

        def notes() -> dict[str, Any]:
            skipped = {} if precision == steps.BY_HAND else {"skipped_steps": int(carry[0].metrics["skipped_steps"])}
            counted = {"step": step.row} if stack in steps.STACKS else {}
            about = {"params": stack.layers * weights, "attention": "cudnn" if flash else "xla"}
            return counted | about | skipped | {"gemms_in": gemms_in(precision), **planned(compiled)}

        return Variant(call, work={"tokens": float(rows), "flops": flops}, notes=notes)

    return _with_flash(bench, f"{stack.kind}, {precision}", build)


def _with_flash(bench: Bench, which: str, build: Callable[[bool], Variant]) -> Variant:
    """The step with cuDNN's flash attention; with XLA's where there is none, which its row says."""
    if not bench.tiny:
        try:
            return build(True)
        except Exception as e:
            bench.left_out(f"flash attention, {which}", f"{type(e).__name__}: {e}")
    return build(False)
