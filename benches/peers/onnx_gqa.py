"""onnxruntime's GroupQueryAttention on the CPU. The last token is appended by the operator itself, in place."""

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from common import DIM, KV_HEADS, QUERY_HEADS, SCALE, Built, Missing, serve

TYPES = {"f32": (TensorProto.FLOAT, np.float32), "f16": (TensorProto.FLOAT16, np.float16)}


def model(kind: int, context: int) -> bytes:
    value = lambda name, shape, kind=kind: helper.make_tensor_value_info(name, kind, shape)
    row, past = [1, 1, KV_HEADS * DIM], [1, KV_HEADS, context, DIM]
    inputs = [value("q", [1, 1, QUERY_HEADS * DIM]), value("k", row), value("v", row), value("past_k", past)]
    inputs += [value("past_v", past), value("seen", [1], TensorProto.INT32), value("total", [], TensorProto.INT32)]
    outputs = [value("out", [1, 1, QUERY_HEADS * DIM]), value("present_k", past), value("present_v", past)]
    node = helper.make_node(
        "GroupQueryAttention",
        [i.name for i in inputs],
        [o.name for o in outputs],
        domain="com.microsoft",
        num_heads=QUERY_HEADS,
        kv_num_heads=KV_HEADS,
        scale=SCALE,
    )
    graph = helper.make_graph([node], "attention", inputs, outputs)
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=sets, ir_version=9).SerializeToString()


def build(dtype, q, k, v) -> Built:
    if dtype not in TYPES:
        raise Missing("the operator takes f32 and f16")
    kind, stored = TYPES[dtype]
    context = len(k)
    value = lambda x: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x))
    past = [value(x.astype(stored).transpose(1, 0, 2)[None]) for x in (k, v)]
    rows = [value(x.astype(stored).reshape(1, 1, -1)) for x in (q, k[-1], v[-1])]
    out = value(np.zeros((1, 1, QUERY_HEADS * DIM), stored))
    lengths = [value(np.array([context - 1], np.int32)), value(np.array(context, np.int32))]
    bound = {}
    for threads in (1, 2):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        # A pool that spins would take the cores of the peer whose turn is next.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = ort.InferenceSession(model(kind, context), options, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        for name, x in zip(["q", "k", "v", "past_k", "past_v", "seen", "total"], rows + past + lengths):
            binding.bind_ortvalue_input(name, x)
        for name, x in zip(["out", "present_k", "present_v"], [out] + past):
            binding.bind_ortvalue_output(name, x)
        bound[threads] = (session, binding)

    def call(threads):
        session, binding = bound[threads]
        session.run_with_iobinding(binding)

    output = lambda: out.numpy().reshape(QUERY_HEADS, DIM).astype(np.float32)
    return Built(call, output, 2 * k.size * np.dtype(stored).itemsize)


serve(ort.__version__, build)
