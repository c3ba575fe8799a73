"""Records that a traced program meets by several ways."""

import copy

import pytest
import torch

from fast.ops import constant_record
from reference.schemes.record_text import record_of
from reference.schemes.schemes import RECORDS
from reference.training.recipe import recipe_of


def test_a_constant_record_is_no_object_that_a_program_may_meet_again():
    name = "mxfp8_e4m3"
    assert constant_record(name) == record_of(name)
    assert constant_record(name) is not record_of(name)


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
