"""The ways in which one training step is spread over devices, and three models to spread.

A *job* is a model with its optimizer: an initial state, and a step that is written once,

    step(state, batch, mean) -> (state, loss)

`mean` averages a tree over devices where they are visible (pmap, shard_map) and does nothing where XLA does it (jit). A
*regime* places state and batch on devices, compiles the step, and hands back what each device then holds:
`regime.copies(state)` has one host tree per device of this process, so that devices can be compared.

Everything here works with several processes too: each passes the whole state and the whole batch, of which a regime
takes the part of its own devices.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact, assert_moved

AXIS = "data"
DEVICES = 4
BATCH, FEATURES, HIDDEN, OUTPUTS = 16, 8, 16, 4  # each device gets 4 rows


def mesh_of(axis_type: AxisType = AxisType.Auto, devices: int = DEVICES) -> Mesh:
    return jax.make_mesh((devices,), (AXIS,), axis_types=(axis_type,), devices=jax.devices()[:devices])


def mean_in_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.pmean(x.astype(jnp.float32), AXIS), tree)


def unchanged(after: Any, before: Any) -> bool:
    """Whether nothing was computed between two host trees: they lie alike in memory, -0.0 and NaNs too."""
    pairs = zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
    return all(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs)


def alike(copies: Sequence[Any]) -> bool:
    """Whether one program left the same bits wherever it ran for equal inputs: on each device, or a second time."""
    return all(unchanged(copy, copies[0]) for copy in copies[1:])


def fsdp_spec(x: Any) -> P:
    """Matrices are split along their first axis; all else is on every device."""
    return P(AXIS) if jnp.ndim(x) >= 2 and jnp.shape(x)[0] % DEVICES == 0 else P()


class Regime:
    """One device, with which all other regimes are compared. `axis_name` is the axis that is bound inside the step."""

    name: str = "single"
    axis_name: str | None = None

    def place(self, state: Any) -> Any:
        return jax.tree.map(jnp.asarray, state)

    def shard(self, batch: Any) -> Any:
        return batch

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(functools.partial(step, mean=lambda tree: tree))

    def copies(self, tree: Any) -> list[Any]:
        return [jax.tree.map(np.asarray, tree)]


@dataclasses.dataclass
class Pmap(Regime):
    name: str = "pmap"
    axis_name: str | None = AXIS

    def place(self, state: Any) -> Any:
        """By a pmap that changes nothing: arrays from the host would be another program than those of the last step."""
        copies = jax.tree.map(lambda x: np.stack([np.asarray(x)] * len(self._local_rows())), state)
        return jax.pmap(lambda tree: tree, axis_name=AXIS, devices=jax.devices()[:DEVICES])(copies)

    def shard(self, batch: Any) -> Any:
        return jax.tree.map(
            lambda x: x.reshape(DEVICES, x.shape[0] // DEVICES, *x.shape[1:])[self._local_rows()], batch
        )

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return jax.pmap(_with_common_loss(step), axis_name=AXIS, devices=jax.devices()[:DEVICES])

    def copies(self, tree: Any) -> list[Any]:
        rows = range(len(self._local_rows()))
        return [jax.tree.map(lambda x, i=i: np.asarray(x.addressable_shards[i].data)[0], tree) for i in rows]

    def _local_rows(self) -> list[int]:
        return [i for i, d in enumerate(jax.devices()[:DEVICES]) if d.process_index == jax.process_index()]


@dataclasses.dataclass
class Jit(Regime):
    """Plain jit; arrays come with a sharding, and XLA does the rest."""

    name: str
    param_spec: Callable[[Any], P] = lambda x: P()
    batch_spec: P = dataclasses.field(default_factory=lambda: P(AXIS))
    axis_type: AxisType = AxisType.Auto
    axis_name: str | None = None

    @functools.cached_property
    def mesh(self) -> Mesh:
        return mesh_of(self.axis_type)

    def put(self, tree: Any, spec_of: Callable[[Any], P]) -> Any:
        def put_leaf(x: Any) -> Any:
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, NamedSharding(self.mesh, spec_of(x)), lambda index: x[index])

        return jax.tree.map(put_leaf, tree)

    def place(self, state: Any) -> Any:
        return self.put(state, self.param_spec)

    def shard(self, batch: Any) -> Any:
        return self.put(batch, lambda _: self.batch_spec)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return jax.set_mesh(self.mesh) if self.axis_type == AxisType.Explicit else contextlib.nullcontext()

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        compiled = jax.jit(functools.partial(step, mean=lambda tree: tree))

        def call(state: Any, batch: Any) -> Any:
            with self.scope():
                return compiled(state, batch)

        return call

    def copies(self, tree: Any) -> list[Any]:
        whole = jax.tree.map(
            lambda x: x if x.is_fully_replicated else jax.device_put(x, NamedSharding(self.mesh, P())), tree
        )
        count = len(jax.tree.leaves(whole)[0].addressable_shards)
        return [jax.tree.map(lambda x, i=i: np.asarray(x.addressable_shards[i].data), whole) for i in range(count)]


@dataclasses.dataclass
class ShardMap(Jit):
    check_vma: bool = True
    axis_name: str | None = AXIS

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        specs: Any = {"in_specs": (P(), P(AXIS)), "out_specs": P()}
        return jax.jit(jax.shard_map(_with_common_loss(step), mesh=self.mesh, **specs, check_vma=self.check_vma))


def _with_common_loss(step: Callable[..., Any]) -> Callable[..., Any]:
    def with_common_loss(state: Any, batch: Any) -> Any:
        state, loss = step(state, batch, mean=mean_in_float32)
        return state, jax.lax.pmean(loss, AXIS)

    return with_common_loss


SINGLE = Regime()
REGIMES: dict[str, Regime] = {
    regime.name: regime
    for regime in (
        Pmap(),
        ShardMap("shard_map", check_vma=True),
        ShardMap("shard_map_unchecked", check_vma=False),
        Jit("jit_replicated", batch_spec=P()),
        Jit("jit_data"),
        Jit("jit_fsdp", param_spec=fsdp_spec),
        Jit("explicit", axis_type=AxisType.Explicit),
    )
}


def regime_of(name: str) -> Regime:
    """That of a name; "single": one device."""
    return SINGLE if name == "single" else REGIMES[name]


# What is chosen from all, as (regime, framework, dtype, accumulate): each regime and each framework, in both dtypes.
SAMPLE = (
    ("pmap", "plain", "fp16", 1),
    ("shard_map", "nnx", "fp16", 1),
    ("shard_map_unchecked", "linen", "bf16", 1),
    ("jit_replicated", "linen", "bf16", 1),
    ("jit_data", "nnx", "fp16", 1),
    ("jit_fsdp", "plain", "fp16", 1),
    ("explicit", "plain", "bf16", 2),
    ("shard_map", "fused", "fp16", 1),
    ("jit_fsdp", "fused", "bf16", 1),
)


class Job(NamedTuple):
    """A model with its optimizer: its first state, a pytree of arrays, and a step.

    Of a state, `opt_state` finds the optimizer's; `kept` is what a skipped step must leave alone, all but the loss
    scale and the skip counters; `values` is what is compared between regimes, by name.
    """

    state: Any
    step: Callable[..., Any]
    opt_state: Callable[[Any], Any]
    kept: Callable[[Any], Any]
    values: Callable[[Any], dict[str, Any]]


def optimizer() -> optax.GradientTransformation:
    # eps is large, so that Adam does not blow rounding up where a gradient is nearly zero
    return optax.chain(jaxmp.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))


def loss_scale_of(dtype: str) -> Any:
    """float16 moves its scale within a few steps; bfloat16 has none."""
    return jaxmp.DynamicLossScale(2.0**10, growth_interval=2) if dtype == "fp16" else None


def guarded(opt_state: Any) -> Any:
    """The part of the optimizer's state that must not move on a skip."""
    (state,) = jaxmp._src.step.state.find(opt_state, jaxmp._src.step.state.StepState)
    return state.master_params, state.rounding_count, state.fp8_scales, state.optimizer_state


