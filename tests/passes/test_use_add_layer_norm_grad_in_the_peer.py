"""Training graphs that onnxruntime-training built, rewritten to AddLayerNormGrad, run in that runtime: the
same losses and parameters.

What depends on dx and must not be folded in differs between the architectures, see the table.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from old_runtime import needs_old_runtime, run_in_old_runtime
from peer_artifacts import COMPARED, LEARNING_RATE, TRAINED, peer_artifacts

from ort_ops.passes import use_add_layer_norm_grad

SCRIPT = Path(__file__).with_name("peer_rewritten_script.py")

pytestmark = needs_old_runtime

NORMS = {
    "dropout_post": (4, 0, 0),
    "dropout_pre": (5, 4, 0),
    "frozen": (5, 4, 0),
    "kept_addends": (1, 0, 1),
    "parallel": (3, 2, 0),
    "post_norm": (4, 0, 0),
    "pre_norm": (5, 4, 0),
    "shared_norm": (5, 4, 0),
    "two_norms": (5, 4, 0),
}
"""Norms of each model, how many take in the Sum after them, and how many the Add before them.

The last norm of a pre-norm model and all of a post-norm model have a Sum only with gradients that depend on
theirs.
"""


TOLERANCE = COMPARED * LEARNING_RATE * 5e-4
"""Adam moves a parameter by up to the learning rate a step, also where the gradient is nothing but rounding
(key biases of an attention: about 1e-9, a thousandth of epsilon, of which some tenths differ)."""


@pytest.mark.parametrize("name", NORMS)
def test_what_is_fused(name: str) -> None:
    model = onnx.load(peer_artifacts(name) / "training_model.onnx")
    rewritten, report = use_add_layer_norm_grad(model)
    sums = [entry.sum for entry in report.fused if entry.sum]
    adds = [entry.add for entry in report.fused if entry.add]
    assert (len(report.fused), len(sums), len(adds), len(report.left)) == (*NORMS[name], 0)
    for entry in report.fused:
        assert entry.sum or "a cycle" in entry.why_no_sum or name == "kept_addends"
    before, after = (Counter(node.op_type for node in graph.graph.node) for graph in (model, rewritten))
    removed, added = before - after, after - before
    assert removed["LayerNormalizationGrad"] == added["AddLayerNormGrad"] == NORMS[name][0]
    assert removed["Sum"] - added["Sum"] == len(set(sums)) - len(adds)
    assert set(removed) <= {"LayerNormalizationGrad", "Sum", "Identity", "Add"}
    assert set(added) <= {"AddLayerNormGrad", "Sum"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each model, what the peer made of the rewritten graph in `COMPARED` steps."""
    root = tmp_path_factory.mktemp("rewritten")
    for name in [name for name in NORMS if name in TRAINED]:
        source, folder = peer_artifacts(name), root / name
        folder.mkdir()
        for file in ("optimizer_model.onnx", "checkpoint", "data.npz"):
            shutil.copy(source / file, folder)
        model, _ = use_add_layer_norm_grad(onnx.load(source / "training_model.onnx"))
        onnx.save(model, folder / "training_model.onnx")
    run_in_old_runtime(SCRIPT, root)
    return root


@pytest.mark.parametrize("name", [name for name in NORMS if name in TRAINED])
def test_same_losses_and_parameters_in_the_peer(trained: Path, name: str) -> None:
    got, expected = np.load(trained / name / "trained.npz"), np.load(peer_artifacts(name) / "trained.npz")
    np.testing.assert_allclose(got["losses"], expected["losses"][:COMPARED], rtol=1e-5)
    for parameter in got.files:
        if parameter != "losses":
            difference = np.abs(got[parameter] - expected[f"compared/{parameter}"]).max()
            assert difference <= TOLERANCE, f"{parameter}: {difference}"
