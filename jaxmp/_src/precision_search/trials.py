"""The runs of `suggest_policy`: steps that measure, and gradients with some matmuls rounded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from jaxmp._src.precision_search import fake_quantize, format_noise
from jaxmp._src.precision_search.fake_quantize import Roundings
from jaxmp._src.precision_search.format_noise import TENSORS
from jaxmp._src.precision_search.subject import Subject
from jaxmp._src.precision_search.suggestion import Mix
from jaxmp._src.step.policy import get_policy


def measure(subject: Subject, optimizer: Any, steps: int) -> tuple[np.ndarray, float, PyTree]:
    """Trains in float32, twice from the same start: float16's loss scale is known only after the first time.

    Returns the measured sums [matmul, tensor, n], zeros for the gradients of data; the highest loss scale; the params
    after the steps. A loss that is not finite is a ValueError.
    """

    @jax.jit
    def step(params: PyTree, opt_state: Any, batch: Any, loss_scale: Any) -> Any:
        def loss_fn(params: PyTree, probes: Array) -> Array:
            def watch(i: int, run: Any, operands: list[Any]) -> Array:
                return format_noise.watched_matmul(run, operands, subject.gemms[i].weight, probes[i], loss_scale)

            return subject.hooked(watch)(params, batch)

        probes = jnp.zeros((len(subject.gemms), len(TENSORS), format_noise.SIZE))
        loss, (grads, found) = jax.value_and_grad(loss_fn, argnums=(0, 1))(params, probes)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, found

    def run(loss_scale: float) -> tuple[np.ndarray, PyTree]:
        params, opt_state = subject.params, optimizer.init(subject.params)
        total = np.zeros((len(subject.gemms), len(TENSORS), format_noise.SIZE))
        for i in range(steps):
            params, opt_state, loss, found = step(params, opt_state, subject.batch, jnp.float32(loss_scale))
            total += np.asarray(found, np.float64)
            if not np.isfinite(loss):
                raise ValueError(
                    f"suggest_policy: the loss in float32 is {loss} in step {i + 1} of {steps}; a model that fails in "
                    f"float32 fails in lower precision. Pass another optimizer=, or check the batch."
                )
        total[[gemm.is_data for gemm in subject.gemms], TENSORS.index("dx")] = 0
        return total, params

    gradients = [TENSORS.index(name) for name in format_noise.BACKWARD]
    histogram = format_noise.exponents(run(1.0)[0])[:, gradients].sum(axis=(0, 1))
    highest = float(np.clip(format_noise.highest_loss_scale(histogram), 1.0, 2.0**32))
    total, params = run(highest)
    return total, highest, params


class Trial:
    """Gradients of the model at `params` with its matmuls rounded, compared with float32; compiled once.

    A gradient in float32 that is zero or not finite is a ValueError.
    """

    def __init__(self, subject: Subject, params: PyTree):
        def loss_fn(params: PyTree, batch: Any, by: Roundings) -> Array:
            def change(i: int, run: Any, operands: list[Any]) -> Array:
                return fake_quantize.quantized_matmul(run, operands, jax.tree.map(lambda x: x[i], by))

            return subject.hooked(change)(params, batch)

        self._gradient = jax.jit(jax.value_and_grad(loss_fn))
        self._compare = jax.jit(_compare)
        self._given = params, subject.batch
        exact = fake_quantize.stacked([fake_quantize.roundings("fp32")] * len(subject.gemms))
        with get_policy("fp32").default_matmul_precision():
            self._loss, self._grads = self._gradient(*self._given, exact)
        largest = max((float(jnp.max(jnp.abs(g), initial=0)) for g in jax.tree.leaves(self._grads)), default=0.0)
        if not 0 < largest < np.inf:
            raise ValueError(f"suggest_policy: the largest gradient in float32 is {largest}: nothing can be compared")

    def run(self, by: list[Roundings]) -> Mix:
        """The gradient with these roundings, one for each matmul."""
        with get_policy("fp32").default_matmul_precision():  # a part of the key of what is compiled
            loss, grads = self._gradient(*self._given, fake_quantize.stacked(by))
        noise, cosine = self._compare(grads, self._grads)
        return Mix(format_noise.decibel(float(noise)), float(cosine), float(loss), float(self._loss))


def _compare(grads: PyTree, reference: PyTree) -> tuple[Array, Array]:
    """Noise to signal and the cosine of the angle between two trees, as one vector each."""
    pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(reference), strict=True))
    # The unit, because squares of tiny gradients would be zero.
    unit = jnp.max(jnp.stack([jnp.max(jnp.abs(r), initial=0) for _, r in pairs]))
    signal, noise, own, product = (
        sum((jnp.sum(f(g / unit, r / unit)) for g, r in pairs), jnp.float32(0))
        for f in (lambda g, r: r * r, lambda g, r: (g - r) ** 2, lambda g, r: g * g, lambda g, r: g * r)
    )
    return noise / signal, product / jnp.sqrt(own * signal)
