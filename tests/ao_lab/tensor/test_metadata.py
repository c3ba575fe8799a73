"""Preshuffled `QuantizedTensor`s, matrices and experts (E, N, K): every operation as of the plain weight.

GPUs are stood in for by CPU tensors, whose products go through the plain parts.
"""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional

from ao_lab import Recipe, quantized
from ao_lab.tensor import metadata as rule
from ao_lab.tensor.fsdp import gathered_parts, whole_weight
from ao_lab.tensor.metadata import described
from reference import SCHEMES

LAYOUT = "preshuffled"
BF16 = torch.bfloat16
MATRIX, EXPERTS = (256, 384), (4, 128, 256)
#: Lengths that are filled: rows, columns, both; half a byte; one row; experts of either.
ODD = [
    ("int4_g32_asymmetric", (70, 416)), ("int4_g64", (128, 576)), ("int8_rowwise", (133, 1001)), ("fp8_tensorwise", (70, 130)),
    ("mxfp4", (1, 96)), ("nvfp4", (70, 144)), ("mxfp8_e4m3", (256, 160)), ("nf4", (100, 448)),
    ("int4_g32", (3, 72, 160)), ("int8_rowwise_asymmetric", (2, 128, 72)), ("nvfp4", (2, 72, 144)),
]  # fmt: skip
#: The last one has blocks of the flattened weight, which pieces of it do not.
NAMES = (
    "int4_g128", "int4_g32_asymmetric", "int8_rowwise", "fp8_rowwise", "fp8_tensorwise", "mxfp8_e4m3", "mxfp4", "nvfp4", "nf4",
)  # fmt: skip
OF_EXPERTS = (
    "int4_g128",
    "int4_g32_asymmetric",
    "int8_rowwise",
    "fp8_rowwise",
    "mxfp8_e4m3",
    "mxfp4",
    "nvfp4",
)
CASES = [*((name, MATRIX) for name in NAMES), *((name, EXPERTS) for name in OF_EXPERTS)]
ENDS = torch.tensor([3, 3, 5, 9], dtype=torch.int32)


def dense(seed=0, shape=MATRIX):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def pair(name, seed=0, shape=MATRIX):
    """A plain weight, and the same preshuffled."""
    plain = quantized(dense(seed, shape), name)
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


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_the_same_weight(name, shape):
    plain, t = pair(name, shape=shape)
    values = plain.dequantize()
    assert t.meta.layout == LAYOUT
    assert LAYOUT in repr(t)
    assert LAYOUT not in repr(plain)
    assert same_parts(t.to_layout("plain"), plain)
    assert same_parts(t.plain, plain)
    assert plain.plain is plain
    assert torch.equal(t, plain)
    assert not torch.equal(t, pair(name, 1, shape)[0])
    assert torch.equal(t.dequantize(), values)
    assert torch.equal(t.mT.dequantize(), values.mT)
    x = dense(3, (*shape[:-2], 5, shape[-1]))
    assert torch.equal(x @ t.mT, x @ values.mT)
    if shape == MATRIX:
        with torch.no_grad():
            assert torch.equal(functional.linear(x, t), x @ values.t())
        return
    assert torch.equal(torch.bmm(x, t.mT), torch.bmm(x, values.mT))
    bias, rows = dense(4, (128,)), dense(5, (9, 256))
    assert torch.equal(torch.baddbmm(bias, x, t.mT), torch.baddbmm(bias, x, values.mT))
    grouped = torch._grouped_mm(rows, values.mT, offs=ENDS)
    assert torch.equal(torch._grouped_mm(rows, t.mT, offs=ENDS), grouped)


