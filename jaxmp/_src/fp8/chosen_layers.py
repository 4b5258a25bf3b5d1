"""Which layers run in fp8, by which recipe: one rule for layers of linen, layers of nnx, and matmuls of any function.

Each of the three finds the layers of a model in its own way (a call that flax intercepts, attributes, a traced
function), and gives their paths and the order in which they run. A layer that can run in fp8 does, if `filter=` names
it. Without a filter all do but the first and the last with weights; a layer in a loop is neither.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jaxmp._src.base import tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.fp8 import recipe as recipe_lib, scale_leaves
from jaxmp._src.programs import jaxprs

Filter = Callable[[str, Any], bool] | Sequence[str] | None
Layer = TypeVar("Layer", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class KeptLayers:
    """Says whether a policy keeps a layer in float32 (`keep_fp32`), so that neither autocast casts it nor fp8 takes it.

    It does if patterns name all params of the layer itself. Scales of fp8 do not count.

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


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which layers run in fp8. Equal rules choose alike: `jax.jit` may use what it traced under an equal one.

    Attributes:
      function: of the user, which has the arguments `recipe` and `filter`; for warnings.
      recipe: a recipe, or a dict from patterns of paths to recipes.
      filter: patterns of paths, or `(path, layer) -> bool`; None for all but the ends.
      kept: the layers that a policy keeps in float32.

    Raises:
      TypeError: no recipe.
    """

    function: str
    recipe: Any = dataclasses.field(compare=False)
    filter: Filter = dataclasses.field(default=None, compare=False)
    kept: KeptLayers | None = None
    _identity: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        for part in self.recipes.values():
            recipe_lib.check(part)
        if self.filter is not None and not callable(self.filter):
            object.__setattr__(self, "filter", tree_paths.patterns_of(self.filter))
        object.__setattr__(self, "_identity", (tuple(self.recipes.items()), _identity_of(self.filter)))

    @property
    def recipes(self) -> Mapping[str, Any]:
        """The recipes by pattern."""
        return scale_leaves.recipes_of(self.recipe)

    def recipe_at(self, path: str) -> Any:
        """The recipe for the layer at `path`: the first whose pattern fits."""
        return self.recipes[scale_leaves.pattern_for(self.recipes, path, "fp8 layer")]

    def why_not(
        self, path: str, layer: Any, ends: Mapping[Any, str], *, at: Any = None, params: Iterable[str] = ()
    ) -> str | None:
        """Why a layer that can run in fp8 does not; None if it does.

        Args:
          path, layer: for the filter.
          ends: from `ends`.
          at: what `ends` calls the layer, if not by its path.
          params: names of its params.
        """
        if self.kept is not None and self.kept(path, params):
            return "keep_fp32"
        if jaxprs.is_highest(getattr(layer, "precision", None)):
            return "precision=HIGHEST"
        if self.filter is None:
            end = ends.get(path if at is None else at)
            return end and f"the {end} operation with weights"
        chosen = self.filter(path, layer) if callable(self.filter) else tree_paths.matches(path, self.filter)
        return None if chosen else "filter"

    def warn(self, layers: Iterable[tuple[str, str | None, bool]], *, idle_only: bool = False, see: str = "") -> None:
        """Warns of patterns that fit no layer that can run in fp8, else of a model in which none runs in fp8.

        Args:
          found: of each layer its path, why it does not run in fp8 (None if it does, or if another warning says why),
            and whether it can.
          idle_only: whether something else runs in fp8, or another warning says that nothing does.
          see: what shows the user more.
        """
        layers = list(layers)
        paths = [path for path, _, can in layers if can]
        patterns = () if self.filter is None or callable(self.filter) else self.filter
        idle = tree_paths.warn_of_idle(f"{self.function}(filter=)", patterns, paths, of="layer")
        scale_leaves.warn_of_idle(f"{self.function}(recipe)", self.recipe, paths, of="layer")
        if idle or idle_only or self.filter == () or any(why is None for _, why, _ in layers):
            return
        reasons = list(dict.fromkeys(f"{path or '(top)'}: {why}" for path, why, _ in layers))
        shown = "; ".join([*reasons[:4], *(["..."] if len(reasons) > 4 else [])]) or "it has no matmul with weights"
        advice = " Pass filter=lambda path, layer: True." if paths else ""
        warn(
            "no-layer-in-fp8",
            f"{self.function} chose no matmul with weights for fp8 ({shown}).{advice}{see}",
        )


def ends(order: Iterable[tuple[Layer, bool]]) -> dict[Layer, str]:
    """The first and the last layer with weights, as "first" and "last": (layer, is it in a loop) as they run."""
    run = list(order)
    named = zip([*run[:1], *run[-1:]], ("first", "last"), strict=False)
    return {layer: name for (layer, in_loop), name in named if not in_loop}


def _identity_of(chosen: Any) -> Any:
    """Equal for filters that choose alike.

    A function is its code and the values in it, so one that a loop writes again is the same filter.
    """
    if isinstance(chosen, functools.partial):
        return (_identity_of(chosen.func), _values(chosen.args), _values(chosen.keywords.items()))
    if inspect.isfunction(chosen):
        cells = [cell.cell_contents for cell in chosen.__closure__ or ()]
        named = (chosen.__kwdefaults__ or {}).items()
        return (chosen.__code__, _values(cells), _values(chosen.__defaults__ or ()), _values(named))
    return _values([chosen])


def _values(values: Any) -> tuple[Any, ...]:
    return tuple(_values(x) if isinstance(x, (tuple, list)) else _Same.if_unhashable(x) for x in values)


class _Same:
    """A value without a hash, equal only to itself."""

    def __init__(self, value: Any):
        self._value = value

    @classmethod
    def if_unhashable(cls, value: Any) -> Any:
        """`value`, in a `_Same` if it has no hash."""
        try:
            hash(value)
        except TypeError:
            return cls(value)
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)
