"""Measured times of variants of kernel families: reports/gpu/family_times.csv."""

from __future__ import annotations

import csv
from pathlib import Path

from experiments.report.families import problem_of
from fast.gemm.families import FAMILIES
from fast.gemm.problem import Problem

FILE = Path(__file__).resolve().parents[2] / "reports/gpu/family_times.csv"
#: What was timed beside variants: dense weights, in bfloat16 and dequantized for the call, and another family.
OTHERS = ("bf16", "dense", "linear_small")
Key = tuple[str, int, int, str, int]


def measured(family: str, device: str = "NVIDIA H200") -> dict[Key, dict[str, float]]:
    """Microseconds by scheme, n, k, rows (of experts those of each, or of all) and experts, then by variant."""
    found: dict[Key, dict[str, float]] = {}
    with FILE.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if (row["family"], row["device"]) == (family, device):
                key = row["scheme"], int(row["n"]), int(row["k"]), row["rows"], int(row["experts"] or 0)
                found.setdefault(key, {})[row["variant"]] = float(row["us"])
    return found


def problem(family: str, key: Key) -> Problem:
    """As `choose` sees it."""
    scheme, n, k, rows, experts = key
    p = problem_of(FAMILIES[family].takes[0].layout, scheme, (n, k))
    return p._replace(rows=sum(map(int, rows.split())) / (experts or 1), experts=experts)


__all__ = ["FILE", "OTHERS", "Key", "measured", "problem"]
