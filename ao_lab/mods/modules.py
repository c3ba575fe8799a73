"""Modules that mods put in place of a model's own, each of which keeps what it replaced, so that it can be put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from ao_lab.tensor.quantized_tensor import QuantizedTensor

#: Columns that are normalised together: a tile of a GEMM holds them, so that its epilogue can.
BLOCK = 256


class BlockNorm(nn.Module):
    """x over its root mean square in blocks of columns, times a gain: (..., width) to the same.

    Each block of `block` columns is normalised by itself, without a mean and without a bias: y = x / sqrt(mean(x^2) + eps) *
    weight. Parameter `weight` (width,), None without `elementwise_affine`. ValueError where blocks do not divide the width.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        width: int,
        block: int = BLOCK,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if block < 1 or width % block:
            raise ValueError(
                f"BlockNorm: {width} columns are no whole blocks of {block}; choose a block that divides them"
            )
        self.width, self.block, self.eps = width, block, eps
        weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x in blocks."""
        blocks = x.reshape(*x.shape[:-1], self.width // self.block, self.block)
        y = functional.rms_norm(blocks, (self.block,), None, self.eps).reshape(x.shape)
        return y if self.weight is None else y * self.weight

    def extra_repr(self) -> str:
        """Width and block."""
        return f"{self.width}, block={self.block}, eps={self.eps}"


class HardSwish(nn.Hardswish):
    """x * relu6(x + 3) / 6."""


class PaddedLinear(nn.Linear):
    """nn.Linear whose lengths are filled by zeros up to multiples of 16 in each call; made of an nn.Linear in place."""

    plain: ClassVar[type[nn.Linear]] = nn.Linear
    STEP: ClassVar[int] = 16

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias, of the same numbers beside zeros; a quantized weight is multiplied as it is."""
        if isinstance(self.weight, QuantizedTensor):
            return functional.linear(input, self.weight, self.bias)
        more_k, more_n = -self.in_features % self.STEP, -self.out_features % self.STEP
        x, w = functional.pad(input, (0, more_k)), functional.pad(self.weight, (0, more_k, 0, more_n))
        bias = self.bias if self.bias is None else functional.pad(self.bias, (0, more_n))
        return functional.linear(x, w, bias)[..., : self.out_features]


class JoinedLinear(nn.Linear):
    """nn.Linear that has siblings of the same input: the first of them that is called multiplies for all.

    Made of an nn.Linear in place; parameters and names stay."""

    plain: ClassVar[type[nn.Linear]] = nn.Linear
    siblings: Siblings

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias, by one GEMM with the siblings'; in a compiled program, and of tensors of inference mode,
        whose changes are not counted, each by itself."""
        if torch.compiler.is_compiling() or input.is_inference() or self.weight.is_inference():
            return functional.linear(input, self.weight, self.bias)
        return self.siblings.output(self, input)


class Siblings:
    """Layers that multiply one input. Outputs wait until their layer asks for them, and the input as long.

    They are computed anew where the input, a parameter, autocast or whether gradients are recorded has changed since."""

    def __init__(self, members: Sequence[JoinedLinear]) -> None:
        self.members = list(members)
        self.waiting: dict[int, torch.Tensor] = {}
        self.x: torch.Tensor | None = None
        self.state: Any = None

    def output(self, member: JoinedLinear, x: torch.Tensor) -> torch.Tensor:
        """A member's product."""
        at = next(i for i, one in enumerate(self.members) if one is member)
        state = self._state(x)
        if not (self._is_same(x) and self.state == state and at in self.waiting):
            self.waiting = dict(enumerate(self._products(x)))
            self.x, self.state = x, state
        result = self.waiting.pop(at)
        if not self.waiting:
            self.x = None
        return result

    def _state(self, x: torch.Tensor) -> Any:
        """What products depend on beside the input's place: versions of input and parameters, modes."""
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        versions = [(id(p), p._version) for one in self.members for p in one.parameters()]
        return x._version, torch.is_grad_enabled(), autocast, versions

    def _is_same(self, x: torch.Tensor) -> bool:
        """Whether x is the input whose products wait: the same memory in the same history."""
        known = self.x
        return known is not None and (
            known is x
            or (
                known.data_ptr() == x.data_ptr()
                and (known.shape, known.stride(), known.dtype) == (x.shape, x.stride(), x.dtype)
                and known.requires_grad == x.requires_grad
                and known._base is x._base
            )
        )

    def _products(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = torch.cat([one.weight for one in self.members])
        biases = [one.bias for one in self.members]
        bias = None if all(one is None for one in biases) else torch.cat(
            [weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in self.members]
        )  # fmt: skip
        y = functional.linear(x, weight, bias)
        return torch.split(y, [one.out_features for one in self.members], -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Siblings:
        """With the copied members, which a copied model shares; nothing waits."""
        import copy

        made = Siblings([])
        memo[id(self)] = made
        made.members = [copy.deepcopy(one, memo) for one in self.members]
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"members": self.members, "waiting": {}, "x": None, "state": None}


__all__ = ["BLOCK", "BlockNorm", "HardSwish", "JoinedLinear", "PaddedLinear", "Siblings"]
