"""Every kernel of `fast` compiles for Hopper without a GPU, keeps its numbers in registers, and moves them 16 bytes at a time.

`COMPILED` has a case for every branch of the kernels, `HOT` the ones whose speed counts, at the shapes that are measured. What
a GPU would find, wrong bits, is no matter of these tests: `test_kernels_interpreter` and `tests/gpu` compare those.

No case may have local memory or a stack, but those of `SPILLS_LATER` under Triton 3.7. Some call a subroutine, the slow
path of a correctly rounded division or root; it works in registers too. Triton is required here: `make test` installs it.
"""

import ast
import platform
import re
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

import triton

import fast
from fast.kernels.quantize import host as quantizer
from fast.kernels.scheme.constants import constants_of
from reference import SCHEMES
from tests.fast.kernels.compiling.kernel_calls import (
    BIG,
    GROUPS,
    HOT,
    KERNELS,
    LEARNED,
    THRICE,
    TWICE,
    arranged,
    batches,
    both_axes,
    case,
    clip,
    decode,
    dequantize,
    encode,
    fake,
    gate,
    gathered,
    given_both,
    gradient,
    grouped,
    layouts,
    learned_rounding,
    mixing,
    mx_both,
    norm,
    noted,
    pack,
    quantize,
    static_scales,
    token_errors,
    unpack,
    words,
    zero_points,
    zeroed,
)
from tests.fast.kernels.compiling.kernel_compiler import launched, launched_together
from tests.fast.kernels.compiling.kernel_samples import by_day, features_of, in_parts, kinds_of_call
from tests.fast.linear.test_linear_compile import PRODUCTS

