"""How much each kernel at the memory limit moves at a time, and how many instructions it may have for that."""

from dataclasses import dataclass

from tests.fast.kernels.compiling.kernel_calls import (
    BIG,
    batches,
    both_axes,
    case,
    decode,
    dequantize,
    encode,
    fake,
    gate,
    gathered,
    given_both,
    grouped,
    layouts,
    mx_both,
    norm,
    pack,
    quantize,
    static_scales,
    unpack,
)

TWICE = ("blocks_kernel", "blocks_kernel")
THRICE = (*TWICE, "blocks_kernel")
GROUPS = ("group_maxima_kernel", "group_columns_kernel")


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
)
