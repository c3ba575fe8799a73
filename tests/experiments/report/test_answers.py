"""The page of answers: the rule that decides a claim, each verdict from synthetic rows, and commands that can be run."""

import shlex
from dataclasses import replace

import pytest
import typer

from ao_lab.cli.app import app
from experiments.harness.rows import Row
from experiments.report import questions
from experiments.report.answers import NO, NOT_YET, UNDECIDED, YES, Claim, Interval, Question

NOTHING = {name: [] for name in questions.READ}
REAL, GAPS = "real SmolLM2-135M-Instruct/full/wikitext-2", "language gaps/full/prose"
HERE = {"unit": "", "device": "NVIDIA H200", "seed": 0, "date": "2026-11-20T10:00:00"}


def row(experiment, table, setting, method, metric, value):
    return Row(
        experiment=experiment, table=table, setting=setting, method=method, metric=metric, value=value, **HERE
    )


@pytest.mark.parametrize(
    ("interval", "side", "verdict"),
    [
        ((-2, -1, -0.1), "<", YES), ((0.1, 1, 2), "<", NO), ((-1, 0.5, 2), "<", UNDECIDED), ((-1, -0.5, 0), "<", UNDECIDED),
        ((-1, -0.5, 0), "<=", YES), ((0, 0, 0), "<=", YES), ((0, 0, 0), "<", UNDECIDED), ((0, 1, 2), "<", UNDECIDED),
        ((0.1, 1, 2), ">", YES), ((-2, -1, -0.1), ">", NO), ((-1, 0, 1), ">", UNDECIDED),
        ((float("nan"),) * 3, "<", UNDECIDED), ((-float("inf"), -1, -0.5), "<", UNDECIDED),
    ],
)  # fmt: skip
def test_the_interval_decides(interval, side, verdict):
    assert Claim("It", "x", Interval(*interval, ()), 0.0, "%", "", side=side).verdict == verdict
    assert Claim("It", "x", None, 0.0, "%", "", side=side).verdict == NOT_YET


def test_intervals_of_differences_and_ratios():
    """Half of a difference is the root of the squares; a ratio goes from the least over the largest."""
    found = Interval.around(5.0, 3.0).minus(Interval.around(1.0, 4.0))
    assert (found.low, found.middle, found.high) == (-1.0, 4.0, 9.0)
    over = Interval(8.0, 9.0, 10.0, ()).over(Interval(2.0, 3.0, 4.0, ()))
    assert (over.low, over.middle, over.high) == (2.0, 3.0, 5.0)


def verdicts(rows, make):
    return {
        (claim.statement, claim.of.split(", ")[0]): claim.verdict
        for claim in make({**NOTHING, **rows}).claims
    }


def test_without_rows_nothing_is_answered():
    """Each claim says not yet and names a command that the command line takes."""
    found = questions.questions(NOTHING)
    assert len(found) == 4
    group = typer.main.get_command(app)
    for claim in (claim for question in found for claim in question.claims):
        assert (claim.verdict, claim.value, claim.where) == (NOT_YET, "", ("", ""))
        program, name, *words = shlex.split(claim.command)
        command = group.get_command(group.make_context("ao-lab", [name], resilient_parsing=True), name)
        assert (program, command.make_context(name, words).params["scale"]) == ("ao-lab", "full")
    assert all(
        "not yet" in str(sentence) and "ao-lab reproduce" in str(sentence)
        for question in found
        for sentence in question.answers
    )


@pytest.mark.parametrize(("gap", "half", "behind", "nothing"), [
    (0.4, 0.1, YES, NO), (1.5, 0.1, NO, NO), (0.9, 0.3, UNDECIDED, NO), (0.1, 0.3, YES, UNDECIDED), (-0.5, 0.1, YES, YES),
])  # fmt: skip
def test_sparse_models_lie_behind_by_their_interval(gap, half, behind, nothing):
    values = {"gap": gap, "gap, 95% interval": half}
    rows = [row("sparsity", GAPS, "30m", "one-shot, wanda", *one) for one in values.items()]
    found = questions.sparse_language_models({**NOTHING, "sparsity": rows})
    known = {claim.statement: claim.verdict for claim in found.claims if claim.verdict != NOT_YET}
    assert known == {
        "A 2:4 model lies less than 1% behind the dense one": behind,
        "A 2:4 model is as good as the dense one": nothing,
    }
    assert sum(claim.verdict == NOT_YET for claim in found.claims) == len(found.claims) - 2


@pytest.mark.parametrize(("autoround", "gptq", "some", "more"), [
    (60.0, 50.0, YES, YES), (50.0, 60.0, YES, NO), (50.0, 51.0, YES, UNDECIDED), (-9.0, 50.0, NO, NO),
    (1.0, None, UNDECIDED, NOT_YET),
])  # fmt: skip
def test_autoround_is_held_against_gptq(autoround, gptq, some, more):
    """One standard error is a percent each, so a difference of 2.8 points decides."""
    rows = []
    for method, value in (("autoround", autoround), ("search + autoround", -50.0), ("gptq", gptq)):
        if value is not None:
            for metric, number in ((questions.RECOVERED, value), (questions.RECOVERED_ERROR, 1.0)):
                rows.append(row("calibration", REAL, "int3_g64_asymmetric", method, metric, number))
    found = verdicts({"calibration": rows}, questions.two_and_three_bits)
    assert found["AutoRound recovers KL that rounding costs", "int3_g64_asymmetric"] == some
    assert found["AutoRound recovers more of rounding's KL than GPTQ", "int3_g64_asymmetric"] == more
    assert found["AutoRound recovers KL that rounding costs", "int2_g64_asymmetric"] == NOT_YET


