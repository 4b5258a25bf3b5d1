"""torch.amp's scaler as an object: recorded traces of the real one, its order of calls, and devices that agree.

Where a test compares with torch and does not ask for equality, the docstring of jaxmp/_src/porting/grad_scaler.py
names the difference.
"""

import functools
import math

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import lax

import jaxmp
import regimes
from helpers import assert_close, assert_exact, assert_moved, assert_same_program, assert_within_ulps
from jaxmp._src.base import compat
from jaxmp._src.devices import collectives
from jaxmp._src.loss_scale import static
from oracle_data import load, name_of
from regimes import AXIS, DEVICES

TORCH = load("torch_amp_grad_scaler")
TINY = float(np.finfo(np.float32).tiny)  # XLA flushes what is smaller to zero
SGD = optax.sgd(1.0)
unscaled = jax.jit(lambda scaler, grads: scaler.unscale(grads))
sgd_step = jax.jit(lambda scaler, grad, param: scaler.step(SGD, grad, SGD.init(param), param))
LONGEST = max(len(case["found_inf"]) for case in TORCH["cases"])


def scaled(scaler):
    """`scaler`, after it has scaled a loss."""
    scaler.scale(jnp.float32(1.0))
    return scaler


# traces of torch


@jax.jit
def run(scaler, values):
    """One step for each gradient in `values`: (scale, growth tracker, stepped) after each."""

    def one(carry, value):
        scaler, param = carry
        new_param, _, scaler = scaler.step(SGD, value, SGD.init(param), param)
        scaler = scaler.update()
        return (scaler, jnp.zeros(())), (scaler.get_scale(), scaler._loss_scale.growth_count, new_param != param)

    _, trace = lax.scan(one, (scaler, jnp.zeros(())), values)
    return trace


SUNK = "no_floor_underflow_to_zero"
REFUSED = "init_scale_inf"  # torch goes on from inf; no scaler of ours starts or loads one


def trace_of(case):
    values = np.ones(LONGEST, np.float32)
    steps = len(case["found_inf"])
    values[:steps] = [{0: 1.0, 1: np.inf, 2: np.nan}[x] for x in case["found_inf"]]
    return [np.asarray(x)[:steps] for x in run(jaxmp.GradScaler(**case["kwargs"]), values)]


@pytest.mark.thorough(4)
@pytest.mark.parametrize("case", [case for case in TORCH["cases"] if case["name"] not in (SUNK, REFUSED)], ids=name_of)
def test_traces(case):
    scales, counts, stepped = trace_of(case)
    columns = [np.array([row[i] for row in case["trace"]], np.float64) for i in range(3)]
    expected = columns[0].astype(np.float32)
    if case["name"] in ("nonpow2", "growth_1.001"):  # torch rounds twice
        assert_close(scales, expected, rtol=len(expected) * 2.0**-23)
    else:
        assert_exact(scales, expected)
    assert_exact(counts, columns[1].astype(np.int32))
    before = np.append(np.float32(case["kwargs"].get("init_scale", 2.0**16)), expected[:-1])
    visible = before <= 2.0**126  # 1 / scale is 0 beyond, so a step that is taken does not move
    assert_exact(stepped, columns[2].astype(bool) & visible)


def test_with_a_scale_that_has_sunk_to_zero_nothing_is_stepped():
    """torch takes the last step, with gradients of 1 / 0."""
    (case,) = [case for case in TORCH["cases"] if case["name"] == SUNK]
    assert case["trace"][-1][2] == 1
    scales, _, stepped = trace_of(case)
    assert_close(scales, np.array([row[0] for row in case["trace"]], np.float32), atol=TINY)
    assert not stepped.any()


