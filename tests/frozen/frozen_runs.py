"""Builds and executes the frozen runs, with public names of jaxmp only: eight steps each, and what is left of each.

A run is a `World`: a state, one function for a step, one that reads the state. Both modes call the same functions, op
by op under `jax.disable_jit()`, or as one compiled program.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import frozen_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from frozen_cases import Case, dyadic, full
from jax.extend.core import ClosedJaxpr, Jaxpr

import jaxmp

STEPS = 8
LEARNING_RATE = 2.0**-6
FIRST_SCALE, STATIC_SCALE = 2.0**8, 2.0**7
# For skip_if: the step of a spike, its gradient, the factor of a model's data; |g|, or an amax, above the limit skips.
SPIKE_AT, SPIKE, SPIKE_OF_DATA, LIMIT = 4, 32.0, 64.0, 12.0
EVENTS = {
    "none": {},
    "inf": {2: np.inf, 5: -np.inf},
    "nan": {2: np.nan, 5: np.nan},
    "pair": {2: np.inf, 3: np.nan, 6: -np.inf},
}
ROWS, WIDTH, OUT = 16, 8, 4  # of the models
RECIPES = {
    "delayed": jaxmp.fp8.DelayedScaling(amax_history_len=3),
    "current": jaxmp.fp8.CurrentScaling(),
    "block": jaxmp.fp8.BlockScaling(),
}
# Shapes of the params that take given gradients; models have two layers, `a` with a bias, `b` without.
SHAPES: dict[str, Any] = {
    "dict": {"bias": (8,), "norm": {"scale": (8,)}, "w": (8, 8)},
    "boxes": {"bias": (8,), "norm": {"scale": (8,)}, "w": (8, 8)},
    "tuple": ((8, 8), [(), (8,)]),
    "empty": {"bias": (8,), "none": (0, 4), "scale": (), "w": (8, 8)},
}
BIG = (16, 256)  # a leaf that is large enough for moments in 8 bits
KEPT = {"dict": "norm/*", "boxes": "norm/*", "tuple": "1/0", "empty": "scale", "model": "b/*"}  # keep_fp32
FROZEN = ("bias", "1/1", "a/bias")  # by set_to_zero

MOMENTS = ("mu", "nu", "trace", "momentum", "sum_of_squares", "v_row", "v_col", "v", "acc_grads", "ema_params")
COUNTS = ("count", "mini_step", "gradient_step", "compress_count", "ema_count", "ema_weight")
# Elements are no longer held alone, so nothing counts them.
LEFT_OUT = ("kept_elements",)
MEASURED = ("grad_norm", "fp8/max_amax", "ema_weight/0")  # computed floats; all other metrics and counts are decisions

Seen = dict[str, np.ndarray]  # "kind|path" -> what a step left there


class World(NamedTuple):
    """A run, ready to go: where it starts, `(state, batch) -> state`, `state -> Parts`, and a batch for each step."""

    state: Any
    step: Callable[[Any, Any], Any]
    look: Callable[[Any], "Parts"]
    batches: list[Any]


class Parts(NamedTuple):
    """The parts of a state: params, optimizer state, and more that is kept, by name."""

    params: Any
    opt_state: Any
    more: Mapping[str, Any] = MappingProxyType({})


# What deliberate faults replace.


def scaled(gradient: jax.Array, scale: jax.Array) -> jax.Array:
    """A given gradient as `value_and_grad` would return it, but for its dtype."""
    return gradient * scale


def wrapped(inner: Any) -> Any:
    """The optimizer that goes into `mixed_precision`."""
    return inner


def moved_on(before: Parts, after: Parts) -> Parts:
    """The state after a step."""
    return after


# Trees


def key_of(path: Any) -> str:
    """A key path as `a/b/0`, without the names of boxes."""
    names = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path]
    return "/".join(name for name in names if name not in ("value", "raw_value"))


def leaves_of(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path; boxes are opened."""
    return {key_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def by_path(label: Callable[[str], Any]) -> Callable[[Any], Any]:
    """`label` of the path of each leaf of a tree."""
    return lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: label(key_of(path)), tree)


