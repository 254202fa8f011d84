"""Rotary position embedding: the static configuration and its host-side tables.

Everything that depends only on the configuration is computed once, on the host, in float64. What reaches a kernel is a
table of fixed-point frequencies (`turns`): float32 `position * frequency` is off by 0.03 rad at position 10^6, while
64-bit fixed-point turns wrap exactly and leave only the rounding of the last sine and cosine.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from . import checks

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
PAIRINGS = ("half", "interleaved")
# Fields that only some kinds read: given for another kind they would have no effect, and are refused.
_READ_BY = {
    "factor": ("linear", "dynamic", "yarn", "llama3", "longrope"),
    "original_max_position": ("dynamic", "yarn", "llama3", "longrope"),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "truncate": ("yarn",),
    "short_factor": ("longrope",),
    "long_factor": ("longrope",),
    "long": ("longrope",),
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How queries and keys are rotated. Frozen and hashable: a static argument under `jit`.

    With `f_j = base ** (-2 j / dim)` for pair `j` of `dim / 2`, in radians a token:

    ========= ==========================================================================================
    kind      frequency of pair j
    ========= ==========================================================================================
    default   `f_j`
    linear    `f_j / factor`
    dynamic   `rope_base[b] ** (-2 j / dim)`, the base given per sequence as an operand (`ntk_base` computes it)
    yarn      `f_j` blended with `f_j / factor` between the correction dims of `beta_fast` and `beta_slow`
    llama3    `f_j` blended with `f_j / factor` by wavelength between `low_freq_factor` and `high_freq_factor`
    longrope  `f_j / long_factor[j]` when `long`, else `f_j / short_factor[j]`
    ========= ==========================================================================================

    Args:
      kind: one of the above.
      dim: rotated columns of a head, a multiple of 8.
      base: the base of the frequencies.
      pairing: "half" pairs column j with j + dim/2 (Hugging Face), "interleaved" 2j with 2j + 1 (GPT-J).
      offset: first rotated column (MLA rotates the last 64 of 576: `offset=512`), a multiple of 8.
      factor: context extension factor of linear, dynamic, yarn, llama3 and longrope.
      original_max_position: trained context length in tokens; required by dynamic, yarn, llama3 and longrope.
      low_freq_factor, high_freq_factor: llama3's wavelength bounds.
      beta_fast, beta_slow: yarn's rotation counts.
      truncate: yarn: round the correction range outwards to whole pairs; models differ.
      attention_factor: factor on cos and sin (so on q and k both). Default: yarn `0.1 ln(factor) + 1`, longrope
        `sqrt(1 + ln(factor) / ln(original_max_position))`, both for factor > 1; 1 otherwise.
      short_factor, long_factor: longrope's per-pair divisors, `dim / 2` each.
      long: longrope: use `long_factor`. Decided once for a sequence's life, since cached keys stay rotated.
      sections: multimodal (temporal, height, width) counts of pairs, summing to `dim / 2`; positions are then [T, 3].
      sections_interleaved: the pairs of the three axes alternate (t h w t h w ...) instead of standing in blocks.
    """

    kind: str = "default"
    dim: int = 128
    base: float = 10000.0
    pairing: str = "half"
    offset: int = 0
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    long: bool = False
    sections: tuple[int, int, int] | None = None
    sections_interleaved: bool = False

    def __post_init__(self):
        def fail(field, rule, hint=""):
            raise ValueError(f"RopeConfig: {field} must {rule}, got {getattr(self, field)!r}{hint}")

        if self.kind not in KINDS:
            fail("kind", f"be one of {', '.join(KINDS)}")
        if self.pairing not in PAIRINGS:
            fail("pairing", f"be one of {', '.join(PAIRINGS)}")
        for field in ("dim", "offset"):
            checks.static_int("RopeConfig", field, getattr(self, field), 0)
        for field in ("base", "factor"):
            checks.static_float("RopeConfig", field, getattr(self, field))
        for field in dataclasses.fields(self):
            readers = _READ_BY.get(field.name, KINDS)
            if self.kind not in readers and getattr(self, field.name) != field.default:
                fail(field.name, f"be left at {field.default!r} for kind={self.kind!r}", f"; {', '.join(readers)} read it")
        if self.dim <= 0 or self.dim % 8:
            fail("dim", "be a positive multiple of 8")
        if self.offset < 0 or self.offset % 8:
            fail("offset", "be a non-negative multiple of 8")
        if not (math.isfinite(self.base) and self.base > 1):
            fail("base", "be finite and > 1")
        if not (math.isfinite(self.factor) and self.factor > 0):
            fail("factor", "be finite and > 0")
        needs_length = self.kind in ("dynamic", "yarn", "llama3", "longrope")
        if needs_length and not (self.original_max_position and self.original_max_position > 1):
            fail("original_max_position", f"be given (tokens, > 1) for kind={self.kind!r}")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            fail("high_freq_factor", f"be > low_freq_factor = {self.low_freq_factor}")
        if self.attention_factor is not None and not math.isfinite(self.attention_factor):
            fail("attention_factor", "be finite")
        for field in ("short_factor", "long_factor", "sections"):
            value = getattr(self, field)
            if value is not None and not isinstance(value, tuple):  # lists come from JSON; hashing needs a tuple
                object.__setattr__(self, field, tuple(value))
        if self.kind == "longrope":
            field = "long_factor" if self.long else "short_factor"
            if getattr(self, field) is None or len(getattr(self, field)) != self.dim // 2:
                fail(field, f"hold dim / 2 = {self.dim // 2} numbers")
        if self.sections is not None:
            for count in self.sections:
                checks.static_int("RopeConfig", "sections", count, 0)
            if len(self.sections) != 3 or sum(self.sections) != self.dim // 2:
                fail("sections", f"be three counts of pairs that sum to dim / 2 = {self.dim // 2}")
        elif self.sections_interleaved:
            fail("sections_interleaved", "be False without sections")

    @property
    def resolved_attention_factor(self) -> float:
        """The factor that multiplies cos and sin."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.factor > 1 and self.kind == "yarn":
            return 0.1 * math.log(self.factor) + 1.0
        if self.factor > 1 and self.kind == "longrope":
            return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_max_position))
        return 1.0

    def inv_freq(self, base: float | None = None) -> np.ndarray:
        """Frequencies in radians a token, float64 [dim / 2]; `base` replaces `self.base`."""
        base = self.base if base is None else base
        j = np.arange(self.dim // 2, dtype=np.float64)
        freq = float(base) ** (-2.0 * j / self.dim)
        if self.kind == "linear":
            return freq / self.factor
        if self.kind == "yarn":

            def correction_pair(rotations):  # the pair that turns `rotations` times in the trained context
                wavelengths = self.original_max_position / (2 * math.pi * rotations)
                return self.dim * math.log(wavelengths) / (2 * math.log(base))

            low, high = correction_pair(self.beta_fast), correction_pair(self.beta_slow)
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, self.dim - 1)
            if low == high:
                high += 0.001  # keeps the ramp a step instead of a division by zero
            interpolated = np.clip((j - low) / (high - low), 0.0, 1.0)
            return freq * (1.0 - interpolated * (1.0 - 1.0 / self.factor))
        if self.kind == "llama3":
            turns_in_context = self.original_max_position / (2 * math.pi) * freq
            smooth = (turns_in_context - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            smooth = np.clip(smooth, 0.0, 1.0)
            return (1.0 - smooth) * freq / self.factor + smooth * freq
        if self.kind == "longrope":
            return freq / np.asarray(self.long_factor if self.long else self.short_factor, np.float64)
        return freq

    def turns(self) -> np.ndarray:
        """Frequencies as fixed-point turns: uint32 [dim / 2, 2], the high and low words of `f / 2 pi * 2**64`."""
        words = [round(f / (2 * math.pi) * 2**64) % 2**64 for f in self.inv_freq().tolist()]
        return np.array([(w >> 32, w & 0xFFFFFFFF) for w in words], np.uint32)

    def ntk_base(self, length: int) -> float:
        """`rope_base` of one sequence for kind "dynamic": `length` is its context in tokens, frozen for its life."""
        if self.factor <= 1 or length <= self.original_max_position:
            return self.base
        stretch = self.factor * length / self.original_max_position - (self.factor - 1)
        return self.base * stretch ** (self.dim / (self.dim - 2))

    @staticmethod
    def from_hf(config: Any, head_dim: int) -> "RopeConfig":
        """Reads a Hugging Face config (object or dict) of a rotate-half model with heads of `head_dim` columns.

        Understands `rope_theta`, `rope_scaling` / `rope_parameters`, `partial_rotary_factor` and `mrope_section`.
        longrope starts with `long=False`: whether a sequence is long is the caller's knowledge.
        """

        def get(name, default=None):
            value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
            return default if value is None else value

        scaling = dict(get("rope_parameters") or get("rope_scaling") or {})
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        kind = {"mrope": "default", "su": "longrope"}.get(kind, kind)
        partial = scaling.get("partial_rotary_factor", get("partial_rotary_factor", 1.0))
        fields: dict[str, Any] = dict(
            kind=kind,
            dim=int(head_dim * partial),
            base=float(scaling.get("rope_theta", get("rope_theta", 10000.0))),
        )
        max_position = get("max_position_embeddings")
        original = scaling.get("original_max_position_embeddings", get("original_max_position_embeddings"))
        if kind in ("dynamic", "yarn", "llama3", "longrope"):
            fields["original_max_position"] = original or max_position
        if kind == "longrope":
            if original and max_position:
                fields["factor"] = max_position / original
            for name in ("short_factor", "long_factor"):
                fields[name] = tuple(scaling[name])
        if "factor" in scaling and "factor" not in fields and kind != "default":
            fields["factor"] = float(scaling["factor"])
        if kind == "yarn":
            for name in ("beta_fast", "beta_slow", "truncate"):
                if scaling.get(name) is not None:
                    fields[name] = scaling[name]
            mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
            if scaling.get("attention_factor") is None and mscale and mscale_all:
                factor = fields.get("factor", 1.0)

                def magnitude(m):
                    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

                fields["attention_factor"] = magnitude(mscale) / magnitude(mscale_all)
        if kind == "llama3":
            for name in ("low_freq_factor", "high_freq_factor"):
                fields[name] = float(scaling[name])
        if scaling.get("attention_factor") is not None:
            fields["attention_factor"] = float(scaling["attention_factor"])
        if scaling.get("mrope_section"):
            fields["sections"] = tuple(scaling["mrope_section"])
            fields["sections_interleaved"] = bool(scaling.get("mrope_interleaved", False))
        return RopeConfig(**fields)
