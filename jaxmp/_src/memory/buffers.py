"""The memory of a traced function over time: its buffers, found in its jaxpr.

A jaxpr names every intermediate, and a compiler stores few of them. XLA on a GPU stores the results of matmuls,
reductions and loops. Operations in between (casts, additions, activations, masks) are computed inside the kernel that
reads them, again for each reader if necessary. So each value here is one of two things:

    a *buffer*      has memory: inputs, and the operands and results of matmuls, reductions, scatters and loops
    *recomputed*    has no memory: it stands for the buffers it is computed from, and keeps those alive

The params that `jaxmp.fsdp.gather` gathers are buffers. XLA reduces their gradients in a few large collectives. So
these gradients count as whole until the end, and the parts of the device count all the time.

A value with several readers is a buffer if this moves fewer bytes than to read, for each reader, the buffers that the
value would be recomputed from. So x + f(x) is a buffer if four kernels read it, and a norm's output is recomputed from
its input. XLA's fusion decides in this way. Of the costly functions, XLA keeps tanh and erf, and recomputes the sigmoid
of a silu.

Equal equations are one: XLA computes them once, except across a rematerialization.

Some buffers are in no equation. A convolution whose padding is unequal reads a padded copy, and so does a matmul whose
sum XLA splits into parts, if these are not aligned. A max pool keeps for its gradient the coordinates of its maxima, or
its operand.

With the equations in order, a buffer is alive from the equation that writes it to its last reader. The peak is the
largest sum of buffers that are alive at the same time.

Differences from XLA: order (XLA may move equations), workspaces of libraries, padding inside kernels, fusions that
XLA's cost model rejects. `benchmarks/h100/memory.py` compares it with XLA's own analysis.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.extend.core
import jax.numpy as jnp

from jaxmp._src.distributed import fsdp
from jaxmp._src.programs import jaxprs

_MATMULS = jaxprs.MATMULS | jaxprs.RAGGED_MATMULS | {"scaled_dot"}
_VIEWS = jaxprs.REARRANGES | jaxprs.HANDS_ON  # the same bytes, or read as such
_SAYS = jaxprs.HANDS_ON | {"stop_gradient"}
_LIGHT = frozenset({"convert_element_type", "max", "min", "neg", "abs"})  # a matmul does these as it reads
_COSTLY = frozenset({"tanh", "erf", "erfc"})  # XLA does not compute these again for each reader
_BODIES = jaxprs.CONTROL_FLOW | {"shard_map"}
_KERNELS = frozenset({"pallas_call", "custom_call", "ffi_call", "pure_callback", "io_callback", "fft"})
_WRITES = frozenset(
    {"argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "top_k", "approx_top_k"}
    | {"select_and_scatter_add", "dynamic_update_slice", "all_gather", "all_to_all", "psum", "pmax", "reduce_scatter"}
    | {"threefry2x32", "random_bits", "random_wrap", "random_unwrap", "optimization_barrier"}
)
_GATHERS, _CUTS = "a param is gathered", "a gradient is cut"  # no names of primitives
_PADS, _KEEPS = "a convolution's operand is padded", "a pool keeps what its gradient reads"
_WRITES |= {_GATHERS, _CUTS, _PADS, _KEEPS}
_PREFIXES = ("reduce_", "scatter", "rng_", "select_and_")
_NOT_REDUCED = frozenset({"reduce_precision"})  # an elementwise rounding
_OF_CUBLAS = 4 << 20
_ALIGNED, _LARGE = 8, 1 << 16  # arrays of fewer values than _LARGE do not count
_TILE, _CORES = 128, 132  # of a matmul's result on an H100


class Usage(NamedTuple):
    """Bytes in addition to a function's inputs.

    Attributes:
      saved: values of the jaxpr that its first part computes and its second part reads, with nothing recomputed.
      kept: the same in buffers.
      scratch: the most that buffers take at once, without outputs.
      peak: the same with outputs, each from the equation that writes it.
    """

    saved: int
    kept: int
    scratch: int
    peak: int


class _Op(NamedTuple):
    """An equation whose values are numbers, one for each value of the flattened program."""

    eqn: Any
    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    is_barrier: bool = False  # its operands are stored although it computes nothing: the start of a rematerialization


class _Program:
    """A jaxpr with its calls written out, without equations that no output needs."""

    def __init__(self, jaxpr: Any, output_bytes: Sequence[int | None] | None = None):
        self.sizes: list[int] = []
        self.ops: list[_Op] = []
        self._copies: dict[tuple[Any, ...], int] = {}  # padded, for convolutions and the gradients of their kernels
        self._pads: dict[tuple[Any, ...], int] = {}  # XLA computes equal ones once ...
        self._known: dict[Any, list[int]] = {}  # ... as all equations that are equal
        self._pools: dict[tuple[Any, ...], tuple[int, ...]] = {}  # what each keeps for its gradient
        inside, _ = jaxprs.open_jaxpr(jaxpr)
        names: dict[Any, int | None] = {v: self._new(v.aval) for v in (*inside.constvars, *inside.invars)}
        self.inputs = frozenset(range(len(self.sizes)))
        self._write_out(inside, names)
        self.outputs = [None if _is_literal(v) else names[v] for v in inside.outvars]
        self._leave_out_what_is_unused()
        read = {r for op in self.ops for r in op.reads}
        self.ops.sort(key=lambda op: op.name == _CUTS and not read.intersection(op.writes))
        self.producer = {w: op for op in self.ops for w in op.writes}
        for output, size in zip(self.outputs, output_bytes or (), strict=False):
            if size is not None and output is not None:
                output = _behind_views(self, output)
                self.sizes[output] = self.sizes[output] if output in self.inputs else size

    def _new(self, aval: Any) -> int:
        self.sizes.append(nbytes(aval))
        return len(self.sizes) - 1

    def _write_out(self, jaxpr: Any, names: dict[Any, int | None]) -> None:
        for eqn in jaxpr.eqns:
            reads = [None if _is_literal(v) else names[v] for v in eqn.invars]
            name = eqn.primitive.name
            if name == "conv_general_dilated":
                reads[0] = self._padded_copy(eqn, reads[0])
            elif name in {"reduce_window_max", "select_and_scatter_add"} and reads[-1] is not None:
                pool = (reads[-1], *(eqn.params[k] for k in ("window_dimensions", "window_strides", "padding")))
                if name == "reduce_window_max":
                    self._pools[pool] = self._kept_by_a_pool(eqn, reads[-1])
                elif pool in self._pools:
                    reads[-1:] = self._pools[pool]
            if name in jaxprs.CALLS:
                ((called, _),) = jaxprs.functions_of(eqn)
                if eqn.params.get("differentiated") and eqn.params.get("prevent_cse", True):
                    self._pads.clear()  # ... except across a rematerialization
                    self._known.clear()
                    known = tuple(r for r in reads if r is not None)
                    self.ops.append(_Op(eqn, name, known, (), is_barrier=True))
                inner: dict[Any, int | None] = dict.fromkeys(called.constvars)
                inner |= dict(zip(called.invars, reads, strict=True))
                self._write_out(called, inner)
                written = [None if _is_literal(v) else inner[v] for v in called.outvars]
                names |= dict(zip(eqn.outvars, written, strict=True))
                continue
            if name == "pad":
                names[eqn.outvars[0]] = self._written_pad(eqn, reads)
                continue
            if name == "name":
                name = {fsdp.GATHERED: _GATHERS, fsdp.PART: _CUTS}.get(eqn.params["name"], name)
            if name in _SAYS and reads[0] is not None:  # the value itself
                names[eqn.outvars[0]] = reads[0]
                continue
            avals = [v.aval for v in eqn.outvars]
            if name == "shard_map":  # the part of its results on one device
                avals = [v.aval for v in jaxprs.functions_of(eqn)[0][0].outvars]
            key = _equation_key(eqn, reads)
            if key in self._known:
                names |= dict(zip(eqn.outvars, self._known[key], strict=True))
                continue
            written = [self._new(aval) for aval in avals]
            if key is not None:
                self._known[key] = written
            names |= dict(zip(eqn.outvars, written, strict=True))
            self.ops.append(_Op(eqn, name, tuple(r for r in reads if r is not None), tuple(written)))

    def _written_pad(self, eqn: Any, reads: list[int | None]) -> int:
        """The result of a pad: the operand if it adds nothing; the same as before if it was written before."""
        operand, value = reads
        ends = eqn.params["padding_config"]
        if operand is not None and not any(map(any, ends)):
            return operand
        maker = next((op for op in reversed(self.ops) if value in op.writes), None)
        is_constant = value is None or (maker is not None and not maker.reads)
        pad = (operand, None if is_constant else value, ends)
        if pad not in self._pads:
            self._pads[pad] = self._new(eqn.outvars[0].aval)
            self.ops.append(_Op(eqn, "pad", tuple(r for r in reads if r is not None), (self._pads[pad],)))
        return self._pads[pad]

    def _padded_copy(self, eqn: Any, operand: int | None) -> int | None:
        """What a convolution reads for its operand: cuDNN pads both ends alike, so XLA pads a copy where they differ.

        The gradient of the kernel reads the same copy. It has the strides as its dilation, the kernel as its result.
        """
        params, spec = eqn.params, eqn.params["dimension_numbers"]
        kernel = tuple(eqn.invars[1].aval.shape[axis] for axis in spec.rhs_spec[2:])
        result = tuple(eqn.outvars[0].aval.shape[axis] for axis in spec.out_spec[2:])
        lows, highs = zip(*params["padding"], strict=True) if params["padding"] else ((), ())
        known = self._copies.get((operand, lows, params["rhs_dilation"], result))
        if known is not None:
            return known
        is_plain = {*params["lhs_dilation"], *params["rhs_dilation"]} <= {1}
        if operand is None or lows == highs or not is_plain:
            return operand
        image = eqn.invars[0].aval
        sides = {axis: max(sum(ends), 0) for axis, ends in zip(spec.lhs_spec[2:], params["padding"], strict=True)}
        copy = self._new(jax.ShapeDtypeStruct([d + sides.get(i, 0) for i, d in enumerate(image.shape)], image.dtype))
        self.ops.append(_Op(eqn, _PADS, (operand,), (copy,)))
        self._copies[operand, lows, params["window_strides"], kernel] = copy
        return copy

    def _kept_by_a_pool(self, eqn: Any, operand: int) -> tuple[int, ...]:
        """What a max pool keeps for its gradient.

        XLA computes the coordinates of each maximum, int32 for each axis, in the forward pass or late, from the
        operand: the smaller is kept. So are the zeros that the gradient is added to, where the operand is a relu:
        the relu compares with the same zeros.
        """
        image, result = eqn.invars[0].aval, eqn.outvars[0].aval
        coordinates = 4 * len(result.shape) * math.prod(result.shape)
        held = [self._new(jax.ShapeDtypeStruct((min(coordinates, nbytes(image)),), jnp.uint8))]
        maker = next((op for op in reversed(self.ops) if operand in op.writes), None)
        if maker is not None and maker.name == "max" and any(map(_is_literal, maker.eqn.invars)):
            held.append(self._new(image))
        self.ops.append(_Op(eqn, _KEEPS, (operand,), tuple(held)))
        return tuple(held)

    def _leave_out_what_is_unused(self) -> None:
        used = {o for o in self.outputs if o is not None}
        kept = []
        for op in reversed(self.ops):
            if op.is_barrier or any(w in used for w in op.writes):
                used |= set() if op.is_barrier else set(op.reads)
                kept.append(op)
        self.ops = [
            op._replace(reads=tuple(r for r in op.reads if r in used)) if op.is_barrier else op for op in kept[::-1]
        ]


def usage(jaxpr: Any, *, output_bytes: Sequence[int | None] | None = None) -> Usage:
    """The memory of a function in addition to its inputs; its first part ends where its first output is computed.

    For `jax.value_and_grad(f)` the first output is the loss, and the two parts are the forward and backward pass.

    Args:
      jaxpr: of the function, from `jax.make_jaxpr`.
      output_bytes: for each output the bytes on one device; None: the size in the jaxpr.
    """
    program = _Program(jaxpr, output_bytes)
    bases, stored = _find_buffers(program)
    first = next((o for o in program.outputs if o is not None), None)
    turn = next((t for t, op in enumerate(program.ops) if first in op.writes), -1)  # the last of the first part
    ends = _last_reads(program, bases, stored)
    starts = {w: t for t, op in enumerate(program.ops) for w in op.writes}
    held = {b for o in program.outputs if o is not None for b in bases[o]}
    kept = sum(program.sizes[b] for b, t in starts.items() if b in ends and t <= turn < ends[b] and b not in held)
    scratch, peak = (_peak(program, stored, ends, held, with_outputs) for with_outputs in (False, True))
    return Usage(_saved(program, turn, starts), kept, scratch, peak)


def nbytes(x: Any) -> int:
    """The bytes of an array or abstract value; 0 if it has no shape."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not hasattr(x, "shape"):
        return 0
    return math.prod(x.shape) * getattr(dtype, "itemsize", 4)