def squared_error(prediction: Any, y: Any) -> Any:
    return jnp.mean((prediction.astype(jnp.float32) - y) ** 2)


@functools.cache
def make_job(framework: str, dtype: str, axis_name: str | None = None, accumulate: int = 1) -> Job:
    """A small regression model in `framework`; `axis_name` is for BatchNorm's statistics.

    framework: "plain", "linen", "nnx", or "fused": the plain one with an optimizer that writes in place, and with split
    masters for bfloat16.
    """
    if framework in ("plain", "fused"):
        return _plain_job(dtype, accumulate, fused=framework == "fused")
    assert accumulate == 1, "BatchNorm sees other microbatches where each device cuts its own part of the batch"
    return {"linen": _linen_job, "nnx": _nnx_job}[framework](dtype, axis_name)


def plain_params() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    draw = lambda *shape: np.asarray(rng.normal(size=shape) / shape[0] ** 0.5, np.float32)  # noqa: E731
    return {
        "in": {"w": draw(FEATURES, HIDDEN)},
        "ln": {"scale": np.ones((1, HIDDEN), np.float32)},
        "out": {"w": draw(HIDDEN, OUTPUTS)},
    }


def plain_loss(params: Any, batch: Any) -> Any:
    w = params["in"]["w"]
    h = jnp.tanh(batch["x"].astype(w.dtype) @ w).astype(jnp.float32) * params["ln"]["scale"]
    return squared_error(h.astype(w.dtype) @ params["out"]["w"], batch["y"])


