"""`ao-lab formats` and `ao-lab configs`: the number formats of the specification, and what `--config` takes.

Everything shown is read from the records in `reference` and from the configurations; no number is typed here.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ao_lab.cli.terminal import WrongInput, console, number, print_json, print_table, short_number

if TYPE_CHECKING:
    from ao_lab.config.base import Config
    from reference.formats.formats import Format

# Formats of up to this many bits are shown code by code, wider ones by their landmarks.
TABLE_BITS = 8

FORMAT_COLUMNS = (
    "format", "bits", "exp", "man", "bias", "max", "min", "min normal", "smallest", "epsilon", "NaN codes", "inf", "-0",
)  # fmt: skip
TEXT_COLUMNS = ("format", "inf", "-0")


def show_formats(name: str | None, as_json: bool) -> None:
    """All formats as a table, or one with its values."""
    from reference import FORMATS

    if name is None:
        rows = [describe_format(record) for record in FORMATS.values()]
        if as_json:
            print_json(rows)
        else:
            numbers = [column for column in FORMAT_COLUMNS if column not in TEXT_COLUMNS]
            print_table("Number formats", FORMAT_COLUMNS, map(format_cells, rows), numbers)
        return
    record = known(name, FORMATS, "format")
    details = describe_format(record)
    if as_json:
        key = "values" if record.bits <= TABLE_BITS else "landmarks"
        print_json({**details, key: value_rows(record, listed_codes(record))})
    else:
        cells = [[key, cell(value)] for key, value in details.items()]
        print_table(f"Format {record.name}", ["property", "value"], cells)
        print_values(record)


def known(name: str, records: Mapping[str, Record], what: str) -> Record:
    """The record of this name; WrongInput names the nearest ones."""
    from reference.arrays.namespace import lookup

    try:
        return lookup(name, records, what)
    except ValueError as error:
        raise WrongInput(str(error)) from error


def describe_format(record: Format) -> dict[str, Any]:
    """One format as plain data; what a kind of format does not have is None."""
    is_float = record.kind == "float"
    has_exponent = is_float or record.kind == "scale"
    values = [float(value) for value in record.values]
    return {
        "name": record.name,
        "kind": record.kind,
        "bits": record.bits,
        "exponent_bits": record.exponent_bits if has_exponent else None,
        "mantissa_bits": record.mantissa_bits if is_float else None,
        "bias": record.bias if has_exponent else None,
        "max": record.max,
        "min": record.min,
        "smallest_normal": record.smallest_normal if is_float else None,
        "smallest_subnormal": record.smallest_subnormal,
        "epsilon": None if math.isnan(record.epsilon) else record.epsilon,
        "nan_codes": sum(math.isnan(value) for value in values),
        "infinity": any(math.isinf(value) for value in values),
        "negative_zero": record.has_negative_zero,
    }


def format_cells(row: Mapping[str, Any]) -> list[str]:
    """One format as a line of the table, long numbers shortened."""
    fields = [row[key] for key in ("name", "bits", "exponent_bits", "mantissa_bits", "bias")]
    limits = [row[key] for key in ("max", "min", "smallest_normal", "smallest_subnormal", "epsilon")]
    specials = [row[key] for key in ("nan_codes", "infinity", "negative_zero")]
    shortened = ["-" if value is None else short_number(value) for value in limits]
    return [*map(cell, fields), *shortened, *map(cell, specials)]


def cell(value: Any) -> str:
    """One property as text, exactly."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else str(value)


def listed_codes(record: Format) -> list[int]:
    """The codes worth listing: all of a narrow format, the landmarks of a wide one."""
    return list(range(1 << record.bits)) if record.bits <= TABLE_BITS else landmarks(record)


def landmarks(record: Format) -> list[int]:
    """Codes of a wide float where something begins or ends, in ascending order."""
    normal, sign = 1 << record.mantissa_bits, record.sign_mask
    one = record.bias << record.mantissa_bits
    positive = [0, 1, normal - 1, normal, one - 1, one, one + 1, record.max_code]
    positive += [code for code in (record.infinity_code, record.nan_code) if code is not None]
    return [*positive, *(code | sign for code in positive)] if sign else positive


def value_rows(record: Format, codes: list[int]) -> list[dict[str, Any]]:
    """Code, bit fields and value, one row a code."""
    return [
        {"code": code, "bits": bit_fields(record, code), "value": float(record.values[code])}
        for code in codes
    ]


