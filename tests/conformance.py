"""One suite for every implementation: a thin class in tests/backends names the implementation, everything else is here.

    class TestCpu(conformance.Conformance):
        implementation = "cpu"
        unsupported = {...}

`unsupported` lists tags of `cases.Spec`: calls that have one of them must raise NotImplementedError, and no others may.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import zlib
from collections import defaultdict
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn
from jax_turboattn.testing import cases, codecs, golden, tolerances

ATTENTION = ("attention", "ragged_attention", "paged_attention", "paged_decode", "merge_partials")
VMAP_SPECS = [spec for spec in cases.SPECS if "vmap" in spec.tags]
DRAWN_SPECS = [s for s in cases.SPECS if s.op not in ("merge_partials", "copy_pages")]
CP_SPECS = [s for s in cases.SPECS if "cp" in s.tags and s.op == "paged_attention" and s.kv_dtype is None]


# ---- from numpy to jax and back


def to_jax(x: Any) -> Any:
    """Arrays and caches of a case as what the public functions take."""
    if isinstance(x, golden.Cache):
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
        return jax_turboattn.PagedKVCache(**{n: to_jax(f) for n, f in fields.items()})
    if isinstance(x, tuple):
        return tuple(map(to_jax, x))
    return jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic)) else x


def to_numpy(x: Any) -> Any:
    """The other way round."""
    if isinstance(x, jax_turboattn.PagedKVCache):
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(golden.Cache)}
        return golden.Cache(**{n: to_numpy(f) for n, f in fields.items()})
    if isinstance(x, (tuple, list)):
        return tuple(map(to_numpy, x))
    return np.asarray(x) if isinstance(x, jax.Array) else x


def function(spec: cases.Spec, implementation: str):
    """The public function of a spec with its static arguments bound: dict of arrays -> results."""
    public = getattr(jax_turboattn, spec.op)
    static = dict(spec.static) | dict(spec.hints)
    if spec.op in ("attention", "ragged_attention", "paged_attention", "paged_decode", "paged_attention_step"):
        static["return_residual"] = True
    if spec.op != "copy_pages":  # copy_pages has no such argument: the environment variable chooses
        return lambda arrays: public(**arrays, **static, implementation=implementation)

    def copy_pages(arrays):
        name = "JAX_TURBOATTN_IMPLEMENTATION"
        before = os.environ.get(name)
        os.environ[name] = implementation
        try:
            return public(**arrays, **static)
        finally:
            os.environ.pop(name) if before is None else os.environ.update({name: before})

    return copy_pages


@functools.lru_cache(maxsize=512)
def executable(spec: cases.Spec, implementation: str):
    return jax.jit(function(spec, implementation))


@functools.cache
def declined(spec: cases.Spec, implementation: str) -> str | None:
    """Why the implementation has no kernel for a primitive of this spec's call; None when it takes them all."""
    platform = "cpu" if implementation == "cpu" else "cuda"
    call = cases.build(cases.Case(spec, GROUPED[spec.label][0].values))
    try:
        jax_turboattn.explain(
            function(spec, implementation), {n: to_jax(x) for n, x in call.arrays.items()}, platform=platform
        )
    except NotImplementedError as error:
        return str(error).partition(" has no kernel for this call: ")[2] or str(error)
    return None


def run(case: cases.Case, call: cases.Call, implementation: str) -> Any:
    return to_numpy(executable(case.spec, implementation)({n: to_jax(x) for n, x in call.arrays.items()}))


def leaves(result: Any) -> list[np.ndarray]:
    """All arrays of a numpy result."""
    if isinstance(result, golden.Cache):
        return [x for x in (result.key, result.value, result.key_params, result.value_params) if x is not None]
    return [leaf for part in result for leaf in leaves(part)] if isinstance(result, tuple) else [result]


# ---- one case against the golden


