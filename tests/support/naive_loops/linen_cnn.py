"""A CNN in flax.linen as its documentation writes it: no dtype anywhere."""

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (8, 16):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(16)(x))
        return nn.Dense(10)(x)


def loss_fn(params, x, y):
    logits = model.apply({"params": params}, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def train_step(state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, x, y)
    return state.apply_gradients(grads=grads), loss


model = CNN()
x, y = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype(np.float32), np.arange(4)
params = jax.jit(model.init)(jax.random.key(0), x)["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
step, carry, batch = train_step, (state,), (x, y)
