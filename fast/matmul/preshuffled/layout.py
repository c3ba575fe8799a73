"""The preshuffled layout of a stored weight (N, K), or of experts' weights (E, N, K), and back to exactly its parts, as torch
operations on any device.

codes   int32 (N / 64, K / 64, words): atoms of 64 rows by 64 columns, 512 words of 4-bit codes or 1024 of 8-bit ones
scale   float32 (blocks, N): what a program reads of a block lies side by side; narrower storage is widened, exactly;
        or int32 (rows of words, N / 2) of scales that are multiplied into elements, and an outer one (`fast.scale_factors`);
        of nf4 int32 (rows of words, N), their parts behind them (`fast.scale_factors`)
zero    int32 (blocks, N / 2): the zero points of rows n and n + 8, 16 bits each; None without

Parts of experts' weights have an axis of experts in front, so that an expert's are a view of them.

By the bits of rows n and columns k (n3 is bit 3 of n), from the slowest index (`fast/kernels/triton_small_m/decode.py`):

    4 bits  words n5 n4 | n2 n1 n0 | k2 k1 | k5 | k4          nibbles of a word: k0 k3 n3, of nf4 k3 n3 k0
    8 bits  words k5 | n5 n4 | n2 n1 n0 | k2 k1 | k4 | k3     bytes of a word:   k0 n3

N and K above are the weight's, filled by zeros to multiples of 128, where words are as many bytes as the codes. Those of the
weight are `Quantized.shape`, to which parts are cut as they come back. `fast.kernels.triton_small_m` arranges and restores on a
GPU; words and rows here are the same bits, and also what a tracer records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from fast.dispatch import is_traced
from fast.scale_factors import (
    BLOCK,
    ELEMENTS,
    FILLED,
    LEAST,
    ValueRule,
    element_with_factors,
    element_with_levels,
    factors_of,
    filled,
    first_broken,
    group_of,
    parts_of,
    scales_of,
    scales_with_parts,
    values_rules,
)
from reference import Quantized, Scheme

#: Lengths of experts are multiples of this, 16 bytes, where torch multiplies them made dense (`torch._grouped_mm`).
GROUPED = 8
#: Those of 4 bits.
NIBBLES = ("int4", "nf4")
#: Blocks along K are one of these, multiples of FILLED, or whole rows.
SMALL_BLOCKS = (32, 64)
#: torch's dtypes of scales by their storage.
STORAGES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
}  # fmt: skip
#: Zero points of 4-bit codes that the kernel takes.
LOWEST, HIGHEST = -8, 7


def scheme_reason(scheme: Scheme, shape: tuple[int, ...], axis: int) -> str | None:
    """Why no weight of a scheme and shape is preshuffled, whatever its values; None where it is."""
    if len(shape) not in (2, 3) or axis != len(shape) - 1:
        return "it must be a matrix, or experts' matrices, with blocks along its last axis"
    if not all(shape):
        return f"it must have rows and columns, got {tuple(shape)}"
    if len(shape) == 3 and any(length % GROUPED for length in shape[1:]):
        return f"lengths of experts must be multiples of {GROUPED}, got {tuple(shape)}"
    if scheme.element not in ELEMENTS:
        return f"its elements must be {', '.join(ELEMENTS)}, got {scheme.element}"
    if element_with_factors(scheme) is not None:
        return _cut_reason(int(str(scheme.scale.block)), shape)
    if scheme.element == "float4_e2m1fn":
        return "blocks of its elements must be 32 columns of e8m0 scales, or 16 of e4m3 ones under an outer scale that decodes"
    if scheme.element == "nf4":
        return _levels_reason(scheme, shape)
    scale, zero = scheme.scale, scheme.zero
    if scheme.outer is not None or scale.stored != "decode" or scale.storage not in STORAGES:
        return f"each block must have one scale for decoding, in {', '.join(STORAGES)}"
    if zero is not None and (zero.rule != "code" or zero.storage != "int8" or scale.block == "tensor"):
        return "zero points must be codes, of blocks or rows"
    block = scale.block
    if block == "tensor" and len(shape) == 3:
        return "each expert must have scales of its own"
    if block in (-1, "tensor", shape[-1]):
        return None
    if not isinstance(block, int) or block <= 0 or (block not in SMALL_BLOCKS and block % FILLED):
        return f"blocks must be {SMALL_BLOCKS[0]}, {SMALL_BLOCKS[1]} or a multiple of {FILLED} columns, or rows, got {block}"
    return _cut_reason(block, shape)


def _cut_reason(block: int, shape: tuple[int, ...]) -> str | None:
    """Why rows of a shape are not in blocks of so many columns; None where they are."""
    return (
        f"its rows must be whole blocks of {block} columns, got {tuple(shape)}" if shape[-1] % block else None
    )


def _levels_reason(scheme: Scheme, shape: tuple[int, ...]) -> str | None:
    """The same of NF4, whose blocks are of the flattened weight."""
    if element_with_levels(scheme) is None:
        return "its scales must be those of scheme nf4"
    if len(shape) != 2 or shape[1] < LEAST:
        return f"NF4 must be a matrix of {LEAST} columns or more"
    return _cut_reason(BLOCK, shape)


def unsupported_reason(q: Quantized) -> str | None:
    """Why a stored weight is not preshuffled: `stored_reason`, or a value from which its parts would not come back."""
    return stored_reason(q) or first_broken(_rules(q))


def unsupported_reasons(weights: Iterable[Quantized]) -> list[str | None]:
    """`unsupported_reason` of each: the host waits for all of their values once, in place of once a rule of each."""
    stored = [(stored_reason(q), q) for q in weights]
    rules = [[] if reason is not None else [*_rules(q)] for reason, q in stored]
    broken = iter(_known([flag for each in rules for flag, _ in each]))
    found = [[rule for _, rule in each if next(broken)] for each in rules]
    return [next(iter(each), reason) for (reason, _), each in zip(stored, found, strict=True)]


def _known(flags: list[torch.Tensor]) -> list[bool]:
    """Booleans on any devices, each device waited for once."""
    known: dict[int, bool] = {}
    for device in {flag.device for flag in flags}:
        here = [place for place, flag in enumerate(flags) if flag.device == device]
        known.update(zip(here, torch.stack([flags[place] for place in here]).tolist(), strict=True))
    return [known[place] for place in range(len(flags))]


def stored_reason(q: Quantized) -> str | None:
    """Why a stored weight is not preshuffled, whatever its values: `scheme_reason`, or how its parts lie."""
    reason = scheme_reason(q.scheme, tuple(q.shape), q.axis)
    if reason is not None:
        return reason
    if q.tiled or q.packed != (q.scheme.format.bits < 8):
        return "its scales must be plain, and its codes packed where they have 4 bits"
    if q.scheme.element == "nf4":
        return "its scales are not known while a program is traced" if is_traced(q.codes) else None
    if _values_decide(q) and is_traced(q.codes):
        return "whether its values can be is not known while a program is traced"
    return None


def _values_decide(q: Quantized) -> bool:
    """Whether there are `_rules`."""
    element, half = q.scheme.element, q.scheme.scale.storage == "float16"
    narrow = element == "int4" and q.zero is not None
    return narrow or half or element == "float8_e4m3fn" or element_with_factors(q.scheme) is not None


def _rules(q: Quantized) -> Iterator[ValueRule]:
    """Of the values of a weight that `stored_reason` takes; nothing is waited for."""
    element = q.scheme.element
    if element == "int4" and q.zero is not None:
        outside = ((q.zero < LOWEST) | (q.zero > HIGHEST)).any()
        yield outside, f"zero points of 4-bit codes must be {LOWEST} to {HIGHEST}"
    if element == "float8_e4m3fn":
        yield ((q.codes & 0x7F) == 0x7F).any(), "none of its codes may be NaN"
    if element_with_factors(q.scheme) is not None:
        yield from values_rules(q)
    elif q.scheme.scale.storage == "float16":
        yield _wide(q).isnan().any(), "none of its scales may be NaN"


def preshuffled(q: Quantized, words: torch.Tensor | None = None) -> Quantized:
    """A stored weight with codes, scale and zero point of the module text; ValueError with the rule for others.

    words: its codes, where a kernel has arranged them.
    """
    reason = unsupported_reason(q)
    if reason is not None:
        raise ValueError(f"a weight {tuple(q.shape)} in {q.scheme.name} is not preshuffled: {reason}")
    return rearranged(q, words)


def rearranged(q: Quantized, words: torch.Tensor | None = None) -> Quantized:
    """`preshuffled` of a weight of which it is known that it can be: its values are not looked at again."""
    codes = arranged(rows_in_all(q.codes), ELEMENTS[q.scheme.element]) if words is None else words
    codes = codes.reshape(*q.shape[:-2], -1, *codes.shape[1:])
    rows, columns = filled(q.shape[-2]), filled(q.shape[-1])
    if q.scheme.element == "nf4":
        return replace(q, codes=codes, scale=scales_with_parts(q, rows, columns), outer=None, zero=None)
    factors = element_with_factors(q.scheme) is not None
    scale = factors_of(q, rows, columns) if factors else _blocks(_wide(q), q)
    return replace(q, codes=codes, scale=scale, zero=None if q.zero is None else _pairs(q))


def restored(q: Quantized, codes: torch.Tensor | None = None) -> Quantized:
    """What `preshuffled` was given. codes: they, where a kernel has restored them, in `shape_in_all`."""
    if codes is None:
        codes = all_rows(atoms_in_all(q.codes), ELEMENTS[q.scheme.element])
    rows = q.shape[-2]
    each = codes.reshape(*q.shape[:-2], -1, codes.shape[-1])
    codes = each[..., :rows, : bytes_of_row(q)].contiguous()
    if element_with_factors(q.scheme) is not None:
        scale, outer = scales_of(q.scale, q.scheme)
        return replace(q, codes=codes, scale=scale[..., :rows, : _blocks_of_row(q)].contiguous(), outer=outer)
    if q.scheme.element == "nf4":
        scale, outer, mean = parts_of(q.scale, q.shape, filled(q.shape[1]))
        return replace(q, codes=codes, scale=scale, outer=outer, zero=mean)
    scale = _narrow(q.scale, q.scheme.scale.storage)
    one = q.scheme.scale.block == "tensor"
    scale = scale[0, 0].clone() if one else _turned(scale[..., : _blocks_of_row(q), :rows])
    zero = None if q.zero is None else _turned(_singles(q.zero)[..., : _blocks_of_row(q), :rows])
    return replace(q, codes=codes, scale=scale, zero=zero)


def shape_in_all(q: Quantized) -> tuple[int, int]:
    """Rows and bytes of the codes of a preshuffled weight, of experts as of one tall matrix, each one's rows filled."""
    rows = q.shape[0] if len(q.shape) == 2 else q.shape[0] * filled(q.shape[1])
    return rows, bytes_of_row(q)


