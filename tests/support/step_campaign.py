"""Random gradients through the whole optimizer step, in every regime and precision, beside the oracle in NumPy.

    make oracle                       20,000 steps; writes benchmarks/results/oracle.json

A world is one optimizer in one precision and one regime. Each step gets gradients of every magnitude below 2^48, with
zeros of both signs and subnormal numbers, and now and then a larger one, inf or NaN on one device. After each step
every param, master, moment, count and scale is compared with `step_oracle`, and all devices with each other.
"""

import collections
import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import campaigns
import jaxmp
import regimes
import step_oracle
from regimes import DEVICES, alike, guarded, unchanged
from step_oracle import TOO_LARGE, Hyper, ScaleRule

SHAPES = {"w": (8, 4), "vector": (5,), "scalar": (), "empty": (0, 4), "kept": (3,)}
SCALE = ScaleRule(growth_interval=3, hysteresis=2, min_scale=4.0, max_scale=2.0**14)
ANEW = 40  # steps from one initial state


class Precision(NamedTuple):
    policy: str
    remainder_bits: int | None = None
    skip_nonfinite: bool = True


PRECISIONS = {
    "fp32": Precision("fp32"),
    "bf16": Precision("bf16"),
    "bf16-every-step": Precision("bf16", skip_nonfinite=False),
    "fp16": Precision("fp16"),
    "split16": Precision("bf16", 16),
    "split8": Precision("bf16", 8),
}
HYPER = {
    "adam": Hyper("adam", 1e-3),
    "adamw": Hyper("adam", 2e-3, 0.8, 0.99, weight_decay=0.1),
    "sgd": Hyper("sgd", 1e-2),
    "lion": Hyper("lion", 1e-3, 0.9, 0.99, weight_decay=0.01),
}
MOMENTS = {"adam": ("mu", "nu"), "sgd": ("trace",), "lion": ("mu",)}


def optimizer(name: str) -> optax.GradientTransformation:
    """`fused_adamw` and its kin name jaxmp's optimizers, the others optax's."""
    h = HYPER[name.removeprefix("fused_")]
    of_adam, of_lion = (h.learning_rate, h.b1, h.b2, h.eps), (h.learning_rate, h.b1, h.b2)
    return {
        "adam": lambda: optax.adam(*of_adam),
        "adamw": lambda: optax.adamw(*of_adam, weight_decay=h.weight_decay),
        "sgd": lambda: optax.sgd(h.learning_rate, h.b1),
        "lion": lambda: optax.lion(*of_lion, weight_decay=h.weight_decay),
        "fused_adamw": lambda: jaxmp.fused_adamw(*of_adam, weight_decay=h.weight_decay),
        "fused_sgd": lambda: jaxmp.fused_sgd(h.learning_rate, h.b1),
        "fused_lion": lambda: jaxmp.fused_lion(*of_lion, weight_decay=h.weight_decay),
    }[name]()


# Each regime, precision and optimizer several times, and most pairs of them.
WORLDS = (
    ("single", "fp32", "adam"),
    ("single", "bf16", "adamw"),
    ("single", "bf16-every-step", "lion"),
    ("single", "fp16", "fused_adamw"),
    ("single", "split8", "fused_sgd"),
    ("pmap", "fp16", "adamw"),
    ("pmap", "fp32", "sgd"),
    ("pmap", "split16", "fused_lion"),
    ("shard_map", "bf16", "adam"),
    ("shard_map", "fp16", "sgd"),
    ("shard_map", "split8", "fused_adamw"),
    ("shard_map_unchecked", "fp16", "lion"),
    ("shard_map_unchecked", "bf16-every-step", "adamw"),
    ("shard_map_unchecked", "split16", "adam"),
    ("jit_replicated", "fp32", "fused_adamw"),
    ("jit_replicated", "fp16", "adam"),
    ("jit_data", "bf16", "sgd"),
    ("jit_data", "split16", "fused_adamw"),
    ("jit_data", "fp16", "fused_lion"),
    ("jit_fsdp", "bf16-every-step", "adam"),
    ("jit_fsdp", "fp16", "fused_sgd"),
    ("jit_fsdp", "split8", "adamw"),
    ("explicit", "fp32", "lion"),
    ("explicit", "fp16", "adam"),
)


def initial_params() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    params = {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in SHAPES.items()}
    params["w"][0] = (0.0, -0.0, 1e-30, 6e4)
    return params


