"""Injected faults: one wrong number in one gradient of one device, and what a step makes of it.

    make faults                       10,000 faults; writes benchmarks/results/faults.json

A *world* is a small model in one parallel regime and one precision. From one state two steps are taken on the same
batch: one uninjured, its *twin*, and one in which a gradient of one device holds inf, NaN, the largest finite number
of its dtype or another huge one (1e3 to 3e38) at a random place. What must hold
(the numbers are those of the design's invariants):

1.  All devices take the same decision and have the same scale; the scale moved by the rule of `step_oracle`.
2.  inf and NaN skip, and so does a gradient that is 2^48 or more when it is reduced and unscaled: params, masters,
    moments, counts and amax histories are bit for bit those before the step. A smaller number does what the twin does:
    everything but the number's own place is bit for bit the twin's, for one compiled step took both. (After some faults
    the twin overflows, too: an fp8 scale has become so small that all else is rounded to 0.)
3.  Nothing that is not finite stands anywhere in params or state; the scale lies within its bounds.
4.  No master moves farther than Adam can move it, whatever gradient it took.
5.  Structure, dtypes and shardings stay, and nothing is compiled again.

The next fault starts from the injured state, so that faults add up; after some it starts anew.
"""

import collections
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

import campaigns
import jaxmp
import regimes
from fp8_model import matmul, scale_leaves
from jaxmp import fsdp
from regimes import DEVICES, alike, guarded, unchanged
from step_oracle import TOO_LARGE, ScaleRule, next_scale

WIDTH, ROWS = 16, 64  # 16 rows on each device: the least that an fp8 GEMM takes
RECIPE = jaxmp.fp8.DelayedScaling(amax_history_len=3)
SCALE = ScaleRule(growth_interval=3, hysteresis=2, min_scale=4.0, max_scale=2.0**14)
ANEW = 40  # faults that add up
KINDS = ("inf", "-inf", "nan", "largest", "huge")
RATE = 1e-3
FARTHEST = 4 * RATE  # Adam moves a weight by at most (1 - b1) / sqrt(1 - b2) = 3.2 times its rate
PRECISIONS = {"fp16": ("fp16", False), "bf16": ("bf16", False), "fp8": ("fp8", True), "fp16+fp8": ("fp16", True)}
MESH = regimes.mesh_of()


class World(NamedTuple):
    """One model in one regime: a compiled `(state, batch with a fault) -> state`, and where it starts.

    `shard` places a batch, `copies` has what each device holds of a state. Of the gradients there are the paths and the
    largest number of each, and how many devices average one, of which one has the fault.
    """

    step: Callable[..., Any]
    state: Any
    shard: Callable[[Any], Any]
    copies: Callable[[Any], list[Any]]
    names: list[str]
    limits: list[float]
    shares: int
    has_scale: bool


def _params(in_fp8: bool) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    leaf = lambda *shape: jnp.asarray(rng.normal(size=shape) / WIDTH**0.5, jnp.float32)  # noqa: E731
    layers = {name: {"w": leaf(WIDTH, WIDTH)} | (scale_leaves() if in_fp8 else {}) for name in ("a", "b")}
    return layers | {"norm": jnp.ones((1, WIDTH))}


def _loss(params: Any, batch: Any, in_fp8: bool, dtype: Any) -> Any:
    def layer(params: Any, x: Any) -> Any:
        return matmul(params, x, RECIPE) if in_fp8 else x @ params["w"].astype(x.dtype)

    h = jnp.tanh(layer(params["a"], batch["x"].astype(dtype)).astype(jnp.float32) * params["norm"])
    return jnp.mean((layer(params["b"], h.astype(dtype)).astype(jnp.float32) - batch["y"]) ** 2)


def _injure(grads: Any, fault: Any) -> Any:
    """`grads` with the fault in them, if this device has one: leaf -1 is none."""
    leaf, place, value = jnp.max(fault["leaf"]), jnp.max(fault["place"]), jnp.sum(fault["value"])
    leaves, treedef = jax.tree.flatten(grads)
    hurt = []
    for i, g in enumerate(leaves):
        here = (jnp.arange(g.size).reshape(g.shape) == place % g.size) & (leaf == i)
        hurt.append(jnp.where(here & jnp.isfinite(g), value.astype(g.dtype), g))  # an overflow of its own stays
    return treedef.unflatten(hurt)


