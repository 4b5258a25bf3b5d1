"""The state of Megatron's optimizer: each case that Megatron was recorded at, and what we make of it."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
import oracle_data
from helpers import assert_exact, assert_moved
from jaxmp.checkpoint import export_megatron, import_megatron

ORACLE = oracle_data.load("megatron_state_dict")
SHAPES = ORACLE["format"]["fp32_from_fp16_params"].partition("shapes ")[2]
GROUPS = [["a", "b"], ["c"]]
SCALE = jaxmp.DynamicLossScale(65536.0)
PARAMS = {"a": (7, 5), "b": (5, 3), "c": (5,)}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=shape).astype(np.float32) for path, shape in PARAMS.items()}


def make(policy="fp16", inner=None, **kwargs):
    scale = {"loss_scale": SCALE} if policy == "fp16" else {}
    return jaxmp.mixed_precision(optax.adam(1e-2) if inner is None else inner, policy, **scale, **kwargs)


def started(policy="fp16", **kwargs):
    params32 = jax.tree.map(jnp.asarray, arrays(0))
    return jaxmp.get_policy(policy).cast_to_param(params32), make(policy, **kwargs).init(params32)


def saved():
    """A state dict in the format that was recorded."""
    masters, mu, nu = arrays(1), arrays(2), arrays(3)
    per_param = [{"exp_avg": mu[p], "exp_avg_sq": nu[p] ** 2, "step": 7} for p in "abc"]
    groups = [{"lr": 0.01} | {"params": g["params"]} for g in ORACLE["format"]["param_groups"]]
    return {
        "optimizer": {"state": dict(enumerate(per_param)), "param_groups": groups},
        "fp32_from_fp16_params": [[masters["a"], masters["b"]], [masters["c"]]],
        "grad_scaler": copy.deepcopy(ORACLE["format"]["grad_scaler"]),
    }


def check_complete(params, opt_state, scale=(4096.0, 1)):
    assert_moved(jaxmp.get_master_params(opt_state, params), arrays(1))
    assert_moved(optax.tree.get(opt_state, "mu"), arrays(2))
    assert_moved(optax.tree.get(opt_state, "nu"), {p: x**2 for p, x in arrays(3).items()})
    assert int(optax.tree.get(opt_state, "count")) == 7
    assert (float(opt_state.scaling.loss_scale), int(opt_state.scaling.growth_count)) == scale
    # Megatron leaves the model's params to another checkpoint ("model_params_restored_by_optimizer_load": false).
    assert_exact(params, jax.tree.map(lambda m: jnp.asarray(m, jnp.float16), arrays(1)))


def renamed(state, old, new):
    return {new if name == old else name: x for name, x in state.items()}


def regrouped(state, *numbers):
    return state | {"optimizer": state["optimizer"] | {"param_groups": [{"params": n} for n in numbers]}}


# Each of the recorded load cases: what is changed, and either the warning or the error that it must give.
CASES = {
    "current": (lambda s: s, None, None),
    "old optimizer key 'optimizer_state_dict'": (
        lambda s: renamed(s, "optimizer", "optimizer_state_dict"), "optimizer_state_dict is read as optimizer", None
    ),
    "no grad_scaler": (
        lambda s: {k: x for k, x in s.items() if k != "grad_scaler"}, "no grad_scaler: the loss scale stays 65536", None
    ),
    "old key fp32_from_fp16": (lambda s: renamed(s, "fp32_from_fp16_params", "fp32_from_fp16"), None, None),
    "neither fp32 key": (
        lambda s: {k: x for k, x in s.items() if k != "fp32_from_fp16_params"}, None,
        r"must have fp32_from_fp16_params \(or fp32_from_fp16",
    ),
    "scaler keys missing hysteresis_tracker": (
        lambda s: s | {"grad_scaler": {k: x for k, x in s["grad_scaler"].items() if k != "hysteresis_tracker"}}, None,
        "without hysteresis_tracker",
    ),
    "fewer saved groups (zip truncates silently)": (
        lambda s: s | {"fp32_from_fp16_params": s["fp32_from_fp16_params"][:1]}, None,
        r"groups= has \[2, 1\] params with a master; .* has groups of \[2\]",
    ),
    # Ours are matched by position: groups that look alike are no trouble.
    "group identifiers collide (both groups lack wd_mult)": (lambda s: regrouped(s, [0, 1], [2]), None, None),
    "groups saved in swapped order (HEAD re-matches by identifier; params list keeps saved order)": (
        lambda s: regrouped(s, [2], [0, 1]), None, r"groups= has \[2, 1\] params; .* has groups of \[1, 2\]"
    ),
}  # fmt: skip


def test_every_recorded_case_is_here():
    assert set(CASES) | {"grad_scaler present but class has none"} == set(ORACLE["load_cases"])
    assert SHAPES == "[[[7, 5], [5, 3]], [[5]]]"


@pytest.mark.thorough(1)
@pytest.mark.parametrize("case", CASES)
def test_load_cases(case):
    change, warning, error = CASES[case]
    params, opt_state = started()
    before = jax.tree.map(np.array, (params, opt_state))
    if error is not None:
        with pytest.raises(ValueError, match=error):
            import_megatron(change(saved()), opt_state, params, groups=GROUPS)
        assert_moved((params, opt_state), before)
        return
    if warning is not None:
        with pytest.warns(UserWarning, match=warning):
            loaded = import_megatron(change(saved()), opt_state, params, groups=GROUPS)
        check_complete(*loaded, scale=(65536.0, 0) if "grad_scaler" in case else (4096.0, 1))
    else:
        check_complete(*import_megatron(change(saved()), opt_state, params, groups=GROUPS))
    recorded = ORACLE["load_cases"][case]
    if recorded["result"] == "ok":  # where Megatron loads, the same scale and masters come out
        assert recorded["masters_restored"] and recorded["after"][0] == (4096.0)


def test_grad_scaler_present_but_class_has_none():
    params, opt_state = started("bf16")
    with pytest.warns(
        UserWarning, match="has a grad_scaler, but this optimizer has no dynamic loss scale: the grad_scaler is"
    ):
        params, opt_state = import_megatron(saved(), opt_state, params, groups=GROUPS)
    assert_moved(jaxmp.get_master_params(opt_state, params), arrays(1))
    assert float(jaxmp.get_loss_scale(opt_state)) == 1.0  # as recorded: [1.0, null]


def test_a_constant_grad_scaler_has_no_state():
    """Megatron's `ConstantGradScaler.state_dict()` is empty."""
    params, opt_state = started()
    with pytest.warns(UserWarning, match="empty, as that of a constant scale is: the loss scale stays 65536.0"):
        check_complete(*import_megatron(saved() | {"grad_scaler": {}}, opt_state, params, groups=GROUPS), (65536.0, 0))
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "fp16", loss_scale=128.0)
    params, opt_state = import_megatron(saved() | {"grad_scaler": {}}, tx.init(arrays(0)), params, groups=GROUPS)
    assert float(jaxmp.get_loss_scale(opt_state)) == 128.0


