"""Statistics of tensors, inside jit: how large values are, and what a cast to each format would do to them.

A float of magnitude |x| has the bits m = (exponent + 127) * 2^23 + fraction. As int32, these bits have the same order
as the floats. So the rank of m among a few fixed integers, the edges, gives the octave of a value and the result of its
cast to each format:

    rank(x) = number of edges E with E <= m

    edges: the start of each octave; for each format, the smallest value that does not round to zero, the smallest
           normal number, and the smallest value that rounds above the largest number; the smallest float32 above
           zero; infinity

One histogram of ranks is enough: the share of values at or above an edge is the sum of the bins from that edge on. It
takes a few reads of the tensor. It is exact, because integers are compared (a CPU would read subnormal floats as zero).
The pass runs under `lax.cond`, so a step that is not sampled does not pay for it. With `when=False` the program does
not contain it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxmp._src.base import compat, tables, tree_paths
from jaxmp._src.devices import collectives, host_memory, shardings
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.numerics import float_bits, formats
from pallas_kernels.by_platform import by_platform

FORMATS = {name: formats.DTYPES[name] for name in ("bf16", "fp16", "e4m3", "e5m2")}
LOWEST, HIGHEST = -48, 23  # exponents of the histogram's octaves; values outside count in the outermost ones
_SMALL = 2**20  # tensors of at most this many values are copied, to measure several in one loop

T = TypeVar("T")
LeafCounts = tuple[Int[Array, "ranks"], Int[Array, "2"]]  # the result of `of_leaf`: number of values by rank; extremes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("sampled", "amax", "smallest", "zeros", "nonfinite", "overflow", "underflow", "subnormal", "octaves"),
    meta_fields=("names", "dtypes", "sizes"),
)
@dataclasses.dataclass(frozen=True)
class TensorStats:
    """Statistics of n tensors, the result of `tensor_stats`. A pytree, so that jit can return it.

    A share is a fraction of all values of a tensor, from 0 to 1. The shares by format describe a cast to that format
    with rounding to nearest even. The formats are bf16, fp16, e4m3 and e5m2, in this order (`FORMATS`).

    Attributes:
      names: path of each tensor (static).
      dtypes: name of the dtype of each tensor (static).
      sizes: number of values of each tensor on one device (static).
      sampled: bool[], False if `when` was False: all other arrays are then 0.
      amax: float32[n], the largest finite magnitude.
      smallest: float32[n], the smallest magnitude above zero; 0 if there is none.
      zeros: float32[n], share of exact zeros.
      nonfinite: float32[n], share of inf and NaN.
      overflow: float32[n, 4], share of finite values that would round above the largest number of a format.
      underflow: float32[n, 4], share of nonzero values that would round to zero.
      subnormal: float32[n, 4], share of values below the smallest normal number of a format that would not round to 0.
      octaves: float32[n, 72], share of values in [2^k, 2^(k+1)) for k = -48 to 23. Values outside count in the first or
        last octave. float32[n, 0] with `histogram=False`.

    Example:
      >>> stats = tensor_stats({"w": jnp.array([1.0, 0.0])})
      >>> stats.names, float(stats.amax[0]), float(stats.zeros[0])
      (('w',), 1.0, 0.5)
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    sampled: Bool[Array, ""]
    amax: Float[Array, "n"]
    smallest: Float[Array, "n"]
    zeros: Float[Array, "n"]
    nonfinite: Float[Array, "n"]
    overflow: Float[Array, "n formats"]
    underflow: Float[Array, "n formats"]
    subnormal: Float[Array, "n formats"]
    octaves: Float[Array, "n octaves"]

    def __getitem__(self, name: str) -> dict[str, Any]:
        """The statistics of one tensor as a dict of numbers; keys by format are such as `overflow/fp16`."""
        if name not in self.names:
            raise KeyError(f"the key must name a tensor; got {name!r}. There are {', '.join(self.names) or 'none'}.")
        i = self.names.index(name)
        row: dict[str, Any] = {"dtype": self.dtypes[i], "size": self.sizes[i]}
        row |= {key: float(getattr(self, key)[i]) for key in ("amax", "smallest", "zeros", "nonfinite")}
        for key in ("overflow", "underflow", "subnormal"):
            row |= {f"{key}/{f}": float(x) for f, x in zip(FORMATS, np.asarray(getattr(self, key)[i]), strict=True)}
        return row

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("tensor", "dtype", "amax", "smallest", "zeros", "nonfinite", *(f"lost in {f}" for f in FORMATS))
        ]
        for i, name in enumerate(self.names):
            lost = np.asarray(self.overflow[i] + self.underflow[i])
            shares = (self.zeros[i], self.nonfinite[i], *lost)
            extremes = (f"{float(self.amax[i]):.3g}", f"{float(self.smallest[i]):.3g}")
            rows.append((name, self.dtypes[i], *extremes, *(f"{100 * float(x):.3g}%" for x in shares)))
        return tables.columns(rows)


