"""Weights in safetensors files: export for inference engines, import from any training system.

A file has named tensors and no code. Names and layouts follow one of two conventions:

    flax    the path with dots, `decoder.Dense_0.kernel`, arrays unchanged
    torch   `decoder.Dense_0.weight`: kernels [in, out] are stored as [out, in], convolutions [*k, in, out] as
            [out, in, *k]; embeddings and the scales of norms are also called weight

A kernel in fp8 is stored with its scale, in the format that vLLM, TensorRT-LLM and compressed-tensors read:

    weight        float8_e4m3fn      round(w / weight_scale)
    weight_scale  float32, shape ()  max |w| / 448           w = weight * weight_scale
"""

import json
import math
import os
import pathlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxmp._src.base import optional, tree_paths
from jaxmp._src.checkpoint import placement, writer
from jaxmp._src.fp8 import scale_leaves, stored_kernels
from jaxmp._src.numerics import casting
from jaxmp._src.step import leaf_paths
from jaxmp._src.step.read_state import get_master_params, masters_of

Layout = Literal["flax", "torch"]
_FP8 = jnp.dtype(jnp.float8_e4m3fn)
_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
_CODES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "U16": np.uint16, "U32": np.uint32, "BOOL": np.bool_,
}  # fmt: skip


class _Tensor(NamedTuple):
    """A tensor that is to be written, or that lies in a file: it is made, or read, when it is needed."""

    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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
    """Writes the weights into one safetensors file, from the masters if there are any, each rounded once.

    Names and layouts: `"flax"` writes the path with dots, `decoder.Dense_0.kernel`, and arrays unchanged. `"torch"`
    writes `decoder.Dense_0.weight`, kernels [in, out] as [out, in], and convolutions [*k, in, out] as [out, in, *k]. A
    kernel in fp8 is two tensors, `weight` (float8_e4m3fn) and `weight_scale` (float32[], max |w| / 448), with
    w = weight * weight_scale.

    Args:
      path: the file. It is replaced in one atomic step, after everything is written.
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

    Raises:
      ImportError: safetensors is not installed; names the extra.
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
    dtype = jnp.dtype(dtype)
    if dtype.name not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}; got {dtype}")
    _check_layout(layout)
    tensors: dict[str, _Tensor] = {}

    def add(name: str, like: Any, path: str, make: Callable[[], Any]) -> None:
        name = name if rename is None else rename(name)
        if name in tensors:
            raise ValueError(f"each tensor needs its own name; got {name!r} for {path} and for another leaf.")
        tensors[name] = _Tensor(jnp.dtype(like.dtype), tuple(like.shape), lambda: _on_host(make(), path))

    given = leaf_paths.plain_leaves(params)
    full = leaf_paths.plain_leaves(_in_full(params, opt_state))
    layers = stored_kernels.pairs(full)
    tree_paths.warn_of_idle("save_safetensors(keep=)", keep, full, of="param")
    for at, x in full.items():
        if scale_leaves.is_scale(at):
            continue
        _check_is_here(x, at)
        name, shape = _name(at, layout), jax.eval_shape(lambda x=x, at=at: _to_layout(x, at, layout))
        narrow = casting.is_float(x) and dtype == _FP8 and _is_kernel(at, shape) and not tree_paths.matches(at, keep)
        if not narrow:
            wanted = jnp.bfloat16 if dtype == _FP8 else dtype

            def cast(x: Any = x, at: str = at, wanted: Any = wanted) -> Any:
                return casting.cast_float(jnp.asarray(_to_layout(x, at, layout)), wanted, saturate=True)

            add(name, jax.eval_shape(cast), at, cast)
            continue
        if opt_state is None and stored_kernels.is_stored(given[at]):  # the fp8 values of training
            pair = lambda at=at: (_to_layout(given[at], at, layout), _inverse_scale(given, layers[at]))  # noqa: E731
        else:
            pair = lambda x=x, at=at: _quantize(_to_layout(x, at, layout), at)  # noqa: E731
        add(name, jax.ShapeDtypeStruct(shape.shape, _FP8), at, lambda pair=pair: pair()[0])
        add(f"{name}_scale", jax.ShapeDtypeStruct((), jnp.float32), at, lambda pair=pair: pair()[1])
        of_input = layers.get(at, "").replace("fp8_rhs", "fp8_lhs")
        if input_scales and of_input in given:
            make = lambda of_input=of_input: _inverse_scale(given, of_input)  # noqa: E731
            add(_sibling(name, "input_scale"), jax.eval_shape(make), of_input, make)
    _write(pathlib.Path(path), tensors, {"format": "pt" if layout == "torch" else "flax"})


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
      path: a file, or several (shards of one model).
      like: the model's params, arrays or `jax.ShapeDtypeStruct`; float32 if masters are made from them in full
        precision. fp8 scales in it are kept if they are arrays; otherwise they start at scale 1.
      layout, rename: as for `save_safetensors`; they give the names and axes in the file for each leaf of `like`.
      strict: whether a tensor of the file that is not in `like` is an error. A missing tensor always is.

    Returns:
      A tree like `like`. Tensors in fp8 are multiplied by their scale.

    Raises:
      ImportError: safetensors is not installed; names the extra.
      ValueError: a damaged file, or one of another format; a tensor that is missing, left over or of another shape.

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
    tensors: dict[str, _Tensor] = {}
    source: dict[str, Any] = {}
    for one in paths:
        for name, tensor in _tensors_of(one).items():
            if name in tensors:
                raise ValueError(f"each tensor must be in one file; {name} is in {source[name]} and in {one}.")
            tensors[name], source[name] = tensor, one
    left = set(tensors)
    what = ", ".join(map(str, paths))

    def take(path: str, x: Any) -> Any:
        path = leaf_paths.plain(path)
        if scale_leaves.is_scale(path):
            return x if not isinstance(x, jax.ShapeDtypeStruct) else _start(path, x)
        name = _name(path, layout)
        name = name if rename is None else rename(name)
        if name not in tensors:
            raise ValueError(
                f"{what} must have a tensor for each param; {name} ({path}) is missing. {_first_names(tensors)}"
            )
        left.difference_update({name, f"{name}_scale", _sibling(name, "input_scale")})
        tensor = _dequantized(tensors, name)
        tensor = _from_layout(tensor, path, layout)
        if tensor.shape != tuple(x.shape):
            raise ValueError(
                f"{what} must fit the model; {name} has shape {tensor.shape} for {path}, expected {tuple(x.shape)}."
            )
        value = casting.cast_float(jnp.asarray(tensor), x.dtype, saturate=True)
        if value.dtype != x.dtype:
            raise ValueError(f"{what} must fit the model; {name} is {value.dtype}, expected {x.dtype} at {path}.")
        return value

    shardings = placement.Shardings(like)

    def placed(path: str, x: Any) -> Any:
        sharding = shardings.of(path, tuple(x.shape))
        value = take(path, x)
        return value if sharding is None else jax.device_put(value, sharding)

    loaded = tree_paths.map_with_path(placed, like)
    if strict and left:
        raise ValueError(
            f"{what} must be of this model; the tensor {min(left)} is not in the model. Pass strict=False to ignore "
            f"such tensors."
        )
    return loaded


def read_safetensors(path: Any) -> dict[str, np.ndarray]:
    """Reads the tensors of one file by name, in the dtypes and layouts of the file.

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
    return {name: tensor.make() for name, tensor in _tensors_of(path).items()}


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