class World:
    """One optimizer, precision and regime, compiled once."""

    def __init__(self, regime_name: str, precision: str, optimizer_name: str):
        self.regime = regimes.regime_of(regime_name)
        self.precision = PRECISIONS[precision]
        self.hyper = HYPER[optimizer_name.removeprefix("fused_")]
        self.is_fp16 = self.precision.policy == "fp16"
        policy = jaxmp.get_policy(self.precision.policy, keep_fp32=("kept",))
        tx = jaxmp.mixed_precision(
            optimizer(optimizer_name),
            policy,
            loss_scale=jaxmp.DynamicLossScale(2.0**10, **SCALE._asdict()) if self.is_fp16 else None,
            remainder_bits=self.precision.remainder_bits,
            skip_nonfinite=self.precision.skip_nonfinite,
            before=jaxmp.reduce_gradients(),
        )
        params32 = jax.tree.map(jnp.asarray, initial_params())
        params = policy.cast_to_param(params32)
        self.dtypes = {name: np.dtype(x.dtype) for name, x in params.items()}
        self.first = self.regime.place((params, tx.init(params32)))
        self.masters = jax.jit(jaxmp.get_master_params)
        dtypes = self.dtypes

        def step(state: Any, batch: Any, mean: Any) -> Any:
            del mean  # `before` reduces
            params, opt_state = state
            jaxmp.get_loss_scale(opt_state)  # these gradients are scaled already
            grads = {name: jnp.mean(x.astype(jnp.float32), 0).astype(dtypes[name]) for name, x in batch.items()}
            return jaxmp.apply_gradients(tx, grads, opt_state, params), jnp.zeros(())

        self.step = self.regime.compile(step)

    def read(self, state: Any) -> "Seen":
        """The state on the host, from the first device; raises if the devices differ."""
        copies = self.regime.copies(state)
        assert alike(copies), "devices differ"
        params, opt_state = copies[0]
        masters = jax.tree.map(np.asarray, self.masters(opt_state, params))
        moments = {name: optax.tree.get(opt_state, name) for name in MOMENTS[self.hyper.rule]}
        by_name = {"master": masters} | moments
        leaves = {leaf: {name: tree[leaf] for name, tree in by_name.items()} for leaf in SHAPES}
        metrics = {name: np.asarray(x).item() for name, x in jaxmp.get_metrics(opt_state).items()}
        count = 0 if self.hyper.rule == "sgd" else int(optax.tree.get(opt_state, "count"))
        return Seen(params, leaves, count, metrics, (params, guarded(opt_state)))


class Seen(NamedTuple):
    """What a state holds."""

    params: dict[str, Any]
    leaves: dict[str, dict[str, Any]]
    count: int
    metrics: dict[str, Any]
    kept: Any


def draw(rng: np.random.Generator, dtypes: dict[str, Any], injured: bool) -> dict[str, np.ndarray]:
    """Gradients of all devices, [DEVICES, ...], of which the mean is exact: equal ones, or one and zeros.

    `injured`: one of them is inf, NaN, or large: some of the large ones, at the limit too, are usable.
    """
    grads = {}
    for name, shape in SHAPES.items():
        dtype, info = dtypes[name], jnp.finfo(dtypes[name])
        x = rng.normal(size=shape) * 10.0 ** rng.uniform(-8, 3, size=shape)
        single = rng.random(shape) < 0.5
        special = rng.random(shape)
        large = min(float(info.max) * 0.999, TOO_LARGE / 2)
        huge = np.exp(rng.uniform(np.log(1e3), np.log(large), size=shape))
        x = np.where(special < 0.08, huge * np.sign(x), x)
        x = np.where((special > 0.08) & (special < 0.12), float(info.smallest_subnormal) * rng.integers(1, 400), x)
        x = np.where((special > 0.12) & (special < 0.2), -0.0, x)
        single |= np.abs(x) > 1e3
        device = rng.integers(DEVICES, size=shape)
        quantum = 4 * float(info.smallest_subnormal)  # so that a fourth of it is exact
        x = np.where(np.abs(x) < 2.0**10 * quantum, np.rint(x / quantum) * quantum, x)
        here = np.arange(DEVICES).reshape(-1, *[1] * len(shape)) == device
        grads[name] = np.where(here | ~single, x, 0.0).astype(dtype)
    if injured:
        name = str(rng.choice([n for n in SHAPES if n != "empty"]))
        place = tuple(int(rng.integers(n)) for n in SHAPES[name])
        largest = float(jnp.finfo(dtypes[name]).max)
        limit = np.asarray(min(TOO_LARGE * DEVICES, largest)).astype(dtypes[name])  # of the mean; the others are zeros
        below = np.nextafter(limit, np.zeros((), limit.dtype))
        finite = min(float(rng.choice([limit, below, 10.0 ** rng.uniform(14, 38)])), largest)
        grads[name][(slice(None), *place)] = 0.0
        grads[name][(int(rng.integers(DEVICES)), *place)] = rng.choice(
            [np.inf, -np.inf, np.nan] + ([finite, -finite] if largest > TOO_LARGE else [])
        )
    return grads