def check(case: cases.Case, call: cases.Call, result: Any, implementation: str, tensor_cores: bool = False) -> None:
    """Raises BudgetExceeded unless the result is what the golden says.

    tensor_cores: both products are of 16-bit operands. Probabilities are rounded to E then; sums are those of
    `tolerances.tensor_core_slack`; and rows over a quantised cache may follow the golden that does not round decoded
    values, see `golden.paged_attention`.
    """
    what = f"{case.name} [{implementation}]"
    reference = getattr(golden, case.spec.op)
    folds = tensor_cores and case.spec.kv_dtype is not None
    if case.spec.op in ATTENTION:
        out, lse = result
        goldens = tuple(reference(**call.semantic, baseline=baseline) for baseline in (False, True))
        if folds:
            folded = (reference(**call.semantic, folded=True, baseline=baseline) for baseline in (False, True))
            goldens = tolerances.nearer(lse, goldens, tuple(folded))
        check_out(what, case, call, out, lse, *goldens, tensor_cores)
    elif case.spec.op == "paged_attention_step":
        (out, lse), written = result
        step = functools.partial(reference, **call.semantic, stored=written)
        want, stored = step()
        check_cache(what, call, written, stored)
        goldens = (want, step(baseline=True)[0])
        if folds:
            folded = (step(folded=True, baseline=baseline)[0] for baseline in (False, True))
            goldens = tolerances.nearer(lse, goldens, tuple(folded))
        check_out(what, case, call, out, lse, *goldens, tensor_cores, step_slack(call, written))
    elif case.spec.op == "append_kv":
        check_cache(what, call, result, reference(**call.semantic))
    elif case.spec.op == "copy_pages":
        for i, (got, want) in enumerate(zip(leaves(result), leaves(reference(**call.semantic)), strict=True)):
            tolerances.same_bytes(f"{what}: array {i}", got, want)
    else:
        for name, got, want in zip(("key", "value"), result, reference(**call.semantic), strict=True):
            tolerances.same_values(f"{what}: {name}", got, want)


def check_out(
    what: str,
    case: cases.Case,
    call: cases.Call,
    out: Any,
    lse: Any,
    want: golden.Result,
    base: golden.Result,
    tensor_cores: bool,
    slack: Any = 0.0,
) -> None:
    expected = dict(case.spec.hints).get("out_dtype", case.spec.dtype)
    assert out.dtype == cases.DTYPES[expected] and lse.dtype == np.float32
    if tensor_cores and "query" in call.semantic:
        slack = slack + tolerances.tensor_core_slack(want.peak, call.semantic["query"].shape[-1])
    tolerances.check_attention(what, out, lse, want, base, slack)
    if case.values.data == "ones" and not case.spec.tags & {"sinks", "value_bias", "quantised", "shared_value"}:
        seen = want.keys > 0
        # The logits cancel in sum(p) / sum(p): what is left is one ulp, of the output or of the probabilities above, and
        # the float32 floor of the two sums.
        last = cases.DTYPES[case.spec.dtype] if tensor_cores else out.dtype
        limit = tolerances.ulp(np.ones(()), last) + tolerances.float32_floor(want.keys[seen], np.zeros(()))
        tolerances.within(f"{what}: V = 1", out[seen], np.ones_like(want.out[seen]), limit[:, None, None])


def step_slack(call: cases.Call, written: golden.Cache) -> Any:
    """What the queries' own rounding may move the logits by: nothing without RoPE and logn.

    float32 too: an angle in float32 is off by up to 2e-7 rad, so a rotated query is by an ulp or two.
    """
    arguments = call.semantic
    query = arguments["query"]
    if not (arguments.get("rope") or arguments.get("logn")):
        return 0.0
    names = ("query_bias", "rope", "rope_base", "positions", "logn", "logn_zero_based")
    start = int(arguments["shared_prefix"][1]) if "shared_prefix" in arguments else 0
    turning = {n: arguments[n] for n in names if n in arguments}
    place = (query, arguments["kv_lens"], arguments["q_offsets"])
    exact = golden.prologue_queries(*place, **turning, start=start, rounded=False)
    pages = np.arange(written.key.shape[-4])
    layers = range(written.key.shape[0]) if written.key.ndim == 5 else (None,)
    keys = [golden.decode(written, layer, pages, query.dtype)[0].astype(np.float64) for layer in layers]
    scale = arguments.get("scale") or query.shape[-1] ** -0.5
    return tolerances.query_slack(
        exact, query.dtype, max(np.abs(k[np.isfinite(k)]).max(initial=0) for k in keys), scale
    )


