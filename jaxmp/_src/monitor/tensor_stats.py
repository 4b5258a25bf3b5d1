"""What the numbers of a tensor are, inside jit: how large, how small, and what each format would make of them.

A float of magnitude |x| has the bits m = (exponent + 127) * 2^23 + fraction as an int32, in the order of the floats. So
where a value falls, in which octave and beyond which edge of which format, is its rank among a few fixed integers:

    rank(x) = number of edges E with E <= m         edges: every octave; of each format the least value that does not
                                                    round to zero, its smallest normal number, and the least value that
                                                    rounds beyond its largest; the smallest float32; infinity

One histogram of ranks holds it all: the share of values beyond an edge is the sum of the bins from it on. That takes a
few reads of the tensor, and is exact, in integers (a CPU would read subnormal floats as zero). The pass runs under
`lax.cond`, so a step that is not sampled does not pay for it; with `when=False` there is nothing in the program at all.
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
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxmp._src.base import compat, tables, tree_paths
from jaxmp._src.devices import collectives, shardings
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.numerics import float_bits, formats

FORMATS = {name: formats.DTYPES[name] for name in ("bf16", "fp16", "e4m3", "e5m2")}
LOWEST, HIGHEST = -48, 23  # the octaves of the histogram, by their exponent; what lies outside counts in the outermost
_SMALL = 2**20  # values of a tensor that may be copied to be looked at together with others

T = TypeVar("T")
Seen = tuple[Int[Array, "ranks"], Int[Array, "2"]]  # what `of_leaf` sees


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("sampled", "amax", "smallest", "zeros", "nonfinite", "overflow", "underflow", "subnormal", "octaves"),
    meta_fields=("names", "dtypes", "sizes"),
)
@dataclasses.dataclass(frozen=True)
class TensorStats:
    """Statistics of n tensors, as `tensor_stats` makes them: a pytree that goes through jit.

    Shares are of all values of a tensor, from 0 to 1; "would" speaks of a cast to that format with rounding to nearest
    even. The formats, in this order: bf16, fp16, e4m3, e5m2 (`FORMATS`).

    Attributes:
      names: path of each tensor (static).
      dtypes: name of the dtype of each (static).
      sizes: number of values of each, on one device (static).
      sampled: bool[], False where `when` was False: all else is then 0.
      amax: float32[n], the largest finite magnitude.
      smallest: float32[n], the smallest magnitude above zero; 0 if there is none.
      zeros: float32[n], share of exact zeros.
      nonfinite: float32[n], share of inf and NaN.
      overflow: float32[n, 4], share of finite values that would round beyond the largest of a format.
      underflow: float32[n, 4], share of values other than zero that would round to zero.
      subnormal: float32[n, 4], share of values below the smallest normal number of a format that would not become zero.
      octaves: float32[n, 72], share of values in [2^k, 2^(k+1)) for k = -48 to 23, the outermost taking what lies
        beyond; or float32[n, 0] without histogram.

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
        """The statistics of one tensor as numbers, those of formats as `overflow/fp16`."""
        if name not in self.names:
            raise KeyError(f"no tensor {name!r} was measured; there are {', '.join(self.names) or 'none'}")
        i = self.names.index(name)
        found: dict[str, Any] = {"dtype": self.dtypes[i], "size": self.sizes[i]}
        found |= {key: float(getattr(self, key)[i]) for key in ("amax", "smallest", "zeros", "nonfinite")}
        for key in ("overflow", "underflow", "subnormal"):
            found |= {f"{key}/{f}": float(x) for f, x in zip(FORMATS, np.asarray(getattr(self, key)[i]), strict=True)}
        return found

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
    """Statistics of every float leaf of `tree`, in one pass over each.

    It reads and changes nothing; under jit, pmap, shard_map or outside. fp8 scale leaves, integers, keys and complex
    leaves are passed over.

    Args:
      tree: params, gradients, activations. Gradients as `jaxmp.value_and_grad` returns them are scaled: they show what
        the 16-bit numbers were; `scale=1 / jaxmp.get_loss_scale(opt_state)` shows what they stand for.
      when: whether to look: `step % 10 == 0`; under pmap and shard_map the same on all devices, or they wait for one
        another for ever. Where a traced value is False the pass is not run; Python's False leaves
        nothing in the program, and None comes back.
      scale: a factor for all values, in float32.
      histogram: whether to keep the octaves.
      axis_name: axes over which devices hold different parts or microbatches: `"auto"` (all that pmap or shard_map
        binds), names, or None where none is bound. Extremes are taken and shares averaged over them.

    Returns:
      `TensorStats`, its names in the order of the leaves; or None for `when=False`.

    Example:
      >>> grads = {"dense": {"kernel": jnp.array([1.0, 1e-6, 1e-9, 0.0])}}
      >>> stats = tensor_stats(grads)
      >>> stats["dense/kernel"]["subnormal/fp16"], stats["dense/kernel"]["underflow/fp16"]
      (0.25, 0.25)
    """
    return sampled(lambda: measure(tree, scale=scale, histogram=histogram, axis_name=axis_name), when)


