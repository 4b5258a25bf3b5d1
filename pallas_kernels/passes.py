"""A pass of `tiles` as a JAX function: for arrays of any rank, on one device or several, and under vmap.

- **Rank.** A tensor is read as a matrix whose rows are its first `rows` axes. Its transpose has these axes last, so
  tensors that are split over devices need no reshape. A vector that a pass takes beside its tensors has their first
  `rows` axes (a number for each row), or the others.
- **Devices.** Inside `jax.shard_map` and `jax.pmap` a kernel gets the device's own arrays. Under plain `jax.jit`, XLA
  does not know what a kernel does and would gather its operands. `custom_partitioning` tells XLA that every axis may be
  split, that the cast is split like the tensor and the transpose like the transposed tensor, and that amax is the MAX
  over the axes that split the tensor. Sums over rows are split like a row, and added over the axes that split the rows.
- **vmap.** The reference runs; a backend given by name runs its kernel once for each member of the batch.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from pallas_kernels import backend as backends, reference, tiles

DTYPES = tuple(jax.numpy.dtype(d) for d in tiles.DTYPES)


class Pass(NamedTuple):
    """The static part of a pass."""

    name: str
    compute: Callable[..., Any] | None  # as for `tiles.run_tiles`
    inputs: int  # the number of input tensors
    values: int  # the number of values that `compute` makes from them
    dtype: Any
    wide_dtype: Any
    rows: int
    unmet: str | None = None  # why no kernel supports this pass, for any shape; None if one does
    sums: bool = False  # whether each value is also summed over its rows, in float32
    of_rows: int = 0  # the number of vectors with a number for each row, then of those with one for each column
    of_columns: int = 0
    rounded: Any = jax.numpy.dtype("float32")  # the dtype that computed values are rounded to first


def check(name: str, arrays: Sequence[Array], scales: Sequence[Array], dtype: Any, rows: int | None = None) -> None:
    """Raises for arguments that no backend supports; `name` is the called function; `rows=None` requires matrices."""
    for x in arrays:
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} takes float32, bfloat16 or float16; got {x.dtype}. Cast it with .astype first.")
        if rows is None and x.ndim != 2:
            raise ValueError(f"{name} takes matrices, [M, N]; got shape {x.shape}. Reshape it to two axes.")
        if x.shape != arrays[0].shape:
            raise ValueError(f"{name} takes tensors of one shape; got {arrays[0].shape} and {x.shape}.")
    if dtype not in tiles.FP8_DTYPES:
        raise TypeError(
            f"{name} casts to jnp.float8_e4m3fn or jnp.float8_e5m2; got {getattr(dtype, '__name__', dtype)}."
        )
    for scale in scales:
        if scale.shape or scale.dtype != jax.numpy.float32:
            raise TypeError(f"{name} takes one float32 scale, shape (); got {scale.dtype}{list(scale.shape)}.")


def run(plan: Pass, arrays: Sequence[Array], scales: Sequence[Array], backend: str) -> list[tiles.Output]:
    """Runs the pass with `backend`; see `pallas_kernels.backend`."""
    flat = _by_backend(plan, backend)(*arrays, *scales)
    return _outputs(plan, flat)


def run_or(
    plan: Pass,
    instead: Callable[..., Any],
    args: Sequence[Array],
    backend: str = "auto",
    *,
    unread: Sequence[Array] = (),
) -> list[Array]:
    """The kernel of `plan` on `args`, or `instead(*unread, *args)`, as `backend` says.

    `args` are the tensors, the vectors of rows, those of columns, and the scales. Returns a flat list: for each value
    q, its transpose, amax, the wide value if `plan` has a `wide_dtype`, and the sums if it has those.
    """

    def kernel(*given: Array, interpret: Any) -> list[Array]:
        return _kernel(plan, *given[len(unread) :], interpret=interpret)

    return backends.run(backend, kernel, instead, *unread, *args, unmet=why_not(plan, args))


def why_not(plan: Pass, args: Sequence[Array]) -> str | None:
    """Why no kernel can run on these tensors here, on any hardware; None if one can."""
    return plan.unmet or tiles.why_not(args[0].shape, plan.rows) or backends.why_not_here(args)


@functools.lru_cache(maxsize=512)
def _by_backend(plan: Pass, backend: str) -> Callable[..., list[Array]]:
    """Flat arrays to flat arrays, with a rule for vmap."""
    plain = functools.partial(_reference, plan)

    @jax.custom_batching.custom_vmap
    def run_one(*args: Array) -> list[Array]:
        with jax.named_scope(f"pallas_kernels.{plan.name}"):
            return run_or(plan, plain, args, backend)

    @run_one.def_vmap
    def run_batch(axis_size: int, in_batched: Sequence[bool], *args: Array) -> tuple[list[Array], list[bool]]:
        outs_batched = [True] * _n_outputs(plan)
        if backend in ("auto", "xla"):
            return jax.vmap(plain, [0 if b else None for b in in_batched], axis_size=axis_size)(*args), outs_batched
        mapped = [x for x, b in zip(args, in_batched, strict=True) if b]

        def one(members: list[Array]) -> list[Array]:
            it = iter(members)
            return run_one(*(next(it) if b else x for x, b in zip(args, in_batched, strict=True)))

        return lax.map(one, mapped), outs_batched

    return run_one


def _parts(plan: Pass, args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]]:
    """The tensors, the vectors of rows, those of columns, and the scales."""
    ends = plan.inputs, plan.inputs + plan.of_rows, plan.inputs + plan.of_rows + plan.of_columns
    return args[: ends[0]], args[ends[0] : ends[1]], args[ends[1] : ends[2]], args[ends[2] :]


def _reference(plan: Pass, *args: Array) -> list[Array]:
    arrays, of_rows, of_columns, scales = _parts(plan, args)
    if plan.compute is None:
        values = [arrays[0]]
    else:
        ndim = arrays[0].ndim
        vectors = [v.reshape(*v.shape, *[1] * (ndim - v.ndim)) for v in of_rows]
        vectors += [v.reshape(*[1] * (ndim - v.ndim), *v.shape) for v in of_columns]
        made = plan.compute(*(x.astype(jax.numpy.float32) for x in arrays), *vectors)
        values = [v.astype(plan.rounded) for v in (made if isinstance(made, tuple) else [made])]
    outs: list[Array] = []
    for value, scale in zip(values, scales, strict=True):
        outs += reference.cast_transpose_amax(value, scale, plan.dtype, plan.rows)
        outs += [] if plan.wide_dtype is None else [value.astype(plan.wide_dtype)]
        outs += [reference.sums_over_rows(value, plan.rows)] if plan.sums else []
    return outs


def _on_device(plan: Pass, *args: Array, interpret: Any) -> list[Array]:
    """The kernel on this device's own arrays; the reference if a shard has a size that the kernel does not support."""
    arrays, of_rows, of_columns, scales = _parts(plan, args)
    shape = arrays[0].shape
    if tiles.why_not(shape, plan.rows):
        return _reference(plan, *args)
    sides = math.prod(shape[: plan.rows]), math.prod(shape[plan.rows :])
    turned = (*shape[plan.rows :], *shape[: plan.rows])
    found = tiles.run_tiles(
        plan.compute,
        [x.reshape(sides) for x in arrays],
        scales,
        plan.dtype,
        name=plan.name,
        of_rows=[v.reshape(sides[0]) for v in of_rows],
        of_columns=[v.reshape(sides[1]) for v in of_columns],
        rounded=plan.rounded,
        wide_dtype=plan.wide_dtype,
        sums=plan.sums,
        interpret=interpret,
    )
    outs: list[Array] = []
    for value in found:
        outs += [value.q.reshape(shape), value.q_t.reshape(turned), value.amax]
        outs += [] if value.wide is None else [value.wide.reshape(shape)]
        outs += [] if value.sums is None else [value.sums.reshape(shape[plan.rows :])]
    return outs