def check_cache(what: str, call: cases.Call, got: golden.Cache, want: golden.Cache) -> None:
    """Bytes equal the golden's; with RoPE the new keys may differ by a rounding, and codes by one."""
    rope = call.static.get("rope")
    for kind in ("key", "value"):
        data, params = (getattr(want, n) for n in (kind, f"{kind}_params"))
        if data is None:
            continue
        before = getattr(call.arrays["cache"], kind)
        if rope is None or kind == "value":
            tolerances.same_bytes(f"{what}: cache.{kind}", getattr(got, kind), data)
            if params is not None:
                tolerances.same_values(f"{what}: cache.{kind}_params", getattr(got, f"{kind}_params"), params)
            continue
        new = (data.view(np.uint8) != before.view(np.uint8)).reshape(*data.shape[:-1], -1).any(-1)
        if want.dtype in codecs.BITS:  # a constant row's codes may be those that the slot held
            old = getattr(call.arrays["cache"], f"{kind}_params")
            new |= (params.view(np.uint8) != old.view(np.uint8)).reshape(*new.shape, -1).any(-1)
        tolerances.same_bytes(f"{what}: untouched slots of cache.{kind}", getattr(got, kind)[~new], data[~new])
        check_rotated(f"{what}: cache.{kind}", call, got, want, kind, new)


def check_rotated(
    what: str, call: cases.Call, got: golden.Cache, want: golden.Cache, kind: str, new: np.ndarray
) -> None:
    """Slots `new` of the rotated keys. A phase may be off by 1e-4 rad beyond position 4096 and by 1e-5 below."""
    far = np.abs(call.arrays["positions"]).max(initial=0) >= 4096 if "positions" in call.arrays else False
    phase = 1e-4 if far else 1e-5
    if "rope_base" in call.arrays:
        farthest = np.abs(call.arrays["positions"]).max(initial=0) if "positions" in call.arrays else 4096
        phase = max(phase, 2e-7 * float(farthest))
    g, w = (getattr(cache, kind)[new] for cache in (got, want))
    if want.dtype in codecs.BITS:
        unpack = codecs.unpack_int4 if want.dtype == "int4" else np.asarray
        gp, wp = (getattr(cache, f"{kind}_params")[new] for cache in (got, want))
        tolerances.within(f"{what}_params", gp, wp, tolerances.ulp(wp, wp.dtype) + phase * _largest(wp))
        same = ((gp == wp) | (np.isnan(gp) & np.isnan(wp))).all(-1)
        codes = [unpack(x).astype(np.int16) for x in (g, w)]
        tolerances.within(f"{what} codes", codes[0][same], codes[1][same], np.ones(()))
        decoded = [codecs.decode_int(x, p, want.dtype).astype(np.float64)[~same] for x, p in ((g, gp), (w, wp))]
        step = wp[~same][:, :1].astype(np.float64)
        tolerances.within(f"{what} decoded", *decoded, 2 * step + tolerances.ulp(decoded[1], wp.dtype))
    elif want.dtype == "float8_e4m3fn":
        codes = [x.astype(np.float32) for x in (g, w)]
        tolerances.within(f"{what} fp8", *codes, tolerances.ulp(codes[1], codecs.FP8))
    else:
        limit = tolerances.ulp(w, w.dtype) + phase * _largest(w)
        tolerances.within(what, g, w, limit)


def _largest(rows: np.ndarray) -> np.ndarray:
    return np.abs(np.nan_to_num(rows.astype(np.float64), posinf=0, neginf=0)).max(-1, keepdims=True, initial=0)


# ---- the suite


def by_spec(chosen: tuple[cases.Case, ...]) -> dict[str, list[cases.Case]]:
    grouped = defaultdict(list)
    for case in chosen:
        grouped[case.spec.label].append(case)
    return grouped


