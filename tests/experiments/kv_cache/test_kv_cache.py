"""Experiment `kv_cache`: its numbers, and what its page says of rows."""

import torch
import transformers

from experiments.harness.rows import Row
from experiments.kv_cache import page, run
from experiments.kv_cache.run import ALL, CHAINS, ERROR


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


def row(table, setting, method, metric, value):
    return Row(experiment="kv_cache", table=table, setting=setting, method=method, metric=metric, value=value, unit="",
               device="cpu", seed=0)  # fmt: skip


def test_page():
    rows = [row("sums/full/uniform-weights", tokens, method, ERROR, value) for tokens in ("1024", "131072")
            for method, value in zip(CHAINS, (0.5, 1e-4), strict=True)]  # fmt: skip
    rows += [row("real m/full/text", ALL, "fp8", "perplexity, change", 0.05)]
    found = page.findings(rows)
    assert found[0] == "FP8 sums over 131072 tokens lose 50% in one chain and 0.01% in chains of 128."
    assert "fp8 0.05%" in found[1]
    assert [section.title.split(" (")[0] for section in page.sections(rows)] == ["FP8 sums", "m"]
