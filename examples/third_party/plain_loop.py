"""A training loop in float32, as the documentation of optax writes it."""

import jax
import optax


def train(model, tx, batches, policy=None):
    """Trains a model of models.py; returns its params, state and optimizer state."""
    params, state, opt_state = model.params, model.state, tx.init(model.params)

    @jax.jit
    def step(params, state, opt_state, batch):
        (loss, state), grads = jax.value_and_grad(model.loss, has_aux=True)(params, state, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, loss

    for batch in batches:
        params, state, opt_state, _ = step(params, state, opt_state, batch)
    return params, state, opt_state
