"""A policy in force: `autocast(policy)` as region and transform, `value_and_grad(policy=)`, and how they nest."""

import contextlib
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxmp
from helpers import assert_within_ulps
from matmul_dtypes import matmuls
from policy_steps import filled
from regimes import mesh_of

X, Y = np.random.default_rng(0).normal(size=(2, 16, 16)).astype(np.float32)


class Net(nn.Module):
    """Three Dense layers, the middle one of which runs in fp8 where fp8 is on."""

    dtypes: tuple = (None, None, None)

    @nn.compact
    def __call__(self, x):
        for dtype in self.dtypes:
            x = nn.relu(nn.Dense(16, dtype=dtype)(x))
        return x


def loss_fn(params, x, y):
    return jnp.mean((Net().apply({"params": params}, x) - y) ** 2)


@functools.cache
def params_of(policy: str) -> Any:
    return filled(jaxmp.autocast(Net().init, policy), jax.random.key(0), X)["params"]


@functools.cache
def made(policy: str) -> tuple[Any, Any]:
    """(16-bit params, state of the optimizer)."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
    return jaxmp.get_policy(policy).cast_to_param(params_of(policy)), tx.init(params_of(policy))


def gradient(policy: str, loss: Any = loss_fn, **options: Any) -> Any:
    """`value_and_grad` with a policy, as a function of a batch."""
    params, opt_state = made(policy)
    return lambda x, y: jaxmp.value_and_grad(loss, policy=policy, **options)(params, x, y, opt_state=opt_state)


EXPECTED = {
    "fp16": {"float16": 8},
    "bf16": {"bfloat16": 8},
    "16-mixed": {"float16": 8},
    "fp8": {"bfloat16": 5, "float8_e4m3fn": 1, "float8_e4m3fnxfloat8_e5m2": 2},
    "fp32": {"float32": 8},
}


# value_and_grad


@pytest.mark.parametrize("policy", EXPECTED)
def test_a_loss_runs_in_the_precision_of_its_policy(policy):
    assert matmuls(gradient(policy), X, Y) == EXPECTED[policy]


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["fp16", "fp8"])
def test_it_does_so_in_every_regime(policy):
    run = gradient(policy)

    def local(x, y):
        return jax.lax.pmean(run(x, y), "data")

    def with_aux(params, x, y):
        return loss_fn(params, x, y), x

    fold = X.reshape(2, 8, 16), Y.reshape(2, 8, 16)
    batch = (np.concatenate([X, X]), np.concatenate([Y, Y]))
    spread = functools.partial(jax.shard_map, local, mesh=mesh_of(devices=2), in_specs=P("data"), out_specs=P())
    regimes = {
        "microbatches": (gradient(policy, accumulate=2, accumulate_argnums=(1, 2)), batch),
        "remat": (gradient(policy, jax.checkpoint(loss_fn)), (X, Y)),
        "jitted loss": (gradient(policy, jax.jit(loss_fn)), (X, Y)),
        "aux": (gradient(policy, with_aux, has_aux=True), (X, Y)),
        "scan": (lambda x, y: jax.lax.map(lambda b: run(*b)[0], (x[None], y[None])), (X, Y)),
        "shard_map": (spread(), batch),
        "vmap": (jax.vmap(run), fold),
        "unchecked": (spread(check_vma=False), batch),
    }
    for name, (fn, args) in regimes.items():
        assert matmuls(fn, *args).keys() == EXPECTED[policy].keys(), name


def test_a_filter_that_a_loop_writes_again_traces_nothing_again():
    traces, params = [], params_of("fp8")

    @jax.jit
    def run(x):
        traces.append(1)
        return Net().apply({"params": params}, x)

    for _ in range(3):
        with jaxmp.autocast("fp8", filter=lambda path, _: path == "Dense_1"):
            jax.eval_shape(run, X)
    assert len(traces) == 1


@pytest.mark.parametrize("policy", ["fp16", "fp32"])
def test_it_traces_the_loss_once(policy):
    traces = []

    def counted(params, x, y):
        traces.append(1)
        return loss_fn(params, x, y)

    jax.make_jaxpr(gradient(policy, counted))(X, Y)
    assert len(traces) == 1


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("policy", "name"), [("fp32", "HIGHEST"), ("tf32", "HIGH")])
def test_the_precision_of_float32_matmuls(policy, name):
    assert str(jax.make_jaxpr(gradient(policy))(X, Y)).count(f"precision=(Precision.{name},") == 8
    assert "Precision" not in str(jax.make_jaxpr(lambda x, y: x @ y)(X, Y))


# Regions inside and around the loss


def test_a_region_inside_the_loss_is_the_innermost():
    def half_off(params, x, y):
        with jaxmp.autocast(enabled=False):
            x = x @ x
        return loss_fn(params, x, y)

    assert matmuls(gradient("bf16", half_off), X, Y) == {"float32": 1, "bfloat16": 8}


PRECISE = {"Dense_2": jnp.float32}
AROUND = {  # a region -> the matmuls of value_and_grad with policy="fp16", and of one that reads it from the state
    "another dtype": (lambda: jaxmp.autocast(jnp.bfloat16), {"float16": 8}, {"bfloat16": 8}),
    "off": (lambda: jaxmp.autocast(enabled=False), {"float16": 8}, {"float32": 8}),
    "the same, more precise": (lambda: jaxmp.autocast("fp16", modules=PRECISE), *2 * [{"float16": 5, "float32": 3}]),
    "another, more precise": (
        lambda: jaxmp.autocast("bf16", modules=PRECISE),
        {"float16": 8},
        {"bfloat16": 5, "float32": 3},
    ),
}


@pytest.mark.parametrize("region", AROUND)
def test_a_region_around_the_loss(region):
    """An argument is nearer than a region around it, unless this says more. A TrainState's policy is a default."""
    around, explicit, carried = AROUND[region]
    params, opt_state = made("fp16")
    tx = optax.GradientTransformation(lambda params: opt_state, lambda *args: args)
    state = jaxmp.linen.TrainState(
        step=0, apply_fn=None, params=params, tx=tx, opt_state=opt_state, policy=jaxmp.get_policy("fp16")
    )

    def by_state(x, y):
        return jaxmp.value_and_grad(loss_fn)(state.params, x, y, opt_state=state.opt_state)

    with around():
        assert matmuls(gradient("fp16"), X, Y) == explicit
        assert matmuls(by_state, X, Y) == carried


