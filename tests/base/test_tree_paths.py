"""The language of path patterns: its rules, the arguments that use it, and what a useless pattern raises."""

import functools
import tempfile
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors

import jaxmp
from jaxmp._src.base import tree_paths
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.step import masters as masters_lib
from jaxmp.checkpoint import save_safetensors

CASES = [
    ("kernel", "kernel", True),
    ("kernel", "dense/kernel", True),
    ("kernel", "dense/my_kernel", False),
    ("dense", "dense/kernel", False),
    ("mlp/up", "block_0/mlp/up", True),
    ("lp/up", "block_0/mlp/up", False),
    ("KERNEL", "Dense/Kernel", True),
    ("/head", "head", True),
    ("/head", "decoder/head", False),
    ("/mlp/*", "mlp/up", True),
    ("/mlp/*", "block_0/mlp/up", False),
    ("*", "a/b/c", True),
    ("*", "", True),
    ("*norm*", "block_0/LayerNorm_1/scale", True),
    ("mlp/*", "block_0/mlp/a/b", True),
    ("mlp/*", "mlp", False),
    ("a/**/b", "a/b", True),
    ("a/**/b", "x/a/y/z/b", True),
    ("a/**/b", "a/xb", False),
    ("a*/b", "ab/c/b", True),
    ("**/b", "b", True),
    ("/**/b", "a/b", True),
    ("a/**", "a/b/c", True),
    ("a/**", "a", False),
    ("block_?/up", "block_1/up", True),
    ("block_?/up", "block_10/up", False),
    ("block_[0-2]/up", "block_1/up", True),
    ("block_[!0-2]/up", "block_1/up", False),
    ("layer.0", "layer_0", False),
    ("", "", True),
    ("", "a", False),
    ("/", "", True),
    ("<root>", "<root>", True),
]


@pytest.mark.parametrize(("pattern", "path", "fits"), CASES)
def test_the_language(pattern, path, fits):
    assert tree_paths.matches(path, pattern) is fits
    assert tree_paths.matches(path, ["nothing", pattern]) is fits
    assert tree_paths.first_match(path, {"nothing": 1, pattern: 2, "*": 3}) == (pattern if fits else "*")


# Every argument with patterns chooses the same paths.

CHOICES = [
    ("UP", {"up", "mlp/up"}),
    ("/up", {"up"}),
    ("mlp/*", {"mlp/up", "mlp/down"}),
    ("[mn]*", {"mlp/up", "mlp/down", "norm_head"}),
]
SIDE = 16
X = np.ones((SIDE, SIDE), np.float32)
LEAVES = {"up": X, "mlp": {"up": X, "down": X}, "norm_head": X}


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(SIDE, name="down")(nn.Dense(SIDE, name="up")(x))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(SIDE, name="norm_head")(Mlp(name="mlp")(nn.Dense(SIDE, name="up")(x)))


@functools.cache
def params_of_net():
    return jax.jit(Net().init)(jax.random.key(0), X)["params"]


def kept_by_policy(pattern):
    policy = jaxmp.get_policy("bf16", keep_fp32=pattern)
    jax.eval_shape(jaxmp.mixed_precision(optax.sgd(1.0), policy).init, LEAVES)
    cast = tree_paths.leaves_by_path(policy.cast_to_param(LEAVES))
    return {path for path, x in cast.items() if x.dtype == jnp.float32}


def cast_by_autocast(pattern):
    explained = jaxmp.explain_autocast(
        lambda params: Net().apply({"params": params}, X),
        params_of_net(),
        dtype=jnp.float16,
        modules={pattern: jnp.bfloat16},
    )
    dots = [row for row in explained.rows if row.name == "dot_general"]
    return {row.module.partition("/")[2] for row in dots if row.runs_in == "bfloat16"}


def kept_in_file(pattern):
    kernels = jax.tree.map(lambda x: {"kernel": x}, LEAVES)
    with tempfile.TemporaryDirectory() as folder:
        save_safetensors(f"{folder}/w", kernels, dtype=jnp.float8_e4m3fn, keep=f"{pattern}/kernel")
        with safetensors.safe_open(f"{folder}/w", framework="np") as file:
            in_16_bits = [name for name in file.keys() if file.get_slice(name).get_dtype() == "BF16"]
    return {name.removesuffix(".kernel").replace(".", "/") for name in in_16_bits}


