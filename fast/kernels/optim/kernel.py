"""`step_kernel`: one step of `reference.optim.update` for the blocks of many parameters, everything read and written once.

A program takes up to REPEAT times P blocks of SIZE elements of one parameter, P at a time. `tiles` says which: pairs (row of
`tensors`, first block). What a parameter's blocks share is read once.
A row of `tensors` is what a parameter needs: addresses and counts (`COLUMNS`); a row of `numbers` has the float32 numbers of
its step, which `numbers_kernel` wrote just before from the step counter and the learning rate where they lie, on the device. So
a captured CUDA graph goes on stepping, and nothing is compiled anew for other parameters.

The largest magnitude of a block's new moments is found in registers, a warp a block. A thread has eight neighbouring elements,
which are what one counter of Philox rounds, so random words stay where they are drawn.

Reciprocals and square roots are correctly rounded, products and sums fused where the reference fuses them: the bits are its.
Of the default states under b2 of 1/2 or more they need no test for rare exponents, as no second moment is below 2**-101.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import LARGEST, MAGNITUDE, NAN, bits_of, float_of, is_nan, rounded, widened
from fast.kernels.hadamard import philox_words
from fast.kernels.optim.nibbles import e2m1_values, e2m1_words, halves_in_middle, uint4_values, uint4_words
from fast.kernels.rowwise_colwise.tiles import scales_of
from fast.kernels.rules.elements import clamp_integer, decode, encode, pairs, to_integer
from fast.kernels.rules.statistics import larger
from fast.kernels.sm90.bit_tricks import negative_by_product, reciprocal_rn
from fast.kernels.tile.quantize import stochastic_codes

#: What a row of `tensors` holds, int64: addresses, then counts.
COLUMNS = (
    "p", "g", "first", "first_scale", "second", "second_scale", "error", "step", "blocks", "length", "in_row", "parameter",
    "block",
)  # fmt: skip
WIDTH = tl.constexpr(len(COLUMNS))
#: Numbers of a step, float32: as `reference.optim.update.Numbers`, then the step and whether it is left out.
NUMBERS = tl.constexpr(12)
#: Neighbouring elements of a thread, and of a counter.
TOGETHER = tl.constexpr(8)


@triton.jit
def power(base, exponent):
    """base**exponent: products of squares, from the lowest bit on; float64."""
    result = base * 0.0 + 1.0
    for _ in tl.range(0, 32):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit
def numbers_kernel(
    tensors, constants, rate, skip, numbers, count, LION: tl.constexpr, ADAM: tl.constexpr, TILE: tl.constexpr
):
    """The numbers of the next step of `count` parameters, TILE a program; their counters move on unless `skip` says that the
    step is left out.

    constants: float64 betas, and eps and weight decay (rounded to float32 before). rate: the learning rate, float32.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = row < count
    at = tl.load(tensors + row * WIDTH + 7, mask=there, other=0).to(tl.pointer_type(tl.float32))
    left_out = tl.load(skip) != 0.0
    before = tl.load(at, mask=there, other=0.0)
    step = before.to(tl.int32) + 1
    b1, b2 = tl.load(constants), tl.load(constants + 1)
    eps, decay = tl.load(constants + 2), tl.load(constants + 3)
    lr = tl.load(rate).to(tl.float64)
    zero = step.to(tl.float64) * 0.0
    size, root, keep = zero + lr, zero + 1.0, zero + 1.0
    if not LION:
        size = lr / (1.0 - power(zero + b1, step))
        root = 1.0 / tl.sqrt(1.0 - power(zero + b2, step))
    if not ADAM:
        keep = zero + (1.0 - lr * decay)
    out = numbers + row * NUMBERS
    tl.store(out, (zero + b1).to(tl.float32), mask=there)
    tl.store(out + 1, (zero + (1.0 - b1)).to(tl.float32), mask=there)
    tl.store(out + 2, (zero + b2).to(tl.float32), mask=there)
    tl.store(out + 3, (zero + (1.0 - b2)).to(tl.float32), mask=there)
    tl.store(out + 4, size.to(tl.float32), mask=there)
    tl.store(out + 5, root.to(tl.float32), mask=there)
    tl.store(out + 6, (zero + eps).to(tl.float32), mask=there)
    tl.store(out + 7, keep.to(tl.float32), mask=there)
    tl.store(out + 8, (zero + decay).to(tl.float32), mask=there)
    tl.store(out + 9, step.to(tl.float32), mask=there)
    tl.store(out + 10, (zero + left_out.to(tl.float64)).to(tl.float32), mask=there)
    tl.store(at, tl.where(left_out, before, step.to(tl.float32)), mask=there)


