"""One way to validate and to time a family of kernels that multiply rows by a stored weight; a record says what of it.

Compared are, of the rule's variant or of all: integers whose sums are exact in float32, bit for bit, into poisoned memory
between guards, and again and again; every element of a weight, which a row of inputs with a single 1 copies; random
numbers within a bound, the same bits each time. Timed are all variants and what else multiplies, in turn, over weights
that exceed the second-level cache together; the floor of a row is every byte once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from tests.gpu.harness.poison import check_guards, outputs, poisoned
from tests.gpu.harness.subject import Asked, Check, Row, Subject, beyond, differs
from tests.gpu.harness.timing import Call, measured, rate, several

POISON = 0xA5
#: Calls after the first of the rule's variant, and of another one or of random numbers.
REPEATS, AGAIN = 100, 5


class Problem(NamedTuple):
    """shape: rows and columns of the weight. rows: of the inputs; of experts those of each. dtype: of inputs and outputs."""

    scheme: str
    shape: tuple[int, int]
    rows: Any
    dtype: torch.dtype = torch.bfloat16
    bias: torch.dtype | None = None

    def __str__(self) -> str:
        bias = "" if self.bias is None else f", bias {self.bias}"
        return f"{self.scheme} {self.shape} {self.rows} rows {self.dtype}{bias}".replace("torch.", "")


def bytes_of(part: Any) -> int:
    """Of a tensor, of tuples of them, and of records with tensors."""
    if isinstance(part, tuple):
        return sum(map(bytes_of, part))
    if hasattr(part, "nbytes"):
        return int(part.nbytes)
    return sum(one.nbytes for one in getattr(part, "__dict__", {}).values() if isinstance(one, torch.Tensor))


def normal_inputs(problem: Problem) -> Any:
    """Normal numbers."""
    return torch.randn(problem.rows, problem.shape[1], device="cuda").to(problem.dtype)


def no_checks(asked: Asked) -> Iterator[Check]:
    """Of families without further ones."""
    yield from ()


@dataclass(frozen=True)
class Family:
    """A family; operands are what its `multiply` takes. See the module text.

    multiply: of inputs, a weight, a bias, a variant and what allocates the output (None: as always). variants: of a
    problem, the rule's first, or that alone. exact: inputs, weight, bias and the result, all of whose sums are exact.
    random: inputs, weight, float64 products and how far results may be, or None. columns: a weight and its elements (N, K)
    in the inputs' dtype. most: rows of inputs of a call. filled: a weight of random bits. peers: of a scheme, a shape and
    the weights, what else multiplies inputs.
    """

    name: str
    about: str
    multiply: Callable[..., torch.Tensor | None]
    variants: Callable[[Problem, bool], Sequence[Any]]
    compile: Callable[[Iterable[tuple[Problem, Any]]], None]
    problems: Sequence[Problem]
    exact: Callable[[Problem], tuple[Any, Any, Any, torch.Tensor]]
    filled: Callable[[str, tuple[int, int]], Any]
    peers: Callable[[str, tuple[int, int], list[Any]], Callable[[Any], dict[str, list[Call]]]]
    schemes: Sequence[str]
    shapes: Sequence[tuple[int, int]]
    rows: Sequence[int]
    random: Callable[[Problem], tuple[Any, ...] | None] = lambda problem: None
    columns: Callable[[Problem], tuple[Any, torch.Tensor]] | None = None
    most: int = 1 << 20
    named: Callable[[Any], str] = str
    inputs: Callable[[Problem], Any] = normal_inputs
    more: Callable[[Asked], Iterable[Check]] = no_checks

    @property
    def subject(self) -> Subject:
        """What `validate.py` knows."""
        return Subject(self.name, self.about, partial(checks, self), partial(times, self))


def checks(family: Family, asked: Asked) -> Iterator[Check]:
    """All problems of the schemes that were asked for, kernels compiled before."""
    chosen = [one for one in family.problems if not asked.schemes or one.scheme in asked.schemes]
    family.compile((one, variant) for one in chosen for variant in family.variants(one, asked.every))
    for one in chosen:
        yield str(one), partial(wrong_of, family, one, asked.every)
    yield from family.more(asked)


def wrong_of(family: Family, problem: Problem, every: bool) -> Iterator[str]:
    """What differs of each variant."""
    x, w, bias, wanted = family.exact(problem)
    variants = family.variants(problem, every)
    for at, variant in enumerate(variants):
        name = family.named(variant)
        found = guarded(family, x, w, bias, variant)
        yield from differs(f"{name}: integers", found, wanted)
        yield from repeated(
            name, found, partial(family.multiply, x, w, bias, variant, fresh), AGAIN if at else REPEATS
        )
    if family.columns is not None:
        w, elements = family.columns(problem)
        eye = torch.eye(elements.shape[1], device="cuda", dtype=problem.dtype)
        for variant in variants if every else variants[:1]:
            parts = [
                family.multiply(part, w, None, variant if every else None, fresh)
                for part in eye.split(family.most)
            ]
            made = None if any(part is None for part in parts) else torch.cat(parts).t()  # type: ignore[arg-type]
            yield from differs(f"{family.named(variant)}: elements of the weight", made, elements)
    operands = family.random(problem)
    for variant in variants if operands is not None else ():
        x, w, truth, allowed = operands
        call = partial(family.multiply, x, w, None, variant, fresh)
        found = call()
        yield from beyond(f"{family.named(variant)}: random numbers", found, truth, allowed)
        yield from repeated(family.named(variant), found, call, AGAIN)


def fresh(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An output, for what allocates as `launcher.allocator` does."""
    return torch.zeros(shape, dtype=dtype, device="cuda")


