"""The README's Python blocks run, one after the other, and give the shapes that its comments say; its table is generated."""

import pathlib
import re

import pytest

from jax_turboattn.backends import ffi
from jax_turboattn.commands.kernels import support_table

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_examples_run():
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 2
    exec(compile(blocks[0], "README.md, first block", "exec"), names)
    B, H, D = names["B"], names["H"], names["D"]
    assert names["out"].shape == (B, H, D)
    exec(compile(blocks[1], "README.md, second block", "exec"), names)
    assert names["out"].shape == (B, H, D) and names["cache"].num_pages == 64


def matrix_rows() -> list[dict]:
    """The rows of kernel_matrix.cmake as the module that is built from them lists them: CI's first run builds none."""
    text = (ROOT / "ffi/kernels/kernel_matrix.cmake").read_text()
    long_names = dict(re.findall(r"set\(TURBOATTN_NAME_(\w+) (\w+)\)", text))
    rows = []
    for row in re.findall(r'^\s*"([a-z0-9_]+(?:\|[a-z0-9]+){5})"$', text, re.M):
        phase, family, *dims, dtype, kv_dtype = row.split("|")
        head_dim, value_dim = (None if dim == "any" else int(dim) for dim in dims)
        dtypes = dict(dtype=long_names.get(dtype), kv_dtype=long_names.get(kv_dtype))
        rows.append(dict(phase=phase, family=family, head_dim=head_dim, value_dim=value_dim, **dtypes))
    return rows


def test_the_table_of_kernels_is_the_generated_one():
    """To renew it, paste what is printed here between the two comments."""
    table = support_table(matrix_rows() + ffi.load("cpu").module.kernels())
    print(table)
    assert re.findall(r"<!-- kernels: .* -->\n(.*)\n<!-- end of kernels -->", README, re.S) == [table]


def test_the_matrix_is_the_registry():
    if ffi.load("cuda").reason is not None:
        pytest.skip(ffi.load("cuda").reason)
    rows = matrix_rows()
    built = [{name: kernel[name] for name in rows[0]} for kernel in ffi.load("cuda").module.kernels()]
    assert built and all(kernel in rows for kernel in built)  # all of them, or those of the cards that it was built for


def test_a_table_says_exactly_what_there_is():
    """Kernels that take different things get lines of their own."""

    def row(head_dim, dtype, kv_dtype, value_dim=None):
        return dict(
            phase="decode",
            family="sm80",
            head_dim=head_dim,
            value_dim=value_dim or head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )

    rows = [row(d, e, kv) for d in (64, 128) for e in ("bfloat16", "float16") for kv in (e, "int8")]
    rows += [row(256, "bfloat16", "bfloat16"), row(576, "bfloat16", "bfloat16", value_dim=512)]
    lines = support_table(rows).splitlines()[2:]
    assert [line.split(" | ")[3:] for line in lines] == [
        ["64, 128", "bf16, fp16", "query dtype, int8 |"],
        ["256, 576 (Dv 512)", "bf16", "query dtype |"],
    ]
