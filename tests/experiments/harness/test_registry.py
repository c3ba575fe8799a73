"""Experiments and the function that runs them: no row missing, none measured twice, clear errors."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

import experiments
from experiments import EXPERIMENTS
from experiments.data.evaluation import Error, mean_and_error
from experiments.decode.configs import CONFIGS
from experiments.formats import page
from experiments.formats import run as formats
from experiments.harness import registry, revision
from experiments.harness.measuring import measure_all
from experiments.harness.paths import Paths
from experiments.harness.rows import ROOT, Journal, read
from experiments.models import quantized_model as pairing
from experiments.ptq import run as ptq
from experiments.ptq.real import PARTS, WEIGHTS
from experiments.runs import run as harness_run
from experiments.runs.run import text_for
from experiments.runs.settings import settings_for
from reference import SCHEMES
from tests.experiments.harness import tiny
from tests.support.record_samples import FIELDS, NAMES
from tests.support.runs import forks

# The commit of a clone, what has changed since another, and what is said where nothing is known.


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A repository with one commit of two files of code."""
    monkeypatch.delenv("AO_LAB_COMMIT", raising=False)
    for cached in (revision.commit, revision.state, revision.changed_files):
        cached.cache_clear()

    def git(*arguments):
        names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True)
        for cached in (revision.commit, revision.state, revision.changed_files):
            cached.cache_clear()

    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / "a.py").write_text("x = 1\n" * 20)
    (tmp_path / "fast" / "b.py").write_text("y = 1\n" * 20)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    yield tmp_path, git
    for cached in (revision.commit, revision.state, revision.changed_files):
        cached.cache_clear()


def test_uncommitted_changes_of_code_are_said_and_name_a_state(clone):
    root, git = clone
    commit = revision.commit(root)
    assert len(commit) == revision.DIGITS
    assert revision.state(root) == commit
    (root / "reports").mkdir()
    (root / "reports" / "rows.csv").write_text("a\n")
    git("status")
    assert revision.commit(root) == commit
    (root / "fast" / "c.py").write_text("z = 1\n")
    git("status")
    assert revision.commit(root) == f"{commit}+dirty"
    first = revision.state(root)
    (root / "fast" / "c.py").write_text("z = 2\n")
    git("status")
    assert revision.state(root) != first
    assert revision.state(root).startswith(f"{commit}+dirty-")


def test_files_that_changed_are_counted_and_moved_ones_are_not(clone):
    root, git = clone
    first = revision.commit(root)
    assert revision.changed_files(first, ("fast",), root) == 0
    git("mv", "fast/a.py", "fast/moved.py")
    git("commit", "-qm", "moved")
    assert revision.changed_files(first, ("fast",), root) == 0
    (root / "fast" / "b.py").write_text("y = 2\n" * 20)
    git("commit", "-qam", "changed")
    assert revision.changed_files(first, ("fast",), root) == 1
    assert revision.changed_files(f"{first}+dirty", ("fast",), root) == 1
    assert revision.changed_files(first, ("reference",), root) == 0
    assert revision.changed_files(revision.commit(root), ("fast",), root) == 0


def test_new_files_count_and_pages_do_not(clone):
    root, git = clone
    first = revision.commit(root)
    (root / "fast" / "new.py").write_text("z = 1\n")
    page = root / "experiments" / "linear"
    (page / "report").mkdir(parents=True)
    for path in (page / "page.py", page / "report" / "times.py"):
        path.write_text("x = 1\n")
    git("status")
    assert revision.changed_files(first, ("fast", "experiments/linear"), root) == 1
    (page / "run.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-qm", "more")
    assert revision.changed_files(first, ("fast", "experiments/linear"), root) == 2


def test_a_tree_of_which_git_says_nothing_is_not_clean(clone, monkeypatch):
    root, git = clone
    commit, real = revision.commit(root), revision.printed
    monkeypatch.setattr(
        "ao_lab.install.revision.printed", lambda *c, root: None if "status" in c else real(*c, root=root)
    )
    git("status")
    assert revision.commit(root) == f"{commit}+dirty"


def test_variables_of_another_repository_change_nothing(clone, monkeypatch):
    root, git = clone
    commit = revision.commit(root)
    git("status")
    monkeypatch.setenv("GIT_DIR", str(revision.ROOT / ".git"))
    assert revision.commit(root) == commit


