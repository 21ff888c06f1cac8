"""PyTorch on the CPU. The argument says how: `sdpa` (32 heads, enable_gqa), `rows` (the group as rows of one head), `matmul`."""

import sys

import torch
import torch.nn.functional as F

from common import DIM, GROUP, KV_HEADS, SCALE, Built, Missing, serve

HOW = sys.argv[1]
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def build(dtype, q, k, v) -> Built:
    if dtype not in DTYPES:
        raise Missing(f"{dtype} is no dtype of its attention")
    # Heads first, tokens in a row: the layout that its kernels ask for.
    to = lambda x: torch.from_numpy(x).to(DTYPES[dtype])
    k, v = (to(x).transpose(0, 1).contiguous()[None] for x in (k, v))
    q = to(q).view(1, -1, 1, DIM) if HOW == "sdpa" else to(q).view(1, KV_HEADS, GROUP, DIM)
    last = [None]

    @torch.inference_mode()
    def call(threads):
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if HOW == "matmul":
            last[0] = torch.matmul(torch.softmax(torch.matmul(q, k.transpose(2, 3)) * SCALE, dim=-1), v)
        else:
            last[0] = F.scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=HOW == "sdpa")

    output = lambda: last[0].reshape(-1, DIM).float().numpy()
    return Built(call, output, 2 * k.nbytes)


serve(torch.__version__, build)
