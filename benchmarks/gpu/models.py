"""Sections of the GPU run: fp8 beside 16 and 32 bits in the GEMMs of a layer, in a block, and in whole training steps.

Attention is cuDNN's flash attention if the policy computes in 16 bits, otherwise XLA's: cuDNN has none for float32.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmp
from benchmarks.gpu import sections
from benchmarks.lib import trees
from benchmarks.lib.timing import Bench, LeftOut, Variant, carried, planned
from benchmarks.programs import steps
from benchmarks.programs.steps import HEAD

RECIPES = {
    "fp8 delayed": jaxmp.fp8.DelayedScaling(),
    "fp8 current": jaxmp.fp8.CurrentScaling(),
    "fp8 block": jaxmp.fp8.BlockScaling(),
}
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
        given = scales if isinstance(recipe, jaxmp.fp8.DelayedScaling) else None
        return jaxmp.fp8.dot_general(x, w, MATMUL, recipe=recipe, scales=given)

    y, backward = jax.vjp(dot, w, x, scales)
    return y, backward(g)


# --- layers -----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer as in Llama: RMSNorm, rotary positions, grouped-query attention, gated MLP of 3.5 times the width.

    [B, T, D] -> [B, T, D]: matmuls and attention in `dtype`, norms in float32, no biases.
    """

    kv_heads: int
    dtype: Any
    flash: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.RMSNorm, dtype=jnp.float32)
        y = norm()(x).astype(self.dtype)
        heads = {"q": width // HEAD, "k": self.kv_heads, "v": self.kv_heads}
        q, k, v = (dense(n * HEAD, name=name)(y).reshape(*x.shape[:2], n, HEAD) for name, n in heads.items())
        attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn" if self.flash else "xla")
        y = attention(steps.rotated(q), steps.rotated(k), v, is_causal=True)
        x = x + dense(width, name="o")(y.reshape(x.shape))
        y = norm()(x).astype(self.dtype)
        hidden = width * 7 // 2
        return x + dense(width, name="down")(nn.silu(dense(hidden, name="gate")(y)) * dense(hidden, name="up")(y))


def llama_of(width: int, policy: jaxmp.Policy, *, flash: bool) -> Layer:
    """A layer of this width. At 4096 it is that of Llama 8B: 32 heads, 8 for keys and values, 14336 hidden."""
    return Layer(max(width // HEAD // 4, 1), policy.compute_dtype, flash)


def block(bench: Bench) -> None:
    """Forward and backward pass of a layer, without an optimizer."""
    for width in (128,) if bench.tiny else (4096, 8192):
        tokens = (1, 32) if bench.tiny else (1, 4096)
        build = functools.partial(_layer_step, bench, width, tokens, trains=False)
        what = f"transformer block, width {width}, forward and backward"
        bench.compare(what, {name: functools.partial(build, policy_name=name) for name in ("bf16", "bf16+fp8")})


def crossover(bench: Bench) -> None:
    """A training step of one Llama layer at several widths, to find the width from which fp8 is faster."""
    for width in (128,) if bench.tiny else (4096, 512, 1024, 2048):
        tokens = (1, 32) if bench.tiny else (2, 4096)
        build = functools.partial(_layer_step, bench, width, tokens)
        variants = {name: functools.partial(build, policy_name=name) for name in ("bf16", "fp8")}
        bench.compare(sections.LAYER.format(width), variants)


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


def whole_step(bench: Bench, kind: str, precisions: Sequence[str]) -> None:
    """Loss, gradients and optimizer of the programs that `python -m benchmarks h100 steps` counts."""
    stack = next(stack for stack in steps.STACKS if stack.kind == kind)
    if bench.tiny:
        stack, precisions = stack._replace(width=128, layers=1, sequences=1, length=16), precisions[:2]
    build = functools.partial(_whole_step, bench, stack)
    bench.compare(sections.STEPS[kind], {name: functools.partial(build, name) for name in precisions})


def _whole_step(bench: Bench, stack: steps.Stack, precision: str) -> Variant:
    rows = stack.sequences * stack.length
    weights = sum(n_in * n_out for n_in, n_out in stack.matrices.values())
    # 6 for each weight of a matmul and token, and as many for each past position: causal, forward and backward.
    flops = 6.0 * rows * stack.layers * (weights + stack.length * stack.width)

    def build(flash: bool) -> Variant:
        step = steps.Step(stack, precision, flash=flash)
        program, shape = steps.program(step), steps.example(step)
        x = jax.random.normal(jax.random.key(0), shape.shape, shape.dtype)
        state = jax.jit(program.init)()
        compiled = jax.jit(program.run, donate_argnums=0).lower(state, x).compile()
        held = [state]
        del state

        def call() -> Any:
            held[0], loss = compiled(held[0], x)
            return loss

        def notes() -> dict[str, Any]:
            skipped = {} if precision == steps.BY_HAND else {"skipped_steps": int(held[0].metrics["skipped_steps"])}
            found = {"step": step.row, "params": stack.layers * weights, **skipped}
            return found | {"gemms_in": gemms_in(precision), **planned(compiled)}

        return Variant(call, work={"tokens": float(rows), "flops": flops}, notes=notes)

    return _with_flash(bench, True, f"{stack.kind}, {precision}", build)


def _layer_step(bench: Bench, width: int, tokens: tuple[int, int], *, policy_name: str, trains: bool = True) -> Variant:
    policy, recipe = precision_of(policy_name)
    x = jax.random.normal(jax.random.key(0), (*tokens, width), policy.compute_dtype)

    def build(flash: bool) -> Variant:
        model = llama_of(width, policy, flash=flash)

        def loss_fn(params: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(model.apply({"params": params}, x).astype(jnp.float32) ** 2)

        return train_step(policy, recipe, model, loss_fn, x, x, trains=trains, tokens=tokens[0] * tokens[1])

    return _with_flash(bench, policy.computes_in_16_bits, f"width {width}, {policy_name}", build)


def _with_flash(bench: Bench, in_16_bits: bool, which: str, build: Callable[[bool], Variant]) -> Variant:
    """The step with flash attention where it computes in 16 bits and cuDNN has it; its row says which it is."""

    def named(flash: bool) -> Variant:
        step = build(flash)
        return step._replace(notes=lambda: step.notes() | {"attention": "cudnn" if flash else "xla"})

    if in_16_bits and not bench.tiny:
        try:
            return named(flash=True)
        except Exception as e:
            bench.left_out(f"flash attention, {which}", f"{type(e).__name__}: {e}")
    return named(flash=False)


# --- a training step of any model -------------------------------------------------------------------------------------


def precision_of(name: str) -> tuple[jaxmp.Policy, Any]:
    """The policy with this name, and its recipe if matmuls run in fp8."""
    policy = jaxmp.get_policy(name.removesuffix("+fp8"), keep_fp32=("*Norm*",))
    return policy, jaxmp.fp8.DelayedScaling() if name.endswith("+fp8") else policy.recipe


def train_step(
    policy: jaxmp.Policy,
    recipe: Any,
    model: nn.Module,
    loss_fn: Callable[..., jax.Array],
    example: jax.Array,
    batch: Any,
    *,
    tokens: int,
    trains: bool = True,
    filter: Any = lambda path, layer: True,
) -> Variant:
    """Gradients of `loss_fn(params, batch)` and, if it `trains`, the fused AdamW, on one device, state in place.

    A float16 run has a fixed loss scale, because a skipped step would be too fast. The row has the number of skipped
    steps.
    """
    inner = jaxmp.fused_adamw(1e-4, max_norm=1.0) if trains else optax.identity()
    loss_scale: Any = 1024.0 if policy.param_dtype == jnp.float16 else None
    tx = jaxmp.mixed_precision(inner, policy, loss_scale=loss_scale, recipe=recipe)

    def in_fp8() -> Any:
        return jaxmp.fp8.autocast(recipe, filter=filter) if recipe else contextlib.nullcontext()

    @jax.jit
    def init(key: jax.Array) -> Any:
        with in_fp8():
            params32 = model.init(key, example)["params"]
        return policy.cast_to_param(params32), tx.init(params32)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        with in_fp8(), policy.default_matmul_precision():
            loss, grads = jaxmp.value_and_grad(loss_fn)(params, batch, opt_state=opt_state)
        if not trains:
            return loss, grads
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    state = init(jax.random.key(1))
    compiled = jax.jit(step, donate_argnums=0 if trains else ()).lower(state, batch).compile()
    fixed = {"params": trees.size(state[0]), **planned(compiled)}
    if not trains:
        return Variant(lambda: compiled(state, batch), work={"tokens": float(tokens)}, notes=lambda: fixed)
    call = carried(compiled, state, batch)

    def notes() -> dict[str, Any]:
        return fixed | {"skipped_steps": int(jaxmp.get_metrics(call()[1])["skipped_steps"])}

    return Variant(call, work={"tokens": float(tokens)}, notes=notes)


# --- the example ------------------------------------------------------------------------------------------------------


def example(bench: Bench) -> None:
    """The model of examples/train.py, in the size that its docstring gives for a machine with GPUs."""
    names = ("fp32", "fp8") if bench.tiny else ("bf16", "fp8", "fp16", "tf32", "fp32")
    size = {"width": 32, "layers": 2, "heads": 2} if bench.tiny else {"width": 512, "layers": 8, "heads": 4}
    batch = (2, 65) if bench.tiny else (128, 65)
    build = functools.partial(_example_step, size, batch)
    what = f"training step of examples/train.py, width {size['width']}"
    bench.compare(what, {name: functools.partial(build, policy_name=name) for name in names})


def _example_step(size: dict[str, int], batch: tuple[int, int], *, policy_name: str) -> Variant:
    try:
        from benchmarks.lib.examples import train
    except ModuleNotFoundError as e:
        raise LeftOut(f"examples/train.py needs {e.name}") from e
    policy, recipe, _ = train.precision_of(policy_name)
    model = train.Transformer(**size, dtype=policy.compute_dtype)
    tokens = jax.random.randint(jax.random.key(0), batch, 0, 256).astype(jnp.uint8)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        return train.next_byte_loss(model.apply({"params": params}, tokens[:, :-1]), tokens)

    count = batch[0] * (batch[1] - 1)
    return train_step(policy, recipe, model, loss_fn, tokens[:1, :-1], tokens, tokens=count, filter=None)
