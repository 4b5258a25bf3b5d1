"""Compares gradients that devices sum in 16 bits and in float32 (`reduce_dtype=`) with float64."""

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
from benchmarks.lib.tables import holds, markdown
from benchmarks.lib.versions import CPU, versions

DEVICES, POLICIES, LARGEST = (8, 64), ("bf16", "fp16", "bf16-mixed"), 1e-6
VOCABULARY, WIDTH, BLOCKS, ROWS, LENGTH = 128, 64, 3, 4, 32


def params32(seed: int) -> dict[str, Any]:
    """Params by name, float32, as bfloat16 and float16 both hold them."""
    rng = np.random.default_rng(seed)
    shapes = {"tokens": (VOCABULARY, WIDTH)}
    for i in range(BLOCKS):
        shapes |= {f"up{i}": (WIDTH, 4 * WIDTH), f"down{i}": (4 * WIDTH, WIDTH), f"norm{i}": (WIDTH,)}
    params = {k: rng.normal(size=s) / s[0] ** 0.5 if len(s) > 1 else np.ones(s) for k, s in shapes.items()}
    return {k: jnp.asarray(x, jnp.bfloat16).astype(jnp.float32) for k, x in params.items()}


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of the next token."""
    h = params["tokens"][tokens[:, :-1]]
    for i in range(BLOCKS):
        x = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * params[f"norm{i}"]
        h = h + jax.nn.gelu(x @ params[f"up{i}"]) @ params[f"down{i}"]
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["tokens"].T, tokens[:, 1:]).mean()


def of_each_device(policy: jaxmp.Policy, tokens: np.ndarray, devices: int) -> list[np.ndarray]:
    """The gradients of the matrices, float32[devices, ...] each, times the loss scale."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy, loss_scale=2.0**10)
    opt_state = tx.init(params32(0))
    mesh = jax.make_mesh((devices,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])

    def gradient(params: Any, tokens: jax.Array) -> Any:
        _, grads = jaxmp.value_and_grad(loss_fn, policy=policy)(params, tokens, opt_state=opt_state)
        return jax.tree.map(lambda g: g[None], grads)

    run = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")))
    grads = jax.device_get(run(policy.cast_to_param(params32(0)), tokens))
    return [g for g in jax.tree.leaves(grads) if g.ndim > 2]


def exact_gradient(tokens: np.ndarray) -> list[np.ndarray]:
    """The gradients of the matrices in float64, times the loss scale."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params32(0))
        grads = jax.jit(jax.grad(lambda p: 2.0**10 * loss_fn(p, tokens)))(params)
        return [np.asarray(g) for g in jax.tree.leaves(grads) if g.ndim > 1]


def ring_mean(parts: np.ndarray, dtype: Any) -> np.ndarray:
    """The mean over the first axis in float64 of a sum as a ring takes it: each hop rounds to `dtype`.

    So do accelerators without `reduce_dtype`. XLA for CPU reduces in float32, and rounds inside of its products.
    """
    devices = len(parts)
    chunks = np.array_split(parts.reshape(devices, -1), devices, axis=1)
    sums = []
    for start, chunk in enumerate(chunks):
        total = chunk[start].astype(dtype)
        for hop in range(1, devices):
            total = (total.astype(np.float32) + chunk[(start + hop) % devices].astype(np.float32)).astype(dtype)
        sums.append(total.astype(np.float64))
    return np.concatenate(sums).reshape(parts.shape[1:]) / devices


def error(grads: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """|grads - exact| / |exact|, in the norm over all matrices."""
    pairs = list(zip(grads, exact, strict=True))
    return float((sum(np.sum((a - b) ** 2) for a, b in pairs) / sum(np.sum(b**2) for _, b in pairs)) ** 0.5)


def rows_of(name: str, devices: int) -> list[dict[str, Any]]:
    """The errors in 16 bits and in float32: of the sum alone, and with those of the devices' own gradients."""
    print(f"{name}, {devices} devices", file=sys.stderr, flush=True)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (ROWS * devices, LENGTH + 1))
    exact = exact_gradient(tokens)
    policy = jaxmp.get_policy(name, keep_fp32="norm*", reduce_dtype="float32")
    parts = of_each_device(policy, tokens, devices)
    whole = [g.astype(np.float64).mean(0) for g in parts]
    rows = []
    for dtype in (policy.compute_dtype, np.dtype(np.float32)):
        means = [ring_mean(g, dtype) for g in parts]
        row = {"policy": name, "devices": devices, "reduce_dtype": dtype.name}
        row |= {"error_of_sum": error(means, whole), "error": error(means, exact)}
        too_far = dtype == np.float32 and row["error_of_sum"] > LARGEST
        rows.append(row | {"missed": [f"an error of {row['error_of_sum']:.1e}"] if too_far else []})
    return rows


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    cells = [["policy", "devices", "summed in", "error of the sum", "error of the gradient", "holds"]]
    for row in results["rows"]:
        errors = f"{row['error_of_sum']:.1e}", f"{row['error']:.1e}"
        target = holds(row, has_target=row["reduce_dtype"] == "float32")
        cells.append([row["policy"], str(row["devices"]), row["reduce_dtype"], *errors, target])
    return markdown(cells)


def _measured(devices: tuple[int, ...], policies: tuple[str, ...]) -> dict[str, Any]:
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", max(devices))
    return {"rows": [row for n in devices for name in policies for row in rows_of(name, n)]}


def measure_tiny() -> dict[str, Any]:
    """Two devices and one policy."""
    return _measured((2,), POLICIES[:1])


def measure_all() -> dict[str, Any]:
    """All results."""
    device = f"CPU with {max(DEVICES)} simulated devices, {os.cpu_count()} cores"
    return {"device": device, "versions": versions(CPU), **_measured(DEVICES, POLICIES)}


BENCHMARK = Benchmark("cpu reduce_dtype", "cpu_reduce_dtype.json", measure_all, render, measure_tiny)