def test_fp8_around_the_loss_keeps_its_recipe_and_filter():
    region = functools.partial(jaxmp.fp8.autocast, jaxmp.fp8.DelayedScaling(fp8_format="E4M3"), filter=("Dense_0",))
    with region():
        params = filled(Net().init, jax.random.key(0), X)["params"]
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp8").init(params_of("fp8"))

    def run(x, y):
        with region():
            return jaxmp.value_and_grad(loss_fn, policy="fp8")(params, x, y, opt_state=opt_state)

    assert matmuls(run, X, Y) == {"float8_e4m3fn": 3, "bfloat16": 6}


# A dtype of their own


def test_linen_modules_keep_a_16_bit_dtype_of_their_own():
    net = Net((None, jnp.bfloat16, None))

    def loss(params, x, y):
        return jnp.mean((net.apply({"params": params}, x) - y) ** 2)

    assert matmuls(gradient("fp16", loss), X, Y) == {"float16": 5, "bfloat16": 3}
    named = jaxmp.autocast(loss, "fp16", modules={"Dense_1": jnp.float16})  # but a name is nearer
    assert matmuls(jax.grad(named), params_of("fp16"), X, Y) == {"float16": 8}


def test_nnx_modules_keep_a_16_bit_dtype_of_their_own():
    layers = [nnx.Linear(16, 16, dtype=dtype, rngs=nnx.Rngs(0)) for dtype in (None, jnp.float16, jnp.bfloat16)]
    model = nnx.Sequential(nnx.Embed(8, 16, rngs=nnx.Rngs(1)), *layers)
    call = jaxmp.autocast(lambda model, x: model(x), jnp.float16)
    graphdef, state = nnx.split(model)
    run = lambda state, x: call(nnx.merge(graphdef, state), x)  # noqa: E731
    assert matmuls(run, state, np.zeros(16, np.int32)) == {"float16": 2, "bfloat16": 1}


