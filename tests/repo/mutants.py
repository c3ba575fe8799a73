"""Rules to break (`mutation.py` breaks them): of the specification, of the kernels' device functions, of the library.

Most tests named here compare with an oracle, and none was written for the line that is broken.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One broken rule: `old` stands once in the file, a path from the root. tests: pytest's arguments; nightly: whether only a
    nightly case among them sees it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    nightly: bool = False

    @property
    def arguments(self) -> str:
        """`tests`, with nightly cases where those are needed."""
        return f"{self.tests} -m ''" if self.nightly else self.tests


MXFP4 = "tests/reference/quantize/test_quantize.py -k mxfp4_equals"
INT8 = "tests/reference/quantize/test_quantize.py -k int8_asymmetric_equals"
ELEMENTS = "tests/reference/quantize/test_quantize.py"
ROUNDING = "tests/reference/formats/test_rounding.py"
SCALES = "tests/reference/quantize/test_scales.py"
SOFTFLOAT = "tests/reference/arrays/test_softfloat.py -k integer_rules"
STATISTICS = "tests/reference/quantize/test_scales.py"
BLOCKS = "tests/reference/quantize/test_blocks.py"
MX = "tests/reference/schemes/torchao/test_mx.py"
SPARSITY = "tests/reference/sparsity/test_"

# Kernels in CUDA C++, their PTX in the emulator.
TESTS = "tests/fast/kernels/"
SM90 = TESTS + "sm90/test_"
BITS = SM90 + "intn_small_m.py -k variants_give"
W4A16_GEMV = SM90 + "w4a16_gemv.py -k '(variants_give and stream) or scales_of'"
DIRECT = SM90 + "w4a16_gemv.py -k 'variants_give and direct'"
FACTORED = SM90 + "w4a16_gemv.py -k 'variants_give and elements'"
MIXED = SM90 + "w4a16_gemm.py -k 'elements_of and (int4 or split or slices)'"
ROW_SCALES = SM90 + "w4a16_gemm.py -k sums_are_multiplied"
FACTORS = SM90 + "w4a16_gemm.py -k every_element"
EXPERTS = SM90 + "w4a16_gemm_experts.py -k row_has_the_weight"
DENSE = SM90 + "s8_gemm.py -k bits_of"
SPARSE = SM90 + "sparse24_gemm.py -k bits_of"
SPARSE_W4A16_GEMV = SM90 + "sparse24_w4a16_gemv.py -k variants_give"
PAIR = SM90 + "sparse24_pair.py -k 'product_is or silu_of'"
GATES = SM90 + "sparse24_pair.py -k sixteen_bit"
# Kernels in Triton, in its interpreter.
INTERPRETER = TESTS + "test_interpreter.py -k "
FP8_AND_MX = INTERPRETER + "'kernels_agree and mx'"
INTEGERS = INTERPRETER + "'kernels_agree and integers'"
SCALES_OF_SCALES = INTERPRETER + "scales_of_scales"
GRADIENTS = INTERPRETER + "gradients"
PRODUCTS = INTERPRETER + "products"
GROUPED = INTERPRETER + "tokens_sorted"
HOT = TESTS + "test_interpreter.py -k 'hot_paths and fours'"
HOT_INTEGERS = TESTS + "test_interpreter.py -k 'hot_paths and integers'"
CODEBOOKS = TESTS + "test_interpreter.py -k 'hot_paths and codebooks'"
EDGES = TESTS + "test_interpreter.py -k records_at"
CONVENTIONS = TESTS + "test_interpreter.py -k conventions"
BOTH_AXES = TESTS + "test_interpreter.py -k both_axes"
STORAGE = TESTS + "test_sparse_kernels.py -k bits_are"
TRANSPOSABLE = TESTS + "test_transposable_kernels.py -k bits_are"
NORMALIZE = TESTS + "test_layers.py -k norm_bits_in"
SWIGLU = TESTS + "test_layers.py -k swiglu_bits_in"
CACHE_WRITES = "tests/fast/attention/test_attention.py -k 'interpreted and write-bfloat16'"
PREFILL = "tests/fast/attention/test_quantized.py -k interpreted"
ATTENTION_8_BITS = "tests/reference/attention/test_quantized.py"
CACHE_READS = "tests/fast/attention/test_attention.py -k 'interpreted and attend-value'"
SPARSE_LINEAR = TESTS + "triton_sparse24_small_m/test_mma_sparse.py"
STATIC_SCALES = "tests/fast/quantize/test_static_scales.py -k kernel_agrees"
SATURATION = "tests/fast/quantize/test_fake_quantize.py -k kernels_agree"
GEMV = "tests/fast/linear/test_triton_gemv.py"
SHARDS = "tests/ao_lab/checkpoint/test_io.py -k "
LOOPS = "tests/fast/cpu/loops/test_gemv.py -k number_of_the_table"
COLUMN_SUMS = TESTS + "test_layers.py -k in_the_interpreter"
SMALL = "tests/fast/linear/preshuffled/test_linear_small.py -k test_bits"
DYNAMIC = "tests/fast/linear/preshuffled/test_dynamic_inputs.py -k test_bits"

REFERENCE = [
    Mutation("attention in 8 bits divides by weights before they were rounded", "reference/attention/quantized.py",
             "    total = weights.sum(axis=-1, keepdims=True)\n    if chain",
             "    total = np.maximum(_weights(p, part)[0], 0).sum(axis=-1, keepdims=True)\n    if chain", ATTENTION_8_BITS),
    Mutation("hidden keys count in the mean", "reference/attention/quantized.py",
             "    hosts[1:] = _hidden(hosts[1:], seen)\n", "", ATTENTION_8_BITS),
    Mutation("ties to even go up", "reference/formats/encode.py",
             "- 1) + (floor & 1)) >> shift", "- 1) + 1) >> shift", ROUNDING),
    Mutation("to_odd forgets what was lost", "reference/formats/encode.py",
             "return floor | inexact", "return floor", ROUNDING),
    Mutation("up and down swapped", "reference/formats/encode.py",
             'if mode == "down"', 'if mode == "up"', ROUNDING),
    Mutation("stochastic takes the low random bits", "reference/formats/encode.py",
             '"int32") >> 8)', '"int32"))', ROUNDING),
    Mutation("ties go up in the short rule", "reference/formats/encode.py",
             "((magnitude >> drop) & 1)) >> drop", "1) >> drop", MXFP4),
    Mutation("saturation one code late", "reference/formats/encode.py",
             "return ns.minimum(code, fmt.max_code)", "return ns.minimum(code, fmt.max_code + 1)",
             "tests/reference/quantize/test_quantize.py -k static_scales"),
    Mutation("integers lose their lowest value", "reference/formats/encode.py",
             "ns.minimum(ns.maximum(integer, low), high)", "ns.minimum(ns.maximum(integer, low + 1), high)", INT8),
    Mutation("rceil too large at an exact ratio", "reference/quantize/scales.py",
             "fraction > target_fraction", "fraction >= target_fraction", SCALES),
    Mutation("ceil misses one ulp over a power of two", "reference/quantize/scales.py",
             "fraction > 0", "fraction > 1", SCALES),
    Mutation("even rounds at the wrong bit", "reference/quantize/scales.py",
             "22 - bits", "21 - bits", SCALES),
    Mutation("floor without the target's exponent", "reference/quantize/scales.py",
             "exponent - target_exponent", "exponent - target_exponent + 1", SCALES),
    Mutation("scales have no floor", "reference/quantize/scales.py",
             "return ns.maximum(bits, bits_of(floor_value(record.floor[1], dtype)))", "return bits", SCALES),
    Mutation("zero point by a reciprocal", "reference/quantize/scales.py",
             "steps = unit.divide(span.low, scale)", "steps = unit.multiply(span.low, unit.reciprocal(scale))", ELEMENTS),
    Mutation("block scale by an outer reciprocal", "reference/quantize/scales.py",
             "else wide.divide(bits, outer)", "else wide.multiply(bits, wide.reciprocal(outer))", ELEMENTS),
    Mutation("elements divided instead of multiplied", "reference/quantize/quantize.py",
             'if scheme.apply == "divide" else unit.multiply(x, factor)',
             'if scheme.apply == "divide" else unit.divide(x, unit.reciprocal(factor))', ELEMENTS),
    Mutation("two reciprocals instead of one", "reference/quantize/quantize.py",
             "bits = unit.reciprocal(unit.multiply(outer, scale))", "bits = unit.divide(unit.reciprocal(outer), scale)",
             ELEMENTS),
    Mutation("smallest MX scale applied as 2^-126", "reference/quantize/quantize.py",
             "exponent = ns.maximum(scale >> 23, 0) - E8M0_BIAS", "exponent = ns.maximum(scale >> 23, 1) - E8M0_BIAS",
             MXFP4),
    Mutation("quotients without a sticky bit", "reference/arrays/softfloat.py",
             "quotient | ns.where(remainder != 0, 1, 0)", "quotient", SOFTFLOAT),
    Mutation("sums without a sticky bit", "reference/arrays/softfloat.py",
             "(wide >> shift) | ns.where((wide & ((1 << shift) - 1)) != 0, 1, 0)", "wide >> shift", SOFTFLOAT),
    Mutation("products round ties up", "reference/arrays/softfloat.py",
             "(significand + (1 << (drop - 1)) - 1 + odd) >> drop", "(significand + (1 << (drop - 1))) >> drop", SOFTFLOAT),
    Mutation("short blocks filled with their first element", "reference/quantize/blocks.py",
             "(slice(-1, None),)", "(slice(0, 1),)", BLOCKS),
    Mutation("blocks run along the last axis only", "reference/quantize/blocks.py",
             "return ns.moveaxis(x, -1, self.axis).reshape(self.shape)", "return x.reshape(self.shape)", BLOCKS),
    Mutation("finite products overflow", "reference/quantize/quantize.py",
             "return ns.where(overflow, (product & SIGN) | LARGEST, product)", "return product",
             "tests/reference/schemes/test_default_schemes.py -k finite_input"),
    Mutation("infinity hides a NaN", "reference/quantize/scales.py",
             "nan = largest > INFINITY", "nan = largest >= INFINITY",
             "tests/reference/schemes/torchao/test_affine.py tests/reference/quantize/test_scales.py"),
    Mutation("means of subnormals round up", "reference/quantize/scales.py",
             "(values + ((values >> 1) & 1)) >> 1", "(values + 1) >> 1", STATISTICS),
    Mutation("the range may miss zero", "reference/quantize/scales.py",
             "ns.where(span.high < 0, 0, span.high)", "span.high", STATISTICS),
    Mutation("logarithms rounded as numbers are not", "reference/arrays/softfloat.py",
             "spacing / (4 if toward_zero and", "spacing / (2 if toward_zero and",
             MX + " tests/reference/schemes/torchao/test_affine.py"),
    Mutation("compress takes -0 for a weight", "reference/sparsity/compress.py",
             "(bits != 0) & (bits != negative)", "bits != 0", SPARSITY + "compress.py"),
    Mutation("RIA without its square root", "reference/sparsity/prune.py",
             "square_root(ns, norms) if exponent == 0.5 else norms", "norms", SPARSITY + "prune.py -k score"),
    Mutation("a zero weight on an infinite norm", "reference/sparsity/prune.py",
             "(score == 0) & ~is_nan(norms)", "score < 0", SPARSITY + "prune.py -k score"),
    Mutation("an infinity counts as a NaN in a tile", "reference/sparsity/transposable.py",
             "NAN_COUNT = 9", "NAN_COUNT = 1", SPARSITY + "transposable.py"),
    Mutation("rows of a tile added one by one", "reference/sparsity/transposable.py",
             "plus(plus(rows[0], rows[1]), plus(rows[2], rows[3]))", "plus(plus(plus(rows[0], rows[1]), rows[2]), rows[3])",
             SPARSITY + "transposable.py"),
    Mutation("no update behind a block", "reference/sparsity/sparsegpt.py",
             "errors @ upper[start:stop, stop:]", "0", SPARSITY + "sparsegpt.py"),
    Mutation("scores without the diagonal", "reference/sparsity/sparsegpt.py",
             "np.abs(wide[:, j : j + group]) / diagonal[j : j + group]", "np.abs(wide[:, j : j + group])",
             SPARSITY + "sparsegpt.py"),
    Mutation("damping of the largest element", "reference/sparsity/sparsegpt.py",
             "share * diagonal.mean()", "share * diagonal.max()", SPARSITY + "sparsegpt.py"),
    Mutation("an infinite square of a finite activation", "reference/sparsity/activation.py",
             "ns.minimum(product, LARGEST)", "product", SPARSITY + "prune.py -k equals_the_loop"),
    Mutation("SR-STE decays what is kept", "reference/sparsity/prune.py",
             "ns.where(mask, ns.bitcast(a, carrier), ns.bitcast(b, carrier))",
             "ns.where(mask, ns.bitcast(b, carrier), ns.bitcast(a, carrier))", SPARSITY + "prune.py -k formula"),
    Mutation("group 0000 reaches the hardware", "reference/sparsity/layouts.py",
             "ns.where(groups == 0, NOTHING_KEPT, groups), m, k // 4", "groups, m, k // 4", SPARSITY + "layouts.py"),
    Mutation("tiles of one width", "reference/sparsity/layouts.py",
             "64 * n * (r // 16 % 4)", "128 * (r // 16 % 4)", SPARSITY + "layouts.py"),
    Mutation("an empty block's code of zero is not compared", "reference/sparsity/compress.py",
             "scheme.zero is not None or codes[0] ==", "True or codes[0] ==", SPARSITY + "compress.py -k empty_block"),
    Mutation("a recipe's key without its accumulation", "reference/training/recipe.py",
             "repr((facts, sums))", "repr(facts)", "tests/reference/training/test_recipe.py -k accumulated"),
    Mutation("groups filled up to their blocks alone", "reference/training/grouped.py",
             "max(inner, record.hadamard, STEP)", "max(inner, record.hadamard)",
             "tests/reference/training/test_grouped.py -k sixteen"),
    Mutation("24 aligned bits of 16-bit operands", "reference/training/linear.py",
             '"frac_bits": 25', '"frac_bits": 24', "tests/reference/training/test_linear.py -k aligned"),
    Mutation("wide codes through the table of bytes", "reference/formats/encode.py",
             "bits <= 6 and fmt.bits <= 8", "bits <= 6", "tests/reference/formats/test_formats.py -k floats"),
    Mutation("masked arrays are read as others", "reference/arrays/namespace.py",
             "isinstance(x, np.ma.MaskedArray)", "False", "tests/reference/arrays/test_namespace.py -k 'masked and quantize'"),
]  # fmt: skip

KERNELS = [
    Mutation("codes behind the first place keep half their range", "fast/kernels/sm90_intn_small_m/decode.cuh",
             "float((1 << MANTISSA) >> PLACE) - float(turned)", "float((1 << MANTISSA) >> PLACE)", BITS),
    Mutation("the last two codes of three bytes are the first", "fast/kernels/sm90_intn_small_m/decode.cuh",
             "second = 0x5421u + bytes", "second = 0x4310u + bytes", BITS),
    Mutation("every program adds its own sums", "fast/kernels/sm90_intn_small_m/sm90_intn_small_m.cu",
             "load_sum(SPLITS > 1 ? address_in(address, s) : address)", "load_sum(address)", BITS),
    Mutation("scales of long groups begin anew", "fast/kernels/sm90_intn_small_m/load.cuh",
             "index / (GROUP / COLUMNS)", "index % (GROUP / COLUMNS)", BITS),
    Mutation("zero points are added", "fast/kernels/sm90_w4a16_gemv/decode.cuh",
             "-offset - float(int(zeros << 16) >> 16)", "-offset + float(int(zeros << 16) >> 16)", W4A16_GEMV),
    Mutation("rows of x are scaled after the bias", "fast/kernels/sm90_w4a16_gemv/sums.cuh",
             "v += bias_at(p.bias, p.bias_kind, row);",
             "v += bias_at(p.bias, p.bias_kind, row) * (p.x_scale == nullptr ? 1.f : p.x_scale[token]);", W4A16_GEMV),
    Mutation("every program has the first rows", "fast/kernels/sm90_w4a16_gemv/sm90_w4a16_gemv.cu",
             "at = place * SHARE + i % SHARE", "at = i % SHARE", W4A16_GEMV),
    Mutation("lanes read columns of half of x", "fast/kernels/sm90_w4a16_gemv/sm90_w4a16_gemv.cu",
             "* ring.pitch + at.lane / 8 * 16", "* ring.pitch + at.lane / 16 * 16", W4A16_GEMV),
    Mutation("the last atom of unlike phases", "fast/kernels/sm90_w4a16_gemv/direct.cu",
             "(p.k / 64 - phase + PHASES - 1) / PHASES", "(p.k / 64) / PHASES", DIRECT),
    Mutation("e4m3 without its sign", "fast/kernels/sm90_w4a16_gemv/decode.cuh",
             "logic<0xEA>(v, 0x80008000u, u)", "logic<0xEA>(v, 0x00008000u, u)", DIRECT),
    Mutation("second terms have the first ones' bytes", "fast/kernels/sm90_w4a16_gemv/levels.cuh",
             "second = chosen(2, codes, upper)", "second = chosen(1, codes, upper)", FACTORED),
    Mutation("blocks' exponents change places", "fast/kernels/sm90_w4a16_gemv/factors.cuh",
             "16 * row + i / 2 * 8", "16 * row + i % 2 * 8", FACTORED),
    Mutation("nibbles are not turned", "fast/kernels/sm90_w4a16_gemm/decode.cuh",
             "u32(150 - 4 * r) << 23 | 8u << 4 * r", "u32(150 - 4 * r) << 23", MIXED),
    Mutation("parts of K begin with the first scales", "fast/kernels/sm90_w4a16_gemm/load.cuh",
             "PARTS > 1 ? PARTS * steps.first : steps.first / p.each", "PARTS > 1 ? PARTS * steps.first : 0", ROW_SCALES),
    Mutation("another's sums replace one's own", "fast/kernels/sm90_w4a16_gemm/sliced_k.cuh",
             "sum[i] = __fadd_rn(sum[i], __uint_as_float(words[i]))", "sum[i] = __uint_as_float(words[i])", MIXED),
    Mutation("scales of blocks are not rounded with the weight's", "fast/kernels/sm90_w4a16_gemm/factors.cuh",
             "0x1p-118f), own)", "0x1p-118f), 1.f)", FACTORS),
    Mutation("zero points of the first expert", "fast/kernels/sm90_w4a16_gemm/experts.cuh",
             "p.zeros + index() * p.zeros_each", "p.zeros", EXPERTS),
    Mutation("the bias comes before the scales", "fast/kernels/hopper/output.cuh",
             "__fadd_rn(__fmul_rn(__fmul_rn(float(sum[i]), x_scale), scale[i]), bias[i])",
             "__fmul_rn(__fadd_rn(__fmul_rn(float(sum[i]), x_scale), bias[i]), scale[i])", DENSE),
    Mutation("outgoing rows are swizzled by four", "fast/kernels/hopper/store.cuh",
             "((part ^ lane % 8) << 4)", "((part ^ lane % 4) << 4)", DENSE),
    Mutation("biases in float16 are taken for bfloat16", "fast/kernels/hopper/words.cuh",
             "if (kind == BFLOAT16)", "if (kind != FLOAT32)", DENSE),
    Mutation("all tiles are of the first features", "fast/kernels/hopper/tiles.cuh",
             "(at / size * PAIR + int(neighbour)) * FEATURES", "int(neighbour) * FEATURES", DENSE),
    Mutation("eight rows lie half as far apart", "fast/kernels/hopper/copies.cuh",
             "(u64(8 * width >> 4) << 32)", "(u64(4 * width >> 4) << 32)", DENSE),
    Mutation("sums of a neighbour's features", "fast/kernels/hopper/output.cuh",
             "rank % PAIR + PAIR * s", "PAIR * s", SPARSE),
    Mutation("metadata of 16 bits by single lanes", "fast/kernels/sm90_sparse24_gemm/sm90_sparse24_gemm.cu",
             "(thread / 4 * 2 + thread % 2) * 8", "thread / 2 * 8", SPARSE),
    Mutation("codes of the high half a place too high", "fast/kernels/sm90_sparse24_w4a16_gemv/sm90_sparse24_w4a16_gemv.cu",
             "0xC1C0C308u", "0xC1C8C308u", SPARSE_W4A16_GEMV),
    Mutation("scales of bfloat16 as float16", "fast/kernels/sm90_sparse24_w4a16_gemv/sm90_sparse24_w4a16_gemv.cu",
             "__uint_as_float(u32(half) << 16)", "__uint_as_float(u32(half) << 15)", SPARSE_W4A16_GEMV),
    Mutation("every program writes the first rows", "fast/kernels/sm90_sparse24_w4a16_gemv/output.cuh",
             "total(token, own), token, first, four)", "total(token, own), token, first, own)", SPARSE_W4A16_GEMV),
    Mutation("silu of float16 by one part of log2(e)", "fast/kernels/hopper/gated.cuh",
             "  if constexpr (HALF) f = fmaf(v, -LOG2E_REST, f);\n", "", GATES, nightly=True),
    Mutation("a gate's rows have the other weight's sums", "fast/kernels/sm90_sparse24_w4a16_gemv/output.cuh",
             "? four / 8 * 2 + four % 2 : four / 4", "? four / 8 * 2 + (four + 1) % 2 : four / 4", PAIR),
    Mutation("tokens that fill no box are left out", "fast/kernels/sm90_w4a16_gemm/load.cuh",
             "return (max(left, 0) + BOX - 1) / BOX * BOX;", "return max(left, 0) / BOX * BOX;", MIXED),
    Mutation("zero points of the lower rows", "fast/kernels/sm90_w4a16_gemm/decode.cuh",
             "float(-(both >> 16))", "float(-(both << 16 >> 16))", MIXED),
    Mutation("the second column of e4m3 is the first", "fast/kernels/sm90_w4a16_gemm/decode.cuh",
             "float_of(pair >> 16)", "float_of(pair)", MIXED),
    Mutation("promoted sums replace one another", "fast/kernels/sm90_sparse24_gemm/sm90_sparse24_gemm.cu",
             "sum[i] += part[i];", "sum[i] = part[i];", SPARSE),
    Mutation("x of the first stage alone", "fast/kernels/sm90_w4a16_gemv/load.cuh",
             "i64(i) * 2 * STEPS * STEP", "0", FACTORED),
    Mutation("scales of the lower rows", "fast/kernels/sm90_w4a16_gemv/direct.cu",
             "load_factor(scale + 32)", "load_factor(scale)", DIRECT),
    Mutation("maxima alone saturate", "fast/kernels/tile/quantize.py",
             " | (low * inv_scale + TO_INTEGER < bottom)", "", SATURATION),
    Mutation("groups of three bits begin in other words", "fast/kernels/sm90/integers.py",
             "        return j - (j > 0).to(tl.int32)", "        return j", INTEGERS),
    Mutation("codes of six bits from other bytes", "fast/kernels/sm90/bit_tricks.py",
             "prmt.b32 $1, $4, $5, 0x5421;", "prmt.b32 $1, $4, $5, 0x5431;", HOT_INTEGERS, nightly=True),
    Mutation("random words in another order", "fast/kernels/encode.py",
             "tl.join(tl.join(a, c), tl.join(b, d))", "tl.join(tl.join(a, b), tl.join(c, d))", GROUPED),
    Mutation("two's complement is not turned", "fast/kernels/triton_gemv/gemv_w4a16.py",
             "one + (8 << place if signed else 0)", "one", GEMV),
    Mutation("sums for means in a gradient", "fast/kernels/layers/rms_norm.py",
             "return tl.div_rn(share, tl.zeros_like(share) + length)", "return share", SWIGLU),
    Mutation("silu's slope near zero by its quotient", "fast/kernels/layers/swiglu.py",
             "return tl.where(tl.abs(v) < SMALL, line, slope)", "return slope", SWIGLU),
    Mutation("folded outer scales are factors", "fast/kernels/rules/values.py",
             "scale * rounded(tl.div_rn(1.0, outer), DTYPE)", "scale * outer", INTEGERS),
    Mutation("lanes read words of their neighbours", "fast/kernels/triton_sparse24_small_m/weight_reads.py",
             "(lane % 4 * EACH + which % EACH)", "(lane % 4 + which % EACH)", SPARSE_LINEAR),
    Mutation("float8 codes without their sign on a CPU", "fast/cpu/loops/decode.py",
             "(most << up) - (1 << 15)", "most << up", LOOPS),
    Mutation("values beyond the largest are not stopped", "fast/kernels/rules/elements.py",
             "a = tl.minimum(magnitude, float_of(tl.full((), E.max_bits, tl.int32)))", "a = magnitude", FP8_AND_MX),
    Mutation("subnormal codes are shifted by one too many", "fast/kernels/rules/elements.py",
             "below = tl.maximum(E.emin - exponent, 0)", "below = tl.maximum(E.emin + 1 - exponent, 0)", INTEGERS),
    Mutation("powers of two round down", "fast/kernels/rules/scales.py",
             "((largest + L.carry) >> 23)", "(largest >> 23)", FP8_AND_MX),
    Mutation("zero points beyond the codes", "fast/kernels/rules/scales.py",
             "tl.minimum(tl.maximum(SCHEME.low - nearest_integer(steps), SCHEME.low), SCHEME.high)",
             "SCHEME.low - nearest_integer(steps)", EDGES),
    Mutation("the range may miss zero, by kernels", "fast/kernels/rules/statistics.py",
             "    elif WITH_ZERO:\n        b = tl.where(b < 0, 0, b)", "    elif WITH_ZERO:\n        b = b", EDGES),
    Mutation("e8m0 codes beyond the largest scale", "fast/kernels/rules/scales.py",
             "            code = tl.minimum(code, 254)", "            code = code", EDGES),
    Mutation("a negative zero without a code", "fast/kernels/rules/elements.py",
             "tl.where((b < 0) & (code != 0), code | E.sign_mask, code)", "tl.where(b < 0, code | E.sign_mask, code)",
             INTEGERS),
    Mutation("e8m0 of -0 is NaN", "fast/kernels/rules/elements.py",
             "| ((b < 0) & (b != SIGN))", "| (b < 0)", INTEGERS),
    Mutation("rows under given scales lose their NaN", "fast/kernels/static_scales.py",
             "float_of(tl.where(largest > INFINITY, NAN, bits_of(s)))", "s", STATIC_SCALES),
    Mutation("NaN in the mean of scales", "fast/kernels/rules/scales.py",
             "v = tl.where((bits_of(v) & MAGNITUDE) < INFINITY, v, 0.0)", "v = v", SCALES_OF_SCALES),
    Mutation("six bits lose what crosses a word", "fast/kernels/rules/elements.py",
             "((second >> 8) & 0xFFFF) | (third << 16)", "((second >> 8) & 0xFFF) | (third << 16)", FP8_AND_MX),
    Mutation("no floor under e4m3 scales of zero blocks", "fast/kernels/tile/scales.py",
             "code = tl.where(code == 0, L.floor_code, code)", "code = code", CONVENTIONS),
    Mutation("e2m1 rounds at 1.75", "fast/kernels/sm90/fp4_fp6.py",
             "fma.rn.sat.f32 k, x, {half}, 0fC0000000; fma.rn.f32 g, g, 0f40800000, 0f4B000000;",
             "fma.rn.sat.f32 k, x, {half}, 0fBFE00000; fma.rn.f32 g, g, 0f40800000, 0f4B000000;", HOT),
    Mutation("quotients without their last correction", "fast/kernels/sm90/bit_tricks.py",
             "return tl.fma(tl.fma(first, -TARGET, a), INVERSE, first)", "return first", EDGES),
    Mutation("scales of ranges have no floor", "fast/kernels/sm90/integers.py",
             "scale = tl.maximum(ratio, float_of(tl.full((), L.floor, tl.int32)))", "scale = ratio", EDGES),
    Mutation("a codebook's cubic decides alone", "fast/kernels/sm90/codebooks.py",
             "add.rn.f32 $0, $2, s;", "mov.f32 $0, $2;", CODEBOOKS),
    Mutation("random bits are not cut where the format is", "fast/kernels/tile/quantize.py",
             "(random_bits >> (9 + M))", "(random_bits >> 9)", HOT_INTEGERS, nightly=True),
    Mutation("learned scales count what saturated twice", "fast/kernels/quantize/vjp.py",
             "tl.where(lost, 0.0, in_units(v, scale, outer, zero, SCHEME))", "in_units(v, scale, outer, zero, SCHEME)",
             GRADIENTS),
    Mutation("short blocks are filled with other elements", "fast/kernels/quantize/vjp.py",
             "return tl.minimum(at, limit - 1), exists & (i < length)", "return tl.minimum(at, 0), exists & (i < length)",
             GRADIENTS),
    Mutation("a part of K begins a step late", "fast/kernels/triton_scaled_mm/kernel.py",
             "start = tl.program_id(1) * steps\n    if SWAP:\n        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)",
             "start = tl.program_id(1) * (steps + BLOCK_K)\n    if SWAP:\n"
             "        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)",
             PRODUCTS),
    Mutation("a zero point of all rows is the first row's", "fast/kernels/triton_scaled_mm/kernel.py",
             "zero_a + (m if EACH_A else m * 0)", "zero_a + m * 0", PRODUCTS),
    Mutation("columns' scales lie as their blocks do", "fast/kernels/rowwise_colwise/tiles.py",
             "column.to(tl.int64)[None, :] * blocks + block[:, None]",
             "block[:, None] * columns + column.to(tl.int64)[None, :]", FP8_AND_MX),
    Mutation("groups are not filled up", "fast/kernels/grouped.py",
             "(stop - start + (STEP - 1)) // STEP * STEP", "(stop - start) // STEP * STEP", GROUPED),
    Mutation("differences of a transform are turned", "fast/kernels/hadamard.py",
             "(v[i - (1 << STAGE)] - v[i],)", "(v[i] - v[i - (1 << STAGE)],)", GROUPED),
    Mutation("MX multipliers beyond float32", "fast/kernels/rowwise_colwise/mx.py",
             "low = tl.minimum(multiplier & LOW_HALF, 0x7F00)", "low = multiplier & LOW_HALF", FP8_AND_MX),
    Mutation("rounding of pairs forgets the smallest normal number", "fast/kernels/both_axes.py",
             "max.u16x2 u, u, $6;", "max.u16x2 u, u, u;", BOTH_AXES),
    Mutation("of equal magnitudes the last is kept", "fast/kernels/sparsity/groups.py",
             "over01, over02, over03 = a - k1, a - k2, a - k3",
             "over01, over02, over03 = ~((k1 | TOP) - k0), a - k2, a - k3", STORAGE),
    Mutation("unused places name the first free element", "fast/kernels/sparsity/groups.py",
             "both | ~(early & (k2 | ~k3))", "both | ~(early & k2)", STORAGE),
    Mutation("the second value does not win", "fast/kernels/sparsity/compress.py",
             "(low & ~(255 << second)) | (0x32 << second)", "low | (0x32 << second)", STORAGE),
    Mutation("pairs of columns of the transpose change places", "fast/kernels/sparsity/transposable.py",
             "a, b = _two_columns(upper, lower, 2 * HALF), _two_columns(upper, lower, 2 * HALF + 1)",
             "a, b = _two_columns(upper, lower, 2 * HALF + 1), _two_columns(upper, lower, 2 * HALF)", TRANSPOSABLE),
    Mutation("an infinity counts as a NaN in a tile of the kernel", "fast/kernels/sparsity/transposable.py",
             "NAN_COUNT = tl.constexpr(9)", "NAN_COUNT = tl.constexpr(1)", TRANSPOSABLE),
    Mutation("the mean of squares of the filled row", "fast/kernels/layers/rms_norm.py",
             "mean = tl.div_rn(total, tl.zeros_like(total) + length)",
             "mean = tl.div_rn(total, tl.zeros_like(total) + SIZE)", NORMALIZE),
    Mutation("silu of float16 by one part of log2(e), in Triton", "fast/kernels/layers/swiglu.py",
             "f = tl.fma(v, -LOG2E_REST, f)", "f = f", SWIGLU),
    Mutation("rotary's second half has the first one's table", "fast/kernels/layers/attention.py",
             "_table(s + half, i, half, first, HAS_PTX)", "_table(s, i, half, first, HAS_PTX)", SWIGLU),
    Mutation("a chunk's last step reads the next chunk", "fast/kernels/layers/column_sums.py",
             "last = tl.minimum(first + chunk, rows)", "last = rows", COLUMN_SUMS),
    Mutation("zero points of int4 without the offset", "fast/kernels/triton_small_m/decode.py",
             'OFFSET: tl.constexpr = 0 if ELEMENT == "int8" else (136',
             'OFFSET: tl.constexpr = 0 if ELEMENT == "int8" else (128', DYNAMIC),
    Mutation("parts of K are not added", "fast/kernels/triton_small_m/product.py",
             "for part in tl.static_range(1, SPLITS):\n        total", "for part in tl.static_range(2, SPLITS):\n        total",
             SMALL),
    Mutation("dense experts have the words of the first one", "fast/kernels/triton_small_m/dense.py",
             "words += expert * (ROWS", "words += 0 * expert * (ROWS", SMALL),
    Mutation("factors of the upper rows", "fast/kernels/triton_small_m/decode.py",
             "(n // 8 % 2 * 16 + block % 2 * 8)", "(block % 2 * 8)", DYNAMIC),
    Mutation("one token beyond a cache is dropped", "fast/kernels/attention/append.py",
             "position + tokens <= room,", "position + tokens <= room + 1,", CACHE_WRITES),
    Mutation("both blocks of a key have the first one's scale", "fast/kernels/attention/decode.py",
             "part = part * tl.load(scales + b)[None, :]", "part = part * tl.load(scales)[None, :]", CACHE_READS),
    Mutation("positions behind the last token are attended to", "fast/kernels/attention/parts.py",
             "return first, tl.minimum(first + each, tokens)", "return first, first + each", CACHE_READS),
    Mutation("keys are read before their group is full", "fast/kernels/attention/parts.py",
             "tl.minimum(count - RESIDUAL, count - count % GROUP)", "count - RESIDUAL", CACHE_READS),
    Mutation("last tokens in slots of others", "fast/kernels/attention/append.py",
             "SINKS + (at - SINKS) % RING", "SINKS + at % RING", CACHE_WRITES),
    Mutation("tokens of values in their own order", "fast/kernels/attention/quantize_heads.py",
             "token = first + place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2", "token = first + place",
             PREFILL),
    Mutation("a window of one key more", "fast/kernels/attention/prefill.py",
             "(key[None, :] > place[:, None] - window)", "(key[None, :] >= place[:, None] - window)", PREFILL),
    Mutation("a tile on the edge without a mask", "fast/kernels/attention/prefill.py",
             "tl.maximum(first + offset + 1, 0) // N * N", "tl.maximum(first + offset + N, 0) // N * N", PREFILL),
]  # fmt: skip

LIBRARY = [
    Mutation("gradients pass before QAT begins", "ao_lab/qat/linear.py",
             "return torch.where(started, dx, g), late[0], late[1]", "return dx, late[0], late[1]",
             "tests/ao_lab/qat/test_linear_forward.py -k delayed_start"),
    Mutation("inputs that saturate have gradients", "ao_lab/qat/linear.py",
             "dx, dinput, _ = straight_through(dx,", "_, dinput, _ = straight_through(dx,",
             "tests/ao_lab/qat/test_linear_forward.py -k 'straight_through or static_inputs'"),
    Mutation("AWQ's nibbles in order", "ao_lab/checkpoint/formats/awq.py",
             "NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]", "NIBBLES = [0, 1, 2, 3, 4, 5, 6, 7]",
             "tests/ao_lab/checkpoint/formats/test_group_integers.py -k library_dequantizes"),
    Mutation("GPTQ's zero points one too low", "ao_lab/checkpoint/formats/gptq.py",
             "return (zeros + 1) & ((1 << bits) - 1) if less_one and bits not in ONES else zeros", "return zeros",
             "tests/ao_lab/checkpoint/formats/test_group_integers.py -k library_dequantizes"),
    Mutation("runs that take as much as the dense weight", "ao_lab/checkpoint/formats/gptq.py",
             "if integers.bits + 24 / run >= 16:", "if integers.bits + 24 / run > 16:",
             "tests/ao_lab/checkpoint/formats/test_group_integers.py -k runs_that"),
    Mutation("two weights of one tensor", "ao_lab/checkpoint/records.py",
             "if used.setdefault(full, name) != name:", "if used.setdefault(full, name) is None:",
             "tests/ao_lab/checkpoint/test_checks.py -k one_tensor"),
    Mutation("a weight of a tensor that is left out", "ao_lab/checkpoint/formats/__init__.py",
             "dense_names(result, folder, records.left_out)", "dense_names(result, folder)",
             "tests/ao_lab/checkpoint/test_checks.py -k one_tensor"),
    Mutation("packed zero points without their sign", "ao_lab/checkpoint/export.py",
             "(unsigned - ((unsigned >> (bits - 1)) << bits))", "unsigned",
             "tests/ao_lab/checkpoint/formats/test_compressed_tensors.py -k weights_are"),
    Mutation("SR-STE's pull in the gradient's dtype", "ao_lab/sparsity/training/layers.py",
             "pull = w.float().mul(decay)", "pull = w.mul(decay).float()",
             "tests/ao_lab/sparsity/training/test_layers.py"),
    Mutation("bytes behind the last tensor", "ao_lab/checkpoint/io/shards.py",
             "if end != size:", "if end > size:", SHARDS + "headers"),
    Mutation("negative counts in a header", "ao_lab/checkpoint/io/shards.py",
             "type(n) is int and n >= 0", "type(n) is int", SHARDS + "headers"),
    Mutation("shards in other folders", "ao_lab/checkpoint/io/shards.py",
             "[A-Za-z0-9_.-]{0,200}\\.safetensors", "[A-Za-z0-9_./-]{0,200}\\.safetensors", SHARDS + "folder_alone"),
    Mutation("two files with one tensor", "ao_lab/checkpoint/io/shards.py",
             "            if name in files:", "            if False:", SHARDS + "two_files"),
    Mutation("shards with other metadata", "ao_lab/checkpoint/io/shards.py",
             "if result.setdefault(key, value) != value:", "if result.setdefault(key, value) is None:", SHARDS + "differ"),
    Mutation("settings that hide a method", "ao_lab/checkpoint/model_builder.py",
             "if hasattr(kind, name)]", "if name == kind]",
             "tests/ao_lab/checkpoint/test_model_builder.py -k names_a_method"),
    Mutation("a choice that its kernel does not take", "ao_lab/gemm/select.py",
             "one.kernel in PRODUCTS and PRODUCTS[one.kernel].unsupported_reason(w, dtype) is None",
             "one.kernel in PRODUCTS", "tests/ao_lab/gemm/test_select.py -k chosen_kernel"),
]  # fmt: skip

# Calibration: sums, which of it is taken, memory, rotations, experts, ranks.
RUNS = "tests/ao_lab/calibration/test_"
CALIBRATION = [
    Mutation("sums are not made means", "ao_lab/calibration/tokens.py",
             "            self.value /= self.count\n", "            pass\n", RUNS + "residence.py -k mean_of_products"),
    Mutation("padding is learned from", "ao_lab/calibration/tokens.py",
             "return Rows(rows[role == TRAIN], rows[role == HELD_OUT])",
             "return Rows(rows[role != HELD_OUT], rows[role == HELD_OUT])", RUNS + "run.py -k padding"),
    Mutation("nothing is lent to an expert", "ao_lab/calibration/tokens.py",
             "own.add_(other.to(own.device), alpha=count)", "own", RUNS + "experts.py -k mean_is_lent"),
    Mutation("what is worse than rounding is taken", "ao_lab/calibration/layers.py",
             "best = last if errors[last] <= errors[0] else min(range(last), key=lambda i: (errors[i], -i))",
             "best = last", RUNS + "run.py -k would_be_worse"),
    Mutation("shared outer scales are learned apart", "ao_lab/calibration/autoround.py",
             "stays = not self.before.rounded or self.part.outer is not None", "stays = not self.before.rounded",
             RUNS + "autoround.py -k go_on_sharing"),
    Mutation("moments stay until their block is over", "ao_lab/calibration/run.py",
             "                inputs.pop(target.name, None)\n", "                pass\n",
             RUNS + "residence.py -k last_stack"),
    Mutation("a block stays on the device", "ao_lab/calibration/residence.py",
             "        self.leave()\n        self.copies,", "        self.copies,", RUNS + "residence.py -k one_block"),
    Mutation("changed gains do not go home", "ao_lab/calibration/residence.py",
             "_same(taken, values) else taken", "_same(values, values) else taken", RUNS + "residence.py -k gains"),
    Mutation("a finished block is no view of its file", "ao_lab/calibration/residence.py",
             "if name in self.touched and self.stored is not None:", "if False:", RUNS + "residence.py -k one_block"),
    Mutation("a hessian is put in order by its upper triangle", "fast/calibration/hessian.py",
             "columns <= rows[:, None]", "columns >= rows[:, None]", "tests/fast/calibration/test_memory.py -k strips"),
    Mutation("ratios beside the factor", "fast/calibration/gptq.py",
             "upper.div_(diagonal)", "upper / diagonal", "tests/fast/calibration/test_memory.py -k matrices"),
    Mutation("gains are folded and stay", "ao_lab/calibration/rotations.py",
             "return torch.full_like(w, self.neutral)", "return w", RUNS + "offline.py -k 'float64 and Llama'"),
    Mutation("rotations are not proved", "ao_lab/calibration/offline.py",
             "if error <= TOLERANCE:", "if True:", RUNS + "offline.py -k refused_before"),
    Mutation("biases of layers that write are not rotated", "ao_lab/calibration/offline.py",
             "            if bias is not None:\n", "            if False:\n", RUNS + "offline.py -k 'biased'"),
    Mutation("experts' rows are matched in part", "ao_lab/calibration/experts.py",
             "if bool((self.prints[at] == wanted).all()) else None", "if True else None", RUNS + "experts.py -k by_their_bits"),
    Mutation("shares are added one after the other", "ao_lab/calibration/tokens.py",
             "while self.closed and self.closed[-1][0] == node[0]:", "while self.closed:", RUNS + "ranks.py -k tree"),
    Mutation("sequences are counted on each rank", "ao_lab/calibration/tokens.py",
             "shapes = ranks.gathered(capture.shapes)", "shapes = [[]] * ranks.rank + [capture.shapes]",
             RUNS + "ranks.py -k one_process"),
    Mutation("scales of keys take all heads of queries", "ao_lab/calibration/cache_scales.py",
             "x = x[:, ::repeats]", "x = x[:, :: repeats * 2]", RUNS + "cache_scales.py -k 'holds and head'"),
    Mutation("block files of another call are taken", "ao_lab/calibration/resume.py",
             "        if other:\n", "        if False:\n", RUNS + "resume.py -k refused"),
]  # fmt: skip

MUTATIONS = [*REFERENCE, *KERNELS, *LIBRARY, *CALIBRATION]
