"""EmbeddingGrad: the gradient of a table whose rows were looked up by Gather along axis 0."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto
from onnx.reference.op_run import OpRun

from ort_ops.operators.inference import Inference, agree, text
from ort_ops.operators.operator import DOMAIN, AttributeValue, Operator, Slot


def _body(_present: frozenset[str], _attributes: Mapping[str, AttributeValue]) -> str:
    """ScatterElements, never ScatterND: ONNX Runtime's CPU provider runs the latter's additions on several
    threads without protecting the sums, so that repeated indices lose terms."""
    return """
        zero = Constant <value_float = 0.0> ()
        one = Constant <value_ints = [1]> ()
        table_shape = Shape (table)
        zeros = Expand (zero, table_shape)
        long_indices = Cast <to = 7> (indices)
        index_count = Size (long_indices)
        count = Reshape (index_count, one)
        row_shape = Shape <start = 1> (table)
        row_rank = Shape (row_shape)
        row_of_ones = Expand (one, row_rank)
        updates_shape = Concat <axis = 0> (count, row_shape)
        updates = Reshape <allowzero = 1> (dy, updates_shape)
        column_shape = Concat <axis = 0> (count, row_of_ones)
        column = Reshape <allowzero = 1> (long_indices, column_shape)
        places = Expand (column, updates_shape)
        dtable = ScatterElements <axis = 0, reduction = "add"> (zeros, places, updates)
    """


def _infer(node: Inference) -> None:
    """dtable is as table; dy has the shape of indices followed by that of a row."""
    node.check_rank("table")
    dy, indices, table = (node.shapes.get(name) for name in ("dy", "indices", "table"))
    if dy is not None and indices is not None and table is not None:
        expected = [*indices, *table[1:]]
        if not agree(dy, expected):
            node.fail(f"dy must be {text(expected)}, the shape of indices and that of a row", text(dy))
    node.set_output(0, TensorProto.FLOAT, table)


class EmbeddingGrad(OpRun):
    """The operator for `onnx.reference`: sums in float64, rounded once."""

    op_domain = DOMAIN

    def _run(self, dy: np.ndarray, indices: np.ndarray, table: np.ndarray) -> tuple[np.ndarray]:
        dtable = np.zeros(table.shape, np.float64)
        np.add.at(dtable, indices, dy)
        return (dtable.astype(np.float32),)


EMBEDDING_GRAD = Operator(
    name="EmbeddingGrad",
    doc=(
        "Gradient of table for y = Gather(table, indices), axis 0: dtable[r] is the sum of dy[i] over all i "
        "with indices[i] = r, in the order of i; zeros where there is none. Of table, only the shape is read."
    ),
    inputs=(
        Slot("dy", "tensor(float)", "[*indices, *row]: gradient of the rows that were looked up"),
        Slot("indices", "I", "which row each is; of any shape; negative ones count from the table's end"),
        Slot("table", "tensor(float)", "[rows, *row]"),
    ),
    outputs=(Slot("dtable", "tensor(float)", "as table: its gradient"),),
    type_constraints=(("I", ("tensor(int32)", "tensor(int64)"), "Type of the indices."),),
    body=_body,
    infer=_infer,
    reference=EmbeddingGrad,
    min_opset=16,  # ScatterElements' reduction
)
