"""Programs that update a donated cache, and what proves that none of them copies it: for every host's tests.

proof = prove("step", Shapes(), "float32", "float32")
assert proof.copies == [] and ...
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_turboattn as ta


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes of the programs. The pool must be large beside everything else: what is as large as it is a copy of it."""

    B: int = 3
    H: int = 4
    K: int = 2
    D: int = 16
    P: int = 8
    N: int = 1024
    M: int = 4
    L: int = 3

    def cache(self, kv_dtype: str, dtype: str, num_layers: int | None = None) -> ta.PagedKVCache:
        return ta.PagedKVCache.create(
            self.N, self.K, self.D, page_size=self.P, num_layers=num_layers, dtype=kv_dtype, param_dtype=dtype
        )


class Programs:
    """cache -> cache, or results with a cache among them; queries in `dtype`."""

    # name -> whether the cache is stacked over layers
    STACKED = dict(
        append=False,
        step=False,
        copy_pages=False,
        decode_loop=False,
        while_loop=False,
        scan_over_layers=True,
        copy_pages_of_all_layers=True,
    )

    def __init__(self, shapes: Shapes, dtype: str):
        self.shapes = s = shapes
        self.query, self.new = jnp.ones((s.B, s.H, s.D), dtype), jnp.ones((s.B, s.K, s.D), dtype)
        self.offsets = jnp.arange(s.B + 1, dtype=jnp.int32)
        self.table = jnp.arange(s.B * s.M, dtype=jnp.int32).reshape(s.B, s.M)
        self.lens = jnp.array([1, 9, 20], jnp.int32)

    def append(self, cache, layer=None):
        return ta.append_kv(cache, self.new, self.new, self.table, self.lens, self.offsets, layer=layer)

    def step(self, cache, layer=None, lens=None):
        lens = self.lens if lens is None else lens
        return ta.paged_attention_step(
            self.query, self.new, self.new, cache, self.table, lens, self.offsets, layer=layer
        )

    def decode_loop(self, cache):
        """Append and attend, several times: the serving loop."""

        def body(carry, _):
            cache, lens = carry
            out, cache = self.step(cache, lens=lens)
            return (cache, lens + 1), out

        (cache, _), outs = jax.lax.scan(body, (cache, self.lens), length=4)
        return cache, outs

    def while_loop(self, cache):
        def body(carry):
            i, cache, total = carry
            out, cache = self.step(cache)
            return i + 1, cache, total + out

        _, cache, total = jax.lax.while_loop(lambda c: c[0] < 3, body, (0, cache, jnp.zeros_like(self.query)))
        return cache, total

    def scan_over_layers(self, cache):
        def layer(carry, index):
            cache, x = carry
            out, cache = self.step(cache, layer=index)
            return (cache, x + out), None

        (cache, x), _ = jax.lax.scan(layer, (cache, self.query), jnp.arange(self.shapes.L, dtype=jnp.int32))
        return cache, x

    def copy_pages(self, cache):
        return ta.copy_pages(cache, jnp.array([0, 1], jnp.int32), jnp.array([5, 6], jnp.int32))

    copy_pages_of_all_layers = copy_pages


@dataclasses.dataclass(frozen=True)
class Copy:
    """An instruction of the optimised HLO that copies an array as large as a pool, or as one layer of it."""

    instruction: str
    computation: str  # the line that opens the computation it stands in
    around: list[str]  # it, its operands and its users

    def __str__(self) -> str:
        return "\n    ".join([f"{self.instruction}\n  in {self.computation}", *self.around])


@dataclasses.dataclass(frozen=True)
class Proof:
    """What one donating call showed.

    Attributes:
      copies: of the pool, in the optimised HLO.
      aliased, temporary: bytes that the executable aliases from arguments to results, and takes beside them.
      pool, smallest: bytes of all arrays of the cache, and of the smallest paged array of one layer.
      pointers_kept: the cache that came back lies where the donated one lay.
      consumed: the donated arrays cannot be used any more.
      hlo: the optimised program.
    """

    copies: list[Copy]
    aliased: int
    temporary: int
    pool: int
    smallest: int
    pointers_kept: bool
    consumed: bool
    hlo: str

    def check(self, workspace: int = 0) -> None:
        """Raises AssertionError unless the pool was updated in place; `workspace`: bytes that kernels may use."""
        assert not self.copies, "pool-sized copies:\n  " + "\n  ".join(map(str, self.copies))
        assert self.aliased >= self.pool
        assert self.temporary < self.smallest + workspace, f"{self.temporary} bytes beside a pool of {self.smallest}"
        assert self.pointers_kept and self.consumed


def prove(program: str, shapes: Shapes, kv_dtype: str, dtype: str) -> Proof:
    """Compiles and runs a program of `Programs` on a donated cache.

    Raises:
      NotImplementedError: the implementation that the environment names has no kernel for it.
    """
    function = getattr(Programs(shapes, dtype), program)
    cache = shapes.cache(kv_dtype, dtype, shapes.L if Programs.STACKED[program] else None)
    pools = jax.tree.leaves(cache)
    one_layer = jax.tree.leaves(jax.eval_shape(lambda: shapes.cache(kv_dtype, dtype)))
    compiled = jax.jit(function, donate_argnums=0).lower(cache).compile()
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    before = [x.unsafe_buffer_pointer() for x in pools]
    total = sum(x.nbytes for x in pools)
    copies = pool_sized_copies(hlo, cache)
    result = compiled(cache)
    after = result if isinstance(result, ta.PagedKVCache) else next(r for r in result if isinstance(r, ta.PagedKVCache))
    return Proof(
        copies=copies,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        pool=total,
        smallest=min(x.size * x.dtype.itemsize for x in one_layer if x.ndim > 1),
        pointers_kept=[x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == before,
        consumed=all(x.is_deleted() for x in pools),
        hlo=hlo,
    )


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\(")
_COPIES = ("copy", "copy-start", "async-copy")


def pool_sized_copies(hlo: str, cache: ta.PagedKVCache) -> list[Copy]:
    """Copies, and fusions named after one, of as many elements as a pool of the cache has, or one layer of it."""
    sizes = set()
    for array in jax.tree.leaves(cache):
        sizes |= {array.size, array.size // (cache.num_layers or 1)}
    found, computation = [], ""
    lines = hlo.splitlines()
    for line in lines:
        if line.rstrip().endswith("{") and not line.startswith(" "):
            computation = line.split("{")[0].strip()[:200]
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, shape, opcode = match.groups()
        if opcode not in _COPIES and not ("fusion" in opcode and "copy" in name):
            continue
        if any(_elements(dims) in sizes for dims in re.findall(r"\w+\[([\d,]*)\]", shape)):
            mentions = [x.strip()[:240] for x in lines if re.search(rf"%?\b{re.escape(name)}\b(?![\w.\-])", x)]
            operands = re.findall(r"%([\w.\-]+)", line.split(f"{opcode}(", 1)[1])
            defined = [
                x.strip()[:240] for x in lines if any(re.match(rf"\s*(ROOT )?%?{re.escape(o)} =", x) for o in operands)
            ]
            found.append(Copy(line.strip()[:240], computation, [*defined, *mentions]))
    return found


def _elements(dims: str) -> int:
    size = 1
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    return size


def undonated_append(shapes: Shapes, dtype: str) -> tuple[Callable[..., Any], ta.PagedKVCache, str]:
    """An append whose cache is not donated, so that it must be copied: (function, cache, its optimised HLO)."""
    cache = shapes.cache(dtype, dtype)
    append = Programs(shapes, dtype).append
    return append, cache, jax.jit(append).lower(cache).compile().as_text()
