"""auto_fp16 and force_fp32, as in mmcv."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
from helpers import assert_exact, assert_within_ulps

rng = np.random.default_rng(0)
W, X = jnp.asarray(rng.normal(size=(8, 8)), jnp.float32), jnp.asarray(rng.normal(size=(2, 8)), jnp.float32)


def names(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.dtype.name, tree)


def test_casts_the_named_arguments_and_runs_autocast() -> None:
    @jaxmp.auto_fp16(apply_to=("x", "y"))
    def fn(x: jax.Array, w: jax.Array, y: Any = W) -> Any:
        return x, w, y, x @ w, jnp.exp(x)

    assert names(fn(X, W)) == ("float16", "float32", "float32", "float16", "float32")  # a default is not cast
    assert names(fn(X, w=W, y={"a": X, "n": jnp.arange(2)}))[2] == {"a": "float16", "n": "int32"}
    wide = jnp.ones((2, 2), jnp.bfloat16)
    assert names(fn(wide, wide))[0] == "bfloat16"  # only float32 is cast
    assert names(jax.jit(fn)(X, W)) == names(fn(X, W))


def test_casts_all_arguments_without_names_and_what_comes_out() -> None:
    assert names(jaxmp.auto_fp16()(lambda x, w: (x, w))(X, W)) == ("float16", "float16")
    assert names(jaxmp.auto_fp16(dtype=jnp.bfloat16)(lambda x, w: x @ w)(X, W)) == "bfloat16"
    out = jaxmp.auto_fp16(out_fp32=True)(lambda x, w: (x @ w, x > 0))(X, W)
    assert names(out) == ("float32", "bool")
    assert_within_ulps(out[0].astype(jnp.float16), X.astype(jnp.float16) @ W.astype(jnp.float16), 2)
    assert_exact(out[0], out[0].astype(jnp.float16).astype(jnp.float32))


def test_force_fp32_inside_of_auto_fp16() -> None:
    @jaxmp.force_fp32(apply_to=("scores",), out_fp16=True)
    def loss(scores: jax.Array, other: jax.Array) -> Any:
        return scores @ W, other

    @jaxmp.auto_fp16()
    def model(x: jax.Array) -> Any:
        scores = x @ W
        return scores, *loss(scores, x.astype(jnp.bfloat16))

    assert names(model(X)) == ("float16", "float16", "bfloat16")
    exact = ((X.astype(jnp.float16) @ W.astype(jnp.float16)).astype(jnp.float32) @ W).astype(jnp.float16)
    assert_within_ulps(model(X)[1], exact, 4)


class Detector(nn.Module):
    fp16_enabled: bool = True

    @jaxmp.auto_fp16(apply_to=("image",), out_fp32=True)
    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        scores = nn.Dense(4)(image)
        self.sow("intermediates", "scores", scores)
        return self.normalize(scores)

    @jaxmp.force_fp32(apply_to=("scores",))
    def normalize(self, scores: jax.Array) -> jax.Array:
        return scores / jnp.sum(scores @ scores.T)


@pytest.mark.parametrize("enabled", [True, False])
def test_linen_methods_and_the_switch(enabled: bool) -> None:
    params = jax.jit(Detector().init)(jax.random.key(0), X)
    assert set(jax.tree.leaves(names(params["params"]))) == {"float32"}
    apply = functools.partial(Detector(fp16_enabled=enabled).apply, mutable=["intermediates"])
    out, state = jax.eval_shape(apply, {"params": params["params"]}, X)
    assert out.dtype == jnp.float32
    text = str(jax.make_jaxpr(lambda p: Detector(fp16_enabled=enabled).apply({"params": p}, X))(params["params"]))
    assert ("f16[2,4] = dot_general" in text) == enabled
    assert "f32[2,2] = dot_general" in text  # normalize's
    assert names(state["intermediates"]["scores"]) == (("float16" if enabled else "float32"),)


def test_nnx_methods() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.dense, self.fp16_enabled = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), True

        @jaxmp.auto_fp16()
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dense(x)

    net = Net()
    assert net(X).dtype == jnp.float16 and net.dense.kernel[...].dtype == jnp.float32
    net.fp16_enabled = False
    assert net(X).dtype == jnp.float32


def test_bad_names() -> None:
    with pytest.raises(ValueError, match=r"auto_fp16: apply_to must name arguments of .*, \['x'\]; got \['img'\]"):
        jaxmp.auto_fp16(apply_to=("img",))(lambda x: x)
    with pytest.raises(
        ValueError, match=r"force_fp32: apply_to takes several names; got the string 'x'. Write \('x',\)"
    ):
        jaxmp.force_fp32(apply_to="x")(lambda x: x)
    with pytest.raises(ValueError, match="must be float16, bfloat16"):
        jaxmp.auto_fp16(dtype=jnp.int8)
