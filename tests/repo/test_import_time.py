"""Imports are quick: under 150 ms beyond NumPy, and the command line loads neither torch nor JAX."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MS = 150.0
TRIES = 7

TIMED = """
import time, numpy  # CPU time: what other processes do is not our import
start = time.process_time()
{work}
print((time.process_time() - start) * 1e3)
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
def test_import_is_quick(name):
    """The best of several: a busy machine slows single runs, and a slow import slows them all."""
    work = f"import {name}" if name == "reference" else "import ao_lab; ao_lab.FORMATS"
    times = []
    for _ in range(TRIES):
        times.append(float(output_of(TIMED.format(work=work))))
        if times[-1] < LIMIT_MS:
            return
    pytest.fail(
        f"import {name} takes {min(times):.0f} ms beyond NumPy at best, the limit is {LIMIT_MS:.0f} ms"
    )


@pytest.mark.parametrize(
    "work",
    ["import reference", "import ao_lab", "import ao_lab; ao_lab.SCHEMES", "import ao_lab.cli.app", HELP],
)
def test_nothing_heavy_is_imported(work):
    assert output_of(HEAVY.format(work=work)) == "[]"


WITHOUT_TRITON = """
import importlib, pkgutil, sys, warnings
sys.modules["triton"] = None
warnings.simplefilter("ignore")
import torch, ao_lab
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
"""


def test_a_cpu_needs_no_triton():
    """A build of torch for CPUs brings none: every module is imported, and layers train."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