def test_update_with_a_new_scale():
    oracle = TORCH["update_new_scale"]
    scaler = jaxmp.GradScaler(oracle["init_scale"], growth_interval=oracle["growth_interval"])
    for overflows, new_scale, scale, count, stepped in oracle["trace"]:
        new_scale = jnp.float32(256.0) if new_scale == "tensor256" else new_scale
        grad = jnp.float32(np.inf if overflows else 1.0)
        param, _, scaler = sgd_step(scaler, grad, jnp.zeros(()))
        scaler = scaler.update(new_scale)
        assert_exact(tuple(jax.tree.leaves(scaler))[:2], (scale, count))
        assert (float(param) != 0) == bool(stepped)


def test_types_of_new_scale():
    """An int is taken, which torch does not; an int32 scalar is as in torch."""
    for new_scale, scale in ((512, 512.0), (512.0, 512.0), (jnp.int32(7), 7.0), (np.float64(3), 3.0)):
        scaler = scaled(jaxmp.GradScaler()).update(new_scale)
        assert_exact(scaler.get_scale(), scale)
        assert not scaler.get_scale().weak_type


@pytest.mark.parametrize(
    ("new_scale", "message"),
    [
        (0.0, "positive and finite; got new_scale=0.0"),
        (jnp.float32(math.nan), "positive and finite; got new_scale=nan"),
        (np.float32(-1.0), "positive and finite; got new_scale=-1.0"),
        (1e300, "positive and finite; got new_scale=1e[+]300"),
        (jnp.ones(1), r"must be a scalar; got new_scale of shape \(1,\). Pass a number, such as new_scale\[0\]"),
    ],
    ids=["0", "nan", "negative", "too_large", "one_element"],
)
def test_a_new_scale_that_is_none_raises(new_scale, message):
    with pytest.raises(ValueError, match=message):
        scaled(jaxmp.GradScaler()).update(new_scale)


def test_a_traced_scale_that_is_none_changes_nothing():
    update = jax.jit(lambda scaler, scale: scaler.update(scale).get_scale())
    scaler = scaled(jaxmp.GradScaler(8.0))
    for scale, expected in ((4.0, 4.0), (math.nan, 8.0), (0.0, 8.0), (math.inf, 8.0)):
        assert_exact(update(scaler, np.float32(scale)), np.float32(expected))


@functools.cache
def two_optimizers(unscale_a_first):
    @jax.jit
    def step(scaler, params, grad_a, grad_b):
        if unscale_a_first:
            grad_a, scaler = scaler.unscale(grad_a, optimizer="a")
        a, _, scaler = scaler.step(SGD, grad_a, SGD.init(params[0]), params[0], optimizer="a")
        b, _, scaler = scaler.step(SGD, grad_b, SGD.init(params[1]), params[1], optimizer="b")
        flags = [scaler.found_inf(optimizer=name) for name in ("a", "b")]
        return flags, (a, b), scaler.update()

    return step


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    "case", TORCH["multi_optimizer"], ids=lambda c: f"{c['inf_in_opt']}-{c['unscale_opt_a_first']}"
)
def test_several_optimizers(case):
    """Each skips by its own gradients, and the scale falls if any of them overflowed."""
    scaler, params = jaxmp.GradScaler(4.0, growth_interval=2), (jnp.zeros(()), jnp.zeros(()))
    for it, (found_inf, a, b, scale, count) in enumerate(case["trace"]):
        grads = [np.float32(np.inf if it in (0, 2) and bad else 4.0) for bad in case["inf_in_opt"]]
        flags, params, scaler = two_optimizers(case["unscale_opt_a_first"])(scaler, params, *grads)
        assert [float(x) for x in flags] == [x for (x,) in found_inf]
        assert_exact(params, (a, b))
        assert_exact(tuple(jax.tree.leaves(scaler))[:2], (scale, count))


