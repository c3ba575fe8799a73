"""The records: complete, frozen, each name says what its record holds; as text; registered; refused where they mean nothing."""

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
from reference import FORMATS, SCHEMES, Format, Scale, Scales, Scheme, Zero, register
from reference.formats.encode import MODES
from reference.formats.storage import storage_dtype
from reference.schemes.in_files import loaded_scheme, stored_fields
from reference.schemes.schemes import (
    RECORDS,
    format_fields,
    format_from,
    record_of,
    scheme_fields,
    scheme_from,
    scheme_of,
)
from tests.support.refusals import refused

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
    refused(ValueError, "unknown scheme", record_of, "mxfp5")
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


def test_a_target_that_is_left_out_is_the_elements_limit(scheme):
    """With a zero point it is the element's range; an outer scale has to have its own."""
    assert replace(scheme, scale=Scale(block=32)) == replace(scheme, scale=Scale(block=32, target=4.0))
    ranged = replace(SCHEMES["int4_g32_asymmetric"].scale, target=0.0)
    assert replace(SCHEMES["int4_g32_asymmetric"], scale=ranged) == SCHEMES["int4_g32_asymmetric"]
    outer = replace(SCHEMES["nvfp4"].outer, target=0.0)
    refused(ValueError, "an outer scale has a target", replace, SCHEMES["nvfp4"], outer=outer)


def test_elements_of_six_exponent_bits_have_a_target(scheme):
    """Their largest value is beyond 2**20, the largest target."""
    wide = register(Format(name="wide", kind="float", bits=8, exponent_bits=6, mantissa_bits=1))
    made = Scheme(name="wide_b32", element=wide, scale=Scale(block=32))
    assert (wide.max > 2**32, made.scale.target) == (True, 2.0**20)
    assert np.allclose(reference.fake_quantize(X, made), X, rtol=0.25)


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
    refused(TypeError, "register takes a Format or a Scheme, got str", register, "mxfp4")


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
    refused(ValueError, "'posit_like' is the name of another format", scheme_from, other)


def test_print_shows_the_fields_that_are_no_defaults(scheme):
    told = "Scheme(name='posit_like_b32', element='posit_like', scale=Scale(block=32, target=4.0, floor=("
    assert str(scheme).startswith(told)
    assert repr(scheme) == "Scheme(posit_like_b32)"
    refused(
        ValueError,
        "the nearest is posit_like_b32; one of your own is registered first",
        scheme_of,
        "posit_like_b3",
    )


def test_a_format_of_a_file_takes_no_name_from_others(scheme):
    """Its scheme has it whatever its name means here, the name stays free, and files get it back as it was."""
    text = json.dumps(scheme_fields(scheme))
    assert loaded_scheme(json.loads(text)) == scheme  # registered here with the same fields
    FORMATS.pop("posit_like")
    other = register(replace(POSIT, table=(-8.0, *POSIT.table[1:])))
    found = loaded_scheme(json.loads(text))
    assert found.format == replace(POSIT, name=found.element)
    assert (FORMATS["posit_like"], found.element.startswith("posit_like_")) == (other, True)
    assert loaded_scheme(json.loads(text)) == found
    assert json.dumps(stored_fields(found)) == text
    assert record_of(found.key) == found
    x = np.linspace(-8, 8, 64, dtype=np.float32).reshape(2, 32)
    ours = reference.dequantize(reference.quantize(x, replace(scheme, name="ours")))
    assert not np.array_equal(reference.dequantize(reference.quantize(x, found)), ours)
    wrong = json.loads(text)
    wrong["formats"][0]["name"] = wrong["element"] = "float8_e4m3fn"
    refused(ValueError, "'float8_e4m3fn' is a format of this library with other fields", loaded_scheme, wrong)


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
DEFAULTS = sorted(name for name in SCHEMES if "." not in name)


@pytest.mark.parametrize("name", [*DESIGN, *INTEGERS, *STRETCHED])
def test_every_scheme_of_the_design_exists(name):
    assert SCHEMES[name].name == name
    assert scheme_of(name) is SCHEMES[name]
    assert repr(SCHEMES[name]) == f"Scheme({name})"