def nodes_of(state: Any) -> Iterator[Any]:
    """All NamedTuples of an optimizer's state, from the outside to the inside."""
    if hasattr(state, "_fields"):
        yield state
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    for child in children:
        yield from nodes_of(child)


def filled(shapes: Any, seed: int, make: Callable[..., np.ndarray], **kwargs: Any) -> Any:
    """A tree of numbers; each leaf has numbers of its own."""
    is_shape = lambda x: isinstance(x, tuple) and all(type(n) is int for n in x)  # noqa: E731
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=is_shape)
    return treedef.unflatten([make(97 * seed + i, shape, **kwargs) for i, shape in enumerate(leaves)])


def shapes_of(case: Case) -> Any:
    shapes = SHAPES[case.tree]
    if case.optimizer in frozen_cases.IN_EIGHT_BITS:
        shapes = shapes | {"big": BIG} if isinstance(shapes, dict) else (*shapes, BIG)
    return shapes


# Optimizers


def optimizer_of(case: Case) -> Any:
    """What goes into `mixed_precision`."""
    rate = LEARNING_RATE
    is_first = by_path(lambda path: path.endswith(("w", "kernel", "0")))
    by_first = by_path(lambda path: "a" if path.endswith(("w", "kernel", "0")) else "b")
    inner = {
        "adamw": lambda: optax.adamw(rate, weight_decay=0.01),
        "sgd": lambda: optax.sgd(rate, 0.9),
        "lion": lambda: optax.lion(rate, 0.9, 0.99, weight_decay=0.01),
        "lamb": lambda: optax.lamb(rate),
        "adafactor": lambda: optax.adafactor(rate, min_dim_size_to_factor=4),
        "multi_transform": lambda: optax.multi_transform({"a": optax.adamw(rate), "b": optax.sgd(rate, 0.9)}, by_first),
        "masked": lambda: optax.chain(optax.masked(optax.scale_by_adam(), is_first), optax.scale(-rate)),
        "clip": lambda: optax.chain(jaxmp.clip_by_global_norm(1.0), jaxmp.count_zeros(), optax.adamw(rate)),
        "schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, rate, 3, 8)),
        "multisteps": lambda: optax.MultiSteps(optax.adamw(rate), 2),
        "fused_adamw": lambda: jaxmp.fused_adamw(rate, weight_decay=0.01, max_norm=1.0),
        "fused_lion": lambda: jaxmp.fused_lion(rate),
        "fused_sgd": lambda: jaxmp.fused_sgd(rate, max_norm=2.0),
        "int8": lambda: jaxmp.compress_moments(optax.adamw(rate), jnp.int8),
        "fused_int8": lambda: jaxmp.fused_adamw(rate, state_dtype=jnp.int8),
        "fused_e4m3": lambda: jaxmp.fused_sgd(rate, state_dtype=jnp.float8_e4m3fn),
        "bf16_moments": lambda: jaxmp.compress_moments(optax.sgd(rate, 0.9), jnp.bfloat16),
        "ema": lambda: optax.adamw(rate),
    }[case.optimizer]()
    if case.masters == "frozen":
        frozen = by_path(lambda path: "frozen" if path in FROZEN else "train")
        inner = optax.multi_transform({"train": inner, "frozen": optax.set_to_zero()}, frozen)
    if case.optimizer == "ema":
        inner = optax.chain(inner, jaxmp.ema_params(0.9))
    return wrapped(inner)


def loss_scale_of(case: Case) -> Any:
    """For `mixed_precision`; None: no scale."""
    if case.scale in frozen_cases.PRESETS:
        return jaxmp.DynamicLossScale.preset(case.scale, initial_scale=FIRST_SCALE, growth_interval=2)
    if case.scale in ("dynamic", "shared"):
        return jaxmp.DynamicLossScale(FIRST_SCALE, growth_interval=2, hysteresis=2)
    return STATIC_SCALE if case.scale == "static" else None


def policy_of(case: Case) -> jaxmp.Policy:
    tree = case.tree if case.takes_given_gradients or case.tree in ("tuple", "empty") else "model"
    return jaxmp.get_policy(case.policy, keep_fp32=(KEPT[tree],) if case.keep == "some" else ())


