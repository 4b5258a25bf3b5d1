"""One contract for every public transform, and `mixed_precision` around every optimizer of optax.

What users do to an optimizer (jit, vmap, pmap, hyperparameters as state, checkpoints, nnx, shardings, donation) must
work with ours in the same way. The transforms are in `PARTS`, the optimizers in `OPTIMIZERS`.
"""

import functools
import inspect
import warnings
from typing import Any, NamedTuple

import flax.core
import flax.jax_utils
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from optax import contrib

import jaxmp
from helpers import assert_close, assert_exact, assert_moved, assert_same_program, assert_within_ulps, compilations
from regimes import guarded

# One shape for all leaves, so that eager operations compile once; a norm has two dimensions in a stack of layers.
KERNEL = np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(8, 3)
KERNEL[0] = [0.0, -0.0, 1e-7]
PARAMS32 = {"dense": {"kernel": KERNEL}, "norm": {"scale": np.ones((8, 3), np.float32)}}


def inner() -> optax.GradientTransformation:
    return optax.chain(jaxmp.clip_by_global_norm(1.0), jaxmp.count_zeros(), optax.adam(1e-2))


KEEP_NORMS = jaxmp.get_policy("fp16", keep_fp32=("*norm*",))


class Part(NamedTuple):
    """A public transform: how it is made, how params are stored for it, and whether it can skip a step."""

    make: Any
    policy: Any = "fp32"
    skips: bool = True


PARTS = {
    "mixed_precision-fp32": Part(lambda: jaxmp.mixed_precision(inner(), "fp32"), "fp32"),
    "mixed_precision-bf16": Part(lambda: jaxmp.mixed_precision(inner(), "bf16", loss_scale=128.0), "bf16"),
    "mixed_precision-keep_fp32": Part(lambda: jaxmp.mixed_precision(inner(), KEEP_NORMS), KEEP_NORMS),
    "unscale_and_skip": Part(lambda: jaxmp.unscale_and_skip(inner(), 4.0)),
    "keep_master_params": Part(lambda: jaxmp.keep_master_params(inner(), "bf16"), "bf16", skips=False),
    "clip_by_global_norm": Part(lambda: jaxmp.clip_by_global_norm(1.0), skips=False),
    "count_zeros": Part(jaxmp.count_zeros, skips=False),
    "ema_params": Part(lambda: jaxmp.ema_params(0.9), skips=False),
    "reduce_gradients": Part(jaxmp.reduce_gradients, "fp16", skips=False),
}
each_part = pytest.mark.parametrize("name", PARTS)
ALSO = pytest.mark.thorough(0)


class Case(NamedTuple):
    tx: optax.GradientTransformationExtraArgs
    params: Any
    state: Any
    update: Any  # compiled (grads, state, params) -> (updates, state)
    good: Any  # scaled gradients
    bad: Any  # with one inf


def params_for(policy: Any) -> Any:
    return jaxmp.get_policy(policy).cast_to_param(jax.tree.map(jnp.asarray, PARAMS32))


def grads_for(params: Any, *, bad: bool = False) -> Any:
    """Gradients as a backward pass leaves them: scaled, in the params' dtypes; `bad` puts an inf into one element."""
    grads = jax.tree.map(lambda p: (64 * (2 + np.arange(p.size).reshape(p.shape) % 3)).astype(p.dtype), params)
    if bad:
        grads["norm"]["scale"][1, 1] = np.inf
    return jax.tree.map(jnp.asarray, grads)


@functools.cache
def case(name: str) -> Case:
    part = PARTS[name]
    tx = optax.with_extra_args_support(part.make())
    params = params_for(part.policy)
    state = tx.init(jax.tree.map(jnp.asarray, PARAMS32))
    good, bad = grads_for(params), grads_for(params, bad=part.skips)
    if name == "keep_master_params":  # takes unscaled gradients, in float32
        good = bad = jax.tree.map(lambda g: g.astype(jnp.float32), good)
    return Case(tx, params, state, jax.jit(tx.update), good, bad)


def types(tree: Any) -> Any:
    return jax.tree.map(jax.typeof, tree)  # shape, dtype, weak type, sharding


# ---------------------------------------------------------------------------------------------------------------------
# the contract


