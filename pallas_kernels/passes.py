"""A pass of `tiles` as a JAX function: for arrays of any rank, on one device or several, and under vmap.

- **Rank.** A tensor is read as a matrix whose rows are its first `rows` axes. Its transpose has these axes last, so
  tensors that are split over devices need no reshape. A vector that a pass takes beside its tensors has the others: a
  number for each column.
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
    dtype: Any
    rows: int
    sums: bool = False  # whether the value is also summed over its rows, in float32
    vectors: int = 0  # the number of vectors with a number for each column
    rounded: Any = jax.numpy.dtype("float32")  # the dtype that a computed value is rounded to first


def check(name: str, x: Array, scale: Array, dtype: Any) -> None:
    """Raises for arguments that no backend supports; `name` is the called function, which takes matrices."""
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} takes float32, bfloat16 or float16; got {x.dtype}. Cast it with .astype first.")
    if x.ndim != 2:
        raise ValueError(f"{name} takes matrices, [M, N]; got shape {x.shape}. Reshape it to two axes.")
    if dtype not in tiles.FP8_DTYPES:
        raise TypeError(
            f"{name} casts to jnp.float8_e4m3fn or jnp.float8_e5m2; got {getattr(dtype, '__name__', dtype)}."
        )
    if scale.shape or scale.dtype != jax.numpy.float32:
        raise TypeError(f"{name} takes one float32 scale, shape (); got {scale.dtype}{list(scale.shape)}.")


def run(plan: Pass, args: Sequence[Array], backend: str) -> tiles.Output:
    """Runs the pass on tensors, vectors and the scale, with `backend`; see `pallas_kernels.backend`."""
    return tiles.Output(*_by_backend(plan, backend)(*args))


def run_or(
    plan: Pass,
    instead: Callable[..., Any],
    args: Sequence[Array],
    backend: str = "auto",
    *,
    unread: Sequence[Array] = (),
) -> list[Array]:
    """The kernel of `plan` on `args`, or `instead(*unread, *args)`, as `backend` says.

    `args` are the tensors, the vectors and the scale. Returns a flat list: q, its transpose, amax, and the sums if
    `plan` has those.
    """

    def kernel(*operands: Array, interpret: Any) -> list[Array]:
        return _kernel(plan, *operands[len(unread) :], interpret=interpret)

    return backends.run(backend, kernel, instead, *unread, *args, unmet=why_not(plan, args))


def why_not(plan: Pass, args: Sequence[Array]) -> str | None:
    """Why no kernel can run on these tensors here, on any hardware; None if one can."""
    return tiles.why_not(args[0].shape, plan.rows) or backends.why_not_here(args)


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
        outs_batched = [True] * (3 + plan.sums)
        if backend in ("auto", "xla"):
            return jax.vmap(plain, [0 if b else None for b in in_batched], axis_size=axis_size)(*args), outs_batched
        mapped = [x for x, b in zip(args, in_batched, strict=True) if b]

        def one(members: list[Array]) -> list[Array]:
            it = iter(members)
            return run_one(*(next(it) if b else x for x, b in zip(args, in_batched, strict=True)))

        return lax.map(one, mapped), outs_batched

    return run_one


def _reference(plan: Pass, *args: Array) -> list[Array]:
    tensors, vectors, scale = args[: plan.inputs], args[plan.inputs : -1], args[-1]
    value = tensors[0]
    if plan.compute is not None:
        vectors = [v.reshape(*[1] * (value.ndim - v.ndim), *v.shape) for v in vectors]
        value = plan.compute(*(x.astype(jax.numpy.float32) for x in tensors), *vectors).astype(plan.rounded)
    outs = list(reference.cast_transpose_amax(value, scale, plan.dtype, plan.rows))
    return [*outs, reference.sums_over_rows(value, plan.rows)] if plan.sums else outs


def _on_device(plan: Pass, *args: Array, interpret: Any) -> list[Array]:
    """The kernel on this device's own arrays; the reference if a shard has a size that the kernel does not support."""
    tensors, vectors, scale = args[: plan.inputs], args[plan.inputs : -1], args[-1]
    shape = tensors[0].shape
    if tiles.why_not(shape, plan.rows):
        return _reference(plan, *args)
    rows, columns = shape[: plan.rows], shape[plan.rows :]
    sides = math.prod(rows), math.prod(columns)
    results = tiles.run_tiles(
        plan.compute,
        [x.reshape(sides) for x in tensors],
        [v.reshape(sides[1]) for v in vectors],
        scale,
        plan.dtype,
        name=plan.name,
        rounded=plan.rounded,
        sums=plan.sums,
        interpret=interpret,
    )
    outs = [results.q.reshape(shape), results.q_t.reshape(*columns, *rows), results.amax]
    return outs if results.sums is None else [*outs, results.sums.reshape(columns)]


def _kernel(plan: Pass, *args: Array, interpret: Any) -> list[Array]:
    on_device = functools.partial(_on_device, plan, interpret=interpret)
    if interpret or jax.sharding.get_abstract_mesh().manual_axes:
        axes = backends.varying_axes_of(args)
        return [backends.as_varying(x, axes) for x in on_device(*args)]
    ndim = args[0].ndim
    # The rule for Shardy, like an einsum: "d0 d1, -> d0 d1, d1 d0, " for a matrix and its scale.
    same, row, column = (
        " ".join(f"d{i}" for i in axes) for axes in (range(ndim), range(plan.rows), range(plan.rows, ndim))
    )
    operands = [same] * plan.inputs + [column] * plan.vectors + [""]
    rule = f"{', '.join(operands)} -> {', '.join([same, f'{column} {row}', '', *[column] * plan.sums])}"
    split = custom_partitioning(lambda *args: on_device(*args))
    split.def_partition(
        partition=functools.partial(_partition, plan, on_device),
        infer_sharding_from_operands=lambda mesh, operands, results: _results(plan, operands[0].sharding, ndim),
        sharding_rule=rule,
    )
    return split(*args)


def _partition(plan: Pass, on_device: Any, mesh: Any, operands: Sequence[Any], results: Any) -> Any:
    """The result that `custom_partitioning` needs: (mesh, function for one device, shardings of results, operands)."""
    del results
    sharding, ndim = operands[0].sharding, len(operands[0].shape)
    spec = _spec(sharding, ndim)
    names, of_rows = _names(spec), _names(spec[: plan.rows])

    def lowered(*args: Array) -> list[Array]:
        q, q_t, amax, *sums = on_device(*args)
        amax = lax.pmax(amax, names) if names else amax
        return [q, q_t, amax, *(lax.psum(x, of_rows) if of_rows else x for x in sums)]

    others = [NamedSharding(sharding.mesh, PartitionSpec(*own)) for own in (*[spec[plan.rows :]] * plan.vectors, ())]
    return mesh, lowered, _results(plan, sharding, ndim), (*[sharding] * plan.inputs, *others)


def _results(plan: Pass, sharding: Any, ndim: int) -> list[Any]:
    spec = _spec(sharding, ndim)
    same, turned = PartitionSpec(*spec), PartitionSpec(*spec[plan.rows :], *spec[: plan.rows])
    specs = [same, turned, PartitionSpec()] + ([PartitionSpec(*spec[plan.rows :])] if plan.sums else [])
    return [NamedSharding(sharding.mesh, p) for p in specs]


def _spec(sharding: Any, ndim: int) -> tuple[Any, ...]:
    return (*sharding.spec, *[None] * (ndim - len(sharding.spec)))


def _names(spec: Sequence[Any]) -> tuple[str, ...]:
    """The mesh axes that split a tensor."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    return tuple(name for entry in entries for name in entry)