PARTS = ("slopes_kernel", "part_sums_kernel")
COMPILED = (
    # Tokens sorted by expert.
    case(gathered, "float32", kernels=("gather_transposed_kernel",)),
    case(gathered, "float16", (90, 40), 100, kernels=("gather_transposed_kernel",)),
    *(case(arranged, experts, kernels=("layout_kernel",)) for experts in (1, 64, 512)),
    case(grouped, "fp8_tensorwise_e5m2", "float16", (90, 64), 32, kernels=GROUPS),
    case(grouped, "fp8_rowwise", "float16", step=128, kernels=GROUPS),
    case(grouped, "mxfp4_rceil", step=32, kernels=GROUPS[1:]),
    case(grouped, "mxfp6_e2m3", "float16", step=64, kernels=GROUPS[1:]),
    case(words, kernels=("random_words_kernel",)),
    case(zero_points, kernels=("hqq_kernel",)),
    case(zero_points, "float32", 32, "float32", 1.0, kernels=("hqq_kernel",)),
    case(zero_points, "float16", 256, "float16", kernels=("hqq_kernel",)),
    *(
        case(learned_rounding, *one, kernels=LEARNED)
        for one in (("mxfp4", "float32"), ("int8_rowwise", "float16"))
    ),
    case(token_errors, "float32", "float16", (64, 96), kernels=("errors_kernel", "gradients_kernel")),
    case(mixing, length=4, kernels=("columns_kernel",)),
    case(mixing, axis=1, kernels=("rows_kernel",)),
    case(mixing, "nvfp4", 0, 1, kernels=("rows_kernel", "rows_kernel")),
    case(zeroed, "zero_tail_", kernels=("zero_tail_kernel",)),
    case(zeroed, "zero_empty_", shape=(8, 1024, 512), kernels=("zero_empty_kernel",)),
    # 8-bit floats: whole rows, long rows in two passes, columns, groups, rectangles, the whole tensor.
    case(quantize, "fp8_rowwise", "float32"),
    case(quantize, "fp8_rowwise_e5m2", "float16", (4, 32768), kernels=TWICE),
    case(quantize, "fp8_rowwise", shape=(1000, 96), axis=0, kernels=TWICE),
    case(quantize, "fp8_1x128", "float32", (200, 48), axis=0),
    case(quantize, "int4_g32_asymmetric", shape=(64, 45), axis=0),
    case(quantize, "int8_rowwise_asymmetric", "float16", BIG, axis=0, kernels=TWICE),
    case(quantize, "fp8_1x128", "float16", (3, 200)),
    case(quantize, "fp8_128x128_e5m2", shape=(300, 200)),
    case(quantize, "fp8_tensorwise", "float32", given="all"),
    case(quantize, "torchao.fp8_rowwise_training_pow2"),
    case(quantize, "torchao.fp8_tensorwise_inference", shape=BIG, kernels=TWICE),
    case(quantize, "torchao.fp8_tensorwise_inference", shape=(2, 14336)),
    case(quantize, "int8_tensorwise", "float16", (8, 4096)),
    case(quantize, "fp8_tensorwise", shape=(9, 4096), kernels=TWICE),
    # Powers of two: every element, every rule.
    case(quantize, "mxfp8_e5m2_rceil", "float16"),
    case(quantize, "mxfp6_e2m3", "float32", (64, 48), axis=0),
    case(quantize, "mxfp6_e3m2", packed=True),
    case(quantize, "mxfp6_e2m3_rceil", "float16", given="all", packed=True),
    case(quantize, "mxfp4", shape=(64, 48), axis=0),
    case(quantize, "mxfp4_rceil", "float32", packed=True),
    case(quantize, "mxfp4", stochastic=True),
    case(quantize, "mxfp6_e2m3", "float32", stochastic=True, packed=True),
    case(quantize, "mxfp8_e5m2_rceil", "float16", (96, 48), axis=0, stochastic=True),
    case(quantize, "mxint8", "float16"),
    case(quantize, "torchao.mxfp8_e4m3_rceil"),
    case(quantize, "torchao.mxfp4_even", "float32", packed=True),
    # Scales under an outer scale.
    case(quantize, "nvfp4", "float32", kernels=TWICE),
    case(quantize, "nvfp4", "float16", given="outer", packed=True),
    case(quantize, "nvfp4", given="all"),
    case(quantize, "torchao.nvfp4", given="outer"),
    case(quantize, "te.nvfp4_16x16", kernels=TWICE),
    case(quantize, "compressed_tensors.nvfp4", "float16", packed=True, kernels=TWICE),
    case(quantize, "nf4", kernels=TWICE),
    case(quantize, "nf4", "float32", (3, 43691), kernels=THRICE),
    case(quantize, "nf4", "float16", (3, 128), packed=True, kernels=TWICE),
    case(quantize, "nf4", shape=(3, 41), given="all"),
    case(quantize, "torchao.nf4", shape=(64, 256), kernels=TWICE),
    # Tiled scales.
    case(quantize, "mxfp8_e4m3", tiled=True),
    case(quantize, "mxfp4", "float32", (96, 96), packed=True, tiled=True),
    case(quantize, "nvfp4", shape=(130, 256), packed=True, tiled=True, kernels=TWICE),
    # Integers: symmetric and with zero points, every way to pack.
    case(quantize, "int8_rowwise_asymmetric", "float16", (4, 32768), kernels=TWICE),
    case(quantize, "int4_g32_asymmetric", packed=True),
    case(quantize, "int2_g64_asymmetric", "float32", packed=True),
    case(quantize, "int3_g32", packed=True),
    case(quantize, "int5_g256_asymmetric", "float32", packed=True),
    case(quantize, "int6_g32", "float16", packed=True),
    case(quantize, "int3_g32", shape=(3, 96), packed=True),
    case(quantize, "int5_g64", given="all", packed=True),
    case(quantize, "ternary_rowwise", shape=(64, 256)),
    case(quantize, "ternary_g32", packed=True),
    case(quantize, "stretched2_rowwise", shape=(64, 256), packed=True),
    case(quantize, "stretched2_g32", "float32", packed=True),
    case(quantize, "int8_rowwise", "float32", stochastic=True),
    case(quantize, "torchao.int4_g32_tinygemm", "float16"),
    case(quantize, "torchao.int8_rowwise_no_clipping"),
    case(quantize, "torchao.intx4_g32", packed=True),
    case(quantize, "torchao.intx8_rowwise_asymmetric"),
    case(quantize, "compressed_tensors.int4_g128", packed=True),
    # Under given scales, with scales of rows: rows that fill no tile, rows in parts.
    case(static_scales, "int8_tensorwise", "float32", (33, 77), kernels=("static_scales_kernel",)),
    case(static_scales, "torchao.int8_tensorwise_asymmetric", "float16", (2, 17008), kernels=("static_scales_kernel",)),
    # Back, in every dtype.
    case(dequantize, "fp8_rowwise_e5m2", "float16"),
    case(dequantize, "fp8_1x128", "float32", (200, 48), axis=0),
    case(dequantize, "mxfp6_e3m2", "float16", packed=True),
    case(dequantize, "torchao.mxfp8_e4m3_rceil", "float16"),
    case(dequantize, "torchao.nvfp4", "float32", packed=True),
    case(dequantize, "mxint8", "float32"),
    case(dequantize, "int4_g32_asymmetric", "float16", packed=True),
    case(dequantize, "int2_g32", packed=True),
    case(dequantize, "int3_g32", "float32", packed=True),
    case(dequantize, "int6_g128_asymmetric", "float16", (3, 128), packed=True),
    case(dequantize, "torchao.int5_g32", packed=True),
    case(dequantize, "torchao.int4_g32_tinygemm", packed=True),
    case(dequantize, "ternary_g32", packed=True),
    case(dequantize, "stretched2_g32", packed=True),
    case(dequantize, "nf4", "float32", (3, 41)),
    case(dequantize, "nf4", "float16", (3, 128), packed=True),
    case(dequantize, "torchao.nf4", shape=(64, 256), packed=True),
    # Training.
    *(
        case(function, name, dtype, shape, axis)
        for function in (noted, clip)
        for name, dtype, shape, axis in (
            ("int8_rowwise_asymmetric", "bfloat16", (64, 14336), -1),
            ("int4_g128_asymmetric", "float16", (64, 512), -1),
            ("int4_g32_asymmetric", "float32", (64, 512), -1),
            ("int4_g32_asymmetric", "bfloat16", (64, 48), 0),
        )
    ),
    case(fake, "mxfp6_e2m3", "float16"),
    case(fake, "int4_g32_asymmetric", "float32"),
    case(fake, "torchao.int4_g32_tinygemm"),
    case(fake, "ternary_g32"),
    case(fake, "stretched2_g32"),
    case(fake, "nf4", "float16", kernels=THRICE),
    case(gradient, "mxfp8_e4m3"),
    case(gradient, "nvfp4", "float32", kernels=TWICE),
    case(gradient, "torchao.int4_g32_tinygemm", "float16"),
    case(gradient, "nf4"),
    case(gradient, "stretched2_g32", given=True, kernels=("slopes_kernel",)),
    # Gradients of given scales: whole blocks, parts of large ones, columns, rectangles, every rule of scales.
    case(gradient, "mxfp8_e4m3", given=True, kernels=("slopes_kernel",)),
    case(gradient, "fp8_rowwise", "float16", (16, 16384), given=True, kernels=PARTS),
    case(gradient, "int8_rowwise_asymmetric", "float32", (7, 1000), given=True, kernels=("slopes_kernel",)),
    case(gradient, "int2_g256_asymmetric", "float32", (1024, 48), 0, given=True, kernels=("slopes_kernel",)),
    case(gradient, "fp8_128x128", "float32", (300, 200), 0, given=True, kernels=PARTS),
    case(gradient, "nvfp4", "float32", given=True, kernels=("slopes_kernel",)),
    case(gradient, "torchao.int4_g32_tinygemm", given=True, kernels=("slopes_kernel",)),
    case(gradient, "torchao.nf4", "float16", (64, 256), given=True, kernels=("slopes_kernel",)),
    case(given_both, False, dtype="float16", kernels=("given_both_kernel",)),
    # Both layouts by tiles: those that a matrix does not fill, float32, each kind of block.
    case(layouts, "fp8_rowwise", "float32", (300, 200), kernels=("maxima_kernel", "tiles_kernel")),
    case(layouts, "fp8_tensorwise_e5m2", "float16", (129, 66), kernels=("blocks_kernel", "tiles_kernel")),
    case(layouts, "fp8_1x128", shape=(160, 272), kernels=("tiles_kernel",)),
    case(layouts, "fp8_128x128_e5m2", "float32", rows=False, kernels=("tiles_kernel",)),
    case(layouts, "mxfp6_e2m3", "float32", kernels=("tiles_kernel",)),
    case(layouts, "mxfp4", rows=False, kernels=("mx_pairs_kernel",)),
    case(layouts, "fp8_1x128_e5m2", "float16", rows=False, kernels=("pairs_kernel",)),
    case(mx_both, "mxfp6_e3m2_rceil", "float16", tiled=True, kernels=("mx_pairs_kernel",)),
    case(mx_both, "mxfp8_e5m2_rceil", "float32", kernels=("mx_both_kernel", "untile_kernel")),
    case(mx_both, "mxfp8_e4m3", "float32", tiled=True, kernels=("mx_both_kernel",)),
    case(mx_both, "mxfp8_e5m2_rceil", "float16", kernels=("mx_pairs_kernel", "untile_kernel")),
    # Columns of batches.
    case(batches, "fp8_tensorwise", kernels=("blocks_kernel", "pairs_kernel")),
    case(batches, "fp8_128x128", kernels=("pairs_kernel",)),
    case(batches, "fp8_rowwise", "float32", (3, 300, 200), kernels=("maxima_kernel", "tiles_kernel")),
    case(batches, "fp8_tensorwise", "float16", (3, 300, 200), kernels=("blocks_kernel", "tiles_kernel")),
    # Both axes of one read: by pairs, by float32, programs that are not filled.
    case(both_axes, "mxfp4_rceil", shape=(96, 160), codes=True, kernels=("values_kernel",)),
    case(both_axes, "mxfp8_e4m3", "float16", (96, 160), kernels=("values_kernel",)),
    case(both_axes, "mxfp6_e3m2", "float16", codes=True, kernels=("values_kernel",)),
    # Tiles that may be tried.
    *(
        case(mx_both, down=down, across=across, kernels=("mx_pairs_kernel", "untile_kernel"))
        for down, across in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 2))
    ),
    case(mx_both, down=8, registers=96, kernels=("mx_pairs_kernel", "untile_kernel")),
    case(mx_both, tiled=True, down=4, across=2, kernels=("mx_pairs_kernel",)),
    # Producers: long rows, rows that fill no tile, packed codes, zero points.
    case(norm, dtype="float16", shape=(64, 32768), residual=False, kernels=("sums_kernel", "norm_kernel")),
    case(norm, "int8_rowwise_asymmetric", "float32", (7, 1000), kernels=("norm_kernel",)),
    case(norm, "mxfp4", packed=True, kernels=("norm_kernel",)),
    # Rows in pieces.
    case(norm, "mxfp8_e4m3", shape=(64, 14336), kernels=("norm_pieces_kernel",)),
    case(norm, "int4_g32_asymmetric", "float32", (5, 1536), packed=True, kernels=("norm_pieces_kernel",)),
    case(norm, dtype="float16", shape=(5, 12288), kernels=("norm_pieces_kernel",)),
    case(norm, "fp8_rowwise", shape=(64, 14336), kernels=("norm_pieces_kernel",)),
    case(norm, "fp8_rowwise_e5m2", "float32", (64, 14336), kernels=("norm_pieces_kernel",)),
    case(norm, "fp8_rowwise", shape=(64, 12288), residual=False, kernels=("norm_pieces_kernel",)),
    case(gate, "int4_g32_asymmetric", "float16", (7, 96), packed=True, kernels=("swiglu_kernel",)),
    case(gate, "fp8_rowwise_e5m2", "float16", (7, 1536), kernels=("swiglu_pieces_kernel",)),
    # One element at a time.
    case(encode, "float8_e4m3fn", kernels=("encode_kernel",)),
    case(encode, "float4_e2m1fn", "float16", rounding="stochastic", kernels=("encode_kernel",)),
    case(encode, "nf4", "float32", kernels=("encode_kernel",)),
    case(decode, "float6_e3m2fn", kernels=("decode_kernel",)),
    case(decode, "bfloat16", "uint16", kernels=("decode_kernel",)),
    case(pack, "int7", shape=(3, 37), kernels=("pack_kernel",)),
    case(unpack, "int7", shape=(3, 37), kernels=("unpack_kernel",)),
    # Words, and codes after the last group.
    case(pack, "int4", shape=(3, 1001 * 2), kernels=("pack_octets_kernel", "pack_kernel")),
    case(unpack, "int2", shape=(1, 1001), kernels=("unpack_octets_kernel", "unpack_kernel")),
    case(pack, "float6_e3m2fn", shape=(3, 60), kernels=("pack_groups_kernel", "pack_kernel")),
    case(pack, "int7", shape=(3, 64), kernels=("pack_groups_kernel",)),
    case(unpack, "int7", shape=(3, 72), kernels=("unpack_groups_kernel", "unpack_kernel")),
    case(unpack, "float6_e3m2fn", shape=(3, 60), kernels=("unpack_sixes_kernel", "unpack_kernel")),
)  # fmt: skip


