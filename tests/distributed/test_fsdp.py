"""Params cut over devices: what moves in which dtype, and training that equals one device's."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
import regimes
from helpers import assert_close, assert_exact, assert_moved
from jaxmp import fsdp
from jaxmp._src.distributed.param_layout import Cut

DEVICES = 8
POLICY = jaxmp.get_policy("fp16")
ROWS = P("fsdp")


def mesh_of(shape=(DEVICES,), names=("fsdp",), axis_type=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


def draw(*shape):
    return np.asarray(np.random.default_rng(0).normal(size=shape) / shape[0] ** 0.5, np.float32)


# Every kind of leaf: cut along either dimension, padded, and whole.
PARAMS = {"in": draw(8, 24), "out": draw(24, 5), "odd": draw(5, 7), "bias": np.zeros((1, 7), np.float32)}
LAYOUT = fsdp.layout_of(PARAMS, mesh_of(), min_size=20)


# Layouts


def test_each_leaf_is_cut_along_its_longest_dimension_that_divides():
    assert LAYOUT.specs == {"in": P(None, "fsdp"), "out": P("fsdp", None), "odd": P(None, "fsdp"), "bias": P()}
    assert LAYOUT.cuts["odd"] == Cut(P(None, "fsdp"), (5, 7), dim=1, padded=8)
    assert (LAYOUT.cuts["odd"].size, LAYOUT.cuts["odd"].padding) == (7, 5)
    assert LAYOUT.cuts["in"] == Cut(P(None, "fsdp"), (8, 24), dim=1, padded=24)
    assert LAYOUT.cuts["bias"] == Cut(P(), (1, 7))
    assert LAYOUT.whole == {"in": False, "out": False, "odd": False, "bias": True}
    assert LAYOUT.padding == 5
    assert LAYOUT.shardings["out"] == NamedSharding(LAYOUT.mesh, P("fsdp", None))


def test_small_leaves_and_fp8_scales_stay_whole():
    scales = {"fp8_lhs_e4m3_log2_scale": np.zeros(2**15), "w": np.zeros(2**14), "b": np.zeros(2**14 - 1)}
    assert fsdp.layout_of(scales, mesh_of()).whole == {"fp8_lhs_e4m3_log2_scale": True, "w": False, "b": True}


def test_dimensions_that_other_axes_cut_are_left_to_them():
    mesh = mesh_of((2, 4), ("fsdp", "tensor"))
    params = {"up": np.ones((8, 64)), "norm": np.ones(64), "all": np.ones((8, 64))}
    specs = {"up": P(None, "tensor"), "norm": P(), "all": P("tensor", None)}
    layout = fsdp.layout_of(params, mesh, specs=specs, min_size=1)
    assert layout.specs == {"up": P("fsdp", "tensor"), "norm": P("fsdp"), "all": P("tensor", "fsdp")}
    along_tensor = fsdp.layout_of(params, mesh, specs=P("tensor"), min_size=1)
    assert along_tensor.whole == {"up": False, "norm": True, "all": False}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_padding_comes_off_as_it_went_on(axis_type):
    """On axes of the kind that `jax.make_mesh` makes by default, too."""
    layout = fsdp.layout_of(PARAMS, mesh_of(axis_type=axis_type), min_size=20)
    padded = fsdp.pad(PARAMS, layout)
    assert padded["odd"].shape == (5, 8) and not np.any(padded["odd"][:, 7])
    assert fsdp.pad({**PARAMS, "odd": PARAMS["odd"].astype(np.float16)}, layout)["odd"].dtype == jnp.float16
    placed = jax.device_put(padded, layout.shardings)
    trim = functools.partial(fsdp.trim, layout=layout)
    for trimmed in (trim(padded), trim(placed), jax.jit(trim)(placed)):
        assert_moved(jax.tree.map(np.asarray, trimmed), PARAMS)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("bits", [None, 16])
def test_state_is_padded_and_trimmed_as_its_params(bits):
    """From 8 devices to 4: another padding."""
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "bf16", remainder_bits=bits)
    params, init = jaxmp.get_policy("bf16").cast_to_param(PARAMS), jax.jit(tx.init)
    job = {"params": params, "opt_state": init(PARAMS), "norm": np.ones(7, np.float32)}
    padded = fsdp.pad(job, LAYOUT)
    assert optax.tree.get(padded["opt_state"], "mu")["odd"].shape == (5, 8)
    (master,) = jax.tree.leaves(padded["opt_state"].master_params["odd"])
    assert master.shape == padded["params"]["odd"].shape == (5, 8)
    assert padded["norm"].shape == (7,)
    assert_exact(padded["opt_state"], init(fsdp.pad(PARAMS, LAYOUT)))
    assert_moved(fsdp.trim(padded, LAYOUT), job)
    with pytest.raises(ValueError, match=r"a padded leaf must have length 8.*\(5, 7\) at opt_state/.*/odd"):
        fsdp.trim(job, LAYOUT)


@pytest.mark.thorough(0)
def test_moments_in_8_bits_are_not_padded():
    tx = jaxmp.compress_moments(optax.adam(1e-2), jnp.int8)
    init = jax.jit(tx.init)
    odd = {"w": np.ones((1023, 1056), np.float32)}
    other = fsdp.layout_of(odd, jax.make_mesh((5,), ("fsdp",), devices=jax.devices()[:5]), min_size=1)
    with pytest.raises(ValueError, match="moments in 8 bits cannot be padded; got them at .*/w/codes"):
        fsdp.pad(init(odd), other)
    even = {"w": np.ones((64, 256), np.float32)}  # cut along the axis whose neighbours share scales, and not padded
    layout, state = fsdp.layout_of(even, mesh_of(), min_size=1), init(even)
    for changed in (fsdp.pad((even, state), layout), fsdp.trim((even, state), layout)):
        assert_moved(changed, (even, state))


WRONG = {
    "axis": (lambda: fsdp.layout_of(PARAMS, mesh_of(), "model"), "got 'model', and the mesh has 'fsdp'"),
    "own_axis": (lambda: fsdp.layout_of(PARAMS, mesh_of(), specs=P("fsdp")), r"at bias. Leave out 'fsdp'"),
    "rank": (lambda: fsdp.layout_of(PARAMS, mesh_of(), specs=P(None, None, None)), r"specs must fit the leaf.*at bias"),
    "unknown_axis": (lambda: fsdp.layout_of(PARAMS, mesh_of(), specs=P("tensor")), r"'tensor' \(in specs at bias\)"),
    "specs": (lambda: fsdp.layout_of(PARAMS, mesh_of(), specs={"in": P()}), "specs must be a tree of PartitionSpecs"),
    "twice": (
        lambda: fsdp.pad(fsdp.pad(PARAMS, LAYOUT), LAYOUT),
        r"an unpadded leaf must have length 7 in dimension 1.*\(5, 8\) at odd",
    ),
    "never": (lambda: fsdp.trim(PARAMS, LAYOUT), r"a padded leaf must have length 8 in dimension 1.*\(5, 7\) at odd"),
    "tree": (lambda: fsdp.pad({"in": PARAMS["in"]}, LAYOUT), "bias is in the layout only. Make one for this tree"),
    "jit": (
        lambda: fsdp.gather(fsdp.pad(PARAMS, LAYOUT), LAYOUT, reduce_dtype=jnp.float32),
        "reduce_dtype= and predivide= need jax.shard_map.*is not bound. Leave both out",
    ),
    "unbound": (lambda: fsdp.reduce_gradients(PARAMS, LAYOUT), "axis name 'fsdp' is not bound here"),
    "part": (
        lambda: jax.shard_map(lambda p: fsdp.gather(p, LAYOUT), mesh=LAYOUT.mesh, in_specs=P(), out_specs=P())(PARAMS),
        r"a device's part of a leaf must have length 3 in dimension 1; got shape \(8, 24\) at in",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name):
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()


MATRICES = {"in": PARAMS["in"], "out": PARAMS["out"]}
PAIR = fsdp.layout_of(MATRICES, mesh_of(), min_size=1)
X = jnp.ones((16, 8))


def pair_loss(params, x):
    return jnp.mean((jnp.tanh(x.astype(params["in"].dtype) @ params["in"]) @ params["out"]).astype(jnp.float32))


def spread(f, out_specs=PAIR.specs, check_vma=True):
    return jax.shard_map(f, mesh=PAIR.mesh, in_specs=(PAIR.specs, ROWS), out_specs=out_specs, check_vma=check_vma)


TX = jaxmp.mixed_precision(optax.sgd(1.0), POLICY, loss_scale=1.0)
STATE = TX.init({})


# Training


def model(params, x):
    """A loop reads the gathered weights of its first layer."""
    x = x.astype(params["in"].dtype).reshape(2, -1, 8)
    x = jax.lax.map(lambda rows: jnp.tanh(rows @ params["in"]), x).reshape(-1, 24)
    return (jnp.tanh(x @ params["out"]) @ params["odd"] + params["bias"]).astype(jnp.float32)


def whole_loss(params, batch):
    return jnp.mean((model(params, batch["x"]) - batch["y"]) ** 2)


def cut_loss(params, batch):
    return whole_loss(fsdp.gather(params, LAYOUT), batch)


def optimizer(**where):
    counted = jaxmp.count_zeros(**where, **({"padding": LAYOUT.padding} if where else {}))
    clipped = jaxmp.clip_by_global_norm(1.0, **where)
    inner = optax.chain(clipped, counted, optax.adamw(1e-2, eps=1e-3))
    scale = jaxmp.DynamicLossScale(1024.0, growth_interval=2, hysteresis=1)
    return jaxmp.mixed_precision(inner, POLICY, loss_scale=scale)


@functools.cache
def batches():
    rng = np.random.default_rng(1)
    drawn = [{"x": rng.normal(size=(16, 8)), "y": rng.normal(size=(16, 7))} for _ in range(5)]
    drawn[2]["x"][5, 1] = np.inf  # a row of the third device
    return [jax.tree.map(np.float32, batch) for batch in drawn]


@functools.cache
def run(how):
    """(unpadded params, unpadded masters, metrics of each step, losses, the padded state) of five steps."""
    where = {"axis_name": "fsdp", "replicated": LAYOUT.whole} if how.startswith("shard_map") else {}
    tx = optimizer(**where)

    def step(params, opt_state, batch):
        loss_fn = whole_loss if how == "single" else cut_loss
        loss, grads = jaxmp.value_and_grad(loss_fn)(params, batch, opt_state=opt_state)
        if where:
            grads, loss = fsdp.reduce_gradients(grads, LAYOUT), jax.lax.pmean(loss, "fsdp")
        return *jaxmp.apply_gradients(tx, grads, opt_state, params), loss

    if how == "single":
        params, opt_state = POLICY.cast_to_param(PARAMS), tx.init(PARAMS)
        compiled, trim = jax.jit(step), lambda tree: tree
    else:
        padded = jax.device_put(fsdp.pad(PARAMS, LAYOUT), LAYOUT.shardings)
        shardings = jaxmp.sharding_of(tx, padded, LAYOUT.shardings)
        params, opt_state = POLICY.cast_to_param(padded), jax.jit(tx.init, out_shardings=shardings)(padded)
        lie = LAYOUT.shardings if how != "zero" else jax.tree.map(lambda _: NamedSharding(LAYOUT.mesh, P()), PARAMS)
        params = jax.device_put(params, lie)
        trim = functools.partial(fsdp.trim, layout=LAYOUT)
        if where:
            state = jaxmp.sharding_of(tx, padded, LAYOUT.specs)
            step = jax.shard_map(
                step,
                mesh=LAYOUT.mesh,
                in_specs=(LAYOUT.specs, state, ROWS),
                out_specs=(LAYOUT.specs, state, P()),
                check_vma=how == "shard_map",
            )
            compiled = jax.jit(step)
        else:
            compiled = jax.jit(step, out_shardings=(lie, shardings, None))
    metrics, losses, programs, events = [], [], [], regimes.compile_events()
    for batch in batches():
        if how in ("jit", "zero"):
            batch = jax.device_put(batch, NamedSharding(LAYOUT.mesh, ROWS))
        events.clear()
        params, opt_state, loss = compiled(params, opt_state, batch)
        programs.append(len(events))
        metrics.append(jax.tree.map(np.asarray, jaxmp.get_metrics(opt_state)))
        losses.append(float(loss))
    masters = jaxmp.get_master_params(opt_state, params)
    return trim(params), trim(masters), metrics, losses, (params, masters, programs)


HOW = ["shard_map", "shard_map_unchecked", "jit", "zero"]  # zero: params on every device, only the state is cut
DECISIONS = ("loss_scale", "skipped", "skipped_steps", "growth_count", "hysteresis_left")


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", HOW)
def test_training_is_that_of_one_device(how):
    """State lies as the params do, padding stays zero, and later steps compile nothing."""
    params, masters, metrics, losses, (padded, padded_masters, programs) = run(how)
    one = run("single")
    assert [bool(m["skipped"]) for m in metrics] == [False, False, True, False, False]
    for got, expected in zip(metrics, one[2], strict=True):
        assert_exact({k: got[k] for k in DECISIONS}, {k: expected[k] for k in DECISIONS})
        assert_close(got["grad_norm"], expected["grad_norm"], rtol=2e-3)  # float16 gradients of other microbatches
    assert_close(masters, one[1], atol=2e-4)
    assert_exact(params, jax.tree.map(lambda m: m.astype(jnp.float16), masters))
    np.testing.assert_allclose(losses, one[3], rtol=1e-3)

    for name, param in padded.items():
        assert (param.dtype, padded_masters[name].dtype) == (np.float16, np.float32)
        assert padded_masters[name].sharding.is_equivalent_to(LAYOUT.shardings[name], param.ndim), name
        if how == "zero":
            assert param.is_fully_replicated
        else:
            assert param.sharding.is_equivalent_to(LAYOUT.shardings[name], param.ndim), name
    assert_exact(padded_masters["odd"][:, 7], np.zeros(5, np.float32))
    assert programs[0] > 0 and programs[1:] == [0] * 4


def test_meshes_with_explicit_axes():
    """Where arrays lie is part of their types there, and stays."""
    mesh = mesh_of(axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        layout = fsdp.layout_of(MATRICES, mesh, min_size=1)
        tx = jaxmp.mixed_precision(optax.sgd(1.0), POLICY, loss_scale=8.0)
        cut = jax.device_put(MATRICES, layout.shardings)
        x = jax.device_put(np.asarray(X), NamedSharding(mesh, ROWS))

        @jax.jit
        def step(params, opt_state):
            def loss_fn(params):
                return pair_loss(fsdp.gather(params, layout), x)

            _, grads = jaxmp.value_and_grad(loss_fn)(params, opt_state=opt_state)
            return jaxmp.apply_gradients(tx, grads, opt_state, params)

        params, opt_state = step(POLICY.cast_to_param(cut), tx.init(cut))
        masters = jaxmp.get_master_params(opt_state, params)
    assert {name: tuple(jax.typeof(x).sharding.spec) for name, x in params.items()} == {
        "in": (None, "fsdp"),
        "out": ("fsdp", None),
    }
    one = jax.jit(jax.grad(pair_loss))(POLICY.cast_to_param(MATRICES), X)
    expected = jax.tree.map(lambda p, g: p - np.asarray(g).astype(np.float32), MATRICES, one)
    assert_close(jax.tree.map(np.asarray, masters), expected, atol=2e-3)


def test_zeros_are_counted_once_and_padding_never():
    """Exact: the gradient of a weight that meets a zero input is zero, on every device."""
    grads = jax.tree.map(lambda p: np.float32(p > 0), PARAMS)
    tx = jaxmp.count_zeros(axis_name="fsdp", replicated=LAYOUT.whole, padding=LAYOUT.padding)

    def count(grads):
        return tx.update(grads, tx.init(grads))[1].zero_grads

    spread = jax.shard_map(count, mesh=LAYOUT.mesh, in_specs=(LAYOUT.specs,), out_specs=P())
    expected = sum(np.sum(g == 0) for g in grads.values())
    assert_exact(jax.jit(spread)(fsdp.pad(grads, LAYOUT)), np.float32(expected))


# Loops that were data-parallel


def cut_grads(params, x):
    """Gradients as `fsdp.gather` hands them back, not yet reduced."""
    return jaxmp.value_and_grad(lambda p: pair_loss(fsdp.gather(p, PAIR), x))(params, opt_state=STATE)[1]


def trace(step, **options):
    return jax.eval_shape(spread(step, **options), POLICY.cast_to_param(MATRICES), X)


@pytest.mark.parametrize(("axes", "check_vma"), [("auto", True), ("fsdp", False)])
def test_the_mean_of_a_data_parallel_loop_is_refused(axes, check_vma):
    """It would add the parts of different params, and train on the sum."""

    def step(params, x):
        return jaxmp.reduce_gradients(axes).update(cut_grads(params, x), optax.EmptyState())[0]

    with pytest.raises(ValueError, match="cut over 'fsdp' must not be averaged over it.*fsdp.reduce_gradients"):
        trace(step, check_vma=check_vma)


def test_a_pmean_before_is_seen_where_jax_keeps_track():
    with pytest.raises(ValueError, match="not be averaged over it; got in averaged. Remove jax.lax.pmean"):
        trace(lambda params, x: fsdp.reduce_gradients(jax.lax.pmean(cut_grads(params, x), "fsdp"), PAIR))


def test_another_trees_mean_is_its_own_affair():
    def step(params, x):
        mean = jaxmp.reduce_gradients().update({"other": x.sum(0)}, optax.EmptyState())[0]
        return fsdp.reduce_gradients(cut_grads(params, x), PAIR), mean

    assert trace(step, out_specs=(PAIR.specs, P()))[1]["other"].shape == (8,)


def test_one_step_takes_one_layout_of_the_axis_that_is_bound():
    other = fsdp.layout_of(MATRICES, mesh_of(), min_size=150)  # `out` is whole there
    with pytest.raises(ValueError, match=r"uncut leaf must have shape \(24, 5\).*got \(3, 5\) at out.*Use one layout"):
        trace(lambda params, x: fsdp.reduce_gradients(cut_grads(params, x), other))
    unbound = fsdp.layout_of(MATRICES, mesh_of(names=("shards",)), "shards", min_size=1)
    with pytest.raises(ValueError, match="got 'shards' in a shard_map over fsdp. Use a layout of this mesh"):
        trace(lambda params, x: fsdp.gather(params, unbound))


# What moves


def collectives(f, *args):
    """[(name, dtype of what moves, whether inside of a scan)] of every collective in the jaxpr of `f`."""
    moves = []

    def visit(jaxpr, in_scan):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("all_gather", "reduce_scatter", "psum", "psum_invariant"):
                moves.append((eqn.primitive.name, eqn.invars[0].aval.dtype.name, in_scan))
            for sub in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                inner = getattr(sub, "jaxpr", sub)
                if hasattr(inner, "eqns"):
                    visit(inner, in_scan or eqn.primitive.name == "scan")

    visit(jax.make_jaxpr(f)(*args).jaxpr, False)
    return moves


def moving(loss_fn, params=None, **kwargs):
    def step(params, x):
        _, grads = jaxmp.value_and_grad(loss_fn, **kwargs)(params, x, opt_state=STATE)
        return fsdp.reduce_gradients(grads, PAIR)

    return collectives(spread(step), params or POLICY.cast_to_param(MATRICES), X)


@pytest.mark.parametrize(
    ("params", "options", "gathered", "reduced"),
    [
        ("float16", {"reduce_dtype": jnp.float32}, "float16", "float32"),
        ("float16", {"reduce_dtype": None}, "float16", "float16"),
        ("float32", {"dtype": jnp.bfloat16}, "bfloat16", "bfloat16"),  # the model computes in it
    ],
)
def test_params_move_in_16_bits_and_gradients_as_asked(params, options, gathered, reduced):
    moves = moving(
        lambda p, x: pair_loss(fsdp.gather(p, PAIR, **options), x),
        jax.tree.map(lambda x: x.astype(params), MATRICES),
    )
    assert sorted(moves) == [("all_gather", gathered, False)] * 2 + [("reduce_scatter", reduced, False)] * 2


def test_gradients_are_reduced_in_each_microbatch_or_once_for_all():
    def window(params, x):
        whole = fsdp.gather(params, PAIR)
        _, grads = jaxmp.value_and_grad(pair_loss, accumulate=2)(whole, x, opt_state=STATE)
        return fsdp.reduce_gradients(grads, PAIR, dtype=jnp.float16)

    each = moving(lambda p, x: pair_loss(fsdp.gather(p, PAIR), x), accumulate=2)
    once = collectives(spread(window), POLICY.cast_to_param(MATRICES), X)
    assert sorted(each) == [("all_gather", "float16", True)] * 2 + [("reduce_scatter", "float16", True)] * 2
    assert sorted(once) == [("all_gather", "float16", False)] * 2 + [("reduce_scatter", "float16", False)] * 2


def test_gathered_params_are_freed_and_gathered_again():
    def loss(p, x):
        return pair_loss(fsdp.gather(p, PAIR), x)

    again = moving(jax.checkpoint(loss, policy=fsdp.save_all_but_gathered()))
    everything = moving(jax.checkpoint(loss, policy=jax.checkpoint_policies.everything_saveable))
    assert [name for name, *_ in again].count("all_gather") == 3  # the first layer's input has no gradient
    assert [name for name, *_ in everything].count("all_gather") == 2


def test_float16_sums_of_eight_devices_stay_in_range_with_fsdps_rule():
    """8 * 16384 is beyond float16; divided by 4 before the sum and by 2 after it, it is not. The mean is 16384."""
    w = np.ones(8, np.float16)
    layout = fsdp.layout_of({"w": w}, mesh_of(), min_size=1)

    def grads(predivide):
        def loss_fn(params, x):
            return jnp.sum((fsdp.gather(params, layout, predivide=predivide)["w"] * x).astype(jnp.float32))

        def step(params, x):
            return fsdp.reduce_gradients(jaxmp.value_and_grad(loss_fn)(params, x, opt_state=STATE)[1], layout)

        f = jax.shard_map(step, mesh=layout.mesh, in_specs=(layout.specs, P()), out_specs=layout.specs)
        return jax.jit(f)({"w": w}, np.full(8, 16384.0, np.float16))["w"]

    for predivide in (8.0, 4.0, None):
        assert_exact(grads(predivide), np.full(8, 16384.0, np.float32))
    assert np.all(np.isinf(grads(1.0)))


def test_masters_are_gathered_in_full_precision_for_evaluation():
    tx, padded = jaxmp.mixed_precision(optax.sgd(1.0), POLICY), fsdp.pad(PARAMS, LAYOUT)
    masters = jaxmp.get_master_params(tx.init(padded), POLICY.cast_to_param(padded))

    def whole(params):
        return fsdp.gather(params, LAYOUT)

    specs = jax.tree.map(lambda _: P(), LAYOUT.specs)
    gathered = jax.shard_map(whole, mesh=LAYOUT.mesh, in_specs=(LAYOUT.specs,), out_specs=specs, check_vma=False)
    assert_moved(jax.jit(gathered)(masters), PARAMS)
    assert_moved(jax.jit(whole)(jax.device_put(masters, LAYOUT.shardings)), PARAMS)


def test_arguments_in_the_place_of_others_are_named():
    params, mesh, tx = {"w": jnp.ones((8, 8))}, mesh_of(), optax.adam(1e-3)
    layout = fsdp.layout_of(params, mesh, min_size=1)
    for call, message in {
        lambda: fsdp.layout_of(mesh, params): r"layout_of\(params, mesh\) takes a mesh, .*; got dict",
        lambda: fsdp.gather(layout, params): r"gather\(params, layout\) takes the layout .*; got dict",
        lambda: fsdp.pad(layout, params): r"takes the layout of jaxmp.fsdp.layout_of\(params, mesh\); got dict",
        lambda: jaxmp.sharding_of(params, tx, layout.specs): "got dict as tx, function in params",
        lambda: jaxmp.sharding_of(tx, layout.shardings, params): "got NamedSharding in params, ArrayImpl in shardings",
        lambda: jaxmp.sharding_of(tx, params, layout): "as layout.shardings; got Layout in shardings",
    }.items():
        with pytest.raises(TypeError, match=message):
            call()


@pytest.mark.thorough(0)
def test_cut_inside_a_node_and_whole_between_nodes():
    """HSDP: parts are scattered over four devices, and only parts are summed over nodes."""
    params32 = {"w": np.zeros((32, 48), np.float32), "b": np.zeros((1, 48), np.float32)}
    mesh, policy = mesh_of((2, 4), ("node", "fsdp")), jaxmp.get_policy("bf16")
    layout = fsdp.layout_of(params32, mesh, min_size=64)
    clip = jaxmp.clip_by_global_norm(0.1, axis_name="fsdp", replicated=layout.whole)
    tx = jaxmp.mixed_precision(optax.chain(clip, optax.sgd(0.5, momentum=0.9)), policy)

    def loss_fn(params, x):
        whole = fsdp.gather(params, layout, reduce_dtype=jnp.float32)
        h = (x.astype(jnp.bfloat16) @ whole["w"]).astype(jnp.float32) + whole["b"]
        return jnp.mean(jnp.tanh(h) ** 2)

    def step(params, opt_state, x):
        _, grads = jaxmp.value_and_grad(loss_fn, axis_name=("node", "fsdp"))(params, x, opt_state=opt_state)
        grads, _ = jaxmp.reduce_gradients("node").update(fsdp.reduce_gradients(grads, layout), optax.EmptyState())
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    specs = (layout.specs, jaxmp.sharding_of(tx, params32, layout.specs))
    spread = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P(("node", "fsdp"))), out_specs=specs)
    state = policy.cast_to_param(params32), tx.init(params32)
    text = jax.jit(spread).lower(*state, np.ones((16, 32), np.float32)).compile().as_text()
    scattered = re.findall(r"f32\[(\d+),(\d+)\]\S* reduce-scatter\(", text)
    assert [int(a) * int(b) for a, b in scattered] == [32 * 48 // 4]
    summed = [line.split(" all-reduce(")[0] for line in text.splitlines() if " all-reduce(" in line]
    assert any("[32,12]" in shapes for shapes in summed)  # a part, between nodes
    assert not any("[32,48]" in shapes for shapes in summed)  # never the whole leaf