def _in_full(params: PyTree, opt_state: Any) -> PyTree:
    if opt_state is None:
        return stored_kernels.load_weights(params, jnp.float32)
    _check_masters(opt_state, params)
    return get_master_params(opt_state, params)


def _check_masters(opt_state: Any, params: PyTree) -> None:
    """Raises a ValueError for the first param whose master has another shape."""
    units, treedef = tree_paths.boxed_leaves(params)
    for (path, unit), master in zip(units, treedef.flatten_up_to(masters_of(opt_state, params)), strict=True):
        shapes = [[tuple(x.shape) for x in jax.tree.leaves(part)] for part in (unit, master)]
        if master is not None and shapes[0] != shapes[1]:
            got = [", ".join(map(str, found)) for found in shapes]
            raise ValueError(
                f"the masters in opt_state must have the shapes of params; {path} is {got[0]} in params and {got[1]} "
                f"in the masters. Pass the opt_state of these params. If the params were trimmed, also call "
                f"jaxmp.fsdp.trim(opt_state, layout)."
            )


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


def _dequantized(tensors: Mapping[str, _Tensor], name: str) -> np.ndarray:
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


def _check_is_here(x: Any, path: str) -> None:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(
            f"the process that writes the file needs each weight as a whole; {path} is split over processes. Gather "
            f"the params first: jax.experimental.multihost_utils.process_allgather(params, tiled=True)."
        )


def _on_host(x: Any, path: str) -> np.ndarray:
    _check_is_here(x, path)
    return np.ascontiguousarray(np.asarray(x)).reshape(x.shape)


def _write(path: pathlib.Path, tensors: Mapping[str, _Tensor], about: dict[str, str]) -> None:
    """Writes the file, one tensor at a time, under a name that no other process has, and renames it on the disk."""
    optional.load("safetensors", extra="checkpoint")
    codes = {np.dtype(dtype): code for code, dtype in _CODES.items()}
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that each is aligned
    for name in order:
        start, end = end, end + tensors[name].nbytes
        code = codes[tensors[name].dtype]
        header[name] = {"dtype": code, "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with beside.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                file.write(tensors[name].make().reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        writer.sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def _tensors_of(path: Any) -> dict[str, _Tensor]:
    """The tensors of a file by name, to be read one at a time."""
    library = optional.load("safetensors", extra="checkpoint")
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"path must be a file; there is no file at {path}.")
    try:
        with library.safe_open(path, framework="np"):  # it checks offsets and the length of the file
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (library.SafetensorError, ValueError, OSError) as e:
        raise ValueError(
            f"{path} must be a complete safetensors file; it is damaged, incomplete, or of another format ({e})."
        ) from e
    found = {}
    for name, spec in sorted(header.items()):
        if name == "__metadata__":
            continue
        if spec["dtype"] not in _CODES:
            raise ValueError(
                f"tensors must have a dtype of {', '.join(_CODES)}; {name} in {path} is {spec['dtype']}. Convert it "
                f"with the tool that wrote it."
            )
        dtype, shape = np.dtype(_CODES[spec["dtype"]]), tuple(spec["shape"])
        at = 8 + length + spec["data_offsets"][0]
        found[name] = _Tensor(dtype, shape, lambda d=dtype, s=shape, at=at: _read(path, at, d, s))
    return found


def _read(path: pathlib.Path, at: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    with path.open("rb") as file:
        file.seek(at)
        data = file.read(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape)


def _check_layout(layout: str) -> None:
    if layout not in ("flax", "torch"):
        raise ValueError(f'layout must be "flax" or "torch"; got {layout!r}')


def _first_names(tensors: Mapping[str, Any]) -> str:
    return f"It has {', '.join(list(tensors)[:4])}{', ...' if len(tensors) > 4 else ''}."
