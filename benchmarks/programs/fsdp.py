"""A transformer sharded over many H100s: its training steps are compiled, and their collectives are counted."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

import jaxmp
from benchmarks.lib import aot
from jaxmp import fsdp
from jaxmp._src.distributed import param_layout

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH, ROWS = 2048, 16, 4, 50257, 512, 8
# The usual settings for FSDP: collectives overlap with matmuls, and are not merged into ones too large to overlap.
OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_gather_combine_threshold_bytes": 2**20,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**20,
}


class Program(NamedTuple):
    """How a step is written.

    Attributes:
      name: for the table.
      manual: jax.shard_map with the collectives of `jaxmp.fsdp.gather`; otherwise plain jit, and XLA inserts them.
      policy: the precision policy.
      reduce_dtype: the dtype in which gradients are summed; None for their own.
      again: if gathered params are freed and gathered again for the backward pass, the checkpoint policy for all other
        values; None if gathered params are kept.
      microbatches: the number of microbatches.
      once: params are gathered before the first microbatch, and gradients are reduced after the last.
    """

    name: str
    manual: bool = True
    policy: str = "fp16"
    reduce_dtype: Any = None
    again: Any = None
    microbatches: int = 1
    once: bool = False


PROGRAMS = (
    Program("fp32 params, all in float32", policy="fp32"),
    Program("fp16, jit with shardings", manual=False),
    Program("fp16, reduced in float16"),
    Program("fp16, reduced in float32", reduce_dtype=jnp.float32),
    Program("bf16, reduced in float32", policy="bf16", reduce_dtype=jnp.float32),
    Program("fp16, gathered again, all else saved", again=jax.checkpoint_policies.everything_saveable),
    Program("fp16, gathered again, matmuls saved", again=jax.checkpoint_policies.dots_saveable),
    Program("fp16, 4 microbatches, reduced in each", microbatches=4),
    Program("fp16, 4 microbatches, reduced once", microbatches=4, once=True),
)


def params32() -> PyTree:
    """The params' shapes: embeddings, `LAYERS` blocks, a last norm; the embedding is also the output matrix."""
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    block = {
        "qkv": f32((WIDTH, 3 * WIDTH)),
        "out": f32((WIDTH, WIDTH)),
        "up": f32((WIDTH, 4 * WIDTH)),
        "down": f32((4 * WIDTH, WIDTH)),
        "norm_1": f32((WIDTH,)),
        "norm_2": f32((WIDTH,)),
    }
    blocks = {f"block_{i}": dict(block) for i in range(LAYERS)}
    return {"tokens": f32((VOCABULARY, WIDTH)), "positions": f32((LENGTH, WIDTH)), "norm": f32((WIDTH,))} | blocks


