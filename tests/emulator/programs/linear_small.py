"""Products of few rows with small weights, and with inputs that are quantized on the way: kernels in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process linear_small weights [day | SCHEME]
TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process linear_small dynamic [SCHEME ...]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import floor, log2

import torch

import fast
import reference
from ao_lab.config.recipe import Recipe, named
from ao_lab.gemm import dense as expert_products
from ao_lab.gemm import select
from ao_lab.tensor.metadata import unsupported_reason
from ao_lab.tensor.quantized_tensor import from_quantized, quantized
from ao_lab.testing.strategies import assert_same_bits
from fast import dispatch
from fast.kernels import exact_inputs as inputs_host
from fast.kernels.exact_inputs import row_codes_kernel
from fast.kernels.scheme.constants import block_op, constants_of
from fast.kernels.triton_small_m import grouped, host, pair
from fast.kernels.triton_small_m.dense import arranged_dense
from fast.kernels.triton_small_m.host import Tiling
from fast.kernels.triton_small_m.layout import restored_codes
from fast.launch.launcher import power_above
from fast.matmul.preshuffled import layout, linear
from fast.matmul.preshuffled.dynamic import CODES, kind_of, linear_small_dynamic
from fast.matmul.preshuffled.linear import linear_small
from fast.matmul.preshuffled.pair import linear_small_pair, linear_small_swiglu
from fast.scale_factors import LEAST, SECOND, TERMS, form_of
from reference import Quantized, Scheme
from tests.emulator import ptx_interpreter
from tests.support.linear_cases import exact_inputs, exact_result, exact_weight, inputs, outside, weight

BF16, HALF = torch.bfloat16, torch.float16
SCHEMES = (
    "int4_g32", "int4_g64", "int4_g128", "int4_g256", "int4_g32_asymmetric", "int4_g64_asymmetric", "int4_g128_asymmetric",
    "torchao.int4_g32", "int8_rowwise", "int8_tensorwise", "int8_rowwise_asymmetric", "int8_g32",
    "int8_g32_asymmetric", "int8_g128", "fp8_rowwise", "fp8_tensorwise", "fp8_1x128", "mxfp8_e4m3",
    "mxfp4", "nvfp4", "torchao.nvfp4_single_level", "nf4",
)  # fmt: skip
#: A scheme of each kind of word and scale; of the first also tensors of three axes.
BY_DAY = ("int4_g32_asymmetric", "nvfp4", "int8_rowwise_asymmetric", "fp8_rowwise", "mxfp8_e4m3", "nf4")
#: Those whose scales are factors, powers of two first.
WITH_FACTORS = ("mxfp4", "mxfp8_e4m3", "nvfp4")
#: Those of which every tile of experts is compared.
TILED = ("int4_g32_asymmetric", "int4_g64", "int4_g128", "int8_rowwise", "fp8_1x128", *WITH_FACTORS)
TILED_BY_DAY = ("nvfp4",)
#: Scales that are factors: powers of two, and all of e4m3 that are no NaN, a smallest one and zero among them.
FACTORS = {
    "float8_e8m0fnu": torch.arange(100, 140).to(torch.uint8), "float8_e4m3fn": torch.arange(127).to(torch.uint8),
}  # fmt: skip
#: Rows of the weight and of X, K in blocks, dtype, tiles: parts that are not of one length, rows and columns that are filled.
CASES = (
    (64, 3, 2, BF16, Tiling(16, 64, 128, 1, 2, 4)), (70, 17, 3, HALF, Tiling(32, 128, 128, 2, 2, 8)),
    (133, 5, 5, BF16, Tiling(8, 64, 64, 3, 2, 4)), (256, 33, 2, HALF, Tiling(64, 256, 64, 1, 2, 8)),
)  # fmt: skip


def block_of(name: str) -> int:
    """Columns that K is a multiple of; twice as many are taken."""
    if name == "nf4":
        return LEAST // 2
    block = named(name).scale.block
    return max(32, block) if isinstance(block, int) else block[1] if isinstance(block, tuple) else 32


def odd_length(name: str) -> int:
    """Columns that are filled, of blocks that are no multiple of 128; of rows an odd number."""
    block = named(name).scale.block
    if name == "nf4":
        return LEAST + 64
    if not isinstance(block, int) or block < 0:
        return 161
    return {16: 144, 32: 160, 64: 192}.get(block, 3 * block)


def compare(name: str, cases: Iterable[tuple[int, int, int, torch.dtype, Tiling]] = CASES) -> None:
    """Exact sums to the bit, others within the bound; codes come back."""
    for rows, count, blocks, dtype, tiling in cases:
        length, bias = blocks * block_of(name), (torch.arange(rows) % 7 - 3).to(dtype)
        w, x = exact_weight(named(name), rows, length), exact_inputs(count, length, dtype)
        arranged = host.arrange(w)
        assert arranged is not None
        assert torch.equal(restored_codes(arranged), w.codes)
        if not tiling.fits(arranged.rows, arranged.columns, arranged.element, arranged.group):
            continue
        made = host.linear_small(x, arranged, bias, tiling=tiling)
        assert_same_bits(made, exact_result(x, w, bias))
        if count > 3:
            continue
        assert_same_bits(made, reference.linear(x, w, bias))
        w, x = weight(named(name), rows, length), inputs(count, length, dtype)
        arranged = host.arrange(w)
        assert outside(host.linear_small(x, arranged, None, tiling=tiling), x, w, None) == 0
        wide = host.linear_small(x, arranged, dtype=torch.float32)
        assert torch.equal(wide.to(dtype), host.linear_small(x, arranged))


def every_code(name: str, dtype: torch.dtype) -> None:
    """Each code in each place of a word, one at a time, under scales that are different ones where they are factors."""
    scheme, bits = named(name), named(name).format.bits
    codes = (torch.arange(256)[:, None] + 3 * torch.arange(128)[None, :]) % 2**bits
    if scheme.element == "float8_e4m3fn":
        codes = torch.where(codes & 0x7F == 0x7F, 1, codes)
    codes = codes.to(torch.uint8)
    stored = fast.pack(codes, scheme.format) if bits < 8 else codes
    scale, outer = torch.ones((256, 1)), None if scheme.outer is None else torch.tensor(1.0)
    if (patterns := FACTORS.get(scheme.scale.storage)) is not None:
        blocks = 128 // int(str(scheme.scale.block))
        scale = patterns[torch.arange(256 * blocks) % len(patterns)].reshape(256, blocks)
    w = Quantized(stored, scale, outer, None, (256, 128), 1, scheme, packed=bits < 8)
    x = torch.eye(128, dtype=dtype)
    made = host.linear_small(x, host.arrange(w), dtype=torch.float32)
    assert_same_bits(made + 0.0, fast.dequantize(w).t().contiguous() + 0.0)


def levels_of(dtype: torch.dtype) -> torch.Tensor:
    """What both terms of each level are, in float64: float32 holds it."""
    patterns = torch.tensor(TERMS[str(dtype).removeprefix("torch.")]).to(torch.int16).view(dtype).double()
    return patterns[:, 0] + SECOND * patterns[:, 1]


def every_level(dtype: torch.dtype) -> None:
    """NF4's codes in each place of a word, one at a time, under scales that are different ones: both terms, exactly."""
    w = exact_weight(named("nf4"), 256, LEAST)
    codes = (torch.arange(256)[:, None] + 3 * torch.arange(LEAST)[None, :]) % 16
    stored = replace(w, codes=fast.pack(codes.to(torch.uint8), w.scheme.format))
    scales = fast.dequantize(replace(w, codes=torch.full_like(w.codes, 255)))
    assert sorted(set(scales.flatten().tolist())) == [1.0, 2.0, 4.0]
    arranged = host.arrange(stored)
    parts = torch.eye(LEAST, dtype=dtype).split(128)
    made = torch.cat([host.linear_small(x, arranged, dtype=torch.float32) for x in parts])
    wanted = (levels_of(dtype)[codes] * scales).t()
    assert torch.equal(made.double(), wanted)


