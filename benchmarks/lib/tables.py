"""How results come into README.md: as tables between markers, with what they were measured with below.

A script that measures is a function that returns its results, and `run`, which does what the command line asks for.
Results are a dict: "command", "device", "versions", and lists of rows; what of a target is not met stands in the rows'
or the results' own "missed", in words.
"""

import argparse
import importlib.metadata
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
README = HERE / "README.md"


def markdown(cells: list[list[str]]) -> str:
    """A markdown table of its rows, the first being the head, with the columns aligned."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [cells[0], ["-" * w for w in widths], *cells[1:]]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def write_between(begin: str, end: str, text: str, page: Path | None = None) -> None:
    """Replaces what stands between two markers in README.md, or in another page."""
    page = page or README
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def write_readme(markers: tuple[str, str], tables: str, results: dict[str, Any], page: Path | None = None) -> None:
    """Puts tables, and what they were measured with, between their markers in README.md, or in another page."""
    found = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    write_between(*markers, f"{tables}\n\n{results['device']}; {found}.", page)


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The command line: `--table` or nothing."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--table", action="store_true", help="only write README.md's tables from the stored results")
    return parser.parse_args()


def run(
    description: str | None,
    path: Path,
    markers: tuple[str, str],
    render: Callable[[dict[str, Any]], str],
    measure: Callable[[], dict[str, Any]],
    page: Path | None = None,
) -> int:
    """What a script does as a program: measures, writes the results and README.md's tables; or the tables alone.

    Args:
      description: the script's docstring.
      path: where the results are kept.
      markers: of the tables in README.md.
      render: results to markdown.
      measure: makes the results.
      page: where the markers are; None: README.md.

    Returns:
      The exit status: 1 if a target is missed.
    """
    if parse_arguments(description).table:
        results = json.loads(path.read_text())
        write_readme(markers, render(results), results, page)
        return 0
    results = measure()
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    write_readme(markers, render(results), results, page)
    print(render(results), *results.get("missed", ()), sep="\n")
    rows = [row for part in results.values() if isinstance(part, list) for row in part if isinstance(row, dict)]
    return 1 if results.get("missed") or any(row.get("missed") for row in rows) else 0


def holds(row: dict[str, Any], *, has_target: bool = True) -> str:
    """The last column of a row: whether it meets its target, if it has one, or what it misses."""
    if row["missed"]:
        return "no: " + "; ".join(row["missed"])
    return "yes" if has_target else ""


def versions(packages: tuple[str, ...], command: str) -> dict[str, str]:
    """Of everything that the numbers depend on; stops the program where something is missing."""
    try:
        return {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in packages}
    except importlib.metadata.PackageNotFoundError as e:
        raise SystemExit(f"{e.name} is missing: `{command}` installs what this needs, and runs it") from e
