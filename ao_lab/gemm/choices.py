"""Measured choices: which function computes a product, by what the product is.

`ao_lab.tune` measures and adds, the dispatchers of layers ask, nothing else writes. Nothing is measured when a layer runs, is
compiled or captured: a product that was never tuned goes by the default rules of its dispatcher. So does every product under
`torch.use_deterministic_algorithms(True)` and inside `default_choices()`: equal code then gives equal bits whatever was tuned.

A compiled program keeps the choices that stood when it was traced: tune before `torch.compile`, or call
`torch._dynamo.reset()`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from operator import index
from pathlib import Path
from typing import Any

import torch

from fast.ops import constant_result
from fast.user_cache import NoCacheFolder, cache_folder, read_own, write_own
from reference.training.recipe import PRODUCTS, Recipe

# Records of tuning: a product, what can compute it, what was chosen. Serving, training and sparse weights have the same.

#: What products are of: a layer with a quantized weight; the three of a training step; a whole training step of a layer.
DIRECTIONS = ("inference", *PRODUCTS, "training")
#: The choice for a training layer none of whose products runs in low precision.
DENSE = "dense"
#: What may be chosen for "training": every subset of the three products that run in low precision, all of them first.
SUBSETS = tuple("+".join(low) or DENSE for count in (3, 2, 1, 0) for low in combinations(PRODUCTS, count))
#: Ranges of rows are the powers of two; one that was not measured follows one that was, at most so many powers away.
NEAR = 2


@dataclass(frozen=True)
class Problem:
    """A product of a layer: all that choices depend on.

    a, b: keys of the operands' schemes, "" for a dense one; for "training" a recipe's key and "". rows: the layer's rows
    (tokens) rounded up to a power of two, so that a choice holds for a range of them. n, k: the product's other two lengths. As
    (rows of a, rows of b, sum) these are (rows, n, k), and (k, n, rows) for "weight_grad", whose sum runs over tokens.
    sparsity: "" or a pattern of b, such as "2:4". accumulation: how a product of training adds, "fast" or "precise"; "" for the
    other directions, whose keys say all. experts: how many matrices b holds, rows being sorted by expert; 0 for one matrix.
    """

    direction: str
    a: str
    b: str
    n: int
    k: int
    rows: int
    dtype: str
    sparsity: str = ""
    accumulation: str = ""
    experts: int = 0


@dataclass(frozen=True)
class Candidate:
    """A function that can compute a product.

    seconds: the median of what the choice goes by, in eager mode the larger one of 1.5 `host` (until all is launched) and `gpu`
    (until all is computed, launches hidden), under graphs `gpu`. spread: half of what lies between its 20% and 80% quantiles.
    error: the norm of the difference over the exact product's norm. reason: why it was not measured; "" where it was.
    most_rows: where that is the number of rows, the most that it takes.
    """

    kernel: str
    seconds: float | None = None
    spread: float | None = None
    error: float | None = None
    reason: str = ""
    host: float | None = None
    gpu: float | None = None
    most_rows: int | None = None

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.kernel} (not measured: {self.reason})"
        error = "" if self.error is None else f", error {self.error:.1e}"
        return f"{self.kernel} ({self.seconds * 1e6:.1f} us{error})"


@dataclass(frozen=True)
class Choice:
    """What was chosen for a problem, and all that was looked at, the default first."""

    problem: Problem
    kernel: str
    candidates: tuple[Candidate, ...] = ()

    @property
    def candidate(self) -> Candidate:
        """The one that was chosen."""
        return next((c for c in self.candidates if c.kernel == self.kernel), Candidate(self.kernel))

    def covers(self, rows: int) -> bool:
        """Whether all that could compute a range of rows was looked at, and not left out for the rows that were measured."""
        fewest = rows // 2 + 1
        return rows >= self.problem.rows or all(
            c.most_rows is None or c.most_rows < fewest for c in self.candidates
        )

    def __str__(self) -> str:
        p = self.problem
        chosen = self.candidate
        others = ", ".join(str(c) for c in self.candidates if c is not chosen and c.seconds is not None)
        of = f" of {p.experts} expert{'s' * (p.experts > 1)}" if p.experts else ""
        beside = f"; others: {others}" if others else ""
        return f"{p.direction}{of} {p.n}x{p.k}, tokens <= {p.rows}: {chosen}{beside}"


def problem_of(
    direction: str,
    a: str,
    b: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype | str,
    accumulation: str = "",
    experts: int = 0,
) -> Problem:
    """The problem of a product a (M, K) @ b.T (K, N), shape = (M, N, K), whose rows or sum are a layer's rows."""
    m, n, k = shape
    rows, k = (k, m) if direction == "weight_grad" else (m, k)
    rows = rows_range(rows)
    return Problem(direction, a, b, n, k, rows, str(dtype), accumulation=accumulation, experts=experts)


