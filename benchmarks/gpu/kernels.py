"""Sections of the GPU run: the bandwidth of the device, and each kernel beside XLA's version and torch's."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from benchmarks.gpu import models, sections
from benchmarks.lib import trees
from benchmarks.lib.timing import Bench, LeftOut, Variant, advanced, carried, copies_for, repeated
from jaxmp._src.base import hardware
from jaxmp._src.fp8 import cast_ways
from pallas_kernels import backend as backends, moments, update

TREE = "GPT-2 small"
TABLE = dict(cast_ways.BY_KIND)  # as it is, before both ways are measured
PASSES = 8  # over a tree, in one program: the host needs longer to queue one than the GPU to run it


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

            def variant(backend: str, side: int = side, dtype: Any = dtype) -> Variant:
                copies = copies_for(side * side * 2, tiny=bench.tiny)
                xs = list(jax.random.normal(jax.random.key(0), (copies, side, side), dtype))

                def run(xs: list[jax.Array], scale: jax.Array) -> Any:
                    return [
                        pallas_kernels.cast_transpose_amax(x, scale, jnp.float8_e4m3fn, backend=backend) for x in xs
                    ]

                call = functools.partial(jax.jit(run), xs, jnp.float32(4.0))
                return Variant(call, copies=copies, work={"bytes": side * side * (jnp.dtype(dtype).itemsize + 2.0)})

            _both(bench, sections.CASTS.format(side, jnp.dtype(dtype).name), variant)


def _dense_in_way(rows: int, n_in: int, n_out: int, way: str) -> Variant:
    """A Dense in fp8, forward and backward, whose tensors are cast in this way; it notes the way of the table."""
    kind = hardware.gpu_kind()
    table = TABLE.get(kind, cast_ways.ONE_PASS)
    cast_ways.BY_KIND[kind] = way
    jax.clear_caches()  # the program is traced at the first call
    variant = models.dense_variant(rows, n_in, n_out, "fp8 delayed")
    return variant._replace(notes=lambda: {**variant.notes(), "table": table})


def tree(bench: Bench) -> None:
    """Kernels over a whole tree, on the params of GPT-2 small: unscaling, the norm, the update."""
    shapes = {"kernel": trees.leaf(16, 256), "bias": trees.leaf(5)} if bench.tiny else trees.gpt2()
    size = trees.size(shapes)
    for dtype in (jnp.float16, jnp.float32):

        def unscale(backend: str, dtype: Any = dtype) -> Variant:
            f = functools.partial(pallas_kernels.unscale_and_check, backend=backend)
            return _passes(f, _random(shapes, dtype), size * (jnp.dtype(dtype).itemsize + 4.0))

        in_torch = {"torch": lambda: torch_unscale(shapes)} if dtype == jnp.float32 else {}
        _both(bench, f"unscale_and_check, {jnp.dtype(dtype).name}", unscale, in_torch)

    def norm(backend: str) -> Variant:
        f = functools.partial(pallas_kernels.gradient_norm, backend=backend)
        return _passes(f, _random(shapes, jnp.float16), size * 2.0)

    _both(bench, "gradient_norm, float16", norm, {"torch": lambda: torch_norm(shapes)})
    for kind, nbytes in KINDS.items():
        in_torch = {"torch": lambda: torch_adamw(shapes)} if kind == "float32" else {}
        variant = functools.partial(adamw, shapes, kind, size * nbytes)
        _both(bench, f"multi_tensor_update AdamW, {kind}", variant, in_torch)


def leaves(bench: Bench) -> None:
    """37 equal leaves beside one leaf of as many bytes: what the switch between leaves costs."""
    n, count = (2**8, 3) if bench.tiny else (2**21, 37)
    trees_of = {f"{count} leaves": [trees.leaf(n)] * count, "one leaf": [trees.leaf(count * n)]}
    for name in ("gradient_norm", "unscale_and_check"):
        nbytes = float(count) * n * (2 if name == "gradient_norm" else 6)

        def variant(shapes: Any, name: str = name, nbytes: float = nbytes) -> Variant:
            f = functools.partial(getattr(pallas_kernels, name), backend=bench.kernels)
            return _passes(f, _random(shapes, jnp.float16), nbytes)

        build = {which: functools.partial(variant, shapes) for which, shapes in trees_of.items()}
        bench.compare(f"{name}, float16, {count} leaves and one", build)
    kind, nbytes = next(iter(KINDS.items()))
    build = {
        which: functools.partial(adamw, shapes, kind, float(count * n * nbytes), bench.kernels)
        for which, shapes in trees_of.items()
    }
    bench.compare(f"multi_tensor_update AdamW, {count} leaves and one", build)


# Bytes that a step of AdamW reads and writes for one param: gradient; the parts of the weight; two moments
KINDS = {
    "float32": 4 + 8 + 16,
    "float16 with float32 master": 2 + 8 + 2 + 16,
    "bfloat16 with 16 bits of remainder": 2 + 4 + 4 + 16,
    "bfloat16 with 8 bits of remainder, int8 moments": 2 + 4 + 2 + 4,
}


def adamw(shapes: Any, kind: str, nbytes: float, backend: str) -> Variant:
    """A step on weights of one kind, in place."""
    state_dtype = jnp.int8 if "int8" in kind else jnp.float32
    rule = update.AdamW()

    dtype = jnp.dtype(kind.split()[0])  # of the gradients

    def weight(w: jax.Array) -> tuple[Any, ...]:
        held = tuple(moments.zeros(w.shape, state_dtype, signed=signed) for signed in rule.signed)
        if "remainder" in kind:
            return *moments.split(w, jnp.dtype(jnp.int8 if "8 bits" in kind else jnp.int16)), held
        return None if kind == "float32" else w.astype(dtype), w, held

    def step(weights: list[tuple[Any, ...]], grads: list[jax.Array], number: jax.Array) -> list[tuple[Any, ...]]:
        one = jnp.float32(1.0)
        moved, _ = update.multi_tensor_update(
            [update.Weight(g, *w) for g, w in zip(grads, weights, strict=True)],
            rule,
            factor=one,
            learning_rate=one * 1e-4,
            step=number,
            scalars=(one * 0.1, one * 0.001),
            taken=number > 0,
            backend=backend,
        )
        return [(w.param, w.master, w.moments) for w in moved]

    params, grads = jax.tree.leaves(_random(shapes, jnp.float32)), jax.tree.leaves(_random(shapes, dtype, seed=1))
    weights = jax.jit(lambda params: list(map(weight, params)))(params)
    call = carried(jax.jit(advanced(step, PASSES), donate_argnums=0), weights, grads, jnp.int32(1))
    return Variant(call, copies=PASSES, work={"bytes": float(nbytes)})


def _passes(f: Callable[..., Any], tree: Any, nbytes: float) -> Variant:
    """Passes of `f(tree, inverse scale)` over a tree, each of which moves so many bytes."""
    call = functools.partial(jax.jit(repeated(f, PASSES)), tree, jnp.float32(1.0))
    return Variant(call, copies=PASSES, work={"bytes": nbytes})


def _both(
    bench: Bench, what: str, variant: Callable[[str], Variant], more: dict[str, Callable[[], Variant]] | None = None
) -> None:
    """The kernel beside XLA, and beside `more`."""

    def kernel() -> Variant:
        if bench.kernels == "interpret" and (reason := backends.why_no_kernels()):
            raise LeftOut(reason)
        return variant(bench.kernels)

    more = {} if more is None else more
    bench.compare(what, {"xla": lambda: variant("xla"), bench.kernels: kernel, **more})


def _random(shapes: Any, dtype: Any, seed: int = 0) -> Any:
    def draw() -> Any:
        leaves, treedef = jax.tree.flatten(shapes)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        return treedef.unflatten(
            [jax.random.normal(k, x.shape, jnp.float32).astype(dtype) for k, x in zip(keys, leaves, strict=True)]
        )

    return jax.jit(draw)()


# --- torch ------------------------------------------------------------------------------------------------------------


def _torch() -> Any:
    try:
        import torch
    except ImportError as e:
        raise LeftOut(f"torch is missing: {e}") from e
    if not torch.cuda.is_available():
        raise LeftOut("torch sees no GPU")
    return torch


def _tensors(torch: Any, shapes: Any, dtype: str) -> list[Any]:
    found = [x.shape for x in jax.tree.leaves(shapes)]
    return [torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for shape in found]


def torch_unscale(shapes: Any) -> Variant:
    """The pass of torch's GradScaler over gradients: in place, with as many bytes as ours on float32."""
    torch = _torch()
    grads = _tensors(torch, shapes, "float32")
    found_inf, inv_scale = torch.zeros((), device="cuda"), torch.ones((), device="cuda")

    def call() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)

    return Variant(call, lambda _: torch.cuda.synchronize(), work={"bytes": trees.size(shapes) * 8.0})


def torch_norm(shapes: Any) -> Variant:
    """The global norm as in `torch.nn.utils.clip_grad_norm_`."""
    torch = _torch()
    grads = _tensors(torch, shapes, "float16")

    def call() -> Any:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))

    return Variant(call, lambda _: torch.cuda.synchronize(), work={"bytes": trees.size(shapes) * 2.0})


def torch_adamw(shapes: Any) -> Variant:
    """`torch.optim.AdamW(fused=True)` on float32 params."""
    torch = _torch()
    params = [torch.nn.Parameter(x) for x in _tensors(torch, shapes, "float32")]
    for p, g in zip(params, _tensors(torch, shapes, "float32"), strict=True):
        p.grad = g
    step = torch.optim.AdamW(params, lr=1e-4, fused=True).step
    return Variant(step, lambda _: torch.cuda.synchronize(), work={"bytes": trees.size(shapes) * 28.0})
