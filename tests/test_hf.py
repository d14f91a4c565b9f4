"""Example inputs of Hugging Face models come from their config."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tpcompile.capture import capture
from tpcompile.errors import InputError
from tpcompile.hf import example_inputs_for

DECODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
T5 = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
}
TEXT = {"input_ids": (2, 16)}
LABELLED = TEXT | {"labels": (2, 16)}
MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", DECODER, LABELLED | {"use_cache": False}),
    "LlamaModel": ("LlamaConfig", DECODER, TEXT | {"use_cache": False}),
    "BertForMaskedLM": ("BertConfig", DECODER, LABELLED),
    "BertForSequenceClassification": ("BertConfig", DECODER, TEXT | {"labels": (2,)}),
    "BertForTokenClassification": ("BertConfig", DECODER, LABELLED),
    "BertForQuestionAnswering": (
        "BertConfig",
        DECODER,
        TEXT | {"start_positions": (2,), "end_positions": (2,)},
    ),
    "RobertaForMaskedLM": (
        "RobertaConfig",
        DECODER | {"max_position_embeddings": 12},
        {"input_ids": (2, 10), "labels": (2, 10)},
    ),
    "T5ForConditionalGeneration": ("T5Config", T5, LABELLED | {"use_cache": False}),
    "T5Model": (
        "T5Config",
        T5,
        TEXT | {"decoder_input_ids": (2, 16), "use_cache": False},
    ),
    "T5EncoderModel": ("T5Config", T5, TEXT),
    "ViTModel": ("ViTConfig", VIT, {"pixel_values": (2, 3, 16, 16)}),
    "ViTForImageClassification": (
        "ViTConfig",
        VIT,
        {"pixel_values": (2, 3, 16, 16), "labels": (2,)},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_example_inputs(name: str) -> None:
    """They are what the model takes, with labels where there is a loss, and it captures."""
    config, sizes, expected = MODELS[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    inputs = example_inputs_for(model)
    shapes: dict[str, Any] = {
        key: tuple(value.shape) if isinstance(value, torch.Tensor) else value
        for key, value in inputs.items()
    }
    assert shapes == expected
    assert "loss" in model(**inputs) or "labels" not in expected
    assert capture(model, (), inputs).notes == []


def test_other_models_need_inputs() -> None:
    """The error shows the signature."""
    with pytest.raises(InputError) as error:
        example_inputs_for(nn.Linear(2, 2))
    assert str(error.value) == (
        "cannot make example inputs for Linear.\n"
        "  it has no Hugging Face config; its signature is "
        "forward(input: torch.Tensor) -> torch.Tensor.\n"
        "  fix: pass example_inputs=, the arguments of one call: a dict of keywords or a tuple."
    )
