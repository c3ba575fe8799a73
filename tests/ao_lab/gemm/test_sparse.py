"""Where kernels of 2:4 weights enter the table of products."""

import pytest

from ao_lab import SparseQuantizedTensor
from ao_lab.gemm.select import PRODUCTS, Kernel
from ao_lab.gemm.sparse import enter


@pytest.fixture(autouse=True)
def _restored():
    before = dict(PRODUCTS)
    yield
    PRODUCTS.clear()
    PRODUCTS.update(before)


def test_kernels_enter_behind_all_others_or_before_one():
    assert SparseQuantizedTensor.__module__ == "ao_lab.tensor.sparse.sparse_tensor"  # which enters both
    names = list(PRODUCTS)
    assert names[-2:] == ["cusparselt", "sparse_wgmma"]
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
