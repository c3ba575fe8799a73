"""The records: complete, frozen, checked, and each name says what its record holds."""

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import ao_lab
import ao_lab.jax
import reference
from ao_lab.testing import assert_same_bits
from reference import FORMATS, SCHEMES, Format, Scale, Scheme, Zero, register
from reference.schemes.schemes import (
    RECORDS,
    format_fields,
    format_from,
    record_of,
    scheme_fields,
    scheme_from,
    scheme_of,
)

# Records as text: the same record in any process.

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_fields_and_names(name):
    scheme = SCHEMES[name]
    result = scheme_from(json.loads(json.dumps(scheme_fields(scheme))))
    assert result == scheme
    assert (result.key, scheme.key) == (name, name)
    assert record_of(name) == scheme


def test_names_are_those_of_a_new_process():
    """Records that only serve to make others have names too, and none of them takes a record's place."""
    script = (
        "from reference.schemes.schemes import record_of; from reference.schemes.schemes import SCHEMES; "
        "print([name for name, scheme in SCHEMES.items() if record_of(name) != scheme])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_record_of_ones_own_travels_with_its_fields():
    own = replace(SCHEMES["nvfp4"], name="mine", dequantize="ieee", deviations=("a", "b"))
    del RECORDS[own.key]
    assert record_of(own.key) == own
    assert record_of(own.key) is record_of(own.key)
    # A known name with other fields is another record, and leaves the known one alone.
    other = replace(SCHEMES["mxfp4"], negative_zero=False)
    assert other.key != "mxfp4"
    assert record_of(other.key) == other
    assert record_of("mxfp4") == SCHEMES["mxfp4"]


def test_another_process_understands_the_text():
    own = replace(SCHEMES["fp8_128x128"], name="mine", deviations=("a",))
    script = f"from reference.schemes.schemes import *; print(record_of({own.key!r}).key)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == own.key


def test_other_texts_are_refused():
    with pytest.raises(ValueError, match="unknown scheme"):
        record_of("mxfp5")
    with pytest.raises(TypeError):
        record_of('{"name": "mine", "unknown": 3}')


# `register`: a format and a scheme of one's own by name, in every library; names are never given anew.

X = np.random.default_rng(0).standard_normal((4, 64), np.float32)
TABLE = (-4.0, -2.0, -1.0, -0.25, 0.0, 0.5, 1.5, 4.0)
POSIT = Format(name="posit_like", kind="codebook", bits=3, table=TABLE)


@pytest.fixture
def scheme():
    """A registered scheme of a registered format, forgotten afterwards."""
    before = [dict(table) for table in (FORMATS, SCHEMES, RECORDS)]
    made = Scheme(
        name="posit_like_b32",
        element=register(POSIT),
        scale=Scale(block=32, target=4.0, floor=("stored", 2.0**-126)),
    )
    yield register(made)
    for table, old in zip((FORMATS, SCHEMES, RECORDS), before, strict=True):
        table.clear()
        table.update(old)


def test_every_library_knows_it(scheme):
    assert scheme.element == "posit_like"
    q = reference.quantize(X, "posit_like_b32", packed=True)
    want = reference.dequantize(q)
    ratios = (want / np.repeat(q.scale, 32, 1)).astype(np.float16)
    assert set(np.unique(ratios)) <= set(TABLE)
    assert_same_bits(ao_lab.fake_quantize(torch.from_numpy(X), "posit_like_b32"), want)
    assert_same_bits(ao_lab.jax.fake_quantize(jnp.asarray(X), "posit_like_b32"), want)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 4, bias=False))
    layer[0].weight.data = torch.from_numpy(X)
    ao_lab.quantize_(layer, ao_lab.SchemeConfig(scheme="posit_like_b32"))
    assert_same_bits(layer[0].weight.dequantize(), want)


def test_public_names():
    for name in ("Format", "Scale", "Scheme", "Zero"):
        assert getattr(ao_lab, name) is getattr(reference, name)
    assert ao_lab.register(SCHEMES["mxfp4"]) is SCHEMES["mxfp4"]


