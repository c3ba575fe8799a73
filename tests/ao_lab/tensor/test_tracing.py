"""`QuantizedTensor` under torch.compile and torch.export: the same bits as eager, in one graph."""

import io

import pytest
import torch
from torch import nn

from ao_lab import Recipe, SchemeConfig, quantize_, quantized
from reference import SCHEMES, Scales
from tests.support.runs import forks

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


def test_a_weight_of_another_recipe_compiles_anew():
    x = torch.ones(2, 128)
    layer = nn.Linear(128, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    dense = layer.weight.detach().clone()
    for scheme in ("int4_g32", "int4_g64", "mxfp4", "nvfp4"):
        layer.weight = nn.Parameter(quantized(dense, scheme), requires_grad=False)
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x)), scheme


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
