"""Operators that models in use are made of: each has a rule, a zero gradient, no gradient by definition, or a
definition by operators that have one."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from ort_ops.gradient import all_rules
from ort_ops.gradient.documentation import definitions_version, operator_table

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"

STANDARD = """
    Abs Acos Acosh Add Asin Asinh Atan Atanh Attention AveragePool BatchNormalization Cast CastLike
    Ceil Celu Clip Concat Conv ConvTranspose Cos Cosh CumSum DepthToSpace Det Div Dropout Einsum Elu
    Erf Exp Expand Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool
    GlobalMaxPool GridSample GroupNormalization HardSigmoid HardSwish Hardmax Identity
    InstanceNormalization LRN LSTM LayerNormalization LeakyRelu Log LogSoftmax LpNormalization
    LpPool MatMul Max MaxPool Mean MeanVarianceNormalization Min Mish Mod Mul Neg
    NegativeLogLikelihoodLoss PRelu Pad Pow RMSNormalization RNN Reciprocal ReduceL1 ReduceL2
    ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
    Relu Reshape Resize ReverseSequence Round Scan ScatterElements ScatterND Selu Sigmoid Sign
    SimplifiedLayerNormalization Sin Sinh Slice Softmax SoftmaxCrossEntropyLoss Softplus Softsign
    SpaceToDepth Split Sqrt Squeeze Sub Sum Swish Tan Tanh ThresholdedRelu Tile TopK Transpose Trilu
    Unsqueeze Where
""".split()
RUNTIME = """
    BiasGelu FastGelu FusedGemm FusedMatMul Gelu QuickGelu SkipLayerNormalization
    SkipSimplifiedLayerNormalization
""".split()

WITHOUT_RULE = {
    "If": "the branch that is taken is known at run time only; one with a constant condition is folded",
    "Loop": "control flow, refused by name",
    "MaxRoiPool": "no rule yet",
    "ConcatFromSequence": "sequences",
    "Optional": "sequences",
    "SequenceAt": "sequences",
    "SequenceConstruct": "sequences",
    "SequenceEmpty": "sequences",
    "SequenceErase": "sequences",
    "SequenceInsert": "sequences",
    "SplitToSequence": "sequences",
}
"""The rest of the default domain, and why."""


def known(domain: str) -> set[str]:
    """Operators with a rule, a zero or an entry as not differentiable, or defined by a function."""
    schemas = [schema for schema in onnx.defs.get_all_schemas() if schema.domain == domain]
    defined = {s.name for s in schemas if s.has_function or s.has_context_dependent_function}
    return defined | {rule.op_type for rule in all_rules() if rule.domain == domain}


@pytest.mark.parametrize(
    ("domain", "operators"), [("", STANDARD), ("com.microsoft", RUNTIME)], ids=["standard", "runtime"]
)
def test_what_models_are_made_of(domain: str, operators: list[str]) -> None:
    assert sorted(set(operators) - known(domain)) == []


def test_the_rest_of_the_default_domain_is_known() -> None:
    schemas = [s for s in onnx.defs.get_all_schemas() if s.domain == "" and not s.deprecated]
    assert {schema.name for schema in schemas} - known("") <= set(WITHOUT_RULE)
    assert not known("") & set(WITHOUT_RULE)


def test_the_page_of_operators_is_up_to_date() -> None:
    page = PAGE.read_text()
    if definitions_version() not in page:
        pytest.skip(
            f"the page was made with another onnx than {onnx.__version__}, which defines other operators"
        )
    command = "python -m ort_ops.gradient.documentation > docs/operators.md"
    assert page == operator_table(), f"docs/operators.md is out of date; write it anew: {command}"