def test_again_and_under_a_taken_name(scheme):
    assert register(replace(scheme)) == scheme
    assert register(replace(POSIT)) == POSIT
    for record in (
        replace(SCHEMES["mxfp4"], rounding="toward_zero"),
        replace(POSIT, name="nf4_torchao", bits=3),
    ):
        with pytest.raises(
            ValueError, match=f"'{record.name}' is the name of another {type(record).__name__.lower()}"
        ):
            register(record)
    with pytest.raises(TypeError, match="register takes a Format or a Scheme, got str"):
        register("mxfp4")


def test_a_format_is_registered_before_a_scheme_names_it():
    scale = Scale(block=32, target=4.0)
    with pytest.raises(
        ValueError, match=r"element is a format that FORMATS does not have: register\(Format\(posit_like\)\)"
    ):
        Scheme(name="x", element=POSIT, scale=scale)
    with pytest.raises(ValueError, match="storage is a format that FORMATS does not have"):
        Scale(block=32, target=4.0, storage=POSIT)
    built_in = Scheme(
        name="x", element=FORMATS["float4_e2m1fn"], scale=replace(scale, storage=FORMATS["bfloat16"])
    )
    assert (built_in.element, built_in.scale.storage) == ("float4_e2m1fn", "bfloat16")


@pytest.mark.parametrize(
    "fields", [{"name": ""}, {"name": "{}"}, {"name": None}, {"nan_code": 16}, {"nan_code": -1}]
)
def test_other_fields_of_schemes_are_checked(fields):
    with pytest.raises(
        ValueError, match=r"the name of a scheme|nan_code is a code of float4_e2m1fn, 0 to 15"
    ):
        replace(SCHEMES["mxfp4"], **fields)


def test_records_travel_as_text(scheme):
    """The text has the format with it, so that a process that never saw either makes both again."""
    text, key = json.dumps(scheme_fields(scheme)), scheme.key
    assert key.startswith("{")
    assert "formats" not in scheme_fields(SCHEMES["mxfp4"])
    for table in (FORMATS, SCHEMES, RECORDS):
        for name in ("posit_like", "posit_like_b32", key):
            table.pop(name, None)
    again = scheme_from(json.loads(text))
    assert (again, FORMATS["posit_like"]) == (scheme, POSIT)
    assert record_of(key) == scheme
    assert format_from(json.loads(json.dumps(format_fields(POSIT)))) == POSIT
    other = json.loads(text)
    other["formats"][0]["table"][0] = -8.0
    with pytest.raises(ValueError, match="'posit_like' is the name of another format"):
        scheme_from(other)


def test_files_may_have_them(scheme):
    """What a saved model says of a record is checked field by field before it is one."""
    from ao_lab.checkpoint.io.strict_json import check_scheme_fields

    fields = json.loads(json.dumps(scheme_fields(scheme)))
    check_scheme_fields(fields, "weight")
    for broken in ({"name": "x"}, 3, {**fields["formats"][0], "more": 1}):
        with pytest.raises(ValueError, match="weight: format 0"):
            check_scheme_fields({**fields, "formats": [broken]}, "weight")
    with pytest.raises(ValueError, match="formats is a list of at most 3 records"):
        check_scheme_fields({**fields, "formats": fields["formats"] * 4}, "weight")


FP8 = [
    f"fp8_{block}{suffix}"
    for block in ("tensorwise", "rowwise", "1x128", "128x128")
    for suffix in ("", "_e5m2")
]
STRETCHED = [f"{element}_{block}" for element in ("ternary", "stretched2") for block in ("rowwise", "g32")]
MX = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8"]
DESIGN = [*FP8, *MX, "nvfp4", "int8_tensorwise", "int8_rowwise", "int8_rowwise_asymmetric", "nf4"]
INTEGERS = [
    f"int{b}_g{g}{s}" for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128, 256) for s in ("", "_asymmetric")
]
HOUSE = sorted(name for name in SCHEMES if "." not in name)
PLAIN = {"block": 32, "target": 6.0}


