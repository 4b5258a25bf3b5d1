"""The rules on numbers: what is a finding, in which step, and what is none."""

import functools
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import ROOT
from jaxmp._src.monitor import rules
from jaxmp._src.monitor.step_stats import Fp8Stats, Paths
from jaxmp.monitor import Monitor


def findings(rows, **options):
    """(kind, path): the step, of a monitor that takes these rows: metrics, with "loss" and "stats" among them."""
    monitor = Monitor(warn=False, **options)
    for i, row in enumerate(rows):
        row = dict(row)
        loss, stats = row.pop("loss", None), row.pop("stats", None)
        monitor.update(i, {"skipped": 0.0} | row, loss=loss, stats=stats)
    monitor.finish()
    return {(f.kind, f.path): f.step for f in monitor.findings}


def test_the_docs_list_every_rule():
    table = rules.__doc__.split("says what to try:")[-1].split("\n\n")[1]
    listed = re.findall(r"^    (\w+)(?: |$)", table, re.MULTILINE)
    page = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/how-to/trouble/monitor.md").read_text(), re.MULTILINE)
    named = re.search(r"kind: the rule: (.*?)\.\n", rules.Finding.__doc__, re.DOTALL)[1]
    made = re.findall(r"Finding\(\s*\"(\w+)\",\s*step", Path(rules.__file__).read_text())
    assert len(listed) == len(page) == 12
    assert set(listed) == set(page) == set(re.findall(r"\w+", named)) - {"or"} == set(made)


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([2.0, 50.0, 1e4, 1e8, 1e12, 1.5e23, 1.5e23], 5),  # from the first steps on
        ([2.0 - 0.01 * (i % 5) for i in range(40)] + [2.3, 5.0, 5.0, 5.0], 43),
        ([0.1 * 1.1**i for i in range(100)], 29),  # slowly
        ([1.0, np.inf], 1),
        ([1e-8 * (1 + i % 3) + 0.9**i for i in range(300)], None),  # noise of a loss that is almost 0
        ([2.3, 9.0, 7.0, 3.0, 2.0, 1.0, 0.9] + [0.8] * 50, None),  # a bad start
        ([0.9**i for i in range(120)] + [1e-2] * 5, None),  # it fell by far more
        ([-1.0 - 0.1 * i for i in range(60)], None),
        ([9.0 if i % 8 == 0 else 1.0 for i in range(200)], None),  # another kind of batch
        ([1.0] * 30 + [40.0] + [1.0] * 30 + [40.0] + [1.0] * 9, None),  # single spikes
    ],
    ids=["at_once", "to_a_level", "slowly", "inf", "almost_0", "bad_start", "small", "negative", "mixed", "spikes"],
)
def test_losses_that_jump_and_others(losses, step):
    assert findings([{"loss": loss} for loss in losses]) == ({} if step is None else {("loss_jump", ""): step})


def test_a_loss_that_explodes_between_skips():
    """float16: most steps of an explosion are skipped, and their losses show it too, if they are finite."""
    high = [{"loss": 263.0, "skipped": 1.0}, {"loss": 3e2}]
    rows = [{"loss": 0.2}] * 64 + [{"loss": np.nan, "skipped": 1.0}] + high * 2
    assert findings(rows) == {("loss_jump", ""): 67}


@pytest.mark.parametrize(
    ("skipped", "steps", "step"),
    [
        (lambda i: i in (1900, 1930, 1960, 1980, 1990), 2000, 1990),  # they rise; 3 are too few
        (lambda i: i % 80 == 1, 1000, 999),  # 1.25 % of a full window
        (lambda i: i >= 50 and i % 10 == 0, 200, 90),
        (lambda i: i % 150 == 1, 2000, None),
        (lambda i: i < 40, 200, None),  # the scale falls to its level
    ],
    ids=["rising", "one percent", "one in ten", "healthy", "search"],
)
def test_skips(skipped, steps, step):
    named = findings([{"skipped": float(skipped(i))} for i in range(steps)])
    assert named == ({} if step is None else {("skips", ""): step})