def _saved(program: _Program, turn: int, starts: dict[int, int]) -> int:
    """Bytes that are computed up to `turn` and read after it; views of one value count once.

    What XLA makes of a value for its readers counts as that value.
    """
    copied = {w: op.reads[0] for op in program.ops if op.name in {_PADS, _KEEPS} for w in op.writes}
    found = set()
    for op in program.ops[turn + 1 :]:
        if not op.is_barrier:
            read = {copied.get(r, r) for r in op.reads}
            found |= {_behind_views(program, r) for r in read if starts.get(r, turn + 1) <= turn}
    return sum(program.sizes[r] for r in found - program.inputs)


def _behind_views(program: _Program, value: int) -> int:
    while value in program.producer and program.producer[value].name in _VIEWS:
        value = program.producer[value].reads[0]
    return value


def _find_buffers(program: _Program) -> tuple[dict[int, set[int]], set[int]]:
    """(the buffers that each value is computed from, itself if it is one; the values that are buffers)."""
    forced = _forced(program)
    readers = _readers_that_store(program, forced)
    bases = {i: {i} for i in program.inputs}
    stored = set(program.inputs)
    factors = _beside_costly(program)
    operands = {_behind_views(program, r) for op in program.ops if op.name == "dot_general" for r in op.reads}
    wide: set[int] = set()  # costly ones in float32: XLA stores them, or what is made from them
    for op in program.ops:
        read = set().union(*(bases[r] for r in op.reads))
        again = sum(program.sizes[b] for b in read - wide)
        for w in op.writes:
            n, size = len(readers[w]), program.sizes[w]
            shared = op.name not in _VIEWS and n > 1
            costly = shared and op.name in _COSTLY and _LARGE < size
            moves_less = 0 < (n + 1) * size < (n - 1) * again  # it is written, read n times; its bases are read once
            if w in operands:
                moves_less = 0 < size < again  # a matmul reads an operand several times: the narrower
            if w in forced or costly or (shared and (w in factors or moves_less)):
                stored.add(w)
                if costly and op.eqn.outvars[0].aval.dtype.itemsize > 2:
                    wide.add(w)
                bases[w] = {w}
            else:
                bases[w] = read
    return bases, stored


