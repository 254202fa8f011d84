"""`kernels`: the compiled kernels of the loaded extension modules, one a line or as the README's table."""

from __future__ import annotations

from typing import Any

from ..inspection import kernels
from .table import print_table

Row = dict[str, Any]

# The functions that launch the kernels of a phase, in the order of the table.
_PAGED = "`paged_attention`, `paged_decode`, `paged_attention_step`"
_FUNCTIONS = dict(
    attention="`attention`, `ragged_attention`",
    prefill=_PAGED,
    decode=_PAGED,
    append="`append_kv`, `paged_attention_step`",
    gather="`gather_kv`",
    copy_pages="`copy_pages`",
    merge="`merge_partials`",
)
# Family -> the name that forces it, and where it runs.
_IMPLEMENTATIONS = dict(
    sm75="`cuda:sm75`, 7.5 or newer",
    sm80="`cuda:sm80`, 8.0 or newer",
    sm90="`cuda:sm90`, 9.0",
    simt="`cuda`, 7.5 or newer",
    cpu="`cpu`",
)
_SHORT = dict(bfloat16="bf16", float16="fp16", float32="fp32", float8_e4m3fn="fp8 e4m3")
_WITHOUT_CACHE = ("attention", "merge")


def add_arguments(parser) -> None:
    parser.add_argument("--markdown", action="store_true", help="what they take, as the table in the README")


def run(args) -> int:
    rows = kernels()
    if not rows:
        print("no extension module is loaded; `python -m jax_turboattn env` says why")
        return 1
    if args.markdown:
        print(support_table(rows))
        return 0
    columns = list(dict.fromkeys(name for row in rows for name in row))
    print_table(columns, [["any" if row.get(name) is None else row[name] for name in columns] for row in rows])
    return 0


def support_table(rows: list[Row]) -> str:
    """What kernel rows take, in Markdown: kernels that take the same share a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for phase, functions in _FUNCTIONS.items():
        for family, implementation in _IMPLEMENTATIONS.items():
            for takes in _grouped([r for r in rows if (r["phase"], r["family"]) == (phase, family)], phase):
                lines.setdefault((functions, implementation, *takes), []).append(phase)
    cells = [("functions", "kernels", "implementation", "head dims", "query dtypes", "caches"), ("---",) * 6]
    functions, implementations = list(_FUNCTIONS.values()), list(_IMPLEMENTATIONS.values())
    ordered = sorted(lines.items(), key=lambda line: (functions.index(line[0][0]), implementations.index(line[0][1])))
    cells += [(names, ", ".join(phases), *takes) for (names, *takes), phases in ordered]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def _grouped(rows: list[Row], phase: str) -> list[tuple[str, str, str]]:
    """(head dims, query dtypes, caches) of the kernels of one phase and family, in as few lines as say it exactly."""
    caches: dict[tuple[str, Any], list[str]] = {}
    for row in rows:
        stored = "query dtype" if row["kv_dtype"] == row["dtype"] else _SHORT.get(row["kv_dtype"], row["kv_dtype"])
        stored = {"attention": "-", "merge": "-", "copy_pages": "any"}.get(phase, stored)
        caches.setdefault((_dims(row), row["dtype"]), []).append(stored)
    dims: dict[tuple[Any, tuple[str, ...]], list[str]] = {}
    for (dim, dtype), stored in caches.items():
        dims.setdefault((dtype, tuple(stored)), []).append(dim)
    dtypes: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for (dtype, stored), found in dims.items():
        dtypes.setdefault((tuple(found), stored), []).append("any" if dtype is None else _SHORT[dtype])
    return [(", ".join(found), ", ".join(names), ", ".join(stored)) for (found, stored), names in dtypes.items()]


def _dims(row: Row) -> str:
    head_dim, value_dim = row["head_dim"], row["value_dim"]
    if head_dim is None:
        return "any" if row["family"] == "cpu" or row["phase"] in ("copy_pages", "merge") else "multiples of 8"
    return f"{head_dim}" if head_dim == value_dim else f"{head_dim} (Dv {value_dim})"
