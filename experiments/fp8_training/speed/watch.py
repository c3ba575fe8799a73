"""A watch for either device: CUDA events, or the host's clock where work is done when a call returns."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.timing import Call, CudaWatch, Watch, in_turn
from experiments.qat_overhead.step import HostWatch


class CpuWatch(HostWatch):
    """The host's clock; a graph is the calls themselves."""

    def capture(self, calls: Sequence[Call]) -> Call:
        """One call that makes all of these."""
        return in_turn(calls)


def watch_of(device: str) -> Watch:
    """The watch of a device."""
    return CudaWatch() if device == "cuda" else CpuWatch()


__all__ = ["CpuWatch", "watch_of"]
