"""`weight_and_bias_gradients`: its bits on a CPU, which way a shape gets, the order of two streams, and what a tracer sees."""

import contextlib

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fast.dispatch import execute
from fast.gemm.choose import APART, BESIDE, EPILOGUE, gradients
from fast.kernels import cublaslt
from fast.layers import linear_gradients as layer
from fast.layers.column_sums import column_sums
from fast.layers.linear_gradients import LINEAR_GRADIENTS, weight_and_bias_gradients

HALF, BF16 = torch.float16, torch.bfloat16


def normals(*shape, dtype=HALF, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def torchs(g, x):
    return g.t().mm(x), column_sums(g)


@pytest.mark.parametrize("dtype", [HALF, BF16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 300])
def test_on_a_cpu_both_are_torchs(rows, dtype):
    g, x = normals(rows, 16, dtype=dtype), normals(rows, 24, dtype=dtype, seed=1)
    for call in (weight_and_bias_gradients, torch.ops.ao_lab.weight_and_bias_gradients):
        made = tuple(call(g, x))
        assert same(made, torchs(g, x))
        assert [t.dtype for t in made] == [dtype, dtype]


@pytest.mark.parametrize("call", [weight_and_bias_gradients, layer.LINEAR_GRADIENTS_OP])
def test_gradients_of_the_gradients(call):
    g, x = (normals(5, width, dtype=torch.float64, seed=width).requires_grad_() for width in (3, 4))
    assert torch.autograd.gradcheck(lambda g, x: tuple(call(g, x)), (g, x))


@pytest.mark.parametrize(
    ("g", "x", "error", "text"),
    [
        (normals(3, 2), normals(3, 2, dtype=BF16), TypeError, "got torch.float16 and torch.bfloat16"),
        (
            torch.ones(2, 2, dtype=torch.int8),
            torch.ones(2, 2, dtype=torch.int8),
            TypeError,
            "floating-point dtype",
        ),
        (normals(3, 2), normals(4, 2), ValueError, r"as many rows, got \(3, 2\) and \(4, 2\)"),
        (normals(2, 3, 2), normals(3, 2), ValueError, "reshape them"),
    ],
)
def test_what_is_refused(g, x, error, text):
    with pytest.raises(error, match=text):
        weight_and_bias_gradients(g, x)


@pytest.mark.parametrize(
    ("shape", "dtype", "way"),
    [
        ((13008, 4096, 1024), HALF, EPILOGUE),
        ((13008, 4096, 1024), BF16, APART),
        ((13008, 1024, 4096), HALF, BESIDE),
        ((13008, 1024, 4096), BF16, BESIDE),
        ((13008, 2048, 2048), BF16, BESIDE),
        # Sums that four multiprocessors do not finish, sums that take as long as a second stream, further tiles.
        ((13008, 1024, 2040), BF16, APART),
        ((11718, 1024, 2048), BF16, APART),
        ((13008, 2048, 2056), BF16, APART),
        ((13008, 1024, 1024), HALF, APART),
        # Of float16 too few outputs, too few tiles, too many.
        ((13008, 4088, 1024), HALF, APART),
        # Of more rows the library's product is no longer the quicker one.
        ((16384, 4096, 1024), HALF, EPILOGUE),
        ((16392, 4096, 1024), HALF, APART),
        ((13008, 2048, 512), HALF, APART),
        ((13008, 4104, 1024), HALF, APART),
    ],
)
def test_the_way_of_a_shape(shape, dtype, way):
    assert gradients(*shape, dtype) == way


@pytest.fixture
def ways(monkeypatch):
    """Names of the ways that were taken, on a Hopper GPU that is played by the host."""
    taken = []
    monkeypatch.setattr(layer, "covers", lambda g: len(g) > 1)
    monkeypatch.setattr(layer, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(layer, "beside", lambda g, x: taken.append(BESIDE) or torchs(g, x))
    monkeypatch.setattr(
        cublaslt, "weight_and_bias_gradients", lambda g, x: taken.append(EPILOGUE) or torchs(g, x)
    )
    monkeypatch.setattr("fast.dispatch.has_kernels", lambda x: True)
    return taken


@pytest.mark.parametrize("way", [APART, BESIDE, EPILOGUE])
def test_the_rules_way_is_taken(ways, monkeypatch, way):
    monkeypatch.setattr(layer, "gradients", lambda *_: way)
    g, x = normals(9, 4), normals(9, 3)
    for _ in range(2):
        assert same(execute(LINEAR_GRADIENTS, None, (), (g, x)), torchs(g, x))
    assert ways == ([] if way == APART else [way, way])


@pytest.mark.parametrize("way", [APART, BESIDE, EPILOGUE])
def test_plain_calls_pass_dispatch_by(ways, monkeypatch, way):
    """Where nothing listens and no gradient is wanted; the same bits either way."""
    monkeypatch.setattr(layer, "gradients", lambda *_: way)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(layer, "has_kernels", lambda t: True)
    monkeypatch.setattr(layer, "execute", lambda f, r, v, o: torchs(*o, o[0])[1])
    dispatched = []
    monkeypatch.setattr(layer, "run", lambda f, r, v, o: dispatched.append(f.name) or torchs(*o))
    g, x = normals(9, 4), normals(9, 3)
    right = torchs(g, x)
    assert same(weight_and_bias_gradients(g, x), right)
    assert (ways, dispatched) == ([] if way == APART else [way], [])
    assert same(weight_and_bias_gradients(g, x.clone().requires_grad_()), right)
    with torch.no_grad():
        assert same(weight_and_bias_gradients(g, x.clone().requires_grad_()), right)
    with FlopCounterMode(display=False):
        weight_and_bias_gradients(g, x)
    monkeypatch.setattr(layer, "has_kernels", lambda t: False)
    weight_and_bias_gradients(g, x)
    assert dispatched == 3 * ["weight_and_bias_gradients"]


def test_what_no_way_is_worth(ways, monkeypatch):
    """Small matrices, other GPUs, and products that the library does not have."""
    monkeypatch.setattr(layer, "gradients", lambda *_: EPILOGUE)
    execute(LINEAR_GRADIENTS, None, (), (normals(1, 4), normals(1, 3)))
    monkeypatch.setattr(cublaslt, "weight_and_bias_gradients", lambda g, x: None)
    g, x = normals(9, 4), normals(9, 3)
    assert same(execute(LINEAR_GRADIENTS, None, (), (g, x)), torchs(g, x))
    monkeypatch.setattr(layer, "gradients", lambda *_: BESIDE)
    monkeypatch.setattr(layer, "_capability", lambda device: (10, 0))
    execute(LINEAR_GRADIENTS, None, (), (g, x))
    assert ways == []


def two_streams(monkeypatch):
    """The current stream and that of products, played; what they are told is in the list."""
    told = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            told.append(f"{self.name} waits for {other.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    monkeypatch.setattr(layer, "product_stream", lambda device: Stream("product"))
    return told


def test_the_order_of_two_streams(monkeypatch):
    """The product begins after what the current stream has done, which goes on after it; memory is the current stream's."""
    told = two_streams(monkeypatch)

    @contextlib.contextmanager
    def within(stream):
        told.append(f"on {stream.name}")
        yield
        told.append("back")

    multiply, allocate = torch.mm, torch.Tensor.new_empty
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: told.append("product") or multiply(a, b, out=out))
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda t, shape: told.append("memory") or allocate(t, shape)
    )
    monkeypatch.setattr(layer, "execute", lambda f, r, v, o: told.append("sums") or column_sums(*o))
    g, x = normals(9, 4), normals(9, 3)
    made = layer.beside(g, x)
    assert told == [
        "memory", "product waits for current", "on product", "product", "back", "sums", "current waits for product"
    ]  # fmt: skip
    monkeypatch.undo()
    assert same(made, torchs(g, x))


@pytest.mark.parametrize("fails", [False, True])
def test_work_beside_the_librarys_product(monkeypatch, fails):
    """It is launched behind the product on the current stream, which waits for the product whatever comes of it."""
    told = two_streams(monkeypatch)

    def work():
        told.append("work")
        if fails:
            raise ValueError("no")
        return "done"

    monkeypatch.setattr(
        cublaslt,
        "weight_and_bias_gradients",
        lambda g, x, stream: told.append(stream.name) or torchs(g, x),
    )
    monkeypatch.setattr(layer, "covers", lambda g: True)
    monkeypatch.setattr(layer, "way", lambda g, x: EPILOGUE)
    g, x = normals(9, 4), normals(9, 3)
    if fails:
        with pytest.raises(ValueError, match="no"):
            layer.beside_work(g, x, work)
    else:
        made, found = layer.beside_work(g, x, work)
        assert same(made, torchs(g, x))
        assert found == "done"
    assert told == ["product waits for current", "product", "work", "current waits for product"]


@pytest.mark.parametrize(
    ("way", "worth", "most"), [(APART, True, 8), (BESIDE, False, 8), (BESIDE, True, 9)], ids=str
)
def test_work_where_all_is_one_after_the_other(monkeypatch, way, worth, most):
    """The rule says so, the matrix is not worth a kernel of sums, or the product is too short for sums and work."""
    monkeypatch.setattr(layer, "covers", lambda g: worth)
    monkeypatch.setattr(layer, "way", lambda g, x: way)
    monkeypatch.setattr(layer, "MOST_ROWS", most)
    assert layer.beside_work(normals(9, 4), normals(9, 3), lambda: "done") == (None, "done")


@pytest.mark.parametrize("fails", [False, True])
def test_work_beside_torchs_product(monkeypatch, fails):
    """It follows the sums, and the current stream waits for the product after it, whatever comes of it."""
    told = two_streams(monkeypatch)
    multiply = torch.mm

    def work():
        told.append("work")
        if fails:
            raise ValueError("no")
        return "done"

    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: told.append("product") or multiply(a, b, out=out))
    monkeypatch.setattr(layer, "execute", lambda f, r, v, o: told.append("sums") or column_sums(*o))
    monkeypatch.setattr(layer, "covers", lambda g: True)
    monkeypatch.setattr(layer, "way", lambda g, x: BESIDE)
    monkeypatch.setattr(layer, "MOST_ROWS", 8)
    g, x = normals(9, 4), normals(9, 3)
    if fails:
        with pytest.raises(ValueError, match="no"):
            layer.beside_work(g, x, work)
    else:
        made, found = layer.beside_work(g, x, work)
        assert found == "done"
    assert told == ["product waits for current", "product", "sums", "work", "current waits for product"]
    monkeypatch.undo()
    assert fails or same(made, torchs(g, x))