@pytest.mark.parametrize("name", [*DESIGN, *INTEGERS, *STRETCHED])
def test_every_scheme_of_the_design_exists(name):
    assert SCHEMES[name].name == name
    assert scheme_of(name) is SCHEMES[name]
    assert repr(SCHEMES[name]) == f"Scheme({name})"


@pytest.mark.parametrize("name", HOUSE)
def test_default_rules(name):
    """No deviations; scales that cannot be zero; reciprocals; specials stay in their block."""
    scheme = SCHEMES[name]
    assert scheme.deviations == ()
    assert (scheme.apply, scheme.arithmetic, scheme.nan, scheme.dequantize) == (
        "reciprocal",
        "float32",
        "block",
        "float32",
    )
    assert scheme.scale.power_of_two or scheme.scale.floor[0] == "stored"
    assert scheme.scale.compute == "float32"


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - set(HOUSE)))
def test_conventions_name_their_project(name):
    assert name.split(".")[0] in ("torchao", "te", "compressed_tensors")


@pytest.mark.parametrize("name", HOUSE)
def test_targets_are_limits_of_the_element(name):
    scheme = SCHEMES[name]
    fmt = FORMATS[scheme.element]
    codes = 2.0**fmt.bits - 1 if scheme.zero else {"ternary": 1.5, "stretched2": 2.0}.get(fmt.name, fmt.max)
    assert scheme.scale.target == codes
    if scheme.outer is not None and scheme.outer.statistic == "absmax_elements":
        assert scheme.outer.target == codes * FORMATS[scheme.scale.storage].max


def test_integer_names():
    scheme = SCHEMES["int5_g64_asymmetric"]
    assert (scheme.element, scheme.scale.block, scheme.scale.statistic) == ("int5", 64, "minmax_with_zero")
    assert scheme.zero == Zero()
    assert SCHEMES["int5_g64"].zero is None


def test_records_are_frozen_and_hashable():
    with pytest.raises(FrozenInstanceError):
        SCHEMES["mxfp4"].element = "int8"
    assert len({hash(scheme) for scheme in SCHEMES.values()}) == len(SCHEMES)
    assert replace(SCHEMES["mxfp4"]) == SCHEMES["mxfp4"]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"statistic": "median"}, "statistic is one of absmax, .*; got 'median'"),
        ({"rule": "round"}, "rule is one of ratio, .*; got 'round'"),
        ({"compute": "float16"}, "compute is one of float32"),
        ({"stored": "both"}, "stored is one of decode, encode"),
        ({"center": "median"}, "center is one of none, mean"),
    ],
)
def test_scale_fields_are_checked(field, message):
    with pytest.raises(ValueError, match=message):
        Scale(**PLAIN, **field)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"element": "float8_e4m3"}, "unknown format 'float8_e4m3'; the nearest are .*float8_e4m3fn"),
        ({"apply": "shift"}, "apply is one of reciprocal"),
        ({"outer_order": "x"}, "outer_order is one of decode"),
        ({"arithmetic": "float64"}, "arithmetic is one of float32"),
        ({"codes_from": "x"}, "codes_from is one of stored"),
        ({"nan": "x"}, "nan is one of block"),
        ({"dequantize": "x"}, "dequantize is one of float32"),
    ],
)
def test_scheme_fields_are_checked(field, message):
    with pytest.raises(ValueError, match=message):
        Scheme(**{"name": "mine", "element": "int8", "scale": Scale(**PLAIN), **field})


def test_zero_rule_is_checked():
    with pytest.raises(ValueError, match="zero rule is one of code, value; got 'float'"):
        Zero(rule="float")


@pytest.mark.parametrize("rule", ["code", "value"])
@pytest.mark.parametrize("storage", ["uint8", "nf4", "int4"])
def test_zero_storage_is_checked(rule, storage):
    with pytest.raises(ValueError, match=f"zero point of rule '{rule}' is one of .*; got '{storage}'"):
        Zero(rule=rule, storage=storage)


@pytest.mark.parametrize(("block", "size"), [("flat:64", 64), ("tensor", 0), (-1, 0), (32, 0), ((2, 4), 0)])
def test_blocks_of_the_flattened_tensor_have_a_size(block, size):
    assert Scale(block=block, target=6.0).flat_size == size
