"""Optimizer state of every kind, cut over eight devices with its params, moves as on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_close
from jaxmp import fsdp
from pallas_kernels import moments

MESH = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
POLICY = jaxmp.get_policy("bf16")
rng = np.random.default_rng(0)
# Cut along the first axis, into parts that are too small to start in 8 bits; and along the axis of the groups.
PARAMS = {
    "rows": np.float32(rng.normal(size=(128, 96)) / 11),
    "columns": np.float32(rng.normal(size=(32, 2048)) / 6),
}
LAYOUT = fsdp.layout_of(PARAMS, MESH, min_size=1)
BATCHES = [rng.normal(size=(16, 128)).astype(jnp.bfloat16) for _ in range(4)]
RATE, EPS = 1e-2, 1e-3

KINDS = {
    "split 16": (lambda: jaxmp.fused_adamw(RATE, eps=EPS), 16),
    "split 8": (lambda: jaxmp.fused_adamw(RATE, eps=EPS), 8),
    "bfloat16": (lambda: jaxmp.fused_adamw(RATE, eps=EPS, state_dtype=jnp.bfloat16), None),
    "int8": (lambda: jaxmp.fused_adamw(RATE, eps=EPS, state_dtype=jnp.int8), None),
    "compressed int8": (lambda: jaxmp.compress_moments(optax.adamw(RATE, eps=EPS), jnp.int8), 8),
    "ema": (lambda: optax.chain(optax.adamw(RATE, eps=EPS), jaxmp.ema_params(0.5)), None),
    "steps": (lambda: optax.MultiSteps(optax.adamw(RATE, eps=EPS), 2).gradient_transformation(), None),
}


def loss_of(params, x):
    bounded = jnp.mean(jnp.tanh(x @ params["rows"]).astype(jnp.float32) ** 2)
    return bounded + jnp.mean((x[:, :32] @ params["columns"] - 1).astype(jnp.float32) ** 2)


@functools.cache
def run(kind, how):
    """The float32 params after four steps, and the state."""
    make, bits = KINDS[kind]
    tx = jaxmp.mixed_precision(make(), POLICY, remainder_bits=bits)

    def step(params, opt_state, x):
        loss_fn = loss_of if how == "single" else lambda params, x: loss_of(fsdp.gather(params, LAYOUT), x)
        _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=opt_state)
        if how.startswith("shard_map"):
            grads = fsdp.reduce_gradients(grads, LAYOUT)
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    params32 = PARAMS if how == "single" else jax.device_put(PARAMS, LAYOUT.shardings)
    place = None if how == "single" else jaxmp.sharding_of(tx, PARAMS, LAYOUT.shardings)
    params, opt_state = POLICY.cast_to_param(params32), jax.jit(tx.init, out_shardings=place)(params32)
    if how.startswith("shard_map"):
        specs = (LAYOUT.specs, jaxmp.sharding_of(tx, PARAMS, LAYOUT.specs))
        step = jax.shard_map(
            step, mesh=MESH, in_specs=(*specs, P("fsdp")), out_specs=specs, check_vma=how == "shard_map"
        )
    step = jax.jit(step)
    for x in BATCHES:
        x = x if how == "single" else jax.device_put(x, NamedSharding(MESH, P("fsdp")))
        params, opt_state = step(params, opt_state, x)
    return jax.tree.map(np.asarray, jaxmp.get_master_params(opt_state, params)), opt_state


def distance(a, b):
    return np.sqrt(sum(np.sum((np.asarray(a[name]) - np.asarray(b[name])) ** 2) for name in a))


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("split 16", "shard_map"),
        ("split 8", "jit"),  # noise of the whole leaf, and of parts
        ("split 8", "shard_map_unchecked"),
        ("bfloat16", "shard_map"),
        ("int8", "jit"),
        ("int8", "shard_map_unchecked"),
        ("compressed int8", "shard_map"),
        ("ema", "shard_map"),
        ("steps", "shard_map_unchecked"),
    ],
)
def test_state_of_every_kind_moves_as_on_one_device(kind, how):
    """Noise and gradients are rounded apart on eight devices, and no further apart than that.

    The bound is in shares of the way that the params went: eight bits of moment are about two per cent of it, and block
    scales that lie on another device than their codes half of it.
    """
    masters, opt_state = run(kind, how)
    one, _ = run(kind, "single")
    narrow = 0.04 if "int8" in kind else 0.005
    assert distance(masters, one) <= narrow * distance(one, PARAMS)
    cut = [x for x in jax.tree.leaves(opt_state) if x.ndim == 2]
    assert len(cut) >= 4 and not any(x.is_fully_replicated for x in cut)
    codes = [x for x in jax.tree.leaves(opt_state, is_leaf=moments.is_quantized) if moments.is_quantized(x)]
    assert len(codes) == (4 if narrow > 0.01 else 0)


def test_a_scale_that_spans_devices_is_refused_by_its_path():
    """2 scales of 256 codes each over 8 devices: four devices would share a scale, and each would choose its own."""
    params = {"w": np.ones((64, 512), np.float32)}
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(RATE, state_dtype=jnp.int8), POLICY)
    specs = jaxmp.sharding_of(tx, params, {"w": P(None, "fsdp")})
    step = jax.shard_map(lambda state: state, mesh=MESH, in_specs=(specs,), out_specs=specs, check_vma=False)
    with pytest.raises(ValueError, match=r"mu'?\]?\['w'\]\.scales"):
        jax.eval_shape(step, jax.eval_shape(tx.init, params))
    placed = jaxmp.sharding_of(tx, params, {"w": NamedSharding(MESH, P(None, "fsdp"))})  # under jit XLA sees it whole
    assert optax.tree.get(placed, "mu")["w"].scales.spec == P(None, None)
    assert optax.tree.get(placed, "mu")["w"].codes.spec == P(None, "fsdp")


@pytest.mark.thorough(0)
def test_a_part_of_a_moment_keeps_its_form():
    """At `init` 1024 elements would stay in float32; as a part of 8192 they are in 8 bits."""
    tx = jaxmp.compress_moments(optax.adam(RATE), jnp.int8)
    state, params = jax.jit(tx.init)({"w": np.ones((8, 1024), np.float32)}), {"w": np.ones((1, 1024), np.float32)}
    part = jax.tree.map(lambda x: x[:1] if x.ndim == 2 else x, state)
    updates, new = jax.jit(tx.update)(params, part, params)
    assert jax.tree.structure(new) == jax.tree.structure(part)
    assert_close(updates["w"], np.full((1, 1024), -RATE, np.float32), rtol=1e-3)