def _plain_job(dtype: str, accumulate: int, *, fused: bool) -> Job:
    policy = jaxmp.get_policy(dtype, keep_fp32=("*ln*",))
    inner = jaxmp.fused_adamw(1e-2, eps=1e-3, max_norm=1.0) if fused else optimizer()
    bits = 16 if fused and dtype == "bf16" else None
    options = {"loss_scale": loss_scale_of(dtype), "remainder_bits": bits, "before": jaxmp.reduce_gradients()}
    tx = jaxmp.mixed_precision(inner, policy, **options)
    params32 = jax.tree.map(jnp.asarray, plain_params())

    def step(state: Any, batch: Any, mean: Any) -> Any:
        del mean  # `before` reduces
        params, opt_state = state
        loss, grads = jaxmp.value_and_grad(plain_loss, accumulate=accumulate)(params, batch, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, grads, opt_state, params), loss

    state = (policy.cast_to_param(params32), tx.init(params32))
    return Job(state, step, lambda s: s[1], lambda s: (s[0], guarded(s[1])), lambda s: _values(*s))


def _values(params: Any, opt_state: Any, **more: Any) -> dict[str, Any]:
    return {
        "params": params,
        "masters": jaxmp.get_master_params(opt_state, params),
        "moments": optax.tree.get(opt_state, "mu"),
        "count": optax.tree.get(opt_state, "count"),
        **more,
    }


class LinenNet(nn.Module):
    dtype: Any
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(HIDDEN, use_bias=False, dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype, axis_name=self.axis_name)(x)
        return nn.Dense(OUTPUTS, use_bias=False, dtype=self.dtype)(jnp.tanh(x))


class BatchNormState(jaxmp.linen.TrainState):
    batch_stats: Any = None


def _linen_job(dtype: str, axis_name: str | None) -> Job:
    policy = jaxmp.get_policy(dtype, keep_fp32=("*BatchNorm*",))
    model = LinenNet(policy.compute_dtype, axis_name)
    variables = model.init(jax.random.key(0), jnp.ones((2, FEATURES)))
    state = BatchNormState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=jaxmp.mixed_precision(optimizer(), policy, loss_scale=loss_scale_of(dtype)),
        policy=policy,
        batch_stats=variables["batch_stats"],
    )

    def loss_fn(params: Any, batch_stats: Any, batch: Any) -> Any:
        out, new = model.apply({"params": params, "batch_stats": batch_stats}, batch["x"], mutable=["batch_stats"])
        return squared_error(out, batch["y"]), new["batch_stats"]

    def step(state: BatchNormState, batch: Any, mean: Any) -> Any:
        compute = jaxmp.value_and_grad(loss_fn, has_aux=True)
        (loss, batch_stats), grads = compute(state.params, state.batch_stats, batch, opt_state=state.opt_state)
        return state.apply_gradients(grads=mean(grads), batch_stats=batch_stats), loss

    def kept(state: BatchNormState) -> Any:
        return state.params, state.batch_stats, state.step, guarded(state.opt_state)

    def values(state: BatchNormState) -> dict[str, Any]:
        return _values(state.params, state.opt_state, batch_stats=state.batch_stats, step=state.step)

    return Job(state, step, lambda s: s.opt_state, kept, values)


