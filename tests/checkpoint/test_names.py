"""Names of a model are any strings: each leaf comes back under its own name, or `save` refuses it before it writes."""

import shutil
import tempfile
import unicodedata
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

import jaxmp
from helpers import assert_moved
from jaxmp import checkpoint
from jaxmp._src.step import state as states

COMPOSED = unicodedata.normalize("NFC", "café")
DECOMPOSED = unicodedata.normalize("NFD", "café")
WORDS = [
    *states.StepState._fields,
    *states.Fp8State._fields,
    *(
        "guarded",
        "fp8_rest",
        "master_inner",
        "mu",
        "nu",
        "codes",
        "scales",
        "value",
        "remainder16",
        "by_axis",
        "params",
    ),
]
ODD = ["a.b", "a/b", "a%2Eb", "%", "..", ".", "", "'", '"', "a b", "\n", "\\", "0", "00", "Dense", "dense", "n" * 300]
ODD += [COMPOSED, DECOMPOSED, ".zarray", "<root>", "opt_state", "~", "名前"]
POLICY = jaxmp.get_policy("bf16")
SCALE = jaxmp.DynamicLossScale(4.0)


def numbered(tree):
    """`tree` with other numbers in each leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([np.full((2,), i + 1, np.float32) for i in range(len(leaves))])


def job(params, inner=None):
    """(tx, params, opt_state) with other numbers in every array, as if it had been trained."""
    tx = jaxmp.mixed_precision(inner or optax.chain(optax.trace(0.9), jaxmp.ema_params(0.9)), POLICY, loss_scale=SCALE)
    params = numbered(params)
    leaves, treedef = jax.tree.flatten(jax.eval_shape(tx.init, params))
    state = treedef.unflatten([np.full(x.shape, i + 3, x.dtype) for i, x in enumerate(leaves)])
    state = state._replace(unscaled_fp16=np.zeros((), bool))  # said by the optimizer, not by the checkpoint
    return tx, POLICY.cast_to_param(params), state


def saved_and_restored(params, **kwargs):
    """The job and what came back of it."""
    tx, params, state = job(params, **kwargs)
    folder = tempfile.mkdtemp()
    try:
        with checkpoint.manager(folder) as steps:
            checkpoint.save(steps, 0, params=params, opt_state=state, extra={"average": params})
            found = checkpoint.restore(steps, tx, params=params, extra={"average": params})
    finally:
        shutil.rmtree(folder)
    return (params, state, params), (found.params, found.opt_state, found.extra["average"])


def assert_all_is_back(params, **kwargs):
    before, after = saved_and_restored(params, **kwargs)
    assert_moved(after, before)
    assert jax.tree.structure(after) == jax.tree.structure(before)


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    "word", ["master_params", "amax_states", "guarded", "optimizer_state", "fp8_scales", "scaling"]
)
def test_a_layer_may_be_called_as_the_fields_of_a_state(word):
    """`mu` and `nu` came back with other values, or not at all."""
    assert_all_is_back({word: {"w": 0, word: {"scale": 0, "loss_scale": 0}}, "w": 0})


def test_names_that_orbax_joins_to_one_come_back():
    """They were written over each other, and the checkpoint was called damaged."""
    assert_all_is_back({"a.b": 0, "a": {"b": 0}, "a%2Eb": 0, "": {"": 0}, ".": 0})


NAMES = st.one_of(st.sampled_from(WORDS), st.sampled_from(ODD), st.text(max_size=4))
TREES = st.recursive(
    st.just(0),
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, min_size=1, max_size=4), st.lists(inner, min_size=1, max_size=2)
    ),
    max_leaves=6,
)


@pytest.mark.thorough(0)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(TREES)
@example({name: 0 for name in ODD})
@example({name: {name: 0, "w": 0} for name in WORDS})
@example([{"0": 0}, 0])
def test_every_tree_comes_back_or_is_refused(tree):
    tx, params, state = job(tree)
    folder = tempfile.mkdtemp()
    try:
        with checkpoint.manager(folder) as steps:
            try:
                with warnings.catch_warnings(action="ignore"):
                    checkpoint.save(steps, 0, params=params, opt_state=state)
            except ValueError as e:
                assert "must have different" in str(e) or "must be valid Unicode" in str(e)
                assert steps.latest_step() is None and steps.all_steps() == []
                return
            found = checkpoint.restore(steps, tx, params=params)
    finally:
        shutil.rmtree(folder)
    assert_moved((found.params, found.opt_state), (params, state))


def refused(params, message):
    folder = tempfile.mkdtemp()
    with checkpoint.manager(folder) as steps:
        with pytest.raises(ValueError, match=message):
            checkpoint.save(steps, 0, params=params, opt_state=())
        assert steps.all_steps() == []
    shutil.rmtree(folder)


def test_names_that_nothing_can_tell_apart_are_refused_before_anything_is_written():
    class Keyed(dict):
        """A dict that keeps the numbers apart from the strings of their digits, as nnx does."""

    jax.tree_util.register_pytree_with_keys(
        Keyed,
        lambda x: ([(jax.tree_util.DictKey(k), v) for k, v in x.items()], tuple(x)),
        lambda keys, values: Keyed(zip(keys, values, strict=True)),
    )
    refused({"layers": Keyed({1: jnp.ones(2), "1": jnp.zeros(2)})}, "must have different names.*two at params/layers/1")
    refused({"a/b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}, "must have different paths.*two at a/b")
    refused({"\ud800": jnp.ones(2)}, "must be valid Unicode; got .*Rename the leaf")


def test_ordinary_names_are_those_of_orbax(tmp_path):
    """Dots alone, as in the names of torch, need no escapes: Orbax reads the tree into the same structure."""
    params = numbered({"layers.0.weight": 0, "layers.1.weight": 0})
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 0, params=params, opt_state=())
    with ocp.StandardCheckpointer() as reader:
        found = reader.restore(tmp_path / "0" / "state")
    assert_moved(found["params"], params)
