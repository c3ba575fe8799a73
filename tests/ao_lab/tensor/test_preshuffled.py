"""Preshuffled `QuantizedTensor`s: every operation as of the plain weight, files that never have the layout, and where it is
chosen. GPUs are stood in for by CPU tensors, whose products go through the plain parts."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import nn

import ao_lab.tensor.preshuffled as rule
from ao_lab import Recipe, SchemeConfig, explain, load_pretrained, quantize_, quantized, save_pretrained
from ao_lab.gemm.fused import most_fused_rows
from ao_lab.gemm.select import PRODUCTS, select_kernel
from ao_lab.quantization.api import preshuffle
from ao_lab.tensor.fsdp import gathered_parts, whole_weight
from ao_lab.tensor.metadata import described
from reference import SCHEMES
from tests.ao_lab.gemm.capability import set_capability

LAYOUT = "preshuffled"
#: The last one has blocks of the flattened weight, which pieces of it do not.
NAMES = (
    "int4_g128", "int4_g32_asymmetric", "int8_rowwise", "fp8_rowwise", "fp8_tensorwise", "mxfp8_e4m3", "mxfp4", "nvfp4", "nf4",
)  # fmt: skip
BF16 = torch.bfloat16


def dense(seed=0, shape=(256, 384)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def pair(name, seed=0):
    """A plain weight, and the same preshuffled."""
    plain = quantized(dense(seed), name)
    return plain, plain.to_layout(LAYOUT)


def same_parts(first, second):
    """Whether two weights are stored alike, in one layout, to the bit."""
    pairs = [(first.parts[name], second.parts[name]) for name in first.parts]
    return first.meta == second.meta and all(
        a is b or (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)) for a, b in pairs
    )


@pytest.fixture
def gpu(monkeypatch):
    """Tensors of this host count as those of a GPU with kernels."""
    monkeypatch.setattr(rule, "has_kernels", lambda x: True)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_weight(name):
    plain, t = pair(name)
    assert t.meta.layout == LAYOUT
    assert LAYOUT in repr(t)
    assert LAYOUT not in repr(plain)
    assert same_parts(t.to_layout("plain"), plain)
    assert same_parts(t.plain, plain)
    assert plain.plain is plain
    assert torch.equal(t, plain)
    assert not torch.equal(t, quantized(dense(1), name))
    assert torch.equal(t.dequantize(), plain.dequantize())
    x = dense(3, (5, 384))
    with torch.no_grad():
        assert torch.equal(nn.functional.linear(x, t), x @ plain.dequantize().t())
    assert torch.equal(x @ t.t(), x @ plain.dequantize().t())


@pytest.mark.parametrize("name", NAMES[:-1])
def test_views_and_pieces(name):
    plain, t = pair(name)
    assert same_parts(t[128:], plain[128:])
    assert same_parts(torch.cat([t, t]), torch.cat([plain, plain]))
    assert [piece.meta.layout for piece in t.split(128)] == ["plain", "plain"]
    assert t.detach().meta.layout == t.clone().meta.layout == t.t().meta.layout == LAYOUT
    assert same_parts(t.t().plain, plain.t())
    assert same_parts(t.view(-1).view(256, 384), t)
    assert torch.equal(t.view(-1).dequantize(), plain.dequantize().reshape(-1))
    assert same_parts(t.view(2, 128, 384), plain.view(2, 128, 384))
    assert torch.equal(t.expand(3, 256, 384).dequantize(), plain.expand(3, 256, 384).dequantize())
    padded = nn.functional.pad(plain, (0, 0, 0, 128))
    assert same_parts(nn.functional.pad(t, (0, 0, 0, 128)), padded)
    zeros = torch.zeros_like(t)
    assert same_parts(zeros, torch.zeros_like(plain))


@pytest.mark.parametrize("name", NAMES[:-1])
def test_rows_are_looked_up(name):
    plain, t = pair(name)
    index = torch.tensor([[3, 200], [17, 8]])
    assert torch.equal(nn.functional.embedding(index, t), nn.functional.embedding(index, plain))
    assert same_parts(t.index_select(0, index[0]), plain.index_select(0, index[0]))
    assert same_parts(t[torch.tensor([-1, 5])], plain[torch.tensor([-1, 5])])
    for wrong in (-1, 256):
        with pytest.raises((IndexError, RuntimeError)):
            nn.functional.embedding(torch.tensor([wrong]), t)


def test_rows_and_slices_of_nf4():
    """Blocks are those of the flattened weight: whole groups of 256 are pieces, rows are looked up in the dense one."""
    plain, t = pair("nf4")
    assert same_parts(t[128:], plain[128:])
    index = torch.tensor([[3, 200], [17, 8]])
    assert torch.equal(nn.functional.embedding(index, t), nn.functional.embedding(index, plain))
    assert same_parts(t.t().plain, plain.t())
    assert torch.equal(t[index], plain.dequantize()[index])


@pytest.mark.parametrize("name", NAMES)
def test_copies_keep_the_targets_layout(name):
    plain, t = pair(name)
    other, arranged = pair(name, 1)
    for source in (other, arranged, dense(1)):
        for target in (t.clone(), plain.clone()):
            layout = target.meta.layout
            target.copy_(source)
            assert same_parts(target, other.to_layout(layout))
    filled = torch.zeros(256, 384, dtype=BF16)
    assert torch.equal(filled.copy_(t), plain.dequantize())
    assert same_parts(copy.deepcopy(t), t)
    swapped = t.clone()
    swapped.data = plain
    assert same_parts(swapped, plain)
    assert torch.equal(swapped.dequantize(), plain.dequantize())


def test_what_a_target_cannot_hold_is_told():
    t = pair("fp8_rowwise")[1]
    broken = quantized(dense(), "fp8_rowwise")
    broken.codes[0, 0] = 0x7F
    with pytest.raises(ValueError, match="none of its codes may be NaN; leave it plain"):
        t.copy_(broken)


@pytest.mark.parametrize("name", ["int4_g128", "int8_rowwise", "mxfp8_e4m3"])
def test_powers_of_two(name):
    plain, t = pair(name)
    assert same_parts(t.mul_(4).to_layout("plain"), plain.mul_(4))
    assert same_parts(t.div_(8).to_layout("plain"), plain.div_(8))
    with pytest.raises(ValueError, match="leave the range"):
        t.mul_(2.0**250)
    assert same_parts(t.to_layout("plain"), plain)


def test_other_dtypes_and_recipes():
    plain, t = pair("int8_rowwise")
    assert same_parts(t.float(), plain.float())
    assert same_parts(t.half(), plain.half())  # on a host every copy is plain
    assert t.with_recipe(kernel="fused").meta.layout == LAYOUT
    for changes in ({"kernel": "reference"}, {"activation": SCHEMES["int8_rowwise"]}):
        assert same_parts(t.with_recipe(**changes), plain.with_recipe(**changes))
    assert t._stable_hash_for_caching() != plain._stable_hash_for_caching()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: quantized(
                dense(), Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_rowwise"])
            ),
            "by those of its inputs",
        ),
        (
            lambda: quantized(dense(), Recipe(weight=SCHEMES["int8_rowwise"], kernel="dequantize")),
            "auto or fused",
        ),
        (lambda: quantized(dense(), "int8_rowwise", axis=0), "blocks along its last axis"),
        (lambda: quantized(dense(0, (2, 2, 128, 128)), "int8_rowwise"), "a matrix, or experts"),
        (lambda: quantized(dense(0, (2, 128, 128)), "int8_rowwise", axis=1), "blocks along its last axis"),
        (lambda: quantized(dense(0, (2, 128, 128)), "fp8_tensorwise"), "scales of its own"),
        (lambda: quantized(dense(0, (100, 128)), "int8_rowwise"), "multiples of 128"),
        (lambda: quantized(dense(0, (256, 256)), "nf4"), "NF4 must be a matrix of 384"),
        (lambda: quantized(dense(), "int3_g32"), "its elements must be"),
    ],
)
def test_what_stays_plain(make, text, gpu):
    t = make()
    with pytest.raises(ValueError, match=text):
        t.to_layout(LAYOUT)
    assert rule.for_products(t) is t
    assert text.split()[0] in str(rule.unsupported_reason(t))


def test_files_are_plain():
    """torch.save of a weight, a parameter and a state; older readers know no other layout."""
    plain, t = pair("int4_g128")
    for value in (t, nn.Parameter(t, requires_grad=False), {"weight": t}):
        file = io.BytesIO()
        torch.save(value, file)
        assert LAYOUT.encode() not in file.getvalue()
        file.seek(0)
        found = torch.load(file, weights_only=True)
        assert same_parts(found["weight"] if isinstance(found, dict) else found, plain)
    assert described(t.meta)["layout"] == LAYOUT


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(128, 128), nn.Linear(128, 256), nn.Linear(256, 128, bias=False))
    return net.to(BF16)


def every(module, name):
    return isinstance(module, (nn.Linear, nn.Embedding))


def layouts(net):
    return [parameter.meta.layout for name, parameter in net.named_parameters() if name.endswith("weight")]


def test_quantize_chooses_it(gpu):
    """Where layers multiply; tables stay, and a table that is a head too."""
    net = model()
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
    net = model()
    quantize_(net, SchemeConfig(scheme="int4_g128"))
    assert layouts(net[1:]) == ["plain", "plain"]


def test_what_is_left_alone(gpu):
    plain = pair("int8_rowwise")[0]
    for t in (plain.float(), plain.view(-1), plain.to("meta"), plain.clone().requires_grad_()):
        assert rule.for_products(t) is t
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fake = mode.from_tensor(plain)
    assert rule.for_products(fake) is fake
    moved = []
    torch.vmap(lambda x: moved.append(rule.for_products(plain)) or x)(torch.ones(2))
    assert moved[0] is plain
    assert rule.for_products(plain).meta.layout == LAYOUT


def test_moves(gpu, monkeypatch):
    """From the host alone, and not where processes share a model."""
    plain = pair("int8_rowwise")[0]

    class Moved:
        is_cuda = True

    after = Moved()
    monkeypatch.setattr(rule, "for_products", lambda t: "chosen")
    assert rule.moved_to_gpu(plain, after) == "chosen"
    assert rule.moved_to_gpu(plain.clone().requires_grad_(), after) is after
    assert rule.moved_to_gpu(plain, plain) is plain
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert rule.moved_to_gpu(plain, after) is after
    assert rule.stays(torch.device("cuda", 1), torch.float16)
    assert not rule.stays(torch.device("cuda"), torch.float32)
    assert not rule.stays(torch.device("cpu"), BF16)


def test_states_go_both_ways(gpu, monkeypatch):
    first, second = model(), model()
    quantize_(first, SchemeConfig(scheme="int4_g128_asymmetric"), every)
    monkeypatch.setattr(rule, "has_kernels", lambda x: False)
    quantize_(second, SchemeConfig(scheme="int4_g128_asymmetric"), every)
    assert layouts(second) == ["plain"] * 3
    wanted = [p.dequantize() for p in second.parameters() if hasattr(p, "dequantize") and p.dim() == 2]
    for target, source in ((first, second), (second, first)):
        for parameter in target.parameters():
            parameter.data.copy_(torch.zeros(parameter.shape))
        before = layouts(target)
        target.load_state_dict(source.state_dict())
        assert layouts(target) == before
        found = [p.dequantize() for p in target.parameters() if p.dim() == 2]
        assert all(map(torch.equal, found, wanted))


def stored(folder):
    """Tensors of a folder's one file, and its metadata."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118


