"""The state of Megatron's optimizer: each case that Megatron was recorded at, and what we make of it."""

import contextlib
import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
import oracle_data
from helpers import assert_exact, assert_moved
from jaxmp.checkpoint import import_megatron

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
    """(the optimizer, params) of a job that imports."""
    params32 = jax.tree.map(jnp.asarray, arrays(0))
    return make(policy, **kwargs), jaxmp.get_policy(policy).cast_to_param(params32)


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


def without_scaler():
    return {name: x for name, x in saved().items() if name != "grad_scaler"}


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
        lambda s: {k: x for k, x in s.items() if k != "grad_scaler"}, "missing or empty: the scale stays", None
    ),
    "old key fp32_from_fp16": (lambda s: renamed(s, "fp32_from_fp16_params", "fp32_from_fp16"), None, None),
    "neither fp32 key": (
        lambda s: {k: x for k, x in s.items() if k != "fp32_from_fp16_params"}, None,
        r"must have fp32_from_fp16_params \(or fp32_from_fp16",
    ),
    "scaler keys missing hysteresis_tracker": (
        lambda s: s | {"grad_scaler": {k: x for k, x in s["grad_scaler"].items() if k != "hysteresis_tracker"}}, None,
        "hysteresis_tracker has missing",
    ),
    "fewer saved groups (zip truncates silently)": (
        lambda s: s | {"fp32_from_fp16_params": s["fp32_from_fp16_params"][:1]}, None,
        r"fp32_from_fp16_params is matched by position.* \[2, 1\], and \[2\]",
    ),
    # Ours are matched by position: groups that look alike are no trouble.
    "group identifiers collide (both groups lack wd_mult)": (lambda s: regrouped(s, [0, 1], [2]), None, None),
    "groups saved in swapped order (HEAD re-matches by identifier; params list keeps saved order)": (
        lambda s: regrouped(s, [2], [0, 1]), None, r"param_groups is matched by position.* \[2, 1\], and \[1, 2\]"
    ),
}  # fmt: skip


def test_every_recorded_case_is_here():
    assert set(CASES) | {"grad_scaler present but class has none"} == set(ORACLE["load_cases"])
    assert SHAPES == "[[[7, 5], [5, 3]], [[5]]]"


@pytest.mark.thorough(1)
@pytest.mark.parametrize("case", CASES)
def test_load_cases(case):
    change, warning, error = CASES[case]
    tx, params = started()
    load = functools.partial(import_megatron, change(saved()), tx, params, groups=GROUPS)
    if error is not None:
        with pytest.raises(ValueError, match=error):
            load()
        return
    with pytest.warns(UserWarning, match=warning) if warning else contextlib.nullcontext():
        loaded = load()
    check_complete(*loaded, scale=(65536.0, 0) if case == "no grad_scaler" else (4096.0, 1))
    recorded = ORACLE["load_cases"][case]
    if recorded["result"] == "ok":  # where Megatron loads, the same scale and masters come out
        assert recorded["masters_restored"] and recorded["after"][0] == (4096.0)


def test_grad_scaler_present_but_class_has_none():
    tx, params = started("bf16")
    with pytest.warns(UserWarning, match="grad_scaler is not used: this optimizer has no dynamic loss scale"):
        params, opt_state = import_megatron(saved(), tx, params, groups=GROUPS)
    assert_moved(jaxmp.get_master_params(opt_state, params), arrays(1))
    assert float(jaxmp.get_loss_scale(opt_state)) == 1.0  # as recorded: [1.0, null]


def test_a_constant_grad_scaler_has_no_state():
    """Megatron's `ConstantGradScaler.state_dict()` is empty."""
    tx, params = started()
    with pytest.warns(UserWarning, match="missing or empty: the scale stays 65536.0"):
        check_complete(*import_megatron(saved() | {"grad_scaler": {}}, tx, params, groups=GROUPS), (65536.0, 0))
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "fp16", loss_scale=128.0)
    params, opt_state = import_megatron(saved() | {"grad_scaler": {}}, tx, params, groups=GROUPS)
    assert float(jaxmp.get_loss_scale(opt_state)) == 128.0


def test_what_megatron_has_not_is_named():
    """Params in float32 are in the model's part of its checkpoint; averages are nowhere."""
    policy = jaxmp.get_policy("bf16", keep_fp32=("c",))
    tx = jaxmp.mixed_precision(optax.adam(1e-2), policy)
    params32 = jax.tree.map(jnp.asarray, arrays(0))
    state = without_scaler()
    state["fp32_from_fp16_params"] = [state["fp32_from_fp16_params"][0], []]
    with pytest.warns(UserWarning, match="Megatron's optimizer has no master of c: the values are those of params"):
        params, opt_state = import_megatron(state, tx, policy.cast_to_param(params32), groups=GROUPS)
    assert_moved(params["c"], params32["c"])
    assert_moved(jaxmp.get_master_params(opt_state, params)["c"], params32["c"])
    assert_moved(optax.tree.get(opt_state, "mu")["c"], arrays(2)["c"])
    tx, params = started("bf16", inner=optax.chain(optax.adam(1e-2), jaxmp.ema_params(0.9)))
    with pytest.warns(UserWarning, match="has no averages"):
        _, opt_state = import_megatron(without_scaler(), tx, params, groups=GROUPS)
    assert_moved(optax.tree.get(opt_state, "mu"), arrays(2))


