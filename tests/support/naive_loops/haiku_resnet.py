"""haiku's ResNet, with batch statistics, in a plain optax loop."""

import haiku as hk
import jax
import numpy as np
import optax


def forward(x):
    channels, ones = (8, 8, 16, 16), (1, 1, 1, 1)
    net = hk.nets.ResNet(
        ones, 10, bottleneck=False, channels_per_group=channels, use_projection=(True, True, True, True)
    )
    return net(x, is_training=True)


def loss_fn(params, state, x, y):
    logits, state = net.apply(params, state, None, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), state


def train_step(params, state, opt_state, x, y):
    (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, state, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), state, opt_state, loss


net = hk.transform_with_state(forward)
x, y = np.random.default_rng(0).normal(size=(4, 32, 32, 3)).astype(np.float32), np.arange(4)
params, state = jax.jit(net.init)(jax.random.key(0), x)
tx = optax.sgd(0.1, momentum=0.9)
step, carry, batch = train_step, (params, state, tx.init(params)), (x, y)
