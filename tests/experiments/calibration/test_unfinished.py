"""A calibration that is stopped goes on after the blocks that it has finished, and ends with the rows of one that was not."""

import pytest
import torch

from experiments.calibration import run
from experiments.calibration.unfinished import Unfinished
from experiments.data import texts
from experiments.data.texts import OwnText
from experiments.harness.measuring import Deadline, is_late
from experiments.harness.rows import Journal
from experiments.models.causal_lm import of_folder
from experiments.runs.settings import RealModels, Settings
from tests.support.models.hf_models import tokenizer

transformers = pytest.importorskip("transformers")
ONLY = ("int3_g64_asymmetric", "gptq")


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """The folder of a random model of two blocks."""
    path = tmp_path_factory.mktemp("models") / "deep-llama"
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer().save(str(path / "tokenizer.json"))
    return path


class Until:
    """Seconds are over once a layer of this block, or a measurement of this name, is told of."""

    def __init__(self, monkeypatch, block):
        self.now, self.told = 0.0, []
        before = run.Watch.at

        def at(watch, word, *left):
            self.told.append(word)
            self.now = 10.0 if block in word else self.now
            before(watch, word, *left)

        begin = run.Watch.begins

        def begins(watch, doing):
            self.now = 10.0 if block in doing else self.now
            begin(watch, doing)

        monkeypatch.setattr(run.Watch, "at", at)
        monkeypatch.setattr(run.Watch, "begins", begins)

    def __call__(self):
        return self.now


def measured(folder, cache, monkeypatch, block="never", journal=None, only=ONLY, alone=True):
    """Rows of a run that ends at a block, of what was measured and of what was not, and the words that it told.

    alone: whether the user's text is the only one.
    """
    own = OwnText(
        "own",
        "The cat sat on the mat, and saw the dog. " * 400,
        "A dog ran home to its cat. " * 40,
        alone=alone,
    )
    asked = RealModels(models=(str(folder),), windows=2, length=32, own_text=own)
    here = Settings(
        scale="quick", device="cpu", cache=cache, models=asked.models, asked=asked, only=only, seconds=9.0
    )
    journal = Journal() if journal is None else journal
    with monkeypatch.context() as patch:
        patch.setitem(run.SEQUENCES, "quick", 8)
        clock = Until(patch, block)
        quantized = run.quantized
        patch.setattr(
            run,
            "quantized",
            lambda *given: clock.told.append(f"{len(given[-1])} methods") or quantized(*given),
        )
        failed = run.measure_model(here, of_folder(folder), journal, Deadline(9.0, clock))
    return journal.rows, failed, clock.told


def values(rows):
    """Of gptq, but for its time."""
    return {
        (row.table, row.metric): row.value
        for row in rows
        if row.method == "gptq" and row.metric != "time to quantize"
    }


