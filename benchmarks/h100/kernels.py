"""Checks every Pallas kernel: its registers, spills and bytes, and whether a mesh gathers its operands."""

import functools
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # before a kernel is compiled
os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import pallas_kernels
from benchmarks.lib import aot
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import failing, holds, markdown
from benchmarks.lib.versions import on_h100
from benchmarks.programs import computed_casts
from pallas_kernels import moments as moments_of, update as update_kernel

SIDE = 4096
SHAPES = ((SIDE, SIDE), (1000,), (13,))  # a matrix, and small leaves that need blocks of every size
WHOLE = (8, 4096)  # a leaf that only needs blocks of the largest size
LEAVES = (1, 12, 148)
LEAST_WIDTH = 8  # bytes of a leaf that a thread moves at once
N_SCALARS = 8  # loads and stores of 4 bytes that a kernel may have: flag, scalars, numbers of the leaf, scales, sums
LEAST_SHARED = 4  # bytes that a thread stores in shared memory at once
SLACK = 0.5  # MiB: partial sums and scalars
CAST = "cast_transpose_amax"  # whose splits over devices are looked at


class Kernel(NamedTuple):
    """One row: a function, its arguments, and the least that it has to move."""

    name: str
    variant: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...]  # trees of abstract arrays
    least_mib: float
    donated: tuple[int, ...] = ()
    unread_mib: float = 0.0  # operands that are written in place and never read


def kernels() -> list[Kernel]:
    """All kernels, in the important dtypes; a new one gets a row here."""
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    k = pallas_kernels
    return [
        *_matrix("cast_transpose_amax", lambda x, s: k.cast_transpose_amax(x, s, e4m3), inputs=1),
        *_matrix("cast_transpose_amax, e5m2", lambda x, s: k.cast_transpose_amax(x, s, e5m2), inputs=1),
        *_matrix(f"{computed_casts.NAME} of a gelu with a bias", computed_casts.gelu, inputs=1, vectors=1),
        *_matrix(f"{computed_casts.NAME} of silu(a) b", computed_casts.silu_gated, inputs=2),
        *_over_trees(),
    ]


def _over_trees(shapes: Sequence[tuple[int, ...]] = SHAPES) -> Iterator[Kernel]:
    """Kernels over the leaves of a tree of these shapes."""
    k, scalar = pallas_kernels, jax.ShapeDtypeStruct((), jnp.float32)
    one_byte = SIDE**2 / 2**20

    def tree(dtype: Any) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    half, f32 = (tree(jnp.float16), scalar), (tree(jnp.float32), scalar)
    yield Kernel("gradient_norm", "float16", k.gradient_norm, half, 2 * one_byte)
    yield Kernel("unscale_and_check", "float16", k.unscale_and_check, half, 6 * one_byte, unread_mib=4 * one_byte)
    for dtype, size in ((jnp.bfloat16, 2), (jnp.float8_e4m3fn, 1)):

        def cast(masters: Any, scale: Any, dtype: Any = dtype) -> Any:
            return k.cast_tree(masters, dtype, scale=scale)

        name, least = f"cast_tree to {jnp.dtype(dtype).name}", (4 + size) * one_byte
        yield Kernel(name, "float32", cast, f32, least, unread_mib=size * one_byte)

    def update(weights: Any, grads: Any, factor: Any, taken: Any, rule: Any) -> Any:
        bound = [update_kernel.Weight(g, *w) for g, w in zip(grads, weights, strict=True)]
        scalars = (factor, factor) if len(rule.signed) == 2 else ()
        rest = {"factor": factor, "learning_rate": factor, "step": factor, "scalars": scalars, "taken": taken}
        after, _ = k.multi_tensor_update(bound, rule, **rest)
        return [(w.param, w.master, w.moments) for w in after]

    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    adamw, lion, sgd = update_kernel.AdamW(), update_kernel.Lion(), update_kernel.Momentum()
    forms = (
        ("AdamW", adamw, jnp.float16, jnp.float32, jnp.float32, 28, 2),
        ("AdamW, split masters", adamw, jnp.bfloat16, jnp.int16, jnp.float32, 26, 0),
        ("AdamW, 24-bit masters, int8 moments", adamw, jnp.bfloat16, jnp.int8, jnp.int8, 12, 0),
        ("AdamW, 24-bit masters, bfloat16 moments", adamw, jnp.bfloat16, jnp.int8, jnp.bfloat16, 16, 0),
        ("AdamW, bfloat16 moments", adamw, jnp.bfloat16, jnp.float32, jnp.bfloat16, 20, 2),
        ("AdamW, e4m3 moments", adamw, jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, 16, 2),
        ("Lion", lion, jnp.float16, jnp.float32, jnp.float32, 20, 2),
        ("SGD with momentum", sgd, jnp.float16, jnp.float32, jnp.float32, 20, 2),
    )
    for name, rule, dtype, master, state, moved, unread in forms:

        def moments(x: jax.ShapeDtypeStruct, rule: Any = rule, state: Any = state) -> tuple[Any, ...]:
            return tuple(moments_of.like(x.shape, state, signed=signed) for signed in rule.signed)

        grads = tree(dtype)
        weights = [(g, jax.ShapeDtypeStruct(g.shape, master), moments(g)) for g in grads]
        scales = 16 * SIDE**2 / 256 / 2**20 if jnp.dtype(state).itemsize == 1 else 0  # of two moments, read and written
        yield Kernel(
            f"multi_tensor_update: {name}",
            jnp.dtype(dtype).name,
            functools.partial(update, rule=rule),
            (weights, grads, scalar, flag),
            moved * one_byte + scales,
            donated=(0,),
            unread_mib=unread * one_byte,
        )


