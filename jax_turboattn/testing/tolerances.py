"""The accuracy budget of contract section 7, and reports that say where it was exceeded.

A row is one query token of one head. Its error may be twice that of the plain same-dtype baseline, plus one ulp of the
output dtype at the row's largest magnitude, plus a float32 floor. The baseline's errors are pooled over rows with a
similar number of keys, each relative to its row's `spread` (the sum of p * |v|, which is what rounding acts on): a
baseline that is exact by luck on one row is no yardstick.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .golden import Result

Array = np.ndarray[Any, Any]


class BudgetExceeded(AssertionError):
    """An implementation's result is outside the budget."""


def ulp(x: Array, dtype: Any) -> Array:
    """Spacing of dtype's numbers at |x|, float64; at zero for NaN and Inf."""
    info = ml_dtypes.finfo(dtype)
    magnitude = np.abs(np.nan_to_num(np.asarray(x, np.float64), posinf=0, neginf=0))
    return np.exp2(np.floor(np.log2(np.maximum(magnitude, float(info.smallest_normal))))) * float(info.eps)


def float32_floor(keys: Array, peak: Array) -> Array:
    """Relative rounding error that float32 arithmetic is granted on n keys with logits up to |x| = peak."""
    return 2.0**-23 * (4 + 2 * peak + np.sqrt(keys) / 2)


def same_mask(what: str, got: Array, want: Array) -> None:
    """Raises unless NaN, +Inf and -Inf stand at the same places."""
    for name, test in (("NaN", np.isnan), ("+Inf", np.isposinf), ("-Inf", np.isneginf)):
        differs = test(got) != test(want)
        if differs.any():
            raise BudgetExceeded(f"{what}: {name} in other places than the golden's\n" + _places(differs, got, want))


def same_bytes(what: str, got: Array, want: Array) -> None:
    """Raises unless the two arrays have one dtype, one shape and the same bytes."""
    if got.dtype != want.dtype or got.shape != want.shape:
        raise BudgetExceeded(f"{what}: {got.dtype}{list(got.shape)} where {want.dtype}{list(want.shape)} is wanted")
    if got.tobytes() == want.tobytes():
        return
    unsigned = f"u{got.dtype.itemsize}"
    differs = np.ascontiguousarray(got).view(unsigned) != np.ascontiguousarray(want).view(unsigned)
    raise BudgetExceeded(f"{what}: bytes differ\n" + _places(differs, got, want))


def same_values(what: str, got: Array, want: Array) -> None:
    """Raises unless all elements are equal; NaNs are equal to each other, and so are zeros of either sign."""
    if got.dtype != want.dtype or got.shape != want.shape:
        raise BudgetExceeded(f"{what}: {got.dtype}{list(got.shape)} where {want.dtype}{list(want.shape)} is wanted")
    g, w = got.astype(np.float64), want.astype(np.float64)
    differs = (g != w) & ~(np.isnan(g) & np.isnan(w))
    if differs.any():
        raise BudgetExceeded(f"{what}: values differ\n" + _places(differs, got, want))


def within(what: str, got: Array, want: Array, limit: Array) -> None:
    """Raises unless |got - want| <= limit wherever want is finite, and the masks are equal."""
    g, w = got.astype(np.float64), want.astype(np.float64)
    if g.shape != w.shape:
        raise BudgetExceeded(f"{what}: shape {list(g.shape)} where {list(w.shape)} is wanted")
    same_mask(what, g, w)
    finite = np.isfinite(w)
    error = np.abs(np.where(finite, g, 0) - np.where(finite, w, 0))
    differs = error > limit
    if differs.any():
        raise BudgetExceeded(f"{what}: over the budget\n" + _places(differs, g, w, np.broadcast_to(limit, g.shape)))


def check_attention(
    what: str,
    out: Array,
    lse: Array | None,
    golden: Result,
    baseline: Result,
    slack: Array | float = 0.0,
    factor: float = 1.0,
) -> None:
    """Raises BudgetExceeded unless out [..., H, Dv] and lse [..., H] are within the budget of `golden`.

    Args:
      what: names the case and the implementation in the report.
      baseline: the same call with `baseline=True`; its out is cast to out's dtype here.
      slack: [..., H] error of the logits that the queries' own rounding is granted, see `query_slack`.
      factor: multiplies the whole budget. 1 is the contract; other values are for measuring.
    """
    if out.shape != golden.out.shape:
        raise BudgetExceeded(f"{what}: out {list(out.shape)} where {list(golden.out.shape)} is wanted")
    got, want = out.astype(np.float64), golden.out
    same_mask(f"{what}: out", got, want)
    empty = golden.keys == 0
    if got[empty].any():
        differs = (got != 0) & empty[..., None, None]
        raise BudgetExceeded(f"{what}: out of rows that see nothing must be 0\n" + _places(differs, got, want))
    finite = np.isfinite(want)
    want = np.where(finite, want, 0)
    error = np.where(finite, got, 0) - want
    base = np.where(finite, baseline.out.astype(out.dtype).astype(np.float64), 0) - want
    spread = np.where(np.isfinite(golden.spread), golden.spread, 0)
    floor = float32_floor(golden.keys[..., None], np.where(np.isfinite(golden.peak), golden.peak, 0))
    floor = floor + 2 * slack  # a logit off by e scales its weight and the denominator by 1 + e each
    last = ulp(np.abs(want).max(-1, initial=0), out.dtype)

    widest = spread.max(-1, initial=0)
    limit = 2 * _pooled(_ratio(np.abs(base).max(-1, initial=0), widest), golden.keys) * widest + last + floor * widest
    differs = np.abs(error) > factor * limit[..., None]
    if differs.any():
        at = np.broadcast_to(factor * limit[..., None], error.shape)
        raise BudgetExceeded(f"{what}: out over the budget\n" + _places(differs, got, want, at, golden.keys))

    length = np.linalg.norm(spread, axis=-1)
    allowed = 2 * _pooled(_ratio(np.linalg.norm(base, axis=-1), length), golden.keys) * length
    allowed = allowed + last * np.sqrt(out.shape[-1]) + floor * length
    norm = np.linalg.norm(error, axis=-1)
    differs = norm > factor * allowed
    if differs.any():
        text = _places(differs, norm, np.zeros_like(norm), factor * allowed, golden.keys)
        raise BudgetExceeded(f"{what}: L2 error of rows over the budget\n" + text)

    if lse is not None:
        want = golden.lse
        finite = np.isfinite(want)
        base = np.abs(np.where(finite, baseline.lse.astype(np.float64), 0) - np.where(finite, want, 0))
        scale = np.maximum(1.0, np.where(finite, np.abs(want), 0))
        limit = 2 * _pooled(_ratio(base, scale), golden.keys) * scale + ulp(want, np.float32) + floor
        within(f"{what}: lse", lse, want, factor * limit)


