"""The recipes of jaxmp with Adam, for `jaxmp.memory.overview`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jaxmp._src.fp8 import linen_layers
from jaxmp._src.step import transform
from jaxmp._src.step.policy import Policy, get_policy
from jaxmp._src.step.transform import unscale_and_skip
from jaxmp._src.transforms import fused, masterless


def recipes(num_params: float) -> dict[str, tuple[PyTree, Policy, Any]]:
    """(params, policy, optimizer) of each recipe, for a matrix of about `num_params` values."""
    rows = max(1, round(num_params / 1024))
    plain = {"kernel": jax.ShapeDtypeStruct((rows, 1024), jnp.float32)}
    with linen_layers.autocast(filter=lambda path, layer: True):
        layer = nn.Dense(1024, use_bias=False)
        x = jax.ShapeDtypeStruct((16, rows), jnp.float32)
        scaled = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
    adam, bf16 = optax.adam(1e-3), get_policy("bf16")
    made: dict[str, tuple[PyTree, Policy, Any]] = {}
    for name in ("fp32", "fp16", "bf16"):
        made[name] = plain, get_policy(name), transform.mixed_precision(adam, name)
    small = fused.fused_adamw(1e-3, state_dtype=jnp.int8)
    made["bf16, remainder_bits=16"] = plain, bf16, transform.mixed_precision(adam, bf16, remainder_bits=16)
    made["bf16, 8-bit"] = plain, bf16, transform.mixed_precision(small, bf16, remainder_bits=8)
    alone = optax.chain(masterless.float32_moments(adam), masterless.stochastic_round_updates(seed=0))
    made["bf16, no masters"] = plain, bf16, unscale_and_skip(alone)
    for name, policy in (("fp8", get_policy("fp8")), ("fp8 weights", get_policy("fp8", fp8_weights=True))):
        made[name] = scaled, policy, transform.mixed_precision(adam, policy)
    return made
