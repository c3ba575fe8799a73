"""Names of kernels as rows have them."""

import pytest
import torch

from experiments.harness.launched import demangled, joined, launched, short


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
    monkeypatch.setattr("experiments.harness.launched.captured", refused)
    assert launched(lambda: None) == ""
    assert "the kernels of a call are not named: AttributeError: no cuFuncGetName" in capsys.readouterr().err
