"""Readers of fp8 scales get numbers: shapes are refused, and jax.eval_shape takes the readers."""

import jax
import jax.numpy as jnp
import pytest

import jaxmp

SCALES = {"dense": {"kernel": jnp.ones((2, 2)), "fp8_lhs_e4m3_log2_scale": jnp.float32(3.0)}}
AMAXES = {"dense": {"kernel": jnp.ones((2, 2)), "fp8_lhs_e4m3_log2_scale": jnp.zeros(3)}}


@pytest.mark.parametrize(("reader", "tree", "of"), [("get_scales", SCALES, "params"), ("get_amaxes", AMAXES, "grads")])
def test_shapes(reader, tree, of):
    read, shapes = getattr(jaxmp.fp8, reader), jax.eval_shape(lambda: tree)
    got = "a jax.ShapeDtypeStruct at dense/fp8_lhs_e4m3_log2_scale"
    rule = rf"{reader} reads numbers; got {got}. Call jax.eval_shape\(jaxmp.fp8.{reader}, {of}\)"
    with pytest.raises(TypeError, match=rule):
        read(shapes)
    found = jax.eval_shape(read, shapes)
    assert found["dense/fp8_lhs_e4m3_log2_scale"] == jax.ShapeDtypeStruct((), jnp.float32)
    assert read(tree).keys() == found.keys()
