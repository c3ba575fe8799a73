"""A weight as `linear_small` keeps it in place of its codes, scales and zero points: `arrange` makes it once, at load.

words   int32 (atoms along N, atoms along K, words of an atom), the order of `elements`: as many bytes as the codes
scale   float32 (blocks, rows): what a program reads of a block lies side by side; narrower storage is widened, exactly;
        or int32 (rows of words, rows / 2) of scales that are multiplied into the elements (`fast.scale_factors`);
        of nf4 int32 (rows of words, rows), their parts behind them (`fast.scale_factors`)
zero    int32 (blocks, rows / 2): the zero points of rows n and n + 8, 16 bits each

Rows are filled to a multiple of 128, columns too. Nothing of the weight is kept twice: `restored_codes` gives the codes back.

`arrange_kernel` goes from codes as they are stored to that layout, `restore_kernel` back: each word, each byte once. A word
of 4-bit codes has a byte (two neighbours along K) of rows n, n + 8 at columns k, k + 8, one of 8 bits two bytes of both rows.
Rows and columns that do not exist become codes of 0, which meet inputs that are 0 and results that are not written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.scheme.fast_path_rules import ocp_name
from fast.kernels.triton_gemv.select import Weight, weight_of
from fast.kernels.triton_small_m.decode import has_nibbles, words_of
from fast.launch.launcher import Call, CompiledLaunch, ceil_div, same_device
from fast.scale_factors import (
    BLOCK,
    FILLED,
    LEAST,
    ArrangedWeight,
    element_with_factors,
    element_with_levels,
    factors_of,
    filled,
    scales_with_parts,
    values_reason,
)
from reference import Quantized
from reference.formats.formats import FORMATS
from reference.quantize.quantize import check_quantized

#: Rows and columns of an atom.
ATOM = 64
#: Words of an atom, by the element.
WORDS = {"int4": 512, "int8": 1024, "e4m3": 1024, "e2m1": 512, "e4m3_mx": 1024, "nf4": 512}
#: Elements whose scales are factors.
FACTORED = ("e2m1", "e4m3_mx")
#: Zero points of int4 that decoding takes.
LOWEST, HIGHEST = -8, 7
WIDE = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def element_of(weight: Weight) -> str | None:
    """What a weight's elements are to the kernel; None where it has no decoding for them."""
    rule = weight.rule
    if rule.kind == "int" and rule.low in (-8, -128) and not rule.fraction_bits:
        return {4: "int4" if weight.packed else None, 8: "int8"}.get(int(rule.bits))
    is_e4m3 = ocp_name(FORMATS.get(weight.element, rule)) == "e4m3" and rule.bits == 8
    return "e4m3" if is_e4m3 and rule.zero == "" else None


def group_of(weight: Weight) -> int | None:
    """`ArrangedWeight.group`; None for blocks that a step of the kernel does not hold whole or is not a part of."""
    if weight.block <= 0 or (weight.block == weight.length and weight.block_rows == 1):
        return 0
    served = weight.block in (32, 64) or weight.block % FILLED == 0
    return weight.block if served and weight.block_rows == 1 else None


def arrange(w: Quantized) -> ArrangedWeight | None:
    """The private layout of a weight on its device; None where the kernel takes no such weight.

    Taken are two's complement integers of 4 bits (packed) and 8 bits and e4m3, with one scale in all, one a row, or one for
    each 32, 64 or multiple of 128 columns of a row, and for integers a zero point that is a code; MXFP8 of e4m3, MXFP4 and
    NVFP4 (both packed) whose scales are exact factors; NF4 (packed), K from LEAST on. Rows are whole blocks, and
    without blocks a multiple of 32 long.
    Errors are those of `check_quantized`.
    """
    check_quantized(w)
    weight = None if w.tiled else weight_of(w.scheme, tuple(w.shape), w.axis, w.packed)
    if weight is None or not same_device(w.codes, w.scale, w.zero, w.outer):
        return None
    if element_with_factors(w.scheme) is not None:
        return _arranged_factors(w)
    if element_with_levels(w.scheme) is not None:
        return _arranged_levels(w)
    element, group, rule = element_of(weight), group_of(weight), weight.rule
    plain = not rule.has_outer and not rule.two_level and rule.zero in ("", "code")
    whole = weight.rows > 0 and weight.length > 0 and not (group and weight.length % group)
    if element is None or group is None or not plain or not whole:
        return None
    scale, zero = _scales(w, weight, group), None
    if w.zero is not None:
        if element == "int4" and not LOWEST <= int(w.zero.min()) <= int(w.zero.max()) <= HIGHEST:
            return None
        zero = _zeros(w.zero, weight, group)
    if element == "e4m3":
        scale = _with_nan(scale, w.codes)
    shape = (weight.rows, weight.length)
    return ArrangedWeight(_words(w.codes, shape, element), scale, zero, shape, element, group)