def is_spike(grads: Any, metrics: dict[str, Any]) -> jax.Array:
    """The user's own reason to skip a step."""
    large = [jnp.any(jnp.abs(g) > LIMIT) for g in jax.tree.leaves(grads) if g.size]
    return functools.reduce(jnp.logical_or, large, metrics["fp8/max_amax"] > 4 * LIMIT)


def tx_of(case: Case) -> Any:
    remainder_bits = {"split16": 16, "split8": 8}.get(case.masters)
    if case.way == "scaler":
        return jaxmp.keep_master_params(optimizer_of(case), policy_of(case), remainder_bits=remainder_bits)
    return jaxmp.mixed_precision(
        optimizer_of(case),
        policy_of(case),
        loss_scale=1.0 if case.scale == "shared" else loss_scale_of(case),
        recipe=RECIPES.get(case.recipe),
        skip_nonfinite=case.skip != "off",
        skip_if=is_spike if case.skip == "skip_if" else None,
        remainder_bits=remainder_bits,
    )


# Models: two layers and a square, whose dtypes they name themselves


def compute_dtype_of(case: Case) -> Any:
    return {"fp32": jnp.float32, "fp16": jnp.float16}.get(case.policy, jnp.bfloat16)


class LinenNet(nn.Module):
    dtype: Any
    recipe: Any
    boxed: bool
    wide_kernels: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        make: Any = nn.initializers.zeros_init()
        options: dict[str, Any] = {"kernel_init": nn.with_partitioning(make, (None, None)) if self.boxed else make}
        if self.recipe is not None:
            options["dot_general_cls"] = functools.partial(jaxmp.linen.Fp8DotGeneral, recipe=self.recipe)
            if self.wide_kernels:
                options["promote_dtype"] = jaxmp.fp8.promote_all_but_kernel
        h = nn.relu(nn.Dense(WIDTH, dtype=self.dtype, name="a", **options)(x))
        return nn.Dense(OUT, dtype=self.dtype, use_bias=False, name="b", **options)(h)


class NnxNet(nnx.Module):
    def __init__(self, dtype: Any, recipe: Any):
        options: Any = lambda: {} if recipe is None else {"dot_general": jaxmp.nnx.Fp8DotGeneral(recipe)}  # noqa: E731
        make: Any = {"kernel_init": nnx.initializers.zeros_init(), "rngs": nnx.Rngs(0), "dtype": dtype}
        self.a = nnx.Linear(WIDTH, WIDTH, **make, **options())
        self.b = nnx.Linear(WIDTH, OUT, use_bias=False, **make, **options())

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(nnx.relu(self.a(x)))


def with_numbers(params: Any) -> Any:
    """`params`, with numbers in place of all weights; fp8 scales stay."""

    def numbers(path: Any, x: Any) -> Any:
        seed = sum(map(ord, key_of(path)))
        return x if jaxmp.fp8.is_scale(path) else jnp.asarray(full(seed, x.shape))

    return jax.tree_util.tree_map_with_path(numbers, params)


def plain_apply(case: Case, params: Any, x: jax.Array) -> jax.Array:
    """The model whose params are a dict, or tuples and scalars, made by hand."""
    dtype = compute_dtype_of(case)
    leaves = leaves_of(params)
    names = ("0", "1/1", "1/0") if case.tree == "tuple" else ("w", "bias", "scale")
    w, bias, scale = (leaves[name] for name in names)
    h = jax.lax.dot(x.astype(dtype), w.astype(dtype)).astype(jnp.float32)
    return nn.relu(h * scale.astype(jnp.float32)) + bias.astype(jnp.float32)[None]


def accumulate_of(case: Case) -> dict[str, Any]:
    return {"accumulate": 4, "accumulate_argnums": (1, 2)} if case.accumulate == "4" else {}


