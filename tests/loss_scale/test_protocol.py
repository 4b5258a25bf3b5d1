"""Loss-scale objects: jmp's protocol, jmp's own objects and what breaks in them, a user's own class, and bad input."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_exact, assert_moved, assert_same_program
from jaxmp._src.loss_scale import protocol

PRESETS = ("megatron", "torch", "deepspeed", "deepspeed_fused", "apex", "apex_amp", "mmcv")

SCALERS = {
    "default": jaxmp.DynamicLossScale,
    "refill": functools.partial(jaxmp.DynamicLossScale, refill="step", min_scale=None, max_scale=None),
    **{name: functools.partial(jaxmp.DynamicLossScale.preset, name) for name in PRESETS},
    "static": functools.partial(jaxmp.StaticLossScale, 8),
    "static from array": lambda: jaxmp.StaticLossScale(jnp.int32(8)),
    "none": jaxmp.NoOpLossScale,
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["default", "static", "static from array", "none"])
def test_jmp_protocol(name):
    scaler = SCALERS[name]()
    scale = np.float32(scaler.loss_scale)
    of_16_bits = {"f16": np.full(2, 0.5, np.float16), "bf16": jnp.bfloat16(3.0)}
    tree = of_16_bits | {"n": np.arange(2), "key": jax.random.key(0)}
    scaled, unscaled = scaler.scale(tree), scaler.unscale(tree)
    assert_exact(scaled, tree | {"f16": np.full(2, 0.5 * scale), "bf16": 3 * scale})
    assert_exact(unscaled, tree | {"f16": np.full(2, np.float32(0.5 / scale)), "bf16": np.float32(3 / scale)})
    assert_exact(scaler.loss_scale, scale)
    assert type(scaler.adjust(jnp.array(True))) is type(scaler)


@jax.jit
def jit_adjust(scaler, finite):
    return scaler.adjust(finite)


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", SCALERS)
def test_leaves_keep_their_strong_dtypes_and_a_round_trip_keeps_the_rule(name):
    """A weakly typed scale follows the dtype of what it meets: in float16 65536 is inf (flax's DynamicScale)."""
    scaler = SCALERS[name]()
    types = [jax.typeof(x) for x in jax.tree.leaves(scaler)]
    for leaf in types:
        assert not leaf.weak_type and leaf.dtype in (jnp.float32, jnp.int32) and leaf.shape == ()
    for finite in (True, False, np.bool_(True)):
        for adjusted in (scaler.adjust(finite), jit_adjust(scaler, finite)):
            assert [jax.typeof(x) for x in jax.tree.leaves(adjusted)] == types
            assert jax.tree.structure(adjusted) == jax.tree.structure(scaler)
    rebuilt = jax.tree.map(lambda x: x, scaler)
    assert repr(rebuilt) == repr(scaler)
    for _ in range(4):
        scaler, rebuilt = jit_adjust(scaler, False), jit_adjust(rebuilt, False)
        assert_same_program(rebuilt, scaler)


def test_jmp_dynamic_scale_is_taken_over_step_by_step():
    theirs = jmp.DynamicLossScale(
        jnp.float32(2.0**10), jnp.int32(2), period=4, factor=4, min_loss_scale=jnp.float32(2.0)
    )
    ours = protocol.as_loss_scale(theirs)
    finite, rows = np.random.default_rng(0).random(60) > 0.3, []
    for step_finite in finite:
        theirs = theirs.adjust(jnp.array(step_finite))  # not under jit, where it loses its floor
        rows.append((np.float32(theirs.loss_scale), np.int32(theirs.counter)))

    @jax.jit
    def scan(ours, finite):
        def step(ours, finite):
            ours = ours.adjust(finite)
            return ours, (ours.loss_scale, ours.growth_count)

        return jax.lax.scan(step, ours, finite)[1]

    assert_exact(scan(ours, finite), tuple(np.stack(column) for column in zip(*rows, strict=True)))


def test_a_floor_of_zero_of_jmp_is_none():
    scale = protocol.as_loss_scale(jmp.DynamicLossScale(jnp.float32(8.0), min_loss_scale=jnp.float32(0.0)))
    for _ in range(5):
        scale = jit_adjust(scale, False)
    assert_exact(scale.loss_scale, 0.25)


def test_jmp_scales_inside_mixed_precision():
    params = jnp.ones(2, jnp.float16)
    bad = jnp.array([np.nan, 1.0], jnp.float16)
    for theirs, after in (
        (jmp.DynamicLossScale(jnp.float32(16.0), factor=4, min_loss_scale=jnp.float32(8.0)), 8.0),
        (jmp.StaticLossScale(16.0), 16.0),
    ):
        tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=theirs)
        step = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
        opt_state = tx.init(params)
        for _ in range(2):
            same, opt_state = step(bad, opt_state, params)
            assert_exact(jaxmp.get_loss_scale(opt_state), after)
            assert_moved(same, params)
        moved, _ = step(jnp.full(2, after, jnp.float16), opt_state, params)
        assert_exact(moved, jnp.zeros(2, jnp.float16))


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (jmp.StaticLossScale(np.float16(128.0)), jaxmp.StaticLossScale(128.0)),
        (jmp.NoOpLossScale(), jaxmp.NoOpLossScale()),
        (None, jaxmp.NoOpLossScale()),
        (128, jaxmp.StaticLossScale(128.0)),
        (np.float64(128.0), jaxmp.StaticLossScale(128.0)),
        (jnp.float32(128.0), jaxmp.StaticLossScale(128.0)),
    ],
    ids=["jmp static", "jmp none", "None", "int", "numpy", "array"],
)
def test_what_stands_for_a_scale(scale, expected):
    assert_exact(protocol.as_loss_scale(scale), expected)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["loss_scale", "overflows"], meta_fields=["divisor"])
