"""Names of kernels, what is compiled, and the host's time of a call."""

import pytest
import torch
from torch import nn

from experiments.harness import bench
from experiments.harness.cuda_graph import compiled_runs, demangled, joined, launched, short
from experiments.harness.measuring import Wrong

# Names of kernels as rows have them.


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blocks_kernel", "blocks_kernel"),
        ("nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT", "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)",
            "at::native::reduce_kernel",
        ),
        ("void (anonymous namespace)::copy<int>(int*)", "copy"),
        ("_ZN2at6native13reduce_kernelILi512EEEvT_", "at::native::reduce_kernel"),
        ("x" * 99, "x" * 60),
    ],
)
def test_names_lose_types_and_arguments(name, words):
    assert short(name) == words


def test_names_of_c_plus_plus_are_demangled_and_others_stay():
    assert demangled("_ZN3foo3barEi") == "foo::bar(int)"
    assert demangled("_Zbroken") == "_Zbroken"
    assert demangled("sm90_w4a16_gemv") == "sm90_w4a16_gemv"


def test_many_kernels_are_counted():
    assert joined([]) == ""
    assert joined(["a", "b", "c"]) == "a + b + c"
    assert joined(["a", "b", "c", "d", "e"]) == "a + b + c + 2 more"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_called():
    assert launched(lambda: pytest.fail("called")) == ""


def test_a_call_whose_kernels_cannot_be_named_says_so(monkeypatch, capsys):
    """Its times are kept, and the column stays empty."""

    def refused(call):
        raise AttributeError("no cuFuncGetName")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("experiments.harness.cuda_graph.captured", refused)
    assert launched(lambda: None) == ""
    assert "the kernels of a call are not named: AttributeError: no cuFuncGetName" in capsys.readouterr().err


# Rows are called compiled where a compiled program runs.


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).relu()


def run(net):
    net.compile(backend="eager")
    x = torch.ones(2, 8)
    net(x)
    with compiled_runs():
        net(x)


def test_a_program_of_another_model_is_one():
    torch.compiler.reset()
    run(Layer())
    run(Layer())


def test_what_runs_as_it_is_is_no_row():
    """torch's own containers run operation by operation, without a word."""
    torch.compiler.reset()
    with pytest.raises(Wrong, match="nothing was compiled"):
        run(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    with compiled_runs(wanted=False):
        nn.Linear(8, 8)(torch.ones(2, 8))


def test_the_host_is_timed_without_the_queue():
    now, log = [0.0], []

    def call(seconds=5e-6):
        now[0] += seconds
        log.append("call")

    def sync():
        now[0] += 1.0
        log.append("sync")

    calls = {"one": call, "other": lambda: call(7e-6)}
    found = bench.host_times(calls, sync, batches=20, batch=4, clock=lambda: now[0])
    assert found == {"one": pytest.approx(5e-6), "other": pytest.approx(7e-6)}
    assert log.count("call") == 2 * 84
    assert "".join(word[0] for word in log).find("c" * 9) == -1
