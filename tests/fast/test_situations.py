"""Every public function of `fast` in every situation of `tests.support.situations` gives its one stated answer."""

import inspect

import pytest
import torch

import fast
from fast import device
from tests.support.situations import ANSWERS, EXAMPLES, SITUATIONS, walk


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_answer_is_the_stated_one(example, situation):
    assert list(walk(example, situation)) == []


def test_each_public_function_is_in_the_table():
    functions = {name for name in fast.__all__ if inspect.isfunction(getattr(fast, name))}
    # SparseGPT is no single call: torch's own factorizations and products, by steps, for one weight at a time.
    functions.remove("sparsegpt")
    assert functions == {name.partition(",")[0] for name in EXAMPLES}
    assert {name for name, _ in ANSWERS} <= {"", *EXAMPLES}
    assert {name.partition(":")[0] for _, name in ANSWERS} <= {*SITUATIONS, "another library"}


@pytest.mark.parametrize("example", EXAMPLES)
def test_arrays_of_another_library_are_refused(example):
    case = EXAMPLES[example]
    tensors = case.make(case.rows, "cpu")
    name, x = next(iter(tensors.items()))
    error, text = ANSWERS["", "another library"]
    array = x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()
    with pytest.raises((error, AttributeError) if name in ("codes", "packed") else error, match=text):
        case.call(fast, {**tensors, name: array})


def test_builds_for_rocm_have_no_kernels(monkeypatch):
    """An MI300 reports a compute capability of (9, 4); what we compile is for NVIDIA GPUs."""
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 4))
    device._reason.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="this build of torch is for ROCm"):
            assert "ROCm" in device._reason(0)
    finally:
        device._reason.cache_clear()
