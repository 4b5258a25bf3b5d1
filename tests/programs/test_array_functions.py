"""What counts as a module, and what jaxmp does with one among the arguments: the same everywhere."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_exact
from jaxmp._src.programs import array_functions

X = jnp.ones((2, 2))


class Total(nnx.Pytree):
    """An object of a user that is no nnx.Module, but holds variables as one does."""

    def __init__(self):
        self.total = nnx.Variable(jnp.zeros(()))


class Hidden(nnx.Pytree, pytree=False):
    """The same, and no tree to jax."""

    def __init__(self):
        self.total = nnx.Variable(jnp.zeros(()))


class Layer(nnx.Module):
    def __init__(self):
        self.total = nnx.Variable(jnp.zeros(()))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TreeModule:
    """A module as equinox has them: a tree of its arrays."""

    total: jax.Array

    def __call__(self, x):
        return x @ x + self.total


def add_one(x):
    x.total[...] += 1


def make_optimizer():
    return nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)


# How it is made, how it is changed in place, and the leaf that shows it.
MODULES = {
    "Module": (Layer, add_one, lambda x: x.total[...]),
    "Pytree": (Total, add_one, lambda x: x.total[...]),
    "pytree=False": (Hidden, add_one, lambda x: x.total[...]),
    "Rngs": (lambda: nnx.Rngs(0), lambda x: x(), lambda x: x.default.count[...]),
    "Optimizer": (make_optimizer, lambda x: x.step.set_value(x.step[...] + 1), lambda x: x.step[...]),
}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("name", MODULES)
def test_nnx_objects_with_variables_are_modules(name):
    """A function that changes one in place changes it; taken apart, it comes back as a copy."""
    make, change, count = MODULES[name]
    obj, expected = make(), make()
    assert array_functions.is_module(obj)
    leaves = array_functions.leaves_of({"m": obj, "x": 3})
    assert leaves.paths[0] == "x" and all(path.startswith("m/") for path in leaves.paths[1:])
    copy = leaves.rebuild(leaves.values)["m"]
    change(copy)
    assert count(copy) != count(obj)
    assert jaxmp.monitor.first_bad_op(lambda obj: change(obj), make()) is None

    def fn(x, obj):
        change(obj)
        return x @ x

    change(expected)
    for transform in (jaxmp.autocast, jaxmp.no_autocast, jaxmp.auto_fp16(), jaxmp.force_fp32()):
        obj = make()
        transform(fn)(X, obj)
        assert_exact(count(obj), count(expected))


def test_a_variable_is_a_box_that_autocast_updates():
    wide = jnp.ones((8, 8))
    variable = nnx.Param(wide)
    assert not array_functions.is_module(variable)
    assert array_functions.leaves_of({"p": variable}).paths == ["p"]

    def fn(p):
        p[...] = p[...] + 1
        return p[...] @ wide

    assert jaxmp.autocast(fn)(variable).dtype == jnp.float16
    assert_exact(variable[...], wide + 1)


def test_linen_modules_are_leaves_and_trees_are_trees():
    dense, tree = nn.Dense(2), TreeModule(jnp.ones(()))
    assert not array_functions.is_module(dense) and not array_functions.is_module(tree)
    assert array_functions.leaves_of([dense, tree]).values == [dense, tree.total]
    x = jnp.ones((8, 8))
    params = jax.jit(dense.init)(jax.random.key(0), x)
    for fn in (
        lambda: jaxmp.autocast(lambda m, p: m.apply(p, x))(dense, params),
        lambda: jaxmp.autocast(dense.bind(params))(x),
        lambda: jaxmp.autocast(tree)(x),
        lambda: jaxmp.autocast(lambda m: m(x))(tree),
    ):
        assert jax.eval_shape(fn).dtype == jnp.float16
