"""tests/gpu/harness/traces.py on a trace that is written by hand, and of a profiler on a CPU."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.gpu.harness import traces


def event(cat, name, ts, dur, *, tid=0, correlation=None):
    return {
        "ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": {"correlation": correlation}
    }  # fmt: skip


# Two steps: in each a graph of two kernels that overlap by 1 and a third after a gap of 2; then a copy outside.
STEPS = [
    one
    for at, number in ((0, 1), (100, 3))
    for one in (
        event("user_annotation", f"ProfilerStep#{number}", at, 90),
        event("cuda_runtime", "cudaGraphLaunch", at + 1, 3, correlation=number),
        event("kernel", "first", at + 10, 5, tid=7, correlation=number),
        event("kernel", "second", at + 14, 6, tid=7, correlation=number),
        event("kernel", "first", at + 22, 8, tid=7, correlation=number),
        event("gpu_memcpy", "copy", at + 40, 2, tid=7, correlation=number + 1),
        event("cpu_op", "aten::outer", at + 50, 20),
        event("cpu_op", "aten::inner", at + 55, 5),
        event("cpu_op", "aten::inner", at + 60, 4),
        event("cpu_op", "aten::outer", at + 50, 10, tid=1),
    )
]


def test_gpu_work():
    found = traces.gpu_times(traces.complete({"traceEvents": STEPS[::-1]}), 2)
    assert found == pytest.approx({
        "count": 4, "kernels_us": 21, "busy_us": 20, "span_us": 66, "graphs": 1, "graph_count": 3, "graph_span_us": 20,
        "graph_busy_us": 18, "graph_idle_us": 2, "between_us": 80, "outside_us": 2, "outside_count": 1,
    })  # fmt: skip


def test_kernels_and_the_host_by_name():
    events = traces.complete({"traceEvents": STEPS})
    assert traces.kernels(events, 2)["first"] == {"count": 2, "us": 13}
    host = traces.host(events, 2)
    assert host["aten::outer"] == {"count": 2, "us": 30, "self_us": 21}
    assert host["aten::inner"] == {"count": 2, "us": 9, "self_us": 9}
    assert host["cudaGraphLaunch"]["us"] == 3
    assert not any(name.startswith("ProfilerStep") for name in host)


def test_nothing_is_no_work():
    assert set(traces.gpu_times([], 1).values()) == {0}


def test_a_trace_of_torch(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    host = traces.host(traces.complete(json.loads((tmp_path / "trace.json").read_text())), 1)
    assert host["aten::linear"]["count"] == 1
    assert host["aten::linear"]["us"] > host["aten::linear"]["self_us"] >= 0
