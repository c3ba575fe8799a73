"""Calls of the kernels' host functions on memory that is never touched, for `test_kernels_compile`."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import fast.kernels
from ao_lab.config.recipe import named
from fast.kernels import both_axes as values_host
from fast.kernels import encode as pointwise
from fast.kernels import encode as random_words
from fast.kernels import grouped as grouped_layout
from fast.kernels import grouped as groups_host
from fast.kernels import grouped as host
from fast.kernels import hadamard as hadamard
from fast.kernels import static_scales as static_scales_host
from fast.kernels.calibration import hqq, signround
from fast.kernels.calibration import token_errors as errors
from fast.kernels.layers import rms_norm as normalize
from fast.kernels.layers import swiglu
from fast.kernels.quantize import host as clipping
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize import vjp
from fast.kernels.rowwise_colwise import host as layouts_host
from fast.kernels.rowwise_colwise import mx as both
from fast.kernels.scheme.constants import constants_of
from fast.kernels.triton_gemv import select as products
from fast.kernels.triton_scaled_mm import host as code_rows
from fast.quantize.static_scales import rows_record
from reference import FORMATS, SCHEMES, Quantized, Scales
from reference.formats.storage import packed_shape, storage_dtype
from reference.quantize.blocks import Blocks
from reference.quantize.scales import scale_groups
from reference.training.grouped import padded_rows
from tests.support import family_times

KERNELS = Path(fast.kernels.__file__).parent
BIG = (16384, 4096)
SOME = (64, 512)


def empty(shape, dtype):
    """Memory that nobody writes or reads."""
    return torch.empty(shape, dtype=getattr(torch, dtype))


def scales_of(scheme, shape, axis):
    """Scales as they are kept."""
    kept = Blocks.of(shape, scheme.scale, axis).scale_shape
    scale = empty(kept, storage_dtype(scheme.scale.storage))
    if scheme.outer and scheme.outer.statistic != "absmax_elements":
        groups = scale_groups(Blocks.of(shape, scheme.scale, axis), scheme.outer, scheme)
        return Scales(scale, empty(groups.scale_shape, "float32"), empty((), "float32"))
    outer = empty((), "float32") if scheme.outer else None
    return Scales(scale, outer, empty(kept, storage_dtype(scheme.zero.storage)) if scheme.zero else None)


def quantize(
    name, dtype="bfloat16", shape=SOME, axis=-1, packed=False, given="", stochastic=False, tiled=False
):
    scheme, words = SCHEMES[name], None
    if stochastic:
        scheme, words = (
            replace(scheme, rounding="stochastic", name=f"{name} stochastic"),
            empty(shape, "uint32"),
        )
    scales = scales_of(scheme, shape, axis) if given else None
    if given == "outer":
        scales = Scales(outer=scales.outer)
    return quantizer.quantize(empty(shape, dtype), scheme, axis, scales, words, packed, tiled)


def static_scales(name, dtype="bfloat16", shape=SOME):
    scheme = SCHEMES[name]
    scales, by_rows = scales_of(scheme, shape, -1), rows_record(scheme.key)
    return static_scales_host.quantize_rows(empty(shape, dtype), scheme, by_rows, scales)


def zero_points(dtype="bfloat16", length=64, storage="bfloat16", p=0.7):
    rows, one = empty((4096, length), dtype), empty((4096,), "float32")
    return hqq.zero_points(rows, one, one, storage, 8.0, 15, 20, p, 10.0)


def learned_rounding(name, dtype="bfloat16", shape=SOME):
    scheme, w, v = SCHEMES[name], empty(shape, dtype), empty(shape, "float32")
    blocks = Blocks.of(shape, scheme.scale, -1)
    by = signround.unit(empty((*blocks.scale_shape, 1), "float32"), scheme.format, blocks)
    signround.moved(w, v, by)
    signround.gradient(v, w, v, by, sums=True)
    signround.gradient(v, w, v, by, sums=True, rate=0.1)
    signround.keep(empty((1,), "uint8"), v, v)
    return signround.step(v, v, 0.1)


def token_errors(dtype="bfloat16", wanted="bfloat16", shape=SOME):
    y = empty(shape, dtype).requires_grad_()
    found = errors.token_errors(y, empty(shape, wanted))
    return torch.autograd.grad(found, y, empty(shape[:-1], "float32"))


def dequantize(name, dtype="bfloat16", shape=SOME, axis=-1, packed=False):
    scheme = SCHEMES[name]
    codes = empty(packed_shape(shape, scheme.format) if packed else shape, "uint8")
    kept = scales_of(scheme, shape, axis)
    return quantizer.dequantize(
        Quantized(codes, kept.scale, kept.outer, kept.zero, shape, axis, scheme, packed), dtype
    )


def fake(name, dtype="bfloat16", shape=SOME, axis=-1):
    return quantizer.fake_quantize(empty(shape, dtype), SCHEMES[name], axis, None)


def gradient(name, dtype="bfloat16", shape=SOME, axis=-1, given=False):
    scheme, x = SCHEMES[name], empty(shape, dtype)
    return vjp.gradient(x, x, scheme, axis, None, scales_of(scheme, shape, axis) if given else None)


def noted(name, dtype="bfloat16", shape=SOME, axis=-1):
    return clipping.noted(empty(shape, dtype), SCHEMES[name], axis)


def clip(name, dtype="bfloat16", shape=SOME, axis=-1):
    x, scheme = empty(shape, dtype), SCHEMES[name]
    blocks = Blocks.of(shape, scheme.scale, axis).scale_shape
    return clipping.clip(x, x, empty(blocks, "uint8"), scheme, axis)


def mx_both(name="mxfp8_e4m3", dtype="bfloat16", tiled=False, **tuning):
    return both.mx_both(empty(BIG, dtype), constants_of(SCHEMES[name], dtype), tiled, **tuning)


def layouts(name, dtype="bfloat16", shape=BIG, rows=True, power=False):
    scheme = SCHEMES[name]
    if power:
        scale = replace(scheme.scale, rule="ratio_pow2")
        scheme = replace(scheme, name=f"{name} in powers of two", scale=scale)
    call = layouts_host.fused_both if rows else layouts_host.columns_only
    return call(empty(shape, dtype), scheme, *((None, False) if rows else (False,)))


def batches(name, dtype="bfloat16", shape=(8, 14336, 4096)):
    """The columns of each matrix of a batch."""
    return layouts_host.batch_columns(empty(shape, dtype), SCHEMES[name])


def both_axes(name, dtype="bfloat16", shape=BIG, codes=False):
    """Values along rows; values or codes along columns."""
    call = values_host.values_and_codes if codes else values_host.both_values
    return call(empty(shape, dtype), SCHEMES[name])


def given_both(one, name="fp8_tensorwise", dtype="bfloat16"):
    scale, other = empty((), "float32"), empty((), "float32")
    scales = (scale, scale if one else other)
    return both.given_both(empty(BIG, dtype), constants_of(SCHEMES[name], dtype), scales)


def norm(scheme=None, dtype="bfloat16", shape=(4096, 4096), residual=True, packed=False):
    x = empty(shape, dtype)
    if scheme is None:
        return normalize.rms_norm(x, x[0], 1e-5, x if residual else None)
    return normalize.rms_norm_quantize(x, x[0], scheme, 1e-5, x if residual else None, packed)


def gate(scheme=None, dtype="bfloat16", shape=(4096, 4096), packed=False):
    x = empty(shape, dtype)
    return swiglu.swiglu(x, x) if scheme is None else swiglu.swiglu_quantize(x, x, scheme, packed)


def encode(fmt, dtype="bfloat16", rounding="nearest_even", shape=SOME):
    words = empty(shape, "uint32") if rounding == "stochastic" else None
    return pointwise.encode(empty(shape, dtype), fmt, rounding, "saturate", words)


def decode(fmt, codes="uint8", shape=SOME):
    return pointwise.decode(empty(shape, codes), fmt)


def pack(fmt, shape=SOME):
    return pointwise.pack(empty(shape, "uint8"), fmt)


def unpack(fmt, shape=SOME):
    return pointwise.unpack(empty(packed_shape(shape, FORMATS[fmt]), "uint8"), fmt, shape)


def gathered(dtype="bfloat16", shape=BIG, filled=16512):
    """Rows sorted by expert as columns, groups filled up."""
    return host.gather_transposed(empty(shape, dtype), empty((filled,), "int32"))


def arranged(experts=8, step=16, places=16512):
    """Tables of rows sorted by expert."""
    return grouped_layout.group_layout(empty((experts,), "int32"), places, places, step)


def grouped(name, dtype="bfloat16", shape=BIG, step=16, experts=8):
    """Rows sorted by expert as codes of columns."""
    places = padded_rows(shape[0], experts, step)
    tables = empty((places,), "int32"), empty((places // 16,), "int32")
    return groups_host.group_columns(empty(shape, dtype), SCHEMES[name], *tables, experts, step)


def zeroed(which, dtype="bfloat16", shape=BIG):
    """Zeros where grouped products write nothing."""
    y = empty(shape, dtype)
    getattr(host, which)(y, empty((8,), "int32"))
    return y


def mixing(name=None, length=32, axis=0, dtype="bfloat16", shape=BIG, values=True):
    """Blocks mixed, and quantized by words drawn in place."""
    scheme = None
    if name is not None:
        scheme = replace(SCHEMES[name], name=f"{name}_stochastic", rounding="stochastic")
    rule, x = hadamard.Rule(scheme, length, axis), empty(shape, dtype)
    assert hadamard.covers(x, rule)
    if scheme is None:
        return hadamard.mixed(x, rule)
    return (hadamard.quantized_values if values else hadamard.quantized)(x, rule, 2**62 + 5, 4)


def words(shape=BIG):
    """Random words."""
    return random_words.random_words(shape, 2**62 + 5, 4, torch.device("cpu"))


def weight(name, shape):
    """A stored weight, small codes packed."""
    scheme = named(name)
    codes = empty(packed_shape(shape, scheme.format), "uint8")
    kept = scales_of(scheme, shape, 1)
    return Quantized(codes, kept.scale, kept.outer, kept.zero, shape, 1, scheme, scheme.format.bits < 8)


def linear(name, rows=1, dtype="bfloat16", shape=(4096, 4096), bias=False):
    added = empty(shape[:1], dtype) if bias else None
    return family_times.linear(empty((rows, shape[1]), dtype), weight(name, shape), added)


def pair(name, dtype="bfloat16", shape=(4096, 4096)):
    """One row times two weights."""
    return products.linear_pair(empty((1, shape[1]), dtype), weight(name, shape), weight(name, shape))


def gated(name, dtype="bfloat16", shape=(4096, 4096)):
    """silu of one product of one row times another."""
    return products.linear_swiglu(empty((1, shape[1]), dtype), weight(name, shape), weight(name, shape))


def codes(inputs, weight, rows=1, dtype="bfloat16", shape=(4096, 4096), bias=False, fast_sums=False):
    """Rows of codes times a weight of codes."""
    x, w = (
        Quantized(empty(size, "uint8"), kept.scale, kept.outer, kept.zero, size, 1, scheme)
        for size, scheme in (((rows, shape[1]), named(inputs)), (shape, named(weight)))
        for kept in (scales_of(scheme, size, 1),)
    )
    added = empty(shape[:1], dtype) if bias else None
    if rows > 1:
        return code_rows.linear_of_codes(x, w, added, getattr(torch, dtype), None, fast_sums)
    return products.linear_of_codes(x, w, added, getattr(torch, dtype), None)


@dataclass(frozen=True)
class Case:
    """A call, and the kernels that it launches, in order."""

    call: partial
    kernels: tuple[str, ...] = ("blocks_kernel",)

    @property
    def name(self):
        parts = [*self.call.args, *(f"{key}={value}" for key, value in self.call.keywords.items())]
        return " ".join([self.call.func.__name__, *map(str, parts)])


def case(function, *args, kernels=("blocks_kernel",), **options):
    return Case(partial(function, *args, **options), kernels)


# How much each kernel at the memory limit moves at a time, and how many instructions it may have for that.

TWICE = ("blocks_kernel", "blocks_kernel")
THRICE = (*TWICE, "blocks_kernel")
GROUPS = ("group_maxima_kernel", "group_columns_kernel")
LEARNED = ("moved_kernel", "gradient_kernel", "gradient_kernel", "keep_better_kernel", "sign_step_kernel")


@dataclass(frozen=True)
class Moves:
    """What a kernel at the memory limit does for an element.

    reads, writes: bytes, moved `load` and `store` bytes at a time. most: instructions. few: how many narrower loads or stores
    there may be, for scales, zero points and sums.
    """

    reads: float
    writes: float
    most: float
    load: int = 16
    store: int = 16
    few: int = 8


# What is not moved 16 bytes at a time:
# * Scales, zero points and sums, of which a thread has a few.
# * Blocks of 16 packed 4-bit codes (nvfp4) have 8 bytes, and a thread holds whole blocks that are no neighbours.
# * Of the codes in both layouts, those of rows leave 8 at a time, as lanes have them: 8 stores of 64 elements.
# * 6-bit codes leave as two words of the six of a block, and are read as three words of 4 bytes for 16 codes.
# * Words of 32 integer codes leave one by one where their number is odd, two where it is even, filled up to a power of two
#   that lanes without a word do not store; they are read one by one.
# * Packed codes that are made of codes, or become codes, are 4 or 8 bytes of every 16, and codes are 4 of 16 bytes of float32.
# Limits are the instructions of the code as it is, by Triton 3.6 or 3.7, whichever has more, and a tenth more.
HOT = (
    (case(gathered, kernels=("gather_transposed_kernel",)), (Moves(2, 2, 6.4),)),
    (case(quantize, "fp8_rowwise", shape=BIG), (Moves(2, 1, 7.2),)),
    (
        case(static_scales, "int8_tensorwise", shape=BIG, kernels=("static_scales_kernel",)),
        (Moves(2, 1, 19.3),),
    ),
    (case(quantize, "fp8_1x128", shape=BIG), (Moves(2, 1, 8.5),)),
    (case(quantize, "fp8_128x128", shape=BIG), (Moves(2, 1, 9.6),)),
    (case(quantize, "fp8_tensorwise", shape=BIG, kernels=TWICE), (Moves(2, 0, 4.8), Moves(2, 1, 5.2))),
    (case(quantize, "mxfp8_e4m3", shape=BIG), (Moves(2, 1, 6.9),)),
    (case(quantize, "mxfp8_e4m3_rceil", shape=BIG), (Moves(2, 1, 6.9),)),
    (case(quantize, "int8_rowwise", shape=BIG), (Moves(2, 1, 9.7),)),
    (case(quantize, "int4_g32", shape=BIG, packed=True), (Moves(2, 0.5, 8.2),)),
    (case(quantize, "int2_g128", shape=BIG, packed=True), (Moves(2, 0.25, 10.3, store=8),)),
    (case(quantize, "stretched2_g32", shape=BIG, packed=True), (Moves(2, 0.25, 13.0, store=8),)),
    (case(quantize, "int3_g128", shape=BIG, packed=True), (Moves(2, 0.375, 11.5, store=4),)),
    (case(quantize, "int4_g128", shape=BIG, packed=True), (Moves(2, 0.5, 8),)),
    (case(quantize, "int5_g128", shape=BIG, packed=True), (Moves(2, 0.625, 10.5, store=4),)),
    (case(quantize, "int6_g128", shape=BIG, packed=True), (Moves(2, 0.75, 9.9, store=8),)),
    (case(quantize, "mxfp4", shape=BIG), (Moves(2, 1, 13.7),)),
    (case(quantize, "int8_rowwise_asymmetric", shape=BIG), (Moves(2, 1, 12.3),)),
    (case(quantize, "int8_rowwise_asymmetric", shape=(4096, 14336)), (Moves(2, 1, 11.3),)),
    (case(quantize, "int4_g128_asymmetric", shape=BIG, packed=True), (Moves(2, 0.5, 10.6),)),
    (case(quantize, "int4_g32_asymmetric", "float16", BIG, packed=True), (Moves(2, 0.5, 10.5),)),
    (case(quantize, "int4_g128_asymmetric", shape=BIG), (Moves(2, 1, 14.3),)),
    (case(quantize, "mxfp4", shape=BIG, packed=True), (Moves(2, 0.5, 12.8),)),
    (
        case(quantize, "nvfp4", shape=BIG, packed=True, kernels=TWICE),
        (Moves(2, 0, 9.1), Moves(2, 0.5, 20.4, store=8)),
    ),
    # Two paths, of which one runs; blocks side by side, whose words leave one by one, 16 lanes beside each other.
    (
        case(quantize, "te.nvfp4_16x16", shape=BIG, packed=True, kernels=TWICE),
        (Moves(2, 0, 4.8), Moves(2, 0.5, 42.9, store=4, few=12)),
    ),
    (case(quantize, "mxfp6_e2m3", shape=BIG, packed=True), (Moves(2, 0.75, 8.6, store=8),)),
    # Random words are read as well.
    (case(quantize, "mxfp8_e4m3", shape=BIG, stochastic=True), (Moves(6, 1, 23.2),)),
    # Codes and scales; the mean of parts of the scales; codes of scales.
    (
        case(quantize, "nf4", shape=BIG, kernels=THRICE),
        (Moves(2, 1, 18.4), Moves(4, 0, 17.6), Moves(4, 1, 37.5)),
    ),
    (
        case(quantize, "nf4", shape=BIG, packed=True, kernels=THRICE),
        (Moves(2, 0.5, 21.1), Moves(4, 0, 17.6), Moves(4, 1, 37.5)),
    ),
    (case(dequantize, "nf4", shape=BIG), (Moves(1, 2, 12.5),)),
    (case(dequantize, "nf4", shape=BIG, packed=True), (Moves(0.5, 2, 12.2),)),
    (case(dequantize, "fp8_1x128", shape=BIG), (Moves(1, 2, 8.8),)),
    (case(dequantize, "mxfp8_e4m3", shape=BIG), (Moves(1, 2, 9.4),)),
    (case(dequantize, "int8_rowwise", shape=BIG), (Moves(1, 2, 8.5),)),
    (case(dequantize, "int4_g32", shape=BIG, packed=True), (Moves(0.5, 2, 9.3),)),
    (case(dequantize, "int2_g128", shape=BIG, packed=True), (Moves(0.25, 2, 9.0, load=4, few=12),)),
    (case(dequantize, "int3_g128", shape=BIG, packed=True), (Moves(0.375, 2, 9.7, load=4, few=18),)),
    (case(dequantize, "int5_g128", shape=BIG, packed=True), (Moves(0.625, 2, 9.6, load=4, few=14),)),
    (case(dequantize, "int6_g128", shape=BIG, packed=True), (Moves(0.75, 2, 10, load=4, few=12),)),
    (case(dequantize, "mxfp4", shape=BIG, packed=True), (Moves(0.5, 2, 11.1),)),
    (case(dequantize, "nvfp4", shape=BIG, packed=True), (Moves(0.5, 2, 12.1, load=8),)),
    (case(dequantize, "mxfp6_e2m3", shape=BIG, packed=True), (Moves(0.75, 2, 12.8, load=4),)),
    (case(fake, "mxfp8_e4m3", shape=BIG), (Moves(2, 2, 13.8),)),
    (case(fake, "int8_rowwise", shape=BIG), (Moves(2, 2, 12.2),)),
    (case(fake, "stretched2_rowwise", shape=BIG), (Moves(2, 2, 18.9),)),
    (case(fake, "stretched2_g32", shape=BIG), (Moves(2, 2, 21.7),)),
    (case(mx_both, dtype="float32", tiled=True, kernels=("mx_both_kernel",)), (Moves(4, 2, 17.9),)),
    (
        case(mx_both, kernels=("mx_pairs_kernel", "untile_kernel")),
        (Moves(2, 1, 12.9, few=12), Moves(1, 1, 8.4, load=4)),
    ),
    (
        case(layouts, "fp8_rowwise", power=True, kernels=("maxima_kernel", "pairs_kernel")),
        (Moves(2, 0, 9.0), Moves(2, 1, 11.0, few=14)),
    ),
    (
        case(layouts, "fp8_tensorwise", kernels=("blocks_kernel", "pairs_kernel")),
        (Moves(2, 0, 4.8), Moves(2, 1, 7.5, few=14)),
    ),
    (case(layouts, "fp8_1x128", kernels=("pairs_kernel",)), (Moves(2, 1, 16.5, few=14),)),
    (case(layouts, "fp8_128x128", kernels=("pairs_kernel",)), (Moves(2, 1, 9.6, few=14),)),
    # Columns of a batch of matrices.
    (
        case(batches, "fp8_rowwise", kernels=("maxima_kernel", "pairs_kernel")),
        (Moves(2, 0, 9.0), Moves(2, 1, 9.1, few=14)),
    ),
    (case(batches, "mxfp8_e4m3_rceil", kernels=("mx_pairs_kernel",)), (Moves(2, 1, 12.9, few=12),)),
    # Columns of rows sorted by expert: maxima leave at two places, of which one runs for nearly all rows.
    (case(grouped, "fp8_rowwise", kernels=GROUPS), (Moves(2, 0, 11.6), Moves(2, 1, 10.5, few=14))),
    (case(grouped, "fp8_tensorwise", kernels=GROUPS), (Moves(2, 0, 10.9), Moves(2, 1, 9.9, few=14))),
    (case(grouped, "fp8_1x128", step=128, kernels=GROUPS[1:]), (Moves(2, 1, 11.9, few=14),)),
    (case(grouped, "mxfp8_e4m3_rceil", step=32, kernels=GROUPS[1:]), (Moves(2, 1, 10.5, few=14),)),
    (case(given_both, True, kernels=("given_both_kernel",)), (Moves(2, 2, 12.9),)),
    # Along the first axis: 8 columns a thread, so 8 codes at a time; 16 where an earlier pass left the scales.
    (case(quantize, "mxfp8_e4m3", shape=BIG, axis=0), (Moves(2, 1, 8.4, store=8),)),
    (case(quantize, "mxfp8_e4m3", "float32", BIG, axis=0), (Moves(4, 1, 7.9, store=8),)),
    (case(quantize, "mxfp8_e4m3", shape=(640, 200), axis=0), (Moves(2, 1, 9.5, store=8),)),
    (case(quantize, "int4_g32", shape=BIG, axis=0), (Moves(2, 1, 13, store=8),)),
    (case(quantize, "int8_g64", shape=BIG, axis=0), (Moves(2, 1, 10.3, store=8),)),
    (case(quantize, "fp8_1x128", shape=BIG, axis=0), (Moves(2, 1, 7.9, store=8),)),
    (case(quantize, "fp8_rowwise", shape=BIG, axis=0, kernels=TWICE), (Moves(2, 0, 4.6), Moves(2, 1, 5))),
    (case(quantize, "int8_rowwise", shape=BIG, axis=0, kernels=TWICE), (Moves(2, 0, 4.6), Moves(2, 1, 9.1))),
    (case(dequantize, "mxfp8_e4m3", shape=BIG, axis=0), (Moves(1, 2, 7.8, load=8),)),
    (case(fake, "mxfp8_e4m3", shape=BIG, axis=0), (Moves(2, 2, 13.9),)),
    # Both axes of one read; codes leave 8 at a time, as lanes have them.
    (case(both_axes, "mxfp8_e4m3_rceil", kernels=("values_kernel",)), (Moves(2, 4, 15.8),)),
    (case(both_axes, "mxfp4", kernels=("values_kernel",)), (Moves(2, 4, 16.7),)),
    (
        case(both_axes, "mxfp8_e4m3_rceil", codes=True, kernels=("values_kernel",)),
        (Moves(2, 2, 14.5, few=10),),
    ),
    (
        case(both_axes, "mxfp6_e2m3_rceil", codes=True, kernels=("values_kernel",)),
        (Moves(2, 2, 19.1, few=10),),
    ),
    # x, a residual and the weight; the new residual and the result.
    (case(norm, kernels=("norm_kernel",)), (Moves(6, 4, 18.6),)),
    (case(norm, "mxfp8_e4m3", kernels=("norm_kernel",)), (Moves(6, 3, 23.8),)),
    (case(gate, kernels=("swiglu_kernel",)), (Moves(4, 2, 22.3),)),
    (case(gate, "mxfp8_e4m3", kernels=("swiglu_kernel",)), (Moves(4, 1, 27.0),)),
    (case(gate, "fp8_rowwise", shape=(64, 12288), kernels=("swiglu_pieces_kernel",)), (Moves(4, 1, 26.3),)),
    # Elements on their own.
    (case(encode, "float8_e4m3fn", shape=BIG, kernels=("encode_kernel",)), (Moves(2, 1, 2.9, few=0),)),
    (case(encode, "float4_e2m1fn", shape=BIG, kernels=("encode_kernel",)), (Moves(2, 1, 12.3, few=0),)),
    (case(decode, "float8_e4m3fn", shape=BIG, kernels=("decode_kernel",)), (Moves(1, 4, 9, load=4, few=0),)),
    # Codes as words of eight.
    (
        case(pack, "float4_e2m1fn", BIG, kernels=("pack_octets_kernel",)),
        (Moves(1, 0.5, 3.1, store=8, few=0),),
    ),
    (
        case(unpack, "float4_e2m1fn", BIG, kernels=("unpack_octets_kernel",)),
        (Moves(0.5, 1, 3.1, load=8, few=0),),
    ),
    (case(pack, "int2", BIG, kernels=("pack_octets_kernel",)), (Moves(1, 0.25, 2.9, store=8, few=0),)),
    (case(unpack, "int2", BIG, kernels=("unpack_octets_kernel",)), (Moves(0.25, 1, 3.0, load=4, few=0),)),
    # Words of 32 codes, filled up as above.
    (
        case(pack, "float6_e2m3fn", BIG, kernels=("pack_groups_kernel",)),
        (Moves(1, 0.75, 4.1, store=8, few=2),),
    ),
    (case(pack, "int3", BIG, kernels=("pack_groups_kernel",)), (Moves(1, 0.375, 3.7, store=4, few=2),)),
    (case(pack, "int5", BIG, kernels=("pack_groups_kernel",)), (Moves(1, 0.625, 4.8, store=4, few=6),)),
    (
        case(unpack, "int5", BIG, kernels=("unpack_groups_kernel",)),
        (Moves(0.625, 1, 4.4, load=4, store=8, few=6),),
    ),
    (
        case(unpack, "float6_e2m3fn", BIG, kernels=("unpack_sixes_kernel",)),
        (Moves(0.75, 1, 3.7, load=4, few=0),),
    ),
    # V, weights, their gradients; the scale of each element is read by itself.
    (
        case(learned_rounding, "int4_g128", shape=BIG, kernels=LEARNED),
        (
            Moves(6, 4, 15.1, few=16),
            Moves(8, 4, 15.3, few=16),
            Moves(8, 4, 23.1, few=16),
            Moves(4, 4, 3.5),
            Moves(8, 4, 12.1),
        ),
    ),
    (
        case(token_errors, shape=BIG, kernels=("errors_kernel", "gradients_kernel")),
        (Moves(4, 0, 11.2), Moves(4, 2, 11.4)),
    ),
)
