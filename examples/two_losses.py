#!/usr/bin/env python
"""Two losses on one trunk, two optimizers, one loss scale: torch.amp's rule.

    python examples/two_losses.py

A trunk feeds two heads. Head A (with the trunk) learns a regression with AdamW, head B a classification with SGD. Both
losses have the same scale. At step 60 head B overflows: its optimizer skips, the other one does not, and the shared
scale falls once, because one of them overflowed. At step 120 both overflow: both skip, and the scale falls once.

Expected, on any machine, in a few seconds:

    step  60: skipped by B       loss scale 65536 -> 32768
    step 120: skipped by A and B loss scale 32768 -> 16384
    regression loss 0.80 -> 0.01, classification loss 0.77 -> 0.02
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import tyro

import jaxmp


@dataclasses.dataclass(frozen=True)
class Config:
    """What is trained."""

    policy: str = "fp16"
    steps: int = 200
    width: int = 64
    overflow_b: int = 60  # step at which head B overflows
    overflow_both: int = 120  # step at which the trunk's features overflow, and so both heads
    seed: int = 0


class TwoHeads(nn.Module):
    """A trunk with a regression head and a classification head."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:  # [N, 8] -> f32 [N], f32 [N]
        x = nn.relu(nn.Dense(self.width, name="trunk")(x))
        a = nn.Dense(1, name="head_a")(x)
        b = nn.Dense(1, name="head_b")(x)
        return a[:, 0], b[:, 0]


def main(cfg: Config) -> dict[str, list[Any]]:
    """Trains, prints the skipped steps, and returns the history."""
    policy = jaxmp.get_policy(cfg.policy)
    model = TwoHeads(cfg.width)
    x = jax.random.normal(jax.random.key(cfg.seed), (256, 8))
    target, label = jnp.sin(x[:, 0] + x[:, 1]) + 0.7, (x[:, 2] * x[:, 3] > 0).astype(jnp.float32)
    params32 = model.init(jax.random.key(cfg.seed + 1), x)["params"]

    # Each optimizer has its own params. Both run under the shared scale, so they have none of their own (1.0).
    is_b = {"head_b"}
    params32_a = {name: leaf for name, leaf in params32.items() if name not in is_b}  # the trunk and head A
    params32_b = {name: leaf for name, leaf in params32.items() if name in is_b}
    tx_a = jaxmp.mixed_precision(optax.adamw(1e-2), policy, loss_scale=1.0)
    tx_b = jaxmp.mixed_precision(optax.sgd(0.2, momentum=0.9), policy, loss_scale=1.0)
    shared = jaxmp.shared_loss_scale(jaxmp.DynamicLossScale(2.0**16, hysteresis=1))

    def loss_a(a: Any, b: Any, disturbance: jax.Array) -> jax.Array:
        prediction, _ = model.apply({"params": a | b}, x)
        return jnp.mean((prediction - target) ** 2) * disturbance

    def loss_b(a: Any, b: Any, disturbance: jax.Array) -> jax.Array:
        _, logits = model.apply({"params": a | b}, x)
        return optax.sigmoid_binary_cross_entropy(logits, label).mean() * disturbance

    @jax.jit
    def step(a: Any, b: Any, state_a: Any, state_b: Any, scale: Any, disturb_a: jax.Array, disturb_b: jax.Array) -> Any:
        # A's optimizer updates the trunk and head A with the sum of both losses; B's updates head B with its own loss.
        grad_a = jaxmp.value_and_grad(loss_a, argnums=(0, 1), policy=policy)
        grad_b = jaxmp.value_and_grad(loss_b, argnums=(0, 1), policy=policy)
        value_a, (grads_a, _) = grad_a(a, b, disturb_a, opt_state=scale)
        value_b, (trunk_grads, grads_b) = grad_b(a, b, disturb_b, opt_state=scale)
        # Head B's gradient of the trunk counts only if it is finite. Otherwise B's overflow would also skip A.
        usable = jaxmp.all_finite(trunk_grads)
        grads_a = jax.tree.map(lambda g, h: g.astype(jnp.float32) + jnp.where(usable, h, 0), grads_a, trunk_grads)
        a, state_a, scale = shared.apply_gradients(tx_a, grads_a, state_a, a, scale)
        b, state_b, scale = shared.apply_gradients(tx_b, grads_b, state_b, b, scale)
        scale = shared.update(scale)  # once per step, if any flag was set
        skipped = jaxmp.get_metrics(state_a)["skipped"], jaxmp.get_metrics(state_b)["skipped"]
        return (a, b, state_a, state_b, scale), (value_a, value_b, *skipped)

    carry = (
        policy.cast_to_param(params32_a),
        policy.cast_to_param(params32_b),
        tx_a.init(params32_a),
        tx_b.init(params32_b),
        shared.init(),
    )
    one, inf = jnp.ones(()), jnp.full((), jnp.inf)
    history: dict[str, list[Any]] = {"loss_a": [], "loss_b": [], "skipped_a": [], "skipped_b": [], "loss_scale": []}
    for i in range(cfg.steps):
        before = float(jaxmp.get_loss_scale(carry[-1]))
        disturb_a = inf if i == cfg.overflow_both else one
        disturb_b = inf if i in (cfg.overflow_b, cfg.overflow_both) else one
        carry, (value_a, value_b, skipped_a, skipped_b) = step(*carry, disturb_a, disturb_b)
        after = float(jaxmp.get_loss_scale(carry[-1]))
        values = (float(value_a), float(value_b), bool(skipped_a), bool(skipped_b), after)
        for name, value in zip(history, values, strict=True):
            history[name].append(value)
        if skipped_a or skipped_b:
            who = " and ".join(name for name, skipped in (("A", skipped_a), ("B", skipped_b)) if skipped)
            print(f"step {i:3d}: skipped by {who:7s} loss scale {before:.0f} -> {after:.0f}")
    print(
        f"regression loss {history['loss_a'][0]:.3f} -> {history['loss_a'][-1]:.3f}, "
        f"classification loss {history['loss_b'][0]:.3f} -> {history['loss_b'][-1]:.3f}"
    )
    return history


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
