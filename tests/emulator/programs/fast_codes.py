"""The hot paths of the kernels, inline assembly included, on CPU tensors against `reference`, bit for bit.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process fast_codes GROUP[,GROUP...] [FRACTION]

Rules are made for hardware and instructions are emulated (`ptx_interpreter`), so that what a GPU computes is compared without
one. `programs/kernels.py` tries indices, masks and passes; here a launch is one large tile, because the interpreter's time goes
by operations and not by elements. It prints what agreed, one line each, and raises at the first difference.

FRACTION: how much of the edge blocks of float32 and of the outer scales is tried; 1 for a long sweep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import reference
from ao_lab.testing.samples import Layout
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels import encode
from fast.kernels.layers import rms_norm as normalize
from fast.kernels.layers import swiglu
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize import plan as passes
from fast.kernels.quantize.plan import Geometry
from fast.kernels.scheme.constants import element_of
from fast.kernels.scheme.fast_path_rules import OCP, SEQUENCES
from fast.kernels.sm90.codebooks import CENTER, CUBIC, LINEAR
from fast.launch.launcher import power_above
from reference import SCHEMES, Quantized, Scales, Scheme
from reference.arrays.bridges import to_torch
from tests.emulator import ptx_interpreter
from tests.emulator.ptx_opcodes import RECIPROCAL
from tests.gpu.harness.inputs import DTYPES, NUMPY, WIDTH, Array, all_patterns, scheme_inputs, shared
from tests.gpu.kernels.scales import STRANGE
from tests.gpu.kernels.schemes import encode_inputs

GROUPS = {
    "fours": ("mxfp4", "mxfp4_rceil", "nvfp4"),
    "sixes": ("mxfp6_e2m3", "mxfp6_e3m2", "mxfp6_e3m2_rceil", "int6_g64"),
    "bytes": ("mxfp8_e4m3", "mxfp8_e5m2_rceil", "mxint8", "fp8_rowwise", "fp8_1x128", "fp8_1x128_e5m2", "int8_rowwise"),
    "integers": ("int4_g32", "int4_g32_asymmetric", "int2_g32", "int8_rowwise_asymmetric", "ternary_g32", "ternary_rowwise"),
    "groups": ("int3_g32", "int5_g128", "int5_g64_asymmetric", "int7_g128", "int2_g128", "int6_g256", "int4_g128"),
    "ranges": ("int4_g128_asymmetric", "int8_g64_asymmetric"),
    "codebooks": ("nf4",),
    "stretched": ("stretched2_g32", "stretched2_rowwise"),
}  # fmt: skip
# Stochastic rounding: the first and last mantissa sizes, and every rule of scales.
DRAWN = ("mxfp8_e4m3", "mxfp8_e5m2_rceil", "mxfp6_e2m3", "mxfp6_e3m2_rceil", "mxfp4")
# Minima and maxima elsewhere: rows that fill no tile, blocks that fill none, rows in parts, along the first axis.
RANGED = (
    ("int8_rowwise_asymmetric", (5, 200), -1), ("torchao.int4_g32_tinygemm", (5, 96), -1), ("int4_g64_asymmetric", (3, 64), -1),
    ("int8_rowwise_asymmetric", (2, 20000), -1), ("int4_g32_asymmetric", (32, 45), 0),
    ("torchao.int4_g32_tinygemm", (9, 100), -1), ("torchao.int4_g32_tinygemm", (64, 24), 0),
    ("torchao.int4_g32_tinygemm", (64, 256), -1),
)  # fmt: skip
PRODUCED = ("fp8_rowwise", "mxfp8_e4m3", "mxfp4", "mxfp6_e2m3", "int8_rowwise", "int4_g32_asymmetric")
# Rows of two pieces, and of three: see `row_pieces`.
IN_PIECES = (1536, 3584)
# Rows of a power of two that, one after the other, are as long as a row of pieces.
JOINED = ((3, 512), (7, 1024))
# Elements of a launch, at least.
LAUNCH = 1 << 16
#: Given outer scales: ordinary ones, and both sides of where `hot.choose_under_outer` calls a scale ordinary.
OUTERS = (1.0, 1.5, 0.0123, 2.0**-112, 1.9e-34, 1.66e35, 1.67e35, 1e-37, 1e38, 3e-40, 1e20, 1e-20)


def one_tile(make: Any, programs: int = 1) -> Any:
    """Geometry with tiles of at most a million elements, where it was as large a power of two as divides the blocks.

    programs: a power of two, at least so many of them share the blocks.
    """

    def geometry(blocks: Any) -> Geometry | None:
        place = make(blocks)
        if place is None or place.chunked or place.masked or place.shape != "flat":
            return place
        p = min(max(1, (place.blocks & -place.blocks) // programs), (1 << 20) // place.size)
        return replace(place, p=p, programs=place.blocks // p)

    return geometry


def two_tiles(make: Any) -> Any:
    """The last pass of pairs in two programs: `one_tile` leaves it the 64 blocks each that suit a GPU."""

    def place(of: Any, outer: str, pairs: bool) -> Geometry:
        made = make(of, outer, pairs)
        if made is of.place or made.programs < 3 or made.shape != "flat":
            return made
        p = min((made.blocks & -made.blocks) // 2, (1 << 20) // made.size)
        return replace(made, p=p, programs=made.blocks // p)

    return place


def ladders(dtype: str, size: int) -> Array:
    """Blocks with one of 64 maxima and, below it, 1024 patterns of eight binades of a 16-bit dtype: all codes and ties."""
    rng, count = np.random.default_rng(7), LAUNCH // size
    top = rng.integers(1, int(Layout.of(dtype).infinity), 64)[np.arange(count) * 64 // count]
    step = np.arange(LAUNCH).reshape(count, size) % 1024 * (8 if dtype == "float16" else 1)
    bits = np.maximum(top[:, None] - step, 0)
    bits[:, 3] = top
    return bits_as(bits | rng.integers(0, 2, bits.shape) << 15, dtype)


def halfway(scheme: Scheme, dtype: str, size: int) -> Array:
    """Blocks as long as their codes reach, which begin at halves and quarters of a step: ends that round beyond the codes."""
    rng, count = np.random.default_rng(9), LAUNCH // size // 4
    target = int(scheme.scale.target)
    low = -rng.integers(0, target, (count, 1)) - rng.choice([0, 0.25, 0.5, 0.75], (count, 1))
    x = np.round(2 * rng.uniform(low, low + target, (count, size))) / 2
    x[:, :1], x[:, -1:] = low, low + target
    step = np.exp2(
        rng.integers(-14, 7, (count, 1)) if dtype == "float16" else rng.integers(-133, 119, (count, 1))
    )
    return (x * step).astype(NUMPY[dtype]).reshape(-1, WIDTH)


def bits_as(bits: Array, dtype: str) -> Array:
    """16-bit patterns in rows."""
    return bits.astype(np.uint16).view(NUMPY[dtype]).reshape(-1, WIDTH)


def inputs(scheme: Scheme, dtype: str, fraction: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of 256 columns: edge blocks, in one tensor where no scale reaches beyond a block, and patterns of 16 bits."""
    made = dict(scheme_inputs(scheme, dtype, fraction))
    if not shared(scheme):
        made = {"edges": np.concatenate(list(made.values()))}
    block = scheme.scale.block
    size = block if isinstance(block, int) and block > 0 else WIDTH
    if scheme.zero is not None:
        made["halfway"] = halfway(scheme, dtype, size)
    if dtype != "float32":
        every = all_patterns(dtype)
        made["patterns"] = np.concatenate([ladders(dtype, size), every["finite"], every["shuffled"]])
        made["ladders"] = ladders(dtype, size)
    for label, x in made.items():
        # Rows by a power of two, so that nothing is masked.
        yield label, to_torch(x[np.arange(power_above(len(x))) % len(x)])