@pytest.mark.parametrize(("name", "shape"), ODD, ids=str)
def test_lengths_that_are_filled(name, shape, gpu):
    """The weight, its pieces, copies, files, gradients and products are those of the plain one."""
    plain, t = pair(name, shape=shape)
    values, x = plain.dequantize(), dense(3, (*shape[:-2], 5, shape[-1]))
    assert rule.for_products(plain).meta.layout == t.meta.layout == LAYOUT
    assert t.shape == t.detach().shape == t.view(-1).view(shape).shape == shape
    for same, wanted in ((t.to_layout("plain"), plain), (t.mT.plain, plain.mT), (t.clone().plain, plain)):
        assert same_parts(same, wanted)
    assert torch.equal(t, plain)
    assert torch.equal(t.dequantize(), values)
    assert torch.equal(x @ t.mT, x @ values.mT)
    assert same_parts(torch.zeros_like(t), torch.zeros_like(plain))
    for source in (pair(name, 1, shape)[1], dense(1, shape)):
        target = t.clone()
        assert same_parts(target.copy_(source), pair(name, 1, shape)[1])
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    assert same_parts(torch.load(file, weights_only=True), plain)
    if len(shape) == 3:
        assert same_parts(t[1].plain, plain[1])
        assert same_parts(t[[1, 0, 1]].plain, plain[[1, 0, 1]])
        assert same_parts(t[:, :64], plain[:, :64])
        return
    with torch.no_grad():
        assert torch.equal(functional.linear(x, t), functional.linear(x, plain))
    given, like = (x.clone().requires_grad_() for _ in range(2))
    functional.linear(given, t).sum().backward()
    functional.linear(like, plain).sum().backward()
    assert torch.equal(given.grad, like.grad)
    index = torch.tensor([[0, shape[0] - 1]])
    assert torch.equal(functional.embedding(index, t), functional.embedding(index, plain))
    if name != "nf4":
        middle = (shape[0] + 1) // 2
        assert same_parts(t[middle:], plain[middle:])
        assert same_parts(torch.cat([t, t]), torch.cat([plain, plain]))


@pytest.mark.parametrize(("name", "shape"), [case for case in CASES if case[0] != "nf4"])
def test_views_and_pieces(name, shape):
    """Pieces of matrices are plain, and so are those of experts along other axes than theirs."""
    plain, t = pair(name, shape=shape)
    assert t.detach().meta.layout == t.clone().meta.layout == t.mT.meta.layout == LAYOUT
    assert same_parts(t.mT.plain, plain.mT)
    assert same_parts(t.view(-1).view(shape), t)
    assert torch.equal(t.view(-1).dequantize(), plain.dequantize().reshape(-1))
    assert same_parts(torch.zeros_like(t), torch.zeros_like(plain))
    assert same_parts(torch.cat([t, t]), torch.cat([plain, plain]))
    if shape == EXPERTS:
        assert same_parts(t[:, :64], plain[:, :64])
        assert same_parts(t[..., 128:], plain[..., 128:])
        assert same_parts(t.view(512, 256), plain.view(512, 256))
        return
    assert same_parts(t[128:], plain[128:])
    assert [piece.meta.layout for piece in t.split(128)] == ["plain", "plain"]
    assert same_parts(t.view(2, 128, 384), plain.view(2, 128, 384))
    assert torch.equal(t.expand(3, 256, 384).dequantize(), plain.expand(3, 256, 384).dequantize())
    padded = functional.pad(plain, (0, 0, 0, 128))
    assert same_parts(functional.pad(t, (0, 0, 0, 128)), padded)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_rows_are_looked_up(name):
    plain, t = pair(name)
    index = torch.tensor([[3, 200], [17, 8]])
    assert torch.equal(functional.embedding(index, t), functional.embedding(index, plain))
    assert same_parts(t.index_select(0, index[0]), plain.index_select(0, index[0]))
    assert same_parts(t[torch.tensor([-1, 5])], plain[torch.tensor([-1, 5])])
    for wrong in (-1, 256):
        with pytest.raises((IndexError, RuntimeError)):
            functional.embedding(torch.tensor([wrong]), t)


