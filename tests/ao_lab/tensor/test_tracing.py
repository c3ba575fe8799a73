"""`QuantizedTensor` under torch.compile and torch.export: the same bits as eager, in one graph."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.fx.passes.utils.source_matcher_utils import get_source_partitions

from ao_lab import Recipe, SchemeConfig, quantize_, quantized
from ao_lab.gemm import choices
from ao_lab.gemm.select import inference_keys
from reference import SCHEMES, Scales
from tests.support.runs import forks

ROOT = Path(__file__).resolve().parents[3]
PAIRS = [
    ("int8_rowwise", None),
    ("int4_g32_asymmetric", None),
    ("nvfp4", None),
    ("nf4", None),
    ("int8_rowwise", "int8_rowwise"),
    ("int8_rowwise", "int8_rowwise_asymmetric"),
    ("fp8_rowwise", "fp8_rowwise"),
    ("int4_g128", "fp8_rowwise"),
    ("mxfp4", "mxfp8_e4m3"),
]


class Net(nn.Module):
    """Two linear layers, one with a bias, and an embedding."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Embedding(16, 128)
        self.first = nn.Linear(128, 256)
        self.second = nn.Linear(256, 128, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)

    def forward(self, tokens):
        return self.second(nn.functional.silu(self.first(self.table(tokens))))


def network(scheme, activation=None, **options):
    net = Net()
    config = SchemeConfig(scheme=scheme, activation_scheme=activation, **options)
    quantize_(net, config, lambda module, name: isinstance(module, (nn.Linear, nn.Embedding)))
    return net.eval()


TOKENS = torch.tensor([[1, 2, 3], [15, 0, 7]])


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()


@pytest.mark.parametrize(("scheme", "activation"), PAIRS)
def test_compiled_in_one_graph(scheme, activation):
    net = network(scheme, activation)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(TOKENS), net(TOKENS))
        # Another batch: the same program, or one for any size.
        assert torch.equal(compiled(TOKENS[:, :2]), net(TOKENS[:, :2]))


# Inductor imports modules of torch that torch itself calls deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("scheme", "activation"), [PAIRS[1], PAIRS[5], PAIRS[6]])
def test_compiled_by_inductor(scheme, activation):
    net = network(scheme, activation)
    with torch.no_grad():
        dense = net.first(net.table(TOKENS))
        assert torch.equal(torch.compile(net.first, fullgraph=True)(net.table(TOKENS)), dense)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_program_on_disk_from_before_a_choice_is_not_taken(no_choices):
    """torch keeps what Inductor compiled by what it was made of: a layer's own operations, as they are chosen, belong to it."""
    net, x = network("int4_g32_asymmetric"), torch.linspace(-2, 2, 6 * 128).reshape(6, 128)
    keys = inference_keys(net.first.weight.t())
    problem = choices.problem_of("inference", *keys, (6, 256, 128), torch.float32)
    with torch.no_grad(), fresh_cache():
        for _ in range(2):
            torch.compiler.reset()
            compiled = torch.compile(net.first, fullgraph=True)
            assert torch.equal(compiled(x), net.first(x))
            choices.choices_for(x.device).add(choices.Choice(problem, "dequantize"))


