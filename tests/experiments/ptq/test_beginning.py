"""Models whose tokenizer begins a text with a token (Gemma): every window has it, and every sequence that methods see."""

import json

import pytest
from tokenizers import processors

from experiments.calibration.run import prepared
from experiments.data import texts
from experiments.data.texts import EvaluationText
from experiments.models.causal_lm import encoding_of, of_folder, windows_for
from experiments.runs.settings import RealModels, Settings
from tests.support.models.hf_models import save_llama, tokenizer

TEXT = EvaluationText("t", "", ("the of and to in is it that for was on are with as at be this have " * 20,))


@pytest.fixture(scope="module", params=["tokenizer.json", "tokenizer_config.json", "neither"])
def folder(request, tmp_path_factory):
    """A model whose tokenizer says in one of two files that texts begin with BOS; converted GGUF files do in the second."""
    made = tmp_path_factory.mktemp("models") / request.param
    save_llama(made)
    saved = tokenizer()
    saved.add_special_tokens(["<bos>"])
    bos = saved.token_to_id("<bos>")
    if request.param == "tokenizer.json":
        saved.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", bos)]
        )
    saved.save(str(made / "tokenizer.json"))
    if request.param != "tokenizer.json":
        fields = {"bos_token": "<bos>", "add_bos_token": request.param == "tokenizer_config.json"}
        (made / "tokenizer_config.json").write_text(json.dumps(fields))
    return made, bos


def test_every_window_begins_with_it_and_predicts_all_of_its_text(folder):
    place, bos = folder
    (windows,) = windows_for(of_folder(place), [TEXT], 16, 4)
    if place.name == "neither":
        assert (windows.ids == bos).sum() == 0
        assert (windows.first, windows.share) == (1, 15 / 16)
        return
    assert encoding_of(of_folder(place))[1] == [bos]
    assert windows.ids[:, 0].tolist() == [bos] * 4
    assert (windows.ids[:, 1:] == bos).sum() == 0
    assert (windows.ids.shape[1], windows.first, windows.share) == (16, 1, 1.0)


def test_sequences_that_methods_see_begin_with_it(folder, tmp_path, monkeypatch):
    place, bos = folder
    monkeypatch.delenv(texts.VARIABLE, raising=False)
    monkeypatch.setattr("experiments.calibration.run.SEQUENCES", {"quick": 2})
    asked = RealModels(models=(str(place),), windows=1, length=16)
    here = Settings(scale="quick", device="cpu", cache=tmp_path, models=asked.models, asked=asked)
    run = prepared(here, of_folder(place))
    begins = [bool(row[0] == bos) for batch in run.batches for row in batch]
    assert begins == [place.name != "neither"] * 2
    assert run.batches[0].shape[1] == 64
