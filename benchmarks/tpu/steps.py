"""Compiles steps for TPUs, without having one, and counts their bytes beside optax in float32 and a recipe by hand."""

import functools
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec as P

import jaxmp
from benchmarks.lib import aot, trees
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import failing, holds, markdown
from benchmarks.lib.versions import TPU, versions
from benchmarks.programs.h100 import applied
from benchmarks.programs.recipes import Recipe, plain

ONE = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "v7x": "tpu7x:1x1x1"}
EIGHT = {"v5e": "v5e:2x4", "v6e": "v6e:2x4", "v7x": "tpu7x:2x2x1"}  # a chip of the last is two devices
BY_HAND, FLOAT32 = "by hand, bf16 params with masters", "optax in float32"
MOST = 1.1  # of the bytes by hand
WIDTH = 4096
MAX_NORM, RATE = 1.0, 1e-3


class Case(NamedTuple):
    """One program.

    Attributes:
      group: "optimizer", "step", "fsdp", "offload".
      name: of the program.
      topologies: where it is compiled: one chip or eight.
      build: compiles it for a mesh.
      params: their number, to divide bytes by; None for whole steps.
    """

    group: str
    name: str
    topologies: dict[str, str]
    build: Callable[[Mesh], Any]
    params: int | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it has targets: not what is compared with."""
        return self.name not in (FLOAT32, BY_HAND) and not self.name.endswith("fp32")


# --- programs ---------------------------------------------------------------------------------------------------------


def two_leaves(width: int = WIDTH) -> Any:
    """A matrix and a bias: what a step moves for a param is the same for more of them."""
    return {"kernel": trees.leaf(width, width), "bias": trees.leaf(width)}


def by_hand() -> Recipe:
    """bf16 params with float32 masters, clipped AdamW: what people write without a library. It never skips."""
    adamw = optax.adamw(RATE)

    def init(params32: Any) -> Any:
        return params32, adamw.init(params32)

    def step(params: Any, state: Any, grads: Any) -> Any:
        del params  # remade from the masters
        masters, adamw_state = state
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, MAX_NORM / (norm + 1e-6)), grads)
        updates, adamw_state = adamw.update(grads, adamw_state, masters)
        masters = optax.apply_updates(masters, updates)
        return jax.tree.map(lambda w: w.astype(jnp.bfloat16), masters), (masters, adamw_state)

    return init, step


def in_jaxmp(inner: Any, policy: str = "bf16", **kwargs: Any) -> Recipe:
    """`mixed_precision` and `apply_gradients`."""
    tx = jaxmp.mixed_precision(inner, policy, **kwargs)
    return tx.init, applied(tx)


def optimizers() -> dict[str, tuple[Any, Any]]:
    """Name: ((init, step), dtype of the params)."""
    clip = jaxmp.clip_by_global_norm(MAX_NORM)
    clipped = optax.chain(clip, optax.adamw(RATE))
    compressed = optax.chain(clip, jaxmp.compress_moments(optax.adamw(RATE), jnp.int8))
    fused = functools.partial(jaxmp.fused_adamw, RATE, max_norm=MAX_NORM)
    bf16 = jnp.bfloat16
    return {
        FLOAT32: (plain(optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(RATE))), jnp.float32),
        BY_HAND: (by_hand(), bf16),
        "jaxmp, bf16": (in_jaxmp(clipped), bf16),
        "jaxmp, fp16": (in_jaxmp(clipped, "fp16"), jnp.float16),
        "jaxmp, bf16, 16 bits of remainder": (in_jaxmp(clipped, remainder_bits=16), bf16),
        "jaxmp, bf16, int8 moments": (in_jaxmp(compressed), bf16),
        "jaxmp.fused_adamw, bf16": (in_jaxmp(fused()), bf16),
        "jaxmp.fused_adamw, bf16, 16 bits of remainder": (in_jaxmp(fused(), remainder_bits=16), bf16),
        "jaxmp.fused_adamw, bf16, 8 bits of remainder, int8 moments": (
            in_jaxmp(fused(state_dtype=jnp.int8), remainder_bits=8),
            bf16,
        ),
    }


def optimizer_step(program: Any, dtype: Any, shapes: Any, mesh: Mesh) -> Any:
    """The optimizer's side of a step, its params and state updated in place."""
    init, step = program
    params = trees.cast(shapes, dtype)
    state = jax.eval_shape(init, shapes)
    return aot.compile_for(step, *(aot.abstract(mesh, x) for x in (params, state, params)), donate_argnums=(0, 1))


