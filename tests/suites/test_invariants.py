"""The design's invariants over random runs: state machines that draw finite, huge, inf and NaN gradients.

A run is played twice: by the public chain under jit, and by `NaiveRun`, a rewrite of the documented rules in NumPy,
one scalar rule after the other. The optimizer is momentum SGD with factors that are powers of two, so that each
float32 operation rounds once in either, and the two agree bit for bit. After every step:

1.  what unscaled is what scaled (masters equal the rewrite's, also on steps that move the scale);
2.  a skipped step changed nothing but loss scale and counters, -0.0 included;
3.  masters and state are finite, the scale lies within its bounds, and a scale stuck at its floor is reported;
4.  state kept its types, and nothing was compiled but once;
5.  params are the rounded masters, and a kept leaf is its own.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import jaxmp
from helpers import assert_exact, assert_moved
from regimes import guarded

INITIAL = {"a": np.float32([1.0, -0.0, -2.5]), "b": np.float32([0.0, 1e-7, 40000.0]), "kept": np.float32([-0.0, 3.0])}
SPIKE = 2.0**20  # true gradients above this are what `skip_if` looks for
TOO_LARGE = 2.0**48  # no step is taken on a true gradient of this size
LEARNING_RATE, MOMENTUM = np.float32(2.0), np.float32(0.5)


class Config(NamedTuple):
    dtype: Any = np.float16
    scale: dict[str, Any] | float | None = None  # arguments of DynamicLossScale, a static scale, or none
    skip_if: bool = False


CONFIGS = {
    "fp16": Config(scale=dict(initial_scale=64.0, growth_interval=2, hysteresis=2, min_scale=0.25, max_scale=1024.0)),
    "fp16-refill": Config(
        scale=dict(initial_scale=2.0, growth_interval=3, hysteresis=2, min_scale=1.0, max_scale=8.0, refill="step")
    ),
    "fp16-factors": Config(
        scale=dict(initial_scale=16.0, growth_factor=4.0, backoff_factor=0.125, growth_interval=1, hysteresis=1),
        skip_if=True,
    ),
    "fp16-static": Config(scale=8.0),
    "bf16": Config(dtype=ml_dtypes.bfloat16),
    "bf16-spikes": Config(dtype=ml_dtypes.bfloat16, skip_if=True),
    "fp32": Config(dtype=np.float32),
}


def policy_of(config):
    name = {np.float16: "fp16", ml_dtypes.bfloat16: "bf16", np.float32: "fp32"}[config.dtype]
    return jaxmp.get_policy(name, keep_fp32=("kept",))


def is_spike(grads, metrics):
    return jaxmp.global_norm(grads, ord=np.inf) > SPIKE


@functools.cache
def program(name):
    """The chain of a configuration and its compiled step: shared by all examples."""
    config = CONFIGS[name]
    schedule = optax.scale_by_schedule(lambda count: -float(LEARNING_RATE))
    tx = jaxmp.mixed_precision(
        optax.chain(optax.trace(decay=float(MOMENTUM)), schedule),
        policy_of(config),
        loss_scale=jaxmp.DynamicLossScale(**config.scale) if isinstance(config.scale, dict) else config.scale,
        skip_if=is_spike if config.skip_if else None,
    )
    return tx, jax.jit(functools.partial(jaxmp.apply_gradients, tx))


class NaiveRun:
    """The same training in NumPy, written from the documentation."""

    def __init__(self, config):
        self.config = config
        self.rule = {
            **dict(growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, hysteresis=2, min_scale=1.0),
            **dict(max_scale=2.0**32, refill="growth"),
            **(config.scale if isinstance(config.scale, dict) else {}),
        }
        self.dynamic = isinstance(config.scale, dict)
        self.scale = np.float32(self.rule["initial_scale"] if self.dynamic else config.scale or 1.0)
        self.growth_count, self.hysteresis_left = 0, self.rule["hysteresis"] if self.dynamic else 0
        self.masters = {k: v.copy() for k, v in INITIAL.items()}
        self.velocity = {k: np.zeros_like(v) for k, v in INITIAL.items()}
        self.count = self.skipped_steps = self.consecutive = self.pinned = self.saturated = 0
        self.skipped = False

    def param_dtype(self, name):
        return np.float32 if name == "kept" else self.config.dtype

    def params(self):
        return {name: cast(master, self.param_dtype(name)) for name, master in self.masters.items()}

    def step(self, scaled):
        with np.errstate(all="ignore"):
            grads = {k: g.astype(np.float32) * (np.float32(1) / self.scale) for k, g in scaled.items()}
            finite = all((np.abs(g) < TOO_LARGE).all() for g in grads.values())
            spike = self.config.skip_if and max(np.abs(g).max() for g in grads.values()) > SPIKE
            self.move_scale(finite)
            self.skipped = not finite or bool(spike)
            self.skipped_steps += self.skipped
            self.consecutive = self.consecutive + 1 if self.skipped else 0
            if self.skipped:
                return
            self.saturated = sum(
                int((np.abs(m) > 65504).sum())
                for name, m in self.masters.items()
                if self.param_dtype(name) == np.float16
            )
            self.count += 1
            for name, g in grads.items():
                self.velocity[name] = g + MOMENTUM * self.velocity[name]
                self.masters[name] = self.masters[name] + -LEARNING_RATE * self.velocity[name]

    def move_scale(self, finite):
        rule = self.rule
        at_floor = self.scale <= rule["min_scale"]
        self.pinned = 0 if finite else self.pinned + (self.dynamic and self.hysteresis_left <= 1 and at_floor)
        if not self.dynamic:
            return
        if finite:
            self.growth_count += 1
            if rule["refill"] == "step":
                self.hysteresis_left = rule["hysteresis"]
            if self.growth_count == rule["growth_interval"]:
                self.growth_count, self.hysteresis_left = 0, rule["hysteresis"]
                self.scale = np.float32(min(self.scale * rule["growth_factor"], rule["max_scale"]))
        else:
            self.growth_count = 0
            self.hysteresis_left = max(self.hysteresis_left - 1, 0)
            if self.hysteresis_left == 0:
                self.scale = np.float32(max(self.scale * rule["backoff_factor"], rule["min_scale"]))


def cast(master, dtype):
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    return np.clip(master, -largest, largest).astype(dtype)


# true gradients: nothing, tiny (lost or subnormal in fp16), ordinary, and large enough to overflow fp16 once scaled
TRUE_GRADIENTS = st.sampled_from(
    [0.0, -0.0, 2.0**-40, -(2.0**-24), 2.0**-20, 2.0**-8, -0.75, 1.0, 3.0, -96.0, 1000.0, -3000.0, 30000.0, -65504.0]
)
BAD_VALUES = st.sampled_from([np.inf, -np.inf, np.nan])
PLACES = st.sampled_from([(name, i) for name, leaf in INITIAL.items() for i in range(leaf.size)])


class Machine(RuleBasedStateMachine):
    """Random steps of one configuration; `name` is set by the subclass."""

    name = ""

    def __init__(self):
        super().__init__()
        self.config = CONFIGS[self.name]
        self.tx, self.apply = program(self.name)
        params32 = jax.tree.map(jnp.asarray, INITIAL)
        self.params, self.state = policy_of(self.config).cast_to_param(params32), self.tx.init(params32)
        self.types = jax.tree.map(jax.typeof, (self.params, self.state))
        self.naive = NaiveRun(self.config)

    def step(self, true, bad=()):
        """One step with `true` gradients, scaled and cast as a backward pass does it, and `bad` ones put in."""
        with np.errstate(all="ignore"):
            scaled = {k: (np.float32(g) * self.naive.scale).astype(self.naive.param_dtype(k)) for k, g in true.items()}
        for (leaf, i), value in bad:
            scaled[leaf][i] = value
        before = self.params, self.state
        self.params, self.state = self.apply(scaled, self.state, self.params)
        self.naive.step(scaled)
        if self.naive.skipped:
            assert_moved(self.params, before[0])
            assert_moved(guarded(self.state), guarded(before[1]))

    @rule(data=st.data())
    def finite_or_overflowing(self, data):
        self.step(
            {k: data.draw(st.lists(TRUE_GRADIENTS, min_size=v.size, max_size=v.size)) for k, v in INITIAL.items()}
        )

    @rule(g=st.sampled_from([0.0, -0.0, 2.0**-16, 0.5]), steps=st.integers(1, 3))
    def calm(self, g, steps):
        for _ in range(steps):
            self.step({k: np.full(v.shape, g) for k, v in INITIAL.items()})

    @rule(places=st.lists(PLACES, min_size=1, max_size=3), value=BAD_VALUES, steps=st.integers(1, 3))
    def overflow(self, places, value, steps):
        for _ in range(steps):
            self.step({k: np.ones(v.shape) for k, v in INITIAL.items()}, [(place, value) for place in places])

    @precondition(lambda self: self.config.dtype != np.float16)
    @rule(place=PLACES, value=st.sampled_from([2.0**21, 2.0**47, 2.0**48, -(2.0**48), -(2.0**100), 3.0e38]))
    def spike(self, place, value):
        """Finite and huge: a reason of the user's own to skip; from 2^48 on it always is one."""
        true = {k: np.zeros(v.shape) for k, v in INITIAL.items()}
        true[place[0]][place[1]] = value
        self.step(true)

    @invariant()
    def params_masters_and_inner_state_are_those_of_the_rewrite(self):
        naive = self.naive
        assert_exact(self.params, naive.params())
        assert_exact(jaxmp.get_master_params(self.state, self.params), naive.masters)
        assert_exact(optax.tree.get(self.state, "trace"), naive.velocity)
        assert int(self.state.optimizer_state[1].count) == naive.count

    @invariant()
    def scale_and_counters_are_those_of_the_rewrite(self):
        naive, metrics = self.naive, jaxmp.get_metrics(self.state)
        expected = {
            "loss_scale": naive.scale,
            "growth_count": np.int32(naive.growth_count),
            "hysteresis_left": np.int32(naive.hysteresis_left),
            "skipped": np.bool_(naive.skipped),
            "skipped_steps": np.int32(naive.skipped_steps),
            "consecutive_skips": np.int32(naive.consecutive),
            "pinned_overflows": np.int32(naive.pinned),
            "saturated_params": np.float32(naive.saturated),
        }
        assert_exact({k: metrics[k] for k in expected}, expected)

    @invariant()
    def everything_is_finite_and_in_bounds(self):
        for path, x in jax.tree_util.tree_leaves_with_path((self.params, self.state)):
            assert np.all(np.isfinite(np.asarray(x, np.float64))), jax.tree_util.keystr(path)
        if self.naive.dynamic:
            assert self.naive.rule["min_scale"] <= jaxmp.get_loss_scale(self.state) <= self.naive.rule["max_scale"]

    @invariant()
    def what_is_wrong_is_reported_and_nothing_else(self):
        look = functools.partial(jaxmp.check_progress, self.state, max_consecutive_skips=1000)
        if self.naive.pinned:
            with pytest.warns(UserWarning, match="pinned at its floor, .*: overflows could not"):
                look()
        else:
            look()  # a warning would be an error

    @invariant()
    def types_stay(self):
        assert jax.tree.map(jax.typeof, (self.params, self.state)) == self.types


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_invariants(name, request):
    machine = type(f"Machine_{name}", (Machine,), {"name": name})
    examples, steps = (12, 40) if request.config.getoption("all") else (6, 12)
    options = {"max_examples": examples, "stateful_step_count": steps, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(machine, settings=settings(deadline=None, **options))
    assert program(name)[1]._cache_size() == 1  # compiled once, for all runs together
