"""Python objects with arrays inside, as two files: a small pickle, and the bytes of the arrays.

The arrays are written one at a time (an array that occurs twice is written once) and are restored bit for bit:
bfloat16, fp8 and int4, typed keys, numpy arrays. Functions and classes are stored by name, as pickle always does. A
function without a name (a lambda, the closure of an initializer) is restored as an object that raises an error when it
is called: most of them are never called again. Names in `__main__` are looked up in a module that the reader chooses.
"""

import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmp._src.base.by_identity import ByIdentity
from jaxmp._src.programs import array_functions


class MissingFunction:
    """In the place of a function that cannot be found by a name."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"{self.name} was not stored with the capture, because it is not at the top of a module. Pass like=, "
            f"arguments that are made in the same way."
        )


class Saver(pickle.Pickler):
    """Writes objects to `file` and their arrays to `arrays`.

    Args:
      file: for the pickle.
      arrays: for the bytes; several savers may share one.
      places: by array, where it was written; savers that share `arrays` share it too.
    """

    def __init__(self, file: BinaryIO, arrays: BinaryIO, places: ByIdentity):
        super().__init__(file, protocol=5)
        self.arrays = arrays
        self.places = places

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, jax.Array) and jnp.issubdtype(obj.dtype, jax.dtypes.prng_key):
            return "key", jax.random.key_impl(obj), self._place(obj, jax.random.key_data(obj))
        if isinstance(obj, jax.Array):
            return "weak" if obj.weak_type and obj.ndim == 0 else "jax", None, self._place(obj, obj)
        if type(obj) is np.ndarray and not obj.dtype.hasobject and obj.dtype.names is None:
            return "numpy", None, self._place(obj, obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and not has_name(obj):
            return MissingFunction, (obj.__qualname__,)
        if array_functions.is_module(obj):
            return _merge, nnx.split(obj)
        return NotImplemented

    def _place(self, obj: Any, x: Any) -> Any:
        place = self.places.get(obj)
        if place is None:
            host = np.asarray(x)
            place = self.arrays.tell(), host.shape, host.dtype
            self.places.set(obj, place)
            # As bytes, because numpy cannot write every dtype.
            self.arrays.write(np.ascontiguousarray(host).reshape(-1).view(np.uint8).data)
        return place


class Loader(pickle.Unpickler):
    """Reads what a `Saver` wrote.

    Args:
      file: the pickle.
      arrays: the bytes.
      main: the module for names that were in `__main__`; None for `__main__`.
      on_host: whether arrays stay arrays of numpy; keys do not.
    """

    def __init__(self, file: BinaryIO, arrays: BinaryIO, main: types.ModuleType | None = None, on_host: bool = False):
        super().__init__(file)
        self.arrays = arrays
        self.main = main
        self.on_host = on_host
        self.found: dict[Any, Any] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "__main__" and self.main and hasattr(self.main, global_name.partition(".")[0]):
            module_name = self.main.__name__
        return super().find_class(module_name, global_name)

    def persistent_load(self, pid: Any) -> Any:
        if pid not in self.found:
            kind, implementation, (start, shape, dtype) = pid
            self.arrays.seek(start)
            data = bytearray(self.arrays.read(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize))
            x = np.frombuffer(data, np.uint8).view(dtype).reshape(shape)
            if kind == "key":
                x = jax.random.wrap_key_data(jnp.asarray(x), impl=implementation)
            elif kind != "numpy" and not self.on_host:
                x = as_jax(x, weak=kind == "weak")
            self.found[pid] = x
        return self.found[pid]


def as_jax(x: np.ndarray, *, weak: bool) -> jax.Array:
    """An array on the default device, weakly typed if `weak`; a ValueError if it needs 64 bits and they are off."""
    found = jnp.asarray(x.item() if weak and x.dtype in (np.float32, np.int32, np.bool_) else x)
    if found.dtype != x.dtype:
        raise ValueError(
            f"a capture must be replayed with the settings of its run; got {x.dtype} arrays, and jax_enable_x64 is off "
            f"here. Set JAX_ENABLE_X64=1."
        )
    return found


def has_name(function: Callable[..., Any]) -> bool:
    """Whether a function can be found by its module and name."""
    found: Any = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _merge(graphdef: Any, state: Any) -> Any:
    return nnx.merge(graphdef, state)
