"""What is absent is named: gradients, finite state, updates; and 20 healthy runs stay silent.

Each run is a small real training, compiled as a scan over 100 steps. One step of ten is sampled, as the docs say.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp._src.monitor.step_stats import Fp8Stats
from jaxmp.monitor import Monitor

EVERY, CHUNK = 10, 100
RNG = np.random.default_rng(3)
X = RNG.normal(size=(512, 16)).astype(np.float32)
LABELS = ((X[:, 0] > 0) * 2 + (X[:, 1] > 0)).astype(np.int32)
TOKENS = np.minimum(RNG.zipf(1.3, size=(512, 9)) - 1, 255).astype(np.int32)  # most rows of 256 are rare
UNUSED = next(row for row in range(256) if row not in TOKENS)
PLACES = np.minimum(np.abs(X[:, 2]) * 2.6, 5).astype(np.int32)
DATA = {"x": X, "label": LABELS, "tokens": TOKENS, "place": PLACES}


class Model(NamedTuple):
    """A loss `(params, state, batch, i, alive) -> (loss, new state)`, its float32 params and its carried state."""

    loss: Callable[..., Any]
    params: Any
    state: Any = ()


class Wide(nn.Module):
    """Layers in a row; `drop`, `stop` (a layer without a gradient), `dead` (a layer whose relu gives 0)."""

    drop: float = 0.0
    norm: Any = nn.LayerNorm

    @nn.compact
    def __call__(self, x, key, alive):
        for name in ("first", "middle", "last"):
            y = nn.Dense(32, name=name)(x)
            if self.norm is nn.BatchNorm:
                y = nn.BatchNorm(use_running_average=False, name=f"{name}_norm")(y)
            elif self.norm is not None:
                y = nn.LayerNorm(name=f"{name}_norm")(y)
            y = nn.relu(y) * alive[name]
            x = x[:, : y.shape[1]] + y if x.shape == y.shape else y
        x = nn.Dropout(self.drop, deterministic=not self.drop)(x, rng=key)
        return nn.Dense(4, name="head")(x)


ALIVE = {name: np.float32(1) for name in ("first", "middle", "last")}


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def wide(policy, drop=0.0, norm=nn.LayerNorm):
    module = Wide(drop, norm)
    key = jax.random.key(0)
    init = jaxmp.autocast(module.init, "fp8") if policy == "fp8" else module.init
    variables = jax.jit(init)(key, X[:32], key, ALIVE)

    def loss(params, state, batch, i, alive):
        variables = {"params": params, "batch_stats": state} if state else {"params": params}
        out, new = module.apply(variables, batch["x"], jax.random.key(i), alive, mutable=["batch_stats"])
        return cross_entropy(out, batch["label"]), new.get("batch_stats", ())

    return Model(loss, variables["params"], variables.get("batch_stats", ()))


class Language(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, 32, name="embed")(tokens) + self.param("places", nn.initializers.normal(0.02), (1, 8, 32))
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(
            nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens)
        )
        x = x + nn.Dense(32, name="down")(nn.gelu(nn.Dense(64, name="up")(nn.LayerNorm()(x))))
        return nn.Dense(256, name="head")(nn.LayerNorm()(x))


def language(policy):
    module = Language()
    params = jax.jit(module.init)(jax.random.key(0), TOKENS[:2, :-1])["params"]

    def loss(params, state, batch, i, alive):
        return cross_entropy(module.apply({"params": params}, batch["tokens"][:, :-1]), batch["tokens"][:, 1:]), state

    return Model(loss, params)


class Experts(nn.Module):
    """Six experts, each a module of its own; most steps leave the last one without an example."""

    @nn.compact
    def __call__(self, x, places):
        x = nn.relu(nn.Dense(32, name="stem")(x))
        out = 0.0
        for e in range(6):
            y = nn.Dense(32, name=f"expert_{e}")(x)
            out += jnp.where((places == e)[:, None], nn.relu(y), 0)
        return nn.Dense(4, name="head")(x + out)


def experts(policy):
    module = Experts()
    params = jax.jit(module.init)(jax.random.key(0), X[:2], PLACES[:2])["params"]

    def loss(params, state, batch, i, alive):
        return cross_entropy(module.apply({"params": params}, batch["x"], batch["place"]), batch["label"]), state

    return Model(loss, params)


def after_a_warmup(policy, steps=25):
    """A second head, whose loss begins after some steps."""
    own = wide(policy)
    params = dict(own.params) | {"second": {"kernel": np.float32(RNG.normal(size=(16, 4)) / 4)}}

    def loss(params, state, batch, i, alive):
        params = dict(params)
        second = params.pop("second")
        loss, state = own.loss(params, state, batch, i, alive)
        return loss + jnp.where(i >= steps, cross_entropy(batch["x"] @ second["kernel"], batch["label"]), 0.0), state

    return Model(loss, params)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(16, 32, rngs=rngs), nnx.BatchNorm(32, rngs=rngs)
        self.middle, self.head = nnx.Linear(32, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x, alive):
        x = nnx.relu(self.norm(self.first(x))) * alive["first"]
        return self.head(x + nnx.relu(self.middle(x)) * alive["middle"])


def in_nnx(policy):
    graph, params, state = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def loss(params, state, batch, i, alive):
        model = nnx.merge(graph, params, state, copy=True)
        out = model(batch["x"], alive)
        return cross_entropy(out, batch["label"]), nnx.state(model, nnx.BatchStat)

    return Model(loss, params, state)


def carried(policy):
    """A recurrent net, whose state goes on from batch to batch."""
    params = {"in": RNG.normal(size=(16, 8)) / 4, "carry": RNG.normal(size=(8, 8)) / 4, "out": RNG.normal(size=(8, 4))}

    def loss(params, state, batch, i, alive):
        h = jnp.tanh(batch["x"] @ params["in"] + state["h"] @ params["carry"])
        return cross_entropy(h @ params["out"], batch["label"]), {"h": jax.lax.stop_gradient(h.astype(jnp.float32))}

    return Model(loss, jax.tree.map(np.float32, params), {"h": jnp.zeros((32, 8))})


def frozen_first(inner):
    def labels(params):
        return {name: "frozen" if name.startswith("first") else "trained" for name in params}

    return optax.multi_transform({"trained": inner, "frozen": optax.set_to_zero()}, labels)


class Fault:
    """Nothing wrong. Subclasses plant a fault."""

    def loss(self, loss):
        return loss

    def grads(self, i, grads):  # before step_stats
        return grads

    def late(self, i, grads):  # after it
        return grads

    def params(self, i, params):  # between two steps
        return params

    def state(self, i, state):
        return state


NO_FAULT = Fault()


class Program(NamedTuple):
    """A training, compiled once: `run(carry, steps, factors of the outputs of layers by step)`."""

    start: Any
    run: Callable[..., Any]


def program(model, inner, policy, fault=NO_FAULT, update=jaxmp.apply_gradients, every=EVERY):
    loss_fn, tx, policy = fault.loss(model.loss), jaxmp.mixed_precision(inner, policy), jaxmp.get_policy(policy)

    def step(carry, now):
        (params, opt_state, state), (i, alive) = carry, now
        params = fault.params(i, params)
        rows = jax.random.randint(jax.random.key(i), (32,), 0, len(X))
        batch = {name: jnp.asarray(x)[rows] for name, x in DATA.items()}
        grad_fn = jaxmp.value_and_grad(loss_fn, has_aux=True, policy=policy)
        (loss, new), grads = grad_fn(params, state, batch, i, alive, opt_state=opt_state)
        grads, sampled = fault.grads(i, grads), i % every == 0
        stats = jaxmp.monitor.step_stats(grads, opt_state, params, state=state, when=sampled, histogram=False)
        params, opt_state = update(tx, fault.late(i, grads), opt_state, params)
        state = fault.state(i, jaxmp.keep_if_skipped(opt_state, new, state))
        return (params, opt_state, state), (jaxmp.get_metrics(opt_state), loss, stats)

    params32 = jax.tree.map(jnp.asarray, model.params)
    start = policy.cast_to_param(params32), tx.init(params32), model.state
    return Program(start, jax.jit(lambda carry, *now: jax.lax.scan(step, carry, now)))


def watch(training, steps=100, every=EVERY, **alive):
    """The monitor of a run; `alive`: factors of the outputs of layers, one for each step."""
    monitor, carry = Monitor(warn=False), training.start
    factors = {name: np.ones(steps, np.float32) for name in ALIVE} | alive
    for first in range(0, steps, CHUNK):
        chunk = slice(first, first + CHUNK)
        carry, seen = training.run(carry, jnp.arange(first, first + CHUNK), {k: x[chunk] for k, x in factors.items()})
        metrics, loss, stats = jax.device_get(seen)
        for i in range(CHUNK):
            sample = jax.tree.map(lambda x, i=i: x[i], stats) if (first + i) % every == 0 else None
            monitor.update(first + i, {key: x[i] for key, x in metrics.items()}, loss=loss[i], stats=sample)
    monitor.finish()
    return monitor


def found(monitor):
    return {(f.kind, f.path): f for f in monitor.findings}


def adam(rate=3e-3):
    return optax.chain(jaxmp.clip_by_global_norm(1.0), optax.adam(rate))


def warm(make, rate):
    return make(optax.warmup_cosine_decay_schedule(0.0, rate, 50, 500))


HEALTHY = {
    "adam, fp32": (wide, "fp32", optax.adam(3e-3)),
    "adamw, bf16": (wide, "bf16", optax.adamw(3e-3, weight_decay=0.1)),
    "clipped adam, fp16": (wide, "fp16", adam()),
    "sgd, bf16": (wide, "bf16", optax.sgd(0.05)),
    "momentum, fp16, no norm": (functools.partial(wide, norm=None), "fp16", optax.sgd(0.05, momentum=0.9)),
    "lion, bf16": (wide, "bf16", optax.lion(3e-4)),
    "lamb, fp16": (wide, "fp16", optax.lamb(3e-3)),
    "rmsprop, fp32": (wide, "fp32", optax.rmsprop(1e-3)),
    "fused, bf16": (wide, "bf16", jaxmp.fused_adamw(3e-3, max_norm=1.0)),
    "warm-up and dropout, bf16": (functools.partial(wide, drop=0.5), "bf16", warm(optax.adamw, 3e-3)),
    "dropout, fp16": (functools.partial(wide, drop=0.5, norm=None), "fp16", optax.adam(3e-3)),
    "batch norm, fp16": (functools.partial(wide, norm=nn.BatchNorm), "fp16", optax.adamw(3e-3)),
    "batch norm, nnx, bf16": (in_nnx, "bf16", optax.adam(3e-3)),
    "rare rows, bf16": (language, "bf16", optax.adamw(1e-3)),
    "rare rows, fp16": (language, "fp16", adam(1e-3)),
    "rare rows, adafactor, fp32": (language, "fp32", optax.adafactor(1e-3)),
    "rare experts, fp16": (experts, "fp16", optax.adam(3e-3)),
    "rare experts, adamw, bf16": (experts, "bf16", optax.adamw(3e-3, weight_decay=0.1)),
    "rare experts, every step, fp16": (experts, "fp16", optax.adam(3e-3)),
    "a frozen layer, bf16": (wide, "bf16", frozen_first(optax.adam(3e-3))),
    "a frozen layer, sgd, fp32": (wide, "fp32", frozen_first(optax.sgd(0.05))),
    "adam, fp8": (wide, "fp8", adam()),
    "adamw and dropout, fp8": (functools.partial(wide, drop=0.3), "fp8", optax.adamw(3e-3)),
    "a later head, bf16": (after_a_warmup, "bf16", optax.adamw(3e-3)),
    "accumulated, fp16": (wide, "fp16", optax.MultiSteps(adam(), 4)),
    "carried state, bf16": (carried, "bf16", optax.adam(3e-3)),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_of_500_steps_is_silent(name):
    make, policy, inner = HEALTHY[name]
    every = 1 if "every step" in name else EVERY
    monitor = watch(program(make(policy), inner, policy, every=every), 500, every)
    assert not monitor.findings, str(monitor)
    losses = [row["loss"] for row in monitor.steps]
    assert np.mean(losses[-50:]) < np.mean(losses[:20])


# What is absent is named within 50 steps


class Detached(Fault):
    """A loss, or a layer, behind stop_gradient."""

    def __init__(self, name=None):
        self.name = name

    def loss(self, loss):
        def detached(params, *rest):
            stop = jax.lax.stop_gradient
            return loss(
                stop(params) if self.name is None else dict(params) | {self.name: stop(params[self.name])}, *rest
            )

        return detached


class ClippedOutside(Fault):
    """Optax's clip on the scaled gradients, before or after the statistics are taken."""

    def __init__(self, late):
        self.is_late = late

    def clipped(self, grads):
        return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]

    def grads(self, i, grads):
        return grads if self.is_late else self.clipped(grads)

    def late(self, i, grads):
        return self.clipped(grads) if self.is_late else grads