@pytest.mark.parametrize("name", DEFAULTS)
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


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - set(DEFAULTS)))
def test_conventions_name_their_project(name):
    assert name.split(".")[0] in ("torchao", "te", "compressed_tensors", "hqq")


@pytest.mark.parametrize("name", DEFAULTS)
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


@pytest.mark.parametrize("rule", ["code", "value"])
@pytest.mark.parametrize("storage", ["uint8", "nf4", "int4"])
def test_zero_storage_is_checked(rule, storage):
    with pytest.raises(ValueError, match=f"zero point of rule '{rule}' is one of .*; got '{storage}'"):
        Zero(rule=rule, storage=storage)


@pytest.mark.parametrize(("block", "size"), [("flat:64", 64), ("tensor", 0), (-1, 0), (32, 0), ((2, 4), 0)])
def test_blocks_of_the_flattened_tensor_have_a_size(block, size):
    assert Scale(block=block, target=6.0).flat_size == size


# Records that mean nothing are refused when they are made, with the rule and the way out; and odd but sound ones work.

CHECKED_X = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
SCALE_FIELDS = [
    ({"block": 0}, "block is"), ({"block": (0, 4)}, "block is"), ({"block": "flat:0"}, "block is"),
    ({"block": -2}, "block is"), ({"block": (1, -1)}, "block is"), ({"block": "row"}, "block is"),
    ({"block": [32, 32]}, "block is"), ({"block": 32.0}, "block is"), ({"block": (1, 2, 3)}, "block is"),
    ({"storage": "float64"}, "nearest are"),
    ({"target": -1}, "target"), ({"target": float("nan")}, "target"), ({"target": 1e-50}, "target"),
    ({"target": 1e60}, "target"), ({"floor": ("scael", 1.0)}, "floor is one of"),
    ({"floor": ("stored", 0.0)}, "positive number"), ({"floor": ("scale", "small")}, "tiny"),
    ({"storage": "float8_e4m3fn"}, "value of its storage"),
    ({"storage": "float8_e4m3fn", "floor": ("stored", "eps")}, "'eps' is a name"), ({"rule": "floor"}, "ratio_pow2"),
    ({"rule": "flor"}, "rule is one of ratio, .*; got 'flor'"),
    ({"statistic": "max"}, "statistic is one of absmax, .*; got 'max'"),
    ({"compute": "float16"}, "compute is one of float32"), ({"stored": "both"}, "stored is one of decode, encode"),
    ({"center": "median"}, "center is one of none, mean"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), SCALE_FIELDS)
def test_scale_fields(fields, words):
    refused(ValueError, words, replace, SCHEMES["fp8_rowwise"].scale, **fields)


def with_scale(name, **fields):
    return replace(SCHEMES[name], scale=replace(SCHEMES[name].scale, **fields))


#: A record, fields in place of its own, and what is said of them.
SCHEME_FIELDS = [
    ("mxfp8_e4m3", {"overflow": "bogus"}, "overflow is one of"),
    # What `fake_quantize_vjp` marks saturated elements with is its own business.
    ("mxfp8_e4m3", {"overflow": "mark"}, "overflow is one of saturate, nonfinite, inf, nan;"),
    ("mxfp8_e4m3", {"overflow": "inf"}, "no code for overflow"),
    ("mxfp4", {"overflow": "nonfinite"}, "no code for overflow"),
    ("mxfp4", {"rounding": "bogus"}, "rounding to float4_e2m1fn is one of"),
    ("nf4", {"rounding": "up"}, "rounding to nf4"),
    ("torchao.nf4", {"rounding": "stochastic"}, "rounding to nf4_torchao"),
    ("mxint8", {"zero": Zero()}, "zero point needs"),
    ("int4_g32_asymmetric", {"element": "float8_e4m3fn"}, "zero point needs"),
    ("int8_rowwise_asymmetric", {"element": "uint8"}, "signed element"),
    ("int8_g32_asymmetric", {"element": "mxint8"}, "binary point; use int8"),
    ("mxfp4", {"outer": SCHEMES["nvfp4"].outer}, "no outer scale"),
    ("mxfp4", {"element": "float8_e4m3"}, "unknown format 'float8_e4m3'; the nearest are .*float8_e4m3fn"),
    ("mxfp4", {"scale": {"storage": "float8_e4m3fn"}}, "float8_e8m0fnu"),
    ("fp8_rowwise", {"scale": {"storage": "int8"}}, "outer scale"),
    ("nf4", {"scale": {"storage": "float32"}}, "scales that are codes"),
    ("mxfp4", {"apply": "shift"}, "apply is one of reciprocal"),
    ("mxfp4", {"outer_order": "x"}, "outer_order is one of decode"),
    ("mxfp4", {"arithmetic": "float64"}, "arithmetic is one of float32"),
    ("mxfp4", {"codes_from": "x"}, "codes_from is one of stored"),
    ("mxfp4", {"nan": "x"}, "nan is one of block"),
    ("mxfp4", {"dequantize": "x"}, "dequantize is one of float32"),
    *(("mxfp4", {"name": name}, "the name of a scheme") for name in ("", "{}", None)),
    *(("mxfp4", {"nan_code": code}, "nan_code is a code of float4_e2m1fn, 0 to 15") for code in (16, -1)),
]