GROUPED = by_spec(cases.CASES)


def ids(specs: Any) -> Any:
    return pytest.mark.parametrize("spec", specs, ids=[s.label if isinstance(s, cases.Spec) else s for s in specs])


class Conformance:
    """Everything that the contract asks of one implementation."""

    implementation: str
    unsupported: frozenset[str] = frozenset()
    append_implementation: str | None = None  # where append_kv is another's: whose
    tensor_cores = False  # see check
    draws = 1  # random draws of each spec; contract: at least 200 a run

    def refusal(self, spec: cases.Spec) -> str | None:
        """Why the implementation must raise NotImplementedError for this spec; None when it must not."""
        tags = sorted(spec.tags & self.unsupported)
        return f"has no kernel for {', '.join(tags)}" if tags else None

    def need(self, spec: cases.Spec) -> None:
        reason = self.refusal(spec)
        if reason is not None:
            pytest.skip(f"{self.implementation}: {reason}: see test_values")

    @pytest.mark.parametrize("case", cases.CASES, ids=[case.name for case in cases.CASES])
    def test_values(self, case, record_property):
        """Values, lse, written caches; poison and wild integers are part of every case."""
        call = cases.build(case)
        reason = self.refusal(case.spec)
        if reason is not None:
            with pytest.raises(NotImplementedError):
                run(case, call, self.implementation)
            record_property("declined", [self.implementation, reason, case.spec.label])
            return
        check(case, call, run(case, call, self.implementation), self.implementation, self.tensor_cores)

    @ids(list(GROUPED))
    def test_reruns_are_bitwise_equal(self, spec):
        """The same executable with other values in between gives the same bits."""
        group = GROUPED[spec]
        self.need(group[0].spec)
        calls = [cases.build(case) for case in (group[0], group[-1])]
        first, _, again = (run(group[0], call, self.implementation) for call in (calls[0], calls[1], calls[0]))
        for got, want in zip(leaves(again), leaves(first), strict=True):
            assert got.tobytes() == want.tobytes()

    @ids(VMAP_SPECS)
    def test_vmap_is_a_loop(self, spec):
        """vmap over everything that may differ from call to call equals the calls one by one."""
        self.need(spec)
        group = GROUPED[spec.label][:2]
        calls = [{n: to_jax(x) for n, x in cases.build(case).arrays.items()} for case in group]
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *calls)
        mapped = jax.jit(jax.vmap(function(spec, self.implementation)))(stacked)
        for i, (case, one) in enumerate(zip(group, calls, strict=True)):
            alone = to_numpy(executable(spec, self.implementation)(one))
            together = to_numpy(jax.tree.map(lambda x, i=i: x[i], mapped))
            for got, want in zip(leaves(together), leaves(alone), strict=True):
                if spec.op in ("append_kv", "copy_pages", "gather_kv"):
                    tolerances.same_bytes(f"vmap {case.name}", got, want)
                else:
                    ulp = tolerances.ulp(want, want.dtype)
                    tolerances.within(f"vmap {case.name}", got, want, 2 * ulp + 1e-5)

    @ids([s for s in VMAP_SPECS if s.op in ("paged_attention", "paged_decode")])
    def test_vmap_over_queries_only(self, spec):
        """The cache is not mapped: it must be shared, not copied into the batch wrongly."""
        self.need(spec)
        case = GROUPED[spec.label][0]
        arrays = {n: to_jax(x) for n, x in cases.build(case).arrays.items()}
        queries = jnp.stack([arrays["query"], -arrays["query"]])
        call = function(spec, self.implementation)
        mapped = jax.jit(jax.vmap(lambda q: call(arrays | {"query": q})))(queries)
        for i in range(2):
            alone = to_numpy(executable(spec, self.implementation)(arrays | {"query": queries[i]}))
            for got, want in zip(leaves(to_numpy(jax.tree.map(lambda x, i=i: x[i], mapped))), alone, strict=True):
                ulp = tolerances.ulp(want, want.dtype)
                tolerances.within(f"vmap of queries {case.name}", got, want, 2 * ulp + 1e-5)

    @ids(CP_SPECS)
    def test_context_parallel_ranks_merge_to_the_whole(self, spec):
        """All ranks of one context, merged by the implementation, against the golden of the whole."""
        self.need(spec)
        rng = np.random.default_rng(5)
        size, B, P, M = spec.cp_size, spec.B, spec.P, spec.M
        H, K = spec.heads
        dtype = cases.DTYPES[spec.dtype]
        lens = rng.integers(0, spec.capacity + 1, B).astype(np.int32)
        q_lens = np.minimum(rng.integers(0, 4, B), lens)
        q_offsets = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        query = rng.standard_normal((spec.T, H, spec.dim)).astype(dtype)
        k, v = (rng.standard_normal((lens.sum(), K, spec.dim)).astype(dtype) for _ in range(2))
        kv_offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        outs, lses = [], []
        for rank in range(size):
            table = rng.permutation(B * M).reshape(B, M).astype(np.int32)
            empty = golden.Cache(
                *(np.full((B * M, K, P, spec.dim), np.nan, dtype) for _ in range(2)), None, None, spec.dtype, spec.dim
            )
            cache = golden.append_kv(empty, k, v, table, lens, kv_offsets, cp_rank=rank, cp_size=size)
            call = dict(
                query=query, cache=cache, page_table=table, kv_lens=lens, q_offsets=q_offsets, cp_rank=np.int32(rank)
            )
            out, lse = executable(spec, self.implementation)({n: to_jax(x) for n, x in call.items()})
            outs.append(out)
            lses.append(lse)
        merged, lse = jax_turboattn.merge_partials(outs, lses, out_dtype=spec.dtype, implementation=self.implementation)
        options = {n: x for n, x in spec.options.items() if n != "cp_size"}
        want = golden.ragged_attention(query, k, v, q_offsets, kv_offsets, **options)
        base = golden.ragged_attention(query, k, v, q_offsets, kv_offsets, **options, baseline=True)
        tolerances.check_attention(f"{spec.label} merged", np.asarray(merged), np.asarray(lse), want, base)

    @pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
    def test_batch_invariant(self, kv_dtype):
        """A sequence's bits: alone, and among others, elsewhere in the batch, with other padded sizes."""
        name = "invariant" if kv_dtype == "bfloat16" else "int8"
        spec = next(s for s in cases.SPECS if s.label == f"paged_attention/{name}")
        spec = dataclasses.replace(spec, hints=(("batch_invariant", True),))
        self.need(spec)
        case = cases.Case(spec, cases.Values("random", "random"))
        call = cases.build(case)
        out, lse = run(case, call, self.implementation)
        q_offsets = call.arrays["q_offsets"]
        for b in range(spec.B):
            rows = slice(q_offsets[b], q_offsets[b + 1])
            count = rows.stop - rows.start
            if count == 0:
                continue
            table = np.concatenate([call.arrays["page_table"][b : b + 1], np.full((1, 3), -1, np.int32)], axis=1)
            query = np.full((12, *call.arrays["query"].shape[1:]), np.nan, call.arrays["query"].dtype)
            query[2 : 2 + count] = call.arrays["query"][rows]
            one = call.arrays | dict(
                query=query,
                page_table=table,
                kv_lens=call.arrays["kv_lens"][b : b + 1],
                q_offsets=np.array([2, 2 + count], np.int32),
            )
            alone = to_numpy(executable(spec, self.implementation)({n: to_jax(x) for n, x in one.items()}))
            assert alone[0][2 : 2 + count].tobytes() == out[rows].tobytes()
            assert alone[1][2 : 2 + count].tobytes() == lse[rows].tobytes()

    def test_step_equals_append_then_attention(self):
        """Mixed decode and prefill in one fused call, against separate calls of the same implementation."""
        case = cases.find("paged_attention_step/int8/mixed")
        self.need(case.spec)
        call = cases.build(case)
        arrays = {n: to_jax(x) for n, x in call.arrays.items()}
        (out, lse), written = run(case, call, self.implementation)
        rows = ("key", "value", "page_table", "kv_lens", "q_offsets")
        writer = self.append_implementation or self.implementation
        cache = jax_turboattn.append_kv(arrays["cache"], *(arrays[n] for n in rows), implementation=writer)
        apart = jax_turboattn.paged_attention(
            arrays["query"],
            cache,
            *(arrays[n] for n in rows[2:]),
            return_residual=True,
            implementation=self.implementation,
        )
        for got, want in zip(leaves(written), leaves(to_numpy(cache)), strict=True):
            tolerances.same_bytes("cache of the fused step", got, want)
        ulp = tolerances.ulp(np.asarray(apart[0]).astype(np.float64), out.dtype)
        tolerances.within("out of the fused step", out, np.asarray(apart[0]), ulp)
        tolerances.within("lse of the fused step", lse, np.asarray(apart[1]), np.full(lse.shape, 1e-5))

    @pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
    def test_minimum_of_both_zeros(self, kv_dtype):
        """A row whose minimum is both +0 and -0 has +0 as its zero point, in whatever order it is read."""
        rows = np.abs(np.random.default_rng(0).normal(size=(64, 1, 64))).astype(jnp.bfloat16)
        for i, row in enumerate(rows[:, 0]):
            row[i], row[(7 * i + 5) % 64] = 0.0, -0.0
        cache = jax_turboattn.PagedKVCache.create(1, 1, 64, dtype=kv_dtype)
        one = (np.zeros((1, 1), np.int32), np.array([64], np.int32), np.array([0, 64], np.int32))
        written = jax_turboattn.append_kv(cache, rows, rows, *one, implementation=self.implementation)
        wanted = golden.append_kv(to_numpy(cache), rows, rows, *one)
        for got, want in zip(leaves(to_numpy(written)), leaves(wanted), strict=True):
            tolerances.same_bytes("a minimum of both zeros", got, want)

    @ids(DRAWN_SPECS)
    def test_random_draws(self, spec, record_property):
        """Random ragged batches, windows, data and poison through the executables that the cases compiled."""
        self.need(spec)

        @hypothesis.settings(max_examples=self.draws, derandomize=True, deadline=None, database=None)
        @hypothesis.given(st.integers(0, 2**32 - 1))
        def draw(seed):
            rng = np.random.default_rng([zlib.crc32(spec.label.encode()), seed])
            case = cases.Case(spec, cases.random_values(rng, spec, f"seed{seed}"))
            hypothesis.note(f"{case.name}: {case.values}")
            call = cases.build(case)
            check(case, call, run(case, call, self.implementation), self.implementation, self.tensor_cores)

        draw()
        record_property("drawn", [self.implementation, self.draws])

    @pytest.mark.nightly
    def test_random_shapes(self):
        """Free shapes: every draw compiles. The seed is printed; NIGHTLY_SEED repeats it."""
        seed = int(os.environ.get("NIGHTLY_SEED", np.random.SeedSequence().entropy % 2**32))
        print(f"NIGHTLY_SEED={seed}")
        rng = np.random.default_rng(seed)
        specs = [s for s in cases.SPECS if self.refusal(s) is None]
        for i in range(200):
            spec = cases.random_shape(rng, specs[rng.integers(len(specs))])
            case = cases.Case(spec, cases.random_values(rng, spec, f"nightly{i}"))
            jitted = jax.jit(function(spec, self.implementation))
            try:
                call = cases.build(case)
                result = to_numpy(jitted({n: to_jax(x) for n, x in call.arrays.items()}))
                check(case, call, result, self.implementation, self.tensor_cores)
            except Exception as error:
                error.add_note(f"{case.spec} {case.values}")
                raise

    @pytest.mark.nightly
    def test_offsets_beyond_int32(self):
        """A pool of more than 2^31 elements: its last pages are written and read where they are."""
        if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") < 10 << 30:
            pytest.skip("needs 10 GiB of free memory")
        P, D, q_len = 256, 128, 600
        num_pages = 2**31 // (P * D) + 3
        table = np.array([[num_pages - 1, num_pages - 3, num_pages - 2]], np.int32)
        rng = np.random.default_rng(11)
        query, key, value = (rng.standard_normal((q_len, h, D)).astype(cases.DTYPES["bfloat16"]) for h in (2, 1, 1))
        lengths = dict(kv_lens=np.array([q_len], np.int32), q_offsets=np.array([0, q_len], np.int32))
        kept = slice(q_len - 40, q_len)  # rows compared: each costs the golden its 600 keys

        def step(cache, arrays):
            attention = functools.partial(jax_turboattn.paged_attention_step, implementation=self.implementation)
            (out, lse), cache = attention(cache=cache, **arrays, return_residual=True)
            read = functools.partial(jax_turboattn.gather_kv, implementation=self.implementation)
            return out[kept], lse[kept], cache, read(cache, arrays["page_table"], arrays["kv_lens"])

        arrays = dict(query=query, key=key, value=value, page_table=table, **lengths)
        cache = jax_turboattn.PagedKVCache.create(num_pages, 1, D, page_size=P, dtype="int8")
        donating = jax.jit(step, donate_argnums=0)
        out, lse, _, gathered = donating(cache, {n: to_jax(x) for n, x in arrays.items()})
        small = golden.Cache(
            *(np.zeros((3, 1, P, D), np.uint8) for _ in range(2)),
            *(np.zeros((3, 1, P, 2), cases.DTYPES["bfloat16"]) for _ in range(2)),
            "int8",
            D,
        )
        arrays |= dict(page_table=np.array([[2, 0, 1]], np.int32))
        want, written = golden.paged_attention_step(cache=small, **arrays)
        base, _ = golden.paged_attention_step(cache=small, **arrays, baseline=True)
        rows = [dataclasses.replace(r, **{f: x[kept] for f, x in vars(r).items()}) for r in (want, base)]
        tolerances.check_attention("beyond int32", np.asarray(out), np.asarray(lse), *rows)
        stored = golden.gather_kv(written, arrays["page_table"], arrays["kv_lens"])
        for name, got, expected in zip(("key", "value"), to_numpy(gathered), stored, strict=True):
            tolerances.same_values(f"beyond int32: {name}", got, expected)