@pytest.mark.parametrize("layout", ["ao_lab", "compressed-tensors"])
def test_folders_are_plain(tmp_path, monkeypatch, layout):
    """A folder holds what the plain model's does."""
    nets = {}
    for name, there in (("plain", False), (LAYOUT, True)):
        monkeypatch.setattr(rule, "has_kernels", lambda x, there=there: there)
        nets[name] = model()
        quantize_(nets[name], SchemeConfig(scheme="compressed_tensors.int4_g128"))
        save_pretrained(nets[name], tmp_path / name, layout=layout, config={"dtype": "bfloat16"})
    assert layouts(nets[LAYOUT][1:]) == [LAYOUT, LAYOUT]
    (first, records), (second, others) = (stored(tmp_path / name) for name in nets)
    assert records == others
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    target = load_pretrained(tmp_path / LAYOUT, model())
    assert layouts(target[1:]) == [LAYOUT, LAYOUT]
    monkeypatch.setattr(rule, "has_kernels", lambda x: False)
    target = load_pretrained(tmp_path / LAYOUT, model())
    assert layouts(target[1:]) == ["plain", "plain"]
    assert torch.equal(target[1].weight, nets["plain"][1].weight)


def test_records_with_the_layout_are_refused(tmp_path):
    net = model()
    quantize_(net, SchemeConfig(scheme="int4_g128"))
    save_pretrained(net, tmp_path, layout="ao_lab", config={})
    (file,) = tmp_path.glob("*.safetensors")
    changed = file.read_bytes()
    size = int.from_bytes(changed[:8], "little")
    header = changed[8 : 8 + size].replace(rb"\"layout\": \"plain\"", rb"\"layout\": \"preshuffled\"")
    assert header != changed[8 : 8 + size]
    file.write_bytes(len(header).to_bytes(8, "little") + header + changed[8 + size :])
    with pytest.raises(ValueError, match="layout is one of plain, tiled, 2:4"):
        load_pretrained(tmp_path, model())


