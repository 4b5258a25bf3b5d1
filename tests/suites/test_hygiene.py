"""What a step costs beyond its arithmetic: programs, copies, messages between devices; and what a profile shows."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmp
import regimes
from helpers import assert_moved, reductions
from regimes import AXIS, DEVICES, REGIMES, mesh_of, trace_of

F16, F32 = np.float16, np.float32

# The runs of regimes that test_regimes.py has, too, and each framework on one device.
RUNS = [
    *[("single", framework, "fp16", 1) for framework in ("plain", "linen", "nnx")],
    *dict((regime, (regime, *run)) for regime, *run in regimes.SAMPLE).values(),
]


def test_the_runs_have_each_regime():
    assert {run[0] for run in RUNS} == {"single", *REGIMES}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(map(str, run)))
def test_the_second_call_compiles_nothing_and_types_stay(run):
    """Not on a skip, not when the scale moves: dtypes, weak types and shardings are those of the first state."""
    trace = trace_of(*run)
    assert trace.programs[0] > 0
    assert trace.programs[1:] == [0] * (regimes.STEPS - 1)
    for types in trace.types:
        for (aval, sharding), (old, old_sharding) in zip(types, trace.types[0], strict=True):
            assert aval == old and not aval.weak_type
            assert sharding.is_equivalent_to(old_sharding, aval.ndim)


# One update, in the forms that hygiene is looked at in

SIDE = 64
BIG = SIDE * SIDE * 2  # bytes; all that is smaller is a scalar


def make_params(n=3):
    return {f"w{i}": jnp.ones((SIDE, SIDE)) for i in range(n)} | {"norm": jnp.ones((SIDE, SIDE))}


def make_tx(policy):
    inner = optax.chain(jaxmp.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return jaxmp.mixed_precision(inner, policy, loss_scale=8.0)


def make_policy(name):
    return jaxmp.get_policy(name, keep_fp32=("norm",))


def loss_fn(params, x):
    for name in sorted(params):
        x = jnp.tanh(x.astype(params[name].dtype) @ params[name])
    return jnp.mean(x.astype(F32))


def moved(tx, how, state, grads):
    """The optimizer side of a step, written in one way or the other."""
    params, opt_state = state
    if how == "apply_gradients":
        return jaxmp.apply_gradients(tx, grads, opt_state, params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def step_with(tx, how, **options):
    """A whole step; `how` its optimizer side is written."""

    def step(state, x):
        _, grads = jaxmp.value_and_grad(loss_fn, **options)(state[0], x, opt_state=state[1])
        return moved(tx, how, state, grads)

    return step


def big(tree):
    return [x for x in jax.tree.leaves(tree) if x.nbytes >= BIG]


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("name", "how"), [("fp16", "apply_gradients"), ("bf16", "update"), ("fp32", "apply_gradients")]
)
def test_donated_state_is_reused(name, how):
    """A donated buffer that XLA cannot use is a warning, which is an error here; one it does not need stays alive."""
    policy = make_policy(name)
    params32 = make_params()
    tx = make_tx(policy)
    state = (policy.cast_to_param(params32), tx.init(params32))
    x = jnp.ones((2, SIDE))
    compiled = jax.jit(step_with(tx, how), donate_argnums=0).lower(state, x).compile()
    size = sum(leaf.nbytes for leaf in big(state))
    assert size <= compiled.memory_analysis().alias_size_in_bytes <= size + 200
    new = compiled(state, x)
    assert all(leaf.is_deleted() for leaf in big(state))
    for _ in range(2):
        new = compiled(new, x)
    assert bool(jaxmp.all_finite(new))  # what was not computed, too: `jax_debug_nans` looks at all results


counts_copies = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="XLA of jax 0.10 copies what branches hand on, two arrays of each param"
)


def copies_on_eight_devices(step, state, grads):
    """How many arrays of 1 KiB or more a program copies, params and state donated and split over eight devices."""
    state, grads = fsdp(mesh_of(devices=8), (state, grads))
    results = jax.tree.map(lambda x: x.sharding, state)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=results).lower(state, grads).compile()
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", compiled.as_text())
    return sum(np.prod([int(n) for n in shape.split(",")]) >= 512 for shape in shapes)


@counts_copies
@pytest.mark.thorough(1)
@pytest.mark.parametrize(("name", "how"), [("fp16", "apply_gradients"), ("bf16", "update")])
def test_nothing_is_copied_where_devices_share_the_state(name, how):
    policy, tx, params32 = make_policy(name), make_tx(name), make_params(12)
    del params32["norm"]
    params, step = policy.cast_to_param(params32), functools.partial(moved, tx, how)
    assert copies_on_eight_devices(step, (params, tx.init(params32)), params) == 0


@counts_copies
@pytest.mark.thorough(0)
@pytest.mark.parametrize("how", ["apply_gradients", "update"])
def test_multi_steps_inside_copies_no_more_than_by_hand(how):
    inner, policy, params32 = optax.MultiSteps(optax.adamw(1e-2), 4), jaxmp.get_policy("fp16"), make_params(2)
    tx, params = jaxmp.mixed_precision(inner, policy), policy.cast_to_param(params32)

    def by_hand(state, grads):
        params, (masters, inner_state) = state
        grads = jax.tree.map(lambda g: g.astype(F32) / F32(2.0**16), grads)
        taken = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        updates, new_state = inner.update(grads, inner_state, masters)
        new = optax.apply_updates(masters, updates), new_state
        masters, inner_state = jax.tree.map(lambda n, o: jnp.where(taken, n, o), new, (masters, inner_state))
        return jax.tree.map(lambda m, p: m.astype(p.dtype), masters, params), (masters, inner_state)

    ours = functools.partial(moved, tx, how)
    hand = copies_on_eight_devices(by_hand, (params, (params32, inner.init(params32))), params)
    assert 0 < copies_on_eight_devices(ours, (params, tx.init(params32)), params) <= hand


@pytest.mark.parametrize(("name", "from_16_bits"), [("fp16", False), ("bf16", True), ("fp32", False)])
def test_init_shares_no_buffer_with_anything(name, from_16_bits):
    """Two arrays in one buffer cannot both be donated, and a donated param would take its master along."""
    policy = make_policy(name)
    params = make_params()
    if from_16_bits:
        params = policy.cast_to_param(params)
    tx = make_tx(policy)
    first, second = tx.init(params), tx.init(params)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, first, second))]
    assert len(set(pointers)) == len(pointers)
    state = jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=tx, policy=policy)
    pointers = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.opt_state)}
    assert not pointers & {x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state.params))}

    before = jax.tree.map(np.asarray, first)
    jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(params)
    assert_moved(jax.tree.map(np.asarray, first), before)


def fsdp(mesh, tree):
    def spec(x):
        return P(AXIS) if jnp.ndim(x) == 2 else P()

    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), tree)


def test_weakly_typed_params_become_strong_at_the_cast_and_keep_their_sharding():
    """`jnp.full(shape, 1.0)` is weakly typed, the result of an update is not: the second call would compile again."""
    policy = make_policy("fp16")
    tx = make_tx(policy)
    params32 = fsdp(mesh_of(), jax.tree.map(lambda x: jnp.full(x.shape, 1.0), make_params(1)))
    assert all(x.weak_type for x in jax.tree.leaves(params32))
    state = (policy.cast_to_param(params32), tx.init(params32))
    for x in jax.tree.leaves(state):
        assert not jax.typeof(x).weak_type
        # `jnp.zeros_like` of a weakly typed array lies on one device
        assert x.ndim < 2 or x.sharding.is_equivalent_to(params32["w0"].sharding, 2)
    new = jax.eval_shape(step_with(tx, "apply_gradients"), state, jnp.ones((2, SIDE)))
    assert [x.dtype for x in jax.tree.leaves(new)] == [x.dtype for x in jax.tree.leaves(state)]
    assert not any(jax.typeof(x).weak_type for x in jax.tree.leaves(new))


# What goes over the wire


def compile_update(how, n):
    """The program of an update with gradients that are reduced already, over four devices, for n + 1 leaves."""
    policy = make_policy("fp16")
    tx = jaxmp.mixed_precision(optax.sgd(1e-2), policy, skip_if=lambda grads, metrics: metrics["loss_scale"] < 0)
    params32 = {f"w{i}": jnp.ones((4, 2)) for i in range(n)} | {"norm": jnp.ones((4, 2))}
    params = policy.cast_to_param(params32)
    arguments = (params, params, tx.init(params32))

    def update(params, grads, opt_state):
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    if how == "pmap":
        arguments = jax.tree.map(lambda x: np.stack([x] * DEVICES), arguments)
        compiled = jax.pmap(update, AXIS, devices=jax.devices()[:DEVICES])
    elif how == "jit_fsdp":
        arguments, compiled = fsdp(mesh_of(), arguments), jax.jit(update)
    else:
        check = how == "shard_map"
        compiled = jax.jit(jax.shard_map(update, mesh=mesh_of(), in_specs=P(), out_specs=P(), check_vma=check))
    text = compiled.lower(*arguments).compile().as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    return reductions(text)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["pmap", "shard_map", "shard_map_unchecked"])
def test_one_small_all_reduce_for_all_flags_however_many_leaves(how):
    for n in (3, 30) if how == "shard_map" else (3,):
        ((operator, shape),) = compile_update(how, n)
        assert operator == "maximum"
        assert re.fullmatch(r"f32\[[1-4]\]", shape)


def test_sharded_leaves_under_jit_share_one_all_reduce_of_flags():
    """Beside it the count of saturated params has a sum of its own, off the critical path."""
    assert sorted(operator for operator, _ in compile_update("jit_fsdp", 5)) == ["add", "maximum"]


def test_microbatches_of_a_sharded_batch_stay_on_their_devices():
    """Under jit each device keeps its rows: every k-th row goes into a microbatch, and only sums go over the wire."""
    mesh = mesh_of()
    w = jax.device_put(jnp.ones((3, 2), F16), NamedSharding(mesh, P()))
    x = jax.device_put(jnp.arange(16 * 3.0).reshape(16, 3), NamedSharding(mesh, P(AXIS)))
    opt_state = jaxmp.unscale_and_skip(optax.identity(), 1.0).init(w)

    def loss_fn(w, x):
        return jnp.mean((x.astype(F16) @ w).astype(F32)), x

    f = jax.jit(jaxmp.value_and_grad(loss_fn, has_aux=True, accumulate=2))
    text = f.lower(w, x, opt_state=opt_state).compile().as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    (_, rows), _ = f(w, x, opt_state=opt_state)
    rows = np.asarray(rows)
    assert sorted(map(tuple, rows.reshape(16, 3))) == sorted(map(tuple, np.asarray(x)))
    assert_moved(rows[:, ::2], np.stack([np.asarray(x)[0::4], np.asarray(x)[1::4]]))


STAGE = re.compile(r"jaxmp\.\w+")


def test_stages_have_names_in_the_program():
    """A profile reads as the step."""
    policy = make_policy("fp16")
    params32 = {"w": jnp.ones((4, 4)), "norm": jnp.ones((4, 4))}
    tx = jaxmp.mixed_precision(optax.adam(1e-2), policy)
    state = (policy.cast_to_param(params32), tx.init(params32))
    step = step_with(tx, "apply_gradients", accumulate=2)
    traced = jax.jit(step).trace(state, jnp.ones((4, 4)))
    stages = "accumulate unscale check_finite optimizer update_masters write_params"
    names = {f"jaxmp.{stage}" for stage in stages.split()}
    text = traced.lower().compile().as_text()
    assert {stage for name in re.findall(r'op_name="([^"]*)"', text) for stage in STAGE.findall(name)} >= names
    for_gpu = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert set(STAGE.findall(for_gpu)) >= names | {"jaxmp.keep_or_skip"}  # a branch in a program for a CPU
