"""Exported programs: what backends read of the nodes that a layer was decomposed to, and what compiles them."""

import io

import pytest
import torch
from torch import nn
from torch.fx.passes.utils.source_matcher_utils import get_source_partitions

from ao_lab import SchemeConfig, quantize_

# torch's own tools call each other what they deprecate.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

X = torch.linspace(-2, 2, 3 * 64).reshape(3, 64)
PAIRS = [
    ("int8_rowwise", None),
    ("int8_g32", "int8_rowwise"),
    ("fp8_rowwise", "fp8_rowwise"),
    ("nvfp4", "nvfp4"),
]


def network(scheme, activation):
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    quantize_(net, SchemeConfig(scheme=scheme, activation_scheme=activation))
    return net.eval().requires_grad_(False)


def operators(nodes):
    return {str(node.target) for node in nodes if node.op == "call_function"}


@pytest.mark.parametrize(
    ("scheme", "activation", "strict"),
    [
        (*PAIRS[1], False),
        *(
            pytest.param(*pair, strict, marks=pytest.mark.nightly)
            for pair in PAIRS
            for strict in (False, True)
        ),
    ],
)
def test_a_layers_source_holds_none_of_our_operators(scheme, activation, strict):
    """ExecuTorch's partitioner takes all that comes from nn.Linear for movements of its weight, and reads codes as float32."""
    program = torch.export.export(network(scheme, activation), (X,), strict=strict).run_decompositions({})
    assert any("ao_lab" in name for name in operators(program.graph.nodes))
    linear = [nn.Linear, nn.functional.linear, "linear"]
    partitions = [one for of in get_source_partitions(program.graph, linear).values() for one in of]
    assert not any("ao_lab" in name for one in partitions for name in operators(one.nodes))
    # Programs are saved with what nodes come from.
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(X), program.module()(X))


@pytest.mark.nightly
@pytest.mark.parametrize(("scheme", "activation"), [PAIRS[0], ("int8_rowwise", "int8_rowwise"), PAIRS[3]])
def test_compiled_ahead_of_time(scheme, activation, tmp_path):
    net = network(scheme, activation)
    with torch.no_grad():
        program = torch.export.export(
            net, (X,), dynamic_shapes=({0: torch.export.Dim("rows", min=1, max=64)},)
        )
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "net.pt2"))
        compiled = torch._inductor.aoti_load_package(path)
        for x in (X, X[:1], torch.cat([X, X])):
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)