# Takes as long as a dozen others; the same kernels of fewer elements are among those.
LONG = (
    case(quantize, "torchao.nf4", "float16", (1024, 256), packed=True, kernels=THRICE),
    case(mixing, kernels=("columns_kernel",)),
    case(mixing, "mxfp4_rceil", kernels=("columns_kernel",)),
    case(mixing, "mxfp4_rceil", axis=1, kernels=("rows_kernel",)),
    case(mixing, "nvfp4", 16, values=False, kernels=("columns_kernel", "columns_kernel")),
)

# What Triton 3.7 compiles with some bytes of stack, and 3.6 without; docs/ARCHITECTURE.md lists them.
SPILLS_LATER = ("mx_both mxfp8_e5m2_rceil float16",)
# Bytes of stack that a limit of registers costs the general rules, for the sake of the sequence beside them (`block_launch`).
LIMITED = {"quantize torchao.nf4 shape=(64, 256)": 104}
# What is compiled by tests of their own: tests/experiments/decode/test_decode.py, test_layers.py, sparsity,
# sm90/test_metadata.py, sparse_linear and tests/fast/linear/preshuffled/test_linear_small.py.
ELSEWHERE = {"attention_kernel"}
# Attention of a cache: tests/fast/attention/test_attention.py.
ELSEWHERE |= {"append_kernel", "attend_kernel", "combine_kernel", "group_kernel"}
# Of prompts in 8 bits: tests/fast/attention/test_quantized.py.
ELSEWHERE |= {"heads_kernel", "mean_kernel", "prefill_kernel", "statistics_kernel"}
# tests/fast/kernels/test_block_norm.py, test_embedding_bag.py, test_layer_norm.py.
ELSEWHERE |= {"scaled_mm_block_norm_kernel", "embedding_bag_kernel", "layer_norm_kernel"}
# HSTU's: tests/fast/attention/test_pointwise.py.
ELSEWHERE |= {"pointwise_attention_kernel"}
ELSEWHERE |= {"arrange_kernel", "dense_kernel", "triton_sparse24_small_m_kernel"}
ELSEWHERE |= {"triton_small_m_kernel", "sum_splits_kernel", "restore_kernel", "triton_small_m_experts_kernel"}
# Optimizers: tests/fast/kernels/test_optim.py.
ELSEWHERE |= {"numbers_kernel", "step_kernel"}
# Searched scales: tests/fast/calibration/test_search.py.
ELSEWHERE |= {"candidates_kernel"}
# Those in front of them: tests/fast/linear/preshuffled/test_dynamic_inputs.py.
ELSEWHERE |= {"row_codes_kernel", "block_values_kernel"}
ELSEWHERE |= {"arranged_dense_kernel", "triton_small_m_pair_kernel", "sum_pair_splits_kernel"}
ELSEWHERE |= {
    "add_pieces_kernel",
    "column_sums_kernel",
    "norm_gradient_kernel",
    "rotary_kernel",
    "swiglu_gradient_kernel",
    "turned_bytes_kernel",
    "join_rows_kernel",
    "split_rows_kernel",
}
ELSEWHERE |= {
    "compress_kernel",
    "decompress_kernel",
    "groups_kernel",
    "keep_kernel",
    "mask_kernel",
    "masked_kernel",
    "quantize_compressed_kernel",
    "ranks_kernel",
    "transposable_kernel",
}