def compare(x: torch.Tensor, scheme: Scheme, scales: Scales | None = None) -> Quantized:
    """Codes, packed ones where they are narrow, and fake quantization."""
    wanted = reference.quantize(x, scheme, scales=scales)
    assert_same_bits(quantizer.quantize(x, scheme, -1, scales, None, False), wanted)
    if scheme.format.bits < 8:
        packed = reference.quantize(x, scheme, scales=scales, packed=True)
        assert_same_bits(quantizer.quantize(x, scheme, -1, scales, None, True), packed)
    fake = reference.fake_quantize(x, scheme, scales=scales)
    assert_same_bits(quantizer.fake_quantize(x, scheme, -1, scales), fake)
    return wanted


def scheme_named(name: str) -> Scheme:
    """A scheme; int7, which has none, as int6 with another element and its target."""
    if name != "int7_g128":
        return SCHEMES[name]
    six = SCHEMES["int6_g128"]
    return replace(six, name=name, element="int7", scale=replace(six.scale, target=63.0))


def compare_scheme(name: str, fraction: float) -> None:
    """All functions of the quantizer, for inputs of all dtypes."""
    scheme = scheme_named(name)
    for dtype in DTYPES:
        labels = []
        for label, x in inputs(scheme, dtype, fraction):
            q = compare(x, scheme)
            labels.append(label)
        print(name, dtype, *labels, flush=True)
    compare_values(q, name)
    if scheme.outer is not None and scheme.outer.statistic == "absmax_elements":
        compare_outers(scheme, fraction)


