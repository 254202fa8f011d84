"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    cells = [list(columns), *([str(x) for x in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip())
