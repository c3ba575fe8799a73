"""Tokens sorted by expert in situations that break grouped products: experts without tokens, few, all, tokens of no expert."""

import torch

#: Ends of four groups among 90 rows: what is special about them.
OFFSETS = {
    "uneven": (7, 7, 60, 83),
    "one group of everything": (0, 90, 90, 90),
    "no tokens at all": (0, 0, 0, 0),
    "the last without tokens": (31, 32, 64, 64),
    "even, rows of no expert": (16, 32, 48, 64),
}
T, K, N, E = 90, 256, 128, 4


def offsets_of(name):
    return torch.tensor(OFFSETS[name], dtype=torch.int32)


def tensors(dtype=torch.bfloat16, seed=0):
    """x (T, K), w (E, N, K) and g (T, N)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator).to(dtype)
    w = (torch.randn(E, N, K, generator=generator) / 20).to(dtype)
    g = (torch.randn(T, N, generator=generator) / 1000).to(dtype)
    return x, w, g


def poison(tensor, offsets, value=float("nan")):
    """The tensor with rows of no expert set to a value."""
    made = tensor.clone()
    made[int(offsets[-1]) :] = value
    return made
