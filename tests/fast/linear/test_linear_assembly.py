"""The inline assembly of `linear`'s kernels in the PTX emulator, bit for bit: what codes become, and sums of products in order.

The tensor core's instruction itself is not emulated; `tests/gpu` compares what it makes.
"""

import platform

import ml_dtypes
import numpy as np
import pytest

from reference.matmul.linear import ADDED
from tests.emulator.ptx_opcodes import fused, run

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.triton_gemv import gemv_w4a16, gemv_w8a16

ELEMENT_KINDS = {
    "int": (gemv_w8a16.TEXT_INT.value, np.int8),
    "e4m3": (gemv_w8a16.TEXT_E4M3.value, ml_dtypes.float8_e4m3fn),
    "e5m2": (gemv_w8a16.TEXT_E5M2.value, ml_dtypes.float8_e5m2),
}
# What `triton_gemv_w8a16_kernel` says of the operands.
OPERANDS = "=&f,f,r,f,f,f,f"
#: The dtypes of pairs; what they count beside a nibble.
FLOAT16_KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
MORE = 16


@np.errstate(all="ignore")
@pytest.mark.parametrize("kind", ELEMENT_KINDS)
def test_four_bytes_times_four_inputs(kind):
    """Fused multiply-adds from the first to the fourth, of every code in every place."""
    text, dtype = ELEMENT_KINDS[kind]
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (4096, 4), dtype=np.uint8)
    codes[:1024] = (np.arange(1024)[:, None] // 4 * (np.arange(4) == np.arange(1024)[:, None] % 4)).astype(
        np.uint8
    )
    total, *x = (
        rng.standard_normal(4096).astype(np.float32) * 2.0 ** rng.integers(-9, 9, 4096) for _ in range(5)
    )
    total, *x = (v.astype(np.float32) for v in (total, *x))
    made = run(
        text,
        OPERANDS,
        [v.view(np.uint32) for v in (total, codes.view("<u4")[:, 0].copy().view(np.float32), *x)],
    )[0]
    wanted = total
    for place in range(4):
        wanted = fused(codes[:, place].copy().view(dtype).astype(np.float32), x[place], wanted)
    nan = np.isnan(wanted)
    assert (made[~nan] == wanted.view(np.uint32)[~nan]).all()
    assert (np.isnan(made.view(np.float32)) == nan).all()
    assert nan.any() == (kind != "int")


def test_four_bytes_times_four_bytes():
    """Exact, and so are four bytes alone."""
    codes = np.random.default_rng(1).integers(-128, 128, (2, 4096, 4), dtype=np.int8)
    total = np.random.default_rng(2).integers(-(2**30), 2**30, 4096, dtype=np.int32)
    words = [part.view("<u4")[:, 0].copy() for part in codes]
    made = run(gemv_w8a16.DOT.value, "=r,r,r,r", [total.view(np.uint32), *words])[0].view(np.int32)
    assert (made == total + codes.astype(np.int32).prod(0).sum(1)).all()
    alone = run(gemv_w8a16.SUM.value, "=r,r,r", [total.view(np.uint32), words[0]])[0].view(np.int32)
    assert (alone == total + codes[0].astype(np.int32).sum(1)).all()


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_four_bytes_are_four_floats(kind):
    """All codes in all places."""
    text = {"e4m3": gemv_w8a16.DECODE_E4M3, "e5m2": gemv_w8a16.DECODE_E5M2}[kind].value
    codes = (np.arange(256)[:, None] + np.array([0, 77, 140, 203])).astype(np.uint8)
    made = run(text, "=&f,=&f,=&f,=&f,r", [codes.view("<u4")[:, 0].copy()])
    for place, got in enumerate(made):
        wanted = codes[:, place].copy().view(ELEMENT_KINDS[kind][1]).astype(np.float32)
        np.testing.assert_array_equal(got.astype(np.uint32).view(np.float32), wanted)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("kind", FLOAT16_KINDS)
def test_eight_nibbles_and_sixteen(kind, signed):
    """Codes j and j + 4 make a pair; every code in every place, 16 more of it, 24 more of two's complement."""
    decoded = gemv_w4a16._decoded("$4", "o", kind, signed)
    text = f"{{ .reg .b32 v, o<4>; {decoded}" + "".join(f"mov.b32 ${j}, o{j}; " for j in range(4)) + "}"
    codes = (np.arange(64)[:, None] * 3 + 5 * np.arange(8)) % 16
    assert all(set(column) == set(range(16)) for column in codes.T)
    word = (codes.astype(np.uint64) << (4 * np.arange(8)).astype(np.uint64)).sum(1).astype(np.uint32)
    values = ((codes ^ 8) - 8 + 8 if signed else codes) + MORE
    # The bound of `linear` counts what is added, and taken off again.
    assert (values - ((codes ^ 8) - 8 if signed else codes)).max() <= ADDED / 2
    for j, pair in enumerate(run(text, "=&r,=&r,=&r,=&r,r", [word])):
        halves = (
            pair.astype(np.uint32).view(np.uint16).reshape(-1, 2).view(FLOAT16_KINDS[kind]).astype(np.int64)
        )
        assert (halves[:, 0] == values[:, j]).all()
        assert (halves[:, 1] == values[:, j + 4]).all()