def test_a_child_follows_the_dtype_of_its_parent_unless_it_has_its_own():
    class Parent(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x):
            return nn.Dense(16, dtype=jnp.float16)(nn.Dense(16)(x))

    params = filled(Parent().init, jax.random.key(0), X)
    run = jaxmp.autocast(Parent(jnp.bfloat16).apply, jnp.float16)
    assert matmuls(run, params, X) == {"float16": 1, "bfloat16": 1}


# autocast of a policy


def test_a_policy_in_place_of_a_dtype():
    for policy in ("bf16", "bf16-mixed", jaxmp.get_policy("bf16"), jmp.get_policy("p=f32,c=bf16,o=f32")):
        for how in (
            jaxmp.autocast(policy),
            jaxmp.autocast(dtype=policy),
            functools.partial(jaxmp.autocast, dtype=policy),
        ):
            assert matmuls(how(jnp.matmul), X, Y) == {"bfloat16": 1}
    for policy in ("fp32", "tf32", "float32"):
        assert matmuls(jaxmp.autocast(jnp.matmul, policy), X, Y) == {"float32": 1}
    in_fp16 = jaxmp.autocast(jnp.matmul, "fp16", output_dtype=jnp.float32)
    assert jax.eval_shape(in_fp16, X, Y).dtype == jnp.float32


def test_a_region_of_fp8_serves_for_init_and_for_evaluation():
    params = params_of("fp8")
    assert [name for name, layer in params.items() if "Fp8DotGeneral_0" in layer] == ["Dense_1"]
    with jaxmp.autocast("fp8"):
        assert jax.eval_shape(Net().init, jax.random.key(0), X)["params"] == jax.eval_shape(lambda: params)
    apply = jax.jit(Net().apply)
    expected = {"bfloat16": 2, "float8_e4m3fn": 1}
    with jaxmp.autocast("bf16"):  # the jitted function is traced anew in each region
        assert matmuls(apply, {"params": params}, X) == {"bfloat16": 3}
    with jaxmp.autocast("fp8"):
        assert matmuls(apply, {"params": params}, X) == expected
        with jaxmp.autocast("fp8", enabled=False):
            assert matmuls(apply, {"params": params}, X) == {"float32": 3}
    assert matmuls(jaxmp.autocast(Net().apply, "fp8"), {"params": params}, X) == expected

    @jaxmp.autocast("fp8")
    def decorated(params, x):
        return Net().apply({"params": params}, x)

    assert matmuls(decorated, params, X) == expected


def test_a_layer_in_fp8_returns_16_bits():
    with jaxmp.fp8.autocast(filter=lambda path, layer: True):
        params = jax.eval_shape(Net().init, jax.random.key(0), X)
        for apply in (Net().apply, lambda params, x: Net().apply(params, x, method=lambda net, x: net(x))):
            assert jax.eval_shape(jaxmp.autocast(apply, jnp.bfloat16), params, X).dtype == jnp.bfloat16
    model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.Einsum("ij,jk->ik", (16, 16), rngs=nnx.Rngs(1)))
    jaxmp.nnx.to_fp8(model, filter=lambda path, layer: True)
    call, (graphdef, state) = jaxmp.autocast(lambda model, x: model(x), jnp.bfloat16), nnx.split(model)
    assert jax.eval_shape(lambda x: call(nnx.merge(graphdef, state), x), X).dtype == jnp.bfloat16


def test_a_region_leaves_the_params_that_init_makes_as_they_are():
    init = nn.Dense(16, kernel_init=nn.initializers.orthogonal()).init
    plain = jax.jit(init)(jax.random.key(0), X)
    in_a_region = lambda *args: jaxmp.autocast("fp16")(init)(*args)  # noqa: E731
    for other in (in_a_region, jaxmp.autocast(init, "fp16")):
        assert_within_ulps(jax.jit(other)(jax.random.key(0), X), plain, 4)