def make_world(regime_name: str, precision: str) -> World:
    """Compiles nothing yet."""
    name, in_fp8 = PRECISIONS[precision]
    policy = jaxmp.get_policy(name, keep_fp32=("norm",))
    params32 = _params(in_fp8)
    scale = jaxmp.DynamicLossScale(2.0**10, **SCALE._asdict()) if name == "fp16" else None
    recipe = RECIPE if in_fp8 else None
    tx = jaxmp.mixed_precision(optax.adam(RATE), policy, loss_scale=scale, recipe=recipe)
    is_fsdp = regime_name == "shard_map_fsdp"
    regime = regimes.Jit("shard_map_fsdp") if is_fsdp else regimes.regime_of(regime_name)
    layout = fsdp.layout_of(params32, MESH, regimes.AXIS, min_size=64) if is_fsdp else None
    bound = is_fsdp or regime.axis_name

    def step(state: Any, batch: Any, mean: Any = None) -> Any:
        del mean
        params, opt_state = state

        def loss_fn(params: Any, batch: Any) -> Any:
            return _loss(fsdp.gather(params, layout) if layout else params, batch, in_fp8, policy.compute_dtype)

        loss, grads = jaxmp.value_and_grad(loss_fn)(params, batch, opt_state=opt_state)
        grads = _injure(grads, batch["fault"])
        if in_fp8 and bound:  # value_and_grad has made amaxes common: so is a wrong one
            grads = _common_amaxes(grads)
        if layout:
            grads = fsdp.reduce_gradients(grads, layout)
        elif bound:
            grads, _ = jaxmp.reduce_gradients().update(grads, optax.EmptyState())
        return jaxmp.apply_gradients(tx, grads, opt_state, params), loss

    state = (policy.cast_to_param(params32), tx.init(params32))
    if layout:
        specs = (layout.specs, jaxmp.sharding_of(tx, params32, layout.specs))

        def body(state: Any, batch: Any) -> Any:
            state, loss = step(state, batch)
            return state, jax.lax.pmean(loss, regimes.AXIS)

        of_body: Any = {"in_specs": (specs, P(regimes.AXIS)), "out_specs": (specs, P())}
        compiled = jax.jit(jax.shard_map(body, mesh=MESH, **of_body, check_vma=True))
        placed = jax.device_put(state, jax.tree.map(lambda s: NamedSharding(MESH, s), specs))
    else:
        compiled, placed = regime.compile(step), regime.place(state)
    params = jax.tree_util.tree_leaves_with_path(state[0])
    return World(
        lambda state, batch: compiled(state, batch)[0],
        placed,
        regime.shard,
        regime.copies,
        [jax.tree_util.keystr(path) for path, _ in params],
        [float(jnp.finfo(x.dtype).max) for _, x in params],
        DEVICES if bound else 1,
        scale is not None,
    )


def _common_amaxes(grads: Any) -> Any:
    def common(path: Any, g: Any) -> Any:
        if not jaxmp.fp8.is_scale(path):
            return g
        bad = jax.lax.pmax((~jnp.isfinite(g)).astype(jnp.float32), regimes.AXIS) > 0
        return jnp.where(bad, jnp.inf, jax.lax.pmax(jnp.where(jnp.isfinite(g), g, 0.0), regimes.AXIS))

    return jax.tree_util.tree_map_with_path(common, grads)


class Fault(NamedTuple):
    """One wrong number."""

    leaf: int
    device: int
    place: int
    kind: str
    exponent: float = 0.0  # of ten, for "huge"

    def value(self, limit: float) -> float:
        """The wrong number, in a gradient whose largest number is `limit`."""
        if self.kind == "huge":
            return min(10.0**self.exponent, limit)
        return limit if self.kind == "largest" else float(self.kind)


def batch_of(rng: np.random.Generator, fault: Fault | None, limits: list[float]) -> dict[str, Any]:
    """A batch for all devices, with a fault or none."""
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    leaf, place, value = np.full(DEVICES, -1, np.int32), np.zeros(DEVICES, np.int32), np.zeros(DEVICES, np.float32)
    if fault is not None:
        leaf[fault.device], place[fault.device] = fault.leaf, fault.place
        value[fault.device] = fault.value(limits[fault.leaf])
    batch = {"x": x, "y": np.tanh(x @ np.eye(WIDTH, k=1, dtype=np.float32))}
    return batch | {"fault": {"leaf": leaf, "place": place, "value": value}}


def check(world: World, before: Any, twin: Any, after: Any, fault: Fault) -> None:
    """Raises AssertionError, with the invariant's number, where a step with a fault did what it must not."""
    is_scale = _is_scale(world.names[fault.leaf])
    befores, twins, afters = (world.copies(state) for state in (before, twin, after))
    assert alike(afters), "1: devices differ"
    old, other, new = befores[0], twins[0], afters[0]
    metrics, old_metrics = (jax.tree.map(np.asarray, jaxmp.get_metrics(state[1])) for state in (new, old))
    skip = bool(jaxmp.get_metrics(other[1])["skipped"]) or is_too_large(world, fault, old_metrics["loss_scale"])
    assert bool(metrics["skipped"]) == skip, f"1: skipped is {metrics['skipped']} for {fault.kind}"
    assert metrics["skipped_steps"] == old_metrics["skipped_steps"] + skip, "1: the count of skips"
    if world.has_scale:
        old_scale, got = (
            tuple(m[name].item() for name in ("loss_scale", "growth_count", "hysteresis_left"))
            for m in (old_metrics, metrics)
        )
        assert got == next_scale(SCALE, *old_scale, finite=not skip), f"1: the scale's state is {got}"
        assert SCALE.min_scale <= got[0] <= SCALE.max_scale, "3: the scale is out of bounds"
    else:
        assert metrics["loss_scale"] == 1.0, "1: a scale where there is none"
    kept = lambda state: (state[0], guarded(state[1]))  # noqa: E731
    if skip:
        assert unchanged(kept(new), kept(old)), "2: a skipped step changed something"
    else:
        differ = _differing(kept(new), kept(other))
        allowed = world.names[fault.leaf]
        for path, places in differ.items():
            own = allowed in path or (is_scale and any(f".{part}" in path for part in _OF_A_SCALE))
            most = RECIPE.amax_history_len if path.endswith(".amax_history") else 1  # it moves on where the twin's is 0
            assert own and places <= most, f"2: {places} places of {path} differ from the twin's"
        _check_moves(kept(new), kept(old))
    for path, x in _by_path(kept(new)).items():
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        assert not is_float or np.all(np.isfinite(x.astype(np.float32))), f"3: {path} is not finite"
    kinds = [[(x.shape, x.dtype, getattr(x, "sharding", None)) for x in jax.tree.leaves(s)] for s in (twin, after)]
    assert kinds[0] == kinds[1], "5: a dtype, shape or sharding changed"
    assert jax.tree.structure(before) == jax.tree.structure(after), "5: the structure changed"