def findings_of(model, inner, policy, fault):
    return found(watch(program(model, inner, policy, fault)))


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("make", "policy", "inner"),
    [
        (wide, "bf16", optax.adamw(3e-3, weight_decay=0.1)),
        (functools.partial(wide, norm=None), "fp16", adam()),
        (wide, "fp8", adam()),
        (in_nnx, "bf16", optax.sgd(0.05, momentum=0.9)),
        (wide, "fp32", optax.sgd(0.05)),
    ],
    ids=["adamw-bf16", "adam-fp16", "adam-fp8", "momentum-bf16-nnx", "sgd-fp32"],
)
def test_a_layer_that_is_dead_from_a_step_on(make, policy, inner):
    training = program(make(policy), inner, policy)
    for since in (0, 1, 23, 53, 101):
        named = found(watch(training, 200, middle=(np.arange(200) < since).astype(np.float32)))
        assert {("no_gradient", f"grads/middle/{leaf}") for leaf in ("kernel", "bias")} <= named.keys(), since
        others = [key for key in named if key[0] != "no_gradient" or not key[1].startswith("grads/middle")]
        assert others == ([("lost_gradients", "")] if policy == "fp8" else [])  # which is another word for it
        steps = [finding.step for (kind, _), finding in named.items() if kind == "no_gradient"]
        assert since < min(steps) and max(steps) <= since + 50, (since, steps)
        message = named["no_gradient", "grads/middle/kernel"].message
        assert "stop_gradient" in message
        if since != 1:  # in float16 the first sample may be of a step that overflowed
            assert ("It had gradients before" in message) == (since > 0)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp8", "fp32"])
