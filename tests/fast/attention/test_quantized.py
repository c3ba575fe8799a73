"""`fast.attention.quantized`: CPU tensors against the reference, kernels compiled for Hopper and in Triton's interpreter."""

import platform
import re

import pytest
import torch

from fast.attention.quantized import NONE, quantized_attention
from reference.attention import quantized as specified
from reference.attention.quantized import ATTENTION_RECIPES, AttentionRecipe, by_blocks


def states(queries=40, keys=40, width=64, dtype=torch.bfloat16):
    """q of 4 heads as a view of (B, T, heads, width), k and v of 2."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, queries, 4, width, generator=draw).to(dtype).transpose(1, 2)
    return q, *(torch.randn(2, 2, keys, width, generator=draw).to(dtype) for _ in range(2))


@pytest.mark.parametrize(
    "recipe", [*ATTENTION_RECIPES, AttentionRecipe(key=by_blocks("int8_rowwise", 64), rotate=False)]
)
def test_cpu_is_the_reference(recipe):
    """The same numbers, for a record that has no name too; memory is (B, T, H, D)."""
    q, k, v = states()
    options = {"causal": True, "window": 9, "offset": 2, "mask": torch.rand(2, 1, 40, 40) > 0.1}
    y = quantized_attention(q, k, v, recipe, scale=0.2, **options)
    assert torch.equal(y, specified.quantized_attention(q, k, v, recipe, scale=0.2, **options))
    assert y.transpose(1, 2).is_contiguous()
    assert y.dtype == torch.bfloat16


def test_compiled_and_checked():
    """One graph, the same result; the fake has the strides of the result."""
    q, k, v = states()

    def f(q, k, v):
        return quantized_attention(q, k, v, causal=True) + 1

    assert torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(q, k, v), f(q, k, v))
    ids = [scheme.key for scheme in ATTENTION_RECIPES["int8"].schemes]
    rules = (*ids, True, True, 128, 0.1, True, -(1 << 31), -(1 << 31), None)
    torch.library.opcheck(
        torch.ops.ao_lab.quantized_attention, (q, k, v, *rules), test_utils="test_faketensor"
    )


def test_refused():
    q, k, v = states()
    with pytest.raises(ValueError, match="has no gradient"):
        quantized_attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        quantized_attention(q, k, v)
    with pytest.raises(ValueError, match="beside causal=True"):
        quantized_attention(q.detach(), k, v, window=3)
    with pytest.raises(ValueError, match="offset is the place of the first query"):
        quantized_attention(q.detach(), k, v, causal=True, offset=NONE)
    with pytest.raises(ValueError, match="key heads divide query heads"):
        quantized_attention(q.detach()[:, :3], k, v)


@pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
class TestKernels:
    @pytest.mark.parametrize(
        ("what", "names"),
        [
            pytest.param("codes", "int8,int8_block,fp8", marks=pytest.mark.nightly),
            ("attend", "causal,window,zeros"),
            pytest.param("attend", "all,offset,mask,few keys,wide", marks=pytest.mark.nightly),
        ],
    )
    def test_interpreted(self, what, names):
        from tests.emulator.interpreter_process import lines_of

        assert lines_of("quantized_attention", what, names) == [f"{what} {name}" for name in names.split(",")]

    @pytest.mark.parametrize(
        ("recipe", "width"),
        [("int8_block", 128), ("int8", 128), ("fp8", 128), ("int8", 64), ("int8", 96), ("int8_block", 256)],
    )
    @pytest.mark.nightly
    def test_compiled(self, recipe, width):
        """Both matmuls by `wgmma`, codes by TMA, weights that stay in registers and are waited for, no spills."""
        from fast.kernels.attention import prefill
        from tests.fast.kernels.compiling.kernel_compiler import launched

        q, k, v = (
            torch.zeros(1, 512, heads, width, dtype=torch.bfloat16).transpose(1, 2) for heads in (4, 2, 2)
        )
        record = ATTENTION_RECIPES[recipe]
        machines = launched(lambda: prefill.attention(q, k, v, record, scale=0.1, causal=True))
        assert [m.kernel for m in machines] == [
            "statistics_kernel", "mean_kernel", "heads_kernel", "heads_kernel", "values_kernel", "prefill_kernel"
        ]  # fmt: skip
        assert all(m.local == m.stack == 0 for m in machines)
        machine = machines[-1]
        names = {name.split(".")[0] for name in machine.instructions}
        assert {"QGMMA", "UTMALDG"} <= names
        assert ("IGMMA" in names) == (recipe != "fp8")
        assert not {"HGMMA", "HMMA", "IMMA"} & names
        assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", machine.ptx)) == {"0"}
        moved = re.findall(r"shfl\.sync\.idx\.b32 +\S+, \S+, (\S+),", machine.ptx)
        assert set(moved) <= {"0"}  # the number of the warp; no weight leaves its thread