def stay_in_registers(machine, stack=0):
    """No spills, no arrays in local memory, no stack frame beyond what a limit of registers costs."""
    assert machine.local == 0
    assert machine.stack <= stack


def move_wide(machine, name, width, wanted, few):
    """All `wanted` bytes of an element in accesses of `width`, and few others, none wider."""
    found = machine.accesses(name)
    seen = f"{name}: {found} for {machine.elements} elements a thread"
    others = sum(found.values()) - wanted * machine.elements / width
    assert found.get(width, 0) * width >= wanted * machine.elements, seen
    assert others <= few, seen
    assert max(found, default=0) <= max(width, 8), seen


def with_marks(cases):
    """Cases as parameters; those that spill under a later Triton may fail there, and nowhere else."""
    later = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
    spills = pytest.mark.xfail(later, reason="Triton 3.7 spills", raises=AssertionError, strict=False)
    return by_day(cases, features_of, lambda one: one.name, lambda one: [spills] * (one.name in SPILLS_LATER))


@pytest.mark.parametrize(
    ("name", "stack"),
    [("fp8_rowwise", 8), ("int8_rowwise", 8), ("int8_rowwise_asymmetric", 0), ("stretched2_rowwise", 8)],
)
def test_rows_of_14336_are_rounded_by_three_programs_of_a_multiprocessor(name, stack):
    """80 registers of 256 threads three times, for a spill of two words; measured to be faster (see the log)."""
    x = torch.empty(64, 14336, dtype=torch.bfloat16)
    (machine,) = launched(lambda: quantizer.fake_quantize(x, SCHEMES[name], -1, None))
    assert 3 * 256 * machine.registers <= 65536
    assert machine.stack <= stack


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("compressed_tensors.int4_token", 16),
        ("compressed_tensors.fp8_token", 8),
        ("torchao.intx8_rowwise_asymmetric", 16),
        ("torchao.fp8_rowwise_inference", 64),
    ],
)
def test_rows_of_14336_of_other_projects_are_quantized_by_three_programs(name, stack):
    """The same of two paths, of which the general rules spill more."""
    (machine,) = launched(case(quantize, name, shape=(64, 14336)).call)
    assert 3 * 256 * machine.registers <= 65536
    assert machine.stack <= stack
    text = " ".join(machine.order)
    assert len(re.findall(r"STL|LDL", text[: text.index("EXIT")])) <= 3


