"""In shard_map an optimizer sees parts of the params that are cut: what needs whole leaves is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxmp
from jaxmp import fsdp
from jaxmp._src.distributed.param_layout import Cut, Layout

MESH = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
RNG = np.random.default_rng(0)
PARAMS = {"w": np.float32(RNG.normal(size=(128, 64)) / 8), "norm": np.ones((1, 128), np.float32)}
LAYOUT = fsdp.layout_of(PARAMS, MESH, min_size=1024)
WHERE = {"axis_name": "fsdp", "replicated": LAYOUT.whole}
X = np.float32(RNG.normal(size=(8, 128)))

WRONG = {
    "split masters": (lambda: optax.lamb(1e-3), "reduce_sum"),
    "clip_by_global_norm": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), "reduce_sum"),
    "clip_by_block_rms": (lambda: optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), "reduce_sum"),
    "adaptive_grad_clip": (lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)), "reduce_sum"),
    "lars": (lambda: optax.lars(1e-3), "reduce_sum"),
    "adafactor": (lambda: optax.adafactor(1e-3), "reduce_sum"),
    "muon": (lambda: optax.contrib.muon(1e-3), ""),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.sgd(0.1), 3), "reduce_and"),
    "noise": (
        lambda: optax.chain(optax.add_noise(1.0, 0.5, key=0), optax.sgd(0.1)),
        "random numbers that are the same for every part",
    ),
    "normalize": (lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)), "reduce_sum"),
    "fused, clipped": (lambda: jaxmp.fused_adamw(1e-3, max_norm=1.0), ""),
    "without axis_name": (lambda: optax.chain(jaxmp.clip_by_global_norm(1.0), optax.sgd(0.1)), "reduce_sum"),
}
RIGHT = {
    "adamw": lambda: optax.adamw(1e-3),
    "lion": lambda: optax.lion(1e-3),
    "schedule": lambda: optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda n: 0.1 / (1 + n))),
    "clip": lambda: optax.chain(optax.clip(1.0), optax.rmsprop(1e-3)),
    "clip over the axis": lambda: optax.chain(jaxmp.clip_by_global_norm(1.0, **WHERE), optax.adamw(1e-3)),
    "ema": lambda: optax.chain(optax.adamw(1e-3), jaxmp.ema_params(0.9)),
    "int8": lambda: jaxmp.compress_moments(optax.adamw(1e-3), jnp.int8),
    "fused int8": lambda: jaxmp.fused_adamw(1e-3, state_dtype=jnp.int8),
    "fused": lambda: jaxmp.fused_adamw(1e-3),
    "centralize": lambda: optax.chain(optax.centralize(), optax.adam(1e-3)),  # means of rows; w is cut by rows
    "masked": lambda: optax.masked(optax.adamw(1e-3), {"w": True, "norm": False}),
    "steps": lambda: optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(),
    "agc of what is whole": lambda: optax.chain(
        optax.masked(optax.clip_by_block_rms(1.0), {"w": False, "norm": True}), optax.sgd(0.1)
    ),
}


def loss_of(params, x):
    x = (x * params.get("norm", 1.0)).astype(jnp.bfloat16)
    return jnp.mean((x @ params["w"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)


def trace(tx, policy, check_vma, layout=LAYOUT, params32=PARAMS):
    """Traces a step of FSDP in shard_map."""
    policy = jaxmp.get_policy(policy)
    params, opt_state = jax.eval_shape(lambda: (policy.cast_to_param(params32), tx.init(params32)))

    def step(params, opt_state, x):
        loss_fn = lambda params, x: loss_of(fsdp.gather(params, layout), x)  # noqa: E731
        _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, fsdp.reduce_gradients(grads, layout), opt_state, params)

    specs = (layout.specs, jaxmp.sharding_of(tx, params32, layout.specs))
    step = jax.shard_map(step, mesh=MESH, in_specs=(*specs, P("fsdp")), out_specs=specs, check_vma=check_vma)
    return jax.eval_shape(step, params, opt_state, X)


@pytest.mark.thorough(4)
@pytest.mark.parametrize(("name", "check_vma"), [(name, i % 2 == 0) for i, name in enumerate(WRONG)])
def test_what_needs_whole_leaves_is_refused(name, check_vma):
    make, primitive = WRONG[name]
    tx = jaxmp.mixed_precision(make(), "bf16", remainder_bits=16 if name == "split masters" else None)
    cause = primitive if " " in primitive else f"a {primitive}.* over a part"
    message = rf"cut over 'fsdp' must be elementwise, or reduce over 'fsdp'; got {cause}.* \(.*"
    message += "is made from it. Use plain jax.jit with .*jaxmp.clip_by_global_norm"
    with pytest.raises(ValueError, match=message):
        trace(tx, "bf16", check_vma)


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("name", "check_vma"), [(name, i % 2 == 0) for i, name in enumerate(RIGHT)])
def test_what_is_elementwise_or_sums_over_the_axis_is_taken(name, check_vma):
    trace(jaxmp.mixed_precision(RIGHT[name](), "bf16"), "bf16", check_vma)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_in_every_policy_and_never_under_jit(policy):
    tx = jaxmp.mixed_precision(optax.lamb(1e-3), policy)
    with pytest.raises(ValueError, match="must be elementwise"):
        trace(tx, policy, True)

    def under_jit(params, opt_state):
        loss_fn = lambda params: loss_of(fsdp.gather(params, LAYOUT), X)  # noqa: E731
        _, grads = jaxmp.value_and_grad(loss_fn)(params, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    jax.eval_shape(under_jit, jaxmp.get_policy(policy).cast_to_param(PARAMS), tx.init(PARAMS))


def test_a_mean_is_right_along_the_axis_that_is_whole_and_wrong_along_the_one_that_is_cut():
    params = {"w": PARAMS["w"]}
    tx = jaxmp.mixed_precision(optax.chain(optax.centralize(), optax.sgd(0.1)), "fp32")
    trace(tx, "fp32", True, fsdp.layout_of(params, MESH, min_size=1), params)
    columns = Layout(MESH, "fsdp", {"w": Cut(P(None, "fsdp"), PARAMS["w"].shape, 1, 64)})
    with pytest.raises(ValueError, match="got a reduce_sum over a part .*_subtract_mean"):
        trace(tx, "fp32", True, columns, params)


@pytest.mark.parametrize(
    "inner", [optax.adafactor(1e-3, min_dim_size_to_factor=32), optax.sm3(0.1)], ids=["adafactor", "sm3"]
)
def test_state_of_whole_rows_and_columns_does_not_fit_parts(inner):
    """The update itself would raise an error of broadcasting."""
    message = r"state must be cut over 'fsdp' .*; got .*/w.*of shape \(\d+,.*\) for a part of shape \(32, 64\)"
    with pytest.raises(ValueError, match=message):
        trace(jaxmp.mixed_precision(inner, "bf16"), "bf16", True)


def test_a_leaf_of_which_parts_are_factored_otherwise_is_refused():
    """Whole, w is factored; its parts of 32 rows are not."""
    tx = jaxmp.mixed_precision(
        optax.adafactor(1e-3, clipping_threshold=None, multiply_by_parameter_scale=False, min_dim_size_to_factor=33),
        "fp32",
    )
    wanted = "must keep the shapes of opt_state; got .* at .*/w. Use jax.jit, not shard_map"
    with jax.numpy_rank_promotion("allow"), pytest.raises(ValueError, match=wanted):
        trace(tx, "fp32", False)


# Padding, under plain jit

PADDED = np.float32(RNG.normal(size=(9, 13)))
COUNTS = {
    "adafactor": optax.adafactor(1e-2),
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(1e-4), optax.sgd(100.0)),
}
COUNTS_NOT = {
    "lamb": optax.lamb(1e-2),
    "fused": jaxmp.fused_adamw(1e-2, max_norm=0.1),
    "schedule-free": optax.contrib.schedule_free_sgd(0.1),
}


def change_after_a_step(inner, *, cuts, size=13):
    """How a step of plain jit changes the params, on one device or cut over four with padding."""
    tx, params = jaxmp.mixed_precision(inner, "fp32"), {"w": np.tile(PADDED, (1, size // 13))}
    layout = fsdp.layout_of(params, MESH, min_size=8)
    padded = fsdp.pad(params, layout) if cuts else params

    @jax.jit
    def step(params, opt_state):
        loss_fn = lambda p: jnp.mean(jnp.tanh((fsdp.gather(p, layout) if cuts else p)["w"]) ** 2)  # noqa: E731
        _, grads = jaxmp.value_and_grad(loss_fn)(params, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    new, _ = step(padded, jax.jit(tx.init)(padded))
    return np.asarray((fsdp.trim(new, layout) if cuts else new)["w"] - params["w"])


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", COUNTS)
def test_an_optimizer_that_counts_padding_is_warned_of(name):
    message = "must not count padding; .* and w, of which 13 of 16 along axis 1 are no padd"
    with pytest.warns(UserWarning, match=message):
        padded = change_after_a_step(COUNTS[name], cuts=True)
    alone = change_after_a_step(COUNTS[name], cuts=False)
    assert np.abs(padded - alone).max() > 0.01 * np.abs(alone).max()


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", COUNTS_NOT)
def test_what_only_sums_is_right_on_padded_leaves(name):
    alone, padded = (change_after_a_step(COUNTS_NOT[name], cuts=cuts) for cuts in (False, True))
    np.testing.assert_allclose(padded, alone, rtol=0, atol=2**-20)  # 4 ulps of the largest param
    assert np.abs(alone).max() > 2**-12


def test_little_padding_is_not_warned_of():
    change_after_a_step(COUNTS["clip_by_block_rms"], cuts=True, size=13 * 41)
