"""`linear`'s kernels for one vector and for tiles on CPU tensors in Triton's interpreter, against exact products.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process linear products [day]

day: a record of each kind, see `BY_DAY`.
See `programs/kernels.py` for what the interpreter can show. The kernels in Gluon have inline assembly, which it has not: there
`gemv_any` takes all weights. Sums that are exact in float32 have to be equal bit for bit, others within the bound of
`linear_cases`.

`quantize_rows` by its kernel on CPU tensors in Triton's interpreter, against the codes and scales of the reference.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process linear static_scales
"""

from dataclasses import replace

import torch

import fast
import reference
from ao_lab.config.recipe import integer_scheme, named
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels import static_scales
from fast.kernels.quantize import host as quantizer
from fast.kernels.triton_scaled_mm import host as codes
from fast.kernels.triton_scaled_mm import host as scaled_mm
from fast.kernels.triton_scaled_mm.host import MANY, WIDE
from fast.quantize.static_scales import quantize_rows, rows_record
from reference import SCHEMES, Quantized, Scales, Scheme
from reference.matmul.linear import transposed
from tests.emulator import quick_interpreter
from tests.support import family_times
from tests.support.linear_cases import exact_inputs, exact_result, exact_weight, inputs, outside, weight

OBLONG = replace(
    SCHEMES["fp8_128x128"], name="oblong", scale=replace(SCHEMES["fp8_128x128"].scale, block=(16, 32))
)
# Scheme, length of a row, and whether tiles take it too.
CASES = (
    ("int8_rowwise", 256, True), ("int8_rowwise", 96, True), ("int8_tensorwise", 256, True), ("fp8_rowwise", 544, True),
    ("fp8_tensorwise_e5m2", 256, True), ("int8_rowwise_asymmetric", 256, True), ("int4_g32", 96, True),
    ("int4_g64", 256, True), ("int4_g64_asymmetric", 256, True), ("int4_g256_asymmetric", 768, True),
    ("int2_g32", 256, True), ("int2_g32_asymmetric", 96, True), ("int3_g32", 256, True), ("int3_g128_asymmetric", 384, True),
    ("int5_g64", 256, True), ("int6_g32_asymmetric", 160, True), ("int8_g32", 256, True), ("mxfp8_e4m3", 256, True),
    ("mxfp8_e5m2", 96, True), ("mxfp6_e2m3", 256, True), ("mxfp6_e3m2", 96, True), ("mxfp4", 1056, True),
    ("mxint8", 256, True), ("nvfp4", 256, True), ("nvfp4", 80, True), ("fp8_1x128", 384, True),
    ("fp8_128x128", 256, True), (OBLONG, 96, True), ("nf4", 256, False), ("nf4", 64, False),
    (integer_scheme(4, 8, True), 72, False), (integer_scheme(4, 16, False), 80, True),
)  # fmt: skip
#: Every way to store an element, every kind of block and zero point, long rows; records of the user's own.
BY_DAY = (
    ("int8_rowwise", 96), ("fp8_rowwise", 544), ("int8_rowwise_asymmetric", 256), ("int4_g64_asymmetric", 256),
    ("int3_g128_asymmetric", 384), ("mxfp6_e3m2", 96), ("mxfp4", 1056), ("nvfp4", 80), ("fp8_128x128", 256), ("nf4", 256),
)  # fmt: skip
NOT_EXACT = ("nf4",)
ROWS = 37


def compare(record: Scheme, length: int, several: bool) -> None:
    """A vector, and some rows of 16-bit numbers, with and without a bias."""
    for count, dtype in ((1, torch.float32), (1, torch.float16), (5 if length > 256 else 17, torch.float16)):
        bias = None if count == 17 else torch.arange(ROWS).to(dtype) % 7 - 3
        for exact in (True, False) if record.name not in NOT_EXACT else (False,):
            w = (exact_weight if exact else weight)(record, ROWS, length)
            x = (exact_inputs if exact else inputs)(count, length, dtype)
            made = family_times.linear(x, w, bias)
            if count > 1 and not several:
                assert made is None
                continue
            assert made is not None, "no kernel takes this"
            if exact:
                assert_same_bits(made, exact_result(x, w, bias))
                assert_same_bits(made, reference.linear(x, w, bias))
            else:
                assert outside(made, x, w, bias) == 0
                of_reference(made, x, w, bias)


