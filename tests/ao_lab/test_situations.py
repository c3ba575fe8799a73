"""The public functions of `ao_lab` on torch tensors have the answers of `fast`'s, whatever the situation."""

import pytest

import ao_lab
from tests.support.situations import EXAMPLES, SITUATIONS, walk

#: Of `ao_lab` it takes tables that are tensors, as `quantize_` makes them.
OF_TENSORS = ("embedding_bag",)
#: What `ao_lab` exports of these functions.
OFFERED = [name for name in EXAMPLES if hasattr(ao_lab, name.partition(",")[0]) and name not in OF_TENSORS]


@pytest.mark.parametrize("situation", [name for name in SITUATIONS if name != "fullgraph"])
@pytest.mark.parametrize("example", OFFERED)
def test_the_answer_is_that_of_fast(example, situation):
    assert list(walk(example, situation, f=ao_lab)) == []


def test_most_functions_are_offered():
    assert {"quantize", "dequantize", "fake_quantize", "encode", "pack", "matmul"} <= set(OFFERED)


@pytest.mark.parametrize("example", ["quantize", "dequantize", "fake_quantize", "encode"])
def test_programs_are_one_graph(example):
    assert list(walk(example, "fullgraph", f=ao_lab)) == []
