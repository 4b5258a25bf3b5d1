"""Compiles a JAX function for an NVIDIA H100 on a machine without a GPU, and counts what the program would do."""

# XLA compiles for a GPU that is only described (`h100_sxm.txtpb`), with a CUDA plugin of jax but no driver and no GPU:
#
#     >>> m = mesh(8, ("data",))                                                # doctest: +SKIP
#     >>> c = compile_for(step, spec(m, (4096, 4096), "float16"), donate_argnums=0)
#     >>> report(c, n_params=4096 * 4096)
#
# Of its final HLO, each executed instruction reads each operand once and writes each result once; caches are ignored. A
# slice reads only the part that it takes. A conditional counts as its most expensive branch. A loop counts as one
# iteration, or as all with `every_turn=True`, where an in-place update of a part of an array counts only that part. All
# operands of our own kernels count as read, unless `report(unread_bytes=...)` says otherwise. Times, autotuning and
# errors at run time are not visible.
#
# Import this before jax: it makes jax use the CPU of this machine.

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_TARGET = Path(__file__).resolve().with_name("h100_sxm.txtpb")
_ITEMSIZE = {
    **{"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2},
    **{"f8e4m3fn": 1, "f8e5m2": 1, "f8e8m0fnu": 1, "s8": 1, "u8": 1, "pred": 1},
}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"}
_FREE |= {f"{c}-done" for c in ("copy", "async", "fusion", *_COLLECTIVES)}
_SLICE = ("slice", "dynamic-slice")
_MOVES = {"parameter", "bitcast", "tuple", "copy", "reshape", "slice", "concatenate"}
_BLOCK = ("while", "conditional", "call")  # they launch nothing; their computations do

_COMPUTATION = re.compile(r"^(?:ENTRY )?(%[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*?)\)(?:, (.*)|$)")
PARAMETER = re.compile(r"(%[\w.\-]+) = .* parameter\((\d+)\)")


class Instruction(NamedTuple):
    """One executed line of HLO, and the bytes that it moves."""

    op: str  # "fusion", "copy", "all-reduce", ...
    kind: str  # the fusion's kind or the custom call's target
    name: str
    bytes_read: int
    bytes_written: int
    body: str  # name of the fused computation; "" where there is none
    sources: frozenset[str]  # names of the instructions whose results it reads
    dtypes: tuple[str, ...]  # in its result, as HLO calls them


def mesh(n_devices: int = 1, axis_names: tuple[str, ...] = ("data",), shape: tuple[int, ...] | None = None) -> Mesh:
    """A mesh of `n_devices` H100s that are only described."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_TARGET.read_text(), topology=f"1x1x{n_devices}"
    )
    return topologies.make_mesh(topology, shape or (n_devices,), axis_names)


def tpu_mesh(topology: str, axis_names: tuple[str, ...] = ("data",)) -> Mesh:
    """A mesh of TPUs that are only described, along one axis; `topology` like "v6e:2x4". It needs libtpu, but no TPU.

    Raises:
      ModuleNotFoundError: libtpu is missing.
      RuntimeError: libtpu knows no such topology.
    """
    import libtpu  # noqa: F401  # jax would say that there is no TPU

    # It neither asks where it runs, nor takes the lock of the TPUs of this machine: it only compiles.
    about = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost"}
    for name, value in (about | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}).items():
        os.environ.setdefault(name, value)
    description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return topologies.make_mesh(description, (len(description.devices),), axis_names)


def spec(m: Mesh, shape: tuple[int, ...], dtype: Any, partition: PartitionSpec | None = None) -> jax.ShapeDtypeStruct:
    """An abstract argument of `shape` and `dtype` on mesh `m`; replicated without a `partition`."""
    sharding = NamedSharding(m, PartitionSpec() if partition is None else partition)
    plain = dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else jnp.dtype(dtype)  # random keys have their own
    return jax.ShapeDtypeStruct(shape, plain, sharding=sharding)


def abstract(m: Mesh, tree: Any, partition: Callable[[Any], PartitionSpec] | None = None) -> Any:
    """`spec` of every leaf of a tree; `partition` returns the partition of a leaf, None replicates all."""
    return jax.tree.map(lambda x: spec(m, x.shape, x.dtype, partition and partition(x)), tree)


def compile_for(
    f: Callable[..., Any], *args: Any, compiler_options: dict[str, Any] | None = None, **jit_kwargs: Any
) -> jax.stages.Compiled:
    """Lowers `jax.jit(f, **jit_kwargs)` on abstract `args` and compiles it for their devices."""
    return jax.jit(f, **jit_kwargs).lower(*args).compile(compiler_options=compiler_options)


def computations(compiled: jax.stages.Compiled) -> dict[str, list[str]]:
    """The lines of each HLO computation by name; the entry computation also by the name "ENTRY"."""
    text = re.sub(r"/\*.*?\*/", "", compiled.as_text() or "")
    out: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            lines = out.setdefault(match.group(1), [])
            if line.startswith("ENTRY"):
                out["ENTRY"] = lines
        else:
            lines.append(line)
    return out


def instructions(compiled: jax.stages.Compiled, *, every_turn: bool = False) -> list[Instruction]:
    """Kernels, copies and collectives in the order of the final HLO; one iteration of each loop, or `every_turn`."""
    blocks = computations(compiled)
    return list(_walk("ENTRY", blocks, every_turn))


def report(
    compiled: jax.stages.Compiled, n_params: int | None = None, *, unread_bytes: int = 0, every_turn: bool = False
) -> dict[str, Any]:
    """Counts of a compiled program.

    Args:
      compiled: what `compile_for` returned.
      n_params: number of parameters to divide by.
      unread_bytes: bytes of Mosaic kernels' operands that share their buffer with a result and are never read, like the
        model's params if there are float32 masters. They are subtracted from the bytes read.
      every_turn: counts every iteration of a loop, if XLA knows their number.

    Returns:
      kernels: number of instructions that launch something, without collectives.
      bytes_read, bytes_written: by kernels, without packing; bytes_per_param: their sum divided by `n_params`.
      packing_bytes: read and written by kernels that only gather the input of a collective or scatter its output. They
        are part of the exchange of gradients, not of the update.
      mosaic_bytes_read: the part of bytes_read that Mosaic kernels read.
      between_bytes: read and written by XLA's kernels between a collective and a Mosaic kernel. An example is the
        division of a mean by the number of devices: XLA can fuse it with its own kernels, but not with ours.
      copies, largest_copy_bytes: copies of a buffer to another one, unchanged.
      collectives: input bytes of each collective, by kind, in order.
      temp_bytes, alias_bytes: from XLA's memory analysis: scratch memory, and outputs in donated inputs.

    Raises:
      ValueError: `unread_bytes` exceed the operands of all Mosaic kernels.
    """
    blocks = computations(compiled)
    runs = list(_walk("ENTRY", blocks, every_turn))
    collectives = [i for i in runs if i.op.startswith(_COLLECTIVES)]
    names = {i.name for i in collectives}
    feeding = frozenset().union(*(i.sources for i in collectives))
    kernels = [i for i in runs if i.name not in names]
    packing = [i for i in kernels if _only_moves(i, blocks) and (i.name in feeding or i.sources & names)]
    local = [i for i in kernels if i not in packing]
    copies = [i for i in local if _only_moves(i, blocks, {"parameter", "bitcast", "tuple", "copy"})]
    mosaic = [i for i in local if i.kind.startswith("mosaic_gpu")]
    read_by_mosaic = frozenset().union(*(i.sources for i in mosaic))
    brought = names | {i.name for i in packing if i.sources & names}
    between = [i for i in local if i not in mosaic and i.sources & brought and i.name in read_by_mosaic]
    by_mosaic = sum(i.bytes_read for i in mosaic)
    if unread_bytes > by_mosaic:
        raise ValueError(f"Mosaic kernels have operands of {by_mosaic} bytes; {unread_bytes} of these cannot be unread")
    read = sum(i.bytes_read for i in local) - unread_bytes
    written = sum(i.bytes_written for i in local)
    by_kind = {c: [i.bytes_read for i in collectives if i.op.startswith(c)] for c in _COLLECTIVES}
    memory: Any = compiled.memory_analysis()
    return {
        "kernels": len(kernels),
        "bytes_read": read,
        "bytes_written": written,
        "mosaic_bytes_read": by_mosaic - unread_bytes,
        "between_bytes": moved(between),
        "bytes_per_param": round((read + written) / n_params, 3) if n_params else None,
        "packing_bytes": moved(packing),
        "copies": len(copies),
        "largest_copy_bytes": max((i.bytes_written for i in copies), default=0),
        "collectives": {c: sizes for c, sizes in by_kind.items() if sizes},
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }


def nbytes(type_text: str) -> int:
    """Bytes of an HLO type, "f32[8,128]{1,0}" or a tuple of types."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", type_text)
    return sum(_ITEMSIZE.get(t, 0) * math.prod(int(d) for d in dims.split(",") if d) for t, dims in arrays)


