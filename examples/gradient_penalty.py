#!/usr/bin/env python
"""A gradient penalty in fp16: torch.amp's example of a scaled gradient inside a scaled loss.

    python examples/gradient_penalty.py

The critic of a WGAN-GP is trained on two clouds of points. Its loss contains a gradient: the gradient of the critic D
with respect to its input, which should have norm 1:

    loss = mean D(fake) - mean D(real) + penalty * mean (|dD/dx| - 1)^2

In fp16 both gradients need a scale. The inner one is the gradient of `scaler.scale(D)`, divided by the scale in float32
*before* the penalty is computed. The penalty is not linear in this gradient, so the scale could not be removed
afterwards. If the inner gradient overflows, the loss and every gradient of the step overflow too, and the step is
skipped.

The clouds are Gaussians, one shifted by `--distance`. This is their Wasserstein distance, and a critic of slope 1 finds
it as mean D(real) - mean D(fake). (With a penalty the slope can be a little larger.) Expected, in about ten seconds:

     step   fp32 loss   fp16 loss   loss scale
        0      6.2478         nan        65536   skipped
       50     -1.9529     -1.8150         4096
      100     -2.8106     -2.7673         4096
      ...
      399     -3.0691     -3.0687         4096
    distance 3: the critic finds 3.443 in fp32 and 3.442 in fp16, which skipped 4 steps
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxmp


@dataclasses.dataclass(frozen=True)
class Config:
    """What is trained."""

    steps: int = 400
    batch_size: int = 256
    width: int = 64
    distance: float = 3.0  # between the clouds
    penalty: float = 10.0
    learning_rate: float = 2e-3
    init_scale: float = 2.0**16  # too high for gradients near 1, on purpose: the first steps lower it
    log_every: int = 50
    seed: int = 0


def init(cfg: Config) -> dict[str, jax.Array]:
    """The critic's params, float32."""
    shapes = {"in": (2, cfg.width), "hidden": (cfg.width, cfg.width), "out": (cfg.width, 1)}
    keys = jax.random.split(jax.random.key(cfg.seed), len(shapes))
    return {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def critic(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:  # [2] -> f32 []
    h = jnp.tanh(x.astype(params["in"].dtype) @ params["in"])
    h = jax.nn.softplus(h @ params["hidden"])
    return (h @ params["out"])[0].astype(jnp.float32)


def loss_fn(params: Any, scaler: jaxmp.GradScaler, real: jax.Array, fake: jax.Array, between: jax.Array, weight: float):
    """(loss to minimize, distance between the clouds that the critic finds)."""
    scores = jax.vmap(critic, in_axes=(None, 0))
    distance = jnp.mean(scores(params, real)) - jnp.mean(scores(params, fake))
    # In the dtype of the params, so that the scaled gradients are 16-bit.
    points = between.astype(params["in"].dtype)
    scaled = jax.vmap(jax.grad(lambda x: scaler.scale(critic(params, x))))(points)  # [N, 2]
    slopes = scaled.astype(jnp.float32) / scaler.get_scale()
    norms = jnp.sqrt(jnp.sum(slopes**2, axis=-1) + 1e-12)  # the root of 0 has no gradient
    return weight * jnp.mean((norms - 1.0) ** 2) - distance, distance


def train(cfg: Config, name: str) -> dict[str, list[float]]:
    """Trains one critic under the policy `name`; returns one list per measurement, with one entry per step."""
    policy = jaxmp.get_policy(name)
    tx = jaxmp.keep_master_params(optax.adam(cfg.learning_rate), policy)  # masters if params have 16 bits
    params32 = init(cfg)
    scaler = jaxmp.GradScaler(cfg.init_scale, enabled=policy.uses_float16)

    @jax.jit
    def step(params: Any, opt_state: Any, scaler: jaxmp.GradScaler, key: jax.Array) -> Any:
        a, b, c = jax.random.split(key, 3)
        real, fake = (jax.random.normal(k, (cfg.batch_size, 2)) for k in (a, b))
        real = real + jnp.array([[cfg.distance, 0.0]])
        between = fake + jax.random.uniform(c, (cfg.batch_size, 1)) * (real - fake)

        def scaled_loss(params: Any) -> Any:
            loss, distance = loss_fn(params, scaler, real, fake, between, cfg.penalty)
            return scaler.scale(loss), (loss, distance)

        grads, (loss, distance) = jax.grad(scaled_loss, has_aux=True)(params)
        params, opt_state, scaler = scaler.step(tx, grads, opt_state, params)
        skipped = scaler.found_inf()
        return params, opt_state, scaler.update(), (loss, distance, skipped)

    state = (policy.cast_to_param(params32), tx.init(params32), scaler)
    history: dict[str, list[Any]] = {"loss": [], "distance": [], "skipped": [], "scale": []}
    for key in jax.random.split(jax.random.key(cfg.seed + 1), cfg.steps):
        scale = state[2].get_scale()
        *state, measured = step(*state, key)
        for column, value in zip(history.values(), (*measured, scale), strict=True):
            column.append(value)
    return {name: [float(x) for x in column] for name, column in history.items()}


def main(cfg: Config) -> dict[str, dict[str, list[float]]]:
    """Trains both, prints a table, and returns the measurements."""
    runs = {name: train(cfg, name) for name in ("fp32", "fp16")}
    fp32, fp16 = runs["fp32"], runs["fp16"]
    print(" step   fp32 loss   fp16 loss   loss scale")
    for i in sorted({*range(0, cfg.steps, cfg.log_every), cfg.steps - 1}):
        note = "   skipped" if fp16["skipped"][i] else ""
        print(f"{i:5d} {fp32['loss'][i]:11.4f} {fp16['loss'][i]:11.4f} {fp16['scale'][i]:12.0f}{note}")
    recent = slice(-20, None)  # one batch is noisy
    found = {name: sum(run["distance"][recent]) / len(run["distance"][recent]) for name, run in runs.items()}
    print(
        f"distance {cfg.distance:g}: the critic finds {found['fp32']:.3f} in fp32 and {found['fp16']:.3f} in fp16, "
        f"which skipped {sum(fp16['skipped']):.0f} steps"
    )
    return runs


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
