"""Kernels of 2:4 weights in the table of products, and what several of them ask."""

from types import SimpleNamespace

import pytest
import torch

from ao_lab.gemm.sparse import device_reason, kind_of
from reference import SCHEMES
from tests.ao_lab.gemm.capability import set_capability
from tests.support.runs import forks


def test_kernels_of_sparse_weights_stand_before_those_that_take_all_and_are_imported_for_such_a_weight():
    program = """
import sys, torch, ao_lab
from ao_lab.gemm.select import PRODUCTS, select_kernel
config = ao_lab.Int4WeightOnlyConfig(group_size=32)
w = ao_lab.quantized(torch.randn(64, 64), config.recipe())
assert list(PRODUCTS)[-5:] == ["sparse_int4", "sparse_wgmma", "dequantize", "reference", "cusparselt"]
reasons = {PRODUCTS[name].unsupported_reason(w.t(), torch.bfloat16) for name in ("sparse_int4", "sparse_wgmma", "cusparselt")}
print(reasons, "ao_lab.gemm.sparse" in sys.modules)
w = ao_lab.quantized_compressed(torch.randn(64, 32).repeat_interleave(2, 1) * torch.tensor([1, 0] * 32), config.recipe())
select_kernel(w.t(), torch.bfloat16)
import ao_lab.gemm.sparse
print(PRODUCTS["sparse_int4"] is ao_lab.gemm.sparse.INT4, PRODUCTS["sparse_wgmma"] is ao_lab.gemm.sparse.WGMMA)
print(torch.ops.ao_lab.cusparselt_mm)
"""
    done = forks.python("-c", program)
    told = ["{'the weight is not in 2:4 storage'} False", "True True", "ao_lab.cusparselt_mm"]
    assert done.stdout.splitlines() == told, done.stderr


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
    set_capability(monkeypatch, capability)
    found = device_reason(SimpleNamespace(is_cuda=True, device=torch.device("cuda")), oldest, later=later)
    assert (found is None) if reason is None else (reason in found)
    host = SimpleNamespace(is_cuda=False, device=torch.device("cpu"))
    assert device_reason(host, oldest) == "it is for Nvidia GPUs, this weight is on cpu"


def test_what_elements_are_multiplied_with():
    names = ("fp8_rowwise", "fp8_e5m2_rowwise", "int8_rowwise", "int4_g32")
    found = [kind_of(SCHEMES[name]) for name in names if name in SCHEMES]
    assert found[0] == "float8"
    assert found[-2:] == ["int8", "int4"]