def test_a_layer_that_is_detached(policy):
    named = findings_of(wide(policy), optax.adam(3e-3), policy, Detached("first"))
    assert set(named) == {("no_gradient", f"grads/first/{leaf}") for leaf in ("kernel", "bias")}
    assert all(finding.step <= 50 and "It never had one" in finding.message for finding in named.values())


@pytest.mark.thorough(0)
@pytest.mark.parametrize("policy", ["fp16", "bf16", "fp8", "fp32"])
def test_a_loss_that_is_detached(policy):
    named = findings_of(wide(policy), optax.adamw(3e-3), policy, Detached())
    assert set(named) == {("no_gradient", "grads")}
    finding = named["no_gradient", "grads"]
    assert finding.step <= 50 and "Is the loss detached" in finding.message


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    "inner", [optax.adam(3e-3), optax.adamw(3e-3, weight_decay=0.1), optax.sgd(0.1)], ids=["adam", "adamw", "sgd"]
)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.filterwarnings("ignore:gradients that are multiplied by a loss scale must not be clipped")
def test_a_clip_that_makes_all_float16_gradients_zero(late, inner):
    """The norm of scaled gradients overflows float16: named, whether statistics are taken before the clip or after."""
    named = findings_of(wide("fp16"), inner, "fp16", ClippedOutside(late))
    assert min(finding.step for finding in named.values()) <= 50
    assert all(("mixed_precision" in finding.message) for finding in named.values())
    kinds = {kind for kind, _ in named}
    assert "dead_update" in kinds if late else set(named) == {("no_gradient", "grads")}


