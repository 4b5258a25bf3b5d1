"""fp8 in functions of any kind: recipes without state on the matmuls that autocast finds (`autocast.weighted_matmuls`).

A recipe without state needs no layer: its scales come from the operands. So autocast applies it to the `dot_general`s
of a traced function, also to those of other libraries. The recipe comes from `jaxmp.autocast(recipe=)`, or from a
policy. A policy's recipe goes to flax's layers first, because they know more (they cast a kernel from the dtype in
which it is stored). If a layer used the recipe, no other matmul uses it.

`DelayedScaling` has state, which only layers can keep. It is refused, or said to have no effect.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxmp._src.autocast import weighted_matmuls
from jaxmp._src.autocast.weighted_matmuls import Operation
from jaxmp._src.base import ambient
from jaxmp._src.base.warn import warn
from jaxmp._src.fp8 import chosen_layers, matmul

_OF_MODULES = (
    'In linen, make and run the model in `with jaxmp.autocast("fp8"):`; in nnx, call jaxmp.nnx.to_fp8(model). '
    'Else call jaxmp.autocast(fn, "fp8", recipe=jaxmp.fp8.CurrentScaling()).'
)


@dataclasses.dataclass(frozen=True)
class Fp8Product:
    """A product by one recipe, whose operand number `weight` is the weight."""

    recipe: Any
    weight: int

    @property
    def dtype_name(self) -> str:
        """The dtype of activations and weights."""
        return jnp.dtype(self.recipe.dtype()).name

    @property
    def reason(self) -> str:
        """The recipe's name."""
        return type(self.recipe).__name__

    def __call__(self, lhs: Array, rhs: Array, dtype: Any, params: Mapping[str, Any], /) -> Array:
        """The product in `dtype`; the weight is multiplied as the right operand, as recipes and `vmap` take it."""
        numbers, sharding = params["dimension_numbers"], params.get("out_sharding")
        options = {"recipe": self.recipe, "preferred_element_type": dtype}
        if self.weight == 1 or sharding is not None:
            return matmul.dot_general(lhs, rhs, numbers, out_sharding=sharding, **options)
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
        y = matmul.dot_general(rhs, lhs, ((rhs_contract, lhs_contract), (rhs_batch, lhs_batch)), **options)
        batch, free = len(lhs_batch), lhs.ndim - len(lhs_contract) - len(lhs_batch)
        return jnp.moveaxis(y, range(y.ndim - free, y.ndim), range(batch, batch + free))


@dataclasses.dataclass(frozen=True)
class Chooser:
    """Which matmuls of a function run by a recipe (`weighted_matmuls.Chooser`).

    Attributes:
      rule: which layers run in fp8. A filter that is a function gets the equation in place of a module.
      of_policy: whether the recipe is a policy's, which layers may have taken.
    """

    rule: chosen_layers.Rule
    of_policy: bool

    def choose(self, operations: list[Operation]) -> Sequence[weighted_matmuls.Product | str | None]:
        """The product of each operation, or why it has none; warns where nothing runs in fp8."""
        could = [operation for operation in operations if operation.why_not is None]
        linen = ambient.now().fp8_layers  # in the region around: if its layers were asked, their filter has the word
        if self.of_policy and (any(o.is_layer for o in operations) or (linen is not None and linen.base_calls > 0)):
            return [None] * len(operations)
        # A product by such a recipe needs more than its operands: scales, or a key.
        if any(recipe.has_state or recipe.rounds_at_random for recipe in self.rule.recipes.values()):
            if could and not ambient.is_in_loss():  # else value_and_grad says it
                _warn_of_state(len(could))
            return [None] * len(operations)
        doubles = {o.path or "(top)": None for o in operations if o.why_not == weighted_matmuls.IN_FLOAT64}
        if doubles:
            matmul.warn_of_fallback(jnp.dtype(jnp.float64), "cast its operands to float32", ", ".join([*doubles][:4]))
        ends = chosen_layers.ends((o.place, o.in_loop) for o in operations if o.weight is not None or o.is_layer)
        chosen = [self._choose(operation, ends) for operation in operations]
        if not self.of_policy:
            whys = [choice if isinstance(choice, str) else None for choice in chosen]
            matmuls = [(o.path, why, o.why_not is None) for o, why in zip(operations, whys, strict=True)]
            see = " jaxmp.explain_autocast(fn, *args, recipe=...) shows all."
            self.rule.warn(matmuls, idle_only=bool(doubles) or any(o.is_layer for o in operations), see=see)
        return chosen

    def check_region(self) -> None:
        """Raises a ValueError for `with autocast(recipe=)` in a function that autocast rewrites."""
        if not self.of_policy:
            raise ValueError(
                f"autocast(recipe=) must not be in a function under autocast; got {self.rule.recipe!r}. Pass recipe= "
                f"to that autocast."
            )

    def _choose(self, operation: Operation, ends: Mapping[Any, str]) -> Fp8Product | str:
        why_not = operation.why_not or self.rule.why_not(operation.path, operation.eqn, ends, at=operation.place)
        if why_not is not None:
            return why_not
        assert operation.weight is not None
        return Fp8Product(self.rule.recipe_at(operation.path), operation.weight)


def chooser_of(recipe: Any, filter: chosen_layers.Filter = None, *, of_policy: bool = False) -> Chooser:
    """The chooser for the arguments of `autocast`; checks them.

    Raises:
      TypeError: no recipe.
      ValueError: a recipe that needs state, or a key, and is not a policy's.
    """
    rule = chosen_layers.Rule("jaxmp.autocast", recipe, filter)
    for part in rule.recipes.values():
        if of_policy:
            continue
        if part.has_state:
            raise ValueError(
                f"autocast(recipe=) must get a recipe without state; got {part!r}. Pass "
                f"recipe=jaxmp.fp8.CurrentScaling()."
            )
        if part.rounds_at_random:
            raise ValueError(
                f"autocast(recipe=) must not round stochastically; got {part!r}. Use NVFP4(stochastic_rounding=False)."
            )
    return Chooser(rule, of_policy)


def _warn_of_state(count: int) -> None:
    warn(
        "recipe-needs-state",
        f"the policy's recipe needs state that this function does not hold, so none of its {count} matmuls with "
        f"weights runs in fp8. {_OF_MODULES}",
    )