ARGUMENTS = {  # of fp8: tests/fp8/test_chosen_layers.py; filter= of activations: tests/monitor/test_activations.py
    "keep_fp32": kept_by_policy,
    "autocast(modules=)": cast_by_autocast,
    "save_safetensors(keep=)": kept_in_file,
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_every_argument_speaks_the_language(argument):
    for pattern, expected in CHOICES:
        assert ARGUMENTS[argument](pattern) == expected, pattern


def test_a_level_of_the_tree_is_named_with_what_is_below():
    with pytest.warns(UserWarning, match=r"the pattern 'mlp' fits no leaf. Close to it: 'mlp/\*'\."):
        assert tree_paths.warn_of_idle("partial", "mlp", ["mlp/up/kernel", "mlp/up/bias"], of="leaf")
    assert tree_paths.matches("mlp/up/kernel", "mlp/*")


@pytest.mark.thorough(2)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_pattern_that_fits_nothing_says_the_same_everywhere(argument):
    pattern = "mlp/upp"
    with pytest.warns(UserWarning) as caught:
        ARGUMENTS[argument](pattern)
    message = str(caught[0].message)
    assert f"{argument}: the pattern '{pattern}" in message and "fits no " in message
    assert "Close to it: 'mlp/up" in message
    shown = message.partition("Paths here: ")[2].partition(". [")[0]
    assert 3 <= len(shown.split(", ")) <= 4 and "up" in shown
    assert message.endswith(". [docs/warnings.md#pattern-fits-nothing]")


def test_a_recipe_for_no_scale_is_warned_of_where_the_optimizer_is_made():
    recipes = {"*upp*": jaxmp.fp8.DelayedScaling(), "*": jaxmp.fp8.DelayedScaling()}
    with jaxmp.fp8.autocast(filter="up"):
        params = jax.eval_shape(Net().init, jax.random.key(0), X)["params"]
    with pytest.warns(UserWarning, match=r"mixed_precision\(recipe=\): the pattern '\*upp\*' fits no fp8 scale"):
        jax.eval_shape(jaxmp.mixed_precision(optax.sgd(1.0), "fp8", recipe=recipes).init, params)
    stateless = {"*upp*": jaxmp.fp8.CurrentScaling(), "*": jaxmp.fp8.DelayedScaling()}  # has no scales in the params
    jax.eval_shape(jaxmp.mixed_precision(optax.sgd(1.0), "fp8", recipe=stateless).init, params)


def test_a_recipe_is_for_all_below_a_level():
    recipes = {"mlp": 1, "up": 2, "*": 3}
    for path, expected in (("block_0/mlp/up", "mlp"), ("block_0/up", "up"), ("head", "*")):
        for end in ("", "/Fp8DotGeneral_0/fp8_lhs_e4m3_log2_scale"):
            assert scale_leaves.pattern_for(recipes, path + end, "fp8 layer") == expected


class Last(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(SIDE, name="last")(x)


def test_autocast_regions_warn_at_their_end_of_all_that_was_called_in_them():
    params, region = params_of_net(), {"dtype": jnp.float16, "modules": {"mlp/up": jnp.float32, "last": jnp.float32}}
    last_params = {"last": params["up"]}

    def call(module, params):
        jax.eval_shape(lambda params: module.apply({"params": params}, X), params)

    with jaxmp.autocast(**region):  # each model alone leaves a pattern without a module
        call(Net(), params)
        call(Last(), last_params)
    with pytest.warns(UserWarning, match=r"autocast\(modules=\): the pattern 'last' fits no module") as record:
        with jaxmp.autocast(**region):
            call(Net(), params)
    assert len(record) == 1
    with jaxmp.autocast(**region):
        pass  # nothing was called
    with pytest.raises(ZeroDivisionError), jaxmp.autocast(**region):
        call(Net(), params)
        raise ZeroDivisionError  # the error is what counts


def test_fp8_regions_warn_of_whole_models_only():
    class Model(nn.Module):
        def setup(self):
            self.encoder, self.head = nn.Dense(SIDE), nn.Dense(SIDE)

        def __call__(self, x):
            return self.head(self.encoder(x))

        def encode(self, x):
            return self.encoder(x)

    recipe, params = jaxmp.fp8.CurrentScaling(), jax.eval_shape(Model().init, jax.random.key(0), X)
    with jaxmp.fp8.autocast(recipe, filter=("encoder", "head")):
        jax.eval_shape(lambda params: Model().apply(params, X, method="encode"), params)
    with pytest.warns(UserWarning, match=r"filter=\): the pattern 'haed' fits no layer. Close to it: 'head'"):
        with jaxmp.fp8.autocast(recipe, filter=("encoder", "haed")):  # a stateless recipe needs no init in the region
            jax.eval_shape(lambda params: Model().apply(params, X), params)


def test_patterns_compare_by_their_order():
    patterns = tree_paths.Patterns("keep", {"up": 1, "head": 2}, of="leaf")
    assert patterns == tree_paths.Patterns("other", {"up": 1, "head": 2}, of="layer")
    assert hash(patterns) == hash(tree_paths.Patterns("other", {"up": 1, "head": 2}, of="layer"))
    assert patterns != tree_paths.Patterns("keep", {"head": 2, "up": 1}, of="leaf")


@flax.struct.dataclass
class ActorCritic:
    w: Any
    value: Any


def test_a_layer_named_value_is_no_box():
    """The level of a box has this name too: an `nn.Partitioned`, an `nnx.Variable`."""
    box = nn.Partitioned(jnp.ones(2), (None,))
    split = nn.Partitioned(masters_lib.Remainder16(jnp.ones(2, jnp.int16)), (None,))
    tree = {"w": box, "value": {"w": box, "value": {"w": split}}, "net": ActorCritic(1.0, ActorCritic(2.0, None))}
    assert set(tree_paths.leaves_by_path(tree)) == {"w", "value/w", "value/value/w/remainder16", "net/w", "net/value/w"}


def test_two_leaves_with_one_path_are_refused():
    with pytest.raises(ValueError, match="leaves must have different paths.*; got two at a/b"):
        tree_paths.leaves_by_path({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})
