"""How a measurement becomes rows: its values with the status ``ok``, or a status that says why there are none."""

from __future__ import annotations

from collections.abc import Callable

import torch

from experiments.harness.rows import Journal, Row

#: Metrics of one measurement, with their units.
Values = dict[str, tuple[float, str]]


#: How the entry begins that names the kernel behind a method's values; it becomes a column of their rows.
KERNEL = "kernel: "


def kernel(name: str) -> Values:
    """The entry of values that names what computed them."""
    return {f"{KERNEL}{name}": (1.0, "")} if name else {}


#: What follows an error of CUDA in torch's text of it.
ADVICE = "\nSearch for `cuda"


class Wrong(Exception):
    """A result differs from the reference's."""


def keep(journal: Journal, failed: list[Row], rows: list[Row]) -> None:
    """Rows of what went well into the journal, others beside it."""
    if any(row.metric == "status: ok" for row in rows):
        journal.add(rows)
    else:
        failed += rows


def status(word: str) -> Values:
    """The row that says how it went; what it says is in its name, as rows hold numbers."""
    return {f"status: {' '.join(word.split())[:200]}": (float(word == "ok"), "")}


def attempt(work: Callable[[], Values]) -> Values:
    """What work finds, with a status; of a failure only that."""
    try:
        return {**work(), **status("ok")}
    except Wrong as error:
        return status(f"wrong: {error}")
    except Exception as error:  # noqa: BLE001
        return status(f"error: {type(error).__name__}: {str(error).partition(ADVICE)[0]}")
    finally:
        free()


def free() -> None:
    """Give memory back, so that the next case has all of it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
