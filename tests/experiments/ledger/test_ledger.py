"""The ledger: what makes an entry stale, what a refresh runs, and that a refresh that is cut short loses nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ao_lab.cli.app import main
from experiments.harness import provenance
from experiments.harness.rows import ROOT, Row, write
from experiments.kernels import bench
from experiments.kernels.cases.all_cases import CASES
from experiments.ledger import entries, gpu_tests, ledger, refresh
from experiments.source.closure import SourceTree
from tests.gpu import validate_kernels
from tests.gpu.harness.run import Settings

FILES = {
    "fast/__init__.py": "from fast.cast import cast\nfrom fast.layers import norm\nfrom fast.plain import plain\n",
    "fast/cast.py": "from fast.kernels.caster import kernel\n\ndef cast(x):\n    kernel[(1,)](x)\n",
    "fast/layers.py": "from fast.kernels import norms\n\ndef norm(x):\n    norms.kernel[(1,)](x)\n",
    "fast/plain.py": "def plain(x):\n    return x\n",
    "fast/kernels/caster.py": "import triton\nfrom fast.kernels.sizes import S\n\n@triton.jit\ndef kernel(x):\n    x + S\n",
    "fast/kernels/norms.py": "import triton\n\n@triton.jit(noinline=True)\ndef kernel(x):\n    x\n",
    "fast/kernels/sizes.py": "S = 4  # bytes\n",
}
MACHINE = {"date": "2026-11-21", "gpu": "H200", "driver": "1", "versions": {"torch": "2.11"}}
#: A validator of four jobs: it ends itself after as many as AFTER says.
SCRIPT = """
import json, os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
jobs = [("casts", "a", "cast"), ("casts", "b", "cast"), ("norms", "a", "norm"), ("both", "a", "norm"), ("both", "a", "cast")]
if "--families" in given:
    functions = given["--functions"].split(",")
    wanted = {*given["--families"].split(","), *(family for family, _, function in jobs if function in functions)}
    jobs = [job for job in jobs if job[0] in wanted]
path = given["--journal"]
lines = [json.loads(line) for line in open(path) if line.strip() and line.endswith("}\\n")]
done = {(line.get("family"), line.get("label")) for line in lines if "tests" in line}
labels = list(dict.fromkeys((family, label) for family, label, _ in jobs))
families = [family for family, _ in labels]
journal = open(path, "a")
print(json.dumps({"families": {family: families.count(family) for family in families}}), file=journal, flush=True)
left = int(open("after").read())
for family, label in labels:
    if (family, label) in done:
        continue
    if left == 0:
        journal.write('{"family": "cut sho')
        journal.flush()
        os._exit(9)
    left -= 1
    tests = [dict(name=f"{family}/{function}", status="ok", count=100, different=0, handed_on=2)
             for one, other, function in jobs if (one, other) == (family, label)]
    print(json.dumps({"family": family, "function": "f", "label": label, "tests": tests}), file=journal, flush=True)
    open("ran", "a").write(f"{family} {label}\\n")
"""


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone whose `fast` has two functions with kernels and one without."""
    for name, text in {**FILES, gpu_tests.TESTS: SCRIPT, "after": "99", "ran": ""}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    functions = {"cast": "fast.cast", "norm": "fast.norm"}
    monkeypatch.setattr(entries, "functions", CachedFunctions(functions))
    monkeypatch.setattr(ledger, "functions", entries.functions)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    provenance.forget()
    monkeypatch.setattr(refresh, "about", lambda: MACHINE)
    monkeypatch.setattr(refresh, "measure", lambda seconds, everything=False: None)
    monkeypatch.setitem(CASES, "quantize.mxfp4", replace(CASES["quantize.mxfp4"], needs=("cast:packed",)))
    yield tmp_path
    monkeypatch.undo()
    provenance.forget()


class CachedFunctions:
    """`entries.functions` of the small clone."""

    def __init__(self, made):
        self.made = made

    def __call__(self):
        return self.made

    def cache_clear(self):
        pass


def edit(root, name, before, after):
    path = root / name
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    provenance.forget()


def ran(root):
    """The jobs that ran since the last look."""
    made = (root / "ran").read_text().split("\n")[:-1]
    (root / "ran").write_text("")
    return made