def _beside_costly(program: _Program) -> set[int]:
    """What costly values in 16 bits are multiplied by: one kernel writes both, for the backward pass."""
    found = set()
    for op in program.ops:
        for one, other in itertools.permutations(op.reads, 2) if op.name == "mul" else ():
            maker = program.producer.get(one)
            if maker is not None and maker.name in _COSTLY and _LARGE < program.sizes[one] == program.sizes[other]:
                found |= {other} if maker.eqn.outvars[0].aval.dtype.itemsize == 2 else set()
    return found


def _forced(program: _Program) -> set[int]:
    """Values that are buffers for any readers."""
    firm = set(program.inputs) | {w for op in program.ops if op.name in _MATMULS | _BODIES for w in op.writes}
    forced: set[int] = set()

    def force(value: int, by_matmul: bool = False) -> None:
        value = _behind_views(program, value)
        source = value
        while by_matmul and source not in firm and source in program.producer:
            op = program.producer[source]
            if op.name not in _VIEWS and not (op.name in _LIGHT and len(op.reads) == 1):
                break
            source = op.reads[0]
        if not (by_matmul and source in firm):
            forced.add(value)

    for output in program.outputs:
        if output is not None:
            force(output)
    for op in program.ops:
        if op.is_barrier or op.name in _MATMULS | _BODIES | _KERNELS:
            for r in op.reads:
                force(r, op.name == "dot_general")
        by_name = op.name.startswith(_PREFIXES) and op.name not in _NOT_REDUCED
        if op.name in _MATMULS | _BODIES | _KERNELS | _WRITES or by_name:
            forced |= set(op.writes)
    return forced