def test_a_run_that_skips_every_step_is_named_once():
    assert findings([{"skipped": 1.0, "pinned_overflows": 0.0}] * 200) == {("skips", ""): 79}  # a static scale
    at_its_floor = [{"skipped": 1.0, "pinned_overflows": float(i)} for i in range(200)]
    assert findings(at_its_floor) == {("stuck_scale", ""): 3}


def test_scales_and_counts_of_the_metrics():
    assert findings([{"loss_scale": 2.0**k} for k in (16, 31, 32)]) == {("stuck_scale", ""): 2}
    assert not findings([{"loss_scale": 2.0**k} for k in (40, 33, 36)])  # it was to begin there
    overflow = {"loss_scale": 2.0**31, "skipped": 1.0}
    assert not findings([{"loss_scale": 2.0**16}, overflow, {"loss_scale": 2.0**32}])  # it is at its level
    assert findings([{"fp8/lost_gradients": np.nan}, {"fp8/lost_gradients": 2.0}]) == {("lost_gradients", ""): 1}
    assert findings([{"fp8/spoiled": 0.0}, {"fp8/spoiled": 1.0}]) == {("spoiled_amaxes", ""): 1}
    counts = [{"stale_masters": float(x)} for x in (0, 3, 1, 20, 200)]  # optax.apply_updates leaves a few behind
    assert findings(counts) == {("stale_master", "params"): 4}
    norms = [{"grad_norm": float(i < 10)} for i in range(70)]
    assert findings(norms) == {("no_gradient", "grads"): 54}


# Samples


@functools.cache
def healthy_sample():
    step_stats = jax.jit(lambda grads, params: jaxmp.monitor.step_stats(grads, (), params, histogram=False))
    grads = {"w": np.full(64, 1e-3, np.float16), "b": np.ones(4, np.float16)}
    return jax.device_get(step_stats(grads, {"w": np.ones(64, np.float32), "b": np.ones(4, np.float32)}))


def sample(**kwargs):
    return healthy_sample()._replace(**{"probes": {}} | kwargs)


tensor_stats = jax.jit(functools.partial(jaxmp.monitor.tensor_stats, histogram=False))


def grads_of(w, b=1.0):
    return jax.device_get(tensor_stats({"w": np.full(64, w, np.float16), "b": np.full(4, b, np.float16)}))


def overflowing(is_so):
    return sample(activations=jax.device_get(tensor_stats({"layer": np.full(4, 3e4 * is_so + 1, np.float16)})))


def underflowing(is_so):
    return sample(grads=grads_of(1e-6 if is_so else 1e-3))


def saturating(is_so):
    path = "layer/fp8_lhs_e4m3_log2_scale"
    return sample(fp8=Fp8Stats({path: np.float32(9)}, {path: np.float32(64)}, {path: np.bool_(is_so)}))


def not_finite(is_so):
    return sample(state={"mean": np.float32(np.nan if is_so else 1)})


