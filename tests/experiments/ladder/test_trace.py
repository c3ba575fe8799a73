"""Traces: union of intervals, shares of operators, kernels and the scopes that launched them."""

import random

import pytest
import torch

from experiments.harness.measuring import Wrong
from experiments.ladder.run import BUSY, IDLE, trace_values
from experiments.ladder.trace import Kernel, busy, kernels_of, operator_of, scopes, shares, traced, union


def test_union_counts_overlaps_once():
    """As counting whole microseconds that some interval covers."""
    draw = random.Random(0)
    for _ in range(50):
        intervals = [
            (begin, begin + draw.randint(0, 12)) for begin in draw.choices(range(60), k=draw.randint(0, 9))
        ]
        covered = {at for begin, end in intervals for at in range(begin, end)}
        assert union(intervals) == len(covered)


def test_shares_add_up_to_one_and_name_the_rest():
    kernels = [Kernel("a", 0, 3, "linear"), Kernel("b", 2, 3, "attention"), Kernel("c", 9, 13, "other")]
    found = shares(kernels)
    assert found == {
        "attention": 1 / 8,
        "linear": 3 / 8,
        "norm": 0,
        "embedding": 0,
        "convolution": 0,
        "other": 1 / 2,
    }
    assert sum(found.values()) == 1
    with pytest.raises(ValueError, match="no kernel"):
        shares([])


def event(cat, name, ts, dur, correlation=None, tid=1):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_a_kernel_belongs_to_the_innermost_scope_that_launched_it():
    trace = [
        event("user_annotation", "ladder: attention", 0, 10),
        event("user_annotation", "ladder: linear", 2, 3),
        event("user_annotation", "someone else's", 2, 1),
        event("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 3, 1, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 3, 1, correlation=3, tid=2),
        event("cuda_runtime", "cudaGraphLaunch", 12, 1, correlation=4),
        event("kernel", "elementwise", 20, 4, correlation=1),
        event("kernel", "elementwise", 22, 6, correlation=2),
        event("kernel", "elementwise", 30, 1, correlation=3),
        event("kernel", "nvjet_sm90_tst", 40, 1, correlation=4),
        event("gpu_memcpy", "Memcpy DtoD", 41, 1, correlation=4),
        event("cpu_op", "aten::mm", 0, 100),
    ]
    kernels = kernels_of({"traceEvents": trace})
    assert [one.operator for one in kernels] == ["attention", "linear", "other", "linear", "other"]
    assert busy(kernels) == 8 + 1 + 2


def test_of_a_cpu_outermost_operations_count():
    """What an operation calls is in its time; another thread has its own."""
    trace = [event("cpu_op", "aten::linear", 0, 9), event("cpu_op", "aten::addmm", 1, 7), event("cpu_op", "aten::add", 10, 2),
             event("cpu_op", "aten::mul", 1, 3, tid=2)]  # fmt: skip
    found = kernels_of({"traceEvents": trace})
    assert sorted(one.name for one in found) == ["aten::add", "aten::linear", "aten::mul"]


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("void pytorch_flash::flash_fwd_splitkv_kernel", "attention"),
        ("attend_kernel", "attention"),
        ("append_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_knob_7", "attention"),
        ("nvjet_sm90_tst_64x8", "linear"),
        ("sm90_w4a16_gemv", "linear"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "norm"),
        ("triton_per_fused_native_layer_norm_2", "norm"),
        ("triton_poi_fused_embedding_0", "embedding"),
        ("cudnn_infer_ampere_scudnn_conv_fprop", "convolution"),
        ("triton_poi_fused_mul_silu_5", "other"),
        ("triton_poi_fused__to_copy_convert_1", "other"),
    ],
)
def test_names_of_kernels_without_a_scope(name, operator):
    assert operator_of(name) == operator


def test_what_a_model_does_on_a_cpu():
    """The outermost operations, in the scopes of its modules, which leave no hook behind."""
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Conv1d(4, 4, 1), torch.nn.GELU()
    )
    x = torch.randn(4, 8)
    with scopes(model):
        kernels, seconds = traced(lambda: model(x), "cpu")
    assert {one.operator for one in kernels} == {"linear", "norm", "convolution", "other"}
    assert 0 < busy(kernels) <= 1e6 * seconds
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_idle_share_is_of_the_time_without_the_profiler():
    kernels = [
        Kernel("a", 0, 300, "linear"),
        Kernel("b", 200, 400, "other"),
        Kernel("c", 800, 1000, "linear"),
    ]
    found = trace_values(kernels, units=2, milliseconds=0.5)
    assert found[BUSY][0] == pytest.approx(0.3)
    assert found[IDLE][0] == pytest.approx(0.4)
    with pytest.raises(Wrong, match=r"kernels took 0\.300 ms"):
        trace_values(kernels, units=2, milliseconds=0.25)