def count() -> int:
    """The number of params."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params32()))


def _norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def _block(params: PyTree, x: Array) -> Array:
    b, t, d = x.shape
    qkv = (_norm(x, params["norm_1"]) @ params["qkv"]).reshape(b, t, 3, HEADS, d // HEADS)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * (d // HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e30)
    x = x + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(v.dtype), v).reshape(b, t, d) @ params["out"]
    return x + jax.nn.relu(_norm(x, params["norm_2"]) @ params["up"]) @ params["down"]


def loss_of(params: PyTree, tokens: Array, block: Callable[[PyTree, Array], Array] = _block) -> Array:
    """Mean cross-entropy of the next token, of tokens int32[rows, LENGTH + 1]."""
    x = params["tokens"][tokens[:, :-1]] + params["positions"]
    for i in range(LAYERS):
        x = block(params[f"block_{i}"], x)
    logits = (_norm(x, params["norm"]) @ params["tokens"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def _set_up(program: Program, mesh: Any) -> tuple[Any, param_layout.Layout, Any, PyTree]:
    """(policy, layout, optimizer, the padded params' shapes)."""
    policy = jaxmp.get_policy(program.policy, keep_fp32=("*norm*",))
    layout = fsdp.layout_of(params32(), mesh)
    where: dict[str, Any] = {"axis_name": "fsdp", "replicated": layout.whole} if program.manual else {}
    inner = optax.chain(jaxmp.clip_by_global_norm(1.0, **where), optax.adamw(1e-4))
    padded = jax.eval_shape(lambda p: fsdp.pad(p, layout), params32())
    return policy, layout, jaxmp.mixed_precision(inner, policy), padded


def compiled(program: Program, devices: int) -> Any:
    """The step, compiled for `devices` H100s."""
    mesh = aot.mesh(devices, ("fsdp",))
    policy, layout, tx, padded = _set_up(program, mesh)
    k = program.microbatches

    def gather(params: PyTree) -> PyTree:
        return fsdp.gather(params, layout, **({"reduce_dtype": program.reduce_dtype} if program.manual else {}))

    loss_fn: Any = loss_of if program.once else (lambda params, tokens: loss_of(gather(params), tokens))
    if program.again is not None:
        loss_fn = jax.checkpoint(loss_fn, policy=fsdp.save_all_but_gathered(program.again))

    def step(params: PyTree, opt_state: Any, tokens: Array) -> Any:
        seen = gather(params) if program.once else params
        loss, grads = jaxmp.value_and_grad(loss_fn, accumulate=k)(seen, tokens, opt_state=opt_state)
        if program.manual:
            grads = fsdp.reduce_gradients(grads, layout, dtype=program.reduce_dtype)
            loss = jax.lax.pmean(loss, "fsdp")
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, loss

    abstract = (policy.cast_to_param(padded), jax.eval_shape(tx.init, padded))
    specs = (layout.specs, jaxmp.sharding_of(tx, padded, layout.specs))
    rows = P("fsdp")
    arguments = jax.tree.map(lambda x, s: aot.spec(mesh, x.shape, x.dtype, s), abstract, specs)
    tokens = aot.spec(mesh, (ROWS * k * devices, LENGTH + 1), jnp.int32, rows)
    if program.manual:
        f: Any = jax.shard_map(step, mesh=mesh, in_specs=(*specs, rows), out_specs=(*specs, P()))
        shardings = None
    else:
        f, shardings = step, (*jax.tree.map(lambda x: x.sharding, arguments), None)
    kwargs = {} if shardings is None else {"out_shardings": shardings}
    return aot.compile_for(f, *arguments, tokens, donate_argnums=(0, 1), compiler_options=OPTIONS, **kwargs)


KINDS = ("all-gather", "reduce-scatter", "all-reduce")


def traffic(executable: Any, devices: int) -> dict[str, dict[str, dict[str, int]]]:
    """For each kind of collective and dtype: the number in a step, and the bytes of the whole tensor on each device.

    That is the result of a gather or the input of a reduction. A ring moves (n - 1) / n of it into and out of a device.
    """
    bytes_by_kind: dict[str, dict[str, dict[str, int]]] = {kind: {} for kind in KINDS}
    for i in aot.instructions(executable, every_turn=True):
        kind = next((kind for kind in KINDS if i.op.startswith(kind)), None)
        if kind is None:
            continue
        entry = bytes_by_kind[kind].setdefault("+".join(i.dtypes), {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += i.bytes_read * (devices if kind == "all-gather" else 1)
    return {kind: dtypes for kind, dtypes in bytes_by_kind.items() if dtypes}


def flag_reductions(executable: Any) -> int:
    """The number of all-reduces that combine flags and amaxes: by MAX, by AND or OR, or in a complex sum with the norm.

    The update waits for these. The count of masters that saturate is another one, of 8 bytes: it is known after the
    update, and nothing waits for it. It is not counted here.
    """
    blocks = aot.computations(executable)
    flags = 0
    for lines in aot.running(blocks):
        for _, shape, op, _, attributes in aot.parse(lines):
            reducer = re.search(r"to_apply=(%[\w.\-]+)", attributes)
            if op in ("all-reduce", "all-reduce-start") and reducer and "jaxmp.count" not in attributes:
                is_flag = any(re.search(r" (maximum|and|or)\(", line) for line in blocks[reducer.group(1)])
                flags += is_flag or "c64" in str(shape)
    return flags


def overlapped(executable: Any) -> tuple[int, int]:
    """(gathers and scatters scheduled to overlap with a matmul, all gathers and scatters); loops count once."""
    hidden = total = 0
    for lines in aot.running(aot.computations(executable)):
        runs = list(aot.parse(lines))
        done_at = {read[0]: i for i, (_, _, op, read, _) in enumerate(runs) if op.endswith("-done") and read}
        for i, (name, _, op, _, _) in enumerate(runs):
            if not op.startswith(("all-gather", "reduce-scatter")) or op.endswith("-done"):
                continue
            total += 1
            between = runs[i + 1 : done_at[name]] if name in done_at else []
            hidden += any(re.search("gemm|cublas|dot", n + attributes) for n, _, _, _, attributes in between)
    return hidden, total
