"""Planted faults are named by kind and path within 50 steps, and healthy runs of 500 steps stay silent.

Each run is a small real training, compiled as a scan over 100 steps. One step of ten is sampled, as the docs say.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp.monitor import Monitor

EVERY, CHUNK = 10, 100
RNG = np.random.default_rng(3)
X = RNG.normal(size=(512, 16)).astype(np.float32)
LABELS = ((X[:, 0] > 0) * 2 + (X[:, 1] > 0)).astype(np.int32)
TOKENS = np.minimum(RNG.zipf(1.3, size=(512, 9)) - 1, 255).astype(np.int32)  # most rows of 256 are rare
UNUSED = next(row for row in range(256) if row not in TOKENS)
PLACES = np.minimum(np.abs(X[:, 2]) * 2.6, 5).astype(np.int32)
DATA = {"x": X, "label": LABELS, "tokens": TOKENS, "place": PLACES}


class Model(NamedTuple):
    """A loss `(params, state, batch, i) -> (loss, new state)`, its float32 params and its carried state."""

    loss: Callable[..., Any]
    params: Any
    state: Any = ()


class Wide(nn.Module):
    """Layers in a row, of which the middle one may be dead: its relu gives 0."""

    drop: float = 0.0
    norm: Any = nn.LayerNorm
    residual: bool = True

    @nn.compact
    def __call__(self, x, key, alive=1.0):
        for name in ("first", "middle", "last"):
            y = nn.Dense(32, name=name)(x)
            if self.norm is nn.BatchNorm:
                y = nn.BatchNorm(use_running_average=False, name=f"{name}_norm")(y)
            elif self.norm is not None:
                y = nn.LayerNorm(name=f"{name}_norm")(y)
            y = nn.relu(y) * (alive if name == "middle" else 1)
            x = x + y if self.residual and x.shape == y.shape else y
        x = nn.Dropout(self.drop, deterministic=not self.drop)(x, rng=key)
        return nn.Dense(4, name="head")(x)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def wide(policy, drop=0.0, norm=nn.LayerNorm, residual=True, dead_from=None):
    module = Wide(drop, norm, residual)
    key = jax.random.key(0)
    init = jaxmp.autocast(module.init, "fp8") if policy == "fp8" else module.init
    variables = jax.jit(init)(key, X[:32], key)

    def loss(params, state, batch, i):
        variables = {"params": params, "batch_stats": state} if state else {"params": params}
        alive = 1.0 if dead_from is None else (i < dead_from).astype(jnp.float32)
        out, new = module.apply(variables, batch["x"], jax.random.key(i), alive, mutable=["batch_stats"])
        return cross_entropy(out, batch["label"]), new.get("batch_stats", ())

    return Model(loss, variables["params"], variables.get("batch_stats", ()))


class Language(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, 32, name="embed")(tokens) + self.param("places", nn.initializers.normal(0.02), (1, 8, 32))
        mask = nn.make_causal_mask(tokens)
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dense(32, name="down")(nn.gelu(nn.Dense(64, name="up")(nn.LayerNorm()(x))))
        return nn.Dense(256, name="head")(nn.LayerNorm()(x))


class Experts(nn.Module):
    """Six experts, each a module of its own; most steps leave the last one without an example."""

    @nn.compact
    def __call__(self, x, places):
        x = nn.relu(nn.Dense(32, name="stem")(x))
        out = 0.0
        for e in range(6):
            y = nn.Dense(32, name=f"expert_{e}")(x)
            out += jnp.where((places == e)[:, None], nn.relu(y), 0)
        return nn.Dense(4, name="head")(x + out)


def of_module(module, inputs_of, labels_of, policy):
    """A linen module that has params only."""
    params = jax.jit(module.init)(jax.random.key(0), *inputs_of({name: x[:2] for name, x in DATA.items()}))["params"]

    def loss(params, state, batch, i):
        return cross_entropy(module.apply({"params": params}, *inputs_of(batch)), labels_of(batch)), state

    return Model(loss, params)


language = functools.partial(
    of_module, Language(), lambda batch: (batch["tokens"][:, :-1],), lambda batch: batch["tokens"][:, 1:]
)
experts = functools.partial(
    of_module, Experts(), lambda batch: (batch["x"], batch["place"]), lambda batch: batch["label"]
)


def beside(name, value, loss_of, policy):
    """`wide` with one more param, and `loss_of(param, batch, i)` in its loss."""
    own = wide(policy)

    def loss(params, state, batch, i):
        params = dict(params)
        added = loss_of(params.pop(name), batch, i)
        loss, state = own.loss(params, state, batch, i)
        return loss + added, state

    return Model(loss, dict(own.params) | {name: value})


after_a_warmup = functools.partial(  # a second head, whose loss begins after some steps
    beside,
    "second",
    {"kernel": np.float32(RNG.normal(size=(16, 4)) / 4)},
    lambda head, batch, i: jnp.where(i >= 25, cross_entropy(batch["x"] @ head["kernel"], batch["label"]), 0.0),
)
with_temperature = functools.partial(  # a scalar that is larger than float16 can hold
    beside, "temperature", np.float32(7e4), lambda x, batch, i: (1e-6 * x.astype(jnp.float32)) ** 2
)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(16, 32, rngs=rngs), nnx.BatchNorm(32, rngs=rngs)
        self.middle, self.head = nnx.Linear(32, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.first(x)))
        return self.head(x + nnx.relu(self.middle(x)))


def in_nnx(policy):
    graph, params, state = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def loss(params, state, batch, i):
        model = nnx.merge(graph, params, state, copy=True)
        out = model(batch["x"])
        return cross_entropy(out, batch["label"]), nnx.state(model, nnx.BatchStat)

    return Model(loss, params, state)


def frozen_first(inner):
    def labels(params):
        return {name: "frozen" if name.startswith("first") else "trained" for name in params}

    return optax.multi_transform({"trained": inner, "frozen": optax.set_to_zero()}, labels)


def as_it_is(i, x):
    return x


class Fault(NamedTuple):
    """What is planted: changes in step i of what a step reads or makes. By default nothing is wrong."""

    batch: Callable[..., Any] = as_it_is
    loss: Callable[..., Any] = lambda loss: loss
    grads: Callable[..., Any] = as_it_is  # before step_stats
    late: Callable[..., Any] = as_it_is  # after it
    params: Callable[..., Any] = as_it_is  # between two steps
    state: Callable[..., Any] = as_it_is
    carry: Callable[..., Any] = lambda i, new, old: new  # the params and the opt_state with which the loop goes on


def by_updates(tx, grads, opt_state, params):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


class Run(NamedTuple):
    """A training: what is trained by what, and what is wrong with it."""

    make: Callable[[Any], Model]
    policy: str
    inner: Any
    fault: Fault = Fault()
    update: Callable[..., Any] = jaxmp.apply_gradients
    every: int = EVERY
    loss_scale: Any = "default"
    has_masters: bool = True
    watched: bool = False


def watch(run, steps=100):
    """The monitor of a run of which all steps are compiled as one scan."""
    model, policy, fault = run.make(run.policy), jaxmp.get_policy(run.policy), run.fault
    options = {} if run.loss_scale == "default" else {"loss_scale": run.loss_scale}
    tx = jaxmp.mixed_precision(run.inner, policy, **options) if run.has_masters else run.inner

    def step(carry, i):
        params, opt_state, state = carry
        params = fault.params(i, params)
        rows = jax.random.randint(jax.random.key(i), (32,), 0, len(X))
        batch = fault.batch(i, {name: jnp.asarray(x)[rows] for name, x in DATA.items()})
        sampled, loss_fn = i % run.every == 0, fault.loss(model.loss)
        if run.watched:
            inside = jaxmp.monitor.watch_activations(loss_fn, when=sampled)

            def loss_fn(*args):
                (loss, state), seen = inside(*args)
                return loss, (state, seen)

        if run.has_masters:
            grad_fn = jaxmp.value_and_grad(loss_fn, has_aux=True, policy=policy)
            (loss, new_state), grads = grad_fn(params, state, batch, i, opt_state=opt_state)
        else:
            grad_fn = jax.value_and_grad(jaxmp.autocast(loss_fn, policy), has_aux=True)
            (loss, new_state), grads = grad_fn(params, state, batch, i)
        new_state, seen = new_state if run.watched else (new_state, None)
        grads = fault.grads(i, grads)
        options = {"state": state, "activations": seen, "histogram": False}
        stats = jaxmp.monitor.step_stats(grads, opt_state, params, when=sampled, **options)
        new = fault.carry(i, run.update(tx, fault.late(i, grads), opt_state, params), (params, opt_state))
        new_state = fault.state(i, jaxmp.keep_if_skipped(new[1], new_state, state))
        return (*new, new_state), (jaxmp.get_metrics(new[1]), loss, stats)

    params32 = jax.tree.map(jnp.asarray, model.params)
    params = jax.jit(policy.cast_to_param)(params32)
    opt_state = jax.jit(tx.init)(params32 if run.has_masters else params)
    carry, monitor = (params, opt_state, model.state), Monitor(warn=False)
    compiled = jax.jit(lambda carry, steps: jax.lax.scan(step, carry, steps))
    for first in range(0, steps, CHUNK):
        carry, seen = compiled(carry, jnp.arange(first, first + CHUNK))
        metrics, loss, stats = jax.device_get(seen)
        for i in range(CHUNK):
            of_step = jax.tree.map(lambda x, i=i: x[i], stats)
            monitor.update(first + i, {key: x[i] for key, x in metrics.items()}, loss=loss[i], stats=of_step)
    monitor.finish()
    return monitor


def adam(rate=3e-3):
    return optax.chain(jaxmp.clip_by_global_norm(1.0), optax.adam(rate))


WARM = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 50, 500))
HEALTHY = {
    "adam by tx.update, bf16": (wide, "bf16", optax.adam(3e-3)),
    "momentum, fp16, no norm": (functools.partial(wide, norm=None), "fp16", optax.sgd(0.05, momentum=0.9)),
    "fused, bf16": (wide, "bf16", jaxmp.fused_adamw(3e-3, max_norm=1.0)),
    "warm-up and dropout, bf16": (functools.partial(wide, drop=0.5), "bf16", WARM),
    "batch norm, fp16": (functools.partial(wide, norm=nn.BatchNorm), "fp16", optax.adamw(3e-3)),
    "batch norm, nnx, bf16": (in_nnx, "bf16", optax.adam(3e-3)),
    "rare rows, fp16": (language, "fp16", adam(1e-3)),
    "rare experts, every step, fp16": (experts, "fp16", optax.adam(3e-3)),
    "a frozen layer, sgd, fp32": (wide, "fp32", frozen_first(optax.sgd(0.05))),
    "adamw and dropout, fp8": (functools.partial(wide, drop=0.3), "fp8", optax.adamw(3e-3)),
    "a later head, bf16": (after_a_warmup, "bf16", optax.adamw(3e-3)),
    "accumulated, fp16": (wide, "fp16", optax.MultiSteps(adam(), 4)),
}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_of_500_steps_is_silent(name):
    make, policy, inner = HEALTHY[name]
    update = by_updates if "tx.update" in name else jaxmp.apply_gradients
    monitor = watch(Run(make, policy, inner, update=update, every=1 if "every step" in name else EVERY), 500)
    assert not monitor.findings, str(monitor)
    losses = [row["loss"] for row in monitor.steps]
    assert np.mean(losses[-50:]) < np.mean(losses[:20])


# Faults


def every(n, since, value):
    """1, and `value` in each n-th step from a step on."""
    return lambda i: jnp.where((i >= since) & (i % n == 0), value, 1.0)


def since(step, value):
    return every(1, step, value)


def once(step, value):
    return lambda i: jnp.where(i == step, value, 1.0)


def times(factor):
    """All leaves of a tree times `factor(i)`, in their own dtype."""
    return lambda i, tree: jax.tree.map(lambda x: (x.astype(jnp.float32) * factor(i)).astype(x.dtype), tree)


def middle_times(factor):
    """The kernel of the middle layer times `factor(i)`."""

    def change(i, tree):
        kernel = times(factor)(i, tree["middle"]["kernel"])
        return tree | {"middle": tree["middle"] | {"kernel": kernel}}

    return change


def x_times(factor):
    return lambda i, batch: batch | {"x": batch["x"] * factor(i)}


def in_loss(change):
    """The loss sees other params than the step."""
    return lambda loss: lambda params, state, batch, i: loss(change(i, params), state, batch, i)


def detached(i, params):
    return params | {"first": jax.lax.stop_gradient(params["first"])}


def loss_times(factor):
    return lambda loss: lambda *args: (lambda loss, state: (loss * factor, state))(*loss(*args))


def clipped(i, grads):
    """Optax's clip on scaled gradients: in float16 their norm is inf."""
    return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]