def of_reference(made: torch.Tensor, x: torch.Tensor, w: Quantized, bias: torch.Tensor | None) -> None:
    """Without zero points, the reference's own bound, and that of its exact tier."""
    if w.zero is not None:
        return
    options = {"out_dtype": str(x.dtype).removeprefix("torch."), "bias": bias}
    bound = reference.matmul_error_bound(x, transposed(w), accumulation="blocked", **options)
    bound += reference.matmul_error_bound(x, transposed(w), **options)
    assert ((made.double() - reference.linear(x, w, bias).double()).abs() <= bound).all()


def compare_specials() -> None:
    """A NaN among the scales is its row's alone, one among the inputs everyone's; the last rows are their own."""
    w = weight(SCHEMES["mxfp8_e4m3"], ROWS, 256)
    w.scale[9, 3] = 255
    for count, dtype in ((1, torch.float32), (3, torch.float16)):
        x = inputs(count, 256, dtype)
        made = family_times.linear(x, w, None)
        assert torch.equal(made.isnan().any(0).nonzero()[:, 0], torch.tensor([9]))
        x[-1, 200] = float("nan")
        made = family_times.linear(x, w, None)
        assert made[-1].isnan().all()
        assert int(made[:-1].isnan().sum()) == count - 1
    print("specials", flush=True)


def compare_one_bit() -> None:
    """No kernel multiplies by one bit; those that store and read it keep its zero points in float32."""
    for shape, axis in (((5, 128), -1), ((64, 24), 0), ((2, 96, 5), 1), ((2, 64, 128), 1)):
        record = integer_scheme(1, 32, True)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
            one_bit(x, record, axis)
            x.view(-1)[7], x.view(-1)[90], x[-1] = float("nan"), float("inf"), 0
            one_bit(x, record, axis)
    assert family_times.linear(x[0, :1], fast.quantize(torch.ones(4, 128), record), None) is None
    print("one bit", flush=True)


def one_bit(x: torch.Tensor, record: Scheme, axis: int) -> None:
    """All functions of the quantizer."""
    q = reference.quantize(x, record, axis=axis)
    assert_same_bits(quantizer.quantize(x, record, axis, None, None, False), q)
    assert_same_bits(quantizer.choose_scales(x, record, axis), q.scales)
    given = reference.quantize(x * 2, record, axis=axis).scales
    wanted = reference.quantize(x, record, axis=axis, scales=given)
    assert_same_bits(quantizer.quantize(x, record, axis, given, None, False), wanted)
    for to in ("float32", "float16"):
        assert_same_bits(quantizer.dequantize(q, to), reference.dequantize(q, to))
    if x.dtype != torch.bfloat16:
        fake = reference.fake_quantize(x, record, axis=axis)
        assert_same_bits(quantizer.fake_quantize(x, record, axis, None), fake)


#: M, N and K, the schemes of both operands, the dtype, whether sums are fast, and the tile where it is not the rule's: operands
#: in either order of the tensor core, rows, columns and lengths that fill no tile, K in parts, tiles in groups along M.
CODES = (
    ((17, 80, 304), "fp8_rowwise", "fp8_rowwise", torch.float16, True, None),
    ((5, 70, 4112), "fp8_tensorwise_e5m2", "fp8_rowwise", torch.float32, False, None),
    ((40, 33, 528), "fp8_rowwise", "fp8_rowwise_e5m2", torch.float32, True, None),
    ((200, 40, 176), "fp8_tensorwise", "fp8_tensorwise", torch.float16, False, None),
    ((400, 280, 176), "fp8_rowwise", "fp8_rowwise", torch.float16, True, replace(WIDE, together=3)),
)


#: The same of integers: M, N and K, the schemes of both operands, the dtype, and the tile where it is not the rule's.
INT_CODES = (
    ((17, 80, 304), "int8_rowwise_asymmetric", "int8_rowwise", torch.float16, None),
    ((5, 70, 4112), "int8_rowwise_asymmetric", "int8_tensorwise", torch.float32, None),
    ((40, 33, 528), "int8_tensorwise", "int8_rowwise", torch.float32, None),
    ((300, 280, 176), "int8_rowwise_asymmetric", "int8_rowwise", torch.float16, MANY),
)


