"""What a case of several ranks is: a name, what it is expected to equal, and the function that every rank runs.

A case's function gets a `Rank` (which one, of how many, on which device, with a folder that all see) and a `Tally`, which
counts values compared and the largest difference. Every rank has a tally of its own; the case's is their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.harness.measuring import Values, Wrong

IDENTITY, SPEED, FAILURES = "identity", "speed", "failures"
KINDS = (IDENTITY, SPEED, FAILURES)
#: What cases are expected to equal; the setting of their rows.
BITS = "bits of one process"
SLICES = "bits of the slices in one process"
ORDER = "one process, but for the order of sums"
REFUSED = "an error that names the way out"
#: Metrics of a case.
COMPARED, DIFFERENT, LARGEST, BOUND, SECONDS = (
    "values compared", "values different", "largest difference", "bound", "seconds",
)  # fmt: skip
RANKS = "ranks"
#: Between method and metric, where a case measures several methods.
LINE = " | "
NEEDS_GPUS = "not run: it needs GPUs"
#: Seconds after which a case of GPUs counts as hung; CPU ranks share their cores and get more.
LIMIT = 75.0


@dataclass(frozen=True)
class Rank:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device
    #: A folder of the case, which every rank sees.
    folder: Path

    @property
    def dtype(self) -> torch.dtype:
        """What models are in: bfloat16 on GPUs, float32 on CPUs."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def first(self) -> bool:
        """Whether it is the first."""
        return self.rank == 0

    def mesh(self) -> Any:
        """All ranks in a row."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self.device.type, (self.size,))

    def random(self, *shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal values, the same on every rank and device."""
        made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return made.to(self.device, dtype or self.dtype)

    def wait(self) -> None:
        """Wait for all ranks."""
        torch.distributed.barrier()


@dataclass
class Tally:
    """What was compared."""

    compared: int = 0
    different: int = 0
    largest: float = 0.0
    bound: float = 0.0
    #: The first few things that were not as they are to be.
    wrong: list[str] = field(default_factory=list)
    #: Measured values (of a case of speed).
    values: Values = field(default_factory=dict)

    def bits(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Count elements whose bits differ."""
        found, expected = found.detach(), expected.detach()
        self.compared += expected.numel()
        if found.shape != expected.shape or found.dtype != expected.dtype:
            self._note(
                f"{what}: {found.dtype} {tuple(found.shape)} for {expected.dtype} {tuple(expected.shape)}"
            )
            return
        unequal = patterns(found) != patterns(expected)
        if count := int(unequal.sum()):
            self.different += count
            apart = (found.double() - expected.double()).abs()[unequal]
            self.largest = max(self.largest, float(apart.max()))
            self._note(f"{what}: {count} of {expected.numel()} values differ, by {float(apart.max()):.3g}")

    def stored(self, what: str, found: Any, expected: Any) -> None:
        """Count elements of a quantized weight's codes, scales and zero points whose bits differ."""
        if not hasattr(expected, "parts"):
            self.bits(what, found, expected)
            return
        self.true(f"{what}: a {type(found).__name__}", hasattr(found, "parts"))
        for name, part in expected.parts.items() if hasattr(found, "parts") else ():
            self.true(
                f"{what}, {name}: one of the two has none", (part is None) == (found.parts[name] is None)
            )
            if part is not None and found.parts[name] is not None:
                self.bits(f"{what}, {name}", bytes_of(found.parts[name]), bytes_of(part))

    def near(self, what: str, found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
        """Hold the largest difference to a bound."""
        self.compared += expected.numel()
        self.bound = max(self.bound, bound)
        apart = float((found.detach().double() - expected.detach().double()).abs().max())
        self.different += int((found.detach() != expected.detach()).sum())
        self.largest = max(self.largest, apart)
        if not apart <= bound:
            self._note(f"{what}: {apart:.3g} apart, the bound is {bound:.3g}")

    def lines(self, method: str, values: Values) -> None:
        """Measured values of one of several methods."""
        self.compared += 1
        for metric, value in values.items():
            self.values[f"{method}{LINE}{metric}"] = value

    def true(self, what: str, holds: bool) -> None:
        """Count something that holds or does not."""
        self.compared += 1
        if not holds:
            self._note(what)

    def _note(self, text: str) -> None:
        if len(self.wrong) < 3:
            self.wrong.append(text)

    def as_values(self) -> Values:
        """Metrics; Wrong where something was not as it is to be, or nothing was compared or measured."""
        if self.wrong:
            raise Wrong("; ".join(self.wrong))
        if not self.compared:
            raise Wrong("nothing was compared")
        counted: Values = {
            COMPARED: (self.compared, ""), DIFFERENT: (self.different, ""),
            LARGEST: (self.largest, ""), BOUND: (self.bound, ""),
        }  # fmt: skip
        return {**counted, **self.values}


def bytes_of(part: torch.Tensor) -> torch.Tensor:
    """Of a tensor its bytes: dtypes of 8 bits are not compared otherwise."""
    return part.detach().contiguous().reshape(-1).view(torch.uint8)


def patterns(x: torch.Tensor) -> torch.Tensor:
    """Values as integers that are equal where all bits are, of NaN where both are NaN: -0 is not 0."""
    if not x.is_floating_point():
        return x
    as_integers = x.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    )
    return torch.where(x.isnan(), torch.iinfo(as_integers.dtype).max, as_integers)


Work = Callable[[Rank, Tally], None]


@dataclass(frozen=True)
class Case:
    """One thing that all ranks do.

    name: its row's method. expected: what it is compared with, its row's setting. kind: of its table. gpus: why it needs GPUs
    (nothing: it runs on CPUs too). day: whether the test of every day runs it. limit: seconds after which it counts as hung.
    """

    name: str
    work: Work
    expected: str = BITS
    kind: str = IDENTITY
    gpus: str = ""
    day: bool = False
    limit: float = LIMIT

    @property
    def group(self) -> str:
        """The first words of its name, by which several are chosen at once."""
        return self.name.partition(",")[0]


def chosen(cases: Iterable[Case], names: Iterable[str]) -> list[Case]:
    """Cases by name, by group or by kind; all without names. ValueError for a name that is none of these."""
    cases, names = list(cases), list(names)
    known = {word for case in cases for word in (case.name, case.group, case.kind)}
    for name in names:
        if name not in known:
            groups = ", ".join(dict.fromkeys(repr(case.group) for case in cases))
            raise ValueError(
                f"unknown case {name!r}; name a kind ({', '.join(KINDS)}), a group ({groups}) or one case of `--list`"
            )
    return [case for case in cases if not names or {case.name, case.group, case.kind} & set(names)]