def test_what_megatron_has_not_is_named():
    """Params in float32 are in the model's part of its checkpoint; averages are nowhere."""
    policy = jaxmp.get_policy("bf16", keep_fp32=("c",))
    tx = jaxmp.mixed_precision(optax.adam(1e-2), policy)
    params32 = jax.tree.map(jnp.asarray, arrays(0))
    state = {k: x for k, x in saved().items() if k != "grad_scaler"}
    state["fp32_from_fp16_params"] = [state["fp32_from_fp16_params"][0], []]
    params = policy.cast_to_param(params32)
    with pytest.warns(UserWarning, match="has no copy of params that it keeps in float32: c stay as in params=. Take"):
        found, _ = import_megatron(state, tx.init(params32), params, groups=GROUPS)
    assert_moved(found["c"], params32["c"])
    of_model = {"c": arrays(4)["c"]}
    found, opt_state = import_megatron(state, tx.init(params32), params, groups=GROUPS, in_float32=of_model)
    assert_moved(found["c"], of_model["c"])
    assert_moved(jaxmp.get_master_params(opt_state, found)["c"], of_model["c"])
    for wrong, told in (
        ({"a": of_model["c"]}, "a has a master in"),
        ({"d": 1.0}, "d is in no group"),
        ({"c": 1.0}, "shape"),
    ):
        with pytest.raises(ValueError, match=told):
            import_megatron(state, tx.init(params32), params, groups=GROUPS, in_float32=wrong)
    params, opt_state = started("bf16", inner=optax.chain(optax.adam(1e-2), jaxmp.ema_params(0.9)))
    state = {k: x for k, x in saved().items() if k != "grad_scaler"}
    with pytest.warns(UserWarning, match="has no average of the weights: .*ema_params/a and the others stay"):
        import_megatron(state, opt_state, params, groups=GROUPS)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("kwargs", [{}, {"remainder_bits": 16}], ids=["whole", "split"])
