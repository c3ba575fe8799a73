"""Layers whose quantized weight has a low-rank residual beside it: y = x Wq' + b + (x R') L'.

`quantize_(..., methods=(..., LowRank(rank=32)))` makes them, in place, of nn.Linear, and so does reading a folder that holds
them. L (N, rank) and R (rank, K) are parameters of the layer, `residual_left` and `residual_right`, in 16 bits; they belong to
the quantized layer and do not train. The inputs of the second product are those of the layer, whatever the first one rounds or
rotates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.layers import ConvertedModule, full_name, shorten
from reference.calibration.residual import LowRank as Factors

#: The names of a layer's factors, (N, rank) and (rank, K).
LEFT, RIGHT = FACTORS = ("residual_left", "residual_right")
#: Why they are as they are, for reports.
RESIDUAL = "a factor of the layer's low-rank residual"


class LowRankLinear(ConvertedModule, nn.Linear):
    """nn.Linear of a quantized weight with a low-rank residual; made by `add_residual`, in place."""

    for_training: ClassVar[bool] = False

    residual_left: nn.Parameter
    residual_right: nn.Parameter

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x Wq' + b + (x R') L'; factors in the dtype of the inputs, under autocast all of it in its dtype."""
        linear = nn.functional.linear
        low = linear(input, self.residual_right.to(input.dtype))
        y = linear(input, self.weight, self.bias)
        return y + linear(low, self.residual_left.to(low.dtype))

    @property
    def rank(self) -> int:
        """Of its residual."""
        return self.residual_right.shape[0]

    def merged(self) -> torch.Tensor:
        """The dense weight that the layer stands for, float32 (N, K)."""
        weight: Any = self.weight.detach()
        values = weight.dequantize(torch.float32) if isinstance(weight, QuantizedTensor) else weight.float()
        result: torch.Tensor = (
            values + self.residual_left.detach().float() @ self.residual_right.detach().float()
        )
        return result

    def unsupported_reason(self) -> str | None:
        """A weight is quantized before it has a residual."""
        quantized = isinstance(self.weight, QuantizedTensor)
        return None if quantized else "its residual belongs to the weight that it had"

    def parameter_reason(self, name: str) -> str | None:
        """Why a factor is there, for `explain`."""
        return RESIDUAL if name in FACTORS else None

    def extra_repr(self) -> str:
        """torch's own, and the rank."""
        return f"{super().extra_repr()}, low-rank residual of rank {self.rank}"


def add_residual(layer: nn.Linear, factors: Factors) -> None:
    """Give a layer a residual, in place, or another one in place of that which it has."""
    layer.__class__ = LowRankLinear
    for name, factor in zip(FACTORS, factors, strict=True):
        layer._parameters[name] = nn.Parameter(factor, requires_grad=False)


def drop_residual(layer: LowRankLinear) -> None:
    """The layer without its residual."""
    for name in FACTORS:
        del layer._parameters[name]
    layer.__class__ = nn.Linear  # type: ignore[assignment]


def residual_layers(model: nn.Module) -> dict[str, LowRankLinear]:
    """The layers of a model that have one, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LowRankLinear)}


def residual_bits(rank: int, shape: tuple[int, ...], itemsize: int = 2) -> float:
    """Bits that the factors of a residual add to each weight of a matrix (N, K)."""
    return 8 * itemsize * rank * sum(shape) / (shape[0] * shape[1])


def refuse_residuals(model: nn.Module, what: str) -> None:
    """ValueError for a model with residuals, which what is to be written has no place for."""
    if found := list(residual_layers(model)):
        raise ValueError(
            f"{shorten(found)}: {what} has no place for a low-rank residual; quantize without LowRank, or save with "
            f'save_pretrained(layout="ao_lab")'
        )


def unplaced_residuals(model: nn.Module) -> list[str]:
    """Why compressed-tensors cannot hold a model with residuals, a sentence for each layer that has one."""
    return [
        f"{name}: its low-rank residual of rank {layer.rank} has no place in compressed-tensors; quantize without LowRank, or "
        f"save with layout='ao_lab'"
        for name, layer in residual_layers(model).items()
    ]


@contextmanager
def with_residuals(model: nn.Module, tensors: Mapping[str, Any]) -> Iterator[None]:
    """The model has the residuals that are among `tensors` (anything with dtype and shape, by name), values not yet set.

    After an error its layers are as they were. Names that belong to no nn.Linear are left to those who compare names.
    """
    before = {id(layer): factors_of(layer) for layer in residual_layers(model).values()}
    given = list(_placed(model, tensors))
    try:
        yield
    except BaseException:
        for layer in given:
            restore(layer, before.get(id(layer)))
        raise


def give_residuals(model: nn.Module, tensors: Mapping[str, Any]) -> None:
    """`with_residuals` for good."""
    with with_residuals(model, tensors):
        pass


def factors_of(layer: LowRankLinear) -> Factors:
    """The factors of a layer."""
    return Factors(layer.residual_left.detach(), layer.residual_right.detach())


def restore(layer: nn.Linear, factors: Factors | None) -> None:
    """The factors that a layer had before, or none."""
    if factors is not None:
        add_residual(layer, factors)
    elif isinstance(layer, LowRankLinear):
        drop_residual(layer)


def _placed(model: nn.Module, tensors: Mapping[str, Any]) -> Iterator[nn.Linear]:
    """The layers that have got factors of the shapes of these tensors."""
    modules = dict(model.named_modules())
    for path in residual_paths(tensors):
        layer: Any = modules.get(path)
        if type(layer) not in (nn.Linear, LowRankLinear):
            continue
        found = [tensors[full_name(path, name)] for name in FACTORS]
        if not _fit(tuple(layer.weight.shape), *(tuple(one.shape) for one in found)):
            continue
        device = layer.weight.device
        add_residual(
            layer, Factors(*(torch.empty(tuple(one.shape), dtype=one.dtype, device=device) for one in found))
        )
        yield layer


def _fit(shape: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Whether factors of these shapes belong beside a weight of this one."""
    rank = left[-1] if len(left) == 2 else 0
    return 0 < rank <= min(shape) and (left, right) == ((shape[0], rank), (rank, shape[1]))


def residual_paths(names: Iterable[str]) -> list[str]:
    """The layers whose two factors are among the names."""
    known = set(names)
    paths = [
        name[: -len(LEFT)].removesuffix(".") for name in known if name == LEFT or name.endswith(f".{LEFT}")
    ]
    return sorted(path for path in paths if full_name(path, RIGHT) in known)


__all__ = [
    "FACTORS", "RESIDUAL", "LowRankLinear", "add_residual", "drop_residual", "factors_of", "give_residuals",
    "refuse_residuals", "residual_bits", "residual_layers", "residual_paths", "unplaced_residuals",
    "with_residuals",
]  # fmt: skip