@pytest.mark.parametrize("packed", [False, True])
def test_two_dimensional_blocks_side_by_side_stay_in_their_warp(packed):
    """Rows of all blocks are read together, and no element changes its lane before it is stored."""
    machine = launched(case(quantize, "te.nvfp4_16x16", shape=BIG, packed=packed).call)[-1]
    assert machine.named("BAR", "STS", "LDS", "STSM", "LDSM") == 0
    text = " ".join(machine.order)
    assert len(text[: text.index("EXIT")].split()) <= 17.5 * machine.elements


def test_pairs_under_corrected_quotients_leave_room_for_other_warps():
    """72 registers, which both paths spill 48 bytes for."""
    call = case(quantize, "compressed_tensors.nvfp4", shape=BIG, packed=True).call
    machine = launched(call)[-1]
    assert (machine.registers, machine.local) == (72, 0)
    assert machine.stack <= 48


@pytest.mark.parametrize(
    ("name", "length"), [("fp8_rowwise", 9001), ("torchao.int8_rowwise_no_clipping", 14336)]
)
def test_rows_that_would_spill_get_their_registers(name, length):
    """Masks of single numbers, and instructions that take more."""
    x = torch.empty(64, length, dtype=torch.bfloat16)
    (machine,) = launched(lambda: quantizer.fake_quantize(x, SCHEMES[name], -1, None))
    stay_in_registers(machine)


