"""Weights in safetensors files: export for inference engines, import from any training system.

    flax    the path with dots, `decoder.Dense_0.kernel`, arrays unchanged
    torch   `decoder.Dense_0.weight`: kernels [in, out] are stored as [out, in], convolutions [*k, in, out] as
            [out, in, *k]; embeddings and the scales of norms are also called weight

A kernel in fp8 is two tensors, as vLLM and TensorRT-LLM read it: `weight` = round(w / weight_scale) in e4m3, and
`weight_scale` = max |w| / 448.
"""

import collections
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from jaxmp._src.base import optional, tree_paths
from jaxmp._src.devices import shardings
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.numerics import casting, frozen_kernel
from jaxmp._src.step import argument_kinds

Layout = Literal["flax", "torch"]
_FP8 = jnp.dtype(jnp.float8_e4m3fn)
_WRITTEN = ("float32", "bfloat16", "float16", "float8_e4m3fn")
_READ = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": jnp.bfloat16, "F8_E4M3": _FP8, "F8_E5M2": jnp.float8_e5m2}
_READ |= {"BOOL": "?"} | {f"{kind.upper()}{8 * size}": f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}
_NAMES = {np.dtype(dtype).name for dtype in _READ.values()}
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def save_safetensors(
    path: Any,
    params: PyTree,
    *,
    dtype: Any = jnp.bfloat16,
    layout: Layout = "flax",
    keep: str | Sequence[str] = (),
    rename: Callable[[str], str] = str,
    max_shard_size: int | None = None,
) -> None:
    """Writes weights, each rounded once, into a file, or into shards with an index as Hugging Face's tools do.

    Args:
      path: the file; with `max_shard_size`, the folder. A model that was there is replaced.
      params: the weights: `jaxmp.get_master_params(opt_state, params)`, or an average of them. All processes of a job
        call it; the first one writes. A kernel of `jaxmp.fp8.freeze` is written as an array; in fp8 by its very bits,
        with a scale for each column (in torch's layout, row).
      dtype: of floats: float32, bfloat16, float16; float8_e4m3fn for kernels with a scale each, the rest in bfloat16.
        Finite values beyond its range become the largest.
      layout: `"flax"` or `"torch"`.
      keep: path patterns of kernels that stay bfloat16 in an fp8 file (`"*lm_head*"`).
      rename: from the name that `layout` gives a tensor to the one to write: `lambda name: "model." + name`.
      max_shard_size: the most bytes in a file; a larger tensor gets its own. Host memory holds one file at a time.

    Raises:
      ValueError: another dtype or layout; two tensors with one name; a kernel without a torch layout.

    Example:
      >>> import tempfile
      >>> params = {"Dense_0": {"kernel": jnp.full((2, 3), 2.0), "bias": jnp.zeros(3)}}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_safetensors(folder + "/w.safetensors", params, dtype=jnp.float8_e4m3fn, layout="torch")
      ...     load_safetensors(folder + "/w.safetensors", params, layout="torch")["Dense_0"]["kernel"][0].tolist()
      [2.0, 2.0, 2.0]
    """
    library = optional.load("safetensors.numpy", extra="checkpoint")
    argument_kinds.check("save_safetensors(path, params)", params=("params", params))
    if jnp.dtype(dtype).name not in _WRITTEN:
        raise ValueError(f"dtype must be one of {', '.join(_WRITTEN)}; got {jnp.dtype(dtype)}.")
    if max_shard_size is not None and not (isinstance(max_shard_size, int) and max_shard_size > 0):
        raise ValueError(f"max_shard_size= is a number of bytes; got {max_shard_size!r}.")
    in_fp8 = jnp.dtype(dtype) == _FP8
    weights = tree_paths.leaves_by_path(params, frozen_kernel.is_frozen)
    weights = {at: x for at, x in weights.items() if not scale_leaves.is_scale(at)}
    weights = {at: x if hasattr(x, "dtype") else np.asarray(x) for at, x in weights.items()}
    names = {at: rename(_name(at, layout)) for at in weights}
    tree_paths.warn_of_idle("save_safetensors(keep=)", keep, weights, of="param")
    narrow = {at for at, x in weights.items() if in_fp8 and _is_kernel(at, x) and not tree_paths.matches(at, keep)}
    written = collections.Counter([*names.values(), *(f"{names[at]}_scale" for at in narrow)])
    for at, x in weights.items():
        if written[names[at]] > 1:
            raise ValueError(f"each tensor needs its own name; got {names[at]!r} for {at} and for another leaf.")
        if x.dtype.name not in _NAMES:
            raise ValueError(f"safetensors holds tensors of {', '.join(_READ)}; got {x.dtype} at {at}.")
        if layout == "torch" and _is_kernel(at, x) and x.ndim == 3:
            raise ValueError(f"torch has several layouts for a kernel of 3 axes; got one at {at}. Reshape it to two.")

    def tensors(at: str) -> dict[str, np.ndarray]:
        value: Any = weights[at]
        if frozen_kernel.is_frozen(value) and at in narrow:  # the very bits, with a scale for each column
            parts = np.asarray(value.q), np.exp2(np.asarray(value.log2_scale, np.float32))
            if layout == "torch" and _is_kernel(at, value):
                parts = tuple(np.moveaxis(x, (-1, -2), (0, 1)) for x in parts)
            return dict(zip((names[at], f"{names[at]}_scale"), parts, strict=True))
        value = jnp.asarray(value) if frozen_kernel.is_frozen(value) else value
        if isinstance(value, jax.Array) and not value.is_fully_addressable and not value.is_fully_replicated:
            value = multihost_utils.process_allgather(value, tiled=True)
        value = np.asarray(value)
        value = np.moveaxis(value, (-1, -2), (0, 1)) if layout == "torch" and _is_kernel(at, value) else value
        if at not in narrow:
            return {names[at]: _rounded(value, jnp.bfloat16 if in_fp8 else dtype)}
        value = value.astype(np.float32)
        scale = np.maximum(np.max(np.abs(value), initial=0) / np.float32(448), np.finfo(np.float32).tiny)
        if not np.isfinite(scale):
            raise ValueError(f"a kernel in fp8 has one scale, which an inf or a NaN takes from all; got one at {at}.")
        return {names[at]: _rounded(value / scale, _FP8), f"{names[at]}_scale": scale}

    short = 2 if in_fp8 else jnp.dtype(dtype).itemsize
    path, files, left = pathlib.Path(path), [[]], max_shard_size or 0
    for at, x in weights.items():
        nbytes = x.size * (1 if at in narrow else short if casting.is_float(x) else x.dtype.itemsize)
        if files[-1] and max_shard_size and nbytes > left:
            files, left = [*files, []], max_shard_size
        files[-1].append(at)
        left -= nbytes
    called = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    called = [path] if not max_shard_size else [path / name for name in (called if len(files) > 1 else [_ONE])]
    index: Any = {"metadata": {"total_size": 0}, "weight_map": {}}
    failure = None
    for file, of_file in zip(called, files, strict=True):
        arrays = {
            name: np.asarray(x, order="C") for at in of_file for name, x in tensors(at).items()
        }  # by all processes
        index["weight_map"] |= dict.fromkeys(arrays, file.name)
        index["metadata"]["total_size"] += sum(x.nbytes for x in arrays.values())
        try:
            if jax.process_index() == 0 and failure is None:
                file.parent.mkdir(parents=bool(max_shard_size), exist_ok=True)
                library.save_file(arrays, f"{file}.tmp", {"format": "pt" if layout == "torch" else "flax"})
            if jax.process_index() == 0 and failure is None and file == called[-1]:
                # A folder is without its index meanwhile: a writer that is killed leaves no mix of two models.
                old = (path / _INDEX, path / _ONE, *path.glob("model-*-of-*.safetensors")) if max_shard_size else ()
                for there in old:
                    there.unlink(missing_ok=True)
                for there in called:
                    pathlib.Path(f"{there}.tmp").replace(there)
                if len(called) > 1:
                    (path / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
        except OSError as e:
            failure = e
    failures = multihost_utils.process_allgather(np.array(failure is not None)) if jax.process_count() > 1 else failure
    if failure or np.any(failures):
        raise failure or OSError(f"process 0, which writes, could not write {path}; its own error says why.")


def load_safetensors(
    path: Any, like: PyTree, *, layout: Layout = "flax", rename: Callable[[str], str] = str, strict: bool = True
) -> PyTree:
    """Loads params, with the tree, dtypes and shardings of `like`.

    Args:
      path: a file; or a folder with one, or with shards and their index.
      like: arrays or `jax.ShapeDtypeStruct`s. fp8 scales in it are kept; those that are only described start at 1.
      layout, rename: as for `save_safetensors`.
      strict: whether a tensor of the files that is not in `like` is an error. A missing one always is.

    Returns:
      A tree like `like`. Tensors in fp8 are multiplied by their scale: one, or one for each row or
      column. What is a frozen
      kernel there (`jaxmp.fp8.freeze`) is frozen again.

    Raises:
      ValueError: a damaged file; files that are not those of their index; a tensor that is missing, left over, of
        another shape, or with numbers that do not fit.

    Example:
      >>> import tempfile
      >>> params = {"Dense_0": {"kernel": jnp.full((2, 3), 2.0)}}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_safetensors(folder, params, max_shard_size=10**9)
      ...     load_safetensors(folder, params)["Dense_0"]["kernel"].shape
      (2, 3)
    """
    stored = _in_folder(path) if (path := pathlib.Path(path)).is_dir() else _in_file(path)
    left = set(stored)

    def take(at: str, x: Any) -> Any:
        if frozen_kernel.is_frozen(x):
            like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings.chosen(x.q))
            return frozen_kernel.kernel_of(take(at, like))
        if scale_leaves.is_scale(at):
            return scale_leaves.started(at, x)
        name = rename(_name(at, layout))
        if name not in stored:
            there = ", ".join(sorted(stored)[:4])
            raise ValueError(f"{path} must have a tensor for each param; {name} ({at}) is not among {there}, ...")
        left.discard(name)
        value = stored[name]
        if value.dtype in (_FP8, jnp.float8_e5m2):
            left.difference_update({f"{name}_scale", f"{name.rpartition('.')[0]}.input_scale".lstrip(".")})
            scale = stored.get(f"{name}_scale", np.zeros(0))
            by_axes = scale.ndim == value.ndim and all(
                n in (1, m) for n, m in zip(scale.shape, value.shape, strict=True)
            )
            is_fitting = scale.size == 1 or by_axes or (scale.size == value.shape[0] == scale.shape[0])
            if not (is_fitting and casting.is_float(scale) and np.all((scale >= 0) & np.isfinite(scale))):
                raise ValueError(f"{name} is in fp8, so {name}_scale must be one float, or one for each row or column.")
            scale = scale if by_axes else scale.reshape(-1, *[1] * (value.ndim - 1))
            value = value.astype(np.float32) * scale.astype(np.float32)
        value = np.moveaxis(value, (0, 1), (-1, -2)) if layout == "torch" and _is_kernel(at, value) else value
        if value.shape != tuple(x.shape):
            raise ValueError(f"{path} must fit the model; {name} has shape {value.shape}, expected {x.shape} at {at}.")
        if casting.is_float(x) and casting.is_float(value):
            value = _rounded(value, x.dtype)
        elif casting.is_float(x) or casting.is_float(value) or not np.array_equal(value, value.astype(x.dtype)):
            raise ValueError(f"{path} must fit the model; {name} is {value.dtype}, expected {x.dtype} at {at}.")
        sharding, value = shardings.chosen(x), value.astype(x.dtype)
        if sharding is None:  # 64 bits, which jax may shorten, stay with NumPy
            return jnp.array(value) if jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype else value
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    loaded = tree_paths.map_with_path(take, like, is_leaf=frozen_kernel.is_frozen)
    if strict and left:
        raise ValueError(f"{path} must be of this model; {min(left)} is not in it. Pass strict=False to ignore it.")
    return loaded