@pytest.mark.thorough(2)
@each_part
def test_unknown_extra_arguments_change_nothing(name):
    """The program is the same with them."""
    c = case(name)
    plain = jax.make_jaxpr(c.tx.update)(c.good, c.state, c.params)
    more = jax.make_jaxpr(functools.partial(c.tx.update, unknown=jnp.ones(3), another="text"))
    assert str(more(c.good, c.state, c.params)) == str(plain)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: jaxmp.mixed_precision(inner, "fp16"),
        lambda inner: jaxmp.unscale_and_skip(inner, 4.0),
        lambda inner: jaxmp.keep_master_params(inner, "fp16"),
    ],
    ids=["mixed_precision", "unscale_and_skip", "keep_master_params"],
)
def test_extra_arguments_reach_the_inner_transform(wrap):
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(extra_args)
        return updates, state

    tx = wrap(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
    params = params_for("fp16")
    jax.eval_shape(lambda g, p: tx.update(g, tx.init(p), p, value=3.0, unknown="text"), grads_for(params), params)
    assert seen["value"] == 3.0 and seen["unknown"] == "text"


@pytest.mark.parametrize(
    "name", ["unscale_and_skip", *(pytest.param(x, marks=ALSO) for x in PARTS if x != "unscale_and_skip")]
)
def test_eager_and_vmap_equal_jit(name):
    """Of an ensemble under vmap one member overflows and is skipped, the others are not."""
    c = case(name)
    members = [(g, c.state, c.params) for g in (c.good, c.bad, jax.tree.map(lambda x: x * 2, c.good))]
    expected = [c.update(*member) for member in members]
    assert_close(c.tx.update(*members[0]), expected[0], rtol=1e-6, atol=1e-9)
    stack = lambda *xs: np.stack(xs)  # noqa: E731
    of_vmap = jax.jit(jax.vmap(c.tx.update))(*jax.tree.map(stack, *members))
    assert_close(of_vmap, jax.tree.map(stack, *expected), rtol=1e-6, atol=1e-9)


@pytest.mark.thorough(3)
@each_part
def test_the_second_call_compiles_nothing_and_the_state_keeps_its_type(name):
    c = case(name)
    jax.block_until_ready(c.update(c.good, c.state, c.params))
    before = types((c.state, jax.tree.map(lambda p: p.astype(jnp.float32), c.params)))
    state = c.state
    with compilations() as compiled:
        for grads in (c.good, c.bad, c.good):
            updates, state = c.update(grads, state, c.params)
    assert compiled == []
    assert types((state, updates)) == before


@each_part
def test_tree_map_params_finds_the_leaves_that_are_like_params(name):
    c = case(name)
    tagged = optax.tree_map_params(c.tx, lambda x: "param", c.state, transform_non_params=lambda x: "other")
    for path, tag in jax.tree_util.tree_leaves_with_path(tagged):
        key = jax.tree_util.keystr(path)
        assert tag == ("param" if "'dense'" in key or "'norm'" in key else "other"), key
    assert jax.tree.structure(tagged) == jax.tree.structure(c.state)
    assert_moved(optax.tree.map_params(c.tx, lambda x: x, c.state), c.state)


@pytest.mark.parametrize("name", ["mixed_precision-bf16", "mixed_precision-keep_fp32", "keep_master_params"])
def test_tree_map_params_puts_specs_on_masters_and_moments(name):
    """The way in which users shard optimizer state. Leaves without a master are masked, as under `optax.masked`."""
    c = case(name)
    specs = jax.tree.map(lambda x: P("data", *[None] * (x.ndim - 1)), c.params)
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    state_specs = optax.tree_map_params(
        c.tx,
        lambda leaf, spec: leaf if is_masked(leaf) else spec,
        c.state,
        specs,
        transform_non_params=lambda _: P(),
        is_leaf=is_masked,
    )
    assert optax.tree.get(state_specs, "mu") == specs
    masters = optax.tree.get(state_specs, "master_params")
    assert masters["dense"] == specs["dense"]
    has_master = PARTS[name].policy is not KEEP_NORMS
    assert masters["norm"]["scale"] == (specs["norm"]["scale"] if has_master else optax.MaskedNode())


def by_flax(saved, folder):
    del folder
    template = {name: {"state": case(name).state, "params": case(name).params} for name in saved}
    restored = flax.serialization.from_bytes(template, flax.serialization.to_bytes(saved))
    return jax.tree.map(jnp.asarray, restored)


def by_orbax(saved, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "checkpoint", jax.tree.map(ocp.utils.to_shape_dtype_struct, saved))


@pytest.mark.parametrize("through", [by_flax, pytest.param(by_orbax, marks=pytest.mark.thorough(0))])
def test_a_saved_state_goes_on_bit_for_bit(through, tmp_path):
    """All transforms in one checkpoint: params, state and the step after it."""
    saved = {}
    for name in PARTS if through is by_orbax else ["mixed_precision-keep_fp32", "ema_params"]:
        c = case(name)
        _, state = c.update(c.bad, c.update(c.good, c.state, c.params)[1], c.params)
        saved[name] = {"state": state, "params": c.params}
    restored = through(saved, tmp_path)
    assert_moved(restored, saved)
    for name in saved:
        c = case(name)
        again, expected = (c.update(c.good, x[name]["state"], x[name]["params"]) for x in (restored, saved))
        assert_same_program(again, expected)


@pytest.mark.thorough(1)
@each_part
def test_nnx_optimizer(name):
    """`nnx.Optimizer` with an unknown keyword; a skipped step leaves the model alone."""
    part = PARTS[name]
    rngs = nnx.Rngs(0)
    model = nnx.Dict(dense=nnx.Linear(8, 3, use_bias=False, rngs=rngs), norm=nnx.LayerNorm(3, rngs=rngs))
    tx = optax.chain(part.make(), optax.sgd(1.0)) if not part.skips else part.make()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    jaxmp.nnx.cast_to_param(model, part.policy)
    before = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model)))
    grads = jax.tree.map(lambda p: jnp.full_like(p, 64), nnx.state(model, nnx.Param))
    if part.skips:
        bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), grads)
        optimizer.update(model, bad, unknown=1)
        assert bool(jaxmp.get_metrics(optimizer.opt_state)["skipped"])
        assert_moved(nnx.to_pure_dict(nnx.state(model)), before)
    optimizer.update(model, grads, unknown=1)
    after = nnx.to_pure_dict(nnx.state(model))
    assert types(after) == types(before)
    assert not np.array_equal(after["dense"]["kernel"], before["dense"]["kernel"])


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("name", "devices"), [*((name, 8) for name in PARTS), ("mixed_precision-keep_fp32", 1)])
def test_types_are_stable_on_an_explicit_mesh(name, devices):
    """`jax.typeof` (with its sharding) of state and params is the same before and after."""
    part = PARTS[name]
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        tx = optax.with_extra_args_support(part.make())
        spec = P(None, "data") if devices == 1 else P("data")
        params32 = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), PARAMS32)
        params, state = jaxmp.get_policy(part.policy).cast_to_param(params32), tx.init(params32)

        @jax.jit
        def step(grads, state, params):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        after = step(jax.tree.map(lambda p: jnp.full_like(p, 64), params), state, params)
        assert types(after) == types((params, state))


