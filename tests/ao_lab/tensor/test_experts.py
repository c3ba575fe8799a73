"""Experts by number (`ao_lab.tensor.experts`): as the dense experts by number, in products and everywhere else."""

import copy
import io

import pytest
import torch

from ao_lab.tensor import experts as gathered
from ao_lab.tensor import slicing
from ao_lab.tensor.experts import Gathered
from ao_lab.tensor.quantized_tensor import QuantizedTensor, quantized

NUMBERS = torch.tensor([3, 0, 3, -1, 1])
ENDS = torch.tensor([1, 2, 2, 4, 6], dtype=torch.int32)


def experts(scheme="int4_g32", shape=(4, 64, 128)):
    return quantized(torch.randn(shape, generator=torch.Generator().manual_seed(0)), scheme)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def no_copies(monkeypatch):
    def refused(*arguments, **options):
        raise AssertionError("experts are copied")

    monkeypatch.setattr(slicing, "select_rows", refused)


@pytest.mark.parametrize("scheme", ["int4_g32", "nf4", "mxfp4", "fp8_rowwise"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("inference", [False, True])
def test_products(no_copies, scheme, rows, inference):
    """From both sides and both ways round; nothing is copied."""
    w = experts(scheme)
    with torch.inference_mode(inference):
        check_products(w, rows)


def check_products(w, rows):
    dense, x, z = w.dequantize()[NUMBERS], random(5, rows, 128), random(5, rows, 64)
    for made, wanted in (
        (torch.bmm(x, w[NUMBERS].mT), torch.bmm(x, dense.mT)),
        (torch.bmm(w[NUMBERS], x.mT), torch.bmm(dense, x.mT)),
        (torch.bmm(z, w[NUMBERS]), torch.bmm(z, dense)),
        (w.mT[NUMBERS] @ z.mT, dense.mT @ z.mT),
    ):
        torch.testing.assert_close(made, wanted)


def test_a_weight_that_was_multiplied_is_copied_and_replaced_as_any():
    w, x = experts(), random(5, 1, 128)
    torch.bmm(x, w[NUMBERS].mT)
    copied, other = copy.deepcopy(w), quantized(random(4, 64, 128), "int4_g32")
    copied.copy_(other)
    w.data = other
    for t in (copied, w):
        torch.testing.assert_close(torch.bmm(x, t[NUMBERS].mT), torch.bmm(x, other.dequantize()[NUMBERS].mT))


def test_products_have_gradients(no_copies):
    w, x = experts(), random(5, 1, 128).requires_grad_()
    with torch.inference_mode():
        torch.bmm(x, w[NUMBERS].mT)
    torch.bmm(x, w[NUMBERS].mT).sum().backward()
    torch.testing.assert_close(x.grad, w.dequantize()[NUMBERS].sum(1, keepdim=True))


@pytest.mark.parametrize("scheme", ["int4_g32", "nf4", "nvfp4"])
def test_all_else_sees_the_parts(scheme):
    w = experts(scheme, (4, 128, 128))
    dense, found = w.dequantize()[NUMBERS], w[NUMBERS]
    assert type(found) is Gathered
    assert torch.equal(found.dequantize(), dense)
    assert torch.equal(found[2].dequantize(), dense[2])
    assert torch.equal(found.mT.dequantize(), dense.mT)
    assert torch.equal(found.clone().dequantize(), dense)
    assert torch.equal(copy.deepcopy(found).dequantize(), dense)
    assert torch.equal(found[NUMBERS].dequantize(), dense[NUMBERS])
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is QuantizedTensor
    assert torch.equal(loaded.dequantize(), dense)


def test_few_are_copied_where_no_kernel_multiplies_groups(monkeypatch):
    """Two of four: less than all made dense."""
    w, x = experts(), random(2, 1, 128)
    assert type(w[NUMBERS[:2]]) is QuantizedTensor
    monkeypatch.setattr(gathered, "groups_reason", lambda w, dtype: None)
    assert type(w[NUMBERS[:2]]) is Gathered
    torch.testing.assert_close(torch.bmm(x, w[NUMBERS[:2]].mT), torch.bmm(x, w.dequantize()[NUMBERS[:2]].mT))


def test_numbers_are_those_of_the_gather():
    w, numbers, x = experts(), NUMBERS.clone(), random(5, 1, 128)
    found = w[numbers]
    numbers.fill_(0)
    torch.testing.assert_close(torch.bmm(x, found.mT), torch.bmm(x, w.dequantize()[NUMBERS].mT))
    for wrong in (4, -5):
        with pytest.raises(IndexError):
            w[torch.tensor([0, 1, 2, wrong])]
    assert w[NUMBERS[:0]].shape == (0, 64, 128)


@pytest.mark.parametrize("many", [1, 5])
def test_blocks_that_span_experts(many):
    """NF4 of experts that are no whole number of its blocks: products and values as any; parts there are none."""
    w, numbers, x = experts("nf4", (4, 8, 12)), NUMBERS[:many], random(many, 1, 12)
    dense = w.dequantize()[numbers]
    assert torch.equal(w[numbers].dequantize(), dense)
    assert torch.equal(w[numbers].mT.dequantize(), dense.mT)
    torch.testing.assert_close(torch.bmm(x, w[numbers].mT), torch.bmm(x, dense.mT))
    with pytest.raises(ValueError, match="no block spans it"):
        w[numbers].clone()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.bmm(x, w[numbers].mT), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.bmm(x, dense.mT))


def other_experts():
    return quantized(random(4, 64, 128), "int4_g32")[NUMBERS].clone()


def check_are(t, dense):
    """Values, both ways round, and products of either kind are those of `dense`."""
    x, rows = random(5, 1, 128), random(6, 128)
    assert torch.equal(t.dequantize(), dense)
    assert torch.equal(t.mT.dequantize(), dense.mT)
    torch.testing.assert_close(torch.bmm(x, t.mT), torch.bmm(x, dense.mT))
    torch.testing.assert_close(torch.bmm(t, x.mT), torch.bmm(dense, x.mT))
    torch.testing.assert_close(torch._grouped_mm(rows, t.mT, ENDS), torch._grouped_mm(rows, dense.mT, ENDS))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", ["copy_", "data", "copy_ of a view", "write of parts"])
def test_writes_are_seen_by_all_that_was_gathered(write, inference):
    w, other = experts(), other_experts()
    found, before = w[NUMBERS], w.dequantize()
    view = found.mT
    with torch.inference_mode(inference):
        if write == "data":
            found.data = other
        elif write == "write of parts":
            for name, part in found.parts.items():
                if part is not None:
                    part.copy_(getattr(other, name))
        else:
            (found if write == "copy_" else view.mT).copy_(other)
    check_are(found, other.dequantize())
    if write != "data":
        check_are(view.mT, other.dequantize())
    assert torch.equal(w.dequantize(), before)
    assert type(found) is QuantizedTensor


@pytest.mark.parametrize("trained", [False, True])
def test_parameters_are_plain(monkeypatch, trained):
    """One copy, which loading and assignment replace."""
    w, module, other = experts(), torch.nn.Module(), other_experts()
    module.w = torch.nn.Parameter(w[NUMBERS], requires_grad=trained)
    assert type(module.w) is QuantizedTensor
    assert isinstance(module.w, torch.nn.Parameter)
    assert not {"source", "choice"} & set(module.w.__dict__)
    check_are(module.w.detach(), w.dequantize()[NUMBERS])
    module.load_state_dict({"w": other})
    check_are(module.w.detach(), other.dequantize())
    module.w.data = w[NUMBERS]
    check_are(module.w.detach(), w.dequantize()[NUMBERS])
    assert type(w[NUMBERS].detach().requires_grad_()) is QuantizedTensor


def test_a_gather_and_its_views_are_copied_once(monkeypatch):
    found, copies, run = experts()[NUMBERS], [], slicing.select_rows
    monkeypatch.setattr(slicing, "select_rows", lambda *given: copies.append(given) or run(*given))
    views = [found.mT, found.mT.mT, found.view(found.shape)]
    for t in (found.mT, found, *views):
        t.clone()
    assert len(copies) == 1
    assert {type(t) for t in (found, *views)} == {QuantizedTensor}
    assert {t.codes.data_ptr() for t in views} == {found.codes.data_ptr()}


def replaced_data(w, other):
    w.data = other


WRITES = {
    "copy_": lambda w, other: w.copy_(other),
    "of an expert": lambda w, other: w[1].copy_(other[1]),
    "of a part": lambda w, other: w.codes.copy_(other.codes),
    "data": replaced_data,
    "moved": lambda w, other: setattr(w.scale, "data", w.scale.clone()),
}


@pytest.mark.parametrize("write", sorted(WRITES))
@pytest.mark.parametrize(
    "use",
    [
        lambda t: torch.bmm(random(5, 1, 128), t.mT),
        lambda t: torch.bmm(t, random(5, 128, 1)),
        lambda t: t.dequantize(),
        lambda t: t.clone(),
        lambda t: torch.nn.Parameter(t, requires_grad=False),
    ],
)
def test_a_weight_that_is_written_before_its_gather_is_used(write, use):
    w, other = experts(), quantized(random(4, 64, 128), "int4_g32")
    waiting, used, copied, dense = w[NUMBERS], w[NUMBERS], w[NUMBERS].clone(), w.dequantize()[NUMBERS]
    used.clone()
    WRITES[write](w, other)
    with pytest.raises(RuntimeError, match=r"written or replaced after it was indexed.*clone"):
        use(waiting)
    for t in (used, copied):
        assert torch.equal(t.dequantize(), dense)
    use(w[NUMBERS])


def test_a_weight_that_is_written_before_the_backward_pass():
    w, x = experts(), random(5, 1, 128).requires_grad_()
    y = torch.bmm(x, w[NUMBERS].mT)
    w.copy_(quantized(random(4, 64, 128), "int4_g32"))
    with pytest.raises(RuntimeError, match="written or replaced after it was indexed"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("scheme", "shape", "dtype"),
    [
        ("fp8_rowwise", (4, 5, 37), torch.float32),
        ("int8_rowwise", (4, 30, 36), torch.bfloat16),
        ("fp8_rowwise", (4, 30, 36), torch.float32),
        ("int8_rowwise", (4, 36, 30), torch.float16),
    ],
)
def test_lengths_that_torch_multiplies_in_no_groups(scheme, shape, dtype):
    w = quantized(random(*shape).to(dtype), scheme)
    dense, x = w.dequantize()[NUMBERS], random(5, 1, shape[2]).to(dtype)
    assert not gathered._torch_groups(w, dtype)
    torch.testing.assert_close(torch.bmm(x, w[NUMBERS].mT), torch.bmm(x, dense.mT))
    torch.testing.assert_close(torch.bmm(w[NUMBERS], x.mT), torch.bmm(dense, x.mT))


@pytest.mark.parametrize("shape", [(7, 1, 128), (4, 1, 128), (5, 128), (5, 1, 64), (1, 5, 1, 128)])
def test_shapes_that_do_not_fit(monkeypatch, shape):
    """As `torch.bmm` has it, before anything is indexed."""
    w, x = experts()[NUMBERS], random(*shape)
    monkeypatch.setattr(gathered, "_by_expert", None)
    with pytest.raises(RuntimeError, match=rf"\({', '.join(map(str, shape))}\) and \(5, 128, 64\)"):
        torch.bmm(x, w.mT)
    with pytest.raises(RuntimeError, match=r"bmm of \(5, 64, 128\) and"):
        torch.bmm(w, x.mT)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_few_numbers(monkeypatch, dynamic):
    """A number that is left open is taken for a small one: not all experts are made dense."""
    w, x, shapes = quantized(random(4, 64, 128).bfloat16(), "int4_g32"), random(2, 1, 128).bfloat16(), []
    wanted, run = torch.bmm(x, w.dequantize()[NUMBERS[:2]].mT), QuantizedTensor.dequantize

    def dequantize(t, dtype=None):
        shapes.append(tuple(t.shape))
        return run(t, dtype)

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, numbers: torch.bmm(x, w[numbers].mT), backend="aot_eager", dynamic=dynamic, fullgraph=True
    )
    monkeypatch.setattr(QuantizedTensor, "dequantize", dequantize)
    torch.testing.assert_close(compiled(x, NUMBERS[:2]), wanted)
    assert shapes
    assert not [shape for shape in shapes if shape[0] == w.shape[0]]


def test_compiled_gathers_that_leave_a_graph():
    w, x = experts(), random(5, 1, 128)

    def broken(x, numbers):
        found = w[numbers]
        torch._dynamo.graph_break()
        return torch.bmm(x, found.mT)

    torch._dynamo.reset()
    compiled = torch.compile(broken, backend="aot_eager")
    for numbers in (NUMBERS, NUMBERS.flip(0)):
        torch.testing.assert_close(compiled(x, numbers), broken(x, numbers))
