"""A preshuffled weight as kernels read it, and what it stores of the scales of blocks: factors of decoded elements, and the two
parts of NF4's levels.

Scales that are multiplied into 16-bit elements without rounding, as the product of few rows stores them.

A power of two times e2m1 or e4m3, and an e4m3 scale times e2m1, have at most 8 significant bits: bfloat16 holds them. So these
scales are factors of the decoded weight and not of the sums, and a product reads 2 bytes of one, of a power of two 1:

    int32 (rows, N / 2)    row 0        float32 bits of the weight's own scale, N / 2 times: the outer scale, or 2**S of weights
                                        with scales beyond what a factor holds
                           the others   blocks of 16: (K / 64, N / 2, 4) factors of rows n, the low half, and n + 8
                                        blocks of 32: (K / 64, N / 2) exponent fields of rows n, blocks 0 and 1, and n + 8

A factor is the bfloat16 scale times 2**(EXPONENTS - S), which is also what decoding lacks: the bits of an element, put into a
bfloat16 as they are, are that many powers of two too small. Experts have an axis in front.

Scales of NF4's blocks as the product of few rows stores them: one in float32 for each block, and behind them their parts.

    int32 (rows, N)   K / 64 rows   float32 bits of scales of blocks of 64 columns: code / outer scale + mean, as `dequantize`
                      the others    16 levels; outer scales; their mean; int8 codes of the scales, four in a word; zeros

The stored parts come back exactly.

A level is decoded as hi + SECOND * mid, 16-bit floats with one sign and one high byte, so that decoding looks up three bytes
and not four. Their sums are put together in float32. In bfloat16 a level is 2**-15.97 off, relatively, or 262 roundings of
float32: `reference.linear_error_bound` has 2 K + 6 of them and sums take 19/16 K, so K must be LEAST or more. In float16 it is
2**-19. Levels -1, 0 and 1 are exact; both terms have one sign, so that an infinite input is no NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from reference import SCHEMES, Quantized, Scheme
from reference.schemes.schemes import record_of

#: What elements are to the kernel, or to those that arrange codes: all of 4 bits but nf4 have one order.
ELEMENTS = {"int4": "int4", "int8": "int8", "float8_e4m3fn": "e4m3", "float4_e2m1fn": "int4", "nf4": "nf4"}
#: Rows and columns are filled to multiples of this.
FILLED = 128
#: Columns of a block.
BLOCK = 64
#: Blocks of an outer scale.
GROUP = 256
LEVELS = 16
#: The fewest columns of a weight.
LEAST = 384
#: The code of a scale that is NaN.
CODEBOOK_NAN = -128
#: What the second term of a level is multiplied by.
SECOND = 0.01953125
#: Patterns of both terms of the levels by dtype.
TERMS = {
    "bfloat16": (
        (0xBF7B, 0xBF80), (0xBF2B, 0xBFB9), (0xBF03, 0xBF2F), (0xBEC8, 0xBE61), (0xBE8E, 0xBEBA), (0xBE37, 0xBE9F),
        (0xBDB8, 0xBD7D), (0x0000, 0x0000), (0x3D9E, 0x3DFF), (0x3E22, 0x3E0F), (0x3E76, 0x3E9A), (0x3EAB, 0x3E4E),
        (0x3EE0, 0x3E28), (0x3F09, 0x3FB4), (0x3F34, 0x3F82), (0x3F7B, 0x3F80),
    ),
    "float16": (
        (0xBBDD, 0xBB00), (0xB974, 0xB9F6), (0xB81E, 0xB845), (0xB632, 0xB651), (0xB477, 0xB46A), (0xB1D0, 0xB122),
        (0xADB6, 0xADF4), (0x0000, 0x0000), (0x2CFF, 0x2CF8), (0x310A, 0x31AB), (0x33BC, 0x333B), (0x354B, 0x35D2),
        (0x36ED, 0x366E), (0x3868, 0x38D9), (0x39AD, 0x3986), (0x3BDD, 0x3B00),
    ),
}  # fmt: skip


def filled(length: int) -> int:
    """Rows or columns, and those that fill them."""
    return -(-length // FILLED) * FILLED


@dataclass(frozen=True)
class ArrangedWeight:
    """Tensors of a preshuffled weight (`fast.matmul.preshuffled.layout`) and what kernels have to know of them. shape: (N, K);
    element, group: see `form_of`."""

    words: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    shape: tuple[int, int]
    element: str
    group: int

    @property
    def rows(self) -> int:
        """N, filled."""
        return filled(self.shape[0])

    @property
    def columns(self) -> int:
        """K, filled."""
        return filled(self.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of the weight."""
        return self.words.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)


