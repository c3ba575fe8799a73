"""What recommendation models share: tables of ids behind one embedding bag, feed-forward blocks, and floating-point operations.

All tables of a model are one matrix, as table-batched embeddings have them: an id is counted from where its table begins, and
one lookup serves all features. Ids are checked against their own table before that, on a CPU; on a GPU a check would wait for
it, and out-of-range ids of a quantized table are its kernel's error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from ao_lab import QuantizedTensor, embedding_bag


class Tables(nn.Module):
    """Embedding tables of one width with a bag of a fixed length each.

    Called with ids (B, sum of hots), integers, the bag of table after table; gives sums (B, tables, width). Parameter
    `bag.weight` (sum of sizes, width). ValueError for ids outside of their table (on a CPU) or of another shape.
    """

    def __init__(
        self, sizes: Sequence[int], hots: Sequence[int], width: int, device: str | None = None
    ) -> None:
        super().__init__()
        if len(sizes) != len(hots) or not sizes:
            raise ValueError(f"{len(sizes)} tables and {len(hots)} bags; every table has one")
        self.sizes, self.hots, self.width = tuple(sizes), tuple(hots), width
        self.bag = nn.EmbeddingBag(sum(sizes), width, mode="sum", sparse=True, device=device)
        begins = [0, *accumulate(sizes)][:-1]
        columns = [at for at, hot in enumerate(hots) for _ in range(hot)]
        places = {
            "starts": [begins[at] for at in columns],
            "ends": [sizes[at] for at in columns],
            "firsts": [0, *accumulate(hots)][:-1],
        }
        for name, values in places.items():
            self.register_buffer(name, torch.tensor(values, device=device), persistent=False)
        if not self.bag.weight.is_meta:
            nn.init.normal_(self.bag.weight, std=width**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Sums of the rows of each bag."""
        count = sum(self.hots)
        if ids.dim() != 2 or ids.shape[1] != count:
            raise ValueError(
                f"ids of shape {tuple(ids.shape)}; tables with bags of {self.hots} take (B, {count})"
            )
        if ids.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check(ids)
        offsets = torch.arange(len(ids), device=ids.device)[:, None] * count + self.firsts
        places, begins, weight = (ids + self.starts).reshape(-1), offsets.reshape(-1), self.bag.weight
        if isinstance(weight, QuantizedTensor):
            # Bags of one table share a program of the kernel.
            rows = embedding_bag(weight, places, begins, features=len(self.sizes))
        else:
            rows = self.bag(places, begins)
        return rows.reshape(len(ids), len(self.sizes), self.width)

    def _check(self, ids: Tensor) -> None:
        wrong = (ids < 0) | (ids >= self.ends)
        if wrong.any():
            sample, column = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"sample {sample} has id {int(ids[sample, column])} in column {column}, whose table has rows 0 to "
                f"{int(self.ends[column]) - 1}; hash it or map it to a row for unknown ids"
            )


class Block(nn.Module):
    """A linear layer, a norm (or none) and an activation: what the layers of a feed-forward network are."""

    def __init__(
        self, inputs: int, outputs: int, norm: Callable[[int], nn.Module] | None, activation: nn.Module
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.Identity() if norm is None else norm(outputs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs) to (B, outputs)."""
        result: Tensor = self.activation(self.norm(self.linear(x)))
        return result


def feed_forward(
    widths: Sequence[int],
    *,
    norm: Callable[[int], nn.Module] | None = None,
    activation: Callable[[], nn.Module] = nn.ReLU,
    last: bool = False,
) -> nn.Sequential:
    """Blocks from width to width; `last`: the last layer is linear alone, as before a sigmoid."""
    pairs = list(pairwise(widths))
    blocks: list[nn.Module] = [Block(i, o, norm, activation()) for i, o in (pairs[:-1] if last else pairs)]
    return nn.Sequential(*blocks, *([nn.Linear(*pairs[-1])] if last else []))


def multiply_adds(widths: Sequence[int]) -> int:
    """Multiply-adds a sample of a feed-forward network."""
    return sum(i * o for i, o in pairwise(widths))


__all__ = ["Block", "Tables", "feed_forward", "multiply_adds"]