def test_a_stopped_method_goes_on_after_its_blocks(deep, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(texts, "evaluation_texts", lambda *_: pytest.fail("another text than the user's"))
    journal = Journal()
    _, failed, told = measured(deep, tmp_path / "a", monkeypatch, "layers.1: statistics", journal)
    assert [word for word in told if word.endswith("methods")] == ["0 methods", "2 methods"]
    assert [row.method for row in failed if is_late(row.metric)] == ["gptq"]
    assert (
        "gptq, int3_g64_asymmetric: 1 finished blocks are kept; the same command" in capsys.readouterr().err
    )
    rows, failed, told = measured(deep, tmp_path / "a", monkeypatch, journal=journal)
    said = capsys.readouterr().err
    assert said.startswith(
        "ao-lab: gptq, int3_g64_asymmetric: 1 of 2 finished blocks are kept; it goes on"
    ), said
    assert failed == []
    assert not any("layers.0: statistics" in word for word in told)
    assert any("layers.1: statistics" in word for word in told)
    # Rounding is not measured again.
    assert [word for word in told if word.endswith("methods")] == ["2 methods"]
    assert list((tmp_path / "a" / "calibrations").iterdir()) == []
    whole, _, _ = measured(deep, tmp_path / "b", monkeypatch)
    assert values(rows) == values(whole)
    assert {row.table.split("/")[2] for row in rows} == {"model", f"own-{digest_of(whole)}-held-out"}
    assert "time to quantize" in {row.metric for row in whole if row.method == "gptq"}
    assert "time to quantize" not in {row.metric for row in rows if row.method == "gptq"}


@pytest.mark.parametrize(("stop", "left"), [("held-out", {"rounding", "gptq"}), ("gptq", {"gptq"})])
def test_what_is_kept_is_not_measured_again(deep, tmp_path, monkeypatch, stop, left):
    """A run that ends while it judges rounding, or behind it, gets further each time: not by the dense model again."""
    journal = Journal()
    _, failed, told = measured(deep, tmp_path, monkeypatch, stop, journal)
    assert {row.method for row in failed} == left
    assert told.count("bfloat16") == 1
    dense = {row for row in journal.rows if row.method == "bfloat16"}
    rows, failed, told = measured(deep, tmp_path, monkeypatch, journal=journal)
    assert failed == []
    assert "bfloat16" not in told
    assert {row for row in rows if row.method == "bfloat16"} == dense
    assert [word for word in told if word.endswith("methods")] == ["0 methods"] * (len(left) - 1) + [
        "2 methods"
    ]
    assert list((tmp_path / "calibrations").iterdir()) == []


def test_each_run_gets_further(deep, tmp_path, monkeypatch):
    """However few its seconds are: by the dense model, by rounding on a text, by rounding on the other."""
    journal, late, only = Journal(), [], ("int3_g64_asymmetric", "rounding")
    for _ in range(3):
        _, failed, told = measured(deep, tmp_path, monkeypatch, "q_proj", journal, only, alone=False)
        late.append((len(failed), "bfloat16" in told))
    assert late == [(1, True), (1, False), (0, False)]
    whole, _, _ = measured(deep, tmp_path / "b", monkeypatch, only=only, alone=False)
    times = ("time to quantize",)
    assert [row.key for row in journal.rows] == [row.key for row in whole]
    assert [row.value for row in journal.rows if row.metric not in times] == [
        row.value for row in whole if row.metric not in times
    ]
    assert list((tmp_path / "calibrations").iterdir()) == []


def test_loading_is_not_counted(deep, tmp_path, monkeypatch):
    """Where it alone takes as long as the seconds, the same command would never get further."""
    _, failed, _ = measured(deep, tmp_path, monkeypatch, "sequences")
    assert failed == []


def test_choices_are_made_once(deep, tmp_path, monkeypatch, capsys):
    """Stopped behind them, a run has their rows without another call, and then nothing is kept."""
    calls, make = [], run.choice.chosen
    monkeypatch.setattr(run.choice, "chosen", lambda *given: calls.append(given) or make(*given))
    few = {"BUDGETS": (4.25,), "OPTIONS": (run.choice.LOWEST, run.choice.HIGHEST), "METHODS": (), "RULES": ()}
    for name, value in few.items():
        monkeypatch.setattr(run.choice, name, value)
    for name, value in (("SEQUENCES", 8), ("TOKENS", 32), ("ALONE", 1)):
        monkeypatch.setitem(getattr(run.choice, name), "quick", value)
    journal, only = Journal(), ("choice", "rounding")
    _, failed, _ = measured(deep, tmp_path / "a", monkeypatch, "held-out", journal, only)
    assert {is_late(row.metric) for row in failed} == {True}
    assert len(calls) == 1
    rows, failed, _ = measured(deep, tmp_path / "a", monkeypatch, journal=journal, only=only)
    assert failed == []
    assert len(calls) == 1
    assert (
        "the automatic choices of a run that was stopped are kept; none is made again"
        in capsys.readouterr().err
    )
    assert list((tmp_path / "a" / "calibrations").iterdir()) == []
    whole, _, _ = measured(deep, tmp_path / "b", monkeypatch, only=only)
    assert len(calls) == 2
    assert chosen(rows) == chosen(whole)


def chosen(rows):
    """Of the choice, but for its time, whose row there is."""
    found = {(row.table, row.metric): row.value for row in rows if row.setting == "choice, 4.25 bits"}
    assert any(found.pop(key) > 0 for key in list(found) if key[1] == "time to choose, all budgets")
    return {key: value for key, value in found.items() if key[1] != "time to quantize"}


def digest_of(rows):
    """Of the text, as rows name it."""
    return next(row.table.split("-")[-3] for row in rows if "own-" in row.table)


def test_seconds_that_are_too_few_are_named(deep, tmp_path, monkeypatch, capsys):
    """The same command again would end at the same place."""
    measured(deep, tmp_path, monkeypatch, "layers.0: statistics")
    said = capsys.readouterr().err
    assert "no block was finished in 9 s, and in as many none will be; give --seconds 18" in said
    assert "are kept" not in said


def test_nothing_is_kept_of_a_run_that_times_methods(deep, tmp_path):
    here = Settings(scale="quick", device="cpu", cache=tmp_path)
    assert Unfinished.of(here, of_folder(deep), "gptq") is None


def test_a_text_that_is_too_short_to_draw_from(deep):
    with pytest.raises(
        ValueError, match=r"draw sequences of 512 tokens .* more than 8192 letters and have 3"
    ):
        OwnText("own", "abc", "d").check_drawn(512)