@pytest.mark.parametrize(
    ("mx", "fp8", "verdict"), [(0.01, 0.05, YES), (0.05, 0.01, NO), (0.02, 0.021, UNDECIDED)]
)
def test_mx_is_held_against_fp8(mx, fp8, verdict):
    rows = []
    for scheme, value in zip(questions.EIGHT, (mx, fp8), strict=True):
        setting = f"weights + activations in {scheme}"
        for metric, number in (("loss, change", value), ("loss, standard error of the change", 0.005)):
            rows.append(row("ptq", REAL, setting, scheme, metric, number))
    (claim,) = [
        one for one in questions.mx_against_fp8({**NOTHING, "ptq": rows}).claims if one.unit == "nats"
    ]
    assert claim.verdict == verdict
    assert claim.where == ("NVIDIA H200", "2026-11-20")
    assert f"{mx - fp8:.4f} nats [" in claim.value


@pytest.mark.parametrize(
    ("ours", "time", "torchao"), [(103.0, NO, YES), (99.9, UNDECIDED, YES), (90.0, YES, YES), (150.0, NO, NO)]
)
def test_a_step_of_qat_is_held_against_plain_training_and_torchao(ours, time, torchao):
    recipe, rows = "int8 dynamic, int4 g32", []
    where = "qat_overhead", "qat_overhead/full/blocks", "compiled"
    for method, value in (("bfloat16", 100.0), (f"ours, {recipe}", ours), (f"torchao, {recipe}", 130.0)):
        for metric, number in (("time, 20%", 0.99 * value), ("time", value), ("time, 80%", 1.01 * value)):
            rows.append(row(*where, method, metric, number))
    rows.append(row(*where, f"ours, {recipe}", "peak memory over plain", 0.0))
    found = verdicts({"qat_overhead": rows}, questions.qat_without_lora)
    name = "int8 dynamic"
    assert found["A step of QAT takes at most the time of a training step without it", name] == time
    assert found["A step of QAT takes less time than torchao's", name] == torchao
    assert found["A step of QAT takes at most the memory of a training step without it", name] == YES


def test_a_sentence_says_what_all_of_its_claims_share_once():
    claims = [Claim("It holds", f"{one}, wide, 30m", Interval.around(value, 1.0), 0.0, "%", "ao-lab x", 1)
              for one, value in (("a", -5.0), ("b", 5.0))]  # fmt: skip
    claims.append(Claim("It holds", "c, wide, 30m", None, 0.0, "%", "ao-lab x"))
    (said,) = Question("Q", "asked", claims).answers
    assert str(said) == (
        "It holds, of wide, 30m: **yes** (a: -5.0% [-6.0, -4.0]), **no** (b: 5.0% [4.0, 6.0]), **not yet** (c); measured by "
        "`ao-lab x`."
    )
    assert said.head == "It holds, of wide, 30m: **yes** 1, **no** 1, **not yet** 1"
    assert said.lines == ["yes, a: -5.0% [-6.0, -4.0]", "no, b: 5.0% [4.0, 6.0]", "not yet, c"]


@pytest.mark.parametrize(("learned", "against", "verdict"), [
    (2.0, 2.2, YES), (2.2, 2.0, NO), (2.0, 2.001, UNDECIDED), (2.0, None, NOT_YET),
])  # fmt: skip
def test_training_is_held_against_autoround_over_paired_seeds(learned, against, verdict):
    """Seeds differ by more than the ways do; of each seed the difference is what counts."""
    rows, drift = [], {0: 0.0, 1: 0.5, 2: -0.7}
    for arm, value in (
        (questions.LEARNED, learned),
        (questions.PARETOQ, learned),
        (questions.AUTOROUND, against),
        ("PTQ", 3.0),
        ("PTQ, GPTQ", 2.5),
    ):
        for seed, more in drift.items() if value is not None else ():
            noise = 0.01 * seed if arm == questions.LEARNED else 0.0
            one = row("qat", REAL, "weights", f"int2_g32: {arm}", "loss", value + more + noise)
            rows.append(replace(one, seed=seed))
    found = verdicts({"qat": rows}, questions.two_and_three_bits)
    assert found["Training with learned scales loses less than AutoRound", "int2_g32"] == verdict
    by_paretoq = found["Training by ParetoQ loses less than AutoRound", "int2_g32"]
    assert by_paretoq == (YES if verdict == UNDECIDED else verdict)
    best = "Training with learned scales loses less than the best of rounding, searched scales and GPTQ"
    assert (found[best, "int2_g32"], found[best, "int3_g32"]) == (YES, NOT_YET)
    lone = [one for one in rows if one.seed == 0]
    assert verdicts({"qat": lone}, questions.two_and_three_bits)[best, "int2_g32"] == NOT_YET
