"""Casts: the roundings of mixed precision, made so that they really happen.

A cast to a narrow dtype and back is how one asks "what would this value be in float16?". XLA for GPUs deletes such a
pair inside one program (`xla_allow_excess_precision`), and with it the answer: `f32(f16(master)) - f32(p)` becomes
`master - p`. `round_to` rounds by arithmetic that no simplifier may remove.

With q(x) = 2^(max(e(x), e_min) - m), the spacing of a dtype's grid round x (e(x): exponent of x, e_min: smallest
normal exponent, m: bits of mantissa),

    round_to(x) = q(x) * nearest_even(x / q(x))

All three steps are exact in float32: q is a power of two made from the bits of x. Subnormals of the narrow dtype come
out right because the spacing stops shrinking at e_min (`lax.reduce_precision` flushes those of float16 to zero).

Casts of *state* saturate: a float32 master of 70000 becomes 65504 in float16, never inf.
"""

from jaxmp._src.numerics.casting import (
    cast_float as cast_float,
    cast_floats as cast_floats,
    computed_once as computed_once,
    is_float as is_float,
    is_low_precision as is_low_precision,
    round_to as round_to,
    round_to_grid as round_to_grid,
    saturating_cast as saturating_cast,
    stochastic_round as stochastic_round,
    strongly_typed as strongly_typed,
)
from jaxmp._src.numerics.float_bits import (
    inverse_of_power_of_two as inverse_of_power_of_two,
    power_of_two_below as power_of_two_below,
    reciprocal as reciprocal,
)
