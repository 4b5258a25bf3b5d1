"""Weights in safetensors files: export for inference engines, import from any training system.

A file has named tensors and no code. Names and layouts follow one of two conventions:

    flax    the path with dots, `decoder.Dense_0.kernel`, arrays unchanged
    torch   `decoder.Dense_0.weight`: kernels [in, out] are stored as [out, in], convolutions [*k, in, out] as
            [out, in, *k]; embeddings and the scales of norms are also called weight

A kernel in fp8 is stored with its scale, in the format that vLLM, TensorRT-LLM and compressed-tensors read:

    weight        float8_e4m3fn      round(w / weight_scale)
    weight_scale  float32, shape ()  max |w| / 448           w = weight * weight_scale
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.base.progress import Progress
from jaxmp._src.checkpoint import job_leaves, placement, tensor_files
from jaxmp._src.checkpoint.tensor_files import Tensor
from jaxmp._src.fp8 import scale_leaves, stored_kernels
from jaxmp._src.guard import argument_kinds
from jaxmp._src.guard.state_readers import get_master_params
from jaxmp._src.numerics import casting
from jaxmp._src.step.state import masters_of

Layout = Literal["flax", "torch"]
_FP8 = jnp.dtype(jnp.float8_e4m3fn)
_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


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
    max_shard_size: int | str | None = None,
) -> None:
    """Writes the weights into safetensors files, from the masters if there are any, each rounded once.

    It copies one tensor at a time to the host's memory. In a job of several processes, all of them must call it with
    the same arguments: the first one writes, and collects split arrays tensor by tensor.

    Names and layouts: `"flax"` writes the path with dots, `decoder.Dense_0.kernel`, and arrays unchanged. `"torch"`
    writes `decoder.Dense_0.weight`, kernels [in, out] as [out, in], and convolutions [*k, in, out] as [out, in, *k]. A
    kernel in fp8 is two tensors, `weight` (float8_e4m3fn) and `weight_scale` (float32[], max |w| / 448), with
    w = weight * weight_scale.

    Args:
      path: the file. It is replaced in one atomic step, after everything is written. With `max_shard_size` a folder.
      params: the model's params, or any tree of weights such as `get_ema_params(...)`.
      opt_state: state with the masters of `params`.
      dtype: float32, bfloat16, float16 or float8_e4m3fn. With float8_e4m3fn only kernels are stored in fp8, each with
        its scale; other leaves are stored in bfloat16. Kernels are leaves called `kernel` with two axes or more.
      layout: `"flax"` or `"torch"`.
      keep: path patterns of kernels that stay bfloat16 in an fp8 file (`"*lm_head*"`).
      input_scales: for fp8: whether to write `input_scale`, 1 / scale of the layer's input from training, beside
        `weight_scale`, for engines with static scales of activations.
      rename: takes the name that `layout` gives a tensor and returns the name to write, such as
        `lambda n: "model." + n`.
      max_shard_size: the size of a file in bytes, or as text ("5GB"); a larger tensor gets a file of its own. Then
        `path` is a folder with files as Hugging Face's tools write them: `model-00001-of-00002.safetensors`, ..., and
        `model.safetensors.index.json`, which says where each tensor is; `model.safetensors` alone if one file is
        enough. They replace a model that is in the folder.

    Raises:
      ImportError: safetensors is not installed; names the extra.
      OSError: the first process could not write; raised in all processes.
      TypeError: a TrainState, or an optimizer's state, in the place of params.
      ValueError: another dtype; two tensors with one name; masters of other shapes than `params` (`jaxmp.fsdp.trim`
        takes both); a kernel that has no torch layout, named by path.

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
    argument_kinds.check("save_safetensors(path, params, opt_state=)", params=("params", params))
    dtype = _dtype_of(dtype)
    _check_layout(layout)
    limit = tensor_files.size_of(max_shard_size)
    tensors: dict[str, Tensor] = {}

    def add(name: str, like: Any, path: str, make: Callable[[], Any]) -> None:
        name = name if rename is None else rename(name)
        if name in tensors:
            raise ValueError(f"each tensor needs its own name; got {name!r} for {path} and for another leaf.")
        tensors[name] = Tensor(jnp.dtype(like.dtype), tuple(like.shape), make, path)

    given = tree_paths.leaves_by_path(params)
    layers = stored_kernels.pairs(given)
    full = _in_full(params, given, layers, opt_state)
    tree_paths.warn_of_idle("save_safetensors(keep=)", keep, full, of="param")
    for at, in_full in full.items():
        if scale_leaves.is_scale(at):
            continue
        laid_out = lambda in_full=in_full, at=at: _to_layout(in_full(), at, layout)  # noqa: E731
        name, shape = _name(at, layout), jax.eval_shape(laid_out)
        narrow = (
            casting.is_float(shape) and dtype == _FP8 and _is_kernel(at, shape) and not tree_paths.matches(at, keep)
        )
        if not narrow:
            wanted = jnp.bfloat16 if dtype == _FP8 else dtype

            def cast(laid_out: Callable[[], Any] = laid_out, wanted: Any = wanted) -> Any:
                return casting.cast_float(jnp.asarray(laid_out()), wanted, saturate=True)

            add(name, jax.eval_shape(cast), at, cast)
            continue
        if opt_state is None and stored_kernels.is_stored(given[at]):  # the fp8 values of training
            pair = lambda at=at: (_to_layout(given[at], at, layout), _inverse_scale(given, layers[at]))  # noqa: E731
        else:
            pair = lambda laid_out=laid_out, at=at: _quantize(laid_out(), at)  # noqa: E731
        add(name, jax.ShapeDtypeStruct(shape.shape, _FP8), at, lambda pair=pair: pair()[0])
        add(f"{name}_scale", jax.ShapeDtypeStruct((), jnp.float32), at, lambda pair=pair: pair()[1])
        of_input = layers.get(at, "").replace("fp8_rhs", "fp8_lhs")
        if input_scales and of_input in given:
            make = lambda of_input=of_input: _inverse_scale(given, of_input)  # noqa: E731
            add(_sibling(name, "input_scale"), jax.eval_shape(make), of_input, make)
    tensor_files.write(path, tensors, {"format": "pt" if layout == "torch" else "flax"}, limit)