@triton.jit
def random_words(index, parameter, step, seed_low, seed_high):
    """(P, 4 S) words of counters (P, S), each for two neighbours."""
    zero = index.to(tl.uint32) * 0
    a, b, c, d = philox_words(index.to(tl.uint32), zero, zero + parameter, zero + step, seed_low, seed_high)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(words, (index.shape[0], TOGETHER // 2 * index.shape[1]))


@triton.jit
def halves(words, SWAPPED: tl.constexpr):
    """Words (P, S) as 16 random bits for each of (P, 2 S), int32; `reference.optim.states.halves`."""
    low, high = (words & 0xFFFF).to(tl.int32), (words >> 16).to(tl.int32)
    both = tl.join(high, low) if SWAPPED else tl.join(low, high)
    return tl.reshape(both, (words.shape[0], 2 * words.shape[1]))


@triton.jit
def searched(v, thresholds, BITS: tl.constexpr):
    """Codes of a codebook: how many thresholds lie below v; none for NaN."""
    code = (v * 0.0).to(tl.int32)
    for bit in tl.static_range(BITS):
        # Half of what is left: 2**(BITS - 1 - bit).
        middle = tl.load(thresholds + code + ((1 << (BITS - 1 - bit)) - 1))
        code = tl.where(v > middle, code + (1 << (BITS - 1 - bit)), code)
    return code


@triton.jit
def load_codes(source, at, at_half, inside, inside_half, BITS: tl.constexpr):
    """int32 codes (P, SIZE), a byte each or two in one."""
    if BITS == 8:
        return tl.load(source + at, mask=inside, other=0).to(tl.int32)
    else:
        byte = tl.load(source + at_half, mask=inside_half, other=0).to(tl.int32)
        return tl.reshape(tl.join(byte & 15, byte >> 4), (byte.shape[0], 2 * byte.shape[1]))


@triton.jit
def values_of(codes, table, STATE: tl.constexpr):
    """float32 values of codes, without their scales."""
    if STATE.kind == "codebook":
        return tl.load(table + codes)
    else:
        return decode(codes, STATE.element)


@triton.jit
def fused(a, b, c, HAS_PTX: tl.constexpr):
    """float32 a b + c, rounded once; in the interpreter as `reference.arrays.softfloat.fused_multiply_add` computes it."""
    if HAS_PTX:
        return tl.fma(a, b, c)
    else:
        product, other = a.to(tl.float64) * b.to(tl.float64), c.to(tl.float64)
        total = product + other
        part = total - product
        rest = (product - (total - part)) + (other - part)
        bits = total.to(tl.int64, bitcast=True)
        odd = bits + tl.where((rest > 0) == (total > 0), 1, -1)
        odd = tl.where((tl.abs(total) < float("inf")) & (rest != 0) & (bits & 1 == 0), odd, bits)
        return odd.to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def decayed(moment, beta, new, STATE: tl.constexpr, ROOT: tl.constexpr, HAS_PTX: tl.constexpr):
    """beta times a moment plus `new`; of scaled ones (values, scales (P, 1)) the product, or its square (ROOT)."""
    value, scale = moment
    if STATE is None:
        return fused(value, beta, new, HAS_PTX)
    elif ROOT:
        return fused(value * value, beta * (scale * scale), new, HAS_PTX)
    else:
        return fused(value, beta * scale, new, HAS_PTX)


@triton.jit
def moment_codes(
    v, bits, table, STATE: tl.constexpr, POSITIVE: tl.constexpr, LEAST: tl.constexpr, FRACTION: tl.constexpr
):
    """(codes, what is stored as their scales) of moments (P, SIZE); bits: 16 random ones each, or None. POSITIVE: no moment is
    negative or NaN; LEAST: the smallest code."""
    if POSITIVE:
        largest = tl.max(bits_of(v), axis=1, keep_dims=True)
    else:
        largest = largest_of_blocks(v, STATE.has_ptx)
    stored, scale, factor = scales_of(largest, STATE)
    e4m3 = STATE.kind == "float" and STATE.element.bias == 7 and STATE.element.max_code == 126
    if e4m3 and LEAST == 8 and STATE.rounding == "stochastic" and STATE.power_ratio:
        return root_codes(v * factor, bits, STATE.has_ptx), stored
    words = None
    if bits is not None:
        words = bits.to(tl.uint32) << 16
    if STATE.apply == "divide":
        scaled = tl.div_rn(v, scale)
    else:
        scaled = v * factor
    if FRACTION != 0:
        scaled = rounded_fraction(scaled, bits, FRACTION)
    if STATE.kind == "codebook":
        THRESHOLDS: tl.constexpr = 1 << STATE.bits
        codes = searched(scaled, table + THRESHOLDS, STATE.bits)
    elif STATE.rounding == "stochastic" and STATE.kind == "float":
        codes = stochastic_codes(scaled, words, STATE.element)
    elif STATE.rounding == "stochastic":
        codes = clamp_integer(to_integer(scaled, words, STATE.element), STATE.element)
    else:
        codes = encode(scaled, None, STATE.element)
    if (STATE.rounding == "stochastic" or STATE.kind != "float") and not POSITIVE:
        codes = tl.where(is_nan(scale), STATE.poison_code, codes)
    if LEAST != 0:
        codes = tl.maximum(codes, LEAST)
    return codes, stored


@triton.jit
def largest_of_blocks(v, HAS_PTX: tl.constexpr):
    """Patterns of the largest magnitudes (P, 1): floats of a thread, whose absolute value is free, then integers of a warp."""
    if HAS_PTX:
        parts = tl.reshape(tl.abs(v), (v.shape[0], v.shape[1] // TOGETHER, TOGETHER))
        return tl.max(bits_of(tl.reduce(parts, 2, larger)) & MAGNITUDE, axis=1, keep_dims=True)
    else:
        return tl.max(bits_of(v) & MAGNITUDE, axis=1, keep_dims=True)


@triton.jit
def root_codes(y, bits, HAS_PTX: tl.constexpr):
    """e4m3 codes of values up to 448, rounded stochastically, the smallest normal number (code 8) at least."""
    rounded = rounded_fraction(tl.maximum(y, 0.015625), bits, 3)
    if HAS_PTX:
        return rounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        return (bits_of(rounded) >> 20) - ((127 - 7) << 3)


@triton.jit
def rounded_fraction(y, bits, FRACTION: tl.constexpr):
    """float32 rounded stochastically by 16 random bits to so many fraction bits; the sign is not touched, NaN becomes any."""
    return float_of((bits_of(y) + (bits << (7 - FRACTION))) & -(1 << (23 - FRACTION)))


@triton.jit
def square_root_rn(v, FAST: tl.constexpr):
    """sqrt(v), correctly rounded. FAST: v is 2**-101 or more and finite; the sequence of the assembler without its test."""
    if FAST:
        guess = tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1
        )
        root = v * guess
        rest = tl.fma(root * -1.0, root, v)
        return tl.fma(rest, guess * 0.5, root)
    else:
        return tl.sqrt_rn(v)


@triton.jit
def inverse_rn(v, FAST: tl.constexpr):
    """1 / v, correctly rounded. FAST: v lies between 2**-126 and 2**125."""
    if FAST:
        return reciprocal_rn(v)
    else:
        return tl.div_rn(1.0, v)


@triton.jit
def store_codes(target, codes, at, at_half, inside, inside_half, BITS: tl.constexpr):
    """The inverse of `load_codes`."""
    if BITS == 8:
        tl.store(target + at, codes.to(tl.uint8), mask=inside)
    else:
        tl.store(target + at_half, pairs(codes, 4).to(tl.uint8), mask=inside_half)


@triton.jit
def stochastic_bfloat16(v, bits):
    """float32 rounded to bfloat16 by 16 random bits."""
    pattern = tl.where(v == v, bits_of(v) + bits, NAN)
    return (pattern >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def joined_master(p, error, WIDTH: tl.constexpr):
    """float32 of a bfloat16 and its error; `reference.optim.update.join_master`."""
    code = p.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return float_of(code + (error.to(tl.int32) << (16 - WIDTH)))


@triton.jit
def split_master(v, WIDTH: tl.constexpr):
    """(bfloat16, error as int32 in its low bits); `reference.optim.update.split_master`."""
    bits = tl.where(v == v, bits_of(v), NAN)
    if WIDTH < 16:
        bits = bits + (1 << (15 - WIDTH))
    code = ((bits + 0x8000) >> 16).to(tl.int16)
    return code.to(tl.bfloat16, bitcast=True), bits >> (16 - WIDTH)


@triton.jit
def rounded_to(v, TYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """float32 in a parameter's dtype, to nearest even. (The interpreter's cast to bfloat16 cuts.)"""
    if tl.float32 == TYPE:
        return v
    elif tl.bfloat16 == TYPE and not HAS_PTX:
        return rounded(v, "bfloat16").to(TYPE)
    else:
        return v.to(TYPE)


@triton.jit
def address(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in a column of a row; ALIGNED: it is a multiple of 16 bytes."""
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def moved(pointer, offset, ALIGNED: tl.constexpr):
    """A pointer some elements further on."""
    pointer += offset
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def moment_addresses(row, COLUMN: tl.constexpr, ALIGNED: tl.constexpr, STATE: tl.constexpr):
    """(pointer, pointer of its scales) of a moment, in columns of a row from one on; without scales itself again."""
    if STATE is None:
        # No scales: Triton 3.6 returns no None from here.
        pointer = address(row, COLUMN, tl.float32, ALIGNED)
        return pointer, pointer
    else:
        return address(row, COLUMN, tl.uint8, ALIGNED), address(row, COLUMN + 1, tl.float32, False)


@triton.jit
def load_moment(
    pointers, table, places, bases, ALIGNED: tl.constexpr, STATE: tl.constexpr, WORDS: tl.constexpr
):
    """(pointer, pointer of scales, (values, scales)) of a moment's elements at some places; without scales the others again."""
    at, at_half, inside, inside_half, blocks, exists = places
    base, base_half, base_block = bases
    if STATE is None:
        pointer = moved(pointers[0], base, ALIGNED)
        values = tl.load(pointer + at, mask=inside, other=0.0)
        return pointer, pointer, (values, values)
    else:
        pointer = moved(pointers[0], base if STATE.bits == 8 else base_half, ALIGNED)
        scales = pointers[1] + base_block
        scale = tl.load(scales + blocks, mask=exists, other=0.0)
        if WORDS:
            words = tl.load(word_pointers(pointer, at), mask=exists, other=0)
            if STATE.kind == "float":
                return pointer, scales, (e2m1_values(words), scale)
            else:
                return pointer, scales, (uint4_values(words), scale)
        else:
            codes = load_codes(pointer, at, at_half, inside, inside_half, STATE.bits)
            return pointer, scales, (values_of(codes, table, STATE), scale)


@triton.jit
def word_pointers(pointer, at):
    """Of the int32 words (P, S / 8) of 4-bit codes at places (P, S)."""
    P: tl.constexpr = at.shape[0]
    COUNT: tl.constexpr = at.shape[1] // 8
    within = tl.arange(0, P)[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
    # One word a thread, as its elements lie.
    within = tl.max_contiguous(tl.multiple_of(within, [1, 1]), [1, 1])
    return pointer.to(tl.pointer_type(tl.int32)) + within


@triton.jit
def store_moment(
    pointer, scales, v, words, table, places, RAGGED: tl.constexpr, STATE: tl.constexpr, POSITIVE: tl.constexpr,
    LEAST: tl.constexpr, FRACTION: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_moment`, rounded as `moment_codes` says."""
    at, at_half, inside, inside_half, blocks, exists = places
    if STATE is None:
        tl.store(pointer + at, v, mask=inside)
    elif WORDS:
        if POSITIVE:
            stored, scale, factor = scales_of(tl.max(bits_of(v), axis=1, keep_dims=True), STATE)
            codes = uint4_words(v * factor, halves_in_middle(words))
        else:
            stored, scale, factor = scales_of(largest_of_blocks(v, STATE.has_ptx), STATE)
            codes = e2m1_words(v * factor, halves_in_middle(words), is_nan(scale))
        tl.store(word_pointers(pointer, at), codes, mask=exists)
        tl.store(scales + blocks, stored, mask=exists)
    else:
        bits = None
        if STATE.rounding == "stochastic" or FRACTION != 0:
            bits = halves(words, False)
        codes, scale = moment_codes(v, bits, table, STATE, POSITIVE, LEAST, FRACTION)
        if RAGGED:
            codes = tl.where(inside, codes, 0)
        store_codes(pointer, codes, at, at_half, inside, inside_half, STATE.bits)
        tl.store(scales + blocks, scale, mask=exists)


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def step_kernel(
    tiles, tensors, numbers, first_table, second_table, seed_low, seed_high,
    KIND: tl.constexpr, P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    FRACTION: tl.constexpr, ROOT: tl.constexpr, LEAST: tl.constexpr, FAST: tl.constexpr, DRAWS: tl.constexpr,
    ROUNDS: tl.constexpr, MASTER: tl.constexpr, RAGGED: tl.constexpr, ALIGNED: tl.constexpr, HAS_PTX: tl.constexpr,
    FIRST_WORDS: tl.constexpr, SECOND_WORDS: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr, REPEAT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """See the module. FIRST, SECOND: `SchemeConstants`, or None for float32. FRACTION: bits to which the first is rounded
    before. ROOT: the second is stored as its root; LEAST: its smallest code. FAST: no exponent is rare. DRAWS: random bits are
    used. ROUNDS: bfloat16 parameters are rounded stochastically. RAGGED: rows are no multiples of blocks; ALIGNED: all
    addresses are multiples of 16 bytes. FIRST_WORDS, SECOND_WORDS: codes are read and written as words (`nibbles`). STAGES: 2
    and more read that many turns of the loop ahead, less one. The seed comes as signed halves."""
    tile = tl.program_id(0)
    tensor, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    row = tensors + tensor * WIDTH
    n = numbers + tensor * NUMBERS
    # No block exists in a step that is left out.
    limit = tl.where(tl.load(n + 10) != 0.0, 0, tl.load(row + 8)).to(tl.int32)
    length, in_row = tl.load(row + 9), tl.load(row + 10)
    parameter, offset = tl.load(row + 11).to(tl.uint32), tl.load(row + 12)
    step = tl.load(n + 9).to(tl.uint32)
    first_beta, first_rest, second_beta, second_rest = (
        tl.load(n),
        tl.load(n + 1),
        tl.load(n + 2),
        tl.load(n + 3),
    )
    size, to_root, eps, keep, decay = (
        tl.load(n + 4),
        tl.load(n + 5),
        tl.load(n + 6),
        tl.load(n + 7),
        tl.load(n + 8),
    )
    p_from, g_from = address(row, 0, P_TYPE, ALIGNED), address(row, 1, G_TYPE, ALIGNED)
    first_from, second_from = (
        moment_addresses(row, 2, ALIGNED, FIRST),
        moment_addresses(row, 4, ALIGNED, SECOND),
    )
    if MASTER == 8:
        error_from = address(row, 6, tl.int8, ALIGNED)
    elif MASTER == 16:
        error_from = address(row, 6, tl.int16, ALIGNED)
    blocks = tl.arange(0, P)[:, None]
    within = tl.arange(0, SIZE)[None, :]
    half = tl.arange(0, SIZE // 2)[None, :]
    for begin in tl.range(first, tl.minimum(first + REPEAT * P, limit), P, num_stages=STAGES):
        exists = blocks < limit - begin
        wide = offset * 0 + begin  # int64, of a number in the interpreter too
        if RAGGED:
            block = wide + blocks
            line, column = block // in_row, block % in_row * SIZE
            at = line * length + column + within
            at_half = line * ((length + 1) // 2) + column // 2 + half
            inside = exists & (column + within < length)
            inside_half = exists & (column + 2 * half < length)
            base, base_half = wide * 0, wide * 0
        else:
            at = blocks * SIZE + within
            at_half = blocks * (SIZE // 2) + half
            # Eight neighbours a thread, as random words lie; said here, or bytes would have sixteen.
            at = tl.max_contiguous(tl.multiple_of(at, [1, TOGETHER]), [1, TOGETHER])
            at_half = tl.max_contiguous(tl.multiple_of(at_half, [1, TOGETHER // 2]), [1, TOGETHER // 2])
            inside = tl.broadcast_to(exists, (P, SIZE))
            inside_half = tl.broadcast_to(exists, (P, SIZE // 2))
            base, base_half = wide * SIZE, wide * (SIZE // 2)
        p_at = moved(p_from, base, ALIGNED)
        g = widened(tl.load(moved(g_from, base, ALIGNED) + at, mask=inside, other=0.0))
        stored_p = tl.load(p_at + at, mask=inside, other=0.0)
        if MASTER != 0:
            error_at = moved(error_from, base, ALIGNED)
            p = joined_master(stored_p, tl.load(error_at + at, mask=inside, other=0), MASTER)
        else:
            p = widened(stored_p)
        places, bases = (at, at_half, inside, inside_half, blocks, exists), (base, base_half, wide)
        first_at, first_scale, m = load_moment(
            first_from, first_table, places, bases, ALIGNED, FIRST, FIRST_WORDS
        )
        if KIND != "lion":
            second_at, second_scale, v = load_moment(
                second_from, second_table, places, bases, ALIGNED, SECOND, SECOND_WORDS
            )

        if KIND == "adam":
            g = fused(decay, p, g, HAS_PTX)
        if KIND == "lion":
            direction = decayed(m, first_beta, first_rest * g, FIRST, False, HAS_PTX)
            sign = (direction > 0).to(tl.float32) - (direction < 0).to(tl.float32)
            sign = tl.where(is_nan(direction), direction, sign)
            m = decayed(m, second_beta, second_rest * g, FIRST, False, HAS_PTX)
            p = fused(p, keep, negative_by_product(size * sign), HAS_PTX)
            root = m
            v = m
        else:
            m = decayed(m, first_beta, first_rest * g, FIRST, False, HAS_PTX)
            v = decayed(v, second_beta, second_rest * (g * g), SECOND, ROOT, HAS_PTX)
            v = tl.minimum(v, float_of(tl.full((), LARGEST, tl.int32)))
            root = square_root_rn(v, FAST)
            change = (m * size) * inverse_rn(fused(root, to_root, eps, HAS_PTX), FAST)
            p = fused(p, keep, negative_by_product(change), HAS_PTX)
        if RAGGED:
            m = tl.where(inside, m, 0.0)
            v = tl.where(inside, v, 0.0)
            root = tl.where(inside, root, 0.0)

        counter = ((wide + offset) * (SIZE // TOGETHER)).to(tl.int32)
        index = counter + (blocks * (SIZE // TOGETHER) + tl.arange(0, SIZE // TOGETHER)[None, :])
        if DRAWS:
            words = random_words(index, parameter, step, seed_low.to(tl.uint32), seed_high.to(tl.uint32))
        else:
            words = index
        store_moment(
            first_at,
            first_scale,
            m,
            words,
            first_table,
            places,
            RAGGED,
            FIRST,
            False,
            0,
            FRACTION,
            FIRST_WORDS,
        )
        if KIND != "lion":
            new = root if ROOT else v
            store_moment(
                second_at, second_scale, new, words, second_table, places, RAGGED, SECOND, True, LEAST, 0,
                SECOND_WORDS,
            )  # fmt: skip
        if MASTER != 0:
            stored_p, error = split_master(p, MASTER)
            tl.store(error_at + at, error.to(error_at.dtype.element_ty), mask=inside)
        elif ROUNDS:
            stored_p = stochastic_bfloat16(p, halves(words, True))
        else:
            stored_p = rounded_to(p, P_TYPE, HAS_PTX)
        tl.store(p_at + at, stored_p, mask=inside)
