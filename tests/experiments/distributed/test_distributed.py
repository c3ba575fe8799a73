"""Cases of several ranks: those of every day pass on two CPU ranks; what fails, hangs or dies is said, and the others go on."""

from dataclasses import replace

import pytest
import torch

from experiments.distributed import failures, page, run, speed
from experiments.distributed.cases import FAILURES, IDENTITY, NEEDS_GPUS, REFUSED, SPEED, Rank, Tally, chosen
from experiments.distributed.launch import launch
from experiments.distributed.ranks import FAILED, Plan, in_need
from experiments.harness.measuring import status
from experiments.harness.rows import ROOT, read
from experiments.runs.settings import settings_for
from tests.support.distributed import planted_cases
from tests.support.runs import forks

#: Of each kind of case but those whose ranks tests of the library compare by day: of optimizers, calibration, FSDP2 and tensor
#: parallelism.
DAY = [
    case.name
    for case in run.CASES
    if case.day and case.name.split(",")[0] not in ("optimizers", "calibration")
]
NIGHT = [case.name for case in run.CASES if case.name not in DAY]


def said(out, *arguments, torchrun=False):
    """Exit code, and how each case ended by name. What starts the ranks is a fork, which imports no torch anew."""
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"] if torchrun else []
    command = ["-m", *start, "experiments.distributed", "--out", str(out), "--device", "cpu", *arguments]
    done = forks.python(*command, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=3600)
    rows = read(out / "data" / "distributed.csv")
    found = {
        row.method: row.metric.removeprefix("status: ") for row in rows if row.metric.startswith("status: ")
    }
    return done, found


def only(names):
    return [word for name in names for word in ("--only", name)]


def test_a_case_of_each_kind_by_day(tmp_path):
    done, found = said(tmp_path, *only(DAY))
    assert found == dict.fromkeys(DAY, "ok"), done.stderr[-3000:]
    assert done.returncode == 0


@pytest.mark.nightly
def test_every_case(tmp_path):
    done, found = said(tmp_path, *only(NIGHT))
    wrong = {
        name: word
        for name, word in found.items()
        if word != "ok" and not word.startswith("not run: it needs GPUs")
    }
    assert not wrong, done.stderr[-3000:]
    assert sorted(found) == sorted(NIGHT)  # what has not passed yet goes first
    assert done.returncode == 0


#: How the planted cases end.
PLANTED = {
    "first": "ok",
    "different": "wrong: a value: 1 of 4 values differ, by 1.19e-07",
    "raises": "error: rank 1: ValueError: no such thing",
    "between": "ok",
    "hangs": "error: rank 0 did not end within 4 s",
    "dies": "error: a rank died",
    "nothing": "wrong: nothing was compared",
    "gpus": f"{NEEDS_GPUS}: so it is",
    "last": "ok",
}


@pytest.mark.nightly
@pytest.mark.parametrize("torchrun", [False, True])
def test_what_fails_is_said_and_the_others_go_on(tmp_path, torchrun):
    done, found = said(tmp_path, "--cases", planted_cases.__name__, torchrun=torchrun)
    assert found.keys() == PLANTED.keys(), done.stderr[-3000:]
    for name, words in PLANTED.items():
        assert found[name].startswith(words) or (name == "dies" and "Connection" in found[name]), found[name]
    assert done.returncode == 1
    assert [path.name for path in tmp_path.glob(".ranks-*")] == []


def test_bits_are_those_of_zeros_and_nan_too():
    tally = Tally()
    tally.bits("equal", torch.tensor([-0.0, float("nan"), 1.0]), torch.tensor([-0.0, -float("nan"), 1.0]))
    assert tally.different == 0
    tally.bits("a sign", torch.tensor([-0.0]).bfloat16(), torch.tensor([0.0]).bfloat16())
    assert tally.different == 1
    assert tally.wrong


def test_ranks_that_hang_are_no_ranks_that_ended():
    """The last dies or never comes; the others have an error, and need not be killed."""
    assert failures.by_themselves([1, -9])
    assert failures.by_themselves([-6, -9])
    assert not failures.by_themselves([-9, -9])
    assert not failures.by_themselves([0, -9])


def test_decoding_sees_layers_that_add_nothing(tmp_path, monkeypatch):
    """Whose outputs are the inputs: 0.97 of the cosine of the right ones."""
    here = Rank(0, 1, torch.device("cpu"), tmp_path)
    monkeypatch.setattr(speed, "added", lambda y: y)
    monkeypatch.setattr(speed, "in_turn", lambda rank, calls, *_: {key: [1.0] for key in calls})
    right, wrong = Tally(), Tally()
    speed.decode(here, right, 1)
    assert right.wrong == []
    decoders = speed.decoders

    def broken(*given):
        nets = decoders(*given)
        nets["int4"] = torch.nn.Identity()
        return nets

    monkeypatch.setattr(speed, "decoders", broken)
    speed.decode(here, wrong, 1)
    assert [word.partition(" has")[0] for word in wrong.wrong] == ["what layers add in int4"]


