"""Public functions under autocast, with gradients and under transformations, beside float32 and a cast by hand.

    make autocast         every function, dtype and transformation; writes benchmarks/results/autocast_fuzz.json

Each float argument comes from a 16-bit matmul, which leaves its value as it is. Then

    exact      the function in float32
    by hand    the function of 16-bit arguments, where jax has it: the error that 16 bits may make
    autocast   is not further from `exact` than a few times that error, or a few units in the last place

The same holds under vmap (inside and outside), scan, while and cond, and for the gradient of a weighted sum.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import campaigns
import jaxmp
import public_functions
from public_functions import FUNCTIONS

DTYPES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
QUICK = {"xla_backend_optimization_level": 0}
# Results that are chosen by comparing numbers, at random or by index: one rounding may change them wholly.
CHOSEN = ("argsort", "categorical", "random.gamma", "nextafter", "lexsort", "spence")


def is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def lowered(x: Any) -> Any:
    """`x` as the result of a matmul: 16 bits under autocast, and exact."""
    if not is_float(x):
        return x
    return (jnp.stack([x] * 8, -1) @ jnp.full((8, 1), 1 / 8))[..., 0]  # four elements would be no matmul


def flat(fn: Any) -> Any:
    """`fn` of lowered arguments; a list of its array results."""
    return lambda *args: [jnp.asarray(x) for x in jax.tree.leaves(fn(*map(lowered, args)))]


def twice(args: Any) -> Any:
    return [jnp.stack([x, x]) for x in args]


def second(results: Any) -> Any:
    return [x[1] for x in results]


def in_scan(fn: Any) -> Any:
    return lambda *args: second(lax.scan(lambda c, xs: (c, fn(*xs)), 0, tuple(twice(args)))[1])


def in_vmap(fn: Any) -> Any:
    return lambda *args: second(jax.vmap(fn)(*twice(args)))


def zeros_of(fn: Any, *args: Any) -> Any:
    return [jnp.zeros(s.shape, s.dtype) for s in jax.eval_shape(fn, *args)]


def in_while(fn: Any) -> Any:
    return lambda *args: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, fn(*args)), (0, zeros_of(fn, *args)))[
        1
    ]


def in_cond(fn: Any) -> Any:
    zeros = functools.partial(zeros_of, fn)
    return lambda *args: lax.cond(jnp.ravel(args[0])[0] > -1e4, fn, zeros, *args)


OVER = {"plain": lambda fn: fn, "vmap": in_vmap, "scan": in_scan, "while": in_while, "cond": in_cond}
WITHOUT_REVERSE = ("while",)


def weighted(fn: Any, floats: list[int], weights: Any) -> Any:
    """The gradient of a weighted sum of the float results of `fn`."""

    def gradient(*args: Any) -> Any:
        def total(moving: Any) -> Any:
            given = list(args)
            for i, x in zip(floats, moving, strict=True):
                given[i] = x
            outs = [x for x in fn(*given) if is_float(x)]
            return sum(jnp.sum(x.astype(jnp.float32) * w) for x, w in zip(outs, weights, strict=True))

        return jax.grad(total)([args[i] for i in floats])

    return gradient


def program(name: str, dtype: Any, over: Any, seed: int) -> tuple[Any, Any]:
    """A function that computes everything, and its arguments."""
    fn, kinds = FUNCTIONS[name]
    args = public_functions.arguments(kinds, seed)
    floats = [i for i, x in enumerate(args) if x.dtype == np.float32]
    plain = flat(fn)
    shapes = jax.eval_shape(plain, *args)
    rng = np.random.default_rng(seed + 1)
    weights = [rng.uniform(0.5, 1.5, s.shape).astype(np.float32) for s in shapes if is_float(s)]
    has_gradient = bool(floats and weights) and _runs(weighted(plain, floats, weights), args)
    cast = [x.astype(dtype) if x.dtype == np.float32 else x for x in args]
    by_hand = lambda *args: [jnp.asarray(x) for x in jax.tree.leaves(fn(*args))]  # noqa: E731
    has_by_hand = _runs(by_hand, cast)

    def run(args: Any, cast: Any) -> Any:
        values, grads = {"exact": plain(*args)}, {}
        if has_by_hand:
            values["by hand"] = by_hand(*cast)
        auto = functools.partial(jaxmp.autocast, dtype=dtype)
        for how in over:
            values[how] = auto(OVER[how](plain))(*args)
        if "vmap" in over:
            values["outer vmap"] = in_vmap(auto(plain))(*args)
        if has_gradient:
            grads["exact"] = weighted(plain, floats, weights)(*args)
            if has_by_hand and _runs(weighted(by_hand, floats, weights), cast):
                grads["by hand"] = weighted(by_hand, floats, weights)(*cast)
            for how in over:
                if how not in WITHOUT_REVERSE:
                    grads[how] = weighted(auto(OVER[how](plain)), floats, weights)(*args)
            if "plain" in over:
                grads["inner"] = auto(weighted(plain, floats, weights))(*args)
        return values, grads

    return run, (args, cast)


def _runs(fn: Any, args: Any) -> bool:
    try:
        jax.jit(fn).lower(*args)
    except Exception:  # jax has no such function, derivative, or kernel on this platform
        return False
    return True


def check(name: str, dtype: Any, over: Any = tuple(OVER), seed: int = 0) -> int:
    """Raises an AssertionError for a function that autocast makes wrong. Returns how many results were compared."""
    with jax.numpy_rank_promotion("allow"):
        run, arguments = program(name, dtype, over, seed)
        values, grads = jax.jit(run, compiler_options=QUICK)(*arguments)
    compared = 0
    for kind, results in (("value", values), ("gradient", grads)):
        for how, got in results.items():
            if how in ("exact", "by hand"):
                continue
            hands = results.get("by hand", results["exact"])
            for i, (y, exact, by_hand) in enumerate(zip(got, results["exact"], hands, strict=True)):
                _compare(f"{name}, {jnp.dtype(dtype).name}, {how}, {kind} {i}", y, exact, by_hand, dtype, kind)
                compared += 1
    return compared


def _compare(what: str, y: Any, exact: Any, by_hand: Any, dtype: Any, kind: str) -> None:
    assert y.shape == exact.shape, what
    if any(word in what for word in CHOSEN):
        return
    if not is_float(exact):
        same = (np.asarray(y) == np.asarray(exact)) | (np.asarray(y) == np.asarray(by_hand))
        assert same.all(), (what, y, exact)
        return
    assert y.dtype in (jnp.dtype(dtype), jnp.float32), (what, y.dtype)
    y, exact, by_hand = (np.asarray(x).astype(np.float64) for x in (y, exact, by_hand))
    eps = float(jnp.finfo(dtype).eps)
    with np.errstate(invalid="ignore"):
        hand_error = np.nan_to_num(np.abs(by_hand - exact), nan=0.0, posinf=0.0, neginf=0.0)
        largest = np.abs(exact[np.isfinite(exact)]).max(initial=1.0)
        factor = 3.0 if kind == "value" else 8.0
        bound = factor * (hand_error.max(initial=0.0) + eps * np.abs(exact) + 0.5 * eps * largest)
        wrong = ~((y == exact) | (np.isnan(y) & np.isnan(exact)) | (np.abs(y - exact) <= bound))
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise AssertionError((what, at, y[at], exact[at], by_hand[at]))


NAMES = sorted(FUNCTIONS)


def _row_of(name: str, seed: int) -> dict[str, Any]:
    """How many results of a function were compared, and what was wrong."""
    compared, wrong = dict.fromkeys(DTYPES, 0), []
    for dtype in DTYPES:
        try:
            compared[dtype] = check(name, DTYPES[dtype], seed=seed)
        except AssertionError as e:
            wrong.append(str(e))
        except Exception as e:
            wrong.append(f"{name}, {dtype}: {type(e).__name__}: {e}")
    return {"compared": compared, "wrong": wrong}


def main() -> int:
    """The campaign."""
    parser = campaigns.parser_of(__doc__)
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every N-th, from the I-th"
    )
    arguments = parser.parse_args()
    index, parts = arguments.part
    names = NAMES[index::parts]

    def summary(rows: list[Any], wrong: list[str]) -> dict[str, Any]:
        compared = sum(sum(row["compared"].values()) for row in rows)
        not_run = len(NAMES) - len(rows)
        return {"functions": len(rows), "functions_not_run": not_run, "compared": compared, "wrong": wrong}

    return campaigns.one_by_one(
        arguments.json,
        f"python tests/support/autocast_fuzz.py --seed {arguments.seed}",
        "function",
        zip(names, names, strict=True),
        lambda name: _row_of(name, arguments.seed),
        lambda row: row["wrong"],
        summary,
    )


if __name__ == "__main__":
    sys.exit(main())
