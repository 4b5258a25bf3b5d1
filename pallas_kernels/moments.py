"""Optimizer state in few bits: moments in 16 or 8 bits, and the low bits of a split master.

**Moments.** In one step an exponential average changes by about 1/1000 of its size. With rounding to nearest in 8 bits,
or in bfloat16, it would not change at all. So moments are rounded *stochastically*: up or down, with probabilities that
make the average correct. The noise is a hash of (element, leaf, step): it is the same on every device and in every run.

    bfloat16    add 16 random bits to the 16 bits that are dropped, then truncate
    8 bits      x = sign(c) (|c| / top)^power * s      with a scale s for each group of neighbours, its largest |x|

`power` compands: more of the 255 codes represent small values. The optimizer divides by the root of the second moment,
so the second moment has twice the power of the first. It is never rounded to zero, because that would make a weight
jump.

**Split masters** (TransformerEngine's `store_param_remainders`). A bfloat16 param is the upper half of its float32
master, rounded. The optimizer stores the difference:

    bits(master) = bits(param) << 16  +  remainder        int16; or int8, for a master of 24 bits

Ties round away from zero, so 16 bits are enough for the remainder: param + remainder = master, exactly. With 8 bits
the master has 24, and every update rounds it stochastically, as moments are: rounded to nearest, it would not take a
step below 2^-17 of its size.
"""

from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import views

GROUPS = (256, 128, 64, 32)  # neighbours along the last axis that share a scale: the first size that divides the axis
LEAST = 4096  # leaves with fewer elements keep float32 moments: they take few bytes and matter most

_LARGEST_SPLIT = np.int32(0x7F7F7FFF)  # the largest float32 that rounds to a finite bfloat16


class Quantized(NamedTuple):
    """A moment in 8 bits."""

    codes: Array  # int8 (signed), uint8 (not negative) or an 8-bit float; the shape of the param
    scales: Float[Array, "..."]  # float32, one for each group of neighbours along the last axis

    @property
    def group(self) -> int:
        """How many neighbours share a scale."""
        return self.codes.shape[-1] // self.scales.shape[-1]


def is_quantized(x: Any) -> bool:
    """Whether a moment is stored in 8 bits; for `is_leaf=`."""
    return isinstance(x, Quantized)


class Codec(NamedTuple):
    """How a float32 in [-1, 1] is stored in 8 bits."""

    dtype: str  # name of the codes' dtype
    top: float  # the code of 1
    power: int  # of the companding


def codec_of(state_dtype: Any, *, signed: bool) -> Codec | None:
    """The codec of a moment stored in `state_dtype`; None for float32 and bfloat16, which need no scale."""
    try:
        name = "None" if state_dtype is None else jnp.dtype(state_dtype).name
    except TypeError:
        name = repr(state_dtype)
    if name in ("float32", "bfloat16"):
        return None
    if name == "int8":
        return Codec("int8", 127.0, 2) if signed else Codec("uint8", 255.0, 4)
    if name in ("float8_e4m3fn", "float8_e5m2"):
        return Codec(name, float(jnp.finfo(name).max), 1 if signed else 2)
    raise ValueError(f"state_dtype must be float32, bfloat16, int8, float8_e4m3fn or float8_e5m2; got {name}")


def codec_for(stored: str, *, signed: bool) -> Codec | None:
    """`codec_of` for the dtype of stored codes, by name; uint8 is the dtype of second moments under int8."""
    return codec_of("int8" if stored == "uint8" else stored, signed=signed)


def group_of(shape: tuple[int, ...]) -> int | None:
    """How many neighbours share a scale in a moment of this shape; None for small leaves and if no group divides."""
    if not shape or int(np.prod(shape)) < LEAST:
        return None
    return next((group for group in GROUPS if shape[-1] % group == 0), None)


