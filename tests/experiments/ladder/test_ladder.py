"""Rungs do what their names say, are measured whole, and become rows and a page."""

import gc
import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.harness.measuring import Wrong
from experiments.harness.rows import Journal, Row
from experiments.ladder import acceptance, decoding, page, run, seamless, summary, work
from experiments.ladder.decoding import Loop
from experiments.ladder.rungs import (
    ALONE,
    EAGER,
    FULL,
    GRAPHS,
    LADDER,
    LEFT_OUT,
    Levers,
    configurations,
    ladder,
)
from experiments.ladder.subjects import MODELS, STAND_INS, WEIGHTS, Decoder, Ranker, Seamless
from experiments.runs.run import merged
from experiments.runs.settings import settings_for

LLAMA, CHAMELEON, SEAMLESS, HSTU = STAND_INS
EVERY = [replace(one, compiled=False, graphs=False) for one in configurations() if not one.speculation]


def test_names_tell_all_configurations_apart():
    every = configurations()
    assert len({one.name for one in every}) == len(every)
    assert set(LADDER) | set(ALONE.values()) | set(LEFT_OUT.values()) == set(every)


def test_each_rung_changes_one_lever_of_the_one_before():
    for before, after in pairwise(LADDER):
        changed = [name for name in vars(after) if getattr(before, name) != getattr(after, name)]
        assert len(changed) == 1, (before.name, after.name)


@pytest.fixture(scope="module")
def models():
    """Stand-ins by subject and weights."""
    found = {}

    def model(subject, weights):
        if (subject.name, weights) not in found:
            found[subject.name, weights] = work.weights_in(subject, subject.build("cpu", 0), weights)
        return found[subject.name, weights]

    return model


@pytest.mark.parametrize("levers", dict.fromkeys(EVERY), ids=lambda one: one.name)
@pytest.mark.parametrize("subject", [LLAMA, CHAMELEON], ids=lambda one: one.name)
def test_rungs_compute_the_same_steps(subject, levers, models):
    """By another attention, cache and weights: all steps' logits are those of the same weights, eagerly."""
    if levers.cache and not levers.attention:
        levers = replace(levers, attention=True)

    @torch.no_grad()
    def steps(chosen):
        loop = Loop(subject, models(subject, levers.weights), chosen, 2, "cpu", 0)
        loop.prepare()
        loop.evidence()
        return torch.stack([loop.step().nan_to_num(neginf=0.0).clone() for _ in range(2)])

    found, expected = steps(levers), steps(levers.plain)
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_an_image_has_two_sequences_and_tokens_of_images_alone(models):
    loop = Loop(CHAMELEON, models(CHAMELEON, ""), Levers(attention=True), 2, "cpu", 0)
    with torch.no_grad():
        loop.prepare()
        logits = loop.step()
    assert (logits.shape[0], loop.sequences) == (2, 4)
    image = set(loop.model.model.vocabulary_mapping.image_tokens)
    assert set(logits[0].isfinite().nonzero().flatten().tolist()) == image
    assert loop.token.view(2, 2).unique(dim=0).shape[0] == 1


@torch.no_grad()
def test_guidance_moves_away_from_logits_without_the_prompt(models):
    """The first half of the sequences has it."""
    model, ids = models(CHAMELEON, ""), torch.tensor([[5], [6], [7], [8]])
    guided = decoding.Step(model, image=True)(ids, None)
    with_prompt, without = decoding.Step(model, image=False)(ids, None).chunk(2)
    expected = without + 3.0 * (with_prompt - without)
    there = guided.isfinite()
    torch.testing.assert_close(guided[there], expected[there])


