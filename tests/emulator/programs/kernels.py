"""The kernels of `fast` on CPU tensors in Triton's interpreter, against `reference`, bit for bit.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process kernels schemes GROUP[,GROUP...]

What is tried are indices, masks, passes and the rules as float and integer operations. The instruction sequences of `words` and
the conversion instructions are not: the interpreter knows no inline assembly, and rules are made with hardware=False. Outputs
in bfloat16 are not compared either: the interpreter truncates where it should round. float32 and float16 outputs are.

Scales that are quantized themselves, by kernels on CPU tensors in Triton's interpreter, against `reference`, bit for bit.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process kernels second_level [day]

day: a record and a shape of each kind alone.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast import dispatch
from fast.kernels import encode
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize import plan as passes
from fast.kernels.quantize import vjp
from fast.kernels.rowwise_colwise import host as layouts
from fast.kernels.rowwise_colwise import mx as both
from fast.kernels.rowwise_colwise.mx import _scales
from fast.kernels.scheme.constants import constants_of
from reference import SCHEMES, Scales, Scheme
from reference.schemes.schemes import scheme_of
from tests.emulator import quick_interpreter

# (shape, axis): the first of a scheme is tried in all dtypes, the others in float32.
ROWS = (((3, 77), -1), ((40, 24), 0), ((2, 35, 5), 1), ((77,), 0), ((), -1))
# Blocks that take two passes: rows beyond a tile, columns beyond 256, each with a part that is not full, and columns without.
LONG = (((2, 17001), -1), ((300, 5), 0), ((2, 320, 64), 1))
# The last one fills its tiles of columns.
WHOLE = (((3, 64), -1), ((64, 24), 0), ((2, 96, 5), 1), ((192,), 0), ((2, 64, 128), 1))
GROUPS = {
    "fp8": (("fp8_rowwise", (*ROWS, *LONG)), ("fp8_tensorwise_e5m2", (((3, 100), -1), ((), 0), ((2, 9001), -1))),
            ("fp8_tensorwise", (((6, 4096), -1),)),  # of 16 bits one program, else three parts
            ("fp8_1x128", (((3, 200), -1), ((140, 24), 0), ((2, 35, 5), 1), ((77,), 0))),
            ("fp8_128x128", (((130, 150), -1), ((2, 129, 40), -1))),
            ("torchao.fp8_rowwise_training_pow2", ROWS[:2]), ("compressed_tensors.fp8_channel", ROWS[:2])),
    "mx": (("mxfp8_e4m3", WHOLE), ("mxfp8_e5m2_rceil", WHOLE[:2]), ("mxfp6_e2m3", WHOLE), ("mxfp6_e3m2_rceil", WHOLE[:1]),
           ("mxfp4", WHOLE), ("mxint8", WHOLE[:2]), ("torchao.mxfp8_e4m3_rceil", WHOLE[:2]),
           ("torchao.mxfp4_even", WHOLE[:1])),
    "integers": (("int8_rowwise_asymmetric", (*ROWS[1:], *LONG)), ("int4_g32", WHOLE), ("int4_g32_asymmetric", WHOLE[:3]),
                 ("int2_g32", WHOLE[:1]), ("int3_g32", WHOLE[:1]), ("int6_g64", WHOLE[:1]),
                 ("ternary_rowwise", ROWS[:1]), ("ternary_g32", WHOLE[:2]), ("stretched2_rowwise", ROWS[:1]),
                 ("stretched2_g32", WHOLE[:2]),
                 ("torchao.int4_g32_tinygemm", WHOLE[:2]), ("torchao.int8_rowwise_no_clipping", ROWS[:2])),
    "two levels": (("nvfp4", (*WHOLE, ((2, 9008), -1))), ("nf4", (((5, 64), -1), ((3, 41), 0))),
                   ("te.nvfp4_16x16", (((3, 16, 16), -1), ((32, 48), -1))),
                   ("compressed_tensors.nvfp4", WHOLE[:2])),
}  # fmt: skip
# Whole rows, within and beyond a program of `octets`; rows that end within a byte, of which one is a stream nevertheless.
PACKED = ((3, 8), (2, 3, 40), (3, 160), (1, 2048 + 32), (5, 1000), (3, 6004), (2, 8192), (3, 37), (1, 8301), (2,))  # fmt: skip
FORMATS = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float6_e3m2fn",
    "float4_e2m1fn",
    "float8_e4m3fnuz",
    "float8_e8m0fnu",
    "bfloat16",
    "int8",
    "mxint8",
    "nf4",
)


def numbers(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1, specials: bool = False
) -> torch.Tensor:
    """Normal numbers whose rows differ by powers of two, so that no row can be taken for its neighbour.

    specials: with zeros, subnormals, an infinity and a NaN, which hide what else is in their blocks.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        rows = x.view(-1, shape[-1])
        rows *= 2.0 ** (3 * torch.arange(len(rows)) % 7)[:, None]
    flat = x.reshape(-1)
    if specials and flat.numel() > 60:
        flat[::17], flat[50], flat[-3] = 0, float("inf"), float("nan")
        flat[:4] *= 1e-40
    return x.to(dtype)


