"""`ao-lab schemes`: the records of quantization schemes as a table, and one of them in words.

Everything shown is read from the records in `reference`; no number is typed here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ao_lab.cli.listings import known
from ao_lab.cli.terminal import number, print_json, print_table, say

if TYPE_CHECKING:
    from reference.schemes.schemes import Block, Scale, Scheme

COLUMNS = ("scheme", "bits", "element", "block", "scale", "stored as", "also")
#: What the fields of a record say, by their names in `Scheme` and in its scales; the rules are in those classes.
MEANINGS = {
    "element": "format of the values",
    "block": "values that share a scale",
    "statistic": "taken of a block's values",
    "target": "what the statistic maps onto",
    "rule": "how the scale comes from the statistic",
    "compute": "precision in which the scale is computed",
    "stored": "decode: a scale multiplies codes; encode: it multiplies values",
    "by_reciprocal": "the ratio is target * (1 / statistic), rounded twice",
    "floor": "the smallest statistic, scale or stored scale",
    "nonfinite": "what an infinite or NaN outer scale becomes",
    "zero.rule": "code: an integer in the codes' range; value: a float that is added",
    "storage": "format in which it is stored",
    "center": "mean: the mean of the scales is subtracted before they are quantized",
    "partial": "the last block of an axis may be short",
    "even_bits": "mantissa bits to which rule even rounds the statistic",
    "apply": "how values are divided by the scale",
    "outer_order": "in which order the outer scale enters",
    "arithmetic": "precision of the arithmetic on values",
    "codes_from": "stored: values are divided by the scale as it is stored; exact: by the scale before that rounding",
    "rounding": "how values are rounded to codes",
    "overflow": "values beyond the format's largest",
    "nan": "what NaN or infinity does to its block",
    "nan_code": "code of the values of a NaN block",
    "negative_zero": "whether -0 keeps its sign",
    "smallest_exponent": "power of two used in place of the smallest scale",
    "dequantize": "precision of code times scale",
    "deviations": "where this convention breaks the default rules",
}


def show_schemes(name: str | None, as_json: bool, everything: bool = False) -> None:
    """Schemes as a table: without a name those of ao_lab (`everything`: of other libraries too), or those whose names begin
    with "name."; or one record."""
    from reference import SCHEMES

    prefix = "" if name is None else name.removesuffix(".") + "."
    listed = [record for key, record in SCHEMES.items() if key.startswith(prefix)]
    if name is not None and (name in SCHEMES or not listed):
        show_scheme(_made(name) or known(name, SCHEMES, "scheme"), as_json)
    elif as_json:
        print_json([dataclasses.asdict(record) for record in listed])
    else:
        ours = [record for record in listed if everything or name is not None or "." not in record.name]
        print_table("Schemes", COLUMNS, [cells(record) for record in ours], ["bits"])
        if others := sorted({record.name.partition(".")[0] for record in listed if record not in ours}):
            say(
                f"{len(listed) - len(ours)} more follow other libraries: ao-lab schemes {' | '.join(others)}; --all lists all"
            )
        if name is None:
            say(MADE)


#: Names that no table lists, since each is made from another or from its numbers; `ao_lab.config.recipe.named` makes them.
MADE = (
    "also by name: NAME_cast, scales rounded to the weight's dtype, as compressed-tensors' loaders keep them; nvfp4_pow2, its "
    "outer scale a power of two; int1 to int8 in any group, such as int4_g48_asymmetric, scales in 16 bits with _bf16 or _f16; "
    "ternary_g64, stretched2_rowwise"
)


def _made(name: str) -> Scheme | None:
    """The record of a name that is made from another, or from its numbers; None where it is none of these."""
    from ao_lab.config.recipe import named

    try:
        return named(name)
    except ValueError:
        return None


def show_scheme(record: Scheme, as_json: bool) -> None:
    """One record: a sentence, then the fields that differ from a scheme's defaults with what they mean."""
    if as_json:
        print_json(dataclasses.asdict(record))
        return
    rules = {
        f"{name}.rule": rule_text(one)
        for name, one in (("scale", record.scale), ("outer", record.outer))
        if one
    }
    rows = [
        [path, f"{value}: {rules[path]}" if path in rules else text(value), _meaning_in(record, path)]
        for path, value in told_fields(record)
    ]
    print_table(f"Scheme {record.name}: {sentence(record)}", ["field", "value", "what it is"], rows)


def meaning(path: str) -> str:
    """What a field says, by its path or its name."""
    return MEANINGS.get(path) or MEANINGS.get(path.rpartition(".")[2], "")


def _meaning_in(record: Scheme, path: str) -> str:
    """What a field says in one record: of a target under rules that take its exponent alone, that too."""
    if path == "scale.target" and record.scale.rule in ("floor", "ceil", "even"):
        return f"the element's largest value; the rule takes its exponent alone, {_exponent(record.scale.target)}"
    return meaning(path)