@pytest.mark.parametrize("pattern", ["1001", "11000", "01", "10000000"], ids=["thirds", "bursts", "second", "eighth"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [(overflowing, "near_overflow"), (underflowing, "underflow"), (saturating, "saturation"), (not_finite, "overflow")],
)
def test_a_fault_that_comes_and_goes_is_found(make, kind, pattern):
    """Three of nine samples; what is seen now and then is none."""
    samples = {c: make(c == "1") for c in "01"}
    kinds = {kind for kind, _ in findings([{"stats": samples[pattern[i % len(pattern)]]} for i in range(30)])}
    assert kinds == ({kind} if len(pattern) < 8 else set())


def test_one_overflow_of_an_activation_is_a_finding_and_of_a_gradient_is_none():
    """No loss scale repairs a forward pass."""
    seen = jax.device_get(tensor_stats({"layer": np.full(4, np.inf, np.float16)}))
    assert findings([{"stats": sample(activations=seen)}]) == {("overflow", "activations/layer"): 0}
    assert findings([{"stats": sample(grads=grads_of(np.inf))}] + [{"stats": sample()}] * 5) == {}


@pytest.mark.parametrize(
    ("zero", "step"),
    [
        (lambda i: i >= 3, 10),  # samples of every fifth step; before that of step 15 it moved
        (lambda i: i >= 1 and i not in (5, 6), 17),  # it came back after 15 steps: 45
        (lambda i: i % 2 == 0, None),
        (lambda i: i % 7 != 0, None),
    ],
    ids=["gone", "came-back", "second", "seventh"],
)
def test_a_gradient_that_is_zero_for_long_is_absent(zero, step):
    samples = {is_so: sample(grads=grads_of(0.0 if is_so else 1.0)) for is_so in (True, False)}
    monitor = Monitor(warn=False)
    for i in range(40):
        moved = sum(not zero(j) for j in range(i))  # by its gradients before this step
        monitor.update(5 * i, {}, stats=samples[zero(i)]._replace(probes={"w": np.full(4, moved, np.float32)}))
    monitor.finish()
    named = {(f.kind, f.path): f.step // 5 for f in monitor.findings}
    assert named == ({} if step is None else {("no_gradient", "grads/w"): step})


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("is_expert", [False, True], ids=["dead", "expert"])
def test_momentum_moves_a_dead_layer_and_tokens_an_expert_between_two_samples(every, is_expert):
    """Momentum of 0.9 decays from step 20 on. The expert gets tokens in every third step, and in no sample."""
    samples = {is_so: sample(grads=grads_of(0.0 if is_so else 1.0)) for is_so in (True, False)}
    monitor, w = Monitor(warn=False), 1.0
    for i in range(120):
        is_zero = i >= 20 or is_expert
        if i % every == 0:
            monitor.update(i, {}, stats=samples[is_zero]._replace(probes={"w": np.full(4, w, np.float32)}))
        w += float(i % 3 == 1) if is_expert else 0.9 ** max(0, i - 19)
    monitor.finish()
    named = {(f.kind, f.path): f.step for f in monitor.findings}
    assert set(named) == (set() if is_expert else {("no_gradient", "grads/w")})
    assert is_expert or named["no_gradient", "grads/w"] <= 70


@pytest.mark.parametrize(
    "frozen", [{"probes": {}}, {"may_be_frozen": Paths({"w"})}], ids=["no master", "no state of its own"]
)
def test_a_frozen_param_without_a_gradient_is_not_absent(frozen):
    stats = sample(grads=grads_of(0.0))._replace(**{"probes": {"w": np.ones(4, np.float32)}} | frozen)
    assert findings([{"stats": stats}] * 40) == {}


def test_an_infinite_value_from_the_start_may_be_meant():
    """Such as the best loss so far; NaN never is. Arrays of the params are not read twice."""
    params = {"w": jnp.ones(4)}

    @jax.jit
    def stats_of(params, best):
        return jaxmp.monitor.step_stats(params, (), params, state={"best": best, "n": 0, "p": params["w"]})

    stats = stats_of(params, jnp.float32(jnp.inf))
    assert set(stats.state) == {"best"} and stats.state["best"].dtype == np.float32
    for value, is_named in ((jnp.inf, False), (jnp.nan, True)):
        named = findings([{"stats": stats_of(params, jnp.float32(value))}] * 5)
        assert (("overflow", "state/best") in named) == is_named


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("policy", "by"),
    [("bf16", "label"), ("fp32", "label"), ("16-mixed", "label"), ("fp32", "hand"), ("fp32", "rate 0")],
)
def test_a_frozen_param_is_no_dead_update(policy, by):
    """Under optax.set_to_zero it has gradients and never moves; in 16 bits it has no master, and no probes.

    One that code puts back after each step is named, and all if none moves.
    """
    frozen = {"base": True, "bias": True, "lora": False}
    inner = optax.sgd(0.0 if by == "rate 0" else 0.1)
    if by in ("label", "rate 0"):
        labels = {name: "f" if is_frozen else "t" for name, is_frozen in frozen.items()}
        inner = optax.multi_transform({"t": inner, "f": optax.set_to_zero()}, labels)
    tx = jaxmp.mixed_precision(inner, policy)
    params32 = {"base": jnp.linspace(0.1, 1, 7), "bias": jnp.zeros(7), "lora": jnp.linspace(0.2, 1, 7)}

    def step(carry, _):
        params, opt_state = carry
        loss = lambda p: jnp.sum(p["base"] * p["lora"] + p["bias"]).astype(jnp.float32)  # noqa: E731
        _, grads = jaxmp.value_and_grad(loss)(params, opt_state=opt_state)
        stats = jaxmp.monitor.step_stats(grads, opt_state, params, histogram=False)
        new, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return (new | ({name: params[name] for name in ("base", "bias")} if by == "hand" else {}), opt_state), stats

    with warnings.catch_warnings(action="ignore"):  # the loss has no matmul
        start = jaxmp.get_policy(policy).cast_to_param(params32), jax.jit(tx.init)(params32)
        stats = jax.device_get(jax.jit(lambda carry: jax.lax.scan(step, carry, None, length=6)[1])(start))
    assert set(stats.probes) == ({"lora"} if policy == "bf16" else set(frozen))
    named = findings([{"stats": jax.tree.map(lambda x, i=i: x[i], stats)} for i in range(6)])
    dead = {"hand": ("params/base", "params/bias"), "rate 0": ("params",)}.get(by, ())
    assert set(named) == {("dead_update", path) for path in dead}


def test_steps_that_only_accumulate_move_nothing_and_are_not_blamed():
    """Updates that are too small are."""
    tx = jaxmp.mixed_precision(optax.MultiSteps(optax.inject_hyperparams(optax.adam)(1e-2), 4), "bf16")
    params32 = {"w": np.linspace(0.1, 1, 8, dtype=np.float32), "v": np.linspace(0.2, 1, 8, dtype=np.float32)}

    def step(carry, _):
        params, opt_state = carry
        loss_fn = lambda p: jnp.sum((p["w"] * p["v"]).astype(jnp.float32))  # noqa: E731
        grads = jaxmp.value_and_grad(loss_fn)(params, opt_state=opt_state)[1]
        stats = jaxmp.monitor.step_stats(grads, opt_state, params, histogram=False)
        return jaxmp.apply_gradients(tx, grads, opt_state, params), stats

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, length=20)[1])
    params, opt_state = jaxmp.get_policy("bf16").cast_to_param(params32), jax.jit(tx.init)(params32)
    for rate, kinds in ((1e-2, set()), (1e-12, {"dead_update"})):
        with warnings.catch_warnings(action="ignore"):
            stats = jax.device_get(run((params, optax.tree.set(opt_state, learning_rate=np.float32(rate)))))
        named = findings([{"stats": jax.tree.map(lambda x, i=i: x[i], stats)} for i in range(20)])
        assert {kind for kind, _ in named} == kinds


