"""Plain-text tables for terminals and logs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby


def spans(numbers: Iterable[int], to: str = "-") -> list[str]:
    """Return whole numbers as short texts, in ascending order, with each run of consecutive numbers as one range:
    ["0-3", "7"].

    Args:
        to: text between the two ends of a range.
    """
    placed = enumerate(sorted({*numbers}))
    runs = [[number for _, number in run] for _, run in groupby(placed, lambda one: one[1] - one[0])]
    return [to.join(map(str, dict.fromkeys((run[0], run[-1])))) for run in runs]


def aligned(rows: Iterable[Sequence[str]], align: str, indent: str = "") -> list[str]:
    """Format the rows of a table as lines of text. Columns stand two blanks apart, each as wide as its widest cell.

    Args:
        rows: the cells of each row. If a row has fewer cells than the table has columns, its last cell takes the rest
            of the line.
        align: one character for each column, "<" (left) or ">" (right).
        indent: text in front of every line.
    """
    table = [(row, len(row) - 1 if len(row) < len(align) else len(align)) for row in rows]
    widths = [max((len(row[n]) for row, end in table if n < end), default=0) for n in range(len(align))]
    lines = []
    for row, end in table:
        cells = [f"{cell:{align[column]}{widths[column]}}" for column, cell in enumerate(row[:end])]
        lines.append((indent + "  ".join([*cells, *row[end:]])).rstrip())
    return lines