def noisy(i, grads):
    noise = 1e-3 * jax.random.normal(jax.random.key(i))
    return jax.tree_util.tree_map_with_path(lambda path, g: g + noise if jaxmp.fp8.is_scale(path) else g, grads)


def bad_state(part, value):
    """One value of the carried arrays that fit is replaced at step 20, once."""

    def bad(i, path, x):
        is_it = part in jax.tree_util.keystr(path)
        return jnp.where((i == 20) & (jnp.arange(x.size).reshape(x.shape) == 1), value, x) if is_it else x

    return lambda i, state: jax.tree_util.tree_map_with_path(functools.partial(bad, i), state)


def bad_row(i, params):
    """NaN in a row of the embedding that no batch reads."""
    table = params["embed"]["embedding"]
    table = jnp.where((i == 35) & (jnp.arange(256)[:, None] == UNUSED), jnp.nan, table)
    return params | {"embed": {"embedding": table}}


def old_from(step):
    return lambda i, new, old: jax.tree.map(lambda a, b: jnp.where(i < step, a, b), new, old)


class Planted(NamedTuple):
    """A fault: the step in which it begins, what must be found ("kind path"), kinds that are also true, and the run."""

    begins: int
    finding: str
    also: str
    run: Run


def planted(begins, finding, policy, inner=optax.adam(3e-3), make=wide, *, also="", **fields):  # noqa: B008
    """`fields` are those of a `Fault` and of a `Run`."""
    fault = Fault(**{name: fields.pop(name) for name in Fault._fields if name in fields})
    return Planted(begins, finding, also, Run(make, policy, inner, fault, **fields))


