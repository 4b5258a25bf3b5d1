"""Norms, clipping and zero counts against Megatron-LM's, whole and split over devices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact, assert_moved
from oracle_data import load, name_of

ROWS = load("megatron_clip_grads")["rows"]
ORDERS = {2: "total_norm", math.inf: "norm_inf", 3: "norm_3"}


def grads_of(row: dict, name: str = "grads") -> list[jax.Array]:
    return [jnp.array(values, jnp.float32) for values in row[name]]


def clip(grads, max_norm, **kwargs):
    tx = jaxmp.clip_by_global_norm(max_norm, **kwargs)
    return tx.update(grads, tx.init(grads))


# Megatron-LM


@pytest.mark.thorough(7)
@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_global_norm(row, ord):
    expected = row[ORDERS[ord]]
    if expected is None:  # torch's MAX of NaN depends on where it stands; ours is NaN
        expected = np.nan
    assert_close(jaxmp.global_norm(grads_of(row), ord=ord), np.float32(expected), rtol=1e-6)


@pytest.mark.thorough(3)
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_clipped_gradients(row):
    """A norm of exactly max_norm is scaled by 0.999999; one that overflows on finite gradients gives zeros."""
    clipped, state = jax.jit(clip, static_argnums=1)(grads_of(row), row["max_norm"])
    assert_close(clipped, grads_of(row, "clipped"), rtol=1e-6)
    assert_close(state.grad_norm, np.float32(row["total_norm"]), rtol=1e-6)
    if row["clipped"] == row["grads"]:
        assert_exact(clipped, grads_of(row))


def test_where_optax_clips_otherwise():
    (row,) = [row for row in ROWS if row["name"] == "exactly_max"]
    tx = optax.clip_by_global_norm(row["max_norm"])
    assert_moved(tx.update(grads_of(row), tx.init(None))[0], grads_of(row))
    assert np.all(clip(grads_of(row), row["max_norm"])[0][0] < grads_of(row)[0])


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_count_zeros(row):
    tx = jaxmp.count_zeros()
    grads, state = tx.update(grads_of(row), tx.init(None))
    assert_moved(grads, grads_of(row))
    assert_exact(state.zero_grads, float(row["num_zeros"]))


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    "inner",
    [optax.chain(jaxmp.clip_by_global_norm(1.0), optax.adamw(1e-2)), jaxmp.fused_adamw(1e-2, max_norm=1.0)],
    ids=["chain", "fused"],
)
def test_the_norm_is_that_of_the_last_step_taken(inner):
    tx, params = jaxmp.mixed_precision(inner, "bf16"), np.ones(4, jnp.bfloat16)
    step, state = jax.jit(lambda grads, state: jaxmp.apply_gradients(tx, grads, state, params)[1]), tx.init(params)
    for value, norm, skipped in ((0.25, 0.5, False), (1e25, 0.5, True), (0.5, 1.0, False)):
        state = step(np.full(4, value, np.float32), state)
        metrics = jaxmp.get_metrics(state)
        assert (metrics["grad_norm"], metrics["skipped"]) == (norm, skipped)


def test_zero_norm_switches_clipping_off():
    tx = jaxmp.clip_by_global_norm(0.0)
    grads = jnp.array([1e20, np.nan])
    updates, state = tx.update(grads, tx.init(grads))
    assert_moved(updates, grads)
    assert jax.tree.leaves(state) == []
    assert np.isnan(jaxmp.get_metrics(state)["grad_norm"])


def test_norms_are_float32_whatever_the_gradients_are():
    """In float16 the square of 300 is inf. Clipped gradients keep their dtype; what is no float passes through."""
    grads = {"f16": jnp.full(4, 300.0, jnp.float16), "bf16": jnp.full(2, 0.0, jnp.bfloat16), "n": jnp.arange(3)}
    assert_exact(jaxmp.global_norm(grads), 600.0)
    clipped, _ = clip(grads, 60.0)
    assert_close(clipped, grads | {"f16": jnp.full(4, 30.0, jnp.float16)})


def test_norms_of_nothing_and_of_frozen_kernels():
    for ord in ORDERS:
        assert_exact(jaxmp.global_norm({}, ord=ord), 0.0)
        assert_exact(jaxmp.global_norm({"w": np.zeros((0, 3), np.float32)}, ord=ord), 0.0)
    frozen = jaxmp.fp8.freeze({"kernel": np.linspace(-1, 2, 32, dtype=np.float32).reshape(8, 4)})
    assert_close(jaxmp.global_norm(frozen), jaxmp.global_norm(jnp.asarray(frozen["kernel"])), rtol=1e-6)


def test_bad_numbers_and_an_axis_that_is_not_bound_are_named():
    for max_norm in (-1.0, math.nan):
        with pytest.raises(ValueError, match=rf"max_norm must be >= 0 \(0 means no clipping\); got {max_norm}"):
            jaxmp.clip_by_global_norm(max_norm)
    for ord in (0, -1, math.nan):
        with pytest.raises(ValueError, match=f"the order of a norm must be > 0; got {ord}"):
            jaxmp.global_norm(np.ones(2, np.float32), ord=ord)
    with pytest.raises(ValueError, match=r"axis name 'model' is not bound here; bound axes: none\..*jax.shard_map"):
        clip(GRADS, 1.0, axis_name="model")


# Params split over devices


MASK = {"split": False, "bias": True, "norm": {"scale": True}}
SPECS = {"split": P("model"), "bias": P(), "norm": P()}
GRADS = {
    "split": np.linspace(-3, 3, 24, dtype=np.float32).reshape(8, 3) * (np.arange(3) > 0),
    "bias": np.array([0.0, 2.0, 0.5], np.float32),
    "norm": {"scale": np.array([0.0, -4.0], np.float32)},
}


@functools.cache
def over_model_axis(ord: float, check_vma: bool, masked: str):
    """(clipped, norm, zeros) of GRADS, computed by four devices that each hold a part of `split`."""
    masks = {"tree": MASK, "prefix": {"split": False, "bias": True, "norm": True}, "none": None}
    masks["function"] = lambda params: {name: name != "split" for name in params}
    kwargs = {"axis_name": "model", "replicated": masks[masked]}

    @functools.partial(
        jax.shard_map,
        mesh=Mesh(np.array(jax.devices()[:4]), "model"),
        in_specs=(SPECS,),
        out_specs=(SPECS, P(), P()),
        check_vma=check_vma,
    )
    def run(grads):
        clipped, clip_state = clip(grads, 1.5, ord=ord, **kwargs)
        counter = jaxmp.count_zeros(**kwargs)
        _, zero_state = counter.update(grads, counter.init(grads))
        return clipped, clip_state.grad_norm, zero_state.zero_grads

    return jax.jit(run)(GRADS)


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    "ord, check_vma, masked",
    [
        (2, False, "tree"),
        (2, True, "none"),  # jax keeps track of what is the same everywhere
        (2, False, "function"),
        (math.inf, True, "prefix"),
        (3, True, "tree"),
    ],
)
def test_split_params_have_the_norm_of_whole_ones(ord, check_vma, masked):
    clipped, norm, zeros = over_model_axis(ord, check_vma, masked)
    assert_close(norm, jaxmp.global_norm(GRADS, ord=ord), rtol=1e-6)
    assert_close(clipped, clip(GRADS, 1.5, ord=ord)[0], rtol=1e-6)
    assert_exact(zeros, float(sum(np.sum(g == 0) for g in jax.tree.leaves(GRADS))))


def test_leaves_that_every_shard_holds_count_once():
    """Without the mask they count four times, where jax does not keep track: the more, the more devices there are."""
    _, norm, zeros = over_model_axis(2, False, "none")
    whole = sum(np.sum(g.astype(np.float64) ** 2) for g in (GRADS["bias"], GRADS["norm"]["scale"]))
    split = np.sum(GRADS["split"].astype(np.float64) ** 2)
    assert_close(norm, np.float32(np.sqrt(split + 4 * whole)), rtol=1e-6)
    assert_exact(zeros, float(np.sum(GRADS["split"] == 0) + 4 * 2))


# Schedules


def test_max_norm_follows_a_schedule():
    schedule = optax.piecewise_constant_schedule(4.0, {1: 0.5, 2: 0.5})  # 4, 2, 1
    tx = jaxmp.mixed_precision(
        optax.chain(optax.inject_hyperparams(jaxmp.clip_by_global_norm)(max_norm=schedule), optax.sgd(1.0)),
        "fp16",
        loss_scale=8.0,
    )
    params = jnp.zeros(2, jnp.float16)
    opt_state = tx.init(params)
    update = jax.jit(tx.update)
    grads = jnp.array([24.0, -32.0], jnp.float16)  # scaled by 8: a norm of 5
    moved = 0.0
    for max_norm in (4.0, 2.0, 1.0, 1.0):
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        moved += max_norm
        assert_close(jaxmp.get_master_params(opt_state, params), jnp.array([-0.6, 0.8]) * moved, rtol=1e-6)
        assert_exact(jaxmp.get_metrics(opt_state)["grad_norm"], 5.0)


@pytest.mark.parametrize("max_norm, expected", [(0.0, [3.0, 4.0]), (1.0, [0.6, 0.8]), (8.0, [3.0, 4.0])])
def test_max_norm_can_be_an_array(max_norm, expected):
    """0 is off here as well: as a bound it would stop all training."""
    clipped, _ = jax.jit(clip)(jnp.array([3.0, 4.0]), max_norm)
    assert_close(clipped, jnp.array(expected), rtol=1e-6)


# Weight decay


def test_weight_decay_mask():
    """Megatron-LM's: not on biases and norms; also where a scan stacked the layers, and inside `mixed_precision`."""
    shapes = {
        "embed": {"embedding": (4, 2)},
        "blocks": {
            "attention": {"kernel": (3, 2, 2), "bias": (3, 2)},
            "LayerNorm_0": {"scale": (3, 2), "bias": (3, 2)},
            "RMSNorm": {"scale": (3, 2)},
        },
        "gain": (2,),
        "temperature": (),
        "bias": (1, 2),
    }
    params = jax.tree.map(lambda s: np.ones(s, np.float32), shapes, is_leaf=lambda s: isinstance(s, tuple))
    expected = {
        "embed": {"embedding": True},
        "blocks": {
            "attention": {"kernel": True, "bias": False},
            "LayerNorm_0": {"scale": False, "bias": False},
            "RMSNorm": {"scale": False},
        },
        "gain": False,
        "temperature": False,
        "bias": False,
    }
    assert jaxmp.weight_decay_mask(params) == expected
    assert jaxmp.weight_decay_mask(jax.eval_shape(lambda: params)) == expected

    tx = jaxmp.mixed_precision(optax.adamw(0.5, weight_decay=0.5, mask=jaxmp.weight_decay_mask), "bf16")
    params = {"kernel": np.ones((2, 2), jnp.bfloat16), "bias": np.ones(2, jnp.bfloat16)}
    step = jax.jit(lambda p: jaxmp.apply_gradients(tx, jax.tree.map(jnp.zeros_like, p), tx.init(p), p)[0])
    assert_exact(step(params), params | {"kernel": np.full((2, 2), 0.75, jnp.bfloat16)})