@pytest.mark.thorough(3)
@pytest.mark.parametrize("case", TORCH["unscale_values"], ids=lambda c: f"{c['scale']}-{c['found_inf'][0]:.0f}")
def test_unscaled_values(case):
    grads = {"w": np.array(case["in"], np.float32)}
    out, scaler = unscaled(jaxmp.GradScaler(case["scale"]), grads)
    expected = np.array(case["out_bits"], np.int32).view(np.float32)
    values, found_inf = np.asarray(out["w"]), bool(scaler.found_inf())
    if case["inv_scale"] < TINY:  # is 0 here
        expected = np.where(np.isfinite(expected), np.copysign(np.float32(0.0), expected), np.float32(np.nan))
    assert_close(values, expected, atol=TINY)
    normal = (np.abs(grads["w"]) > TINY) & (np.abs(expected) > TINY)
    assert_exact(values[normal], expected[normal])
    overflowed = bool(np.any(~np.isfinite(expected) & np.isfinite(grads["w"])))  # in unscaling; torch does not look
    assert found_inf == (case["found_inf"] == [1.0] or overflowed)


def test_gradients_of_every_dtype_are_unscaled_in_float32():
    """Exactly: 2^-24, the smallest float16, over 2^16 is no float16 any more."""
    scaled_grads = [jnp.array([2.0**-24, 8.0], dtype) for dtype in (jnp.float16, jnp.bfloat16, jnp.float32)]
    grads, _ = scaled(jaxmp.GradScaler()).unscale(scaled_grads)
    assert_exact(grads, [np.array([2.0**-40, 2.0**-13], np.float32)] * 3)


def test_fused_adam():
    """Params, count, scale and growth tracker of torch's Adam; its float32 rounds otherwise."""
    (oracle,) = [rows for name, rows in TORCH["misc"].items() if name.startswith("fused_adam_cpu")]
    tx, scaler, param = optax.adam(0.1), jaxmp.GradScaler(4.0, growth_interval=2), jnp.float32(1.0)
    opt_state = tx.init(param)
    step = jax.jit(lambda s, g, o, p: s.step(tx, g, o, p))
    for grad, (value, unscaled, count, scale, tracker) in zip((4.0, np.inf, 8.0, 4.0), oracle, strict=True):
        assert_exact(scaled(scaler).unscale(jnp.float32(grad))[0], unscaled)
        param, opt_state, scaler = step(scaler, jnp.float32(grad), opt_state, param)
        scaler = scaler.update()
        assert_close(param, value, rtol=3e-6)
        assert_exact(optax.tree.get(opt_state, "count"), int(count))
        assert_exact(tuple(jax.tree.leaves(scaler))[:2], (scale, tracker))


# the order of calls

MESSAGES = {
    "_scale is None": "a scaler without a call. Differentiate lambda p: scaler.scale",
    "unscale_() has already been called": "before step; got 'optimizer', which was already unscaled since the last",
    "unscale_() is being called after step()": "once, before step; got 'optimizer', which has already stepped since",
    "step() has already been called": "must step once between two updates; got 'optimizer' twice",
    "No inf checks were recorded": "got no gradients since the last update()",
}


def play(ops):
    """(failing op, message) or (None, stage, scale, growth tracker, param, grad) after torch's script of one param."""
    scaler, param, grad = jaxmp.GradScaler(4.0, growth_interval=2), jnp.zeros(()), jnp.float32(8.0)
    for i, op in enumerate(ops):
        try:
            if op == "scale":
                scaler.scale(jnp.float32(1.0))
            elif op == "unscale":
                grad, scaler = scaler.unscale(grad)
            elif op == "step":
                argument = grad
                if scaler._structure.stage_of("optimizer") == "READY":  # torch leaves the gradient unscaled in place
                    grad, _ = scaler.unscale(grad)
                    argument = grad * scaler.get_scale()
                param, _, scaler = scaler.step(SGD, argument, SGD.init(param), param)
            else:
                scaler = scaler.update(8.0 if op == "update8" else None)
        except ValueError as e:
            return i, str(e)
    stage = scaler._structure.stage_of("optimizer")
    return None, stage, *(x.item() for x in jax.tree.leaves(scaler)[:2]), param.item(), grad.item()