sgd = optax.sgd(0.05)
from_64, to_the_top = jaxmp.DynamicLossScale(64.0), jaxmp.DynamicLossScale(2.0**16, growth_interval=2)
batch_norm, no_skips = functools.partial(wide, norm=nn.BatchNorm), functools.partial(wide, residual=False)
dead, decays = functools.partial(wide, dead_from=23), optax.adamw(3e-3, weight_decay=0.1)
uphill = times(lambda i: jnp.where((i >= 40) & (i < 44), -60.0, 1.0))
growing = in_loss(middle_times(lambda i: 2.0 ** jnp.clip(i - 30.0, 0, 50)))
halved = middle_times(once(47, 0.5))
MIDDLE = "middle/kernel"
FAULTS = {
    "skips that rise": planted(50, "skips grads", "fp16", batch=x_times(every(4, 50, np.inf)), also="overflow"),
    "a scale at its floor by NaN in the data": planted(
        30, "stuck_scale", "fp16", batch=x_times(since(30, np.nan)), also="overflow skips"
    ),
    "a scale of 2^32 with tiny gradients": planted(
        0, "stuck_scale", "fp16", loss=loss_times(2.0**-50), loss_scale=to_the_top, also="underflow dead_update"
    ),
    "a loss that jumps after a skip": planted(
        40, "loss_jump", "fp16", sgd, grads=times(once(43, np.inf)), late=uphill, loss_scale=from_64
    ),
    "a float16 activation that overflows": planted(
        33,
        "overflow activations/middle",
        "fp16",
        loss=in_loss(middle_times(since(33, 1e5))),
        watched=True,
        also="stuck_scale skips",
    ),
    "a gradient that overflows again and again": planted(
        30, f"overflow grads/{MIDDLE}", "fp16", grads=middle_times(every(5, 30, np.inf)), also="skips"
    ),
    "a detached layer": planted(
        0, "no_gradient grads/first/kernel", "bf16", loss=in_loss(detached), also="no_gradient"
    ),
    "a dead layer": planted(23, f"no_gradient grads/{MIDDLE}", "bf16", decays, dead, also="no_gradient"),
    "scaled gradients that are clipped": planted(0, "no_gradient grads", "fp16", grads=clipped),
    "the same, after the statistics": planted(0, "dead_update params", "fp16", late=clipped),
    "an fp8 tensor that saturates": planted(
        30, "saturation middle/Fp8DotGeneral_0/fp8_rhs_e4m3_log2_scale", "fp8", adam(), loss=growing
    ),
    "fp8 amaxes with noise": planted(0, "spoiled_amaxes", "fp8", adam(), late=noisy),
    "fp8 gradients lost as zeros": planted(0, "lost_gradients", "fp8", adam(), no_skips, loss=loss_times(1e-6)),
    "bfloat16 params without masters": planted(
        0, f"dead_update params/{MIDDLE}", "bf16", optax.sgd(1e-5), has_masters=False, also="dead_update"
    ),
    "inf in BatchNorm of linen": planted(
        20, "overflow state/first_norm/mean", "fp16", make=batch_norm, state=bad_state("first_norm']['mean", jnp.inf)
    ),
    "NaN in BatchNorm of nnx": planted(
        20, "overflow state/norm/mean", "bf16", make=in_nnx, state=bad_state("mean", jnp.nan)
    ),
    "NaN in a param that is rarely used": planted(
        35, "overflow params/embed/embedding", "fp32", optax.sgd(0.1), language, params=bad_row
    ),
    "a param changed by hand between two samples": planted(47, f"stale_master params/{MIDDLE}", "bf16", params=halved),
    "the same, with tx.update": planted(47, f"stale_master params/{MIDDLE}", "fp16", params=halved, update=by_updates),
    "a master beyond float16": planted(0, "saturation params/temperature", "fp16", optax.adam(3e-2), with_temperature),
    "old params and state that come back": planted(35, "dead_update params", "bf16", carry=old_from(35)),
    # A norm that is small, or always the same, may be a healthy one. The call warns of a loss scale that nothing read.
    "gradients that were never scaled": planted(0, "", "fp16", grads=times(lambda i: 2.0**-16)),
}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.filterwarnings("ignore:scaled gradients must not be clipped")
def test_a_fault_is_named_within_50_steps(name):
    begins, finding, also, run = FAULTS[name]
    monitor = watch(run)
    named = {f"{f.kind} {f.path}".strip(): f.step for f in monitor.findings}
    if finding:
        assert begins <= named.pop(finding, -1) <= begins + 50, str(monitor)
    assert {name.split()[0] for name in named} <= set(also.split()), str(monitor)
