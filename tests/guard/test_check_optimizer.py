"""`check_optimizer` judges by what an optimizer does, not by how it is made."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def params_of(dtype):
    return {"dense": {"kernel": jnp.ones((6, 4), dtype)}, "bias": jnp.ones((1, 4), dtype)}


def decayed(params):
    return jax.tree.map(lambda p: False, params) | {"dense": {"kernel": True}}


FINE = {
    "adam-f32": (optax.adam(1e-3), F32),
    "adam-bf16": (optax.adam(1e-3), BF16),  # moments are rounded coarsely; eps does not underflow
    "adam-f16-large-eps": (optax.adam(1e-3, eps=1e-3), F16),
    "nerf-f32": (optax.adam(1e-2, eps=1e-15), F32),
    "lion-f16": (optax.lion(1e-3), F16),
    "sgd-f16": (optax.sgd(1e-3, momentum=0.9), F16),
    "mask-f32": (optax.adamw(1e-3, mask=decayed), F32),
    "inject_hyperparams-f32": (optax.inject_hyperparams(optax.adam)(1e-3), F32),
    "MultiSteps-f32": (optax.MultiSteps(optax.adam(1e-3), 2), F32),
    "masters-f16": (jaxmp.mixed_precision(optax.adam(1e-3), "fp16"), F16),
    "masters-f32-at-init": (jaxmp.mixed_precision(optax.adam(1e-3), "fp16"), F32),
    "float32_moments-f16": (jaxmp.float32_moments(optax.adam(1e-3)), F16),
    "asks-for-the-loss": (optax.contrib.momo(0.1), F32),
}
FINE |= {
    f"{name}-f32": (getattr(optax, name)(1e-3), F32)
    for name in ("radam", "novograd", "lamb", "adabelief", "adafactor", "yogi", "rprop", "fromage", "adan", "sm3")
}
FAULTY = {
    # What a second step, or a leaf of one element, does not show.
    "radam-f16": (optax.radam(1e-3), F16),  # divides from its sixth step on
    "radam-f32-eps-0": (optax.radam(1e-3, eps=0.0), F32),
    "radam-late-f32-eps-0": (optax.radam(1e-3, b2=0.9, eps=0.0), F32),
    "novograd-f16": (optax.novograd(1e-3), F16),  # by the norm of a layer
    "novograd-f32-eps-0": (optax.novograd(1e-3, eps=0.0), F32),
    "lamb-f32-eps-0": (optax.lamb(1e-3, eps=0.0), F32),
    "adam-f16": (optax.adam(1e-3), F16),
    "adam-f16-below-normal": (optax.adam(1e-3, eps=6e-5), F16),
    "adam-f32-eps-0": (optax.adam(1e-3, eps=0.0), F32),
    "adam-f32-subnormal": (optax.adam(1e-3, eps=1e-39), F32),
    "adamw-mask-f16": (optax.adamw(1e-3, mask=decayed), F16),
    "inject_hyperparams-f16": (optax.inject_hyperparams(optax.adam)(1e-3), F16),
    "multi_transform-f16": (
        optax.multi_transform({True: optax.sgd(0.1), False: optax.adam(0.1)}, decayed),
        F16,
    ),
    "behind-a-skip-and-masters": (jaxmp.mixed_precision(optax.adam(1e-3, eps=0.0), "bf16"), BF16),
}


@pytest.mark.thorough(4)
@pytest.mark.parametrize("name", FINE)
def test_no_false_alarm(name):
    tx, dtype = FINE[name]
    assert jaxmp.check_optimizer(tx, params_of(dtype)) is True  # a warning would be an error


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_reported(name):
    tx, dtype = FAULTY[name]
    with pytest.warns(UserWarning, match="must not divide by what underflows") as caught:
        assert jaxmp.check_optimizer(tx, params_of(dtype)) is False
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert jnp.dtype(dtype).name in message
    assert "jaxmp.float32_moments(inner); or raise eps" in message


def test_the_leaf_is_named():
    tx = optax.multi_transform({True: optax.adam(0.1), False: optax.sgd(0.1)}, decayed)
    with pytest.warns(
        UserWarning, match=r"at dense/kernel \(float16\) this one moves a weight by nan for a gradient of 0 in step 1"
    ):
        jaxmp.check_optimizer(tx, params_of(F16))


UNKNOWN = {
    "value_fn": optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), lambda updates, state, params=None, *, value_fn, **extra: (updates, state)
    ),
    "axis": optax.chain(optax.stateless(lambda u, p: jax.lax.pmean(u, "data")), optax.adam(1e-3)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_run_is_not_judged(name):
    assert jaxmp.check_optimizer(UNKNOWN[name], params_of(F32)) is None


def test_only_shapes_and_dtypes_are_read_under_jit_too():
    seen = []

    @jax.jit
    def f(params):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen.append((jaxmp.check_optimizer(optax.adam(1e-3), params), len(caught)))
        return params

    f(params_of(F16))
    jax.eval_shape(f, params_of(F32))
    assert seen == [(False, 1), (True, 0)]
    abstract = jax.eval_shape(lambda: params_of(F32))
    assert jaxmp.check_optimizer(optax.adam(1e-3), abstract) is True


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["eager", "jit", "eval_shape"])
def test_init_reports_float16_state_by_itself(how):
    tx = jaxmp.unscale_and_skip(optax.adam(1e-3), 4.0)
    init = {"eager": tx.init, "jit": jax.jit(tx.init), "eval_shape": lambda p: jax.eval_shape(tx.init, p)}[how]
    with pytest.warns(UserWarning, match=r"must not divide by what underflows; at bias \(float16\)"):
        init(params_of(F16))
    # and nothing else: float32 and bfloat16 have an eps of 1e-8, and so do masters
    for other, dtype in (
        (tx, F32),
        (tx, BF16),
        (jaxmp.mixed_precision(optax.adam(1e-3), "fp16"), F16),
        (jaxmp.unscale_and_skip(jaxmp.float32_moments(optax.adam(1e-3)), 4.0), F16),
        (jaxmp.unscale_and_skip(optax.sgd(1e-3, momentum=0.9), 4.0), F16),
    ):
        other.init(params_of(dtype))


def test_the_step_is_the_same_program_as_without_a_check():
    """The check is a matter of `init`: no operation of it is in the update."""
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "fp16")
    params = params_of(F16)
    before = str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
    jaxmp.check_optimizer(tx, params)
    assert str(jax.make_jaxpr(tx.update)(params, tx.init(params), params)) == before
