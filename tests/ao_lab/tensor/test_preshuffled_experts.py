"""Preshuffled experts (E, N, K): operations as of the plain weights, single experts as views, models and files.

CPU tensors stand in for those of a GPU; their products go through the plain parts, groups through the operator where a test
says so."""

import copy
import io

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

import ao_lab.quantization.report as report
import ao_lab.tensor.preshuffled as rule
from ao_lab import (
    SchemeConfig,
    explain,
    linear_and_experts,
    load_pretrained,
    quantize_,
    quantized,
    save_pretrained,
)
from ao_lab.gemm import fused, select
from fast.matmul.preshuffled.grouped import grouped_linear_small
from reference import SCHEMES
from tests.ao_lab.gemm.capability import set_capability
from tests.ao_lab.tensor.test_preshuffled import BF16, LAYOUT, dense, same_parts

NAMES = ("int4_g128", "int4_g32_asymmetric", "int8_rowwise", "fp8_rowwise", "mxfp8_e4m3", "mxfp4", "nvfp4")
SHAPE = (4, 128, 256)
ENDS = torch.tensor([3, 3, 5, 9], dtype=torch.int32)


def pair(name, seed=0):
    """Plain weights, and the same preshuffled."""
    plain = quantized(dense(seed, SHAPE), name)
    return plain, plain.to_layout(LAYOUT)


@pytest.fixture
def gpu(monkeypatch):
    """Tensors of this host count as those of a GPU with kernels."""
    monkeypatch.setattr(rule, "has_kernels", lambda x: True)


