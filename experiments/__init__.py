"""Experiments: a folder for each table or figure. They measure, and contain no quantization algorithm.

`reproduce` runs them, and `python -m experiments` the same from a shell; `ao-lab reproduce` is the comfortable way. A folder
with an `EXPERIMENT` in its ``__init__`` is one (`experiments.harness.registry`). What it measures is imported when it runs, so
importing this package is quick.
"""

from typing import Any

from experiments.harness.paths import Paths
from experiments.harness.registry import EXPERIMENTS


def __getattr__(name: str) -> Any:
    """`reproduce`, which needs torch, when it is first used."""
    if name != "reproduce":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from experiments.runs.run import reproduce

    return reproduce


__all__ = ["EXPERIMENTS", "Paths", "reproduce"]
