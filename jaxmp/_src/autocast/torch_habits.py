"""What hands that know torch.amp type first, and what to tell them."""

import warnings
from typing import Any

import numpy as np

_DEVICES = ("cuda", "cpu", "gpu", "tpu", "xpu", "mps")


def check_no_device(what: str, given: Any) -> None:
    """Raises a TypeError for `GradScaler("cuda")` and the like.

    Example:
      >>> check_no_device("autocast", "float16")
    """
    if isinstance(given, str) and given in _DEVICES:
        raise TypeError(f"{what} takes no device: JAX knows where its arrays are; got {given!r}. Leave it out.")


def warn_of_rounded_loss(dtype: np.dtype) -> None:
    """Warns if a loss that is to be scaled was rounded to 16 bits before.

    Example:
      >>> warn_of_rounded_loss(np.dtype("float32"))
    """
    if dtype.itemsize == 2:
        warnings.warn(
            f"the loss to be scaled is {dtype.name}: it was rounded, and its gradient starts in 16 bits. Compute it in "
            f"float32. `with jaxmp.autocast(...)` round a plain function reaches only the modules in it; make the "
            f"function autocast: jaxmp.autocast(loss_fn).",
            stacklevel=3,
        )