def test_functions_with_kernels_have_entries():
    """By what they reach: nobody lists them."""
    found = entries.functions()
    assert {"quantize", "dequantize", "linear", "rms_norm", "encode", "jax", "saturation"} <= set(found)
    assert "matmul_error_bound" not in found
    kernels = entries.code_of("encode")["kernels"]
    assert "fast.kernels.encode.pointwise" in kernels
    assert not any(name.startswith("fast.kernels.linear") for name in kernels)


def test_cuda_sources_belong_to_the_code_of_an_entry(monkeypatch):
    """A kernel that is no Triton function counts by the file that its module names."""
    assert "linear_sparse" in entries.functions()
    before = entries.code_of("linear_sparse")
    assert "fast.kernels.sparse_mm.variants" in before["kernels"]
    others = entries.code_of("encode")["source_hash"]
    assert entries.is_fresh("linear_sparse", before)
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"another kernel")
    assert entries.code_of("linear_sparse")["source_hash"] != before["source_hash"]
    assert not entries.is_fresh("linear_sparse", before)
    said = entries.problem("linear_sparse", before, [])
    assert said == "stale: fast/kernels/sparse_mm/sparse_mm.cu changed"
    assert entries.code_of("encode")["source_hash"] == others


def test_new_entries_are_tested_by_the_families_that_are_named(clone, monkeypatch):
    """And by those that say that they test them."""
    monkeypatch.setattr(refresh, "stale_entries", lambda root: ["cast"])
    assert refresh.test_stale(["casts"], 60.0, clone) == ["cast"]
    assert ran(clone) == ["casts a", "casts b", "both a"]
    assert ledger.read(clone)["cast"]["tests"]["state"] == "ran"


def test_a_refresh_makes_every_entry_and_the_next_runs_nothing(clone):
    assert ledger.problems(clone) == dict.fromkeys(("cast", "norm"), "missing: never tested on a GPU")
    refresh.refresh(root=clone)
    assert len(ran(clone)) == 4
    entry = ledger.read(clone)["cast"]
    assert entry["kernels"] == ["fast.kernels.caster"]
    assert {key: entry[key] for key in MACHINE} == MACHINE
    assert entry["tests"] == {
        "state": "ran",
        "run": 2,
        "passed": 2,
        "failed": [],
        "compared": 300,
        "different": 0,
        "by_the_reference": 6,
        "families": ["both", "casts"],
    }
    assert ledger.problems(clone) == {}
    refresh.refresh(root=clone)
    assert ran(clone) == []
    assert not gpu_tests.journal_of(clone).exists()


def test_a_comment_makes_nothing_stale_and_a_constant_one_entry(clone):
    refresh.refresh(root=clone)
    ran(clone)
    edit(clone, "fast/kernels/sizes.py", "# bytes", "# bytes of a word")
    assert ledger.problems(clone) == {}
    edit(clone, "fast/kernels/sizes.py", "S = 4", "S = 8")
    assert ledger.problems(clone) == {"cast": "stale: fast.kernels.sizes changed"}
    before = ledger.read(clone)["norm"]
    refresh.refresh(root=clone)
    assert ran(clone) == ["casts a", "casts b", "both a"]
    assert ledger.problems(clone) == {}
    assert ledger.read(clone)["norm"] == before


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_refresh_that_is_killed_goes_on_where_it_was(clone, after):
    (clone / "after").write_text(str(after))
    refresh.refresh(root=clone)
    first = ran(clone)
    assert len(first) == after
    assert set(ledger.problems(clone)) == {"cast", "norm"}
    (clone / "after").write_text("99")
    refresh.refresh(root=clone)
    second = ran(clone)
    assert sorted([*first, *second]) == ["both a", "casts a", "casts b", "norms a"]
    assert ledger.problems(clone) == {}
    assert ledger.read(clone)["cast"]["tests"]["compared"] == 300


