"""Writes the MoE of examples/models as a GGUF file, for the peers of `benches/decode/run`: `moe_gguf.py OUT joined|split`. llama.cpp
reads the experts of a layer as one tensor (`joined`), candle as one each. Matrices stay in f16."""

import json
import pathlib
import struct
import sys

import numpy as np

MODEL = pathlib.Path(__file__).resolve().parents[2] / "examples/models/austen-moe"
ALIGNMENT = 32
# Numbers of GGUF's types of metadata and of tensors.
U32, REAL, STRING = (4, "<I"), (6, "<f"), 8
KINDS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}


def tensors() -> dict[str, np.ndarray]:
    data = (MODEL / "model.safetensors").read_bytes()
    (n,) = struct.unpack_from("<Q", data)
    found = {}
    for name, of in json.loads(data[8 : 8 + n]).items():
        if name != "__metadata__":
            begin, end = of["data_offsets"]
            found[name] = np.frombuffer(data[8 + n + begin : 8 + n + end], np.float16).reshape(of["shape"])
    return found


def pairs(rows: np.ndarray, dim: int) -> np.ndarray:
    """Channels `i` and `i + dim / 2` of a head, which RoPE turns together, side by side."""
    return np.ascontiguousarray(rows.reshape(-1, 2, dim // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape))


def converted(config: dict, joined: bool) -> dict[str, np.ndarray]:
    of, dim = tensors(), config["head_dim"]
    out = {"token_embd.weight": of["model.embed_tokens.weight"], "output.weight": of["lm_head.weight"], "output_norm.weight": of["model.norm.weight"].astype(np.float32)}
    for layer in range(config["num_hidden_layers"]):
        there, here = f"model.layers.{layer}.", f"blk.{layer}."
        attention = {name: of[f"{there}self_attn.{name}_proj.weight"] for name in "qkvo"}
        out[f"{here}attn_q.weight"], out[f"{here}attn_k.weight"] = pairs(attention["q"], dim), pairs(attention["k"], dim)
        out[f"{here}attn_v.weight"], out[f"{here}attn_output.weight"] = attention["v"], attention["o"]
        out[f"{here}attn_norm.weight"] = of[f"{there}input_layernorm.weight"].astype(np.float32)
        out[f"{here}ffn_norm.weight"] = of[f"{there}post_attention_layernorm.weight"].astype(np.float32)
        out[f"{here}ffn_gate_inp.weight"] = of[f"{there}block_sparse_moe.gate.weight"].astype(np.float32)
        for name, w in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            experts = [of[f"{there}block_sparse_moe.experts.{e}.{w}.weight"] for e in range(config["num_local_experts"])]
            if joined:
                out[f"{here}ffn_{name}_exps.weight"] = np.stack(experts)
            else:
                out.update({f"{here}ffn_{name}.{e}.weight": expert for e, expert in enumerate(experts)})
    return out


def metadata(config: dict) -> list[bytes]:
    text = lambda s: struct.pack("<Q", len(s)) + s.encode()
    pair = lambda name, kind, value: text(name) + struct.pack("<I", kind) + value
    whole = {
        "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
        "rope.dimension_count": "head_dim", "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok", "vocab_size": "vocab_size",
    }
    real = {"rope.freq_base": "rope_theta", "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
    out = [pair("general.architecture", STRING, text("llama")), pair("tokenizer.ggml.model", STRING, text("none"))]
    for (kind, form), names in ((U32, whole), (REAL, real)):
        out += [pair(f"llama.{name}", kind, struct.pack(form, config[key])) for name, key in names.items()]
    return out


def main() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    found, pairs_of = converted(config, sys.argv[2] == "joined"), metadata(config)
    head, data = struct.pack("<4sIQQ", b"GGUF", 3, len(found), len(pairs_of)) + b"".join(pairs_of), b""
    for name, x in found.items():
        head += struct.pack("<Q", len(name)) + name.encode() + struct.pack(f"<I{x.ndim}QIQ", x.ndim, *x.shape[::-1], KINDS[x.dtype], len(data))
        data += x.tobytes() + b"\0" * (-x.nbytes % ALIGNMENT)
    pathlib.Path(sys.argv[1]).write_bytes(head + b"\0" * (-len(head) % ALIGNMENT) + data)


main()