def test_a_norm_that_is_zero_is_named_without_samples():
    monitor = Monitor(warn=False)
    for i in range(60):
        monitor.update(i, {"grad_norm": 0.0, "loss_scale": 2.0**16, "skipped": 0.0}, loss=1.0)
    monitor.finish()
    (finding,) = monitor.findings
    assert (finding.kind, finding.path) == ("no_gradient", "grads") and finding.step <= 50
    assert "put it inside, jaxmp.mixed_precision(optax.chain(" in finding.message


# State that is not finite


class BadState(Fault):
    """One value of each carried array that fits is replaced at step 20, once."""

    def __init__(self, part, value):
        self.part, self.value = part, value

    def state(self, i, state):
        def bad(path, x):
            is_it = self.part in jax.tree_util.keystr(path)
            return jnp.where((i == 20) & (jnp.arange(x.size).reshape(x.shape) == 1), self.value, x) if is_it else x

        return jax.tree_util.tree_map_with_path(bad, state)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("make", "policy", "part", "value", "path"),
    [
        (functools.partial(wide, norm=nn.BatchNorm), "bf16", "first_norm']['var", jnp.nan, "state/first_norm/var"),
        (functools.partial(wide, norm=nn.BatchNorm), "fp16", "first_norm']['mean", jnp.inf, "state/first_norm/mean"),
        (in_nnx, "bf16", "mean", jnp.nan, "state/norm/mean"),
        (carried, "bf16", "h", jnp.nan, "state/h"),
    ],
    ids=["linen", "linen-inf", "nnx", "carried"],
)
def test_state_that_is_not_finite(make, policy, part, value, path):
    named = findings_of(make(policy), optax.adam(3e-3), policy, BadState(part, value))
    finding = named["nonfinite_state", path]
    assert 20 < finding.step <= 70 and "keep_if_skipped(opt_state, new, old)" in finding.message
    # Statistics of BatchNorm do not change the loss. A state that the loss reads makes it NaN.
    assert len(named) == 1 or path == "state/h"


