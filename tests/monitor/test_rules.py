"""Each rule of the monitor, with its cause planted in a recurrent net that no rule was written for; and silence."""

import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import ROOT
from jaxmp._src.monitor import absence, rules
from jaxmp.monitor import Monitor, MonitorWarning

RNG = np.random.default_rng(7)
SHAPES = {"embed": (5, 12), "carry": (12, 12), "readout": (12, 3)}
PARAMS32 = {name: RNG.normal(size=s).astype(np.float32) / s[0] ** 0.5 for name, s in SHAPES.items()}
X = RNG.normal(size=(6, 16, 5)).astype(np.float32)  # time, batch, features
Y = np.stack([X.sum(axis=(0, 2)), np.sin(X[-1, :, 0]), X[0, :, 1]], axis=1)
EVERY, STEPS = 5, 100


def loss_of(params, x):
    def cell(h, x):
        return jnp.tanh(x.astype(h.dtype) @ params["embed"] + h @ params["carry"]), None

    with jax.named_scope("recurrence"):
        h, _ = jax.lax.scan(cell, jnp.zeros((x.shape[1], 12), params["carry"].dtype), x)
    return jnp.mean(((h @ params["readout"]).astype(jnp.float32) - Y) ** 2)


class Plan:
    """What is planted in a run of n steps: factors of the inputs and of the gradients of each leaf, [n]."""

    def __init__(self, n):
        self.x = np.ones(n, np.float32)
        self.grads = {name: np.ones(n, np.float32) for name in SHAPES}


def program(policy, grads_by="jaxmp", clip="inside", optimizer="adam"):
    return compiled(policy, grads_by, clip, optimizer)


def test_the_docs_list_every_rule():
    listed = re.findall(r"^    (\w+)(?: |$)", rules.__doc__.split("say what to try:")[-1], re.MULTILINE)
    page = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/how-to/trouble/monitor.md").read_text(), re.MULTILINE)
    named = re.search(r"kind: the rule: (.*?)\.\n", rules.Finding.__doc__, re.DOTALL)[1]
    code = "".join(Path(module.__file__).read_text() for module in (rules, absence))
    made = re.findall(r"Finding\(\s*\"(\w+)\",\s*step", code)
    assert len(listed) == len(page) == 17
    assert set(listed) == set(page) == set(re.findall(r"\w+_?\w+", named)) - {"or"} == set(made)


@functools.cache
def compiled(policy, grads_by, clip, optimizer):
    """`(start, run)`: `run(state, x factors, gradient factors)` is one compiled scan over steps."""
    inner = optax.adam(3e-3) if optimizer == "adam" else optax.sgd(0.02)
    norm = jaxmp.clip_by_global_norm(1.0) if optimizer == "adam" else optax.identity()
    tx = jaxmp.mixed_precision(optax.chain(norm, inner) if clip != "around" else inner, policy)
    tx = optax.chain(norm, tx) if clip == "around" else tx

    def step(state, now):
        params, opt_state = state
        i, x, factors = now
        if grads_by == "jaxmp":
            loss, grads = jaxmp.value_and_grad(loss_of)(params, X * x, opt_state=opt_state)
        else:
            loss, grads = jax.value_and_grad(loss_of)(params, X * x)
        grads = {name: (g.astype(jnp.float32) * factors[name]).astype(g.dtype) for name, g in grads.items()}
        if clip == "by hand":
            wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            wide, _ = optax.clip_by_global_norm(1.0).update(wide, optax.EmptyState())
            grads = jax.tree.map(lambda g, old: g.astype(old.dtype), wide, grads)
        stats = jaxmp.monitor.step_stats(grads, opt_state, params, when=i % EVERY == 0, histogram=False)
        if clip == "around":  # apply_gradients refuses it
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        else:
            params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return (params, opt_state), (jaxmp.get_metrics(opt_state), loss, stats)

    def start(scale=None, params32=PARAMS32):
        opt_state = tx.init(jax.tree.map(jnp.asarray, params32))
        if scale is not None:
            opt_state = opt_state._replace(scaling=opt_state.scaling._replace(loss_scale=jnp.float32(scale)))
        return jaxmp.get_policy(policy).cast_to_param(params32), opt_state

    return start, jax.jit(lambda state, *now: jax.lax.scan(step, state, now))


