"""equinox's MLP in a plain optax loop."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax


def loss_fn(params, x, y):
    model = eqx.combine(params, static)
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return eqx.apply_updates(params, updates), opt_state, loss


params, static = eqx.partition(eqx.nn.MLP(8, 4, 32, 2, key=jax.random.key(0)), eqx.is_inexact_array)
x, y = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32), np.ones((16, 4), np.float32)
tx = optax.adam(1e-3)
step, carry, batch = train_step, (params, tx.init(params)), (x, y)