def test_an_infinite_value_from_the_start_may_be_meant():
    """Such as the best loss so far; NaN never is. Arrays of the params are not read twice."""
    params = {"w": jnp.ones(4)}
    best, count = jnp.float32(jnp.inf), jnp.int32(0)

    @jax.jit
    def stats_of(params, best):
        return jaxmp.monitor.step_stats(params, (), params, state={"best": best, "n": count, "p": params["w"]})

    stats = stats_of(params, best)
    assert set(stats.state) == {"best"} and stats.state["best"].dtype == np.float32
    assert float(stats.state["best"]) == np.inf
    for value, is_named in ((jnp.inf, False), (jnp.nan, True)):
        monitor = Monitor(warn=False)
        for i in range(5):
            monitor.update(10 * i, {}, stats=stats_of(params, jnp.float32(value)))
        monitor.finish()
        assert (("nonfinite_state", "state/best") in found(monitor)) == is_named


class BadParam(Fault):
    """A rare row of the embedding is overwritten by NaN, in params and masters of an optimizer without a guard."""

    def params(self, i, params):
        table = params["embed"]["embedding"]
        table = jnp.where((i == 35) & (jnp.arange(256)[:, None] == UNUSED), jnp.nan, table)
        return params | {"embed": {"embedding": table}}


@pytest.mark.thorough(0)
def test_a_param_that_is_not_finite_and_not_used():
    named = findings_of(language("fp32"), optax.sgd(0.1), "fp32", BadParam())
    assert set(named) == {("nonfinite_state", "params/embed/embedding")}
    assert named["nonfinite_state", "params/embed/embedding"].step <= 85


# Faults that come and go


tensor_stats = jax.jit(functools.partial(jaxmp.monitor.tensor_stats, histogram=False))


