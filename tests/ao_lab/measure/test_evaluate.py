"""`evaluate` in Python: folders and models in memory give the same numbers; what does not fit is refused before work."""

from functools import partial

import pytest
import torch

from ao_lab import SchemeConfig, evaluate, quantize_
from ao_lab.measure.asked import as_fields, context_of
from ao_lab.measure.folders import device_of
from tests.support.models.hf_models import WORDS, save_llama

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    save_llama(root / "base")
    (root / "text.txt").write_text(" ".join([WORDS] * 30))
    return root


def given(folder, **more):
    return {"text": folder / "text.txt", "limit": 3, "length": 24, "device": "cpu", **more}


def test_a_model_in_memory_has_the_numbers_of_its_folder(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto").eval()
    by_folder = evaluate(folder / "base", **given(folder))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "base" / "tokenizer.json"))
    for tokenizer in (folder / "base", fast):
        assert evaluate(model, tokenizer=tokenizer, **given(folder)).tasks == by_folder.tasks
    told = by_folder.to_dict()
    assert (told["model"], told["windows"], told["tokens"], told["device"]) == ("base", 3, 3 * 23, "cpu")
    low, high = told["intervals_95"]["perplexity"]["loss"]
    assert low < told["tasks"]["perplexity"]["loss"] < high
    assert f" ± {(high - low) / 2:.2g}" in str(by_folder)
    frame = by_folder.to_frame()
    assert set(frame["task"]) == {"perplexity", "accuracy"}
    assert "token_perplexity" in str(by_folder)


def test_a_quantized_model_beside_its_base(folder):
    seen = []
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto").eval()
    quantize_(model, SchemeConfig(scheme="mxfp4"))
    model.train()
    model.model.eval()
    found = evaluate(
        model,
        tokenizer=folder / "base",
        against=folder / "base",
        progress=lambda *at: seen.append(at),
        **given(folder),
    )
    assert set(found.tasks) == {"perplexity", "accuracy", "agreement", "weights"}
    assert found.tasks["agreement"]["kl"] > 0
    assert found.against == "base"
    assert (model.training, model.model.training) == (True, False)
    # Scales that moved into a norm: errors against the base would be those of other weights.
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    paired = partial(evaluate, model, tokenizer=folder / "base", against=folder / "base", **given(folder))
    moved = paired(tasks=["weights", "perplexity"])
    assert list(moved.tasks) == ["perplexity"]
    assert any("errors of weights are left out: 1 unquantized param" in note for note in moved.notes)
    # Nothing measured is no result that a card would show in place of an earlier one.
    with pytest.raises(ValueError, match=r"errors of weights are left out.*ask for other tasks"):
        paired(tasks=["weights"])
    assert seen[-1] == (3, 3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"length": 65}, "takes at most 64 tokens"),
        ({"length": 1}, "at least 2 tokens"),
        ({"limit": 0}, "at least 1 sequence"),
        ({"tasks": ["agreement"]}, "give its folder with --against"),
        ({"tokenizer": "elsewhere"}, "a folder has its own"),
        ({"text": "nowhere.txt"}, "is no file"),
        ({"text": "wikitext2"}, "is a text of the corpus prose"),
        ({"against": "."}, "has no config.json"),
    ],
)
def test_what_does_not_fit(folder, wrong, said, monkeypatch):
    monkeypatch.setattr("ao_lab.measure.evaluate.loaded", lambda *_: pytest.fail("the model was read"))
    with pytest.raises(ValueError, match=said):
        evaluate(folder / "base", **given(folder, **wrong))


def test_the_context_by_what_configurations_call_it(monkeypatch):
    assert context_of({"n_positions": 1024, "n_ctx": 7}) == 1024
    assert context_of({"text_config": {"max_position_embeddings": 8192}}) == 8192
    assert context_of({"vocab_size": 256, "max_position_embeddings": True}) is None
    config = transformers.GPT2Config(n_positions=48)
    assert context_of(as_fields(config)) == context_of(config.to_dict()) == 48
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (device_of(None), device_of(None, torch.nn.Linear(2, 2))) == ("cuda", "cpu")


def test_models_that_are_none(folder, tmp_path):
    with pytest.raises(ValueError, match="names on the Hub are not fetched: hf download"):
        evaluate("some/model", **given(folder))
    with pytest.raises(TypeError, match=r"a folder or a torch\.nn\.Module, got int"):
        evaluate(3, **given(folder))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="give tokenizer="):
        evaluate(model, **given(folder))
    with pytest.raises(ValueError, match="a folder or a fast tokenizer"):
        evaluate(model, tokenizer=3, **given(folder))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch sees no GPU here"):
            evaluate(folder / "base", **given(folder, device="cuda"))