def test_parts_by_themselves(clone, monkeypatch):
    """Tests have all of the time then; benchmarks alone test nothing."""
    times, run = [], gpu_tests.run_tests
    monkeypatch.setattr(gpu_tests, "run_tests", lambda *given: times.append(given[3]) or run(*given))
    measured = []
    monkeypatch.setattr(refresh, "measure", lambda seconds, everything: measured.append(seconds))
    refresh.refresh(100.0, root=clone, parts=[refresh.BENCHMARKS])
    assert (ran(clone), times, len(measured)) == ([], [], 1)
    refresh.refresh(100.0, root=clone, parts=[refresh.TESTS])
    assert (len(ran(clone)), times, len(measured)) == (4, [100.0], 1)
    assert ledger.problems(clone) == {}


def test_jobs_of_other_code_are_not_taken_for_tested(clone):
    """Others are."""
    (clone / "after").write_text("3")
    refresh.refresh(root=clone)
    ran(clone)
    edit(clone, "fast/kernels/norms.py", "    x\n", "    x + 1\n")
    (clone / "after").write_text("99")
    refresh.refresh(root=clone)
    assert sorted(ran(clone)) == ["both a", "norms a"]
    assert ledger.problems(clone) == {}
    assert ledger.read(clone)["cast"]["tests"]["compared"] == 300


def test_all_remakes_everything(clone):
    refresh.refresh(root=clone)
    ran(clone)
    refresh.refresh(root=clone, everything=True)
    assert len(ran(clone)) == 4


def test_gone_functions_are_named(clone):
    refresh.refresh(root=clone)
    made = ledger.read(clone)
    ledger.write({**made, "gone": made["cast"]}, clone)
    assert ledger.problems(clone) == {"gone": "stale: no such function"}


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ({"status": "different", "different": 3}, "failed: 1 of 1 tests (family/cast)"),
        ({"different": 3}, "failed: 1 of 1 tests"),
        ({"status": "error"}, "failed: 1 of 1 tests"),
        ({"status": "missing"}, "failed: 1 of 1"),
        ({"status": "skipped"}, "untested: no test of it ran (ran)"),
    ],
)
def test_entries_without_passed_tests_do_not_stand(clone, tests, words):
    refresh.refresh(root=clone)
    one = {"name": "family/cast", "status": "ok", "count": 1, "different": 0, "handed_on": 0, **tests}
    made = ledger.read(clone)
    made["cast"]["tests"] = entries.outcome([one], "ran")
    ledger.write(made, clone)
    assert ledger.problems(clone)["cast"].startswith(words)
    assert refresh.stale_entries(clone) == ["cast"]


def benchmark(metric="status: ok", **changes):
    values = {
        "experiment": "kernels",
        "table": "kernels/full/random-normal",
        "setting": "16384x4096",
        "method": "quantize.mxfp4",
        "metric": metric,
        "value": 1.0,
        "unit": "",
        "device": "H200",
        "seed": 0,
        "source_hash": "now",
    }
    return Row(**{**values, **changes})


def test_benchmarks_are_rows_of_the_cases_that_call_a_function(clone, monkeypatch):
    refresh.refresh(root=clone)
    monkeypatch.setattr(provenance, "row_hash", lambda *place: "now")
    path = clone / "reports" / "data" / "kernels.csv"
    write(path, [benchmark(), benchmark("time"), benchmark(method="quantize.mxfp4_rceil")])
    assert ledger.problems(clone) == {}
    assert ledger.shown(clone)["cast"]["benchmarks"] == {"measured": 1, "reached": 1}
    write(path, [benchmark(source_hash="then")])
    words = "stale: 1 of 1 benchmarks, such as quantize.mxfp4"
    assert ledger.problems(clone) == {"cast": words}
    write(path, [benchmark("status: wrong: codes")])
    assert ledger.problems(clone) == {"cast": "failed: benchmarks quantize.mxfp4"}


def test_published_benchmarks_of_this_gpu_and_libraries_are_not_measured_again(tmp_path, monkeypatch):
    from experiments.harness.paths import Paths
    from tests.experiments.harness import tiny

    places = Paths(tmp_path, tmp_path / "reports")
    settings = replace(tiny.settings(tmp_path), scale="full")
    rows = [
        benchmark(device="cpu"),
        benchmark("time", device="cpu"),
        benchmark(),
        benchmark("status: error", setting="x"),
    ]
    assert bench.measured_here(rows, settings, places) == []
    record = {"kernels/full/cpu": {"libraries": bench.libraries()}}
    (places.data).mkdir(parents=True)
    (places.data / "environment.json").write_text(json.dumps(record))
    assert bench.measured_here(rows, settings, places) == rows[:2]