def compare_scheme(x: torch.Tensor, name: str, axis: int) -> Iterator[str]:
    """Every function of the quantizer; yields the names of those that do not answer for every scheme."""
    scheme, q = SCHEMES[name], reference.quantize(x, name, axis=axis)
    made = quantizer.quantize(x, name, axis, None, None, False)
    assert_same_bits(made, q)
    assert_same_bits(quantizer.choose_scales(x, scheme, axis), q.scales)
    given = quantizer.quantize(x, name, axis, q.scales, None, False)
    assert_same_bits(given, reference.quantize(x, name, axis=axis, scales=q.scales))
    if q.outer is not None and q.outer.shape == ():
        outer = Scales(outer=q.outer * 1.5)
        assert_same_bits(
            quantizer.quantize(x, name, axis, outer, None, False),
            reference.quantize(x, name, axis=axis, scales=outer),
        )
        yield "outer"
    yield from compare_packed(x, name, axis)
    if (
        len(x.shape) == 2
        and axis % 2 == 1
        and q.scale.dtype == torch.uint8
        and isinstance(scheme.scale.block, int)
    ):
        for scales in (None, q.scales):
            wanted = reference.quantize(x, name, axis=axis, scales=scales, tiled=True)
            assert_same_bits(quantizer.quantize(x, name, axis, scales, None, False, True), wanted)
            assert_same_bits(quantizer.dequantize(wanted, "float32"), reference.dequantize(q))
        yield "tiled"
    for dtype in ("float32", "float16") if x.dtype != torch.bfloat16 else ():
        assert_same_bits(quantizer.dequantize(q, dtype), reference.dequantize(q, dtype))
    if x.dtype != torch.bfloat16:
        yield from compare_training(x, name, axis)


def compare_packed(x: torch.Tensor, name: str, axis: int) -> Iterator[str]:
    """Packed codes, written and read, where rows are whole bytes."""
    scheme = SCHEMES[name]
    if scheme.format.bits >= 8 or not x.shape or x.shape[-1] * scheme.format.bits % 8:
        return
    q = reference.quantize(x, name, axis=axis, packed=True)
    assert_same_bits(quantizer.quantize(x, name, axis, None, None, True), q)
    values = quantizer.dequantize(q, "float32")
    if values is not None:
        assert_same_bits(values, reference.dequantize(q, "float32"))
        yield "packed"


def compare_training(x: torch.Tensor, name: str, axis: int) -> Iterator[str]:
    """Fake quantization and its gradient."""
    scheme = SCHEMES[name]
    assert_same_bits(
        quantizer.fake_quantize(x, scheme, axis, None), reference.fake_quantize(x, name, axis=axis)
    )
    yield "fake_quantize"
    g = numbers(tuple(x.shape), x.dtype, seed=2)
    masked = vjp.gradient(g, x, scheme, axis)
    if masked is not None:
        assert_same_bits(masked, reference.fake_quantize_vjp(g, x, name, axis=axis))
        yield "gradient"