def test_a_copy_without_history_is_named_by_its_code(tmp_path, monkeypatch):
    """A dangling link is no file of it."""
    monkeypatch.delenv("AO_LAB_COMMIT", raising=False)
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / ".#a.py").symlink_to("nowhere")
    names = []
    for text, told in (("x = 1", None), ("x = 2", None), ("x = 2", "0832d6b6"), ("x = 3", "0832d6b6")):
        (tmp_path / "fast" / "a.py").write_text(text)
        if told:
            monkeypatch.setenv("AO_LAB_COMMIT", told)
        for cached in (revision.commit, revision.state):
            cached.cache_clear()
        names.append(revision.state(tmp_path))
    assert len({*names}) == 4
    assert [name.partition("-")[0] for name in names] == ["unknown", "unknown", "0832d6b6", "0832d6b6"]
    for cached in (revision.commit, revision.state):
        cached.cache_clear()


def test_what_nobody_knows_is_none(clone):
    root, _ = clone
    assert revision.changed_files("", ("fast",), root) is None
    assert revision.changed_files("00000000", ("fast",), root) is None


def test_a_copy_without_history_is_told_its_commit(tmp_path, monkeypatch):
    monkeypatch.delenv("AO_LAB_COMMIT", raising=False)
    revision.commit.cache_clear()
    assert revision.commit(tmp_path) == ""
    monkeypatch.setenv("AO_LAB_COMMIT", "0832d6b6")
    for root in (tmp_path, revision.ROOT):
        revision.commit.cache_clear()
        assert revision.commit(root) == "0832d6b6"
    revision.commit.cache_clear()


# A few records by day, which take every path of the two experiments; all by night.
RECORDS = pytest.mark.parametrize(
    "schemes",
    [pytest.param(FIELDS[::8], id="few"), pytest.param(NAMES, id="all", marks=pytest.mark.nightly)],
)


@RECORDS
def test_ptq_has_a_row_for_every_scheme(tmp_path, schemes):
    rows = ptq.run(tiny.settings(tmp_path, schemes))
    quality = {(row.method, pairing.activations_of(row.setting) is None) for row in rows}
    expected = {(scheme, alone) for scheme in schemes for alone in (True, False)}
    assert quality == expected | {("float32", True), ("bfloat16", True), ("bfloat16", False)}
    metrics = {(row.method, row.setting): 0 for row in rows}
    for row in rows:
        metrics[row.method, row.setting] += 1
    # 7 numbers of quality, 3 of size, 8 layers.
    assert set(metrics.values()) == {18}
    assert len({row.key for row in rows}) == len(rows)
    baseline = [row for row in rows if row.method == "float32" and row.metric == "bits per byte, change"]
    assert [row.value for row in baseline] == [0.0]


@RECORDS
def test_formats_has_a_row_for_every_scheme(tmp_path, schemes):
    rows = formats.run(tiny.settings(tmp_path, schemes))
    assert {row.method for row in rows} == set(schemes)
    for setting in ("normal", "heavy-tailed", "outlier channels", "weights", "activations"):
        assert sum(row.setting == setting for row in rows) == len(schemes) * len(formats.METRICS)
    for setting in ("weights of q_proj", "input of down_proj"):
        assert sum(row.setting == setting for row in rows) == 2 * len(schemes)
    assert len({row.key for row in rows}) == len(rows)


def test_bits_per_element_are_those_of_the_group(tmp_path):
    made = tiny.settings(tmp_path, ["fp8_tensorwise"])
    rows = formats.rows_of(
        made, "x", "y", "fp8_tensorwise", {"large": [torch.ones(256, 256)], "small": [torch.ones(128, 256)]}
    )
    bits = {row.setting: row.value for row in rows if row.metric == formats.BITS}
    assert bits == {"large": 8 + 32 / 65536, "small": 8 + 32 / 32768}


@pytest.mark.parametrize("experiment", [formats, ptq])
def test_a_second_run_measures_only_what_is_missing(tmp_path, monkeypatch, experiment):
    path = tmp_path / "journal.csv"
    experiment.run(tiny.settings(tmp_path, ["mxfp4"]), Journal(path))
    before = read(path)
    measured = []

    def counted(tasks, measure, device):
        for task, result in measure_all(tasks, measure, device):
            measured.append(task)
            yield task, result

    monkeypatch.setattr(experiment, "measure_all", counted)
    rows = experiment.run(tiny.settings(tmp_path, ["mxfp4", "mxint8"]), Journal(path))
    named = [task for task in measured if task != "float32"]
    assert len(named) == 2
    assert {getattr(task, "method", task[-1] if isinstance(task, tuple) else None) for task in named} == {
        "mxint8"
    }
    assert rows[: len(before)] == read(path)[: len(before)] == before


def test_an_error_keeps_what_was_measured(tmp_path):
    path = tmp_path / "journal.csv"
    with pytest.raises(ValueError, match="no_such_scheme"):
        formats.run(tiny.settings(tmp_path, ["mxfp4", "no_such_scheme"]), Journal(path))
    assert {row.method for row in read(path)} <= {"mxfp4"}


