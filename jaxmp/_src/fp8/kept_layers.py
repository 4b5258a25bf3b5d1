"""Layers that a policy keeps in float32 (`keep_fp32`), which neither autocast casts nor fp8 takes."""

import dataclasses
from collections.abc import Iterable

from jaxmp._src.base import tree_paths
from jaxmp._src.fp8 import scale_leaves


@dataclasses.dataclass(frozen=True)
class KeptLayers:
    """Says whether a layer is kept: whether patterns of params name all of its own. Scales of fp8 do not count.

    Attributes:
      patterns: of paths of params (`tree_paths`).
    """

    patterns: tuple[str, ...]

    def __call__(self, path: str, params: Iterable[str]) -> bool:
        """Whether the module at `path` with these params, named from there on, is kept; one without params is not."""
        has_params = False
        for name in params:  # up to the first that no pattern names: a large model has many
            if scale_leaves.is_scale(name):
                continue
            if not tree_paths.matches(f"{path}/{name}" if path else name, self.patterns):
                return False
            has_params = True
        return has_params
