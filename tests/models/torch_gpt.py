"""The model of models/gpt.py written a second time with PyTorch, as the reference for its values and
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import gpt
import torch
import torch.nn.functional as F


def logits(
    config: gpt.GptConfig, parameters: Mapping[str, torch.Tensor], tokens: torch.Tensor
) -> torch.Tensor:
    """Logits [batch, length, vocabulary] of `tokens` [batch, length]."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ parameters[f"{name}.weight"] + parameters[f"{name}.bias"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(
            x, (config.width,), parameters[f"{name}.weight"], parameters[f"{name}.bias"], eps=1e-5
        )

    def attention(name: str, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, config.heads, -1).transpose(1, 2)
            for part in linear(f"{name}.query_key_value", x).split(width, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return linear(f"{name}.projection", attended.transpose(1, 2).reshape(batch, length, width))

    def mlp(name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(f"{name}.projection", F.gelu(linear(f"{name}.expansion", x), approximate="tanh"))

    x = (
        F.embedding(tokens, parameters["token_embedding"])
        + parameters["position_embedding"][: tokens.shape[1]]
    )
    for layer in range(config.layers):
        x = x + attention(f"blocks.{layer}.attention", norm(f"blocks.{layer}.attention_norm", x))
        x = x + mlp(f"blocks.{layer}.mlp", norm(f"blocks.{layer}.mlp_norm", x))
    return linear("head", norm("final_norm", x))


def loss(
    config: gpt.GptConfig, parameters: Mapping[str, torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    return F.cross_entropy(logits(config, parameters, tokens).flatten(0, 1), targets.flatten())
