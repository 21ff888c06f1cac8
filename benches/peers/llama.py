"""llama.cpp's flash attention: ggml_flash_attn_ext, through the C functions that the package xllamacpp exports.

The argument is the layout of keys and values: `tokens` (llama.cpp's own cache: a token's heads side by side) or `heads`.
"""

import ctypes as c
import importlib.metadata
import sys

import numpy as np

from common import DIM, KV_HEADS, QUERY_HEADS, SCALE, Built, bf16, serve
from processes import llama_library

TOKENS = sys.argv[1] == "tokens"
# ggml's numbers of its types, the values of a block and its bytes.
TYPES = {"f32": (0, 1, 4), "f16": (1, 1, 2), "bf16": (30, 1, 2), "q8_0": (8, 32, 34), "q4_0": (2, 32, 18)}


class InitParams(c.Structure):
    _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]


P, I64, SIZE = c.c_void_p, c.c_int64, c.c_size_t
LIB = llama_library({
    "ggml_init": (P, [InitParams]),
    "ggml_new_tensor_3d": (P, [P, c.c_int, I64, I64, I64]),
    "ggml_permute": (P, [P, P, c.c_int, c.c_int, c.c_int, c.c_int]),
    "ggml_get_data": (P, [P]),
    "ggml_nbytes": (SIZE, [P]),
    "ggml_quantize_chunk": (SIZE, [c.c_int, P, P, I64, I64, I64, P]),
    "ggml_flash_attn_ext": (P, [P, P, P, P, P, c.c_float, c.c_float, c.c_float]),
    "ggml_new_graph": (P, [P]),
    "ggml_build_forward_expand": (None, [P, P]),
    "ggml_backend_cpu_init": (P, []),
    "ggml_backend_cpu_set_n_threads": (None, [P, c.c_int]),
    "ggml_backend_graph_compute": (c.c_int, [P, P]),
})
BACKEND = LIB.ggml_backend_cpu_init()


def packed(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Bytes of the values in their order, and what they stand for if that is not x."""
    kind, block, size = TYPES[dtype]
    if dtype in ("f32", "f16", "bf16"):
        return {"f32": x, "f16": x.astype(np.float16), "bf16": bf16(x)}[dtype].view(np.uint8).reshape(-1), None
    out = np.empty(x.size // block * size, np.uint8)
    LIB.ggml_quantize_chunk(kind, x.ctypes.data, out.ctypes.data, 0, x.size // DIM, DIM, None)
    blocks = out.reshape(-1, size)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    codes = blocks[:, 2:]
    if dtype == "q8_0":
        values = codes.copy().view(np.int8)
    else:
        values = np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.int8) - 8
    return out, (values * scale).reshape(x.shape)


def tensor(context, dtype: str, x: np.ndarray):
    """[tokens, heads, DIM] in either layout, seen as ggml's [DIM, tokens, heads]; its bytes, and what it stands for."""
    tokens, heads, _ = x.shape
    shape = (DIM, heads, tokens) if TOKENS else (DIM, tokens, heads)
    data, stored = packed(x if TOKENS else np.ascontiguousarray(x.transpose(1, 0, 2)), dtype)
    t = LIB.ggml_new_tensor_3d(context, TYPES[dtype][0], *shape)
    assert LIB.ggml_nbytes(t) == data.nbytes
    c.memmove(LIB.ggml_get_data(t), data.ctypes.data, data.nbytes)
    if stored is None:
        stored = x
    elif not TOKENS:
        stored = stored.transpose(1, 0, 2)
    return (LIB.ggml_permute(context, t, 0, 2, 1, 3) if TOKENS else t), data.nbytes, stored


def build(dtype, q, k, v) -> Built:
    _, block, size = TYPES[dtype]
    room = 2 * k.size // block * size + (16 << 20)
    context = LIB.ggml_init(InitParams(room, None, False))
    (k, k_bytes, k_stored), (v, v_bytes, v_stored) = (tensor(context, dtype, x) for x in (k, v))
    rows = LIB.ggml_new_tensor_3d(context, TYPES["f32"][0], DIM, 1, QUERY_HEADS)
    c.memmove(LIB.ggml_get_data(rows), q.ctypes.data, q.nbytes)
    out = LIB.ggml_flash_attn_ext(context, rows, k, v, None, SCALE, 0.0, 0.0)
    graph = LIB.ggml_new_graph(context)
    LIB.ggml_build_forward_expand(graph, out)

    def call(threads):
        LIB.ggml_backend_cpu_set_n_threads(BACKEND, threads)
        status = LIB.ggml_backend_graph_compute(BACKEND, graph)
        if status != 0:
            raise RuntimeError(f"ggml status {status}")

    def output():
        data = np.empty((QUERY_HEADS, DIM), np.float32)
        c.memmove(data.ctypes.data, LIB.ggml_get_data(out), data.nbytes)
        return data

    return Built(call, output, k_bytes + v_bytes, (k_stored, v_stored))


simd = "avx512" if LIB.ggml_cpu_has_avx512() else "avx2" if LIB.ggml_cpu_has_avx2() else "other"
serve(f"xllamacpp {importlib.metadata.version('xllamacpp')} {simd}", build)