@dataclasses.dataclass(frozen=True)
class DividingScale:
    """A user's own scaler: divides by `divisor` at every second overflow and never grows."""

    loss_scale: Any
    overflows: Any
    divisor: float

    def scale(self, tree):
        return jax.tree.map(lambda x: x * self.loss_scale, tree)

    def unscale(self, tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32) / self.loss_scale, tree)

    def adjust(self, grads_finite):
        overflows = jnp.where(grads_finite, self.overflows, self.overflows + 1)
        falls = ~grads_finite & (overflows % 2 == 0)
        return dataclasses.replace(
            self, loss_scale=jnp.where(falls, self.loss_scale / self.divisor, self.loss_scale), overflows=overflows
        )


def test_a_users_own_scaler():
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale=DividingScale(jnp.float32(64.0), jnp.int32(0), 4.0))
    params = {"w": np.zeros(2, np.float16)}
    traces = []

    @jax.jit
    def step(params, opt_state, x):
        traces.append(1)
        value_and_grad = jaxmp.value_and_grad(lambda params, x: jnp.sum((params["w"] * x).astype(jnp.float32)))
        loss, grads = value_and_grad(params, x, opt_state=opt_state)
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, loss, grads

    opt_state = tx.init(params)
    types = jax.tree.map(jax.typeof, opt_state)
    expected = [(1.0, 64.0, -1.0), (np.inf, 64.0, -1.0), (1.0, 64.0, -2.0), (np.inf, 16.0, -2.0), (0.5, 16.0, -2.5)]
    for x, scale_after, w in expected:
        scale_before = jaxmp.get_loss_scale(opt_state)
        params, opt_state, _, grads = step(params, opt_state, np.full(2, x, np.float16))
        assert_exact(grads["w"], np.full(2, x * scale_before, np.float16))
        assert_exact(jaxmp.get_loss_scale(opt_state), scale_after)
        assert_exact(params["w"], np.full(2, w, np.float16))
        assert jax.tree.map(jax.typeof, opt_state) == types
    assert len(traces) == 1
    assert_exact(opt_state.scaling.scaler_leaves, (16.0, 2))
    assert_exact(jaxmp.get_metrics(opt_state)["skipped_steps"], 2)
    assert np.isnan(jaxmp.get_metrics(opt_state)["growth_count"])


# Bad input


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"initial_scale": 0.0}, "initial_scale must be > 0; got 0.0"),
        ({"initial_scale": math.nan}, "initial_scale must be > 0; got nan"),
        ({"growth_factor": 1.0}, "growth_factor must be > 1; got 1.0"),
        ({"growth_factor": math.nan}, "growth_factor must be > 1"),
        ({"backoff_factor": 1.0}, "backoff_factor must be between 0 and 1, both excluded; got 1.0"),
        ({"backoff_factor": 0}, "backoff_factor must be between 0 and 1, both excluded; got 0"),
        ({"growth_interval": 0}, "growth_interval must be >= 1 step; got 0"),
        ({"hysteresis": 0}, "hysteresis must be >= 1 overflow; 1 is no hysteresis; got 0"),
        ({"min_scale": 0.0}, "min_scale must be > 0; pass None for no floor; got 0.0"),
        ({"max_scale": math.inf}, "max_scale must be finite; pass None for no ceiling; got inf"),
        ({"min_scale": 2.0**17}, r"min_scale <= initial_scale <= max_scale.*got 131072.0.*65536.0.*4294967296.0"),
        ({"max_scale": 2.0}, "pass None for a bound"),
        ({"initial_scale": 2.0**33}, "Move initial_scale, or"),
        ({"refill": "always"}, r"""refill must be "growth" \(Megatron-LM\) or "step" \(apex\); got 'always'"""),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_a_bad_number_is_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        jaxmp.DynamicLossScale(**kwargs)


