"""Who serves a kernel: XLA from plain jax.numpy, or Mosaic GPU from Pallas.

    "auto"        mosaic where the program is lowered for an NVIDIA GPU and the kernel can serve, else xla
    "xla"         the reference in jax.numpy, on any device
    "mosaic"      the kernel; raises where it cannot serve, and says which condition failed
    "interpret"   the kernel, interpreted on a CPU: for tests. It checks values, not whether Mosaic can lower them.

"auto" is decided when the program is lowered, by the platform it is lowered for (`lax.platform_dependent`): a function
that is traced on a CPU and compiled for a GPU gets the kernel. What cannot be asked there is how new the GPU is; the
GPUs of this machine stand for it, and without any Hopper is assumed.

A kernel sees whole arrays. Inside `jax.shard_map` and `jax.pmap` these are the device's own. Under plain `jax.jit` with
arrays that are split over devices XLA would gather them first, so kernels say by `custom_partitioning` how they are
split (`passes`, `meshes`). Meshes with explicit axes, and regions in which only some axes are manual, are left to XLA.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

NAMES = ("auto", "xla", "mosaic", "interpret")
FIRST_JAX = (0, 11, 2)  # before it, `plgpu.kernel` writes no refs and interprets nothing
FIRST_CAPABILITY = 9.0  # Hopper


def run(
    backend: str,
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    *args: Any,
    unmet: str | None = None,
) -> Any:
    """Calls `kernel(*args, interpret=...)` or `reference(*args)`, as `backend` says.

    Args:
      backend: one of `NAMES`.
      kernel: takes `interpret=`: False, or what `pl.kernel` takes for it.
      reference: the same function in jax.numpy.
      *args: pytrees of arrays.
      unmet: why the kernel cannot serve these arguments (shapes, dtypes); None if it can.

    Raises:
      ValueError: an unknown backend; "mosaic" or "interpret" where it cannot serve, with the condition that failed.
    """
    check(backend)
    if backend == "xla":
        return reference(*args)
    if backend == "auto":
        if unmet or why_no_kernels() or why_not_here(args):
            return reference(*args)
        by_kernel = functools.partial(_typed_as, reference, functools.partial(kernel, interpret=False))
        return lax.platform_dependent(*args, cuda=by_kernel, default=reference)
    reason = why_no_kernels(needs_gpu=backend == "mosaic") or unmet or why_not_here(args)
    if reason:
        raise ValueError(f'backend="{backend}" cannot serve here: {reason}. Use backend="auto", or "xla".')
    if backend == "mosaic":
        return kernel(*args, interpret=False)
    from jax.experimental.pallas import mosaic_gpu

    return kernel(*args, interpret=mosaic_gpu.InterpretGPUParams())


def _typed_as(reference: Callable[..., Any], kernel: Callable[..., Any], *args: Any) -> Any:
    """The kernel's results, typed as varying over the axes over which the reference's vary (`jax.shard_map`)."""
    out, treedef = jax.tree.flatten(kernel(*args))
    if any(varying_axes(x) for x in jax.tree.leaves(args)):
        expected = jax.make_jaxpr(lambda *a: jax.tree.leaves(reference(*a)))(*args).out_avals
        out = [as_varying(x, varying_axes(aval)) for x, aval in zip(out, expected, strict=True)]
    return treedef.unflatten(out)


def varying_axes(x: Any) -> frozenset[str]:
    """The manual axes over which an array, or its abstract value, may differ from device to device.

    Only `jax.shard_map(check_vma=True)` tracks them; elsewhere the set is empty.
    """
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    tracked = getattr(aval, "manual_axis_type", None)  # jax >= 0.10.2 as seen; `vma` before it was renamed
    return frozenset(getattr(aval, "vma", None) or ()) if tracked is None else frozenset(tracked.varying)


def as_varying(x: Array, axes: Iterable[str]) -> Array:
    """`x`, typed as varying over `axes` as well: the same value, but autodiff no longer sums its gradient over them.

    Under `jax.shard_map(check_vma=True)` the gradient of an unvarying input is summed over the mesh in the input's
    own dtype, which overflows in float16. Elsewhere this changes nothing.
    """
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def check(backend: str) -> None:
    """Raises a ValueError if there is no such backend."""
    if backend not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(map(repr, NAMES))}; got {backend!r}")


def why_no_kernels(*, needs_gpu: bool = False) -> str | None:
    """Why no kernel can serve with this jax and these GPUs; None if they can.

    Args:
      needs_gpu: whether a machine without a GPU, on which programs for one can still be compiled, is a reason.

    Example:
      >>> why_no_kernels() is None or why_no_kernels(needs_gpu=True) is not None  # no more serves without a GPU
      True
    """
    if jax.__version_info__ < FIRST_JAX:
        return f"kernels need jax >= {'.'.join(map(str, FIRST_JAX))}; this is {jax.__version__}"
    oldest = oldest_gpu()
    if oldest is None:
        return "there is no NVIDIA GPU" if needs_gpu else None
    if oldest < FIRST_CAPABILITY:
        return f"kernels need compute capability >= {FIRST_CAPABILITY} (Hopper); a GPU here has {oldest}"
    return None


def oldest_gpu() -> float | None:
    """The least compute capability of this machine's GPUs; None without one."""
    try:
        gpus = jax.devices("cuda")
    except RuntimeError:
        return None
    return min(float(getattr(gpu, "compute_capability", FIRST_CAPABILITY)) for gpu in gpus)


def why_not_here(args: Any) -> str | None:
    """Why no kernel can stand in this region of a program, with these arrays; None if one can."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and set(mesh.manual_axes) != set(mesh.axis_names):
        return f"only the axes {mesh.manual_axes} of the mesh {mesh.axis_names} are manual here"
    for x in jax.tree.leaves(args):
        lies_on = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
        if any(kind == jax.sharding.AxisType.Explicit for kind in getattr(lies_on, "axis_types", None) or ()):
            return "an array lies on a mesh with explicit axes"
    return None