def tensor_stats(
    tree: PyTree,
    *,
    when: bool | Bool[Array, ""] = True,
    scale: float | Float[Array, ""] | None = None,
    histogram: bool = True,
    axis_name: collectives.AxisName = "auto",
) -> TensorStats | None:
    """Statistics of every float leaf of `tree`.

    It works under jit, pmap, shard_map or outside, and changes nothing. It ignores integers, keys, complex leaves and
    fp8 scale leaves.

    Args:
      tree: params, gradients, activations. Gradients of `jaxmp.value_and_grad` are scaled: their statistics show the
        numbers that 16 bits held. With `scale=1 / jaxmp.get_loss_scale(opt_state)` they show the true gradients.
      when: whether to compute statistics, such as `step % 10 == 0`. A traced False skips the computation; with Python's
        False the program does not contain it, and None is returned. Under pmap and shard_map it must be the same on
        all devices, or they wait for each other forever.
      scale: a factor for all values, in float32.
      histogram: whether to compute the octaves.
      axis_name: axes over which devices hold different parts or microbatches: `"auto"` (all axes that pmap or shard_map
        binds), names, or None. Over these axes extremes are combined by MAX or MIN, and shares are averaged.

    Returns:
      `TensorStats` with names in the order of the leaves; or None for `when=False`.

    Raises:
      TypeError: `when` is not a bool.
      ValueError: `when` can differ between devices.

    Example:
      >>> grads = {"dense": {"kernel": jnp.array([1.0, 1e-6, 1e-9, 0.0])}}
      >>> stats = tensor_stats(grads)
      >>> stats["dense/kernel"]["subnormal/fp16"], stats["dense/kernel"]["underflow/fp16"]
      (0.25, 0.25)
    """
    return sampled(lambda: measure(tree, scale=scale, histogram=histogram, axis_name=axis_name), when)


def sampled(make: Callable[[], T], when: bool | Bool[Array, ""]) -> T | None:
    """`make()` if `when`, else zeros of its type; for Python's False None, without tracing `make`."""
    when = checked_when(when)
    if isinstance(when, bool):
        return make() if when else None
    with jax.named_scope("jaxmp.monitor"):
        like = jax.eval_shape(make)

        def zeros(x: Any) -> Array:
            return compat.as_varying(jnp.zeros(x.shape, x.dtype), tuple(compat.varying_axes(x)))

        return lax.cond(when, make, lambda: jax.tree.map(zeros, like))


def checked_when(when: Any) -> bool | Bool[Array, ""]:
    """`when` as a Python bool or a bool[] array; raises for numbers, such as `step % 10` without `== 0`."""
    # Python's 0 passes: `every and step % every == 0` gives it for every=0.
    if isinstance(when, (bool, np.bool_)) or (isinstance(when, int) and when == 0):
        return bool(when)
    shaped: Any = when
    if getattr(when, "dtype", None) != np.dtype(bool) or jnp.ndim(when):
        got = f"{shaped.dtype}{list(shaped.shape)}" if hasattr(when, "dtype") else repr(when)
        raise TypeError(f"when must be one bool, such as step % 10 == 0; got {got}.")
    if axes := compat.varying_axes(shaped):  # some devices would wait forever for the others
        raise ValueError(
            f"when must be the same on all devices; got one that varies over {sorted(axes)}. Use the step."
        )
    return shaped


def measure(
    tree: PyTree, *, scale: Any = None, histogram: bool = True, axis_name: collectives.AxisName = "auto"
) -> TensorStats:
    """`tensor_stats` without `when`."""
    with jax.named_scope("jaxmp.tensor_stats"):
        leaves = dict(float_leaves(host_memory.to_device(tree)))
        seen = _of_leaves(list(leaves.values()), scale, histogram)
        return assemble({path: (x.dtype, x.size) for path, x in leaves.items()}, seen, histogram, axis_name)


