"""Everything to run one step again, alone: its arguments and its loss scale, in a folder.

A skipped step changes only the loss scale. So after a skipped step, the params are bit for bit those from which the
step started. A capture therefore needs no snapshot, and no change of the training step.

A capture is a folder of files:

    arrays.bin     the bytes of all arrays, one after the other
    leaves.pickle  the path of each leaf of the arguments, and its place in arrays.bin
    args.pickle    the arguments without their arrays: dicts, tuples, dataclasses, nnx modules without their variables
    kwargs.pickle  the same for keyword arguments and options
    capture.json   the scale, what was observed, the function's name, versions, devices, flags: for people to read

It is written under another name and renamed when it is complete, so a job that is killed leaves no incomplete capture.
Arrays are written to the file one at a time: the host needs memory for the largest array. Like every pickle, a capture
may run code when it is loaded: load only captures that you made.
"""

import dataclasses
import inspect
import json
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from jaxmp._src.base.by_identity import ByIdentity
from jaxmp._src.base.warn import warn
from jaxmp._src.programs import array_functions
from jaxmp._src.replay import array_pickle, atomic_folders, nonfinite
from jaxmp._src.step.policy import get_policy

_META, _ARRAYS, _LEAVES, _TREE, _KWARGS = "capture.json", "arrays.bin", "leaves.pickle", "args.pickle", "kwargs.pickle"
_CONFIG = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_numpy_dtype_promotion")


