"""The ledger: which files are kernels, what makes an entry stale, and what a refresh writes."""

import json
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from ao_lab.cli.app import main
from experiments.harness.rows import ROOT
from experiments.kernels import bench as command
from experiments.kernels.cases.all_cases import CASES
from experiments.kernels.cases.case import Bar
from experiments.kernels.report.lines import Against, Line
from experiments.ledger import ledger
from experiments.ledger import sources as ledger_sources
from experiments.ledger.sources import dependencies, digest, kernel_files, public_functions

FILES = {
    "fast/__init__.py": "from fast.cast import cast\nfrom fast.plain import plain\n",
    "fast/plain.py": "from fast.tensors import check\n\ndef plain(x):\n    return dict[str, int](x=check(x))\n",
    "fast/tensors.py": "def check(x):\n    return x\n",
    "fast/cast.py": "import fast.tensors\n\ndef cast(x):\n    from fast.kernels import caster\n    return caster.run(x)\n",
    "fast/kernels/__init__.py": "",
    "fast/kernels/rules/bits.py": "import triton\n\n@triton.jit\ndef bits(v):\n    return v\n",
    "fast/kernels/caster.py": "from .bits import bits\nfrom fast.kernels.sizes import S\n\ndef run(x):\n    bits[(S,)](x)\n",
    "fast/kernels/sizes.py": "S = 4\n",
    "fast/launcher.py": "import triton\n\n@triton.jit(noinline=True)\ndef kernel(x):\n    pass\n",
}
MACHINE = {"date": "2026-11-21", "gpu": "H200", "driver": "1", "versions": {"torch": "2.11"}}
OK = {"name": "family/cast", "kernel": "fast", "status": "ok", "count": 100, "different": 0, "seconds": 1.5}
LINE = Line(
    "quantize.mxfp4", "16384x4096", "ok", {"time": 12.3456, "fraction": 0.91}, (Bar("fraction", 0.9),)
)


@pytest.fixture
def clone(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture
def measured(clone, monkeypatch):
    """A clone whose ledger was just refreshed; `cast` is what the benchmark needs."""
    monkeypatch.setitem(CASES, "quantize.mxfp4", replace(CASES["quantize.mxfp4"], needs=("cast",)))
    write(clone, [OK, {**OK, "name": "bits", "kernel": "fast/launcher.py"}])
    return clone


def write(root, tests, lines=(LINE,)):
    entries = ledger.entries_of(root, {"tests": tests, "state": "ran"}, lines, MACHINE)
    path = ledger.path_of(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"kernels": entries, "tests": {}}))


def test_kernel_files_are_found(clone):
    assert kernel_files(clone) == [
        "fast/cast.py",
        "fast/kernels/rules/bits.py",
        "fast/kernels/caster.py",
        "fast/kernels/sizes.py",
        "fast/launcher.py",
    ]


def test_dependencies_are_those_of_fast_and_reach_on(clone):
    assert dependencies(clone, "fast/kernels/rules/bits.py") == []
    assert dependencies(clone, "fast/kernels/caster.py") == [
        "fast/kernels/rules/bits.py",
        "fast/kernels/sizes.py",
    ]
    assert dependencies(clone, "fast/cast.py") == [
        "fast/kernels/rules/bits.py",
        "fast/kernels/caster.py",
        "fast/kernels/sizes.py",
        "fast/tensors.py",
    ]
    assert public_functions(clone)["plain"] == ["fast/plain.py", "fast/tensors.py"]


def test_the_files_of_this_clone_can_be_read(monkeypatch):
    """Each is parsed once: they are asked for again by every file that imports them."""
    imported = ledger_sources.imported
    monkeypatch.setattr(ledger_sources, "imported", lru_cache(None)(lambda *asked: tuple(imported(*asked))))
    for name in kernel_files(ROOT):
        assert name.startswith("fast/")
        assert len(digest(ROOT, name)) == 64
        assert name not in dependencies(ROOT, name)


def test_one_byte_makes_what_depends_on_it_stale(measured):
    measured_files = {"fast/launcher.py": "unmeasured: no benchmark uses it"}
    assert ledger.problems(measured) == measured_files
    path = measured / "fast/kernels/rules/bits.py"
    path.write_text(path.read_text() + "#")
    stale = {name for name, words in ledger.problems(measured).items() if words.startswith("stale")}
    assert stale == {"fast/cast.py", "fast/kernels/rules/bits.py", "fast/kernels/caster.py"}
    path.write_text(FILES["fast/kernels/rules/bits.py"])
    assert ledger.problems(measured) == measured_files


def test_line_ends_are_no_change(measured):
    path = measured / "fast/kernels/rules/bits.py"
    before = digest(measured, "fast/kernels/rules/bits.py")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert digest(measured, "fast/kernels/rules/bits.py") == before


def test_what_is_outside_a_kernels_imports_does_not_count(measured):
    before = ledger.problems(measured)
    (measured / "fast/plain.py").write_text("def plain(x):\n    return None\n")
    assert ledger.problems(measured) == before


def test_new_and_gone_files_are_named(measured):
    (measured / "fast/kernels/new.py").write_text("")
    (measured / "fast/launcher.py").unlink()
    found = ledger.problems(measured)
    assert found["fast/kernels/new.py"] == "missing: never tested on a GPU"
    assert found["fast/launcher.py"] == "stale: no such kernel file"


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ([{**OK, "status": "different", "different": 3}], "failed: 1 of 1 tests (family/cast)"),
        ([{**OK, "different": 3}], "failed: 1 of 1 tests"),
        ([OK, {**OK, "name": "other/cast", "status": "error"}], "failed: 1 of 2 tests (other/cast)"),
        ([{**OK, "status": "missing"}], "failed: 1 of 1"),
        ([{**OK, "status": "skipped"}], "untested: no test of it ran"),
        ([], "untested: no test of it ran"),
        ([{**OK, "name": "family/plain"}], "untested: no test of it ran"),
    ],
)
def test_entries_without_passed_tests_do_not_stand(measured, tests, words):
    write(measured, tests)
    assert ledger.problems(measured)["fast/kernels/caster.py"].startswith(words)