def assemble(
    tensors: Mapping[str, tuple[Any, int]], counts: list[LeafCounts], histogram: bool, axis_name: collectives.AxisName
) -> TensorStats:
    """The statistics of `tensors` (path -> dtype, number of values), combined over devices, from `of_leaf` of each."""
    axes = collectives.bound_axes(axis_name)
    ranks = jnp.stack([r for r, _ in counts]) if counts else jnp.zeros((0, len(_edges(histogram)) + 1), jnp.uint32)
    shares = _shares(ranks, histogram)
    extremes = jnp.stack([e for _, e in counts]) if counts else jnp.zeros((0, 2), jnp.int32)
    if axes and counts:
        shares = collectives.sum_over(shares, axes) / lax.psum(1, axes)
        extremes = collectives.max_over(extremes, axes)  # as integers: a float MAX could flush subnormals
    smallest = jnp.where(extremes[:, 1] == 0, 0, float_bits.INFINITY - extremes[:, 1])
    zeros, nonfinite, overflow, underflow, subnormal, octaves = jnp.split(
        shares, np.cumsum([1, 1, len(FORMATS), len(FORMATS), len(FORMATS)]), axis=1
    )
    return TensorStats(
        names=tuple(tensors),
        dtypes=tuple(jnp.dtype(dtype).name for dtype, _ in tensors.values()),
        sizes=tuple(size for _, size in tensors.values()),
        sampled=jnp.ones((), bool),
        amax=float_bits.from_bits(extremes[:, 0]),
        smallest=float_bits.from_bits(smallest),
        zeros=zeros[:, 0],
        nonfinite=nonfinite[:, 0],
        overflow=overflow,
        underflow=underflow,
        subnormal=subnormal,
        octaves=octaves,
    )


def over_microbatches(stats: TensorStats) -> TensorStats:
    """Stacked statistics of several microbatches combined; statistics of one batch unchanged."""
    if stats.sampled.ndim == 0:
        return stats
    shares = ("zeros", "nonfinite", "overflow", "underflow", "subnormal", "octaves")
    means: dict[str, Any] = {name: jnp.mean(getattr(stats, name), axis=0) for name in shares}
    amax, least = jnp.max(stats.amax, axis=0), jnp.min(jnp.where(stats.smallest > 0, stats.smallest, jnp.inf), axis=0)
    smallest = jnp.where(jnp.isinf(least), 0.0, least)
    return dataclasses.replace(stats, sampled=stats.sampled[0], amax=amax, smallest=smallest, **means)


def float_leaves(tree: PyTree) -> Iterator[tuple[str, Array]]:
    for path, x in tree_paths.leaves_by_path(tree).items():
        if jnp.issubdtype(jnp.result_type(x), jnp.floating) and not scale_leaves.is_scale(path) and np.size(x):
            yield path, jnp.asarray(x)


def _of_leaves(leaves: list[Array], scale: Any, histogram: bool) -> list[LeafCounts]:
    """`of_leaf` of each leaf. Small leaves of one type share a loop, so that a deep model compiles quickly."""
    measure_leaf = functools.partial(of_leaf, scale=scale, histogram=histogram)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        groups.setdefault(jax.typeof(x) if x.size <= _SMALL else i, []).append(i)
    counts: dict[int, LeafCounts] = {}
    done: Any = ()
    for members in groups.values():
        # One group after another, so that XLA does not keep the bits of all leaves at once.
        group, done = lax.optimization_barrier(([leaves[i] for i in members], done))
        if len(members) == 1:
            counts[members[0]] = done = measure_leaf(group[0])
        else:
            ranks, extremes = done = lax.map(measure_leaf, jnp.stack(group))
            counts |= {i: (ranks[k], extremes[k]) for k, i in enumerate(members)}
    return [counts[i] for i in range(len(leaves))]


def of_leaf(x: Array, scale: Any = None, histogram: bool = True) -> LeafCounts:
    """The number of values of `x` of each rank, and two extremes, both combined over devices by MAX."""
    # The extremes as bits: the largest finite magnitude; and infinity minus the smallest magnitude above zero (0 if all
    # values are zero).
    x = x.astype(jnp.float32) if scale is None else x.astype(jnp.float32) * scale
    count: Any = functools.partial(_of_float32, histogram=histogram)
    whole = shardings.whole_if_explicit(x)
    if whole is not None:  # XLA chooses how to combine its parts
        count = jax.sharding.auto_axes(count, out_sharding=(whole, whole))
    return count(x)


def _of_float32(x: Array, histogram: bool) -> LeafCounts:
    # Keeps the shape: to flatten an array that is split over devices would gather it.
    m = float_bits.to_bits(x) & np.int32(0x7FFFFFFF)
    by_scatter = lambda _, m: _ranks_by_scatter(m, histogram)  # noqa: E731
    ranks = by_platform(functools.partial(_ranks_by_comparison, histogram=histogram), m, cpu=by_scatter, maps=True)
    largest = jnp.max(jnp.where(m < float_bits.INFINITY, m, 0))
    smallest = jnp.min(jnp.where((m > 0) & (m < float_bits.INFINITY), m, float_bits.INFINITY))
    return ranks, jnp.stack([largest, float_bits.INFINITY - smallest])