class NnxNet(nnx.Module):
    def __init__(self, dtype: Any, axis_name: str | None, rngs: nnx.Rngs):
        self.inner = nnx.Linear(FEATURES, HIDDEN, use_bias=False, dtype=dtype, rngs=rngs)
        self.bn = nnx.BatchNorm(HIDDEN, momentum=0.9, dtype=dtype, axis_name=axis_name, rngs=rngs)
        self.outer = nnx.Linear(HIDDEN, OUTPUTS, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.outer(jnp.tanh(self.bn(self.inner(x))))


def _nnx_job(dtype: str, axis_name: str | None) -> Job:
    policy = jaxmp.get_policy(dtype, keep_fp32=("bn*",))
    model = NnxNet(policy.compute_dtype, axis_name, nnx.Rngs(0))
    tx = jaxmp.mixed_precision(optimizer(), policy, loss_scale=loss_scale_of(dtype))
    opt = nnx.Optimizer(model, tx, wrt=nnx.Param)
    jaxmp.nnx.cast_to_param(model, policy)
    graphdef, initial = nnx.split((model, opt))

    def loss_fn(model: NnxNet, batch: Any) -> Any:
        return squared_error(model(batch["x"]), batch["y"])

    def step(state: Any, batch: Any, mean: Any) -> Any:
        model, opt = nnx.merge(graphdef, state)
        before = jaxmp.nnx.snapshot(model)
        loss, grads = jaxmp.nnx.value_and_grad(loss_fn)(model, batch, opt_state=opt.opt_state)
        opt.update(model, mean(grads))
        jaxmp.nnx.restore_if_skipped(opt.opt_state, model, before)
        return nnx.state((model, opt)), loss

    def opt_state(state: Any) -> Any:
        return nnx.as_pure(nnx.merge(graphdef, state)[1].opt_state)

    def model_state(state: Any, kind: Any) -> Any:
        return nnx.as_pure(nnx.state(nnx.merge(graphdef, state)[0], kind))

    def kept(state: Any) -> Any:
        return model_state(state, ...), guarded(opt_state(state))

    def values(state: Any) -> dict[str, Any]:
        params, batch_stats = model_state(state, nnx.Param), model_state(state, nnx.BatchStat)
        return _values(params, opt_state(state), batch_stats=batch_stats)

    return Job(initial, step, opt_state, kept, values)


STEPS = 6
BAD = {1: np.inf, 3: np.nan}  # by step, in the data of one device; with hysteresis 2 the second lowers the scale
BAD_ROW = 5  # of the second device, and of the first process where there are two


def make_batches() -> list[dict[str, Any]]:
    """Regression data for a run of six steps, two of which overflow on one device."""
    batches = []
    for i in range(STEPS):
        rng = np.random.default_rng(i)
        x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
        if i in BAD:
            x[BAD_ROW, 3] = BAD[i]
        batches.append({"x": x, "y": rng.normal(size=(BATCH, OUTPUTS)).astype(np.float32)})
    return batches


class Trace(NamedTuple):
    """What a run did: lists by step; `devices` and `types` begin before the first one.

    `devices[step][device]` is what each device held, `types` are `jax.typeof` of the state's leaves and their
    shardings, `programs` counts what was traced or compiled.
    """

    devices: list[list[Any]]
    losses: list[float]
    types: list[list[Any]]
    programs: list[int]


@functools.cache
def compile_events() -> list[str]:
    """A list that grows with every trace and every compilation of jax."""
    events: list[str] = []

    def listen(name: str, *_: Any, **__: Any) -> None:
        if name.startswith("/jax/core/compile/"):
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return events


@functools.cache
def trace_of(regime_name: str, framework: str, dtype: str, accumulate: int = 1) -> Trace:
    """The run of one job in one regime ("single" for one device) over `make_batches()`."""
    regime = regime_of(regime_name)
    return run_job(regime, make_job(framework, dtype, regime.axis_name, accumulate), make_batches())


def run_job(regime: Regime, job: Job, batches: list[Any]) -> Trace:
    compiled = regime.compile(job.step)
    state = regime.place(job.state)

    def types(state: Any) -> list[Any]:
        return [(jax.typeof(x), getattr(x, "sharding", None)) for x in jax.tree.leaves(state)]

    trace = Trace([regime.copies(state)], [], [types(state)], [])
    events = compile_events()
    for batch in batches:
        batch = jax.block_until_ready(regime.shard(batch))
        events.clear()
        state, loss = jax.block_until_ready(compiled(state, batch))
        trace.programs.append(len(events))
        trace.devices.append(regime.copies(state))
        trace.losses.append(float(regime.copies(loss)[0]))
        trace.types.append(types(state))
    return trace


# What must come out, whatever the regime. bfloat16 has no scale: no counts move.
SKIPPED = [False, True, False, True, False, False]
EXPECTED = {
    "fp16": {
        "loss_scale": [1024.0, 1024.0, 1024.0, 512.0, 512.0, 1024.0],
        "growth_count": [1, 0, 1, 0, 1, 0],
        "hysteresis_left": [2, 1, 1, 0, 0, 2],
    },
    "bf16": {"loss_scale": [1.0] * STEPS, "growth_count": [0] * STEPS, "hysteresis_left": [0] * STEPS},
}
# Devices round their part of a sum apart: some units in the last place of the 16-bit dtype, at values of size one.
TOLERANCE = {"fp16": 4 * 2.0**-10, "bf16": 4 * 2.0**-7}


def check_run(job: Job, dtype: str, devices: list[list[Any]]) -> list[dict[str, np.ndarray]]:
    """Asserts what holds of every run: all devices alike to the bit, the right decisions, skips that change nothing.

    `devices[step][device]` begins before the first step; `dtype` is "fp16" or "bf16". Returns each step's metrics.
    """
    for copies in devices:
        assert len(copies) == DEVICES
        assert alike(copies)
    states = [copies[0] for copies in devices]
    metrics = [metrics_of(job, state) for state in states[1:]]
    assert [bool(m["skipped"]) for m in metrics] == SKIPPED
    assert [int(m["skipped_steps"]) for m in metrics] == np.cumsum(SKIPPED).tolist()
    for name, values in EXPECTED[dtype].items():
        assert [m[name].item() for m in metrics] == values, name
    for before, after, skipped in zip(states[:-1], states[1:], SKIPPED, strict=True):
        if skipped:
            assert_moved(job.kept(after), job.kept(before))
        else:
            assert not unchanged(job.kept(after), job.kept(before))
    return metrics


def check_equal(job: Job, trace: Trace, other_job: Job, other: Trace, tolerance: float) -> None:
    """Asserts that two runs took the same decisions and came to the same values, but for rounding."""
    for got, expected in zip(trace.devices[1:], other.devices[1:], strict=True):
        decisions, other_decisions = metrics_of(job, got[0]), metrics_of(other_job, expected[0])
        for name in ("grad_norm", "largest_gradient"):  # of gradients, which are rounded in another order
            assert_close(decisions.pop(name), other_decisions.pop(name), rtol=tolerance)
        assert_exact(decisions, other_decisions)
        assert_close(job.values(got[0]), other_job.values(expected[0]), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(trace.losses, other.losses, rtol=tolerance, equal_nan=True)


def metrics_of(job: Job, state: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in jaxmp.get_metrics(job.opt_state(state)).items()}
