"""What `sparsify_` did to each layer, and why others stay."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from ao_lab.quantization.report import SPARSITY


@dataclass(frozen=True)
class SparseLayer:
    """One parameter that `sparsify_` looked at."""

    #: Full name of the parameter.
    name: str
    #: Class of the module that has it.
    kind: str
    shape: tuple[int, ...]
    #: Why it was pruned, or left.
    reason: str
    #: "2:4"; "" where it was left.
    pattern: str = ""
    #: The score that decided: magnitude where no input told the channels apart; in training "its own zeros" where masks are
    #: those of an earlier pruning, after it "training".
    score: str = ""
    #: The share of its elements that are zero now.
    zeros: float = 0.0
    #: Tokens that its statistic has seen.
    tokens: int = 0
    #: SparseGPT's error of the layer's outputs, and the damping and the floor that its Hessian took.
    loss: float | None = None
    damping: float | None = None
    floor: float | None = None
    #: "compressed" where kept elements alone are stored, and the bytes that they and their places take; 0 where it is dense.
    storage: str = "dense"
    bytes: int = 0

    @property
    def changed(self) -> bool:
        """Whether it was pruned."""
        return bool(self.pattern)

    def __str__(self) -> str:
        if not self.changed:
            return f"left: {self.reason}"
        told = f"{self.pattern} by {self.score}, {100 * self.zeros:.1f} % zeros"
        if self.loss is not None:
            told += f", loss {self.loss:.3g}, damping {self.damping:g}"
            told += f", floor {self.floor:g}" if self.floor else ""
        told += f", compressed, {self.bytes} bytes" if self.storage == "compressed" else ""
        return f"{told}: {self.reason}"


@dataclass(frozen=True)
class SparsityReport:
    """Every layer that `sparsify_` looked at, in the order of the model's modules."""

    layers: tuple[SparseLayer, ...] = field(default_factory=tuple)

    @property
    def changed(self) -> tuple[SparseLayer, ...]:
        """Those that were pruned."""
        return tuple(layer for layer in self.layers if layer.changed)

    @property
    def left(self) -> tuple[SparseLayer, ...]:
        """Those that were not."""
        return tuple(layer for layer in self.layers if not layer.changed)

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=0)
        lines = [f"{len(self.changed)} of {len(self.layers)} layers pruned"]
        return "\n".join([*lines, *(f"  {layer.name:<{width}}  {layer}" for layer in self.layers)])


def remember(model: nn.Module, name: str, what: str) -> None:
    """Keep with the model, for `ao_lab.explain`, that a parameter was pruned."""
    known: dict[str, str] = {**getattr(model, SPARSITY, {}), name: what}
    object.__setattr__(model, SPARSITY, known)


__all__ = ["SparseLayer", "SparsityReport", "remember"]
