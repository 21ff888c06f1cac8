"""llama.cpp as one of the engines of `benches/decode/run`, through the C functions that the package xllamacpp exports. The arguments
are the GGUF file and whether attention is fused: `flash` (llama.cpp's choice on a CPU) or `plain`. Its cache is in f16, its default."""

import ctypes as c
import importlib.metadata
import pathlib
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from processes import Missing, answer, llama_library

P, I32, U32, F32, FLAG = c.c_void_p, c.c_int32, c.c_uint32, c.c_float, c.c_bool
# Tokens of a call when the cache is filled, llama.cpp's own limit of a batch.
CHUNK = 2048


class ModelParams(c.Structure):
    _fields_ = [("devices", P), ("overrides", P), ("n_gpu_layers", I32), ("split_mode", c.c_int), ("load_mode", c.c_int), ("lazy_mode", c.c_int),
                ("main_gpu", I32), ("tensor_split", P), ("progress", P), ("progress_data", P), ("kv_overrides", P), ("flags", FLAG * 6)]


class ContextParams(c.Structure):
    _fields_ = [("n_ctx", U32), ("n_batch", U32), ("n_ubatch", U32), ("n_seq_max", U32), ("n_rs_seq", U32), ("n_outputs_max", U32),
                ("n_outputs_max_per_seq", U32), ("n_threads", I32), ("n_threads_batch", I32), ("ctx_type", c.c_int), ("rope_scaling_type", c.c_int),
                ("pooling_type", c.c_int), ("attention_type", c.c_int), ("flash_attn_type", c.c_int), ("reals", F32 * 6), ("yarn_orig_ctx", U32),
                ("defrag_thold", F32), ("cb_eval", P), ("cb_eval_data", P), ("type_k", c.c_int), ("type_v", c.c_int), ("moe_cache_size", c.c_size_t),
                ("abort", P), ("abort_data", P), ("flags", FLAG * 6), ("samplers", P), ("n_samplers", c.c_size_t), ("ctx_other", P)]


class Batch(c.Structure):
    _fields_ = [("n_tokens", I32), ("token", c.POINTER(I32)), ("embd", P), ("pos", c.POINTER(I32)), ("n_seq_id", c.POINTER(I32)),
                ("seq_id", c.POINTER(c.POINTER(I32))), ("logits", c.POINTER(c.c_int8))]


LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, P)
LIB = llama_library({
    "llama_log_set": (None, [LOG, P]),
    "llama_model_default_params": (ModelParams, []),
    "llama_model_load_from_file": (P, [c.c_char_p, ModelParams]),
    "llama_model_get_vocab": (P, [P]),
    "llama_vocab_n_tokens": (I32, [P]),
    "llama_model_n_ctx_train": (I32, [P]),
    "llama_context_default_params": (ContextParams, []),
    "llama_init_from_model": (P, [P, ContextParams]),
    "llama_set_n_threads": (None, [P, I32, I32]),
    "llama_get_memory": (P, [P]),
    "llama_memory_seq_rm": (FLAG, [P, I32, I32, I32]),
    "llama_batch_init": (Batch, [I32, I32, I32]),
    "llama_decode": (I32, [P, Batch]),
    "llama_get_logits_ith": (c.POINTER(F32), [P, I32]),
})


class Engine:
    def __init__(self, path: str, attention: str):
        self.quiet = LOG(lambda level, text, data: None)
        LIB.llama_log_set(self.quiet, None)
        self.model = LIB.llama_model_load_from_file(path.encode(), LIB.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"{path}: not loaded")
        self.vocab = LIB.llama_vocab_n_tokens(LIB.llama_model_get_vocab(self.model))
        params = LIB.llama_context_default_params()
        if (params.n_ctx, params.n_batch, params.n_ubatch, params.type_k, params.type_v, params.ctx_other) != (512, CHUNK, 512, 1, 1, None):
            raise SystemExit("llama.h has changed: the structures of this file are those of another version")
        params.n_ctx, params.flash_attn_type = LIB.llama_model_n_ctx_train(self.model), {"flash": 1, "plain": 0}[attention]
        self.context = LIB.llama_init_from_model(self.model, params)
        self.memory = LIB.llama_get_memory(self.context)
        self.batch = LIB.llama_batch_init(CHUNK, 0, 1)
        self.text: list[int] = []
        self.held = 0

    def decode(self, n: int, all_logits: bool = False) -> np.ndarray:
        """The next `n` tokens of the text; the logits after each, or after the last one."""
        self.batch.n_tokens = n
        for i in range(n):
            self.batch.token[i], self.batch.pos[i] = self.text[self.held + i], self.held + i
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
            self.batch.logits[i] = all_logits or i == n - 1
        if status := LIB.llama_decode(self.context, self.batch):
            raise Missing(f"llama_decode answers {status}")
        self.held += n
        rows = range(n) if all_logits else [n - 1]
        return np.stack([np.ctypeslib.as_array(LIB.llama_get_logits_ith(self.context, i), (self.vocab,)) for i in rows])

    def take(self, *tokens: str) -> str:
        self.text = [int(token) for token in tokens]
        return "ok"

    def hold(self, tokens: str) -> str:
        n = int(tokens)
        if n < self.held:
            LIB.llama_memory_seq_rm(self.memory, 0, n, -1)
            self.held = n
        while self.held < n:
            self.decode(min(n - self.held, CHUNK))
        return "ok"

    def nats(self, tokens: str) -> str:
        self.hold("0")
        n = int(tokens)
        logits = self.decode(n, all_logits=True).astype(np.float64)[:-1]
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(n - 1), self.text[1:n]]
        return " ".join(f"{x:.6f}" for x in np.log(np.exp(logits).sum(axis=1)) - chosen)

    def prompt(self, tokens: str, threads: str) -> str:
        LIB.llama_set_n_threads(self.context, int(threads), int(threads))
        start = time.perf_counter()
        self.decode(int(tokens))
        return f"{time.perf_counter() - start:e}"

    def generate(self, tokens: str, threads: str) -> str:
        LIB.llama_set_n_threads(self.context, int(threads), int(threads))
        start = time.perf_counter()
        for _ in range(int(tokens)):
            self.decode(1)
        return f"{time.perf_counter() - start:e}"


engine = Engine(*sys.argv[1:])
requests = {name: getattr(engine, name) for name in ("take", "hold", "nats", "prompt", "generate")}
answer(f"llama.cpp {importlib.metadata.version('xllamacpp')}", requests)