def test_an_optimizer_that_keeps_its_params_shares_no_buffer_with_the_masters():
    tx = jaxmp.mixed_precision(contrib.prodigy(), "bf16")
    state, params = tx.init(jax.tree.map(jnp.asarray, PARAMS32)), params_for("bf16")
    step = jax.jit(functools.partial(jaxmp.apply_gradients, tx), donate_argnums=(1,))
    _, state = step(grads_for(params), state, params)
    assert_close(optax.tree.get(state, "params0"), jax.tree.map(jnp.asarray, PARAMS32))


# ---------------------------------------------------------------------------------------------------------------------
# around every optimizer


def decayed(params: Any) -> Any:
    """A mask made from the full params: a function of every leaf and its path."""
    return jax.tree_util.tree_map_with_path(lambda path, p: p.ndim > 1 and "norm" not in str(path), params)


LABELS = {"dense": {"kernel": "adam"}, "norm": {"scale": "sgd"}}


def loss_at(params: Any) -> Any:
    """The loss that lbfgs, with its line search, and sophia evaluate."""
    return 0.1 * sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(params))


def without_deprecations(f: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return f(*args)


WITH_VALUE = {"polyak_sgd", "momo", "momo_adam", "reduce_on_plateau", "lbfgs"}

OPTIMIZERS = {
    **{
        name: functools.partial(getattr(optax, name), 0.1)
        for name in (
            "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam "
            "nadamw novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum "
            "sm3 yogi"
        ).split()
    },
    **{
        name: functools.partial(getattr(contrib, name), 0.1)
        for name in (
            "acprop ademamix adopt dadapt_adamw dog dowg madgrad momo momo_adam muon prodigy schedule_free_adamw "
            "schedule_free_sgd simplified_ademamix"
        ).split()
    },
    "cocob": contrib.cocob,
    "galore": lambda: contrib.galore(0.1, rank=2),
    "mechanize": lambda: contrib.mechanize(optax.adam(1.0)),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),  # a typed PRNG key in its state
    "noisy_sgd-key": lambda: optax.noisy_sgd(0.1, key=jax.random.key(0)),
    "optimistic_adam": lambda: without_deprecations(optax.optimistic_adam, 0.1),
    "polyak_sgd": optax.polyak_sgd,
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
    "reduce_on_plateau": lambda: optax.chain(optax.adam(0.1), contrib.reduce_on_plateau(patience=1)),
    # sam says that it takes extra arguments and does not: told to be a plain transform, it works
    "sam": lambda: optax.GradientTransformation(*contrib.sam(optax.sgd(0.1), optax.sgd(0.1))),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9),
    "sophia": lambda: contrib.sophia(0.1),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.adam(0.1)),
    "sgd-momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    # masks, labels and schedules that are built from the full params
    "adamw-mask": lambda: optax.adamw(0.1, mask=decayed),
    "adamw-weight_decay_mask": lambda: optax.adamw(0.1, mask=jaxmp.weight_decay_mask),
    "adamw-schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 1, 10)),
    "masked": lambda: optax.chain(optax.masked(optax.add_decayed_weights(0.1), decayed(PARAMS32)), optax.sgd(0.1)),
    "masked-callable": lambda: optax.masked(optax.adam(0.1), decayed),
    "multi_transform": lambda: optax.multi_transform({"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)}, LABELS),
    "multi_transform-callable": lambda: optax.multi_transform({True: optax.adam(0.1), False: optax.sgd(0.1)}, decayed),
    "partition-mixed": lambda: optax.partition({True: contrib.muon(0.1), False: optax.adam(0.1)}, decayed),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 10), mask=decayed
    ),
    "per-leaf-lr": lambda: optax.chain(
        optax.scale_by_adam(), optax.stateless(lambda u, p: jax.tree.map(lambda x, y: -0.1 * (x + 0.0 * y), u, p))
    ),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "clip_agc": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "MultiSteps-1": lambda: optax.MultiSteps(optax.adam(0.1), 1),
}


