"""Files in the safetensors format: named tensors, in one file or in shards with an index, written and read one by one.

A file is the length of a header (8 bytes), the header (JSON: dtype, shape and place of each tensor), and the bytes. A
model in shards is a folder, as Hugging Face's tools write and read it:

    model-00001-of-00002.safetensors    each with a part of the tensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json        {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}

With several processes, all of them call `write` with the same order of tensors, and the first process writes. It
collects a tensor that is split over processes just before it writes the tensor, and then frees it.
"""

import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxmp._src.base import optional
from jaxmp._src.base.progress import Progress
from jaxmp._src.checkpoint import writer

_CODES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "U16": np.uint16, "U32": np.uint32, "BOOL": np.bool_,
}  # fmt: skip
_CODE_OF = {np.dtype(dtype): code for code, dtype in _CODES.items()}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")


class Tensor(NamedTuple):
    """A tensor that is to be written, or that lies in a file: it is made, or read, when it is needed."""

    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], Any]
    source: str = ""  # the path of its leaf, or of its file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(path: Any, tensors: Mapping[str, Tensor], about: Mapping[str, str], max_shard_size: int | None) -> None:
    """Writes tensors into the file `path`, or into shards in the folder `path`, one tensor at a time.

    Nothing is there under its name before everything is on the disk. A folder loses its index before its files are
    replaced, and gets the new one when all of them are there: so a writer that was killed leaves no mix of two models.
    """
    optional.load("safetensors", extra="checkpoint")
    _check_dtypes(tensors)
    path = pathlib.Path(path)
    if max_shard_size is None:
        files = {path: list(tensors)}
        if path.is_dir():
            raise ValueError(
                f"without max_shard_size= all tensors go into one file; {path} is a folder. Pass the path of a file, "
                f'or max_shard_size="5GB" to write shards into the folder.'
            )
    else:
        files = {path / name: names for name, names in _shards(tensors, max_shard_size).items()}
        if path.exists() and not path.is_dir():
            raise ValueError(f"shards are written into a folder; {path} is a file. Pass the path of a folder.")
    failure = None
    beside = {file: file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp") for file in files}
    is_new = max_shard_size is not None and not path.exists()
    try:
        with Progress(f"writing {path}") as line:
            ready = itertools.count(1)

            def make(name: str) -> np.ndarray:
                line.say(f"tensor {next(ready)} of {len(tensors)}, {name}")
                return _on_host(tensors[name].make())

            for file, names in files.items():
                names = sorted(names, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that each is aligned
                arrays = (make(name) for name in names)
                if jax.process_index() == 0 and failure is None:
                    try:
                        file.parent.mkdir(parents=max_shard_size is not None, exist_ok=True)
                        _write_file(beside[file], _header(tensors, names, about), arrays)
                    except OSError as e:
                        failure = e
                        if jax.process_count() == 1:
                            raise
                for _ in arrays:  # the others take part, and so does a process that cannot write
                    pass
        if jax.process_index() == 0 and failure is None:
            try:
                _put_in_place(path, beside, files, tensors, max_shard_size)
            except OSError as e:
                failure = e
        _agree(failure, path)
    except BaseException:
        with contextlib.suppress(OSError):
            for temporary in beside.values() if jax.process_index() == 0 else ():
                temporary.unlink(missing_ok=True)
            if is_new and jax.process_index() == 0 and not any(path.iterdir()):
                path.rmdir()
        raise


def tensors_of(path: Any) -> dict[str, Tensor]:
    """The tensors of a file, of a folder, or of an index with its shards, by name, to be read one at a time."""
    library = optional.load("safetensors", extra="checkpoint")
    path = pathlib.Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise ValueError(f"path must be a file or a folder of safetensors; there is no file at {path}.")
    return _of_index(path) if path.name.endswith(".json") else _of_file(library, path)


def merged(paths: Sequence[Any]) -> dict[str, Tensor]:
    """The tensors of several files; a ValueError names one that is in two."""
    found: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in tensors_of(path).items():
            if name in found:
                raise ValueError(
                    f"each tensor must be in one file; {name} is in {found[name].source} and in {tensor.source}. Pass "
                    f"the files of one model only, or its index."
                )
            found[name] = tensor
    return found


def size_of(text: Any) -> int | None:
    """The number of bytes of `max_shard_size`: an int, or text such as "5GB" (10**9 bytes) or "512MiB"."""
    found = (
        re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]i?B)?", text.strip(), re.IGNORECASE) if isinstance(text, str) else None
    )
    size = int(float(found[1]) * _UNITS[(found[2] or "").upper()]) if found else text
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f'max_shard_size must be a number of bytes, text such as "5GB", or None; got {text!r}.')
    return size


