"""The fp8 matmul of experts against float32 and NumPy, on numbers that fp8 holds exactly: all sums are exact.

Operands are small whole numbers, so products and gradients equal those of float32 to the bit.
"""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P

import jaxmp
from fp8_model import GRAD, LHS, RHS
from helpers import assert_exact
from jaxmp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, FallbackWarning, Scales, ragged_dot
from kernel_oracles import expert_by_expert
from pallas_kernels import backend as backends
from same_operations import assert_same_operations

F32, BF16 = np.float32, jnp.bfloat16
RECIPES = {
    "delayed": DelayedScaling(),
    "delayed, any scale": DelayedScaling(power_of_two=False),
    "current": CurrentScaling(),
}
CASES = [  # rows of each expert
    ("delayed", (3, 5, 12, 4)),
    ("delayed", (0, 24, 0, 0)),
    ("delayed, any scale", (7, 0, 2, 4)),  # and rows of nobody
    ("current", (7, 0, 2, 4)),
    ("current", (0, 0, 0, 0)),
]
SIZES = np.int32(CASES[2][1])
M, K, N = 24, 20, 10
needs_kernels = pytest.mark.skipif(backends.why_no_kernels() is not None, reason=str(backends.why_no_kernels()))


def whole_numbers(seed, *shape):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(F32)


@functools.cache
def compiled(recipe):
    @jax.jit
    def all_of(x, w, sizes, grad, scales):
        y, vjp = jax.vjp(lambda x, w, s: ragged_dot(x, w, sizes, recipe=recipe, scales=s), x, w, scales)
        return y, *vjp(grad.astype(y.dtype))

    return all_of


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_result_and_gradients_are_those_of_float32(name, sizes):
    recipe, sizes = RECIPES[name], np.int32(sizes)
    x, w, grad = whole_numbers(0, M, K), 4 * whole_numbers(1, 4, K, N), 2 * whole_numbers(2, M, N)  # of three amaxes
    x[sum(sizes) :] *= 1000  # rows of nobody are in no amax
    grad[sum(sizes) :] = np.nan  # nor in a gradient
    start = 0.0 if recipe is not RECIPES["delayed, any scale"] else 1.0
    scales = None if isinstance(recipe, CurrentScaling) else Scales(*np.full(3, start, F32))
    y, d_x, d_w, amaxes = compiled(recipe)(x, w, sizes, grad, scales)
    without_signs_of_zeros = jax.tree.map(lambda t: t + 0.0, ((y, d_x, d_w), expert_by_expert(x, w, grad, sizes)))
    assert_exact(*without_signs_of_zeros)
    if scales is not None:
        used = [np.max(np.abs(t[: sum(sizes)]), initial=F32(0)) for t in (x, grad)]
        assert_exact(amaxes, Scales(used[0], np.max(np.abs(w)), used[1]))


@needs_kernels
def test_the_program_for_gpus_multiplies_in_fp8_and_bfloat16_stays():
    """A kernel for each product (tests/kernels/test_kernels_grouped.py), also where the batch is split by plain jit."""
    args = jnp.ones((M, K), BF16), jnp.ones((4, K, N)), jnp.int32([6, 6, 6, 6]), jnp.ones((M, N), BF16)
    given = (*args, Scales(*np.zeros(3, F32)))
    one = Mesh(np.array(jax.devices()[:1]), "data")
    f = jax.shard_map(compiled(DelayedScaling()), mesh=one, in_specs=P(), out_specs=P(), check_vma=False)
    text = jax.jit(f).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    found = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    formats = [re.findall(r"x(f8E\dM\d\w*)>", line) for line in found]
    assert formats == [["f8E4M3FN", "f8E4M3FN"], ["f8E5M2", "f8E4M3FN"], ["f8E4M3FN", "f8E5M2"]]
    assert "ragged_dot" not in text
    written = [re.findall(r"-> \(?tensor<\S+x(\w+)>", line)[0] for line in found]
    assert written == ["bf16", "bf16", "f32"]
    y, d_x, d_w, _ = jax.eval_shape(compiled(DelayedScaling()), *given)
    assert (y.dtype, d_x.dtype, d_w.dtype) == (BF16, BF16, F32)


def test_a_gpu_without_the_kernels_is_named(monkeypatch):
    monkeypatch.setattr(backends, "oldest_gpu", lambda: 8.9)
    reason = "runs in bfloat16 instead of fp8: kernels need (compute capability >= 9.0|jax >= 0.11.2)"
    args = whole_numbers(0, M, K), whole_numbers(1, 4, K, N), np.int32([6, 0, 8, 6])
    with pytest.warns(FallbackWarning, match=reason):
        jax.eval_shape(functools.partial(ragged_dot, recipe=CurrentScaling()), *args)


def test_what_it_does_not_take():
    x, w, sizes = jnp.ones((M, K)), jnp.ones((4, K, N)), jnp.int32([6, 6, 6, 6])
    with pytest.raises(ValueError, match=r"takes DelayedScaling\(\) or CurrentScaling\(\); got BlockScaling"):
        ragged_dot(x, w, sizes, recipe=BlockScaling())
    with pytest.raises(ValueError, match="needs scales=.*got DelayedScaling and scales=None"):
        ragged_dot(x, w, sizes, recipe=DelayedScaling())
    with pytest.raises(ValueError, match=r"lhs \[m, k\].* got \(24, 20\), \(4, 20, 10\) and \(3,\)"):
        ragged_dot(x, w, sizes[:3], recipe=CurrentScaling())


# Layers


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x, sizes):
        kernel = self.param("kernel", nn.initializers.lecun_normal(batch_axis=0), (4, x.shape[-1], N))
        return jaxmp.linen.Fp8RaggedDot(DelayedScaling(amax_history_len=4))(x, kernel, sizes)


class NnxExperts(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(nnx.initializers.lecun_normal(batch_axis=0)(rngs.params(), (4, K, N)))
        self.product = jaxmp.nnx.Fp8RaggedDot(DelayedScaling(amax_history_len=4))

    def __call__(self, x, sizes):
        return self.product(x, self.kernel[...], sizes)


def test_fp8_can_be_switched_off():
    x, sizes = jnp.asarray(whole_numbers(0, M, K)), jnp.asarray(SIZES)
    params = jax.eval_shape(Experts().init, jax.random.key(0), x, sizes)["params"]
    model = NnxExperts(nnx.Rngs(0))
    assert sorted(nnx.to_pure_dict(nnx.state(model, jaxmp.nnx.Fp8Scale))["product"]["dot_general"]) == [GRAD, LHS, RHS]

    def ragged(kernel):
        return jax.lax.ragged_dot(x, kernel, sizes)

    apply = lambda params: Experts().apply({"params": params}, x, sizes)  # noqa: E731
    with jaxmp.fp8.autocast(enabled=False):
        assert_same_operations(apply, lambda params: ragged(params["kernel"]), params)
        assert_same_operations(lambda: model(x, sizes), lambda: ragged(model.kernel[...]))
    assert "float8" in str(jax.make_jaxpr(lambda: model(x, sizes))())
