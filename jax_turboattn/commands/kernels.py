"""`kernels`: the compiled kernels of the loaded extension modules."""

from __future__ import annotations

from ..inspection import kernels
from .table import print_table


def add_arguments(parser) -> None:
    """No arguments."""


def run(args) -> int:
    rows = kernels()
    if not rows:
        print("no extension module is loaded; `python -m jax_turboattn env` says why")
        return 0
    columns = list(dict.fromkeys(name for row in rows for name in row))
    print_table(columns, [["any" if row.get(name) is None else row[name] for name in columns] for row in rows])
    return 0