def _kernel(plan: Pass, *args: Array, interpret: Any) -> list[Array]:
    on_device = functools.partial(_on_device, plan, interpret=interpret)
    if interpret or jax.sharding.get_abstract_mesh().manual_axes:
        return _varying(on_device(*args), args)
    ndim = args[0].ndim
    split = custom_partitioning(lambda *args: on_device(*args))
    split.def_partition(
        partition=functools.partial(_partition, plan, on_device),
        infer_sharding_from_operands=lambda mesh, operands, results: _results(plan, operands[0].sharding, ndim),
        sharding_rule=_sharding_rule(plan, ndim),
    )
    return split(*args)


def _partition(plan: Pass, on_device: Any, mesh: Any, operands: Sequence[Any], results: Any) -> Any:
    """The result that `custom_partitioning` needs: (mesh, function for one device, shardings of results, operands)."""
    del results
    sharding, ndim = operands[0].sharding, len(operands[0].shape)
    spec = _spec(sharding, ndim)
    names, of_rows = _names(spec), _names(spec[: plan.rows])

    def lowered(*args: Array) -> list[Array]:
        outs = on_device(*args)
        for k in range(0, len(outs), _n_outputs(plan) // plan.values):
            outs[k + 2] = lax.pmax(outs[k + 2], names) if names else outs[k + 2]
            last = k + _n_outputs(plan) // plan.values - 1
            outs[last] = lax.psum(outs[last], of_rows) if plan.sums and of_rows else outs[last]
        return outs

    vectors = [spec[: plan.rows]] * plan.of_rows + [spec[plan.rows :]] * plan.of_columns
    others = [NamedSharding(sharding.mesh, PartitionSpec(*own)) for own in (*vectors, *[()] * plan.values)]
    return mesh, lowered, _results(plan, sharding, ndim), (*[sharding] * plan.inputs, *others)


def _results(plan: Pass, sharding: Any, ndim: int) -> list[Any]:
    spec = _spec(sharding, ndim)
    same, turned = PartitionSpec(*spec), PartitionSpec(*spec[plan.rows :], *spec[: plan.rows])
    one = [same, turned, PartitionSpec()] + ([] if plan.wide_dtype is None else [same])
    one += [PartitionSpec(*spec[plan.rows :])] if plan.sums else []
    return [NamedSharding(sharding.mesh, p) for p in one * plan.values]


def _spec(sharding: Any, ndim: int) -> tuple[Any, ...]:
    return (*sharding.spec, *[None] * (ndim - len(sharding.spec)))


def _names(spec: Sequence[Any]) -> tuple[str, ...]:
    """The mesh axes that split a tensor."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    return tuple(name for entry in entries for name in entry)


def _sharding_rule(plan: Pass, ndim: int) -> str:
    """The rule for Shardy, like an einsum: "i j, -> i j, j i, " for a matrix and its scale."""
    axes = [f"d{i}" for i in range(ndim)]
    same, turned = " ".join(axes), " ".join(axes[plan.rows :] + axes[: plan.rows])
    one = [same, turned, ""] + ([] if plan.wide_dtype is None else [same])
    one += [" ".join(axes[plan.rows :])] if plan.sums else []
    vectors = [" ".join(axes[: plan.rows])] * plan.of_rows + [" ".join(axes[plan.rows :])] * plan.of_columns
    return f"{', '.join([same] * plan.inputs + vectors + [''] * plan.values)} -> {', '.join(one * plan.values)}"


def _varying(outs: list[Array], args: Sequence[Array]) -> list[Array]:
    """`outs`, typed as varying over every manual axis that an argument varies over."""
    axes = frozenset().union(*(backends.varying_axes(x) for x in args))
    return [backends.as_varying(x, axes) for x in outs]


def _n_outputs(plan: Pass) -> int:
    return plan.values * (3 + (plan.wide_dtype is not None) + plan.sums)


def _outputs(plan: Pass, flat: Sequence[Array]) -> list[tiles.Output]:
    size = _n_outputs(plan) // plan.values
    parts = [flat[k * size : (k + 1) * size] for k in range(plan.values)]
    outputs = []
    for q, q_t, amax, *more in parts:
        wide = more.pop(0) if plan.wide_dtype is not None else None
        outputs.append(tiles.Output(q, q_t, amax, wide, more[0] if plan.sums else None))
    return outputs