def one_level_a_row(dtype: torch.dtype) -> None:
    """Errors of a level that all have one sign, in the fewest columns: within the bound of float32, and one term is not."""
    w = exact_weight(named("nf4"), 64, LEAST)
    codes = (torch.arange(64) % 16)[:, None].expand(-1, LEAST)
    w = replace(w, codes=fast.pack(codes.to(torch.uint8).contiguous(), w.scheme.format))
    x = torch.ones((2, LEAST), dtype=dtype)
    allowed = reference.linear_error_bound(x, w, None, out_dtype="float32")
    truth = x.double() @ fast.dequantize(w).double().t()
    made = host.linear_small(x, host.arrange(w), dtype=torch.float32)
    assert bool(((made.double() - truth).abs() <= allowed).all())
    nearest = torch.tensor(w.scheme.format.values.tolist()).to(dtype).double()
    scales = fast.dequantize(replace(w, codes=torch.full_like(w.codes, 255))).double()
    alone = (x.double()[:, None] * nearest[codes] * scales).sum(-1)
    assert bool(((alone - truth).abs() > allowed).any())


def nan_scales() -> None:
    """A scale that is NaN makes its row of the result NaN, and no other; an infinite input is infinite, but for level 0."""
    w = exact_weight(named("nf4"), 64, LEAST)
    w.scale[5 * LEAST // 64 + 2] = -128
    made = host.linear_small(exact_inputs(3, LEAST, BF16), host.arrange(w))
    assert torch.equal(made.isnan(), (torch.arange(64) == 5).expand(3, -1))
    w = weight(named("nf4"), 64, LEAST)
    x = exact_inputs(1, LEAST, BF16)
    x[0, 70] = float("inf")
    wanted = x.float() @ fast.dequantize(w).t()
    made = host.linear_small(x, host.arrange(w), dtype=torch.float32)
    assert torch.equal(made.nan_to_num(7.0, 8.0, 9.0), wanted.nan_to_num(7.0, 8.0, 9.0))


def far_scales(name: str, dtype: torch.dtype) -> None:
    """Powers of two beyond what a factor holds: exact sums, and the bits of dense weights. NaN is not taken."""
    w = exact_weight(named(name), 64, 256)
    w.scale[:] = torch.arange(w.scale.numel()).reshape(w.scale.shape) % 3 + 180
    x = exact_inputs(3, 256, dtype)
    made = host.linear_small(x, host.arrange(w), dtype=torch.float32)
    assert_same_bits(made.double(), x.double() @ fast.dequantize(w).double().t())
    assert_same_bits(arranged_dense(host.arrange(w), torch.float32), fast.dequantize(w))
    w.scale[7, 3] = 255
    assert host.arrange(w) is None


def not_a_number() -> None:
    """A code that is NaN makes its row of the result NaN, and no other."""
    w = exact_weight(named("fp8_rowwise"), 64, 256)
    w.codes[5, 77] = 0xFF
    made = host.linear_small(exact_inputs(3, 256, BF16), host.arrange(w))
    assert torch.equal(made.isnan(), (torch.arange(64) == 5).expand(3, -1))


def as_dense(name: str) -> None:
    """The bits of `dequantize`, in every dtype; rows and columns that fill no tile."""
    for rows, blocks in ((70, 3), (128, 2)):
        w = weight(named(name), rows, blocks * block_of(name))
        arranged = host.arrange(w)
        for dtype in (BF16, HALF, torch.float32):
            assert_same_bits(arranged_dense(arranged, dtype), fast.dequantize(w, dtype))


#: Rows of each expert: none, one, more than a tile.
EXPERTS = (3, 0, 1, 40)


def of_experts(name: str) -> None:
    """Each expert's rows by its own weight; those behind the last stay as they were."""
    weights = [exact_weight(named(name), 70, 2 * block_of(name), seed) for seed in range(len(EXPERTS))]
    x = exact_inputs(sum(EXPERTS) + 5, 2 * block_of(name), BF16)
    ends = torch.tensor(EXPERTS, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    made = grouped.grouped_linear_small(x, grouped.stacked([host.arrange(w) for w in weights]), ends)
    assert made is not None
    parts = zip(x[: ends[-1]].split(EXPERTS), made[: ends[-1]].split(EXPERTS), weights, strict=True)
    for rows, got, w in parts:
        assert_same_bits(got, exact_result(rows, w, None))


#: Rows of X, dtype, tiles for two weights: those of the rule, parts of K, halves of two atoms.
PAIRS = (
    (1, BF16, None), (5, HALF, Tiling(16, 128, 64, 3, 2, 4)), (16, BF16, Tiling(8, 256, 64, 1, 2, 8)),
    (3, BF16, Tiling(16, 256, 64, 2, 2, 8)),
)  # fmt: skip


#: Schemes of which two weights are multiplied at once: every branch of addresses.
TWO = ("int4_g128", "int4_g32_asymmetric", "int4_g128_asymmetric", "int8_rowwise_asymmetric", "fp8_rowwise")
TWO_BY_DAY = TWO[1:2]


def of_two(name: str, pairs: Iterable[tuple[int, torch.dtype, Tiling | None]] = PAIRS) -> None:
    """Two weights at once: exact sums to the bit and swiglu of them; others have the bits of each weight by itself."""
    length = 3 * max(128, block_of(name))
    made = [[draw(named(name), 256, length, seed) for seed in (0, 3)] for draw in (exact_weight, weight)]
    for count, dtype, tiling in pairs:
        x, arranged = exact_inputs(count, length, dtype) / 64, [host.arrange(w) for w in made[0]]
        sums = [exact_result(x, w, None) for w in made[0]]
        if tiling and not tiling.fits(512, length, arranged[0].element, arranged[0].group):
            continue
        for got, wanted in zip(pair.linear_small_pair(x, *arranged, tiling=tiling), sums, strict=True):
            assert_same_bits(got, wanted)
        assert_same_bits(pair.linear_small_swiglu(x, *arranged, tiling=tiling), reference.swiglu(*sums))
        x, arranged = inputs(count, length, dtype), [host.arrange(w) for w in made[1]]
        both = pair.linear_small_pair(x, *arranged, tiling=tiling)
        for got, w, each in zip(both, arranged, made[1], strict=True):
            if tiling is not None:
                assert_same_bits(got, host.linear_small(x, w, tiling=tiling))
            assert outside(got, x, each, None) == 0
        assert_same_bits(pair.linear_small_swiglu(x, *arranged, tiling=tiling), reference.swiglu(*both))


#: Every tile that the rule takes, by rows at once: rows of X that an expert has on average.
TILES = {
    16: ((128, 128, 6, 4), (64, 128, 6, 4), (64, 256, 4, 4)), 32: ((128, 128, 4, 4),), 64: ((128, 128, 4, 8), (128, 64, 4, 8)),
}  # fmt: skip


def tiles_of_experts(name: str) -> None:
    """Each tile, for as many rows as it is for."""
    length = 2 * max(128, block_of(name))
    weights = [exact_weight(named(name), 256, length, seed) for seed in range(4)]
    experts = grouped.stacked([host.arrange(w) for w in weights])  # type: ignore[misc]
    for at_once, tiles in TILES.items():
        counts = (at_once // 2 + 3, 0, at_once + 1, at_once // 2 - 4)
        x = exact_inputs(sum(counts), length, BF16)
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        assert grouped.rows_at_once(len(x), 4) == at_once
        each = zip(x.split(counts), weights, strict=True)
        wanted = torch.cat([exact_result(rows, w, None) for rows, w in each])
        for tile in tiles:
            assert_same_bits(grouped.grouped_linear_small(x, experts, ends, tile=tile), wanted)


def tensors_of_experts(name: str, rows_of_weight: int, length: int, dtypes: Iterable[torch.dtype]) -> None:
    """`torch._grouped_mm` by preshuffled weights of three axes: the kernel's bits; of many rows those of dense weights."""
    counts = torch.tensor((3, 0, 21))
    dense = torch.randn(3, rows_of_weight, length, generator=torch.Generator().manual_seed(0)).to(BF16)
    plain = quantized(dense, name)
    t = plain.to_layout("preshuffled")
    for parts in ("codes", "scale", "zero"):
        made = [
            getattr(host.arrange(plain[at].quantized), parts.replace("codes", "words")) for at in range(3)
        ]
        assert made[0] is None or torch.equal(getattr(t, parts), torch.stack(made))
    assert all(
        torch.equal(getattr(linear.preshuffled(plain.quantized), part), getattr(t, part))
        for part in ("codes", "scale")
    )
    assert torch.equal(linear.restored(t.stored).codes, plain.codes)
    ends = counts.cumsum(0, dtype=torch.int32)
    for dtype in dtypes:
        x = inputs(24, length, dtype)
        made = torch._grouped_mm(x, t.mT, ends)
        for rows, got, at in zip(
            x.split(counts.tolist()), made.split(counts.tolist()), range(3), strict=True
        ):
            assert not len(rows) or outside(got, rows, plain[at].quantized, None) == 0
            assert (
                not len(rows)
                or outside(linear_small(rows, t[at].stored), rows, plain[at].quantized, None) == 0
            )
        experts = grouped.ArrangedWeight(
            t.codes, t.scale, t.zero, (rows_of_weight, length), *form_of(named(name), length)
        )
        assert_same_bits(made, grouped.grouped_linear_small(x, experts, ends))
    many = inputs(3 * 64 + 1, length, BF16)
    ends = torch.tensor((100, 101, 193), dtype=torch.int32)
    assert_same_bits(
        torch._grouped_mm(many, t.mT, ends), torch._grouped_mm(many, plain.dequantize().mT, ends)
    )


def preshuffled(name: str, n: int, length: int, counts: Iterable[int] = (1, 16, 17)) -> None:
    """The layout of stored weights has the kernel's words, and weights that have it are multiplied by the kernel.

    counts: rows of X for two weights at once.
    """
    w = exact_weight(named(name), n, length)
    stored, form = layout.preshuffled(w), form_of(named(name), length)
    own = grouped.ArrangedWeight(stored.codes, stored.scale, stored.zero, (n, length), *form)
    arranged = host.arrange(w) or own
    for made, kernel in ((stored.codes, arranged.words), (stored.scale, arranged.scale)):
        assert torch.equal(made, kernel)
    assert stored.zero is None or torch.equal(stored.zero, arranged.zero)
    assert form == (arranged.element, arranged.group)
    assert torch.equal(linear.preshuffled(w).codes, arranged.words)
    assert torch.equal(linear.restored(stored).codes, w.codes)
    t = from_quantized(w, Recipe(weight=named(name)), BF16).to_layout("preshuffled")
    for count in (1, 5):
        x, bias = exact_inputs(count, length, BF16), (torch.arange(n) % 7 - 3).to(BF16)
        assert_same_bits(select.PRODUCTS["fused"].run(x, t.transposed(), bias), exact_result(x, w, bias))
        assert_same_bits(linear_small(x, t.stored, bias), host.linear_small(x, arranged, bias))
    both = w, exact_weight(named(name), n, length, 3)
    ready = [stored, layout.preshuffled(both[1])]
    for count in counts:
        x = exact_inputs(count, length, BF16) / 64
        sums = [exact_result(x, one, None) for one in both]
        for got, wanted in zip(linear_small_pair(x, *ready), sums, strict=True):
            assert_same_bits(got, wanted)
        assert_same_bits(linear_small_swiglu(x, *ready), reference.swiglu(*sums))
    many = exact_inputs(130, length, BF16)
    assert_same_bits(linear_small(many, t.stored), torch.nn.functional.linear(many, t.dequantize(BF16)))


def weights_agree(*names: str) -> None:
    """Compare all."""
    by_day = names == ("day",)
    chosen = [name for name in SCHEMES if (name in BY_DAY if by_day else names in ((), (name,)))]
    for at, name in enumerate(chosen):
        # By day every case with the first scheme, and two of the four with each other one in turn.
        compare(name, CASES[at % 2 :: 2] if by_day and at else CASES)
        if name != "nf4":
            of_experts(name)
        as_dense(name)
        if name in (TWO_BY_DAY if by_day else TWO):
            # By day the rule's tiles, and parts of K in halves of two atoms.
            of_two(name, PAIRS[::3] if by_day else PAIRS)
        print(name, flush=True)
    many = ("int4_g128", "int8_rowwise", "fp8_rowwise", *WITH_FACTORS) if len(chosen) > 1 else ()
    for at, name in enumerate(many):
        for dtype in host.INPUTS[at % 2 :][:1] if by_day else host.INPUTS:
            every_code(name, dtype)
            if name in WITH_FACTORS[:2]:
                far_scales(name, dtype)
        print("every code of", name, flush=True)
    if "nf4" in chosen:
        nan_scales()
        for dtype in host.INPUTS[:1] if by_day else host.INPUTS:
            every_level(dtype)
            one_level_a_row(dtype)
        print("every level of nf4", flush=True)
    not_a_number()
    for name in (name for name in chosen if name in (TILED_BY_DAY if by_day else TILED)):
        tiles_of_experts(name)
        print("tiles of experts", name, flush=True)
    dispatch.has_kernels = lambda x: True
    # Groups ask where weights are, and of which kind of GPU.
    expert_products.groups_reason = lambda w, dtype: None  # type: ignore[assignment]
    for name in chosen:
        length = 2 * max(128, block_of(name))
        # By day what fills no tile, and of one weight of the first scheme what fills all; two weights at once are of that one.
        first = not by_day or name == BY_DAY[0]
        for shape in [(128, length)] * first + [(70, odd_length(name))]:
            preshuffled(name, *shape, counts=(1, 17) if by_day and first else (1, 16, 17) if first else ())
        if named(name).scale.block != "tensor" and name != "nf4" and not (by_day and name != BY_DAY[0]):
            for shape in [(128, length)] * (not by_day) + [(72, odd_length(name) // 8 * 8)]:
                tensors_of_experts(name, *shape, host.INPUTS[:1] if by_day else host.INPUTS)
        print("preshuffled", name, flush=True)


NAMES = {BF16: "bfloat16", HALF: "float16"}
DYNAMIC = (
    "int8_rowwise", "int8_rowwise_asymmetric", "fp8_rowwise", "fp8_rowwise_e5m2", "torchao.int8_rowwise",
    "torchao.int8_rowwise_asymmetric", "compressed_tensors.fp8_token", "int8_rowwise_bf16", "mxfp8_e4m3", "mxfp8_e4m3_rceil",
    "mxfp8_e5m2_rceil", "mxfp4_rceil", "mxfp6_e2m3", "mxint8",
)  # fmt: skip
#: Schemes and shapes of weights, two of them filled, and rows of X of the products.
WEIGHTS = (
    ("int4_g128", (128, 256), 3), ("int4_g32_asymmetric", (70, 160), 17), ("int8_rowwise", (128, 256), 1),
    ("mxfp8_e4m3", (70, 160), 5),
)  # fmt: skip


def rows_of(dtype: torch.dtype, length: int) -> torch.Tensor:
    """Random rows, and rows of zeros, of one element, of the ends of the range, with infinities and NaN."""
    x = inputs(12, length, torch.float32) * 2.0 ** (5 * torch.arange(12) % 17 - 8)[:, None]
    x = x.to(dtype)
    info = torch.finfo(dtype)
    x[1], x[2], x[3], x[4] = 0.0, -0.0, info.max, info.smallest_normal
    x[5, 1:] = 0.0
    x[6, 7], x[7, 9] = float("inf"), float("nan")
    x[8] = x[8].abs()
    return x


def expected(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of the reference: values, or decoded codes less the zero point, and scales."""
    if kind_of(scheme) != CODES:
        return reference.fake_quantize(x, scheme), None
    q = reference.quantize(x, scheme)
    values = torch.from_numpy(scheme.format.values.copy())[q.codes.long()]
    values = values if q.zero is None else values - q.zero.float()
    scale = q.scale if scheme.scale.storage == "float32" else q.scale.view(torch.bfloat16).float()
    return values.to(x.dtype), scale[:, 0]


def same_inputs(made: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor, scheme: Scheme) -> None:
    """Scales to the bit; elements where the scale is a number."""
    values, scale = expected(x, scheme)
    if scale is None:
        assert_same_bits(made[0], values)
        return
    assert made[1] is not None
    assert_same_bits(made[1], scale)
    real = ~scale.isnan()
    assert torch.equal(made[0].isnan()[real], values.isnan()[real])
    assert torch.equal(made[0].nan_to_num()[real], values.nan_to_num()[real])


def inputs_agree(scheme: Scheme) -> None:
    """By the rules, and of codes by the sequences of a GPU; rows that fill a program and rows that do not."""
    for dtype in inputs_host.product.INPUTS:
        for length in (256, 384):
            x = rows_of(dtype, length)
            kind = str(kind_of(scheme))
            made = inputs_host.exact_inputs(x, scheme, kind)
            assert made is not None
            same_inputs(made, x, scheme)
            if kind != CODES:
                continue
            y, scale = torch.empty_like(x), torch.empty(len(x))
            rule = constants_of(scheme, NAMES[dtype])
            row_codes_kernel[(len(x),)](x, y, scale, length, power_above(length), rule, block_op(), False)
            same_inputs((y, scale), x, scheme)


def with_exact_scales(count: int, length: int, dtype: torch.dtype, scheme: Scheme) -> torch.Tensor:
    """Small integers times a power of two, and the largest in each block, so that its scale is one and nothing is rounded."""
    x = torch.randint(-2, 3, (count, length), generator=torch.Generator().manual_seed(1)).float()
    top = scheme.scale.target if kind_of(scheme) == CODES else 2.0 ** floor(log2(scheme.scale.target))
    x *= 2.0 ** max(floor(log2(top)) - 8, 0)
    x[:, ::32] = top
    if scheme.zero is not None:
        x[:, ::32], x[:, 1::32] = top // 2 + 1, -(top // 2)
    return x.to(dtype)


def multiplied(q: Quantized, x: torch.Tensor, scheme: Scheme, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of what is stored, with all digits and rounded once."""
    values = reference.dequantize(reference.quantize(x, scheme)).double()
    result = values @ fast.dequantize(q).double().t()
    result = result if bias is None else result + bias.double()
    narrow = result.float()
    assert torch.equal(narrow.double(), result)
    return narrow.to(x.dtype)


def products_agree(scheme: Scheme, weights: Iterable[tuple[str, tuple[int, int], int]]) -> None:
    """Exact sums to the bit, random ones within the bound, through the public function and through layers."""
    for name, (n, length), count in weights:
        dtype = (BF16, HALF)[count % 2]
        w, bias = exact_weight(named(name), n, length), 64 * (torch.arange(n) % 7 - 3).to(dtype)
        x = with_exact_scales(count, length, dtype, scheme)
        stored = layout.preshuffled(w)
        made = linear_small_dynamic(x, scheme, stored, bias)
        assert_same_bits(made, multiplied(w, x, scheme, bias))
        layer = from_quantized(w, Recipe(weight=named(name), activation=scheme), dtype)
        if unsupported_reason(layer) is None:
            t = layer.to_layout("preshuffled")
            assert_same_bits(select.PRODUCTS["fused"].run(x, t.transposed(), bias), made)
        w, x = weight(named(name), n, length), inputs(count, length, dtype)
        made = linear_small_dynamic(x[None], scheme, layout.preshuffled(w))[0]
        values = reference.dequantize(reference.quantize(x, scheme))
        bound = reference.linear_error_bound(values, w, out_dtype=NAMES[dtype])
        exact = values.double() @ fast.dequantize(w).double().t()
        assert bool(((made.double() - exact).abs() <= bound).all())
        many = inputs(130, length, dtype)
        wanted = fast.fake_quantize(many, scheme) @ fast.dequantize(w, dtype).t()
        assert_same_bits(linear_small_dynamic(many, scheme, layout.preshuffled(w)), wanted)


def dynamic_agree(*names: str) -> None:
    """Compare all."""
    dispatch.has_kernels = lambda x: True
    for at, name in enumerate(DYNAMIC):
        if names and name not in names:
            continue
        scheme = named(name)
        inputs_agree(scheme)
        # Each by two of the weights in turn.
        products_agree(scheme, [WEIGHTS[(at + more) % len(WEIGHTS)] for more in range(2)])
        print(name, flush=True)


def main(name: str, *names: str) -> None:
    """Compare what has this name."""
    ptx_interpreter.install()
    {"weights": weights_agree, "dynamic": dynamic_agree}[name](*names)
