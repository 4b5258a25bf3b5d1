"""Writes metrics to TensorBoard, Weights & Biases, a CSV file, or a function."""

import csv
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


def log_metrics(to: Any, step: int, metrics: Mapping[str, Any], **scalars: Any) -> None:
    """Writes the metrics of a step.

    Metrics that are NaN, because `get_metrics` does not compute them (no clipping in the chain, no fp8), are left out,
    except in a CSV file, whose rows all have the same columns. A loss or another scalar of yours is always written.
    Reading a metric waits for the step to finish: call this function every few steps, or one step later.

    Args:
      to: a path that ends in .csv (rows are appended); a TensorBoard writer (of torch, tensorboardX or clu:
        `add_scalar`; of flax.metrics.tensorboard: `scalar`); a W&B run or the wandb module (`log`); or a function of
        `(step, dict)`.
      step: the number of the step.
      metrics: `jaxmp.get_metrics(opt_state)`, or any flat dict of scalars.
      **scalars: more scalars by name: `loss=loss`.

    Raises:
      TypeError: `to` is none of these.
      ValueError: the CSV file has other columns.

    Example:
      >>> import optax, jax.numpy as jnp, jaxmp
      >>> opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp16").init({"w": jnp.ones(2)})
      >>> rows = []
      >>> log_metrics(lambda step, row: rows.append(row), 7, jaxmp.get_metrics(opt_state), loss=0.5)
      >>> rows[0]["loss"], rows[0]["loss_scale"], "grad_norm" in rows[0]
      (0.5, 65536.0, False)
    """
    write = _writer(to)
    computed = {key: as_number(x) for key, x in jax.device_get(dict(metrics)).items()}
    own = {key: as_number(x) for key, x in jax.device_get(scalars).items()}
    if isinstance(to, (str, os.PathLike)):
        write(step, computed | own)  # every row of a CSV file has the same columns
    else:
        write(step, {key: x for key, x in computed.items() if not math.isnan(x)} | own)


def _writer(to: Any) -> Callable[[int, dict[str, float]], Any]:
    if isinstance(to, (str, os.PathLike)):
        path = os.fspath(to)
        if path.endswith(".csv"):
            return lambda step, row: _append(path, {"step": step} | row)
    elif hasattr(to, "add_scalar"):
        return lambda step, row: [to.add_scalar(key, x, step) for key, x in row.items()]
    elif hasattr(to, "scalar"):
        return lambda step, row: [to.scalar(key, x, step) for key, x in row.items()]
    elif hasattr(to, "log"):
        return lambda step, row: to.log(row, step=step)
    elif callable(to):
        return to
    raise TypeError(f"to must be a path ending in .csv, a writer (add_scalar, scalar, log) or a function; got {to!r}.")


def _append(path: str, row: dict[str, float]) -> None:
    has_rows = os.path.exists(path) and os.path.getsize(path) > 0
    if has_rows:
        with open(path, newline="") as f:
            columns = next(csv.reader(f))
        if columns != list(row):
            differ = ", ".join(sorted(set(columns) ^ set(row))) or "their order"
            raise ValueError(
                f"rows must have the columns of {path}; got others: {differ}. Log the same scalars in every step."
            )
    with open(path, "a", newline="") as f:
        writer = csv.DictWriter(f, list(row))
        if not has_rows:
            writer.writeheader()
        writer.writerow(row)


def as_number(x: Any) -> float:
    """A metric as a number; the first copy, if pmap made several."""
    return float(np.ravel(x)[0])
