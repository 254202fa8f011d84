"""References that PyTorch calls and JAX cannot, timed with CUDA events: FlashAttention-2 in PyTorch, FlashInfer.

Called by peers.py with the shapes as JSON; prints one line a shape: its microseconds, or why there are none. A process
of its own: PyTorch and JAX do not share the card's memory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import statistics
import sys
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

WORKSPACE_BYTES = 512 << 20  # of FlashInfer, for the parts of split sequences
TOLERANCE = 0.03  # of the largest value; rounding of P and of the output to bfloat16 takes up to 0.01


def median_us(launch: Callable[[], object], calls: int, repeats: int = 7) -> float:
    """Microseconds of each of the `calls` calls that launch() queues. The first launch is not counted."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats + 1)]
    for start, end in events:
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events[1:]) / calls * 1e3


def dense(shape: dict, calls: int = 12) -> float:
    """FlashAttention-2: queued calls, each long enough to hide the host's part of the next."""
    (heads, kv_heads), dim, length, new = shape["heads"], shape["dim"], shape["length"], shape["new"]
    query = random(shape["batch"], heads, new, dim)
    key, value = (random(shape["batch"], kv_heads, length, dim) for _ in range(2))
    masks = dict(is_causal=shape["causal"])
    if shape["causal"] and new < length:  # is_causal alone would have the first query see the first key
        masks = dict(attn_mask=causal_lower_right(new, length))

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, **masks, enable_gqa=heads != kv_heads
        )

    def launch():
        for _ in range(calls):
            attend()

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.no_grad():
        us = median_us(launch, calls)
        # The last query sees all keys.
        check(attend()[-1, :, -1], query[-1, :, -1], key[-1][None], value[-1][None], length)
    return us


def paged(shape: dict, calls: int = 16) -> float:
    """FlashInfer: planned calls on sets of shuffled pages that take turns, captured as one CUDA graph.

    Decode on tensor cores where each sequence has one query; else causal prefill by the backend that `shape` names. It
    compiles its kernels first, minutes, unless the package flashinfer-jit-cache holds them.
    """
    flashinfer = importlib.import_module("flashinfer")
    (heads, kv_heads), dim, lens, new = shape["heads"], shape["dim"], shape["lens"], shape["new"]
    page_size, dtype = shape["page_size"], getattr(torch, shape["dtype"])
    counts = torch.tensor([-(-n // page_size) for n in lens], dtype=torch.int32)
    starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    last = torch.tensor([(n - 1) % page_size + 1 for n in lens], dtype=torch.int32)
    tables = torch.randperm(shape["sets"] * int(counts.sum())).int().view(shape["sets"], -1)
    key, value = (random(tables.numel(), kv_heads, page_size, dim).to(dtype) for _ in range(2))
    queries = torch.nn.functional.pad(torch.tensor(new, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    query = random(sum(new), heads, dim)
    outs = [torch.empty_like(query) for _ in tables]
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrappers = []
    for table, out in zip(tables, outs, strict=True):
        arguments = (starts, table, last, heads, kv_heads, dim, page_size)
        types = dict(q_data_type=torch.bfloat16, kv_data_type=dtype)
        if max(new) == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
            wrapper.plan(*arguments, **types)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=shape["backend"])
            wrapper.plan(queries, *arguments, causal=True, **types)
        wrapper.run(query, (key, value), out=out)  # loads kernels, which no capture may
        wrappers.append(wrapper)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            wrappers[i % len(wrappers)].run(query, (key, value), out=outs[i % len(outs)])
    for out in outs:
        out.zero_()  # what is checked is to come from the graph
    us = median_us(graph.replay, calls)
    for table, out in zip(tables, outs, strict=True):
        pages = table[starts[-2] :].to(out.device)
        check(out[-1], query[-1], key[pages], value[pages], lens[-1])
    return us


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def check(out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int) -> None:
    """Raises when the last query's output [H, D] is not that of all `length` keys in the pages [M, K, P, D]."""
    key, value = (x.float().transpose(0, 1).flatten(1, 2)[:, :length] for x in (key, value))  # [K, S, D]
    group = query.float().view(key.shape[0], -1, query.shape[-1])  # [K, G, D]
    weights = (group @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
    expected = (weights @ value).view_as(out)
    error = float((out - expected).abs().max() / expected.abs().max())
    if not error < TOLERANCE:  # NaN too
        raise RuntimeError(f"its result is wrong by {error:.3f} of the largest value")


def main() -> None:
    times = {"prefill": dense, "decode": paged, "chunked": paged, "mixed": paged}
    for shape in json.loads(sys.argv[1]):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                result: float | str = times[shape["kind"]](shape)
        except Exception as error:  # a shape that fails must not take the others with it
            result = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
