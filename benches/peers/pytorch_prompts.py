"""PyTorch's attention of prompts on the CPU, as a peer of the bench prefill: heads first, 32 query heads over 8 KV heads.

`setup DTYPE ROWS CONTEXT` builds the newest ROWS rows of CONTEXT tokens, computes, checks two rows, and answers `ok ERROR`, or `no REASON`.
`sample DTYPE ROWS CONTEXT THREADS` answers the seconds of a call. ROWS of all tokens are PyTorch's causal prompt; fewer have a mask.
"""

import time

import numpy as np
import torch
import torch.nn.functional as F

from common import CHECKED, DIM, KV_HEADS, QUERY_HEADS, SCALE, TOLERANCE, Missing, answer, oracle

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
built = {}


def setup(dtype, rows, context):
    if dtype not in DTYPES:
        raise Missing(f"{dtype} is no dtype of its attention")
    n, tokens = int(rows), int(context)
    torch.manual_seed(1)
    heads = [(QUERY_HEADS, n, 4.0), (KV_HEADS, tokens, 1.0), (KV_HEADS, tokens, 1.0)]
    q, k, v = ((scale * torch.rand(1, h, t, DIM) - scale / 2).to(DTYPES[dtype]) for h, t, scale in heads)
    mask = {"is_causal": True} if n == tokens else {"attn_mask": torch.ones(n, tokens, dtype=torch.bool).tril(tokens - n)}
    built.clear()
    built[dtype, rows, context] = lambda: F.scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=True, **mask)
    with torch.inference_mode():
        out = built[dtype, rows, context]()
    worst = 0.0
    for row in (0, n - 1):
        keys, values = (x[0, :, : tokens - n + row + 1].transpose(0, 1).float().numpy() for x in (k, v))
        expected = oracle(q[0, :, row].float().numpy(), keys, values)
        worst = max(worst, np.abs(out[0, CHECKED, row].float().numpy() - expected).max() / np.abs(expected).max())
    if not worst <= TOLERANCE[dtype]:
        raise ValueError(f"{dtype}, {rows} rows of {context} tokens: off by {worst:.1e}")
    return f"ok {worst:e}"


def sample(dtype, rows, context, threads):
    if torch.get_num_threads() != int(threads):
        torch.set_num_threads(int(threads))
    with torch.inference_mode():
        start = time.perf_counter()
        built[dtype, rows, context]()
        return f"{time.perf_counter() - start:e}"


answer(f"torch {torch.__version__}", {"setup": setup, "sample": sample})