def guarded(family: Family, x: Any, w: Any, bias: Any, variant: Any) -> torch.Tensor | None:
    """The product in poisoned memory; WroteBeyond where what is around it was written."""
    buffers: list[tuple[torch.Tensor, int]] = []
    with poisoned(POISON):
        made = family.multiply(x, w, bias, variant, outputs(POISON, buffers))
        torch.cuda.synchronize()
    check_guards(buffers, POISON)
    return made


def repeated(name: str, found: Any, call: Call, times: int) -> Iterator[str]:
    """A line where calls give other bits than the first one."""
    other = 0 if found is None else sum(not torch.equal(call(), found) for _ in range(times))
    if other:
        yield f"{name}: {other} of {times} further calls gave other bits"


def times(family: Family, asked: Asked) -> Iterator[Row]:
    """A row for each shape, scheme and number of rows."""
    shapes, schemes, rows = (
        asked.shapes or family.shapes,
        asked.schemes or family.schemes,
        asked.rows or family.rows,
    )
    problems = [Problem(scheme, (n, k), count) for (n, k), scheme, count in product(shapes, schemes, rows)]
    family.compile((one, variant) for one in problems for variant in family.variants(one, True))
    for (n, k), scheme in product(shapes, schemes):
        size = bytes_of(family.filled(scheme, (n, k)))
        held = several(partial(family.filled, scheme, (n, k)), size)
        peers = family.peers(scheme, (n, k), held)
        for count in rows:
            problem = Problem(scheme, (n, k), count)
            x, variants = family.inputs(problem), family.variants(problem, True)
            own = {
                family.named(one): [partial(family.multiply, x, w, None, one) for w in held]
                for one in variants
            }
            yield {
                "scheme": scheme, "shape": (n, k), "rows": count, "rule": next(iter(own), None),
                "floor": round((size + bytes_of(x) + 2 * count * n) / rate(), 2), **measured({**peers(x), **own}),
            }  # fmt: skip


def dense_weights(shape: tuple[int, int]) -> list[torch.Tensor]:
    """Of bfloat16, in turn."""
    return several(lambda: torch.randn(shape, device="cuda", dtype=torch.bfloat16), 2.0 * shape[0] * shape[1])


def by_torch(dense: list[torch.Tensor], x: torch.Tensor) -> list[Call]:
    """torch's product in bfloat16 with each weight."""
    return [partial(torch.nn.functional.linear, x, w) for w in dense]


def numbers(one: Any) -> str:
    """The name of a variant that is its numbers."""
    return ",".join(str(int(number)) for number in one)


def small_bias(problem: Problem) -> torch.Tensor | None:
    """Integers from -3 to 3, or none."""
    if problem.bias is None:
        return None
    return (torch.arange(problem.shape[0], device="cuda") % 7 - 3).to(problem.bias)


def exact_product(
    problem: Problem, dense: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Inputs of -1, 0 and 1, a bias and the rounded product with a float64 weight, whose sums are exact in float32."""
    x = torch.randint(-1, 2, (problem.rows, problem.shape[1]), device="cuda").to(problem.dtype)
    bias = small_bias(problem)
    truth = x.double() @ dense.t() + (0.0 if bias is None else bias.double())
    return x, bias, truth.float().to(problem.dtype)


def bounded_product(x: torch.Tensor, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Products with a float64 weight, and how far results may be: one rounding, and sums that lose a unit of float32 with each
    of their terms."""
    truth, size = x.double() @ dense.t(), x.double().abs() @ dense.abs().t()
    return truth, allowance(truth, size, x.shape[1], x.dtype)


def allowance(truth: torch.Tensor, size: torch.Tensor, terms: int, dtype: torch.dtype) -> torch.Tensor:
    """See `bounded_product`; size: sums of magnitudes."""
    unit = torch.finfo(dtype).eps / 2
    return truth.abs() * unit + size * (terms * 2.0**-23) * (1 + unit) + torch.finfo(dtype).tiny


__all__ = [
    "Family", "Problem", "allowance", "bounded_product", "by_torch", "dense_weights", "exact_product", "numbers", "repeated",
    "small_bias",
]  # fmt: skip