@dataclasses.dataclass(frozen=True)
class Capture:
    """A step that was captured.

    Attributes:
      args: the positional arguments of the loss function, arrays on the default device.
      kwargs: its keyword arguments.
      loss_scale: the scale of the step.
      options: argnums, has_aux, accumulate, accumulate_argnums and wrt, as for `jaxmp.value_and_grad`.
      observed: results of the step, such as `{"loss": ..., "skipped": ...}`.
      function: the loss function as `module:name`, or "" if it has no such name.
      about: versions, devices, XLA_FLAGS and jax's settings of the run.
      path: the folder.

    Example:
      >>> import tempfile
      >>> path = capture(tempfile.mkdtemp(), abs, 2.0, loss_scale=8.0, observed={"loss": 2.0})
      >>> step = load_capture(path)
      >>> float(step.args[0]), step.loss_scale, step.observed
      (2.0, 8.0, {'loss': 2.0})
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_scale: float
    options: dict[str, Any]
    observed: dict[str, float]
    function: str
    about: dict[str, Any]
    path: Path


def capture(
    directory: str | os.PathLike[str],
    loss_fn: Callable[..., Any],
    *args: Any,
    loss_scale: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    accumulate: int = 1,
    accumulate_argnums: int | Sequence[int] | None = None,
    wrt: Any = nnx.Param,
    policy: Any = None,
    observed: Mapping[str, Any] | None = None,
    keep: int = 3,
    **kwargs: Any,
) -> Path | None:
    """Writes everything that `jaxmp.value_and_grad(loss_fn, ...)(*args, **kwargs)` needs to run again, alone.

        scale = float(jaxmp.get_loss_scale(opt_state))  # before the step: the scale that it will use
        params, opt_state, loss = train_step(params, opt_state, batch)
        metrics = jaxmp.get_metrics(opt_state)
        if metrics["skipped"]:  # then params are those that the step started from
            observed = {"loss": loss, **metrics}
            jaxmp.monitor.capture("captures", loss_fn, params, batch, loss_scale=scale, observed=observed)

    A function of the host, to call after a step; it adds nothing to the step. In a job of many processes, call it in
    one of them if all hold the whole arrays, or in each: each writes its own folder.

    Args:
      directory: for the captures; made if it does not exist.
      loss_fn: the loss function. Its name is stored, not its code.
      *args: its arguments: params (or an nnx module), batch, keys, statistics of BatchNorm; pytrees.
      loss_scale: the scale that the step used; 1.0 without one.
      argnums, has_aux, accumulate, accumulate_argnums: as for the step's `jaxmp.value_and_grad`.
      wrt: as for the step's `jaxmp.nnx.value_and_grad`.
      policy: as for the step's `value_and_grad`; `state.policy` for a TrainState that carries it.
      observed: scalars that the step returned, by name. `loss`, `skipped` and `grads_finite` are compared with a
        replay.
      keep: how many captures `directory` may hold; after that nothing is written. The first bad steps are nearest to
        the cause, and a failing run does not fill the disk.
      **kwargs: keyword arguments of `loss_fn`.

    Returns:
      The folder of this capture; None (and a warning) if there are `keep` already.

    Raises:
      ValueError: an array was donated, or other processes hold a part of it (names its path); an argument of `loss_fn`
        has the name of one of this function's arguments.
      TypeError: a traced array: call it outside jit.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> def loss_fn(params, x):
      ...     return jnp.mean((params["w"] * x).astype(jnp.float32))
      >>> directory = tempfile.mkdtemp()
      >>> path = capture(directory, loss_fn, {"w": jnp.ones(2, jnp.float16)}, jnp.ones(2), loss_scale=2.0**16)
      >>> load_capture(path).args[0]["w"].dtype, load_capture(directory).loss_scale
      (dtype('float16'), 65536.0)
    """
    _check_names(loss_fn, args)
    leaves = array_functions.leaves_of(args)
    named = array_functions.leaves_of(kwargs)
    for path, x in zip([*leaves.paths, *named.paths], [*leaves.values, *named.values], strict=True):
        _check_readable(f"argument {path}", x)
    scalars = {"loss_scale": loss_scale, **(observed or {})}
    for name, x in scalars.items():
        _check_readable(name, x)
        if np.size(x) != 1:
            raise ValueError(f"loss_scale and observed values must be scalars; got shape {np.shape(x)} at {name}")
    root = Path(directory)
    process = f"-process{jax.process_index()}" if jax.process_count() > 1 else ""
    if len(atomic_folders.folders_in(root, process)) >= keep:
        warn(
            "captures-are-full",
            f"{root} holds keep={keep} captures, so this step is not captured. Move them away, or increase keep.",
        )
        return None
    options = {"argnums": argnums, "has_aux": has_aux, "accumulate": accumulate}
    options |= {"accumulate_argnums": accumulate_argnums, "wrt": wrt}
    options |= {"policy": None if policy is None else get_policy(policy)}
    meta = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "function": name_of(loss_fn),
        "loss_scale": _number(loss_scale),
        "observed": {name: _number(x) for name, x in (observed or {}).items()},
        "about": about(),
    }
    with atomic_folders.new_folder(root, process) as folder:
        meta["not_stored"] = _write(folder.half, leaves, args, {"options": options, "kwargs": kwargs})
        (folder.half / _META).write_text(json.dumps(meta, indent=1))
    return folder.path


def load_capture(
    path: str | os.PathLike[str],
    *,
    like: Sequence[Any] | None = None,
    functions_of: Any = None,
) -> Capture:
    """Reads a capture that you made.

    Args:
      path: its folder, or a directory of several; then the last is read.
      like: positional arguments like those captured, such as `(params, batch)`: their structure, functions, classes
        and shardings are used, with the captured values. Needed if arrays do not fit one device, or if the arguments
        hold objects that cannot be stored (functions and classes that are not at the top of a module).
      functions_of: the module for classes that were in `__main__` when they were captured.

    Returns:
      A `Capture`.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it cannot be rebuilt without `like`, or `like` belongs to another model; names the path.

    Example:
      >>> load_capture("no/such/folder")
      Traceback (most recent call last):
        ...
      FileNotFoundError: no/such/folder must be a capture, or a directory of captures; there is none.
    """
    root, meta = find_capture(path)
    if like is None and meta["not_stored"]:
        raise ValueError(
            f"the arguments of {root} hold an object that cannot be stored: {meta['not_stored']}. Pass like=, "
            f"arguments that are made in the same way."
        )
    with open(root / _ARRAYS, "rb") as arrays:
        with open(root / _LEAVES, "rb") as f:
            stored = array_pickle.Loader(f, arrays, functions_of, on_host=True).load()
        if like is None:
            with open(root / _TREE, "rb") as f:
                args = array_pickle.Loader(f, arrays, functions_of).load()
        else:
            args = _as_like(tuple(like), stored["paths"], stored["values"])
        with open(root / _KWARGS, "rb") as f:
            rest = array_pickle.Loader(f, arrays, functions_of).load()
    about, scale = meta["about"], meta["loss_scale"]
    return Capture(args, rest["kwargs"], scale, rest["options"], meta["observed"], meta["function"], about, root)


def find_capture(path: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """The folder of a capture (the last one in a directory of several), and the content of capture.json."""
    root = Path(path)
    if not (root / _META).exists():
        found = atomic_folders.folders_in(root)
        if not found:
            raise FileNotFoundError(f"{path} must be a capture, or a directory of captures; there is none.")
        root = found[-1]
    return root, json.loads((root / _META).read_text())


def name_of(function: Callable[..., Any]) -> str:
    """A function as `module:name`; "" if it cannot be found by its name."""
    named = hasattr(function, "__qualname__") and array_pickle.has_name(function)
    return f"{function.__module__}:{function.__qualname__}" if named else ""


def about() -> dict[str, Any]:
    """Versions, devices and settings that the numbers of a run depend on."""
    found = {package: metadata.version(package) for package in ("jax", "jaxlib", "flax")}
    found["devices"] = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    found["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
    return found | {name: getattr(jax.config, name) for name in _CONFIG}


def _check_names(loss_fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raises a ValueError if a keyword belongs to `capture` and to the loss function."""
    try:
        signature = inspect.signature(loss_fn)
        taken = signature.bind_partial(*args).arguments
    except (TypeError, ValueError):  # it has no signature, or the call itself raises a better error
        return
    for name in inspect.signature(capture).parameters.keys() & signature.parameters.keys() - taken.keys():
        if signature.parameters[name].kind is not inspect.Parameter.VAR_POSITIONAL and name not in ("args", "kwargs"):
            raise ValueError(
                f"an argument belongs to capture or to the loss function, not to both; got {name}=, which both have. "
                f"Pass it by position, or capture a function that calls yours."
            )