def is_too_large(world: World, fault: Fault, loss_scale: Any) -> bool:
    """Whether no step may be taken on the fault. What the other devices add to it is far below 1e6."""
    value = fault.value(world.limits[fault.leaf])
    if _is_scale(world.names[fault.leaf]):  # an amax: any finite number will do
        return not np.isfinite(value)
    return not abs(value / world.shares / loss_scale) < TOO_LARGE


def _is_scale(path: str) -> bool:
    return any(name in path for name in ("fp8_lhs", "fp8_rhs", "fp8_grad"))


def _by_path(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _check_moves(new: Any, old: Any) -> None:
    """No master moves farther than Adam moves it with consistent moments."""
    before = _by_path(old)
    for path, x in _by_path(new).items():
        is_master = ".master_params" in path or (path.startswith("[0]") and x.dtype == np.float32)
        if is_master and not _is_scale(path):
            was = before[path].astype(np.float64)
            moved = np.abs(x.astype(np.float64) - was)
            assert np.all(moved <= FARTHEST + 1e-6 * np.abs(was)), f"4: {path} moved by {moved.max()}"


_OF_A_SCALE = "amax_history scale saturated_tensors unused_tensors lost_gradients spoiled_tensors".split()


def _differing(a: Any, b: Any) -> dict[str, int]:
    """In how many places the leaves of two trees differ, by path."""
    others = _by_path(b)
    places = {path: int(np.sum(x != others[path])) for path, x in _by_path(a).items()}
    return {path: count for path, count in places.items() if count}


WORLDS = (
    ("single", "fp16"),
    ("pmap", "fp16+fp8"),
    ("shard_map", "fp16"),
    ("shard_map_unchecked", "fp8"),
    ("shard_map_fsdp", "fp16"),
    ("jit_fsdp", "fp16+fp8"),
    ("jit_data", "bf16"),
)


def run(regime_name: str, precision: str, count: int, seed: int) -> collections.Counter:
    """Injects `count` faults into one world; the number of each kind. Raises at the first wrong state."""
    world = make_world(regime_name, precision)
    rng = np.random.default_rng(seed)
    state, done, events = world.state, collections.Counter(), regimes.compile_events()
    state = first = jax.block_until_ready(world.step(state, world.shard(batch_of(rng, None, world.limits))))
    for i in range(count):
        fault = Fault(
            int(rng.integers(len(world.names))),
            int(rng.integers(DEVICES)),
            int(rng.integers(2**16)),
            str(rng.choice(KINDS, p=(0.2, 0.1, 0.2, 0.25, 0.25))),
            float(rng.uniform(3.0, 38.5)),
        )
        data = int(rng.integers(2**31))
        uninjured = world.shard(batch_of(np.random.default_rng(data), None, world.limits))
        injured = world.shard(batch_of(np.random.default_rng(data), fault, world.limits))
        jax.block_until_ready((uninjured, injured))
        twin = jax.block_until_ready(world.step(state, uninjured))
        events.clear()
        after = jax.block_until_ready(world.step(state, injured))
        assert not events or i == 0, f"5: compiled again at {fault}"
        try:
            check(world, state, twin, after, fault)
        except AssertionError as e:
            where = f"{regime_name}, {precision}, fault {i}: {fault} in {world.names[fault.leaf]}"
            raise AssertionError(f"{where}: {e}") from e
        done[fault.kind + (" in an fp8 scale" if "fp8_" in world.names[fault.leaf] else "")] += 1
        state = after if (i + 1) % ANEW else first
    return done


def main() -> int:
    """The campaign."""

    def row_of(regime: str, precision: str, kinds: dict[str, int]) -> dict[str, Any]:
        return {"regime": regime, "precision": precision, "faults": sum(kinds.values()), "kinds": kinds}

    def in_world(index: int, count: int, seed: int) -> collections.Counter:
        return run(*WORLDS[index], count, seed + index)

    return campaigns.over_worlds("faults.py", __doc__, 10_000, "faults", "wrong_states", WORLDS, in_world, row_of)


if __name__ == "__main__":
    sys.exit(main())
