"""Preshuffled weights in models: which layers have them, what multiplies them, states and folders, which never do.

CPU tensors stand in for those of a GPU; their products go through the plain parts, groups through the operator where a test
says so.
"""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import ao_lab
import ao_lab.quantization.report as report
import ao_lab.tensor.metadata as rule
from ao_lab import (
    QuantizedTensor,
    Recipe,
    SchemeConfig,
    explain,
    linear_and_experts,
    load_pretrained,
    quantize_,
    quantized,
    save_pretrained,
)
from ao_lab.gemm import dense as fused
from ao_lab.gemm import select
from ao_lab.gemm.dense import groups_reason, most_fused_rows
from ao_lab.gemm.select import PRODUCTS, select_kernel
from ao_lab.quantization.api import preshuffle
from fast.gemm import families
from fast.matmul.preshuffled.grouped import grouped_linear_small
from fast.matmul.preshuffled.linear import ALL_ROWS, linear_small, rows_as_stored
from reference import SCHEMES
from tests.ao_lab.gemm.capability import set_capability
from tests.ao_lab.tensor.test_metadata import BF16, ENDS, EXPERTS, LAYOUT, dense, pair, with_inputs

CONFIGS = {
    "int8 by int4": lambda: ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
    "float8 by int4": lambda: ao_lab.Float8DynamicActivationInt4WeightConfig(),
    "mxfp8": lambda: ao_lab.MXDynamicActivationMXWeightConfig(),
    "int8 by int8 in groups": lambda: ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8),
    "nvfp4": lambda: ao_lab.NVFP4DynamicActivationNVFP4WeightConfig(),
}
PLAIN = {
    "int8": lambda: ao_lab.Int8DynamicActivationInt8WeightConfig(),
    "float8 tensor": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(),
    "float8 rows": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow()),
}


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


def layers():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(128, 128), nn.Linear(128, 256), nn.Linear(256, 128, bias=False))
    return net.to(BF16)


def experts(name="int4_g128"):
    net = nn.ModuleDict({"experts": Experts()})
    report = quantize_(net, SchemeConfig(scheme=name), linear_and_experts)
    return net, report


def every(module, name):
    return isinstance(module, (nn.Linear, nn.Embedding))


def layouts(net):
    return [p.meta.layout for p in net.parameters() if isinstance(p, QuantizedTensor)]


def dequantized(net):
    made = copy.deepcopy(net)
    for name, parameter in [*made.experts.named_parameters()]:
        setattr(made.experts, name, nn.Parameter(parameter.dequantize()))
    return made


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 384)).to(BF16).requires_grad_(False)


def there(t, **changes):
    """A weight (K, N) as `select` sees it there."""
    names = ("recipe", "scheme", "meta", "shape", "block_axis", "zero", "codes", "scale", "input_scales")
    fields = {name: getattr(t, name) for name in names} | changes
    if t.meta.layout == LAYOUT:
        fields["stored"] = t.stored
    return SimpleNamespace(**fields, device=torch.device("cuda", 0), is_cuda=True)


def test_quantize_chooses_it_for_layers(gpu):
    """Where layers multiply; tables stay, and a table that is a head too."""
    net = layers()
    report = quantize_(net, SchemeConfig(scheme="int4_g128"), every)
    assert layouts(net) == ["plain", LAYOUT, LAYOUT]
    assert str(report) == str(explain(net))
    assert [layer.bytes for layer in report.layers] == [
        sum(part.nbytes for part in p.parts.values() if part is not None)
        for p in (net[0].weight, net[1].weight, net[2].weight)
    ]
    tied = nn.Sequential(nn.Embedding(128, 128), nn.Linear(128, 128)).to(BF16)
    tied[1].weight = tied[0].weight
    quantize_(tied, SchemeConfig(scheme="int4_g128"), every)
    assert tied[0].weight is tied[1].weight
    assert layouts(tied)[0] == "plain"
    index = torch.tensor([3, 77])
    assert torch.equal(tied[0](index), tied[1].weight.dequantize()[index])
    assert not preshuffle(net)


def test_without_a_gpu_nothing_changes():
    net = layers()
    quantize_(net, SchemeConfig(scheme="int4_g128"))
    assert layouts(net[1:]) == ["plain", "plain"]


@pytest.mark.parametrize("name", ["int4_g128", "fp8_rowwise"])
def test_quantize_chooses_it_for_experts(gpu, name):
    """For experts that a filter names; groups, and experts one by one, as of the dequantized model."""
    net, report = experts(name)
    assert layouts(net) == [LAYOUT, LAYOUT]
    assert str(report) == str(explain(net))
    x = dense(3, (9, 128))
    with torch.no_grad():
        wanted = dequantized(net).experts(x, ENDS)
        assert torch.equal(net.experts(x, ENDS), wanted)
        assert torch.equal(net.experts.eager(x, ENDS), dequantized(net).experts.eager(x, ENDS))


