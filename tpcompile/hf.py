"""Example inputs for Hugging Face models, from their configuration alone."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .errors import InputError

BATCH = 2
SEQ = 16
"""Tokens of an example, or fewer where the model has fewer positions."""


def example_inputs_for(
    model: nn.Module, batch: int = BATCH, seq: int | None = None
) -> dict[str, Any]:
    """Keyword arguments for `model.forward` of a Hugging Face model, on its device.

    Labels are given where the forward takes them, so that the loss is part of what is captured.

    Args:
        model: May be on the meta device.
        batch: Samples.
        seq: Tokens of a sample; None: `SEQ`, or fewer where the model has fewer positions.

    Raises:
        InputError: The model is no Hugging Face model, of a kind that is not known here, or has
            fewer positions than `seq`.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise _unknown_error(model, "it has no Hugging Face config")
    takes = set(inspect.signature(model.forward).parameters)
    device = next(model.parameters()).device
    main = getattr(model, "main_input_name", "input_ids")
    if hasattr(config, "vision_config") and hasattr(config, "text_config"):
        raise _unknown_error(model, "it takes text and images together")
    if main == "pixel_values" and "pixel_values" in takes:
        inputs = _image(model, config, batch, device)
    elif "input_ids" in takes:
        inputs = _text(config, takes, (batch, _length(model, seq)), device)
    else:
        raise _unknown_error(model, f"its main input is {main}")
    if "labels" in takes:
        inputs |= _labels(type(model).__name__, config, inputs, batch, device)
    if "start_positions" in takes:
        positions = torch.zeros(batch, dtype=torch.long, device=device)
        inputs |= {"start_positions": positions, "end_positions": positions + 1}
    if "use_cache" in takes:
        inputs["use_cache"] = False
    return inputs


def _text(
    config: Any, takes: set[str], shape: tuple[int, int], device: torch.device
) -> dict[str, Any]:
    ids = _ids(config, shape, device)
    if not getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" not in takes:
        return {"input_ids": ids}
    if "labels" in takes:
        return {"input_ids": ids}
    return {"input_ids": ids, "decoder_input_ids": ids.clone()}


def _ids(config: Any, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Token ids that are no special token where the vocabulary has room: a pad would mask."""
    vocab = _text_config(config).vocab_size
    special = [
        getattr(config, f"{name}_token_id", None)
        for name in ("pad", "bos", "eos", "decoder_start", "sep", "cls", "mask")
    ]
    taken = {t for each in special for t in (each if isinstance(each, list) else [each])}
    free = [token for token in range(min(vocab, 256)) if token not in taken] or [0]
    count = torch.arange(shape[0] * shape[1]) % len(free)
    return torch.tensor(free)[count].reshape(shape).to(device)


def positions_of(model: nn.Module) -> int | None:
    """The most tokens that a Hugging Face model takes; None where that is not limited."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_source_positions")
    config = _text_config(getattr(model, "config", None))
    known = [getattr(config, name, None) for name in names]
    return min((n for n in known if isinstance(n, int) and n > 0), default=None)


def _length(model: nn.Module, seq: int | None) -> int:
    most = positions_of(model)
    if seq is None:
        # BERT's relatives count positions from pad_token_id + 1
        offset = (getattr(model.config, "pad_token_id", None) or 0) + 1
        return max(2, min(SEQ, (most or SEQ + offset) - offset))
    if most is not None and seq > most:
        raise InputError(
            f"{seq} tokens for {type(model).__name__}.",
            f"it has {most} positions.",
            "ask for fewer tokens, or change the config",
        )
    return seq


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _image(model: nn.Module, config: Any, batch: int, device: torch.device) -> dict[str, Any]:
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    channels = getattr(config, "num_channels", 3)
    dtype = next(model.parameters()).dtype
    grid = torch.linspace(-1, 1, batch * channels * height * width, dtype=dtype)
    return {"pixel_values": grid.reshape(batch, channels, height, width).to(device)}


def _labels(
    kind: str, config: Any, inputs: dict[str, Any], batch: int, device: torch.device
) -> dict[str, Tensor]:
    """Labels of the shape and type that the model's head takes, by the head's name."""
    count = getattr(config, "num_labels", 2)
    if kind.endswith(("ForSequenceClassification", "ForImageClassification")):
        if getattr(config, "problem_type", None) == "multi_label_classification":
            return {"labels": torch.zeros(batch, count, device=device)}
        dtype = torch.float32 if count == 1 else torch.long
        return {"labels": (torch.arange(batch) % count).to(device, dtype)}
    if kind.endswith("ForTokenClassification"):
        return {"labels": inputs["input_ids"] % count}
    if kind.endswith(("ForMultipleChoice", "ForNextSentencePrediction")):
        return {}
    return {"labels": inputs["input_ids"].clone()} if "input_ids" in inputs else {}


def _unknown_error(model: nn.Module, found: str) -> InputError:
    return InputError(
        f"cannot make example inputs for {type(model).__name__}.",
        f"{found}; its signature is forward{inspect.signature(model.forward)}.",
        "pass example_inputs=, the arguments of one call: a dict of keywords or a tuple.",
    )