@pytest.mark.parametrize(
    "remainder_bits", [16, pytest.param(None, marks=pytest.mark.thorough(0))], ids=["split", "whole"]
)
def test_the_next_step_is_that_of_the_same_job(remainder_bits):
    """A state of ours, written down as Megatron would, and imported."""
    tx, params = started("bf16", remainder_bits=remainder_bits)
    jaxmp.get_loss_scale(())
    step = jax.jit(lambda *args: jaxmp.apply_gradients(tx, *args))
    grads = jax.tree.map(jnp.ones_like, params)
    params, opt_state = step(grads, jax.jit(tx.init)(arrays(0)), params)
    mu, nu = optax.tree.get(opt_state, "mu"), optax.tree.get(opt_state, "nu")
    masters = jaxmp.get_master_params(opt_state, params)
    each = {i: {"step": 1, "exp_avg": mu[p], "exp_avg_sq": nu[p]} for i, p in enumerate("abc")}
    state = {"optimizer": {"state": each, "param_groups": [{"params": [0, 1]}, {"params": [2]}]}}
    state["fp32_from_fp16_params"] = [[masters["a"], masters["b"]], [masters["c"]]]
    expected = step(grads, opt_state, params)[0]
    for options in ({"groups": GROUPS}, {}):  # without groups, by shape
        new_params, new_state = import_megatron(state, tx, started("bf16")[1], **options)
        assert_moved(jaxmp.get_master_params(new_state, new_params), masters)
        assert_moved(optax.tree.get(new_state, "nu"), nu)
        assert_exact(step(grads, new_state, new_params)[0], expected)


def test_params_of_one_shape_need_their_paths():
    tx = make("bf16")
    with pytest.raises(ValueError, match="without groups=, each param must be found by its shape"):
        import_megatron(saved(), tx, {"a": jnp.ones((7, 5)), "b": jnp.ones((7, 5)), "c": jnp.ones(5)})


def test_a_step_of_the_group_and_momentum():
    state = saved()
    for i, x in state["optimizer"]["state"].items():
        state["optimizer"]["state"][i] = {"exp_avg": x["exp_avg"], "exp_avg_sq": x["exp_avg_sq"]}
    for group in state["optimizer"]["param_groups"]:
        group["step"] = np.asarray(7)  # as apex's FusedAdam has it
    tx, params = started()
    check_complete(*import_megatron(state, tx, params, groups=GROUPS))
    momentum = saved()
    momentum["optimizer"]["state"] = {i: {"momentum_buffer": x} for i, x in enumerate(arrays(2).values())}
    tx, params = started(inner=optax.sgd(0.1, momentum=0.9))
    _, opt_state = import_megatron(momentum, tx, params, groups=GROUPS)
    assert_moved(optax.tree.get(opt_state, "trace"), arrays(2))


def test_layers_may_be_called_as_moments():
    """The fields of a state are told from the names of a model by its types."""
    shapes = {"mu": {"count": (2,), "nu": (3,)}, "count": (4,)}
    rng = np.random.default_rng(0)
    draw = functools.partial(jax.tree.map, lambda s: rng.normal(size=s).astype(np.float32))
    params, weights, mu, nu = (draw(shapes, is_leaf=lambda x: type(x) is tuple) for _ in range(4))
    each = zip(*map(jax.tree.leaves, (mu, nu)), strict=True)
    each = {i: {"step": 3, "exp_avg": m, "exp_avg_sq": v**2} for i, (m, v) in enumerate(each)}
    state = {"optimizer": {"state": each, "param_groups": [{"params": [0, 1, 2]}]}}
    state["fp32_from_fp16_params"] = [jax.tree.leaves(weights)]
    params16 = jaxmp.get_policy("bf16").cast_to_param(params)
    params16, opt_state = import_megatron(state, make("bf16"), params16, groups=[["count", "mu/count", "mu/nu"]])
    assert_moved(jaxmp.get_master_params(opt_state, params16), weights)
    inner = opt_state.optimizer_state[0]
    assert_moved(inner.mu, mu)
    assert_moved(inner.nu, jax.tree.map(np.square, nu))
    assert int(inner.count) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["fp32_from_fp16_params"][1].__setitem__(0, np.ones(4)), r"the master of c has \(4,\)"),
        (lambda s: s["optimizer"]["state"][0].pop("exp_avg_sq"), r"must have exp_avg_sq; got \['exp_avg', 'step'\]"),
        (lambda s: s["optimizer"]["state"][0].update(exp_avg=np.ones(2)), "exp_avg of a has"),
        (lambda s: s["optimizer"]["state"].pop(2), r"that of its param_groups; got \[0, 1\]"),
        (lambda s: s["optimizer"]["state"][0].update(step=8), r"have the same step; .* have \[7, 8\]"),
        (lambda s: s["optimizer"].pop("param_groups"), "must have param_groups"),
    ],
    ids=["master", "moment", "shape", "state", "steps", "groups"],
)
def test_what_does_not_fit(change, message):
    state, (tx, params) = saved(), started()
    change(state)
    with pytest.raises(ValueError, match=message):
        import_megatron(state, tx, params, groups=GROUPS)


def test_groups_have_each_param_once():
    tx, params = started()
    for groups, message in (
        ([["a", "d"], ["c"]], "each param once, by path, .*; d is not a param, .* There are a, b, c"),
        ([["a", "a"], ["c"]], "; a is not a param, or there 2 times"),
        ([["a"], ["c"]], "; b is not a param, or there 0 times"),
    ):
        with pytest.raises(ValueError, match=message):
            import_megatron(saved(), tx, params, groups=groups)