@pytest.mark.parametrize("name", [*CONFIGS, *PLAIN])
def test_quantize_chooses_it_beside_quantized_inputs(name, gpu, monkeypatch):
    """Where no kernel multiplies codes of both; the same weight and the same products otherwise."""
    net, plain = network(), network()
    quantize_(net, (CONFIGS | PLAIN)[name]())
    assert net[0].weight.meta.layout == (LAYOUT if name in CONFIGS else "plain")
    monkeypatch.setattr(rule, "has_kernels", lambda x: False)
    quantize_(plain, (CONFIGS | PLAIN)[name]())
    assert plain[0].weight.meta.layout == "plain"
    assert torch.equal(net[0].weight, plain[0].weight)
    if name in CONFIGS:  # as preshuffled weights are multiplied on this machine
        weight = plain[0].weight.with_recipe(kernel="dequantize")
        plain[0].weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(BF16)
    assert torch.equal(net(x), plain(x))
    assert torch.equal(net[0].weight @ x.t(), plain[0].weight @ x.t())


def plain_experts():
    return nn.ModuleDict({"experts": Experts()})


@pytest.mark.parametrize(("make", "chosen"), [(layers, every), (plain_experts, linear_and_experts)])
def test_states_go_both_ways(gpu, monkeypatch, make, chosen):
    first, second = make(), make()
    quantize_(first, SchemeConfig(scheme="int4_g128"), chosen)
    monkeypatch.setattr(rule, "has_kernels", lambda x: False)
    quantize_(second, SchemeConfig(scheme="int4_g128"), chosen)
    assert LAYOUT in layouts(first)
    assert set(layouts(second)) == {"plain"}

    def values(net):
        return [p.dequantize() for p in net.parameters() if isinstance(p, QuantizedTensor)]

    wanted = values(second)
    for target, source in ((first, second), (second, first)):
        for parameter in target.parameters():
            parameter.data.copy_(torch.zeros(parameter.shape))
        before = layouts(target)
        target.load_state_dict(source.state_dict())
        assert layouts(target) == before
        assert all(map(torch.equal, values(target), wanted))


def stored(folder):
    """Tensors of a folder's one file, and its metadata."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118


@pytest.mark.parametrize(
    ("make", "layout"), [(layers, "ao_lab"), (layers, "compressed-tensors"), (plain_experts, "ao_lab")]
)
def test_folders_are_plain(tmp_path, monkeypatch, make, layout):
    """A folder holds what the plain model's does."""
    nets, chosen = {}, None if make is layers else linear_and_experts
    for name, there in (("plain", False), (LAYOUT, True)):
        monkeypatch.setattr(rule, "has_kernels", lambda x, there=there: there)
        nets[name] = make()
        quantize_(nets[name], SchemeConfig(scheme="compressed_tensors.int4_g128"), chosen)
        save_pretrained(nets[name], tmp_path / name, layout=layout, config={"dtype": "bfloat16"})
    assert set(layouts(nets[LAYOUT])) == {LAYOUT}
    (first, records), (second, others) = (stored(tmp_path / name) for name in nets)
    assert records == others
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for there, found in ((True, LAYOUT), (False, "plain")):
        monkeypatch.setattr(rule, "has_kernels", lambda x, there=there: there)
        target = load_pretrained(tmp_path / LAYOUT, make())
        assert set(layouts(target)) == {found}
        assert all(map(torch.equal, target.parameters(), nets["plain"].parameters()))


def test_records_with_the_layout_are_refused(tmp_path):
    net = layers()
    quantize_(net, SchemeConfig(scheme="int4_g128"))
    save_pretrained(net, tmp_path, layout="ao_lab", config={})
    (file,) = tmp_path.glob("*.safetensors")
    changed = file.read_bytes()
    size = int.from_bytes(changed[:8], "little")
    header = changed[8 : 8 + size].replace(rb"\"layout\": \"plain\"", rb"\"layout\": \"preshuffled\"")
    assert header != changed[8 : 8 + size]
    file.write_bytes(len(header).to_bytes(8, "little") + header + changed[8 + size :])
    with pytest.raises(ValueError, match="layout is one of plain, tiled, 2:4"):
        load_pretrained(tmp_path, layers())


