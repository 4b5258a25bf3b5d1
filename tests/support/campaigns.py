"""Results of a campaign as JSON, and its end: what failed on the screen, and the exit status."""

import json
from pathlib import Path
from typing import Any

import jax
import optax

from regimes import DEVICES


def write(path: Path | None, command: str, counted: dict[str, int], failed: tuple[str, list[str]], rows: list) -> None:
    """Writes the results to `path`; see `finish`."""
    name, messages = failed
    results: dict[str, Any] = _made_with(command) | {**counted, name: messages, "rows": rows}
    if path:
        path.write_text(json.dumps(results, indent=2) + "\n")


def rows_before(path: Path | None, command: str) -> list[Any]:
    """The rows that an interrupted run of `command` left in `path`; none if it had other versions or devices."""
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text())
    return found["rows"] if {key: found[key] for key in _made_with(command)} == _made_with(command) else []


def finish(path: Path | None, command: str, counted: dict[str, int], failed: tuple[str, list[str]], rows: list) -> int:
    """Writes the results to `path`, prints what failed, and returns 1 if something did.

    Args:
      path: None: nothing is written.
      command: what repeats the campaign.
      counted: how many steps, faults or jobs ran, by that name.
      failed: the name of the list of failures, and the list.
      rows: the results in detail.
    """
    write(path, command, counted, failed, rows)
    print(*failed[1], sep="\n")
    return 1 if failed[1] else 0


def _made_with(command: str) -> dict[str, Any]:
    return {
        "command": command,
        "device": f"CPU, {DEVICES} simulated devices",
        "versions": {"jax": jax.__version__, "optax": optax.__version__},
    }
