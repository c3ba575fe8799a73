"""The page of kernel families: written anew it is the committed one, and no family is missing."""

import platform
from pathlib import Path

import pytest

from experiments.report import families
from experiments.report.pages import render
from fast.gemm.families import FAMILIES

REPORTS = Path(__file__).resolve().parents[3] / "reports"
pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")


def test_the_page_is_current():
    tables = families.tables()
    for name in ("families.md", "families.html"):
        assert (REPORTS / name).read_text() == render(f"{name}.j2", families=tables)


def test_every_family_of_a_hopper_gpu_multiplies_something():
    """Those of other GPUs are named in the table of families alone."""
    assert set(FAMILIES) - set(families.families_named()) == {"torch_int_mm", "triton_sparse24_small_m"}
