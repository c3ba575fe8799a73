"""What calibration won, layer by layer, as records that stay with the model and that reports print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

#: Where a model keeps what calibration won, by full names of weights.
CALIBRATION = "ao_lab_calibration"
#: Experts of a weight that a report shows one by one.
SHOWN = 8
#: Held-out tokens from which on errors of two candidates that differ by some percent can be told apart: the mean of so many
#: squares, were they independent and normal, is known to a seventh.
FEW = 100


@dataclass(frozen=True)
class LayerResult:
    """What calibration won for one weight."""

    #: What made the codes: names of methods in their order, "rounding" where that was no worse.
    method: str
    #: The output error, a mean square over tokens and summed over outputs, and that of rounding.
    error: float
    rounding: float
    #: Tokens that methods read, and those that judged; 0 where those judged that were read.
    tokens: int = 0
    held_out: int = 0
    #: What GPTQ's factor took.
    damping: float | None = None
    floor: float = 0.0
    #: Why a method was not applied, or what it made was not taken.
    notes: tuple[str, ...] = ()
    #: Of batched experts what was won for each of them.
    experts: tuple[LayerResult, ...] = ()

    @property
    def ratio(self) -> float:
        """The error over rounding's; 1 where both are 0."""
        return self.error / self.rounding if self.rounding else 1.0

    def __str__(self) -> str:
        text = self.method
        if self.tokens:
            judged = f"{self.held_out} held-out tokens" if self.held_out else f"the {self.tokens} tokens read"
            text += f", {self.ratio:.3f} of rounding's output error on {judged}"
        elif self.method != "rounding":
            text += f", {self.ratio:.3f} of rounding's squared error"
        if self.damping is not None:
            text += f", damping {self.damping:g}"
            text += f", floor {self.floor:g}" if self.floor else ""
        experts = [f"expert {i}: {one.brief}" for i, one in enumerate(self.experts[:SHOWN])]
        if len(self.experts) > SHOWN:
            experts.append(f"{len(self.experts) - SHOWN} more experts")
        return "; ".join([text, *self.notes, *experts])

    @property
    def is_plain(self) -> bool:
        """Whether a method, its error and its damping say all."""
        return not self.notes and not self.experts

    @property
    def brief(self) -> str:
        """Method, error and tokens, without notes."""
        of = f" of {self.tokens} tokens" if self.tokens else ""
        return f"{self.method}{of} {self.ratio:.3f}"


def together(results: Sequence[LayerResult]) -> str:
    """Several plain results of one method as one text: from the least to the largest ratio."""
    ratios, first = sorted(one.ratio for one in results), results[0]
    if first.method == "rounding":
        return first.method
    tokens = {one.held_out or one.tokens for one in results}
    judged = "held-out" if first.held_out else "read"
    count = f"{tokens.pop()} {judged} tokens" if len(tokens) == 1 else f"{judged} tokens"
    what = f"rounding's output error on {count}" if first.tokens else "rounding's squared error"
    return f"{first.method}, {ratios[0]:.3f} to {ratios[-1]:.3f} of {what}"


def few_judges(results: Sequence[LayerResult]) -> str:
    """That few held-out tokens decided, where they did for a layer as a whole (experts see some tokens alone); else ""."""
    counts = [one.held_out for one in results if one.tokens and not one.experts]
    if not counts or (least := min(counts)) >= FEW:
        return ""
    judged = f"{least} held-out tokens" if least else "the tokens that were read, none held out,"
    return (
        f"few tokens: {judged} decided which results were kept, too few to trust the ratios; about a tenth of the calibration "
        f"data is held out (of 19 sequences one), so give {20 * FEW:,} tokens or more"
    )


def remember(model: nn.Module, results: Mapping[str, LayerResult]) -> None:
    """Keep results with a model, for reports."""
    object.__setattr__(model, CALIBRATION, {**getattr(model, CALIBRATION, {}), **results})


__all__ = ["LayerResult", "few_judges"]
