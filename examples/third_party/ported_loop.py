"""The loop of plain_loop.py in the precision of a policy."""

import jax
import optax

import jaxmp


def train(model, tx, batches, policy=None):
    """Trains a model of models.py; returns its params, state and optimizer state."""
    tx = jaxmp.mixed_precision(tx, policy)
    params, state, opt_state = model.params, model.state, tx.init(model.params)

    @jax.jit
    def step(params, state, opt_state, batch):
        grad_fn = jaxmp.value_and_grad(model.loss, has_aux=True, policy=policy)
        (loss, state), grads = grad_fn(params, state, batch, opt_state=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, loss

    for batch in batches:
        params, state, opt_state, _ = step(params, state, opt_state, batch)
    return params, state, opt_state