def linen_step(precision: str, mesh: Mesh, cfg: Any = None) -> Any:
    """The whole step of examples/train.py."""
    from benchmarks.programs.example import example

    case = example(precision, cfg)
    return aot.compile_for(case.step, *(aot.abstract(mesh, x) for x in case.arguments()), donate_argnums=(0, 1))


def nnx_step(precision: str, mesh: Mesh, cfg: Any = None) -> Any:
    """The whole step of the model of examples/train_nnx.py, with `jaxmp.nnx`."""
    from flax import nnx

    from benchmarks.lib.examples import load, train

    train_nnx = load("train_nnx")
    cfg = cfg or train_nnx.Config(dropout=0.0)
    policy, recipe, _ = train.precision_of(precision)
    tx = jaxmp.mixed_precision(optax.chain(jaxmp.clip_by_global_norm(MAX_NORM), optax.adamw(RATE)), policy)

    def make() -> Any:
        model = train_nnx.Transformer(cfg, nnx.Rngs(0))
        if recipe:
            jaxmp.nnx.to_fp8(model, recipe)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        jaxmp.nnx.cast_to_param(model, policy)
        return model, optimizer

    graph, state = nnx.split(nnx.eval_shape(make))

    def step(state: Any, tokens: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        grad_fn = jaxmp.nnx.value_and_grad(lambda m, x: train.next_byte_loss(m(x[:, :-1]), x), policy=policy)
        loss, grads = grad_fn(model, tokens, opt_state=optimizer.opt_state)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    tokens = jax.ShapeDtypeStruct((cfg.batch_size, cfg.seq_len + 1), jnp.uint8)
    return aot.compile_for(step, aot.abstract(mesh, state), aot.abstract(mesh, tokens), donate_argnums=0)


def fsdp_step(policy_name: str, mesh: Mesh, width: int = 1024, layers: int = 4) -> Any:
    """A stack of layers over all chips with `jaxmp.fsdp`: params gathered as they are, gradients reduced in float32."""
    policy = jaxmp.get_policy(policy_name)
    mesh = Mesh(mesh.devices, ("fsdp",))
    shapes = {f"layer_{i}": trees.leaf(width, width) for i in range(layers)}
    layout = jaxmp.fsdp.layout_of(shapes, mesh)
    where: dict[str, Any] = {"axis_name": "fsdp", "replicated": layout.whole}
    tx = jaxmp.mixed_precision(optax.chain(jaxmp.clip_by_global_norm(MAX_NORM, **where), optax.adamw(RATE)), policy)
    padded = jax.eval_shape(lambda p: jaxmp.fsdp.pad(p, layout), shapes)

    def loss_fn(params: Any, x: Any) -> Any:
        for w in jax.tree.leaves(jaxmp.fsdp.gather(params, layout, reduce_dtype=jnp.float32)):
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params: Any, state: Any, x: Any) -> Any:
        loss, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=state)
        grads = jaxmp.fsdp.reduce_gradients(grads, layout, dtype=jnp.float32)
        return *jaxmp.apply_gradients(tx, grads, state, params), jax.lax.pmean(loss, "fsdp")

    abstract = (policy.cast_to_param(padded), jax.eval_shape(tx.init, padded))
    specs = (layout.specs, jaxmp.sharding_of(tx, padded, layout.specs))
    arguments = jax.tree.map(lambda x, s: aot.spec(mesh, x.shape, x.dtype, s), abstract, specs)
    x = aot.spec(mesh, (512 * mesh.size, width), policy.compute_dtype, P("fsdp"))
    f = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("fsdp")), out_specs=(*specs, P()))
    return aot.compile_for(f, *arguments, x, donate_argnums=(0, 1))


