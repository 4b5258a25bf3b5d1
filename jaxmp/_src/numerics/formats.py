"""The floating-point formats of low-precision training in numbers: the first table of `python -m jaxmp formats`.

A format with e exponent and m mantissa bits has 2^m values in every octave (epsilon is 2^-m, the step above 1) and
about 2^e octaves. Below its smallest normal number the step is constant, 2^-m times this number, down to the smallest
subnormal; smaller values become zero. In training, gradients fall below the range, and activations rise above it.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax


class Format(NamedTuple):
    """One format.

    Attributes:
      name: the usual name.
      bits: of one number in memory. tf32 is float32 in memory; a tensor core reads 19 of its bits.
      exponent, mantissa: their bits.
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
    """fp32, tf32, bf16, fp16, both fp8 formats, and fp4.

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
    """The rows of a table of the formats, with the head first."""
    head = ("format", "bits", "exponent", "mantissa", "largest", "smallest normal", "subnormal", "epsilon", "pi")
    return [head, *(_shown(f) for f in formats())]


def _shown(f: Format) -> tuple[str, ...]:
    numbers = (f.largest, f.smallest_normal, f.smallest_subnormal, f.epsilon)
    return (f.name, str(f.bits), str(f.exponent), str(f.mantissa), *(f"{x:.5g}" for x in numbers), f"{f.pi:.7g}")
