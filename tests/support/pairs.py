"""Small jobs that meet every pair of features: each is run, interrupted, restored, and compared with one device.

    make pairs                        all jobs; writes benchmarks/results/pairs.json; a second call goes on

A job is one choice from each of `FEATURES`. The jobs are a covering array: every pair of choices that can
stand together does in two jobs. Each job takes six steps, of which one overflows on one device, and must

1.  decide on each step as the same job on one device does, and end near it: the distance between the masters is a small
    part of the way they went;
2.  leave all devices with the same bits;
3.  change nothing in the skipped step but the loss scale and the counts;
4.  go on to the same bits after a save in the middle, and a restore in a process that has not trained it.

The tests restore in the same process, by the same compiled step.
"""

import contextlib
import functools
import itertools
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import campaigns
import jaxmp
from fp8_model import matmul, scale_leaves
from regimes import DEVICES, alike, guarded, regime_of, squared_error, unchanged

ROWS, WIDTH = 128, 64  # 32 rows on each device, 16 in each of two microbatches: the least that an fp8 GEMM takes
TIMES = 2  # how many jobs have each pair, each job with other features
STEPS, BAD_STEP, SAVED_AFTER = 6, 1, 3
LEARNING_RATE = 1e-2
RECIPE = jaxmp.fp8.DelayedScaling(amax_history_len=3)

FEATURES = {
    "policy": ("fp32", "bf16", "fp16", "fp8", "fp16+fp8"),
    "optimizer": ("adamw", "fused", "sgd-clip", "split16", "split8", "int8", "ema", "multisteps"),
    "gradients": ("whole", "microbatches"),
    "layers": ("listed", "remat", "scan", "vmap"),
    "casting": ("policy", "autocast", "dtype"),
    "regime": ("single", "pmap", "shard_map", "shard_map_unchecked", "jit_data", "jit_fsdp", "explicit"),
    "framework": ("plain", "linen", "nnx"),
}
# What one device and many may differ by, of the way that the masters went.
FAR = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.02, "fp8": 0.2, "fp16+fp8": 0.2}


class Case(NamedTuple):
    """One choice of each feature."""

    policy: str
    optimizer: str
    gradients: str
    layers: str
    casting: str
    regime: str
    framework: str


def why_not(case: Case) -> str | None:
    """The rule of the documentation that excludes a case; None: it must work."""
    if case.optimizer in ("split16", "split8") and case.policy != "bf16":
        return "remainder_bits: the params are bfloat16"
    return None


def pairs_of(case: Case) -> set[tuple[tuple[str, str], ...]]:
    """All pairs of (feature, choice) of a case."""
    return set(itertools.combinations(case._asdict().items(), 2))


@functools.cache
def cases(seed: int = 0, times: int = TIMES) -> list[Case]:
    """A covering array, the same in each process. (allpairspy misses pairs where some choices exclude each other.)"""
    rng = np.random.default_rng(seed)
    valid = [case for row in itertools.product(*FEATURES.values()) if why_not(case := Case(*row)) is None]
    valid = [valid[i] for i in rng.permutation(len(valid))]
    choices = sorted((feature, choice) for feature, all_of in FEATURES.items() for choice in all_of)
    # A set of pairs is one number.
    bit_of = {pair: 1 << n for n, pair in enumerate(itertools.product(choices, choices))}
    bits = {case: sum(bit_of[pair] for pair in pairs_of(case)) for case in valid}
    chosen: list[Case] = []
    for _ in range(times):
        missing = functools.reduce(int.__or__, bits.values())
        while missing:
            wanted = missing & -missing
            having = [case for case, of_case in bits.items() if of_case & wanted]
            chosen.append(max(having[:60], key=lambda case: (bits[case] & missing).bit_count()))
            missing &= ~bits.pop(chosen[-1])
    return chosen


class Job(NamedTuple):
    """A model with its optimizer; a state is a pytree of arrays. `restore` begins from the state of a new job.

    `step(state, batch, mean) -> (state, loss)`, `parts(state) -> (params, opt_state)`, `save(manager, state)`,
    `restore(manager, state) -> state`.
    """

    state: Any
    step: Callable[..., Any]
    parts: Callable[[Any], tuple[Any, Any]]
    save: Callable[[Any, Any], Any]
    restore: Callable[[Any, Any], Any]


