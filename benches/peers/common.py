"""What the Python peers share: the shape, the float64 softmax that each is checked against, and the answers to `run`.

A peer is a process that answers a line with a line. `setup DTYPE CONTEXT` builds keys and values, computes, checks, and
answers `ok BYTES ERROR`, or `no REASON`. `sample DTYPE CONTEXT THREADS` answers the seconds of a call.
"""

import pathlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from processes import Missing, answer

QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128
GROUP = QUERY_HEADS // KV_HEADS
SCALE = DIM**-0.5
# The query heads of the first and of the last KV head.
CHECKED = [*range(GROUP), *range(QUERY_HEADS - GROUP, QUERY_HEADS)]
# Largest error over the largest output. Peers round queries, weights or sums to 16 or 8 bits: llama.cpp adds f16 values up in f16,
# token by token, and PyTorch's matmul leaves logits in bf16, where those near 8 are off by 1/64.
TOLERANCE = {"f32": 1e-4, "f16": 6e-2, "bf16": 6e-2, "q8_0": 3e-2, "q4_0": 3e-2}
SAMPLE_SECONDS = 0.03


@dataclass
class Built:
    """A peer's attention over one cache."""

    call: Callable[[int], object]  # threads; computes
    output: Callable[[], np.ndarray]  # what the last call computed, [QUERY_HEADS, DIM]
    bytes: int  # of keys and values
    stored: tuple[np.ndarray, np.ndarray] | None = None  # what they stand for, if not what was given


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """f32 values that the dtype holds exactly."""
    if dtype == "f16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        return (bf16(x).astype(np.uint32) << 16).view(np.float32)
    return x


def bf16(x: np.ndarray) -> np.ndarray:
    """Bits, rounded to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def oracle(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Softmax attention in float64 of the query heads in CHECKED: q [QUERY_HEADS, DIM], k and v [tokens, KV_HEADS, DIM]."""
    out = []
    for head in (0, KV_HEADS - 1):
        rows = slice(head * GROUP, (head + 1) * GROUP)
        logits = q[rows].astype(np.float64) @ k[:, head].astype(np.float64).T * SCALE
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        out.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, head].astype(np.float64))
    return np.concatenate(out)


def serve(version: str, build: Callable[[str, np.ndarray, np.ndarray, np.ndarray], Built]) -> None:
    """Answers requests until the input ends. `build` gets the dtype, q [QUERY_HEADS, DIM], and k and v [tokens, KV_HEADS, DIM]."""
    built: dict[tuple[str, str], Built] = {}

    def prepare(dtype, context):
        built[dtype, context], error = setup(dtype, int(context), build)
        return f"ok {built[dtype, context].bytes} {error:e}"

    answer(version, {"setup": prepare, "sample": lambda dtype, context, threads: f"{sample(built[dtype, context], int(threads)):e}"})


def setup(dtype: str, context: int, build) -> tuple[Built, float]:
    rng = np.random.default_rng(1)
    # A prime number of values over and over: no two heads or tokens are alike.
    noise = [rounded(rng.standard_normal(1_000_003, np.float32), dtype) for _ in range(2)]
    k, v = (np.resize(x, (context, KV_HEADS, DIM)) for x in noise)
    q = rounded(2 * rng.standard_normal((QUERY_HEADS, DIM), np.float32), dtype)
    built = build(dtype, q, k, v)
    expected = oracle(q, *(built.stored or (k, v)))
    built.stored = None
    worst = 0.0
    for threads in (1, 2):
        built.call(threads)
        worst = max(worst, np.abs(built.output()[CHECKED] - expected).max() / np.abs(expected).max())
        if not worst <= TOLERANCE[dtype]:
            raise ValueError(f"{dtype}, {context} tokens, {threads} threads: off by {worst:.1e} of the largest output")
    return built, worst


def sample(built: Built, threads: int) -> float:
    """Seconds a call. The second half counts: the first warms up."""
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - start < SAMPLE_SECONDS:
        built.call(threads)
        calls += 1
    start = time.perf_counter()
    for _ in range(calls):
        built.call(threads)
    return (time.perf_counter() - start) / calls