@pytest.mark.thorough(1)
@pytest.mark.parametrize("first", ["scale", "unscale", "step", "update", "update8"])
def test_every_order_of_calls(first):
    """Each of torch's recorded scripts that begins so ends in the same state, or fails at the same call."""
    rows = [row for row in TORCH["state_machine"]["rows"] if row[0][0] == first]
    assert rows
    for ops, expected in rows:
        result = play(ops)
        if expected[0] is None:
            assert result == tuple(expected), ops
        else:
            (message,) = [ours for theirs, ours in MESSAGES.items() if theirs in expected[2]]
            assert result[0] == expected[0] and message in result[1], ops


def test_a_stage_goes_through_jit():
    """Unscaled in one function, stepped in another: the structure carries the stage."""
    grads, scaler = unscaled(jaxmp.GradScaler(4.0), jnp.float32(8.0))
    with pytest.raises(ValueError, match="which was already unscaled"):
        unscaled(scaler, grads)
    param, _, scaler = sgd_step(scaler, grads, jnp.zeros(()))
    assert_exact(param, -2.0)
    assert jax.tree.structure(scaler.update()) == jax.tree.structure(jaxmp.GradScaler(4.0))


def test_a_scaler_that_a_jitted_function_scaled_with_is_taken_at_its_word():
    """The gradients come from a function that is compiled already: nothing here sees its call of `scale`."""
    gradient = jax.jit(lambda s, p: jax.grad(lambda p: s.scale(p**2))(p))
    for _ in range(2):
        scaler = jaxmp.GradScaler(4.0)
        grads, _ = scaler.unscale(gradient(scaler, jnp.float32(3.0)))
        assert_exact(grads, 6.0)


def test_found_inf_is_known_from_unscale_to_update():
    _, scaler = scaled(jaxmp.GradScaler(4.0, growth_interval=1)).unscale({})  # without a leaf they are finite
    assert_exact((scaler.found_inf(), scaler.update().get_scale()), (False, 8.0))
    scaler = scaled(jaxmp.GradScaler())
    with pytest.raises(ValueError, match="got 'optimizer', known are: none. Call it on the scaler that they returned"):
        scaler.found_inf()
    _, scaler = scaler.unscale(jnp.array([1.0, np.nan]), optimizer="a")
    assert_exact(scaler.found_inf(optimizer="a"), True)
    with pytest.raises(ValueError, match="got 'b', known are: 'a'"):
        scaler.found_inf(optimizer="b")
    with pytest.raises(ValueError, match="known are: none"):
        scaler.update().found_inf(optimizer="a")


# whole steps


def loss_fn(params, x):
    return jnp.mean((x.astype(params["w"].dtype) @ params["w"]).astype(jnp.float32) ** 2 + params["b"])


PARAMS32 = {"w": np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(3, 2), "b": np.zeros((1, 1), np.float32)}
X = np.linspace(-2.0, 3.0, 12, dtype=np.float32).reshape(4, 3)
KEEP_BIAS = jaxmp.get_policy("fp16", keep_fp32=("b",))
OPTIMIZERS = {
    "momentum": (optax.sgd(0.1, momentum=0.9), None),
    "masters": (jaxmp.keep_master_params(optax.adam(0.1), KEEP_BIAS), KEEP_BIAS),
    "lbfgs": (optax.lbfgs(0.1, memory_size=2, linesearch=None), None),
}


def start(name):
    tx, policy = OPTIMIZERS[name]
    params32 = jax.tree.map(jnp.asarray, PARAMS32)
    return tx, (params32 if policy is None else policy.cast_to_param(params32)), jax.jit(tx.init)(params32)