@pytest.mark.parametrize("region", [True, False], ids=["region", "transform"])
def test_the_precision_of_a_region_ends_with_it(region):
    with jaxmp.autocast("fp32") if region else contextlib.nullcontext():
        inside = str(jax.make_jaxpr(jnp.matmul if region else jaxmp.autocast(jnp.matmul, "fp32"))(X, Y))
    assert "HIGHEST" in inside
    assert "HIGHEST" not in str(jax.make_jaxpr(jnp.matmul)(X, Y))


ERRORS = {
    "device_type": (lambda: jaxmp.autocast(device_type="cuda"), TypeError, "unexpected keyword argument 'device_type'"),
    "misspelt": (lambda: jaxmp.autocast(dtpye=jnp.float16), TypeError, "unexpected keyword argument 'dtpye'"),
    "refused name": (lambda: jaxmp.autocast("16-true"), ValueError, "'16-true' means .*'fp16'"),
    "fp8 format": (lambda: jaxmp.autocast("e4m3"), ValueError, "For fp8 use jaxmp.fp8.autocast"),
    "lists": (lambda: jaxmp.autocast("fp16", allow=("expp",)), ValueError, "allow must hold names .*got 'expp'"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, kind, message = ERRORS[case]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.thorough(0)
def test_amaxes_of_layers_without_a_dtype_are_those_of_layers_with_one():
    """In every regime: a layer in fp8 runs as it was written, and its scales report what they see."""
    params, opt_state = made("fp8")

    def by_hand(params, x, y):
        return jnp.mean((Net((jnp.bfloat16,) * 3).apply({"params": params}, x).astype(jnp.float32) - y) ** 2)

    def scale_gradients(policy, loss, k, x, y):
        with contextlib.nullcontext() if policy else jaxmp.fp8.autocast():
            grad_fn = jaxmp.value_and_grad(loss, policy=policy, accumulate=k, accumulate_argnums=(1, 2))
            grads = grad_fn(params, x, y, opt_state=opt_state)[1]
        return jaxmp.fp8.get_amaxes(grads["Dense_1"]["Fp8DotGeneral_0"])

    @jax.jit
    def all_of_them(x, y):
        expected = {k: scale_gradients(None, by_hand, k, x, y) for k in (1, 2)}
        losses = [(loss_fn, 1), (jax.jit(loss_fn), 1), (jax.checkpoint(loss_fn), 1), (loss_fn, 2)]
        return [(scale_gradients("fp8", loss, k, x, y), expected[k]) for loss, k in losses]

    for amaxes, expected in all_of_them(np.concatenate([X, 2 * X]), np.concatenate([Y, Y])):
        assert all(float(amax) > 0 for amax in jax.tree.leaves(expected))
        np.testing.assert_allclose(*map(jax.tree.leaves, (amaxes, expected)), rtol=1e-2)


def test_a_layer_that_cannot_run_in_fp8_says_in_which_dtype_it_runs():
    """autocast traces in float32 and casts afterwards: the layer runs in bfloat16."""

    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.DenseGeneral(1, axis=(), name="gains")(nn.Dense(16)(x))[..., 0]
            return nn.Dense(16)(nn.Dense(16)(x))

    model = Scaled()
    params = filled(jaxmp.autocast(model.init, "fp8"), jax.random.key(0), X)["params"]

    def loss_fn(params):
        return jnp.mean(model.apply({"params": params}, X))

    grad = jaxmp.value_and_grad(loss_fn, policy="fp8")
    opt_state = jaxmp.unscale_and_skip(optax.identity()).init(())
    with pytest.warns(jaxmp.fp8.FallbackWarning, match=r"\(layer gains\) runs in bfloat16 instead of fp8") as caught:
        jax.eval_shape(lambda params: grad(params, opt_state=opt_state), params)
    assert not any("float32" in str(warning.message) for warning in caught)