def test_wrong_benchmarks_do_not_stand(measured):
    write(measured, [OK], [replace(LINE, status="wrong: codes", values={})])
    assert ledger.problems(measured)["fast/cast.py"] == "failed: benchmarks quantize.mxfp4"


def test_an_entry_holds_what_the_gpu_said(measured):
    against = (Against("torch.compile", 1.23456, "ok"), Against("torchao", None, "error"))
    write(measured, [{**OK, "handed_on": 2}], [replace(LINE, against=against)])
    entry = ledger.read(measured)["kernels"]["fast/kernels/caster.py"]
    assert entry["imports"] == ["fast/kernels/rules/bits.py", "fast/kernels/sizes.py"]
    assert {key: entry[key] for key in MACHINE} == MACHINE
    assert entry["tests"] == {
        "state": "ran",
        "run": 1,
        "passed": 1,
        "failed": [],
        "compared": 100,
        "different": 0,
        "by_the_reference": 2,
    }
    (benchmark,) = entry["benchmarks"]
    assert benchmark == {
        "case": "quantize.mxfp4",
        "shape": "16384x4096",
        "status": "ok",
        "time": 12.3,
        "fraction": 0.91,
        "bars": {"fraction": 0.9},
        "missed": [],
        "best_peer": {"name": "torch.compile", "ratio": 1.23},
    }


SCRIPT = """
import json, sys, time
out = sys.argv[sys.argv.index("--json") + 1]
json.dump({"tests": [dict(name="family/cast", kernel="fast", status="ok", count=1, different=0, seconds=0.5)]}, open(out, "w"))
time.sleep(%s)
sys.exit(%s)
"""


@pytest.mark.parametrize(
    ("sleep", "code", "state"), [(0, 0, "ran"), (0, 1, "exit code 1"), (60, 0, "stopped after 2 s")]
)
def test_tests_run_as_a_script_and_may_break_off(clone, sleep, code, state):
    path = clone / ledger.TESTS
    path.parent.mkdir(parents=True)
    path.write_text(SCRIPT % (sleep, code))
    found = ledger.run_tests(clone, seconds=2)
    assert found["state"] == state
    assert [one["name"] for one in found["tests"]] == ["family/cast"]
    assert ledger.tests_summary(found)["seconds"] == 0.5


def test_without_a_script_nothing_was_tested(clone):
    assert ledger.run_tests(clone, seconds=2) == {"state": f"{ledger.TESTS} does not exist", "tests": []}


def test_refresh_writes_everything_with_the_digests_of_its_beginning(measured, monkeypatch):
    ledger.path_of(measured).unlink()
    seen = {}

    def complete(with_peers, seconds):
        seen.update(with_peers=with_peers, seconds=seconds)
        (measured / "fast/kernels/sizes.py").write_text("S = 8\n")
        return [LINE], []

    monkeypatch.setattr(command, "complete", complete)
    monkeypatch.setattr(ledger, "run_tests", lambda root, seconds: {"state": "ran", "tests": [OK]})
    monkeypatch.setattr(ledger, "about", lambda: MACHINE)
    assert ledger.refresh(measured) == ledger.path_of(measured)
    assert seen["with_peers"] is True
    assert 0 < seen["seconds"] < ledger.TOTAL_SECONDS - ledger.OWN_SECONDS
    # What was changed while it ran was not what ran.
    assert ledger.problems(measured)["fast/cast.py"].startswith("stale")
    assert "fast/kernels/rules/bits.py" not in ledger.problems(measured)
    assert ledger.read(measured)["tests"]["passed"] == 1


def test_the_driver_is_unknown_without_its_tool(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert ledger.driver() == "unknown"


# The command line


def at(monkeypatch, root):
    for name in ("problems", "read", "refresh"):
        function = getattr(ledger, name)
        monkeypatch.setattr(ledger, name, lambda root=root, function=function: function(root))


def test_check_names_what_is_stale_with_code_1(measured, monkeypatch, capsys):
    (measured / "fast/launcher.py").unlink()
    write(measured, [OK])
    at(monkeypatch, measured)
    assert main(["ledger", "--check"]) == 0
    (measured / "fast/kernels/sizes.py").write_text("S = 8\n")
    capsys.readouterr()
    assert main(["ledger", "--check"]) == 1
    out = capsys.readouterr().out
    assert "fast/kernels/sizes.py" in out
    assert "fast/kernels/rules/bits.py" not in out
    assert main(["ledger", "--check", "--json"]) == 1
    assert "stale" in json.loads(capsys.readouterr().out)["problems"]["fast/cast.py"]
    # Shown without being asked whether it stands.
    assert main(["ledger"]) == 0
    assert "2026-11-21" in capsys.readouterr().out


def test_no_ledger_at_all_is_missing_entries(clone, monkeypatch, capsys):
    at(monkeypatch, clone)
    assert main(["ledger", "--check"]) == 1
    assert "never tested" in capsys.readouterr().out


def test_refresh_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["ledger", "--refresh"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["ledger", "--refresh", "--check"]) == 2
    assert "not both" in capsys.readouterr().err


def test_make_test_says_what_is_stale_and_goes_on():
    text = (ROOT / "Makefile").read_text()
    recipe = text[text.index("\ntest:") :].split("\n\n")[0]
    (line,) = [line for line in recipe.splitlines() if "ledger" in line]
    assert "--check" in line
    assert "|| true" in line