def squared_error(out: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((out.astype(jnp.float32) - y[:, : out.shape[1]]) ** 2)


# Batches


def batches_of(case: Case) -> list[Any]:
    """Gradients, or data of a model, of each step; some with a spike or what is not finite in them."""
    make = _given_batch if case.takes_given_gradients else _batch_of_data
    return [make(case, i, case.skip == "skip_if" and i == SPIKE_AT, EVENTS[case.events].get(i)) for i in range(STEPS)]


def _given_batch(case: Case, i: int, is_spike: bool, bad: float | None) -> list[np.ndarray]:
    leaves = jax.tree.leaves(filled(shapes_of(case), 100 + i, dyadic))
    leaves = [np.sign(x) * np.minimum(np.abs(x), 0.75) if x.shape == BIG else x for x in leaves]
    target = leaves[i % len(leaves)] if leaves[i % len(leaves)].size else leaves[-1]
    if is_spike:
        leaves[0].reshape(-1)[-1] = SPIKE
    if bad is not None:
        target.reshape(-1)[0] = bad
    return leaves


def _batch_of_data(case: Case, i: int, is_spike: bool, bad: float | None) -> dict[str, np.ndarray]:
    x, y = dyadic(200 + i, (ROWS, WIDTH), largest=7), dyadic(300 + i, (ROWS, WIDTH), largest=7)
    if is_spike:
        # Delayed scaling saturates a gradient that grows at once; a large input shows in amaxes a step later.
        x, y = (x * SPIKE_OF_DATA, y) if case.recipe == "delayed" else (x, y * SPIKE_OF_DATA)
    if bad is not None:
        x[9, 3] = bad
    return {"x": x, "y": y}


# Worlds


@functools.lru_cache(maxsize=2)
def world_of(case: Case) -> World:
    """The run, from its first state."""
    if case.tree == "nnx":
        return _nnx_world(case)
    tx, policy = tx_of(case), policy_of(case)
    params32, loss_fn = _params_and_loss(case)
    params = policy.cast_to_param(params32)

    def gradients(params: Any, batch: Any, opt_state: Any) -> Any:
        if not case.takes_given_gradients:
            grad = jaxmp.value_and_grad(loss_fn, **accumulate_of(case))
            return grad(params, batch["x"], batch["y"], opt_state=opt_state)[1]
        return given(params, batch, jaxmp.get_loss_scale(opt_state))

    if case.scale == "shared":
        return _shared_world(case, tx, params32, params, gradients)
    if case.way == "scaler":
        return _scaler_world(case, tx, params32, params)
    if case.way == "linen":
        # A state that carries its policy would run the model's loss in autocast.
        carried = {"params": params32, "policy": policy} if case.takes_given_gradients else {"params": params}
        state = jaxmp.linen.TrainState.create(apply_fn=None, tx=tx, **carried)
        if not case.takes_given_gradients:
            state = state.replace(params=params, opt_state=tx.init(params32))

        def linen_step(state: Any, batch: Any) -> Any:
            new = state.apply_gradients(grads=gradients(state.params, batch, state.opt_state))
            after = moved_on(Parts(state.params, state.opt_state), Parts(new.params, new.opt_state))
            return new.replace(params=after.params, opt_state=after.opt_state)

        return World(state, linen_step, lambda s: Parts(s.params, s.opt_state, {"step": s.step}), batches_of(case))

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        grads = gradients(params, batch, opt_state)
        if case.way == "update":
            updates, new = tx.update(grads, opt_state, params)
            after = Parts(optax.apply_updates(params, updates), new)
        else:
            after = Parts(*jaxmp.apply_gradients(tx, grads, opt_state, params))
        after = moved_on(Parts(params, opt_state), after)
        return after.params, after.opt_state

    return World((params, tx.init(params32)), step, lambda s: Parts(*s), batches_of(case))


def given(params: Any, batch: list[Any], scale: jax.Array) -> Any:
    """The gradients of a batch: scaled, in the dtypes of the params."""
    leaves, treedef = jax.tree.flatten(params)
    return treedef.unflatten([scaled(g, scale).astype(p.dtype) for g, p in zip(batch, leaves, strict=True)])


def _params_and_loss(case: Case) -> tuple[Any, Any]:
    if case.takes_given_gradients or case.tree in ("tuple", "empty"):
        params = jax.tree.map(jnp.asarray, filled(shapes_of(case), 7, full))
        if case.tree == "boxes":
            params["w"] = nn.Partitioned(params["w"], names=(None, None))
        return params, lambda params, x, y: squared_error(plain_apply(case, params, x), y)
    model = LinenNet(compute_dtype_of(case), RECIPES.get(case.recipe), case.tree == "boxes", case.policy == "fp8")
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((ROWS, WIDTH)))["params"]
    params = with_numbers(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    return params, lambda params, x, y: squared_error(model.apply({"params": params}, x), y)


def _shared_world(case: Case, tx: Any, params32: Any, params: Any, gradients: Any) -> World:
    """The params of the case, and one leaf with an optimizer of its own."""
    policy = jaxmp.get_policy(case.policy)
    other_tx = jaxmp.mixed_precision(optax.sgd(LEARNING_RATE), policy, loss_scale=1.0)
    other32 = {"other": jnp.asarray(full(11, (3,)))}
    shared = jaxmp.shared_loss_scale(loss_scale_of(case))
    others = [{"other": dyadic(400 + i, (3,))} for i in range(STEPS)]
    others[1]["other"][2] = np.inf if case.events == "pair" else others[1]["other"][2]
    batches = [{"first": b, "other": o} for b, o in zip(batches_of(case), others, strict=True)]

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, other, other_state, scale_state = state
        grads = gradients(params, batch["first"], scale_state)
        other_grads = given(other, [batch["other"]["other"]], jaxmp.get_loss_scale(scale_state))
        before = Parts(params, opt_state)
        params, opt_state, scale_state = shared.apply_gradients(tx, grads, opt_state, params, scale_state)
        params, opt_state, _ = moved_on(before, Parts(params, opt_state))
        other, other_state, scale_state = shared.apply_gradients(other_tx, other_grads, other_state, other, scale_state)
        return params, opt_state, other, other_state, shared.update(scale_state)

    def look(state: Any) -> Parts:
        params, opt_state, other, other_state, scale_state = state
        of_scale = {f"shared {name}": x for name, x in jaxmp.get_metrics(scale_state).items()}
        of_other = {f"other {name}": x for name, x in jaxmp.get_metrics(other_state).items()}
        return Parts(params, opt_state, of_scale | of_other | {"other": other["other"]})

    state = (params, tx.init(params32), policy.cast_to_param(other32), other_tx.init(other32), shared.init())
    return World(state, step, look, batches)


def _scaler_world(case: Case, tx: Any, params32: Any, params: Any) -> World:
    options: Any = {"enabled": False} if case.scale == "none" else {"loss_scale": loss_scale_of(case)}
    scaler = jaxmp.GradScaler(**options)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, scaler, _ = state
        grads = given(params, batch, scaler.scale(jnp.ones((), jnp.float32)))
        new, new_state, scaler = scaler.step(tx, grads, opt_state, params)
        after = moved_on(Parts(params, opt_state), Parts(new, new_state))
        return after.params, after.opt_state, scaler.update(), scaler.found_inf()

    def look(state: Any) -> Parts:
        params, opt_state, scaler, found_inf = state
        more = {"scale": scaler.get_scale(), "found_inf": found_inf}
        if scaler.is_enabled() and case.scale != "static":
            more |= {name: x for name, x in scaler.state_dict().items() if name.startswith("_")}
        return Parts(params, opt_state, more)

    return World((params, tx.init(params32), scaler, jnp.zeros((), bool)), step, look, batches_of(case))


def _nnx_world(case: Case) -> World:
    tx, policy = tx_of(case), policy_of(case)
    model = NnxNet(compute_dtype_of(case), RECIPES.get(case.recipe))
    nnx.update(model, with_numbers(nnx.state(model, nnx.Param)))
    if case.way == "nnx":
        optimizer: Any = jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy=policy)
    else:
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        jaxmp.nnx.cast_to_param(model, policy)
    graphdef, state = nnx.split((model, optimizer))

    def loss_fn(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return squared_error(model(x), y)

    def parts(model: Any, optimizer: Any) -> Parts:
        return Parts(nnx.as_pure(nnx.state(model, nnx.Param)), nnx.as_pure(optimizer.opt_state))

    def step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        before = parts(model, optimizer)
        grad = jaxmp.nnx.value_and_grad(loss_fn, **accumulate_of(case))
        optimizer.update(model, grad(model, batch["x"], batch["y"], opt_state=optimizer.opt_state)[1])
        done = parts(model, optimizer)
        after = moved_on(before, done)
        if after is not done:
            nnx.update(optimizer.opt_state, nnx.state(after.opt_state))
        return nnx.split((model, optimizer))[1]

    def look(state: Any) -> Parts:
        model, optimizer = nnx.merge(graphdef, state)
        return parts(model, optimizer)._replace(more={"step": optimizer.step[...]})

    return World(state, step, look, batches_of(case))


# What is kept


def read(parts: Parts) -> Seen:
    """All that is kept of a state: by "kind|path"."""
    params, opt_state, more = parts
    found: Seen = {}

    def keep(kind: str, path: str, x: Any) -> None:
        assert f"{kind}|{path}" not in found, f"two arrays are {kind}|{path}"
        found[f"{kind}|{path}"] = np.asarray(x)

    weights = {path: x for path, x in leaves_of(params).items() if not jaxmp.fp8.is_scale(path)}
    for path, x in weights.items():
        keep("params", path, x)
    for path, x in leaves_of(jaxmp.get_master_params(opt_state, params)).items():
        if path in weights:
            keep("masters", path, x)
    scales = jaxmp.fp8.get_scales(params)
    for path, x in scales.items():
        keep("fp8 scales", path, x)
    counts: dict[str, int] = {}
    for node in nodes_of(opt_state):
        for field in node._fields:
            if field in MOMENTS:
                for path, x in leaves_of(getattr(node, field)).items():
                    keep("moments", f"{field}/{path}", x)
            elif field in COUNTS:
                number = counts[field] = counts.get(field, -1) + 1
                keep("counts", f"{field}/{number}", getattr(node, field))
            elif field == "amax_history":
                columns = node.amax_history.T
                for path, column in zip(_columns(scales, len(columns)), columns, strict=True):
                    keep("histories", path, column)
    for name, x in jaxmp.get_metrics(opt_state).items():
        if name not in LEFT_OUT:
            keep("metrics", name, x)
    for name, x in more.items():
        if not name.endswith(LEFT_OUT):
            keep("params" if name == "other" else "metrics", name, x)
    return found


def _columns(scales: dict[str, Any], count: int) -> list[str]:
    """The paths of the scales of a history with `count` columns: those of gradients, the others, or all."""
    backward = [path for path in scales if "grad" in path.rpartition("/")[2]]
    forward = [path for path in scales if path not in backward]
    return next(paths for paths in (backward, forward, list(scales)) if len(paths) == count)


def execute(case: Case, *, compiled: bool) -> list[Seen]:
    """What is kept of each step of the run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gradients that were made here, float16 without a scale, and so on
        world = world_of(case)
        seen, state = [], jax.tree.map(lambda x: x, world.state)  # the variables of nnx change in place
        step = jax.jit(world.step) if compiled else world.step
        for batch in world.batches:
            with jax.disable_jit(not compiled):
                state = step(state, jax.tree.map(jnp.asarray, batch))
            seen.append(read(world.look(state)))
    return seen


def primitives_of(case: Case) -> set[str]:
    """The primitives of a step, each with the dtype of its first operand and of its result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = world_of(case)
        return set(_primitives(jax.make_jaxpr(world.step)(world.state, world.batches[0]).jaxpr))


def _primitives(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr))
        inner = [x for x in leaves if isinstance(x, Jaxpr | ClosedJaxpr)]
        if eqn.primitive.name in ("pallas_call", "inline_mgpu"):  # for a GPU
            continue
        for sub in inner:
            yield from _primitives(getattr(sub, "jaxpr", sub))
        if not inner:
            dtypes = [str(getattr(v.aval, "dtype", "")) for v in (*eqn.invars[:1], *eqn.outvars[:1])]
            yield ":".join([eqn.primitive.name, *dtypes])