@pytest.mark.parametrize(
    "one",
    [*with_marks(COMPILED), *(pytest.param(one, id=one.name, marks=pytest.mark.nightly) for one in LONG)],
)
def test_compiles_and_stays_in_registers(one):
    machines = launched(one.call)
    assert tuple(machine.kernel for machine in machines) == one.kernels
    for machine in machines:
        stay_in_registers(machine, LIMITED.get(one.name, 0))


HOT_PARTS, HOT_CASES = in_parts(HOT, lambda each: each[0], kinds_of_call)


@lru_cache(maxsize=2)
def hot_machines(part, names):
    """Machines of those cases of a part that have these names, side by side, by name."""
    cases = [one for one, _ in HOT_PARTS[part] if one.name in names]
    made = launched_together([one.call for one in cases])
    return dict(zip((one.name for one in cases), made, strict=True))


def selected(request):
    """Names of the cases that this run has of a test, whichever process runs them."""
    items = (one for one in request.session.items if one.path == request.path)
    same = (one for one in items if one.originalname == request.node.originalname)
    return frozenset(one.callspec.params["case"][0].name for one in same)


@pytest.mark.parametrize(("part", "case"), HOT_CASES)
def test_hot_kernels_move_wide_and_stay_small(part, case, request):
    one, moves = case
    machines = hot_machines(part, selected(request))[one.name]
    assert tuple(machine.kernel for machine in machines) == one.kernels
    for machine, wanted in zip(machines, moves, strict=True):
        stay_in_registers(machine)
        assert machine.accesses("LDL") == machine.accesses("STL") == {}
        move_wide(machine, "LDG", wanted.load, wanted.reads, wanted.few)
        move_wide(machine, "STG", wanted.store, wanted.writes, wanted.few)
        assert machine.count() <= wanted.most * machine.elements


