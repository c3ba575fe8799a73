"""Which layers get inputs of two axes, found by running the model once on a few tokens.

Of an input (batch, tokens, features) compressed-tensors' strategy "token" finds a scale for each token. Of one with two axes
(poolers, classifiers, OPT's feed-forward layers, shared experts) transformers 5.23 finds one scale for all rows: each token's
result depends on the others, later ones included, and no record of a layer can say so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

#: Small enough for any vocabulary, and no padding, which is 0 or the end of the range as a rule.
TOKENS = ((3, 4, 5), (5, 4, 3))
SAMPLES = 4000
#: What a model's own code may raise for inputs that it does not take.
FORWARD_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    NotImplementedError,
)


@dataclass
class Seen:
    """Layers by how many axes their inputs had; those that were not reached are in neither."""

    flat: set[str] = field(default_factory=set)
    deep: set[str] = field(default_factory=set)


def flat_inputs(model: nn.Module, layers: Collection[str]) -> tuple[list[str], list[str]] | None:
    """(layers whose inputs had two axes, layers that a small input did not reach); None for models of no transformers class.

    The model runs in evaluation mode without gradients, and is left as it was. Where its own code raises, what was reached
    until then is known; a model that takes none of the inputs that its configuration describes reaches nothing.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(model, "main_input_name"):
        return None
    seen = Seen()
    with _evaluated(model), _watched(model, layers, seen), torch.no_grad(), suppress(*FORWARD_ERRORS):
        model(**_inputs(model, config))
    return sorted(seen.flat), sorted(set(layers) - seen.flat - seen.deep)


def _inputs(model: nn.Module, config: Any) -> dict[str, torch.Tensor]:
    """A small input of the kind that the model's configuration asks for."""
    device, dtype = _where(model)
    tokens = torch.tensor(TOKENS, device=device)
    name = str(model.main_input_name)
    result = {name: tokens}
    if (shape := _shape(name, config)) is not None:
        result = {name: torch.zeros(shape, device=device, dtype=dtype)}
    return result | ({"decoder_input_ids": tokens} if getattr(config, "is_encoder_decoder", False) else {})


def _shape(name: str, config: Any) -> tuple[int, ...] | None:
    """The shape of an image, a spectrum or a wave; None for tokens."""
    if name == "pixel_values":
        return 2, config.num_channels, *_pair(config.image_size)
    if name == "input_features":
        return 2, config.num_mel_bins, 2 * config.max_source_positions
    return (2, SAMPLES) if name == "input_values" else None


def _pair(size: Any) -> tuple[int, int]:
    return tuple(size) if isinstance(size, (list, tuple)) else (size, size)


def _where(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    first = next(p for p in model.parameters() if p.is_floating_point())
    return first.device, first.dtype


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while: no dropout, and running statistics stay."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _watched(model: nn.Module, layers: Collection[str], seen: Seen) -> Iterator[None]:
    """Inputs of these layers are looked at as they come."""
    handles = []
    for name in layers:

        def look(module: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
            if inputs and isinstance(inputs[0], torch.Tensor):
                (seen.flat if inputs[0].dim() < 3 else seen.deep).add(name)

        handles.append(model.get_submodule(name).register_forward_pre_hook(look))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


__all__ = ["flat_inputs"]
