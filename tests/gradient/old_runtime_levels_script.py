"""Runs every gradient model of a folder at every optimisation level in the ONNX Runtime of this interpreter.

Started by test_old_runtime_levels.py. A case is NAME.onnx with NAME.inputs.npz; the outputs at LEVEL go to
NAME.LEVEL.npz.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

import ort_ops

LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"]


def main(folder: Path) -> None:
    for model in sorted(folder.glob("*.onnx")):
        feeds = dict(np.load(model.with_suffix(".inputs.npz")))
        for level in LEVELS:
            options = onnxruntime.SessionOptions()
            options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
            ort_ops.register(options)
            session = onnxruntime.InferenceSession(str(model), options, ["CPUExecutionProvider"])
            names = [output.name for output in session.get_outputs()]
            np.savez(
                model.with_suffix(f".{level}.npz"), **dict(zip(names, session.run(names, feeds), strict=True))
            )
    print(onnxruntime.__version__)


main(Path(sys.argv[1]))
