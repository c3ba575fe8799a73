"""Attention of the token that is generated: its kernel in the interpreter, and on a GPU beside torch's attention."""

import re

import pytest
import torch
import triton
from triton.compiler import ASTSource

from experiments.decode.model import CachedAttention, PositionTables
from experiments.models.llama import TINY
from fast.kernels.layers.attention import attention_kernel
from fast.layers.attention import WARPS, attend_one, checked_sizes
from tests.emulator.interpreter_process import lines_of
from tests.fast.kernels.compiling.kernel_compiler import TARGET, machine


def test_the_kernel_in_the_interpreter():
    assert len(lines_of("tests/emulator/programs/attention.py")) == 7


def test_the_cache_is_asked_for_before_the_kernel_in_front_has_ended():
    """And nothing else: queries, rotations and results come after the wait."""
    types = {"position": "*i64", "scale": "fp32"}
    names = attention_kernel.arg_names[:8]
    signature = {name: types.get(name, "*bf16") for name in names}
    sizes = {"HEADS": 32, "KV_HEADS": 8, "WIDTH": 128, "LENGTH": 232, "STEP": 256, "USE_PDL": True}
    source = ASTSource(
        attention_kernel,
        {**signature, **dict.fromkeys(sizes, "constexpr")},
        sizes,
        {(at,): [["tt.divisibility", 16]] for at in range(7)},
    )
    made = triton.compile(source, target=TARGET, options={"num_warps": WARPS, "launch_pdl": True})
    found = machine("attention_kernel", made.asm, 1)
    assert (found.local, found.stack) == (0, 0)
    # The kernel behind may begin only then.
    assert re.findall(r"griddepcontrol\.(\w+)", found.ptx) == ["wait", "launch_dependents"]
    before, after = "\n".join(found.order).split("ACQBULK")
    wide = [name for name in before.splitlines() if name.startswith("LDG") and "128" in name]
    assert len(wide) == 2 * 256 * 128 * 2 // (16 * 32 * WARPS)
    assert not re.search("^STG", before, re.MULTILINE)
    # The position, beside the cache.
    assert len(re.findall("^LDG", before, re.MULTILINE)) == len(wide) + 1
    assert re.search("^STG", after, re.MULTILINE)


def test_unsupported_sizes_raise():
    qkv, keys = torch.empty(1, 1, 8 * 64), torch.empty(1, 2, 40, 64)
    for wrong in (torch.empty(2, 2, 40, 64), keys.mT.contiguous().mT, torch.empty(1, 2, 40, 48)):
        with pytest.raises(ValueError, match="attend_one takes one token"):
            checked_sizes(qkv, wrong, wrong)
    with pytest.raises(ValueError, match="attend_one takes one token"):
        checked_sizes(qkv[:, :0], keys, keys)
    assert checked_sizes(qkv, keys, keys) == (2, 40, 64)


def test_shapes_without_a_gpu():
    qkv, keys = (torch.empty(size, device="meta") for size in ((1, 1, 8 * 64), (1, 2, 40, 64)))
    row, position = torch.empty(1, 64, device="meta"), torch.empty(1, device="meta")
    assert attend_one(qkv, row, row, position, keys, keys).shape == (1, 1, 4 * 64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("position", [0, 1, 7, 255, 256, 299])
def test_on_cuda_it_is_attention(position):
    """Scores and sums of float32, as torch's: only the rounding of rotated elements and of the result differs."""
    torch.manual_seed(position)
    layer = CachedAttention(TINY).to("cuda", torch.bfloat16)
    cache = torch.randn(2, 1, TINY.kv_heads, 300, TINY.head_dim, device="cuda").bfloat16()
    qkv = torch.randn(1, 1, sum(layer.widths), device="cuda").bfloat16()
    index = torch.tensor([position], device="cuda")
    positions = PositionTables.of(TINY, 300, qkv).at(index, TINY.group)
    (keys, values), (other_keys, other_values) = cache.clone(), cache.clone()
    y = attend_one(qkv, positions.cosine, positions.sine, index, keys, values)
    expected = layer._attend(qkv, positions, other_keys, other_values)
    assert torch.equal(values, other_values)
    # Plain torch rounds both products of a rotation and their sum, the kernel the sum.
    torch.testing.assert_close(keys, other_keys, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(y, expected, rtol=2**-5, atol=2**-5)