class NoWaiting(TorchDispatchMode):
    """Refuses what lets the host read a number of a tensor, which no CUDA graph can record."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("subject", STAND_INS, ids=lambda one: one.name)
@torch.no_grad()
def test_nothing_waits_for_a_gpu(subject, models, monkeypatch):
    """In a run of all rungs with a cache of fixed length, as it is recorded; nor in a round of self-speculation."""
    # Tokens beyond a cache are counted on CPUs alone.
    monkeypatch.setattr("ao_lab.kv_cache.layer.KVLayer._check_room", lambda *arguments: None)
    for levers in (GRAPHS, FULL, ALONE["self-speculation"], ALONE["graphs"]):
        if subject.refusal(levers, 1, "cuda") is None:
            plain = replace(levers, weights="", compiled=False)
            for module in (decoding, seamless, work):
                monkeypatch.setattr(module, "captured", lambda call, begin: call)
            found = work.work_of(subject, models(subject, ""), plain, 1, "cpu", 0)
            found.prepare()
            found.begin()
            with NoWaiting():
                found.run()


def test_levers_that_change_nothing_are_seen(models, monkeypatch):
    monkeypatch.setitem(WEIGHTS, "int8", lambda: None)
    monkeypatch.setattr(work.ao_lab, "quantize_", lambda model, config: None)
    with pytest.raises(Wrong, match="int8 did not change"):
        work.weights_in(LLAMA, LLAMA.build("cpu", 0), "int8")
    model = models(LLAMA, "")
    for levers, name in ((Levers(weights="int8"), "weights"), (Levers(graphs=True), "graphs")):
        loop = Loop(LLAMA, model, levers, 1, "cpu", 0)
        with pytest.raises(Wrong, match=f"{name} did not change"):
            loop.evidence()
    loop = Loop(LLAMA, model, Levers(attention=True), 1, "cpu", 0)
    model.set_attn_implementation("eager")
    with pytest.raises(Wrong, match="attention did not change"):
        loop.evidence()


def test_a_program_that_is_not_compiled_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.ladder.decoding.compiled", lambda function, device: function)
    bench = run.Bench(settings_for("quick", "cpu", tmp_path), Journal(), run.Deadline(None))
    with pytest.raises(Wrong, match="compiled did not change"):
        bench.whole(bench.timed, run.Case(LLAMA, Levers(compiled=True), 1))


def test_recorded_rungs_are_timed_last_and_traced_at_once(tmp_path, monkeypatch):
    """A trace slows what launches one by one after it."""
    monkeypatch.setattr(decoding, "captured", lambda call, begin: call)
    monkeypatch.setattr(
        type(LLAMA), "refusal", lambda self, levers, *rest: "not here" if levers.weights else None
    )
    rungs = [Levers(attention=True, graphs=True), Levers(attention=True), Levers(graphs=True, weights="int8")]
    monkeypatch.setattr(run, "ladder", lambda weights: rungs)
    monkeypatch.setattr(run, "configurations", lambda weights: rungs)
    chosen = run.Chosen((LLAMA,), (run.ONE,), run.GROUPS, True)
    assert [case.levers.graphs for case in chosen.timed()] == [False, True, True]
    bench = run.Bench(settings_for("quick", "cpu", tmp_path), Journal(), run.Deadline(None), traces=True)
    traced = []
    monkeypatch.setattr(
        bench,
        "trace",
        lambda work, case, time: traced.append((case.levers.graphs, time)) or {"busy": (1.0, "ms")},
    )
    bench.rows_of(run.KIND, bench.timed, chosen.timed())
    assert [graphs for graphs, _ in traced] == [True]
    recorded = next(
        row.value for row in bench.journal.rows if row.method == rungs[0].name and row.metric == "time"
    )
    assert traced[0][1] == pytest.approx(recorded)
    assert {row.method for row in bench.journal.rows if row.table.startswith("trace/")} == {rungs[0].name}
    assert {row.method for row in bench.journal.rows if row.metric == "host, launch"} == {rungs[1].name}


def test_every_configuration_is_asked_for_evidence(tmp_path, monkeypatch):
    def nothing(self):
        raise Wrong("weights did not change the model")

    monkeypatch.setattr(work.Tokens, "evidence", nothing)
    bench = run.Bench(settings_for("quick", "cpu", tmp_path), Journal(), run.Deadline(None))
    with pytest.raises(Wrong, match="weights did not change"):
        bench.whole(bench.timed, run.Case(LLAMA, EAGER, 1))


def test_a_case_begins_without_the_memory_of_others(tmp_path, monkeypatch):
    """A case that failed and the loop that outputs are compared with are cycles, for which the collector has to come."""
    monkeypatch.setattr(run.Bench, "give_back", lambda self: gc.collect(1))
    bench = run.Bench(settings_for("quick", "cpu", tmp_path), Journal(), run.Deadline(None))
    loops, alive = [], []

    def prepare(loop):
        alive.append(sum(one() is not None for one in loops))
        loops.append(weakref.ref(loop))
        Loop.begin(loop)
        if loop.levers == EAGER:
            raise Wrong("of the first case")

    monkeypatch.setattr(work.Tokens, "prepare", prepare)
    gc.disable()
    try:
        cases = [run.Case(LLAMA, one, 1) for one in (EAGER, Levers(attention=True))]
        bench.rows_of(run.KIND, bench.timed, cases)
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


def test_what_does_not_apply_says_why():
    assert "need a GPU" in LLAMA.refusal(GRAPHS, 1, "cpu")
    assert LLAMA.refusal(GRAPHS, 1, "cuda") is None
    assert "different numbers of drafts" in LLAMA.refusal(LADDER[-1], 4, "cuda")
    assert "one pass over all tokens" in HSTU.refusal(Levers(cache="fp8", attention=True), 1, "cuda")
    assert "bound by arithmetic" in HSTU.refusal(Levers(weights="int4"), 1, "cuda")


def test_the_ends_are_the_first_rung_and_the_last_that_a_model_has(tmp_path):
    """What the mean over models is of; and all rungs hold them."""
    last = {one.name: run.ends(one)[1].name for one in MODELS}
    assert last["llama-3.1-8b"] == FULL.name
    assert last["hstu-dlrmv3"] == replace(GRAPHS, weights="fp8").name
    for one in MODELS:
        found = {levers.name: 2.0 for levers in run.ends(one)}
        assert summary.speedup(one, found) == 1
        assert set(run.ends(one)) < set(ladder(one.weights))
    full = replace(settings_for("full", "cpu", tmp_path), only=(run.ENDS, run.ONE, "llama-3.1-8b"))
    assert run.Chosen.of(full).groups == (run.ENDS,)


@pytest.mark.parametrize(
    "subject", [one for one in MODELS if isinstance(one, Decoder)], ids=lambda one: one.name
)
def test_exact_shapes(subject):
    """Parameters of the published models; the largest batch leaves room on a GPU of 140 GB."""
    model = subject.build("meta", 0)
    count = sum(one.numel() for one in model.parameters())
    assert count / 1e9 == pytest.approx(
        {"llama": 8.03, "code": 33.74, "chameleon": 7.04}[subject.name.split("-")[0]], abs=0.01
    )
    largest = subject.largest(140e9 - 2 * count)
    cache = largest * subject.sequences * subject.positions * 4 * model.config.num_hidden_layers
    cache *= model.config.num_key_value_heads * model.model.layers[0].self_attn.head_dim
    assert 2 * count + cache < 132e9
    assert largest >= 64


def test_exact_shapes_of_seamless():
    """1.81 billion parameters; 10 s of speech, and 480 units of 320 samples."""
    subject = next(one for one in MODELS if isinstance(one, Seamless))
    model = subject.build("meta", 0)
    assert sum(one.numel() for one in model.parameters()) / 1e9 == pytest.approx(1.81, abs=0.01)
    samples = subject.tokens * subject.characters * subject.duration
    for rate in model.config.upsample_rates:
        samples *= rate
    assert samples / model.config.sampling_rate == pytest.approx(subject.frames * 0.02, rel=0.05)


def test_a_run_measures_what_applies_and_resumes(tmp_path, monkeypatch):
    """Rows of two configurations of each kind; what is in the journal is not measured again."""
    settings = replace(settings_for("quick", "cpu", tmp_path), only=("llama",))
    monkeypatch.setattr(run, "ladder", lambda weights: [EAGER, Levers(attention=True), GRAPHS])
    monkeypatch.setattr(
        run,
        "configurations",
        lambda weights: [EAGER, Levers(attention=True), GRAPHS, ALONE["self-speculation"]],
    )
    journal = Journal()
    rows = run.run(settings, journal)
    by_line = {
        (row.table.split("/")[0], row.setting, row.method): row
        for row in rows
        if row.metric.startswith("status")
    }
    said = {line: row.metric for line, row in by_line.items()}
    assert (
        said["ladder", "batch 1", "eager"]
        == said["ladder", "largest batch", "fused attention"]
        == "status: ok"
    )
    assert (
        said["trace", "batch 1", "eager"]
        == said["ladder", "batch 1", ALONE["self-speculation"].name]
        == "status: ok"
    )
    assert said["ladder", "batch 1", GRAPHS.name] == "status: not applicable: CUDA graphs need a GPU"
    shares = [row.value for row in rows if row.metric.startswith("share, ") and row.method == "eager"]
    assert sum(shares) == pytest.approx(1.0)
    mean = next(row for row in rows if row.metric == summary.MEAN)
    assert mean.published == summary.PUBLISHED
    monkeypatch.setattr(run.Bench, "whole", lambda *arguments: pytest.fail("measured again"))
    assert {row.key for row in run.run(settings, journal)} == {row.key for row in rows}


def row(kind, data, setting, method, metric, value):
    return Row(experiment="ladder", table=f"{kind}/full/{data}", setting=setting, method=method, metric=metric,
               value=value, unit="ms", device="NVIDIA H200", seed=0)  # fmt: skip


def full_rows(last=2.0, idle=0.02):
    """All models eight times as fast as the first rung with the rung that is last."""
    rows = []
    for one in MODELS:
        applying = [x for x in ladder(one.weights) if not one.refusal(x, 1, "cuda") and not x.speculation]
        for setting in ("batch 1", "largest batch"):
            for rung in applying:
                time = 16.0 if rung == EAGER else last if rung == applying[-1] else 4.0
                rows += [row("ladder", one.name, setting, rung.name, "time", time),
                         row("ladder", one.name, setting, rung.name, "status: ok", 1.0)]  # fmt: skip
                share = idle if rung.graphs else 0.8
                rows.append(row("trace", one.name, setting, rung.name, "idle share", share))
    return rows


def test_the_mean_over_models_is_beside_the_published_number():
    rows = full_rows()
    # A token's time under self-speculation is none of a model with random weights.
    rows.append(row("ladder", "llama-3.1-8b", "batch 1", LADDER[-1].name, "time", 0.1))
    # A mean that is there already, as a run of one model leaves it.
    rows += summaries(16.0, 1)

    def mean(these):
        found = [
            one
            for one in summary.summarized(these)
            if one.setting == "batch 1" and one.method == summary.METHOD
        ]
        assert [one.value for one in found if one.metric == summary.COUNT] == [len(MODELS)]
        return next(one for one in found if one.metric == summary.MEAN)

    assert (mean(rows).value, mean(rows).published) == (pytest.approx(8.0), 3.88)
    # Without the last rung of all models but HSTU, whose last one is another.
    rankers = sum(isinstance(one, Ranker) for one in MODELS)
    fewer = mean([one for one in rows if one.method != FULL.name]).value
    assert fewer == pytest.approx(4.0 * 2.0 ** (rankers / len(MODELS)))
    with pytest.raises(ValueError, match="at least one ratio"):
        summary.geometric_mean([])


def test_runs_of_one_model_each_have_the_mean_of_all_when_they_are_merged():
    def of(*models):
        return summary.summarized([one for one in full_rows() if one.table.split("/")[-1] in models])

    first, second = of("llama-3.1-8b"), of("hstu-dlrmv3", "code-llama-34b")
    counts = [
        one.value
        for one in merged("ladder", first, second)
        if one.metric == summary.COUNT and one.setting == "batch 1"
    ]
    assert counts == [3]


def summaries(value, count):
    return [
        row("summary", "all-models", setting, summary.METHOD, metric, found)
        for setting in ("batch 1", "largest batch")
        for metric, found in ((summary.MEAN, value), (summary.COUNT, count))
    ]


def test_the_page_says_what_is_reached_and_calls_nothing_a_match():
    rows = full_rows() + summaries(8.0, len(MODELS))
    said = page.findings(rows)
    assert said[0].endswith(f"published 3.88 ({page.NOTE}).")
    assert page.means(full_rows() + summaries(8.0, 2)) == [], "a mean over a part of the models is none"
    assert any(
        "code-llama-34b, batch 1" in one and "16.00 ms a token in eager bfloat16, 2.00 ms with" in one
        for one in said
    )
    part = [one for one in full_rows() if one.table.endswith(("llama-3.1-8b", "code-llama-34b"))]
    assert page.main_finding(part) == (
        "Speed with all optimisations over eager bfloat16, batch 1: "
        f"code-llama-34b 8.00, llama-3.1-8b 8.00 (2 of {len(MODELS)} models)"
    )
    assert any("idle 80.0% of the time" in one and "at most 2.0%" in one for one in said)
    verdicts = [target.reached for one in page.targets_by_run(rows) for target in one.targets]
    assert set(verdicts) == {True}
    late = full_rows(idle=0.5) + summaries(2.0, len(MODELS))
    assert {target.reached for one in page.targets_by_run(late) for target in one.targets} == {False}
    few = page.targets_by_run(summaries(8.0, 2))
    assert [target.reached for target in few[0].targets] == [None, None]
    sections = page.sections(rows)
    assert len(sections) == 1 + len(MODELS)
    names = [drawing.name for section in sections for drawing in section.drawings]
    assert len(names) == len(set(names)) == 2
    levers = next(table for table in sections[1].tables if table.caption.startswith("Levers"))
    assert levers.lines
    assert not any(page.ENDS_ALONE in section.paragraphs for section in sections)


def test_the_page_says_that_ends_alone_were_measured_and_of_which_weights():
    """And leaves out columns that are empty, and drafts of models that have not learned."""
    ends = [
        one for one in full_rows() if one.method in (EAGER.name, "fused attention, compiled, graphs, fp8")
    ]
    ranked = [one for one in ends if one.table.endswith("/hstu-dlrmv3")]
    summary_of, section = page.sections(ranked)
    assert page.ENDS_ALONE in section.paragraphs
    eager = [one for one in ranked if one.method == EAGER.name]
    assert page.FIRST_ALONE in page.sections(eager)[-1].paragraphs
    assert "over bfloat16 with graphs" not in section.tables[0].columns
    assert [one.caption for one in section.tables if one.caption.startswith("Levers")] == []
    assert "the first and the last only" in summary_of.drawings[0].caption
    lines = [label.get_text() for label in summary_of.drawings[0].figure.axes[0].get_yticklabels()]
    assert lines == ["eager", "fused attention, compiled, graphs, fp8"]
    assert "first and last rung only" in page.main_finding(ranked)
    drafts = {acceptance.RATE: 1.0, acceptance.PER_ROUND: 3.0}
    rates = [row(acceptance.KIND, "m", "m", "plain", metric, value) for metric, value in drafts.items()]
    for bits, shown in ((5.0, False), (1.5, True)):
        trained = [*rates, row(acceptance.KIND, "m", "m", "plain", acceptance.BITS, bits)]
        assert any(one.title.startswith("Acceptance") for one in page.sections(trained)) is shown
        assert bool(page.acceptance_words(trained)) is shown


@pytest.mark.parametrize(("seconds", "runs"), [(15.0, run.FEWEST), (1.0, run.RUNS["cuda"])])
def test_long_runs_are_fewer_and_never_below_three(tmp_path, monkeypatch, seconds, runs):
    bench = run.Bench(
        replace(settings_for("quick", "cpu", tmp_path), device="cuda"), Journal(), run.Deadline(None)
    )
    now = [0.0]

    def one(work):
        now[0] += seconds
        return seconds

    monkeypatch.setattr(run.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench, "seconds", one)
    assert bench.runs(None) == [seconds] * runs