@pytest.fixture
def on_gpu(gpu, monkeypatch):
    """Groups are multiplied as on a GPU: by the operator, which runs the reference here."""

    def reason(w, dtype):
        taken = w.meta.layout == LAYOUT and len(w.shape) == 3 and w.meta.transposed and dtype == BF16
        return None if taken else "not taken"

    monkeypatch.setattr(fused, "groups_reason", reason)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_weights(name):
    plain, t = pair(name)
    assert t.meta.layout == LAYOUT
    assert same_parts(t.to_layout("plain"), plain)
    assert torch.equal(t, plain)
    assert not torch.equal(t, pair(name, 1)[0])
    assert torch.equal(t.mT.dequantize(), plain.dequantize().mT)
    x = dense(3, (4, 5, 256))
    assert torch.equal(torch.bmm(x, t.mT), torch.bmm(x, plain.dequantize().mT))
    bias = dense(4, (128,))
    assert torch.equal(torch.baddbmm(bias, x, t.mT), torch.baddbmm(bias, x, plain.dequantize().mT))
    assert torch.equal(x @ t.mT, x @ plain.dequantize().mT)
    rows = dense(5, (9, 256))
    wanted = torch._grouped_mm(rows, plain.dequantize().mT, offs=ENDS)
    assert torch.equal(torch._grouped_mm(rows, t.mT, offs=ENDS), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_an_expert_is_a_view_of_the_parts(name):
    """Preshuffled as well: neither is anything copied, nor are other experts looked at."""
    plain, t = pair(name)
    memory = {
        part: value.untyped_storage().data_ptr() for part, value in t.parts.items() if value is not None
    }
    pieces = [
        (t[2], plain[2]),
        (t[-1], plain[-1]),
        (t.mT[1], plain.mT[1]),
        (t[1:3], plain[1:3]),
        (t.mT[:2], plain.mT[:2]),
    ]
    pieces += [*zip(t.unbind(0), plain.unbind(0), strict=True), *zip(t.split(3), plain.split(3), strict=True)]
    for made, wanted in pieces:
        assert made.meta.layout == LAYOUT
        assert made.shape == wanted.shape
        assert same_parts(made.plain, wanted)
        found = {
            part: value.untyped_storage().data_ptr()
            for part, value in made.parts.items()
            if value is not None
        }
        assert found == memory
    x = dense(3, (5, 256))
    assert torch.equal(functional.linear(x, t[2]), functional.linear(x, plain[2].dequantize()))
    if t.outer is not None:  # one for all experts
        with pytest.raises(ValueError, match=f"outer of {name} also holds for the rest"):
            t[1].copy_(dense(7, (128, 256)))
        return
    t[1].copy_(dense(7, (128, 256)))
    assert same_parts(t[1].plain, quantized(dense(7, (128, 256)), name))
    assert same_parts(t[2].plain, plain[2])


@pytest.mark.parametrize("name", NAMES)
def test_experts_by_number(name):
    plain, t = pair(name)
    numbers = torch.tensor([3, 0, 3])
    for made, wanted in (
        (t[numbers], plain[numbers]), (t[numbers - 4], plain[numbers - 4]), (t.mT[numbers], plain.mT[numbers]),
        (t.index_select(0, numbers), plain.index_select(0, numbers)),
    ):  # fmt: skip
        assert made.meta.layout == LAYOUT
        assert same_parts(made.plain, wanted)
    assert same_parts(t[numbers[:0]], plain[numbers[:0]])
    assert same_parts(t[2:2], plain[2:2])
    for wrong in (4, -1):
        with pytest.raises((IndexError, RuntimeError)):
            t.index_select(0, torch.tensor([wrong]))
    with pytest.raises(IndexError):
        t[4]


@pytest.mark.parametrize("name", NAMES)
def test_other_pieces_are_plain(name):
    plain, t = pair(name)
    assert same_parts(t[:, :64], plain[:, :64])
    assert same_parts(t[..., 128:], plain[..., 128:])
    assert same_parts(torch.cat([t, t]), torch.cat([plain, plain]))
    assert same_parts(t.view(512, 256), plain.view(512, 256))
    assert same_parts(t.view(-1).view(SHAPE), t)
    assert same_parts(torch.zeros_like(t), torch.zeros_like(plain))
    assert t.clone().meta.layout == t.detach().meta.layout == t.mT.meta.layout == LAYOUT
    assert same_parts(copy.deepcopy(t), t)


@pytest.mark.parametrize("name", NAMES)
def test_copies_keep_the_targets_layout(name):
    plain, t = pair(name)
    other, arranged = pair(name, 1)
    for source in (other, arranged, dense(1, SHAPE)):
        for target in (t.clone(), plain.clone()):
            layout = target.meta.layout
            target.copy_(source)
            assert same_parts(target, other.to_layout(layout))
    file = io.BytesIO()
    torch.save({"weight": t}, file)
    file.seek(0)
    assert same_parts(torch.load(file, weights_only=True)["weight"], plain)
    if SCHEMES[name].zero is None:
        assert same_parts(t.mul_(4).to_layout("plain"), plain.mul_(4))


class Experts(nn.Module):
    """Two projections of each expert, as transformers stores them, in the ways in which models multiply by them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(4, 512, 128, dtype=BF16) / 8)
        self.down_proj = nn.Parameter(torch.randn(4, 128, 256, dtype=BF16) / 8)

    def forward(self, x, ends):
        gate, up = torch._grouped_mm(x, self.gate_up_proj.transpose(-2, -1), offs=ends).chunk(2, -1)
        return torch._grouped_mm(functional.silu(gate) * up, self.down_proj.transpose(-2, -1), offs=ends)

    def eager(self, x, ends):
        bounds, made = [0, *ends.tolist()], []
        for at in range(len(ends)):
            rows = x[bounds[at] : bounds[at + 1]]
            gate, up = functional.linear(rows, self.gate_up_proj[at]).chunk(2, -1)
            made.append(functional.linear(functional.silu(gate) * up, self.down_proj[at]))
        return torch.cat(made)


def model(name="int4_g128"):
    net = nn.ModuleDict({"experts": Experts()})
    report = quantize_(net, SchemeConfig(scheme=name), linear_and_experts)
    return net, report


def layouts(net):
    return [parameter.meta.layout for parameter in net.parameters()]


def dequantized(net):
    made = copy.deepcopy(net)
    for name, parameter in [*made.experts.named_parameters()]:
        setattr(made.experts, name, nn.Parameter(parameter.dequantize()))
    return made


@pytest.mark.parametrize("name", ["int4_g128", "fp8_rowwise"])
def test_quantize_chooses_it(gpu, name):
    """For experts that a filter names; groups, and experts one by one, as of the dequantized model."""
    net, report = model(name)
    assert layouts(net) == [LAYOUT, LAYOUT]
    assert str(report) == str(explain(net))
    x = dense(3, (9, 128))
    with torch.no_grad():
        wanted = dequantized(net).experts(x, ENDS)
        assert torch.equal(net.experts(x, ENDS), wanted)
        assert torch.equal(net.experts.eager(x, ENDS), dequantized(net).experts.eager(x, ENDS))


def test_groups_go_to_the_operator(on_gpu):
    """Of 16-bit rows and offsets alone; all else is dequantized."""
    plain, t = pair("int8_rowwise")
    x, values = dense(3, (9, 256)), plain.dequantize()
    kernel = grouped_linear_small(x, t.stored, ENDS)
    for made in (
        torch._grouped_mm(x, t.mT, ENDS), torch._grouped_mm(x, t.mT, offs=ENDS, out_dtype=BF16),
        torch._grouped_mm(x, t.with_recipe(kernel="fused").mT, ENDS),
    ):  # fmt: skip
        assert torch.equal(made, kernel)
    assert not torch.equal(kernel, torch._grouped_mm(x, values.mT, ENDS))
    for rows in (x.half(), x.float()):
        wanted = torch._grouped_mm(rows, plain.dequantize(rows.dtype).mT, ENDS)
        assert torch.equal(torch._grouped_mm(rows, t.mT, ENDS), wanted)
    batch = dense(3, (4, 5, 256))
    assert torch.equal(torch._grouped_mm(batch, t.mT), torch._grouped_mm(batch, values.mT))
    g = dense(6, (9, 128))
    assert torch.equal(torch._grouped_mm(g, t, ENDS), torch._grouped_mm(g, values, ENDS))
    with pytest.raises(ValueError, match="multiplies no groups"):
        torch._grouped_mm(x, plain.with_recipe(kernel="fused").mT, ENDS)


def test_gradients(on_gpu):
    """Of rows, by the dequantized weights: through the tensor, and through the operator alone."""
    plain, t = pair("int4_g128")
    g = dense(6, (9, 128))
    wanted = torch._grouped_mm(g, plain.dequantize(), ENDS)
    for product in (
        lambda x: torch._grouped_mm(x, t.mT, ENDS),
        lambda x: grouped_linear_small(x, t.stored, ENDS),
    ):
        x = dense(3, (9, 256)).requires_grad_()
        product(x).backward(g)
        assert torch.equal(x.grad, wanted)


def test_what_takes_groups(monkeypatch):
    """A GPU with kernels, experts stored along K, and 16-bit inputs."""
    t = pair("int8_rowwise")[1]

    class There:
        def __init__(self, w, **more):
            self.__dict__.update(
                meta=w.meta,
                recipe=w.recipe,
                shape=w.shape,
                is_cuda=True,
                device=torch.device("cuda", 0),
                **more,
            )

    set_capability(monkeypatch, (9, 0))
    assert [fused.groups_reason(There(t.mT), dtype) for dtype in (BF16, torch.float16)] == [None, None]
    assert "does not read torch.float32" in fused.groups_reason(There(t.mT), torch.float32)
    for w in (t, t[0].mT, t.plain.mT):
        assert "must be preshuffled, and stored as (experts, out, in)" in fused.groups_reason(There(w), BF16)
    assert "9.0" in fused.groups_reason(t.mT, BF16)
    set_capability(monkeypatch, (8, 0))
    assert "9.0" in fused.groups_reason(There(t.mT), BF16)
    # Products of a batch go through the plain parts wherever they are.
    assert select.select_kernel(t.mT, BF16) == "dequantize"


def test_the_report_says_what_multiplies(on_gpu, monkeypatch):
    monkeypatch.setattr(report, "groups_reason", fused.groups_reason)
    assert "fused, up to 64 rows an expert on average" in {layer.kernel for layer in model()[1].layers}


def test_compiled_programs(on_gpu):
    """In one graph, with the operator in it; the layout is part of what programs are guarded by."""
    torch.compiler.reset()
    net, _ = model()
    x, seen = dense(3, (9, 128)), []

    def backend(graph, example):
        seen.append(graph.print_readable(print_output=False))
        return graph

    with torch.no_grad():
        wanted = net.experts(x, ENDS)
        compiled = torch.compile(net.experts, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
        assert torch.equal(compiled(x, ENDS), wanted)
        assert seen[0].count("torch.ops.ao_lab.grouped_linear_small") == 2
        for parameter in net.parameters():
            parameter.data = parameter.detach().to_layout("plain")
        assert torch.equal(compiled(x, ENDS), dequantized(net).experts(x, ENDS))


def test_states_go_both_ways(gpu, monkeypatch):
    first, second = model()[0], nn.ModuleDict({"experts": Experts()})
    monkeypatch.setattr(rule, "has_kernels", lambda x: False)
    quantize_(second, SchemeConfig(scheme="int4_g128"), linear_and_experts)
    assert layouts(second) == ["plain", "plain"]
    wanted = [parameter.dequantize() for parameter in second.parameters()]
    for target, source in ((first, second), (second, first)):
        for parameter in target.parameters():
            parameter.data.copy_(torch.zeros(parameter.shape))
        before = layouts(target)
        target.load_state_dict(source.state_dict())
        assert layouts(target) == before
        assert all(map(torch.equal, (parameter.dequantize() for parameter in target.parameters()), wanted))


def stored(folder):
    """Tensors of a folder's one file."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def test_folders_are_plain(tmp_path, monkeypatch):
    nets = {}
    for name, there in (("plain", False), (LAYOUT, True)):
        monkeypatch.setattr(rule, "has_kernels", lambda x, there=there: there)
        nets[name] = model()[0]
        save_pretrained(nets[name], tmp_path / name, layout="ao_lab", config={"dtype": "bfloat16"})
    first, second = (stored(tmp_path / name) for name in nets)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for there, layout in ((True, LAYOUT), (False, "plain")):
        monkeypatch.setattr(rule, "has_kernels", lambda x, there=there: there)
        target = load_pretrained(tmp_path / LAYOUT, nn.ModuleDict({"experts": Experts()}))
        assert layouts(target) == [layout, layout]
        assert torch.equal(target.experts.down_proj, nets["plain"].experts.down_proj)


def test_between_processes(tmp_path):
    """Weights travel plain, into targets of either layout, and are cut to shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain, t = pair("int4_g32_asymmetric")
        for target in (torch.zeros_like(plain), torch.zeros_like(plain).to_layout(LAYOUT)):
            layout = target.meta.layout
            for source in (plain, t):
                torch.distributed.all_gather([target], source)
                assert same_parts(target, plain.to_layout(layout))
                target.copy_(torch.zeros(SHAPE))
                torch.distributed.scatter(target, [source], 0)
                assert same_parts(target, plain.to_layout(layout))
        for dim in (0, 1):
            shard = distribute_tensor(t, init_device_mesh("cpu", (1,)), [Shard(dim)])
            assert torch.equal(shard.full_tensor(), plain)
    finally:
        torch.distributed.destroy_process_group()
