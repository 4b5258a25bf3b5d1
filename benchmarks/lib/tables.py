"""Tables in markdown pages: aligned columns, written between two markers, followed by the versions."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # of the project
README = ROOT / "benchmarks" / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def markdown(cells: list[list[str]]) -> str:
    """Rows of cells as a markdown table with aligned columns; the first row is the head."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [cells[0], ["-" * w for w in widths], *cells[1:]]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def markers(name: str) -> tuple[str, str]:
    """The lines of a page around the tables of the benchmark `name`."""
    return f"<!-- {name}: written by python -m benchmarks {name} -->", f"<!-- {name}: end -->"


def write_between(begin: str, end: str, text: str, page: Path) -> None:
    """Replaces the text between two markers in `page`."""
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def with_versions(tables: str, results: dict[str, Any]) -> str:
    """The tables, and below them the device and the versions that the numbers were measured with."""
    lines = [f"{results['device']}; {_listed(results['versions'])}."]
    others = [_listed(row["versions"]) for row in results.get("rows", ()) if "versions" in row]
    lines += [f"{others.count(text)} older rows: {text}." for text in dict.fromkeys(others)]
    return "\n".join([f"{tables}\n", *lines])


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def failing(checks: Iterable[tuple[bool, str]]) -> list[str]:
    """Of pairs (whether a target holds, what is wrong if not), the targets that are missed."""
    return [wrong for holds, wrong in checks if not holds]


def holds(row: dict[str, Any], *, has_target: bool = True) -> str:
    """The last cell of a row: "yes" if it meets its targets, "no" with what it misses, "" if it has no target."""
    if row["missed"]:
        return "no: " + "; ".join(row["missed"])
    return "yes" if has_target else ""
