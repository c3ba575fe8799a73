"""Maps of optimizers' states: the tables that torchao computes, in the table of formats whatever was imported."""

import subprocess
import sys

import pytest
import torch

from reference import FORMATS
from reference.formats.formats import CODEBOOKS, dynamic_map


@pytest.mark.parametrize(("signed", "exponents", "bits"), [(True, 7, 8), (False, 7, 8), (True, 3, 4)])
def test_dynamic_maps_are_torchaos(signed, exponents, bits):
    other = pytest.importorskip("torchao.optim.quant_utils")
    assert list(dynamic_map(signed, exponents, bits)) == other.create_dynamic_map(signed, exponents, bits)


def test_4_bits_of_the_second_moment_are_torchaos_and_have_no_zero():
    assert FORMATS["linear4_unsigned"].table == tuple(torch.linspace(0, 1, 17)[1:].tolist())


def test_formats_do_not_depend_on_what_was_imported():
    code = "import reference; names = set(reference.FORMATS); import reference.optim.states; "
    code += "assert names == set(reference.FORMATS), names ^ set(reference.FORMATS)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {name for name, *_ in CODEBOOKS} <= set(FORMATS)