def _matrix(name: str, run: Callable[..., Any], *, inputs: int, vectors: int = 0) -> Iterator[Kernel]:
    """Rows of a kernel on square matrices: reads each once, and writes its value twice in fp8."""
    vector = jax.ShapeDtypeStruct((SIDE,), jnp.float32)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        size = jnp.dtype(dtype).itemsize
        x = jax.ShapeDtypeStruct((SIDE, SIDE), dtype)
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        least = (inputs * size + 2) * SIDE**2 / 2**20
        yield Kernel(name, jnp.dtype(dtype).name, run, (x,) * inputs + (scale,) + (vector,) * vectors, least)


def measure(kernel: Kernel) -> dict[str, Any]:
    """Compiles one kernel and returns its row. Memory traffic bounds it: nothing is spilled, or moved twice."""
    compiled, log = compile_kernel(kernel)
    runs = aot.instructions(compiled)
    launches = sum("mosaic" in i.kind for i in runs)
    row = {
        "kernel": kernel.name,
        "variant": kernel.variant,
        **_registers_and_spills(log),
        "launches": launches,
        "beside": len(runs) - launches,
        "mib": round(aot.moved(runs) / 2**20 - kernel.unread_mib, 2),
        "least_mib": kernel.least_mib,
        "shared_stores": _shared_stores(log),
    }
    narrow = sum(n for size, n in row["shared_stores"].items() if int(size) < LEAST_SHARED)
    checks = (
        (launches > 0, "it is not in the program"),
        (row["registers"] is not None, "ptxas said nothing"),
        (not row["spilled_bytes"], f"{row['spilled_bytes']} bytes spilled"),
        (row["mib"] <= kernel.least_mib + SLACK, f"{row['mib']} MiB, not {kernel.least_mib}"),
        (not narrow, f"{narrow} stores of less than {LEAST_SHARED} bytes in shared memory"),
    )
    return row | {"missed": failing(checks)}


def compile_kernel(kernel: Kernel, where: str = "") -> tuple[jax.stages.Compiled, str]:
    """The program of a kernel, and what ptxas and Mosaic print: this bypasses Python's `sys.stdout`."""
    print(f"compiling: {kernel.name} of {kernel.variant}{where}", file=sys.stderr, flush=True)
    arguments = aot.abstract(aot.mesh(), kernel.arguments)
    sys.stdout.flush()
    with tempfile.TemporaryFile(mode="w+") as file:
        copies = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        try:
            compiled = aot.compile_for(kernel.run, *arguments, donate_argnums=kernel.donated)
        finally:
            sys.stdout.flush()
            for descriptor, copy in zip((1, 2), copies, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)
            file.seek(0)
        return compiled, file.read()


def measure_widths(n_leaves: int) -> Iterator[dict[str, Any]]:
    """For each kernel over a tree of `n_leaves` equal leaves: the bytes that a thread loads at once, in PTX."""
    for kernel in _over_trees((WHOLE,) * n_leaves):
        _, log = compile_kernel(kernel, f", over {n_leaves} leaves")
        launches = [part for part in log.split(".entry")[1:] if "mosaic_gpu" in part]
        loads, stores = ([_widths(part, f"{op}.global") for part in launches] for op in ("ld", "st"))
        yield {
            "kernel": kernel.name,
            "leaves": n_leaves,
            **_registers_and_spills(log),
            "loads": [dict(sorted(widths.items())) for widths in loads],
            "stores": [dict(sorted(widths.items())) for widths in stores],
            "missed": [
                f"{n} {what} of {size} bytes"
                for what, of_launches in (("loads", loads), ("stores", stores))
                for widths in of_launches
                for size, n in sorted(widths.items())
                if int(size) < LEAST_WIDTH and n > (N_SCALARS if size == "4" else 0)
            ],
        }


def _registers_and_spills(log: str) -> dict[str, int | None]:
    return {
        "registers": max((int(n) for n in re.findall(r"Used (\d+) registers", log)), default=None),
        "spilled_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes spill", log)),
    }


