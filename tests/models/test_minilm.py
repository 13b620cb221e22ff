"""The sentence encoder of models/minilm against `transformers`, and the pairs that it learns from."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer

from ort_ops.gradient import build_gradient_model

sys.path.insert(0, str(Path(__file__).parents[2] / "models" / "minilm"))

import bert
import finetune
import pairs

CONFIG = bert.BertConfig(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=48,
    vocab_size=40,
    max_position_embeddings=12,
)


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **asdict(CONFIG), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.3
    )
    return transformers.BertModel(config, add_pooling_layer=False).double()


@pytest.fixture(scope="module")
def parameters(module: torch.nn.Module) -> dict[str, np.ndarray]:
    state = module.state_dict()
    return {name: state[name].float().numpy() for name in bert.parameter_shapes(CONFIG)}


def texts(seed: int, batch: int, length: int) -> dict[str, np.ndarray]:
    """Random tokens; each row but the first ends in padding."""
    generator = np.random.default_rng(seed)
    lengths = np.arange(length, length - batch, -1)
    mask = (np.arange(length) < lengths[:, None]).astype(np.int64)
    return {"input_ids": generator.integers(1, 40, (batch, length)) * mask, "attention_mask": mask}


def torch_embeddings(module: torch.nn.Module, inputs: dict[str, np.ndarray]) -> torch.Tensor:
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    states = module(**tensors).last_hidden_state
    mask = tensors["attention_mask"][:, :, None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def run(model, feeds):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def test_embeddings_are_those_of_transformers(module, parameters):
    inputs = texts(1, batch=4, length=9)
    (got,) = run(bert.build_embedding_model(CONFIG, parameters), inputs)
    with torch.no_grad():
        wanted = torch_embeddings(module, inputs).numpy()
    np.testing.assert_allclose(got, wanted, atol=2e-6)


def contrastive_loss(module, titles, passages, same_title: list[tuple[int, int]]) -> torch.Tensor:
    scores = 20 * torch_embeddings(module, titles) @ torch_embeddings(module, passages).T
    mask = torch.zeros_like(scores)
    for row, column in same_title:
        mask[row, column] = mask[column, row] = -torch.inf
    target = torch.arange(len(scores))
    cross_entropy = torch.nn.functional.cross_entropy
    return (cross_entropy(scores + mask, target) + cross_entropy((scores + mask).T, target)) / 2


def test_loss_and_gradients_are_those_of_torch(module, parameters):
    """Rows 1 and 3 have one title, so neither is a wrong answer to the other."""
    titles, passages = texts(2, batch=4, length=6), texts(3, batch=4, length=10)
    for array in titles.values():
        array[3] = array[1]
    module.zero_grad()
    loss = contrastive_loss(module, titles, passages, same_title=[(1, 3)])
    loss.backward()

    trained = [name for name in parameters if not name.endswith("_embeddings.weight")]
    model = build_gradient_model(bert.build_contrastive_model(CONFIG, parameters), requires_grad=trained)
    feeds = {f"title_{name}": array for name, array in titles.items()}
    feeds |= {f"passage_{name}": array for name, array in passages.items()}
    names = [output.name for output in model.graph.output]
    results = dict(zip(names, run(model, feeds | {name: parameters[name] for name in trained}), strict=True))

    np.testing.assert_allclose(results["loss"], loss.item(), rtol=1e-5)
    wanted = {
        name: parameter.grad.numpy() for name, parameter in module.named_parameters() if name in trained
    }
    assert wanted.keys() == set(trained)
    for name, gradient in wanted.items():
        # A bias of the keys moves all scores of a row alike: its true gradient is zero.
        scale = max(np.abs(gradient).max(), 1e-3)
        assert np.abs(results[f"{name}_grad"] - gradient).max() <= 2e-4 * scale, name


def test_every_norm_has_the_fused_gradient(parameters):
    trained = [name for name in parameters if not name.endswith("_embeddings.weight")]
    model = build_gradient_model(bert.build_contrastive_model(CONFIG, parameters), requires_grad=trained)
    fused = {node.input[5] for node in model.graph.node if node.op_type == "AddLayerNormGrad"}
    assert fused == {name for name in parameters if name.endswith("LayerNorm.weight")}


def test_a_missing_or_misshapen_parameter_is_named(parameters):
    name = "encoder.layer.1.output.dense.weight"
    with pytest.raises(ValueError, match=rf"'{name}' of shape \[24, 48\]; got \[48, 24\]"):
        bert.build_embedding_model(CONFIG, {**parameters, name: parameters[name].T})
    without = {key: value for key, value in parameters.items() if key != name}
    with pytest.raises(ValueError, match=rf"'{name}' of shape \[24, 48\]; got none"):
        bert.build_embedding_model(CONFIG, without)


TOPIC = """\
The "with" statement
********************

The "with" statement wraps the execution of a block with methods that a manager defines.

   with_stmt ::= "with" with_item ("," with_item)* ":" suite

object.__enter__(self)

   Enter the runtime context related to this object, which binds the *return* value.

object.__exit__(self)

   Too short.
"""


def test_sections_become_pairs():
    got = pairs.cut_pairs([TOPIC, TOPIC])
    assert got == [
        pairs.Pair(
            "The with statement",
            "The with statement wraps the execution of a block with methods that a manager defines.",
        ),
        pairs.Pair(
            "object.__enter__(self)",
            "Enter the runtime context related to this object, which binds the return value.",
        ),
    ]


def test_no_title_is_on_both_sides():
    everything = [pairs.Pair(f"title {index // 3}", f"passage {index}") for index in range(300)]
    training, held_out = pairs.split_pairs(everything)
    assert sorted(training + held_out, key=everything.index) == everything
    assert not {pair.title for pair in training} & {pair.title for pair in held_out}
    assert 40 <= len(held_out) <= 80


@pytest.fixture
def texts_of_topics(tmp_path) -> finetune.Texts:
    tokenizer = Tokenizer(WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    trainer = WordLevelTrainer(vocab_size=300, special_tokens=["[PAD]", "[UNK]"])
    tokenizer.train_from_iterator(finetune.topics.values(), trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return finetune.Texts(tmp_path)


def test_fine_tuning_learns_with_frozen_tables(tmp_path, monkeypatch, texts_of_topics):
    """The whole program, with an encoder small enough for a test in place of the published one."""
    config = replace(CONFIG, vocab_size=300, max_position_embeddings=finetune.PASSAGE_TOKENS)
    generator = np.random.default_rng(0)
    first = {
        name: np.ones(shape, np.float32)
        if name.endswith("LayerNorm.weight")
        else generator.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in bert.parameter_shapes(config).items()
    }
    monkeypatch.setattr(finetune, "load_published_model", lambda: (config, first, texts_of_topics))
    output = tmp_path / "minilm"
    finetune.main(output, epochs=2, batch_size=32, learning_rate=5e-3, threads=1)

    trained = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(output / "minilm.onnx").graph.initializer
        if tensor.name in first
    }
    assert trained.keys() == first.keys()
    unchanged = {name for name in first if np.array_equal(trained[name], first[name])}
    assert unchanged == {name for name in first if name.endswith("_embeddings.weight")}

    samples = dict(np.load(output / "pairs.npz"))
    assert {len(array) for array in samples.values()} == {len(samples["title_input_ids"])}
    batch = {name: array[:64] for name, array in samples.items()}
    guessing = np.log(64)
    assert run(bert.build_contrastive_model(config, trained), batch)[0] < guessing - 0.2
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