def test_presets_check_their_names_and_overrides():
    for name in PRESETS:
        with pytest.raises(ValueError, match="hysteresis must be >= 1 overflow; 1 is no hysteresis; got 0"):
            jaxmp.DynamicLossScale.preset(name, hysteresis=0)
    with pytest.raises(ValueError, match="a preset is one of 'megatron', 'torch'.*; got 'nvidia'"):
        jaxmp.DynamicLossScale.preset("nvidia")


@pytest.mark.parametrize("scale", [0.0, -2.0, math.inf, math.nan])
def test_a_static_scale_is_positive_and_finite(scale):
    with pytest.raises(ValueError, match=f"a static loss scale must be positive and finite; got {scale}"):
        jaxmp.StaticLossScale(scale)


def test_what_is_no_loss_scale_is_named():
    with pytest.raises(TypeError, match=r"an object with jmp's protocol; got 'dynamic', which lacks .loss_scale"):
        protocol.as_loss_scale("dynamic")
    with pytest.raises(TypeError, match="a class: pass an instance of it"):
        protocol.as_loss_scale(jaxmp.DynamicLossScale)
    with pytest.raises(TypeError, match="which lacks .loss_scale"):
        jaxmp.shared_loss_scale(object())
    with pytest.raises(ValueError, match=r"got 'torch'\. .*DynamicLossScale.preset\(\"megatron\"\)"):
        jaxmp.mixed_precision(optax.sgd(1.0), "fp16", loss_scale="torch")


# Values that are not there yet


RULE = {
    "initial_scale": 4.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 1,
    "hysteresis": 1,
    "min_scale": 2.0,
    "max_scale": 8.0,
}


def test_traced_numbers_pass():
    """Only Python numbers can be checked, so all others must come through: a factory under inject_hyperparams."""

    @jax.jit
    def adjust(rule, finite):
        scaler = jaxmp.DynamicLossScale(**rule)
        return scaler.adjust(finite).loss_scale, scaler.is_pinned(finite)

    for finite, expected in ((True, 8.0), (False, 2.0)):
        assert_exact(adjust(RULE, finite), (expected, False))
    for name in RULE:  # beside Python numbers
        rule_with = lambda x, name=name: jaxmp.DynamicLossScale(**(RULE | {name: x})).adjust(True).loss_scale  # noqa: E731
        jax.eval_shape(rule_with, RULE[name])


def test_scales_under_inject_hyperparams():
    @functools.partial(optax.inject_hyperparams, static_args=("policy",))
    def make(learning_rate, initial_scale, policy):
        loss_scale = jaxmp.DynamicLossScale(initial_scale, hysteresis=1)
        return jaxmp.mixed_precision(optax.sgd(learning_rate), policy, loss_scale=loss_scale)

    tx = make(learning_rate=1.0, initial_scale=4.0, policy="fp16")
    params = jnp.zeros(1, jnp.float16)
    opt_state = tx.init(params)
    update = jax.jit(tx.update)
    for grad, scale_after, w in ((8.0, 4.0, -2.0), (np.inf, 2.0, -2.0), (8.0, 2.0, -6.0)):
        updates, opt_state = update(jnp.array([grad], jnp.float16), opt_state, params)
        params = optax.apply_updates(params, updates)
        assert_exact(jaxmp.get_loss_scale(opt_state), scale_after)
        assert_exact(params, jnp.array([w], jnp.float16))


def test_a_sweep_in_one_program():
    """Learning rates and scales as arrays, from `init` on: nothing may ask what they are."""

    @jax.jit
    @jax.vmap
    def run(learning_rate, initial_scale):
        loss_scale = jaxmp.DynamicLossScale.preset("apex_amp", initial_scale=initial_scale)
        inner = optax.chain(jaxmp.clip_by_global_norm(initial_scale), optax.sgd(learning_rate))
        tx = jaxmp.mixed_precision(inner, "fp16", loss_scale=loss_scale)
        params = jnp.zeros(2, jnp.float16)
        opt_state = tx.init(params)
        for grad in (8.0, np.inf):
            params, opt_state = jaxmp.apply_gradients(tx, jnp.array([grad, 0.0], jnp.float16), opt_state, params)
        return params[0], jaxmp.get_loss_scale(opt_state)

    params, scales = run(jnp.array([1.0, 0.5]), jnp.array([4.0, 8.0]))
    assert_exact((params, scales), (jnp.array([-2.0, -0.5], jnp.float16), jnp.array([2.0, 4.0])))