def optimizer_step(name: str, tx: Any, grads: Any, state: Any, params: Any, value: Any) -> Any:
    extra: dict[str, Any] = {"value": value} if name in WITH_VALUE else {}
    if name == "lbfgs":  # its line search needs the loss as a function of the float32 params
        extra |= {"value_fn": loss_at, "grad": grads}
    if name == "sophia":
        extra |= {"obj_fn": loss_at}
    return jaxmp.apply_gradients(tx, grads, state, params, **extra)


# with loops and branches inside, which eager execution compiles anew at each call; and two plain ones
COMPILED = set("lbfgs muon partition-mixed galore mechanize MultiSteps-1 sophia adamw-mask noisy_sgd".split())


@pytest.mark.thorough(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_survives_an_overflow(name):
    """Good, overflow, good: no error, a skip that changes nothing, finite state, and training that continues."""
    tx = jaxmp.mixed_precision(OPTIMIZERS[name](), KEEP_NORMS)
    step = functools.partial(optimizer_step, name, tx)
    step = jax.jit(step) if name in COMPILED else step
    params32 = jax.tree.map(jnp.asarray, PARAMS32)
    state, params = tx.init(params32), KEEP_NORMS.cast_to_param(params32)
    before = types((params, state))
    good = grads_for(params)
    params, state = step(good, state, params, jnp.float32(1.0))
    skipped_params, skipped_state = step(grads_for(params, bad=True), state, params, jnp.float32(jnp.nan))
    assert_moved(skipped_params, params)
    assert_moved(guarded(skipped_state), guarded(state))
    assert bool(skipped_state.skipped) and int(skipped_state.skipped_steps) == 1
    next_params, next_state = step(good, skipped_state, skipped_params, jnp.float32(0.5))
    assert not bool(next_state.skipped) and int(next_state.skipped_steps) == 1
    assert types((next_params, next_state)) == before
    for path, x in jax.tree_util.tree_leaves_with_path((next_params, next_state)):
        if jnp.issubdtype(x.dtype, jnp.floating):
            assert np.all(np.isfinite(np.asarray(x, np.float64))), jax.tree_util.keystr(path)
    masters = jaxmp.get_master_params(next_state, next_params)
    old_masters = jaxmp.get_master_params(skipped_state, skipped_params)
    assert not np.array_equal(masters["dense"]["kernel"], old_masters["dense"]["kernel"])
    assert_exact(next_params, KEEP_NORMS.cast_to_param(masters))


def test_the_list_of_optimizers_is_complete():
    """Everything in optax that takes a learning rate first is tried, bar what is named here."""
    found = set()
    for module in (optax, contrib):
        for name, f in vars(module).items():
            is_optimizer = inspect.isfunction(f) and not name.startswith(("_", "scale_by_"))
            if is_optimizer and next(iter(inspect.signature(f).parameters), None) == "learning_rate":
                found.add(name)
    per_example_gradients = {"dpsgd"}  # its gradients have a batch axis: test_per_example_gradients
    assert found - per_example_gradients - set(OPTIMIZERS) == set()


def test_per_example_gradients():
    """Differentially private training: gradients with a batch axis that the params lack."""
    private = contrib.differentially_private_aggregate(l2_norm_clip=1.0, noise_multiplier=0.0, key=0)
    tx = jaxmp.mixed_precision(optax.chain(private, optax.sgd(0.1)), "fp16", loss_scale=64.0)
    params = {"w": jnp.ones(3, jnp.float16)}
    state = tx.init(params)
    grads = {"w": jnp.full((2, 3), 64.0, jnp.float16)}
    bad = {"w": grads["w"].at[0, 0].set(jnp.inf)}
    apply = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
    params, state = apply(bad, state, params)
    assert_moved(params, {"w": jnp.ones(3, jnp.float16)})
    params, state = apply(grads, state, params)
    assert params["w"].dtype == jnp.float16 and float(params["w"][0]) < 1.0


# ---------------------------------------------------------------------------------------------------------------------
# fp32 is the inner optimizer

PLAIN = [(name, "eager") for name in ("adamw-mask", "sgd-momentum", "adafactor", "multi_transform")]
PLAIN += [("adamw-mask", "jit")]


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name, how", PLAIN)
def test_fp32_is_the_inner_optimizer(name, how):
    """Op by op to the bit; under jit to the roundings of each step: they are two programs."""
    plain = optax.with_extra_args_support(OPTIMIZERS[name]())
    wrapped = jaxmp.mixed_precision(OPTIMIZERS[name](), "fp32")
    compile_it = jax.jit if how == "jit" else lambda f: f
    plain_update, wrapped_update = compile_it(plain.update), compile_it(wrapped.update)
    params = wrapped_params = jax.tree.map(jnp.asarray, PARAMS32)
    state, wrapped_state = plain.init(params), wrapped.init(params)
    rng = np.random.default_rng(0)
    for step in range(1, 4):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), PARAMS32)
        updates, state = plain_update(grads, state, params)
        wrapped_updates, wrapped_state = wrapped_update(grads, wrapped_state, wrapped_params)
        params = optax.apply_updates(params, updates)
        wrapped_params = optax.apply_updates(wrapped_params, wrapped_updates)
        ours, theirs = (wrapped_params, wrapped_updates, wrapped_state.optimizer_state), (params, updates, state)
        if how == "jit":
            assert_within_ulps(ours, theirs, 4 * step)
        else:
            assert_same_program(ours, theirs)
