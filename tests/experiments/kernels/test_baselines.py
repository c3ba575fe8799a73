"""Baselines: what they compute, how they are timed in turn with ours, and rows of those that cannot run."""

import pytest
import torch

import reference
from experiments.kernels import run
from experiments.kernels.baselines import BASELINES, Baseline, calls_of, is_kernel, offers, torchao_call
from experiments.kernels.cases import CASES, convention_cases
from experiments.kernels.expressions import expression
from experiments.kernels.operations import LARGE
from experiments.kernels.results import results_of
from experiments.runs.run import merged
from tests.experiments.harness.tiny import SHAPE, measured, values_of

#: Cases of records of other projects, whose rules no torch expression has.
CONVENTIONS = {case.name for case in convention_cases()}


@pytest.mark.parametrize("name", list(CASES))
def test_expressions_do_the_same_work(name):
    """Torch's way gives our bits on normal numbers, but for one in ten thousand of a norm, whose sum has another order."""
    case = CASES[name]
    found = expression(case)
    if found is None:
        assert name in CONVENTIONS or not any(target.name == "fraction" for target in case.targets), (
            "a case with a target has this baseline"
        )
        return
    inputs = case.make(reference, SHAPE, "cpu", 0)
    call, arguments = found
    ours, theirs = flat(case.call(reference, inputs)), flat(call(*arguments(inputs)))
    compared = 1 if "axis0" in name else len(ours)  # scales along the other axis lie in another order
    assert len(ours) == len(theirs)
    for mine, other in list(zip(ours, theirs, strict=True))[:compared]:
        equal = torch.eq(mine.reshape(-1), other.reshape(-1).to(mine.dtype)) | (
            mine.reshape(-1) != mine.reshape(-1)
        )
        assert int((~equal).sum()) <= (len(equal) // 10_000 if case.operation == "rms_norm" else 0)


#: Cases with a target; what a layer adds to its own kernel has no baseline.
RACED = [
    case for case in CASES.values() if case.targets and case.wraps is None and case.name not in CONVENTIONS
]


@pytest.mark.parametrize("name", [case.name for case in RACED])
def test_expressions_are_one_graph(name):
    """What breaks a graph, such as a limit that NumPy computes, would make a compiled baseline slower than it has to be."""
    call, arguments = expression(CASES[name])
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=False)
    assert compiled(*arguments(CASES[name].make(reference, SHAPE, "cpu", 0))) is not None


def flat(made):
    if isinstance(made, reference.Quantized):
        return [part for part in (made.codes, made.scale, made.outer) if part is not None]
    if isinstance(made, tuple):
        return [part for one in made for part in flat(one)]
    return [] if made is None else [made]


def test_torch_baselines_stand_against_every_case_with_a_target():
    for case in RACED:
        assert [offers(baseline, case) for baseline in BASELINES[:2]] == [True, True], case.name
    assert not offers(BASELINES[0], CASES["quantize.mxfp4.stochastic"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name for name in CASES if name.split(".")[0] in ("quantize", "dequantize", "both")]
)
def test_torchao_runs_where_it_has_something(name):
    pytest.importorskip("torchao")

    case = CASES[name]
    found = torchao_call(case)
    if found is None:
        return
    if is_kernel(found[0]):
        assert case.scheme in ("fp8_1x128", "compressed_tensors.fp8_group_128")
        return
    call, arguments = found[0], found[1](case.make(reference, SHAPE, "cpu", 0))
    assert call(*arguments) is not None


@pytest.mark.parametrize("name", ["int3_g128", "mxfp6_e2m3"])
def test_torchao_is_no_baseline_where_it_cannot_unpack(name):
    """Its integers and 6-bit codes lie one in a byte: a case of packed ones has no row of torchao, not even an error."""
    (torchao,) = (baseline for baseline in BASELINES if baseline.name == "torchao")
    assert not offers(torchao, CASES[f"dequantize.{name}.packed"])
    assert offers(torchao, CASES["dequantize.mxfp4.packed"])


def test_torchao_decodes_to_our_values():
    pytest.importorskip("torchao")

    for name in ("dequantize.fp8_rowwise", "dequantize.mxfp4.packed", "dequantize.int4_g128"):
        inputs = CASES[name].make(reference, SHAPE, "cpu", 0)
        call, arguments = torchao_call(CASES[name])
        assert torch.equal(call(*arguments(inputs)), CASES[name].call(reference, inputs))


def baseline(find, name="torch eager"):
    return Baseline(name, "", find, compiled=False)


def test_baselines_are_rows_with_ratios(tmp_path):
    rows = measured(tmp_path, ["quantize.mxfp4"], baselines=BASELINES[:1])
    (line,) = [line for found in results_of(rows).values() for line in found]
    assert [one.baseline for one in line.baselines] == ["torch eager"]
    assert line.best_baseline.ratio == pytest.approx(2.0)
    assert line.slower_than == []
    theirs = [row for row in rows if row.method == "torch eager"]
    assert {row.setting for row in theirs} == {"quantize.mxfp4, 256x512"}


def test_a_baseline_that_cannot_run_is_a_row_with_its_error(tmp_path):
    def find(case):
        raise ImportError("No module named 'torchao'")

    rows = measured(tmp_path, ["quantize.mxfp4"], baselines=[baseline(find, "torchao")])
    assert values_of(rows, "torchao") == {"status: error: ImportError: No module named 'torchao'": 0}
    (line,) = [line for found in results_of(rows).values() for line in found]
    assert (line.ok, line.best_baseline) == (True, None)


def test_baselines_that_the_time_does_not_reach_say_so_and_keep_older_rows(tmp_path):
    names = ["quantize.mxfp4"]
    before = measured(tmp_path, names, baselines=BASELINES[:1])
    ticks = iter(float(second) for second in range(10**6))
    late = measured(tmp_path, names, baselines=BASELINES[:1], baseline_seconds=0.5, clock=lambda: next(ticks))
    assert [metric for metric in values_of(late, "torch eager") if "not run" in metric] != []
    kept = merged("kernels", before, late)
    assert values_of(kept, "torch eager") == values_of(before, "torch eager")
    assert set(merged("kernels", [], late)) == set(late)


def test_cases_with_targets_meet_their_baselines_first():
    work = run.pairs([CASES["quantize.mxfp4"], CASES["quantize.fp8_rowwise"]])
    order = [(one[1].name, one[2]) for one in run.comparisons(BASELINES[:1], work)]
    assert order == [(name, shape) for name in ("quantize.fp8_rowwise", "quantize.mxfp4") for shape in LARGE]


def test_baselines_are_compiled_afresh(monkeypatch):
    log = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: log.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda run, **options: log.append(options) or run)
    case = CASES["quantize.mxfp4"]
    sets = [case.make(reference, SHAPE, "cpu", seed) for seed in (0, 1)]
    assert len(calls_of(BASELINES[1], case, sets)) == 2
    assert log == ["reset", {"mode": "max-autotune-no-cudagraphs", "dynamic": False, "fullgraph": True}]