def _readers_that_store(program: _Program, forced: set[int]) -> dict[int, set[int]]:
    """For each value the equations that write a buffer from it, through recomputed values."""
    ends: dict[int, set[int]] = defaultdict(set)
    for t in range(len(program.ops) - 1, -1, -1):
        op = program.ops[t]
        found: set[int] = set()
        for w in op.writes:
            found |= {t} if w in forced else ends[w]
        for r in op.reads:
            ends[r] |= found
    return ends


def _last_reads(program: _Program, bases: dict[int, set[int]], stored: set[int]) -> dict[int, int]:
    """For each buffer the last equation that reads it and writes a buffer."""
    last = {}
    for t, op in enumerate(program.ops):
        if any(w in stored for w in op.writes):
            read = set().union(*(bases[r] for r in op.reads))
            if _padded(op):
                read |= _behind_casts(program, bases, stored, op)
            last |= dict.fromkeys(read, t)
    # XLA may compute the gradient of a gathered weight before that of the layer's input, which reads the weight.
    matmuls = [t for t, op in enumerate(program.ops) if op.name in _MATMULS]
    for b in {w for op in program.ops if op.name == _GATHERS for w in op.writes} & last.keys():
        last[b] = next((t for t in matmuls if t > last[b]), last[b])
    # XLA computes the gradients of convolutions' kernels late: what they read lives until the next convolution.
    convolutions = [t for t, op in enumerate(program.ops) if op.name == "conv_general_dilated"]
    for t, after in itertools.pairwise(convolutions):
        read = set().union(*(bases[r] for r in program.ops[t].reads))
        last |= {b: after for b in read if last.get(b) == t}
    return last