@functools.cache
def step_of(tx, *, clip=False):
    @jax.jit
    def step(params, opt_state, scaler, x):
        grads = jax.grad(lambda p: scaler.scale(loss_fn(p, x)))(params)
        if clip:
            grads, scaler = scaler.unscale(grads)
            grads = jax.tree.map(lambda g: jnp.clip(g, -0.01, 0.01), grads)
        params, opt_state, scaler = scaler.step(tx, grads, opt_state, params)
        return params, opt_state, scaler.update()

    return step


@pytest.mark.parametrize(
    ("name", "bad"), [("masters", np.nan), pytest.param("lbfgs", np.inf, marks=pytest.mark.thorough(0))]
)
def test_a_skip_changes_nothing_but_the_scale(name, bad):
    """Params, masters, moments and counts stay, bit for bit, also where a moment is -0.0."""
    tx, params, opt_state = start(name)
    step = step_of(tx)
    params, opt_state, scaler = step(params, opt_state, jaxmp.GradScaler(64.0), X)
    x = X.copy()
    x[1, 1] = bad
    after_params, after_state, after = step(params, opt_state, scaler, x)
    assert_moved((after_params, after_state), (params, opt_state))
    assert_exact((scaler.get_scale(), after.get_scale()), (64.0, 32.0))
    last_params, _, _ = step(after_params, after_state, after, X)
    assert not np.array_equal(last_params["w"], params["w"])


def test_gradients_may_be_changed_between_unscale_and_step():
    _, params, _ = start("momentum")
    step, opt_state = step_of(SGD, clip=True), SGD.init(params)
    moved, _, scaler = step(params, opt_state, jaxmp.GradScaler(64.0), X)
    clipped = jax.tree.map(lambda g: np.clip(g, -0.01, 0.01), jax.jit(jax.grad(loss_fn))(params, X))
    assert_within_ulps(moved, jax.tree.map(lambda p, g: p - g, params, clipped), 4)
    assert np.any(np.abs(clipped["w"]) == np.float32(0.01))
    _, _, scaler = step(params, opt_state, scaler, X * np.float32(np.inf))
    assert_exact(scaler.get_scale(), 32.0)  # the clip hid the inf from the optimizer, not from the scaler


def test_disabled_is_plain_training():
    """The program of training without a scaler: nothing is scaled or checked, and a step with NaN is taken."""
    tx, params, opt_state = start("masters")

    @jax.jit
    def step(params, opt_state, scaler, x):
        return *jaxmp.apply_gradients(tx, jax.grad(loss_fn)(params, x), opt_state, params), scaler

    state = (params, opt_state, jaxmp.GradScaler(enabled=False))
    assert str(jax.make_jaxpr(step_of(tx))(*state, X)) == str(jax.make_jaxpr(step)(*state, X))
    for x in (X, 2 * X, X * np.float32(np.nan)):
        expected = step(*state, x)
        state = step_of(tx)(*state, x)
        assert_same_program(state, expected)
    assert int(optax.tree.get(state[1], "count")) == 3


def test_disabled_does_nothing():
    """Python objects come back themselves, in any order of calls."""
    scaler, grads, loss = jaxmp.GradScaler(enabled=False), {"w": jnp.float16(np.inf)}, "not even an array"
    assert scaler.scale(loss) is loss
    assert scaler.unscale(grads)[0] is grads
    assert scaler.unscale(grads)[1] is scaler
    assert scaler.update() is scaler
    assert scaler.update(8.0) is scaler
    assert scaler.load_state_dict({}) is scaler
    assert_exact((scaler.get_scale(), scaler.found_inf()), (1.0, False))
    assert (scaler.is_enabled(), scaler.state_dict()) == (False, {})


def test_an_optimizer_that_unscales_itself_is_refused():
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "fp16")
    params = jnp.ones(2, jnp.float16)
    for scaler in (jaxmp.GradScaler(), jaxmp.GradScaler(enabled=False)):
        with pytest.raises(ValueError, match=r"got a tx that also unscales. Pass jaxmp.keep_master_params"):
            scaled(scaler).step(tx, params, tx.init(params), params)