def _in_folder(path: pathlib.Path) -> dict[str, np.ndarray]:
    index, files = path / _INDEX, [x for x in path.glob("*.safetensors") if "-of-" not in x.name]
    if index.exists() == (path / _ONE).exists() and (index.exists() or len(files) != 1):
        raise ValueError(f"a folder must hold one model: a file of safetensors, or shards and {_INDEX}; got {path}.")
    if not index.exists():
        return _in_file(path / _ONE if (path / _ONE).exists() else files[0])
    try:
        listed = json.loads(index.read_text())["weight_map"]
        by_file = {file: _in_file(path / file) for file in sorted({*listed.values()})}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
        raise ValueError(f"an index and all files that it lists must be whole; {index} is not: {e}") from e
    pairs = [(name, file) for file, tensors in by_file.items() for name in tensors]
    if sorted(pairs) != sorted(listed.items()):
        wrong = sorted({*pairs} ^ {*listed.items()})[0]
        raise ValueError(f"an index must say where each tensor is; {index} and its files differ in {wrong[0]}.")
    return {name: x for tensors in by_file.values() for name, x in tensors.items()}


def _in_file(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a file, mapped into memory. The library checks the file; it reads no fp8 into NumPy."""
    library = optional.load("safetensors", extra="checkpoint")
    try:
        with library.safe_open(path, framework="np"):
            data = np.memmap(path, np.uint8, "r")
    except (library.SafetensorError, OSError) as e:
        raise ValueError(f"path must be a whole safetensors file, or a folder of them; got {path}: {e}") from e
    begin, tensors = 8 + int(data[:8].view("<u8")[0]), {}
    for name, x in json.loads(bytes(data[8:begin])).items():
        if name == "__metadata__":
            continue
        if x["dtype"] not in _READ:
            raise ValueError(f"tensors must be of {', '.join(_READ)}; {name} in {path} is {x['dtype']}.")
        start, end = (begin + at for at in x["data_offsets"])
        tensors[name] = data[start:end].view(_READ[x["dtype"]]).reshape(x["shape"])
    return tensors


def _rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Floats in another dtype; finite ones beyond its range become the largest, as a policy casts params."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == dtype:
        return x
    wide, largest = x.astype(x.dtype if x.dtype.itemsize > 2 else np.float32), float(jnp.finfo(dtype).max)
    return np.where(np.isfinite(wide), np.clip(wide, -largest, largest), wide).astype(dtype)


def _is_kernel(path: str, x: Any) -> bool:
    return path.rpartition("/")[2] == "kernel" and x.ndim >= 2


def _name(path: str, layout: Layout) -> str:
    if layout not in ("flax", "torch"):
        raise ValueError(f'layout must be "flax" or "torch"; got {layout!r}')
    head, _, last = path.rpartition("/")
    if layout == "torch" and last in ("kernel", "embedding", "scale"):
        last = "weight"
    return f"{head}/{last}".strip("/").replace("/", ".")
