"""Measured choices: which function computes a product, by what the product is; saved for a device and its library versions.

`ao_lab.tune` measures and adds, the dispatchers of layers ask, nothing else writes. Nothing is measured when a layer runs, is
compiled or captured: a product that was never tuned goes by the default rules of its dispatcher.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

#: What products are of: a layer with a quantized weight; the three of a training step; a whole training step of a layer.
DIRECTIONS = ("inference", "output", "input_grad", "weight_grad", "training")
#: Version of the file's layout: files of another one are not read.
FORMAT = 1


@dataclass(frozen=True)
class Problem:
    """A product a (M, K) @ b.T (K, N): all that choices depend on.

    a, b: keys of the operands' schemes, "" for a dense one; for "training" a is the recipe's name. rows: M rounded up to a
    power of two, so that a choice holds for a range of rows. sparsity: "" or a pattern of b, such as "2:4".
    """

    direction: str
    a: str
    b: str
    n: int
    k: int
    rows: int
    dtype: str
    sparsity: str = ""


@dataclass(frozen=True)
class Candidate:
    """A function that can compute a product. seconds: the median. error: the norm of the difference over the exact product's.

    reason: why it was not measured; "" where it was.
    """

    kernel: str
    seconds: float | None = None
    spread: float | None = None
    error: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Choice:
    """What was chosen for a problem, and all that was looked at."""

    problem: Problem
    kernel: str
    candidates: tuple[Candidate, ...] = ()


@dataclass
class Choices:
    """The choices for one device by problem."""

    device: str = ""
    found: dict[Problem, Choice] = field(default_factory=dict)

    def kernel(self, problem: Problem) -> str | None:
        """The function that was chosen; None where the problem was never tuned."""
        choice = self.found.get(problem)
        return None if choice is None else choice.kernel

    def add(self, choice: Choice) -> None:
        """Add a choice, in place of an older one of its problem."""
        self.found[choice.problem] = choice

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.found.values())

    def as_json(self) -> dict[str, Any]:
        """The file's content."""
        return {"format": FORMAT, "device": self.device, "choices": [asdict(choice) for choice in self]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Choices:
        """The choices of a file's content; ValueError where the content is no such file's."""
        if content.get("format") != FORMAT:
            raise ValueError(f"choices are of format {FORMAT}, got {content.get('format')!r}; tune again")
        choices = cls(content["device"])
        for one in content["choices"]:
            candidates = tuple(Candidate(**candidate) for candidate in one["candidates"])
            choices.add(Choice(Problem(**one["problem"]), one["kernel"], candidates))
        return choices


def rows_range(rows: int) -> int:
    """The power of two that stands for a number of rows: the smallest that is not below it."""
    return 1 << max(rows - 1, 0).bit_length()


def device_name(device: torch.device) -> str:
    """What a choice depends on beside the problem: the device, and the libraries whose kernels are chosen among."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}, triton {_version('triton')}, ao_lab {_version('ao-lab')}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def folder() -> Path:
    """Where choices are saved: AO_LAB_CACHE, else the user's cache."""
    own = os.environ.get("AO_LAB_CACHE")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(own) if own else cache / "ao_lab") / "tuned"


def path_of(device: torch.device) -> Path:
    """The file of a device."""
    safe = "".join(c if c.isalnum() or c in ".-+" else "_" for c in device_name(device))
    return folder() / f"{safe}.json"


@lru_cache(maxsize=16)
def choices_for(device: torch.device) -> Choices:
    """The choices of a device, read from its file when they are first asked for."""
    try:
        return Choices.from_json(json.loads(path_of(device).read_text()))
    except FileNotFoundError:
        return Choices(device_name(device))


def tuned(
    direction: str, a: str, b: str, shape: tuple[Any, Any, Any], dtype: torch.dtype, device: torch.device
) -> str | None:
    """The function that was chosen for a product of M, N, K; None where it was never tuned, or a tracer leaves M open."""
    if not all(isinstance(length, int) for length in shape):
        return None
    found: str | None = _tuned(direction, a, b, *shape, str(dtype), str(device))
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tuned(direction: str, a: str, b: str, m: int, n: int, k: int, dtype: str, device: str) -> str | None:
    choices = choices_for(torch.device(device))
    return choices.kernel(Problem(direction, a, b, n, k, rows_range(m), dtype)) if choices.found else None


def save(choices: Choices, path: Path) -> None:
    """Write all choices to a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(choices.as_json(), indent=1))
    partial.replace(path)


def forget() -> None:
    """Forget what was read: files are read again when they are asked for."""
    choices_for.cache_clear()


__all__ = [
    "Candidate",
    "Choice",
    "Choices",
    "Problem",
    "choices_for",
    "forget",
    "path_of",
    "rows_range",
    "save",
    "tuned",
]
