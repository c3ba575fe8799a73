"""Who multiplies 17 to 128 rows: the rule, and that the product asks it."""

from types import SimpleNamespace

import pytest
import torch

import fast
from ao_lab.config.recipe import named
from fast.kernels.mixed_mm import few, host
from fast.kernels.mixed_mm.few import gains, microseconds
from fast.kernels.mixed_mm.select import INSTRUCTIONS, MULTIPROCESSORS
from fast.kernels.mixed_mm.variants import Weight
from fast.matmul.preshuffled import ops
from tests.fast.kernels.mixed_mm.test_select import arranged, on_hopper

UP, SMALL = (14336, 4096), (1024, 4096)


@pytest.mark.parametrize(
    ("weight", "rows", "wanted"),
    [
        (Weight("int4"), 32, False), (Weight("int4"), 64, False), (Weight("int4"), 65, True),
        (Weight("int4", True), 64, False), (Weight("int4", True), 128, True), (Weight("int4", False, 2), 32, False),
        (Weight("int4", False, 2), 33, True), (Weight("int8"), 128, True), (Weight("e2m1", False, 4), 128, True),
    ],
)  # fmt: skip
def test_rows_of_a_large_weight(weight, rows, wanted):
    assert gains(rows, *UP, weight) == wanted


def test_small_weights_stay():
    """What a product takes whatever its weight is most there."""
    assert not any(gains(rows, *SMALL, weight) for rows in (17, 64, 128) for weight in INSTRUCTIONS)


def test_times():
    """Of what was timed they are the times; half of the elements take half of what is above a call."""
    assert microseconds(128, *UP, Weight("int4", True)) == pytest.approx(53.9)
    assert microseconds(33, 7168, 4096, Weight("int4")) == pytest.approx(3 + (21.9 - 3) / 2)
    assert microseconds(20, *UP, Weight("int8", True, 2)) == pytest.approx(19.6)
    assert set(few.TIMES) <= set(INSTRUCTIONS)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: device.capability)
    monkeypatch.setattr(host, "missing_compiler", lambda: None)
    monkeypatch.setattr(host, "processors_of", lambda index: MULTIPROCESSORS)


@pytest.mark.parametrize(
    ("rows", "capability", "wanted"),
    [(16, (9, 0), False), (17, (9, 0), True), (128, (9, 0), True), (129, (9, 0), False), (64, (8, 0), False)],
)
def test_what_is_asked(hopper, monkeypatch, rows, capability, wanted):
    """17 to 128 rows of what the kernel takes."""
    monkeypatch.setattr(few, "gains", lambda *arguments: arguments[:3] == (rows, 256, 256))
    x = on_hopper(torch.bfloat16, (rows, 256), capability)
    x.get_device = lambda: 0
    assert host.is_faster(x, arranged(), None) == wanted


@pytest.mark.parametrize("faster", [False, True])
def test_the_product_asks(monkeypatch, faster):
    """The one that is faster first, and where it declines the other."""
    from fast.kernels.linear_small import host as small

    q = fast.quantize(torch.randn(128, 256), named("int4_g128"), packed=True)
    w, called = ops.preshuffled(q), []
    monkeypatch.setattr(host, "is_faster", lambda *operands: faster)
    monkeypatch.setattr(host, "mixed_mm", lambda *operands, **more: called.append("mixed_mm"))
    monkeypatch.setattr(
        small, "linear_small", lambda x, *operands, **more: called.append("linear_small") or x
    )
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    ops._kernel(w.scheme, ((128, 256),), (x, w.codes, w.scale, w.zero, None), None)
    assert called == (["mixed_mm", "linear_small"] if faster else ["linear_small"])


def test_operands_are_checked_before(monkeypatch):
    """By whichever kernel: devices that do not go together."""
    from fast.kernels.linear_small import host as small

    def refuse(*operands):
        raise ValueError("checked")

    q = fast.quantize(torch.randn(128, 256), named("int4_g128"), packed=True)
    w = ops.preshuffled(q)
    monkeypatch.setattr(small, "check_operands", refuse)
    monkeypatch.setattr(host, "is_faster", lambda *operands: True)
    monkeypatch.setattr(host, "mixed_mm", lambda *operands, **more: SimpleNamespace())
    with pytest.raises(ValueError, match="checked"):
        ops._kernel(
            w.scheme, ((128, 256),), (torch.randn(64, 256).bfloat16(), w.codes, w.scale, w.zero, None), None
        )
