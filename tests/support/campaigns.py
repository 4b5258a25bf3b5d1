"""The end of a campaign: its results as JSON, what failed on the screen, and the exit status."""

import json
from pathlib import Path
from typing import Any

import jax
import optax

from regimes import DEVICES


def finish(path: Path | None, command: str, counted: dict[str, int], failed: tuple[str, list[str]], rows: list) -> int:
    """Writes the results to `path`, prints what failed, and returns 1 if something did.

    Args:
      path: None: nothing is written.
      command: what repeats the campaign.
      counted: how many steps, faults or jobs ran, by that name.
      failed: the name of the list of failures, and the list.
      rows: the results in detail.
    """
    name, messages = failed
    results: dict[str, Any] = {
        "command": command,
        "device": f"CPU, {DEVICES} simulated devices",
        "versions": {"jax": jax.__version__, "optax": optax.__version__},
        **counted,
        name: messages,
        "rows": rows,
    }
    if path:
        path.write_text(json.dumps(results, indent=2) + "\n")
    print(*messages, sep="\n")
    return 1 if messages else 0
