"""Megatron-LM's mixed-precision optimizer, replayed step by step through `mixed_precision`.

The oracle gives scaled gradients, some with inf or NaN, and says what Megatron's real code made of them: which steps
it skipped, the loss scale and its counters, norms, masters and 16-bit params.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_close, assert_exact, assert_same_program, assert_within_ulps
from oracle_data import load, load_arrays

CASES = {case["name"]: case for case in load("megatron_replay_index")["cases"]}
ARRAYS = load_arrays("megatron_replay")
LEAVES = ("dense", "layer_norm", "head")  # params 0, 1, 2 of the oracle; 1 alone is a vector
POISONED = "adamw_bf16_noscaler_nan_poisons"
# In every run: a float32 leaf, clipping and a scaler; another optimizer; no scale; tiny updates.
ORDINARY = (
    "adamw_maingrad_fp32_layernorm",
    "sgd_noclip",
    "adamw_bf16_noscaler",
    "adamw_tiny_updates_need_master",
)


def policy_of(case: dict) -> jaxmp.Policy:
    keep_fp32 = ("layer_norm",) if case["params"][1][1] == "torch.float32" else ()
    return jaxmp.get_policy(
        {"torch.float16": "fp16", "torch.bfloat16": "bf16"}[case["params"][0][1]], keep_fp32=keep_fp32
    )


def optimizer_of(case: dict, **kwargs) -> optax.GradientTransformationExtraArgs:
    decay = {"weight_decay": 0.1, "mask": jaxmp.weight_decay_mask}
    assert case["groups"] == [[[0, 2], {"weight_decay": 0.1}], [[1], {"weight_decay": 0.0}]]
    if case["inner"].startswith("SGD"):
        assert case["inner"] == "SGD lr=1e-2 momentum=0.9"
        inner = optax.chain(optax.add_decayed_weights(**decay), optax.sgd(1e-2, momentum=0.9))
    else:
        name, rate, rest = case["inner"].split(maxsplit=2)
        assert (name, rest) == ("AdamW", "betas=(0.9,0.95) eps=1e-8")
        inner = optax.adamw(float(rate.removeprefix("lr=")), b1=0.9, b2=0.95, eps=1e-8, **decay)
    if case["clip_grad"]:
        inner = optax.chain(jaxmp.clip_by_global_norm(case["clip_grad"]), jaxmp.count_zeros(), inner)
    loss_scale = case["constant_scale"]
    if case["scaler"]:
        loss_scale = jaxmp.DynamicLossScale.preset("megatron", **case["scaler"])
    return jaxmp.mixed_precision(inner, policy_of(case), loss_scale=loss_scale, **kwargs)


def in_dtype(bits: np.ndarray, param: list) -> np.ndarray:
    """The oracle's arrays: 16-bit floats are stored as int16."""
    if bits.dtype == np.int16:
        return bits.view({"torch.float16": np.float16, "torch.bfloat16": ml_dtypes.bfloat16}[param[1]])
    return bits


def grads_of(case: dict) -> dict[str, np.ndarray]:
    return {leaf: in_dtype(ARRAYS[f"{case['name']}_grads{j}"], case["params"][j]) for j, leaf in enumerate(LEAVES)}


@functools.cache
def program_of(name: str, **kwargs):
    policy, tx = policy_of(CASES[name]), optimizer_of(CASES[name], **kwargs)

    @jax.jit
    def run(params32, grads):
        def step(carry, grads):
            params, direct, opt_state = carry
            loss_scale = jaxmp.get_loss_scale(opt_state)
            direct, direct_state = jaxmp.apply_gradients(tx, grads, opt_state, direct)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            masters = jaxmp.get_master_params(opt_state, params)
            out = (params, direct, masters, jaxmp.get_metrics(opt_state), loss_scale, (opt_state, direct_state))
            return (params, direct, opt_state), out

        params = policy.cast_to_param(params32)
        return jax.lax.scan(step, (params, params, tx.init(params32)), grads)[1]

    return run


def train(case: dict, grads: dict, **kwargs) -> tuple[dict, dict, dict, dict, jax.Array]:
    """After each step: params by update + apply_updates, by apply_gradients, masters, metrics, the scale it had."""
    params32 = {leaf: ARRAYS[f"{case['name']}_init{j}"] for j, leaf in enumerate(LEAVES)}
    *out, (state, direct_state) = program_of(case["name"], **kwargs)(params32, grads)
    assert np.all(state.stale_masters <= 0)  # tx.update counts them, apply_gradients does not read the params
    counted = direct_state._replace(stale_masters=state.stale_masters)
    assert_within_ulps(counted, state, 4)  # of one step: both ways start from one state
    return tuple(out)


def assert_both_ways_agree(direct: dict, params: dict) -> None:
    """One flipped rounding of a 16-bit param; two roundings a step where the param is its own master."""
    for leaf in LEAVES:
        steps = len(params[leaf])
        assert_within_ulps(direct[leaf], params[leaf], 2 * steps if params[leaf].dtype == jnp.float32 else 1)