def test_weight_only_schemes_have_a_named_partner():
    for name, scheme in SCHEMES.items():
        partner = pairing.activation_scheme(name)
        assert not pairing.is_weight_only(SCHEMES[partner])
        assert (partner != name) == (name in pairing.ACTIVATIONS)
        assert pairing.activations_of(pairing.setting_name(partner)) == partner
        assert not pairing.is_weight_only(scheme) or name in pairing.ACTIVATIONS
    assert set(pairing.ACTIVATIONS) <= set(SCHEMES)
    with pytest.raises(ValueError, match="weights"):
        pairing.activations_of("elsewhere")


def test_error_measures_by_hand():
    error = Error.of(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0]))
    assert error.snr_db == pytest.approx(10 * np.log10(25))
    assert error.max_error == pytest.approx(0.25)
    assert error.cosine_distance == pytest.approx(1 - 21 / (5 * 18**0.5))
    double = error + error
    assert (double.snr_db, double.max_error) == (error.snr_db, error.max_error)
    assert Error.of(torch.ones(2), torch.ones(2)).snr_db == np.inf
    assert np.isnan(Error.of(torch.ones(2), torch.tensor([1.0, torch.nan])).snr_db)
    assert Error.of(torch.zeros(2), torch.ones(2)).snr_db == -np.inf
    assert Error.of(torch.zeros(2), torch.ones(2)).max_error == np.inf
    assert Error.of(torch.zeros(2), torch.zeros(2)).max_error == 0
    assert Error.of(torch.zeros(2), torch.zeros(2)).snr_db == np.inf
    good, bad = Error.of(torch.ones(2), torch.ones(2)), Error.of(torch.ones(2), torch.full((2,), torch.nan))
    assert all(np.isnan(both.max_error) for both in (good + bad, bad + good, sum([bad], Error())))
    mean, spread = mean_and_error(np.array([1.0, 2.0, 3.0]))
    assert (mean, spread) == (2.0, pytest.approx(1 / 3**0.5))


def test_unknown_names_are_answered_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"'pqt'.*ptq"):
        registry.chosen(["pqt"])
    with pytest.raises(ValueError, match=f"'nope'.* the tables are {', '.join(EXPERIMENTS)}$"):
        registry.chosen(["nope"])
    with pytest.raises(
        ValueError, match="the nearest are qat, ptq; the tables are formats, ptq, calibration, speed"
    ):
        registry.chosen(["pqt"])
    assert registry.chosen(None) == [name for name, made in EXPERIMENTS.items() if made.always]
    assert registry.chosen(["ptq", "formats"]) == ["formats", "ptq", "decode"]
    assert registry.chosen(["decode"]) == ["decode"]
    with pytest.raises(ValueError, match="only the tables 'decode'"):
        harness_run.reproduce(["formats"], only=["int8wo"])
    with pytest.raises(ValueError, match="quick, full"):
        settings_for("medium", "cpu", tmp_path)
    with pytest.raises(ValueError, match="cpu, cuda"):
        settings_for("quick", "tpu", tmp_path)


def test_a_run_is_published_and_goes_on_at_its_commit(tmp_path):
    places = Paths(tmp_path / "cache", tmp_path / "reports")
    made = harness_run.run_one("formats", tiny.settings(tmp_path), places)
    assert len(read(places.rows("formats"))) > 0
    assert (places.data / f"{tiny.corpus().name}.json").exists()
    assert made[0][1].endswith("formats.csv.gz")
    recorded = places.rows("formats").read_bytes()
    again = harness_run.run_one("formats", tiny.settings(tmp_path), places)
    assert "0 of them measured now" in again[0][0]
    assert places.rows("formats").read_bytes() == recorded


def test_runs_on_two_corpora_stand_beside_each_other(tmp_path):
    """On one page, in figures of their own."""
    places = Paths(tmp_path / "cache", tmp_path / "reports")
    documents = tiny.corpus().documents
    for source in ("sympy", "other"):
        text = type(tiny.corpus())(source, "1", documents)
        harness_run.run_one("formats", tiny.replace(tiny.settings(tmp_path, ["nf4"]), text=text), places)
    sections = page.sections(read(places.rows("formats")))
    drawn = [one.name for section in sections for one in section.drawings]
    assert {"formats-trained-default-quick", "formats-trained-default-quick-other"} <= set(drawn)
    assert len(drawn) == len(set(drawn))
    (noted,) = [one for one in sections if "trained on the corpus other-1-" in " ".join(one.paragraphs)]
    assert "corpus other" in noted.title