def _ranks_by_comparison(m: Int[Array, "..."], histogram: bool) -> Array:
    """The number of values of each rank, from the number at or above each edge: reductions, which are fast on GPUs."""
    edges = np.array([0, *_edges(histogram)], np.int32).reshape(-1, *[1] * m.ndim)
    at_least = jnp.sum(m[None] >= edges, axis=tuple(range(1, m.ndim + 1)), dtype=jnp.uint32)
    return at_least - jnp.concatenate([at_least[1:], jnp.zeros((1,), jnp.uint32)])


def _ranks_by_scatter(m: Int[Array, "..."], histogram: bool) -> Array:
    """The same by a scatter: many times faster on CPUs, where XLA does not vectorize the comparisons."""
    edges, octaves = _edges(histogram), _octave_edges() if histogram else []
    rank = jnp.zeros_like(m)
    if octaves:  # the rank among the octaves' edges is the exponent
        rank = jnp.clip((m >> 23) - (LOWEST + 127), 0, len(octaves))
    for edge in sorted(set(edges) - set(octaves)):
        rank += m >= np.int32(edge)
    return jnp.zeros((len(edges) + 1,), jnp.uint32).at[rank].add(np.uint32(1), mode="promise_in_bounds")


def _shares(ranks: Array, histogram: bool) -> Float[Array, "n shares"]:
    """All shares of each tensor, in the order of the fields of `TensorStats`, from its number of values by rank."""
    at_least = jnp.flip(jnp.cumsum(jnp.flip(ranks, axis=1), axis=1, dtype=jnp.uint32), axis=1)  # at rank 0: all values
    at_least = jnp.pad(at_least, ((0, 0), (0, 1)))  # no value is above the last rank
    low, high = _bounds(histogram)
    return (at_least[:, low] - at_least[:, high]).astype(jnp.float32) / at_least[:, :1].astype(jnp.float32)


@functools.cache
def _bounds(histogram: bool) -> tuple[np.ndarray, np.ndarray]:
    """For each share, in the order of the fields: its lowest rank, and the rank after its highest."""
    edges = _edges(histogram)
    infinity, limits = int(float_bits.INFINITY), [_limits(f) for f in FORMATS]
    between: list[tuple[int, int]] = [(over, infinity) for _, _, over in limits]
    between += [(1, under) for under, _, _ in limits]
    between += [(under, normal) for under, normal, _ in limits]
    if histogram:  # the first octave begins above zero, the last ends below infinity
        between += itertools.pairwise((1, *_octave_edges(), infinity))
    ranks = [(edges.index(a) + 1, edges.index(b) + 1) for a, b in between]
    zeros, nonfinite = (0, edges.index(1) + 1), (edges.index(infinity) + 1, len(edges) + 1)
    low, high = zip(zeros, nonfinite, *ranks, strict=True)
    return np.array(low), np.array(high)


@functools.cache
def _edges(histogram: bool) -> list[int]:
    """All edges as bits, in ascending order."""
    own = {edge for f in FORMATS for edge in _limits(f)}
    return sorted({1, int(float_bits.INFINITY)} | own | set(_octave_edges() if histogram else ()))


def _octave_edges() -> list[int]:
    """The bits of 2^k at the start of each octave but the first, which holds all smaller values as well."""
    return [(k + 127) << 23 for k in range(LOWEST + 1, HIGHEST + 1)]


@functools.cache
def _limits(name: str) -> tuple[int, int, int]:
    """As bits, of a format: the smallest number not rounded to 0, the smallest normal, the smallest to overflow."""
    info = jnp.finfo(FORMATS[name])
    half = np.float32(float(info.smallest_subnormal) / 2)  # a tie: rounds to the even neighbour, zero
    step = float(info.max) - float(np.nextafter(info.max, np.asarray(0, info.dtype)).astype(np.float64))
    tie = np.float32(float(info.max) + step / 2)
    # A tie rounds to the even neighbour: up, to overflow, if the largest number is odd.
    tie_overflows = int(np.asarray(info.max).view(f"uint{info.bits}")) & 1
    return _int(half) + 1, _int(np.float32(info.smallest_normal)), _int(tie) + (0 if tie_overflows else 1)


def _int(x: np.float32) -> int:
    return int(np.asarray(x).view(np.int32))
