"""Sections of the GPU run: the bandwidth of the device, and casts to fp8 beside XLA's."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from benchmarks.gpu import models, sections
from benchmarks.lib.timing import Bench, Variant, copies_for
from jaxmp._src.base import hardware
from jaxmp._src.fp8 import cast_ways

TABLE = dict(cast_ways.BY_KIND)  # as it is, before both ways are measured


def copy(bench: Bench) -> None:
    """A large copy: the reference for programs that memory bandwidth bounds."""
    x = jnp.zeros((2**12 if bench.tiny else 2**28,), jnp.float32)
    once = {"bytes": 2.0 * x.nbytes}
    programs = {"memcpy": jax.jit(jnp.copy), "kernel": jax.jit(lambda x: x * 1.5)}
    bench.compare("copy", {name: lambda f=f: Variant(lambda: f(x), work=once) for name, f in programs.items()})


def casts(bench: Bench) -> None:
    """Both ways of the casts in the GEMMs of a layer; then cast_transpose_amax alone, beside XLA.

    It reads x once, writes it in fp8 in both orders, and finds the amax.
    """
    rows, sides = (64, ((64, 64),)) if bench.tiny else (sections.ROWS, sections.SIDES)
    for n_in, n_out in sides:
        build = {way: functools.partial(_dense_in_way, rows, n_in, n_out, way) for way in cast_ways.WAYS}
        bench.compare(sections.CAST_WAYS.format(rows, n_in, n_out), build)
    for side in (128,) if bench.tiny else (4096, 8192):
        for dtype in (jnp.float32, jnp.bfloat16):
            build = {
                "xla": functools.partial(_cast, bench, side, dtype, "xla"),
                bench.kernels: bench.where_kernels_run(functools.partial(_cast, bench, side, dtype, bench.kernels)),
            }
            bench.compare(sections.CASTS.format(side, jnp.dtype(dtype).name), build)


def _cast(bench: Bench, side: int, dtype: Any, backend: str) -> Variant:
    copies = copies_for(side * side * 2, tiny=bench.tiny)
    xs = list(jax.random.normal(jax.random.key(0), (copies, side, side), dtype))

    def run(xs: list[jax.Array], scale: jax.Array) -> Any:
        return [pallas_kernels.cast_transpose_amax(x, scale, jnp.float8_e4m3fn, backend=backend) for x in xs]

    call = functools.partial(jax.jit(run), xs, jnp.float32(4.0))
    return Variant(call, copies=copies, work={"bytes": side * side * (jnp.dtype(dtype).itemsize + 2.0)})


def _dense_in_way(rows: int, n_in: int, n_out: int, way: str) -> Variant:
    """A Dense in fp8, forward and backward, whose tensors are cast in this way; it notes the way of the table."""
    kind = hardware.gpu_kind()
    table = TABLE.get(kind, cast_ways.ONE_PASS)
    cast_ways.BY_KIND[kind] = way
    jax.clear_caches()  # the program is traced at the first call
    variant = models.dense_variant(rows, n_in, n_out, "fp8 delayed")
    return variant._replace(notes=lambda: {**variant.notes(), "table": table})
