"""Measures what the trace of a training step costs, beside the same step by hand.

The step of a transformer of `LAYERS` equal layers (value_and_grad, adamw, apply_gradients) is traced from nothing, and
not compiled. Times are CPU seconds of the process, the least of `ROUNDS`, taken in turns.

Targets: at most 1.7 of the step by hand in bfloat16 for the policy bf16, and 2.3 for fp8.
"""

import contextlib
import gc
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmp
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import holds, markdown
from benchmarks.lib.versions import CPU, versions
from benchmarks.programs.autocast import Cast, Transformer

LAYERS, ROUNDS = 48, 3
BY_HAND = "bfloat16 by hand"
TARGETS = {"bf16": 1.7, "fp8": 2.3}


def program(name: str, layers: int) -> tuple[Any, tuple[Any, ...]]:
    """(a step, shapes of its arguments)."""
    cast = Cast(jnp.dtype(jnp.bfloat16)) if name == BY_HAND else None
    model = Transformer(width=64, layers=layers, heads=4, vocabulary=256, cast=cast)
    tokens, targets = jax.ShapeDtypeStruct((2, 32), jnp.int32), jax.ShapeDtypeStruct((64,), jnp.int32)

    def loss_fn(params: Any, tokens: Any, targets: Any) -> Any:
        logits: Any = model.apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def by_hand(params: Any, opt_state: Any, *batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = adamw.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def by_policy(params: Any, opt_state: Any, *batch: Any) -> Any:
        loss, grads = jaxmp.value_and_grad(loss_fn, policy=name)(params, *batch, opt_state=opt_state)
        params, opt_state = jaxmp.apply_gradients(mixed, grads, opt_state, params)
        return params, opt_state, loss

    adamw, is_policy = optax.adamw(1e-3), name in TARGETS
    with jaxmp.autocast(name) if is_policy else contextlib.nullcontext():
        params: Any = jax.eval_shape(model.init, jax.random.key(0), tokens)
    if not is_policy:
        return by_hand, (params, jax.eval_shape(adamw.init, params), tokens, targets)
    mixed = jaxmp.mixed_precision(adamw, name)
    params = jax.eval_shape(jaxmp.get_policy(name).cast_to_param, params)
    return by_policy, (params, jax.eval_shape(mixed.init, params), tokens, targets)


def seconds(name: str, layers: int) -> float:
    """CPU seconds of one trace."""
    step, arguments = program(name, layers)
    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    jax.jit(step).trace(*arguments)
    return time.process_time() - start


def measured(layers: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each step."""
    names = ["float32 by hand", BY_HAND, *TARGETS]
    turns = [{name: seconds(name, layers) for name in names} for _ in range(rounds)]
    least = {name: min(turn[name] for turn in turns) for name in names}
    rows = []
    for name in names:
        ratio = least[name] / least[BY_HAND]
        missed = [f"{ratio:.2f} of by hand"] if ratio > TARGETS.get(name, ratio) else []
        rows.append({"step": name, "layers": layers, "seconds": least[name], "of_by_hand": ratio, "missed": missed})
    return rows


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    cells = [["step", "layers", "trace, CPU s", "of bfloat16 by hand", "holds"]]
    for row in results["rows"]:
        target = holds(row, has_target=row["step"] in TARGETS)
        cells.append([row["step"], str(row["layers"]), f"{row['seconds']:.2f}", f"{row['of_by_hand']:.2f}", target])
    return markdown(cells)


def measure_tiny() -> dict[str, Any]:
    """Two layers, once."""
    return {"rows": measured(2, 1)}


def measure_all() -> dict[str, Any]:
    """All results."""
    return {"device": "CPU", "versions": versions(CPU), "rows": measured(LAYERS, ROUNDS)}


BENCHMARK = Benchmark("cpu tracing", "cpu_tracing.json", measure_all, render, measure_tiny)