def test_what_has_not_passed_here_goes_first_or_alone(tmp_path):
    """Rows of another device, of another number of ranks, and of a case that failed are none of a case that passed."""
    settings = settings_for("quick", "cpu", tmp_path)
    cases = run.CASES[:5]
    plan = Plan(cases, settings, tmp_path)
    rows = [row for case in cases[:4] for row in plan.rows(case, 3 if case is cases[2] else 2, status("ok"))]
    rows = [replace(row, device="a GPU") if row.method == cases[3].name else row for row in rows]
    rows += plan.rows(cases[4], 2, status("wrong: a value"))
    wanted = [cases[2], cases[3], cases[4]]
    assert in_need(cases, rows, settings, 2, alone=True) == wanted
    assert in_need(cases, rows, settings, 2) == [*wanted, *cases[:2]]


def test_the_page_says_which_times_failed(tmp_path):
    first, second = [case for case in run.CASES if case.kind == SPEED][:2]
    plan = Plan([first, second], settings_for("full", "cpu", tmp_path), tmp_path)
    error = "error: rank 0: RuntimeError: of strides"
    rows = [*plan.rows(first, 2, status("ok")), *plan.rows(second, 2, status(error))]
    rows = [replace(row, device="a GPU") for row in rows]
    *_, table = page.sections(rows)[-1].tables
    assert [line[:2] for line in table.lines] == [[second.name, error]]
    assert any(f"1 of 2; failed: {second.name}" in words for words in page.findings(rows))
    assert not page.missed(page.Results(rows[:1]))


def test_refusals_are_counted_apart_from_what_is_computed(tmp_path):
    cases = [case for case in run.CASES if case.kind == IDENTITY]
    refused = next(case for case in cases if case.expected == REFUSED)
    computed = next(case for case in cases if case.expected != REFUSED)
    plan = Plan([refused, computed], settings_for("full", "cpu", tmp_path), tmp_path)
    first, second = page.findings(
        [row for case in (refused, computed) for row in plan.rows(case, 2, status("ok"))]
    )
    assert first.endswith(": 1 of 1.")
    assert second.startswith(f"Cases that are to end with {REFUSED}")
    assert page.main_finding(plan.rows(refused, 2, status("ok"))).endswith(": 0 of 0")


def test_what_codes_could_gain_at_best(tmp_path):
    """450 MB less are a millisecond of NVLink; bars are of what was measured."""
    (one,) = Plan(run.CASES[:1], settings_for("full", "cpu", tmp_path), tmp_path).rows(
        run.CASES[0], 2, status("ok")
    )[-1:]
    values = {"bfloat16": (21.0, 900.0), "float8": (40.0, 450.0)}
    rows = [
        replace(
            one,
            setting="FSDP2 step, small",
            method=f"ours, rowwise, {kind} all-gather",
            metric=metric,
            value=value,
        )
        for kind, found in values.items()
        for metric, value in zip(("time", page.GATHERED), found, strict=True)
    ]
    decoded = replace(
        one, setting="decoding of 70B shapes, batch 1", method="int4", metric=page.OVER, value=1.9
    )
    results = page.Results([*rows, decoded])
    assert page.at_best(results, "FSDP2 step, small", "ours, rowwise, float8 all-gather") == pytest.approx(
        21 / 20
    )
    assert page.at_best(results, "FSDP2 step, small", "ours, rowwise, bfloat16 all-gather") is None
    assert [(found.name, found.reached) for found in page.targets(results)] == [
        ("decoding of 70B shapes, batch 1: int4", False)
    ]


@pytest.mark.nightly
def test_ranks_started_ahead_go_on_at_once(tmp_path):
    """Behind a case that kills a rank; none of them is left."""
    chosen_cases = [case for case in planted_cases.CASES if case.name in ("dies", "last")]
    plan = Plan(chosen_cases, settings_for("quick", "cpu", tmp_path), tmp_path)
    given = ["--device", "cpu", "--out", str(tmp_path), "--cases", planted_cases.__name__]
    for case in chosen_cases:
        given += ["--only", case.name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        assert launch(plan, 2, given, ahead=True) == FAILED
    words = {r.method: r.metric for r in read(plan.path) if r.metric.startswith("status: ")}
    assert words["last"] == "status: ok"
    assert words["dies"].startswith("status: error")
    assert list(tmp_path.glob(".turn-*")) == []


def test_cases_are_chosen_by_kind_group_and_name():
    assert {case.kind for case in run.CASES} == {IDENTITY, SPEED, FAILURES}
    assert len({case.name for case in run.CASES}) == len(run.CASES)
    assert [case.name for case in chosen(run.CASES, ["calibration"])] == [
        case.name for case in run.CASES if case.name.startswith("calibration, ")
    ]
    assert chosen(run.CASES, [SPEED, run.CASES[0].name])[0] is run.CASES[0]
    with pytest.raises(ValueError, match="unknown case 'FSDP3'; name a kind"):
        chosen(run.CASES, ["FSDP3"])
