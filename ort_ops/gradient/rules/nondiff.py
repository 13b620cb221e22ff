"""Operators that no gradient flows through, by definition: their results are counts, indices, truth values or
noise, or a value that the model's author wants to count as a constant."""

from __future__ import annotations

from ort_ops.gradient.registry import non_differentiable
from ort_ops.gradient.stop_gradient import DOMAIN, STOP_GRADIENT

non_differentiable("Shape", "Size", "NonZero", "ArgMax", "ArgMin", "NonMaxSuppression", "SequenceLength")
non_differentiable("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsNaN", "IsInf")
non_differentiable(
    "And", "Or", "Xor", "Not", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "BitCast"
)
non_differentiable("Constant", "ConstantOfShape", "EyeLike")
non_differentiable(
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"
)
non_differentiable("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix")
non_differentiable("OptionalHasElement", "StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch")
non_differentiable("TfIdfVectorizer", "ImageDecoder")
non_differentiable(STOP_GRADIENT, domain=DOMAIN)
non_differentiable("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul")
