"""Attention of the token that is generated: its kernel in the interpreter, and on a GPU beside torch's attention."""

import pytest
import torch

from experiments.decode_attention import attend_one
from experiments.decode_model import TINY, Attention, Tables
from tests.interpreter_process import lines_of


def test_the_kernel_in_the_interpreter():
    assert len(lines_of("tests/experiments/interpreted_attention.py")) == 7


def test_shapes_without_a_gpu():
    qkv, keys = (torch.empty(size, device="meta") for size in ((1, 1, 8 * 64), (1, 2, 40, 64)))
    row, position = torch.empty(1, 64, device="meta"), torch.empty(1, device="meta")
    assert attend_one(qkv, row, row, position, keys, keys).shape == (1, 1, 4 * 64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("position", [0, 1, 7, 255, 256, 299])
def test_on_cuda_it_is_attention(position):
    """Scores and sums of float32, as torch's: what differs is the rounding of rotated numbers and of the result."""
    torch.manual_seed(position)
    layer = Attention(TINY).to("cuda", torch.bfloat16)
    cache = torch.randn(2, 1, TINY.kv_heads, 300, TINY.head_width, device="cuda").bfloat16()
    qkv = torch.randn(1, 1, sum(layer.parts), device="cuda").bfloat16()
    place = torch.tensor([position], device="cuda")
    where = Tables.of(TINY, 300, qkv).at(place, TINY.group)
    (keys, values), (other_keys, other_values) = cache.clone(), cache.clone()
    made = attend_one(qkv, where.cosine, where.sine, place, keys, values)
    wanted = layer._attend(qkv, where, other_keys, other_values)
    assert torch.equal(values, other_values)
    # Plain torch rounds both products of a rotation and their sum, the kernel the sum.
    torch.testing.assert_close(keys, other_keys, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(made, wanted, rtol=2**-5, atol=2**-5)
