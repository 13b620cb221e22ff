"""Small `transformers` models with random weights, as people train them: the module, batches, and the axes
that change from batch to batch. Dropout is off, so that a step is a function of its batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers
from torch import nn

VOCABULARY = 40
CLASSES = 3

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """`batch(seed)` gives the keyword arguments of a call that returns the loss."""

    module: nn.Module
    batch: Callable[[int], Batch]
    dynamic_shapes: dict[str, dict[int, str]] = field(default_factory=dict)


def _sequences(*names: str) -> dict[str, dict[int, str]]:
    return {name: {0: "batch", 1: "sequence"} for name in names}


def _tokens(generator: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def _padded(generator: torch.Generator, batch: int, length: int) -> Batch:
    """Tokens of which the last row ends early."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length - 2 :] = 0
    return {"input_ids": _tokens(generator, batch, length), "attention_mask": mask}


def _size(seed: int) -> tuple[int, int]:
    """Batches of more than one size: (rows, length)."""
    return 3 + seed % 2, 7 + seed % 3


def _text(seed: int, labels: Callable[[torch.Generator, torch.Tensor], torch.Tensor]) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    batch = _padded(generator, *_size(seed))
    return batch | {"labels": labels(generator, batch["input_ids"])}


def _masked_tokens(generator: torch.Generator, tokens: torch.Tensor) -> torch.Tensor:
    masked = torch.rand(tokens.shape, generator=generator) < 0.4
    masked[:, 0] = True
    return torch.where(masked, tokens, -100)


def _same_tokens(generator: torch.Generator, tokens: torch.Tensor) -> torch.Tensor:
    return tokens.clone()


def _classes(generator: torch.Generator, tokens: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, CLASSES, tokens.shape[:1], generator=generator)


def _images(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    rows, _ = _size(seed)
    return {
        "pixel_values": torch.randn(rows, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, CLASSES, (rows,), generator=generator),
    }


def bert_mlm() -> Architecture:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Architecture(
        transformers.BertForMaskedLM(config),
        lambda seed: _text(seed, _masked_tokens),
        _sequences("input_ids", "attention_mask", "labels"),
    )


def distilbert_cls() -> Architecture:
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=32,
        n_layers=1,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=24,
        num_labels=CLASSES,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        problem_type="single_label_classification",
    )
    return Architecture(
        transformers.DistilBertForSequenceClassification(config),
        lambda seed: _text(seed, _classes),
        _sequences("input_ids", "attention_mask"),
    )


def roberta_cls() -> Architecture:
    config = transformers.RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=24,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        problem_type="single_label_classification",
    )
    return Architecture(
        transformers.RobertaForSequenceClassification(config),
        lambda seed: _text(seed, _classes),
        _sequences("input_ids", "attention_mask"),
    )


def gpt2_lm() -> Architecture:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=1,
        n_head=4,
        n_positions=24,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Architecture(
        transformers.GPT2LMHeadModel(config),
        lambda seed: _text(seed, _same_tokens),
        _sequences("input_ids", "attention_mask", "labels"),
    )


def bart() -> Architecture:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=24,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        rows, length = _size(seed)
        return _padded(generator, rows, length) | {"labels": _tokens(generator, rows, length + 2)}

    return Architecture(
        transformers.BartForConditionalGeneration(config),
        batch,
        _sequences("input_ids", "attention_mask") | {"labels": {0: "batch", 1: "target_sequence"}},
    )


def vit_cls() -> Architecture:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        problem_type="single_label_classification",
    )
    return Architecture(transformers.ViTForImageClassification(config), _images)


def convnext_cls() -> Architecture:
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        num_labels=CLASSES,
        image_size=32,
        layer_scale_init_value=0.5,
        problem_type="single_label_classification",
    )
    return Architecture(transformers.ConvNextForImageClassification(config), _images)


class WhisperEncoderClassifier(nn.Module):
    """Whisper's encoder under a mean over time and a linear layer."""

    def __init__(self, config: transformers.WhisperConfig) -> None:
        super().__init__()
        self.encoder = transformers.WhisperModel(config).encoder
        self.head = nn.Linear(config.d_model, CLASSES)

    def forward(self, input_features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.encoder(input_features).last_hidden_state.mean(dim=1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def whisper_encoder() -> Architecture:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=12,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        rows, _ = _size(seed)
        return {
            "input_features": torch.randn(rows, 8, 24, generator=generator),
            "labels": torch.randint(0, CLASSES, (rows,), generator=generator),
        }

    return Architecture(WhisperEncoderClassifier(config), batch)


ARCHITECTURES: dict[str, Callable[[], Architecture]] = {
    make.__name__: make
    for make in (
        bert_mlm,
        distilbert_cls,
        roberta_cls,
        gpt2_lm,
        bart,
        vit_cls,
        convnext_cls,
        whisper_encoder,
    )
}
