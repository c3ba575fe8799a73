"""Experiment `kv_cache`: its numbers, and what its page says of rows."""

from dataclasses import replace

import numpy as np
import torch
import transformers

from experiments.data import texts
from experiments.harness.rows import Journal, Row
from experiments.kv_cache import needle, page, run
from experiments.kv_cache.run import ALL, CHAINS, ERROR, LAST
from experiments.runs.run import RealModels, settings_for


def test_sums_fail_in_one_chain():
    assert run.sum_error(16384, None) > 0.05
    assert run.sum_error(16384, 128) < 1e-3


def test_predictions_of_an_unrounded_cache_are_the_models():
    """Token by token from a cache that rounds nothing."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 64, (2, 12))
    with torch.no_grad():
        expected = model(ids).logits
        found = run.FromCache(model, "bfloat16")(ids)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_a_real_model(folder, tmp_path, monkeypatch):
    """Recipes by part of the windows; what failed is told of and measured again by the next run."""
    monkeypatch.delenv(texts.VARIABLE, raising=False)
    monkeypatch.setattr(run, "CONTEXTS", {"quick": ()})
    monkeypatch.setattr(run, "HAYSTACKS", {"quick": ()})
    asked = RealModels(models=(str(folder),), windows=2, length=16)
    settings = replace(settings_for("quick", "cpu", tmp_path), models=asked.models, asked=asked)
    predicted, journal = run.predicted, Journal()

    def without_fp8(bench, windows, recipe):
        if recipe == "fp8":
            raise ValueError("no fp8 today")
        return predicted(bench, windows, recipe)

    monkeypatch.setattr(run, "predicted", without_fp8)
    rows = run.run(settings, journal)
    said = {(one.setting, one.method): one.metric for one in rows if one.metric.startswith("status")}
    failed = "status: error: ValueError: no fp8 today"
    assert said == {(part, recipe): failed if recipe == "fp8" else "status: ok"
                    for part in (ALL, LAST) for recipe in ("fp8", "int4")}  # fmt: skip
    assert {one.method for one in journal.rows} == {"int4"}
    monkeypatch.setattr(run, "predicted", predicted)
    rows = run.run(settings, journal)
    assert {one.metric for one in rows if one.metric.startswith("status")} == {"status: ok"}
    change = {one.method: one.value for one in rows if (one.setting, one.metric) == (ALL, "KL")}
    # All of so few tokens are read as computed.
    assert 0 <= change["int4"] < change["fp8"]


def test_needles():
    """A short training finds needles from every cache; one chain of FP8 sums errs more than short ones over a long context."""
    models = [needle.trained(needle.Plan(steps=150, length=128, longest=2048))]
    for method in needle.METHODS:
        assert needle.asked(models, 1024, method, 3).found > 0.9
    assert needle.asked(models, 1024, "exact", 1).unlike == 0
    q, k, v = (x.numpy() for x in models[0].states(needle.contexts(1, 32768, np.random.default_rng(0))[0]))
    exact, one, parts = (needle.attended(q, k, v, *needle.METHODS[method]) for method in
                         ("exact", "fp8 sums, one chain", "fp8 sums, chains of 128"))  # fmt: skip
    assert np.linalg.norm(one - exact) > 3 * np.linalg.norm(parts - exact)


def row(table, setting, method, metric, value):
    return Row(experiment="kv_cache", table=table, setting=setting, method=method, metric=metric, value=value, unit="",
               device="cpu", seed=0)  # fmt: skip


def test_page():
    rows = [row("sums/full/uniform-weights", tokens, method, ERROR, value) for tokens in ("1024", "131072")
            for method, value in zip(CHAINS, (0.5, 1e-4), strict=True)]  # fmt: skip
    rows += [row("needle/full/uniform-noise", "131072", method, metric, 12.0) for method in needle.METHODS
             for metric in (run.FOUND, run.UNLIKE)]  # fmt: skip
    rows += [row("real m/full/text", ALL, "fp8", "perplexity, change", 0.05)]
    found = page.findings(rows)
    assert found[0] == "FP8 sums over 131072 tokens lose 50% in one chain and 0.01% in chains of 128."
    assert found[1].startswith(
        "Of needles among 131072 tokens are found 12% (exact), 12% (fp8 sums, one chain)"
    )
    assert "fp8 0.05%" in found[2]
    assert [section.title.split(" (")[0] for section in page.sections(rows)] == ["FP8 sums", "A needle", "m"]
