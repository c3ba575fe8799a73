"""Which programs have dependent launches: those of few rows, and nothing is left of that behind a compilation."""

import copy
import pickle

import pytest
import torch
import torch._inductor.config as inductor
from torch import nn

import ao_lab
import fast
from ao_lab.compile.fused_linears import MOST_LATE, FuseLinears, most_rows

pytestmark = pytest.mark.skipif(
    not hasattr(inductor.triton, "enable_pdl"), reason="this torch has no setting for dependent launches"
)


class Enough(Exception):
    """What is asked for was seen; the host's compiler would take minutes of a fresh cache."""


@pytest.fixture
def seen(monkeypatch):
    """The setting where code is made; none is."""
    import torch._functorch.config as functorch
    from torch._inductor.graph import GraphLowering

    found = []

    def noted(self):
        found.append(inductor.triton.enable_pdl)
        raise Enough

    monkeypatch.setattr(GraphLowering, "codegen", noted)
    torch._dynamo.reset()
    # A program from the compiler's caches would not be made again.
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield found
    torch._dynamo.reset()


def compiled(function, x):
    """As far as code is made for it."""
    with torch.no_grad(), pytest.raises(Exception, match="Enough"):
        torch.compile(function, options=ao_lab.compile_options(), dynamic=False)(x)


@pytest.mark.parametrize(("rows", "late"), [(1, True), (MOST_LATE, True), (MOST_LATE + 1, False)])
def test_dependent_launches_are_for_few_rows(seen, rows, late):
    w = fast.quantize(torch.randn(64, 128), "int8_rowwise")
    before = inductor.triton.enable_pdl
    compiled(lambda x: fast.linear(x, w) + 1, torch.randn(rows, 128, dtype=torch.bfloat16))
    assert seen == [late]
    assert inductor.triton.enable_pdl == before


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_torch_count(seen, bias):
    for rows in (MOST_LATE, MOST_LATE + 1):
        compiled(nn.Linear(16, 16, bias), torch.randn(rows, 16))
    assert seen == [True, False]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_options_can_be_copied_and_pickled(copied):
    """The pass is of a class that the compiler takes; a class derived from it stays what it is."""
    options = ao_lab.compile_options()
    made = copied(options)
    assert made.keys() == options.keys()
    one, other = (given["post_grad_custom_pre_pass"] for given in (options, made))
    assert type(one) is type(other)
    assert one.uuid() == other.uuid() == FuseLinears().uuid()
    assert type(copied(FuseLinears())) is FuseLinears
    assert type(copied(Derived())) is Derived


class Derived(FuseLinears):
    """At the module's top, where pickle finds it."""


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


@pytest.mark.parametrize("name", ["_scaled_mm", "_int_mm"])
def test_products_of_codes_count(name):
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"] = torch.empty(64, 32)
    graph.call_function(getattr(torch.ops.aten, name).default, (x, w))
    assert most_rows(graph) == 64