@functools.cache
def replay(name: str, **kwargs):
    return train(CASES[name], grads_of(CASES[name]), **kwargs)


def each_case(*names: str):
    """The same cases for each test, so that a run of one serves the others."""
    marks = {name: () if name in ORDINARY else pytest.mark.thorough(0) for name in names}
    return pytest.mark.parametrize("case", [pytest.param(CASES[name], id=name, marks=marks[name]) for name in names])


def rows_of(case: dict, i: int, dtype, *, where: np.ndarray | None = None) -> np.ndarray:
    rows = case["trace"] if where is None else [row for row, keep in zip(case["trace"], where, strict=True) if keep]
    return np.array([row[i] for row in rows]).astype(dtype)


@each_case(*CASES)
def test_decisions_and_scales(case):
    """Flags, scales and counters are exact at every step; the scale that unscales is the one before it moves."""
    *_, metrics, loss_scale = replay(case["name"], skip_nonfinite=case["name"] != POISONED)
    assert_exact(loss_scale, rows_of(case, 0, np.float32))
    assert_exact(metrics["skipped"], ~rows_of(case, 1, bool))
    assert_exact(metrics["loss_scale"], rows_of(case, 4, np.float32))
    if case["scaler"]:
        assert_exact(metrics["growth_count"], rows_of(case, 5, np.int32))
        assert_exact(metrics["hysteresis_left"], rows_of(case, 6, np.int32))
    if case["clip_grad"]:
        taken = rows_of(case, 1, bool)
        assert_close(metrics["grad_norm"][taken], rows_of(case, 2, np.float32, where=taken), rtol=1e-6)
        assert_exact(metrics["zero_grads"][taken], rows_of(case, 3, np.float32, where=taken))
    else:  # Megatron says 0 for what it did not compute; we say NaN
        assert np.all(np.isnan(metrics["grad_norm"])) and np.all(np.isnan(metrics["zero_grads"]))


@each_case(*(name for name in CASES if name != POISONED))
def test_params_and_masters(case):
    """Masters to 1e-5, and 16-bit params to the rounding of one, by either way of applying a step."""
    params, direct, masters, *_ = replay(case["name"], skip_nonfinite=True)
    for step in case["snap_steps"]:
        for j, leaf in enumerate(LEAVES):
            expected = in_dtype(ARRAYS[f"{case['name']}_model{j}_{step}"], case["params"][j])
            if expected.dtype == np.float32:  # its own master
                assert_close(params[leaf][step], expected, atol=1e-5)
            else:
                assert_within_ulps(params[leaf][step], expected, 1)
                assert_close(masters[leaf][step], ARRAYS[f"{case['name']}_main{j}_{step}"], atol=1e-5)
    assert_both_ways_agree(direct, params)


def test_a_nan_without_a_scaler_poisons_megatron():
    """Where we differ: Megatron writes the NaN into its masters for good. We skip the step, as with a loss scale."""
    case = CASES[POISONED]
    ((bad_step, bad_leaf, _),) = case["inject"]
    (last,) = case["snap_steps"]
    assert np.isnan(ARRAYS[f"{POISONED}_main{bad_leaf}_{last}"]).any()

    params, direct, masters, metrics, _ = train(case, grads_of(case))
    assert_exact(metrics["skipped"], np.arange(len(case["trace"])) == bad_step)
    # by the same program, with the bad gradients in the last step
    order = [i for i in range(len(case["trace"])) if i != bad_step] + [bad_step]
    params_before, _, masters_before, *_ = train(case, jax.tree.map(lambda g: g[order], grads_of(case)))
    assert_same_program(
        jax.tree.map(lambda x: x[-1], (params, masters)),
        jax.tree.map(lambda x: x[-2], (params_before, masters_before)),
    )
    assert_both_ways_agree(direct, params)


@pytest.mark.thorough(0)
def test_a_nan_that_is_not_skipped_stays_as_in_megatron():
    """`skip_nonfinite=False` checks nothing: the NaN is in the same element of the masters, and in no other."""
    case = CASES[POISONED]
    ((bad_step, bad_leaf, _),) = case["inject"]
    (last,) = case["snap_steps"]
    params, _, masters, metrics, _ = replay(POISONED, skip_nonfinite=False)
    assert not np.any(metrics["skipped"])
    for j, leaf in enumerate(LEAVES):
        expected = ARRAYS[f"{POISONED}_main{j}_{last}"]
        poisoned = np.isnan(expected)
        assert poisoned.sum() == (j == bad_leaf)
        assert_exact(np.isnan(masters[leaf][last]), poisoned)
        assert_close(masters[leaf][last][~poisoned], expected[~poisoned], atol=1e-5)
        expected16 = in_dtype(ARRAYS[f"{POISONED}_model{j}_{last}"], case["params"][j])
        assert_within_ulps(params[leaf][last][~poisoned], expected16[~poisoned], 1)
        assert np.all(np.isfinite(masters[leaf][:bad_step]))
