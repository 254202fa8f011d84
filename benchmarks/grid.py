"""The shapes that are timed. Letters as in jax_turboattn/api.py; every list is in the order of the tables."""

from __future__ import annotations

import dataclasses
import itertools

CEILING = "128x8192 h32/8 p64"  # the decode row that reads so much that it shows the read stream


@dataclasses.dataclass(frozen=True)
class Decode:
    """One new token for each of B sequences, read from pages."""

    lens: tuple[int, ...]  # tokens of each sequence
    heads: tuple[int, int] = (32, 8)  # H, K
    page_size: int = 64
    kv_dtype: str = "bfloat16"
    head_dim: int = 128
    fused: bool = False  # paged_attention_step with RoPE, in place of paged_decode
    planned: bool = False  # with a plan that was made before
    batch_invariant: bool = False
    quick: bool = False
    kind = "decode"

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """As of Packed."""
        return tuple((1, n - 1) for n in self.lens)

    @property
    def ragged(self) -> bool:
        return len(set(self.lens)) > 1

    @property
    def ours_alone(self) -> bool:
        """What no peer has."""
        return self.fused or self.planned or self.batch_invariant

    @property
    def name(self) -> str:
        long, short = max(self.lens), min(self.lens)
        count = sum(n == short for n in self.lens)
        if len(set(self.lens)) > 2:
            shape = f"{len(self.lens)}x({short} to {long})"
        else:
            shape = f"{len(self.lens) - count}x{long}+{count}x{short}" if self.ragged else f"{count}x{short}"
        dtype = "" if self.kv_dtype == "bfloat16" else f" {self.kv_dtype}"
        dim = "" if self.head_dim == 128 else f" d{self.head_dim}"
        words = dict(step=self.fused, plan=self.planned, invariant=self.batch_invariant)
        extra = "".join(f" {word}" for word, used in words.items() if used)
        return f"{shape} h{self.heads[0]}/{self.heads[1]} p{self.page_size}{dim}{dtype}{extra}"


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Dense attention of S tokens on themselves."""

    batch: int
    length: int
    heads: tuple[int, int]
    head_dim: int
    is_causal: bool
    quick: bool = False
    kind = "prefill"

    @property
    def name(self) -> str:
        mask = "causal" if self.is_causal else "full"
        return f"{self.batch}x{self.length} h{self.heads[0]}/{self.heads[1]} d{self.head_dim} {mask}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """A packed call on pages: `sequences` of (causal queries, tokens before them)."""

    page_size: int = 64
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    kv_dtype: str = "bfloat16"
    quick: bool = False

    @property
    def name(self) -> str:
        groups = (
            f"{len(list(group))}x({new} on {before})" for (new, before), group in itertools.groupby(self.sequences)
        )
        dtype = "" if self.kv_dtype == "bfloat16" else f" {self.kv_dtype}"
        return f"{' '.join(groups)} h{self.heads[0]}/{self.heads[1]} p{self.page_size}{dtype}"


@dataclasses.dataclass(frozen=True)
class Chunked(Packed):
    """`new` queries a sequence on `history + new` keys."""

    batch: int
    new: int
    history: int
    kind = "chunked"

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        return ((self.new, self.history),) * self.batch


@dataclasses.dataclass(frozen=True)
class Mixed(Packed):
    """What an engine's step has: decode, pieces of prompts, whole prompts."""

    sequences: tuple[tuple[int, int], ...]
    kind = "mixed"


@dataclasses.dataclass(frozen=True)
class Append:
    """RoPE, encode and scatter of `tokens` new tokens, 8 sequences."""

    tokens: int
    kv_dtype: str = "bfloat16"
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    sequences: int = 8
    quick: bool = False
    kind = "append"

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens k{self.kv_heads} d{self.head_dim} {self.kv_dtype}"


def _equal(batch: int, length: int, **fields) -> Decode:
    return Decode((length,) * batch, **fields)


# 64 lengths from 29 to 3998, in an order that follows no rule; and as many short ones as long ones, side by side.
MANY_LENGTHS = tuple(29 + 63 * (37 * i % 64) for i in range(64))
SHORT_BESIDE_LONG = (64,) * 32 + (4096,) * 32


DECODE = (
    _equal(1, 2048),
    _equal(1, 8192, quick=True),
    _equal(8, 8192),
    _equal(64, 256),
    _equal(64, 4096, quick=True),
    _equal(64, 4096, page_size=16),
    _equal(64, 4096, heads=(64, 8)),
    _equal(128, 8192, quick=True),
    _equal(1, 131072),
    Decode((131072, *(1024,) * 63)),
    Decode((131072, *(1024,) * 63), batch_invariant=True),
    *(Decode(lens, kv_dtype=dtype) for lens in (MANY_LENGTHS, SHORT_BESIDE_LONG) for dtype in ("bfloat16", "int8")),
    _equal(64, 4096, planned=True),
    _equal(64, 4096, head_dim=64),
    _equal(64, 4096, kv_dtype="int8", quick=True),
    _equal(64, 4096, kv_dtype="int4"),
    _equal(64, 4096, kv_dtype="float8_e4m3fn"),
    _equal(128, 8192, kv_dtype="int8"),
    _equal(128, 8192, kv_dtype="int4"),
    *(
        _equal(64, 4096, heads=(8 * group, 8), kv_dtype=dtype)
        for dtype in ("int8", "int4", "float8_e4m3fn")
        for group in (1, 8, 16)
    ),
    _equal(64, 256, fused=True),
    _equal(64, 4096, fused=True, quick=True),
    _equal(64, 4096, fused=True, kv_dtype="int8"),
)
PREFILL = tuple(
    Prefill(
        batch,
        length,
        heads,
        dim,
        causal,
        quick=(batch, length, heads, dim) in ((4, 4096, (16, 16), 128), (4, 4096, (32, 32), 64)),
    )
    for batch, length, heads, dim in (
        (16, 1024, (16, 16), 128),
        (8, 2048, (16, 16), 128),
        (4, 4096, (16, 16), 128),
        (1, 16384, (16, 16), 128),
        (4, 4096, (32, 8), 128),
        (4, 4096, (32, 32), 64),
        (1, 16384, (32, 32), 64),
        (2, 8192, (8, 8), 256),
        (1, 128, (32, 8), 128),  # what a launch costs
    )
    for causal in (False, True)
)
CHUNKED = (
    Chunked(4, 1024, 8192, quick=True),
    Chunked(4, 1024, 8192, page_size=16),
    Chunked(4, 1024, 8192, page_size=256),
    Chunked(16, 512, 4096),
    Chunked(1, 128, 131072),
    Chunked(4, 1024, 8192, kv_dtype="int8"),
)
MIXED = (
    Mixed(((1, 4096),) * 64 + ((512, 4096),), quick=True),
    Mixed(((1, 8000),) * 64 + ((64, 131008), (1024, 0))),
    Mixed(((64, 131008),) + ((1024, 0),) * 4),
    Mixed(((300, 2000),) * 8),
    Mixed(((2000, 0),) * 2),
    Mixed(((300, 2000), (40, 0), (700, 200), (9, 2991), (150, 1050))),
    Mixed(((128, 30000),) + ((128, 0),) * 3),
)
APPEND = tuple(
    Append(tokens, dtype, quick=tokens == 32768 and dtype in ("bfloat16", "int8"))
    for tokens in (8192, 32768)
    for dtype in ("bfloat16", "int8", "int4", "float8_e4m3fn")
)
# Those that say whether anything is wrong first: a run may be cut short.
ALL = (*DECODE, *PREFILL, *CHUNKED, *MIXED, *APPEND)
