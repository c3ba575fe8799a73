"""Baselines: the same work without our kernels. Each is timed in turn with ours, on the same inputs.

A baseline that has nothing for a case has no row; one that should run and cannot has a row with its error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ao_lab.measure.turns import Call
from experiments.kernels.expressions import expression
from experiments.kernels.operations import Case, Inputs
from experiments.kernels.torchao_calls import Made, torchao_call

COMPILED = {"mode": "max-autotune-no-cudagraphs", "dynamic": False}


@dataclass(frozen=True)
class Baseline:
    """Who it is, what it computes, how its call is found for a case, whether it is compiled, and only as one graph."""

    name: str
    what: str
    find: Callable[[Case], Made | None]
    compiled: bool
    whole: bool = False


BASELINES = (
    Baseline(
        "torch eager", "the work as plain torch operations, one kernel each", expression, compiled=False
    ),
    Baseline(
        "torch.compile",
        "the same expression under torch.compile (max-autotune-no-cudagraphs, static shapes)",
        expression,
        compiled=True,
        whole=True,
    ),
    Baseline(
        "torchao",
        "torchao's function for the scheme by its own convention, under torch.compile as above; it packs 4-bit MX and NVFP4 "
        "codes, and stores 6-bit and integer codes one a byte",
        torchao_call,
        compiled=True,
    ),
)


def offers(baseline: Baseline, case: Case) -> bool:
    """Whether a baseline has something for a case; one whose library is missing counts, so that its row can say so."""
    try:
        return baseline.find(case) is not None
    except ImportError:
        return True


def calls_of(baseline: Baseline, case: Case, sets: Sequence[Inputs]) -> list[Call]:
    """One call per input set, all through one function, which is compiled when it first runs."""
    found = baseline.find(case)
    if found is None:
        raise ValueError(f"{baseline.name} has nothing for {case.name}")
    run, arguments = found
    if baseline.compiled and not is_kernel(run):
        # A compiled function is kept by its code, which all expressions of a kind share: begin anew, or the ninth falls back.
        torch._dynamo.reset()
        # A graph break would make an expression slower than it has to be: better an error than a weak baseline.
        run = torch.compile(run, fullgraph=baseline.whole, **COMPILED)
    return [partial(run, *arguments(inputs)) for inputs in sets]


def is_kernel(run: Callable[..., Any]) -> bool:
    """Whether a baseline's function launches a Triton kernel itself, and has nothing to compile."""
    return (
        getattr(run, "__name__", type(run).__name__).startswith("triton_") or "CustomOp" in type(run).__name__
    )