def _behind_casts(program: _Program, bases: dict[int, set[int]], stored: set[int], op: _Op) -> set[int]:
    """The largest buffer behind each operand that is a cast without a buffer: the padded copy is made from it."""
    found = set()
    for value in (_behind_views(program, r) for r in op.reads):
        cast = program.producer.get(value)
        if cast is not None and cast.name == "convert_element_type" and value not in stored:
            found.add(max(bases[cast.reads[0]], key=program.sizes.__getitem__))
    return found


def _padded_beside(program: _Program, stored: set[int]) -> dict[int, int]:
    """By cast with a buffer that a padded matmul reads, the bytes of the padded copies, made from the same value."""
    found: dict[int, int] = {}
    for op in program.ops:
        for value in op.reads if _padded(op) else ():
            cast = program.producer.get(_behind_views(program, value))
            if cast is not None and cast.name == "convert_element_type" and cast.writes[0] in stored:
                found[cast.writes[0]] = _padded(op)
    return found


def _peak(program: _Program, stored: set[int], ends: dict[int, int], held: set[int], with_outputs: bool) -> int:
    dying = defaultdict(list)
    for b, t in ends.items():
        dying[t].append(b)
    early = {w for op in program.ops if op.name == _CUTS for w in op.writes if w in held and with_outputs}
    alive = {w: program.sizes[w] for w in early}
    now = most = sum(alive.values())
    beside = _padded_beside(program, stored)
    for t, op in enumerate(program.ops):
        written = [w for w in op.writes if w in stored and w not in early and (with_outputs or w not in held)]
        # A fusion may overwrite an operand that nobody reads later.
        in_place = op.name not in _MATMULS | _BODIES | _KERNELS
        for b in dying[t] if in_place else ():
            now -= alive.pop(b, 0) if b not in held else 0
        for w in written:
            alive[w] = program.sizes[w]
            now += alive[w]
        source = max((program.sizes[b] for b in dying[t]), default=0)  # what a cast and padded copies are made from
        copies = sum(source + beside[w] for w in written if w in beside)
        most = max(most, now + max(copies, _padded(op) + _inside(op) + _workspace(op)))
        for b in () if in_place else dying[t]:
            now -= alive.pop(b, 0) if b not in held else 0
    return most


