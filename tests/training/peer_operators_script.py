"""Runs every model of a folder in onnxruntime-training. Started by test_peer_operators.py.

A case is NAME.onnx with NAME.inputs.npz; the outputs go to NAME.outputs.npz, or what went wrong to
NAME.error.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

for path in Path(sys.argv[1]).glob("*.onnx"):
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        feeds = dict(np.load(path.with_suffix(".inputs.npz")))
        results = session.run(names, feeds)
        np.savez(path.with_suffix(".outputs.npz"), **dict(zip(names, results, strict=True)))
    except Exception as error:
        path.with_suffix(".error").write_text(str(error))
