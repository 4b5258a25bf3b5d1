"""Sections of the GPU run for what only a GPU shows: races, loops, rematerialization, sizes beyond 32 bits, skipping.

Each test is an item of its own. Where the same kernel runs on the same numbers, equal bits are demanded.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks.gpu import launches as all_launches
from benchmarks.lib.timing import Bench, LeftOut, Variant, advanced, carried
from pallas_kernels import backend as backends


def same_bits(a: Any, b: Any) -> jax.Array:
    """bool[]: whether two trees have the same bits."""

    def same(x: jax.Array, y: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            return jnp.array_equal(x, y)
        unsigned = f"uint{8 * x.dtype.itemsize}"
        return jnp.array_equal(jax.lax.bitcast_convert_type(x, unsigned), jax.lax.bitcast_convert_type(y, unsigned))

    return jnp.stack(jax.tree.leaves(jax.tree.map(same, a, b))).all()


def _each_launch(bench: Bench, test: Callable[[str], dict[str, Any] | None]) -> None:
    """Runs a test for each kernel; in tiny sizes for every fifth: interpreted kernels take long to compile."""
    for name in all_launches.names()[:: 5 if bench.tiny else 1]:

        def run(name: str = name) -> dict[str, Any] | None:
            if bench.tiny and (reason := backends.why_no_kernels()):
                raise LeftOut(reason)
            return test(name)

        bench.check(name, run)


def repeats(bench: Bench) -> None:
    """20 launches of a kernel on the same numbers, in one queue: a race shows as other bits."""
    sizes = {} if bench.tiny else {"side": 1024, "blocks": 256}
    launches = all_launches.launches(bench.kernels, **sizes)

    def test(name: str) -> None:
        f, make = launches[name]
        args = jax.tree.map(jnp.asarray, make(0))
        run = jax.jit(f)
        first = run(*args)
        equal = jax.jit(same_bits)
        found = [equal(first, run(*args)) for _ in range(19)]
        different = [i + 2 for i, same in enumerate(found) if not same]
        assert not different, f"{name}: repeats {different} of 20 differ from the first in some bit"

    _each_launch(bench, test)


def scan(bench: Bench) -> None:
    """A kernel in a `lax.scan` of 4 beside 4 calls in one program: the same bits."""
    launches = all_launches.launches(bench.kernels)

    def test(name: str) -> None:
        f, make = launches[name]
        args = [make(seed) for seed in range(4)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *args)
        in_scan = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, f(*x)), None, xs)[1])(stacked)
        unrolled = jax.jit(lambda args: jax.tree.map(lambda *x: jnp.stack(x), *(f(*x) for x in args)))(args)
        assert same_bits(in_scan, unrolled), f"{name}: a scan of 4 and 4 calls differ in some bit"

    _each_launch(bench, test)


def remat(bench: Bench) -> None:
    """Gradients and params of a step under `jax.checkpoint`, beside the same step without, in bf16 and fp8."""
    for name in ("bf16", "fp8"):
        bench.check(f"step under remat, {name}", functools.partial(_remat, bench, name))


def _remat(bench: Bench, name: str) -> dict[str, Any]:
    import contextlib

    import flax.linen as nn

    import jaxmp
    from benchmarks.gpu.models import precision_of

    width = 64 if bench.tiny else 2048
    policy, recipe = precision_of(name)
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3, max_norm=1.0), policy, loss_scale=1024.0, recipe=recipe)
    x = jax.random.normal(jax.random.key(0), (width, width), policy.compute_dtype)

    def in_fp8() -> Any:
        return jaxmp.fp8.autocast(recipe) if recipe else contextlib.nullcontext()

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            dense = functools.partial(nn.Dense, use_bias=False, dtype=policy.compute_dtype)
            return x + dense(width)(nn.gelu(dense(2 * width)(x)))

    class Model(nn.Module):
        remat: bool

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            block = nn.remat(Block) if self.remat else Block
            return block(name="second")(block(name="first")(x))

    def step(remat: bool) -> Any:
        model = Model(remat)

        def init(key: jax.Array) -> Any:
            with in_fp8():
                params32 = model.init(key, x)["params"]
            return policy.cast_to_param(params32), tx.init(params32)

        def loss_fn(params: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(model.apply({"params": params}, x).astype(jnp.float32) ** 2)

        @jax.jit
        def run(key: jax.Array, x: jax.Array) -> Any:
            params, opt_state = init(key)
            with in_fp8():
                loss, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=opt_state)
            return loss, grads, jaxmp.apply_gradients(tx, grads, opt_state, params)[0]

        return run(jax.random.key(1), x)

    plain, again = step(remat=False), step(remat=True)
    equal = bool(same_bits(plain, again))
    gaps = jax.tree.map(_gap, plain, again)
    worst = max(jax.tree.leaves(gaps))
    # Not equal bits: two programs may fuse, and choose their matmuls, in different ways. An ulp of bfloat16 moves one
    # gradient in 32 to its neighbour in e5m2, a quarter away.
    bound = 2.0**-4 if recipe else 2.0**-7
    assert worst <= bound, (
        f"a step under remat differs by {worst:.2e} of the norm of a leaf: rounding explains {bound:.2e}"
    )
    return {"equal_bits": equal, "largest_gap": worst}


def _gap(a: jax.Array, b: jax.Array) -> float:
    a64, b64 = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a64 - b64) / max(np.linalg.norm(a64), 1e-30))


def large_leaf(bench: Bench) -> None:
    """Kernels over one leaf of more than 2^29 elements: an index or a byte offset of 32 bits would wrap."""
    n = (2**12 if bench.tiny else 2**29) + 2**11 + 3
    backend = bench.kernels
    half = jnp.float32(0.5)

    def leaf(dtype: str) -> jax.Array:
        """0 to 250, again and again: exact in every dtype; the last element is 7."""
        return jax.jit(lambda: (jnp.arange(n) % 251).astype(dtype).at[-1].set(7))()

    def unscale() -> None:
        x = leaf("float16")
        run = jax.jit(functools.partial(pallas_kernels.unscale_and_check, inv_scale=half, backend=backend))
        (y,), finite = run([x])
        assert finite, "unscale_and_check: finite gradients are said not to be"
        assert jax.jit(lambda x, y: jnp.array_equal(x.astype(jnp.float32) * half, y))(x, y), "wrong elements"
        del y
        _, finite = run([jax.jit(lambda x: x.at[-1].set(jnp.nan))(x)])
        assert not finite, "unscale_and_check: NaN in the last element is not seen"

    def norm() -> None:
        count = np.arange(n - 1) % 251
        exact = np.sqrt(float(np.sum(np.square(count, dtype=np.int64))) + 49.0) / 2
        found, finite = jax.jit(functools.partial(pallas_kernels.gradient_norm, inv_scale=half, backend=backend))(
            [leaf("float16")]
        )
        assert finite and abs(float(found) / exact - 1) < 1e-5, f"norm {float(found)}, exactly {exact}"

    def cast() -> None:
        x = leaf("float32")
        (y,) = jax.jit(functools.partial(pallas_kernels.cast_tree, dtype=jnp.bfloat16, backend=backend))([x])
        assert jax.jit(lambda x, y: jnp.array_equal(x, y.astype(jnp.float32)))(x, y), "wrong elements"

    def momentum() -> None:
        f = functools.partial(all_launches.updated, all_launches.RULES["Momentum"], backend=backend)
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
        run = jax.jit(lambda x: pallas_kernels.cast_transpose_amax(x, half, jnp.float8_e4m3fn, backend=backend))
        x = jax.jit(lambda: (jnp.arange(shape[0] * shape[1]).reshape(shape) % 13).astype(jnp.bfloat16))()
        q, q_t, amax = run(x)
        assert float(amax) == 12.0, f"amax {float(amax)}, not 12"
        right = jax.jit(lambda x, q, q_t: jnp.array_equal(x * 0.5, q.astype(x.dtype)) & jnp.array_equal(q, q_t.T))
        assert right(x, q, q_t), "wrong elements"

    tests = {
        "unscale_and_check": unscale,
        "gradient_norm": norm,
        "cast_tree": cast,
        "multi_tensor_update, Momentum": momentum,
        "cast_transpose_amax": matrix,
    }
    for name, test in tests.items():

        def run(test: Any = test) -> None:
            if bench.tiny and (reason := backends.why_no_kernels()):
                raise LeftOut(reason)
            test()

        bench.check(name, run)


def skipped(bench: Bench) -> None:
    """`taken=False` changes no bit, and takes the time of a launch: it moves no bytes. Both in programs of 8 steps."""
    shapes = [(1, 256), (3, 256)] if bench.tiny else [(2**14, 2**8)] * 16
    for name, kind in list(all_launches.UPDATES.items())[1:4:2]:
        job = functools.cache(functools.partial(_update, bench, kind, shapes))  # compiled once for all three

        def bits(job: Any = job) -> None:
            step, held, grads = job()
            after = step(jax.tree.map(jnp.copy, held), [jnp.full_like(g, jnp.nan) for g in grads], jnp.bool_(False))
            assert same_bits(after, held), "a step that is not taken changed a bit"

        def timed(taken: bool, job: Any = job) -> Variant:
            step, held, grads = job()
            return Variant(carried(step, jax.tree.map(jnp.copy, held), grads, jnp.bool_(taken)), copies=_STEPS)

        bench.check(f"bits, {name}", bits)
        variants = {"taken": functools.partial(timed, True), "not taken": functools.partial(timed, False)}
        bench.compare(SKIPPED.format(name), variants)


SKIPPED = "multi_tensor_update {}, 16 leaves"
_STEPS = 8  # in a program: queueing one takes the host longer than a step that is not taken takes the GPU


def _update(bench: Bench, kind: Any, shapes: Any) -> tuple[Any, Any, Any]:
    """Compiled steps that update their first argument in place, the weights without gradients, the gradients."""
    if bench.tiny and (reason := backends.why_no_kernels()):
        raise LeftOut(reason)
    (weights,) = all_launches.weights(kind, shapes, 0)
    grads, held = [w[0] for w in weights], [w[1:] for w in weights]
    rule = all_launches.RULES[kind[0]]

    def step(held: Any, grads: Any, taken: Any) -> Any:
        full = [(g, *w) for g, w in zip(grads, held, strict=True)]
        return all_launches.updated(rule, full, backend=bench.kernels, taken=taken)[0]

    compiled = jax.jit(advanced(step, _STEPS), donate_argnums=0).lower(held, grads, jnp.bool_(True)).compile()
    return compiled, held, grads
