"""What a `with jaxmp.autocast(...)` reaches in each framework, and the warning of a region that reached nothing."""

import contextlib
import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp._src.base import ambient
from matmul_dtypes import matmuls
from same_operations import assert_same_operations

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
NOTHING = "in which none ran. Write jaxmp.autocast"


@contextlib.contextmanager
def fresh_process():
    """As if no region had reached anything; warnings are errors."""
    with ambient.having(autocast_reached=set()), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def in_region(fn, dtype=jnp.bfloat16):
    def run(*args):
        with jaxmp.autocast(dtype):
            return fn(*args)

    return run


def test_haiku_modules_run_by_the_region():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 3])(hk.LayerNorm(-1, True, True)(x))))
    params = jax.eval_shape(in_region(model.init), jax.random.key(0), X)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}
    assert_same_operations(in_region(model.apply), jaxmp.autocast(model.apply, jnp.bfloat16), params, X)
    gradient = jax.grad(lambda params: jnp.mean(in_region(model.apply)(params, X).astype(jnp.float32) ** 2))
    assert set(matmuls(gradient, params)) == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(jax.eval_shape(gradient, params))} == {"float32"}
    nested = jaxmp.autocast(in_region(model.apply, jnp.float16), jnp.bfloat16)
    assert set(matmuls(nested, params, X)) == {"float16"}
    assert set(matmuls(in_region(in_region(model.apply, jnp.float32)), params, X)) == {"float32"}


def test_a_region_that_reaches_nothing_says_so():
    linear, mlp, w = nnx.Linear(8, 3, rngs=nnx.Rngs(0)), eqx.nn.MLP(8, 3, 8, 1, key=jax.random.key(0)), jnp.ones((8, 3))
    idle = {
        "nnx": in_region(lambda: linear(X)),
        "equinox": in_region(lambda: jax.vmap(mlp)(X)),
        "plain": in_region(lambda: X @ w),
        "plain, of a policy": in_region(lambda: X @ w, "16-mixed"),
        "nothing": in_region(lambda: None),
    }
    for name, fn in idle.items():
        with fresh_process(), pytest.warns(UserWarning, match=NOTHING) as caught:
            fn()
        assert [w.filename for w in caught] == [__file__], name
    with fresh_process(), pytest.warns(UserWarning, match=r"jaxmp.autocast\(model, jnp.bfloat16\)"):
        in_region(lambda: linear(X))()
    with fresh_process(), pytest.warns(UserWarning, match=NOTHING) as caught:
        in_region(in_region(lambda: linear(X)), jnp.float16)()
    assert len(caught) == 1 and "float16" in str(caught[0].message)
    with fresh_process():  # what the message proposes
        assert matmuls(jaxmp.autocast(linear, jnp.bfloat16), X) == {"bfloat16": 1}


@pytest.mark.thorough(0)
def test_silence_of_regions_that_reach_something():
    model = nn.Dense(3)
    params = jax.jit(model.init)(jax.random.key(0), X)
    linear = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "bf16-mixed").init(params)
    apply = jax.jit(model.apply)
    grad = jax.jit(jaxmp.value_and_grad(lambda p, x: jnp.mean(model.apply(p, x) ** 2)))
    own = jaxmp.autocast(dtype=jnp.bfloat16)(lambda x: x @ jnp.ones((8, 3)))
    reaching = {
        "linen": lambda: model.apply(params, X),
        "init": lambda: jax.eval_shape(model.init, jax.random.key(0), X),
        "jitted": lambda: apply(params, X),
        "value_and_grad": lambda: grad(params, X, opt_state=opt_state),
        "function": lambda: jaxmp.autocast(linear, jnp.bfloat16)(X),
        "decorated": lambda: own(X),
        "inner region": lambda: in_region(lambda: model.apply(params, X), jnp.float16)(),
    }
    for fn in reaching.values():
        with fresh_process():
            in_region(fn)()
            in_region(fn)()  # jit has its program
    with fresh_process():
        for off in (jnp.float32, "fp32", "tf32"):
            in_region(lambda: linear(X), off)()
        in_region(lambda: jaxmp.autocast(lambda x: in_region(linear)(x), jnp.float16)(X))()
        with jaxmp.autocast(enabled=False):
            linear(X)
            in_region(linear)(X)
        with pytest.raises(ZeroDivisionError):
            in_region(lambda: 1 / 0)()


def test_the_region_of_a_step_does_not_hide_an_idle_one():
    """Training casts by its policy; evaluation of an nnx module in a region does not."""
    model = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), "bf16"), wrt=nnx.Param, policy="bf16")
    with fresh_process():
        jaxmp.nnx.value_and_grad(lambda m: jnp.mean(m(X).astype(jnp.float32) ** 2))(model, opt_state=optimizer)
        with pytest.warns(UserWarning, match=NOTHING):
            in_region(lambda: model(X), "bf16")()
