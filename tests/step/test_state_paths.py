"""Where a leaf of a state lies is told by structure: a model may use any word of the optimizers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp._src.step import state_paths

W = jnp.ones((16, 256))
WORDS = ("optimizer_state", "fp8_scales", "master_params", "amax_states", "scaling", "mu", "codes", "value", "guarded")


def table(tx, params):
    """{path: (role, param, part)} of the state of `tx`."""
    paths = state_paths.leaves(jax.eval_shape(tx.init, params), params)
    return {str(path): (path.role, path.param, path.part) for path in paths}


@pytest.mark.thorough(3)
@pytest.mark.parametrize("word", WORDS)
def test_a_model_may_use_every_word_of_a_state(word):
    """Also where the path of one param ends with that of another, and where a layer is called as a field inside it."""
    params = {word: {"w": W, word: {"scale": W}}, "w": W}
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "bf16")
    found = table(tx, params)
    for param in ("w", f"{word}/w", f"{word}/{word}/scale"):
        assert found[f"0/mu/{param}"] == found[f"0/nu/{param}"] == ("inner", param, ())
        assert found[f"master_params/{param}"] == ("master", param, ())
    assert found["0/count"] == ("inner", None, ()) and found["scaling/loss_scale"] == ("scale", None, ())
    assert found["skipped_steps"] == ("counter", None, ()) and len(found) == 21


class Params(NamedTuple):
    mu: jax.Array
    master_params: jax.Array
    codes: jax.Array


@pytest.mark.parametrize("params", [Params(W, W, W), [W, {"0": W}, (W, W)], W], ids=["fields", "lists", "one array"])
def test_params_in_any_container(params):
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3, state_dtype=jnp.int8), "bf16", remainder_bits=16)
    found = table(tx, params)
    for param in (path for path in map(str, _names(params)) if path):
        assert found[f"compressed/0/mu/{param}/codes"] == ("inner", param, ("codes",))
        assert found[f"master_params/{param}/remainder16"] == ("master", param, ("remainder16",))
    assert found["compressed/0/count"] == ("inner", None, ())


def _names(params):
    return [
        "/".join(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path)
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]


def test_arrays_of_an_axis_belong_to_the_param_below_it():
    """A model with a layer that is called as the axis."""
    params = {"data": {"w": W}, "w": W}
    tx = jaxmp.reduce_gradients("data", wire_dtype=jnp.int8, devices=2, min_size=1)
    found = table(tx, params)
    assert {param for path, (_, param, _) in found.items() if path.startswith("unsent/by_axis/data/data")} == {"data/w"}
    assert {param for path, (_, param, _) in found.items() if path == "unsent/by_axis/data/w"} == {"w"}


def test_what_an_optimizer_keeps_of_its_own_for_a_param_belongs_to_it():
    found = table(optax.sm3(1e-3), {"w": W, "b": jnp.ones(3)})
    owners = {path: param for path, (_, param, _) in found.items()}
    assert owners["0/mu/w/0"] == owners["0/mu/w/1"] == "w" and owners["0/nu/b"] == "b"


def test_boxes_of_nnx_add_nothing():
    class Model(nnx.Module):
        def __init__(self):
            self.value = nnx.Param(W)
            self.layers = nnx.List([nnx.Param(W)])

    found = table(jaxmp.mixed_precision(optax.adam(1e-3), "bf16"), nnx.state(Model()))
    assert found["0/mu/value"][1] == "value" and found["master_params/layers/0"][1] == "layers/0"


OLD = {
    "guarded/master_inner/0/mu/value/kernel/value/codes": ("0/mu/value/kernel/codes", "inner", "value/kernel"),
    "1/guarded/0/nu/guarded/w": ("1/0/nu/guarded/w", "inner", "guarded/w"),
    "guarded/master_params/master_params/w": ("master_params/master_params/w", "master", "master_params/w"),
    "fp8_rest/amax_states/0/scale": ("amax_states/0/scale", "fp8", None),
    "scaling/loss_scale": ("scaling/loss_scale", "scale", None),
    "skipped_steps": ("skipped_steps", "counter", None),
    "0/count": ("0/count", "inner", None),
}


def test_states_that_do_not_say_what_is_a_field_are_read_by_names():
    params = {("value", "kernel"), ("guarded", "w"), ("master_params", "w"), ("scale",)}
    found = state_paths.of_names([tuple(path.split("/")) for path in OLD], params)
    assert [(str(path), path.role, path.param) for path in found] == list(OLD.values())