def test_the_driver_is_unknown_without_its_tool(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert refresh.driver() == "unknown"


def test_the_ledger_of_this_clone_is_small():
    code = {name: entries.code_of(name) for name in entries.functions()}
    assert len(json.dumps(code, indent=1)) < 300_000
    assert ledger.path_of(ROOT).stat().st_size < 500_000


def test_jobs_of_the_validator_have_names_of_their_own():
    """By which a journal knows what is finished."""
    jobs = validate_kernels.all_jobs(Settings(fraction=gpu_tests.FRACTION))
    assert len({tuple(getattr(job, key) for key in validate_kernels.KEY) for job in jobs}) == len(jobs)


def test_the_validator_goes_on_from_its_journal(tmp_path, capsys):
    """A job whose line was cut short runs again, others do not."""
    gpu_tests.begin(tmp_path, {"pack": "code"})
    path = gpu_tests.journal_of(tmp_path)
    given = [
        "--device",
        "cpu",
        "--fraction",
        "0.02",
        "--families",
        "pack",
        "--only",
        "pack int4",
        "--workers",
        "0",
    ]
    assert validate_kernels.main([*given, "--journal", str(path)]) == 0
    jobs, sizes = gpu_tests.finished(tmp_path)
    assert sizes == {"pack": len(jobs)}
    assert {one["name"] for one in gpu_tests.tests_of(jobs)["pack"]} == {"pack/pack"}
    assert gpu_tests.open_families(jobs, sizes) == set()
    path.write_text(path.read_text()[:-9])
    assert gpu_tests.open_families(*gpu_tests.finished(tmp_path)) == {"pack"}
    assert validate_kernels.main([*given, "--journal", str(path)]) == 0
    assert len(gpu_tests.finished(tmp_path)[0]) == len(jobs)
    gpu_tests.begin(tmp_path, {"pack": "code"})
    assert gpu_tests.finished(tmp_path)[0]
    gpu_tests.begin(tmp_path, {"pack": "other code"})
    assert gpu_tests.finished(tmp_path) == ([], {})
    assert "every job" not in capsys.readouterr().out


def test_tests_of_rooms_beside_the_public_functions():
    names = (
        "both/quantize",
        "jax shapes/quantize",
        "saturation/saturation.fake_quantize_with_mask",
        "linear/linear",
    )
    assert [entries.entry_of(name) for name in names] == ["quantize", "jax", "saturation", "linear"]


# The command line


def at(monkeypatch, root):
    for name in ("problems", "read", "shown"):
        function = getattr(ledger, name)
        monkeypatch.setattr(ledger, name, lambda root=root, function=function: function(root))


def test_check_names_what_is_stale_with_code_1(clone, monkeypatch, capsys):
    refresh.refresh(root=clone)
    at(monkeypatch, clone)
    assert main(["ledger", "--check"]) == 0
    edit(clone, "fast/kernels/sizes.py", "S = 4", "S = 8")
    capsys.readouterr()
    assert main(["ledger", "--check"]) == 1
    out = capsys.readouterr().out
    assert "fast.kernels.sizes changed" in out
    assert "norm" not in out
    assert main(["ledger", "--check", "--json"]) == 1
    assert "stale" in json.loads(capsys.readouterr().out)["problems"]["cast"]
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
    for wrong, words in ((["--refresh", "--check"], "not both"), (["--all"], "--all with --refresh")):
        assert main(["ledger", *wrong]) == 2
        assert words in capsys.readouterr().err


def test_make_test_says_what_is_stale_and_goes_on():
    text = (ROOT / "Makefile").read_text()
    recipe = text[text.index("\ntest:") :].split("\n\n")[0]
    (line,) = [line for line in recipe.splitlines() if "ledger" in line]
    assert "--check" in line
    assert "|| true" in line


def test_sources_are_those_of_when_they_were_first_asked_for(tmp_path):
    (tmp_path / "fast").mkdir()
    path = tmp_path / "fast" / "a.py"
    path.write_text("def f():\n    return 1\n")
    tree = SourceTree(tmp_path, ("fast",))
    path.write_text("def g():\n    return 1\n")
    assert "f" in tree.module("fast.a").definitions