def check_row_scales(
    x_scale: torch.Tensor | None, x: torch.Tensor, count: int, name: str = "linear_small"
) -> None:
    """ValueError, of the kernel of this name, where there are scales of inputs that are not one in float32 for each row, beside
    them on their device."""
    if x_scale is None:
        return
    if x_scale.numel() != count or x_scale.dtype != torch.float32 or x_scale.device != x.device:
        raise ValueError(
            f"{name}: scales {tuple(x_scale.shape)} in {x_scale.dtype} on {x_scale.device} of inputs {tuple(x.shape)} on "
            f"{x.device}: there must be one in float32 for each row, on the same device"
        )


def element_with_levels(scheme: Scheme) -> str | None:
    """ "nf4" of the default NF4, whatever its name; None of all others."""
    return _element(scheme.key) if scheme.element == SCHEMES["nf4"].element else None


@lru_cache(maxsize=1024)
def _element(key: str) -> str | None:
    scheme = record_of(key)
    return "nf4" if replace(scheme, name="nf4") == SCHEMES["nf4"] else None


def block_scales(q: Quantized) -> torch.Tensor:
    """Scales (N, K / 64) of a plain weight in float32: each step rounded, the largest number in place of infinity."""
    codes = q.scale.reshape(-1).float()
    codes = torch.where(q.scale.reshape(-1) == CODEBOOK_NAN, torch.nan, codes)
    values = codes / q.outer.reshape(-1).repeat_interleave(GROUP)[: codes.shape[0]] + q.zero
    largest = torch.finfo(torch.float32).max
    values = torch.where(values == torch.inf, largest, values)
    return values.reshape(q.shape[0], -1)


