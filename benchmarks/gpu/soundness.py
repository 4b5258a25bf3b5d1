"""Sections of the GPU run for what only a GPU shows: races, loops, sizes beyond 32 bits, skipped steps."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks.gpu import launches as all_launches
from benchmarks.lib.timing import Bench, Variant, advanced, carried

SKIPPED = "multi_tensor_update {}, 16 leaves"
STEPS = 8  # in a program: queueing one takes the host longer than a step that is not taken takes the GPU


def same_bits(a: Any, b: Any) -> jax.Array:
    """bool[]: whether two trees have the same bits."""

    def same(x: jax.Array, y: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            return jnp.array_equal(x, y)
        unsigned = f"uint{8 * x.dtype.itemsize}"
        return jnp.array_equal(jax.lax.bitcast_convert_type(x, unsigned), jax.lax.bitcast_convert_type(y, unsigned))

    return jnp.stack(jax.tree.leaves(jax.tree.map(same, a, b))).all()


def _check_each(bench: Bench, launches: dict[str, all_launches.Launch], test: Callable[..., None]) -> None:
    """Runs a test for each launch; in tiny sizes for every fifth: interpreted kernels take long to compile."""
    for name in list(launches)[:: 5 if bench.tiny else 1]:
        bench.check(name, bench.where_kernels_run(functools.partial(test, *launches[name])))


def repeats(bench: Bench) -> None:
    """20 launches of a kernel on the same numbers, in one queue: a race shows as other bits."""
    sizes = {} if bench.tiny else {"side": 1024, "blocks": 256}

    def test(f: Callable[..., Any], arguments_of: Callable[[int], Any]) -> None:
        arguments = jax.tree.map(jnp.asarray, arguments_of(0))
        run, equal = jax.jit(f), jax.jit(same_bits)
        first = run(*arguments)
        repeats = [equal(first, run(*arguments)) for _ in range(19)]
        different = [i + 2 for i, same in enumerate(repeats) if not same]
        assert not different, f"repeats {different} of 20 differ from the first in some bit"

    _check_each(bench, all_launches.launches(bench.kernels, **sizes), test)


def scan(bench: Bench) -> None:
    """A kernel in a `lax.scan` of 4 beside 4 calls in one program: the same bits."""

    def test(f: Callable[..., Any], arguments_of: Callable[[int], Any]) -> None:
        arguments = [arguments_of(seed) for seed in range(4)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *arguments)
        in_scan = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, f(*x)), None, xs)[1])(stacked)
        unrolled = jax.jit(lambda args: jax.tree.map(lambda *x: jnp.stack(x), *(f(*x) for x in args)))(arguments)
        assert same_bits(in_scan, unrolled), "a scan of 4 and 4 calls differ in some bit"

    _check_each(bench, all_launches.launches(bench.kernels), test)


def large_leaf(bench: Bench) -> None:
    """Kernels over one leaf of more than 2^29 elements: an index or a byte offset of 32 bits would wrap."""
    n = (2**12 if bench.tiny else 2**29) + 2**11 + 3
    half = jnp.float32(0.5)
    kernels = {"backend": bench.kernels}

    def leaf(dtype: str) -> jax.Array:
        """0 to 250, again and again: exact in every dtype; the last element is 7."""
        return jax.jit(lambda: (jnp.arange(n) % 251).astype(dtype).at[-1].set(7))()

    def unscale() -> None:
        x = leaf("float16")
        run = jax.jit(functools.partial(pallas_kernels.unscale_and_check, inv_scale=half, **kernels))
        (y,), finite = run([x])
        assert finite, "unscale_and_check: finite gradients are said not to be"
        assert jax.jit(lambda x, y: jnp.array_equal(x.astype(jnp.float32) * half, y))(x, y), "wrong elements"
        del y
        _, finite = run([jax.jit(lambda x: x.at[-1].set(jnp.nan))(x)])
        assert not finite, "unscale_and_check: NaN in the last element is not seen"

    def norm() -> None:
        count = np.arange(n - 1) % 251
        exact = np.sqrt(float(np.sum(np.square(count, dtype=np.int64))) + 49.0) / 2
        run = jax.jit(functools.partial(pallas_kernels.gradient_norm, inv_scale=half, **kernels))
        value, finite = run([leaf("float16")])
        assert finite and abs(float(value) / exact - 1) < 1e-5, f"norm {float(value)}, exactly {exact}"

    def cast() -> None:
        x = leaf("float32")
        (y,) = jax.jit(functools.partial(pallas_kernels.cast_tree, dtype=jnp.bfloat16, **kernels))([x])
        assert jax.jit(lambda x, y: jnp.array_equal(x, y.astype(jnp.float32)))(x, y), "wrong elements"

    def momentum() -> None:
        f = functools.partial(all_launches.updated, all_launches.RULES["Momentum"], **kernels)
        zeros = jnp.zeros(n, jnp.float32)

        @functools.partial(jax.jit, donate_argnums=(1, 2))
        def run(g: jax.Array, w: jax.Array, mu: jax.Array) -> Any:
            ((_, w, (mu,)),), _ = f([(g, None, w, (mu,))])
            return w, mu

        w, mu = run(leaf("float32"), zeros, jnp.zeros_like(zeros))

        @jax.jit
        def right(w: jax.Array, mu: jax.Array) -> jax.Array:
            g = (jnp.arange(n) % 251).astype(jnp.float32).at[-1].set(7) * 0.5
            return jnp.array_equal(mu, g) & (jnp.max(jnp.abs(w + 1e-3 * g)) < 1e-6)

        assert right(w, mu), "wrong elements"

    def matrix() -> None:
        shape = (128, 192) if bench.tiny else (2**15, 2**14 + 2**7)
        run = jax.jit(lambda x: pallas_kernels.cast_transpose_amax(x, half, jnp.float8_e4m3fn, **kernels))
        x = jax.jit(lambda: (jnp.arange(shape[0] * shape[1]).reshape(shape) % 13).astype(jnp.bfloat16))()
        q, q_t, amax = run(x)
        assert float(amax) == 12.0, f"amax {float(amax)}, not 12"
        right = jax.jit(lambda x, q, q_t: jnp.array_equal(x * 0.5, q.astype(x.dtype)) & jnp.array_equal(q, q_t.T))
        assert right(x, q, q_t), "wrong elements"

    bench.check("unscale_and_check", bench.where_kernels_run(unscale))
    bench.check("gradient_norm", bench.where_kernels_run(norm))
    bench.check("cast_tree", bench.where_kernels_run(cast))
    bench.check("multi_tensor_update, Momentum", bench.where_kernels_run(momentum))
    bench.check("cast_transpose_amax", bench.where_kernels_run(matrix))


def skipped(bench: Bench) -> None:
    """`taken=False` changes no bit, and takes the time of a launch: it moves no bytes."""
    shapes = [(1, 256), (3, 256)] if bench.tiny else [(2**14, 2**8)] * 16
    for name, kind in list(all_launches.UPDATES.items())[1:4:2]:
        job = functools.cache(functools.partial(_update, bench, kind, shapes))  # compiled once for all three

        def bits(job: Any = job) -> None:
            step, weights, grads = job()
            after = step(jax.tree.map(jnp.copy, weights), [jnp.full_like(g, jnp.nan) for g in grads], jnp.bool_(False))
            assert same_bits(after, weights), "a step that is not taken changed a bit"

        def timed(taken: bool, job: Any = job) -> Variant:
            step, weights, grads = job()
            return Variant(carried(step, jax.tree.map(jnp.copy, weights), grads, jnp.bool_(taken)), copies=STEPS)

        bench.check(f"bits, {name}", bench.where_kernels_run(bits))
        variants = {"taken": functools.partial(timed, True), "not taken": functools.partial(timed, False)}
        build = {taken: bench.where_kernels_run(variant) for taken, variant in variants.items()}
        bench.compare(SKIPPED.format(name), build)


def _update(bench: Bench, kind: Any, shapes: Any) -> tuple[Any, Any, Any]:
    """Compiled steps that update their first argument in place, the weights without gradients, the gradients."""
    (weights,) = all_launches.weights(kind, shapes, 0)
    grads, rest = [w[0] for w in weights], [w[1:] for w in weights]
    rule = all_launches.RULES[kind[0]]

    def step(rest: Any, grads: Any, taken: Any) -> Any:
        whole = [(g, *w) for g, w in zip(grads, rest, strict=True)]
        return all_launches.updated(rule, whole, backend=bench.kernels, taken=taken)[0]

    compiled = jax.jit(advanced(step, STEPS), donate_argnums=0).lower(rest, grads, jnp.bool_(True)).compile()
    return compiled, rest, grads