def _arranged_factors(w: Quantized) -> ArrangedWeight | None:
    """A weight whose scales are multiplied into its elements."""
    (n, length), element = w.shape, str(element_with_factors(w.scheme))
    packed = w.packed == (w.scheme.format.bits < 8)
    whole = n > 0 and length > 0 and length % int(str(w.scheme.scale.block)) == 0
    if not packed or not whole or values_reason(w) is not None:
        return None
    if element == "e4m3_mx" and bool(((w.codes & 0x7F) == 0x7F).any()):
        return None
    factors = factors_of(w, filled(n), filled(length))
    group = int(str(w.scheme.scale.block))
    return ArrangedWeight(_words(w.codes, (n, length), element), factors, None, (n, length), element, group)


def _arranged_levels(w: Quantized) -> ArrangedWeight | None:
    """A weight whose elements are looked up."""
    n, length = w.shape
    if not w.packed or length % BLOCK or length < LEAST or not n:
        return None
    scale = scales_with_parts(w, filled(n), filled(length))
    return ArrangedWeight(_words(w.codes, (n, length), "nf4"), scale, None, (n, length), "nf4", BLOCK)


def _words(codes: torch.Tensor, shape: tuple[int, int], element: str, key: Any = None) -> torch.Tensor:
    along_n, along_k = (filled(length) // ATOM for length in shape)
    tail = (shape[0], codes.shape[1], element, WORDS[element])
    call = Call({"codes": codes})
    call.allocate("words", (along_n, along_k, WORDS[element]), torch.int32)
    call.launch(CompiledLaunch(arrange_kernel, (along_k, along_n, 1), tail, 4), ("codes", "words"))
    words: torch.Tensor = call.result("words", key)
    return words


def arranged_words(codes: torch.Tensor, element: str, key: Any = None) -> torch.Tensor:
    """The words of codes as they are stored, uint8 (N, K), of 4 bits (N, K / 2). key: see `dispatch`."""
    return _words(codes, (codes.shape[0], codes.shape[1] * (1024 // WORDS[element])), element, key)


def restored_codes(w: ArrangedWeight) -> torch.Tensor:
    """The codes as they were stored: uint8 (N, K), of 4 bits (N, K / 2)."""
    shape = (w.shape[0], ceil_div(w.shape[1], 1024 // WORDS[w.element]))
    return restored_words(w.words, shape, w.element)


def restored_words(
    words: torch.Tensor, shape: tuple[int, int], element: str, key: Any = None
) -> torch.Tensor:
    """Codes of this shape, of their words. key: see `dispatch`."""
    tail = (*shape, words.shape[1], element, 1024)
    call = Call({"words": words})
    call.allocate("codes", shape, torch.uint8)
    launch = CompiledLaunch(restore_kernel, (shape[0], ceil_div(shape[1], 1024), 1), tail, 4)
    call.launch(launch, ("words", "codes"))
    codes: torch.Tensor = call.result("codes", key)
    return codes


def _blocks(values: torch.Tensor, weight: Weight, group: int) -> torch.Tensor:
    """Values of blocks (N, blocks), or of the whole, as (blocks, rows): rows and columns filled."""
    values = values.reshape(-1, weight.length // group if group else 1).expand(weight.rows, -1)
    blocks = ceil_div(filled(weight.length), group) if group else 1
    result = values.new_zeros((blocks, filled(weight.rows)))
    result[: values.shape[1], : weight.rows] = values.t()
    return result


def _scales(w: Quantized, weight: Weight, group: int) -> torch.Tensor:
    scale = w.scale
    if weight.storage in WIDE:
        scale = scale.view(WIDE[weight.storage]).float()
    elif weight.storage == "float8_e8m0fnu":
        scale = scale.view(torch.float8_e8m0fnu).float()
    return _blocks(scale, weight, group)


def _zeros(zero: torch.Tensor, weight: Weight, group: int) -> torch.Tensor:
    """Pairs of zero points: of rows n, without bit 3, the low half, and of n + 8 the high one."""
    pairs = _blocks(zero.to(torch.int32), weight, group).unflatten(1, (-1, 2, 8))
    return ((pairs[:, :, 0] & 0xFFFF) | (pairs[:, :, 1] << 16)).flatten(1).contiguous()


def _with_nan(scale: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Rows with a code that is NaN get scales that are."""
    wrong = ((codes & 0x7F) == 0x7F).any(1)
    scale[:, : len(wrong)].masked_fill_(wrong, float("nan"))
    return scale


@triton.jit
def _place(i, ELEMENT: tl.constexpr):
    """Row (without bit 3) and column (without bits 3 and 0, for 8 bits without bit 0) of word i of an atom."""
    if has_nibbles(ELEMENT):
        return (i >> 7) * 16 + ((i >> 4) & 7), ((i >> 2) & 3) * 2 + ((i >> 1) & 1) * 32 + (i & 1) * 16
    else:
        n = ((i >> 7) & 3) * 16 + ((i >> 4) & 7)
        return n, ((i >> 2) & 3) * 2 + (i >> 9) * 32 + ((i >> 1) & 1) * 16 + (i & 1) * 8


@triton.jit
def _byte(codes, n, at, rows, BYTES: tl.constexpr):
    """Bytes of rows n, 0 where there is none."""
    exists = (n < rows) & (at < BYTES)
    return tl.load(codes + (n.to(tl.int64) * BYTES + at), mask=exists, other=0).to(tl.int32)


@triton.jit
def arrange_kernel(codes, words, rows, BYTES: tl.constexpr, ELEMENT: tl.constexpr, TILE: tl.constexpr):
    """The words of an atom: program (atom along K, atom along N). codes: uint8 (rows, BYTES); TILE: words of an atom."""
    atom = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    i = tl.arange(0, TILE)
    n, k = _place(i, ELEMENT)
    n, k = n + tl.program_id(1) * 64, k + tl.program_id(0) * 64
    word = i * 0
    if has_nibbles(ELEMENT):
        for place in tl.static_range(4):
            # A byte of nf4 stays one.
            c = _byte(codes, n + place % 2 * 8, (k + place // 2 * 8) // 2, rows, BYTES)
            if ELEMENT == "nf4":
                word = word | (c << (8 * place))
            else:
                word = word | ((c & 15) << (4 * place)) | ((c >> 4) << (4 * place + 16))
    else:
        for place in tl.static_range(4):
            word = word | (_byte(codes, n + place % 2 * 8, k + place // 2, rows, BYTES) << (8 * place))
    tl.store(words + (atom * TILE + i), word)


@triton.jit
def restore_kernel(
    words, codes, rows, BYTES: tl.constexpr, ATOMS: tl.constexpr, ELEMENT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """TILE bytes of a row of codes: program (row, tile), as rows may be more than 65535. ATOMS: atoms along K."""
    n = tl.program_id(0)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = (n // 16 % 4) * 128 + (n % 8) * 16
    half = n // 8 % 2
    if has_nibbles(ELEMENT):
        k = at * 2
        i = row + ((k >> 1) & 3) * 4 + ((k >> 5) & 1) * 2 + ((k >> 4) & 1)
        place = ((k >> 3) & 1) * 2 + half
    else:
        k = at
        i = ((k >> 5) & 1) * 512 + row + ((k >> 1) & 3) * 4 + ((k >> 4) & 1) * 2 + ((k >> 3) & 1)
        place = (k & 1) * 2 + half
    WORDS: tl.constexpr = words_of(ELEMENT)
    atom = (n // 64).to(tl.int64) * ATOMS + k // 64
    word = tl.load(words + (atom * WORDS + i), mask=at < BYTES, other=0)
    if has_nibbles(ELEMENT) and ELEMENT != "nf4":
        code = ((word >> (4 * place)) & 15) | (((word >> (4 * place + 16)) & 15) << 4)
    else:
        code = (word >> (8 * place)) & 255
    tl.store(codes + (n.to(tl.int64) * BYTES + at), code.to(tl.uint8), mask=at < BYTES)


__all__ = ["ArrangedWeight", "arrange", "arranged_words", "restored_codes", "restored_words"]
