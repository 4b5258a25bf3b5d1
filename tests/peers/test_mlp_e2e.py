"""A small MLP trained for 200 steps, against the same run of Megatron-LM's optimizer and of torch.amp.

Forced overflows show the rule of the scale; the runs that start from a large scale overflow by themselves, where our
own float16 gradients leave its range: every such step must be one of theirs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_close, assert_exact, assert_moved
from oracle_data import load, load_arrays, name_of

ORACLE = load("mlp_e2e")
ARRAYS = load_arrays("mlp_e2e")
PARAMS = {name: ARRAYS[f"init_{name}"] for name in ("w1", "b1", "g", "w2", "b2")}
STEPS = 200


def megatron_run(case: dict) -> dict:
    """The arguments of `train` for a case of the oracle."""
    assert case["lr"] == 3e-3
    scaled = case["dtype"] == "torch.float16"
    return {
        "policy": jaxmp.get_policy("fp16" if scaled else "bf16", keep_fp32=("g",) * case["ln_gain_fp32"]),
        "preset": "megatron" if scaled else None,
        "rule": {name: case[name] for name in ("initial_scale", "growth_interval", "hysteresis")},
        "max_norm": case["clip_grad"],
        "accumulate": case["microbatches"],
    }


def torch_run(case: dict) -> dict:
    dtype = case["dtype"].removeprefix("torch.")
    return {
        "policy": jaxmp.get_policy(f"params=float32,compute={dtype},output=float32"),
        "preset": "torch" if dtype == "float16" else None,
        "rule": {"initial_scale": case["init_scale"], "growth_interval": case["growth_interval"]},
        "max_norm": 1.0,
        "accumulate": 1,
    }


def forced_values(case: dict) -> np.ndarray:
    """float32[STEPS], what is written into the gradient of w1 where it is not 0; bfloat16 runs are left alone."""
    values = np.zeros(STEPS, np.float32)
    if case["dtype"] == "torch.float16":
        for step, value in ORACLE["forced"]:
            values[step] = value
    return values


@functools.partial(jax.jit, static_argnames=("policy", "preset", "accumulate"))  # runs with other numbers share it
def train(forced, *, policy, preset, rule, max_norm, accumulate) -> tuple:
    """(losses, scales used, metrics after each step, final params, final masters)."""
    inner = optax.adamw(3e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.01, mask=jaxmp.weight_decay_mask)
    inner = optax.chain(jaxmp.clip_by_global_norm(max_norm), jaxmp.count_zeros(), inner)
    loss_scale = jaxmp.DynamicLossScale.preset(preset, **rule) if preset else None
    tx = jaxmp.mixed_precision(inner, policy, loss_scale=loss_scale)
    xs, ys = jnp.asarray(ARRAYS["X"]), jnp.asarray(ARRAYS["Y"])

    def loss_fn(params, x, y):
        x, w1, w2 = policy.cast_to_compute((x, params["w1"], params["w2"]))
        h = (x @ w1 + params["b1"][None]).astype(jnp.float32)  # biases are 16-bit, or under autocast float32
        h = jax.nn.gelu(h, approximate=True) * params["g"].astype(jnp.float32)[None]
        out = h.astype(policy.compute_dtype) @ w2 + params["b2"][None]
        return jnp.mean((out.astype(jnp.float32) - y) ** 2)

    value_and_grad = jaxmp.value_and_grad(loss_fn, accumulate=accumulate, accumulate_argnums=(1, 2))

    def step(carry, batch):
        params, opt_state = carry
        i, forced = batch
        loss, grads = value_and_grad(params, xs[i], ys[i], opt_state=opt_state)
        g = grads["w1"]
        grads["w1"] = g.at[0, 0].set(jnp.where(forced == 0, g[0, 0], forced.astype(g.dtype)))
        used = jaxmp.get_loss_scale(opt_state)
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return (params, opt_state), (loss, used, jaxmp.get_metrics(opt_state))

    carry = (policy.cast_to_param(PARAMS), tx.init(PARAMS))
    (params, opt_state), out = jax.lax.scan(step, carry, (jnp.arange(STEPS) % len(xs), forced))
    return *out, params, jaxmp.get_master_params(opt_state, params)


@functools.cache
def trained(system: str, name: str):
    (case,) = [case for case in ORACLE[system] if case["name"] == name]
    arguments = megatron_run(case) if system == "megatron" else torch_run(case)
    return train(forced_values(case), **arguments)


def column(case: dict, i: int, dtype=np.float32) -> np.ndarray:
    return np.array([0 if row[i] is None else row[i] for row in case["trace"]]).astype(dtype)


def tolerance(case: dict) -> float:
    return 5e-3 if case["dtype"] == "torch.bfloat16" else 1e-3


def assert_ends_there(case: dict, params: dict, masters: dict, in_float32: tuple[str, ...]) -> None:
    """Masters as theirs in the end; `in_float32` names the params in float32."""
    for name in PARAMS:
        master = ARRAYS.get(f"{case['name']}_final_main_{name}", ARRAYS[f"{case['name']}_final_{name}"])
        assert_close(masters[name], master, atol=2e-2 if case["dtype"] == "torch.bfloat16" else 1e-3)
        assert params[name].dtype.name == ("float32" if name in in_float32 else case["dtype"].removeprefix("torch."))


@pytest.mark.thorough(0)
@pytest.mark.parametrize("case", ORACLE["megatron"], ids=name_of)
def test_megatron(case):
    """Skips and scales are exact at every step, also where the overflow is float16's own."""
    loss, used, metrics, params, masters = trained("megatron", case["name"])
    assert_exact(used, column(case, 1))
    assert_exact(metrics["skipped"], ~column(case, 2, bool))
    assert_exact(metrics["loss_scale"], column(case, 5))
    assert_close(loss, column(case, 0), atol=tolerance(case))
    taken = column(case, 2, bool)
    assert_close(metrics["grad_norm"][taken], column(case, 3)[taken], rtol=5 * tolerance(case))
    assert_exact(metrics["skipped_steps"][-1], int(np.sum(~taken)))
    assert_ends_there(case, params, masters, ("g",) * case["ln_gain_fp32"])


@pytest.mark.thorough(0)
@pytest.mark.parametrize("case", ORACLE["torch_amp"], ids=name_of)
def test_torch_amp(case):
    """float32 params, 16-bit matmuls: autocast and GradScaler. There is no master, and the scale still decides."""
    loss, used, metrics, params, masters = trained("torch_amp", case["name"])
    assert_exact(used, column(case, 1))
    assert_exact(metrics["skipped"], ~column(case, 2, bool))
    assert_exact(metrics["loss_scale"], column(case, 4))
    if case["dtype"] == "torch.float16":
        assert_exact(metrics["growth_count"], column(case, 5, np.int32))
    assert_close(loss, column(case, 0), atol=tolerance(case))
    assert_moved(masters, params)
    assert_ends_there(case, params, masters, tuple(PARAMS))


@pytest.mark.thorough(0)
def test_fp32_baseline():
    baseline = ORACLE["fp32_baseline"]
    arguments = {"policy": jaxmp.get_policy("fp32"), "preset": None, "rule": {}, "max_norm": 1.0, "accumulate": 1}
    loss, used, metrics, *_ = train(np.zeros(STEPS, np.float32), **arguments)
    assert_close(loss, column(baseline, 0), atol=1e-5)
    assert_close(metrics["grad_norm"], column(baseline, 1), rtol=1e-3)
    assert_exact(used, np.ones(STEPS, np.float32))
    assert not np.any(metrics["skipped"])
