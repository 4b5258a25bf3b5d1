"""Sections of the GPU run: fp8 beside 16 and 32 bits in a Dense, in a transformer block, and in whole training steps.

Layers are Llama's: RMSNorm, rotary positions, grouped-query attention, gated MLP of 3.5 times the width, no biases.
Attention is cuDNN's flash attention if the policy computes in 16 bits, otherwise XLA's: cuDNN has none for float32.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmp
from benchmarks.lib import trees
from benchmarks.lib.timing import Bench, LeftOut, Variant, carried

HEAD = 128  # of attention
POLICIES = ("bf16", "fp8", "fp16", "tf32", "fp32", "bf16+fp8")  # the last: bfloat16 params with masters, fp8 matmuls
MATMUL = (((1,), (0,)), ((), ()))


# --- one matmul -------------------------------------------------------------------------------------------------------


def dense(bench: Bench) -> None:
    """y = x w and both gradients, on [8192, side] by [side, side], in bfloat16 outside the GEMMs."""
    for side in (64,) if bench.tiny else (4096, 8192):
        rows = 64 if bench.tiny else 8192
        build = functools.partial(_dense, rows, side)
        bench.compare(
            f"Dense {rows}x{side}x{side}, forward and backward",
            {"bf16": lambda build=build: build(_bf16_dot), "fp8": lambda build=build: build(_fp8_dot)},
        )


def _dense(rows: int, side: int, dot: Callable[..., jax.Array]) -> Variant:
    x, g = jax.random.normal(jax.random.key(0), (2, rows, side), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16) * side**-0.5
    scales = jaxmp.fp8.Scales(*(jnp.float32(e) for e in (6.0, 13.0, 10.0)))  # log2; they fill e4m3, e4m3 and e5m2

    @jax.jit
    def run(w: jax.Array, scales: Any, x: jax.Array, g: jax.Array) -> Any:
        y, backward = jax.vjp(dot, w, scales, x)
        return y, backward(g)

    return Variant(functools.partial(run, w, scales, x, g), work={"flops": 6.0 * rows * side * side})


def _bf16_dot(w: jax.Array, scales: Any, x: jax.Array) -> jax.Array:
    del scales
    return x @ w


def _fp8_dot(w: jax.Array, scales: Any, x: jax.Array) -> jax.Array:
    return jaxmp.fp8.dot_general(x, w, MATMUL, recipe=jaxmp.fp8.DelayedScaling(), scales=scales)


# --- layers of a Llama ------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """One layer, [B, T, D] -> [B, T, D]: matmuls and attention in `dtype`, norms in float32."""

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
        y = attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + dense(width, name="o")(y.reshape(x.shape))
        y = norm()(x).astype(self.dtype)
        hidden = width * 7 // 2
        return x + dense(width, name="down")(nn.silu(dense(hidden, name="gate")(y)) * dense(hidden, name="up")(y))


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions, [B, T, H, 128]."""
    angles = jnp.arange(x.shape[1])[:, None] * 5e5 ** -jnp.linspace(0.0, 1.0, HEAD // 2, endpoint=False)[None]
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def llama_of(width: int, policy: jaxmp.Policy, *, flash: bool) -> Layer:
    """A layer of this width. At 4096 it is that of Llama 8B: 32 heads, 8 for keys and values, 14336 hidden."""
    return Layer(max(width // HEAD // 4, 1), policy.compute_dtype, flash)


def block(bench: Bench) -> None:
    """Forward and backward pass of a layer, without an optimizer."""
    for width in (128,) if bench.tiny else (4096, 8192):
        tokens = (1, 32) if bench.tiny else (1, 4096)
        build = functools.partial(_layer_step, bench, width, tokens, trains=False)
        names = ("bf16", "bf16+fp8")
        what = f"transformer block, width {width}, forward and backward"
        bench.compare(what, {name: functools.partial(build, policy_name=name) for name in names})


def llama(bench: Bench) -> None:
    """A whole training step of a layer as in Llama 8B, on two sequences of 4096."""
    width, tokens = (128, (1, 32)) if bench.tiny else (4096, (2, 4096))
    names = ("bf16", "fp8") if bench.tiny else POLICIES
    build = functools.partial(_layer_step, bench, width, tokens)
    bench.compare(LLAMA.format(width), {name: functools.partial(build, policy_name=name) for name in names})


LLAMA = "training step of a Llama layer, width {}"


def crossover(bench: Bench) -> None:
    """The same at smaller widths, to find the width from which fp8 is faster."""
    for width in (128,) if bench.tiny else (512, 1024, 2048):
        tokens = (1, 32) if bench.tiny else (2, 4096)
        build = functools.partial(_layer_step, bench, width, tokens)
        what = LLAMA.format(width) + (", smaller" if bench.tiny else "")
        bench.compare(what, {name: functools.partial(build, policy_name=name) for name in ("bf16", "fp8")})


def _layer_step(bench: Bench, width: int, tokens: tuple[int, int], *, policy_name: str, trains: bool = True) -> Variant:
    policy, recipe = precision_of(policy_name)
    x = jax.random.normal(jax.random.key(0), (*tokens, width), policy.compute_dtype)

    def build(flash: bool) -> Variant:
        model = llama_of(width, policy, flash=flash)

        def loss_fn(params: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(model.apply({"params": params}, x).astype(jnp.float32) ** 2)

        step = train_step(policy, recipe, model, loss_fn, x, x, trains=trains, tokens=tokens[0] * tokens[1])
        return step._replace(notes=lambda: step.notes() | {"attention": "cudnn" if flash else "xla"})

    if jnp.dtype(policy.compute_dtype).itemsize == 2 and not bench.tiny:
        try:
            return build(flash=True)
        except Exception as e:
            bench.left_out(f"flash attention, width {width}, {policy_name}", f"{type(e).__name__}: {e}")
    return build(flash=False)


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
    size = trees.size(state[0])
    compiled = jax.jit(step, donate_argnums=0 if trains else ()).lower(state, batch).compile()
    memory: Any = compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    fixed = {"params": size, "peak_mib": (peak + memory.temp_size_in_bytes) / 2**20}
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