def tensor_core_slack(peak: Array, head_dim: int) -> Array:
    """Logit error beyond float32's that products of 16-bit operands on tensor cores are granted, at |x| = peak.

    They add 8 or 16 exact products to the sum so far and cut the result off instead of rounding it (Fasi, Higham,
    Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021). The errors are therefore all toward zero and
    add up over head_dim / 16 additions, where the contract's floor assumes rounding to the nearest. Measured on an
    H100: up to 2.7 |x| 2^-23 at head dim 128 and 2.6 at 256, where the floor has 2.
    """
    return 2.0**-24 * head_dim / 128 * np.where(np.isfinite(peak), peak, 0)


def nearer(lse: Array, first: tuple[Result, ...], second: tuple[Result, ...]) -> tuple[Result, ...]:
    """Results of two goldens, row by row those of the one whose lse [..., H] (of its first result) is nearer.

    A call may have two right answers: rows of one kernel follow one golden, rows of another kernel the other.
    """

    def distance(golden: Result) -> Array:
        finite = np.isfinite(golden.lse) & np.isfinite(lse)
        return np.abs(np.where(finite, lse, 0) - np.where(finite, golden.lse, 0)).sum(-1)

    take = distance(second[0]) < distance(first[0])

    def pick(a: Result, b: Result) -> Result:
        fields = {name: (getattr(a, name), getattr(b, name)) for name in vars(a)}
        return Result(
            **{
                n: np.where(take.reshape(take.shape + (1,) * (x.ndim - take.ndim)), y, x)
                for n, (x, y) in fields.items()
            }
        )

    return tuple(map(pick, first, second))


def query_slack(exact: Array, dtype: Any, largest_key: float, scale: float) -> Array:
    """Logit error [T, H] from queries [T, H, D] that float32 arithmetic may round to either 16-bit neighbour.

    exact: the queries of the fused step in float64, before the one rounding to dtype. An element so close to the middle
    of two neighbours that float32 RoPE cannot tell (2e-6 of the row's size) may go both ways: one ulp times the key.
    """
    exact = np.nan_to_num(exact, posinf=0, neginf=0)
    spacing = ulp(exact, dtype)
    to_middle = np.abs(np.abs(exact / spacing) % 1 - 0.5) * spacing
    near = to_middle < 2e-6 * np.abs(exact).max(-1, keepdims=True, initial=0)
    return abs(scale) * largest_key * np.where(near, spacing, 0).sum(-1)


def _ratio(x: Array, y: Array) -> Array:
    return np.divide(x, y, out=np.zeros_like(x), where=y > 0)


def _pooled(errors: Array, keys: Array) -> Array:
    """errors [..., H] replaced by the largest of all rows whose key count has as many bits."""
    pools = np.broadcast_to(np.frexp(keys)[1][..., None], errors.shape)
    pooled = np.zeros_like(errors)
    for pool in np.unique(pools):
        pooled[pools == pool] = errors[pools == pool].max()
    return pooled


def _places(differs: Array, got: Array, want: Array, limit: Array | None = None, keys: Array | None = None) -> str:
    """The worst and the first few positions, both values, and the share of elements that differ."""
    where = np.argwhere(differs)
    lines = [f"  {len(where)} of {differs.size} elements ({100 * len(where) / differs.size:.3g} %)"]
    if limit is not None:
        with np.errstate(invalid="ignore"):
            excess = np.abs(got[differs].astype(np.float64) - want[differs]) / np.maximum(limit[differs], 1e-300)
        where = where[np.argsort(-excess, kind="stable")]
    for index in where[:6]:
        at = tuple(index)
        line = f"  {list(map(int, index))}: got {got[at]}, want {want[at]}"
        if limit is not None:
            line += f", error {abs(float(got[at]) - float(want[at])):.3g} > {float(limit[at]):.3g}"
        if keys is not None:
            line += f", {int(keys[at[: keys.ndim]])} keys"
        lines.append(line)
    return "\n".join(lines)