def rows_with_parts(rows: int, columns: int, blocks: int) -> int:
    """Rows of all of the module text, of a weight filled to as many rows and columns; blocks: those that it has."""
    words = LEVELS + -(-blocks // GROUP) + 1 + -(-blocks // 4)
    return columns // BLOCK + -(-words // rows)


def scales_with_parts(q: Quantized, rows: int, columns: int) -> torch.Tensor:
    """The scales of a plain weight (N, K) in the order of the module text, of as many rows and columns, filled by zeros."""
    scales, codes = block_scales(q), q.scale.reshape(-1)
    missing = (0, columns // BLOCK - scales.shape[1], 0, rows - scales.shape[0])
    levels = torch.tensor(q.scheme.format.values.tolist(), device=scales.device)
    packed = torch.nn.functional.pad(codes, (0, -codes.shape[0] % 4)).view(torch.int32)
    floats = (levels, q.outer.reshape(-1), q.zero.reshape(1))
    words = torch.cat([*(part.contiguous().view(torch.int32) for part in floats), packed])
    words = torch.nn.functional.pad(words, (0, -words.shape[0] % rows)).reshape(-1, rows)
    turned = torch.nn.functional.pad(scales, missing).t().contiguous()
    return torch.cat([turned.view(torch.int32), words])


def parts_of(
    stored: torch.Tensor, shape: tuple[int, ...], columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of scales, outer scales and their mean that `scales_with_parts` was given, of a weight (N, K). columns: filled."""
    blocks = shape[0] * shape[1] // BLOCK
    groups = -(-blocks // GROUP)
    words = stored[columns // BLOCK :].reshape(-1)[LEVELS:]
    outer, mean, codes = words[:groups], words[groups], words[groups + 1 :].view(torch.int8)[:blocks]
    return codes.clone(), outer.clone().view(torch.float32), mean.clone().view(torch.float32)


#: What elements are to the kernel where their scales are factors, by format, storage and columns of a block.
FORMS = {
    ("float4_e2m1fn", "float8_e8m0fnu", 32): "e2m1",
    ("float4_e2m1fn", "float8_e4m3fn", 16): "e2m1",
    ("float8_e4m3fn", "float8_e8m0fnu", 32): "e4m3_mx",
}
#: Powers of two in a factor, by element and columns of a block. Of blocks of 16 columns 8 fewer than decoding lacks, as their
#: scales go up to 448: a product of theirs is 2**-8 of the weight's.
EXPONENTS = {("e2m1", 32): 126, ("e2m1", 16): 118, ("e4m3_mx", 32): 120}
#: Exponents of the smallest elements.
SMALLEST = {"e2m1": -1, "e4m3_mx": -9}
#: Outer scales from here on are not taken: sums of a product times these may be beyond float32 where its result is not.
OUTER = 2.0**119
#: The largest exponent field of a number, and NaN among powers of two.
LARGEST, NAN = 254, 255
#: Rows of words for columns, by those of a block.
COLUMNS = {16: 16, 32: 64}


def element_with_factors(scheme: Scheme) -> str | None:
    """What elements of a scheme with such scales are to the kernel; None where it has others, or a zero point."""
    scale, outer = scheme.scale, scheme.outer
    if not isinstance(scale.block, int) or scheme.zero is not None or scale.stored != "decode":
        return None
    element = FORMS.get((scheme.element, scale.storage, scale.block))
    single = outer is None or (
        scale.storage == "float8_e4m3fn" and outer.block == "tensor" and outer.stored == "decode"
    )
    plain = scheme.outer_order not in ("encode", "folded") or outer is None
    return element if single and plain else None


def form_of(scheme: Scheme, length: int) -> tuple[str, int]:
    """What the elements of rows of a length are to the kernel, and columns of a block: 0 where a row, or the whole weight, is
    one."""
    if element_with_levels(scheme) is not None:
        return "nf4", BLOCK
    return element_with_factors(scheme) or ELEMENTS[scheme.element], group_of(scheme, length)


def group_of(scheme: Scheme, length: int) -> int:
    """Columns of a block of rows of a length; 0 where a row, or the whole weight, is one."""
    block = scheme.scale.block
    return block if isinstance(block, int) and block not in (-1, length) else 0


def exponent_of(scheme: Scheme) -> int:
    """Of `EXPONENTS`."""
    return EXPONENTS[(str(element_with_factors(scheme)), int(str(scheme.scale.block)))]


#: A rule of stored values: whether they break it, a boolean on their device, and what it says.
ValueRule = tuple[torch.Tensor, str]


def first_broken(rules: Iterable[ValueRule]) -> str | None:
    """What the first rule says that values break, each looked at after those before it; None where all hold."""
    return next((rule for broken, rule in rules if bool(broken)), None)


def values_reason(q: Quantized) -> str | None:
    """Why the scales of a plain weight are no factors of its elements, exactly; None where they are."""
    return first_broken(values_rules(q))


def values_rules(q: Quantized) -> Iterator[ValueRule]:
    """The rules of `values_reason`; nothing is waited for."""
    scheme = q.scheme
    if scheme.scale.storage == "float8_e4m3fn":
        yield ((q.scale & 0x7F) == 0x7F).any(), "none of its scales may be NaN"
        if q.outer is not None:
            large = ((q.outer.abs() >= OUTER) & q.outer.isfinite()).any()
            yield large, f"its outer scale must be below {OUTER:.0e}"
        return
    yield (q.scale == NAN).any(), "none of its scales may be NaN"
    element = str(element_with_factors(scheme))
    block = int(str(scheme.scale.block)) * scheme.format.bits // 8
    codes = q.codes & (0x77 if scheme.format.bits == 4 else 0x7F)
    filled = (codes.unflatten(-1, (-1, block)) != 0).any(-1)
    least = _shift(q.scale, exponent_of(scheme)) + 1 - SMALLEST[element]
    yield (
        (filled & (q.scale < least)).any(),
        "scales of blocks that are not all zero must leave their elements 2**-126 or more, of the largest scale's part",
    )


def _shift(scale: torch.Tensor, exponent: int) -> torch.Tensor:
    """S of weights (..., 1, 1): what the largest power of two is beyond a factor."""
    return (scale.to(torch.int32).amax((-2, -1), keepdim=True) + (exponent - LARGEST)).clamp(min=0)


def factors_of(q: Quantized, rows: int, columns: int) -> torch.Tensor:
    """Scales of a plain weight (..., N, K) in the order of the module text, of as many rows and columns, filled by zeros."""
    exponent, block = exponent_of(q.scheme), int(str(q.scheme.scale.block))
    missing = (0, columns // block - q.scale.shape[-1], 0, rows - q.scale.shape[-2])
    if block == 16:
        values = q.scale.view(torch.float8_e4m3fn).float() * 2.0**exponent
        fields = values.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
        own = torch.ones((), device=q.scale.device) if q.outer is None else q.outer.float()
        own = own.view(torch.int32).reshape([1] * fields.dim()).expand(*fields.shape[:-2], 1, 1)
    else:
        shift = _shift(q.scale, exponent)
        fields, own = q.scale.to(torch.int32) + exponent - shift, (shift + 127) << 23
    fields = torch.nn.functional.pad(fields, missing)
    if block == 32:
        fields = fields[..., 0::2] | (fields[..., 1::2] << 8)
    low, high = fields.unflatten(-2, (-1, 2, 8)).unbind(-3)
    pairs = (low | (high << 16)).flatten(-3, -2)
    # Words of an atom's columns and a pair of rows: side by side.
    ordered = pairs.unflatten(-1, (-1, 64 // COLUMNS[block])).transpose(-3, -2)
    return torch.cat(
        [own.expand(*own.shape[:-1], rows // 2), ordered.reshape(*pairs.shape[:-2], -1, rows // 2)], -2
    )


def scales_of(
    factors: torch.Tensor, scheme: Scheme, index: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales (..., N, K / block), filled, and the outer scale that `factors_of` was given. index: numbers of rows, of these."""
    exponent, block = exponent_of(scheme), int(str(scheme.scale.block))
    own, ordered = factors[..., :1, :1], factors[..., 1:, :]
    each = 64 // COLUMNS[block]
    pairs = ordered.reshape(*factors.shape[:-2], -1, factors.shape[-1], each).transpose(-3, -2)
    fields = _halves(pairs.flatten(-2), index)
    if block == 16:
        values = (fields << 16).view(torch.float32) * 2.0**-exponent
        outer = own.reshape(-1)[0].clone().view(torch.float32) if scheme.outer is not None else None
        return values.to(torch.float8_e4m3fn).view(torch.uint8), outer
    both = torch.stack([fields & 255, fields >> 8], -1).flatten(-2)
    return (both - exponent + ((own >> 23) - 127)).to(torch.uint8), None


def _halves(pairs: torch.Tensor, index: torch.Tensor | None) -> Any:
    """Of pairs (..., N / 2, blocks) those of all rows in order, or of some."""
    if index is not None:
        result = pairs[(index >> 4) * 8 + (index & 7)]
        return torch.where(((index >> 3) & 1)[:, None] == 0, result & 0xFFFF, (result >> 16) & 0xFFFF)
    split = pairs.unflatten(-2, (-1, 8))
    return torch.stack([split & 0xFFFF, (split >> 16) & 0xFFFF], -3).flatten(-4, -2)


def rows_of_words(columns: int, block: int) -> int:
    """Rows of the words of a weight of as many columns, its own scale among them."""
    return 1 + columns // COLUMNS[block]


__all__ = [
    "BLOCK",
    "ELEMENTS",
    "EXPONENTS",
    "FILLED",
    "LEAST",
    "SECOND",
    "TERMS",
    "ArrangedWeight",
    "check_row_scales",
    "element_with_factors",
    "element_with_levels",
    "exponent_of",
    "factors_of",
    "filled",
    "first_broken",
    "form_of",
    "group_of",
    "parts_of",
    "rows_of_words",
    "rows_with_parts",
    "scales_of",
    "scales_with_parts",
    "values_reason",
    "values_rules",
]
