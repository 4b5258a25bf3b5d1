"""Text for people: columns of a table."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], align: str = "", *, gap: int = 2) -> str:
    """Rows of cells as aligned lines.

    `align` holds `<` or `>` for each column, in order; columns beyond it are aligned to the left. `gap` is the number
    of spaces between columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = align.ljust(len(widths), "<")
    lines = ((" " * gap).join(f"{c:{side}{w}}" for c, side, w in zip(row, sides, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