def policy_of(case: Case) -> jaxmp.Policy:
    return jaxmp.get_policy({"fp16+fp8": "fp16"}.get(case.policy, case.policy))


def optimizer_of(case: Case) -> Any:
    adamw = optax.adamw(LEARNING_RATE, eps=1e-3)  # a large eps: rounding stays small where gradients nearly vanish
    inner = {
        "adamw": lambda: adamw,
        "fused": lambda: jaxmp.fused_adamw(LEARNING_RATE, eps=1e-3, max_norm=1.0),
        "sgd-clip": lambda: optax.chain(jaxmp.clip_by_global_norm(1.0), optax.sgd(LEARNING_RATE, 0.9)),
        "split16": lambda: adamw,
        "split8": lambda: jaxmp.fused_adamw(LEARNING_RATE, eps=1e-3),
        "int8": lambda: jaxmp.fused_adamw(LEARNING_RATE, eps=1e-3, state_dtype=jnp.int8),
        "ema": lambda: optax.chain(adamw, jaxmp.ema_params(0.9)),
        "multisteps": lambda: optax.MultiSteps(adamw, 2),
    }[case.optimizer]()
    return jaxmp.mixed_precision(
        inner,
        policy_of(case),
        loss_scale=jaxmp.DynamicLossScale(2.0**10, growth_interval=2) if case.policy.startswith("fp16") else None,
        remainder_bits={"split16": 16, "split8": 8}.get(case.optimizer),
        recipe=RECIPE if "fp8" in case.policy else None,
    )