# Along the first axis each maximum is one warp's. Only scales change places, to be written side by side.
ONE_WARP = ("mxfp8_e4m3", "int4_g32", "fp8_rowwise")  # blocks of powers of two, of any scales, whole columns
ONE_WARP_BY_NIGHT = ("mxfp6_e2m3", "mxfp4", "int8_g64", "torchao.mxfp8_e4m3_rceil")


@lru_cache(maxsize=2)
def one_warp_machines(names):
    made = launched_together([case(quantize, name, shape=BIG, axis=0).call for name in names])
    return dict(zip(names, made, strict=True))


@pytest.mark.parametrize(
    ("name", "names"),
    [(name, ONE_WARP) for name in ONE_WARP]
    + [pytest.param(name, ONE_WARP_BY_NIGHT, marks=pytest.mark.nightly) for name in ONE_WARP_BY_NIGHT],
)
def test_maxima_over_rows_stay_in_their_warp(name, names):
    """No barrier, and next to nothing in shared memory; records with two branches ask once whether all blocks are ordinary."""
    asks = bool(constants_of(SCHEMES[name], "bfloat16").has_same)
    for machine in one_warp_machines(names)[name]:
        assert machine.named("BAR") <= 2 * asks
        assert machine.named("STS", "LDS", "STSM", "LDSM") <= 8
        assert machine.named("SHFL") <= machine.elements / 4


