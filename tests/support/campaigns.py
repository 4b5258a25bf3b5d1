"""What campaigns share: their options, a bar, results as JSON, what failed on the screen, and the exit status."""

import argparse
import collections
import json
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import helpers
from regimes import DEVICES

Rows = list[dict[str, Any]]


def parser_of(doc: str | None, count: str = "", default: int = 0) -> argparse.ArgumentParser:
    """The options of a campaign; `count` is the option that says how many cases."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    if count:
        parser.add_argument(count, type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", "--out", type=Path, help="where results go")
    return parser


def versions(*packages: str) -> dict[str, str]:
    return {name.split("-")[0]: version(name) for name in ("jax", *packages)}


def save(path: Path | None, results: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(results, indent=2) + "\n")


def read(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text()) if path and path.exists() else {}


def _made_with(command: str) -> dict[str, Any]:
    return {"command": command, "device": f"CPU, {DEVICES} simulated devices", "versions": versions("optax")}


def over_worlds(
    script: str,
    doc: str | None,
    default: int,
    cases: str,
    wrong_cases: str,
    worlds: Sequence[tuple[str, ...]],
    run: Callable[[int, int, int], collections.Counter],
    row_of: Callable[..., dict[str, Any]],
) -> int:
    """A campaign of `default` cases, shared evenly over worlds; returns the exit status.

    `run(number of a world, how many, seed)` counts the cases by kind, and raises at the first wrong one;
    `row_of(*names of the world, kinds)` is a row of the results.
    """
    arguments = parser_of(doc, "--count", default).parse_args()
    rows, wrong, ran = [], [], 0
    for index, names in helpers.shown(enumerate(worlds), "regimes"):
        start = time.perf_counter()
        share = arguments.count // len(worlds) + (index < arguments.count % len(worlds))
        try:
            kinds = dict(run(index, share, arguments.seed))
        except AssertionError as e:
            wrong.append(str(e))
            kinds = {}
        rows.append(row_of(*names, kinds))
        ran += sum(kinds.values())
        print(f"{', '.join(names)}: {kinds}, {time.perf_counter() - start:.0f} s", flush=True)
    print(*wrong, sep="\n")
    command = f"python tests/support/{script} --count {arguments.count} --seed {arguments.seed}"
    save(arguments.json, _made_with(command) | {cases: ran, wrong_cases: wrong, "rows": rows})
    return int(bool(wrong))


def one_by_one(
    path: Path | None,
    command: str,
    key: str,
    parts: Iterable[tuple[Any, Any]],
    row_of: Callable[[Any], dict[str, Any]],
    failures_of: Callable[[dict[str, Any]], list[str]],
    summary: Callable[[Rows, list[str]], dict[str, Any]],
) -> int:
    """A campaign that goes on where an interrupted call of the same command, versions and devices stopped.

    A row is `{key: name}` and `row_of(part)`, for each `(name, part)`; `summary(rows, what failed)` stands above them.
    Returns the exit status.
    """
    parts, before = list(parts), read(path)
    same = all(before.get(name) == value for name, value in _made_with(command).items())
    rows: Rows = [row for row in before["rows"] if not failures_of(row)] if same else []
    names, ran = {name for name, _ in parts}, {row[key] for row in rows}
    if names <= ran:  # all: once more
        rows, ran = [row for row in rows if row[key] not in names], ran - names
    failed: list[str] = []
    for name, part in helpers.shown([part for part in parts if part[0] not in ran], f"{key}s"):
        start = time.perf_counter()
        row = {key: name} | row_of(part)
        rows = sorted([*rows, row], key=lambda row: row[key])
        failed = [message for row in rows for message in failures_of(row)]
        save(path, _made_with(command) | summary(rows, failed) | {"rows": rows})
        print(f"{row}, {time.perf_counter() - start:.1f} s", *failures_of(row), sep="\n  ", flush=True)
        jax.clear_caches()
    return int(bool(failed))