def means(grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The mean over devices, in the gradients' dtype, as float64."""
    with np.errstate(all="ignore"):
        return {
            name: np.mean(x.astype(np.float64), 0).astype(np.float32).astype(x.dtype).astype(np.float64)
            for name, x in grads.items()
        }


def check(world: World, before: Seen, after: Seen, grads: dict[str, np.ndarray]) -> str:
    """Raises AssertionError where the step was wrong; returns what happened."""
    scale = before.metrics["loss_scale"]
    g = {name: x / scale for name, x in means(grads).items()}
    usable = step_oracle.usable(g.values())
    skip = not usable and world.precision.skip_nonfinite
    assert after.metrics["skipped"] == skip, f"skipped is {after.metrics['skipped']}, gradients usable: {usable}"
    assert after.metrics["skipped_steps"] == before.metrics["skipped_steps"] + skip
    if world.is_fp16:
        names = ("loss_scale", "growth_count", "hysteresis_left")
        expected = step_oracle.next_scale(SCALE, *(before.metrics[name] for name in names), usable)
        assert tuple(after.metrics[name] for name in names) == expected, f"the scale's state, expected {expected}"
    if skip:
        assert unchanged(after.kept, before.kept), "a skipped step changed something"
        return "skipped"
    if world.hyper.rule != "sgd":
        assert after.count == before.count + 1, f"count {before.count} -> {after.count}"
    unit = 2.0**-15 if world.precision.remainder_bits == 8 else 0.0
    for name in SHAPES:
        of_leaf = 0.0 if name == "kept" else unit
        try:
            leaves = step_oracle.check_leaf(
                world.hyper, g[name], before.leaves[name], after.leaves[name], after.count, of_leaf
            )
            split = world.precision.remainder_bits is not None and name != "kept"
            master = after.leaves[name]["master"]
            step_oracle.check_param(after.params[name][~leaves], master[~leaves], ties_away=split)
            if usable:
                assert not leaves.any(), f"{leaves.sum()} elements may leave float32"
                for key, x in after.leaves[name].items():
                    assert np.isfinite(x).all(), f"{key} is not finite"
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}") from e
    return "taken" if usable else "taken on unusable gradients"


@functools.cache
def world_of(index: int) -> World:
    return World(*WORLDS[index])


def run(index: int, count: int, seed: int) -> collections.Counter:
    """Takes `count` steps in a world; how many were taken or skipped. Raises at the first wrong one."""
    world, rng, done = world_of(index), np.random.default_rng((seed, index)), collections.Counter()
    state, before = world.first, world.read(world.first)
    what = ""
    for i in range(count):
        if i % ANEW == 0 or "unusable" in what:
            state, before = world.first, world.read(world.first)
        grads = draw(rng, world.dtypes, injured=rng.random() < 0.25)
        state = jax.block_until_ready(world.step(state, jax.block_until_ready(world.regime.shard(grads)))[0])
        after = world.read(state)
        try:
            what = check(world, before, after, grads)
        except AssertionError as e:
            raise AssertionError(f"{', '.join(WORLDS[index])}, seed {seed}, step {i}: {e}") from e
        done[what] += 1
        before = after
    return done


def main() -> int:
    """The campaign."""

    def row_of(regime: str, precision: str, optimizer: str, steps: dict[str, int]) -> dict[str, Any]:
        return {"regime": regime, "precision": precision, "optimizer": optimizer, "steps": steps}

    return campaigns.over_worlds("step_campaign.py", __doc__, 20_000, "steps", "wrong_steps", WORLDS, run, row_of)


if __name__ == "__main__":
    sys.exit(main())
