"""`ao-lab reproduce qat --model DIR`: small checkpoints end to end, arms, pairing by seeds, what is resumed and refused."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from ao_lab.cli.app import main
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from experiments.data import texts
from experiments.data.texts import OwnText
from experiments.harness.measuring import Wrong, is_late
from experiments.harness.paths import Paths
from experiments.harness.rows import Journal, Row, read
from experiments.models import causal_lm, fine_tuning
from experiments.models.causal_lm import linears, of_folder
from experiments.models.fine_tuning import Tuning, fine_tune, optimizer_of, trainable
from experiments.qat import arms, real
from experiments.qat.arms import (
    ARMS,
    BY_TORCHAO,
    CLIPPED,
    LEARNED,
    METHODS,
    PTQ,
    PTQ_BASE,
    QAT,
    WITH_GPTQ,
    methods_named,
)
from experiments.qat.real import PLANS, TUNED, RealPlan, measure_model
from experiments.qat.real_page import real_findings, real_sections
from experiments.report.questions import real_qat_claims
from experiments.runs.real_models import Tables
from experiments.runs.settings import RealModels, settings_for
from tests.support.models.hf_models import ARCHITECTURES, save_lm

pytest.importorskip("transformers")
SMALL = Tuning(steps=2, batch=2, length=24, rate=1e-3, scale_rate=5e-3)
INPUTS = "weights + activations in int8_rowwise_asymmetric"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_lm(tmp_path_factory.mktemp("models") / "tiny", tied=True)


def settings_of(folder, cache, *only, **asked):
    made = RealModels(models=(str(folder),), windows=2, length=24, **asked)
    return replace(settings_for("quick", "cpu", cache), models=made.models, asked=made, only=only)


def tables_of(settings, journal):
    return Tables("qat", settings, "real tiny", journal, real.Deadline(None))


def plan_of(*only, seeds=2):
    return RealPlan(seeds=seeds, tuning=SMALL, calibrating=4, methods=methods_named(only))


@pytest.fixture(scope="module")
def measured(folder, tmp_path_factory):
    """All arms of a method with learned scales, and a scheme that does not divide."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(texts.VARIABLE, raising=False)
        settings, journal = settings_of(folder, cache), Journal()
        plan = plan_of("int4_g32", "int4_g128")
        failed = measure_model(settings, plan, of_folder(folder), journal, real.Deadline(None))
    return journal.rows, failed, cache


def values(rows, data, method, seed=0):
    return {
        row.metric: row.value
        for row in rows
        if (row.table, row.method, row.seed) == (f"real tiny/quick/{data}", method, seed)
    }


def test_every_arm_has_its_rows_for_each_seed(measured):
    rows, failed, _ = measured
    (text,) = {row.table.split("/")[2] for row in rows} - {"model"}
    learned = [LEARNED, *([BY_TORCHAO] if arms.missing(BY_TORCHAO) is None else [])]
    for seed in (0, 1):
        names = [TUNED, *(f"int4_g32: {arm}" for arm in (PTQ, CLIPPED, WITH_GPTQ, QAT, *learned))]
        for name in names:
            found = values(rows, text, name, seed)
            assert found["status: ok"] == 1
            assert found["perplexity"] > 1
            assert values(rows, "model", name, seed)["status: ok"] == 1
    # Of the model before training there is one of each, and seeds train on other text.
    assert values(rows, text, "bfloat16")["loss"] != values(rows, text, TUNED)["loss"]
    assert not values(rows, text, "bfloat16", 1)
    assert not values(rows, text, f"int4_g32: {PTQ_BASE}", 1)
    assert values(rows, text, TUNED)["loss"] != values(rows, text, TUNED, 1)["loss"]
    assert values(rows, "model", f"int4_g32: {QAT}")["bits per weight"] == 5
    assert not any(row.method.startswith("int4_g128") for row in rows)
    (reason,) = {row.metric for row in failed if row.method.startswith("int4_g128")}
    assert reason.startswith("status: missing: int4_g128 leaves 12 of 14 layers dense")


def test_the_fine_tuned_model_leaves_the_cache_with_its_seed(measured, folder):
    """A scheme that is never measured keeps its seeds open: those of a whole run go."""
    rows, _, cache = measured
    settings, journal = settings_of(folder, cache), Journal()
    journal.add(rows)
    whole = plan_of("int4_g32")
    assert len(list((cache / "qat").iterdir())) == 2
    assert measure_model(settings, whole, of_folder(folder), journal, real.Deadline(None)) == []
    assert journal.rows == rows
    assert list((cache / "qat").iterdir()) == []