@pytest.mark.parametrize(("name", "fields", "words"), SCHEME_FIELDS)
def test_scheme_fields(name, fields, words):
    def make():
        return replace(
            SCHEMES[name], **{**fields, "scale": replace(SCHEMES[name].scale, **fields.get("scale", {}))}
        )

    refused(ValueError, words, make)


def test_zero_rule_is_checked():
    refused(ValueError, "zero rule is one of code, value; got 'float'", Zero, rule="float")


@pytest.mark.parametrize(
    "record",
    [
        with_scale("mxfp8_e4m3", block=16, rule="rceil"),
        with_scale("fp8_rowwise", rule="ratio_pow2"),
        with_scale("fp8_rowwise", storage="float8_e8m0fnu", floor=None, rule="ratio_pow2"),
        with_scale("int8_rowwise", block=(4, 64)),
        replace(SCHEMES["int4_g32_asymmetric"], element="uint4"),
    ],
    ids=["mx16", "pow2", "e8m0", "tiles", "unsigned"],
)
def test_variants_work(record):
    """Signal to noise of a sound variant is that of its bits: above 16 dB for four bits, 25 for eight."""
    error = reference.fake_quantize(CHECKED_X, record) - CHECKED_X
    decibel = 10 * np.log10((CHECKED_X**2).sum() / (error**2).sum())
    assert decibel > (16 if record.format.bits == 4 else 25)


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_every_rounding_mode_counts(name):
    """In every scheme: random words move codes, and the directed modes differ from nearest; codebooks refuse them."""
    x = np.tile(CHECKED_X, (4, 1))
    if SCHEMES[name].format.kind == "codebook":
        refused(ValueError, "rounding", replace, SCHEMES[name], rounding="stochastic")
        return
    low, high = np.zeros(x.shape, np.uint32), np.full(x.shape, 2**32 - 1, np.uint32)
    stochastic = replace(SCHEMES[name], rounding="stochastic")
    codes = [reference.quantize(x, stochastic, random_bits=words).codes for words in (low, high)]
    truncated = reference.quantize(x, replace(SCHEMES[name], rounding="toward_zero")).codes
    assert np.array_equal(codes[0], truncated)
    assert (codes[0] != codes[1]).mean() > 0.1
    for mode in set(MODES) - {"stochastic", "nearest_even", "nearest_away"}:
        other = reference.quantize(x, replace(SCHEMES[name], rounding=mode)).codes
        assert (other != reference.quantize(x, name).codes).any(), mode


@pytest.mark.parametrize("name", [name for name in SCHEMES if "." not in name and name != "nf4"])
def test_given_scales_of_zero_make_no_nan(name):
    if SCHEMES[name].scale.power_of_two:
        return
    scales = reference.choose_scales(CHECKED_X, name)
    zero = Scales(
        np.zeros_like(scales.scale),
        None if scales.outer is None else np.zeros_like(scales.outer),
        scales.zero,
    )
    assert np.isfinite(reference.dequantize(reference.quantize(CHECKED_X * 0, name, scales=zero))).all()
    assert np.isfinite(reference.dequantize(reference.quantize(CHECKED_X, name, scales=zero))).all()