def rows_range(rows: int) -> int:
    """The power of two that stands for a number of rows: the smallest that is not below it."""
    return 1 << max(rows - 1, 0).bit_length()


def nearest(rows: int, measured: Iterable[tuple[int, str]]) -> str | None:
    """The choice for a range of rows from (range, choice) of others.

    Its own where it was measured. Between two that agree, theirs. Else that of the nearest range, the larger one of two, at
    most `NEAR` powers of two away. None elsewhere.
    """
    known = dict(measured)
    if rows in known:
        return known[rows]
    below = max((r for r in known if r < rows), default=None)
    above = min((r for r in known if r > rows), default=None)
    if below is not None and above is not None and known[below] == known[above]:
        return known[below]
    steps = {r: abs(r.bit_length() - rows.bit_length()) for r in (above, below) if r is not None}
    near = min(steps, key=lambda r: steps[r], default=None)
    return known[near] if near is not None and steps[near] <= NEAR else None


#: Of a direction: the keys of a and b, and the accumulation, as a `Problem` has them.
Operands = tuple[str, str, str]


_tables: dict[torch.device, Choices] = {}


#: Counts changes of any table, for those who keep what they found.
VERSION = [0]


#: What `tuned` has found, by all that it was asked; emptied when a table changes, or grows beyond `MOST_FOUND`.
_found: dict[tuple[object, ...], str | None] = {}


MOST_FOUND = 65536


_defaults: list[bool] = []


@dataclass
class Choices:
    """The choices for one device by problem."""

    device: str = ""
    found: dict[Problem, Choice] = field(default_factory=dict)

    def kernel(self, problem: Problem) -> str | None:
        """The function for a problem: `problem.nearest` of the ranges of rows that were tuned.

        None where none is near, or where others are candidates that were not measured.
        """
        choice = self.found.get(problem)
        if choice is not None:
            return choice.kernel
        alike = (c for c in self if replace(c.problem, rows=problem.rows) == problem)
        return nearest(problem.rows, ((c.problem.rows, c.kernel) for c in alike if c.covers(problem.rows)))

    def add(self, choice: Choice) -> None:
        """Add a choice, in place of an older one of its problem."""
        self.found[choice.problem] = choice
        changed()

    def clear(self) -> None:
        """Forget all choices, in this process."""
        self.found.clear()
        changed()

    def of_layer(
        self, n: int, k: int, operands: Mapping[str, Operands], experts: int = 0
    ) -> tuple[Choice, ...]:
        """Those of a layer (N, K) by the operands of its directions, of all ranges of rows and dtypes."""
        transposed = ("input_grad", "weight_grad")
        wanted = {
            name: (*operand_keys, *((k, n) if name in transposed else (n, k)), experts)
            for name, operand_keys in operands.items()
        }

        def of_it(p: Problem) -> bool:
            return wanted.get(p.direction) == (p.a, p.b, p.accumulation, p.n, p.k, p.experts)

        order = list(operands)
        mine = [c for c in self if of_it(c.problem)]
        return tuple(sorted(mine, key=lambda c: (c.problem.rows, order.index(c.problem.direction))))

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.found.values())


def changed() -> None:
    """Forget what was found: a table has changed."""
    _found.clear()
    VERSION[0] += 1


def pinned() -> bool:
    """Whether all layers follow the default rules, whatever was tuned."""
    return bool(_defaults) or torch.are_deterministic_algorithms_enabled()