def test_sums_that_fail_leave_no_product_behind(monkeypatch):
    """Memory goes back to the current stream, so this waits for the product whatever becomes of the sums."""
    told = two_streams(monkeypatch)

    def fails(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(layer, "execute", fails)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        layer.beside(normals(9, 4), normals(9, 3))
    assert told == ["product waits for current", "current waits for product"]


def test_a_graph_that_is_captured_has_a_stream_of_its_own(monkeypatch):
    """cuBLAS keeps a workspace for each stream: one that eager calls made is none of a graph's memory."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: [device, priority])
    layer._stream.cache_clear()
    streams = {}
    for captured in (False, True, False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)  # noqa: B023
        made = layer.product_stream(0)
        assert streams.setdefault(captured, made) is made
    assert streams[False] is not streams[True]
    layer._stream.cache_clear()


def test_a_tracer_sees_an_operator():
    """Of any size, since that may be another one in the next call."""
    with FakeTensorMode():
        g, x = (torch.empty(3, width, device="cuda", dtype=BF16) for width in (16, 8))
        program = make_fx(weight_and_bias_gradients)(g, x)
        dw, db = weight_and_bias_gradients(g, x)
    assert "ao_lab.weight_and_bias_gradients" in program.code
    assert (dw.shape, db.shape, dw.dtype, db.dtype, dw.device.type) == ((16, 8), (16,), BF16, BF16, "cuda")