def _inside(op: _Op) -> int:
    """The memory of the body of a loop or branch in addition to its operands, in one turn."""
    if op.name not in _BODIES:
        return 0
    return max((usage(jaxpr).peak for jaxpr, _ in jaxprs.functions_of(op.eqn)), default=0)


def _padded(op: _Op) -> int:
    """Bytes of the copies that XLA makes of both operands of a matmul whose sum it splits over more of the GPU.

    It splits the sum where the result has fewer tiles than the GPU has cores, and pads the operands if the parts of the
    sum are not aligned.
    """
    if op.name != "dot_general":
        return 0
    (summed, _), (batch, _) = op.eqn.params["dimension_numbers"]
    left, right = (v.aval for v in op.eqn.invars[:2])
    length = math.prod(left.shape[i] for i in summed)
    n = math.prod(left.shape[i] for i in batch)
    rows, columns = (max(x.size // max(length * n, 1), 1) for x in (left, right))
    tiles = n * -(-rows // _TILE) * -(-columns // _TILE)
    if length % _ALIGNED == 0 or tiles >= _CORES or max(left.size, right.size) <= _LARGE:
        return 0
    return sum(nbytes(x) // length * -(-length // _ALIGNED) * _ALIGNED for x in (left, right) if x.size > _LARGE)


def _workspace(op: _Op) -> int:
    """What XLA gives cuBLAS for a matmul in fp8; its other matmuls are Triton's."""
    if op.name != "dot_general":
        return 0
    return _OF_CUBLAS if all(str(v.aval.dtype).startswith("float8") for v in op.eqn.invars) else 0


def _equation_key(eqn: Any, reads: Sequence[int | None]) -> Any:
    """What two equations have in common that compute the same; None if it cannot be said, or if they have effects."""
    if eqn.effects or eqn.primitive.name in _BODIES | _KERNELS | {"name", "optimization_barrier"}:
        return None
    numbers = tuple((i, v.aval.dtype, str(v.val)) for i, v in enumerate(eqn.invars) if _is_literal(v))
    key = (eqn.primitive, tuple(reads), numbers, tuple(sorted(eqn.params.items(), key=lambda item: item[0])))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _is_literal(v: Any) -> bool:
    return isinstance(v, jax.extend.core.Literal)
