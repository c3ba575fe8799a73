"""Settings of the whole test run, and the marker of every test.

A test is `core`, `compile` (Triton compiles or interprets kernels), `integration` (whole models, folders, commands, processes)
or `nightly` (a further record or shape of a test whose other cases take every path). The folder decides, `MARKERS` says how;
`nightly` stands at the test. `pytest -m core` runs one kind.

Hypothesis: `default` looks at new examples in every run and keeps the failures it found; `ci` (HYPOTHESIS_PROFILE=ci, set by
`.ci/run`) draws the same examples every time and stores nothing. Neither has a deadline: machines are shared, and a slow
example is no wrong one. The number of examples is the same in both: no profile makes a test weaker.

Garbage collection is off while tests are collected, and looks at what the tests of one file allocate alone: the million objects
of collected tests, of imported libraries and of earlier files' compiled programs live as long as the process, and a look at all
of them takes seconds.
"""

import gc
import os
from collections.abc import Generator
from pathlib import Path

# One thread a test process: the processes share the cores. Read by torch and NumPy when they are first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Inductor asks the processor for its vector instructions, and compiles a program with each set anew in every empty cache to see
# that the compiler has them, too: nine core-seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# What a developer has tuned changes which kernel multiplies. Compiled kernels are kept there from run to run.
os.environ.setdefault("AO_LAB_CACHE", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "ao_lab"))

import pytest
from hypothesis import HealthCheck, settings

from ao_lab import progress

#: What a run says of its time (`--time-limit`), and parts of a suite (`--part`).
pytest_plugins = ["tests.support.runs.time_budget"]

settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Lines of progress come by the clock, and how long a test takes is the machine's affair; their own tests set it back.
progress.INTERVAL = 3600.0

#: Folders and files below tests/ whose tests are not core.
MARKERS = {
    "emulator": "compile",
    "fast/kernels": "compile",
    "fast/linear": "compile",
    "ao_lab/checkpoint": "integration",
    "ao_lab/cli": "integration",
    "ao_lab/test_eval.py": "integration",
    "ao_lab/qat": "integration",
    "ao_lab/quantization": "integration",
    "ao_lab/tensor": "integration",
    "ao_lab/training/test_fsdp.py": "integration",
    "docs": "integration",
    "experiments": "integration",
    "repo": "integration",
}
TESTS = Path(__file__).parent
#: Allocations between two looks at the youngest objects; Python's own 700 are for small programs.
ALLOCATIONS = 20_000


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without looking for garbage, and never look at what was made until then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])
        gc.enable()


@pytest.hookimpl(trylast=True)  # after fixtures of the file
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Let go of young objects that the tests of a file left, and look at the rest no more: older garbage stays, too."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect(1)
        gc.freeze()


@pytest.fixture(scope="module")
def few_objects() -> None:
    """For tests that collect garbage or look at all objects: what earlier tests left takes a second each time, so it is left
    out once it was looked at."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_choices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[Path, None, None]:
    """A user's cache of its own, the folder; no choice of `tune` before or after."""
    from ao_lab.gemm import choices

    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    choices.forget()
    yield tmp_path
    choices.forget()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test that is not nightly the marker of its folder."""
    # Here, since pytest rewrites a plugin's assertions before it is imported.
    from tests.support.runs.time_budget import leave_to_the_night

    leave_to_the_night(items)
    for item in items:
        if item.get_closest_marker("nightly") is None:
            item.add_marker(marker_of(item.path.relative_to(TESTS).as_posix()))


def marker_of(path: str) -> str:
    """The marker of a file's tests, `core` where no folder says otherwise."""
    found = [marker for folder, marker in MARKERS.items() if f"{path}/".startswith(f"{folder}/")]
    return found[0] if found else "core"