def zeros(shape: tuple[int, ...], state_dtype: Any, *, signed: bool) -> Array | Quantized:
    """A moment of zeros in its stored form."""
    codec = codec_of(state_dtype, signed=signed)
    if codec is None:
        return jnp.zeros(shape, state_dtype)
    group = group_of(shape)
    if group is None:
        return jnp.zeros(shape, jnp.float32)
    scales = jnp.zeros((*shape[:-1], shape[-1] // group), jnp.float32)
    return Quantized(jnp.zeros(shape, codec.dtype), scales)


def like(shape: tuple[int, ...], state_dtype: Any, *, signed: bool) -> Any:
    """The shapes and dtypes of `zeros`."""
    return jax.eval_shape(lambda: zeros(shape, state_dtype, signed=signed))


def flat_index(shape: tuple[int, ...]) -> Int[Array, "..."]:
    """The number of each element in an array of this shape, row by row."""
    stride, index = 1, jnp.zeros(shape, jnp.int32)
    for axis in reversed(range(len(shape))):
        index += lax.broadcasted_iota(jnp.int32, shape, axis) * np.int32(stride & 0x7FFFFFFF)
        stride *= shape[axis]
    return index


# --- the arithmetic: on a block of a kernel, and on whole arrays ------------------------------------------------------
# Roundings by bits have no derivative of their own, so on whole arrays they are given one. A kernel is never
# differentiated, and Mosaic (jax 0.11) lowers no `jax.custom_jvp`: there `in_kernel` is true.


def noise(index: Int[Array, "..."], leaf: Any, step: Any) -> Int[Array, "..."]:
    """32 random bits for each element as uint32: a hash of the numbers of the element, the leaf and the step."""
    salt = jnp.asarray(step, jnp.float32).astype(jnp.int32) * np.int32(0x2545F491) + jnp.asarray(
        leaf, jnp.float32
    ).astype(jnp.int32) * np.int32(0x27D4EB2F)
    x = (index * np.int32(-0x61C88647) + salt).astype(jnp.uint32)  # Knuth's hash, with the golden ratio
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):  # the finalizer of MurmurHash3
        x = x ^ lax.shift_right_logical(x, jnp.full_like(x, shift))
        x = x if factor is None else x * jnp.full_like(x, factor)
    return x


def low_bits(bits: Int[Array, "..."]) -> Int[Array, "..."]:
    """The lower 16 of 32 random bits, as int32."""
    return (bits & np.uint32(0xFFFF)).astype(jnp.int32)


def high_bits(bits: Int[Array, "..."]) -> Int[Array, "..."]:
    """The upper 16 of 32 random bits, as int32."""
    return lax.shift_right_logical(bits, jnp.full_like(bits, 16)).astype(jnp.int32)


@jax.custom_jvp
def with_derivative_of(x: Float[Array, "..."], rounded: Float[Array, "..."]) -> Float[Array, "..."]:
    """`rounded`, a rounding of `x` that was made by its bits, with the derivative of a cast: 1, not 0."""
    del x
    return rounded


@with_derivative_of.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return primals[1], tangents[0].astype(primals[1].dtype)


def to_bfloat16(x: Float[Array, "..."], random: Int[Array, "..."], *, in_kernel: bool = False) -> Array:
    """float32 `x` in bfloat16, rounded up or down by 16 random bits; inf and NaN do not change."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    size = jnp.minimum((bits & np.int32(0x7FFFFFFF)) + random, np.int32(0x7F7FFFFF))  # at most the largest finite
    bits = (bits & np.int32(-0x80000000)) | (size & np.int32(-0x10000))
    rounded = lax.bitcast_convert_type(bits, jnp.float32)
    rounded = jnp.where(jnp.abs(x) < jnp.inf, rounded, x).astype(jnp.bfloat16)
    return rounded if in_kernel else with_derivative_of(x, rounded)


def decode(codec: Codec, codes: Array, scales: Float[Array, "..."], *, in_kernel: bool = False) -> Float[Array, "..."]:
    """The float32 values of codes."""
    return _powered(codec, codes.astype(jnp.float32)) * (scales if in_kernel else _underived(scales))


@jax.custom_jvp
def _underived(scales: Float[Array, "..."]) -> Float[Array, "..."]:
    return scales


@_underived.defjvp
def _(primals: Any, tangents: Any) -> NoReturn:
    raise TypeError(
        "moments in 8 bits have no derivative; got one through several steps. Use state_dtype=jnp.float32, or "
        "jax.lax.stop_gradient(opt_state)."
    )


def encode(codec: Codec, x: Float[Array, "..."], largest: Float[Array, "..."], random: Int[Array, "..."]) -> Array:
    """The codes of float32 `x` under the scale `largest`, rounded up or down so that the mean of `decode` is `x`."""
    # x: finite, and not negative for codecs of second moments; largest: at least the largest |x| of the group;
    # random: 16 random bits for each element. A group of subnormals becomes zeros: its inverse scale would be inf.
    inverse = jnp.where(largest >= float(jnp.finfo(jnp.float32).smallest_normal), 1.0 / largest, 0.0)
    y = jnp.minimum(jnp.abs(x) * inverse, 1.0)
    t = y
    for _ in range(codec.power.bit_length() - 1):
        t = jnp.sqrt(t)
    t = t * codec.top
    low, high = _neighbours(codec, t)
    y_low, y_high = _powered(codec, low), _powered(codec, high)
    up = (y - y_low) * 65536.0 > (y_high - y_low) * random.astype(jnp.float32)
    code = jnp.where(up, high, low)
    if codec.dtype == "int8" or codec.power == 1:
        code = jnp.where(x < 0, -code, code)
    else:
        code = jnp.where(x > 0, jnp.where(code > 0, code, high), code)
    if codec.dtype.startswith("float8"):
        return code.astype(codec.dtype)
    return code.astype(jnp.int32).astype(codec.dtype)


def _neighbours(codec: Codec, t: Float[Array, "..."]) -> tuple[Array, Array]:
    """(the largest code <= t, the next code, at most `top`), as float32."""
    if not codec.dtype.startswith("float8"):
        low = t.astype(jnp.int32).astype(jnp.float32)
        return low, jnp.minimum(low + 1.0, codec.top)
    info = jnp.finfo(codec.dtype)
    exponent = lax.bitcast_convert_type(t, jnp.int32) & np.int32(0x7F800000)
    exponent = jnp.maximum(exponent, np.int32((127 + int(info.minexp)) << 23))
    spacing = lax.bitcast_convert_type(exponent - np.int32(info.nmant << 23), jnp.float32)
    inverse = lax.bitcast_convert_type(np.int32(254 << 23) - exponent, jnp.float32) * np.float32(2.0**info.nmant)
    low = (t * inverse).astype(jnp.int32).astype(jnp.float32) * spacing
    return low, jnp.minimum(low + spacing, codec.top)


def _powered(codec: Codec, code: Float[Array, "..."]) -> Float[Array, "..."]:
    """The value of a code under the scale 1."""
    y = code * np.float32(1 / codec.top)
    if codec.dtype == "int8":  # the only codec with both companding and a sign
        return y * jnp.abs(y)
    for _ in range(codec.power.bit_length() - 1):
        y = y * y
    return y


# --- split masters ---------------------------------------------------------------------------------------------------


def join(param: Array, remainder: Int[Array, "..."], *, in_kernel: bool = False) -> Float[Array, "..."]:
    """The float32 master of a bfloat16 param and its remainder (int16, or int8 of a master of 24 bits)."""
    bits = lax.bitcast_convert_type(param.astype(jnp.float32), jnp.int32)
    low = remainder.astype(jnp.int32)
    master = lax.bitcast_convert_type(bits + (low * 256 if remainder.dtype == jnp.int8 else low), jnp.float32)
    return master if in_kernel else with_derivative_of(param, master)


def split_noise(index: Int[Array, "..."], leaf: Any, step: Any) -> Int[Array, "..."]:
    """The random bits with which `split` rounds a master to 24 bits; other bits than those of the moments."""
    return low_bits(noise(index, jnp.asarray(leaf, jnp.float32) + np.float32(2**20), step))


def split(
    master: Float[Array, "..."], dtype: Any, random: Int[Array, "..."] | None = None, *, in_kernel: bool = False
) -> tuple[Array, Int[Array, "..."]]:
    """The bfloat16 param of a float32 master, and the remainder in `dtype` (int16 or int8).

    int8 leaves no room for the last 8 bits of the master. They are rounded up or down by 16 `random` bits, so that the
    mean is the master: a step below half of the last place kept moves it on average. Without `random`: to nearest.
    """
    # A master beyond the range of bfloat16 is clipped to the largest finite value; NaN stays NaN. On a device that
    # flushes subnormals, the param of a master below 1.2e-38 becomes 0, and only the remainder is left.
    bits = lax.bitcast_convert_type(master, jnp.int32)
    sign = bits & np.int32(-0x80000000)
    size = jnp.minimum(bits & np.int32(0x7FFFFFFF), _LARGEST_SPLIT)
    if jnp.dtype(dtype) == jnp.int8:
        up = np.int32(0x80) if random is None else random & np.int32(0xFF)
        size = (size + up) & np.int32(-0x100)
        size = jnp.minimum(size, _LARGEST_SPLIT & np.int32(-0x100))
    upper = (size + np.int32(0x8000)) & np.int32(-0x10000)
    param = lax.bitcast_convert_type(upper | sign, jnp.float32)
    param = jnp.where(master == master, param, master).astype(jnp.bfloat16)
    param = param if in_kernel else with_derivative_of(master, param)
    low = size - upper
    return param, (lax.div(low, jnp.full_like(low, 256)) if jnp.dtype(dtype) == jnp.int8 else low).astype(dtype)


def requantize(x: Float[Array, "..."], like: Any, random: Int[Array, "..."], *, signed: bool) -> Any:
    """float32 `x` in the stored form of `like`: float32, bfloat16 or `Quantized`; `random` has 16 bits per element."""
    if not isinstance(like, Quantized):
        return to_bfloat16(x, random) if like.dtype == jnp.bfloat16 else x
    codec = codec_for(like.codes.dtype.name, signed=signed)
    assert codec is not None

    def quantized(view: views.View, x: Array, random: Array) -> Quantized:
        grouped, random = view.of_tree(x), view.of_array(random)
        scales = view.group_max(jnp.abs(grouped))
        return Quantized(*view.undone([encode(codec, grouped, scales, random), scales], [x.shape, like.scales.shape]))

    return views.seen(quantized, x.shape, like.group, x, jnp.broadcast_to(random, x.shape))


def dequantize(stored: Any, *, signed: bool) -> Float[Array, "..."]:
    """The float32 values of a moment in any stored form."""
    if not isinstance(stored, Quantized):
        return stored.astype(jnp.float32)
    codec = codec_for(stored.codes.dtype.name, signed=signed)
    assert codec is not None

    def wide(view: views.View, codes: Array, scales: Array) -> Array:
        return view.undone([decode(codec, *view.of_tree((codes, scales)))], [codes.shape])[0]

    return views.seen(wide, stored.codes.shape, stored.group, *stored)
