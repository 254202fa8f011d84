"""Every error that the public functions raise at trace time: its type and its text, one test a message."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn as ta

B, T, S, H, K, D, P, N, M = 2, 5, 5, 4, 2, 16, 8, 6, 3
f32 = jnp.float32


def zeros(*shape, dtype=f32):
    return jnp.zeros(shape, dtype)


def ints(*shape):
    return jnp.zeros(shape, jnp.int32)


def cache(**changes):
    fields = dict(page_size=P, dtype=f32)
    return ta.PagedKVCache.create(N, K, D, **(fields | changes))


def dense(**changes):
    arguments = dict(query=zeros(B, T, H, D), key=zeros(B, S, K, D), value=zeros(B, S, K, D))
    return ta.attention(**(arguments | changes))


def ragged(**changes):
    arguments = dict(query=zeros(T, H, D), key=zeros(S, K, D), value=zeros(S, K, D))
    arguments |= dict(q_offsets=ints(B + 1), kv_offsets=ints(B + 1))
    return ta.ragged_attention(**(arguments | changes))


def tables(**changes):
    return dict(cache=cache(), page_table=ints(B, M), kv_lens=ints(B), q_offsets=ints(B + 1)) | changes


def paged(**changes):
    return ta.paged_attention(**(dict(query=zeros(T, H, D)) | tables(**changes)))


def decode(**changes):
    arguments = dict(query=zeros(B, H, D)) | tables(**changes)
    arguments.pop("q_offsets")
    return ta.paged_decode(**arguments)


def append(**changes):
    return ta.append_kv(**(dict(key=zeros(T, K, D), value=zeros(T, K, D)) | tables(**changes)))


def step(**changes):
    new = dict(query=zeros(T, H, D), key=zeros(T, K, D), value=zeros(T, K, D))
    return ta.paged_attention_step(**(new | tables(**changes)))


def gather(**changes):
    arguments = tables(**changes)
    arguments.pop("q_offsets")
    return ta.gather_kv(**arguments)


def copy(**changes):
    return ta.copy_pages(**(dict(cache=cache(), source=ints(2), destination=ints(2)) | changes))


def merge(**changes):
    return ta.merge_partials(**(dict(outs=zeros(2, T, H, D), lses=zeros(2, T, H)) | changes))


def create(**changes):
    return ta.PagedKVCache.create(**(dict(num_pages=N, num_kv_heads=K, head_dim=D) | changes))


rope = ta.RopeConfig(dim=16)
dynamic = ta.RopeConfig(kind="dynamic", dim=16, original_max_position=32)
multimodal = ta.RopeConfig(dim=16, sections=(2, 3, 3))
latent = ta.PagedKVCache.create(N, 1, 32, value_dim=16, page_size=P, dtype=f32, shared_value=True)
stacked = cache(num_layers=3)
int8 = cache(dtype="int8", param_dtype=f32)
fp8 = cache(dtype="float8_e4m3fn")
int64 = np.zeros((B, M), np.int64)

CASES = [
    # attention: ranks, shapes, dtypes
    (dense, dict(query=zeros(T, D)), ValueError, r"attention: query must have 4 axes \(B, T, H, D\), got \(5, 16\)"),
    (
        dense,
        dict(key=zeros(B, S, K, 8)),
        ValueError,
        r"attention: key must have shape \(B, S, K, D\) = \(2, \*, \*, 16\), got \(2, 5, 2, 8\); D comes from query.shape\[3\]",
    ),
    (dense, dict(value=zeros(B, 4, K, D)), ValueError, r"value must have shape \(B, S, K, Dv\) = \(2, 5, 2, \*\), got \(2, 4"),
    (dense, dict(key=zeros(B, S, 3, D), value=zeros(B, S, 3, D)), ValueError, r"H must be a multiple of K, got H = 4 \("),
    (dense, dict(query=ints(B, T, H, D)), TypeError, r"query must have one of the dtypes bfloat16, .*, got int32"),
    (dense, dict(key=zeros(B, S, K, D, dtype=jnp.bfloat16)), ValueError, "key must have query's dtype float32, got bfloat16"),
    (dense, dict(query="text"), TypeError, "attention: query must be an array, got str"),
    # attention: options
    (dense, dict(scale=float("nan")), ValueError, "scale must be finite in float32, got nan"),
    (dense, dict(scale="big"), TypeError, r"scale must be a Python number \(it is static\), got str"),
    (dense, dict(logits_soft_cap=0.0), ValueError, "logits_soft_cap must be > 0, or None for no cap, got 0.0"),
    (dense, dict(logits_soft_cap=-1), ValueError, "logits_soft_cap must be > 0"),
    (dense, dict(is_causal=1), TypeError, r"is_causal must be a bool \(it is static\), got int"),
    (dense, dict(local_window_size=-2), ValueError, "local_window_size must have sides >= 0, or -1 or None"),
    (dense, dict(local_window_size=(1, 2, 3)), ValueError, r"local_window_size must be an int or a pair"),
    (dense, dict(local_window_size=(2**31, 0)), ValueError, "local_window_size must fit int32"),
    (dense, dict(local_window_size=(1.5, 0)), TypeError, "local_window_size must hold Python ints"),
    (dense, dict(local_window_size=jnp.zeros(2)), TypeError, r"local_window_size must have dtype int32, got float32; cast"),
    (dense, dict(sinks=zeros(3)), ValueError, r"sinks must have shape \(H\) = \(4\), got \(3,\); H comes from query.shape\[2\]"),
    (dense, dict(sinks=ints(H)), TypeError, "sinks must have a floating dtype, got int32"),
    (dense, dict(alibi_slopes=zeros(H, 1)), ValueError, r"alibi_slopes must have 1 axes \(H\)"),
    (dense, dict(out_dtype=jnp.float16), ValueError, "out_dtype must be one of 'float32', got 'float16'"),
    (dense, dict(implementation="tpu"), ValueError, "implementation must be one of 'cuda', .*'xla', got 'tpu'"),
    (dense, dict(query_seq_lengths=ints(3)), ValueError, r"query_seq_lengths must have shape \(B\) = \(2\), got \(3,\)"),
    (dense, dict(key_value_seq_lengths=zeros(B)), TypeError, "key_value_seq_lengths must have dtype int32, got float32; cast it"),
    (
        dense,
        dict(key=zeros(B, 7, K, D), value=zeros(B, 7, K, D), is_causal=True),
        ValueError,
        "query_offset must be given when is_causal, .* got None with T = 5, S = 7; pass 0 .*, or S - T = 2",
    ),
    (dense, dict(query_offset=1.5), TypeError, "query_offset must have dtype int32"),
    (dense, dict(segment_ids=ints(B, 4)), ValueError, r"segment_ids must have shape \(B, T\) = \(2, 5\), got \(2, 4\)"),
    (dense, dict(segment_ids=(ints(B, T),)), ValueError, "segment_ids must be an array or a pair of arrays, got 1 items"),
    (
        dense,
        dict(key=zeros(B, 7, K, D), value=zeros(B, 7, K, D), segment_ids=ints(B, T)),
        ValueError,
        r"segment_ids must be a pair \[B, T\], \[B, S\] when T != S",
    ),
    (dense, dict(bias=zeros(3, 1, 1)), ValueError, r"bias must be broadcastable to \(B, H, T, S\) = \(2, 4, 5, 5\), got \(3, 1, 1\)"),
    (dense, dict(bias=ints(1)), TypeError, "bias must have a floating dtype, got int32"),
    (dense, dict(mask=zeros(T, S)), TypeError, "mask must have dtype bool, got float32"),
    (dense, dict(mask=jnp.ones((T, 3), bool)), ValueError, "mask must be broadcastable"),
    # ragged_attention
    (ragged, dict(q_offsets=ints(B)), ValueError, r"kv_offsets must have shape \(B\+1\) = \(2\), got \(3,\); B\+1 comes from q_offsets"),
    (ragged, dict(q_offsets=ints(0), kv_offsets=ints(0)), ValueError, r"q_offsets must have at least one element \(B \+ 1\)"),
    (ragged, dict(q_offsets=np.zeros(3, np.int64)), TypeError, r"q_offsets must have dtype int32, got int64; cast it with q_offsets.astype"),
    (ragged, dict(max_q_len=-1), ValueError, "max_q_len must be >= 0, got -1"),
    (ragged, dict(max_q_len=1.0), TypeError, r"max_q_len must be a Python int \(it is static\), got float"),
    # paged_attention and paged_decode
    (paged, dict(query=zeros(T, H, 8)), ValueError, r"query must have shape \(T, H, D\) = \(\*, \*, 16\), got \(5, 4, 8\); D comes from cache.head_dim"),
    (paged, dict(query=zeros(T, 3, D)), ValueError, r"H must be a multiple of K, got H = 3 \(query.shape\[1\]\) and K = 2 \(cache.key"),
    (paged, dict(cache=zeros(N, K, P, D)), TypeError, "cache must be a PagedKVCache, got "),
    (paged, dict(cache=cache(dtype="bfloat16")), ValueError, "cache must have the query's dtype float32, got bfloat16; create the cache"),
    (paged, dict(cache=cache(dtype="int8")), ValueError, r"cache.key_params must have the query's dtype float32, got bfloat16; create .*param_dtype='float32'"),
    (paged, dict(page_table=int64), TypeError, r"page_table must have dtype int32, got int64; cast it with page_table.astype\(jnp.int32\)"),
    (paged, dict(page_table=ints(B)), ValueError, r"page_table must have 2 axes \(B, M\), got \(2,\)"),
    (paged, dict(kv_lens=ints(3)), ValueError, r"kv_lens must have shape \(B\) = \(2\), got \(3,\); B comes from page_table.shape\[0\]"),
    (paged, dict(q_offsets=ints(B)), ValueError, r"q_offsets must have shape \(B\+1\) = \(3\), got \(2,\); B\+1 comes from page_table"),
    (paged, dict(layer=0), ValueError, "layer must be None for a cache without a layer axis, got 0"),
    (paged, dict(cache=stacked), ValueError, "layer must be given for a cache of 3 layers, got None"),
    (paged, dict(cache=stacked, layer=1.0), TypeError, "layer must have dtype int32"),
    (paged, dict(cp_size=0), ValueError, "cp_size must be >= 1, got 0"),
    (paged, dict(cp_rank=1), ValueError, "cp_rank must be 0 when cp_size is 1, got 1"),
    (paged, dict(cp_rank=2, cp_size=2), ValueError, "cp_rank must be from 0 to 1, got 2"),
    (paged, dict(cp_size=2, sinks=zeros(H)), ValueError, "sinks must be None with cp_size = 2, got an array; give them to merge_partials"),
    (paged, dict(tree_mask=zeros(T, 2)), TypeError, "tree_mask must have dtype bool"),
    (paged, dict(tree_mask=jnp.ones((T, 2), bool), is_causal=False), ValueError, "tree_mask must come with is_causal=True"),
    (paged, dict(tree_mask=jnp.ones((3, 2), bool)), ValueError, r"tree_mask must have shape \(tokens, Q\) = \(5, \*\), got \(3, 2\)"),
    (paged, dict(shared_prefix=ints(2)), TypeError, r"shared_prefix must be a pair \(page_ids int32\[n\], length\)"),
    (paged, dict(shared_prefix=(np.zeros(2), 3)), TypeError, r"shared_prefix\[0\] must have dtype int32, got float64"),
    (paged, dict(plan=3), TypeError, "plan must come from make_plan, got int"),
    (paged, dict(query=zeros(T, H, 32), cache=latent), ValueError, "scale must be given for a shared_value cache, got None"),
    (paged, dict(batch_invariant=None), TypeError, "batch_invariant must be a bool"),
    (decode, dict(query=zeros(B, D)), ValueError, r"paged_decode: query must have axes \(B, H, D\) or \(B, Q, H, D\), got \(2, 16\)"),
    (decode, dict(page_table=ints(3, M)), ValueError, r"page_table must have shape \(B, M\) = \(2, \*\), got \(3, 3\); B comes from query"),
    (paged, dict(cache=dataclasses.replace(cache(), value=zeros(N, K, P, 8))), ValueError, r"cache.value must have shape \(N, K, P, 16\)"),
    (paged, dict(cache=dataclasses.replace(cache(), value=None)), ValueError, "cache.value must be an array, got None"),
    (paged, dict(cache=dataclasses.replace(int8, key=zeros(N, K, P, D))), ValueError, "cache.key must have dtype uint8, got float32"),
    (paged, dict(cache=dataclasses.replace(int8, key_params=None)), ValueError, "cache.key_params must be an array for int8, got None"),
    (paged, dict(cache=dataclasses.replace(int8, key_params=zeros(N, K, P, 3))), ValueError, r"cache.key_params must have shape"),
    (paged, dict(cache=dataclasses.replace(cache(), key_params=zeros(2))), ValueError, "cache.key_params must be None for float32"),
    (paged, dict(cache=dataclasses.replace(fp8, key_params=zeros(K, dtype=jnp.bfloat16))), ValueError, "cache.key_params must have float32 scales"),
    (paged, dict(cache=dataclasses.replace(cache(), key=zeros(N, K, 12, D))), ValueError, "page_size must be a power of two from 8 to 256, got 12"),
    (paged, dict(cache=dataclasses.replace(cache(), key=zeros(N, K, D))), ValueError, r"cache.key must have 4 axes \(N, K, P, D\), or 5 with layers"),
    # append_kv and the step
    (append, dict(value=None), ValueError, "append_kv: value must be given, got None"),
    (append, dict(key=zeros(T, 3, D)), ValueError, r"key must have shape \(T, K, D\) = \(\*, 2, 16\), got \(5, 3, 16\)"),
    (append, dict(value=zeros(4, K, D)), ValueError, r"value must have shape \(T, K, Dv\) = \(5, 2, 16\), got \(4, 2, 16\)"),
    (append, dict(value=zeros(T, K, D, dtype=jnp.bfloat16)), ValueError, "value must have key's dtype float32, got bfloat16"),
    (append, dict(key_bias=zeros(D)), ValueError, r"key_bias must have 2 axes \(K, D\), got \(16,\)"),
    (append, dict(rope="default"), TypeError, "rope must be a RopeConfig, got str"),
    (append, dict(rope=ta.RopeConfig(dim=32)), ValueError, r"rope must rotate columns of the head: offset \+ dim <= D = 16, got 0 \+ 32"),
    (append, dict(rope=dynamic), ValueError, "rope_base must be given for rope kind 'dynamic', got None; RopeConfig.ntk_base"),
    (append, dict(rope=rope, rope_base=zeros(B)), ValueError, "rope_base must come with rope kind 'dynamic', got kind 'default'"),
    (append, dict(rope_base=zeros(B)), ValueError, "rope_base must come with rope kind 'dynamic', got no rope"),
    (append, dict(positions=ints(T)), ValueError, "positions must come with rope, got rope=None"),
    (append, dict(rope=rope, positions=ints(T, 3)), ValueError, r"positions must have 1 axes \(T\)"),
    (append, dict(rope=multimodal), ValueError, r"positions must be given \(int32 \[T, 3\]\) for a rope with sections"),
    (append, dict(rope=multimodal, positions=ints(T, 2)), ValueError, r"positions must have shape \(T, 3\) = \(5, 3\), got \(5, 2\)"),
    (append, dict(read_only_pages=ints(3)), ValueError, r"read_only_pages must have shape \(B\) = \(2\), got \(3,\)"),
    (append, dict(cache=latent, key=zeros(T, 1, 32), value=zeros(T, 1, 16)), ValueError, "value must be None for a shared_value cache"),
    (step, dict(key=zeros(T, K, D, dtype=jnp.bfloat16)), ValueError, "paged_attention_step: key must have query's dtype float32, got bfloat16"),
    (step, dict(key=zeros(4, K, D)), ValueError, r"key must have shape \(T, K, D\) = \(5, 2, 16\), got \(4, 2, 16\)"),
    (step, dict(query_bias=zeros(K, D)), ValueError, r"query_bias must have shape \(H, D\) = \(4, 16\), got \(2, 16\)"),
    (step, dict(logn=1), ValueError, "logn must be >= 2, got 1"),
    (step, dict(logn_zero_based=True), ValueError, "logn_zero_based must come with logn, got logn=None"),
    # values that a silent cast or wrap would change, and arguments that do not go together
    (decode, dict(query=zeros(B, 2, H, D), tree_mask=jnp.ones((3, 2), bool)), ValueError, r"tree_mask must have shape \(tokens, Q\) = \(4, \*\), got \(3, 2\); tokens comes from the query"),
    (dense, dict(query_offset=2**31), ValueError, "query_offset must fit int32, got 2147483648"),
    (dense, dict(logits_soft_cap=1e-50), ValueError, r"logits_soft_cap must be from 2\*\*-100 to 2\*\*100, got 1e-50"),
    (dense, dict(scale=1e300), ValueError, r"scale must be finite in float32, got 1e\+300"),
    (dense, dict(scale=10**400), ValueError, "scale must be finite in float32"),
    (dense, dict(scale=np.complex64(1 + 2j)), TypeError, "scale must be a real number"),
    (dense, dict(return_residual="no"), TypeError, "return_residual must be a bool"),
    (dense, dict(out_dtype="foo"), TypeError, "attention: out_dtype must be a dtype, got 'foo'"),
    (dense, dict(local_window_size=(True, 0)), TypeError, "local_window_size must hold Python ints"),
    (dense, dict(query=zeros(B, T, H, 0), key=zeros(B, S, K, 0)), ValueError, r"attention: D must be >= 1, got 0 \(query.shape\[3\]\)"),
    (paged, dict(cache=stacked, layer=2**31), ValueError, "layer must fit int32, got 2147483648"),
    (paged, dict(cp_size=2**31), ValueError, "cp_size must fit int32"),
    (paged, dict(cp_size=2, shared_prefix=(ints(1), 3)), ValueError, "shared_prefix must be None with cp_size = 2, got a prefix; attend to the prefix"),
    (paged, dict(shared_prefix=(ints(1), 2**31)), ValueError, r"shared_prefix\[1\] must fit int32"),
    (step, dict(logn=2**40), ValueError, "logn must fit int32"),
    (paged, dict(cache=dataclasses.replace(cache(), key=None)), TypeError, "cache.key must be an array, got NoneType"),
    (paged, dict(cache=dataclasses.replace(cache(), dtype="int2")), ValueError, "cache.dtype must be one of .* got 'int2'"),
    (paged, dict(cache=dataclasses.replace(cache(), shared_value=True)), ValueError, "cache.value must be None with shared_value"),
    (paged, dict(query=zeros(T, H, 32), cache=dataclasses.replace(latent, value_dim=99), scale=1.0), ValueError, "cache.value_dim must be <= head_dim = 32 with shared_value, got 99"),
    (create, dict(param_dtype="foo"), TypeError, "param_dtype must be a dtype, got 'foo'"),
    # gather, copy, merge
    (gather, dict(out_dtype=jnp.bfloat16), ValueError, "gather_kv: out_dtype must be float32 for this cache, got bfloat16"),
    (gather, dict(cache=fp8, out_dtype=jnp.int8), ValueError, "out_dtype must be one of 'bfloat16', 'float16', 'float32', got 'int8'"),
    (copy, dict(destination=ints(3)), ValueError, r"copy_pages: destination must have shape \(n\) = \(2\), got \(3,\)"),
    (copy, dict(source=zeros(2)), TypeError, "source must have dtype int32"),
    (merge, dict(outs=[]), ValueError, "merge_partials: outs must hold at least one partial, got none"),
    (merge, dict(outs=[zeros(T, H, D), zeros(T, H, 8)]), ValueError, "outs must hold arrays of one shape"),
    (merge, dict(outs=zeros(2, D)), ValueError, r"outs must have axes \(R, ..., H, Dv\), got \(2, 16\)"),
    (merge, dict(lses=zeros(2, T, 3)), ValueError, r"lses must have outs' shape without Dv, \(2, 5, 4\), got \(2, 5, 3\)"),
    (merge, dict(lses=zeros(2, T, H, dtype=jnp.bfloat16)), TypeError, "lses must have dtype float32, got bfloat16"),
    (merge, dict(out_dtype=jnp.int8), ValueError, "out_dtype must be one of"),
    # the cache itself
    (create, dict(page_size=48), ValueError, "PagedKVCache.create: page_size must be a power of two from 8 to 256, got 48"),
    (create, dict(page_size=512), ValueError, "page_size must be a power of two from 8 to 256, got 512"),
    (create, dict(dtype="int2"), ValueError, "dtype must be one of 'float32', .*'float8_e4m3fn', got 'int2'"),
    (create, dict(dtype=jnp.float8_e5m2), ValueError, "dtype must be one of .* got 'float8_e5m2'"),
    (create, dict(dtype="int4", head_dim=12), ValueError, "head_dim must be a multiple of 8 for an int4 cache, got 12"),
    (create, dict(num_kv_heads=0), ValueError, "num_kv_heads must be >= 1, got 0"),
    (create, dict(num_pages=2.0), TypeError, r"num_pages must be a Python int \(it is static\), got float"),
    (create, dict(shared_value=True, value_dim=32), ValueError, "value_dim must be <= head_dim = 16 with shared_value, got 32"),
    (create, dict(param_dtype=jnp.int8), ValueError, "param_dtype must be one of 'bfloat16', 'float16', 'float32', got 'int8'"),
]


def test_the_unchanged_calls_are_legal():
    for function in (dense, ragged, paged, decode, append, step, gather, copy, merge, create):
        jax.eval_shape(function)


@pytest.mark.parametrize("function, changes, error, text", CASES, ids=[f"{f.__name__}-{t[:40]}" for f, _, _, t in CASES])
def test_message(function, changes, error, text):
    with pytest.raises(error, match=text):
        jax.eval_shape(lambda: function(**changes))


ROPE_CASES = [
    (dict(kind="su"), "kind must be one of default, linear"),
    (dict(pairing="pairs"), "pairing must be one of half, interleaved"),
    (dict(dim=12), "dim must be a positive multiple of 8, got 12"),
    (dict(offset=4), "offset must be a non-negative multiple of 8, got 4"),
    (dict(base=1.0), "base must be finite and > 1, got 1.0"),
    (dict(kind="linear", factor=0.0), "factor must be finite and > 0, got 0.0"),
    (dict(factor=4.0), "factor must be left at 1.0 for kind='default', got 4.0; linear, dynamic, yarn, llama3, longrope read it"),
    (dict(kind="linear", beta_fast=3.0), "beta_fast must be left at 32.0 for kind='linear'"),
    (dict(kind="yarn"), r"original_max_position must be given \(tokens, > 1\) for kind='yarn', got None"),
    (dict(kind="llama3", original_max_position=8, high_freq_factor=1.0), "high_freq_factor must be > low_freq_factor = 1.0"),
    (dict(kind="longrope", original_max_position=8), "short_factor must hold dim / 2 = 64 numbers"),
    (dict(sections=(1, 2, 3)), "sections must be three counts of pairs that sum to dim / 2 = 64"),
    (dict(sections_interleaved=True), "sections_interleaved must be False without sections"),
    (dict(attention_factor=float("inf")), "attention_factor must be finite"),
]


@pytest.mark.parametrize("fields, text", ROPE_CASES, ids=[t[:30] for _, t in ROPE_CASES])
def test_rope_message(fields, text):
    with pytest.raises(ValueError, match=f"RopeConfig: {text}"):
        ta.RopeConfig(**fields)


def test_plan_of_another_spec():
    arguments = dict(tables(), query=zeros(T, H, D))
    plan = ta.make_plan(**arguments)
    ta.paged_attention(**arguments, plan=plan)
    with pytest.raises(ValueError, match="plan must be made for this call's spec: scale = 0.5, got 0.25; call make_plan"):
        ta.paged_attention(**arguments, plan=plan, scale=0.5)


def test_plan_of_the_step_is_that_of_its_attention():
    plan = ta.make_plan(zeros(T, H, D), **tables())
    step(plan=plan)


def test_plan_of_other_sizes():
    arguments = dict(tables(), query=zeros(T, H, D))
    plan = ta.make_plan(**arguments)
    with pytest.raises(ValueError, match=f"plan must be made for this call's spec: num_tokens = {T + 1}, got {T}"):
        ta.paged_attention(**arguments | dict(query=zeros(T + 1, H, D)), plan=plan)
    wider = jnp.pad(arguments["page_table"], ((0, 0), (0, 1)))
    with pytest.raises(ValueError, match="plan must be made for this call's spec: max_pages = "):
        ta.paged_attention(**arguments | dict(page_table=wider), plan=plan)


@pytest.mark.parametrize(
    "change, error", [(lambda x: x[:3], ValueError), (lambda x: x[None], ValueError), (lambda x: x + 0.5, TypeError)]
)
def test_plan_that_was_changed(change, error):
    arguments = dict(tables(), query=zeros(T, H, D))
    plan = jax.tree.map(change, ta.make_plan(**arguments))
    with pytest.raises(error, match="paged_attention: plan.data must have"):
        ta.paged_attention(**arguments, plan=plan)


def test_named_implementation_without_a_kernel():
    with pytest.raises(NotImplementedError, match="attention: implementation='cpu' has no kernel for this call: a dense bias"):
        jax.eval_shape(lambda: dense(bias=zeros(1), implementation="cpu"))
    with pytest.raises(NotImplementedError, match="implementation='pallas' has no kernel for this call: "):
        jax.eval_shape(lambda: dense(implementation="pallas"))


def test_paged_functions_refuse_gradients():
    with pytest.raises(NotImplementedError, match="paged_attention is not differentiable; train with attention"):
        jax.grad(lambda q: paged(query=q).sum())(zeros(T, H, D))
    with pytest.raises(NotImplementedError, match="append_kv is not differentiable"):
        jax.grad(lambda k: append(key=k).key.sum())(zeros(T, K, D))
    with pytest.raises(NotImplementedError, match="paged_attention_step is not differentiable"):
        jax.grad(lambda q: step(query=q)[0].sum())(zeros(T, H, D))


def test_environment_variable_names_an_implementation(monkeypatch):
    monkeypatch.setenv("JAX_TURBOATTN_IMPLEMENTATION", "gpu")
    with pytest.raises(ValueError, match="JAX_TURBOATTN_IMPLEMENTATION must be one of .*, got 'gpu'"):
        jax.eval_shape(lambda: dense())  # a fresh function: eval_shape remembers its traces