def test_kernels_say_what_they_take(gpu):
    """On a host products are those of the plain parts; "fused" is the one on a GPU."""
    t = pair("int8_rowwise")[1].transposed()
    assert PRODUCTS["fused"].unsupported_reason(t, BF16) == "preshuffled weights are for GPUs"
    assert select_kernel(t, BF16, 1) == "dequantize"
    assert most_fused_rows(t, BF16) == 0
    for name in ("int8", "scaled_mm"):
        assert PRODUCTS[name].unsupported_reason(t, BF16) is not None


def test_a_gpu_multiplies_layers_by_the_fused_kernel(monkeypatch):
    """As `select` sees a weight there: what it takes, up to how many rows, and floats that it takes as `dequantize` does."""
    set_capability(monkeypatch, (9, 0))
    t = pair("int8_rowwise")[1].transposed()
    names = ("recipe", "scheme", "meta", "shape", "block_axis", "zero", "codes", "scale", "stored")
    w = SimpleNamespace(
        **{name: getattr(t, name) for name in names}, device=torch.device("cuda", 0), is_cuda=True
    )
    assert [select_kernel(w, dtype) for dtype in (BF16, torch.float16, torch.float32)] == ["fused"] * 3
    assert [most_fused_rows(w, dtype) for dtype in (BF16, torch.float16, torch.float32)] == [128, 128, 0]
    assert select_kernel(w, torch.float64) == "dequantize"
    set_capability(monkeypatch, (8, 0))
    assert select_kernel(w, BF16) == "dequantize"


def test_groups_go_to_the_operator(on_gpu):
    """Of 16-bit rows and offsets alone; all else is dequantized."""
    plain, t = pair("int8_rowwise", shape=EXPERTS)
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
    with pytest.raises(ValueError, match="does not support grouped matmuls"):
        torch._grouped_mm(x, plain.with_recipe(kernel="fused").mT, ENDS)


def test_gradients(on_gpu):
    """Of rows, by the dequantized weights: through the tensor, and through the operator alone."""
    plain, t = pair("int4_g128", shape=EXPERTS)
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
    t = pair("int8_rowwise", shape=EXPERTS)[1]

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
    assert "fused, up to 64 tokens an expert on average" in {layer.kernel for layer in experts()[1].layers}


def test_compiled_layers(gpu):
    """The layout is part of what programs are guarded by."""
    torch.compiler.reset()
    plain, t = pair("int4_g128")
    x = dense(3, (5, 384))
    compiled = torch.compile(functional.linear, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for weight in (t, plain, t):
            assert torch.equal(compiled(x, weight), x @ plain.dequantize().t())


def test_compiled_experts(on_gpu):
    """In one graph, with the operator in it; the layout is part of what programs are guarded by."""
    torch.compiler.reset()
    net, _ = experts()
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


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gpu_multiplies_beside_quantized_inputs(name, monkeypatch):
    set_capability(monkeypatch, (9, 0))
    net = network()
    quantize_(net, CONFIGS[name]())
    plain = net[0].weight
    t = plain.to_layout(LAYOUT)
    w = there(t.transposed())
    assert [select_kernel(w, dtype) for dtype in (BF16, torch.float16, torch.float32)] == ["fused"] * 3
    assert [most_fused_rows(w, dtype) for dtype in (BF16, torch.float16, torch.float32)] == [128, 128, 0]
    assert select_kernel(w, torch.float64) == "dequantize"
    assert select_kernel(there(plain.transposed()), BF16) == "dequantize"
    assert select_kernel(t.transposed(), BF16) == "dequantize"
    set_capability(monkeypatch, (8, 0))
    assert select_kernel(w, BF16) == "dequantize"


def test_explain_says_up_to_how_many_rows(monkeypatch):
    net = network()
    quantize_(net, CONFIGS["float8 by int4"]())
    net[0].weight = nn.Parameter(net[0].weight.to_layout(LAYOUT), requires_grad=False)
    monkeypatch.setattr(ao_lab.QuantizedTensor, "is_cuda", True)
    assert "fused, up to 128 tokens" in str(explain(net))
    monkeypatch.setattr(fused, "rows_as_stored", lambda w, dtype: ALL_ROWS)
    assert explain(net).changed[0].kernel == "fused"


@pytest.mark.parametrize(
    ("name", "most"), [("int4_g128", ALL_ROWS), ("nf4", 2048), ("nvfp4", 1024), ("mxfp4", ALL_ROWS)]
)
def test_rows_that_read_the_weight_as_it_is_stored(monkeypatch, name, most):
    """On Hopper where NVRTC is; else, and of other shapes, those of the kernel of few rows."""
    stored = on_device(with_inputs(name, "int8_rowwise", (4096, 4096)).to_layout(LAYOUT).stored)
    monkeypatch.setattr(families, "device_of", lambda device: families.HOPPER)
    assert rows_as_stored(stored, BF16) == most
    assert rows_as_stored(stored, torch.float32) == 0
    for other in (families.HOPPER._replace(nvrtc=False), families.HOPPER._replace(capability=(8, 0))):
        monkeypatch.setattr(families, "device_of", lambda device, other=other: other)
        assert rows_as_stored(stored, BF16) == 128


def on_device(stored):
    """A stored weight whose codes say that a GPU has them."""
    codes = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), shape=stored.codes.shape)
    fields = {name: getattr(stored, name) for name in ("scheme", "shape", "scale", "zero")}
    return SimpleNamespace(codes=codes, **fields)