def _widths(ptx: str, op: str) -> Counter[str]:
    """How many loads or stores there are of each number of bytes."""
    accesses = re.findall(rf"{re.escape(op)}(?:\.\w+)*?(?:\.v(\d))?\.[bfsu](\d+)\s", ptx)
    return Counter(str(int(n or 1) * int(bits) // 8) for n, bits in accesses)


def _shared_stores(ptx: str) -> dict[str, int]:
    """How many stores to shared memory there are of each number of bytes; stmatrix stores 4 bytes for each matrix."""
    stores = _widths(ptx, "st.shared")
    for matrices in re.findall(r"stmatrix\.[\w.:]*?\.x(\d)", ptx):
        stores[str(4 * int(matrices))] += 1
    return dict(sorted(stores.items(), key=lambda item: -int(item[0])))


def measure_split(name: str, spec: P) -> dict[str, Any]:
    """A kernel on a matrix split over eight devices, under plain jit; a vector of its columns is whole."""
    m = aot.mesh(8, ("a", "b"), (4, 2))
    arguments = aot.spec(m, (SIDE, SIDE), jnp.bfloat16, spec), aot.spec(m, (), jnp.float32)
    if name == computed_casts.NAME:
        compiled = aot.compile_for(computed_casts.gelu, *arguments, aot.spec(m, (SIDE,), jnp.float32))
    else:
        run = functools.partial(pallas_kernels.cast_transpose_amax, dtype=jnp.float8_e4m3fn)
        compiled = aot.compile_for(run, *arguments)
    collectives = aot.report(compiled)["collectives"]
    small = sum(collectives.get("all-reduce", [])) <= 4 and set(collectives) <= {"all-reduce"}
    q, q_t, _ = compiled.output_shardings
    checks = (
        (small, f"collectives: {collectives}"),
        (any("mosaic" in i.kind for i in aot.instructions(compiled)), "the kernel is not in the program"),
        (_padded(q.spec) == _padded(spec), f"q is split as {q.spec}"),
        (_padded(q_t.spec) == _padded(spec)[::-1], f"q.T is split as {q_t.spec}"),
    )
    return {"kernel": name, "x": str(spec), "collectives": collectives, "missed": failing(checks)}


def _padded(spec: P) -> tuple[Any, ...]:
    return (*spec, *[None] * (2 - len(spec)))


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    cells = [["kernel", "of", "registers", "spilled", "launches", "beside", "MiB", "at least", "shared", "holds"]]
    cells += [
        [
            row["kernel"],
            row["variant"],
            str(row["registers"]),
            f"{row['spilled_bytes']} B",
            str(row["launches"]),
            str(row["beside"]),
            f"{row['mib']:.1f}",
            f"{row['least_mib']:.0f}",
            ", ".join(f"{n} x {size} B" for size, n in row["shared_stores"].items()) or "none",
            holds(row),
        ]
        for row in results["kernels"]
    ]
    split = [["kernel under jit", "x on a 4 x 2 mesh (a, b) as", "collectives", "holds"]]
    split += [
        [
            row["kernel"],
            row["x"],
            ", ".join(f"{kind} of {sum(sizes)} B" for kind, sizes in row["collectives"].items()) or "none",
            holds(row),
        ]
        for row in results["split"]
    ]
    sizes = "16, 8, fewer bytes"
    widths = [["kernel", "leaves", "registers", "spilled", f"loads of {sizes}", f"stores of {sizes}", "holds"]]
    widths += [
        [
            row["kernel"],
            str(row["leaves"]),
            str(row["registers"]),
            f"{row['spilled_bytes']} B",
            "; ".join(_by_width(loads) for loads in row["loads"]),
            "; ".join(_by_width(stores) for stores in row["stores"]),
            holds(row),
        ]
        for row in results["widths"]
    ]
    return "\n\n".join(markdown(part) for part in (cells, widths, split))


def _by_width(widths: dict[str, int]) -> str:
    fewer = sum(n for size, n in widths.items() if int(size) < LEAST_WIDTH)
    return f"{widths.get('16', 0)}, {widths.get('8', 0)}, {fewer}"


def measure_all() -> dict[str, Any]:
    """All results."""
    splits = [(CAST, spec) for spec in (P("a"), P("a", "b"), P(None, "b"), P(("a", "b")), P())]
    splits += [(computed_casts.NAME, spec) for spec in (P("a"), P(None, "b"))]
    return {
        **on_h100(),
        "side": SIDE,
        "kernels": [measure(kernel) for kernel in kernels()],
        "widths": [row for n in LEAVES for row in measure_widths(n)],
        "split": [measure_split(name, spec) for name, spec in splits],
    }


BENCHMARK = Benchmark("h100 kernels", "h100_kernels.json", measure_all, render)