def compare_schemes(cases: tuple) -> None:
    """All shapes of a group; codes and scales also of bfloat16."""
    for name, shapes in cases:
        for shape, axis in shapes:
            for dtype in (
                (torch.float32, torch.float16, torch.bfloat16) if shape == shapes[0][0] else (torch.float32,)
            ):
                did = set(compare_scheme(numbers(shape, dtype), name, axis))
                if dtype == torch.float16:
                    did |= set(compare_scheme(numbers(shape, dtype, specials=True), name, axis))
                print(
                    name,
                    "x".join(map(str, shape)),
                    axis,
                    str(dtype).removeprefix("torch."),
                    *sorted(did),
                    flush=True,
                )


def words(shape: tuple[int, ...]) -> torch.Tensor:
    """Random words."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 2**32, shape, generator=generator).to(torch.uint32)


def compare_stochastic() -> None:
    """Random words reach the kernels, in every function that takes them."""
    for name, shape in (
        ("mxfp4", (3, 96)),
        ("mxfp8_e4m3", (3, 32)),
        ("int8_rowwise", (3, 77)),
        ("nvfp4", (5, 64)),
    ):
        scheme = replace(scheme_of(name), rounding="stochastic", name=f"{name} stochastic")
        x, drawn = numbers(shape, torch.float32), words(shape)
        x[0] = 0
        wanted = reference.quantize(x, scheme, random_bits=drawn)
        assert_same_bits(quantizer.quantize(x, scheme, -1, None, drawn, False), wanted)
        fake = reference.fake_quantize(x, scheme, random_bits=drawn)
        assert_same_bits(quantizer.fake_quantize(x, scheme, -1, None, drawn), fake)
        wanted = reference.fake_quantize_vjp(x, x, scheme, random_bits=drawn)
        assert_same_bits(vjp.gradient(x, x, scheme, -1, drawn), wanted)
        print(name, "stochastic", flush=True)


def compare_formats() -> None:
    """encode, decode, pack and unpack, of more elements than a tile and fewer, with zeros of both signs."""
    for name in FORMATS:
        fmt = reference.FORMATS[name]
        for shape, dtype in (((3, 1401), torch.float32), ((5, 9), torch.float16), ((7,), torch.bfloat16)):
            x = numbers(shape, dtype, specials=True)
            x.view(-1)[5] = -0.0
            codes = reference.encode(x, name)
            assert_same_bits(encode.encode(x, name, "nearest_even", "saturate", None), codes)
            assert_same_bits(encode.decode(codes, name), reference.decode(codes, name))
        if fmt.kind != "codebook" and name != "float8_e8m0fnu":
            x = numbers((3, 41), torch.float32)
            drawn = words((3, 41))
            codes = reference.encode(x, name, rounding="stochastic", random_bits=drawn)
            assert_same_bits(encode.encode(x, name, "stochastic", "saturate", drawn), codes)
        print(name, flush=True)
    compare_packing()


def compare_packing() -> None:
    """Every width: whole groups of codes and what they leave, rows of whole bytes and others, addresses of every kind."""
    generator = torch.Generator().manual_seed(4)
    for name in ("uint1", "int2", "int3", "float4_e2m1fn", "int5", "float6_e2m3fn", "int7"):
        for shape in PACKED:
            codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            packed = reference.pack(codes, name)
            for offset in (0, 1, 4):
                assert_same_bits(encode.pack(moved(codes, offset), name), packed)
                made = encode.unpack(moved(packed, offset), name, shape)
                assert_same_bits(made, codes & ((1 << reference.FORMATS[name].bits) - 1))
        print(name, "packed", flush=True)


def moved(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy that starts `offset` bytes after an address that is a multiple of 64."""
    memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
    copy = memory[offset:].view(tensor.shape)
    assert copy.data_ptr() % 64 == offset
    return copy.copy_(tensor)


