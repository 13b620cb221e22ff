"""Registration in every order that users came up with: it works or raises one plain error, and never hangs.

Each case is a process of its own with a time limit: registration is global to a process, and its known
failures are an endless loop and a crash.
"""

from __future__ import annotations

import pytest
from plugin_sessions import run_script

PRELUDE = """
import numpy as np
import onnx, onnx.helper, onnxruntime
from operator_models import make_model, run_session
from oracle import assert_matches, make_inputs
import ort_ops

inputs = make_inputs((4, 6))
model = make_model(inputs).SerializeToString()

def session(options, model=model):
    return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])

def check(options):
    assert_matches(inputs, **run_session(session(options), inputs.arrays()))

def new_options():
    options = onnxruntime.SessionOptions()
    ort_ops.register(options)
    return options

def upper_case_model():
    '''A model of one of onnxruntime-extensions' own operators.'''
    text = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.STRING, [1]) for name in ("a", "b")]
    node = onnx.helper.make_node("StringUpper", ["a"], ["b"], domain="ai.onnx.contrib")
    graph = onnx.helper.make_graph([node], "upper", text[:1], text[1:])
    imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("ai.onnx.contrib", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()
"""

WORKING = {
    "once": "check(new_options())",
    "twice on the same options": """
options = new_options()
ort_ops.register(options)
check(options)
ort_ops.register(options)
check(options)
""",
    "many options, sessions outliving them": """
sessions = [session(new_options()) for _ in range(40)]
for each in sessions:
    assert_matches(inputs, **run_session(each, inputs.arrays()))
""",
    "many sessions of the same options": """
options = new_options()
sessions = [session(options) for _ in range(20)]
del options
for each in sessions[::-1]:
    assert_matches(inputs, **run_session(each, inputs.arrays()))
""",
    "first use in many threads at once": """
import threading
barrier = threading.Barrier(8)
failures = []
shared = onnxruntime.SessionOptions()
def work():
    try:
        barrier.wait()
        for _ in range(5):
            ort_ops.register(shared)
            check(new_options())
        check(shared)
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failures, failures
""",
    "the extensions' own operators run in the same session options": """
options = new_options()
check(options)
upper = session(options, upper_case_model())
assert upper.run(None, {"a": np.array(["abc"])})[0].tolist() == ["ABC"]
""",
    "extensions registered by the user after ort_ops was used": """
import onnxruntime_extensions
new_options()
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
check(options)
ort_ops.register(options)
check(options)
""",
    "new options after options that the user had registered too early": """
import onnxruntime_extensions
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
assert session(options, upper_case_model()).run(None, {"a": np.array(["abc"])})[0].tolist() == ["ABC"]
try:
    ort_ops.register(options)
except RuntimeError as error:
    assert "make new SessionOptions" in str(error)
check(new_options())
""",
    "a Python operator of another name": """
from onnxruntime_extensions import PyCustomOpDef, onnx_op

@onnx_op(op_type="PlusOne", inputs=[PyCustomOpDef.dt_float], outputs=[PyCustomOpDef.dt_float])
def plus_one(x):
    return x + 1

values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in ("x", "y")]
node = onnx.helper.make_node("PlusOne", ["x"], ["y"], domain="ai.onnx.contrib")
graph = onnx.helper.make_graph([node], "plus_one", values[:1], values[1:])
imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("ai.onnx.contrib", 1)]
other = onnx.helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()
options = new_options()
check(options)
assert session(options, other).run(None, {"x": np.array([1, 2], np.float32)})[0].tolist() == [2, 3]
""",
    "the library by itself, as from C, C++, C# or Java": """
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(ort_ops.library_path())
check(options)
again = onnxruntime.SessionOptions()
again.register_custom_ops_library(ort_ops.library_path())
check(again)
assert "onnxruntime_extensions" not in sys.modules
""",
    "the library by itself on options that are gone before ort_ops is used": """
import gc
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(ort_ops.library_path())
check(options)
del options
gc.collect()
check(new_options())
""",
    "options with profiling and a path for the optimised model are left as they were": """
import os, tempfile
folder = tempfile.mkdtemp()
os.chdir(folder)
options = onnxruntime.SessionOptions()
options.enable_profiling = True
options.profile_file_prefix = os.path.join(folder, "profile")
options.optimized_model_filepath = os.path.join(folder, "optimized.onnx")
options.log_severity_level = 3
ort_ops.register(options)
assert os.listdir(folder) == [], os.listdir(folder)
assert options.enable_profiling and options.optimized_model_filepath.endswith("optimized.onnx")
assert options.log_severity_level == 3
check(options)
""",
}

REFUSED = {
    "a Python operator of the same name": (
        """
from onnxruntime_extensions import PyCustomOpDef, onnx_op

@onnx_op(op_type="AddLayerNormGrad", inputs=[PyCustomOpDef.dt_float], outputs=[PyCustomOpDef.dt_float])
def mine(x):
    return x

new_options()
""",
        "RuntimeError: a Python operator named AddLayerNormGrad was declared",
    ),
    "a Python operator of the same name, declared after the first use": (
        """
from onnxruntime_extensions import PyCustomOpDef, onnx_op
check(new_options())

@onnx_op(op_type="AddLayerNormGrad", inputs=[PyCustomOpDef.dt_float], outputs=[PyCustomOpDef.dt_float])
def mine(x):
    return x

new_options()
""",
        "RuntimeError: a Python operator named AddLayerNormGrad was declared",
    ),
    "extensions registered by the user before ort_ops was used, on the same options": (
        """
import onnxruntime_extensions
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
ort_ops.register(options)
""",
        "RuntimeError: these SessionOptions already hold operators of the domain ai.onnx.contrib",
    ),
    "onnxruntime-extensions not installed": (
        """
sys.modules["onnxruntime_extensions"] = None
new_options()
""",
        "ImportError: ort_ops registers its operators through onnxruntime-extensions",
    ),
}


def run(script: str):
    return run_script(PRELUDE + script + "\nprint('reached the end')\n", timeout_seconds=60)


@pytest.mark.parametrize("script", WORKING.values(), ids=WORKING.keys())
def test_works(script):
    done = run(script)
    assert (done.returncode, done.stdout) == (0, "reached the end\n"), done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("script, message", REFUSED.values(), ids=REFUSED.keys())
def test_is_refused_with_one_plain_error(script, message):
    done = run(script)
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert done.stderr.splitlines()[-1].startswith(message)


def test_extensions_registered_once_more_on_the_same_options_ends_one_way_or_the_other():
    """Two domains of one name in one session are the runtime's to refuse."""
    done = run("""
import onnxruntime_extensions
options = new_options()
try:
    options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    check(options)
except Exception as error:
    print("refused:", type(error).__name__)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("reached the end\n")
