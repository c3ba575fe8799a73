"""Quantized layers in TorchScript: traced for any number of rows, and never written as what they are not."""

import io

import pytest
import torch
from torch import nn

from ao_lab import SchemeConfig, SparsityConfig, quantize_, sparsify_

# torch calls TorchScript deprecated; many programs still trace.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

SCHEMES = [
    ("int8_rowwise", None), ("int8_rowwise", "int8_rowwise"), ("int4_g32", None), ("fp8_tensorwise", "fp8_tensorwise"),
    ("nvfp4", "nvfp4"), ("nf4", None),
]  # fmt: skip
X, MORE = torch.linspace(-2, 2, 3 * 64).reshape(3, 64), torch.linspace(-3, 1, 2 * 5 * 64).reshape(2, 5, 64)


def network(scheme, activation=None, sparse=False):
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64, bias=False))
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    if sparse:
        sparsify_(net, SparsityConfig("2:4"))
    quantize_(
        net, SchemeConfig(scheme=scheme, activation_scheme=activation, sparsity="2:4" if sparse else None)
    )
    return net.eval()


@pytest.mark.parametrize(("scheme", "activation"), SCHEMES)
@pytest.mark.parametrize("grad", [False, True])
def test_traced_for_any_number_of_rows(scheme, activation, grad):
    net = network(scheme, activation)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(net, (X,))
        assert torch.equal(traced(X), net(X))
        assert torch.equal(traced(MORE), net(MORE))


def test_sparse_and_scripted():
    sparse, dense = network("int4_g32", sparse=True), network("int8_rowwise", "int8_rowwise")
    assert torch.equal(torch.jit.trace(sparse, (X,))(MORE), sparse(MORE))
    assert torch.equal(torch.jit.script(dense)(MORE), dense(MORE))


def test_an_embedding_is_traced():
    table = nn.Embedding(16, 64)
    quantize_(table, SchemeConfig(scheme="int8_rowwise"), lambda module, name: True)
    tokens, more = torch.tensor([1, 5]), torch.tensor([[3], [15], [0]])
    assert torch.equal(torch.jit.trace(table, (tokens,))(more), table(more))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_file_is_refused_and_not_begun(frozen, tmp_path):
    """torch would copy from address 0, and end the process."""
    net, file = torch.jit.trace(network("int8_rowwise", "int8_rowwise"), (X,)), io.BytesIO()
    net = torch.jit.freeze(net) if frozen else net
    for write in (
        lambda: torch.jit.save(net, file),
        lambda: net.save(tmp_path / "net.pt"),
        net.save_to_buffer,
    ):
        with pytest.raises(ValueError, match=r"is a QuantizedTensor, .* torch.export.save"):
            write()
    assert not file.getvalue()
    assert not list(tmp_path.iterdir())


def test_dense_modules_are_written():
    net, file = torch.jit.trace(nn.Linear(64, 3), (X,)), io.BytesIO()
    torch.jit.save(torch.jit.freeze(net.eval()), file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(X), net(X))


def test_the_tracing_exporter_to_onnx_is_refused(monkeypatch):
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(ValueError, match=r"dynamo=False.*weight\.dequantize\(\)"):
        torch.jit.trace(network("int8_rowwise"), (X,))


def test_other_libraries_read_no_memory_of_it():
    with pytest.raises(TypeError, match=r"dequantize\(\) it first"):
        torch.from_dlpack(network("int8_rowwise")[0].weight)
