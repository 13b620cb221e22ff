"""Memory: buffers that are taken over, and tensors with more elements than 32 bits can count.

Each case is a process of its own, whose largest memory use tells what was allocated.
"""

from __future__ import annotations

import json
import os
import sys

import pytest
from plugin_sessions import memory_bytes, run_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory use is read from Linux's /proc")

MEBIBYTE = 1 << 20
GIBIBYTE = 1 << 30

IN_PLACE = """
import json, sys
import numpy as np, onnx.parser, onnxruntime
import ort_ops
from plugin_sessions import memory_bytes

ROWS, COLS = 8192, 4096  # 128 MiB of float
name, reader = sys.argv[1:]
made = {"dy": "x", "dsum": "x", name: "made"}
model = onnx.parser.parse_model(f'''
<ir_version: 8, opset_import: ["": 17, "ai.onnx.contrib": 1]>
in_place (
    float[{ROWS}, {COLS}] x, float[{ROWS}, 1] statistic, float[{COLS}] gamma, int64[1] first, int64[1] last
) => (float[n, {COLS}] part, float[m, {COLS}] other)
{{
    made = Neg (x)
    dx = ai.onnx.contrib.AddLayerNormGrad ({made["dy"]}, x, , statistic, statistic, gamma, {made["dsum"]})
    part = Slice (dx, first, last)
    last_again = Shape <end = 1> (part)
    other = Slice ({reader}, first, last_again)
}}
''')
options = onnxruntime.SessionOptions()
options.enable_cpu_mem_arena = False
options.intra_op_num_threads = 1  # a thread's first allocation reserves address space for more
ort_ops.register(options)
session = onnxruntime.InferenceSession(model.SerializeToString(), options)
feeds = {
    "x": np.ones((ROWS, COLS), np.float32),
    "statistic": np.ones((ROWS, 1), np.float32),
    "gamma": np.ones(COLS, np.float32),
    "first": np.array([0]),
    "last": np.array([3]),
}
# Address space, which is counted exactly: resident pages are counted in batches, and come and go.
before = memory_bytes("VmSize")
part, _ = session.run(None, feeds)
after = memory_bytes("VmPeak")
# x = 1 and mean = 1, so xhat is 0 and the norm's part is g - mean(g) = 0: only dsum is left.
expected = {"dy": 1.0, "dsum": -1.0}[name]
np.testing.assert_array_equal(part, np.full((3, COLS), expected, np.float32))
print(json.dumps(after - before))
"""


@pytest.mark.parametrize("name", ["dy", "dsum"])
def test_dx_takes_over_the_buffer_of_a_gradient_that_nobody_reads_later(name):
    tensor_bytes = 128 * MEBIBYTE
    taken_over, kept = (json.loads(finished(run_script(IN_PLACE, name, reader))) for reader in ("x", "made"))
    # 10 % for whatever else a run allocates.
    assert taken_over < 1.1 * tensor_bytes
    assert 2 * tensor_bytes < kept < 2.2 * tensor_bytes


def finished(done) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


HUGE = """
import json, sys
import numpy as np, onnx, onnx.helper, onnxruntime
from operator_models import to_ort_value
from oracle import FLOAT, FLOAT16, Inputs, assert_matches, make_inputs
from plugin_sessions import memory_bytes, plugin_session

ROWS, COLS, DISTINCT = int(sys.argv[1]), 4096, 1021
few = make_inputs((DISTINCT, COLS), FLOAT16, x2=False, dsum=False)
few = few.replace(x1=few.dy)  # one tensor in two roles, for memory's sake
which = np.arange(ROWS) % DISTINCT
watched = np.unique([0, 1, 2**19 - 1, min(2**19, ROWS - 1), *range(ROWS - 3, ROWS)])

t = onnx.TensorProto
value = onnx.helper.make_tensor_value_info
node = onnx.helper.make_node
graph = onnx.helper.make_graph(
    [
        node("AddLayerNormGrad", ["dy", "dy", "", "rstd", "mean", "gamma"], ["dx", "dgamma", "dbeta"],
             domain="ai.onnx.contrib"),
        node("Gather", ["dx", "watched"], ["some_dx"]),
    ],
    "huge",
    [value("dy", t.FLOAT16, ["n", COLS]), value("rstd", t.FLOAT, ["n"]), value("mean", t.FLOAT, ["n"]),
     value("gamma", t.FLOAT16, [COLS]), value("watched", t.INT64, ["k"])],
    [value("some_dx", t.FLOAT16, ["k", COLS]), value("dgamma", t.FLOAT, [COLS]),
     value("dbeta", t.FLOAT, [COLS])],
)
imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("ai.onnx.contrib", 1)]
session = plugin_session(onnx.helper.make_model(graph, opset_imports=imports, ir_version=8), threads=2)

dy = np.empty((ROWS, COLS), np.float16)
for start in range(0, ROWS, DISTINCT):
    dy[start : start + DISTINCT] = few.dy[: min(DISTINCT, ROWS - start)]
feeds = {
    "dy": dy,
    "rstd": few.rstd[which, 0],
    "mean": few.mean[which, 0],
    "gamma": few.gamma,
    "watched": watched,
}
names = ["some_dx", "dgamma", "dbeta"]
results = session.run_with_ort_values(names, {name: to_ort_value(array) for name, array in feeds.items()})
some_dx, dgamma, dbeta = (result.numpy() for result in results)

rows = which[watched]
assert_matches(
    few.replace(dy=few.dy[rows], x1=few.x1[rows], rstd=few.rstd[rows], mean=few.mean[rows]), dx=some_dx
)
# The parameters' gradients are sums in which each distinct row occurs that often; float64 is nearly exact.
often = np.bincount(which, minlength=DISTINCT).astype(np.float64)
few_dy = few.dy.astype(np.float64)
terms = {"dbeta": few_dy, "dgamma": few_dy * (few_dy - few.mean) * few.rstd}
worst = {}
for name, actual in (("dbeta", dbeta), ("dgamma", dgamma)):
    bound = (np.sqrt(ROWS) + 4) * 2.0**-24 * (often @ np.abs(terms[name]))
    worst[name] = float((np.abs(actual - often @ terms[name]) / bound).max())
print(json.dumps([worst, memory_bytes("VmHWM")]))
"""


@pytest.mark.parametrize(
    "rows, needed_bytes",
    [
        pytest.param(2**19 + 1, 10 * GIBIBYTE, id="more than 2^31 elements"),
        pytest.param(
            2**20 + 1,
            19 * GIBIBYTE,
            id="more than 2^32 elements",
            marks=pytest.mark.skipif(
                os.environ.get("ORT_OPS_TEST_HUGE") != "1",
                reason="set ORT_OPS_TEST_HUGE=1 on a machine with 19 GiB of free memory",
            ),
        ),
    ],
)
def test_more_elements_than_32_bits_count(rows, needed_bytes):
    if memory_bytes("MemAvailable", "/proc/meminfo") < needed_bytes:
        pytest.skip(f"needs {needed_bytes // GIBIBYTE} GiB of free memory")
    worst, used_bytes = json.loads(finished(run_script(HUGE, str(rows), timeout_seconds=600)))
    assert worst["dbeta"] <= 1 and worst["dgamma"] <= 1
    assert used_bytes < needed_bytes