def offload_step(mesh: Mesh, width: int = 1024, layers: int = 4) -> Any:
    """AdamW with masters and moments in pinned host memory, streamed leaf by leaf."""
    from benchmarks.h100.offload import on_host

    inner = jaxmp.offload.stream_updates(optax.adamw(RATE), window_bytes=12 * width * width)
    tx = jaxmp.mixed_precision(inner, "bf16")
    shapes = {f"layer_{i}": trees.leaf(width, width) for i in range(layers)}
    params = aot.abstract(mesh, trees.cast(shapes, jnp.bfloat16))
    state = aot.abstract(mesh, jax.eval_shape(tx.init, shapes))
    state = jax.tree.map(lambda x: on_host(mesh, x) if x.ndim else x, state)

    return aot.compile_for(applied(tx), params, state, params, donate_argnums=(0, 1))


def optimizer_cases(width: int = WIDTH) -> list[Case]:
    """The optimizer's side of a step on a matrix and its bias."""
    shapes = two_leaves(width)
    return [
        Case("optimizer", name, ONE, functools.partial(optimizer_step, program, dtype, shapes), trees.size(shapes))
        for name, (program, dtype) in optimizers().items()
    ]


def cases() -> list[Case]:
    """All programs."""
    precisions, policies = ("fp32", "bf16", "fp8"), ("fp32", "bf16")
    return [
        *optimizer_cases(),
        *(Case("step", f"linen example, {name}", ONE, functools.partial(linen_step, name)) for name in precisions),
        *(Case("step", f"nnx example, {name}", ONE, functools.partial(nnx_step, name)) for name in precisions),
        *(Case("fsdp", f"FSDP on 8, {name}", EIGHT, functools.partial(fsdp_step, name)) for name in policies),
        Case("offload", "AdamW, state in host memory", ONE, offload_step),
    ]


# --- counts -----------------------------------------------------------------------------------------------------------


def matmuls(compiled: Any) -> dict[str, int]:
    """The number of matmuls of each kind, "dtype x dtype", in the final program."""
    text = re.sub(r"/\*.*?\*/", "", compiled.as_text() or "")
    counts: dict[str, int] = {}
    types: dict[str, str] = {}
    for line in text.splitlines():
        if head := re.match(r"\s*(?:ROOT )?(%[\w.\-]+) = (\w+)\[", line):
            types[head.group(1)] = head.group(2)
        if operands := re.search(r" (?:convolution|dot)\((.*?)\)", line):
            names = re.findall(r"%[\w.\-]+", operands.group(1))
            kind = " x ".join(sorted({types.get(name, "?") for name in names}, reverse=True))
            counts[kind] = counts.get(kind, 0) + 1
    return counts


_ARRAY = re.compile(r"(\w+\[[\d,]*\])(\{[^}]*\})?")
_MOVES_NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


def hbm_bytes(compiled: Any) -> int:
    """Bytes read from HBM and written to it.

    XLA also counts what a kernel reads from, or writes to, the chip's vector memory, where a prefetch may have put it.

    Raises:
      ValueError: a program with loops or branches.
    """
    total = 0
    types: dict[str, str] = {}

    def in_hbm(type_text: str) -> int:
        return sum(aot.nbytes(array) for array, layout in _ARRAY.findall(type_text) if "S(" not in layout)

    for name, type_text, op, operands, attributes in aot.parse(aot.computations(compiled)["ENTRY"]):
        types[name] = type_text
        if op in ("while", "conditional", "call"):
            raise ValueError(f"the bytes of a program without loops and branches can be counted; got a {op}")
        if op in _MOVES_NOTHING or op.endswith("-done") or "ConcatBitcast" in attributes:
            continue
        read = in_hbm(" ".join(types[operand] for operand in operands))
        if op in ("copy-start", "slice-start"):  # the type: a tuple of the source, the copy and a counter
            moved = min(aot.nbytes(array) for array, _ in _ARRAY.findall(type_text)[:2])
            wrote = in_hbm(type_text) - read  # the source is in the type, too
            total += (moved if read else 0) + (moved if wrote else 0)
        else:
            total += read + in_hbm(type_text)
    return total


