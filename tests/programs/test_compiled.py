"""Programs of functions that are made anew at each call: compiled once, and never with values of an earlier call."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import assert_same_program, compilations
from jaxmp._src.programs import compiled
from pallas_kernels.by_platform import by_platform

X = np.arange(4, dtype=np.float32)


def of_closure(a):
    return lambda x: jnp.sin(x) * a


def of_number(a):
    return lambda x: jnp.where(x > 1, x * a, x)


def of_jitted(a):
    return jax.jit(lambda x: x * a)


def of_scan(a):
    return lambda x: jax.lax.scan(lambda c, row: (c * a + row, None), jnp.float32(0), x)[0]


def of_rule(a):
    @jax.custom_vjp
    def run(x):
        return x * a

    run.defvjp(lambda x: (x * a, None), lambda _, g: (g * a,))
    return run


def of_remat(a):
    policy = jax.checkpoint_policies.save_only_these_names("here")
    return jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x) * a, policy=policy)(x)))


def of_platform(a):
    return lambda x: by_platform(lambda x: x * a, x, cpu=lambda f, x: f(x) + 1, default=lambda f, x: f(x) + 2)


class Module(nnx.Module):
    def __init__(self, a):
        self.a = nnx.Param(jnp.asarray(a))

    def __call__(self, x):
        return jnp.cos(x * self.a[...])


ARRAYS = [of_closure, of_scan, of_rule, of_remat, of_platform, Module]


@pytest.mark.parametrize("make", ARRAYS)
def test_equal_programs_compile_once_and_read_their_own_closures(make):
    closed_over = [jnp.full((), a, jnp.float32) for a in (2, 3)]
    expected = [jax.jit(make(a))(X) for a in closed_over]
    outs = [compiled.once(make(closed_over[0]))(X)]
    with compilations() as compiles:
        outs.append(compiled.once(make(closed_over[1]))(X))
    assert not compiles
    np.testing.assert_array_equal(outs, expected)


@pytest.mark.parametrize("make", [of_number, of_jitted, of_scan])
def test_other_numbers_are_another_program(make):
    for a in (2.0, -0.0, 0.0):
        assert_same_program(compiled.once(make(a))(X), jax.jit(make(a))(X))


def test_a_jitted_function_with_an_array_reads_its_own():
    for a in (2.0, 3.0):
        for shape in ((), (1000,)):
            closed_over = jnp.full(shape, a)
            np.testing.assert_array_equal(compiled.once(of_jitted(closed_over))(jnp.ones(shape)), closed_over)


def test_a_module_that_changes_is_read_anew():
    module = Module(1.0)
    run = compiled.once(module.__call__)
    run(X)
    module.a[...] = jnp.float32(2)
    with compilations() as compiles:
        np.testing.assert_array_equal(run(X), jax.jit(module.__call__)(X))
    assert len(compiles) <= 1  # of the call to compare with


def test_a_callback_is_its_own():
    seen = []

    def run(name):
        def tell(x):
            seen.append(name)
            return x

        def function(x):
            jax.debug.callback(lambda _: seen.append(name), x)
            return jax.pure_callback(tell, jax.ShapeDtypeStruct((4,), np.float32), x)

        return function

    for name in ("first", "second"):
        jax.block_until_ready(compiled.once(run(name))(X))
        jax.effects_barrier()
    assert set(seen[:2]) == {"first"} and set(seen[2:]) == {"second"}


@pytest.mark.thorough(3)
@pytest.mark.parametrize("make", [make for make in ARRAYS if make is not of_remat])
def test_closures_and_their_arrays_are_not_kept(make):
    a = jnp.full((), 3.5)
    fn, there = make(a), weakref.ref(a)
    jax.block_until_ready(compiled.once(fn)(X))
    del a, fn
    gc.collect()
    assert there() is None


def test_derivatives_and_vmap_go_through_by_the_rules():
    @jax.custom_vjp
    def doubled(x):
        return x

    doubled.defvjp(lambda x: (x, None), lambda _, g: (g * 2,))
    assert float(jax.grad(compiled.once(doubled))(1.0)) == 2
    assert float(jax.grad(lambda y: compiled.once(lambda x: doubled(y) * x)(1.0))(1.0)) == 2
    np.testing.assert_array_equal(jax.vmap(compiled.once(lambda x: x + 1))(X), X + 1)
    np.testing.assert_array_equal(jax.jit(compiled.once(lambda x: x + 1))(X), X + 1)


def test_structures_numbers_and_keys():
    def run(tree, number, key):
        assert isinstance(number, jax.core.Tracer)
        return {"out": [tree["a"] * number, jax.random.split(key)], "none": None}

    out = compiled.once(run)({"a": jnp.ones(2, jnp.bfloat16)}, 2.5, jax.random.key(0))
    assert out["none"] is None and out["out"][0].dtype == jnp.bfloat16
    assert jnp.issubdtype(out["out"][1].dtype, jax.dtypes.prng_key)
    args = {"a": jnp.ones(2, jnp.bfloat16)}, 3.5, jax.random.key(1)
    with compilations() as compiles:
        compiled.once(run)(*args)
    assert not compiles