def batches() -> list[dict[str, Any]]:
    """Six batches; in one of them a row of the second device overflows."""
    xs = [np.random.default_rng(i).normal(size=(ROWS, WIDTH)).astype(np.float32) for i in range(STEPS)]
    xs[BAD_STEP][ROWS // DEVICES + 3, 5] = np.inf
    return [{"x": x, "y": np.tanh(x[:, ::-1] * 0.5)} for x in xs]


def options_of(case: Case) -> dict[str, Any]:
    """Arguments of `value_and_grad` besides the loss."""
    options: dict[str, Any] = {"accumulate": 2} if case.gradients == "microbatches" else {}
    if case.casting == "policy" and case.framework != "linen":  # linen's TrainState carries it
        options["policy"] = policy_of(case)
    return options


def cast(case: Case, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The loss, under autocast where the case says so."""
    is_cast = case.casting == "autocast" and case.policy != "fp32"
    return jaxmp.autocast(loss_fn, policy_of(case).compute_dtype) if is_cast else loss_fn


def dtype_of(case: Case) -> Any:
    """The dtype that the model names itself; None: it names none."""
    return policy_of(case).compute_dtype if case.casting == "dtype" else None


# Plain functions


def _plain_job(case: Case) -> Job:
    rng, fp8 = np.random.default_rng(3), "fp8" in case.policy
    policy, tx, dtype = policy_of(case), optimizer_of(case), dtype_of(case)
    stacked = case.layers == "scan"
    draw = lambda *shape: np.asarray(rng.normal(size=shape) / WIDTH**0.5, np.float32)  # noqa: E731
    first = {"w": draw(WIDTH, WIDTH)}
    blocks: Any = {"w": draw(2, WIDTH, WIDTH)} | (scale_leaves((2,)) if fp8 else {})
    if not stacked:
        blocks = {str(i): {name: x[i] for name, x in blocks.items()} for i in range(2)}
    params32 = jax.tree.map(jnp.asarray, {"first": first, "blocks": blocks})

    def block(layer: Any, h: Any) -> Any:
        wide = h if dtype is None else h.astype(dtype)
        out = matmul(layer, wide, RECIPE) if fp8 else wide @ layer["w"].astype(wide.dtype)
        return h + jnp.tanh(out).astype(h.dtype)

    def apply(params: Any, x: Any) -> Any:
        h = x if dtype is None else x.astype(dtype)
        if fp8 and dtype is None:
            h = h.astype(policy.compute_dtype)
        h = h @ params["first"]["w"].astype(h.dtype)
        if stacked:
            return jax.lax.scan(lambda h, layer: (block(layer, h), None), h, params["blocks"])[0]
        one = {"remat": jax.checkpoint(block), "vmap": jax.vmap(block, (None, 0))}.get(case.layers, block)
        return one(params["blocks"]["1"], one(params["blocks"]["0"], h))

    def loss_fn(params: Any, batch: Any) -> Any:
        return squared_error(apply(params, batch["x"]), batch["y"])

    grad = jaxmp.value_and_grad(cast(case, loss_fn), **options_of(case))

    def step(state: Any, batch: Any, mean: Any) -> Any:
        params, opt_state = state
        loss, grads = grad(params, batch, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, mean(grads), opt_state, params), loss

    def save(steps: Any, state: Any) -> None:
        jaxmp.checkpoint.save(steps, SAVED_AFTER, params=state[0], opt_state=state[1])

    def restore(steps: Any, state: Any) -> Any:
        return jaxmp.checkpoint.restore(steps, tx, params=state[0])[1:3]

    state = (policy.cast_to_param(params32), tx.init(params32))
    return Job(state, step, lambda s: s, save, restore)


# linen


class LinenBlock(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, h: Any) -> Any:
        return h + jnp.tanh(nn.Dense(WIDTH, use_bias=False, dtype=self.dtype)(h)).astype(h.dtype)


class LinenNet(nn.Module):
    dtype: Any
    layers: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.Dense(WIDTH, use_bias=False, dtype=self.dtype, name="first")(x)
        if self.layers == "scan":
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            stack = nn.scan(lambda block, h, _: (block(h), None), **axes, length=2)
            h, _ = stack(LinenBlock(self.dtype, name="blocks"), h, None)
        else:
            shared = {"variable_axes": {"params": None}, "split_rngs": {"params": False}}
            wrap: Any = {"remat": nn.remat, "vmap": functools.partial(nn.vmap, **shared)}.get(self.layers, lambda x: x)
            kind = wrap(LinenBlock)
            for i in range(2):
                h = kind(self.dtype, name=f"block{i}")(h)
        return nn.Dense(WIDTH, use_bias=False, dtype=self.dtype, name="last")(h)


def fp8_region(case: Case) -> Any:
    """Where linen's layers get their scales."""
    return jaxmp.fp8.autocast(RECIPE) if "fp8" in case.policy else contextlib.nullcontext()


def _linen_job(case: Case) -> Job:
    model, tx = LinenNet(dtype_of(case), case.layers), optimizer_of(case)
    with fp8_region(case):
        variables = jax.jit(model.init)(jax.random.key(0), jnp.ones((ROWS, WIDTH)))
    state = jaxmp.linen.TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=tx, policy=policy_of(case)
    )

    def loss_fn(params: Any, batch: Any) -> Any:
        return squared_error(model.apply({"params": params}, batch["x"]), batch["y"])

    grad = jaxmp.value_and_grad(cast(case, loss_fn), **options_of(case))

    def step(state: Any, batch: Any, mean: Any) -> Any:
        with fp8_region(case):
            loss, grads = grad(state.params, batch, opt_state=state.opt_state)
        return state.apply_gradients(grads=mean(grads)), loss

    def save(steps: Any, state: Any) -> None:
        job = {"params": state.params, "opt_state": state.opt_state}
        jaxmp.checkpoint.save(steps, SAVED_AFTER, **job, extra={"step": state.step})

    def restore(steps: Any, state: Any) -> Any:
        found = jaxmp.checkpoint.restore(steps, state.tx, params=state.params, extra={"step": state.step})
        return state.replace(params=found.params, opt_state=found.opt_state, step=found.extra["step"])

    return Job(state, step, lambda s: (s.params, s.opt_state), save, restore)


# nnx


class NnxBlock(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, h: Any) -> Any:
        return h + jnp.tanh(self.linear(h)).astype(h.dtype)


class NnxNet(nnx.Module):
    def __init__(self, dtype: Any, layers: str, rngs: nnx.Rngs):
        self.layers = layers
        self.first = nnx.Linear(WIDTH, WIDTH, use_bias=False, dtype=dtype, rngs=rngs)
        if layers == "scan":
            self.blocks = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: NnxBlock(dtype, rngs)))(rngs)
        else:
            self.blocks = nnx.List([NnxBlock(dtype, rngs) for _ in range(2)])
        self.last = nnx.Linear(WIDTH, WIDTH, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        h = self.first(x)
        if self.layers == "scan":
            h = nnx.scan(lambda h, block: block(h), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(h, self.blocks)
        else:
            run: Any = {
                "remat": nnx.remat(lambda block, h: block(h)),
                "vmap": nnx.vmap(lambda block, h: block(h), in_axes=(None, 0)),
            }.get(self.layers, lambda block, h: block(h))
            for block in self.blocks:
                h = run(block, h)
        return self.last(h)


def _nnx_job(case: Case) -> Job:
    model = NnxNet(dtype_of(case), case.layers, nnx.Rngs(0))
    if "fp8" in case.policy:
        jaxmp.nnx.to_fp8(model, RECIPE)
    wrt: Any = (nnx.Param, jaxmp.nnx.Fp8Scale) if "fp8" in case.policy else nnx.Param
    tx = optimizer_of(case)
    optimizer = jaxmp.nnx.Optimizer(model, tx, wrt=wrt, policy=policy_of(case))
    graphdef, initial = nnx.split((model, optimizer))

    def loss_fn(model: NnxNet, batch: Any) -> Any:
        return squared_error(model(batch["x"]), batch["y"])

    grad = jaxmp.nnx.value_and_grad(cast(case, loss_fn), wrt=wrt, **options_of(case))

    def step(state: Any, batch: Any, mean: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = grad(model, batch, opt_state=optimizer.opt_state)
        optimizer.update(model, mean(grads))
        return nnx.state((model, optimizer)), loss

    def parts(state: Any) -> tuple[Any, Any]:
        model, optimizer = nnx.merge(graphdef, state)
        return nnx.as_pure(nnx.state(model, wrt)), nnx.as_pure(optimizer.opt_state)

    def trees(model: Any, optimizer: Any) -> dict[str, Any]:
        rest = {"rest": nnx.state(model, nnx.Not(wrt)), "step": optimizer.step[...]}
        return {"params": nnx.state(model, wrt), "extra": rest}

    def save(steps: Any, state: Any) -> None:
        model, optimizer = nnx.merge(graphdef, state)
        jaxmp.checkpoint.save(steps, SAVED_AFTER, opt_state=optimizer.opt_state, **trees(model, optimizer))

    def restore(steps: Any, state: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        found = jaxmp.checkpoint.restore(steps, tx, **trees(model, optimizer))
        nnx.update(model, found.params, found.extra["rest"])
        nnx.update(optimizer.opt_state, nnx.state(found.opt_state))
        optimizer.step.set_value(found.extra["step"])  # NumPy here: `[...] =` would write into it
        return nnx.state((model, optimizer))

    return Job(initial, step, parts, save, restore)


# Runs


def job_of(case: Case) -> Job:
    return {"plain": _plain_job, "linen": _linen_job, "nnx": _nnx_job}[case.framework](case)


def _steps(regime: Any, compiled: Any, state: Any, numbers: range) -> tuple[list[Any], list[float]]:
    """Host states of the first device after each step, and losses; raises if the devices come to other bits."""
    states, losses = [], []
    for i in numbers:
        state, loss = jax.block_until_ready(compiled(state, jax.block_until_ready(regime.shard(batches()[i]))))
        copies = regime.copies(state)
        assert alike(copies), f"2: devices differ after step {i}"
        states.append(copies[0])
        losses.append(float(np.ravel(regime.copies(loss)[0])[0]))
    return states, losses


def _masters(job: Job, state: Any) -> np.ndarray:
    params, opt_state = job.parts(state)
    leaves = jax.tree_util.tree_leaves_with_path(jaxmp.get_master_params(opt_state, params))
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for path, x in leaves if not jaxmp.fp8.is_scale(path)])


def _metrics(job: Job, state: Any) -> dict[str, Any]:
    return {name: np.asarray(x) for name, x in jaxmp.get_metrics(job.parts(state)[1]).items()}


def _placed(case: Case, state: Any) -> Any:
    """A host state as a checkpoint takes it: on the devices; of pmap's copies, one."""
    return state if case.regime == "pmap" else regime_of(case.regime).place(state)


def _restored(case: Case, job: Job, folder: str) -> Any:
    """The saved state, restored into the first state of a job."""
    with jaxmp.checkpoint.manager(folder) as steps:
        return jax.tree.map(np.asarray, job.restore(steps, _placed(case, jax.tree.map(np.asarray, job.state))))


def _go_on(case: Case, job: Job, compiled: Any, folder: str) -> list[list[np.ndarray]]:
    """The leaves of a job as it is restored from `folder`, and at its end."""
    again = _restored(case, job, folder)
    regime = regime_of(case.regime)
    states, _ = _steps(regime, compiled, regime.place(again), range(SAVED_AFTER, STEPS))
    return [jax.tree.leaves(again), jax.tree.leaves(states[-1])]


def go_on_anew(case: Case, folder: str) -> list[list[np.ndarray]]:
    """The same of a job that this process has not trained."""
    jax.clear_caches()
    job = job_of(case)
    return _go_on(case, job, regime_of(case.regime).compile(job.step), folder)


def check(case: Case, elsewhere: ProcessPoolExecutor | None = None) -> float:
    """Raises AssertionError, with the rule's number; returns how far one device and many are apart.

    The job goes on in a process of `elsewhere`; None: in this one.
    """
    regime, job = regime_of(case.regime), job_of(case)
    compiled = regime.compile(job.step)
    start = jax.tree.map(np.asarray, job.state)
    after_steps, losses = _steps(regime, compiled, regime.place(start), range(STEPS))
    states = [start, *after_steps]

    skipped = [bool(_metrics(job, state)["skipped"]) for state in after_steps]
    assert skipped == [i == BAD_STEP for i in range(STEPS)], f"1: skipped {skipped}"
    for i, loss in enumerate(losses):
        assert np.isfinite(loss) or i == BAD_STEP, f"1: the loss of step {i} is {loss}"
    before, after = (job.parts(states[i]) for i in (BAD_STEP, BAD_STEP + 1))
    before, after = ((params, guarded(opt_state)) for params, opt_state in (before, after))
    assert unchanged(after, before), "3: the skipped step changed state"

    with tempfile.TemporaryDirectory() as folder:
        with jaxmp.checkpoint.manager(folder) as steps:
            job.save(steps, _placed(case, states[SAVED_AFTER]))
        if elsewhere is None:
            again, end = _go_on(case, job, compiled, folder)
        else:
            again, end = elsewhere.submit(go_on_anew, case, folder).result()
    assert unchanged(again, jax.tree.leaves(states[SAVED_AFTER])), "4: restored to other bits"
    assert alike([end, jax.tree.leaves(states[-1])]), "4: the restored job ends in other bits"

    alone = job_of(case._replace(regime="single"))
    single = regime_of("single")
    reference, _ = _steps(single, single.compile(alone.step), single.place(start), range(STEPS))
    moved = np.linalg.norm(_masters(alone, reference[-1]) - _masters(alone, start))
    apart = np.linalg.norm(_masters(job, states[-1]) - _masters(alone, reference[-1]))
    assert moved > 0.05, f"1: the masters moved by {moved} only"
    names = ("loss_scale", "growth_count", "hysteresis_left", "skipped_steps")
    for i, (one, many) in enumerate(zip(reference, after_steps, strict=True)):
        decisions = [{name: _metrics(j, s)[name].item() for name in names} for j, s in ((alone, one), (job, many))]
        assert decisions[0] == decisions[1], f"1: after step {i} one device has {decisions[0]}, many {decisions[1]}"
    far = FAR[case.policy] * (3 if case.optimizer in ("int8", "split8") else 1)
    assert apart <= far * moved, f"1: {apart / moved:.3g} of the way apart from one device"
    return float(apart / moved)


def main() -> int:
    """All jobs."""
    parser = campaigns.parser_of(__doc__)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of jobs")
    arguments = parser.parse_args()
    chosen = [(i, case) for i, case in enumerate(cases(arguments.seed)) if i in (arguments.only or [i])]

    def row_of(case: Case) -> dict[str, Any]:
        try:
            apart, verdict = check(case, elsewhere), "passed"
        except Exception as e:
            apart, verdict = None, f"{type(e).__name__}: {e}"
            if not isinstance(e, AssertionError):
                traceback.print_exc()
        return {**case._asdict(), "apart": apart, "verdict": verdict}

    def failures_of(row: dict[str, Any]) -> list[str]:
        case = ", ".join(row[feature] for feature in FEATURES)
        return [] if row["verdict"] == "passed" else [f"{row['job']}: {case}: {row['verdict']}"]

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as elsewhere:
        return campaigns.one_by_one(
            arguments.json,
            f"python tests/support/pairs.py --seed {arguments.seed}",
            "job",
            chosen,
            row_of,
            failures_of,
            lambda rows, failed: {"jobs": len(rows), "failed": failed},
        )


if __name__ == "__main__":
    sys.exit(main())
