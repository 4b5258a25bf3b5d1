"""Trains with gradients that move in 8 bits between 8 simulated devices, and with float32, over paired seeds.

Each seed (of the params and of the batches) trains the model of examples/train.py once for each way to send gradients,
on the same batches. A gap is that of the held-out loss to float32, in percent, with the standard error over the seeds:

    gap [%] = 100 * mean over seeds of (held_out - held_out in float32) / mean of held_out in float32

All matrices move in few bytes (`min_size` of 2^12 elements); a device has 2 sequences. Target: a gap whose size is
below 0.5 % or twice its standard error.
"""

import dataclasses
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxmp
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.examples import train
from benchmarks.lib.tables import holds, markdown
from benchmarks.lib.versions import CPU, versions

DEVICES, SEEDS, CHUNK, LARGEST = 8, 5, 20, 0.5
WAYS = {
    "float32": None,
    "bfloat16, then int8": (jnp.bfloat16, jnp.int8),
    "int8": jnp.int8,
    "float8_e4m3fn": jnp.float8_e4m3fn,
}


def runs_of(way: str, cfg: train.Config, seeds: range) -> list[dict[str, Any]]:
    """The held-out loss of each seed, in bf16 under fp32 masters."""
    policy = jaxmp.get_policy("bf16", keep_fp32=("*norm*",))
    model = train.Transformer(cfg.width, cfg.layers, cfg.heads, dtype=policy.compute_dtype)
    few = {} if WAYS[way] is None else {"wire_dtype": WAYS[way], "devices": DEVICES, "min_size": 2**12}
    inner = optax.chain(jaxmp.reduce_gradients("data", **few), train.optimizer_of(cfg, small_state=False))
    tx = jaxmp.mixed_precision(inner, policy)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        return train.next_byte_loss(model.apply({"params": params}, tokens[:, :-1]), tokens)

    def steps(params: Any, opt_state: Any, batches: jax.Array) -> Any:
        def step(carry: Any, tokens: jax.Array) -> Any:
            _, grads = jaxmp.value_and_grad(loss_fn)(carry[0], tokens, opt_state=carry[1])
            params, opt_state = jaxmp.apply_gradients(tx, grads, carry[1], carry[0])
            return (params, opt_state), jaxmp.get_metrics(opt_state)["skipped"]

        return jax.lax.scan(step, (params, opt_state), batches)

    def start(key: jax.Array) -> tuple[Any, Any]:
        params32 = model.init(key, jnp.zeros((1, cfg.seq_len), jnp.uint8))["params"]
        return policy.cast_to_param(params32), tx.init(params32)

    params32 = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, cfg.seq_len), jnp.uint8))["params"]
    specs = (P(), jaxmp.sharding_of(tx, params32, jax.tree.map(lambda _: P(), params32)))
    rows = P(None, "data")
    run = jax.jit(jax.shard_map(steps, mesh=mesh, in_specs=(*specs, rows), out_specs=(specs, P())))
    evaluate = jax.jit(lambda params, batches: jax.lax.map(lambda tokens: loss_fn(params, tokens), batches).mean())
    text, held_out_text = train.load_text()
    held_out, found = np.stack(list(train.walk(held_out_text, cfg))), []
    for seed in seeds:
        print(f"{way}, seed {seed}", file=sys.stderr, flush=True)
        params, opt_state = jax.jit(start)(jax.random.key(seed))
        seeded, losses = dataclasses.replace(cfg, seed=seed), []
        for first in range(0, cfg.steps, CHUNK):
            batches = np.stack([train.sample(text, seeded, i) for i in range(first, first + CHUNK)])
            (params, opt_state), _ = run(params, opt_state, batches)
            if first + 5 * CHUNK >= cfg.steps:
                losses.append(float(evaluate(params, held_out)))
        found.append({"way": way, "seed": seed, "held_out": float(np.mean(losses))})
    return found


def rows_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way, with the gap to float32."""
    base = np.array([run["held_out"] for run in runs if run["way"] == "float32"])
    rows = []
    for way in WAYS:
        losses = np.array([run["held_out"] for run in runs if run["way"] == way])
        gaps = 100 * (losses - base) / base.mean()
        error = float(gaps.std(ddof=1) / len(gaps) ** 0.5) if len(gaps) > 1 else 0.0
        row = {"way": way, "seeds": len(losses), "held_out": float(losses.mean()), "gap": float(gaps.mean())}
        too_far = abs(row["gap"]) > max(LARGEST, 2 * error)
        rows.append(row | {"error": error, "missed": [f"a gap of {row['gap']:.2f} %"] if too_far else []})
    return rows


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    cells = [["gradients in", "seeds", "held-out loss", "gap, %", "holds"]]
    for row in results["rows"]:
        gap = "" if row["way"] == "float32" else f"{row['gap']:+.2f} ± {row['error']:.2f}"
        target = holds(row, has_target=row["way"] != "float32")
        cells.append([row["way"], str(row["seeds"]), f"{row['held_out']:.4f}", gap, target])
    return markdown(cells)


def _measured(cfg: train.Config, seeds: range) -> dict[str, Any]:
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", DEVICES)
    runs = [run for way in WAYS for run in runs_of(way, cfg, seeds)]
    return {"steps": cfg.steps, "rows": rows_of(runs), "runs": runs}


def measure_tiny() -> dict[str, Any]:
    """One seed of a tiny model."""
    return _measured(train.Config(steps=CHUNK, width=32, layers=1, heads=2, seq_len=16), range(1))


def measure_all() -> dict[str, Any]:
    """All results."""
    found = versions(CPU)
    device = f"CPU with {DEVICES} simulated devices, {os.cpu_count()} cores"
    return {"device": device, "versions": found, **_measured(train.Config(steps=400, width=64), range(SEEDS))}


BENCHMARK = Benchmark("cpu few_bytes", "cpu_few_bytes.json", measure_all, render, measure_tiny)
