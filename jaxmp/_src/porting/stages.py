"""How far each optimizer is between two updates of a scaler, and what may come next: torch.amp's rules.

READY --unscale--> UNSCALED --step--> STEPPED        READY --step--> STEPPED, unscaled on the way
"""

import dataclasses

_UNSCALED, _STEPPED = "UNSCALED", "STEPPED"
_SAID = {_UNSCALED: "was unscaled", _STEPPED: "has stepped"}


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of all optimizers: hashable, so that they can be part of a pytree's structure.

    Attributes:
      known: (optimizer, stage), sorted, of those that are not READY.

    Example:
      >>> Stages().unscaling("a").stepping("a")
      Stages(known=(('a', 'STEPPED'),))
    """

    known: tuple[tuple[str, str], ...] = ()

    def is_ready(self, optimizer: str) -> bool:
        """Whether its gradients are still scaled."""
        return optimizer not in dict(self.known)

    def unscaling(self, optimizer: str) -> "Stages":
        """The stages after the gradients of `optimizer` are unscaled; a ValueError if they are, or it has stepped."""
        if not self.is_ready(optimizer):
            raise ValueError(
                f"gradients are unscaled once, before the step; got unscale for {optimizer!r}, which "
                f"{_SAID[dict(self.known)[optimizer]]} since the last update(). Call it once, before step, and give "
                f"each optimizer a name of its own: optimizer=."
            )
        return self._with(optimizer, _UNSCALED)

    def stepping(self, optimizer: str) -> "Stages":
        """The stages after a step of `optimizer`; a ValueError if it has stepped."""
        if dict(self.known).get(optimizer) == _STEPPED:
            raise ValueError(
                f"an optimizer steps once between two updates; got step for {optimizer!r}, which has stepped since the "
                f"last update(). Call scaler = scaler.update() once at the end of a step, and give each optimizer a "
                f"name of its own: optimizer=."
            )
        return self._with(optimizer, _STEPPED)

    def _with(self, optimizer: str, stage: str) -> "Stages":
        return Stages(tuple(sorted((dict(self.known) | {optimizer: stage}).items())))
