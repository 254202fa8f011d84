"""The README's Python blocks run, one after the other, and give the shapes that its comments say."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_examples_run():
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) == 2
    exec(compile(blocks[0], "README.md, first block", "exec"), names)
    B, H, D = names["B"], names["H"], names["D"]
    assert names["out"].shape == (B, H, D)
    exec(compile(blocks[1], "README.md, second block", "exec"), names)
    assert names["out"].shape == (B, H, D) and names["cache"].num_pages == 64
