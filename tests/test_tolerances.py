"""The budget and the cases must be able to fail: results that are nearly right are refused, no argument is idle."""

from __future__ import annotations

import dataclasses
import inspect

import conformance
import ml_dtypes
import numpy as np
import pytest

import jax_turboattn
from jax_turboattn.testing import cases, golden, poison, tolerances

BF16 = np.dtype(ml_dtypes.bfloat16)
RNG = np.random.default_rng(3)


def as_implementation(result, dtype):
    """A baseline result as an implementation would return it."""
    return result.out.astype(dtype), result.lse.astype(np.float32)


@pytest.fixture
def dense():
    case = cases.find("attention/causal_bfloat16/full")
    call = cases.build(case)
    want = golden.attention(**call.semantic)
    return call, want, golden.attention(**call.semantic, baseline=True)


def test_the_baseline_itself_passes(dense):
    _, want, base = dense
    tolerances.check_attention("baseline", *as_implementation(base, BF16), want, base)


@pytest.mark.parametrize("factor, passes", [(0.25, False), (1.0, True)])
def test_a_quarter_of_the_budget_is_less_than_the_baseline_needs(dense, factor, passes):
    _, want, base = dense
    out, lse = as_implementation(base, BF16)
    if passes:
        tolerances.check_attention("baseline", out, lse, want, base, factor=factor)
    else:
        with pytest.raises(tolerances.BudgetExceeded):
            tolerances.check_attention("baseline", out, lse, want, base, factor=factor)


@pytest.mark.parametrize(
    "change",
    [
        dict(is_causal=False),
        dict(local_window_size=(60, 0)),
        dict(scale=1.01 / np.sqrt(128)),
        dict(logits_soft_cap=30.0),
        dict(sinks=np.full(4, -6.0, np.float32)),
        dict(query_offset=-1),
    ],
    ids=lambda change: next(iter(change)),
)
def test_slightly_other_arguments_are_refused(dense, change):
    call, want, base = dense
    wrong = golden.attention(**call.semantic | change)
    with pytest.raises(tolerances.BudgetExceeded):
        tolerances.check_attention("wrong", *as_implementation(wrong, BF16), want, base)


def test_one_wrong_element_nan_masks_and_nonzero_empty_rows(dense):
    _, want, base = dense
    out, lse = as_implementation(base, BF16)
    spoilt = out.copy()
    spoilt[0, 5, 1, 7] += 0.1
    with pytest.raises(tolerances.BudgetExceeded, match=r"\[0, 5, 1, 7\].* 6 keys"):
        tolerances.check_attention("spoilt", spoilt, lse, want, base)
    spoilt[0, 5, 1, 7] = np.nan
    with pytest.raises(tolerances.BudgetExceeded, match="NaN in other places"):
        tolerances.check_attention("spoilt", spoilt, lse, want, base)
    empty = golden.Result.empty((2,), 1, 4)
    zeros = np.zeros((2, 1, 4), BF16)
    tolerances.check_attention("empty", zeros, empty.lse.astype(np.float32), empty, empty)
    with pytest.raises(tolerances.BudgetExceeded, match="must be 0"):
        tolerances.check_attention("empty", zeros + BF16.type(1e-30), empty.lse.astype(np.float32), empty, empty)
    with pytest.raises(tolerances.BudgetExceeded, match="-Inf in other places"):
        tolerances.check_attention("empty", zeros, np.full((2, 1), -1e30, np.float32), empty, empty)


def test_rows_of_quantised_caches_follow_one_of_two_goldens():
    """Scales folded or values rounded, row by row: each is right, but not where an implementation promises one."""
    case = cases.find("paged_attention/int8/full")
    call = cases.build(case)
    rounded, folded = (golden.paged_attention(**call.semantic, folded=f, baseline=True) for f in (False, True))
    results = [as_implementation(r, BF16) for r in (rounded, folded)]
    odd = np.arange(len(rounded.lse)) % 2 == 1
    mixed = [np.where(odd.reshape(-1, *(1,) * (a.ndim - 1)), b, a) for a, b in zip(*results, strict=True)]
    for result in (*results, mixed):
        conformance.check(case, call, result, "either", tensor_cores=True)
    conformance.check(case, call, results[0], "rounds")
    for result in (results[1], mixed):
        with pytest.raises(tolerances.BudgetExceeded):
            conformance.check(case, call, result, "rounds")
    off = (results[1][0], results[1][1] + np.float32(1e-4))
    with pytest.raises(tolerances.BudgetExceeded):
        conformance.check(case, call, off, "either", tensor_cores=True)


