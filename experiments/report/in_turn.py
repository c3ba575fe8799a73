"""Speeds that were timed in turn with the dense model's, as pages tell them: the ratio, and whether it is noisy.

The rule is that of `ao-lab bench` and `ao-lab compare`: rounds that disagree, medians that are not the rounds', and a dense
model that was far slower in these rounds than in those of another configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from ao_lab.measure.times import NOISY, doubt_of, drift_of
from experiments.report.results import Results

#: Setting and method.
Line = tuple[str, str]


@dataclass(frozen=True)
class InTurn:
    """Metrics of a rate: its own, the dense model's in the same rounds, and of the rounds' ratios the median and the ends."""

    rate: str
    dense: str
    speedup: str
    lowest: str
    highest: str

    def told(self, results: Results, line: Line) -> str:
        """How much faster than the dense model, and whether that is noisy; "" where it was not timed in turn."""
        middle = results.value(*line, self.speedup)
        if middle is None:
            return ""
        return f"{middle:.2f}x{NOISY * bool(self.doubt(results, line))}"

    def doubt(self, results: Results, line: Line) -> str:
        """Why a speedup is noisy; "" where nothing says that it is. Rows without the dense model's rate have the ends alone."""
        low, high = (results.value(*line, one) for one in (self.lowest, self.highest))
        rate, dense = (results.value(*line, one) for one in (self.rate, self.dense))
        if low is None or high is None:
            return ""
        if not rate or not dense:
            return doubt_of(1.0, (low + high) / 2, low, high)
        others = [1 / row.value for row in results.rows if row.metric == self.dense and row.value]
        return doubt_of(1 / rate, 1 / dense, low, high) or drift_of(1 / dense, others)
