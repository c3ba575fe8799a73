"""Which programs have dependent launches: those of few rows, and nothing is left of that behind a compilation."""

import warnings

import pytest
import torch
import torch._inductor.config as inductor
from torch import nn

import ao_lab
import fast
from ao_lab.compile.fused_linears import MOST_LATE, most_rows

pytestmark = pytest.mark.skipif(
    not hasattr(inductor.triton, "enable_pdl"), reason="this torch has no setting for dependent launches"
)


@pytest.fixture
def seen(monkeypatch):
    """The setting while code is made."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import fresh_cache

    found, codegen = [], GraphLowering.codegen

    def noted(self):
        found.append(inductor.triton.enable_pdl)
        return codegen(self)

    monkeypatch.setattr(GraphLowering, "codegen", noted)
    torch._dynamo.reset()
    # A program from the compiler's cache would not be made again.
    with warnings.catch_warnings(), fresh_cache():
        warnings.simplefilter("ignore")
        yield found


@pytest.mark.parametrize(("rows", "late"), [(1, True), (MOST_LATE, True), (MOST_LATE + 1, False)])
def test_dependent_launches_are_for_few_rows(seen, rows, late):
    w = fast.quantize(torch.randn(64, 128), "int8_rowwise")
    before = inductor.triton.enable_pdl
    with torch.no_grad():
        made = torch.compile(lambda x: fast.linear(x, w) + 1, options=ao_lab.compile_options())
        made(torch.randn(rows, 128, dtype=torch.bfloat16))
    assert seen == [late]
    assert inductor.triton.enable_pdl == before


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_torch_count(seen, bias):
    with torch.no_grad():
        made = torch.compile(nn.Linear(16, 16, bias), options=ao_lab.compile_options(), dynamic=False)
        for rows in (MOST_LATE, MOST_LATE + 1):
            made(torch.randn(rows, 16))
    assert seen == [True, False]


def test_rows_are_those_of_inputs():
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = torch.empty(2, 9, 64), torch.empty(512, 64)
    graph.call_function(torch.ops.aten.relu.default, (w,))
    assert most_rows(graph) == 0
    graph.call_function(torch.ops.ao_lab.linear_small.default, (x, w))
    assert most_rows(graph) == 18
    graph.call_function(torch.ops.aten.mm.default, (w, x))
    assert most_rows(graph) == 512
