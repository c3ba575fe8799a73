"""Values that others published: CSV files in ``experiments/published/``, with their sources.

A published value stands beside one of ours where model, setting and method are the same; the hardware may differ, and pages
say so. A stand-in never stands beside one.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "published"
DECODING = FOLDER / "ptq_decoding.csv"
#: Their metrics by our names.
METRICS = {
    "throughput": "tokens/s",
    "bandwidth": "bandwidth",
    "peak_memory": "peak memory",
    "model_size": "model size",
}
#: The table that is beside ours: same model and setting.
MODEL, HARDWARE = "Llama-3.1-8B", "H100"


@dataclass(frozen=True)
class Published:
    """One published value. setting: under which it was measured, where one table has several."""

    paper: str
    model: str
    hardware: str
    method: str
    metric: str
    value: float
    unit: str
    source: str
    setting: str = ""


@lru_cache(maxsize=1)
def decoding() -> tuple[Published, ...]:
    """Every published row about generating with a quantized Llama at batch 1."""
    return read(DECODING)


def read(path: Path) -> tuple[Published, ...]:
    """The rows of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(
            Published(**{**record, "value": float(record["value"])}) for record in csv.DictReader(file)
        )


def published(method: str, model: str = MODEL, hardware: str = HARDWARE) -> dict[str, float]:
    """What was published for a method, by our names of metrics."""
    return {
        METRICS[one.metric]: one.value
        for one in decoding()
        if (one.model, one.hardware, one.method) == (model, hardware, method) and one.metric in METRICS
    }
