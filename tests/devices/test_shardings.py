"""Optimizer state lies as its params do."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp

MESH = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
PARAMS = {
    "dense": {"kernel": jax.ShapeDtypeStruct((64, 1024), jnp.float32), "bias": jax.ShapeDtypeStruct((8,), jnp.float32)},
    "kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32),  # the end of another path
}
SPECS = {"dense": {"kernel": P("fsdp", None), "bias": P()}, "kernel": P(None, "fsdp")}
SHARDINGS = jax.tree.map(lambda s: NamedSharding(MESH, s), SPECS, is_leaf=lambda x: isinstance(x, P))

OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "clipped": optax.chain(jaxmp.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "fused": jaxmp.fused_adamw(1e-3, max_norm=1.0),
    "int8": jaxmp.compress_moments(optax.adam(1e-3), jnp.int8),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "labels": optax.multi_transform(
        {"adam": optax.adam(1e-3), "frozen": optax.set_to_zero()},
        {"dense": {"kernel": "adam", "bias": "frozen"}, "kernel": "adam"},
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_a_params_shape_lies_as_it_does(name):
    tx = jaxmp.mixed_precision(OPTIMIZERS[name], "fp16")
    state = jax.eval_shape(tx.init, PARAMS)
    shardings = jaxmp.sharding_of(tx, PARAMS, SHARDINGS)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    seen = set()
    for (path, x), sharding in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(shardings), strict=True):
        at = jax.tree_util.keystr(path)
        expected = P()
        for end, param, spec in (
            ("['dense']['kernel']", PARAMS["dense"]["kernel"], P("fsdp", None)),
            ("['kernel']", PARAMS["kernel"], P(None, "fsdp")),
        ):
            if at.endswith(end):
                expected = spec if x.shape == param.shape else P()
                seen.add(expected)
                break
        if at.endswith((".codes", ".scales")) and "dense" in at:  # codes [64, 1024], scales [64, 4]
            assert x.shape in ((64, 1024), (64, 4))
            expected = P("fsdp", None)
            seen.add(x.shape)
        assert sharding.mesh == MESH and sharding.spec == expected, at
    assert {P("fsdp", None), P(None, "fsdp")} <= seen
    assert ((64, 4) in seen) == (name == "int8")


def test_specs_give_specs():
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "bf16")
    shardings = jaxmp.sharding_of(tx, PARAMS, SPECS)
    assert optax.tree.get(shardings, "mu")["kernel"] == P(None, "fsdp")
    assert optax.tree.get(shardings, "loss_scale") == P()
    prefix = jaxmp.sharding_of(tx, PARAMS, {"dense": P("fsdp"), "kernel": P()})
    assert optax.tree.get(prefix, "mu")["dense"] == {"kernel": P("fsdp"), "bias": P("fsdp")}


def test_a_single_array_and_a_memory_of_its_own():
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "bf16")
    shardings = jaxmp.sharding_of(tx, jnp.ones((8, 2)), NamedSharding(MESH, P("fsdp")))
    assert optax.tree.get(shardings, "mu").spec == P("fsdp")
    assert optax.tree.get(shardings, "count").spec == P()
    host = NamedSharding(MESH, P("fsdp"), memory_kind="pinned_host")
    shardings = jaxmp.sharding_of(tx, {"w": jnp.ones((8, 2))}, {"w": host})
    assert optax.tree.get(shardings, "mu")["w"] == host
    assert optax.tree.get(shardings, "loss_scale").memory_kind != "pinned_host"


SHORT = {"dense": SHARDINGS["dense"]}
WRONG = {
    "missing": (SHORT, r"got none for kernel, of shape \(8, 4\)"),
    "left_over": (SHARDINGS | {"head": SHARDINGS["kernel"]}, "head is in shardings only"),
    "rank": (
        SHARDINGS | {"kernel": NamedSharding(MESH, P(None, None, "fsdp"))},
        r"\(8, 4\) at kernel, which has fewer",
    ),
    "length": (
        SHARDINGS | {"kernel": NamedSharding(MESH, P(None, ("data", "fsdp")))},
        r"\(8, 4\) at kernel, cut over 8 in dimension 1. Pad it",
    ),
    "mixed": (SHARDINGS | {"kernel": P()}, "or all PartitionSpecs; got .* at kernel"),
    "kind": (SHARDINGS | {"kernel": "fsdp"}, "PartitionSpecs, as layout.shardings; got str in shardings"),
}


@pytest.mark.parametrize("name", WRONG)
def test_shardings_that_do_not_match_are_named(name):
    shardings, message = WRONG[name]
    with pytest.raises(TypeError if name == "kind" else ValueError, match=message):
        jaxmp.sharding_of(jaxmp.mixed_precision(optax.sgd(1.0), "bf16"), PARAMS, shardings)


def test_a_field_of_a_state_is_no_param_of_that_name():
    """`.count` and `.mu` are fields of Adam's state; a param may be called so, too."""
    params = {"count": jax.ShapeDtypeStruct((), jnp.float32), "mu": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    shardings = jaxmp.sharding_of(optax.adam(1e-3), params, {"count": P(), "mu": P("fsdp")})
    assert shardings[0].mu == {"count": P(), "mu": P("fsdp")}
    assert shardings[0].count == P()
