"""What torch's compiler, TorchScript and other libraries ask of quantized weights, and what they get.

A compiled call compares no records, calls no `__torch_function__` and has the parts as plain inputs.
"""

import copy
import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import TracingContext

import ao_lab
from ao_lab import QuantizedTensor, quantize_, quantized
from ao_lab.config.recipe import Recipe
from ao_lab.tensor import torch_changes
from ao_lab.tensor.metadata import Meta
from ao_lab.tensor.torch_changes import DTENSOR, PENDING, make_changes
from reference import Scheme
from tests.support.quantized_weights import pair, same, weight

CONFIGS = {
    "int8wo": lambda: ao_lab.Int8WeightOnlyConfig(),
    "int4wo": lambda: ao_lab.Int4WeightOnlyConfig(group_size=32),
    "int8dq": lambda: ao_lab.Int8DynamicActivationInt8WeightConfig(),
    "nvfp4wo": lambda: ao_lab.NVFP4WeightOnlyConfig(),
}
X = torch.linspace(-2, 2, 5 * 64).reshape(5, 64)


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()


def network(config=None, depth=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(*(nn.Linear(64, 64, bias=at % 2 == 0) for at in range(depth)))
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    if config is not None:
        quantize_(net, config)
    return net.eval().requires_grad_(False)


def parts_of(net):
    return [
        part
        for p in net.parameters()
        if isinstance(p, QuantizedTensor)
        for part in filter(some, p.parts.values())
    ]


def some(part):
    return part is not None


def watched_backend(seen, computes=True):
    """aot_autograd with a compiler that notes the program's inputs, and which of them stay where they are.

    computes: False for a program that answers the first call's results, so that a call is what torch does around it.
    """
    from torch._dynamo.backends.common import aot_autograd

    def compiler(program, inputs):
        kept = TracingContext.get().fw_metadata.static_input_indices
        seen.append(([type(one) for one in inputs], [tuple(one.shape) for one in inputs], list(kept)))
        known = []

        def answer(*args):
            known[:] = known or program.forward(*args)
            return list(known)

        return make_boxed_func(program.forward if computes else answer)

    return aot_autograd(fw_compiler=compiler)


@pytest.mark.parametrize("name", CONFIGS)
def test_inputs_of_a_program_are_the_parts(name):
    net, seen = network(CONFIGS[name]()), []
    compiled = torch.compile(net, fullgraph=True, backend=watched_backend(seen))
    with torch.no_grad():
        assert torch.equal(compiled(X), net(X))
    kinds, shapes, kept = seen[0]
    assert not any(issubclass(kind, QuantizedTensor) for kind in kinds)
    weights = [*parts_of(net), *(layer.bias for layer in net if layer.bias is not None)]
    assert sorted(shapes) == sorted([tuple(X.shape), *(tuple(one.shape) for one in weights)])
    # CUDA graphs copy what is not listed here before every replay.
    assert sorted(shapes[at] for at in kept) == sorted(tuple(one.shape) for one in weights)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_compiled_call_compares_no_record_and_asks_for_no_size(name, monkeypatch):
    net, asked = network(CONFIGS[name]()), []
    compiled = torch.compile(net, fullgraph=True, backend=watched_backend([], computes=False))
    with torch.no_grad():
        expected = compiled(X)
        for kind in (Recipe, Scheme):
            plain = kind.__eq__
            monkeypatch.setattr(
                kind, "__eq__", lambda a, b, plain=plain: asked.append("record") or plain(a, b)
            )
        functions = QuantizedTensor.__torch_function__
        note = classmethod(lambda cls, func, *rest: asked.append(func) or functions(func, *rest))
        monkeypatch.setattr(QuantizedTensor, "__torch_function__", note)
        assert torch.equal(compiled(X), expected)
    assert asked == []


def test_as_many_programs_as_for_dense_weights():
    counts = []
    for config in (None, *(make() for make in CONFIGS.values())):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        net = network(config)
        compiled = torch.compile(net, backend=counter)
        with torch.no_grad():
            for rows in (1, 2, 3, 5, 4, 1):
                assert torch.equal(compiled(X[:rows]), net(X[:rows]))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


def test_functional_call_is_heard():
    net = network(CONFIGS["int4wo"]())
    other = {"1.weight": quantized(network(seed=1)[1].weight, net[1].weight.recipe)}
    compiled = torch.compile(
        lambda weights, x: torch.func.functional_call(net, weights, (x,)), backend="aot_eager"
    )
    with torch.no_grad():
        before = compiled({}, X)
        assert torch.equal(compiled(other, X), torch.func.functional_call(net, other, (X,)))
        assert torch.equal(compiled({}, X), before)


def test_gradients_of_inputs_and_biases():
    net = network(CONFIGS["int4wo"]())
    for layer in net:
        if layer.bias is not None:
            layer.bias.requires_grad_(True)
    results = []
    for call in (net, torch.compile(net, fullgraph=True, backend="aot_eager")):
        x = X.clone().requires_grad_(True)
        results.append(torch.autograd.grad(call(x).square().sum(), [x, net[0].bias, net[2].bias]))
    assert all(map(torch.equal, *results))


def test_sizes_left_open_go_torchs_way():
    """An argument that is no parameter has open sizes under dynamic=True; torch hands them to the program."""
    weights = [
        quantized(torch.randn(n, 64, generator=torch.Generator().manual_seed(n)), "int8_rowwise")
        for n in (64, 96)
    ]
    compiled = torch.compile(
        lambda x, w: nn.functional.linear(x, w) * w.shape[0], backend="aot_eager", dynamic=True
    )
    with torch.no_grad():
        for w in weights:
            assert torch.equal(compiled(X, w), nn.functional.linear(X, w) * w.shape[0])


def fake_meta(size=(64, 64), stride=(64, 1)):
    return SimpleNamespace(outer_size=size, outer_stride=stride)


def test_known_parts_are_those_of_torchs_order():
    w = quantized(torch.randn(64, 64), "int4_g32_asymmetric")
    names, _ = w.__tensor_flatten__()
    found = torch_changes.known_parts(w, fake_meta())
    assert [id(part) for part in found] == [id(getattr(w, name)) for name in names]
    for meta in (fake_meta(size=(None, 64)), fake_meta(stride=(None, 1))):
        assert torch_changes.known_parts(w, meta) is None
    nested = w.remade({**w.parts, "scale": nn.Parameter(w.scale)})
    assert torch_changes.known_parts(nested, fake_meta()) is None


def test_what_torch_is_left_with():
    asked = []

    def plain(args, *, append_symints, subclass_metas=None):
        asked.append((args, subclass_metas))
        return ["torch"]

    unwrap = torch_changes.unwrapping(plain, QuantizedTensor)
    w = quantized(torch.randn(64, 64), "int8_rowwise")
    dense, other = torch.zeros(2), nn.Buffer(torch.zeros(2)).as_subclass(type("Other", (torch.Tensor,), {}))
    open_meta, known = fake_meta(size=(None, 64)), fake_meta()
    found = unwrap([dense, w, w, other, 7], append_symints=True, subclass_metas=[0, known, open_meta, 3, 4])
    assert [one if isinstance(one, (str, int)) else id(one) for one in found] == [
        id(dense), id(w.codes), id(w.scale), "torch", "torch", 7,
    ]  # fmt: skip
    assert [(id(args[0]), metas[0]) for args, metas in asked] == [(id(w), open_meta), (id(other), 3)]
    assert unwrap([w], append_symints=False) == ["torch"]


def test_changes_are_made_once():
    make_changes(QuantizedTensor)
    assert not any(name in sys.modules for name in PENDING)
    import torch._functorch._aot_autograd.runtime_wrappers
    import torch.distributed.tensor  # noqa: F401

    make_changes(QuantizedTensor)
    assert DTENSOR not in PENDING
    assert torch_changes.WRAPPERS not in PENDING


class Watched(Meta):
    """A description that notes who looks at its fields."""

    looked = 0

    @property
    def _fields(self):
        Watched.looked += 1
        return super()._fields


def test_descriptions_are_equal_by_value_and_never_copied():
    first, second = (quantized(torch.ones(64, 64), "int4_g32").meta for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first is not second
    assert first != quantized(torch.ones(64, 64), "int4_g64").meta
    assert first != first.swapped_axes
    assert first != "int4_g32"
    watched = Watched(*first._fields)
    kept = copy.deepcopy(watched)
    assert kept is watched
    assert watched == kept
    assert Watched.looked == 0


def test_names_of_parts_follow_the_data():
    w = quantized(torch.ones(64, 64), "int4_g32")
    assert w.__tensor_flatten__() is w.__tensor_flatten__()
    assert w.__tensor_flatten__()[0] == ["codes", "scale"]
    w.data = quantized(torch.ones(64, 64), "int4_g32_asymmetric")
    assert w.__tensor_flatten__() == (["codes", "scale", "zero"], w.meta)
    twin = copy.deepcopy(w)
    assert twin.__tensor_flatten__() == (["codes", "scale", "zero"], w.meta)
    assert twin.codes is not w.codes


def test_sparse_weights_embeddings_and_experts():
    """Whatever module has the weight: no class of layers takes part."""
    table = nn.Embedding(16, 64)
    net = nn.Sequential(table, nn.Linear(64, 64, bias=False))
    quantize_(net, CONFIGS["int8wo"](), lambda module, name: True)
    experts = quantized(
        torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0)), "int4_g32", axis=-1
    )
    tokens, x = torch.arange(5), torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(torch.compile(net, fullgraph=True, backend="aot_eager")(tokens), net(tokens))
        batched = torch.compile(
            lambda x, w: torch.bmm(x, w.transpose(-2, -1)), fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(batched(x, experts), torch.bmm(x, experts.transpose(-2, -1)))
    sparse = network()
    ao_lab.sparsify_(sparse, ao_lab.SparsityConfig())
    quantize_(sparse, ao_lab.Int8WeightOnlyConfig(sparsity="2:4"))
    with torch.no_grad():
        assert torch.equal(torch.compile(sparse, fullgraph=True, backend="aot_eager")(X), sparse(X))


def test_modules_and_names_stay():
    net = network(CONFIGS["int8wo"]())
    with torch.no_grad():
        torch.compile(net, backend="aot_eager")(X)
    assert list(copy.deepcopy(net).state_dict()) == ["0.weight", "0.bias", "1.weight", "2.weight", "2.bias"]
    assert all(type(layer) is nn.Linear for layer in net)


# TorchScript traces layers (tests/ao_lab/tensor/test_transforms.py), and never writes them as what they are not.

torchscript = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@torchscript
def test_an_embedding_is_traced():
    table = nn.Embedding(16, 64)
    quantize_(table, CONFIGS["int8wo"](), lambda module, name: True)
    tokens, more = torch.tensor([1, 5]), torch.tensor([[3], [15], [0]])
    assert torch.equal(torch.jit.trace(table, (tokens,))(more), table(more))


@torchscript
@pytest.mark.parametrize("frozen", [False, True])
def test_a_file_is_refused_and_not_begun(frozen, tmp_path):
    """torch would copy from address 0, and end the process."""
    net, file = torch.jit.trace(network(CONFIGS["int8dq"]()), (X,)), io.BytesIO()
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


@torchscript
def test_dense_modules_are_written():
    net, file = torch.jit.trace(nn.Linear(64, 3), (X,)), io.BytesIO()
    torch.jit.save(torch.jit.freeze(net.eval()), file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(X), net(X))


@torchscript
def test_the_tracing_exporter_to_onnx_is_refused(monkeypatch):
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(ValueError, match=r"dynamo=False.*weight\.dequantize\(\)"):
        torch.jit.trace(network(CONFIGS["int8wo"]()), (X,))


def test_other_libraries_read_no_memory_of_it():
    with pytest.raises(TypeError, match=r"dequantize\(\) it first"):
        torch.from_dlpack(network(CONFIGS["int8wo"]())[0].weight)


# Addresses, sizes, storages and arrays of quantized weights, as other libraries ask for them.


def weights():
    return quantized(weight(32, 64), "int4_g32_asymmetric"), pair("int8_rowwise", 32, 64)[0]


def test_addresses_tell_weights_apart():
    """accelerate takes weights of one address for tied ones."""
    t, other = weights()
    assert 0 not in {t.data_ptr(), other.data_ptr()}
    assert t.data_ptr() not in {other.data_ptr(), t.clone().data_ptr(), copy.deepcopy(t).data_ptr()}
    assert t.data_ptr() == t.detach().data_ptr() == t.t().data_ptr() == nn.Parameter(t, False).data_ptr()
    assert t.to("meta").data_ptr() == 0


def test_bytes_are_those_stored():
    for t in weights():
        assert (
            t.nbytes
            == sum(part.nbytes for part in t.parts.values() if part is not None)
            < 32 * 64 * t.element_size()
        )


def test_there_is_no_storage_and_no_array():
    from safetensors.torch import save

    for t in weights():
        for ask in (t.storage, lambda t=t: save({"weight": t})):
            with pytest.raises(ValueError, match=r"several tensors, .* safe_serialization=False"):
                ask()
        for ask in (t.numpy, lambda t=t: np.asarray(t), lambda t=t: t.bfloat16().view(torch.int16)):
            with pytest.raises(TypeError, match=r"is no NumPy array, .* dequantize\(\) gives its values"):
                ask()


def test_reshape_copies_where_there_is_no_view():
    for t in weights():
        dense = t.dequantize()
        made = t.reshape(8, 4, 16, 4)
        assert type(made) is torch.Tensor
        assert same(made, dense.reshape(8, 4, 16, 4))
        assert isinstance(t.reshape(-1), QuantizedTensor)
        with pytest.raises(ValueError, match="dequantize"):
            t.view(8, 4, 16, 4)


def test_a_class_makes_parameters():
    """As accelerate makes them of the class of a parameter, when it moves one."""
    for t in weights():
        made = type(t)(t.clone(), requires_grad=False)
        assert isinstance(made, nn.Parameter)
        assert type(made) is type(t)
        assert torch.equal(made, t)
        with pytest.raises(TypeError, match="made of parts"):
            type(t)(t.parts)
