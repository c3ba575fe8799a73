"""Bits per byte of a model on whole texts, by windows at fixed places.

A zero byte stands in front of a text, as between the files in training, so that each of its bytes is predicted once. Windows of
`context` bytes begin every half context. The first predicts all of its bytes; each later one predicts those of its second half,
which therefore have at least half a context in front of them. Nothing is drawn: every model is measured on the same windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

#: Windows that run at once.
BATCH = 32


def bits_per_byte(model: nn.Module, texts: Mapping[str, bytes], context: int) -> dict[str, float]:
    """-log2 p of each text over its bytes, by its name; sums in float64. `model`: tokens (batch, time) to logits.

    ValueError for an empty text.
    """
    device = next(model.parameters()).device
    return {name: bits(model, text, context, device) / len(text) for name, text in texts.items()}


def bits(model: nn.Module, text: bytes, context: int, device: torch.device) -> float:
    """-log2 p of a text."""
    # All of it on the device before: a copy for each batch would let the host wait for the device.
    parts = zip(*(one.to(device).split(BATCH) for one in windows(text, context)), strict=True)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for inputs, targets, counted in parts:
        with torch.inference_mode():
            logits = model(inputs.long())
        likelihood = torch.log_softmax(logits.float(), dim=-1)
        found = likelihood.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1).double()
        total -= (found * counted).sum()
    return float(total) / math.log(2)


def windows(text: bytes, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets (windows, context), uint8, and which targets count (bool): each byte of the text exactly once.

    ValueError for an empty text and for a context that is odd.
    """
    if not text or context % 2:
        raise ValueError(
            f"a text of at least one byte and an even context, got {len(text)} bytes and {context}"
        )
    half = context // 2
    count = 1 + max(0, math.ceil((len(text) - context) / half))
    padded = torch.zeros(1 + (count + 1) * half, dtype=torch.uint8)
    padded[1 : 1 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    inputs, targets = padded[:-1].unfold(0, context, half), padded[1:].unfold(0, context, half)
    places = torch.arange(count)[:, None] * half + torch.arange(context)
    counted = places < len(text)
    counted[1:, :half] = False
    return inputs, targets, counted


__all__ = ["bits_per_byte", "windows"]
