"""Backends of the kernels: XLA with plain jax.numpy, or Mosaic GPU with Pallas.

    "auto"        mosaic if the program is lowered for an NVIDIA GPU and the kernel supports the arguments, else xla
    "xla"         the reference in jax.numpy, on any device
    "mosaic"      the kernel; raises if it cannot run, and names the condition that failed
    "interpret"   the kernel, interpreted on a CPU, for tests. It checks values, but not whether Mosaic can lower them.

"auto" is decided when the program is lowered, by the platform of the lowering (`by_platform`): a function that is
traced on a CPU and compiled for a GPU gets the kernel, inside a scan too. The lowering does not know how new the GPU
is. So the GPUs of this machine decide; if it has none, Hopper is assumed.

A kernel needs whole arrays. Inside `jax.shard_map` and `jax.pmap`, these are the device's own arrays. Under plain
`jax.jit`, XLA would gather arrays that are split over devices. So the kernels of layers declare with
`custom_partitioning` how their arrays are split (`passes`, `grouped`); in place of those over whole trees, XLA runs
(`alone`). It also runs on meshes with explicit axes, and where only some axes are manual.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, PyTree

from pallas_kernels.by_platform import by_platform

NAMES = ("auto", "xla", "mosaic", "interpret")
FIRST_JAX = (0, 11, 2)  # in earlier versions, `plgpu.kernel` cannot write refs and has no interpreter
FIRST_CAPABILITY = 9.0  # Hopper


def run(
    backend: str,
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    *args: Any,
    unmet: str | None = None,
    alone: bool = False,
) -> Any:
    """Calls `kernel(*args, interpret=...)` or `reference(*args)`, as `backend` says."""
    # unmet: why the kernel does not support these arguments (shapes, dtypes); None if it does.
    # alone: whether no other device may share the arrays, outside of `jax.shard_map`.
    check(backend)
    if backend == "xla":
        return reference(*args)

    def by_kernel(f: Callable[..., Any], *args: Any) -> Any:
        return _typed_as(f, functools.partial(kernel, interpret=False), *args)

    def refuse(f: Callable[..., Any], *args: Any) -> Any:
        raise ValueError(
            'backend="mosaic" cannot run here: devices share the arrays, or jax.vmap adds an axis. Use backend="auto".'
        )

    if backend == "auto":
        if unmet or why_no_kernels() or why_not_here(args):
            return reference(*args)
        return by_platform(reference, *args, cuda=by_kernel, partitions=not alone, alone=alone)
    reason = why_no_kernels(needs_gpu=backend == "mosaic") or unmet or why_not_here(args)
    if reason:
        raise ValueError(f'backend="{backend}" cannot run here: {reason}. Use backend="auto", or "xla".')
    if backend == "mosaic" and alone:
        return by_platform(reference, *args, cuda=by_kernel, default=refuse, alone=True)
    if backend == "mosaic":
        return kernel(*args, interpret=False)
    from jax.experimental.pallas import mosaic_gpu

    return kernel(*args, interpret=mosaic_gpu.InterpretGPUParams())


def _typed_as(reference: Callable[..., Any], kernel: Callable[..., Any], *args: Any) -> Any:
    """The kernel's results, typed as varying over the same axes as the reference's results (`jax.shard_map`)."""
    out, treedef = jax.tree.flatten(kernel(*args))
    if any(varying_axes(x) for x in jax.tree.leaves(args)):
        expected = jax.make_jaxpr(lambda *a: jax.tree.leaves(reference(*a)))(*args).out_avals
        out = [as_varying(x, varying_axes(aval)) for x, aval in zip(out, expected, strict=True)]
    return treedef.unflatten(out)


def varying_axes(x: Any) -> frozenset[str]:
    """The manual axes over which `x` may differ from device to device; empty without `shard_map(check_vma=True)`."""
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    tracked = getattr(aval, "manual_axis_type", None)  # the name in jax >= 0.10.2; it was `vma` before
    return frozenset(getattr(aval, "vma", None) or ()) if tracked is None else frozenset(tracked.varying)


def varying_axes_of(tree: PyTree) -> frozenset[str]:
    """The manual axes over which an array of a tree may differ from device to device."""
    return frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))


def as_varying(x: Array, axes: Iterable[str]) -> Array:
    """`x`, typed as varying over `axes` too: the same value, but autodiff does not sum its gradient over them."""
    # Under `jax.shard_map(check_vma=True)` the gradient of an unvarying input is summed over the mesh in the input's
    # own dtype, which can overflow in float16. Elsewhere this changes nothing.
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def check(backend: str) -> None:
    """Raises a ValueError if there is no such backend."""
    if backend not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(map(repr, NAMES))}; got {backend!r}")


def why_no_kernels(*, needs_gpu: bool = False) -> str | None:
    """Why no kernel can run with this jax and these GPUs; None if kernels can run.

    Args:
      needs_gpu: whether a machine without a GPU is a reason. (Such a machine can still compile programs for a GPU.)

    Returns:
      The reason as text, or None.

    Example:
      >>> why_no_kernels() is None or why_no_kernels(needs_gpu=True) is not None
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


def devices_of(tree: PyTree) -> int:
    """Over how many devices an array may be split that is whole for this trace; 1 inside `jax.shard_map`."""
    own_meshes = [mesh for mesh in meshes(tree) if not mesh.empty and set(mesh.manual_axes) != set(mesh.axis_names)]
    return max((mesh.size for mesh in own_meshes), default=1)


def may_be_split(tree: PyTree) -> bool:
    """Whether devices may share an array of a tree, or its type says how they would: such arrays are not joined."""
    explicit = jax.sharding.AxisType.Explicit
    return devices_of(tree) > 1 or any(explicit in (mesh.axis_types or ()) for mesh in meshes(tree))


def meshes(tree: PyTree) -> list[AbstractMesh | Mesh]:
    """The mesh of this region of a program, and those of the arrays of a tree; some may be empty."""
    return [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))]


def gpus() -> Sequence[Any]:
    """The NVIDIA GPUs of this machine, if it has any."""
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def oldest_gpu() -> float | None:
    """The lowest compute capability of this machine's GPUs; None without a GPU."""
    return min((float(getattr(gpu, "compute_capability", FIRST_CAPABILITY)) for gpu in gpus()), default=None)


def why_not_here(args: Any) -> str | None:
    """Why no kernel can run in this region of a program, with these arrays; None if a kernel can run."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and set(mesh.manual_axes) != set(mesh.axis_names):
        return f"only the axes {mesh.manual_axes} of the mesh {mesh.axis_names} are manual here"
    for x in jax.tree.leaves(args):
        own_mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
        if any(kind == jax.sharding.AxisType.Explicit for kind in getattr(own_mesh, "axis_types", None) or ()):
            return "an array is on a mesh with explicit axes"
    return None
