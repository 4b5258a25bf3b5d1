"""A section of the GPU run: what state and layers in host memory cost in time and save in device memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from benchmarks.lib.timing import Bench, Variant, carried, planned
from jaxmp import offload as host
from jaxmp._src.devices import host_memory

BUS = "copy over the bus"
UPDATE = "apply_gradients, AdamW with masters"
STEP = "training step of stacked layers"


def offload(bench: Bench) -> None:
    """Copies over the bus; AdamW's update, also in a skipped step, which copies nothing; a step of stacked layers.

    Each row has the time, the bytes over the bus by count, the device memory of XLA's plan, and that of the allocator:
    each program has a process of its own, so that nothing else is in it.
    """
    bench.compare(BUS, {"in": lambda: _copy(bench, to_host=False), "out": lambda: _copy(bench, to_host=True)})
    updates = {"device": False, "host": True, "host, skipped": True}
    bench.compare(UPDATE, {name: functools.partial(_update, bench, on, name) for name, on in updates.items()})
    steps = {"device": False, "host": True}
    bench.compare(STEP, {name: functools.partial(_step, bench, on) for name, on in steps.items()})


def _copy(bench: Bench, *, to_host: bool) -> Variant:
    x = jnp.zeros(2**10 if bench.tiny else 2**26, jnp.float32)
    x = x if to_host else host.to_host(x)
    move = jax.jit(host_memory.to_host if to_host else host_memory.to_device)
    return Variant(lambda: move(x), work={"bus_bytes": x.size * 4})


def _update(bench: Bench, on_host: bool, name: str) -> Variant:
    width, layers = (64, 4) if bench.tiny else (4096, 16)  # 268 million params
    inner = host.stream_updates(optax.adamw(1e-3), window_bytes=2**15 if bench.tiny else 2**28)
    tx = jaxmp.mixed_precision(inner, "fp16", loss_scale=1.0)
    before = _in_use()
    params = {f"layer_{i:02}": jnp.zeros((width, width), jnp.float16) for i in range(layers)}
    opt_state = tx.init(params)
    grads = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan if "skipped" in name else 1e-3), params)
    if on_host:
        params, opt_state = host.put((params, opt_state))
    step = jax.jit(lambda state, grads: jaxmp.apply_gradients(tx, grads, state[1], state[0]), donate_argnums=0)
    compiled = step.lower((params, opt_state), grads).compile()
    count = layers * width * width
    crossing = 24 * count if on_host and "skipped" not in name else 0
    return _variant(compiled, (params, opt_state), (grads,), count, crossing, before)


def _step(bench: Bench, on_host: bool) -> Variant:
    width, layers, rows = (32, 4, 16) if bench.tiny else (4096, 16, 4096)
    inner = host.stream_updates(optax.adamw(1e-3), window_bytes=2**12 if bench.tiny else 2**28)
    tx = jaxmp.mixed_precision(inner, "fp16", loss_scale=1.0)
    apply = host.stream_layers(lambda w, x: x + jnp.tanh(x @ w))
    before = _in_use()
    params = [jnp.full((layers // 4, width, width), 1e-3, jnp.float16) for _ in range(4)]  # four stacks, donated
    opt_state = tx.init(params)
    if on_host:
        params, opt_state = host.put((host.to_host(params), opt_state))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(rows, width)), jnp.float16)

    def train_step(state: Any, x: Any) -> Any:
        def loss_fn(params: Any, x: Any) -> Any:
            for stack in params:
                x = apply(stack, x)
            return jnp.mean(jnp.square(x.astype(jnp.float32)))

        _, grads = jaxmp.value_and_grad(loss_fn)(state[0], x, opt_state=state[1])
        return jaxmp.apply_gradients(tx, grads, state[1], state[0])

    compiled = jax.jit(train_step, donate_argnums=0).lower((params, opt_state), x).compile()
    count = layers * width * width
    # Params in twice, gradients out and in twice, masters and moments in and out, params in (for skipped steps) and out
    crossing = (2 * 2 + 2 * 3 + 24 + 2 + 2) * count if on_host else 0
    return _variant(compiled, (params, opt_state), (x,), count, crossing, before, tokens=rows)


def _variant(
    compiled: Any, state: Any, others: tuple[Any, ...], count: int, crossing: int, before: int | None, tokens: int = 0
) -> Variant:
    work = {"bus_bytes": crossing} if crossing else {}
    work |= {"tokens": tokens} if tokens else {}
    notes = {
        "params": count,
        "bus_bytes": crossing,
        **planned(compiled),
        "kinds": sorted({x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim}),
    }

    def measured() -> dict[str, Any]:
        now = _in_use()
        return notes if now is None or before is None else notes | {"in_use_mib": (now - before) / 2**20}

    return Variant(carried(compiled, state, *others), work=work, notes=measured)


def _in_use() -> int | None:
    """Bytes in use by the device's allocator; None if it does not report them (a CPU)."""
    stats = jax.devices()[0].memory_stats()
    return None if stats is None else stats.get("bytes_in_use")
