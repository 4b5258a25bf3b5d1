"""Weights in safetensors files: out for inference engines, in from wherever they were trained.

A file holds named tensors and nothing that could be run. Names and layouts are those of two worlds:

    flax    the path with dots, `decoder.Dense_0.kernel`, arrays as they are
    torch   `decoder.Dense_0.weight`: kernels [in, out] are stored as [out, in], convolutions [*k, in, out] as
            [out, in, *k], embeddings and the gains of norms are called weight as well

A kernel in fp8 stands beside its scale, as vLLM, TensorRT-LLM and compressed-tensors read it:

    weight        float8_e4m3fn      round(w / weight_scale)
    weight_scale  float32, shape ()  max |w| / 448           w = weight * weight_scale
"""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxmp._src.base import optional, tree_paths
from jaxmp._src.checkpoint import job_leaves, placement
from jaxmp._src.fp8 import scale_leaves, stored_kernels
from jaxmp._src.numerics import casting
from jaxmp._src.step.state import get_master_params, masters_of

Layout = Literal["flax", "torch"]
_FP8 = jnp.dtype(jnp.float8_e4m3fn)
_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
_CODES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "U16": np.uint16, "U32": np.uint32, "BOOL": np.bool_,
}  # fmt: skip


def save_safetensors(
    path: Any,
    params: PyTree,
    *,
    opt_state: Any = None,
    dtype: Any = jnp.bfloat16,
    layout: Layout = "flax",
    keep: str | Sequence[str] = (),
    input_scales: bool = False,
    rename: Callable[[str], str] | None = None,
) -> None:
    """Writes the weights into one safetensors file: from the masters where there are any, each rounded once.

    Args:
      path: the file. It is replaced in one go, when all of it is written.
      params: the model's params, or any tree of weights such as `get_ema_params(...)`.
      opt_state: state with the masters of `params`.
      dtype: float32, bfloat16, float16 or float8_e4m3fn. In fp8 only kernels are stored so, each with its scale;
        all else is bfloat16. Kernels are leaves called `kernel` with two axes or more.
      layout: `"flax"` or `"torch"`; see the module's docstring.
      keep: patterns (docs/patterns.md) of kernels that stay bfloat16 in an fp8 file (`"*lm_head*"`).
      input_scales: for fp8: whether `input_scale`, 1 / scale of a layer's input as trained, is written beside
        `weight_scale`, for engines with static scales of activations.
      rename: the name of a tensor from what `layout` makes of its path, such as `lambda n: "model." + n`.

    Raises:
      ImportError: safetensors is not installed; names the extra.
      ValueError: another dtype; two tensors of one name; masters of other shapes than `params` (`jaxmp.fsdp.trim` takes
        both), or a kernel that has no torch layout, named by path.

    Example:
      >>> import tempfile
      >>> params = {"Dense_0": {"kernel": jnp.full((2, 3), 2.0), "bias": jnp.zeros(3)}}
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save_safetensors(directory + "/w", params, dtype=jnp.float8_e4m3fn, layout="torch")
      ...     tensors = read_safetensors(directory + "/w")
      >>> {name: (x.dtype.name, x.shape) for name, x in tensors.items()}
      {'Dense_0.bias': ('bfloat16', (3,)), 'Dense_0.weight': ('float8_e4m3fn', (3, 2)), 'Dense_0.weight_scale': \
('float32', ())}
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in _DTYPES:
        raise ValueError(f"weights are written as {', '.join(_DTYPES)}; got {dtype}")
    _check_layout(layout)
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, x: Any, path: str) -> None:
        name = name if rename is None else rename(name)
        if name in tensors:
            raise ValueError(f"each tensor needs a name of its own; got {name!r} for {path} and for another leaf.")
        tensors[name] = _on_host(x, path)

    given = job_leaves.plain_leaves(params)
    full = job_leaves.plain_leaves(_in_full(params, opt_state))
    layers = stored_kernels.pairs(full)
    tree_paths.warn_of_idle("save_safetensors(keep=)", keep, full, of="param")
    for at, x in full.items():
        if scale_leaves.is_scale(at):
            continue
        x, name = _laid_out(x, at, layout), _name(at, layout)
        narrow = casting.is_float(x) and dtype == _FP8 and _is_kernel(at, x) and not tree_paths.matches(at, keep)
        if not narrow:
            wanted = jnp.bfloat16 if dtype == _FP8 else dtype
            add(name, casting.cast_float(jnp.asarray(x), wanted, saturate=True), at)
            continue
        if opt_state is None and stored_kernels.is_stored(given[at]):  # as it was trained
            weight, weight_scale = _laid_out(given[at], at, layout), _inverse_scale(given, layers[at])
        else:
            weight, weight_scale = quantized(x)
        add(name, weight, at)
        add(f"{name}_scale", weight_scale, at)
        of_input = layers.get(at, "").replace("fp8_rhs", "fp8_lhs")
        if input_scales and of_input in given:
            add(_beside(name, "input_scale"), _inverse_scale(given, of_input), of_input)
    _write(pathlib.Path(path), tensors, {"format": "pt" if layout == "torch" else "flax"})


def load_safetensors(
    path: Any,
    like: PyTree,
    *,
    layout: Layout = "flax",
    rename: Callable[[str], str] | None = None,
    strict: bool = True,
) -> PyTree:
    """Params from safetensors files, in the tree, dtypes and shardings of `like`.

    Args:
      path: a file, or several (shards of one model).
      like: the model's params, arrays or `jax.ShapeDtypeStruct`: float32 for masters to start from in full. fp8 scales
        in it are kept if they are arrays, and start anew (scale 1) if they are not.
      layout, rename: as for `save_safetensors`: how the names and the axes of `like` become those of the file.
      strict: whether a tensor of the file that has no place in `like` is an error. One that is missing always is.

    Returns:
      A tree like `like`. Tensors in fp8 are multiplied by their scale.

    Raises:
      ImportError: safetensors is not installed; names the extra.
      ValueError: a file that is damaged or is something else; a tensor that is missing, left over or of another shape.

    Example:
      >>> import tempfile
      >>> params = {"Dense_0": {"kernel": jnp.full((2, 3), 2.0)}}
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save_safetensors(directory + "/w", params, dtype=jnp.float8_e4m3fn)
      ...     load_safetensors(directory + "/w", params)["Dense_0"]["kernel"].tolist()
      [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    _check_layout(layout)
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    tensors: dict[str, np.ndarray] = {}
    for one in paths:
        tensors |= read_safetensors(one)
    left = set(tensors)
    what = ", ".join(map(str, paths))

    def take(path: str, x: Any) -> Any:
        path = job_leaves.plain(path)
        if scale_leaves.is_scale(path):
            return x if not isinstance(x, jax.ShapeDtypeStruct) else _start(path, x)
        name = _name(path, layout)
        name = name if rename is None else rename(name)
        if name not in tensors:
            raise ValueError(f"{what} must have a tensor for each param; {name} ({path}) is missing. {_has(tensors)}")
        left.difference_update({name, f"{name}_scale", _beside(name, "input_scale")})
        tensor = _dequantized(tensors, name)
        tensor = _laid_in(tensor, path, layout)
        if tensor.shape != tuple(x.shape):
            raise ValueError(
                f"{what} must fit the model; {name} has shape {tensor.shape} as {path}, expected {tuple(x.shape)}."
            )
        value = casting.cast_float(jnp.asarray(tensor), x.dtype, saturate=True)
        if value.dtype != x.dtype:
            raise ValueError(f"{what} must fit the model; {name} is {value.dtype}, expected {x.dtype} at {path}.")
        return value

    loaded = tree_paths.map_with_path(take, like)
    if strict and left:
        raise ValueError(
            f"{what} must be of this model; the tensor {min(left)} has no place in it. Pass strict=False to pass over "
            f"what is left."
        )
    return placement.Shardings(like).place(loaded)


def read_safetensors(path: Any) -> dict[str, np.ndarray]:
    """The tensors of one file by name, as they are stored.

    Raises:
      ValueError: a file that is damaged, cut off, or something else.

    Example:
      >>> import tempfile
      >>> path = tempfile.mkdtemp() + "/model.safetensors"
      >>> save_safetensors(path, {"dense": {"kernel": jnp.ones((3, 2))}})
      >>> {name: x.shape for name, x in read_safetensors(path).items()}
      {'dense.kernel': (3, 2)}
    """
    library = optional.load("safetensors", extra="checkpoint")
    if not pathlib.Path(path).is_file():
        raise ValueError(f"weights are read from a file; there is none at {path}.")
    try:
        found = library.deserialize(pathlib.Path(path).read_bytes())
        return {name: _array(spec) for name, spec in sorted(found)}
    except (library.SafetensorError, KeyError, ValueError) as e:
        raise ValueError(
            f"{path} must be a whole safetensors file; it is damaged, cut off or something else ({e})."
        ) from e


def quantized(weight: Any) -> tuple[Any, Any]:
    """(fp8 weight, weight_scale) with weight ≈ fp8 * weight_scale: one scale for the tensor, as engines read it."""
    weight = jnp.asarray(weight, jnp.float32)
    limit = float(jnp.finfo(_FP8).max)
    largest = jnp.max(jnp.abs(weight), initial=0.0)
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest / np.float32(limit), np.float32(1.0))
    scale = jnp.maximum(scale, np.float32(jnp.finfo(jnp.float32).tiny))
    return casting.saturating_cast(weight / scale, _FP8), scale


