"""Compiles every program of a test run in a way of its own, to find tests that compare the bits of two programs.

`JAXMP_TEST_COMPILERS=7 pytest` chooses the way of each jitted program by a checksum of 7 and its text: LLVM's
optimizations off (a * b + c is rounded twice), on (one FMA, where the CPU has it), and with `fast7` also with sums in
any order. A program compared with itself keeps its bits; two programs that were only lucky do not.
"""

import functools
import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.export
from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE as inside_a_jit

_OPTIMIZED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
_PLAIN = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_FAST = _OPTIMIZED | {
    "xla_cpu_enable_fast_math": True,
    "xla_cpu_fast_math_honor_infs": True,
    "xla_cpu_fast_math_honor_nans": True,
    "xla_cpu_fast_math_honor_division": True,
    "xla_cpu_fast_math_honor_functions": True,
}


def vary(seed: str) -> None:
    """From here on `jax.jit` compiles each program in a way that its text and `seed` choose."""
    ways = [_PLAIN, _OPTIMIZED] + [_FAST] * seed.startswith("fast")
    jit = jax.jit

    def varied(fun: Callable | None = None, /, **options: Any) -> Any:
        if fun is None:
            return functools.partial(varied, **options)
        return _Varied(jit, fun, options, ways, seed)

    jax.jit = functools.wraps(jit)(varied)
    export = jax.export.export
    jax.export.export = lambda f, *args, **kwargs: export(f._plain if isinstance(f, _Varied) else f, *args, **kwargs)


class _Varied:
    """A jitted function: what is not said here is asked of `jax.jit`'s."""

    def __init__(self, jit: Callable, fun: Callable, options: dict[str, Any], ways: list[dict], seed: str) -> None:
        functools.update_wrapper(self, fun)  # first: it copies the attributes below, if `fun` wraps another of these
        self._plain = jit(fun, **options)
        # Inside another program the outer one decides: jax takes options of the outermost only.
        said = options.get("compiler_options") or {}
        self._by_way = [jit(fun, **(options | {"compiler_options": way | said})) for way in ways]
        self._seed, self._chosen = seed, {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if inside_a_jit():
            return self._plain(*args, **kwargs)
        return self._way(args, kwargs)(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        if inside_a_jit():
            return self._plain.lower(*args, **kwargs)
        return self._way(args, kwargs).lower(*args, **kwargs)

    def _cache_size(self) -> int:
        return sum(way._cache_size() for way in self._by_way)

    def _way(self, args: tuple, kwargs: dict) -> Callable:
        leaves, tree = jax.tree.flatten((args, kwargs))
        key = (tree, *map(_kind, leaves))
        if key not in self._chosen:
            try:
                text = re.sub(r"0x[0-9a-f]+", "", str(self._plain.trace(*args, **kwargs).jaxpr))
            except TypeError:  # classes of jmp cannot hold what jax describes arguments with
                text = getattr(self._plain, "__qualname__", "")
            self._chosen[key] = self._by_way[zlib.crc32(f"{self._seed} {text}".encode()) % len(self._by_way)]
        return self._chosen[key]


def _kind(x: Any) -> Any:
    """What a program depends on: shape, dtype and place of an array, the value of anything else."""
    try:
        return jax.typeof(x), getattr(x, "sharding", None)
    except TypeError:
        return x