def bytes_of_row(q: Quantized) -> int:
    """Bytes of the codes of a row."""
    return -(-q.shape[-1] * q.scheme.format.bits // 8)


def _blocks_of_row(q: Quantized) -> int:
    """Scales of a row."""
    group = group_of(q.scheme, q.shape[-1])
    return q.shape[-1] // group if group else 1


def rows_restored(q: Quantized, index: torch.Tensor) -> Quantized:
    """Rows of a preshuffled weight as they were stored, by their numbers (R,): a weight (R, K); nothing else is looked at.

    ValueError of NF4, as scales of rows are not those of a weight of its scheme.
    """
    if q.scheme.element == "nf4":
        raise ValueError(
            f"rows of a weight in {q.scheme.name} are no weight in it; dequantize it, or restore it whole"
        )
    codes = rows_of(q.codes, ELEMENTS[q.scheme.element], index)[:, : bytes_of_row(q)].contiguous()
    shape, blocks = (index.shape[0], q.shape[1]), _blocks_of_row(q)
    if element_with_factors(q.scheme) is not None:
        scale, outer = scales_of(q.scale, q.scheme, index)
        return replace(q, codes=codes, scale=scale[:, :blocks].contiguous(), outer=outer, shape=shape)
    one, storage = q.scheme.scale.block == "tensor", q.scheme.scale.storage
    scale = (
        _narrow(q.scale[:1, :1], storage)[0, 0].clone()
        if one
        else _turned(_narrow(q.scale[:blocks, index], storage))
    )
    zero = None if q.zero is None else _turned(_singles(q.zero)[:blocks])[index]
    return replace(q, codes=codes, scale=scale, zero=zero, shape=shape)


def rows_in_all(codes: torch.Tensor) -> torch.Tensor:
    """Codes of experts as those of one tall matrix, which their words are too: rows of each are filled."""
    if codes.dim() == 3 and (missing := filled(codes.shape[1]) - codes.shape[1]):
        codes = torch.nn.functional.pad(codes, (0, 0, 0, missing))
    return codes.reshape(-1, codes.shape[-1])


def atoms_in_all(words: torch.Tensor) -> torch.Tensor:
    """Words of experts as those of one tall matrix."""
    return words.reshape(-1, *words.shape[-2:])


def filled_codes(shape: Sequence[int], element: str) -> tuple[int, int]:
    """Rows and bytes of filled codes."""
    n, bytes_ = shape
    return filled(n), filled(2 * bytes_) // 2 if element in NIBBLES else filled(bytes_)


def arranged(codes: torch.Tensor, element: str) -> torch.Tensor:
    """The words of codes: uint8 (N, K), or (N, K / 2) of 4 bits, filled by zeros."""
    n, bytes_ = filled_codes(codes.shape, element)
    if (n, bytes_) != tuple(codes.shape):
        codes = torch.nn.functional.pad(codes, (0, bytes_ - codes.shape[1], 0, n - codes.shape[0]))
    if element == "int4":
        # Axes an, n54, n3, n210, ak, k5, k4, k3, k21: a byte has k0.
        split = codes.reshape(n // 64, 4, 2, 8, bytes_ // 32, 2, 2, 2, 4)
        first, second = split.unbind(2)
        both = torch.stack([(first & 15) | (second << 4), (first >> 4) | (second & 0xF0)], -1)
        # an, n54, n210, ak, k5, k4, k3, k21, k0: a byte has n3.
        order = both.permute(0, 3, 1, 2, 7, 4, 5, 8, 6)
        return order.contiguous().view(-1).view(torch.int32).reshape(n // 64, bytes_ // 32, 512)
    if element == "nf4":
        # Axes an, n54, n3, n210, ak, k5, k4, k3, k21: a byte has k0, and a word bytes k3 n3.
        split = codes.reshape(n // 64, 4, 2, 8, bytes_ // 32, 2, 2, 2, 4)
        order = split.permute(0, 4, 1, 3, 8, 5, 6, 7, 2)
        return order.contiguous().view(-1).view(torch.int32).reshape(n // 64, bytes_ // 32, 512)
    # Axes an, n54, n3, n210, ak, k5, k4, k3, k21, k0.
    split = codes.reshape(n // 64, 4, 2, 8, bytes_ // 64, 2, 2, 2, 4, 2)
    order = split.permute(0, 4, 5, 1, 3, 8, 6, 7, 9, 2)
    return order.contiguous().view(-1).view(torch.int32).reshape(n // 64, bytes_ // 64, 1024)


def rows_of(words: torch.Tensor, element: str, index: torch.Tensor) -> torch.Tensor:
    """Codes of the rows of these numbers (R,), as they were stored: uint8 (R, K), or (R, K / 2) of 4 bits."""
    along_n, along_k, _ = words.shape
    atom, n54, n3, n210 = index >> 6, (index >> 4) & 3, (index >> 3) & 1, index & 7
    stored = words.reshape(-1).view(torch.uint8)
    if element == "int4":
        # Rows, ak, k21, k5, k4, k0, k3: a byte has n3.
        result = stored.reshape(along_n, along_k, 4, 8, 4, 2, 2, 2, 2)[atom, :, n54, n210]
        nibbles = torch.where((n3 == 0).reshape(-1, *[1] * 6), result & 15, result >> 4)
        low, high = nibbles.unbind(5)
        return (low | (high << 4)).permute(0, 1, 3, 4, 5, 2).reshape(index.shape[0], 32 * along_k)
    if element == "nf4":
        # Rows, ak, k21, k5, k4, k3.
        result = stored.reshape(along_n, along_k, 4, 8, 4, 2, 2, 2, 2)[atom, :, n54, n210, ..., n3]
        return result.permute(0, 1, 3, 4, 5, 2).reshape(index.shape[0], 32 * along_k)
    # Rows, ak, k5, k21, k4, k3, k0.
    result = stored.reshape(along_n, along_k, 2, 4, 8, 4, 2, 2, 2, 2)[atom, :, :, n54, n210, ..., n3]
    return result.permute(0, 1, 2, 4, 5, 3, 6).reshape(index.shape[0], 64 * along_k)


def all_rows(words: torch.Tensor, element: str) -> torch.Tensor:
    """`rows_of` of every row."""
    return rows_of(words, element, torch.arange(64 * words.shape[0], device=words.device))


def _wide(q: Quantized) -> torch.Tensor:
    """Scales as float32."""
    storage = STORAGES[q.scheme.scale.storage]
    scale: torch.Tensor = q.scale
    return scale if storage == torch.float32 else scale.view(storage).float()


def _narrow(scale: torch.Tensor, storage: str) -> torch.Tensor:
    """Widened scales as they were stored: by their bits, which no rounding has part in."""
    if storage == "float32":
        return scale
    if storage == "float16":
        return scale.half().view(torch.uint16)
    bits = scale.contiguous().view(torch.int32)
    if storage == "bfloat16":
        return (bits >> 16).to(torch.int16).view(torch.uint16)
    return ((bits >> 23) & 255).to(torch.uint8)


def _blocks(values: torch.Tensor, q: Quantized) -> torch.Tensor:
    """Values of blocks (..., N, blocks), or of the whole, as (..., blocks, N), filled by zeros."""
    rows, columns = q.shape[-2:]
    values = values.reshape(1, 1).expand(rows, 1) if values.dim() == 0 else values
    group = group_of(q.scheme, columns)
    missing = (-(-filled(columns) // group) if group else 1) - values.shape[-1], filled(rows) - rows
    if any(missing):
        values = torch.nn.functional.pad(values, (0, missing[0], 0, missing[1]))
    return _turned(values)


def _turned(values: torch.Tensor) -> torch.Tensor:
    """The transposed in memory of its own: in place of one layout the other may change."""
    return values.transpose(-2, -1).clone(memory_format=torch.contiguous_format)


def _pairs(q: Quantized) -> torch.Tensor:
    """Zero points as pairs: of row n, without bit 3, the low half, and of n + 8 the high one."""
    low, high = _blocks(q.zero.to(torch.int32), q).unflatten(-1, (-1, 2, 8)).unbind(-2)
    return ((low & 0xFFFF) | (high << 16)).flatten(-2).contiguous()


def _singles(pairs: torch.Tensor) -> torch.Tensor:
    """Zero points (..., blocks, N) of pairs, as int8."""
    split = pairs.unflatten(-1, (-1, 8))
    both: Any = torch.stack([(split << 16) >> 16, split >> 16], -2)
    result: torch.Tensor = both.flatten(-3).to(torch.int8)
    return result


__all__ = [
    "all_rows",
    "arranged",
    "atoms_in_all",
    "bytes_of_row",
    "filled",
    "filled_codes",
    "preshuffled",
    "rearranged",
    "restored",
    "rows_in_all",
    "rows_of",
    "rows_restored",
    "scheme_reason",
    "shape_in_all",
    "stored_reason",
    "unsupported_reason",
    "unsupported_reasons",
]