def _number(x: Any) -> float:
    return float(np.asarray(x).reshape(()))


def _check_readable(path: str, x: Any) -> None:
    if isinstance(x, Tracer):
        raise TypeError(
            f"a capture stores values, which a traced array does not have; got {jax.typeof(x)} at {path}. "
            f"Call jaxmp.monitor.capture outside jit, on the results of the step."
        )
    if not isinstance(x, jax.Array):
        return
    nonfinite.check_alive(path, x)
    if not (x.is_fully_addressable or x.is_fully_replicated):
        raise ValueError(
            f"a capture stores whole arrays; got one at {path}, and other processes hold parts of it. Gather "
            f"it first, in all processes: jax.experimental.multihost_utils.process_allgather(x, tiled=True)."
        )


def _write(half: Path, leaves: array_functions.Leaves, args: Any, rest: dict[str, Any]) -> str:
    """Writes the arguments; returns why their structure cannot be stored, or ""."""
    places = ByIdentity()
    numbers = (bool, int, float, complex)
    values = [x if array_functions.is_array(x) or isinstance(x, numbers) else None for x in leaves.values]
    with open(half / _ARRAYS, "wb") as arrays:
        for name, x in ((_LEAVES, {"paths": leaves.paths, "values": values}), (_KWARGS, rest)):
            with open(half / name, "wb") as f:
                array_pickle.Saver(f, arrays, places).dump(x)
        try:
            with open(half / _TREE, "wb") as f:
                array_pickle.Saver(f, arrays, places).dump(args)
        except (pickle.PicklingError, TypeError, AttributeError) as e:  # pickle cannot store an object
            return str(e) or type(e).__name__
    return ""


def _as_like(like: Any, paths: list[str], values: list[Any]) -> Any:
    leaves = array_functions.leaves_of(like)
    stored = dict(zip(paths, values, strict=True))
    if extra := stored.keys() ^ set(leaves.paths):
        raise ValueError(
            f"like must have the leaves that were captured; only one of the two has {min(extra)}. Pass arguments that "
            f"are made in the same way."
        )

    def put(path: str, x: Any) -> Any:
        value = stored[path]
        if not array_functions.is_array(value) or not array_functions.is_array(x):
            return x if value is None else value
        if value.shape != x.shape or value.dtype != x.dtype:
            raise ValueError(
                f"like must have the arrays that were captured; got {x.dtype}{list(x.shape)} at {path}, where "
                f"{value.dtype}{list(value.shape)} was captured."
            )
        if not isinstance(x, jax.Array):
            return value
        if not x.ndim and getattr(x, "weak_type", False):
            return array_pickle.as_jax(value, weak=True)
        return jax.device_put(value, x.sharding)

    return leaves.rebuild([put(path, x) for path, x in zip(leaves.paths, leaves.values, strict=True)])
