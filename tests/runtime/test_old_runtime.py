"""The same plugin file and the same models in an old ONNX Runtime, in an interpreter of its own.

old_runtime.py says what that interpreter needs.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import pytest
from old_runtime import needs_old_runtime, run_in_old_runtime
from operator_models import make_model
from oracle import BFLOAT16, DTYPES, FLOAT, FLOAT16, Inputs, assert_matches, make_inputs
from plugin_sessions import run_kernel

from ort_ops.operators import embed_functions

SCRIPT = Path(__file__).with_name("old_runtime_script.py")

pytestmark = needs_old_runtime

GAMMA_TYPES = {FLOAT: [FLOAT], FLOAT16: [FLOAT16, FLOAT], BFLOAT16: [BFLOAT16, FLOAT]}


def all_cases() -> dict[str, tuple[Inputs, onnx.ModelProto]]:
    cases = {}
    for dtype in DTYPES:
        for gamma_dtype, x2, dsum in itertools.product(GAMMA_TYPES[dtype], [True, False], [True, False]):
            inputs = make_inputs((40, 3, 131), dtype, gamma_dtype=gamma_dtype, x2=x2, dsum=dsum)
            name = f"{dtype}_gamma_{gamma_dtype}_x2_{x2}_dsum_{dsum}"
            cases[name] = inputs, make_model(inputs, symbolic=True)
        inputs = make_inputs((4, 8, 16), dtype, axes=2)
        cases[f"{dtype}_two_axes"] = inputs, make_model(inputs)
        cases[f"{dtype}_only_dbeta"] = inputs, make_model(inputs, ("", "", "dbeta"))
        for opset in (15, 17, 18, 21):
            cases[f"{dtype}_opset_{opset}"] = inputs, embed_functions(make_model(inputs, opset=opset))
        without = inputs.replace(x2=None, dsum=None)
        cases[f"{dtype}_overload"] = without, embed_functions(make_model(without))
    return cases


@pytest.fixture(scope="module")
def cases():
    return all_cases()


@pytest.fixture(scope="module")
def folder(cases, tmp_path_factory) -> Path:
    """The cases, and beside them what the old runtime made of them."""
    folder = tmp_path_factory.mktemp("old_runtime")
    for name, (inputs, model) in cases.items():
        onnx.save(_with_float_in_place_of_bfloat16(model), folder / f"{name}.onnx")
        arrays = {
            key: array.astype(FLOAT) if array.dtype == BFLOAT16 else array
            for key, array in inputs.arrays().items()
        }
        np.savez(folder / f"{name}.inputs.npz", **arrays)
        # This runtime ignores overloads when it inlines bodies: without the plugin only complete nodes run.
        if model.functions and not model.functions[0].overload:
            (folder / f"{name}.body").touch()
    printed = run_in_old_runtime(SCRIPT, folder)
    (folder / "version").write_text(printed.strip())
    return folder


def _with_float_in_place_of_bfloat16(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with Cast nodes at its borders: the runtime's old Python interface takes no bfloat16."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    casts_in, casts_out = [], []
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type != onnx.TensorProto.BFLOAT16:
            continue
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        inner = f"{value.name}_bfloat16"
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [inner if name == value.name else name for name in names]
        if value in graph.input:
            casts_in.append(
                onnx.helper.make_node("Cast", [value.name], [inner], to=onnx.TensorProto.BFLOAT16)
            )
        else:
            casts_out.append(onnx.helper.make_node("Cast", [inner], [value.name], to=onnx.TensorProto.FLOAT))
    nodes = [*casts_in, *graph.node, *casts_out]
    del graph.node[:]
    graph.node.extend(nodes)
    return result


def _results(folder: Path, name: str, kind: str, inputs: Inputs) -> dict[str, np.ndarray]:
    results = dict(np.load(folder / f"{name}.{kind}.npz"))
    if "dx" in results:
        results["dx"] = results["dx"].astype(inputs.dy.dtype)
    return results


def test_the_runtime_is_older_than_the_one_of_the_other_tests(folder):
    version = tuple(int(part) for part in (folder / "version").read_text().split(".")[:2])
    assert (1, 18) <= version < (1, 22)


def test_kernel_gives_the_same_bits_as_in_the_newest_runtime(folder, cases):
    for name, (inputs, model) in cases.items():
        results = _results(folder, name, "plugin", inputs)
        assert_matches(inputs, **results)
        outputs = tuple(model.graph.node[0].output)
        for output, array in run_kernel(inputs, outputs).items():
            np.testing.assert_array_equal(results[output], array, err_msg=f"{name}: {output}")


def test_body_gives_the_right_numbers_without_the_plugin(folder, cases):
    names = [path.stem for path in folder.glob("*.body")]
    assert len(names) == 4 * len(DTYPES)
    for name in names:
        inputs, _ = cases[name]
        assert_matches(inputs, **_results(folder, name, "body", inputs))


def test_models_stay_within_what_the_runtime_reads(cases):
    """It reads IR version 10 and opset 21; embedding raises the one only for an overload, the other never."""
    for name, (_, model) in cases.items():
        assert model.ir_version == (10 if name.endswith("overload") else 9)
        assert sorted(entry.domain for entry in model.opset_import) == ["", "ai.onnx.contrib"]
