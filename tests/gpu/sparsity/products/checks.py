"""Checks of variants: what each found, the same serially where it was wrong, counts of them by what variants have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fast.kernels.sm90_sparse24_gemm.variants import Variant
from tests.gpu.sparsity.products.exact import Wrong, complaint, unstable

Job = tuple[Variant, tuple[str, str]]


@dataclass
class Check:
    """A variant for dtypes of values and x: what is wrong with it, and with it where each stage waits for the one before.

    again: whether it was run so, too.
    """

    variant: Variant
    dtypes: tuple[str, str]
    wrong: Wrong | None
    again: bool = False
    serially: Wrong | None = None

    @property
    def name(self) -> str:
        """Variant and dtypes, in short."""
        first, second = (name.removeprefix("float8_") for name in self.dtypes)
        return f"{self.variant.name} {first}" + (f" x {second}" if first != second else "")

    def line(self) -> str:
        """What is wrong."""
        assert self.wrong is not None
        x = "x".join(map(str, self.wrong.shape))
        return f"WRONG {self.name} {x} {self.wrong.out}: {self.wrong.text[:120]}"

    def row(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "variant": self.variant.name, **self.variant._asdict(), "dtypes": self.dtypes, "right": self.wrong is None,
            **(self.wrong._asdict() if self.wrong else {}), "run_serially": self.again,
            "serially": self.serially.text if self.serially else None,
        }  # fmt: skip


def found_by(job: Job, failed: Callable[[str], None]) -> Wrong | None:
    """What is wrong with a variant for dtypes; failed: told what was raised, since after an illegal access nothing runs."""
    variant, dtypes = job
    try:
        wrong = complaint(variant, dtypes)
        # Sums of int8 are exact: that was seen already.
        if wrong is None and variant.pair <= 2 and dtypes[0] != "int8":
            wrong = unstable(variant, dtypes)
    except Exception as error:  # noqa: BLE001  others go on
        text = f"{type(error).__name__}: {str(error)[:300]}"
        failed(text)
        wrong = Wrong(text, (0, 0, 0), "")
    return wrong


#: What variants have in common.
AXES: dict[str, Callable[[Check], Any]] = {
    "tokens": lambda one: one.variant.tokens,
    "warpgroups": lambda one: one.variant.groups,
    "pair": lambda one: one.variant.pair,
    "splits": lambda one: one.variant.splits,
    "promoted": lambda one: one.variant.promote,
    "dtypes": lambda one: one.name.split(" ", 1)[1],
}


def counts(checks: Sequence[Check]) -> Iterator[str]:
    """Wrong ones of all, by each axis: a line each; and of those that were run again how many are right serially."""
    for axis, value_of in AXES.items():
        values = sorted({value_of(one) for one in checks})
        each = [[one for one in checks if value_of(one) == value] for value in values]
        parts = (f"{value} {_wrong(part)}/{len(part)}" for value, part in zip(values, each, strict=True))
        yield f"  wrong by {axis}: " + ", ".join(parts)
    again = [one for one in checks if one.again]
    if again:
        still = [one.name for one in again if one.serially is not None]
        right = len(again) - len(still)
        yield f"  {right} of {len(again)} wrong ones are right serially; not: {', '.join(still[:10]) or 'none'}"


def _wrong(checks: Iterable[Check]) -> int:
    return sum(one.wrong is not None for one in checks)


def write(checks: Sequence[Check], folder: Path) -> None:
    """linear_sparse_checks.json: a list, a line each."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(one.row()) for one in checks)
    (folder / "linear_sparse_checks.json").write_text(f"[\n{rows}\n]\n")


__all__ = ["AXES", "Check", "Job", "counts", "found_by", "write"]