def watch(run, state, plan, monitor=None):
    """The findings of a run, by kind and path, and the state after it."""
    monitor = monitor or Monitor(warn=False, window=80)
    for first in range(0, len(plan.x), STEPS):  # always as many steps, so that one program serves
        steps = np.arange(first, first + STEPS, dtype=np.int32)
        factors = {name: x[steps] for name, x in plan.grads.items()}
        state, seen = run(state, steps, plan.x[steps], factors)
        metrics, loss, stats = jax.device_get(seen)
        for i in range(STEPS):
            sample = jax.tree.map(lambda x, i=i: x[i], stats) if i % EVERY == 0 else None
            monitor.update(first + i, {key: x[i] for key, x in metrics.items()}, loss=loss[i], stats=sample)
    monitor.finish()
    return {(f.kind, f.path): f for f in monitor.findings}, state


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("policy", "optimizer"), [("fp16", "adam"), ("bf16", "adam"), ("bf16", "sgd"), ("fp32", "sgd")]
)
def test_a_healthy_run_of_500_steps_is_silent(policy, optimizer):
    start, run = program(policy, optimizer=optimizer)
    monitor = Monitor(window=80)  # a warning would be an error
    found, _ = watch(run, start(2.0**12 if policy == "fp16" else None), Plan(500), monitor)
    assert not found and monitor.steps[-1]["loss"] < 0.5 * monitor.steps[0]["loss"]
    assert len(monitor.samples) == 500 // EVERY


def planted(kind, path=""):
    """A run with one cause; returns its findings."""
    start, run = program("fp16")
    plan, scale, params32 = Plan(STEPS), 2.0**12, PARAMS32
    if kind == "skips":
        plan.x[10::10] = np.inf
    if kind == "stuck_scale":
        plan.x[20:], scale = np.inf, 2.0
    if kind == "overflow":
        plan.grads["carry"][5::10] = np.inf
    if kind == "underflow":
        plan.grads["embed"][:], scale = 2.0**-22, 1.0
    if kind == "saturation":
        params32 = PARAMS32 | {"readout": np.full((12, 3), 7e4, np.float32)}
        plan.x[:] = 0.0
    return watch(run, start(scale, params32), plan)[0]


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("kind", "path", "words"),
    [
        ("skips", "grads", "of the last 80 steps were skipped"),
        ("stuck_scale", "", "at its lower bound, 1, and 3 steps in a row"),
        ("overflow", "grads/carry", "most other gradients are finite"),
        ("underflow", "grads/embed", "of its nonzero values are subnormal"),
        ("saturation", "params/readout", "its master reaches 7"),
    ],
)
def test_a_planted_cause_is_named(kind, path, words):
    found = planted(kind)
    assert (kind, path) in found, found.keys()
    assert any(word in found[kind, path].message for word in words.split("|"))


@pytest.mark.thorough(0)
@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_a_loss_that_explodes_without_a_skip(policy):
    """Finite gradients, no loss scale: the loss goes far up. The master of a plain SGD follows."""
    start, run = program(policy, optimizer="sgd")
    plan = Plan(STEPS)
    plan.grads["readout"][60:] = -30.0  # uphill
    found, _ = watch(run, start(), plan)
    finding = found["loss_jump", ""]
    assert 60 < finding.step < 90 and "No step was skipped for it" in finding.message


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([2.0, 50.0, 1e4, 1e8, 1e12, 1.5e23, 1.5e23], 5),  # from the first steps on
        ([2.0 - 0.01 * (i % 5) for i in range(40)] + [2.3, 5.0, 5.0, 5.0], 43),
        ([0.1 * 1.1**i for i in range(100)], 29),  # slowly
        ([1e-8 * (1 + i % 3) + 0.9**i for i in range(300)], None),  # noise of a loss that is almost 0
        ([2.3, 9.0, 7.0, 3.0, 2.0, 1.0, 0.9] + [0.8] * 50, None),  # a bad start
        ([-1.0 - 0.1 * i for i in range(60)], None),
        ([1.0] * 30 + [40.0] + [1.0] * 30 + [40.0] + [1.0] * 9, None),  # single spikes
    ],
    ids=["at_once", "to_a_level", "slowly", "almost_0", "bad_start", "negative", "spikes"],
)
def test_losses_that_jump_and_others(losses, step):
    monitor = Monitor(warn=False)
    for i, loss in enumerate(losses):
        monitor.update(i, {}, loss=loss)
    monitor.finish()
    assert [f.step for f in monitor.findings] == ([] if step is None else [step])