def test_a_seed_without_its_fine_tuned_model_is_measured_anew(measured, folder, tmp_path):
    """Its other rows stay, and so do those of other seeds that are whole."""
    rows, _, _ = measured
    left = [row for row in rows if row.method != f"int4_g32: {QAT}" or row.seed == 0]
    journal = Journal()
    journal.add(left)
    plan, model = plan_of("int4_g32"), of_folder(folder)
    settings = settings_of(folder, tmp_path)
    real.drop_unpaired(tables_of(settings, journal), plan, model)
    kept = {(row.method, row.seed) for row in journal.rows}
    assert (f"int4_g32: {QAT}", 0) in kept
    assert {seed for _, seed in kept} == {0}
    path = real.tuned_path(settings, plan, model, 1)
    path.parent.mkdir()
    path.touch()
    journal = Journal()
    journal.add(left)
    real.drop_unpaired(tables_of(settings, journal), plan, model)
    assert len(journal.rows) == len(left)


@pytest.mark.parametrize(("kind", "tied"), [*((kind, True) for kind in ARCHITECTURES), ("llama", False)])
def test_every_architecture_trains_and_converts(kind, tied, tmp_path):
    """A tied head stays dense and tied; a head of its own is quantized."""
    model = causal_lm.load(of_folder(save_lm(tmp_path / kind, kind, tied=tied)), "cpu")
    ids = torch.arange(4 * 24).reshape(4, 24) % 300
    for arm in (QAT, LEARNED) if kind == "gemma3" else (QAT,):
        made = trainable(model, torch.float32)
        arms.prepare(made, METHODS[0], arm, [ids[:2]])
        before = made.model.layers[0].mlp.up_proj.weight.detach().clone()
        found = fine_tune(made, ids, SMALL)
        assert found["time of a step"][0] > 0
        assert not torch.equal(before, made.model.layers[0].mlp.up_proj.weight)
        done = arms.convert(made, METHODS[0], arm).to(torch.bfloat16)
        assert all(isinstance(layer.weight, QuantizedTensor) for layer in linears(done).values())
        assert (done.lm_head.weight is done.get_input_embeddings().weight) is tied
        assert torch.isfinite(done(ids[:1]).logits).all()


def test_one_seed_is_one_text_for_all(folder, tmp_path):
    settings = settings_of(folder, tmp_path)
    here = real.Here.of(settings, plan_of("int4_g32"), of_folder(folder))
    assert torch.equal(here.sequences(1), here.sequences(1))
    assert not torch.equal(here.sequences(0), here.sequences(1))
    assert torch.equal(torch.cat(here.batches(1)), here.sequences(1)[:4])
    assert here.sequences(0).shape == (4, 24)


def test_training_is_adamw_on_the_next_token(folder):
    """Two steps by hand, with clipped gradients, a warm-up of one step and a cosine to zero."""
    model = trainable(causal_lm.load(of_folder(folder), "cpu"), torch.float32)
    other = trainable(model, torch.float32)
    ids = torch.arange(4 * 24).reshape(4, 24) * 3 % 300
    fine_tune(model, ids, SMALL)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step, rate in ((0, 1e-3), (1, 0.5e-3)):
        batch = ids[2 * step : 2 * step + 2]
        optimizer.param_groups[0]["lr"] = rate
        logits = other(batch).logits[:, :-1]
        nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7), name


def test_learned_scales_have_a_rate_of_their_own(folder):
    model = trainable(causal_lm.load(of_folder(folder), "cpu"), torch.float32)
    arms.prepare(model, METHODS[0], LEARNED, [torch.zeros(2, 24, dtype=torch.int64)])
    weights, scales = optimizer_of(model, SMALL).param_groups
    mean = torch.cat([one.detach().flatten() for one in scales["params"]]).mean()
    assert weights["full_rate"] == 1e-3
    assert scales["full_rate"] == pytest.approx(5e-3 * float(mean))
    assert len(scales["params"]) == 14


def test_a_loss_that_is_no_number_is_wrong(folder):
    model = trainable(causal_lm.load(of_folder(folder), "cpu"), torch.float32)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(Wrong, match="loss of training is nan"):
        fine_tune(model, torch.zeros(4, 24, dtype=torch.int64), SMALL)