def test_rows_and_slices_of_nf4():
    """Blocks are those of the flattened weight: whole groups of 256 are pieces, rows are looked up in the dense one."""
    plain, t = pair("nf4")
    assert same_parts(t[128:], plain[128:])
    index = torch.tensor([[3, 200], [17, 8]])
    assert torch.equal(functional.embedding(index, t), functional.embedding(index, plain))
    assert same_parts(t.t().plain, plain.t())
    assert torch.equal(t[index], plain.dequantize()[index])


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_an_expert_is_a_view_of_the_parts(name):
    """Preshuffled as well: neither is anything copied, nor are other experts looked at."""
    plain, t = pair(name, shape=EXPERTS)

    def memory(t):
        return {name: part.untyped_storage().data_ptr() for name, part in t.parts.items() if part is not None}

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
        assert memory(made) == memory(t)
    x = dense(3, (5, 256))
    assert torch.equal(functional.linear(x, t[2]), functional.linear(x, plain[2].dequantize()))
    if t.outer is not None:  # one for all experts
        with pytest.raises(ValueError, match=f"outer of {name} also holds for the rest"):
            t[1].copy_(dense(7, (128, 256)))
        return
    t[1].copy_(dense(7, (128, 256)))
    assert same_parts(t[1].plain, quantized(dense(7, (128, 256)), name))
    assert same_parts(t[2].plain, plain[2])


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_experts_by_number(name):
    plain, t = pair(name, shape=EXPERTS)
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


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_copies_keep_the_targets_layout(name, shape):
    plain, t = pair(name, shape=shape)
    other, arranged = pair(name, 1, shape)
    for source in (other, arranged, dense(1, shape)):
        for target in (t.clone(), plain.clone()):
            layout = target.meta.layout
            target.copy_(source)
            assert same_parts(target, other.to_layout(layout))
    assert torch.equal(torch.zeros(shape, dtype=BF16).copy_(t), plain.dequantize())
    assert same_parts(copy.deepcopy(t), t)
    swapped = t.clone()
    swapped.data = plain
    assert same_parts(swapped, plain)
    assert torch.equal(swapped.dequantize(), plain.dequantize())


def test_what_a_target_cannot_hold_is_told():
    t = pair("fp8_rowwise")[1]
    broken = quantized(dense(), "fp8_rowwise")
    broken.codes[0, 0] = 0x7F
    with pytest.raises(ValueError, match="none of its codes may be NaN; keep layout 'plain'"):
        t.copy_(broken)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, MATRIX) for name in ("int4_g128", "int8_rowwise", "mxfp8_e4m3")),
        ("int4_g128", EXPERTS),
        ("nvfp4", EXPERTS),
    ],
)
def test_powers_of_two(name, shape):
    plain, t = pair(name, shape=shape)
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


def with_inputs(name, activation, shape=MATRIX):
    return quantized(dense(0, shape), Recipe(weight=SCHEMES[name], activation=SCHEMES[activation]))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: quantized(
                dense(), Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_rowwise"])
            ),
            "directly with those of its inputs",
        ),
        (
            lambda: quantized(dense(), Recipe(weight=SCHEMES["int8_rowwise"], kernel="dequantize")),
            "auto or fused",
        ),
        (lambda: quantized(dense(), "int8_rowwise", axis=0), "blocks along its last axis"),
        (lambda: quantized(dense(0, (2, 2, 128, 128)), "int8_rowwise"), "a matrix, or experts"),
        (lambda: quantized(dense(0, (2, 128, 128)), "int8_rowwise", axis=1), "blocks along its last axis"),
        (lambda: quantized(dense(0, (2, 128, 128)), "fp8_tensorwise"), "scales of its own"),
        (lambda: quantized(dense(0, (128, 160)), "fp8_1x128"), "whole blocks of 128 columns"),
        (lambda: quantized(dense(0, (256, 256)), "nf4"), "NF4 must be a matrix of 384"),
        (lambda: quantized(dense(), "int3_g32"), "its elements must be"),
        (lambda: with_inputs("int8_rowwise", "int8_rowwise"), "directly with those of its inputs"),
        (
            lambda: with_inputs("fp8_rowwise", "fp8_rowwise_e5m2"),
            "directly with those of its inputs",
        ),
        (lambda: with_inputs("fp8_1x128", "fp8_1x128"), "directly with those of its inputs"),
        (lambda: with_inputs("fp8_128x128", "fp8_1x128"), "directly with those of its inputs"),
        (
            lambda: with_inputs("int4_g128", "int8_rowwise", (2, 128, 128)),
            "inputs of experts must not be quantized",
        ),
    ],
)
def test_what_stays_plain(make, text, gpu):
    t = make()
    with pytest.raises(ValueError, match=text):
        t.to_layout(LAYOUT)
    assert rule.for_products(t) is t
    assert text.split()[0] in str(rule.unsupported_reason(t))


