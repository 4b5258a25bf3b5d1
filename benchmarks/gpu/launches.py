"""One launch of each kernel, for what is asked of all of them: the same bits again, in a loop, under compute-sanitizer.

python -m benchmarks.gpu.launches [NAME ...] [--tiny]        launches them once, and says which

"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from benchmarks.programs import computed_casts
from pallas_kernels import grouped, moments, update

E4M3 = jnp.float8_e4m3fn
LEAVES = (5, 129, 2048, 8192 + 3)  # tails, whole blocks, and both
RULES = {"AdamW": update.AdamW(), "Lion": update.Lion(), "Momentum": update.Momentum()}
# Rule, dtype of the param, of the master, of the moments
UPDATES = {
    "AdamW, float32": ("AdamW", "float32", "", "float32"),
    "AdamW, float16 with masters": ("AdamW", "float16", "float32", "float32"),
    "AdamW, bfloat16 split": ("AdamW", "bfloat16", "int16", "bfloat16"),
    "AdamW, bfloat16 split, int8 moments": ("AdamW", "bfloat16", "int8", "int8"),
    "Lion, float16 with masters": ("Lion", "float16", "float32", "float32"),
    "Momentum, bfloat16 with masters": ("Momentum", "bfloat16", "float32", "float32"),
}


def launches(backend: str, *, side: int = 128, blocks: int = 1) -> dict[str, tuple[Callable[..., Any], Any]]:
    """For each kernel a function, and a function that makes its arguments from a seed.

    Args:
      backend: of the kernels.
      side: of matrices, a multiple of 128.
      blocks: leaves have so many times the sizes of `LEAVES`.
    """
    matrix = functools.partial(normal, (side, side // 2 if side > 128 else side))
    found: dict[str, tuple[Callable[..., Any], Any]] = {}

    def add(name: str, f: Callable[..., Any], dtypes: str) -> None:
        found[name] = (
            functools.partial(f, backend=backend),
            lambda seed: [matrix(seed * 8 + i, dtype) for i, dtype in enumerate(dtypes.split())],
        )

    one = jnp.float32(1.0)
    for dtype in ("float32", "bfloat16"):
        add(f"cast_transpose_amax, {dtype}", lambda x, backend: _cast(x, backend), dtype)
    add(f"{computed_casts.NAME}, gelu", lambda x, backend: _gelu(x, backend), "bfloat16")
    add(
        f"{computed_casts.NAME}, silu(a) b",
        lambda a, b, backend: computed_casts.silu_gated(a, b, one, backend=backend),
        "bfloat16 bfloat16",
    )
    rows, experts = (side, 128), (4, 128, 192)
    of_experts = jnp.array([side // 2 - 3, 0, 3, side // 4], jnp.int32)  # and some rows are of nobody
    found["grouped by_expert"] = (
        lambda x, w: grouped.by_expert(x, w, of_experts, one, jnp.bfloat16, backend=backend),
        lambda seed: [normal(rows, seed * 8, "float8_e4m3fn"), normal(experts, seed * 8 + 1, "float8_e4m3fn")],
    )
    found["grouped per_expert"] = (
        lambda x, g: grouped.per_expert(x, g, of_experts, one, jnp.float32, backend=backend),
        lambda seed: [normal(rows, seed * 8, "float8_e4m3fn"), normal(rows, seed * 8 + 1, "float8_e5m2")],
    )
    sizes = [n * blocks for n in LEAVES]

    def tree(seed: int, dtype: str = "float16") -> Any:
        return [[normal((n,), seed * 8 + i, dtype) for i, n in enumerate(sizes)]]

    over_tree = {
        "unscale_and_check": functools.partial(pallas_kernels.unscale_and_check, inv_scale=one * 0.5),
        "gradient_norm": functools.partial(pallas_kernels.gradient_norm, inv_scale=one * 0.5),
        "cast_tree": functools.partial(pallas_kernels.cast_tree, dtype=jnp.bfloat16),
    }
    for name, f in over_tree.items():
        found[name] = (functools.partial(f, backend=backend), tree)
    for name, kind in UPDATES.items():
        found[f"multi_tensor_update, {name}"] = (
            functools.partial(updated, RULES[kind[0]], backend=backend),
            functools.partial(weights, kind, [(n // 256 or 1, 256) for n in sizes]),
        )
    return found


def names() -> list[str]:
    """The names of all launches."""
    return list(launches("xla"))


def normal(shape: tuple[int, ...], seed: int, dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def _cast(x: jax.Array, backend: str) -> Any:
    return pallas_kernels.cast_transpose_amax(x, jnp.float32(4.0), E4M3, backend=backend)


def _gelu(x: jax.Array, backend: str) -> Any:
    return computed_casts.gelu(x, jnp.float32(4.0), x[0].astype(jnp.float32), backend=backend)


def weights(kind: tuple[str, str, str, str], shapes: Any, seed: int) -> Any:
    rule, param_dtype, master, state = kind
    made = []
    for i, shape in enumerate(shapes):
        w = normal(shape, seed * 8 + i, "float32")
        held = tuple(moments.zeros(shape, state, signed=signed) for signed in RULES[rule].signed)
        if master.startswith("int"):
            param, kept = moments.split(w, jnp.dtype(master))
        else:
            param, kept = (w.astype(param_dtype), w) if master else (None, w)
        made.append((normal(shape, seed * 8 + i + 4, param_dtype), param, kept, held))
    return [made]


def updated(rule: Any, weights: Any, *, backend: str, taken: Any = True, step: int = 3) -> Any:
    """(param, master, moments) of each weight after a step, and how many masters saturate."""
    one = jnp.float32(1.0)
    moved, saturated = update.multi_tensor_update(
        [update.Weight(*w) for w in weights],
        rule,
        factor=one * 0.5,
        learning_rate=one * 1e-3,
        step=jnp.int32(step),
        scalars=(one * 0.1, one * 0.001) if isinstance(rule, update.AdamW) else (),
        taken=jnp.asarray(taken),
        backend=backend,
    )
    return [(w.param, w.master, w.moments) for w in moved], saturated


def main(arguments: list[str]) -> None:
    """Launches each kernel once."""
    backend = "interpret" if "--tiny" in arguments else "mosaic"
    asked = [argument for argument in arguments if argument != "--tiny"]
    for name, (f, make) in launches(backend).items():
        if not asked or name in asked:
            print(f"launch: {name}", flush=True)
            jax.block_until_ready(jax.jit(f)(*make(0)))


if __name__ == "__main__":
    main(sys.argv[1:])
