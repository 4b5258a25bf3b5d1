"""The floating-point formats of low-precision training, as numbers: what `python -m jaxmp formats` prints.

A format with e exponent and m mantissa bits has 2^m values in every octave (epsilon is 2^-m, the step above 1) and
about 2^e octaves; below its smallest normal number values are 2^-m of that apart, down to the smallest subnormal, and
what is smaller becomes zero. Training meets both ends: gradients fall below the one, activations rise above the other.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax


class Format(NamedTuple):
    """One format.

    Attributes:
      name: as the field calls it.
      bits: of one number in memory. tf32 is float32 in memory, of which a tensor core reads 19 bits.
      exponent, mantissa: bits of these.
      largest: the largest finite number.
      smallest_normal: the smallest number with all bits of the mantissa.
      smallest_subnormal: the smallest number above zero.
      epsilon: from 1 to the next number.
      pi: the number nearest to it.
    """

    name: str
    bits: int
    exponent: int
    mantissa: int
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float
    pi: float


# The names of formats in arguments, metrics and names of leaves: all others are read from here.
DTYPES: dict[str, Any] = {
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "e2m1": jnp.float4_e2m1fn,
}


def name_of(dtype: Any) -> str:
    """The name of a dtype's format, such as `"e4m3"`."""
    return next(name for name, known in DTYPES.items() if jnp.dtype(known) == jnp.dtype(dtype))


def formats() -> list[Format]:
    """fp32, tf32, bf16, fp16, the two of fp8, and fp4, by falling precision of their mantissa and range.

    References:
      IEEE 754-2019; NVIDIA A100 whitepaper (tf32); Micikevicius et al. 2022 (arXiv 2209.05433) for fp8; OCP
      Microscaling Formats v1.0 for e2m1.
    """
    fp32, *others = (_of(name, dtype) for name, dtype in DTYPES.items())
    largest = float(np.float32(2.0**127 * (2 - 2.0**-10)))
    normal = fp32.smallest_normal
    pi = float(lax.reduce_precision(jnp.float32(math.pi), exponent_bits=8, mantissa_bits=10))
    tf32 = Format("tf32", 32, 8, 10, largest, normal, normal * 2.0**-10, 2.0**-10, pi)
    return [fp32, tf32, *others]


def _of(name: str, dtype: Any) -> Format:
    info = jnp.finfo(dtype)
    return Format(
        name,
        info.bits,
        info.bits - 1 - info.nmant,
        info.nmant,
        float(info.max),
        float(info.smallest_normal),
        float(info.smallest_subnormal),
        float(info.eps),
        float(np.asarray(math.pi, dtype).astype(np.float64)),
    )


def rows() -> list[tuple[str, ...]]:
    """The formats as a table's rows, the first being the head."""
    head = ("format", "bits", "exponent", "mantissa", "largest", "smallest normal", "subnormal", "epsilon", "pi")
    return [head, *(_shown(f) for f in formats())]


def _shown(f: Format) -> tuple[str, ...]:
    numbers = (f.largest, f.smallest_normal, f.smallest_subnormal, f.epsilon)
    return (f.name, str(f.bits), str(f.exponent), str(f.mantissa), *(f"{x:.5g}" for x in numbers), f"{f.pi:.7g}")