def _shards(tensors: Mapping[str, Tensor], limit: int) -> dict[str, list[str]]:
    """{name of the file: names of its tensors}, each with `limit` bytes at most or one tensor."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += tensor.nbytes
    if len(parts) == 1:
        return {_ONE: parts[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, 1)}


def _check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODE_OF:
            raise ValueError(
                f"tensors must have a dtype of {', '.join(_CODES)}; {name} ({tensor.source}) is {tensor.dtype}. "
                f"Convert it, or leave it out of the tree."
            )


def _header(tensors: Mapping[str, Tensor], names: Sequence[str], about: Mapping[str, str]) -> bytes:
    """The first bytes of a file: the length of its header, and the header."""
    header: dict[str, Any] = {"__metadata__": dict(about)}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        code = _CODE_OF[tensors[name].dtype]
        header[name] = {"dtype": code, "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_file(path: pathlib.Path, header: bytes, arrays: Iterator[np.ndarray]) -> None:
    with path.open("xb") as file:
        file.write(header)
        for x in arrays:
            file.write(x.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(
    path: pathlib.Path,
    beside: Mapping[pathlib.Path, pathlib.Path],
    files: Mapping[pathlib.Path, Sequence[str]],
    tensors: Mapping[str, Tensor],
    max_shard_size: int | None,
) -> None:
    """Gives the written files their names; in a folder, takes away what an earlier model left there."""
    if max_shard_size is None:
        beside[path].replace(path)
        writer.sync(path.parent)
        return
    for old in (path / _INDEX, path / _ONE):
        old.unlink(missing_ok=True)
    writer.sync(path)
    for file, temporary in beside.items():
        temporary.replace(file)
    for old in path.glob("model-*.safetensors"):
        if _SHARD.search(old.name) and old not in files:
            old.unlink()
    writer.sync(path)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file.name for file, names in files.items() for name in names},
        }
        temporary = path / f".{_INDEX}.{uuid.uuid4().hex}.tmp"
        _write_file(temporary, json.dumps(index, indent=2, sort_keys=True).encode(), iter(()))
        temporary.replace(path / _INDEX)
        writer.sync(path)


def _on_host(x: Any) -> np.ndarray:
    """One array in the memory of this host; collected if it is split over processes, which all call this."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.ascontiguousarray(np.asarray(x)).reshape(x.shape)


def _agree(failure: OSError | None, path: pathlib.Path) -> None:
    """Raises in all processes if one of them failed; returns when the files are there for all."""
    if failure is not None and jax.process_count() == 1:
        raise failure
    if jax.process_count() > 1 and np.any(multihost_utils.process_allgather(np.array(failure is not None))):
        raise failure or OSError(f"process 0, which writes, could not write {path}; its own error says why.")


def _in_folder(folder: pathlib.Path) -> pathlib.Path:
    """The index or the single file of the model in a folder."""
    one, index = folder / _ONE, folder / _INDEX
    if one.exists() and index.exists():
        raise ValueError(
            f"a folder must hold one model; {folder} has {_ONE} and {_INDEX}. Pass the path of the one that you want."
        )
    for path in (one, index):
        if path.exists():
            return path
    files = [x for x in folder.glob("*.safetensors") if not x.name.startswith(".")]
    found = sorted([*folder.glob("*.safetensors.index.json"), *(x for x in files if not _SHARD.search(x.name))])
    if len(found) != 1:
        names = ", ".join(x.name for x in found) or ("shards without an index" if files else "no safetensors file")
        raise ValueError(
            f"a folder must hold one model: {_ONE}, or shards with {_INDEX}; {folder} has {names}. "
            + (
                "Pass the path of one of them."
                if found
                else "Its writer may have been killed: write it again, or pass all shards as a list."
                if files
                else "Pass the folder that save_safetensors wrote."
            )
        )
    return found[0]


def _of_index(path: pathlib.Path) -> dict[str, Tensor]:
    """The tensors of the shards that an index lists; a ValueError where the two differ."""
    try:
        listed = json.loads(path.read_text())["weight_map"]
        names: Iterable[tuple[str, str]] = [(str(name), str(file)) for name, file in listed.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(
            f'an index must be JSON with a "weight_map" of tensors and files; {path} is damaged, or of another format '
            f"({type(e).__name__}: {e})."
        ) from e
    shards = sorted({file for _, file in names})
    missing = [file for file in shards if not (path.parent / file).is_file()]
    if missing:
        raise ValueError(
            f"all files of an index must be beside it; {path} lists {missing[0]}, which is not there. Copy all shards "
            f"of the model into one folder."
        )
    found = merged([path.parent / file for file in shards])
    for name, file in names:
        if name not in found or found[name].source != str(path.parent / file):
            where = f"is in {found[name].source}" if name in found else "is in none of its files"
            raise ValueError(
                f"an index must say where each tensor is; {path} has {name} in {file}, and it {where}. The files are "
                f"not those of this index: take all of them from one place."
            )
    known = {name for name, _ in names}
    for name, tensor in found.items():
        if name not in known:
            raise ValueError(
                f"an index must list each tensor of its files; {name} in {tensor.source} is not in {path}. The files "
                f"are not those of this index: take all of them from one place."
            )
    return found


def _of_file(library: Any, path: pathlib.Path) -> dict[str, Tensor]:
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
        found[name] = Tensor(dtype, shape, lambda d=dtype, s=shape, at=at: _read(path, at, d, s), str(path))
    return found


def _read(path: pathlib.Path, at: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    with path.open("rb") as file:
        file.seek(at)
        data = file.read(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape)