def test_bytes_and_values():
    x = np.array([0.0, 1.0, np.nan], np.float32)
    tolerances.same_bytes("x", x, x.copy())
    tolerances.same_values("x", np.array([-0.0, 1.0, np.nan], np.float32), x)
    with pytest.raises(tolerances.BudgetExceeded, match="bytes differ"):
        tolerances.same_bytes("x", np.array([-0.0, 1.0, np.nan], np.float32), x)
    with pytest.raises(tolerances.BudgetExceeded, match="values differ"):
        tolerances.same_values("x", np.array([0.0, 1.0, 2.0], np.float32), x)


def test_ulp():
    assert tolerances.ulp(1.5, np.float32) == 2.0**-23
    assert tolerances.ulp(1.99, BF16) == 2.0**-7 and tolerances.ulp(2.0, BF16) == 2.0**-6
    assert tolerances.ulp(0.0, np.float16) == 2.0**-24


def test_poison_reaches_every_unused_slot_and_no_other():
    table = poison.lay_out(RNG, 2, 3, 8)
    used = poison.used_slots(table, [20, 0], 8, 8)
    assert used.sum() == 20 and used[table[0, 2]].sum() == 4 and not used[table[1]].any()
    data = np.zeros((8, 2, 8, 16), np.float32)
    spoilt = poison.poison(golden.Cache(data, data, None, None, "float32", 16), used, "nan", RNG)
    assert (np.isnan(spoilt.key).all(-1) == ~used[:, None]).all()
    wild = poison.wild_entries(RNG, table, np.array([[True] * 3, [False] * 3]), 8)
    assert (wild[0] == table[0]).all()


# ---- the cases


def test_there_are_enough_cases_over_few_executables():
    assert len(cases.CASES) >= 400 and len({case.name for case in cases.CASES}) == len(cases.CASES)
    for op in {spec.op for spec in cases.SPECS}:
        assert sum(spec.op == op for spec in cases.SPECS) <= 64, op


def test_building_is_deterministic():
    case = cases.find("paged_attention_step/int8/mixed")
    first, second = cases.build(case), cases.build(case)
    for name, x in first.arrays.items():
        for a, b in zip(conformance.leaves(x), conformance.leaves(second.arrays[name]), strict=True):
            assert a.tobytes() == b.tobytes()


HINTS = {"implementation", "return_residual", "out_dtype", "plan", "max_q_len", "batch_invariant"}


@pytest.mark.parametrize("op", sorted({spec.op for spec in cases.SPECS}))
def test_every_argument_has_an_effect_in_some_case(op):
    """Contract 5: an accepted argument always has its effect. The golden without it must differ in some case of it."""
    parameters = inspect.signature(getattr(jax_turboattn, op)).parameters.values()
    wanted = {p.name for p in parameters if p.default is not inspect.Parameter.empty} - HINTS
    reference, idle = getattr(golden, op), set(wanted)
    for case in cases.CASES:
        spec = case.spec
        present = {a.split("_")[0] if a.startswith(("bias", "mask")) else a for a in spec.arrays} | set(spec.options)
        present |= {"layer"} if spec.L is not None else set()
        present |= {"shared_prefix"} if spec.prefix else set()
        present |= {"cp_rank"} if "cp_size" in present else set()
        if spec.op != op or not present & idle:
            continue
        call = cases.build(case)
        want = reference(**call.semantic)
        for name in sorted(present & idle):
            other = {n: x for n, x in call.semantic.items() if n != name}
            if name == "layer":
                other["layer"] = np.int32(0)
            if name == "cp_rank":
                other["cp_rank"] = np.int32((int(call.arrays["cp_rank"]) + 1) % spec.cp_size)
            if name in ("cp_size", "positions", "rope_base", "rope", "out_dtype"):
                other = call.semantic | {name: _other(name, call.semantic[name])}
            if _differs(want, reference(**other)):
                idle.discard(name)
    assert not idle


def _other(name, value):
    if name == "cp_size":
        return value + 1
    if name == "rope":
        return dataclasses.replace(value, base=value.base * 2, attention_factor=2.0)
    return value + 1


def _differs(first, second):
    def flat(x):
        if isinstance(x, golden.Result):
            return [x.out, x.lse]
        return [leaf for part in x for leaf in flat(part)] if isinstance(x, tuple) else conformance.leaves(x)

    return any(a.tobytes() != b.tobytes() for a, b in zip(flat(first), flat(second), strict=True))
