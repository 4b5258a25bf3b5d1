"""How results come into README.md: as tables between markers, with what they were measured with below."""

import argparse
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"


def markdown(cells: list[list[str]]) -> str:
    """A markdown table of its rows, the first being the head, with the columns aligned."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [cells[0], ["-" * w for w in widths], *cells[1:]]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def write_between(begin: str, end: str, text: str) -> None:
    """Replaces what stands between two markers in README.md."""
    before, rest = README.read_text().split(begin)
    README.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def write_readme(markers: tuple[str, str], tables: str, results: dict[str, Any]) -> None:
    """Puts tables, and what they were measured with, between their markers in README.md."""
    found = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    write_between(*markers, f"{tables}\n\n{results['device']}; {found}.")


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The command line: `--table` or nothing."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--table", action="store_true", help="only write README.md's tables from the stored results")
    return parser.parse_args()


def versions(packages: tuple[str, ...], command: str) -> dict[str, str]:
    """Of everything that the numbers depend on; stops the program where something is missing."""
    try:
        return {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in packages}
    except importlib.metadata.PackageNotFoundError as e:
        raise SystemExit(f"{e.name} is missing: `{command}` installs what this needs, and runs it") from e