def test_extra_arguments_reach_the_optimizer():
    def update(updates, state, params=None, *, factor, **_):
        return jax.tree.map(lambda g: -factor * g, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    params, _, _ = scaled(jaxmp.GradScaler(4.0)).step(tx, jnp.float32(8.0), (), jnp.zeros(()), factor=3.0)
    assert_exact(params, -6.0)


# scale


def test_losses_of_16_bits_are_scaled_in_float32():
    """torch gives 131072 for a scalar and inf for a float16 array."""
    scaler = jaxmp.GradScaler()
    two = {"scalar": jnp.float16(2.0), "array": jnp.full(1, 2.0, jnp.float16), "bf16": jnp.bfloat16(2.0)}
    with pytest.warns(UserWarning, match="the loss to scale is b?float16: it was rounded.*jaxmp.autocast"):
        scaled = scaler.scale(two)
    assert_exact(scaled, {"scalar": 131072.0, "array": np.full(1, 131072.0, np.float32), "bf16": 131072.0})
    for loss, message in (
        ((jnp.float32(1.0), {"n": jnp.int32(3)}), "got int32 at 1/n"),
        (2.0, "got float at <root>. Write return scaler.scale"),
    ):
        with pytest.raises(TypeError, match=message):
            scaler.scale(loss)


# made, saved and loaded


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"growth_factor": 1.0}, "growth_factor must be > 1"),
        ({"backoff_factor": 1.0}, "backoff_factor must be between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval must be >= 1"),
        ({"loss_scale": 8.0, "growth_interval": 5}, "loss_scale= must stand alone; .* Pass them to jaxmp.Dynamic"),
    ],
    ids=str,
)
def test_arguments_out_of_range(kwargs, message):
    with pytest.raises(ValueError, match=message):
        jaxmp.GradScaler(**kwargs)
    with pytest.raises(TypeError, match=r"got NoOpLossScale\(\). For no scaling pass enabled=False"):
        jaxmp.GradScaler(loss_scale=static.NoOpLossScale())


def after(scaler, *overflows):
    for overflow in overflows:
        _, scaler = scaled(scaler).unscale(jnp.float32(np.inf if overflow else 1.0))
        scaler = scaler.update()
    return scaler


def test_state_dicts_are_those_of_torch():
    """Of torch's script: three saves with one overflow between the first two, and what a scaler loads from the last."""
    first, second, _, (scale, tracker) = TORCH["misc"]["state_dict"]
    scaler = jaxmp.GradScaler(8.0, growth_interval=5)
    assert scaler.state_dict() == first
    scaler = after(scaler, True, False)
    saved = scaler.state_dict()
    assert saved == second
    assert [type(x) for x in saved.values()] == [float, float, float, int, int]
    loaded = jaxmp.GradScaler(2.0, growth_factor=3.0, backoff_factor=0.1).load_state_dict(saved)
    assert_exact(tuple(jax.tree.leaves(loaded))[:2], (scale, tracker))
    assert jax.tree.structure(loaded) == jax.tree.structure(scaler)  # the factors, too
    assert loaded.state_dict() == saved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": np.inf}, "positive and finite; got inf"),
        ({"scale": np.nan}, "positive and finite; got nan"),
        ({"scale": 0.0}, "positive and finite; got 0"),
        ({"growth_interval": 2.5}, "a whole number of steps; got 2.5"),
        ({"growth_factor": 0.5}, "growth_factor must be > 1"),
        ({"scale": None}, "must have scale, growth_factor, .*; it lacks scale. Pass"),
        (None, "of an enabled scaler; got an empty one"),
    ],
    ids=["inf", "nan", "0", "interval", "factor", "missing", "empty"],
)
def test_a_state_dict_that_does_not_load(changes, message):
    saved = {} if changes is None else jaxmp.GradScaler().state_dict() | changes
    with pytest.raises(ValueError, match=message):
        jaxmp.GradScaler().load_state_dict({name: x for name, x in saved.items() if x is not None})


