"""What `h100.py` measures jaxmp against: the same work by hand, in flax and in optax (`recipes.py`)."""

from collections.abc import Iterator

import jax.numpy as jnp
import optax

from benchmarks.programs.h100 import GPT2, LLAMA, MANY, Program
from benchmarks.programs.recipes import LEARNING_RATE, MAX_NORM, branched, by_hand, flax_dynamic_scale, plain, selected


def baseline_programs() -> Iterator[Program]:
    """The same work without jaxmp."""
    adamw = optax.adamw(LEARNING_RATE)
    clipped = optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw)
    for how, taken_if in (("select", selected), ("branch", branched)):
        init, step = by_hand(taken_if)
        one = Program(f"by hand, {how}: fp16 params, fp32 masters, clip, adamw", "1 device", step, init)
        for tree in (GPT2, MANY, LLAMA):
            yield one._replace(tree=tree)
    for name, tx in (("adamw", adamw), ("clip + adamw", clipped)):
        init, step = flax_dynamic_scale(tx)
        yield Program(f"flax DynamicScale, f32 params, {name}", "1 device", step, init, params_dtype=jnp.float32)
    for name, tx in (("adamw", adamw), ("clip + adamw", clipped)):
        init, step = plain(tx)
        yield Program(f"optax.{name}, f32, no scaling", "1 device", step, init, params_dtype=jnp.float32)
