"""A job that was padded for one number of devices goes on with another."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxmp
from helpers import assert_exact, assert_moved
from jaxmp import checkpoint, fsdp
from jaxmp._src.distributed.param_layout import Cut, Layout
from pallas_kernels import moments

RNG = np.random.default_rng(0)
PARAMS = {
    "embed": jnp.asarray(RNG.normal(size=(51, 6)), jnp.float32),
    "dense": {
        "kernel": jnp.asarray(RNG.normal(size=(6, 13)), jnp.float32),
        "bias": jnp.ones(3),
        "gain": jnp.float32(0.5),
    },
}
POLICY = jaxmp.get_policy("bf16")
TX = jaxmp.mixed_precision(optax.chain(optax.adam(1e-2), jaxmp.ema_params(0.9)), POLICY, remainder_bits=16)


def layout_of(devices, params=PARAMS):
    mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    return fsdp.layout_of(params, mesh, min_size=10)


def after_a_step(tx, policy, params32):
    """(params, opt_state), without padding; one program makes and moves them."""

    @jax.jit
    def run(params32):
        params, opt_state = policy.cast_to_param(params32), tx.init(params32)
        grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16 if x.dtype == jnp.float8_e4m3fn else x.dtype), params)
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    jaxmp.get_loss_scale(())  # the gradients are made by hand
    return run(params32)


@functools.cache
def trained():
    return after_a_step(TX, POLICY, PARAMS)


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


@pytest.mark.thorough(0)
@pytest.mark.parametrize("devices", [3, 4, 8])
def test_from_8_devices_to_others(saved_on_8, devices):
    layout = layout_of(devices)
    restored = checkpoint.restore(saved_on_8, TX, params=shapes(trained()[0], layout), layout=layout)
    for name, x in (("embed", restored.params["embed"]), ("kernel", restored.params["dense"]["kernel"])):
        assert x.sharding.is_equivalent_to(
            layout.shardings[name] if name == "embed" else layout.shardings["dense"][name], x.ndim
        )
    assert optax.tree.get(restored.opt_state, "mu")["embed"].sharding.spec == layout.specs["embed"]
    there = jax.tree.map(np.asarray, (restored.params, restored.opt_state))
    assert_moved(there, jax.tree.map(np.asarray, fsdp.pad(trained(), layout)))
    back = fsdp.trim((restored.params, restored.opt_state), layout)
    assert_moved(jax.tree.map(np.asarray, back), jax.tree.map(np.asarray, trained()))


@pytest.mark.thorough(0)
def test_to_one_device_and_to_sixteen(saved_on_8):
    restored = checkpoint.restore(saved_on_8, TX, params=trained()[0])
    assert_moved((restored.params, restored.opt_state), trained())
    wide = fsdp.layout_of(PARAMS, jax.sharding.AbstractMesh((16,), ("fsdp",)), min_size=10)
    like = jax.eval_shape(lambda tree: fsdp.pad(tree, wide), trained()[0])
    restored = checkpoint.restore(saved_on_8, TX, params=like, layout=wide)
    assert restored.params["embed"].shape == (64, 6)
    assert_moved((restored.params, restored.opt_state), fsdp.pad(trained(), wide))


def test_and_back_from_one_device(tmp_path):
    """What was saved without padding takes the padding of the new layout, into another precision too."""
    fp32 = jaxmp.mixed_precision(optax.chain(optax.adam(1e-2), jaxmp.ema_params(0.9)), "fp32")
    layout = layout_of(8)
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 0, params=trained()[0], opt_state=trained()[1])
        steps.wait_until_finished()
        restored = checkpoint.restore(steps, fp32, params=shapes(PARAMS, layout), layout=layout)
    expected = checkpoint.convert(trained()[1], trained()[0], to=fp32, policy="fp32")
    assert_exact(jax.tree.map(np.asarray, restored[1:3]), jax.tree.map(np.asarray, fsdp.pad(expected, layout)))


@pytest.mark.thorough(0)
def test_other_trees_are_padded_where_they_are_as_the_params(saved_on_8):
    like = {
        "average": jax.eval_shape(lambda: jaxmp.get_ema_params(trained()[1], trained()[0])),
        "other": jnp.ones((56, 6)),
    }
    found = checkpoint.restore(saved_on_8, TX, params=trained()[0], extra=like).extra
    assert_exact(found["average"], jaxmp.get_ema_params(trained()[1], trained()[0]))
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


def in_8_bits(params, layout, dtype=jnp.int8):
    """(tx, params, opt_state) of AdamW with moments in 8 bits after a step, padded for a layout."""
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-2, state_dtype=dtype), "fp32")

    @jax.jit
    def after_a_step(params):
        padded = fsdp.pad(params, layout)
        return jaxmp.apply_gradients(tx, padded, tx.init(padded), padded)

    jaxmp.get_loss_scale(())  # the gradients are made by hand
    return tx, *after_a_step(params)


def layout_along(axis, shape, padded):
    mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
    spec = jax.sharding.PartitionSpec(*("fsdp" if i == axis else None for i in range(len(shape))))
    return Layout(mesh, "fsdp", {"w": Cut(spec, shape, axis, padded)})


def to_another_layout(params, old, new, tmp_path, dtype=jnp.int8):
    """(the moments before, in float64, without padding; the restored moments; the job)."""
    tx, held, opt_state = in_8_bits(params, old, dtype)
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 0, params=held, opt_state=opt_state, layout=old)
        steps.wait_until_finished()
        restored = checkpoint.restore(steps, tx, params=fsdp.pad(params, new), layout=new)
    return [[optax.tree.get(s, name)["w"] for name in ("mu", "nu")] for s in (opt_state, restored.opt_state)]


def values(moment, shape, name, dtype):
    """A moment without padding, by the rule of its codec, in float64: sign(c) (|c| / top)^power * s."""
    if not isinstance(moment, moments.Quantized):
        return np.asarray(moment, np.float64)[tuple(map(slice, shape))]
    codes = np.asarray(moment.codes, np.float64)
    top, power = {jnp.int8: (127 if name == "mu" else 255, 2), jnp.float8_e4m3fn: (448, 1)}[dtype]
    power *= 2 if name == "nu" else 1
    scales = np.repeat(np.asarray(moment.scales, np.float64), moment.group, axis=-1)
    return (np.sign(codes) * np.abs(codes / top) ** power * scales)[tuple(map(slice, shape))]


@pytest.mark.thorough(1)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize(
    ("shape", "axis", "old", "new"),
    [
        ((51, 128), 0, 56, 51),  # along another axis: codes and scales as they are
        ((64, 246), 1, 256, 288),  # groups of 256, then of 32: each has the scale of the one that it lies in
        ((64, 200), 1, 256, 320),  # of 256, then of 64
        ((16, 2048), 1, 2048, 2049),  # of 256, then float32: 2049 has no groups
        ((5120,), 0, 5120, 5121),
    ],
    ids=str,
)
def test_moments_in_8_bits_keep_their_numbers_under_another_padding(shape, axis, old, new, dtype, tmp_path):
    params = {"w": jnp.asarray(RNG.normal(size=shape), jnp.float32)}
    layouts = layout_along(axis, shape, old), layout_along(axis, shape, new)
    before, after = to_another_layout(params, *layouts, tmp_path, dtype)
    for name, x, y in zip(("mu", "nu"), before, after, strict=True):
        assert isinstance(x, moments.Quantized) and isinstance(y, moments.Quantized) == (
            new % 32 == 0 or axis != len(shape) - 1
        )
        np.testing.assert_allclose(values(y, shape, name, dtype), values(x, shape, name, dtype), rtol=1e-6)
        if isinstance(y, moments.Quantized):
            whole = tuple(map(slice, shape))
            assert_moved(np.asarray(y.codes[whole]), np.asarray(x.codes[whole]))
            assert not np.any(np.asarray(y.codes, np.float32)[..., shape[-1] :])


@pytest.mark.thorough(1)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize(
    ("shape", "old", "new"), [((64, 246), 288, 256), ((16, 2048), 2049, 2048)], ids=["32-to-256", "float32-to-256"]
)
def test_moments_that_get_larger_groups_are_rounded_once_and_named(shape, old, new, dtype, tmp_path):
    params = {"w": jnp.asarray(RNG.normal(size=shape), jnp.float32)}
    layouts = layout_along(1, shape, old), layout_along(1, shape, new)
    with pytest.warns(
        UserWarning, match="2 of them are rounded to the codes of larger groups .*mu/w.*pads another axis"
    ):
        before, after = to_another_layout(params, *layouts, tmp_path, dtype)
    for name, x, y in zip(("mu", "nu"), before, after, strict=True):
        assert isinstance(y, moments.Quantized) and y.group == 256
        x, found = values(x, shape, name, dtype), values(y, shape, name, dtype)
        largest = np.repeat(np.asarray(y.scales, np.float64), 256, axis=-1)[:, : shape[-1]]
        # The codes lie close around x / largest: half a step of the root (int8), or of the mantissa (fp8, 3 bits).
        power = {("mu", jnp.int8): 2, ("nu", jnp.int8): 4}.get((name, dtype), 1 if name == "mu" else 2)
        step = {jnp.int8: 1 / (127 if name == "mu" else 255), jnp.float8_e4m3fn: 2.0**-3}[dtype]
        relative = np.abs(x / largest) ** (1 - 1 / power) if dtype == jnp.int8 else np.abs(x / largest)
        bound = 0.5 * power * step * relative + (power * step) ** 2
        assert np.all(np.abs(found - x) / largest <= bound)
        assert np.max(np.abs(found - x) / largest) > 0  # it is no copy


@pytest.mark.thorough(0)
def test_moments_in_8_bits_go_from_8_devices_to_3_and_back(tmp_path):
    """Placed on real meshes: the default layout cuts the last axis, and pads it on 3 devices, where nothing divides."""
    params = {"w": jnp.asarray(RNG.normal(size=(16, 2048)), jnp.float32)}
    old, new = layout_of(8, params), layout_of(3, params)
    assert old.specs["w"] == jax.sharding.PartitionSpec(None, "fsdp") and new.cuts["w"].padded == 2049
    tx, held, opt_state = in_8_bits(params, old)
    place = lambda x, layout: jax.device_put(x, jaxmp.sharding_of(tx, fsdp.pad(params, layout), layout.shardings))  # noqa: E731
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(
            steps, 0, params=jax.device_put(held, old.shardings), opt_state=place(opt_state, old), layout=old
        )
        steps.wait_until_finished()
        there = checkpoint.restore(steps, tx, params=shapes(held, new), layout=new)
        checkpoint.save(steps, 1, params=there.params, opt_state=there.opt_state, layout=new)
        steps.wait_until_finished()
        with pytest.warns(UserWarning, match="rounded to the codes of larger groups"):
            back = checkpoint.restore(steps, tx, params=shapes(held, old), layout=old)
    assert optax.tree.get(there.opt_state, "mu")["w"].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp")
    # To float32 and back to the same groups is the same code again: the value is one of the grid.
    for name in ("mu", "nu"):
        was, now = (optax.tree.get(s, name)["w"] for s in (opt_state, back.opt_state))
        assert_exact(jax.tree.map(np.asarray, tuple(now)), jax.tree.map(np.asarray, tuple(was)))


@pytest.mark.thorough(0)
@pytest.mark.parametrize("devices", [3, 8])
@pytest.mark.parametrize("change", ["another shape", "the same padded shape", "gone", "renamed"])
def test_a_padded_leaf_that_partial_names_starts_fresh_or_is_left_over(change, devices, saved_on_8):
    """Whole files were called damaged: the checksum of a leaf that is not padded anew is that of the padding it has."""
    rows = {"another shape": 45, "the same padded shape": 53}.get(change, 51)  # 53 rows are padded to 56, as 51 are
    new = {"dense": PARAMS["dense"]}
    if change != "gone":
        new["head" if change == "renamed" else "embed"] = jnp.full((rows, 6), 2.0)
    layout, patterns = layout_of(devices, new), ("embed", "head") if change == "renamed" else "embed"
    params = jax.device_put(POLICY.cast_to_param(fsdp.pad(new, layout)), layout.shardings)
    restored = checkpoint.restore(saved_on_8, TX, params=params, layout=layout, partial=patterns)
    of_leaf = {x for x in (*restored.report.fresh, *restored.report.left_over) if x.split("/")[-1] in ("embed", "head")}
    assert of_leaf == {*restored.report.fresh, *restored.report.left_over} and len(of_leaf) >= 4
    got = fsdp.trim((restored.params, restored.opt_state), layout)
    mu = optax.tree.get(got[1], "mu")
    assert_moved(jax.tree.map(np.asarray, mu["dense"]), optax.tree.get(trained()[1], "mu")["dense"])
    masters, before = jaxmp.get_master_params(got[1], got[0]), jaxmp.get_master_params(*trained()[::-1])
    assert_exact(jax.tree.map(np.asarray, masters["dense"]), jax.tree.map(np.asarray, before["dense"]))
    for name in new.keys() - {"dense"}:
        assert_exact(np.asarray(masters[name]), np.asarray(new[name]))
        assert not np.any(mu[name])


def test_a_layout_that_one_side_forgot_is_named(saved_on_8, tmp_path):
    """The padded shapes agree, and whole files were called damaged."""
    layout = layout_of(8)
    params, opt_state = fsdp.pad(trained(), layout)
    told = (
        r"dense/kernel has shape \(6, 13\), padded to \(6, 16\), in the checkpoint and \(6, 16\) in the model.*layout="
    )
    with pytest.raises(ValueError, match=told):
        checkpoint.restore(saved_on_8, TX, params=params)
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 0, params=params, opt_state=opt_state)
        told = r"dense/kernel has shape \(6, 16\) in the checkpoint and \(6, 13\), padded to \(6, 16\), in the model"
        with pytest.raises(ValueError, match=f"{told}.*saved without it is restored without it"):
            checkpoint.restore(steps, TX, params=params, layout=layout)
        restored = checkpoint.restore(steps, TX, params=params)
    assert_moved((restored.params, restored.opt_state), (params, opt_state))


@pytest.mark.parametrize("rows", [45, 53])  # 53 rows are padded to 56 on 8 devices, as 51 are
def test_another_model_is_shown_without_padding(rows, saved_on_8):
    new = {"dense": PARAMS["dense"], "embed": jnp.ones((rows, 6))}
    layout = layout_of(8, new)
    like = shapes(POLICY.cast_to_param(new), layout)
    told = rf"embed has shape \(51, 6\) in the checkpoint and \({rows}, 6\) in the model, both without padding\."
    with pytest.raises(ValueError, match=told):
        checkpoint.restore(saved_on_8, TX, params=like, layout=layout)


def test_a_leaf_whose_name_ends_as_that_of_a_padded_one_keeps_its_shape(tmp_path):
    """`block/w` has the padded shape of `w`: its last rows were cut off, and were not in its checksum."""
    tree = {"w": jnp.ones((14, 3)), "block": {"w": jnp.full((16, 3), 2.0)}}
    layout = layout_of(8, tree)
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 0, params=fsdp.pad(tree, layout), opt_state=(), layout=layout)
        steps.wait_until_finished()
        assert_moved(checkpoint.restore(steps, None, params=tree).params, tree)


def test_means_over_rows_do_not_follow_the_padding(tmp_path):
    """The error says what continues: the state of Adafactor starts fresh, the masters do not."""
    params = {"w": jnp.asarray(RNG.normal(size=(16, 8)), jnp.float32)}
    tx = jaxmp.mixed_precision(optax.adafactor(1e-2, min_dim_size_to_factor=8), "fp32")
    layout = layout_of(3, params)
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 0, params=params, opt_state=tx.init(params), layout=layout_of(1, params))
        with pytest.raises(ValueError, match=r"v_col/w has shape \(16,\) there, expected \(18,\)\. .*pass moments="):
            checkpoint.restore(steps, tx, params=shapes(params, layout))
        found = checkpoint.restore(steps, tx, params=shapes(params, layout), moments="fit")
    assert {"0/count", "0/v_col/w"} < set(found.report.fresh)
    assert_moved(np.asarray(fsdp.trim(found.params, layout)["w"]), np.asarray(params["w"]))


# Without layout=: the record knows what is padding, and the shardings of params= for how many devices it is now.

ORDERS = [(8, 3, 1, 8), (8, 3, 1, 6, 2, 4, 8), (1, 8, 2, 3, 4, 6, 1), (3, 8, 6, 4)]


def on(devices, tree, layout):
    """Padded params or shapes as the job on so many devices has them; on one device, as they are."""
    return jax.device_put(fsdp.pad(tree, layout), layout.shardings)


@pytest.mark.parametrize("order", [ORDERS[0], *(pytest.param(x, marks=pytest.mark.thorough(0)) for x in ORDERS[1:])])
@pytest.mark.parametrize(
    "shapes_alone", [pytest.param(True, marks=pytest.mark.thorough(0)), False], ids=["shapes", "arrays"]
)
def test_a_job_moves_between_numbers_of_devices_without_a_layout(order, shapes_alone, tmp_path):
    """Odd shapes, a leaf with fewer rows than devices, split masters, an average; the last state is the first."""
    more = PARAMS | {"few": jnp.arange(1.0, 34.0).reshape(3, 11), "one": jnp.arange(1.0, 18.0).reshape(1, 17)}
    params, opt_state = after_a_step(TX, POLICY, more)
    expected = jax.tree.map(np.asarray, (params, opt_state))
    layout = layout_of(order[0], more)
    held = on(order[0], params, layout), jax.jit(lambda tree: fsdp.pad(tree, layout))(opt_state)
    for i, devices in enumerate(order[1:]):
        with checkpoint.manager(tmp_path / str(i)) as steps:
            checkpoint.save(steps, 0, params=held[0], opt_state=held[1], layout=layout)
            layout = layout_of(devices, more)
            like = on(devices, POLICY.cast_to_param(more), layout)
            like = shapes(POLICY.cast_to_param(more), layout) if shapes_alone else like
            found = checkpoint.restore(steps, TX, params=like)
        held = found.params, found.opt_state
        assert jax.tree.map(jnp.shape, held[0]) == jax.tree.map(jnp.shape, like)
        assert_moved(jax.tree.map(np.asarray, fsdp.trim(held, layout)), expected)
        assert held[0]["embed"].sharding.is_equivalent_to(layout.shardings["embed"], 2)


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(nn.Dense(49)(nn.Dense(33)(x)))


def with_scales():
    """Params with the scales of the fp8 layer in the middle, of 33 x 49."""
    with jaxmp.fp8.autocast(jaxmp.fp8.DelayedScaling()):
        return jax.jit(Layers().init)(jax.random.key(0), jnp.ones((16, 6)))["params"]


TIED = jnp.asarray(RNG.normal(size=(51, 6)), jnp.float32)
STORED = jaxmp.get_policy("fp8", fp8_weights=True)
KINDS = {
    "tied leaves": ("fp16", optax.adam(1e-2), {}, lambda: {"embed": TIED, "head": TIED, "k": jnp.ones((6, 13))}),
    "kernels in fp8": (STORED, optax.adam(1e-2), {}, with_scales),
    "kernels in fp8, moments in 8 bits": (STORED, jaxmp.fused_lion(1e-2, state_dtype=jnp.int8), {}, with_scales),
    "moments in 8 bits, masters split in 8": (
        "bf16",
        jaxmp.fused_adamw(1e-2, state_dtype=jnp.int8),
        {"remainder_bits": 8},
        lambda: {"k": jnp.asarray(RNG.normal(size=(201, 128)), jnp.float32), "few": jnp.ones((3, 11))},
    ),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_state_moves_between_numbers_of_devices(kind, tmp_path):
    policy, inner, options, make = KINDS[kind]
    policy, params32 = jaxmp.get_policy(policy), make()
    tx = jaxmp.mixed_precision(inner, policy, **options)
    params, opt_state = after_a_step(tx, policy, params32)
    expected = jax.tree.map(np.asarray, (params, opt_state))
    layout = layout_of(1, params32)
    held = on(1, params, layout), fsdp.pad(opt_state, layout)
    for devices in (8, 3, 1):
        with checkpoint.manager(tmp_path / str(devices)) as steps:
            checkpoint.save(steps, 0, params=held[0], opt_state=held[1], layout=layout)
            layout = layout_of(devices, params32)
            assert layout.padding > 0 or devices != 8
            held = checkpoint.restore(steps, tx, params=shapes(params, layout))[1:3]
    assert_moved(jax.tree.map(np.asarray, held), expected)


def test_from_one_device_that_knew_no_layout(tmp_path):
    """The zeros of padded arrays say what is padding; shapes alone do not, nor does a model of so many rows."""
    layout = layout_of(8)
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 0, params=trained()[0], opt_state=trained()[1])
        found = checkpoint.restore(steps, TX, params=on(8, trained()[0], layout))
        for like in (shapes(trained()[0], layout), jax.tree.map(lambda x: x + 1, on(8, trained()[0], layout))):
            with pytest.raises(
                ValueError, match=r"has shape .* in the checkpoint and .* in the model.*pass its layout="
            ):
                checkpoint.restore(steps, TX, params=like)
    back = fsdp.trim((found.params, found.opt_state), layout)
    assert_moved(jax.tree.map(np.asarray, back), jax.tree.map(np.asarray, trained()))


@pytest.mark.parametrize("rows", [56, 57], ids=["as padding", "too many"])
def test_a_larger_model_is_no_padding(saved_on_8, rows):
    """Arrays with numbers where the padding would be, and lengths that no number of devices gives."""
    layout = layout_of(8 if rows == 56 else 1)
    like = shapes(trained()[0], layout) | {"embed": jnp.ones((rows, 6), jnp.bfloat16)}
    if rows == 56:
        like["embed"] = jax.device_put(like["embed"], layout.shardings["embed"])
    with pytest.raises(ValueError, match=rf"embed has shape .* in the checkpoint and \({rows}, 6\) in the model"):
        checkpoint.restore(saved_on_8, TX, params=like)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_moments_in_8_bits_move_without_a_layout(devices, tmp_path):
    params = {"w": jnp.asarray(RNG.normal(size=(200, 128)), jnp.float32)}
    old, new = layout_of(6, params), layout_of(devices, params)
    assert fsdp.pad(params, old)["w"].shape == (204, 128)
    tx, held, opt_state = in_8_bits(params, old)
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 0, params=held, opt_state=opt_state, layout=old)
        found = checkpoint.restore(steps, tx, params=on(devices, params, new))
    for name in ("mu", "nu"):
        before, after = (optax.tree.get(x, name)["w"] for x in (opt_state, found.opt_state))
        assert after.codes.shape == fsdp.pad(params, new)["w"].shape
        assert_moved(np.asarray(after.codes)[:200], np.asarray(before.codes)[:200])
        assert_moved(np.asarray(after.scales)[:200], np.asarray(before.scales)[:200])