def test_a_rule_with_hysteresis_keeps_its_count():
    scaler = after(jaxmp.GradScaler(loss_scale=jaxmp.DynamicLossScale(8.0, hysteresis=3)), True)
    saved = scaler.state_dict()
    assert saved["_hysteresis_left"] == 2
    fresh = jaxmp.GradScaler(loss_scale=jaxmp.DynamicLossScale(hysteresis=3))
    assert_moved(fresh.load_state_dict(saved), scaler)
    del saved["_hysteresis_left"]  # torch's own
    assert int(fresh.load_state_dict(saved)._loss_scale.hysteresis_left) == 3


def test_checkpoints(tmp_path):
    """Orbax takes the scaler, flax the dict: both with the growth count."""
    scaler = after(jaxmp.GradScaler(8.0, growth_interval=5), True, False)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "scaler", {"scaler": scaler})
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "scaler", {"scaler": jaxmp.GradScaler(growth_interval=5)})["scaler"]
    assert_moved(restored, scaler)
    saved = flax.serialization.msgpack_restore(flax.serialization.msgpack_serialize(scaler.state_dict()))
    assert jaxmp.GradScaler().load_state_dict(saved).state_dict() == scaler.state_dict()


def test_a_static_scale_stays_and_skips():
    scaler = after(jaxmp.GradScaler(loss_scale=512.0), True, False)
    assert_exact(scaler.get_scale(), 512.0)
    param, _, _ = scaled(scaler).step(SGD, jnp.float32(np.inf), SGD.init(jnp.ones(())), jnp.ones(()))
    assert_moved(param, 1.0)
    with pytest.raises(TypeError, match=r"needs a dynamic scale; got StaticLossScale\(512.0\)"):
        scaler.state_dict()


# programs and devices


def test_the_second_call_compiles_nothing():
    """Not on a skip, not when the scale moves; no state changes its type, and a scaler can be donated."""
    tx, params, opt_state = start("masters")
    step = jax.jit(step_of(tx, clip=True), donate_argnums=2)
    state = (params, opt_state, jaxmp.GradScaler(64.0, growth_interval=2))
    types, structure = list(map(jax.typeof, jax.tree.leaves(state))), jax.tree.structure(state)
    for x in (X, X, X * np.float32(np.inf), X):
        state = step(*state, x)
        assert list(map(jax.typeof, jax.tree.leaves(state))) == types
        assert jax.tree.structure(state) == structure
    assert step._cache_size() == 1


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["pmap", "shard_map", "shard_map_unchecked"])
def test_an_overflow_on_one_device_skips_on_all(how):
    regime, (tx, params, opt_state) = regimes.REGIMES[how], start("momentum")

    def step(state, x, mean):
        """Only the device that overflows sees it in its gradients."""
        params, opt_state, scaler = state
        own = jax.tree.map(lambda p: compat.as_varying(p, collectives.bound_axes("auto")), params)
        grads = jax.grad(lambda p: scaler.scale(loss_fn(p, x)))(own)
        alone = collectives.any_nonfinite(grads)
        grads, scaler = scaler.unscale(grads)
        flags = jnp.stack([alone, scaler.found_inf()]).astype(jnp.float32)
        params, opt_state, scaler = scaler.step(tx, mean(grads), opt_state, params)
        return (params, opt_state, scaler.update()), flags

    run, state = regime.compile(step), regime.place((params, opt_state, jaxmp.GradScaler(64.0)))
    good = np.concatenate([X] * DEVICES)
    bad = good.copy()
    bad.reshape(DEVICES, -1)[2, 0] = np.inf
    for x, means_of_flags, scale in ((bad, [0.25, 1.0], 32.0), (good, [0.0, 0.0], 64.0)):
        after, flags = run(state, regime.shard(x))
        copies = regime.copies(after)
        assert len(copies) == DEVICES and regimes.alike(copies)
        assert regimes.unchanged(copies[0][:2], regime.copies(state)[0][:2]) == (x is bad)
        assert_exact((copies[0][2].get_scale(), regime.copies(flags)[0]), (scale, np.float32(means_of_flags)))