def compare_int_codes() -> None:
    """Rows of integers as codes of all sizes, zero points too: sums are exact, so that results are the reference's."""
    scaled_mm.LONG = 4096
    for number, ((m, n, k), left, right, dtype, tile) in enumerate(INT_CODES):
        x = reference.quantize(inputs(m, k, torch.float32, number) + 0.4, left)
        w = reference.quantize(inputs(n, k, torch.float32, number + 9), right)
        for bias in (None, torch.arange(n) / 3):
            made = codes.linear_of_codes(x, w, bias, dtype, None, tile=tile)
            options = {"accumulation": "blocked", "block": k, "out_dtype": str(dtype).removeprefix("torch.")}
            assert made is not None
            assert_same_bits(made, reference.linear(x, w, bias, **options))
        print("integer codes", m, n, k, flush=True)


def compare_codes() -> None:
    """Rows of 8-bit floats as codes: sums are exact, so that results are the reference's."""
    scaled_mm.LONG = 4096
    for number, ((m, n, k), left, right, dtype, fast_sums, tile) in enumerate(CODES):
        x, w = exact_weight(SCHEMES[left], m, k, number), exact_weight(SCHEMES[right], n, k, number + 9)
        for bias in (None, torch.arange(n) / 3):
            made = codes.linear_of_codes(x, w, bias, dtype, None, fast_sums, tile)
            options = {"accumulation": "blocked", "block": k, "out_dtype": str(dtype).removeprefix("torch.")}
            assert made is not None
            assert_same_bits(made, reference.linear(x, w, bias, **options))
        print("codes", m, n, k, flush=True)


def products_agree(part: str = "") -> None:
    """Compare all cases, or those of the day."""
    by_day = part == "day"
    for scheme, length, several in CASES:
        if by_day and isinstance(scheme, str) and (scheme, length) not in BY_DAY:
            continue
        record = named(scheme) if isinstance(scheme, str) else scheme
        assert record is not None
        compare(record, length, several)
        print(record.name, length, "tiles" if several else "", flush=True)
    compare_specials()
    compare_one_bit()
    compare_codes()
    compare_int_codes()


#: Scheme, zero point, shape, the first in all dtypes: short rows of which a program takes several, and a row of two parts.
STATIC = (
    ("int8_tensorwise", None, (9, 64)), ("int8_tensorwise", None, (3, 77)), ("int8_tensorwise", None, (2, 17001)),
    ("int8_tensorwise", None, (1, 2048)), ("torchao.int8_tensorwise_asymmetric", -7, (9, 64)),
    ("int8_rowwise", None, (40, 24)), ("int8_rowwise_asymmetric", 5, (5, 160)),
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def given(name: str, zero: int | None, count: int) -> Scales:
    """Scales in all or for each row, of ordinary size, zero and infinite."""
    if SCHEMES[name].scale.block == "tensor":
        scale = torch.tensor(0.02)
    else:
        scale = torch.linspace(0.01, 0.05, count)[:, None].contiguous()
        scale[:3] = torch.tensor([[0.0], [float("inf")], [float("nan")]])
    return Scales(scale, None, None if zero is None else torch.full_like(scale, zero, dtype=torch.int8))


def inputs_with_nan(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Random rows beyond the range too, an infinity in some, and a NaN at the end of the first and last row."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(2).to(dtype)
    x[::2, 1] = float("inf")
    x[0, -1] = x[-1, -1] = float("nan")
    return x


def compare_static(name: str, zero: int | None, shape: tuple[int, int], dtype: torch.dtype) -> None:
    scheme, x = SCHEMES[name], inputs_with_nan(shape, dtype)
    scales = given(name, zero, shape[0])
    made = static_scales.quantize_rows(x, scheme, rows_record(scheme.key), scales)
    assert made is not None, "no kernel takes this"
    wanted = quantize_rows(x, scheme, scales)
    for part in ("codes", "scale", "zero"):
        one, other = getattr(made, part), getattr(wanted, part)
        assert (one is None) == (other is None)
        if one is not None:
            assert_same_bits(one, other)
    assert (made.scheme, made.shape, made.axis) == (wanted.scheme, wanted.shape, wanted.axis)
    assert made.scale.isnan().flatten().tolist()[-1]


def static_scales_agree() -> None:
    """Compare all."""
    for at, case in enumerate(STATIC):
        for dtype in DTYPES if at == 0 else DTYPES[at % 3 :][:1]:
            compare_static(*case, dtype)
        print(*case)


def main(name: str, *arguments: str) -> None:
    """Compare what has this name."""
    quick_interpreter.install()
    {"products": products_agree, "static_scales": static_scales_agree}[name](*arguments)
