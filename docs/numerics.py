"""The pages of formats and schemes: every record of the specification in a table, and drawn by `ao_lab.plot`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ao_lab
from ao_lab.plot import error, save, values
from reference import FORMATS, SCHEMES, Format, Scheme


class Group(NamedTuple):
    """Records on one part of a page: a title, a sentence, and which names belong to it."""

    title: str
    about: str
    holds: Callable[[str], bool]


def begins(*words: str) -> Callable[[str], bool]:
    """Names that begin so."""
    return lambda name: name.startswith(words)


OF_FORMATS = {
    "float8": Group(
        "8-bit floats",
        "Sign, exponent, mantissa; `fn` has no infinity, `fnuz` no negative zero.",
        begins("float8_e4", "float8_e5"),
    ),
    "small_floats": Group(
        "6-bit and 4-bit floats", "Every pattern of bits is a finite number.", begins("float6", "float4")
    ),
    "integers": Group(
        "Signed integers",
        "Symmetric by default: the most negative value is not used.",
        lambda name: name.startswith("int") and name[3:].isdigit(),
    ),
    "unsigned": Group("Unsigned integers", "For asymmetric schemes, with a zero point.", begins("uint")),
    "codebooks": Group(
        "Codebooks and others",
        "NF4 and other tables of values, and bytes with a fixed point.",
        begins("nf4", "mxint8", "dynamic", "linear4", "ternary", "stretched", "int8_nan"),
    ),
    "scales": Group(
        "16-bit formats and formats of scales",
        "`float8_e8m0fnu` holds powers of two.",
        begins("float16", "bfloat16", "e8m3", "float8_e8"),
    ),
}
OF_SCHEMES = {
    "fp8": Group("FP8", "One float32 scale per tensor, per row, or per block.", begins("fp8_")),
    "mx": Group(
        "MX",
        "Blocks of 32 with a power-of-two scale. `rceil` rounds the scale up so that nothing overflows.",
        begins("mx"),
    ),
    "fp4": Group(
        "NVFP4 and NF4",
        "Scales of blocks are quantized themselves, under one scale for the tensor (NF4: for 256 scales).",
        begins("nvfp4", "nf4"),
    ),
    "int8": Group(
        "8-bit integers",
        "Per tensor, per row, or in groups; asymmetric ones have a zero point.",
        begins("int8_"),
    ),
    "int_small": Group(
        "2-bit to 6-bit integers",
        "In groups of 32 to 256. One curve stands for all group sizes of a width.",
        begins("int2", "int3", "int4", "int5", "int6"),
    ),
    "low": Group("Below 2 bits", "Three or four levels.", begins("ternary", "stretched")),
    "torchao": Group(
        "Conventions of torchao", "The same schemes by torchao's rules, bit for bit.", begins("torchao.")
    ),
    "other": Group(
        "Conventions of other libraries",
        "compressed-tensors, Transformer Engine, HQQ.",
        begins("compressed_tensors.", "te.", "hqq."),
    ),
}
#: Curves of one figure.
MOST = 7
#: Its second level takes tensors of 16,384 elements or more, which figures of errors do not have; its curve is that of nf4.
NOT_DRAWN = ("torchao.nf4",)
THEMES = {"light": None, "dark": "dark"}


def pages() -> dict[str, str]:
    """Markdown of both pages by file name."""
    return {
        "formats.md": page("Formats", OF_FORMATS, FORMATS, format_table),
        "schemes.md": page("Schemes", OF_SCHEMES, SCHEMES, scheme_table),
    }


def page(title: str, groups: dict[str, Group], records: Any, table: Callable[[Sequence[Any]], str]) -> str:
    """A page: each group with its figures and its table; ValueError for a record in no group, or in two."""
    text = f"# {title}\n"
    placed = [name for group in groups.values() for name in records if group.holds(name)]
    if sorted(placed) != sorted(records):
        raise ValueError(
            f"docs/numerics.py: {sorted(set(records) ^ set(placed))} are in no group, or names are in two"
        )
    for slug, group in groups.items():
        found = [record for name, record in records.items() if group.holds(name)]
        text += f"\n## {group.title}\n\n{group.about}\n\n"
        text += "".join(picture(name, alt) for name, alt, _ in figures_of(slug, found)) + table(found)
    return text


def picture(name: str, alt: str) -> str:
    """A figure for light and one for dark pages."""
    parts = [f"```{{image}} {name}-{theme}.svg\n:class: only-{theme}\n:alt: {alt}\n```\n" for theme in THEMES]
    return "\n".join([*parts, ""])


def draw(folder: Path, text: str) -> None:
    """Draw the figures of both pages, unless those of this text are there already."""
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    key, stamp = hashlib.sha256(text.encode()).hexdigest(), folder / "drawn.txt"
    if stamp.exists() and stamp.read_text() == key:
        return
    for groups, records in ((OF_FORMATS, FORMATS), (OF_SCHEMES, SCHEMES)):
        for slug, group in groups.items():
            for name, alt, made in figures_of(
                slug, [one for key, one in records.items() if group.holds(key)]
            ):
                for theme, argument in THEMES.items():
                    figure = made(argument)
                    save(figure, folder / f"{name}-{theme}.svg", alt)
                    plt.close(figure)
    stamp.write_text(key)


def figures_of(slug: str, records: Sequence[Any]) -> Iterable[tuple[str, str, Callable[[str | None], Any]]]:
    """(name, what it shows, how it is drawn) of each figure of a group."""
    if isinstance(records[0], Format):
        narrow = [one for one in records if one.bits <= 8]
        if narrow:
            alt = f"Finite values of {', '.join(one.name for one in narrow)} on a line"
            yield f"values-{slug}", alt, lambda theme, found=narrow: values(*found, theme=theme)
        return
    curves = distinct(records)
    for start in range(0, len(curves), MOST):
        part = curves[start : start + MOST]
        alt = f"Relative error by magnitude of {', '.join(one.name for one in part)}"
        yield f"error-{slug}-{start // MOST}", alt, lambda theme, found=part: error(*found, theme=theme)


def distinct(schemes: Sequence[Scheme]) -> list[Scheme]:
    """Schemes whose errors of a block differ: one of each size of blocks."""
    found: dict[Any, Scheme] = {}
    for one in schemes:
        if one.name in NOT_DRAWN:
            continue
        scale = one.scale
        key = element(one), scale.rule, scale.stored, scale.storage, scale.target, str(one.zero), one.apply
        found.setdefault(key, one)
    return list(found.values())


def element(scheme: Scheme) -> str:
    """The name of a scheme's format."""
    return scheme.element if isinstance(scheme.element, str) else scheme.element.name


