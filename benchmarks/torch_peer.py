"""FlashAttention-2 through PyTorch, timed with CUDA events: prints one JSON object, microseconds by case name.

Called by peers.py with the shapes as JSON. A process of its own: PyTorch and JAX do not share the card's memory.
"""

from __future__ import annotations

import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def microseconds(case: dict, calls: int = 12, repeats: int = 7) -> float:
    (heads, kv_heads), dim = case["heads"], case["dim"]
    query, key, value = (
        torch.randn(case["batch"], h, case["length"], dim, device="cuda", dtype=torch.bfloat16)
        for h in (heads, kv_heads, kv_heads)
    )
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats + 1)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.no_grad():
        for start, end in events:
            start.record()
            for _ in range(calls):
                torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, is_causal=case["causal"], enable_gqa=heads != kv_heads
                )
            end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events[1:]) / calls * 1e3


def main() -> None:
    times: dict[str, float | str] = {}
    for case in json.loads(sys.argv[1]):
        try:
            times[case["name"]] = microseconds(case)
        except RuntimeError as error:
            times[case["name"]] = " ".join(str(error).split())[:200]
    print(json.dumps(times))


if __name__ == "__main__":
    main()
