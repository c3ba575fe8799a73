"""Unquantized layers of one input as one matmul: where weights lie, what they multiply, and the pass over a compiled graph."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from ao_lab.compile import joined_linears
from ao_lab.compile.joined_linears import (
    JoinMatmuls,
    join_weights_,
    joining_pass,
    linear_joined_op,
    runs_of,
    whole_of,
)
from tests.fast.linear.test_linear_pair import targets

BF16 = torch.bfloat16
JOINED = "ao_lab.linear_joined.default"


class Layer(nn.Module):
    """Queries, keys and values, and a gate with what it gates."""

    def __init__(self, dtype=BF16, bias=False):
        super().__init__()
        sizes = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "gate_proj": 48, "up_proj": 48, "o_proj": 64}
        for name, n in sizes.items():
            setattr(self, name, nn.Linear(64, n, bias=bias, dtype=dtype))

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return q, k, v, functional.silu(self.gate_proj(x)) * self.up_proj(x), self.o_proj(x + 1)


@pytest.fixture
def on_cpus(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(joined_linears, "DEVICES", ("cpu",))


def test_weights_follow_each_other(on_cpus):
    """With their values, once; copies lie apart, and are joined again."""
    layer, x = Layer(), torch.randn(3, 64).to(BF16)
    before = {name: w.clone() for name, w in layer.state_dict().items()}
    three = [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
    assert whole_of(three) is None
    assert join_weights_(layer) == 2
    whole = whole_of(three)
    assert torch.equal(whole, torch.cat(list(before.values())[:3]))
    assert all(torch.equal(w, before[name]) for name, w in layer.state_dict().items())
    assert torch.equal(linear_joined_op(x, three), functional.linear(x, whole))
    assert join_weights_(layer) == 2
    assert whole_of(three).data_ptr() == whole.data_ptr()
    assert whole_of(three[::-1]) is None
    other = copy.deepcopy(layer)
    assert whole_of([other.q_proj.weight, other.k_proj.weight, other.v_proj.weight]) is None
    assert torch.equal(
        linear_joined_op(x, three[::-1]), torch.cat([functional.linear(x, w) for w in three[::-1]], -1)
    )


def test_others_stay_where_they_are(on_cpus):
    """Biases, other dtypes, quantized weights, one weight under two names."""
    quantized, tied = Layer(), Layer()
    quantized.k_proj.weight = nn.Parameter(torch.zeros(16, 64, dtype=torch.int8), requires_grad=False)
    tied.up_proj.weight = tied.gate_proj.weight
    assert join_weights_(Layer(bias=True)) == join_weights_(Layer(torch.float32)) == 0
    assert join_weights_(quantized) == join_weights_(tied) == 1


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_weights_stay_trainable_whoever_joins_them(on_cpus, made, joined):
    """In inference mode, as a call of generate() may be, or not."""
    with torch.inference_mode(made):
        layer = Layer()
    with torch.inference_mode(joined):
        assert join_weights_(layer) == 2
    weights = [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
    assert whole_of(weights) is not None
    assert [one.is_inference() for one in weights] == [made] * 3
    if not made:
        layer.q_proj(torch.ones(1, 64, dtype=BF16)).sum().backward()


def test_on_a_cpu_nothing_is_moved():
    assert join_weights_(Layer()) == 0


def graph_of(layer, x):
    """What the pass makes of a layer, as the compiler calls it."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    names = [name for name, _ in layer.named_parameters()]

    def run(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    weights = [w.detach() for w in layer.parameters()]
    graph = make_fx(run, select_decomp_table(), tracing_mode="fake")(x, *weights)
    JoinMatmuls()(graph.graph)
    graph.recompile()
    return graph, weights


@pytest.mark.parametrize("joined", [True, False])
def test_matmuls_of_one_input_are_joined(on_cpus, joined):
    """Three axes, whose rows each layer looks at for itself. Of five weights of one input those are multiplied at once that
    follow each other."""
    layer, x = Layer(), torch.randn(2, 3, 64).to(BF16)
    if joined:
        join_weights_(layer)
    graph, weights = graph_of(layer, x)
    assert [name for name in targets(graph) if name.startswith("ao_lab")] == [JOINED]
    assert sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes) == 1
    five = [w for name, w in layer.named_parameters() if not name.startswith("o_")]
    assert list(map(len, runs_of(five))) == ([3, 2] if joined else [1] * 5)
    for made, wanted in zip(graph(x, *weights), layer(x), strict=True):
        torch.testing.assert_close(made, wanted, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("case", ["rows", "dtype", "device"])
def test_other_matmuls_are_left(on_cpus, monkeypatch, case):
    if case == "device":
        monkeypatch.setattr(joined_linears, "DEVICES", ("cuda",))
    dtype = torch.float32 if case == "dtype" else BF16
    graph, _ = graph_of(Layer(dtype), torch.randn(17 if case == "rows" else 1, 64).to(dtype))
    assert JOINED not in targets(graph)


def test_the_operator_is_described_to_torch():
    weights = [torch.randn(n, 64).to(BF16) for n in (32, 16)]
    operands = (torch.randn(2, 64).to(BF16), weights)
    torch.library.opcheck(
        torch.ops.ao_lab.linear_joined.default, operands, test_utils=("test_schema", "test_faketensor")
    )


def test_the_pass_can_be_pickled():
    made = joining_pass()
    other = pickle.loads(pickle.dumps(made))
    assert type(other) is type(made)
    assert other.uuid() == made.uuid() != super(JoinMatmuls, made).uuid()