def sampled(make: Callable[[], T], when: bool | Bool[Array, ""]) -> T | None:
    """`make()` where `when` is true, else zeros of its type; for Python's False None, and nothing is traced."""
    when = checked_when(when)
    if isinstance(when, bool):
        return make() if when else None
    with jax.named_scope("jaxmp.monitor"):
        like = jax.eval_shape(make)
        return lax.cond(when, make, lambda: jax.tree.map(_zeros, like))


def checked_when(when: Any) -> bool | Bool[Array, ""]:
    """`when` as Python's bool or as an array of one; a number, as of `step % 10` without `== 0`, is refused.

    Python's 0 is let through, which `every and step % every == 0` gives.
    """
    if isinstance(when, (bool, np.bool_)) or (isinstance(when, int) and when == 0):
        return bool(when)
    shaped: Any = when
    if getattr(when, "dtype", None) != np.dtype(bool) or jnp.ndim(when):
        got = f"{shaped.dtype}{list(shaped.shape)}" if hasattr(when, "dtype") else repr(when)
        raise TypeError(f"when= must be a bool, one for the step, such as step % 10 == 0; got {got}")
    if axes := compat.varying_axes(shaped):  # some devices would wait for others that do not come
        raise ValueError(
            f"when= must be the same on all devices, but it varies over {sorted(axes)}. The number of the step is the "
            f"same, and so is jaxmp.all_finite; a loss is after jax.lax.pmean."
        )
    return shaped


def _zeros(like: Any) -> Array:
    return compat.as_varying(jnp.zeros(like.shape, like.dtype), tuple(compat.varying_axes(like)))


def measure(
    tree: PyTree, *, scale: Any = None, histogram: bool = True, axis_name: collectives.AxisName = "auto"
) -> TensorStats:
    """`tensor_stats` without a condition."""
    with jax.named_scope("jaxmp.tensor_stats"):
        leaves = dict(float_leaves(tree))
        seen = _of_leaves(list(leaves.values()), scale, histogram)
        return assemble({path: (x.dtype, x.size) for path, x in leaves.items()}, seen, histogram, axis_name)


def assemble(
    tensors: Mapping[str, tuple[Any, int]], seen: list[Seen], histogram: bool, axis_name: collectives.AxisName
) -> TensorStats:
    """The statistics of several tensors, common to all devices, from what each device saw of each.

    Args:
      tensors: path -> (dtype, number of values).
      seen: of each, in this order, what `of_leaf` gave.
      histogram, axis_name: as for `tensor_stats`.
    """
    axes = collectives.bound_axes(axis_name)
    ranks = jnp.stack([r for r, _ in seen]) if seen else jnp.zeros((0, len(_edges(histogram)) + 1), jnp.uint32)
    shares = _shares(ranks, histogram)
    extremes = jnp.stack([e for _, e in seen]) if seen else jnp.zeros((0, 2), jnp.int32)
    if axes and seen:
        shares = collectives.sum_over(shares, axes) / lax.psum(1, axes)
        extremes = collectives.max_over(extremes, axes)  # as integers: subnormal floats could be flushed on the way
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
    """Statistics that came as auxiliary data of several microbatches, stacked, as one; of one, as they are."""
    if stats.sampled.ndim == 0:
        return stats
    merged: dict[str, Any] = {f.name: getattr(stats, f.name) for f in dataclasses.fields(stats)}
    for name, x in merged.items():
        if isinstance(x, jax.Array) and name not in ("sampled", "amax", "smallest"):
            merged[name] = jnp.mean(x, axis=0)
    least = jnp.min(jnp.where(stats.smallest > 0, stats.smallest, jnp.inf), axis=0)
    extremes: dict[str, Any] = {
        "amax": jnp.max(stats.amax, axis=0),
        "smallest": jnp.where(jnp.isinf(least), 0.0, least),
    }
    fields: dict[str, Any] = merged | extremes | {"sampled": stats.sampled[0]}
    return TensorStats(**fields)


def float_leaves(tree: PyTree) -> Iterator[tuple[str, Array]]:
    for path, x in tree_paths.leaves_by_path(tree).items():
        if jnp.issubdtype(jnp.result_type(x), jnp.floating) and not scale_leaves.is_scale(path) and np.size(x):
            yield path, jnp.asarray(x)


def _of_leaves(leaves: list[Array], scale: Any, histogram: bool) -> list[Seen]:
    """`of_leaf` of each; small ones of one type go through one loop, so that a deep model compiles as a flat one."""
    look = functools.partial(of_leaf, scale=scale, histogram=histogram)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        groups.setdefault(jax.typeof(x) if x.size <= _SMALL else i, []).append(i)
    found: dict[int, Seen] = {}
    done: Any = ()
    for members in groups.values():
        # One after another, so that XLA does not keep the bits of all of them at once.
        given, done = lax.optimization_barrier(([leaves[i] for i in members], done))
        if len(members) == 1:
            found[members[0]] = done = look(given[0])
        else:
            ranks, extremes = done = lax.map(look, jnp.stack(given))
            found |= {i: (ranks[k], extremes[k]) for k, i in enumerate(members)}
    return [found[i] for i in range(len(leaves))]