def both_inputs(dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    """Numbers, and blocks with NaN, infinity, zeros, subnormals, the largest numbers and maxima beside a power of two."""
    x = numbers((rows, columns), dtype)
    x[3, 70], x[40, 1], x[:, 5] = float("nan"), -float("inf"), 0
    x[32:64, :32] *= 1e-4 if dtype == torch.float16 else 1e-37
    x[:32, 32:64] = torch.finfo(dtype).smallest_normal * torch.tensor([-0.0, 0.5, -0.25, 0.0]).repeat(8)
    x[:4, 8] = torch.tensor([448.0, 449.0, 480.0, 512.0])
    x[9, 100], x[60, 101] = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    return x


@triton.jit
def scales_kernel(largest, low, high, code, other, SCHEME: tl.constexpr, SIZE: tl.constexpr):
    """What `patches` makes of pairs of bfloat16 magnitudes."""
    i = tl.arange(0, SIZE)
    a, b, c, d = _scales(tl.load(largest + i), True, SCHEME)
    tl.store(low + i, a)
    tl.store(high + i, b)
    tl.store(code + i, c.to(tl.uint8))
    tl.store(other + i, d.to(tl.uint8))


def compare_multipliers(name: str) -> None:
    """Scales and multipliers of all 32,768 magnitudes of bfloat16, each beside another."""
    magnitudes = torch.arange(2**15, dtype=torch.int32)
    pairs = magnitudes | (magnitudes.flip(0) << 16)
    made = [torch.zeros(2**15, dtype=d) for d in (torch.float32, torch.float32, torch.uint8, torch.uint8)]
    scales_kernel[(1,)](pairs, *made, constants_of(SCHEMES[name], "bfloat16", hardware=False), 2**15)
    blocks = torch.zeros(2**15, 32, dtype=torch.bfloat16)
    blocks[:, 7] = magnitudes.to(torch.int16).view(torch.bfloat16)
    wanted = reference.quantize(blocks, name).scale[:, 0]
    power = torch.where(wanted == 255, torch.nan, 2.0 ** (127.0 - wanted))
    for codes, multipliers, order in ((made[2], made[0], wanted), (made[3], made[1], wanted.flip(0))):
        assert_same_bits(codes, order)
        by = power if order is wanted else power.flip(0)
        assert torch.equal(multipliers.nan_to_num(0), by.nan_to_num(0))
        assert torch.equal(multipliers.isnan(), by.isnan())


def compare_both() -> None:
    """Both layouts from one read: bands and patches, plain and tiled scales, padded tiles."""
    some = ({"down": 2, "across": 1},)
    every = (*some, {"down": 1, "across": 2}, {"down": 1, "across": 1, "band": 2}, {"down": 2, "across": 2})
    for name in ("mxfp8_e4m3", "mxfp8_e4m3_rceil", "mxfp8_e5m2_rceil"):
        compare_multipliers(name)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            pairs = every if (name, dtype) == ("mxfp8_e4m3", torch.bfloat16) else some
            tunings = ({},) if dtype == torch.float32 else pairs
            for number, tuning in enumerate(tunings):
                rows = 64 if tuning == every[2] else 128
                compare_pair(both_inputs(dtype, rows, 128), name, (number + len(name)) % 2 == 1, tuning)
            print(name, "both", str(dtype).removeprefix("torch."), flush=True)
    for name in ("mxfp6_e2m3", "mxfp6_e3m2_rceil", "mxfp4"):
        compare_pair(both_inputs(torch.bfloat16, 128, 128), name, False, some[0])
        print(name, "both", flush=True)


def compare_pair(x: torch.Tensor, name: str, tiled: bool, tuning: dict[str, int]) -> None:
    """The kernel's four outputs."""
    rule = constants_of(SCHEMES[name], str(x.dtype).removeprefix("torch."), hardware=False)
    wanted = reference.quantize_both(x, name, tiled=tiled)
    made = {"codes": wanted[0].codes, "scale": wanted[0].scale, "transposed": wanted[1].codes,
            "transposed_scale": wanted[1].scale}  # fmt: skip
    got = both.mx_both(x, rule, tiled, **tuning).tensors
    for part, value in made.items():
        assert_same_bits(got[part], value.contiguous())


def compare_both_of_tiles() -> None:
    """Both copies and the transpose alone, by tiles that the matrix does not fill, or does; every kind of block."""
    cases = (("fp8_rowwise", (70, 131)), ("fp8_rowwise", (64, 256)), ("fp8_tensorwise_e5m2", (129, 66)),
             ("fp8_1x128", (129, 260)), ("fp8_128x128", (130, 257)), ("mxfp4", (32, 160)))  # fmt: skip
    for number, (name, shape) in enumerate(cases):
        scheme, dtype = scheme_of(name), (torch.float32, torch.float16, torch.bfloat16)[number % 3]
        if number % 2:
            scale = replace(scheme.scale, rule="ratio_pow2" if name != "mxfp4" else "rceil")
            scheme = replace(scheme, name=f"{name} in powers of two", scale=scale)
        for specials in (False, True):
            x = numbers(shape, dtype, specials=specials)
            wanted = reference.quantize_both(x, scheme)
            for got, side in zip(layouts.fused_both(x, scheme, None, False), wanted, strict=True):
                assert_same_bits(got, side)
            assert_same_bits(layouts.columns_only(x, scheme, False), wanted[1])
        print(scheme.name, "layouts", *shape, flush=True)


def compare_batches() -> None:
    """The columns of each matrix of a batch, with scales of its own, by tiles and by patches; every kind of block."""
    cases = (("fp8_rowwise", (3, 70, 131)), ("fp8_rowwise", (2, 128, 256)), ("fp8_tensorwise", (3, 65, 66)),
             ("fp8_tensorwise", (2, 256, 128)), ("fp8_1x128", (2, 129, 130)), ("fp8_1x128", (2, 256, 128)),
             ("fp8_128x128", (2, 128, 256)), ("mxfp8_e4m3_rceil", (3, 256, 64)), ("mxfp4", (2, 32, 160)))  # fmt: skip
    for number, (name, shape) in enumerate(cases):
        scheme = scheme_of(name)
        dtype = torch.float16 if number % 2 else torch.bfloat16
        x = numbers(shape, dtype, specials=number % 3 == 0)
        x[-1] *= 64
        codes, scale = layouts.batch_columns(x, scheme)
        for at, found in enumerate(zip(codes.chunk(len(x)), scale.chunk(len(x)), strict=True)):
            wanted = reference.quantize(x[at].t().contiguous(), scheme)
            assert torch.equal(found[0], wanted.codes)
            assert_same_bits(found[1], wanted.scale.expand(found[1].shape))
        print(name, "layouts", *shape, flush=True)
    assert layouts.batch_columns(numbers((2, 130, 128), torch.bfloat16), scheme_of("fp8_128x128")) is None


def schemes_agree(groups: str) -> None:
    """Compare some groups."""
    for group in groups.split(","):
        if group == "formats":
            compare_formats()
            compare_stochastic()
        elif group == "both":
            compare_both()
            compare_both_of_tiles()
            compare_batches()
        else:
            compare_schemes(GROUPS[group])


NF4, TORCHAO = SCHEMES["nf4"], SCHEMES["torchao.nf4"]
# Less than a block, short last blocks and groups, one scale more than the last pass averages by itself.
OUTER_SHAPES = ((), (3, 41), (64 * 257 + 1,), (64 * 1024 + 1,))


def record(
    name: str, base: Scheme = NF4, scale: Any = None, outer: Any = None, **fields: Any
) -> tuple[str, Scheme]:
    """A record of the user's own: fields of the scheme, of its scale and of its outer scale."""
    made = replace(base.scale, **(scale or {})), replace(base.outer, **(outer or {}))
    return name, replace(base, name=name, scale=made[0], outer=made[1], **fields)


RECORDS = (
    record("from stored scales", codes_from="stored"),
    record("odd groups", scale={"block": "flat:48"}, outer={"block": 40}),
    record("integers", element="int4", scale={"target": 7.0}),
    record("integers from stored scales", element="int8", scale={"target": 127.0}, codes_from="stored"),
    record("in the dtype", scale={"compute": "input"}, outer={"compute": "input"}, dequantize="target"),
    record("any NaN", nan="ieee", codes_from="stored"),
    record("long blocks", scale={"block": "flat:20000"}),
)


#: What is left to the night: other values of fields that a record of the day has, one more pass of averages.
BY_NIGHT = ("from stored scales", "integers", "any NaN")


def extremes(shape: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors whose scales are all NaN, all alike, as large or as small as there are, and of all sizes."""
    x = numbers(shape, torch.float32, seed=3)
    yield "NaN", torch.full_like(x, float("nan"))
    yield "zeros", torch.zeros_like(x)
    yield "ones", torch.ones_like(x)
    # The scale of the first block, read back, lies beyond float32.
    large = torch.where(torch.arange(x.numel()).reshape(shape) < 64, 1.0, 0.3)
    yield "large", large * torch.finfo(torch.float32).max
    yield "small", x * 1e-41
    yield "mixed", x * torch.exp2(torch.arange(x.numel()).reshape(shape) // 64 * 37 % 250 - 125.0)


def compare_second_level(x: torch.Tensor, scheme: Scheme) -> None:
    """Every function of the quantizer, and scales from outside."""
    q = reference.quantize(x, scheme)
    assert_same_bits(quantizer.quantize(x, scheme, -1, None, None, False), q)
    assert_same_bits(quantizer.choose_scales(x, scheme, -1), q.scales)
    strange = torch.randint(-128, 128, q.scale.shape, dtype=torch.int8)
    for given in (q.scales, Scales(strange, q.outer, q.zero), Scales(q.scale * 0, q.outer, q.zero * 0)):
        wanted = reference.quantize(x, scheme, scales=given)
        assert_same_bits(quantizer.quantize(x, scheme, -1, given, None, False), wanted)
        for dtype in ("float32", "float16"):
            assert_same_bits(quantizer.dequantize(wanted, dtype), reference.dequantize(wanted, dtype))
    if x.dtype == torch.bfloat16:
        return
    for given in (None, Scales(strange, q.outer, q.zero)):
        fake = reference.fake_quantize(x, scheme, scales=given)
        assert_same_bits(quantizer.fake_quantize(x, scheme, -1, given), fake)
        wanted = reference.fake_quantize_vjp(x, x, scheme, scales=given)
        assert_same_bits(vjp.gradient(x, x, scheme, -1, None, given), wanted)


def compare_second_level_packed(x: torch.Tensor, scheme: Scheme) -> None:
    """Packed codes, written and read."""
    q = reference.quantize(x, scheme, packed=True)
    assert_same_bits(quantizer.quantize(x, scheme, -1, None, None, True), q)
    assert_same_bits(quantizer.dequantize(q, "float32"), reference.dequantize(q))


def second_level(part: str = "") -> None:
    """Compare everything, or what stands for it."""
    by_day = part == "day"
    torch.manual_seed(0)
    for shape in OUTER_SHAPES[: 3 if by_day else None]:
        compare_second_level(numbers(shape, torch.float32, specials=True), NF4)
        print("nf4", *shape, flush=True)
    for label, x in extremes((9, 300)):
        compare_second_level(x, NF4)
        print("nf4", label, flush=True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for specials in (True,) if by_day else (False, True):
            compare_second_level(numbers((64, 256), dtype, specials=specials), TORCHAO)
        compare_second_level_packed(numbers((64, 256), dtype, specials=True), TORCHAO)
        compare_second_level_packed(numbers((30, 64), dtype, specials=True), NF4)
        print("torchao.nf4", dtype, flush=True)
    # Trees of several passes, whose last is small.
    passes.AVERAGED, passes.MOST_AVERAGES = 16, 4
    for count in (5, 17, 300) if by_day else (5, 16, 17, 250, 300):
        dispatch.CALLS.clear()
        compare_second_level(numbers((count * 64 - 3,), torch.float32), NF4)
        print("passes", count, flush=True)
    for name, scheme in RECORDS:
        if by_day and name in BY_NIGHT:
            continue
        dtype = torch.float16 if scheme.outer.compute == "input" else torch.float32
        compare_second_level(numbers((7, 3001), dtype, specials=True), scheme)
        print(name, flush=True)


def main(name: str, *arguments: str) -> None:
    """Compare what has this name."""
    quick_interpreter.install()
    {"schemes": schemes_agree, "second_level": second_level}[name](*arguments)