def format_table(records: Sequence[Format]) -> str:
    """Range and precision of each format."""
    head = [
        "format",
        "bits",
        "exponent",
        "mantissa",
        "largest",
        "smallest normal",
        "smallest",
        "infinity",
        "NaN",
    ]
    lines = [
        [
            f"`{one.name}`", str(one.bits), shown(one.exponent_bits), shown(one.mantissa_bits), shown(one.max),
            shown(one.smallest_normal), shown(one.smallest_subnormal), yes(one.infinity_code), yes(one.nan_code),
        ]
        for one in records
    ]  # fmt: skip
    return markdown(head, lines)


def scheme_table(records: Sequence[Scheme]) -> str:
    """What each scheme stores."""
    head = [
        "scheme",
        "element",
        "elements per scale",
        "scale",
        "its rule",
        "second scale",
        "zero point",
        "bits per weight",
    ]
    lines = [
        [
            f"`{one.name}`", f"`{element(one)}`", block(one.scale.block), f"`{one.scale.storage}`", one.scale.rule,
            f"`{one.outer.storage}` per {block(one.outer.block)}" if one.outer else "",
            f"`{one.zero.storage}`" if one.zero else "", size(one),
        ]
        for one in records
    ]  # fmt: skip
    return markdown(head, lines)


def size(scheme: Scheme) -> str:
    """Stored bits per weight of a matrix of 4096 x 4096, with all scales."""
    return f"{8 * ao_lab.weight_size((4096, 4096), scheme).bytes / 4096**2:.4g}"


def block(found: Any) -> str:
    """A block in words."""
    if isinstance(found, tuple):
        return " x ".join("row" if one == -1 else str(one) for one in found)
    return {-1: "row", "tensor": "tensor", "row": "row"}.get(found, str(found))


def shown(number: Any) -> str:
    """A number, or nothing."""
    return "" if number is None else f"{number:.4g}"


def yes(code: Any) -> str:
    """Whether there is such a value."""
    return "no" if code is None else "yes"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *lines))
