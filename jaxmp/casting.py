"""Casts and roundings that survive XLA, for models and optimizers of your own.

A cast to a narrow dtype and back rounds a value, for example to float16. Inside one program, XLA for GPUs deletes such
a pair of casts (`xla_allow_excess_precision`), and so the rounding: `f32(f16(x)) - x` becomes 0. `round_to` and
`stochastic_round` round by arithmetic that XLA may not remove.

To cast state, use `saturating_cast`: a float32 master of 70000 becomes 65504 in float16, not inf.
"""

from jaxmp._src.numerics.casting import (
    round_to as round_to,
    saturating_cast as saturating_cast,
    stochastic_round as stochastic_round,
)
