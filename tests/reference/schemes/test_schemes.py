"""The records: complete, frozen, checked, and each name says what its record holds."""

from dataclasses import FrozenInstanceError, replace

import pytest

from reference import FORMATS, SCHEMES, Scale, Scheme, Zero
from reference.schemes.schemes import scheme_of

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