def compare_ranges() -> None:
    """Patterns of 16 bits in `RANGED` places."""
    for name, shape, axis in RANGED:
        for dtype in ("bfloat16", "float16"):
            every = to_torch(all_patterns(dtype)["finite"]).reshape(-1)
            x = every[: shape[0] * shape[1]].reshape(shape)
            x[0, 7], x[-1, 3] = float("nan"), float("-inf")
            scheme = SCHEMES[name]
            if shape[-1] % 8 == 4:
                # A range that does not hold zero, in rows that fill no tile.
                scheme = replace(scheme, scale=replace(scheme.scale, block=-1))
            made = quantizer.quantize(x, scheme, axis, None, None, False)
            assert_same_bits(made, reference.quantize(x, scheme, axis=axis))
        print(name, *shape, flush=True)


def compare_values(q: Quantized, name: str) -> None:
    """Values in all dtypes, of codes and scales of every kind, sensible or not."""
    q = replace(
        q, **{part: anything(getattr(q, part), q.scheme.format.bits) for part in ("codes", "scale", "zero")}
    )
    for packed in {False, q.scheme.format.bits < 8}:
        if packed:
            q = replace(q, codes=reference.pack(q.codes, q.scheme.format), packed=True)
        for dtype in DTYPES:
            assert_same_bits(quantizer.dequantize(q, dtype), reference.dequantize(q, dtype))
    print(name, "values", flush=True)


