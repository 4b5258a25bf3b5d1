"""Stores the moments of any optax optimizer in 16 or 8 bits.

Between two steps the moments are in bfloat16 or in 8 bits; during the step they are float32:

    moments -> float32 -> inner.update -> float32 -> rounded stochastically -> moments

`pallas_kernels.moments` explains the formats and why the rounding is stochastic. Adam's two moments take 8 bytes per
parameter in float32, 4 in bfloat16, and 2.03 in 8 bits. With 8 bits, small leaves and leaves whose last axis is not a
multiple of 32 stay in float32.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.numerics import casting
from jaxmp._src.step import inner_update
from jaxmp._src.step.optimizers import as_transformation
from pallas_kernels import moments

_SIGNED = ("mu", "trace", "momentum")
NOT_NEGATIVE = ("nu", "sum_of_squares")
_LARGE = 2**16  # elements of a param whose float32 moments are worth a warning


class CompressedState(NamedTuple):
    """State of `compress_moments`.

    Attributes:
      compress_count: int32[], updates so far; the noise of the rounding depends on it.
      compressed: state of the wrapped transform; each moment in `state_dtype`, or as `Quantized(codes, scales)`.
    """

    compress_count: Int[Array, ""]
    compressed: Any


def compress_moments(inner: optax.GradientTransformation, state_dtype: Any) -> optax.GradientTransformationExtraArgs:
    """Wraps an optax optimizer so that its moments are stored in 16 or 8 bits.

    Args:
      inner: any transform. Its moments are the fields `mu`, `trace`, `momentum` (signed), `nu` and `sum_of_squares`
        (not negative) of its states; other fields do not change.
      state_dtype: float32 (nothing changes), bfloat16, int8 (companded blocks), float8_e4m3fn or float8_e5m2.

    Returns:
      A transform with `CompressedState`.

    Raises:
      ValueError: another `state_dtype`; at `init`, an inner state without such fields; at `update`, moments that are
        stored in another dtype (named by path).

    Warns:
      UserWarning: at `init`, params of 65,536 elements or more whose moments stay float32, named by path.

    Example:
      >>> tx = compress_moments(optax.adam(1e-3), jnp.int8)
      >>> state = tx.init({"w": jnp.zeros((16, 256))})
      >>> optax.tree.get(state, "nu")["w"].codes.dtype.name, optax.tree.get(state, "nu")["w"].scales.shape
      ('uint8', (16, 1))

    References:
      Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861); FlashOptim (arXiv
      2602.23349) for companding.
    """
    moments.codec_of(state_dtype, signed=True)
    inner = as_transformation(inner)

    def store(x: Any, like: Any, signed: bool, number: int, count: Array) -> Any:
        x = jnp.asarray(x, jnp.float32)  # an inner transform may use another dtype (`mu_dtype`)
        bits = moments.noise(moments.flat_index(x.shape), float(number), count)
        bits = moments.low_bits(bits) if signed else moments.high_bits(bits)
        return moments.requantize(x, like, bits, signed=signed)

    def init_fn(params: PyTree) -> CompressedState:
        state = inner.init(params)
        if not any(map(_holds_moments, jax.tree.leaves(state, is_leaf=_holds_moments))):
            raise ValueError(
                f"compress_moments needs an optimizer with moments ({', '.join((*_SIGNED, *NOT_NEGATIVE))}); got "
                f"{type(state).__name__}. Wrap the transform that has some."
            )

        _warn_of_wide_moments(params, state_dtype)
        count = jnp.zeros((), jnp.int32)

        def first(x: Any, signed: bool, number: int) -> Any:
            # They start at zero. In a jitted init XLA would fold their codes while it compiles: minutes for 50257x768.
            x = jax.lax.optimization_barrier(x)
            return store(x, moments.like(jnp.shape(x), state_dtype, signed=signed), signed, number, count)

        stored = map_moments(first, state)
        return CompressedState(count, tree_paths.with_boxes_inside(stored))

    def update_fn(updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any) -> tuple[PyTree, Any]:
        check_form(state, state_dtype, compressed=True)
        count: Any = optax.safe_increment(state.compress_count)
        with jax.named_scope("jaxmp.decompress_moments"):
            full = map_moments(lambda x, signed, _: moments.dequantize(x, signed=signed), state.compressed)
        updates, new = inner_update.update_stored(inner, updates, full, params, extra_args)
        # In the form that the moment has, not in the one that its shape would get at `init`: in shard_map a device sees
        # its part of a moment, which may be too small to start in 8 bits.
        forms: dict[tuple[bool, int], Any] = {}
        map_moments(lambda x, signed, number: forms.setdefault((signed, number), x), state.compressed)
        with jax.named_scope("jaxmp.compress_moments"):
            return updates, CompressedState(
                count,
                map_moments(lambda x, signed, number: store(x, forms[signed, number], signed, number, count), new),
            )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _warn_of_wide_moments(params: PyTree, state_dtype: Any) -> None:
    """Warns of large params whose moments stay float32, because no group of neighbours divides their last axis."""
    if moments.codec_of(state_dtype, signed=True) is None:
        return
    wide = {
        path: x.shape
        for path, x in tree_paths.leaves_by_path(params).items()
        if casting.is_float(x) and x.size >= _LARGE and moments.group_of(x.shape) is None
    }
    if not wide:
        return
    path, shape = next(iter(wide.items()))
    size, group = shape[-1], min(moments.GROUPS)
    warn(
        "moments-stay-float32",
        f"moments in 8 bits need a last axis of a multiple of {group}; got {shape} at "
        f"{path}{f' and {len(wide) - 1} more' if len(wide) > 1 else ''}, whose moments stay float32. Make it "
        f"{-(-size // group) * group} in place of {size}.",
    )


def check_form(state: Any, state_dtype: Any, *, compressed: bool) -> None:
    """Raises a ValueError for moments that are not stored as an optimizer with `state_dtype` stores them.

    In shard_map a device sees its part of a moment: one in 8 bits may be smaller than those that start so.

    Args:
      state: of the optimizer.
      state_dtype: of its moments.
      compressed: whether a `CompressedState` holds them.
    """
    wanted = jnp.dtype(state_dtype)
    is_compressed = lambda x: isinstance(x, CompressedState)  # noqa: E731
    holds_compressed = any(map(is_compressed, jax.tree.leaves(state, is_leaf=is_compressed)))
    wrong = None if compressed == holds_compressed else f"{'a' if holds_compressed else 'no'} CompressedState"
    for path, x, signed in _moments(state):
        codec = moments.codec_of(state_dtype, signed=signed)
        if moments.is_quantized(x):
            is_own, got = codec is not None and x.codes.dtype == codec.dtype, x.codes.dtype
        else:
            narrower = codec is not None and moments.group_of(jnp.shape(x)) is not None
            is_own, got = x.dtype == (jnp.float32 if codec else wanted) and not narrower, x.dtype
        if not is_own:
            wrong = f"{'int8' if got == jnp.uint8 else got.name} at {tree_paths.path_str(path)}"
            break
    if wrong is not None:
        raise ValueError(
            f"moments must have the optimizer's state_dtype, {wanted.name}; got {wrong}. Make it with the state_dtype "
            f"of before."
        )


def _moments(state: Any) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:
    """(path, moment, whether it is signed) of each moment in `state`."""
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=_holds_moments):
        for name in node._fields if _holds_moments(node) else ():
            if name in (*_SIGNED, *NOT_NEGATIVE):
                field = jax.tree_util.tree_leaves_with_path(getattr(node, name), is_leaf=moments.is_quantized)
                key = jax.tree_util.GetAttrKey(name)
                yield from (((*path, key, *rest), x, name in _SIGNED) for rest, x in field)


def map_moments(f: Any, state: Any) -> Any:
    """`state` with `f(moment, signed, number)` in place of each moment; signed and unsigned ones have own numbers."""

    numbers = {True: itertools.count(), False: itertools.count()}

    def visit(node: Any) -> Any:
        if not _holds_moments(node):
            return node
        new = {}
        for name in node._fields:
            if name in (*_SIGNED, *NOT_NEGATIVE):
                leaves, treedef = jax.tree.flatten(getattr(node, name), is_leaf=moments.is_quantized)
                signed = name in _SIGNED
                new[name] = treedef.unflatten([f(x, signed, next(numbers[signed])) for x in leaves])
        return node._replace(**new)

    return jax.tree.map(visit, state, is_leaf=_holds_moments)


def _holds_moments(node: Any) -> bool:
    fields = getattr(node, "_fields", ())
    return any(name in (*_SIGNED, *NOT_NEGATIVE) for name in fields)