def test_a_step_that_cannot_be_captured_is_taken_plainly(folder, monkeypatch, capsys):
    """A broken capture leaves gradients that were never computed; after a capture errors are errors."""
    model = trainable(causal_lm.load(of_folder(folder), "cpu"), torch.float32)
    expected = trainable(model, torch.float32)
    ids = torch.arange(4 * 24).reshape(4, 24) % 300

    class Breaking(fine_tuning.Steps):
        def __call__(self, batch):
            if self.captured:
                next(model.parameters()).grad = torch.full_like(next(model.parameters()), torch.nan)
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().__call__(batch)

    fine_tune(expected, ids, SMALL)
    monkeypatch.setattr(fine_tuning, "Steps", lambda step, captured: Breaking(step, captured=True))
    fine_tune(model, ids, SMALL)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    assert "not captured in a CUDA graph: operation not permitted" in capsys.readouterr().err
    broken = Breaking(lambda batch: batch, captured=True)
    broken.graph = "captured"
    with pytest.raises(RuntimeError, match="not permitted"):
        fine_tuning._guarded(broken, ids, model)


def test_large_models_train_in_bfloat16_on_a_gpu(folder, monkeypatch):
    model = causal_lm.load(of_folder(folder), "cpu")
    assert fine_tuning.training_dtype(model, "cpu") == torch.float32
    states = 16 * sum(one.numel() for one in model.parameters())
    for memory, dtype in ((2 * states, torch.float32), (1.5 * states, torch.bfloat16)):
        facts = type("Facts", (), {"total_memory": memory})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, facts=facts: facts)
        assert fine_tuning.training_dtype(model, "cuda") == dtype


def real_row(method, seed, value, metric="loss", setting=INPUTS, data="wikitext"):
    return Row(
        experiment="qat", table=f"real m/full/{data}", setting=setting, method=method, metric=metric, value=value,
        unit="", device="NVIDIA H200", seed=seed,
    )  # fmt: skip


def test_recovered_is_of_the_loss_of_ptq_and_beyond_the_best_baseline():
    """PTQ costs 0.2, clipping 0.12, GPTQ 0.10, QAT 0.05 and 0.03 with learned scales."""
    rows = []
    costs = {PTQ: 0.2, CLIPPED: 0.12, WITH_GPTQ: 0.1, QAT: 0.05, LEARNED: 0.03, BY_TORCHAO: 0.06}
    for seed in range(5):
        base = 3 + 0.01 * seed
        rows += [
            real_row(TUNED, seed, base, setting="weights"),
            real_row(TUNED, seed, 9.0, "perplexity", "weights"),
        ]
        for arm, cost in costs.items():
            found = base + cost * (1 + 0.001 * seed)
            rows += [real_row(f"int4_g32: {arm}", seed, found)]
            rows += [real_row(f"int4_g32: {arm}", seed, 9 + 10 * cost, "perplexity")]
            rows += [real_row(f"int4_g32: {arm}", seed, 1.0, "status: ok", data="model")]
    (section,) = real_sections(rows)
    lines = {line[1]: line for line in section.tables[0].lines}
    assert lines[PTQ][3].startswith("0.2004 ± ")
    assert lines[QAT][4].startswith("75.0 ± ")
    assert lines[QAT][5].startswith("75.0 ± ")
    assert lines[QAT][6].startswith("50.0 ± ")
    assert lines[QAT][6].endswith("(PTQ, GPTQ)")
    assert lines[LEARNED][6].startswith("70.0 ± ")
    assert (lines[CLIPPED][4][:4], lines[CLIPPED][6]) == ("40.0", "")
    (finding,) = real_findings(rows)
    assert (
        "PTQ, clipped 40.0%, PTQ, GPTQ 50.0%, QAT 75.0%, QAT, learned scales 85.0%, torchao QAT 70.0%"
        in finding
    )


def test_no_text_chooses_the_baseline_that_it_judges():
    """On the judging text GPTQ is best by its luck; on the other one clipped PTQ is, and is what training is held against."""
    losses = {"wikitext": {PTQ: 0.2, CLIPPED: 0.15, WITH_GPTQ: 0.1, LEARNED: 0.05}}
    losses["books"] = {PTQ: 0.2, CLIPPED: 0.1, WITH_GPTQ: 0.15, LEARNED: 0.05}
    rows = []
    for data, costs in losses.items():
        for seed in range(3):
            rows += [real_row(TUNED, seed, 3.0, setting="weights", data=data)]
            rows += [real_row(TUNED, seed, 9.0, "perplexity", "weights", data=data)]
            for arm, cost in costs.items():
                rows += [real_row(f"int3_g32: {arm}", seed, 3 + cost * (1 + 0.01 * seed), data=data)]
                rows += [real_row(f"int3_g32: {arm}", seed, 9.0, "perplexity", data=data)]
                rows += [real_row(f"int3_g32: {arm}", seed, 1.0, "status: ok", data="model")]
    (section,) = real_sections(rows)
    for data, table, judged in zip(("wikitext", "books"), section.tables, (CLIPPED, WITH_GPTQ), strict=False):
        assert data in table.caption
        line = next(line for line in table.lines if line[1] == LEARNED)
        assert line[6].endswith(f"({judged})")
    claims = [one for one in real_qat_claims(rows, "int3_g32") if "best of rounding" in one.statement]
    differences = [one.found.middle for one in claims]
    assert differences == pytest.approx([-0.101, -0.101])


