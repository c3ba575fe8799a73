"""Imports are quick: what they load beyond NumPy is ours and little, and the command line loads neither torch nor JAX.

How long they take is measured by `make speed`, whose page has the limit; a test that measures it fails on a busy machine.
"""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Modules that an import may load beyond NumPy's, those of the standard library included: 102 and 116, in November 2026.
MOST_MODULES = 130

LOADED = """
import sys, numpy
before = set(sys.modules)
{work}
loaded = set(sys.modules) - before
print(len(loaded), *sorted({{name.split(".")[0] for name in loaded}} - set(sys.stdlib_module_names)))
"""
HEAVY = """
import sys, contextlib, io
{work}
print([name for name in ("torch", "jax", "triton", "numba", "pandas", "matplotlib", "hypothesis") if name in sys.modules])
"""
HELP = (
    "from ao_lab.cli.app import main\nwith contextlib.redirect_stdout(io.StringIO()):\n    main(['--help'])"
)


def output_of(script):
    """What a fresh interpreter prints last."""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", ["reference", "ao_lab"])
def test_import_loads_little(name):
    work = f"import {name}" if name == "reference" else "import ao_lab; ao_lab.FORMATS"
    count, *packages = output_of(LOADED.format(work=work)).split()
    assert set(packages) <= {"numpy", "reference", name}
    assert int(count) <= MOST_MODULES


def test_nothing_heavy_is_imported():
    """By all of these one after the other: what one of them imports is there at the end."""
    work = f"import reference, ao_lab\nao_lab.SCHEMES\n{HELP}"
    assert output_of(HEAVY.format(work=work)) == "[]"


def test_what_is_heavy_is_seen():
    assert output_of(HEAVY.format(work="import ao_lab, hypothesis")) == "['hypothesis']"


FEW_FILES = """
import sys, torch
from ao_lab import Int4WeightOnlyConfig, quantize_
ours = [name for name in sys.modules if name.split(".")[0] in ("ao_lab", "fast", "reference")]
late = [name for name in ("torch._dynamo", "triton", "numba", "ao_lab.gemm.sparse", "fast.cpu.linear") if name in sys.modules]
entered = set()
for _ in range(2):
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128)).bfloat16()
    sys.setprofile(lambda frame, event, argument: entered.add(frame.f_code.co_filename))
    quantize_(model, Int4WeightOnlyConfig())
    sys.setprofile(None)
    files = {name for name in entered if name in {getattr(sys.modules[one], "__file__", "") for one in list(sys.modules)
             if one.split(".")[0] in ("ao_lab", "fast", "reference")}}
    entered.clear()
print(len(ours), len(files), late)
"""


def test_quantizing_a_small_model_reads_few_of_our_files():
    """What it imports first, what it leaves for those who need it, and what a second call runs through."""
    loaded, files, late = output_of(FEW_FILES).split(maxsplit=2)
    assert (int(loaded) <= 120, int(files) <= 33, late) == (True, True, "[]"), (loaded, files, late)


WITHOUT_TRITON = """
import importlib, importlib.util, pathlib, pkgutil, sys, warnings
warnings.simplefilter("ignore")

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, Missing())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find_spec(name, package)
import torch, ao_lab, experiments
for module in pkgutil.walk_packages(experiments.__path__, "experiments."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for module in pkgutil.walk_packages(ao_lab.__path__, "ao_lab."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        if "triton" in str(error) and module.name != "ao_lab.jax.launches":  # which launches on GPUs
            print(module.name)
for recipe in ("rowwise", "mxfp8", "nvfp4"):
    layer = torch.nn.Sequential(torch.nn.Linear(128, 128, dtype=torch.bfloat16))
    ao_lab.convert_for_training_(layer, recipe)
    for _ in range(2):
        layer(torch.randn(128, 128).bfloat16().requires_grad_()).sum().backward()
from experiments.harness.paths import Paths
from experiments.report.pages import write_pages
folder = pathlib.Path(sys.argv[1])
write_pages(Paths(cache=folder / "cache", reports=folder))
"""


def test_a_cpu_needs_no_triton(tmp_path):
    """A build of torch for CPUs brings none: every module is imported, experiments' too, layers train, and pages are written
    from a table of rows."""
    data = ROOT / "reports" / "data"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "qat_overhead.csv").write_bytes((data / "qat_overhead.csv").read_bytes())
    rows = gzip.decompress((data / "linear.csv.gz").read_bytes()).splitlines(keepends=True)
    with gzip.open(tmp_path / "data" / "linear.csv.gz", "wb") as file:
        file.writelines([rows[0], *(row for row in rows if b"H200" in row)][:200])
    command = [sys.executable, "-c", WITHOUT_TRITON, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (tmp_path / "index.html").exists()
    assert not (tmp_path / "families.md").exists()