def test_axes_by_name():
    scaler = jaxmp.GradScaler(4.0, axis_name=[AXIS])
    unscale = jax.pmap(lambda s, g: s.unscale(g)[1].found_inf(), AXIS, in_axes=(None, 0), devices=jax.devices()[:2])
    assert_exact(unscale(scaler, jnp.array([1.0, np.nan])), np.array([True, True]))
    with pytest.raises(ValueError, match="axis_name=None is for no bound axes"):
        unscale(scaled(jaxmp.GradScaler(axis_name=None)), jnp.ones(2))


NO_DEVICE = "takes no device.*got 'cuda'"
AS_IN_TORCH = [  # what a user writes, and what is said of it
    (lambda scaler: jaxmp.GradScaler("cuda"), TypeError, f"GradScaler {NO_DEVICE}"),
    (lambda scaler: jaxmp.GradScaler(device="cuda", init_scale=8.0), TypeError, f"GradScaler {NO_DEVICE}"),
    (lambda scaler: jaxmp.autocast("cuda"), TypeError, f"autocast {NO_DEVICE}"),
    (lambda scaler: scaler.unscale_(optax.sgd(0.1)), AttributeError, "no unscale_. Write .*scaler.unscale"),
    (lambda scaler: scaler.unscale(optax.sgd(0.1)), TypeError, "unscale takes the gradients.*got an optimizer"),
    (lambda scaler: scaler.unscaled(), AttributeError, "no attribute 'unscaled'"),
    (lambda scaler: jaxmp.GradScaler(initscale=8.0), TypeError, "unexpected keyword argument 'initscale'"),
]


def test_what_torch_takes_and_a_scaler_does_not_is_named():
    for write, error, message in AS_IN_TORCH:
        with pytest.raises(error, match=message):
            write(jaxmp.GradScaler())
    assert not hasattr(jaxmp.GradScaler(), "unscale_")


def test_the_questions_put_to_an_optimizer_state_are_put_to_a_scaler():
    scaler = jaxmp.GradScaler(4.0)
    scaler.scale(jnp.float32(1.0))
    _, scaler = scaler.unscale({"w": jnp.array([jnp.inf])})
    assert_moved(jaxmp.keep_if_skipped(scaler, jnp.ones(2), jnp.zeros(2)), jnp.zeros(2))
    assert_exact(jaxmp.get_loss_scale(scaler), 4.0)
    with pytest.raises(TypeError, match="got a GradScaler. Call scaler.state_dict"):
        jaxmp.get_metrics(scaler)
    with pytest.raises(ValueError, match="found_inf is known after unscale or step"):
        jaxmp.keep_if_skipped(scaler.update(), jnp.ones(2), jnp.zeros(2))


def test_gradients_that_were_unscaled_need_the_scaler_that_did_it():
    """The scaler from before would divide them again, by 65536, without a word."""
    tx, params = optax.sgd(1.0), {"w": jnp.ones(2)}

    def step(params, scaler, returned):
        grads = jax.grad(lambda p: scaler.scale(jnp.sum(p["w"])))(params)
        grads, after = scaler.unscale(grads)
        return (after if returned else scaler).step(tx, grads, tx.init(params), params)[0]

    for run in (step, jax.jit(step, static_argnums=2)):
        assert run(params, jaxmp.GradScaler(), True)["w"].tolist() == [0.0, 0.0]
        with pytest.raises(ValueError, match="got those of unscale, and the scaler from before. Use what it returned"):
            run(params, jaxmp.GradScaler(), False)