def of_leaf(x: Array, scale: Any = None, histogram: bool = True) -> Seen:
    """How many values of `x` have each rank; and two extremes, of which devices take the MAX.

    These are bits: of the largest finite magnitude, and infinity less those of the smallest one above zero (0 if there
    is none).
    """
    x = x.astype(jnp.float32) if scale is None else x.astype(jnp.float32) * scale
    count: Any = functools.partial(_of_float32, histogram=histogram)
    if shardings.is_explicit(x):  # how its parts are put together is left to XLA
        count = jax.sharding.auto_axes(count, out_sharding=(PartitionSpec(), PartitionSpec()))
    return count(x)


def _of_float32(x: Array, histogram: bool) -> Seen:
    m = float_bits.to_bits(x) & np.int32(
        0x7FFFFFFF
    )  # in its shape: to flatten it would gather what is cut over devices
    ranks = lax.platform_dependent(
        m, cpu=lambda m: _ranks_by_scatter(m, histogram), default=lambda m: _ranks_by_comparison(m, histogram)
    )
    largest = jnp.max(jnp.where(m < float_bits.INFINITY, m, 0))
    smallest = jnp.min(jnp.where((m > 0) & (m < float_bits.INFINITY), m, float_bits.INFINITY))
    return ranks, jnp.stack([largest, float_bits.INFINITY - smallest])


def _ranks_by_comparison(m: Int[Array, "..."], histogram: bool) -> Array:
    """The number of values of each rank, from counts beyond each edge: reductions side by side, as GPUs like it."""
    edges = np.array([0, *_edges(histogram)], np.int32).reshape(-1, *[1] * m.ndim)
    at_least = jnp.sum(m[None] >= edges, axis=tuple(range(1, m.ndim + 1)), dtype=jnp.uint32)
    return at_least - jnp.concatenate([at_least[1:], jnp.zeros((1,), jnp.uint32)])


def _ranks_by_scatter(m: Int[Array, "..."], histogram: bool) -> Array:
    """The same by a scatter: many times as fast on CPUs, which do not vectorize the other."""
    edges, octaves = _edges(histogram), _octave_edges() if histogram else []
    rank = jnp.zeros_like(m)
    if octaves:  # their edges are the exponents themselves
        rank = jnp.clip((m >> 23) - (LOWEST + 127), 0, len(octaves))
    for edge in sorted(set(edges) - set(octaves)):
        rank += m >= np.int32(edge)
    return jnp.zeros((len(edges) + 1,), jnp.uint32).at[rank].add(np.uint32(1), mode="promise_in_bounds")


def _shares(ranks: Array, histogram: bool) -> Float[Array, "n shares"]:
    """Of each tensor all shares, in the order of the fields, from the numbers of its values of each rank."""
    at_least = jnp.flip(jnp.cumsum(jnp.flip(ranks, axis=1), axis=1, dtype=jnp.uint32), axis=1)  # rank 0: all
    at_least = jnp.pad(at_least, ((0, 0), (0, 1)))  # nothing is beyond the last
    low, high = _bounds(histogram)
    return (at_least[:, low] - at_least[:, high]).astype(jnp.float32) / at_least[:, :1].astype(jnp.float32)


@functools.cache
def _bounds(histogram: bool) -> tuple[np.ndarray, np.ndarray]:
    """The ranks from which and below which the values of each share lie, in the order of the fields."""
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
    """All edges as bits, rising."""
    own = {edge for f in FORMATS for edge in _limits(f)}
    return sorted({1, int(float_bits.INFINITY)} | own | set(_octave_edges() if histogram else ()))


def _octave_edges() -> list[int]:
    """The bits of 2^k where an octave of the histogram begins, but for the first, which takes all that is smaller."""
    return [(k + 127) << 23 for k in range(LOWEST + 1, HIGHEST + 1)]


@functools.cache
def _limits(name: str) -> tuple[int, int, int]:
    """Of a format, as bits: the least magnitude not rounded to zero, the smallest normal, the least that overflows."""
    info = jnp.finfo(FORMATS[name])
    half = np.float32(float(info.smallest_subnormal) / 2)  # a tie, which rounds to the even neighbour: zero
    step = float(info.max) - float(np.nextafter(info.max, np.asarray(0, info.dtype)).astype(np.float64))
    tie = np.float32(float(info.max) + step / 2)
    odd = int(np.asarray(info.max).view(f"uint{info.bits}")) & 1  # then the even neighbour is the one beyond
    return _int(half) + 1, _int(np.float32(info.smallest_normal)), _int(tie) + (0 if odd else 1)


def _int(x: np.float32) -> int:
    return int(np.asarray(x).view(np.int32))