@pytest.mark.parametrize(("scheme", "activation"), PAIRS)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_saved_and_loaded(scheme, activation, strict):
    net = network(scheme, activation)
    program = torch.export.export(net, (TOKENS,), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    with torch.no_grad():
        expected = net(TOKENS)
        assert torch.equal(program.module()(TOKENS), expected)
        assert torch.equal(torch.export.load(file).module()(TOKENS), expected)


def test_a_saved_program_knows_its_records_in_another_process(tmp_path):
    """A record that the other process has never made travels with the program."""
    net, path = network("int4_g16_asymmetric", "int8_tensorwise_bf16"), tmp_path / "net.pt2"
    torch.export.save(torch.export.export(net, (TOKENS,)), path)
    script = f"import torch, fast; print(torch.export.load({str(path)!r}).module()(torch.{TOKENS}).double().sum().item())"
    done = forks.python("-c", script)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == net(TOKENS).double().sum().item()


def test_exported_for_any_batch():
    net = network("int8_rowwise", "int8_rowwise")
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(net, (TOKENS,), dynamic_shapes=shapes)
    more = torch.randint(0, 16, (7, 3), generator=torch.Generator().manual_seed(0))
    assert torch.equal(program.module()(more), net(more))


def test_compiled_with_a_gradient():
    net = network("int4_g32", None)
    eager, compiled = (torch.ones(3, 128, requires_grad=True) for _ in range(2))
    net.first(eager).square().sum().backward()
    torch.compile(net.first, fullgraph=True, backend="aot_eager")(compiled).square().sum().backward()
    assert torch.equal(eager.grad, compiled.grad)


def test_compiled_with_static_scales():
    recipe = Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_tensorwise"])
    layer = nn.Linear(128, 64)
    layer.weight = nn.Parameter(
        quantized(layer.weight, recipe, input_scales=Scales(torch.tensor(0.03))), requires_grad=False
    )
    x = torch.linspace(-3, 3, 256).reshape(2, 128)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_the_host_kernel_cannot_be_traced():
    net = network("int8_rowwise", None, kernel="reference")
    net(TOKENS)
    with pytest.raises(Exception, match="cannot be traced"):
        torch.compile(net, fullgraph=True, backend="aot_eager")(TOKENS)


@pytest.mark.parametrize("scheme", ["int8_rowwise", "int4_g32", "mxfp8_e4m3"])
def test_one_program_for_weights_of_several_shapes(scheme):
    """The second shape makes the compiler trace symbols, of codes and of scales each their own."""
    torch._dynamo.reset()
    compiled = torch.compile(torch.nn.functional.linear, fullgraph=True, backend="eager")
    for rows, columns in ((32, 64), (48, 64), (64, 128)):
        w = quantized(torch.randn(rows, columns, dtype=torch.bfloat16), scheme)
        x = torch.randn(1, columns, dtype=torch.bfloat16)
        assert torch.equal(compiled(x, w), torch.nn.functional.linear(x, w))


# Exported programs: what backends read of the nodes that a layer was decomposed to, and what compiles them.

X = torch.linspace(-2, 2, 3 * 64).reshape(3, 64)
EXPORTED = [
    ("int8_rowwise", None),
    ("int8_g32", "int8_rowwise"),
    ("fp8_rowwise", "fp8_rowwise"),
    ("nvfp4", "nvfp4"),
]


def frozen_layers(scheme, activation):
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    quantize_(net, SchemeConfig(scheme=scheme, activation_scheme=activation))
    return net.eval().requires_grad_(False)


def operators(nodes):
    return {str(node.target) for node in nodes if node.op == "call_function"}


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning"
)  # torch's own tools call each other what they deprecate
@pytest.mark.parametrize(
    ("scheme", "activation", "strict"),
    [
        (*EXPORTED[1], False),
        *(
            pytest.param(*pair, strict, marks=pytest.mark.nightly)
            for pair in EXPORTED
            for strict in (False, True)
        ),
    ],
)
def test_a_layers_source_holds_none_of_our_operators(scheme, activation, strict):
    """ExecuTorch's partitioner takes all that comes from nn.Linear for movements of its weight, and reads codes as float32."""
    program = torch.export.export(frozen_layers(scheme, activation), (X,), strict=strict).run_decompositions(
        {}
    )
    assert any("ao_lab" in name for name in operators(program.graph.nodes))
    linear = [nn.Linear, nn.functional.linear, "linear"]
    partitions = [one for of in get_source_partitions(program.graph, linear).values() for one in of]
    assert not any("ao_lab" in name for one in partitions for name in operators(one.nodes))
    # Programs are saved with what nodes come from.
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(X), program.module()(X))


LOADED_ALONE = """
import sys, torch, ao_lab
ao_lab.register_operators()
x, y = torch.load(f"{sys.argv[1]}/x.pt")
torch.testing.assert_close(torch._inductor.aoti_load_package(f"{sys.argv[1]}/net.pt2")(x), y, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize(
    ("scheme", "activation"), [EXPORTED[0], ("int8_rowwise", "int8_rowwise"), EXPORTED[3]]
)
def test_compiled_ahead_of_time(scheme, activation, tmp_path):
    net = frozen_layers(scheme, activation)
    with torch.no_grad():
        program = torch.export.export(
            net, (X,), dynamic_shapes=({0: torch.export.Dim("rows", min=1, max=64)},)
        )
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "net.pt2"))
        compiled = torch._inductor.aoti_load_package(path)
        for x in (X, X[:1], torch.cat([X, X])):
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)
        torch.save((X, net(X)), tmp_path / "x.pt")
    subprocess.run([sys.executable, "-c", LOADED_ALONE, tmp_path], check=True, cwd=ROOT)
