"""A benchmark case: one kernel on one kind of input, with its floor in bytes, its targets, and what its result must equal.

Calls take the module `fast` as an argument, so that a test can pass another object with the same functions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from experiments.kernels.cases.floors import Shape
from experiments.report.targets import Target

Inputs = dict[str, Any]
Work = Callable[[ModuleType, Inputs], Any]
#: What was compared, the result, the reference's result.
Compared = tuple[str, Any, Any]

SHAPES: dict[str, Shape] = {
    "16384x4096": (16384, 4096),
    "16384x14336": (16384, 14336),
    # 2**31 + 4096 elements: offsets that 32 bits do not hold.
    "524289x4096": (524289, 4096),
    "16x4096": (16, 4096),
    # Weights of two layers of Llama-3.1-8B.
    "14336x4096": (14336, 4096),
    "4096x14336": (4096, 14336),
}
LARGE = ("16384x4096", "16384x14336")
HUGE = "524289x4096"
SMALL = "16x4096"


def at_least(metric: str, limit: float) -> Target:
    """The target that a metric of a case's row is no smaller than a limit."""
    return Target(metric, None, limit, value_format=".4g", limit_format="g")


def at_most(metric: str, limit: float) -> Target:
    """The target that a metric of a case's row is no larger than a limit."""
    return Target(metric, None, limit, at_least=False, value_format=".4g", limit_format="g")


@dataclass(frozen=True)
class Sample:
    """Where a result is compared: a range of rows of the tensor (of columns, where blocks run along the first axis)."""

    start: int
    stop: int

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """These rows, on the host."""
        return tensor[self.start : self.stop].detach().cpu().contiguous()

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """These columns, on the host."""
        return tensor[:, self.start : self.stop].detach().cpu().contiguous()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel to measure.

    name: ``operation.scheme`` and perhaps a variant. needs: functions of `fast` that it calls (`function_of` finds them),
    ``function:parameter`` where a parameter may not exist. read, moved: bytes of the input (what a copy of the same size
    reads) and of the floor. make: inputs of a shape, from a seed. call: the kernel. compare: what of a result must
    equal what, at a sample. beside: other calls that are timed in turn with it, by name. host: whether the host's time for a
    launch is measured as well.
    """

    name: str
    operation: str
    scheme: str
    needs: tuple[str, ...]
    read: Callable[[Shape], float]
    moved: Callable[[Shape], float]
    make: Callable[[Any, Shape, str, int], Inputs]
    call: Work
    compare: Callable[[Any, Inputs, Any, Sample], list[Compared]]
    targets: tuple[Target, ...] = ()
    shapes: tuple[str, ...] = LARGE
    beside: Mapping[str, Work] = field(default_factory=dict)
    host: bool = False
    #: The call inside this one, for what this one adds to the host's time.
    wraps: Work | None = None
    #: What of the operation the expressions of baselines need to know: packed, axis, given, residual, both.
    options: Mapping[str, Any] = field(default_factory=dict)

    def missing(self, fast: Any) -> list[str]:
        """Which of `needs` this `fast` does not have."""
        return [need for need in self.needs if not has(fast, need)]

    def moved_per_element(self, shape: Shape) -> float:
        """Floor in bytes an element."""
        return self.moved(shape) / (shape[0] * shape[1])


def function_of(fast: Any, name: str) -> Any:
    """The function of `fast` called `name`, or of its imported modules (``folder.module.function``); None without one."""
    module, _, attribute = name.rpartition(".")
    if module and isinstance(fast, ModuleType):
        return getattr(sys.modules.get(f"{fast.__name__}.{module}"), attribute, None)
    return getattr(fast, name, None)


def has(fast: Any, need: str) -> bool:
    """Whether `fast` has a function, and the parameter that stands behind a colon."""
    name, _, parameter = need.partition(":")
    function = function_of(fast, name)
    if not callable(function):
        return False
    return not parameter or parameter in inspect.signature(function).parameters
