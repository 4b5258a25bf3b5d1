"""One launch of each kernel, for checks of all of them: the same bits again, in a loop, under compute-sanitizer."""

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
Launch = tuple[Callable[..., Any], Callable[[int], Any]]  # a function, and what makes its arguments from a seed


def launches(backend: str, *, side: int = 128, blocks: int = 1) -> dict[str, Launch]:
    """What launches each kernel.

    Args:
      backend: of the kernels.
      side: of matrices, a multiple of 128.
      blocks: leaves have so many times the sizes of `LEAVES`.
    """
    one = jnp.float32(1.0)
    shape = (side, side // 2 if side > 128 else side)
    rows, experts = (side, 128), (4, 128, 192)
    of_experts = jnp.array([side // 2 - 3, 0, 3, side // 4], jnp.int32)  # and some rows are of nobody
    sizes = [n * blocks for n in LEAVES]

    def arrays(*arguments: tuple[tuple[int, ...], str]) -> Callable[[int], Any]:
        return lambda seed: [normal(shape, seed * 8 + i, dtype) for i, (shape, dtype) in enumerate(arguments)]

    def cast(x: jax.Array) -> Any:
        return pallas_kernels.cast_transpose_amax(x, jnp.float32(4.0), E4M3, backend=backend)

    def gelu(x: jax.Array) -> Any:
        return computed_casts.gelu(x, jnp.float32(4.0), x[0].astype(jnp.float32), backend=backend)

    def silu_gated(a: jax.Array, b: jax.Array) -> Any:
        return computed_casts.silu_gated(a, b, one, backend=backend)

    def by_expert(x: jax.Array, w: jax.Array) -> Any:
        return grouped.by_expert(x, w, of_experts, one, jnp.bfloat16, backend=backend)

    def per_expert(x: jax.Array, g: jax.Array) -> Any:
        return grouped.per_expert(x, g, of_experts, one, jnp.float32, backend=backend)

    def tree(seed: int) -> Any:
        return [arrays(*(((n,), "float16") for n in sizes))(seed)]

    halves: dict[str, Any] = {"inv_scale": one * 0.5, "backend": backend}
    return {
        "cast_transpose_amax, float32": (cast, arrays((shape, "float32"))),
        "cast_transpose_amax, bfloat16": (cast, arrays((shape, "bfloat16"))),
        f"{computed_casts.NAME}, gelu": (gelu, arrays((shape, "bfloat16"))),
        f"{computed_casts.NAME}, silu(a) b": (silu_gated, arrays((shape, "bfloat16"), (shape, "bfloat16"))),
        "grouped by_expert": (by_expert, arrays((rows, "float8_e4m3fn"), (experts, "float8_e4m3fn"))),
        "grouped per_expert": (per_expert, arrays((rows, "float8_e4m3fn"), (rows, "float8_e5m2"))),
        "unscale_and_check": (functools.partial(pallas_kernels.unscale_and_check, **halves), tree),
        "gradient_norm": (functools.partial(pallas_kernels.gradient_norm, **halves), tree),
        "cast_tree": (functools.partial(pallas_kernels.cast_tree, dtype=jnp.bfloat16, backend=backend), tree),
        **{
            f"multi_tensor_update, {name}": (
                functools.partial(updated, RULES[kind[0]], backend=backend),
                functools.partial(weights, kind, [(n // 256 or 1, 256) for n in sizes]),
            )
            for name, kind in UPDATES.items()
        },
    }


def normal(shape: tuple[int, ...], seed: int, dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def weights(kind: tuple[str, str, str, str], shapes: Any, seed: int) -> Any:
    """[a gradient, param, master and moments of each shape]."""
    rule, param_dtype, master, state = kind
    leaves = []
    for i, shape in enumerate(shapes):
        w = normal(shape, seed * 8 + i, "float32")
        zeros = tuple(moments.zeros(shape, state, signed=signed) for signed in RULES[rule].signed)
        if master.startswith("int"):
            param, rest = moments.split(w, jnp.dtype(master))
        else:
            param, rest = (w.astype(param_dtype), w) if master else (None, w)
        leaves.append((normal(shape, seed * 8 + i + 4, param_dtype), param, rest, zeros))
    return [leaves]


def updated(rule: Any, weights: Any, *, backend: str, taken: Any = True, step: int = 3) -> Any:
    """(param, master, moments) of each weight after a step, and how many masters saturate."""
    one = jnp.float32(1.0)
    after, saturated = update.multi_tensor_update(
        [update.Weight(*w) for w in weights],
        rule,
        factor=one * 0.5,
        learning_rate=one * 1e-3,
        step=jnp.int32(step),
        scalars=(one * 0.1, one * 0.001) if isinstance(rule, update.AdamW) else (),
        taken=jnp.asarray(taken),
        backend=backend,
    )
    return [(w.param, w.master, w.moments) for w in after], saturated


def main(arguments: list[str]) -> None:
    """Launches each kernel once: `python -m benchmarks.gpu.launches [--tiny]`."""
    for name, (f, arguments_of) in launches("interpret" if "--tiny" in arguments else "mosaic").items():
        print(f"launch: {name}", flush=True)
        jax.block_until_ready(jax.jit(f)(*arguments_of(0)))


if __name__ == "__main__":
    main(sys.argv[1:])
