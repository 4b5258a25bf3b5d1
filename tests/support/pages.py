"""The pages of the documentation, and their code, with the sizes of its data as they stand or times a factor."""

import re
from pathlib import Path

from helpers import ROOT, python_blocks

DOCS = sorted((ROOT / "docs").rglob("*.md"))

# Sizes of data that a reader may change. What a page asserts holds with others, too.
_NAMES = "batch|rows|columns|features|hidden|classes|tokens"
SIZE = re.compile(rf"^((?:(?:{_NAMES})(?:, )?)+) = ((?:\d+(?:, )?)+)", flags=re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT)).removeprefix("docs/")


def with_sizes(code: str, factor: int) -> str:
    """`code` with each size of its first lines, as in `rows, features = 32, 8`, times `factor`."""
    larger = lambda sizes: re.sub(r"\d+", lambda size: str(factor * int(size[0])), sizes)  # noqa: E731
    return SIZE.sub(lambda line: f"{line[1]} = {larger(line[2])}", code)


def run(page: Path, factor: int = 1) -> None:
    """All blocks of a page, from top to bottom in one namespace."""
    namespace: dict[str, object] = {}
    for block in python_blocks(page):
        exec(compile(with_sizes(block, factor), str(page), "exec"), namespace)