# ---- against jax.nn


def jax_nn_cases() -> list[cases.Case]:
    """Dense cases that jax.nn.dot_product_attention can express: T == S, its arguments only.

    Not float16, which it refuses on the CPU (jax 0.10.2: "precision F16_F16_F32 is not supported by dot_general").
    """
    arrays = {"query_seq_lengths", "key_value_seq_lengths"}
    static = {"is_causal", "scale", "local_window_size"}
    chosen = []
    for case in cases.CASES:
        spec = case.spec
        plain = all(a in arrays or a.split("_")[0] in ("bias", "mask") for a in spec.arrays)
        sides = dict(spec.static).get("local_window_size", 0)
        bounded = not isinstance(sides, tuple) or all(side is not None and side >= 0 for side in sides)
        same_shapes = spec.T == spec.S and spec.B and spec.value_dim in (None, spec.dim) and spec.dtype != "float16"
        if spec.op == "attention" and same_shapes and plain and bounded and set(dict(spec.static)) <= static:
            if case.values.lens != "wild" and not case.values.data.startswith("nan"):
                chosen.append(case)  # jax.nn lets NaN of unseen keys through: it is compared without any
    return chosen


def check_jax_nn(case: cases.Case) -> None:
    """jax.nn's result, from the same arguments, is within the budget of our golden wherever a row sees a key."""
    call = cases.build(case)
    clean = {n: np.nan_to_num(x) if n in ("query", "key", "value") else x for n, x in call.arrays.items()}
    theirs = jax.jit(lambda arrays: jax.nn.dot_product_attention(**arrays, **call.static))
    out = theirs({n: to_jax(x) for n, x in clean.items()})
    want = golden.attention(**call.semantic)
    base = golden.attention(**call.semantic, baseline=True)
    seen = np.isfinite(want.lse)[..., None]
    tolerances.check_attention(f"{case.name} [jax.nn]", np.where(seen, np.asarray(out), 0), None, want, base)