def test_plain_objects_as_scales_are_refused():
    for scales in (Scales(0.5), Scales([0.5] * 8), 0.5):
        with pytest.raises((ValueError, TypeError), match="choose_scales"):
            reference.quantize(CHECKED_X, "fp8_rowwise", scales=scales)
    with pytest.raises(ValueError, match="one uint32 per element"):
        reference.quantize(CHECKED_X, replace(SCHEMES["mxfp4"], rounding="stochastic"), random_bits=[1])


def vjp_of_x(*given, **more):
    return reference.fake_quantize_vjp(CHECKED_X, *given, **more)


@pytest.mark.parametrize("call", [reference.fake_quantize, vjp_of_x])
def test_fake_quantization_takes_random_bits_as_quantize_does(call):
    record = replace(SCHEMES["mxfp4"], rounding="stochastic")
    bits = reference.random_bits(CHECKED_X.shape, seed=0)
    refused(ValueError, "needs random_bits", call, CHECKED_X, record)
    refused(ValueError, "takes no random_bits", call, CHECKED_X, "mxfp4", random_bits=bits)
    refused(ValueError, "one uint32 per element", call, CHECKED_X, record, random_bits=bits[:1])


def test_integer_storage_goes_by_kind():
    """Two's complement of any name is kept as int8; unsigned integers and everything else as unsigned codes."""
    kept = {
        name: storage_dtype(name)
        for name in ("int8", "int8_nan", "mxint8", "uint8", "float8_e4m3fn", "bfloat16", "float32")
    }
    assert kept == {"int8": "int8", "int8_nan": "int8", "mxint8": "int8", "uint8": "uint8", "float8_e4m3fn": "uint8",
                    "bfloat16": "uint16", "float32": "float32"}  # fmt: skip


def test_second_level_that_does_not_divide_names_the_tensor():
    with pytest.raises(ValueError, match=r"tensor of shape \(8, 512\) has 64 scales"):
        reference.quantize(CHECKED_X, "torchao.nf4")


def test_axis_may_be_numpys_integer_but_no_float():
    q = reference.quantize(CHECKED_X, "mxfp4", axis=np.int64(1))
    assert q.axis == 1
    reference.quantize(jnp.asarray(CHECKED_X), "mxfp4", axis=1)
    for axis in (1.0, "0", None, True):
        refused(
            TypeError, "axis is an integer", reference.quantize, jnp.asarray(CHECKED_X), "mxfp4", axis=axis
        )


def test_quantized_tensors_are_compared_by_identity():
    q = reference.quantize(CHECKED_X, "mxfp4")
    assert q == q
    assert q != reference.quantize(CHECKED_X, "mxfp4")
    assert len({q, q}) == 1


def test_ao_lab_fake_quantize_takes_part_in_autograd():
    x = torch.from_numpy(CHECKED_X.copy()).requires_grad_()
    ao_lab.fake_quantize(x, "int8_rowwise").sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert np.array_equal(
        ao_lab.fake_quantize(CHECKED_X, "mxfp4"), reference.fake_quantize(CHECKED_X, "mxfp4")
    )


def test_float64_under_jax_without_x64_is_refused():
    q = reference.quantize(jnp.asarray(CHECKED_X), "mxfp4")
    refused(ValueError, "jax_enable_x64", reference.dequantize, q, "float64")


def test_a_scheme_where_a_format_is_asked_for_is_said_to_be_one():
    """Both are names of the field, and each is often given for the other."""
    with pytest.raises(ValueError, match="nvfp4 is a scheme; its elements are float4_e2m1fn"):
        reference.encode(np.ones(2, np.float32), "nvfp4")
    with pytest.raises(
        ValueError, match=r"float8_e4m3fn is a format; schemes with such elements are .*mxfp8_e4m3"
    ):
        reference.quantize(np.ones((2, 32), np.float32), "float8_e4m3fn")