@pytest.mark.parametrize("shape", [MATRIX, EXPERTS])
def test_files_are_plain(shape):
    """torch.save of a weight, a parameter and a state; older readers know no other layout."""
    plain, t = pair("int4_g128", shape=shape)
    for value in (t, nn.Parameter(t, requires_grad=False), {"weight": t}):
        file = io.BytesIO()
        torch.save(value, file)
        assert LAYOUT.encode() not in file.getvalue()
        file.seek(0)
        found = torch.load(file, weights_only=True)
        assert same_parts(found["weight"] if isinstance(found, dict) else found, plain)
    assert described(t.meta)["layout"] == LAYOUT


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


def test_values_of_many_weights_are_waited_for_once(gpu, monkeypatch):
    """Each is asked about as alone: by its scheme, and by zero points and NaN of those whose values decide."""
    names = ("fp8_tensorwise", "fp8_rowwise", "int4_g32_asymmetric", "mxfp4", "nvfp4", "int8_rowwise", "nf4")
    weights = [quantized(dense(seed), name) for seed, name in enumerate(names)]
    weights += [quantized(dense(7), name) for name in ("fp8_tensorwise", "int4_g32_asymmetric", "nvfp4")]
    weights[-3].codes[5, 7], weights[-2].zero[3, 1], weights[-1].scale[0, 0] = 0x7F, 9, 0x7F
    wanted = [rule.for_products(one) is not one for one in weights]
    assert wanted == [True] * 7 + [False] * 3
    waits = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, read=read, name=name: waits.append(name) or read(x))
    assert rule.read_preshuffled(weights) == wanted
    assert waits == ["tolist"]
    assert rule.read_preshuffled([]) == []


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
@pytest.mark.parametrize("shape", [MATRIX, EXPERTS])
def test_collectives_send_plain_parts(shape):
    """Into weights of either layout, each of which keeps its own; DTensor's shards are plain."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    plain, t = pair("int4_g32_asymmetric", shape=shape)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for target in (torch.zeros_like(plain), torch.zeros_like(plain).to_layout(LAYOUT)):
            layout = target.meta.layout
            for source in (plain, t):
                torch.distributed.all_gather([target], source)
                assert same_parts(target, plain.to_layout(layout))
                target.copy_(torch.zeros(shape))
                torch.distributed.scatter(target, [source], 0)
                assert same_parts(target, plain.to_layout(layout))
                torch.distributed.broadcast(target, 0)
                assert same_parts(target, plain.to_layout(layout))
        for dim in (0, 1):
            shard = distribute_tensor(t, init_device_mesh("cpu", (1,)), [Shard(dim)])
            assert torch.equal(shard.full_tensor(), plain)
            assert shape == EXPERTS or shard._local_tensor.meta.layout == "plain"
    finally:
        torch.distributed.destroy_process_group()


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
        with pytest.raises(ValueError, match="slices are copies in layout 'plain'"):
            t[:128] = dense()[:128]
    assert torch.equal(t, plain)