def test_a_corpus_is_read_for_experiments_that_use_one(tmp_path):
    assert text_for(["speed"]) is text_for(None) is None
    with pytest.raises(ValueError, match="speed: no corpus is used there, but by formats"):
        text_for(["speed"], "prose", tmp_path)
    with pytest.raises(ValueError, match="prose"):
        text_for(["ptq"], "prosa")
    with pytest.raises(ValueError, match=r"train\.txt\.xz is missing"):
        text_for(["ptq", "speed"], "prose", tmp_path)


FOLDER = {
    "__init__.py": "from experiments.harness.registry import Experiment\n\nEXPERIMENT = Experiment(order=15, trained=False)\n",
    "run.py": """
from experiments.dropped_in.double import double

def subject(settings):
    return "x"

def run(settings, journal):
    journal.add([settings.row("dropped_in", "k", "d", "s", "m", "value", double(21), "")])
    return journal.rows
""",
    "double.py": "def double(x):\n    return 2 * x\n",
    "page.py": """
from experiments.report.pages import Section

TITLE = "A new experiment"

def sections(rows):
    return [Section("Found", [f"It is {rows[0].value:.0f}."])]
""",
}


def test_an_experiment_is_a_folder(tmp_path, monkeypatch):
    """Dropped in, it is listed, run and shown; its own folder is among those whose changes its page tells of."""
    folder = tmp_path / "experiments" / "dropped_in"
    folder.mkdir(parents=True)
    for name, text in FOLDER.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(experiments, "__path__", [*experiments.__path__, str(folder.parent)])
    for name in ("", ".run", ".double", ".page"):
        monkeypatch.delitem(sys.modules, f"experiments.dropped_in{name}", raising=False)
    found = registry.discover()
    assert list(found)[:3] == ["formats", "dropped_in", "ptq"]
    monkeypatch.setitem(EXPERIMENTS, "dropped_in", found["dropped_in"])
    assert found["dropped_in"].folders[-1] == "experiments/dropped_in"
    places = Paths(tmp_path / "cache", tmp_path / "reports")
    made = dict(harness_run.reproduce(["dropped_in"], device="cpu", paths=places))
    assert "dropped_in: 1 rows, 1 of them measured now, in 0 s" in made
    assert "It is 42." in (places.reports / "dropped_in.md").read_text()
    again = dict(harness_run.reproduce(["dropped_in"], device="cpu", paths=places))
    assert "dropped_in: 1 rows, 0 of them measured now, in 0 s" in again
    (row,) = read(places.rows("dropped_in"))
    assert row.commit in (places.reports / "dropped_in.md").read_text()


def test_importing_the_package_is_quick_and_the_command_answers():
    code = "import sys, experiments; print(sorted(m for m in ('torch', 'jax', 'matplotlib') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    done = forks.python("-m", "experiments", "formt")
    assert done.returncode == 2
    assert "the nearest is formats" in done.stderr
    assert done.stdout == ""


def test_parts_are_listed_so_that_each_can_be_copied():
    """Names that hold commas stand between semicolons."""
    with pytest.raises(ValueError, match=r"unknown part 'x' of e; the parts are a, b$"):
        registry.check_known("e", ["a", "b"], ["x"])
    with pytest.raises(ValueError, match=r"unknown part 'x' of e; the parts are a, with c; b$"):
        registry.check_known("e", ["a, with c", "b"], ["b", "x"])
    registry.check_known("e", ["a, with c", "b"], ["b", "a, with c"])


def test_parts_are_those_of_the_module_that_measures():
    """Records name them so that an unknown one is refused before torch is imported."""
    for name, one in EXPERIMENTS.items():
        check = getattr(one.run_module(), "check_parts", None) if one.parts else None
        listed = check.args[1] if isinstance(check, partial) else None
        assert listed is None or sorted(one.parts) == sorted(listed), name
        assert one.parts == () or name in (*registry.LIMITED, "decode")
    assert set(EXPERIMENTS["decode"].parts) == {
        word for config in CONFIGS for word in (config.setting, config.method)
    }
    assert set(EXPERIMENTS["ptq"].parts) == {*PARTS, WEIGHTS}
    given = {
        "ptq": ["encoders", "nvfp4"],
        "decode": ["nvfp4", "int8wo"],
        "calibration": ["gptq"],
        "loka": ["speed"],
    }
    for name, only in given.items():
        registry.check_only(name, only, False)
    registry.check_only("kv_cache", ["whatever its recipes are"], True)
    with pytest.raises(ValueError, match="unknown part 'nvfp5' of ptq; the nearest is nvfp4"):
        registry.check_only("ptq", ["nvfp5"], True)