@pytest.mark.parametrize("codes", [False, True])
def test_both_axes_of_one_read_stay_in_their_warp(codes):
    """Three shuffles of eight elements, for both maxima, and two for scales; no barrier, nothing in shared memory."""
    (machine,) = launched(case(both_axes, "mxfp8_e4m3_rceil", codes=codes, kernels=("values_kernel",)).call)
    assert machine.named("BAR", "STS", "LDS", "STSM", "LDSM") == 0
    assert machine.named("SHFL") == 24 + 2 * codes


ALONE = ("int8_rowwise", "int8_rowwise_asymmetric", "fp8_rowwise", "fp8_tensorwise")


@lru_cache(maxsize=2)
def block_alone_machines(length):
    made = launched_together([case(quantize, name, shape=(1, length)).call for name in ALONE])
    return dict(zip(ALONE, made, strict=True))


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize(
    "length", [4096, *(pytest.param(one, marks=pytest.mark.nightly) for one in (8192, 14336, 16384))]
)
def test_a_block_alone_has_many_warps(name, length):
    """One row of inputs is one launch of one program, in which a thread has 16 elements; two rows have no more than others."""
    (machine,) = block_alone_machines(length)[name]
    assert machine.elements == 16
    assert (machine.local, machine.stack, machine.accesses("LDG")) == (0, 0, {16: 2})
    if not name.endswith("tensorwise"):
        (machine,) = launched(case(quantize, name, shape=(2, length)).call)
        assert machine.elements >= 32


def entries():
    """Kernels that are launched, by the way they are named."""
    nodes = [node for path in KERNELS.rglob("*.py") for node in ast.parse(path.read_text()).body]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    marks = ("triton.jit", "gluon.jit")
    compiled = [f for f in functions if any(ast.unparse(d).split("(")[0] in marks for d in f.decorator_list)]
    return {f.name for f in compiled if re.search(r"_kernel$", f.name)}


def test_every_kernel_is_among_the_cases():
    """A kernel that is added needs a case here, or among the products."""
    cases = (*COMPILED, *(one for one, _ in HOT), *PRODUCTS)
    assert entries() - ELSEWHERE == {name for one in cases for name in one.kernels}


@pytest.mark.parametrize(("name", "width"), [("mxfp4", 16), ("mxfp6_e2m3", None), ("nvfp4", 8)])
def test_views_at_an_odd_element_are_not_read_in_words(name, width):
    """Words have to lie at multiples of 4 bytes: a view that does not is copied, and the copy read as wide as any tensor.

    Of 6-bit codes a word at a time is read in any case, so that shows nothing.
    """
    x = torch.zeros(64 * 512 + 1, dtype=torch.bfloat16)[1:].view(64, 512)
    machine = launched(lambda: quantizer.quantize(x, name, -1, None, None, True))[-1]
    assert machine.accesses("LDG").get(16, 0) > 0
    codes = fast.quantize(x, name, packed=True)
    moved = torch.empty(codes.codes.numel() + 1, dtype=torch.uint8)[1:].view(codes.codes.shape)
    machine = launched(lambda: quantizer.dequantize(replace(codes, codes=moved), "float32"))[-1]
    assert width is None or machine.accesses("LDG").get(width, 0) > 0


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_four_bits_that_stay_bytes_are_read_in_words_as_well(name):
    """The same for codes that are not packed: `fp4` makes them from pairs too."""
    x = torch.zeros(64 * 512 + 1, dtype=torch.bfloat16)[1:].view(64, 512)
    machine = launched(lambda: quantizer.quantize(x, name, -1, None, None, False))[-1]
    assert machine.accesses("LDG").get(16, 0) > 0
