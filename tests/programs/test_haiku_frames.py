"""Autocast inside of `hk.transform`: params are made outside, keys come from a sequence of their own, state is refused.

Haiku is no dependency: a frame that keeps its public rules stands for it, and haiku itself where it is installed.
"""

import contextlib
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


class Frame(types.ModuleType):
    """What functions inside of `hk.transform` see; a key that was made in a trace must not outlive it."""

    def __init__(self, params: Any = None, key: Any = None):
        super().__init__("haiku")
        self.params, self.state, self.keys = params, {"norm": {"mean": jnp.zeros(4)}}, [key]
        self.is_inside = True

    def running_init(self) -> bool:
        if not self.is_inside:
            raise ValueError("running_init must be used as part of an `hk.transform`")
        return self.params is None

    def maybe_next_rng_key(self) -> Any:
        if self.keys[-1] is None:
            return None
        self.keys[-1], found = jax.random.split(self.keys[-1])
        return found

    @contextlib.contextmanager
    def with_rng(self, key: Any) -> Any:
        self.keys.append(key)
        yield
        self.keys.pop()

    def get_current_state(self) -> Any:
        return jax.tree.map(lambda x: x, self.state)

    def get_parameter(self, shape: tuple[int, ...]) -> Any:
        if self.params is None:
            self.made = jnp.ones(shape) * 0.1
            return self.made
        return self.params


def model(frame: Frame, x: Any) -> Any:
    y = x @ frame.get_parameter((8, 4))
    for _ in range(2):
        key = frame.maybe_next_rng_key()
        y = y if key is None else jnp.where(jax.random.bernoulli(key, 0.5, y.shape), y, 0.0)
    return y


def test_params_are_made_outside_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = Frame()
    monkeypatch.setitem(sys.modules, "haiku", frame)
    out = jaxmp.autocast(model, jnp.bfloat16)(frame, X)
    assert out.dtype == jnp.float32 and not isinstance(frame.made, jax.core.Tracer)


def test_params_and_keys_of_the_frame_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(params: Any, key: Any) -> Any:
        frame = Frame(params, key)
        monkeypatch.setitem(sys.modules, "haiku", frame)
        first = jaxmp.autocast(model, jnp.bfloat16)(frame, X)
        second = jaxmp.autocast(model, jnp.bfloat16)(frame, X)
        return first, second, jax.random.uniform(frame.maybe_next_rng_key())  # no value of a trace is left

    first, second, number = jax.jit(apply)(jnp.full((8, 4), 0.1), jax.random.key(0))
    assert first.dtype == jnp.bfloat16
    assert (first != second).any() and 0 <= number < 1


def test_a_change_of_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = Frame(jnp.full((8, 4), 0.1))
    monkeypatch.setitem(sys.modules, "haiku", frame)

    def with_state(x: Any) -> Any:
        y = model(frame, x)
        frame.state = {"norm": {"mean": y.mean(0)}}
        return y

    with pytest.raises(ValueError, match=r"autocast in hk.transform .* got norm/mean changed. Call autocast.f"):
        jaxmp.autocast(with_state, jnp.bfloat16)(X)
    frame.is_inside = False
    assert jaxmp.autocast(model, jnp.bfloat16)(frame, X).dtype == jnp.bfloat16
    assert jaxmp.autocast(with_state, jnp.float32)(X).dtype == jnp.float32  # off: nothing is traced


@pytest.mark.thorough(0)
def test_haiku_itself() -> None:
    hk = pytest.importorskip("haiku", reason="dm-haiku is not installed")

    class Net(hk.Module):
        @jaxmp.autocast(dtype=jnp.bfloat16)
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = hk.dropout(hk.next_rng_key(), 0.5, jax.nn.relu(hk.Linear(8)(x)))
            return x

    transformed = hk.transform(lambda x: hk.Linear(3)(Net()(Net()(x))))
    params = transformed.init(jax.random.key(0), X)
    grads = jax.jit(jax.grad(lambda p: transformed.apply(p, jax.random.key(1), X).sum()))(params)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)
    with pytest.raises(ValueError, match="must not change state; got batch_norm"):
        stateful = hk.transform_with_state(jaxmp.autocast(lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=True)))
        stateful.apply(*stateful.init(jax.random.key(0), X), None, X)