def anything(part: torch.Tensor | None, bits: int) -> torch.Tensor | None:
    """Random codes, or a stored scale: random patterns, for float32 many that no rule makes."""
    if part is None:
        return None
    rng = np.random.default_rng(8)
    if part.dtype != torch.float32:
        codes = rng.integers(0, 1 << (bits if part.numel() > LAUNCH // 4 else 8), tuple(part.shape), np.uint8)
        return torch.from_numpy(codes).view(part.dtype)
    values = rng.choice(np.array(STRANGE, np.uint32), tuple(part.shape)).view(np.float32)
    return torch.where(torch.rand(part.shape) < 0.1, torch.from_numpy(values), part)


def compare_outers(scheme: Scheme, fraction: float) -> None:
    """Given outer scales: usual ones and any others, of both signs."""
    patterns = [*np.array(OUTERS, np.float32).view(np.uint32), *STRANGE]
    bits = next(iter(inputs(scheme, "bfloat16", fraction)))[1][:64]
    x = torch.cat([to_torch(ladders("bfloat16", 16))[::4], bits])
    both = [pattern ^ sign for pattern in patterns for sign in (0, 0x80000000)]
    for pattern in both[:: max(1, round(0.3 / fraction))]:
        compare(x, scheme, Scales(outer=torch.tensor(np.uint32(pattern).view(np.float32))))
        print(f"{scheme.name} outer 0x{pattern:08x}", flush=True)


def compare_producers() -> None:
    """silu of every gate, whatever the reciprocal errs by; `swiglu_quantize` and `rms_norm_quantize`."""
    swiglu.ELEMENTS = LAUNCH
    normalize.ELEMENTS = LAUNCH
    for dtype in ("bfloat16", "float16"):
        gates, ups = (to_torch(all_patterns(dtype)[order]) for order in ("sorted", "shuffled"))
        for RECIPROCAL.error in (1, -1, 0):
            for up in (torch.ones_like(gates), -torch.ones_like(gates), ups):
                got, wanted = swiglu.swiglu(gates, up), reference.swiglu(gates, up)
                # The one gate that needs a reciprocal that is not too large; see `swiglu`.
                known = (gates == 5.9375) & (RECIPROCAL.error > 0) & (gates.dtype == torch.bfloat16)
                assert_same_bits(torch.where(known, wanted, got), wanted)
        print("swiglu", dtype, flush=True)
    for dtype in DTYPES:
        x = next(iter(inputs(SCHEMES["mxfp8_e4m3"], dtype, 0.1)))[1][:64]
        for name in PRODUCED:
            compare_produced(x, x.flip(0), name)
        for length in IN_PIECES:
            # Patterns with NaN among them, without them, with an infinity; ordinary numbers.
            some = x.flatten()[: 2 * length].reshape(-1, length)
            finite = some.nan_to_num(0.0, 0.0, 0.0)
            finite[1, 7] = torch.inf
            rows = torch.cat([some, finite, peaks(length, x.dtype)])
            for name in ("fp8_rowwise", "fp8_rowwise_e5m2"):
                compare_produced(rows, rows.flip(0), name)
        for shape in JOINED:
            rows = x.flatten()[: shape[0] * shape[1]].reshape(shape)
            compare_produced(rows, rows.flip(0), "fp8_rowwise")
        print("produced", dtype, *PRODUCED, flush=True)


def peaks(length: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of normal numbers, each with its largest in another place, so that every piece has two of them."""
    x = torch.randn(8, length, generator=torch.Generator().manual_seed(9))
    row = torch.arange(8)
    x[row, (2 * row + 1) * length // 16] *= 64
    return x.to(dtype)


def compare_produced(x: torch.Tensor, other: torch.Tensor, name: str) -> None:
    """Both producers of codes."""
    packed = SCHEMES[name].format.bits < 8
    if x.dtype != torch.float32:
        gated = reference.swiglu_quantize(x, other, name, packed=packed)
        assert_same_bits(swiglu.swiglu_quantize(x, other, name, packed), gated)
    weight = other[2].nan_to_num(1.0, 2.0, -2.0)
    for residual in (other, None):
        made = normalize.rms_norm_quantize(x, weight, name, 1e-6, residual, packed)
        wanted = reference.rms_norm_quantize(x, weight, name, residual=residual, packed=packed)
        for got, right in zip(made, wanted, strict=True):
            assert_same_bits(got, right)


def compare_reciprocals() -> None:
    """Scales, zero points and multipliers of reciprocals that are corrected, where the first guess errs by a unit."""
    for RECIPROCAL.error in (1, -1):
        for name in ("nvfp4", "int4_g32", "int4_g32_asymmetric", "fp8_1x128"):
            compare(to_torch(ladders("bfloat16", 16)), SCHEMES[name])
    RECIPROCAL.error = 0
    print("reciprocals", flush=True)


def compare_bounds(name: str) -> None:
    """Elements beside every midpoint of a codebook and where the cubic turns to the next integer, in units of the scale."""
    scheme = SCHEMES[name]
    middle = element_of(scheme.format).thresholds
    grid = np.linspace(-1, 1, 1 << 16)
    cubic = CENTER + grid * (LINEAR.value + CUBIC.value * grid**2)
    turns = grid[1:][np.diff(np.rint(cubic)) != 0]
    bits = np.concatenate([middle, turns]).astype(np.float32).view(np.int32)[:, None] + np.arange(-64, 64)
    bits = bits.reshape(-1).astype(np.int32)
    y = np.concatenate([bits.view(np.float32), np.float32(grid), np.float32([0.0, -0.0, 1e-40])])
    y = np.resize(y, (power_above(len(y) // 63 + 1), 63))
    x = np.concatenate([np.ones_like(y[:, :1]), y], 1)
    for RECIPROCAL.error in (1, -1, 0):
        compare(to_torch(x.reshape(-1, WIDTH)), scheme)
        compare(to_torch((x * np.float32(1.7e38)).reshape(-1, WIDTH)), scheme)
    print(name, "bounds", flush=True)


def compare_levels(name: str) -> None:
    """Elements at and beside every midpoint of stretched levels, the smallest numbers among them, under given maxima."""
    scheme = SCHEMES[name]
    grid = np.float32(scheme.format.values[1:] - np.float32(0.5))
    beside = np.concatenate([grid, np.nextafter(grid, np.float32(9)), np.nextafter(grid, np.float32(-9))])
    tiny = np.float32([1e-45, -1e-45, 2e-38, -2e-38, 2.0**-25, -(2.0**-25), -0.0, 1e-4])
    y = np.concatenate([beside, tiny])
    # Scales 1 and others: those whose reciprocal is rounded, and is subnormal, and the floor.
    for largest in (2.0, 3.1, 1.9999999, 2.0**127, 3.4e38, 2.0**-125, 1e-38):
        x = np.resize(y * np.float32(largest / 2), (1 << 10, 31))
        x = np.concatenate([np.full_like(x[:, :1], largest), x], 1)
        compare(to_torch(x.reshape(-1, WIDTH)), scheme)
    print(name, "levels", flush=True)


def compare_encode(fraction: float) -> None:
    """Elements on their own: the formats with instructions or sequences of their own, all patterns of 16 bits among them."""
    for name in (name for name, short in OCP.items() if short in SEQUENCES):
        for label, x in encode_inputs(name, fraction):
            if label != "float64":
                made = encode.encode(to_torch(x), name, "nearest_even", "saturate", None)
                assert_same_bits(made, reference.encode(to_torch(x), name))
        print(name, "encode", flush=True)


def compare_drawn(name: str, fraction: float) -> None:
    """Stochastic rounding by random words, by the smallest and by the largest."""
    scheme = replace(SCHEMES[name], rounding="stochastic", name=f"{name} drawn")
    rng = np.random.default_rng(9)
    for dtype in DTYPES:
        for label, x in inputs(scheme, dtype, fraction):
            words = rng.integers(0, 1 << 32, tuple(x.shape), np.uint32)
            words[rng.random(words.shape) < 0.1] = 0
            words[rng.random(words.shape) < 0.1] = 0xFFFFFFFF
            bits = torch.from_numpy(words)
            for packed in {False, scheme.format.bits < 8}:
                wanted = reference.quantize(x, scheme, random_bits=bits, packed=packed)
                assert_same_bits(quantizer.quantize(x, scheme, -1, None, bits, packed), wanted)
            print(name, dtype, label, "drawn", flush=True)


def main(groups: str, fraction: str = "0.1") -> None:
    """Compare some groups."""
    ptx_interpreter.install()
    passes.geometry, passes._place = one_tile(passes.geometry), two_tiles(passes._place)
    for group in groups.split(","):
        compare_group(group, float(fraction))


def compare_group(group: str, fraction: float) -> None:
    """Compare one group."""
    for name in GROUPS.get(group, ()):
        compare_scheme(name, fraction)
    if group == "ranges":
        compare_ranges()
    if group == "codebooks":
        compare_bounds("nf4")
    if group == "stretched":
        compare_levels("stretched2_g32")
    if group == "encode":
        compare_encode(fraction)
    if group == "drawn":
        for name in DRAWN:
            compare_drawn(name, fraction)
    if group == "producers":
        compare_reciprocals()
        compare_producers()