def moved(instructions: Iterable[Instruction]) -> int:
    """Bytes that these instructions read and write."""
    return sum(i.bytes_read + i.bytes_written for i in instructions)


def mib(nbytes: float) -> float:
    """As tables and results have it."""
    return round(nbytes / 2**20, 1)


def parse(lines: list[str]) -> Iterator[tuple[str, str, str, list[str], str]]:
    """(name, type, op, operands, attributes) of each instruction."""
    for line in lines:
        if match := _INSTRUCTION.match(line):
            name, type_text, op, args, attributes = match.groups()
            yield name, type_text, op, re.findall(r"%[\w.\-]+", args), attributes or ""


def _called(attributes: str) -> list[str]:
    """Names of the computations that a while, a conditional or a call runs."""
    if branches := re.search(r"branch_computations=\{(.*?)\}", attributes):
        return re.findall(r"%[\w.\-]+", branches.group(1))
    return re.findall(r"(?:body|true_computation|false_computation|to_apply)=(%[\w.\-]+)", attributes)


def running(blocks: dict[str, list[str]], name: str = "ENTRY") -> list[list[str]]:
    """The lines of the entry computation, and of all loops, branches and calls in it, each once."""
    parts = [blocks[name]]
    for _, _, op, _, attributes in parse(blocks[name]):
        if op in _BLOCK:
            for inner in _called(attributes):
                parts += running(blocks, inner)
    return parts