def _exponent(value: float) -> int:
    """floor(log2 value)."""
    return math.frexp(value)[1] - 1


def cells(record: Scheme) -> list[str]:
    """One scheme as a line of the table."""
    also = [f"outer scale per {block_text(record.outer.block)}"] if record.outer else []
    also += [f"zero point as {record.zero.rule}"] if record.zero else []
    also += [f"deviations: {len(record.deviations)}"] if record.deviations else []
    scale = record.scale
    bits = f"{bits_per_value(record):.4g}"
    told = rule_text(scale)
    return [record.name, bits, record.element, block_text(scale.block), told, scale.storage, ", ".join(also)]


def rule_text(scale: Scale) -> str:
    """How a scale follows from the statistic of its block, as a formula; `reference.quantize.scales` computes it."""
    ratio = f"{scale.statistic} / {number(scale.target)}"
    exponent = _exponent(scale.target)
    whole = "" if exponent == 0 else f" - {exponent}" if exponent > 0 else f" + {-exponent}"
    inverse = f"{number(scale.target)} / {scale.statistic}"
    powers = {
        "ratio": ratio,
        "floor": f"2^(floor(log2 {scale.statistic}){whole})",
        "ceil": f"2^(ceil(log2 {scale.statistic}){whole})",
        "rceil": f"2^ceil(log2({ratio}))",
        "rceil_log2": f"2^ceil(log2({ratio}) in float32)",
        "even": f"2^(floor(log2 of {scale.statistic}, its mantissa rounded){whole})",
        "ratio_pow2": f"2^floor(log2({inverse}))" if scale.stored == "encode" else f"2^ceil(log2({ratio}))",
        "ratio_pow2_log2": f"2^floor(log2({inverse if scale.stored == 'encode' else ratio}) in float32)",
    }
    return powers[scale.rule]


def block_text(block: Block) -> str:
    """A block in words: row, 32, 128 x 128, tensor, 64 flat."""
    from reference.schemes.schemes import flat_size

    if isinstance(block, tuple):
        return " x ".join(map(str, block))
    if flat_size(block):
        return f"{flat_size(block)} flat"
    return "row" if block == -1 else str(block)


def bits_per_value(record: Scheme) -> float:
    """Bits of a code, with those of the scales and zero points of its block, and of an outer scale of so many of them; what
    rows and tensors share counts nothing."""
    beside = float(_storage_bits(record.scale.storage))
    beside += _storage_bits(record.zero.storage) if record.zero else 0
    scales = block_size(record.outer.block) if record.outer else 0
    beside += _storage_bits(record.outer.storage) / scales if record.outer and scales else 0.0
    size = block_size(record.scale.block)
    return record.format.bits + (beside / size if size else 0.0)


def block_size(block: Block) -> int:
    """Values of a block; 0 where their number depends on the tensor."""
    from reference.schemes.schemes import flat_size

    if isinstance(block, tuple):
        return math.prod(block)
    return flat_size(block) or (0 if isinstance(block, str) or block == -1 else block)


def _storage_bits(name: str) -> int:
    from reference import FORMATS

    return 32 if name == "float32" else FORMATS[name].bits


def sentence(record: Scheme) -> str:
    """What a value takes, and from what: "4.5 bits a value; float4_e2m1fn in blocks of 16, a float8_e4m3fn scale each"."""
    where = {"row": "rows", "tensor": "one block, the tensor"}.get(
        found := block_text(record.scale.block), f"blocks of {found}"
    )
    parts = [f"{record.element} in {where}, one {record.scale.storage} scale each"]
    parts += [f"a {record.zero.storage} zero point each"] if record.zero else []
    parts += (
        [f"one {record.outer.storage} outer scale per {block_text(record.outer.block)}"]
        if record.outer
        else []
    )
    bits = f"{bits_per_value(record):.4g} bits a value"
    if (
        record.scale.compute == "input"
        and record.scale.storage == "float32"
        and (size := block_size(record.scale.block))
    ):
        bits += f" ({record.format.bits + 16 / size:.4g} in compressed-tensors' files of 16-bit models)"
    return f"{bits}; {', '.join(parts)}"


def told_fields(record: Scheme) -> Iterator[tuple[str, Any]]:
    """Element, scales and zero point, and of the rest what is not a scheme's default, nested fields with their path."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            yield from ((f"{field.name}.{name}", found) for name, found in _told(value))
        elif field.name != "name" and (field.name == "element" or value != field.default):
            yield field.name, value


def _told(part: Any) -> Iterator[tuple[str, Any]]:
    always = ("block", "statistic", "target", "rule", "storage")
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name in always or value != field.default:
            # As one writes it in a record, and in words where these are others.
            yield field.name, "-1 (row)" if field.name == "block" and value == -1 else value


def text(value: Any) -> str:
    """A field's value as text."""
    if isinstance(value, Mapping) or value is None or value == ():
        return "-"
    return "; ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
