"""Multi-tensor kernels under plain jit on leaves that are split: the rule by which XLA splits them.

The rule is what is tested here, with the reference in the place of the kernel, which only a GPU runs: every device
works on its own part, nothing is gathered, sums count each element once.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact, assert_moved
from pallas_kernels import backend as backends, launch, meshes, multi_tensor
from pallas_kernels.leaves import Leaf

WITHOUT_KERNELS = backends.why_no_kernels()
kernels_only = pytest.mark.skipif(WITHOUT_KERNELS is not None, reason=str(WITHOUT_KERNELS))


@pytest.fixture
def parts(monkeypatch):
    """The kernel is the reference; a list of the shapes that devices work on, one entry for each launch traced."""
    seen: list[list[tuple[int, ...]]] = []

    def apply(f, leaves, scalars, *, n_sums=0, when=None, **_):
        seen.append([leaf.states[0].shape for leaf in leaves])
        return multi_tensor.reference(f, leaves, scalars, n_sums=n_sums, when=when)

    monkeypatch.setattr(multi_tensor, "apply", apply)
    return seen


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def descend(values):
    """x <- x - rate * g, counting what is beyond 1."""
    (g,), (x,) = values.reads, values.states
    new = x - values.scalars[0] * g.astype(jnp.float32)
    return (new, new), (jnp.where(jnp.abs(new) > 1, jnp.ones_like(new), jnp.zeros_like(new)),)


SHAPES = {"split": (8, 6), "both": (8, 4), "columns": (3, 8), "held": (5,), "odd": (7, 3)}
SPECS = {"split": P("data"), "both": P("data", "model"), "columns": P(None, "model"), "held": P(), "odd": P()}


def make_leaves():
    rng = np.random.default_rng(0)
    draw = lambda shape, dtype: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return [
        Leaf((draw(s, jnp.float16),), (draw(s, jnp.float32),), (jnp.zeros(s, jnp.bfloat16),), (), (0.5,))
        for s in SHAPES.values()
    ]


def arrays_of(leaves):
    return [(leaf.reads, leaf.states, leaf.writes) for leaf in leaves]


def step(leaves, apply, arrays, rate, when):
    own = [leaf._replace(reads=r, states=s, writes=w) for leaf, (r, s, w) in zip(leaves, arrays, strict=True)]
    return apply(descend, own, [rate], n_sums=1, when=when)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("taken", [True, False])
def test_each_device_works_on_its_part_and_sums_count_once(parts, taken):
    leaves, mesh = make_leaves(), mesh_of()
    given = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays_of(leaves), SPECS.values(), strict=True)
    ]
    rate, when = jnp.float32(0.25), jnp.array(taken)
    run = jax.jit(functools.partial(step, leaves, functools.partial(meshes.apply, name="descend")))
    result = run(given, rate, when)
    expected = step(leaves, multi_tensor.reference, arrays_of(leaves), rate, when)
    assert_close(result.leaves, expected.leaves, rtol=1e-6)
    if taken:
        assert_exact(result.sums[0], expected.sums[0])  # a quarter of a gradient is exact, so no count can differ
        assert float(result.sums[0]) > 0
    else:
        assert_moved(result.leaves, expected.leaves)
    for new, old in zip(result.leaves, given, strict=True):
        assert all(x.sharding.is_equivalent_to(old[1][0].sharding, x.ndim) for x in new)
    text = run.lower(given, rate, when).compile().as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    # Leaves that are split alike share a launch: four ways here.
    shapes = {tuple(map(tuple, launched)) for launched in parts}
    assert {((2, 6),), ((2, 2),), ((3, 4),), ((5,), (7, 3))} <= shapes


def test_groups_stay_whole(parts):
    """Scales of 8-bit moments are split with their codes; where that would cut a group, the leaf is not split there."""
    del parts
    mesh = mesh_of()
    sharding = NamedSharding(mesh, P("data", "model"))
    assert meshes._even_spec(sharding, (8, 512), 256) == ("data", "model")
    assert meshes._even_spec(sharding, (8, 256), 256) == ("data", None)
    assert meshes._even_spec(sharding, (6, 512), 1) == (None, "model")
    rule = meshes._sharding_rule([Leaf(states=(jnp.ones((8, 512)), jnp.ones((8, 2))), group=256)], [(8, 512)], 1)
    assert rule == "s, l0a0 l0a1, l0a0 l0g -> l0a0 l0a1, l0a0 l0g, "


@pytest.mark.thorough(0)
def test_under_vmap_the_reference_serves(parts):
    leaves = make_leaves()[:2]
    rate = jnp.array([0.25, 0.5])
    run = functools.partial(step, leaves, functools.partial(meshes.apply, name="descend"))
    got = jax.vmap(run, (None, 0, None))(arrays_of(leaves), rate, jnp.array(True))
    for i in range(2):
        expected = step(leaves, multi_tensor.reference, arrays_of(leaves), rate[i], jnp.array(True))
        assert_close(jax.tree.map(lambda x: x[i], got), expected, rtol=1e-6)  # noqa: B023
    assert not [shapes for shapes in parts if len(shapes[0]) > 2]


@pytest.mark.thorough(1)
@kernels_only
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_what_is_lowered_for_a_gpu_on_a_mesh(kind):
    mesh = mesh_of(kind)
    put = lambda tree: jax.device_put(tree, NamedSharding(mesh, P("data")))  # noqa: E731
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3, max_norm=1.0), "fp16")
    params32 = {"w": jnp.ones((8, 256))}
    params, opt_state = put(jaxmp.get_policy("fp16").cast_to_param(params32)), tx.init(put(params32))
    update = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
    text = update.trace(params, opt_state, params).lower(lowering_platforms=("cuda",)).as_text()
    is_auto = kind == AxisType.Auto
    assert ("CustomSPMDPartitioning" in text) == is_auto  # on explicit axes XLA serves


@kernels_only
def test_inside_shard_map_the_kernel_stands_bare():
    mesh = mesh_of()
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3, max_norm=1.0), "fp16")
    params32 = {"w": jnp.ones((8, 256))}
    params, opt_state = jaxmp.get_policy("fp16").cast_to_param(params32), tx.init(params32)
    spread = jax.shard_map(functools.partial(jaxmp.apply_gradients, tx), mesh=mesh, in_specs=P(), out_specs=P())
    text = jax.jit(spread).trace(params, opt_state, params).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "CustomSPMDPartitioning" not in text


@pytest.mark.thorough(0)
@pytest.mark.parametrize("check_vma", [True, False])
def test_under_vmap_inside_shard_map_the_reference_serves(check_vma):
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3, max_norm=1.0), "bf16")
    params32 = {"w": jnp.ones((2, 8, 4)), "b": jnp.ones((2, 4))}  # two models
    params, opt_state = jaxmp.get_policy("bf16").cast_to_param(params32), jax.vmap(tx.init)(params32)
    grads = {"w": params["w"].at[1, 0, 0].set(jnp.nan), "b": params["b"]}  # the second one overflows
    update = jax.vmap(functools.partial(jaxmp.apply_gradients, tx))
    spread = jax.shard_map(update, mesh=mesh_of(), in_specs=P(), out_specs=P(), check_vma=check_vma)
    got = jax.jit(spread)(grads, opt_state, params)
    assert_close(got, jax.jit(update)(grads, opt_state, params), rtol=1e-6)
    assert jaxmp.get_metrics(got[1])["skipped"].tolist() == [False, True]


def test_blocks_cover_each_element_once():
    levels = multi_tensor.UPDATE_LEVELS
    leaves = [Leaf(reads=(jnp.ones(n),)) for n in (1, 127, 128, 2047, 2048, 5000)]
    covered = {i: np.zeros(leaf.reads[0].size, int) for i, leaf in enumerate(leaves)}
    regions = list(launch.regions(leaves, levels))
    for region in regions:
        block = region.level.pieces * region.level.size
        for k, leaf in enumerate(region.leaves):
            for j in range(region.firsts[k + 1] - region.firsts[k]):
                start = region.offsets[k] + j * block
                covered[leaf][start : start + block] += 1
    assert all((x == 1).all() for x in covered.values())
    starts = [region.start for region in regions]
    assert starts == np.cumsum([0, *(region.firsts[-1] for region in regions)])[:-1].tolist()