@contextmanager
def default_choices() -> Iterator[None]:
    """Inside, layers of this process follow the default rules, whatever was tuned."""
    _defaults.append(True)
    try:
        yield
    finally:
        _defaults.pop()


def choices_for(device: torch.device) -> Choices:
    """The choices of a device, read from its file when they are first asked for.

    A file that cannot be read, is broken, or could have been written by another user gives none, with one UserWarning: layers
    then follow the default rules. `tune` replaces a broken file.
    """
    device = _numbered(device)
    if device not in _tables:
        name = device_name(device)
        table = _tables[device] = Choices(name)
        try:
            table.found.update({choice.problem: choice for choice in read(path_of(device), name)})
        except NoCacheFolder:
            return table
        except (OSError, ValueError) as error:
            warnings.warn(
                f"{error}; layers follow the default rules, not tuned choices", UserWarning, stacklevel=3
            )
    return _tables[device]


def _numbered(device: torch.device) -> torch.device:
    """A GPU by its number."""
    number: Any = device.index
    if device.type == "cuda" and number is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def tuned(
    direction: str,
    a: str,
    b: str,
    shape: tuple[Any, Any, Any],
    dtype: torch.dtype,
    device: torch.device,
    accumulation: str = "",
    experts: int = 0,
) -> str | None:
    """The function for a product a (M, K) @ b.T (K, N), shape = (M, N, K): the one that was chosen. See `Problem`.

    None where there is none, and where defaults are pinned. Where a tracer leaves rows open they are compared with the bounds
    of their range: the program holds for that range, and is traced again for others. Other lengths are settled, as a layer's
    are.
    """
    m, n, k = shape
    rows, k = (k, m) if direction == "weight_grad" else (m, k)
    if pinned():
        return None
    if torch.compiler.is_compiling() or not all(isinstance(length, int) for length in (rows, n, k)):
        if not _knows(direction, str(device)):
            return None
        n, k, rows, experts = index(n), index(k), _range_of(rows), index(experts)
        of_traced = (direction, a, b, n, k, rows, str(dtype), "", accumulation, experts)
        traced: str | None = _traced(str(device), *of_traced)
        return traced
    key = (direction, a, b, n, k, rows_range(rows), dtype, device, accumulation, experts)
    try:
        return _found[key]
    except KeyError:
        problem = Problem(direction, a, b, n, k, key[5], str(dtype), "", accumulation, experts)
        return _found.setdefault(key, _looked_up(problem, device))


def _looked_up(problem: Problem, device: torch.device) -> str | None:
    if len(_found) >= MOST_FOUND:
        _found.clear()
    choices = choices_for(device)
    return choices.kernel(problem) if choices.found else None


def _range_of(rows: Any) -> int:
    """`rows_range` by comparisons alone."""
    bound = 1
    while bound < rows:
        bound *= 2
    return bound


@constant_result
def _knows(direction: str, device: str) -> bool:
    return any(choice.problem.direction == direction for choice in choices_for(torch.device(device)))


@constant_result
def _traced(device: str, *problem: Any) -> str | None:
    return _looked_up(Problem(*problem), torch.device(device))


def standing(shape: Iterable[int], device: torch.device) -> tuple[tuple[str, ...], ...]:
    """All choices on a device for weights of two lengths, in either order, as text; none where defaults are pinned."""
    if pinned():
        return ()
    lengths = set(shape)
    mine = (c for c in choices_for(device) if {c.problem.n, c.problem.k} == lengths)
    rows = ((repr(c.problem), c.kernel, *(str(one.most_rows) for one in c.candidates)) for c in mine)
    return tuple(sorted(rows))


def training_operands(recipe: Recipe) -> dict[str, Operands]:
    """The operands of a recipe's directions, as its problems have them."""
    result = {"training": (recipe.key, "", "")}
    for name in PRODUCTS:
        product = getattr(recipe, name)
        a, b = (op.scheme.key if op.scheme is not None else "" for op in (product.a, product.b))
        result[name] = a, b, product.accumulation
    return result


def forget() -> None:
    """Forget what was read: files are read again when they are asked for."""
    _tables.clear()
    changed()