def _start(path: str, x: Any) -> Any:
    return jnp.full(x.shape, 0.0 if scale_leaves.format_of(path)[2] else 1.0, x.dtype)


def _in_full(params: PyTree, opt_state: Any) -> PyTree:
    if opt_state is None:
        return stored_kernels.load_weights(params, jnp.float32)
    _check_masters(opt_state, params)
    return get_master_params(opt_state, params)


def _check_masters(opt_state: Any, params: PyTree) -> None:
    """Raises a ValueError that names the first param whose master has another shape."""
    units, treedef = tree_paths.boxed_leaves(params)
    for (path, unit), master in zip(units, treedef.flatten_up_to(masters_of(opt_state, params)), strict=True):
        shapes = [[tuple(x.shape) for x in jax.tree.leaves(part)] for part in (unit, master)]
        if master is not None and shapes[0] != shapes[1]:
            got = [", ".join(map(str, found)) for found in shapes]
            raise ValueError(
                f"weights are written from the masters, which must have the shapes of params; {path} is {got[0]} in "
                f"params and {got[1]} in the masters. Pass the opt_state of these params: if they were trimmed, trim "
                f"both, with jaxmp.fsdp.trim(opt_state, layout)."
            )


def _is_kernel(path: str, x: Any) -> bool:
    return path.rpartition("/")[2] == "kernel" and x.ndim >= 2