def load_safetensors(
    path: Any,
    like: PyTree,
    *,
    layout: Layout = "flax",
    rename: Callable[[str], str] | None = None,
    strict: bool = True,
) -> PyTree:
    """Loads params from safetensors files, with the tree, dtypes and shardings of `like`.

    Args:
      path: a file; a folder with `model.safetensors`, or with shards and their index; an index; or a list of files.
        Each process of several reads the files.
      like: the model's params, arrays or `jax.ShapeDtypeStruct`; float32 if masters are made from them in full
        precision. fp8 scales in it are kept if they are arrays; otherwise they start at scale 1.
      layout, rename: as for `save_safetensors`; they give the names and axes in the file for each leaf of `like`.
      strict: whether a tensor of the file that is not in `like` is an error. A missing tensor always is.

    Returns:
      A tree like `like`. Tensors in fp8 are multiplied by their scale.

    Raises:
      ImportError: safetensors is not installed; names the extra.
      ValueError: a damaged file, or one of another format; shards that are not those of their index; a tensor that is
        in two files; a tensor that is missing, left over, of another shape, or with integers that do not fit.

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
    tensors = tensor_files.merged(paths)
    left = set(tensors)
    what = ", ".join(map(str, paths))

    def take(path: str, x: Any) -> Any:
        if scale_leaves.is_scale(path):
            return x if not isinstance(x, jax.ShapeDtypeStruct) else _start(path, x)
        name = _name(path, layout)
        name = name if rename is None else rename(name)
        if name not in tensors:
            raise ValueError(
                f"{what} must have a tensor for each param; {name} ({path}) is missing. {_first_names(tensors)}"
            )
        line.say(f"tensor {len(tensors) - len(left) + 1} of {len(tensors)}, {name}")
        left.difference_update({name, f"{name}_scale", _sibling(name, "input_scale")})
        tensor = _dequantized(tensors, name)
        tensor = _from_layout(tensor, path, layout)
        if tensor.shape != tuple(x.shape):
            raise ValueError(
                f"{what} must fit the model; {name} has shape {tensor.shape} for {path}, expected {tuple(x.shape)}."
            )
        if tensor.dtype.kind in "iu" and jnp.issubdtype(x.dtype, jnp.integer):
            tensor = _as_integers(tensor, x.dtype, name)
        value = casting.cast_float(jnp.asarray(tensor), x.dtype, saturate=True)
        if value.dtype != x.dtype:
            raise ValueError(f"{what} must fit the model; {name} is {value.dtype}, expected {x.dtype} at {path}.")
        return value

    shardings = placement.Shardings(like)

    def placed(key_path: Any, x: Any) -> Any:
        sharding = shardings.of_own(tuple(key.name for key in tree_paths.keys_of(key_path)), tuple(x.shape))
        value = take(tree_paths.path_str(key_path), x)
        return value if sharding is None else placement.put(value, sharding)

    with Progress(f"reading {what}") as line:
        loaded = jax.tree_util.tree_map_with_path(placed, like)
    if strict and left:
        raise ValueError(
            f"{what} must be of this model; the tensor {min(left)} is not in the model. Pass strict=False to ignore "
            f"such tensors."
        )
    return loaded


def read_safetensors(path: Any) -> dict[str, np.ndarray]:
    """Reads the tensors of a model by name, in the dtypes and layouts of its files.

    Args:
      path: a file; a folder with `model.safetensors`, or with shards and their index; or an index.

    Raises:
      ImportError: safetensors is not installed; names the extra.
      ValueError: no such file; a file that is damaged, incomplete, or of another format.

    Example:
      >>> import tempfile
      >>> path = tempfile.mkdtemp() + "/model.safetensors"
      >>> save_safetensors(path, {"dense": {"kernel": jnp.ones((3, 2))}})
      >>> {name: x.shape for name, x in read_safetensors(path).items()}
      {'dense.kernel': (3, 2)}
    """
    return {name: tensor.make() for name, tensor in tensor_files.tensors_of(path).items()}


def _dtype_of(dtype: Any) -> Any:
    try:
        found = jnp.dtype(dtype)
    except TypeError:  # no dtype: the name of a policy
        found = None
    if found is None or found.name not in _DTYPES:
        got = repr(dtype) if found is None else found
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}; got {got}")
    return found


def _quantize(weight: Any, path: str) -> tuple[Any, Any]:
    """(fp8 weight, weight_scale) with weight ≈ fp8 * weight_scale; one scale for the whole tensor."""
    weight = jnp.asarray(weight, jnp.float32)
    limit = float(jnp.finfo(_FP8).max)
    largest = jnp.max(jnp.abs(weight), initial=0.0)
    if not bool(jnp.isfinite(largest)):
        raise ValueError(
            f"a kernel in fp8 has one scale, which an inf or a NaN would take from all others; got one at {path}. Mend "
            f"the weight, or leave the kernel in bfloat16 with keep=({path!r},)."
        )
    scale = jnp.where(largest > 0, largest / np.float32(limit), np.float32(1.0))
    scale = jnp.maximum(scale, np.float32(jnp.finfo(jnp.float32).tiny))
    return casting.saturating_cast(weight / scale, _FP8), scale


def _start(path: str, x: Any) -> Any:
    return jnp.full(x.shape, 0.0 if scale_leaves.format_of(path)[2] else 1.0, x.dtype)


def _in_full(
    params: PyTree, given: Mapping[str, Any], layers: Mapping[str, str], opt_state: Any
) -> dict[str, Callable[[], Any]]:
    """{path of a param: its value in full precision, made when it is needed}, from the master if there is one."""

    def in_full(path: str, x: Any, master: Any) -> Callable[[], Any]:
        if master is not None:
            return lambda: job_leaves.master_in_full(path, x, master)
        if path in layers and stored_kernels.is_stored(x):
            return lambda: stored_kernels.dequantized(x, given[layers[path]], jnp.float32)
        return lambda: x

    masters = [None] * len(given) if opt_state is None else _masters(opt_state, params)
    return {path: in_full(path, x, master) for (path, x), master in zip(given.items(), masters, strict=True)}


def _masters(opt_state: Any, params: PyTree) -> list[Any]:
    """The master of each leaf of the params, or None; a ValueError for the first that has another shape."""
    units, treedef = tree_paths.boxed_leaves(params)
    found: list[Any] = []
    masters = treedef.flatten_up_to(masters_of(opt_state, params))
    for (path, unit), master in zip(units, masters, strict=True):
        leaves = jax.tree.leaves(unit)
        if master is None:
            found += [None] * len(leaves)
            continue
        shapes = [[tuple(x.shape) for x in jax.tree.leaves(part)] for part in (unit, master)]
        if shapes[0] != shapes[1]:
            got = [", ".join(map(str, found)) for found in shapes]
            raise ValueError(
                f"the masters in opt_state must have the shapes of params; {path} is {got[0]} in params and {got[1]} "
                f"in the masters. Pass the opt_state of these params. If the params were trimmed, also call "
                f"jaxmp.fsdp.trim(opt_state, layout)."
            )
        found += jax.tree.leaves(master)
    jax.eval_shape(get_master_params, opt_state, params)  # its errors: swapped arguments, params of another dtype
    return found


def _as_integers(x: np.ndarray, dtype: Any, name: str) -> np.ndarray:
    """Integers in another dtype; a ValueError if one does not fit."""
    limits = jnp.iinfo(dtype)
    if x.size and not (int(limits.min) <= int(x.min()) and int(x.max()) <= int(limits.max)):
        raise ValueError(
            f"integers must fit the model; {name} has values from {x.min()} to {x.max()}, expected {jnp.dtype(dtype)}. "
            f"Give the leaf a wider dtype (64 bits need jax_enable_x64)."
        )
    return x.astype(dtype)


def _is_kernel(path: str, x: Any) -> bool:
    return path.rpartition("/")[2] == "kernel" and x.ndim >= 2


def _inverse_scale(leaves: Mapping[str, Any], path: str) -> Any:
    return scale_leaves.scale_of(leaves[path], holds_log2=scale_leaves.format_of(path)[2])[1]


def _sibling(name: str, other: str) -> str:
    return f"{name.rpartition('.')[0]}.{other}".lstrip(".")


def _name(path: str, layout: Layout) -> str:
    head, _, last = path.rpartition("/")
    if layout == "torch" and last in ("kernel", "embedding", "scale"):
        last = "weight"
    return f"{head}/{last}".strip("/").replace("/", ".")


def _to_layout(x: Any, path: str, layout: Layout) -> Any:
    if layout == "flax" or not _is_kernel(path, x):
        return x
    if x.ndim == 3:
        raise ValueError(
            f"a kernel of 3 axes has no single torch layout: torch stores convolutions and projections to heads in "
            f"different ways; got {tuple(x.shape)} at {path}. Reshape it to the two axes that the engine wants, or use "
            f'layout="flax".'
        )
    return jnp.transpose(x, (x.ndim - 1, x.ndim - 2, *range(x.ndim - 2)))


def _from_layout(x: np.ndarray, path: str, layout: Layout) -> np.ndarray:
    if layout == "flax" or not _is_kernel(path, x):
        return x
    return np.transpose(x, (*range(2, x.ndim), 1, 0))


def _dequantized(tensors: Mapping[str, Tensor], name: str) -> np.ndarray:
    x = tensors[name].make()
    if x.dtype not in (_FP8, jnp.dtype(jnp.float8_e5m2)):
        return x
    if f"{name}_scale" not in tensors:
        raise ValueError(f"a tensor in fp8 needs its scale; {name}_scale is missing.")
    scale = np.asarray(tensors[f"{name}_scale"].make(), np.float32)
    if scale.ndim and scale.shape[0] == x.shape[0] and scale.size == scale.shape[0]:  # one for each output
        scale = scale.reshape((-1,) + (1,) * (x.ndim - 1))
    elif scale.size == 1:
        scale = scale.reshape(())
    else:
        raise ValueError(
            f"a tensor in fp8 must have one scale, or one scale for each row; {name}_scale has shape {scale.shape}."
        )
    return x.astype(np.float32) * scale


def _check_layout(layout: str) -> None:
    if layout not in ("flax", "torch"):
        raise ValueError(f'layout must be "flax" or "torch"; got {layout!r}')


def _first_names(tensors: Mapping[str, Any]) -> str:
    return f"It has {', '.join(list(tensors)[:4])}{', ...' if len(tensors) > 4 else ''}."