@pytest.mark.thorough(0)
def test_gradients_that_were_never_scaled():
    start, run = program("fp16", grads_by="jax")
    found, _ = watch(run, start(), Plan(STEPS))
    assert set(found) == {("unscaled", "")}
    message = found["unscaled", ""].message
    assert "compute them by jaxmp.value_and_grad" in message and "loss scale of 65536" in message


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("clip", "words"), [("by hand", "1 / loss scale"), ("around", "before the gradients are uns")])
def test_gradients_that_were_clipped_while_they_were_scaled(clip, words):
    start, run = program("fp16", clip=clip)
    found, _ = watch(run, start(), Plan(STEPS))
    assert ("clipped", "") in found and ("unscaled", "") not in found
    assert words in found["clipped", ""].message and "Clip inside: " in found["clipped", ""].message


def test_a_param_that_was_changed_by_hand():
    """It is named before the next step reverts it; masters made anew are no finding."""
    start, run = program("bf16")
    _, (params, opt_state) = watch(run, start(), Plan(STEPS))
    params = params | {"carry": params["carry"] * 0.5}
    found, _ = watch(run, (params, opt_state), Plan(STEPS))
    assert set(found) == {("stale_master", "params/carry")}
    assert "reload_master_params(opt_state, params)" in found["stale_master", "params/carry"].message
    found, _ = watch(run, (params, jaxmp.reload_master_params(opt_state, params)), Plan(STEPS))
    assert not found


def test_a_norm_that_overflows():
    (finding,) = rules.infinite_norm(3, {"grad_norm": math.inf, "skipped": 0.0})
    assert "makes all gradients zero" in finding.message
    for healthy in ({"grad_norm": 1e19}, {"grad_norm": math.nan}, {"grad_norm": math.inf, "skipped": 1.0}, {}):
        assert not list(rules.infinite_norm(3, healthy))


def test_params_that_do_not_move():
    """Plain optax on bfloat16 params, with a learning rate below their spacing."""
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS32)
    tx = optax.sgd(1e-6)

    @jax.jit
    def run(params):
        def step(params, _):
            grads = jax.grad(loss_of)(params, X)
            stats = jaxmp.monitor.step_stats(grads, (), params, histogram=False)
            return optax.apply_updates(params, tx.update(grads, tx.init(params))[0]), stats

        return jax.lax.scan(step, params, None, length=5)[1]

    monitor, stats = Monitor(warn=False), jax.device_get(run(params))
    for i in range(5):
        monitor.update(i, {}, stats=jax.tree.map(lambda x, i=i: x[i], stats))
    monitor.finish()
    assert {(f.kind, f.path) for f in monitor.findings} == {("dead_update", f"params/{name}") for name in SHAPES}


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("rate", "is_named"), [(1e-2, False), (1e-12, True)], ids=["trains", "too-small"])
def test_steps_that_only_accumulate_move_nothing_and_are_not_blamed(rate, is_named):
    tx = jaxmp.mixed_precision(optax.MultiSteps(optax.adam(rate), 4), "bf16")
    params = jaxmp.get_policy("bf16").cast_to_param(PARAMS32)

    def step(carry, _):
        params, opt_state = carry
        grads = jaxmp.value_and_grad(loss_of)(params, X, opt_state=opt_state)[1]
        stats = jaxmp.monitor.step_stats(grads, opt_state, params, histogram=False)
        return jaxmp.apply_gradients(tx, grads, opt_state, params), stats

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, length=20)[1])
    monitor, stats = Monitor(warn=False), jax.device_get(run((params, tx.init(PARAMS32))))
    for i in range(20):
        monitor.update(i, {}, stats=jax.tree.map(lambda x, i=i: x[i], stats))
    monitor.finish()
    assert {f.kind for f in monitor.findings} == ({"dead_update"} if is_named else set())


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("scale", "kind"), [(3e4, "near_overflow"), (3e6, "overflow")])
def test_activations_that_leave_float16(scale, kind):
    """The scope that makes them is named, in a function without modules."""

    def loss_fn(params, x):
        with jax.named_scope("wide"):
            h = (x @ params).astype(jnp.float16)
        with jax.named_scope("after"):
            return jnp.mean((h.astype(jnp.float32) * 1e-4) ** 2)

    watched = jax.jit(jaxmp.monitor.watch_activations(loss_fn))
    _, seen = watched(scale * np.eye(4, dtype=np.float32), np.ones((2, 4), np.float32))
    step = jaxmp.monitor.step_stats({}, (), {}, activations=seen, histogram=False)
    monitor = Monitor()
    with pytest.warns(MonitorWarning, match=f"{kind} at activations/wide"):
        for i in range(3):
            monitor.update(i, {}, stats=step)
        monitor.finish()


