"""Bad input: each message names the rule, what was got, the fix and the path, and the run can go on after it."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_close, assert_exact, assert_same_program
from jaxmp import DynamicLossScale

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


def with_kernel(tree: Any, kernel: Any) -> Any:
    return tree | {"dense": {"kernel": kernel}}


def update(run: Run, *, grads: Any = None, params: Any = None) -> Any:
    return run.tx.update(run.grads if grads is None else grads, run.state, run.params if params is None else params)


INTS = jnp.array([[1, 2]])
COMPLEX = INTS.astype(jnp.complex64)
NOT_FLOAT = "params must be float"
OTHER_DTYPES = "have the dtypes of the policy"

# What a user does in the middle of a run, the error it gives, and what its message must say.
DURING_A_RUN = {
    "int_params": (
        lambda run: run.tx.init(with_kernel(run.params, INTS)),
        TypeError,
        (NOT_FLOAT, "int32", "dense/kernel", "Keep it out of params"),
    ),
    "complex_params": (
        lambda run: run.tx.init(with_kernel(run.params, COMPLEX)),
        TypeError,
        (NOT_FLOAT, "complex64", "dense/kernel"),
    ),
    "int_gradients": (
        lambda run: update(run, grads=with_kernel(run.grads, INTS)),
        TypeError,
        ("gradients must be float arrays", "int32", "dense/kernel", "jaxmp.value_and_grad"),
    ),
    "loss_and_gradients": (
        lambda run: jaxmp.apply_gradients(run.tx, (1.0, run.grads), run.state, run.params),
        TypeError,
        ("gradients must be float arrays", "float at 0", "loss, grads = jaxmp.value_and_grad"),
    ),
    "aux_that_cannot_be_stacked": (
        lambda run: jaxmp.value_and_grad(lambda p, x: (loss_fn(p), {"name": "a"}), has_aux=True, accumulate=2)(
            run.params, jnp.ones((4, 2)), opt_state=run.state
        ),
        TypeError,
        ("aux must be arrays or numbers", "str", "name", "Leave it out"),
    ),
    "forgotten_cast": (
        lambda run: update(run, params=jax.tree.map(jnp.asarray, PARAMS32)),
        ValueError,
        (OTHER_DTYPES, "got float32 at dense/kernel", "float16", "policy.cast_to_param(params32)"),
    ),
    "forgotten_cast-apply_gradients": (
        lambda run: jaxmp.apply_gradients(run.tx, run.grads, run.state, jax.tree.map(jnp.asarray, PARAMS32)),
        ValueError,
        (OTHER_DTYPES, "got float32 at dense/kernel"),
    ),
    "a_kept_leaf_in_16_bits": (
        lambda run: update(run, params=jaxmp.get_policy("fp16").cast_to_param(PARAMS32)),
        ValueError,
        (OTHER_DTYPES, "got float16 at norm/scale, not float32", "policy.cast_to_param(params32)"),
    ),
    "a_gradient_is_missing": (
        lambda run: update(run, grads={"dense": run.grads["dense"]}),
        ValueError,
        ("grads and params must have the same tree structure", "norm/scale is in params only", "value_and_grad"),
    ),
    "a_gradient_too_many": (
        lambda run: update(run, grads=run.grads | {"extra": jnp.ones(1)}),
        ValueError,
        ("grads and params must have the same tree structure", "extra is in grads only"),
    ),
    "no_params": (
        lambda run: run.tx.update(run.grads, run.state),
        ValueError,
        ("need the params", "tx.update(grads, opt_state, params)"),
    ),
    "shared_scale_needs_mixed_precision": (
        lambda run: jaxmp.shared_loss_scale().apply_gradients(
            optax.sgd(1.0), run.grads, optax.sgd(1.0).init(run.params), run.params, jaxmp.shared_loss_scale().init()
        ),
        ValueError,
        ("shared loss scale", "mixed_precision"),
    ),
}


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", DURING_A_RUN)
def test_bad_input_during_a_run(name):
    """The error says what it must, and the run goes on from the same objects, to the same bits."""
    (do, error, says), run = DURING_A_RUN[name], start()
    expected = jaxmp.apply_gradients(run.tx, run.grads, run.state, run.params)
    with pytest.raises(error) as caught:
        do(run)
    for words in says:
        assert words in str(caught.value)
    assert_same_program(jaxmp.apply_gradients(run.tx, run.grads, run.state, run.params), expected)


def test_donated_buffers_survive_an_error_at_trace_time():
    """The error comes before the step runs, so that donated params and state are still there."""
    run = start()
    step = jax.jit(lambda g, s, p: jaxmp.apply_gradients(run.tx, g, s, p), donate_argnums=(1, 2))
    with pytest.raises(ValueError, match=OTHER_DTYPES):
        step(run.grads, run.state, jax.tree.map(jnp.asarray, PARAMS32))
    with pytest.raises(TypeError, match="gradients must be float arrays"):
        step(with_kernel(run.grads, INTS), run.state, run.params)
    params, _ = step(run.grads, run.state, run.params)
    assert_close(params["norm"]["scale"], jnp.array([2.0]))


AT_THE_START = {
    "scale_is_a_bool": (lambda: mixed(loss_scale=True), TypeError, ("a number or an object", "got True")),
    "dynamic_without_skipping": (
        lambda: jaxmp.mixed_precision(optax.sgd(1.0), "fp16", skip_nonfinite=False),
        ValueError,
        ("must skip overflows", "got skip_nonfinite=False", "Leave it out"),
    ),
    "own_scale_without_skipping": (
        lambda: jaxmp.unscale_and_skip(optax.sgd(1.0), DynamicLossScale(), skip_nonfinite=False),
        ValueError,
        ("a dynamic loss scale must skip overflows",),
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
    "shared_scale_of_nothing": (lambda: jaxmp.shared_loss_scale("torch"), TypeError, ("loss_scale must be", "'torch'")),
}


@pytest.mark.parametrize("name", AT_THE_START)
def test_bad_input_at_the_start(name):
    make, error, says = AT_THE_START[name]
    with pytest.raises(error) as caught:
        make()
    for words in says:
        assert words in str(caught.value)


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


@pytest.mark.parametrize("policy, loss_scale", [("fp16", "auto"), ("fp16", 1.0), ("bf16", None), ("fp32", None)])
def test_other_policies_do_not_warn(policy, loss_scale):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx = jaxmp.mixed_precision(optax.sgd(1.0), policy, loss_scale=loss_scale)
    assert_exact(jaxmp.get_metrics(tx.init({"w": jnp.ones(1)}))["unscaled_fp16"], jnp.array(False))


def test_a_run_that_only_skips_is_told_what_to_try():
    """flax goes to 1e-38 in silence; here the scale stays at the floor."""
    run = start(loss_scale=DynamicLossScale(2.0, hysteresis=1, min_scale=1.0))
    params, state = run.params, run.state
    bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.inf), params)
    for _ in range(3):
        params, state = jaxmp.apply_gradients(run.tx, bad, state, params)
    with pytest.warns(UserWarning) as caught:
        jaxmp.check_progress(state, max_consecutive_skips=4)
    for words in ("pinned at its floor, 1.0", "overflows could not lower it", "first_bad_op", "learning rate"):
        assert words in str(caught[0].message)
    with pytest.raises(jaxmp.TrainingStuck) as stuck:
        jaxmp.check_progress(state, max_consecutive_skips=3, max_pinned_overflows=9)
    for words in ("must not skip 3 steps in a row", "got 3", "loss scale at 1.0", "lower the learning rate"):
        assert words in str(stuck.value)
    assert isinstance(stuck.value, RuntimeError)