def bit_fields(record: Format, code: int) -> str:
    """The code in binary, its fields set apart: sign, exponent, mantissa."""
    digits = f"{code:0{record.bits}b}"
    if record.kind != "float":
        return digits
    mantissa = record.bits - record.mantissa_bits
    fields = (digits[: mantissa - record.exponent_bits], digits[mantissa - record.exponent_bits : mantissa])
    return " ".join(part for part in (*fields, digits[mantissa:]) if part)


def print_values(record: Format) -> None:
    """The values in columns that fill the terminal, in the order of the codes."""
    from rich.columns import Columns
    from rich.text import Text

    codes, digits = listed_codes(record), (record.bits + 3) // 4
    title = "Values" if record.bits <= TABLE_BITS else "Landmarks"
    width = max(len(number(record.values[code])) for code in codes)
    cells = [
        Text(
            f"{code:0{digits}x}  {bit_fields(record, code)}  {number(record.values[code]):>{width}}",
            no_wrap=True,
        )
        for code in codes
    ]
    console().print(f"{title}: code, bits, value")
    console().print(Columns(cells, column_first=True, padding=(0, 4)))


# `ao-lab configs`: the configurations that `--config` takes, their options and defaults, and the nearest to a wrong name.

#: Names of configurations that a message gives at most.
NAMED = 5
#: Those of schemes among them.
NAMED_SCHEMES = 2
#: Options of the command line's own: --activation, --sparsity.
OWN_FLAGS = ("activation_scheme", "sparsity")
#: Options that all configurations have; they come last.
COMMON = ("scheme", "kernel", "axis")
#: Parameters that torchao's classes have, taken so that their calls run unchanged; nothing here depends on them.
WITHOUT_EFFECT = ("set_inductor_config", "version", "int4_tile_packed_ntile", "use_triton_kernel", "alg_id")


def config_classes() -> dict[str, type[Config]]:
    """The configurations of quantized weights by name; without those that hold others, or are for training."""
    from ao_lab import calibration as calibration  # registers configurations with static scales
    from ao_lab.config.base import CONFIGS

    return dict(sorted(CONFIGS.items()))


def check_name(name: str) -> None:
    """WrongInput, with the nearest names, for one that is neither a configuration's nor a scheme's."""
    from reference import SCHEMES

    names: Mapping[str, Any] = {**config_classes(), **SCHEMES}
    try:
        known(name, names, "config")
    except WrongInput as error:
        fitting = sorted(
            fitting_configs(name), key=lambda one: (not one.lower().startswith(name.lower()), len(one))
        )
        schemes = [one for one in SCHEMES if one.startswith(name.lower())] if fitting else []
        told = ", ".join([*fitting[: NAMED - NAMED_SCHEMES], *schemes[:NAMED_SCHEMES]])
        nearest = f"the nearest are {told}" if fitting else str(error).partition("; ")[2]
        raise WrongInput(
            f"--config {name} is no configuration (ao-lab configs lists them) and no scheme (ao-lab schemes); {nearest}"
        ) from None


def fitting_configs(word: str) -> list[str]:
    """Configurations that a word means: those whose names hold it (int4, float8), or whose bits it says (W4A16); what ends as a
    whole name does is a name, and no word."""
    from reference.arrays.namespace import spelled_out

    if word.endswith("Config"):
        return []
    asked = spelled_out(word)
    return [
        name
        for name, kind in config_classes().items()
        if asked and (asked in name.lower() or asked == (bits_of(kind) or "").lower())
    ]


def other_bits(word: str) -> list[str]:
    """The first configurations of a kind of numbers of which there are none in so many bits: int5, float3."""
    kind = word.rstrip("0123456789")
    found = fitting_configs(kind) if kind != word else []
    return sorted(found, key=lambda name: (not name.lower().startswith(kind.lower()), len(name)))[:NAMED]


def bits_of(kind: type[Config]) -> str | None:
    """Bits of weights and inputs as papers write them, W4A16; None where the configuration has to be told."""
    try:
        recipe = kind().recipe()
    except (TypeError, ValueError):
        return None
    inputs = 16 if recipe.activation is None else recipe.activation.format.bits
    return f"W{recipe.weight.format.bits}A{inputs}"