def _inverse_scale(leaves: Mapping[str, Any], path: str) -> Any:
    return scale_leaves.scale_of(leaves[path], holds_log2=scale_leaves.format_of(path)[2])[1]


def _beside(name: str, other: str) -> str:
    return f"{name.rpartition('.')[0]}.{other}".lstrip(".")


def _name(path: str, layout: Layout) -> str:
    head, _, last = path.rpartition("/")
    if layout == "torch" and last in ("kernel", "embedding", "scale"):
        last = "weight"
    return f"{head}/{last}".strip("/").replace("/", ".")


def _laid_out(x: Any, path: str, layout: Layout) -> Any:
    if layout == "flax" or not _is_kernel(path, x):
        return x
    if x.ndim == 3:
        raise ValueError(
            f"a kernel of 3 axes may be a convolution or a projection to heads, which torch stores in different ways; "
            f'got {tuple(x.shape)} at {path}. Reshape it to the two axes that the engine wants, or use layout="flax".'
        )
    return jnp.transpose(x, (x.ndim - 1, x.ndim - 2, *range(x.ndim - 2)))


def _laid_in(x: np.ndarray, path: str, layout: Layout) -> np.ndarray:
    if layout == "flax" or not _is_kernel(path, x):
        return x
    return np.transpose(x, (*range(2, x.ndim), 1, 0))


def _dequantized(tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    x = tensors[name]
    if x.dtype not in (_FP8, jnp.dtype(jnp.float8_e5m2)):
        return x
    if f"{name}_scale" not in tensors:
        raise ValueError(f"a tensor in fp8 means nothing without its scale; {name}_scale is missing.")
    scale = np.asarray(tensors[f"{name}_scale"], np.float32)
    if scale.ndim and scale.shape[0] == x.shape[0] and scale.size == scale.shape[0]:  # one for each output
        scale = scale.reshape((-1,) + (1,) * (x.ndim - 1))
    elif scale.size == 1:
        scale = scale.reshape(())
    else:
        raise ValueError(f"one scale for a tensor or for each of its rows; {name}_scale has shape {scale.shape}.")
    return x.astype(np.float32) * scale


def _on_host(x: Any, path: str) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(
            f"one process writes the file and needs all of each weight; {path} is spread over processes. Gather it "
            f"first: jax.experimental.multihost_utils.process_allgather(params, tiled=True)."
        )
    return np.ascontiguousarray(np.asarray(x)).reshape(x.shape)


def _write(path: pathlib.Path, tensors: Mapping[str, np.ndarray], about: dict[str, str]) -> None:
    data = optional.load("safetensors.numpy", extra="checkpoint").save(dict(tensors), metadata=about)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _array(spec: Any) -> np.ndarray:
    dtype = np.dtype(_CODES[spec["dtype"]])
    return np.frombuffer(spec["data"], dtype).reshape(spec["shape"])


def _check_layout(layout: str) -> None:
    if layout not in ("flax", "torch"):
        raise ValueError(f'layout must be "flax" or "torch"; got {layout!r}')


def _has(tensors: Mapping[str, Any]) -> str:
    return f"It has {', '.join(list(tensors)[:4])}{', ...' if len(tensors) > 4 else ''}."