@pytest.mark.parametrize(
    ("losses", "named"),
    [
        ([1.234] * 60, 49),
        ([math.nan, 1.234] + [1.234] * 58, None),
        ([1.234 + 1e-6] + [1.234] * 300, None),  # it moved once: it has converged
        ([6.90625] * 100 + [6.875] * 300, None),  # computed in bfloat16, in a warm-up
        ([1.0] * 210, 199),
        ([0.0] * 210, None),  # there is none yet
    ],
)
def test_a_loss_that_never_changes(losses, named):
    monitor = jaxmp.monitor.Monitor(warn=False)
    for step, loss in enumerate(losses):
        monitor.update(step, {"skipped": 0.0}, loss=loss)
    monitor.finish()
    found = {f.kind: f.step for f in monitor.findings}
    assert found.get("constant_loss") == named


def test_a_loss_that_explodes_between_skips():
    """float16: most steps of an explosion are skipped, and their losses show it too."""
    monitor = jaxmp.monitor.Monitor(warn=False)
    losses = {66: 4.99, 68: 263.0, 74: 2.3e8}
    high = 0.2
    for step in range(80):
        skipped = step >= 65 and step not in losses
        high = losses.get(step, high)
        monitor.update(step, {"skipped": float(skipped), "loss_scale": 2.0 ** (16 - max(step - 64, 0))}, loss=high)
    found = [f for f in monitor.findings if f.kind == "loss_jump"]
    assert found and found[0].step <= 69 and "before the skip" in found[0].message


@pytest.mark.thorough(1)
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_a_scale_that_falls_to_its_level_is_healthy_where_every_step_is_sampled(hysteresis):
    policy, x = jaxmp.get_policy("fp16"), jax.random.normal(jax.random.key(0), (16, 4))
    scale = jaxmp.DynamicLossScale(jnp.float32(65536), hysteresis=hysteresis)
    tx = jaxmp.mixed_precision(optax.adam(1e-2), policy, loss_scale=scale)
    params = {"w": jnp.full((4, 4), 8.0)}
    params, opt_state = policy.cast_to_param(params), tx.init(params)

    @jax.jit
    def step(params, opt_state):
        loss_fn = lambda p: jnp.mean((x.astype(jnp.float16) @ p["w"]).astype(jnp.float32) ** 2)  # noqa: E731
        loss, grads = jaxmp.value_and_grad(loss_fn)(params, opt_state=opt_state)
        stats = jaxmp.monitor.step_stats(grads, opt_state, params)
        return *jaxmp.apply_gradients(tx, grads, opt_state, params), loss, stats

    monitor = Monitor()
    for i in range(20):
        params, opt_state, loss, stats = step(params, opt_state)
        monitor.update(i, jaxmp.get_metrics(opt_state), loss=loss, stats=stats)
    monitor.finish()
    assert jaxmp.get_metrics(opt_state)["skipped_steps"] >= 2 and monitor.findings == []
