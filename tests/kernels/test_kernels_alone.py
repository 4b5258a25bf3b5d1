"""Kernels over trees take whole arrays: XLA runs where devices share them under plain jit, the kernel in shard_map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
import pallas_kernels
from helpers import assert_close
from pallas_kernels import backend as backends
from platforms import text_for

WITHOUT_KERNELS = backends.why_no_kernels()
kernels_only = pytest.mark.skipif(WITHOUT_KERNELS is not None, reason=str(WITHOUT_KERNELS))


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def job(policy, params32, init=lambda tx, params: tx.init(params)):
    """(a step of a fused optimizer, its state, params of 16 bits)."""
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3, max_norm=1.0), policy)
    params = jaxmp.get_policy(policy).cast_to_param(params32)
    return functools.partial(jaxmp.apply_gradients, tx), init(tx, params32), params


@kernels_only
@pytest.mark.parametrize("how", ["one device", "Auto", "Explicit", "in_shardings", "shard_map"])
def test_what_is_lowered_for_a_gpu(how):
    """The number of devices is known when the program is lowered, also where the traced types say nothing of it."""
    update, opt_state, params = job("fp16", {"w": np.ones((8, 256), np.float32)})
    args, options = (params, opt_state, params), {}
    if how in ("Auto", "Explicit"):
        args = jax.device_put(args, NamedSharding(mesh_of(AxisType[how]), P()))
    elif how == "in_shardings":
        options = {"in_shardings": NamedSharding(mesh_of(), P())}
    elif how == "shard_map":
        update = jax.shard_map(update, mesh=mesh_of(), in_specs=P(), out_specs=P())
    text = text_for(update, *args, **options)
    assert ("mosaic_gpu" in text) == (how in ("one device", "shard_map")) and "CustomSPMDPartitioning" not in text


@kernels_only
@pytest.mark.parametrize("name", ["cast_tree", "unscale_and_check", "gradient_norm"])
def test_a_named_backend_that_cannot_run_on_several_devices_says_so(name, monkeypatch):
    f = getattr(pallas_kernels, name)
    monkeypatch.setattr(backends, "why_no_kernels", lambda **_: None)
    x = jnp.ones((8, 256), jnp.float16)
    scalar = jnp.bfloat16 if name == "cast_tree" else jnp.float32(1)
    run = lambda x: f({"w": x}, scalar, backend="mosaic")  # noqa: E731
    assert "mosaic_gpu" in text_for(run, x)
    for given, g in ((jax.device_put(x, NamedSharding(mesh_of(), P("data"))), run), (x[None], jax.vmap(run))):
        with pytest.raises(ValueError, match='"mosaic" cannot run here: devices share the arrays, or jax.vmap'):
            text_for(g, given)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("check_vma", [True, False])
def test_under_vmap_inside_shard_map_the_reference_serves(check_vma):
    params32 = {"w": np.ones((2, 8, 4), np.float32), "b": np.ones((2, 4), np.float32)}  # two models
    update, opt_state, params = job("bf16", params32, lambda tx, params: jax.vmap(tx.init)(params))
    grads = {"w": params["w"].at[1, 0, 0].set(jnp.nan), "b": params["b"]}  # the second one overflows
    update = jax.vmap(update)
    spread = jax.shard_map(update, mesh=mesh_of(), in_specs=P(), out_specs=P(), check_vma=check_vma)
    got = jax.jit(spread)(grads, opt_state, params)
    assert_close(got, jax.jit(update)(grads, opt_state, params), rtol=1e-6)
    assert jaxmp.get_metrics(got[1])["skipped"].tolist() == [False, True]
