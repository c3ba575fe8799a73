"""Records that a traced program meets by several ways."""

import copy

import pytest
import torch

import fast
from fast.ops import constant_record
from reference import SCHEMES
from reference.schemes.schemes import RECORDS, record_of
from reference.training.recipe import recipe_of

MXFP8, NVFP4 = SCHEMES["mxfp8_e4m3"], SCHEMES["nvfp4"]


def test_a_constant_record_is_no_object_that_a_program_may_meet_again():
    name = "mxfp8_e4m3"
    assert constant_record(name) == record_of(name)
    assert constant_record(name) is not record_of(name)
    assert constant_record(name).scale is not record_of(name).scale


def scaled(x):
    return fast.quantize(x, MXFP8, tiled=True).codes.float() * MXFP8.scale.block


def twice(x):
    q = fast.quantize(x, MXFP8)
    return q.codes.float() * q.scheme.scale.block * MXFP8.scale.block


def outer(x):
    return fast.choose_scales(x, NVFP4).scale.float() * len(NVFP4.outer.statistic)


@pytest.mark.parametrize("program", [scaled, twice, outer])
def test_a_program_may_read_what_a_record_holds(program):
    """A record of the program's module, of which the operators' constant record is a copy."""
    x = torch.randn(128, 128)
    torch.compiler.reset()
    assert torch.equal(torch.compile(program, backend="aot_eager")(x), program(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_layers_compile_where_the_table_holds_another_equal_record(monkeypatch):
    """As when an equal record was made since: the recipe's, the constant one and the table's are three objects."""
    import ao_lab
    from ao_lab.training import products

    key = recipe_of("rowwise").output.a.scheme.key
    monkeypatch.setitem(RECORDS, key, copy.copy(RECORDS[key]))
    monkeypatch.setattr(products, "_able", lambda name, a, b, fast_sums, brief=False: "codes")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))
    ao_lab.convert_for_training_(model, "rowwise")
    torch.compiler.reset()
    model[0].compile(dynamic=False, backend="aot_eager")
    x = torch.ones(16, 64, dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert bool(x.grad.any())
