"""Axis names of the operands that the paged primitives share."""

from __future__ import annotations

# Sequences of packed queries cannot be split: any row of T may be theirs. Uniform queries [B, Q, H, D] can.
PACKED, UNIFORM = "n", "b"


def cache_axes(kv_dtype: str, stacked: bool) -> dict[str, str]:
    """The pool. fp8 has one scale a head, int8 and int4 one (scale, zero) a token and head."""
    params = "k" if kv_dtype == "float8_e4m3fn" else "pages k slot two"
    axes = dict(key_cache="pages k slot d1", value_cache="pages k slot e1", key_params=params, value_params=params)
    return {name: f"l {rest}" for name, rest in axes.items()} if stacked else axes


def sequence_axes(sequences: str) -> dict[str, str]:
    """Per-sequence arrays; `sequences` is PACKED or UNIFORM."""
    b = sequences
    return dict(
        layer=b,
        page_table=f"{b} m",
        kv_lens=b,
        q_ranges=f"{b} two",
        cp_rank=b,
        window=f"{b} two",
        rope_base=b,
        read_only_pages=b,
        prefix_pages="q",
        prefix_len="one",
    )
