"""A map from arrays and tracers to values, by identity: two equal arrays are two keys."""

import weakref
from typing import Any

import numpy as np


class ByIdentity:
    """Holds no key: an entry goes with its array.

    Example:
      >>> import numpy as np
      >>> values, x = ByIdentity(), np.ones(2)
      >>> values.set(x, "this very array")
      >>> values.get(x), values.get(np.ones(2))
      ('this very array', None)
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref, Any]] = {}

    def set(self, key: Any, value: Any) -> None:
        """Keeps `value` for as long as `key` lives; nothing for a scalar of NumPy or Python, which is no array."""
        number = id(key)
        if not isinstance(key, np.generic | int | float | complex):
            self._entries[number] = weakref.ref(key, lambda _: self._entries.pop(number, None)), value

    def get(self, key: Any) -> Any:
        """The value of `key`, or None; of the key None, too."""
        reference, value = self._entries.get(id(key), (None, None))
        return value if reference is not None and reference() is key else None
