"""Runs every case of a folder in the ONNX Runtime of this interpreter. Started by test_old_runtime.py.

A case is NAME.onnx with NAME.inputs.npz. With the plugin registered the outputs go to NAME.plugin.npz;
where NAME.body exists, they are computed once more without the plugin, into NAME.body.npz. Prints the
runtime's version.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

import ort_ops


def run(model: Path, options: onnxruntime.SessionOptions) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(str(model), options, ["CPUExecutionProvider"])
    feeds = dict(np.load(model.with_suffix(".inputs.npz")))
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def main(folder: Path) -> None:
    for model in sorted(folder.glob("*.onnx")):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        ort_ops.register(options)
        ort_ops.register(options)
        np.savez(model.with_suffix(".plugin.npz"), **run(model, options))
        if model.with_suffix(".body").exists():
            np.savez(model.with_suffix(".body.npz"), **run(model, onnxruntime.SessionOptions()))
    print(onnxruntime.__version__)


main(Path(sys.argv[1]))