def test_one_seed_has_no_percentage(measured):
    rows = [row for row in measured[0] if row.seed == 0]
    (section,) = real_sections(rows)
    lines = {(line[0].partition(",")[0], line[1]): line for line in section.tables[0].lines}
    assert lines["int4_g32", QAT][4:7] == ["", "", ""]
    assert "±" not in lines["int4_g32", QAT][3]
    names = [table.caption for table in section.tables]
    assert names[-1] == "tiny: training"
    assert [line[1] for line in section.tables[-1].lines][:3] == ["", QAT, LEARNED]


def test_full_scale_is_five_seeds_of_every_arm(tmp_path):
    plan = PLANS["full"]
    tasks = real.planned(plan)
    assert plan.seeds == 5
    assert {task.arm for task in tasks} == {"bfloat16", TUNED, *ARMS}
    arms_of = {one.name: one.arms for one in METHODS}
    assert arms_of["int3_g32"] == ARMS
    assert LEARNED not in arms_of["nvfp4"]
    assert BY_TORCHAO not in arms_of["mxfp4_rceil"]
    assert [one.name for one in methods_named(("int2_g32", "fp8_rowwise"))] == ["int2_g32", "fp8_rowwise"]
    with pytest.raises(ValueError, match="int9"):
        methods_named(("int9_rowwise",))


def run_command(folder, place, *more, patch):
    patch.setenv("AO_LAB_CACHE", str(place / "cache"))
    patch.delenv(texts.VARIABLE, raising=False)
    options = [
        "--reports",
        str(place / "reports"),
        "--device",
        "cpu",
        "--windows",
        "2",
        "--length",
        "24",
        "--json",
    ]
    code = main(["reproduce", "qat", "--model", str(folder), *more, *options])
    return code, read(Paths(place / "cache", place / "reports").rows("qat"))


def test_the_command_on_own_text_and_again(folder, tmp_path, monkeypatch, capsys):
    """Models train on the text but its end, on which they are evaluated too; a second call measures nothing."""
    plan = replace(PLANS["quick"], tuning=replace(SMALL, length=12))
    monkeypatch.setattr(real, "PLANS", {"quick": plan})
    own = tmp_path / "my text.txt"
    own.write_text("the of and to in is it that for was on are with as at be " * 60)
    options = ["--text", str(own), "--only", "fp8_rowwise"]
    code, rows = run_command(folder, tmp_path, *options, patch=monkeypatch)
    assert code == 0
    named = {row.table.split("/")[2] for row in rows}
    assert "my_text.txt-held-out" in named
    assert len(named) == 3
    text = OwnText.of(own)
    assert text.train + text.held_out == own.read_text()
    assert len(text.held_out) == len(own.read_text()) // 10
    capsys.readouterr()
    monkeypatch.setattr(real, "measure", lambda *_: pytest.fail("measured again"))
    assert run_command(folder, tmp_path, *options, patch=monkeypatch)[0] == 0
    assert "0 of them measured now" in json.loads(capsys.readouterr().out)["written"][0]["what"]


def test_a_limit_of_seconds_leaves_the_rest_for_the_next_run(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(real, "PLANS", {"quick": replace(PLANS["quick"], tuning=SMALL)})
    code, rows = run_command(folder, tmp_path, "--seconds", "0.001", patch=monkeypatch)
    assert (code, {is_late(row.metric) for row in rows}) == (1, {True})
    assert "s of this run did not reach it; the same command goes on with them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--only", "int9_rowwise"], "int9_rowwise"),
        (["--text", "nowhere.txt"], "nowhere.txt is no file"),
        (["--text", "EMPTY"], "holds 3 characters"),
        (["--text", "SHORT"], "the text has 18 tokens, one window has 24"),
        (["--task", "hellaswag"], "lm-evaluation-harness, which is not installed"),
    ],
)
def test_refused(folder, tmp_path, monkeypatch, capsys, more, message):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    (tmp_path / "empty.txt").write_text("abc")
    (tmp_path / "short.txt").write_text("the of and to " * 30)
    files = {"EMPTY": str(tmp_path / "empty.txt"), "SHORT": str(tmp_path / "short.txt")}
    more = [files.get(word, word) for word in more]
    assert run_command(folder, tmp_path, *more, patch=monkeypatch)[0] == 2
    assert message in " ".join(capsys.readouterr().err.split())