@pytest.mark.thorough(0)
def test_a_scale_that_falls_to_its_level_is_healthy_where_every_step_is_sampled():
    policy, x = jaxmp.get_policy("fp16"), np.random.default_rng(0).normal(size=(16, 4))
    tx = jaxmp.mixed_precision(optax.adam(1e-2), policy, loss_scale=jaxmp.DynamicLossScale(hysteresis=2))
    params = {"w": jnp.full((4, 4), 8.0)}
    params, opt_state = policy.cast_to_param(params), jax.jit(tx.init)(params)

    @jax.jit
    def step(params, opt_state):
        loss_fn = lambda p: jnp.mean((x.astype(jnp.float16) @ p["w"]).astype(jnp.float32) ** 2)  # noqa: E731
        loss, grads = jaxmp.value_and_grad(loss_fn)(params, opt_state=opt_state)
        stats = jaxmp.monitor.step_stats(grads, opt_state, params, histogram=False)
        return *jaxmp.apply_gradients(tx, grads, opt_state, params), loss, stats

    monitor = Monitor()  # a warning would be an error
    for i in range(20):
        params, opt_state, loss, stats = step(params, opt_state)
        monitor.update(i, jaxmp.get_metrics(opt_state), loss=loss, stats=stats)
    monitor.finish()
    assert jaxmp.get_metrics(opt_state)["skipped_steps"] >= 2 and monitor.findings == []
