"""Times a training step with jaxmp.monitor and without it."""

import functools
import os
import re
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.examples import train
from benchmarks.lib.tables import holds, markdown
from benchmarks.lib.versions import on_cpu

ROUNDS, EVERY, TARGET = 40, 10, 1.03
PLAIN, STATS, ALL = "as it is", "step_stats", "step_stats and watch_activations"


@functools.cache
def job(cfg: train.Config) -> tuple[Any, Any]:
    """The example's model and its initial state."""
    policy = jaxmp.get_policy("fp16", keep_fp32=("*norm*",))
    model = train.Transformer(cfg.width, cfg.layers, cfg.heads, dtype=policy.compute_dtype)
    tx = jaxmp.mixed_precision(train.optimizer_of(cfg, small_state=False), policy, loss_scale=2.0**10)
    params = jax.jit(model.init)(jax.random.key(cfg.seed), jnp.zeros((1, cfg.seq_len), jnp.uint8))["params"]
    return model, jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy=policy)


def program(cfg: train.Config, kind: str, *, off: bool = False) -> Any:
    """`step(state, i, tokens) -> (state, loss, stats)`; `off`: with when=False."""
    model, _ = job(cfg)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        return train.next_byte_loss(model.apply({"params": params}, tokens[:, :-1]), tokens)

    def step(state: jaxmp.linen.TrainState, i: jax.Array, tokens: jax.Array) -> Any:
        stats, activations = None, None
        when = not off and (kind == ALL or i % EVERY == 0)
        if kind == ALL:
            watched = jaxmp.monitor.watch_activations(loss_fn, when=when)
            aux_grad = jaxmp.value_and_grad(watched, has_aux=True)
            (loss, activations), grads = aux_grad(state.params, tokens, opt_state=state.opt_state)
        else:
            loss, grads = jaxmp.value_and_grad(loss_fn)(state.params, tokens, opt_state=state.opt_state)
        if kind != PLAIN:
            stats = jaxmp.monitor.step_stats(grads, state.opt_state, state.params, when=when, activations=activations)
        return state.apply_gradients(grads=grads), loss, stats

    return step


def instructions(step: Any, *shapes: Any) -> list[str]:
    """A compiled program's instructions, without their positions in the source."""
    text = jax.jit(step).lower(*shapes).compile().as_text()
    return [re.sub(r", metadata=\{[^}]*\}", "", line) for line in text.splitlines() if " = " in line]


def measure(cfg: train.Config, *, rounds: int = ROUNDS) -> dict[str, Any]:
    """The rows of the table, and the targets that no row names. Each program runs ten steps in each round."""
    text, _ = train.load_text()
    tokens = [jnp.asarray(train.sample(text, cfg, i)) for i in range(EVERY)]
    kinds, compiled, states, seconds_to_compile = (PLAIN, STATS, ALL), {}, {}, {}
    for kind in kinds:
        step, states[kind] = program(cfg, kind), jax.tree.map(jnp.copy, job(cfg)[1])  # a copy: it is donated
        before = time.perf_counter()
        compiled[kind] = jax.jit(step, donate_argnums=0).lower(states[kind], 0, tokens[0]).compile()
        seconds_to_compile[kind] = time.perf_counter() - before
    rng, seconds = np.random.default_rng(0), np.zeros((rounds, len(kinds)))
    for r in range(-2, rounds):  # the first two warm up
        for k in rng.permutation(len(kinds)):
            before, state = time.perf_counter(), states[kinds[k]]
            for i in range(EVERY):
                kind = PLAIN if kinds[k] == ALL and i % EVERY else kinds[k]
                state, loss, _ = compiled[kind](state, i, tokens[i])
            jax.block_until_ready(loss)
            states[kinds[k]] = state
            if r >= 0:
                seconds[r, k] = (time.perf_counter() - before) / EVERY
    rows, others = [], []
    for k, kind in enumerate(kinds):
        ratio = float(np.median(seconds[:, k] / seconds[:, 0]))
        row = {
            "program": kind,
            "step_ms": round(1e3 * float(np.median(seconds[:, k])), 2),
            "of_plain": round(ratio, 4),
            "compile_s": round(seconds_to_compile[kind], 2),
        }
        rows.append(row | {"missed": missed(row)})
    state = job(cfg)[1]
    plain = instructions(program(cfg, PLAIN), state, 0, tokens[0])
    for kind in (STATS, ALL):
        if instructions(program(cfg, kind, off=True), state, 0, tokens[0]) != plain:
            others.append(f"{kind} with when=False: another program than without")
    return {"rows": rows, "off_is_the_same_program": not others, "missed": others}


def missed(row: dict[str, Any]) -> list[str]:
    """The target that a row misses, in words."""
    is_fine = row["of_plain"] <= TARGET
    return [] if is_fine else [f"{row['program']}: a step of {row['of_plain']:.3f}, over {TARGET}"]


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    cells = [["watched, every 10 steps", "step, ms", "of as it is", "compile s", f"target {TARGET}"]]
    for row in results["rows"]:
        numbers = [f"{row['step_ms']:.1f}", f"{row['of_plain']:.3f}", f"{row['compile_s']:.1f}"]
        cells.append([row["program"], *numbers, holds(row, has_target=row["program"] != PLAIN)])
    return markdown(cells)


def measure_tiny() -> dict[str, Any]:
    """One round of a tiny model."""
    return measure(train.Config(layers=1, width=32, heads=2, seq_len=16, batch_size=8), rounds=1)


def measure_all() -> dict[str, Any]:
    """All results, in the sizes of the example."""
    before, results = os.getloadavg()[0], measure(train.Config())
    return {**on_cpu(before), **results}


BENCHMARK = Benchmark("cpu monitor", "cpu_monitor.json", measure_all, render, measure_tiny)
