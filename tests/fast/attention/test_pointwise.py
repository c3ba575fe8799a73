"""HSTU's attention by a kernel: in Triton's interpreter, and what is compiled for Hopper."""

import platform

import pytest
import torch

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.attention import pointwise


@pytest.mark.parametrize("name", ["few", pytest.param("tiles", marks=pytest.mark.nightly)])
def test_interpreted(name):
    """Users of several tiles, without history, candidates or tokens; with and without tables of a bias."""
    from tests.emulator.interpreter_process import lines_of

    assert lines_of("pointwise_attention", name) == [name, f"{name}, bias"]


def states(tokens, width=128, heads=4):
    both = torch.zeros(tokens, 4 * heads * width, dtype=torch.bfloat16)
    _, v, q, k = (one.unflatten(-1, (heads, width)) for one in both.chunk(4, -1))
    return q, k, v


@pytest.mark.parametrize("biased", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_compiled(biased):
    """DLRMv3's heads: both products by `wgmma`, one special function a score, no spills."""
    from tests.fast.kernels.compiling.kernel_compiler import launched

    users = [torch.zeros(2, dtype=torch.int64) for _ in range(3)]
    tables = (torch.zeros(4096, dtype=torch.int64), torch.zeros(2048), torch.zeros(64)) if biased else ()
    (machine,) = launched(
        lambda: (pointwise.pointwise_attention(*states(4096), *users, 2048, 0.1, 2048.0, *tables),)
    )
    assert (machine.kernel, machine.local, machine.stack) == ("pointwise_attention_kernel", 0, 0)
    names = {name.split(".")[0] for name in machine.instructions}
    assert {"HGMMA", "LDGSTS", "MUFU"} <= names
    special = {name for name in machine.instructions if name.startswith("MUFU")}
    assert special == {"MUFU.TANH"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[..., :100], k[..., :100], v), "width of 16, 32, 64, 128"),
        (lambda q, k, v: (q.float(), k, v), "bfloat16 or all float16"),
        (
            lambda q, k, v: (q, k.transpose(0, 1).contiguous().transpose(0, 1), v),
            "heads of k lie one after the other",
        ),
        (lambda q, k, v: (q, states(64, 64)[1], v), "k has the shape of q"),
        (lambda q, k, v: (q, states(64, heads=2)[1], v), "k has the shape of q"),
        (lambda q, k, v: (q, k, v[:63]), "v its tokens and heads"),
    ],
)
def test_what_is_refused(change, words):
    users = [torch.zeros(2, dtype=torch.int64) for _ in range(3)]
    with pytest.raises(ValueError, match=words):
        pointwise.pointwise_attention(*change(*states(64)), *users, 64, 0.1, 64.0)
    short = (torch.zeros(64, dtype=torch.int64), torch.zeros(32), torch.zeros(64))
    with pytest.raises(ValueError, match="has 32 distances"):
        pointwise.pointwise_attention(*states(64), *users, 64, 0.1, 64.0, *short)
    for part in ({"times": short[0]}, {"positions": torch.zeros(64), "buckets": short[2]}):
        with pytest.raises(ValueError, match="come together"):
            pointwise.pointwise_attention(*states(64), *users, 64, 0.1, 64.0, **part)