def count(case: Case, chip: str) -> dict[str, Any]:
    """A row; if the program does not compile, with the error."""
    row: dict[str, Any] = {"group": case.group, "program": case.name, "chip": chip, "ours": case.is_ours}
    try:
        mesh = aot.tpu_mesh(case.topologies[chip])
        compiled = case.build(mesh)
    except Exception as e:
        return row | {"error": f"{type(e).__name__}: {str(e).splitlines()[0][:300]}"}
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    counted = float(cost.get("bytes accessed", 0.0))
    text = compiled.as_text() or ""
    collectives = re.findall(r" (all-gather|reduce-scatter|all-reduce)(?:-start)?\(", text)
    return row | {
        "devices": mesh.size,
        "bytes": counted,
        "params": case.params,
        "xla_bytes_per_param": counted / case.params if case.params else None,
        "bytes_per_param": hbm_bytes(compiled) / case.params if case.params else None,
        "host_bytes": memory.host_argument_size_in_bytes,
        "scratch_bytes": memory.temp_size_in_bytes,
        "not_in_place_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "matmuls": matmuls(compiled),
        "collectives": {kind: collectives.count(kind) for kind in sorted(set(collectives))},
    }


def missed(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """The targets that a row misses, in words."""
    if not row["ours"]:
        return []
    if "error" in row:
        return [row["error"]]
    hand = next((r for r in rows if (r["program"], r["chip"]) == (BY_HAND, row["chip"])), {}).get("bytes_per_param")
    ratio = row["bytes_per_param"] / hand if row["group"] == "optimizer" and hand else 0.0
    # A loss and metrics are new; params that are remade from masters are not read, so XLA drops the donated ones.
    new = row["not_in_place_bytes"] - 2**16 - 2 * (row["params"] or 0)
    return failing(
        (
            (ratio <= MOST, f"{ratio:.1f} times the bytes by hand"),
            (new <= 0, f"{row['not_in_place_bytes'] / 2**20:.0f} MiB are not updated in place"),
        )
    )


def measure(chips: dict[str, list[Case]]) -> dict[str, Any]:
    """The results for these chips and their programs."""
    about = {"device": f"TPU {', '.join(chips)} (compiled, not run)", "versions": versions(TPU)}
    rows = []
    for chip, programs in chips.items():
        for case in programs:
            print(f"compiling for {chip}: {case.name}", file=sys.stderr, flush=True)
            rows.append(count(case, chip))
    return {**about, "rows": [row | {"missed": missed(row, rows)} for row in rows]}


ELSEWHERE = (FLOAT32, BY_HAND, "jaxmp, bf16", "linen example, fp8")  # what v5e and v7x are compiled for


def measure_all() -> dict[str, Any]:
    """All programs on v6e, and some on the other chips."""
    some = [case for case in cases() if case.name in ELSEWHERE]
    return measure({"v6e": cases(), "v5e": some, "v7x": some})


def measure_tiny() -> dict[str, Any]:
    """Three optimizers on two leaves."""
    return measure({"v6e": optimizer_cases(256)[:3]})


def render(results: dict[str, Any]) -> str:
    """The results as markdown: a table of the optimizer's side, one of whole steps."""
    optimizers = [["optimizer's side, bytes per param", "chip", "HBM", "XLA counts", "scratch MiB", "holds"]]
    steps = [["whole step", "chip", "MB accessed", "scratch MiB", "host MiB", "matmuls", "collectives", "holds"]]
    for row in results["rows"]:
        table = optimizers if row["group"] == "optimizer" else steps
        if "error" in row:
            cells = [""] * (len(table[0]) - 3)
        elif row["bytes_per_param"] is not None:
            cells = [f"{row[key]:.1f}" for key in ("bytes_per_param", "xla_bytes_per_param")]
            cells.append(f"{row['scratch_bytes'] / 2**20:.1f}")
        else:
            host = f"{row['host_bytes'] / 2**20:.0f}" if row["host_bytes"] else ""
            cells = [f"{row['bytes'] / 1e6:.0f}", f"{row['scratch_bytes'] / 2**20:.1f}", host]
            cells += [", ".join(f"{n} {kind}" for kind, n in row[key].items()) for key in ("matmuls", "collectives")]
        table.append([row["program"], row["chip"], *cells, holds(row, has_target=row["ours"])])
    return "\n\n".join(markdown(table) for table in (optimizers, steps) if len(table) > 1)


BENCHMARK = Benchmark("tpu steps", "tpu_steps.json", measure_all, render, measure_tiny)
