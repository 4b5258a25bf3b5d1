"""Checks decide no number: without them every program is the same, to the letter."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp._src.step import argument_kinds, checks, compute_dtypes, microbatches, scale_reads, state, value_and_grad

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
PARAMS = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}, "norm": {"scale": jnp.ones(2)}}
POLICIES = {
    "fp32": jaxmp.get_policy("fp32"),
    "bf16": jaxmp.get_policy("bf16"),
    "fp16": jaxmp.get_policy("fp16", keep_fp32="norm/*"),
    "16-mixed": jaxmp.get_policy("16-mixed"),
    "bf16-mixed": jaxmp.get_policy("bf16-mixed", keep_fp32=("bias",)),
}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "clipped lion": lambda: optax.chain(jaxmp.clip_by_global_norm(1.0), optax.lion(1e-3)),
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 8), momentum=0.9),
    "averaged": lambda: optax.chain(optax.sgd(0.1), jaxmp.ema_params(0.9)),
    "fused": lambda: jaxmp.fused_adamw(1e-2),
    "every second": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}
CASES = [
    ("fp32", "adamw", 1), ("bf16", "clipped lion", 2), ("fp16", "schedule", 1), ("16-mixed", "averaged", 2),
    ("bf16-mixed", "fused", 1), ("fp16", "every second", 2), ("fp16", "fused", 1), ("bf16-mixed", "adamw", 2),
]  # fmt: skip


def loss_fn(params, x):
    h = x @ params["dense"]["kernel"] + params["dense"]["bias"][None]
    return jnp.mean((h.astype(jnp.float32) * params["norm"]["scale"].astype(jnp.float32)[None]) ** 2)


CHECKS = {
    argument_kinds: ("check",),
    checks: ("check_rule", "check_init", "check_step"),
    compute_dtypes: ("warn_of_wide",),
    microbatches: ("check_batch",),
    scale_reads: ("note_read", "note_scaled", "note_update", "check_scaled", "check_not_scaled", "check_not_changed"),
    state: ("check_is_state",),
    value_and_grad: ("check_call", "check_params"),
}


@pytest.fixture
def turn_off(monkeypatch):
    """Takes all checks out."""

    def replace():
        for module, names in CHECKS.items():
            for name in names:
                assert callable(getattr(module, name))
                monkeypatch.setattr(module, name, lambda *args, **kwargs: None)

    return replace


def text_of(function, *args):
    """The text of a jaxpr, without equations that nothing reads: jax's caches may leave them out."""
    return re.sub(r"0x[0-9a-f]+|\n +_:\S+ = .*", "", str(jax.make_jaxpr(function)(*args)))


def program(policy, inner, accumulate):
    """Two steps: one by `apply_gradients`, one by `update`."""
    tx = jaxmp.mixed_precision(inner, policy, skip_if=lambda grads, metrics: metrics["loss_scale"] < 0.5)

    def steps(params, state):
        for adds in (False, True):
            gradients = jaxmp.value_and_grad(loss_fn, policy=policy, accumulate=accumulate)
            loss, grads = gradients(params, X, opt_state=state)
            if adds:
                updates, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
            else:
                params, state = jaxmp.apply_gradients(tx, grads, state, params)
        return params, state, loss

    return text_of(steps, policy.cast_to_param(PARAMS), tx.init(PARAMS))


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("policy", "inner", "accumulate"), CASES)
def test_a_step_has_the_same_program_without_checks(policy, inner, accumulate, turn_off):
    policy, inner = POLICIES[policy], OPTIMIZERS[inner]()
    checked = program(policy, inner, accumulate)
    turn_off()
    assert program(policy, inner, accumulate) == checked


def test_a_shared_scale_has_the_same_program_without_checks(turn_off):
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=1.0)
    params = jaxmp.get_policy("fp16").cast_to_param(PARAMS)

    def text():
        shared = jaxmp.shared_loss_scale()

        def step(params, state, scale_state):
            _, grads = jaxmp.value_and_grad(loss_fn, policy="fp16")(params, X, opt_state=scale_state)
            params, state, scale_state = shared.apply_gradients(tx, grads, state, params, scale_state)
            return params, state, shared.update(scale_state)

        return text_of(step, params, tx.init(PARAMS), shared.init())

    checked = text()
    turn_off()
    assert text() == checked
