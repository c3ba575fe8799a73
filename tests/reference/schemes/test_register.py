"""`register`: a format and a scheme of one's own by name, in every library; names are never given anew."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import ao_lab
import ao_lab.jax
import reference
from ao_lab.testing import assert_same_bits
from reference import FORMATS, SCHEMES, Format, Scale, Scheme, register
from reference.schemes.record_text import format_fields, format_from, record_of, scheme_fields, scheme_from
from reference.schemes.schemes import RECORDS

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
    from ao_lab.checkpoint.io.plain_values import check_scheme_fields

    fields = json.loads(json.dumps(scheme_fields(scheme)))
    check_scheme_fields(fields, "weight")
    for broken in ({"name": "x"}, 3, {**fields["formats"][0], "more": 1}):
        with pytest.raises(ValueError, match="weight: format 0"):
            check_scheme_fields({**fields, "formats": [broken]}, "weight")
    with pytest.raises(ValueError, match="formats is a list of at most 3 records"):
        check_scheme_fields({**fields, "formats": fields["formats"] * 4}, "weight")