def test_there_and_back(kwargs):
    params, opt_state = started("bf16", **kwargs)
    grads = jax.tree.map(jnp.ones_like, params)
    step = jax.jit(lambda *args: jaxmp.apply_gradients(make("bf16", **kwargs), *args))
    params, opt_state = step(grads, opt_state, params)
    opt_state = opt_state._replace(largest_gradient=jnp.float32(-1))  # Megatron counts no such thing
    out = export_megatron(opt_state, params, groups=GROUPS)
    assert "grad_scaler" not in out and out["optimizer"]["state"][2]["step"] == 1
    empty = started("bf16", **kwargs)
    assert_exact(import_megatron(out, empty[1], empty[0], groups=GROUPS), (params, opt_state))


def test_the_format_that_was_recorded():
    params, opt_state = started()
    out = export_megatron(opt_state, params, groups=GROUPS, loss_scale=SCALE)
    assert sorted(out) == ORACLE["format"]["top_keys"]
    assert sorted(out["optimizer"]) == ORACLE["format"]["optimizer_keys"]
    assert list(out["optimizer"]["state"]) == ORACLE["format"]["optimizer_state_keys"]
    assert sorted(out["optimizer"]["state"][0]) == ORACLE["format"]["per_param"]
    assert str([[list(x.shape) for x in group] for group in out["fp32_from_fp16_params"]]) == SHAPES
    assert out["grad_scaler"] == {"scale": [65536.0], "growth_tracker": 0, "hysteresis_tracker": 2}


def test_a_step_of_the_group_and_momentum():
    state = saved()
    for i, x in state["optimizer"]["state"].items():
        state["optimizer"]["state"][i] = {"exp_avg": x["exp_avg"], "exp_avg_sq": x["exp_avg_sq"]}
    for group in state["optimizer"]["param_groups"]:
        group["step"] = np.asarray(7)  # as apex's FusedAdam has it
    params, opt_state = started()
    check_complete(*import_megatron(state, opt_state, params, groups=GROUPS))
    momentum = saved()
    momentum["optimizer"]["state"] = {i: {"momentum_buffer": x} for i, x in enumerate(arrays(2).values())}
    params, opt_state = started(inner=optax.sgd(0.1, momentum=0.9))
    _, opt_state = import_megatron(momentum, opt_state, params, groups=GROUPS)
    assert_moved(optax.tree.get(opt_state, "trace"), arrays(2))


@pytest.mark.thorough(3)
@pytest.mark.parametrize(
    ("change", "groups", "message"),
    [
        (lambda s: s["fp32_from_fp16_params"][1].__setitem__(0, np.ones(4)), GROUPS, r"master of c has shape \(4,\)"),
        (
            lambda s: s["optimizer"]["state"][0].pop("exp_avg_sq"),
            GROUPS,
            "needs exp_avg_sq, which is missing in Megatron's state of a",
        ),
        (lambda s: s["optimizer"]["state"][0].update(exp_avg=np.ones(2)), GROUPS, "exp_avg of a has shape"),
        (lambda s: s["optimizer"]["state"].pop(2), GROUPS, r"the state of c \(2\) is missing"),
        (lambda s: s["optimizer"]["state"][0].update(step=8), GROUPS, r"have the same step; .* has \[7, 8\]"),
        (lambda s: s["optimizer"].pop("param_groups"), GROUPS, "param_groups is missing"),
        (
            lambda s: None,
            [["a", "d"], ["c"]],
            "must name each param once, by path; d is not a param. There are a, b, c",
        ),
        (lambda s: None, [["a", "a"], ["c"]], "a is given twice"),
        (lambda s: None, [["a"], ["c"]], "must name every param that has a master; b is in no group"),
    ],
    ids=["master", "moment", "shape", "state", "steps", "groups", "unknown", "twice", "few"],
)
def test_what_does_not_fit(change, groups, message):
    state, (params, opt_state) = saved(), started()
    change(state)
    with pytest.raises(ValueError, match=message):
        import_megatron(state, opt_state, params, groups=groups)
