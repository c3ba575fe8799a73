"""What a GPU did in some steps, from the trace of torch's profiler: busy time, and shares of operators.

Idle share = 1 - B / T: B the length of the union of the intervals of kernels and copies (not their sum: streams overlap), T the
wall time of the same steps without the profiler, which slows the host down and would exaggerate idleness.

A kernel belongs to the innermost scope that the host was in when it launched it (`scopes`, record_function around modules). One
that a CUDA graph or a compiled program launched has no scope: its name says which operator it is (`NAMES`, the first that
matches; Inductor writes the operators that it fused into names). What neither says is "other", and printed. On a CPU the
outermost operations of torch stand for kernels.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

ATTENTION, LINEAR, NORM, EMBEDDING, CONVOLUTION, OTHER = OPERATORS = (
    "attention", "linear", "norm", "embedding", "convolution", "other",
)  # fmt: skip
#: How names of scopes begin.
SCOPE = "ladder: "
#: Categories of the trace: what runs on a GPU, what launches it, what the host is in.
DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
LAUNCH = frozenset(("cuda_runtime", "cuda_driver"))
ANNOTATION, CPU = "user_annotation", "cpu_op"
#: Operators by parts of kernels' names, for kernels without a scope.
NAMES: tuple[tuple[str, str], ...] = (
    (ATTENTION, r"flash|fmha|sdpa|attention|attend|softmax|combine_kernel|rotary|append"),
    (CONVOLUTION, r"conv(?!ert)|fprop|dgrad"),
    (
        LINEAR,
        r"gemm|gemv|cutlass|nvjet|cublas|splitk|_mm\b|_mm_|addmm|w4a16|w8a16|s8_|small_m|linear|matmul|triton_tem",
    ),
    (NORM, r"norm|rsqrt|_mean_|pow"),
    (EMBEDDING, r"embedding|indexSelect|index_select"),
)


@dataclass(frozen=True)
class Kernel:
    """One kernel or copy: microseconds of its interval, and the operator that it is of."""

    name: str
    begin: float
    end: float
    operator: str


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (begin, end); where they overlap they count once."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def busy(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which something ran."""
    return union((one.begin, one.end) for one in kernels)


def shares(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Share of each operator of the sum of all kernels' times; they add up to 1. ValueError without kernels."""
    total = sum(one.end - one.begin for one in kernels)
    if not total > 0:
        raise ValueError("the trace holds no kernel, so that operators have no shares")
    return {
        name: sum(one.end - one.begin for one in kernels if one.operator == name) / total
        for name in OPERATORS
    }


def operator_of(name: str) -> str:
    """The operator that a kernel's name says; "other" where it says none."""
    return next((operator for operator, rule in NAMES if re.search(rule, name, re.IGNORECASE)), OTHER)


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """Kernels of a trace in Chrome's format, as torch.profiler exports it; of a CPU its outermost operations."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    inside = Scopes(event for event in events if event.get("cat") == ANNOTATION)
    launched = {
        event["args"]["correlation"]: inside.at(event)
        for event in events
        if event.get("cat") in LAUNCH and "correlation" in event.get("args", {})
    }
    found = [
        kernel_of(event, launched.get(event.get("args", {}).get("correlation")))
        for event in events
        if event.get("cat") in DEVICE
    ]
    return found or [kernel_of(event, inside.at(event)) for event in outermost(events)]


def kernel_of(event: Mapping[str, Any], scope: str | None) -> Kernel:
    """A kernel by its event and the scope that launched it."""
    begin = float(event["ts"])
    return Kernel(event["name"], begin, begin + float(event["dur"]), scope or operator_of(str(event["name"])))


@dataclass
class Scope:
    """An interval of the host; parent: the place of the scope around it, -1 for none."""

    begin: float
    end: float
    operator: str
    parent: int = -1


class Scopes:
    """Scopes of the ladder by thread."""

    def __init__(self, annotations: Iterable[Mapping[str, Any]]) -> None:
        self.by_thread: dict[Any, list[Scope]] = {}
        for event in annotations:
            if str(event["name"]).startswith(SCOPE):
                begin = float(event["ts"])
                one = Scope(begin, begin + float(event["dur"]), str(event["name"]).removeprefix(SCOPE))
                self.by_thread.setdefault(event["tid"], []).append(one)
        for scopes in self.by_thread.values():
            scopes.sort(key=lambda one: (one.begin, -one.end))
            around: list[int] = []
            for at, one in enumerate(scopes):
                while around and scopes[around[-1]].end < one.end:
                    around.pop()
                one.parent = around[-1] if around else -1
                around.append(at)

    def at(self, event: Mapping[str, Any]) -> str | None:
        """The innermost scope that the thread of an event is in at its beginning."""
        moment, scopes = float(event["ts"]), self.by_thread.get(event["tid"], [])
        at = bisect_right(scopes, moment, key=lambda one: one.begin) - 1
        while at >= 0 and scopes[at].end < moment:
            at = scopes[at].parent
        return scopes[at].operator if at >= 0 else None


def outermost(events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Operations that no other operation of their thread called."""
    reached: dict[Any, float] = {}
    for event in sorted(
        (one for one in events if one.get("cat") == CPU), key=lambda one: (one["ts"], -one["dur"])
    ):
        if event["ts"] >= reached.get(event["tid"], float("-inf")):
            reached[event["tid"]] = float(event["ts"]) + float(event["dur"])
            yield event


def scope_of(module: nn.Module) -> str | None:
    """The operator that a module is; None for one that is made of others."""
    name = type(module).__name__
    if isinstance(module, nn.Linear):
        return LINEAR
    if isinstance(module, nn.Embedding):
        return EMBEDDING
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d)):
        return CONVOLUTION
    if name.endswith("Norm"):
        return NORM
    return ATTENTION if name.endswith(("Attention", "RotaryEmbedding")) else None


@contextmanager
def scopes(model: nn.Module) -> Iterator[None]:
    """Each module's forward inside in a scope of its operator, the innermost counts; not for compiled programs, which have
    none."""
    with ExitStack() as stack:
        for module in model.modules():
            operator = scope_of(module)
            if operator is not None:
                entered: list[Any] = []
                before, after = hooks(SCOPE + operator, entered)
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


def hooks(name: str, entered: list[Any]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks that enter and leave a scope."""

    def before(module: nn.Module, inputs: Any) -> None:
        scope = torch.profiler.record_function(name)
        scope.__enter__()
        entered.append(scope)

    def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
        entered.pop().__exit__(None, None, None)

    return before, after


def traced(call: Callable[[], object], device: str) -> tuple[list[Kernel], float]:
    """Kernels of a call, and its seconds. Every later launch of this process takes the host longer: time first, trace last."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes a line to stderr for each trace otherwise
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text(encoding="utf-8"))), seconds