def options_of(kind: type[Config]) -> dict[str, Any]:
    """The options of a configuration that change something, with their defaults."""
    found = {field.name: field.default for field in dataclasses.fields(kind) if field.init}
    common = {name: found.pop(name) for name in COMMON if name in found}
    return {
        name: value
        for name, value in {**found, **common}.items()
        if name not in (*OWN_FLAGS, *WITHOUT_EFFECT) and not _has_one_value(kind, name)
    }


def _has_one_value(kind: type[Config], name: str) -> bool:
    """Whether a parameter may have no other value than its default; None and False say the same."""
    return len({value or None for value in kind.ONLY.get(name, (0, 1))}) == 1


def show_configs(name: str | None, as_json: bool) -> None:
    """All configurations as a table, those that a word means (W8A8, int4), or one with its options."""
    classes = config_classes()
    fitting = list(classes) if name is None else fitting_configs(name)
    if name is None or (name not in classes and fitting):
        _print_configs({key: classes[key] for key in fitting}, as_json)
        return
    if name not in classes and (near := other_bits(name)):
        raise WrongInput(
            f"unknown config {name!r}; the nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}; `ao-lab configs` "
            "lists all"
        )
    kind = known(name, classes, "config")
    options = {key: _plain(value) for key, value in options_of(kind).items()}
    details = {"name": name, "what": " ".join((kind.__doc__ or "").split()), **_schemes(kind)}
    values = {key: values_of(kind, key) for key in options}
    if as_json:
        print_json({**details, "options": options, "values": values})
        return
    properties = [[key, str(value or "-")] for key, value in details.items()]
    print_table(f"Configuration {name}", ["property", "value"], properties)
    defaults = [
        [key, value if isinstance(value, str) else json.dumps(value), values[key] or "-"]
        for key, value in options.items()
    ]
    print_table("Options", ["--option NAME=VALUE", "default", "values"], defaults)


def _print_configs(classes: Mapping[str, type[Config]], as_json: bool) -> None:
    rows = [
        {"name": key, "bits": bits_of(kind), "what": _sentence(kind), **_schemes(kind)}
        for key, kind in classes.items()
    ]
    if as_json:
        print_json(rows)
    else:
        columns = ["configuration", "bits", "what it is", "weight", "activation"]
        print_table("Configurations", columns, [[str(v or "-") for v in row.values()] for row in rows])


def values_of(kind: type[Config], option: str) -> str | None:
    """What an option may be, and what it means; None where that is not one list."""
    from ao_lab.config.granularity import MappingType
    from ao_lab.config.recipe import KERNELS

    if option in kind.ONLY:
        return ", ".join(
            value if isinstance(value, str) else json.dumps(value) for value in kind.ONLY[option]
        )
    known = {
        "kernel": f"{', '.join(KERNELS)}: what multiplies; auto: the fastest that takes the layer",
        "scheme": "a scheme's name (ao-lab schemes) in place of the one that the other options choose",
        "axis": "-1, 0, ...: the axis of the weight along which groups lie; null: its inputs",
        "group_size": "weights along the inputs that share a scale",
        "granularity": (
            "PerTensor, PerAxis or PerRow (an output channel), PerGroup(64), PerBlock(128, 128): weights that share a scale"
        ),
        "mapping_type": f"{', '.join(one.lower() for one in MappingType)} (or in capitals)",
        "scale_dtype": "float32, bfloat16, float16: how scales are stored; null: float32",
        "weight_dtype": "float8_e4m3fn, float8_e5m2" if "Float8" in kind.__name__ else "int1, int2, ... int8",
    }
    return next((text for name, text in known.items() if option.endswith(name)), None)


def _sentence(kind: type[Config]) -> str:
    """The first sentence of a configuration's description."""
    text = " ".join((kind.__doc__ or "").split())
    return text.partition(". ")[0].removesuffix(".") + "."


def _schemes(kind: type[Config]) -> dict[str, str | None]:
    """The schemes of weight and input by default; None where there is none, or the configuration has to be told."""
    try:
        recipe = kind().recipe()
    except (TypeError, ValueError):
        return {"weight": None, "activation": None}
    return {
        "weight": recipe.weight.name,
        "activation": None if recipe.activation is None else recipe.activation.name,
    }


def _plain(value: Any) -> Any:
    """A default as it is typed: JSON, or a granularity by name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    given = [getattr(value, field.name) for field in dataclasses.fields(value)]
    numbers = [item for item in given if isinstance(item, int) and item > 0]
    return type(value).__name__ + (f"({', '.join(map(str, numbers))})" if numbers else "")


Record = TypeVar("Record")
