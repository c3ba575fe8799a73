"""Where kernels of 2:4 weights enter the table of products."""

from types import SimpleNamespace

import pytest
import torch

from ao_lab import SparseQuantizedTensor
from ao_lab.gemm.select import PRODUCTS, Kernel
from ao_lab.gemm.sparse import device_reason, enter, kind_of
from reference import SCHEMES


@pytest.fixture(autouse=True)
def _restored():
    before = dict(PRODUCTS)
    yield
    PRODUCTS.clear()
    PRODUCTS.update(before)


def test_kernels_enter_behind_all_others_or_before_one():
    assert SparseQuantizedTensor.__module__.startswith("ao_lab.tensor.")  # which enters them
    names = list(PRODUCTS)
    assert names[-4:] == ["sparse_wgmma", "dequantize", "reference", "cusparselt"]
    kernel = Kernel(PRODUCTS["dequantize"].run, lambda w, dtype: "never")
    enter("late", kernel)
    enter("early", kernel, before="dequantize")
    place = names.index("dequantize")
    assert list(PRODUCTS) == [*names[:place], "early", *names[place:], "late"]
    enter("early", PRODUCTS["reference"])
    assert PRODUCTS["early"] is kernel
    with pytest.raises(KeyError, match="no kernel is called 'other'"):
        enter("another", kernel, before="other")
    assert "another" not in PRODUCTS


@pytest.mark.parametrize(
    ("capability", "oldest", "later", "reason"),
    [
        ((9, 0), (9, 0), False, None),
        ((9, 0), (8, 9), True, None),
        ((10, 0), (9, 0), False, "for compute capability 9.0, this GPU has 10.0"),
        ((8, 0), (8, 9), True, "for compute capability 8.9 and later, this GPU has 8.0"),
    ],
)
def test_where_kernels_run(capability, oldest, later, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = device_reason(SimpleNamespace(is_cuda=True, device=torch.device("cuda")), oldest, later=later)
    assert (found is None) if reason is None else (reason in found)
    host = SimpleNamespace(is_cuda=False, device=torch.device("cpu"))
    assert device_reason(host, oldest) == "it is for Nvidia GPUs, this weight is on cpu"


def test_what_elements_are_multiplied_with():
    names = ("fp8_rowwise", "fp8_e5m2_rowwise", "int8_rowwise", "int4_g32")
    found = [kind_of(SCHEMES[name]) for name in names if name in SCHEMES]
    assert found[0] == "float8"
    assert found[-2:] == ["int8", "int4"]
