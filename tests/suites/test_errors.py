"""Bad input: each message names the rule, what was got, the fix and the path, and the run can go on after it."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact, assert_moved, assert_same_program
from regimes import guarded

POLICY = jaxmp.get_policy("fp16", keep_fp32=("*norm*",))
PARAMS32 = {"dense": {"kernel": np.float32([[1.0, -2.0]])}, "norm": {"scale": np.float32([3.0])}}


def mixed(inner: Any = None, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
    return jaxmp.mixed_precision(inner or optax.sgd(1.0), POLICY, **{"loss_scale": 4.0} | kwargs)


class Run(NamedTuple):
    """A run in the middle of its training."""

    tx: Any
    params: Any
    state: Any
    grads: Any


def start(**kwargs: Any) -> Run:
    params32 = jax.tree.map(jnp.asarray, PARAMS32)
    tx, params = mixed(**kwargs), POLICY.cast_to_param(params32)
    return Run(tx, params, tx.init(params32), jax.tree.map(lambda p: jnp.full_like(p, 4.0), params))


def loss_fn(params: Any) -> Any:
    return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(params))


def replaced(tree: Any, layer: str, name: str, leaf: Any) -> Any:
    return tree | {layer: {name: leaf}}


class BadInput(NamedTuple):
    """What a user does in the middle of a run, the error it gives, and what its message must say."""

    do: Callable[[Run], Any]
    error: type[Exception]
    says: tuple[str, ...]


KERNEL = ("dense", "kernel")
INTS = jnp.array([[1, 2]])

DURING_A_RUN = {
    "int_params-init": BadInput(
        lambda run: run.tx.init(replaced(run.params, *KERNEL, INTS)),
        TypeError,
        ("params must be float", "int32", "dense/kernel", "Keep it out of params"),
    ),
    "complex_params-init": BadInput(
        lambda run: run.tx.init(replaced(run.params, *KERNEL, INTS.astype(jnp.complex64))),
        TypeError,
        ("params must be float", "complex64", "dense/kernel"),
    ),
    "int_params-value_and_grad": BadInput(
        lambda run: jaxmp.value_and_grad(loss_fn)(replaced(run.params, *KERNEL, INTS), opt_state=run.state),
        TypeError,
        ("params must be float", "int32", "dense/kernel", "in another argument"),
    ),
    "complex_params-value_and_grad": BadInput(
        lambda run: jaxmp.value_and_grad(loss_fn)(
            replaced(run.params, *KERNEL, INTS.astype(jnp.complex64)), opt_state=run.state
        ),
        TypeError,
        ("params must be float", "complex64", "dense/kernel"),
    ),
    "int_gradients": BadInput(
        lambda run: run.tx.update(replaced(run.grads, *KERNEL, INTS), run.state, run.params),
        TypeError,
        ("gradients must be float arrays", "int32", "dense/kernel", "jaxmp.value_and_grad"),
    ),
    "loss_and_gradients": BadInput(
        lambda run: jaxmp.apply_gradients(run.tx, (1.0, run.grads), run.state, run.params),
        TypeError,
        ("gradients must be float arrays", "float at 0", "loss, grads = jaxmp.value_and_grad"),
    ),
    "aux_that_cannot_be_stacked": BadInput(
        lambda run: jaxmp.value_and_grad(lambda p, x: (loss_fn(p), {"name": "a"}), has_aux=True, accumulate=2)(
            run.params, jnp.ones((4, 2)), opt_state=run.state
        ),
        TypeError,
        ("aux must be arrays or numbers", "str", "name", "Leave it out"),
    ),
    "forgotten_cast": BadInput(
        lambda run: run.tx.update(run.grads, run.state, jax.tree.map(jnp.asarray, PARAMS32)),
        ValueError,
        ("have the dtypes of the policy", "got float32 at dense/kernel", "float16", "policy.cast_to_param(params32)"),
    ),
    "forgotten_cast-apply_gradients": BadInput(
        lambda run: jaxmp.apply_gradients(run.tx, run.grads, run.state, jax.tree.map(jnp.asarray, PARAMS32)),
        ValueError,
        ("have the dtypes of the policy", "got float32 at dense/kernel"),
    ),
    "another_16_bit_dtype": BadInput(
        lambda run: run.tx.update(run.grads, run.state, jaxmp.get_policy("bf16").cast_to_param(PARAMS32)),
        ValueError,
        ("have the dtypes of the policy", "got bfloat16 at dense/kernel", "float16"),
    ),
    "a_kept_leaf_in_16_bits": BadInput(
        lambda run: run.tx.update(run.grads, run.state, jaxmp.get_policy("fp16").cast_to_param(PARAMS32)),
        ValueError,
        ("have the dtypes of the policy", "got float16 at norm/scale, not float32", "policy.cast_to_param(params32)"),
    ),
    "16_bit_params_under_fp32": BadInput(
        lambda run: jaxmp.mixed_precision(optax.sgd(1.0), "fp32").update(
            run.grads, jaxmp.mixed_precision(optax.sgd(1.0), "fp32").init(run.params), run.params
        ),
        ValueError,
        ("have the dtypes of the policy", "got float16 at dense/kernel, not float32", "cast_to_param(params32)"),
    ),
    "a_gradient_is_missing": BadInput(
        lambda run: run.tx.update({"dense": run.grads["dense"]}, run.state, run.params),
        ValueError,
        ("grads and params must have the same tree structure", "norm/scale is in params only", "value_and_grad"),
    ),
    "a_gradient_too_many": BadInput(
        lambda run: run.tx.update(run.grads | {"extra": jnp.ones(1)}, run.state, run.params),
        ValueError,
        ("grads and params must have the same tree structure", "extra is in grads only"),
    ),
    "no_params": BadInput(
        lambda run: run.tx.update(run.grads, run.state),
        ValueError,
        ("need the params", "tx.update(grads, opt_state, params)"),
    ),
    "unbound_axis-mixed_precision": BadInput(
        lambda run: mixed(axis_name="data").update(run.grads, run.state, run.params),
        ValueError,
        (
            "axis name 'data' is not bound here",
            "bound axes: none",
            "jax.shard_map",
            "leave axis_name out",
        ),
    ),
    "unbound_axis-value_and_grad": BadInput(
        lambda run: jaxmp.value_and_grad(loss_fn, axis_name="data")(run.params, opt_state=run.state),
        ValueError,
        ("axis name 'data' is not bound here", "jax.shard_map"),
    ),
    "unbound_axis-reduce_gradients": BadInput(
        lambda run: jaxmp.reduce_gradients("data").update(run.grads, optax.EmptyState()),
        ValueError,
        ("axis name 'data' is not bound here", "jax.shard_map"),
    ),
    "unbound_axis-clip": BadInput(
        lambda run: mixed(jaxmp.clip_by_global_norm(1.0, axis_name="model")).update(
            run.grads, mixed(jaxmp.clip_by_global_norm(1.0, axis_name="model")).init(PARAMS32), run.params
        ),
        ValueError,
        ("axis name 'model' is not bound here", "bound axes: none"),
    ),
    "unbound_axis-all_finite": BadInput(
        lambda run: jaxmp.all_finite(run.params, ("data", "model")),
        ValueError,
        ("axis name 'data' is not bound here",),
    ),
    "wrong_axis_under_pmap": BadInput(
        lambda run: parallel(run, mixed(axis_name="model")),
        ValueError,
        ("axis name 'model' is not bound here", "bound axes: data"),
    ),
    "no_axis_under_pmap": BadInput(
        lambda run: parallel(run, mixed(axis_name=None)),
        ValueError,
        ("axis_name=None", "('data',) are bound", "diverge", '"auto"'),
    ),
    "no_axis_under_shard_map": BadInput(
        lambda run: jax.shard_map(
            mixed(axis_name=None).update, mesh=Mesh(np.array(jax.devices()[:2]), ("data",)), in_specs=P(), out_specs=P()
        )(run.grads, run.state, run.params),
        ValueError,
        ("axis_name=None", "('data',) are bound", '"auto"'),
    ),
    "plain_optax_state": BadInput(
        lambda run: jaxmp.value_and_grad(loss_fn)(run.params, opt_state=optax.sgd(1.0).init(run.params)),
        ValueError,
        ("must hold a loss scale", "got a state without", "jaxmp.mixed_precision(...)"),
    ),
    "no_state": BadInput(
        lambda run: jaxmp.value_and_grad(loss_fn)(run.params, opt_state=None),
        ValueError,
        ("must hold a loss scale; got None",),
    ),
    "two_loss_scales": BadInput(
        lambda run: jaxmp.value_and_grad(loss_fn)(
            run.params,
            opt_state=optax.multi_transform(
                {"a": mixed(), "b": mixed()}, {"dense": {"kernel": "a"}, "norm": {"scale": "b"}}
            ).init(run.params),
        ),
        ValueError,
        ("must hold one loss scale; got 2", "mixed_precision around optax.multi_transform"),
    ),
    "two_loss_scales-get_loss_scale": BadInput(
        lambda run: jaxmp.get_loss_scale((run.state, run.state)), ValueError, ("must hold one loss scale; got 2",)
    ),
    "shared_scale_needs_mixed_precision": BadInput(
        lambda run: jaxmp.shared_loss_scale().apply_gradients(
            optax.sgd(1.0), run.grads, optax.sgd(1.0).init(run.params), run.params, jaxmp.shared_loss_scale().init()
        ),
        ValueError,
        ("shared loss scale", "mixed_precision"),
    ),
}


def parallel(run: Run, tx: Any) -> Any:
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), (run.grads, run.state, run.params))
    return jax.pmap(tx.update, axis_name="data", devices=jax.devices()[:2])(*twice)


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", DURING_A_RUN)
def test_bad_input_during_a_run(name):
    """The error says what it must, and the run goes on from the same objects, to the same bits."""
    bad, run = DURING_A_RUN[name], start()
    expected = jaxmp.apply_gradients(run.tx, run.grads, run.state, run.params)
    with pytest.raises(bad.error) as caught:
        bad.do(run)
    for words in bad.says:
        assert words in str(caught.value)
    assert_same_program(jaxmp.apply_gradients(run.tx, run.grads, run.state, run.params), expected)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["forgotten_cast", "int_gradients", "a_gradient_is_missing"])
def test_donated_buffers_survive_an_error_at_trace_time(name):
    """The error comes before the step runs, so that donated params and state are still there."""
    run, bad = start(), DURING_A_RUN[name]
    wrong = {
        "forgotten_cast": (run.grads, jax.tree.map(jnp.asarray, PARAMS32)),
        "int_gradients": (replaced(run.grads, *KERNEL, INTS), run.params),
        "a_gradient_is_missing": ({"dense": run.grads["dense"]}, run.params),
    }[name]
    step = jax.jit(lambda g, s, p: jaxmp.apply_gradients(run.tx, g, s, p), donate_argnums=(1, 2))
    with pytest.raises(bad.error):
        step(wrong[0], run.state, wrong[1])
    params, _ = step(run.grads, run.state, run.params)
    assert_close(params["norm"]["scale"], jnp.array([2.0]))


NAN = float("nan")

AT_THE_START = {
    "hysteresis-0": (lambda: jaxmp.DynamicLossScale(hysteresis=0), ValueError, ("hysteresis must be >= 1", "got 0")),
    "hysteresis--1": (lambda: jaxmp.DynamicLossScale(hysteresis=-1), ValueError, ("hysteresis must be >= 1", "got -1")),
    "min_above_initial": (
        lambda: jaxmp.DynamicLossScale(1.0, min_scale=2.0),
        ValueError,
        ("min_scale <= initial_scale <= max_scale", "got 2.0, 1.0 and 4294967296.0", "Move initial_scale"),
    ),
    "initial_above_max": (
        lambda: jaxmp.DynamicLossScale(8.0, max_scale=4.0),
        ValueError,
        ("min_scale <= initial_scale <= max_scale", "8.0 and 4.0", "pass None"),
    ),
    "min_above_max": (
        lambda: jaxmp.DynamicLossScale(8.0, min_scale=16.0, max_scale=4.0),
        ValueError,
        ("min_scale <= initial_scale <= max_scale", "got 16.0, 8.0 and 4.0"),
    ),
    "growth-1": (
        lambda: jaxmp.DynamicLossScale(growth_factor=1.0),
        ValueError,
        ("growth_factor must be > 1", "got 1.0"),
    ),
    "growth-half": (lambda: jaxmp.DynamicLossScale(growth_factor=0.5), ValueError, ("growth_factor must be > 1",)),
    "growth-nan": (lambda: jaxmp.DynamicLossScale(growth_factor=NAN), ValueError, ("growth_factor must be > 1", "nan")),
    "backoff-1": (
        lambda: jaxmp.DynamicLossScale(backoff_factor=1.0),
        ValueError,
        ("backoff_factor", "between 0 and 1"),
    ),
    "backoff-0": (lambda: jaxmp.DynamicLossScale(backoff_factor=0.0), ValueError, ("backoff_factor", "got 0.0")),
    "interval-0": (lambda: jaxmp.DynamicLossScale(growth_interval=0), ValueError, ("growth_interval must be >= 1",)),
    "min_scale-0": (lambda: jaxmp.DynamicLossScale(min_scale=0.0), ValueError, ("min_scale must be > 0", "None")),
    "max_scale-inf": (
        lambda: jaxmp.DynamicLossScale(max_scale=float("inf")),
        ValueError,
        ("max_scale must be finite", "None"),
    ),
    "initial-0": (
        lambda: jaxmp.DynamicLossScale(0.0, min_scale=None),
        ValueError,
        ("initial_scale must be > 0", "got 0.0"),
    ),
    "initial-nan": (lambda: jaxmp.DynamicLossScale(NAN), ValueError, ("initial_scale must be > 0", "got nan")),
    "refill": (lambda: jaxmp.DynamicLossScale(refill="never"), ValueError, ('"growth"', '"step"', "got 'never'")),
    "preset": (
        lambda: jaxmp.DynamicLossScale.preset("torhc"),
        ValueError,
        ("a preset is one of", "'torch'", "torhc"),
    ),
    "static-0": (lambda: mixed(loss_scale=0.0), ValueError, ("static loss scale must be positive", "got 0.0")),
    "static-negative": (lambda: mixed(loss_scale=-2), ValueError, ("static loss scale must be positive", "got -2")),
    "static-inf": (lambda: mixed(loss_scale=float("inf")), ValueError, ("positive and finite", "got inf")),
    "static-nan": (lambda: mixed(loss_scale=NAN), ValueError, ("positive and finite", "got nan")),
    "scale_by_name": (
        lambda: mixed(loss_scale="megatron"),
        ValueError,
        (
            '"auto", None, a number or a loss-scale object',
            "got 'megatron'",
            'jaxmp.DynamicLossScale.preset("megatron")',
        ),
    ),
    "scale_without_protocol": (lambda: mixed(loss_scale=object()), TypeError, ("jmp's protocol", "lacks .loss_scale")),
    "scale_is_a_class": (
        lambda: mixed(loss_scale=jaxmp.DynamicLossScale),
        TypeError,
        ("a number or an object", "a class: pass an instance of it"),
    ),
    "scale_is_a_bool": (lambda: mixed(loss_scale=True), TypeError, ("a number or an object", "got True")),
    "dynamic_without_skipping": (
        lambda: jaxmp.mixed_precision(optax.sgd(1.0), "fp16", skip_nonfinite=False),
        ValueError,
        ("must skip overflows", "got skip_nonfinite=False", "Leave it out"),
    ),
    "own_scale_without_skipping": (
        lambda: jaxmp.unscale_and_skip(optax.sgd(1.0), jaxmp.DynamicLossScale(), skip_nonfinite=False),
        ValueError,
        ("a dynamic loss scale must skip overflows",),
    ),
    "unknown_policy": (
        lambda: jaxmp.mixed_precision(optax.sgd(1.0), "fp17"),
        ValueError,
        ("a policy must be one of 'fp32', 'tf32', 'fp16', 'bf16'", "'fp17'", "params=float32"),
    ),
    "policy_is_a_dtype": (
        lambda: jaxmp.mixed_precision(optax.sgd(1.0), jnp.float16),
        TypeError,
        ("a policy must be a name", "got "),
    ),
    "inner_is_a_factory": (
        lambda: jaxmp.mixed_precision(optax.sgd, "fp16"),
        TypeError,
        ("inner must be an optax.GradientTransformation", "optax.adamw(1e-3)", "got function"),
    ),
    "swapped_arguments": (lambda: jaxmp.mixed_precision("fp16", optax.sgd(1.0)), TypeError, ("a policy must be",)),
    "negative_norm": (lambda: jaxmp.clip_by_global_norm(-1.0), ValueError, ("max_norm must be >= 0", "got -1.0")),
    "shared_scale_of_nothing": (lambda: jaxmp.shared_loss_scale("torch"), TypeError, ("loss_scale must be", "'torch'")),
}


@pytest.mark.parametrize("name", AT_THE_START)
def test_bad_input_at_the_start(name):
    make, error, says = AT_THE_START[name]
    with pytest.raises(error) as caught:
        make()
    for words in says:
        assert words in str(caught.value)


def test_traced_numbers_are_not_validated():
    """Only Python numbers are: a sweep over hyperparameters under vmap passes."""

    def scale_after_overflow(growth_factor, initial_scale):
        scaler = jaxmp.DynamicLossScale(initial_scale, growth_factor=growth_factor, growth_interval=1, min_scale=None)
        return scaler.adjust(True).loss_scale

    got = jax.vmap(scale_after_overflow)(jnp.array([2.0, 4.0]), jnp.array([8.0, 16.0]))
    assert_exact(got, jnp.array([16.0, 64.0]))


# ---------------------------------------------------------------------------------------------------------------------
# warnings


@pytest.mark.parametrize("policy", ["fp16", "params=float32,compute=float16,output=float32"])
def test_float16_without_a_loss_scale_is_allowed_with_a_warning(policy):
    """It is named in the metrics too, for who does not read the log; the training itself works."""
    with pytest.warns(UserWarning, match="float16.* without a loss scale: gradients below 6e-8 become zero") as caught:
        tx = jaxmp.mixed_precision(optax.sgd(1.0), policy, loss_scale=None)
    assert 'the policy "bf16"' in str(caught[0].message)
    assert caught[0].filename == __file__
    params = jaxmp.get_policy(policy).cast_to_param({"w": jnp.array([2.0])})
    params, state = jaxmp.apply_gradients(tx, jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    assert_close(params["w"].astype(jnp.float32), jnp.array([1.0]))
    assert_exact(jaxmp.get_metrics(state)["unscaled_fp16"], jnp.array(True))


@pytest.mark.parametrize(
    "policy, loss_scale", [("fp16", "auto"), ("fp16", 1.0), ("bf16", None), ("bf16", "auto"), ("fp32", None)]
)
def test_other_policies_do_not_warn(policy, loss_scale):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx = jaxmp.mixed_precision(optax.sgd(1.0), policy, loss_scale=loss_scale)
    assert_exact(jaxmp.get_metrics(tx.init({"w": jnp.ones(1)}))["unscaled_fp16"], jnp.array(False))


def test_a_scale_pinned_at_its_floor_is_reported_and_the_run_can_go_on():
    """flax goes to 1e-38 in silence; here the scale stays at the floor, the metrics count, and a warning can be had."""
    run = start(loss_scale=jaxmp.DynamicLossScale(2.0, hysteresis=1, min_scale=1.0))
    params, state = run.params, run.state
    bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.inf), params)
    for _ in range(3):
        params, state = jaxmp.apply_gradients(run.tx, bad, state, params)
    assert_close(jaxmp.get_loss_scale(state), 1.0)
    assert int(jaxmp.get_metrics(state)["pinned_overflows"]) == 2
    with pytest.warns(UserWarning) as caught:
        jaxmp.check_progress(state)
    for words in ("pinned at its floor, 1.0", "overflows could not lower it", "first_bad_op", "learning rate"):
        assert words in str(caught[0].message)
    with pytest.raises(jaxmp.TrainingStuck, match="must stay above its floor; got 2 overflows in a row at 1.0"):
        jaxmp.check_progress(state, max_pinned_overflows=2)
    assert_moved(params, run.params)
    grads = jax.tree.map(jnp.ones_like, params)
    params, state = jaxmp.apply_gradients(run.tx, grads, state, params)
    assert_close(params["norm"]["scale"], jnp.array([2.0]))
    jaxmp.check_progress(state, max_pinned_overflows=1)


def test_a_run_that_only_skips_is_stopped_and_nothing_is_lost():
    run = start()
    params, state = run.params, run.state
    bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
    for _ in range(3):
        params, state = jaxmp.apply_gradients(run.tx, bad, state, params)
    jaxmp.check_progress(state, max_consecutive_skips=4)
    with pytest.raises(jaxmp.TrainingStuck) as caught:
        jaxmp.check_progress(state, max_consecutive_skips=3)
    for words in ("must not skip 3 steps in a row", "got 3", "loss scale at 4.0", "lower the learning rate"):
        assert words in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert_moved((params, guarded(state)), (run.params, guarded(run.state)))
    params, _ = jaxmp.apply_gradients(run.tx, run.grads, state, params)
    assert_close(params["norm"]["scale"], jnp.array([2.0]))
