"""The page of kernel families: written anew it is the committed one, and no family is missing."""

import gzip
import platform
import subprocess
import sys
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


PAGES_WITHOUT = """
import sys
from pathlib import Path

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, Missing())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find_spec(name, package)
import importlib, pkgutil
import experiments
for module in pkgutil.walk_packages(experiments.__path__, "experiments."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from experiments.harness.paths import Paths
from experiments.report.pages import write_pages
folder = Path(sys.argv[1])
write_pages(Paths(cache=folder / "cache", reports=folder))
"""


def test_experiments_are_imported_and_pages_written_without_triton(tmp_path):
    """All of them, from a table of rows, in a process that cannot import it: torch for a CPU brings none."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "qat_overhead.csv").write_bytes((REPORTS / "data" / "qat_overhead.csv").read_bytes())
    rows = gzip.decompress((REPORTS / "data" / "linear.csv.gz").read_bytes()).splitlines(keepends=True)
    with gzip.open(tmp_path / "data" / "linear.csv.gz", "wb") as file:
        file.writelines([rows[0], *(row for row in rows if b"H200" in row)][:200])
    subprocess.run([sys.executable, "-c", PAGES_WITHOUT, tmp_path], check=True, cwd=REPORTS.parent)
    assert (tmp_path / "index.html").exists()
    assert not (tmp_path / "families.md").exists()