@functools.cache
def healthy_sample():
    step_stats = jax.jit(lambda grads, params: jaxmp.monitor.step_stats(grads, (), params, histogram=False))
    return jax.device_get(step_stats({"w": np.full(64, 1e-3, np.float16)}, {"w": np.ones(64, np.float32)}))


def sample(**kwargs):
    """The statistics of a step as a monitor reads them."""
    return healthy_sample()._replace(probes={}, **kwargs)


def overflowing(share):
    seen = tensor_stats({"layer": np.full(4, 3e4 * share + 1, np.float16)})
    return sample(activations=jax.device_get(seen))


def underflowing(is_so):
    grads = {"w": np.full(64, 1e-6 if is_so else 1e-3, np.float16)}
    return sample(grads=jax.device_get(tensor_stats(grads)))


def saturating(is_so):
    path = "layer/fp8_lhs_e4m3_log2_scale"
    return sample(fp8=Fp8Stats({path: np.float32(9)}, {path: np.float32(64)}, {path: np.bool_(is_so)}))


def not_finite(is_so):
    return sample(state={"mean": np.float32(np.nan if is_so else 1)})


@pytest.mark.thorough(2)
@pytest.mark.parametrize("pattern", ["1001", "11000", "01"], ids=["thirds", "bursts", "every-second"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (overflowing, "near_overflow"),
        (underflowing, "underflow"),
        (saturating, "saturation"),
        (not_finite, "nonfinite_state"),
    ],
    ids=["near_overflow", "underflow", "saturation", "state"],
)
def test_a_fault_that_comes_and_goes_is_found_by_its_rate(make, kind, pattern):
    monitor, samples = Monitor(warn=False), {c: make(c == "1") for c in "01"}
    for i in range(30):
        monitor.update(i, {}, stats=samples[pattern[i % len(pattern)]])
    monitor.finish()
    assert {kind for kind, _ in found(monitor)} == {kind}


def test_what_happens_now_and_then_is_no_fault():
    monitor, samples = Monitor(warn=False), {is_so: saturating(is_so) for is_so in (True, False)}
    for i in range(300):
        monitor.update(i, {}, stats=samples[i % 8 == 0])
    monitor.finish()
    assert not monitor.findings


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("is_high", "last"),
    [
        (lambda i: i >= 60 and i % 8 == 0, 60 + 50),  # every few steps, from a step on
        (lambda i: i >= 100 and i % 20 < 2, 100 + 50),  # in bursts of two
        (lambda i: i % 8 == 0 and i > 10, None),  # always so: another kind of batch
        (lambda i: i in (60, 80, 100), None),
    ],
    ids=["often", "bursts", "always", "now-and-then"],
)
def test_losses_that_jump_every_few_steps(is_high, last):
    monitor = Monitor(warn=False)
    for i in range(200):
        monitor.update(i, {"skipped": 0.0}, loss=9.0 if is_high(i) else 1.0 + 1.5 * 0.9**i)
    monitor.finish()
    kinds = {finding.kind: finding for finding in monitor.findings}
    assert set(kinds) == ({"loss_jump"} if last else set())
    if last:
        assert kinds["loss_jump"].step <= last and "of the last 50 steps" in kinds["loss_jump"].message


# A param that is not its master


class ByHand(Fault):
    """A layer is halved before step 47, which is not sampled."""

    def params(self, i, params):
        kernel = params["middle"]["kernel"]
        return params | {"middle": params["middle"] | {"kernel": jnp.where(i == 47, kernel * 0.5, kernel)}}


def by_updates(tx, grads, opt_state, params):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@pytest.mark.thorough(0)
def test_a_param_that_was_changed_by_hand_is_found_in_that_step():
    """By the count of `tx.update`. No sample sees it: the next step writes the param again."""
    training = program(wide("bf16"), optax.adam(3e-3), "bf16", ByHand(), update=by_updates)
    named = found(watch(training))
    assert set(named) == {("stale_master", "params")}
    finding = named["stale_master", "params"]
    assert finding.step == 47 and "reload_master_params(opt_state, params) after the change" in finding.message
