"""A job that was padded for one number of devices goes on with another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxmp
from helpers import assert_bitwise
from jaxmp import checkpoint, fsdp

pytestmark = pytest.mark.xdist_group("checkpoint")

RNG = np.random.default_rng(0)
PARAMS = {
    "embed": jnp.asarray(RNG.normal(size=(51, 6)), jnp.float32),
    "dense": {"kernel": jnp.asarray(RNG.normal(size=(6, 13)), jnp.float32), "bias": jnp.ones(3)},
}
POLICY = jaxmp.get_policy("bf16")
TX = jaxmp.mixed_precision(optax.chain(optax.adam(1e-2), jaxmp.ema_params(0.9)), POLICY, remainder_bits=16)


def layout_of(devices, params=PARAMS):
    mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    return fsdp.layout_of(params, mesh, min_size=10)


@functools.cache
def trained():
    """(params, opt_state) after a step, without padding."""
    params, opt_state = POLICY.cast_to_param(PARAMS), TX.init(PARAMS)
    jaxmp.get_loss_scale(opt_state)  # the gradients are made by hand
    return jax.jit(lambda p, s: jaxmp.apply_gradients(TX, p, s, p))(params, opt_state)


def shapes(tree, layout):
    """The params that a job with this layout would pass, padded and placed."""
    padded = jax.eval_shape(lambda tree: fsdp.pad(tree, layout), tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), padded, layout.shardings)


@pytest.fixture(scope="module")
def saved_on_8(tmp_path_factory):
    with checkpoint.manager(tmp_path_factory.mktemp("padded")) as steps:
        params, opt_state = fsdp.pad(trained(), layout_of(8))
        assert params["embed"].shape == (56, 6) and params["dense"]["kernel"].shape == (6, 16)
        params = jax.device_put(params, layout_of(8).shardings)
        extra = {"average": jaxmp.get_ema_params(opt_state, params), "other": jnp.ones((56, 6))}
        checkpoint.save(steps, 0, params=params, opt_state=opt_state, extra=extra, layout=layout_of(8))
        steps.wait_until_finished()
        yield steps


@pytest.mark.parametrize("devices", [3, 4, 8])
@pytest.mark.costly
def test_from_8_devices_to_others(saved_on_8, devices):
    layout = layout_of(devices)
    restored = checkpoint.restore(saved_on_8, TX, params=shapes(trained()[0], layout), layout=layout)
    for name, x in (("embed", restored.params["embed"]), ("kernel", restored.params["dense"]["kernel"])):
        assert x.sharding.is_equivalent_to(
            layout.shardings[name] if name == "embed" else layout.shardings["dense"][name], x.ndim
        )
    assert optax.tree.get(restored.opt_state, "mu")["embed"].sharding.spec == layout.specs["embed"]
    there = jax.tree.map(np.asarray, (restored.params, restored.opt_state))
    assert_bitwise(there, jax.tree.map(np.asarray, fsdp.pad(trained(), layout)))
    back = fsdp.trim((restored.params, restored.opt_state), layout)
    assert_bitwise(jax.tree.map(np.asarray, back), jax.tree.map(np.asarray, trained()))


def test_to_one_device_and_to_sixteen(saved_on_8):
    restored = checkpoint.restore(saved_on_8, TX, params=trained()[0])
    assert_bitwise((restored.params, restored.opt_state), trained())
    wide = fsdp.layout_of(PARAMS, jax.sharding.AbstractMesh((16,), ("fsdp",)), min_size=10)
    like = jax.eval_shape(lambda tree: fsdp.pad(tree, wide), trained()[0])
    restored = checkpoint.restore(saved_on_8, TX, params=like, layout=wide)
    assert restored.params["embed"].shape == (64, 6)
    assert_bitwise((restored.params, restored.opt_state), fsdp.pad(trained(), wide))


@pytest.mark.costly
def test_and_back_from_one_device(tmp_path):
    """What was saved without padding takes the padding of the new layout, into another precision too."""
    fp32 = jaxmp.mixed_precision(optax.chain(optax.adam(1e-2), jaxmp.ema_params(0.9)), "fp32")
    layout = layout_of(8)
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 0, params=trained()[0], opt_state=trained()[1])
        steps.wait_until_finished()
        restored = checkpoint.restore(steps, fp32, params=shapes(PARAMS, layout), layout=layout)
    expected = checkpoint.convert(trained()[1], trained()[0], to=fp32, policy="fp32")
    assert_bitwise(jax.tree.map(np.asarray, restored[1:3]), jax.tree.map(np.asarray, fsdp.pad(expected, layout)))


@pytest.mark.costly
def test_other_trees_are_padded_where_they_are_as_the_params(saved_on_8):
    like = {
        "average": jax.eval_shape(lambda: jaxmp.get_ema_params(trained()[1], trained()[0])),
        "other": jnp.ones((56, 6)),
    }
    found = checkpoint.restore(saved_on_8, TX, params=trained()[0], extra=like).extra
    assert_bitwise(found["average"], jaxmp.get_ema_params(trained()[1], trained()[0]))
    assert found["other"].shape == (56, 6)


def test_what_is_no_padding_is_never_cut_off(saved_on_8):
    smaller = trained()[0] | {"embed": trained()[0]["embed"][:50]}
    with pytest.raises(
        ValueError, match=r"embed has shape \(56, 6\) in the checkpoint and \(50, 6\) in the model.*pass its layout="
    ):
        checkpoint.restore(saved_on_8, TX, params=smaller)
    larger = trained()[0] | {"embed": jnp.ones((64, 6), jnp.bfloat16)}  # without a layout: a model of 64 rows
    with pytest.raises(ValueError, match=r"embed has shape \(56, 6\) in the checkpoint and \(64, 6\) in the model"):
        checkpoint.restore(saved_on_8, TX, params=larger)
    with pytest.raises(ValueError, match=r"with layout=, a padded leaf must have length 16.*\(6, 13\) at dense/kernel"):
        checkpoint.restore(saved_on_8, TX, params=trained()[0], layout=layout_of(4))
    with pytest.raises(ValueError, match=r"with layout=, a padded leaf must have length 16.*\(6, 13\) at dense/kernel"):
        checkpoint.save(saved_on_8, 1, params=trained()[0], opt_state=trained()[1], layout=layout_of(8))


@pytest.mark.parametrize("axis", [0, 1], ids=["other-axis", "axis-of-the-groups"])
@pytest.mark.costly
def test_moments_in_8_bits_take_another_padding_along_another_axis(axis, tmp_path):
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-2, state_dtype=jnp.int8), "fp32")
    params = {"w": jnp.asarray(RNG.normal(size=(51, 128) if axis == 0 else (64, 8 * 32 - 10)), jnp.float32)}
    layouts = [
        fsdp.layout_of(params, jax.sharding.AbstractMesh((n,), ("fsdp",)), specs=None, min_size=1) for n in (8, 3)
    ]
    cut = [
        fsdp.Cut(x.cuts["w"].spec, params["w"].shape, axis, n)
        for x, n in zip(layouts, (56, 51) if axis == 0 else (256, 288), strict=True)
    ]
    old, new = (fsdp.Layout(x.mesh, "fsdp", {"w": c}) for x, c in zip(layouts, cut, strict=True))
    padded = fsdp.pad(params, old)
    jaxmp.get_loss_scale(tx.init(padded))
    held = jaxmp.apply_gradients(tx, padded, tx.init(padded), padded)
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 0, params=held[0], opt_state=held[1], layout=old)
        steps.wait_until_finished()
        like = fsdp.pad(params, new)
        if axis == 1:
            with pytest.raises(
                ValueError, match="this axis cannot get another padding; got 256 .* 288 wanted at .*mu/w"
            ):
                checkpoint.restore(steps, tx, params=like, layout=new)
            return
        restored = checkpoint.restore(steps, tx, params=like, layout=new)
    for name in ("mu", "nu"):
        got, before = (optax.tree.get(s, name)["w"] for s in (restored.opt_state, held[1]))
        assert_bitwise(tuple(got), (before.codes[:51], before.scales[:51]))