def turns(op: str, attributes: str) -> int:
    """The number of iterations of a while, if XLA knows it; otherwise 1."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', attributes) if op == "while" else None
    return int(known.group(1)) if known else 1


def _walk(block: str, blocks: dict[str, list[str]], every_turn: bool = False) -> Iterator[Instruction]:
    types: dict[str, str] = {}
    sources: dict[str, frozenset[str]] = {}  # the executed instructions behind each name
    for name, type_text, op, operands, attributes in parse(blocks[block]):
        types[name] = type_text
        behind = frozenset().union(*(sources.get(operand, frozenset()) for operand in operands))
        sources[name] = behind if op in _FREE else frozenset({name})
        if op in _BLOCK:
            inner = [list(_walk(c, blocks, every_turn)) for c in _called(attributes)]
            dearest = max(inner, key=moved, default=[])
            yield from dearest * (turns(op, attributes) if every_turn else 1)
        elif op not in _FREE and 'custom_call_target="AllocateBuffer"' not in attributes:  # moves nothing
            kind = re.search(r"kind=(\w+)", attributes) or re.search(r'custom_call_target="([^"]+)"', attributes)
            body = re.search(r"calls=(%[\w.\-]+)", attributes)
            fused = blocks.get(body.group(1), []) if body else []
            sliced = _sliced(fused) if fused else {}
            reads = {operand: sliced.get(i, nbytes(types.get(operand, ""))) for i, operand in enumerate(operands)}
            written = nbytes(type_text)
            if op == "fusion-start":  # its type is (operands, result, a number)
                written -= sum(nbytes(types.get(operand, "")) for operand in operands) + 4
            if every_turn:
                for i, unchanged in _updated(fused).items():
                    reads[operands[i]], written = 0, written - unchanged
            read = sum(reads.values())
            read = min(read, written) if op in _SLICE else read
            called = body.group(1) if body else ""
            dtypes = tuple(dict.fromkeys(re.findall(r"(\w+)\[", type_text)))
            yield Instruction(op, kind.group(1) if kind else "", name, read, written, called, behind, dtypes)


def _sliced(body: list[str]) -> dict[int, int]:
    """Bytes read from each parameter of a fused computation that is only sliced, by the parameter's number."""
    numbers = {m.group(1): int(m.group(2)) for m in map(PARAMETER.search, body) if m}
    sliced: dict[str, int] = {}
    whole: set[str] = set()
    for _, type_text, op, operands, _ in parse(body):
        for i, operand in enumerate(operands):
            if op in _SLICE and i == 0:
                sliced[operand] = sliced.get(operand, 0) + nbytes(type_text)
            else:
                whole.add(operand)
    return {number: sliced[name] for name, number in numbers.items() if name in sliced and name not in whole}


def _updated(body: list[str]) -> dict[int, int]:
    """Bytes that a fused computation leaves unchanged in each parameter that it only updates in part, by its number."""
    numbers = {m.group(1): int(m.group(2)) for m in map(PARAMETER.search, body) if m}
    types: dict[str, str] = {}
    unchanged: dict[str, int] = {}
    used: set[str] = set()
    for name, type_text, op, operands, _ in parse(body):
        types[name] = type_text
        if op == "dynamic-update-slice":
            unchanged[operands[0]] = nbytes(type_text) - nbytes(types[operands[1]])
            used |= set(operands[1:])
        else:
            used |= set(operands)
    return {number: unchanged[name] for name, number in numbers.items() if name in unchanged and name not in used}


def _only_moves(i: Instruction, blocks: dict[str, list[str]], moves: set[str] = _MOVES) -> bool:
    """Whether an instruction, with everything that is fused into it, only moves values."""
    if i.op != "fusion":
        return i.op.split("-")[0] in moves
    return {op for _, _, op, _, _ in parse(blocks[i.body])} <= moves