# The file of a device's choices: one for each device and its library versions, written whole or not at all.

#: Version of the file's layout and of what its entries mean: files of others are not read, but for `BEFORE`.
FORMAT = 3


#: The one whose products had no accumulation. Of such a file choices of "inference", which have none, are read; those of
#: training products do not say which of two they were measured with, and those of a whole step were timed with them.
BEFORE = 2


def device_name(device: torch.device) -> str:
    """What a choice depends on beside the problem: the device, and the libraries whose kernels are chosen among."""
    # Tracers follow programs of GPUs on machines that have none.
    named = device.type == "cuda" and torch.cuda.is_available()
    name = torch.cuda.get_device_name(device) if named else device.type
    libraries = ", ".join(f"{package} {_version(package)}" for package in ("triton", "ao-lab"))
    built = f" (CUDA {torch.version.cuda})" if device.type == "cuda" else ""
    return f"{name}, torch {torch.__version__}{built}, {libraries}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def folder() -> Path:
    """Where choices are saved: AO_LAB_CACHE, else the user's cache; `NoCacheFolder` where there is no place for one."""
    return cache_folder() / "tuned"


def path_of(device: torch.device) -> Path:
    """The file of a device."""
    safe = "".join(c if c.isalnum() or c in ".-+" else "_" for c in device_name(device))
    return folder() / f"{safe}.json"


def read(path: Path, device: str) -> list[Choice]:
    """The choices in a file, none where there is no file; ValueError for one that is broken or of another device.

    OSError for one that cannot be read, `UntrustedFile` among them where another user could have written it.
    """
    try:
        return choices_of(json.loads(read_own(path)), device)
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} holds no choices of ao_lab.tune for this device ({error}); remove it, or call ao_lab.tune with a "
            f"model whose layers are quantized, or train in low precision: that replaces it"
        ) from None


def choices_of(content: Mapping[str, Any], device: str) -> list[Choice]:
    """The choices of a file's content; ValueError, KeyError or TypeError where the content is no such file's."""
    written = content.get("format")
    if written not in (FORMAT, BEFORE):
        raise ValueError(f"its format is {written!r}, not {FORMAT}")
    if content["device"] != device:
        raise ValueError(f"it is of {content['device']!r}, not of {device!r}")
    result = [_checked(one) for one in content["choices"]]
    return result if written == FORMAT else [one for one in result if one.problem.direction == "inference"]


def _checked(one: Mapping[str, Any]) -> Choice:
    problem = Problem(**one["problem"])
    lengths = (problem.n, problem.k, problem.rows, problem.experts)
    if problem.direction not in DIRECTIONS or not all(type(n) is int and n >= 0 for n in lengths):
        raise ValueError(f"{problem} is not a matmul")
    kernel = one["kernel"]
    if problem.direction == "training" and kernel not in SUBSETS:
        raise ValueError(f"{kernel!r} is not a kernel for training")
    candidates = tuple(Candidate(**candidate) for candidate in one["candidates"])
    if kernel not in {c.kernel for c in candidates}:
        raise ValueError(f"{kernel!r} was chosen and is none of the candidates")
    return Choice(problem, kernel, candidates)


def save(choices: Iterable[Choice], path: Path, device: str) -> None:
    """Write choices to a file, beside those of other problems that it holds; a file that cannot be read is replaced."""
    try:
        all_of_them = {choice.problem: choice for choice in read(path, device)}
    except (OSError, ValueError):
        all_of_them = {}
    all_of_them |= {choice.problem: choice for choice in choices}
    content = {
        "format": FORMAT,
        "device": device,
        "choices": [asdict(choice) for choice in all_of_them.values()],
    }
    write_own(path, json.dumps(content, indent=1).encode())


__all__ = [
    "DIRECTIONS",
    "SUBSETS",
    "Candidate",
    "Choice",
    "Choices",
    "Problem",
    "choices_for",
    "default_choices",
    "device_name",
    "forget",
    "nearest",
    "path_of",
    "pinned",
    "problem_of",
    "read",
    "rows_range",
    "save",
    "standing",
    "training_operands",
    "tuned",
]
