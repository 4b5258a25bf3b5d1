"""Text for people: columns of a table."""

from collections.abc import Sequence


def columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of cells as aligned lines, two spaces between columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
