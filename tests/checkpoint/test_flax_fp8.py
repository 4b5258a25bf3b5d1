"""fp8 state of flax's own layers: the next step has the scales that flax would have had in it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import fp8_ops

import jaxmp
from helpers import assert_exact, assert_moved
from jaxmp.checkpoint import import_flax_fp8

LEAVES = {"lhs": "fp8_lhs_e4m3_log2_scale", "rhs": "fp8_rhs_e4m3_log2_scale", "grad": "fp8_grad_e5m2_log2_scale"}
THEIRS = {"lhs": "input_scale", "rhs": "kernel_scale", "grad": "output_grad_scale"}
RECIPE = jaxmp.fp8.DelayedScaling(amax_history_len=16)


class Model(nn.Module):
    dot_general_cls: object

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.Dense(16, dot_general_cls=self.dot_general_cls)(x)
        return x


@functools.cache
def flax_run(steps=4, loss_scale=1.0):
    """(params, the collection after each step) of flax's own layers, trained with sgd."""
    model = Model(fp8_ops.Fp8DirectDotGeneralOp)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.ones((16, 16)))
    rng, seen = np.random.default_rng(0), []

    @jax.jit
    def step(variables, x):
        def loss_fn(params, state):
            out = model.apply({"params": params, fp8_ops.OVERWRITE_WITH_GRADIENT: state}, x)
            return jnp.mean(out**2) * np.float32(loss_scale)

        params, state = variables["params"], variables[fp8_ops.OVERWRITE_WITH_GRADIENT]
        grads, state = jax.grad(loss_fn, argnums=(0, 1))(params, state)
        params = jax.tree.map(lambda p, g: p - np.float32(0.1 / loss_scale) * g, params, grads)
        return {"params": params, fp8_ops.OVERWRITE_WITH_GRADIENT: state}

    for n in range(steps):
        variables = step(variables, jnp.asarray(rng.normal(size=(16, 16)) * 3.0**n, jnp.float32))
        seen.append(variables[fp8_ops.OVERWRITE_WITH_GRADIENT])
    return variables["params"], seen


def ours(recipe=RECIPE):
    """(params, opt_state) of the same model with our layers."""
    names = dict.fromkeys(LEAVES.values(), jnp.float32(0.0))
    params = {name: layer | {"Fp8DotGeneral_0": names} for name, layer in flax_run()[0].items()}
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp32", recipe=recipe)
    return params, tx.init(params)


def test_the_scales_are_those_of_the_step_that_would_have_come():
    params, seen = flax_run()
    ours_params, opt_state = ours()
    got, new = import_flax_fp8(seen[2], ours_params, opt_state)
    for layer in params:
        for operand, leaf in LEAVES.items():
            flax_scale = float(seen[3][layer]["Fp8DirectDotGeneralOp_0"][THEIRS[operand]][0])  # of step 3: it divides
            scale = 2.0 ** float(got[layer]["Fp8DotGeneral_0"][leaf])
            assert scale <= 1 / flax_scale < 2 * scale  # the power of two below
            assert scale != 1.0
    assert_moved(got["Dense_0"]["kernel"], ours_params["Dense_0"]["kernel"])
    assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, opt_state)
    assert not np.array_equal(jaxmp.fp8.get_scales(got), jaxmp.fp8.get_scales(ours_params))


def test_histories_are_in_order_the_newest_last():
    _, seen = flax_run()
    params, opt_state = ours()
    params, opt_state = import_flax_fp8(seen[2], params, opt_state)
    (group,) = [x for x in optax.tree.get(opt_state, "amax_states") if x.scale.shape == (4,)]
    newest_first = [
        [float(seen[n]["Dense_0"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"][0]) for n in (2, 1, 0)],
        [float(seen[n]["Dense_0"]["Fp8DirectDotGeneralOp_0"]["kernel_amax_history"][0]) for n in (2, 1, 0)],
    ]
    assert group.amax_history.shape == (16, 4)
    for column, expected in enumerate(newest_first):
        assert_moved(group.amax_history[::-1, column][:3], np.asarray(expected, np.float32))
    assert not group.amax_history[:-3].any()


def test_amaxes_of_scaled_gradients_are_unscaled():
    _, seen = flax_run()
    _, scaled = flax_run(3, loss_scale=1024.0)
    params, opt_state = ours()
    plain, scaled = (import_flax_fp8(c, params, opt_state, loss_scale=s) for c, s in ((seen[2], 1), (scaled[2], 1024)))
    assert_exact(scaled[0], plain[0])  # scales that are powers of two


def test_without_a_history_the_last_scale_goes_on():
    _, seen = flax_run()
    params, opt_state = ours()
    empty = jax.tree.map(lambda x: x if x.shape == (1,) else jnp.zeros_like(x), seen[3])
    got, _ = import_flax_fp8(empty, params, opt_state)
    flax_scale = float(seen[3]["Dense_1"]["Fp8DirectDotGeneralOp_0"]["input_scale"][0])
    scale = 2.0 ** float(got["Dense_1"]["Fp8DotGeneral_0"][LEAVES["lhs"]])
    assert scale <= 1 / flax_scale < 2 * scale


def test_scales_that_are_no_powers_of_two():
    recipe = jaxmp.fp8.DelayedScaling(amax_history_len=16, power_of_two=False)
    _, seen = flax_run()
    params, _ = ours()
    rename = {leaf: leaf.replace("log2_", "") for leaf in LEAVES.values()}
    params = {
        k: v | {"Fp8DotGeneral_0": {rename[n]: x + 1 for n, x in v["Fp8DotGeneral_0"].items()}}
        for k, v in params.items()
    }
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp32", recipe=recipe).init(params)
    got, _ = import_flax_fp8(seen[2], params, opt_state)
    flax_scale = float(seen[3]["Dense_1"]["Fp8DirectDotGeneralOp_0"]["output_grad_scale"][0])
    assert float(got["Dense_1"]["Fp8DotGeneral_0"]["fp8_grad_e5m2_scale"]) == pytest.approx(1 / flax_scale, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: {"Dense_0": c["Dense_0"]},
            "Dense_1/Fp8DotGeneral_0/fp8_.* is not in the collection, which has Dense_0",
        ),
        (lambda c: c | {"head": c["Dense_0"]}, "head has no scale leaves in the params"),
        (lambda c: {"Dense_0": {"kernel": jnp.ones(2)}}, "got none among Dense_0/kernel"),
        (lambda c: {"Dense_0": {"op": {"input_scale": jnp.ones(1)}}}, "op/input_amax_history is missing"),
        (lambda c: jax.tree.map(lambda x: jnp.stack([x, x]), c), "not of a stack"),
    ],
    ids=["fewer", "more", "none", "no-history", "stack"],
)
def test_what_does_not_fit(change, message):
    params, opt_state = ours()
    with pytest.raises(ValueError, match=message):
        import_flax_fp8(change(flax_run()[1][2]), params, opt_state)


def test_a_state_without_fp8():
    params, _ = ours()
    with pytest.raises(ValueError, match="got 0 fp8 states in opt_state. Make it with"):
        import_flax_fp8(flax_run()[1][2], params, optax.sgd(0.1).init(params))