def test_kernels_say_what_they_take(gpu):
    """On a host products are those of the plain parts; "fused" is the one on a GPU."""
    t = pair("int8_rowwise")[1].transposed()
    assert PRODUCTS["fused"].unsupported_reason(t, BF16) == "preshuffled weights are multiplied on GPUs"
    assert select_kernel(t, BF16, 1) == "dequantize"
    assert most_fused_rows(t, BF16) == 0
    for name in ("int8", "scaled_mm"):
        assert PRODUCTS[name].unsupported_reason(t, BF16) is not None


def test_a_gpu_multiplies_by_the_fused_kernel(monkeypatch):
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


@pytest.mark.parametrize("name", ["int4_g32_asymmetric", "fp8_tensorwise"])
@pytest.mark.parametrize("rows", [512, 500])
def test_shards_travel_plain(name, rows):
    """What FSDP2 gathers of a preshuffled shard, whole rows or bytes of them, and the weight made of it."""
    plain, t = pair(name)

    class Mesh:
        def size(self):
            return 2

    (sent, told), (wanted, _) = (gathered_parts(one, Mesh(), (rows, 384)) for one in (t, plain))
    assert all(map(torch.equal, sent, wanted))
    whole = tuple(torch.cat([part, part]) for part in sent)
    made, expected = (whole_weight(one, whole, told, BF16)[0] for one in (t, plain))
    assert same_parts(made, expected)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_collectives_send_plain_parts():
    """Into weights of either layout, each of which keeps its own; DTensor's shards are plain."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    plain, t = pair("int4_g32_asymmetric")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for target in (torch.zeros_like(plain), torch.zeros_like(plain).to_layout(LAYOUT)):
            layout = target.meta.layout
            for source in (plain, t):
                torch.distributed.all_gather([target], source)
                assert same_parts(target, plain.to_layout(layout))
                target.copy_(torch.zeros(256, 384))
                torch.distributed.scatter(target, [source], 0)
                assert same_parts(target, plain.to_layout(layout))
                torch.distributed.broadcast(target, 0)
                assert same_parts(target, plain.to_layout(layout))
        shard = distribute_tensor(t, init_device_mesh("cpu", (1,)), [Shard(0)])
        assert shard._local_tensor.meta.layout == "plain"
        assert torch.equal(shard.full_tensor(), plain)
    finally:
        torch.distributed.destroy_process_group()


def test_compiled_programs(gpu):
    """The layout is part of what programs are guarded by."""
    torch.compiler.reset()
    plain, t = pair("int4_g128")
    x = dense(3, (5, 384))
    compiled = torch.compile(nn.functional.linear, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for weight in (t, plain, t):
            assert torch.equal(compiled(x, weight), x @ plain.dequantize().t())


@pytest.mark.parametrize("name", NAMES)
def test_changes_in_place(name):
    """The weight is changed as a plain one is; a slice is a copy, into which nothing can be written."""
    plain, t = pair(name)
    for one in (plain, t):
        one += dense(1)
    assert t.meta.layout == LAYOUT
    assert torch.equal(t, plain)
    for one in (plain, t):
        one[:] = dense(2)
        one.data = one.dequantize() * 3
    assert t.meta.layout == LAYOUT
    assert torch.equal(t, plain)
    if name != "nf4":
        with pytest.raises(ValueError, match="slices are copies in the plain layout"):
            t[:128] = dense()[:128]
    assert torch.equal(t, plain)