def test_the_product_quantizes_inputs():
    """The public path to the operator, whose reference a CPU runs."""
    t = with_inputs("int4_g128", "int8_rowwise").to_layout(LAYOUT)
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(1)).to(BF16)
    made = fused.fused(x, t.transposed(), None)
    wanted = ao_lab.matmul(
        ao_lab.quantize(x, "int8_rowwise"), t.plain.dequantize(torch.float32).t(), out_dtype=BF16
    )
    assert torch.equal(made, wanted)


def test_given_scales_are_not_taken(gpu):
    """Static scales of inputs: the weight stays plain, and the kernel says why."""
    t = with_inputs("int4_g128", "int8_rowwise")
    one = torch.ones(())
    given = t.remade({**t.parts, "input_scale": one})
    assert rule.for_products(given) is given
    assert "scales of its inputs must not be given" in str(rule.unsupported_reason(given))
    w = there(t.to_layout(LAYOUT).transposed(), input_scales=one)
    assert fused.weight_reason(w, BF16) == "scales of its inputs must not be given"


def test_recipes_change_the_layout():
    t = quantized(torch.randn(256, 384).to(BF16), "int4_g128").to_layout(LAYOUT)
    assert t.with_recipe(activation=SCHEMES["int8_rowwise"]).meta.layout == LAYOUT
    rows = quantized(torch.randn(256, 384).to(BF16), "fp8_rowwise").to_layout(LAYOUT)
    assert t.with_recipe(activation=SCHEMES["fp8_1x128"]).meta.layout == LAYOUT
    assert rows.with_recipe(activation=SCHEMES["fp8_rowwise"]).meta.layout == "plain"
    experts = quantized(torch.randn(2, 128, 128).to(BF16), "int4_g128").to_layout(LAYOUT)
    asked = experts.with_recipe(activation=SCHEMES["int8_rowwise"])
    assert groups_reason(there(asked.transposed()), BF16) == "its inputs must not be quantized"


def test_plain_weights_are_told_why():
    w = there(with_inputs("int4_g128", "int8_rowwise").transposed())
    w.recipe = replace(w.recipe, kernel="fused")
    assert "but those of preshuffled matrices" in str(fused.weight_reason(w, BF16))


@pytest.mark.parametrize("name", ["nvfp4", "fp8_1x128", "nf4"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_inputs_that_16_bits_do_not_hold_go_through_their_scheme(name, dtype, monkeypatch):
    """They are rounded in their own dtype, and the weight is multiplied as it is stored; gradients go straight through."""
    t = with_inputs("int4_g128", name).to_layout(LAYOUT)
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    wanted = linear_small(ao_lab.fake_quantize(x, name), t.stored)
    monkeypatch.setattr(ao_lab.QuantizedTensor, "dequantize", None)
    made = fused.fused(x, t.transposed(), None)
    assert torch.equal(made, wanted)
    g = torch.ones_like(made)
    assert torch.equal(torch.autograd.grad(made, x, g)[0], torch.autograd.grad(wanted, x, g)[0])


@pytest.mark.parametrize("rows", [1, 16, 200])
def test_programs_that_are_traced_have_the_operator(rows, monkeypatch):
    """Of tensors that only say where they would be: one operator, whatever the number of rows."""
    set_capability(monkeypatch, (9, 0))
    seen, run = [], fused.linear_small_dynamic
    monkeypatch.setattr(fused, "linear_small_dynamic", lambda *a: seen.append(a) or run(*a))
    with FakeTensorMode(), torch.no_grad():
        dense = torch.empty(384, 256, device="cuda:0", dtype=BF16)
        recipe = Recipe(weight=SCHEMES["int4_g128"], activation=SCHEMES["fp8_rowwise"])
        t = quantized(dense, recipe).to_layout(LAYOUT)
        made = functional.linear(dense.new_empty(2, rows, 256), t, dense.new_empty(384))
    assert (made.shape, made.dtype, made.device.type) == ((2, rows, 384), BF16, "cuda")
    assert [one[1] for one in seen] == [SCHEMES["fp8_rowwise"]]
