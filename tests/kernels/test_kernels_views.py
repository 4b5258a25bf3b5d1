"""Groups of neighbours seen in tiles, as for a TPU: the same numbers as in rows; compiled for the CPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from helpers import assert_exact, assert_moved, assert_same_program
from pallas_kernels import AdamW, multi_tensor_update, views
from pallas_kernels.moments import Quantized, dequantize, requantize, zeros
from pallas_kernels.update import Weight
from platforms import ways_of

SHAPES = [(16, 512), (8, 384), (3, 24, 256), (2, 2, 8, 768)]


def seen_in_tiles(shape, group, *, on="tpu"):
    """Whether an array of this shape is seen in tiles on a platform."""
    found = []
    with ways_of(on):
        jax.jit(lambda x: views.seen(lambda view, x: found.append(view.in_tiles) or x, shape, group, x))(
            jnp.zeros(shape)
        )
    return found[-1]


@pytest.mark.thorough(1)
@pytest.mark.parametrize("group", [128, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_view_in_tiles_has_the_groups_of_the_rows(shape, group):
    if shape[-1] % group:
        group = 128
    assert seen_in_tiles(shape, group)
    view = views.View(shape, group, in_tiles=True)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    per_group = np.abs(x).reshape(*shape[:-1], -1, group).max(-1)
    (seen,), (groups,) = view.of_tree(([jnp.asarray(x)], [jnp.asarray(per_group)]))
    assert_exact(view.group_max(jnp.abs(seen)), groups)
    scaled, again = view.undone([seen * groups, groups], [shape, per_group.shape])
    assert_exact(scaled, x * np.repeat(per_group, group, axis=-1))
    assert_moved(again, per_group)


@pytest.mark.parametrize(
    ("shape", "group"), [((256,), 256), ((12, 256), 128), ((16, 192), 64), ((16, 256), 1)], ids=str
)
def test_what_has_no_whole_tiles_is_seen_in_rows(shape, group):
    assert not seen_in_tiles(shape, group)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm"])
def test_other_platforms_see_rows(platform):
    assert not seen_in_tiles((16, 256), 256, on=platform)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("rows", [64, 32])
def test_each_device_needs_whole_tiles(rows):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.zeros((rows, 256)), jax.NamedSharding(mesh, P("d")))
    found = []

    def see(x):
        return views.seen(lambda view, x: of_one.append(view.in_tiles) or x, x.shape, 256, x)

    for f in (see, jax.shard_map(see, mesh=mesh, in_specs=P(None), out_specs=P())):  # there it is whole on each device
        of_one: list[bool] = []
        jax.jit(f).trace(x).lower(lowering_platforms=("tpu",))
        found.append(of_one[-1])
    assert found == [rows == 64, True]


@pytest.mark.thorough(0)
@pytest.mark.parametrize("state_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("signed", [True, False])
def test_moments_that_are_compressed_alone_have_the_same_bits(state_dtype, signed):
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(3, 16, 512)) ** (1 if signed else 2), jnp.float32)
    random = jnp.asarray(rng.integers(0, 2**16, x.shape), jnp.int32)
    like = zeros(x.shape, state_dtype, signed=signed)

    def both(platform):
        with ways_of(platform):
            stored = requantize(x, like, random, signed=signed)
            return *stored, dequantize(stored, signed=signed)

    assert_same_program(both("tpu"), both("cuda"))  # operation by operation


def weights():
    """Leaves with float32 and split masters, and moments in float32, 16 and 8 bits."""
    rng = np.random.default_rng(1)
    forms = [*((master, "float32") for master in ("float32", "int16", "int8")), ("float32", "bfloat16")]
    found = [((40, 3), *form) for form in forms]
    found += [((16, 512), master, "int8") for master in ("own", "float32", "int16", "int8")]
    found += [((12, 512), "int8", "int8")]  # in rows

    def weight(shape, master, dtype):
        w = jnp.asarray(rng.normal(size=shape), jnp.float32)
        param = None if master == "own" else w.astype(jnp.bfloat16)
        if master in ("int16", "int8"):
            info = jnp.iinfo(master)
            w = jnp.asarray(rng.integers(info.min, info.max, shape, endpoint=True), master)
        elif param is not None:
            w = param.astype(jnp.float32) * 1.0001
        grad = rng.normal(size=shape) * np.where(rng.random(shape) < 0.05, 2.0**45, 1.0)
        moments = tuple(zeros(shape, dtype, signed=signed) for signed in (True, False))
        return Weight(jnp.asarray(grad, jnp.bfloat16), param, w, moments, 0.01)

    return [weight(*x) for x in found]


def step(weights, number, taken):
    scalars = (1 - 0.9**number, 1 - 0.999**number)
    how = {"factor": jnp.float32(1.0), "learning_rate": jnp.float32(1e-3), "step": number, "taken": taken}
    return multi_tensor_update(weights, AdamW(), scalars=scalars, backend="xla", **how)


def after_steps(platform):
    """The weights after a taken step, a skipped one, and one more.

    Operation by operation: XLA for CPU contracts products and sums in different ways in different programs.
    """
    ws, found = weights(), []
    with ways_of(platform):
        for number, taken in ((1.0, True), (2.0, False), (2.0, True)):
            ws, _ = step(ws, jnp.float32(number), jnp.bool_(taken))
            found.append(jax.device_get(ws))
    return found


@pytest.mark.thorough(0)
def test_a_step_for_a_tpu_has_the_bits_of_other_steps():
    assert_same_program(after_steps("tpu"), after_steps("cuda"))


def test_a_skip_is_chosen_where_groups_are_seen():
    """Beyond the view XLA for TPU would read old and new arrays again: 38 bytes of HBM per param for 30."""
    ws = [w for w in weights() if any(isinstance(m, Quantized) for m in w.moments)]
    text = jax.jit(step).trace(ws, jnp.float32(1.0), jnp.bool_(True)).lower(lowering_platforms=("tpu",)).as_text()
    assert "tensor<2x2x2x8x128xf32>" in text  # the leaves of (16, 512), in tiles
    assert not re.findall(r"stablehlo.select.*tensor<16x(?:512|2)x", text)
