"""What a served model does beside predicting: tasks whose data are not here are left out and said to be, and memory."""

import pytest
import torch

from ao_lab.eval import Harness, HarnessOptions
from experiments.models import causal_lm, serving
from experiments.models.causal_lm import of_folder
from tests.support.models.hf_models import save_lm

pytest.importorskip("transformers")


class Manager:
    """Tasks of the harness: one whose data are here, one whose data are not, and no others."""

    def load(self, names):
        if names == ["elsewhere"]:
            raise ConnectionError("Couldn't reach the data")
        if names != ["here"]:
            raise KeyError(f"{names[0]} is not a registered task")


@pytest.fixture
def prepared(monkeypatch):
    calls = []

    def made(names, options, folder):
        calls.append(names)
        return Harness(names, HarnessOptions(), Manager(), None)

    monkeypatch.setattr(serving, "prepared", made)
    serving.tasks_of.cache_clear()
    yield calls
    serving.tasks_of.cache_clear()


def test_a_task_without_its_data_is_left_out_and_said_once(prepared, tmp_path, capsys):
    for _ in range(2):
        assert serving.tasks_of(("here", "elsewhere"), tmp_path).tasks == ["here"]
    said = " ".join(capsys.readouterr().err.split())
    assert (
        said.count("--task elsewhere: NOT MEASURED, its data are not on this machine: ConnectionError") == 1
    )
    assert prepared == [["here", "elsewhere"]]


def test_no_task_left_is_no_number(prepared, tmp_path):
    assert serving.task_values(None, serving.tasks_of(("elsewhere",), tmp_path), 20) == {}


def test_what_the_harness_raises_loses_nothing_else(prepared, tmp_path, monkeypatch, capsys):
    def results(*_):
        raise KeyError("a document without\n answers")

    monkeypatch.setattr(serving, "harness_results", results)
    found = serving.task_values(None, serving.tasks_of(("here",), tmp_path), 20)
    assert list(found) == ["tasks: not measured: KeyError: 'a document without\\n answers'"]
    assert "NOT MEASURED: KeyError" in capsys.readouterr().err


def test_an_unknown_task_is_refused(prepared, tmp_path):
    with pytest.raises(ValueError, match=r"no such task .*hellaswg is not a registered task"):
        serving.tasks_of(("hellaswg",), tmp_path)


def test_memory_of_generating_is_what_tensors_take_beside_the_weights(tmp_path):
    """On a CPU too, where it repeats exactly: the keys and values, logits and values between layers."""
    model = causal_lm.load(of_folder(save_lm(tmp_path / "model")), "cpu")
    prompt = torch.zeros(1, 16, dtype=torch.int64)
    found, again = (serving.generation(model, prompt, 6, model) for _ in range(2))
    assert found["tokens/s"][0] > 0
    assert found[serving.THREADS][0] in (1, torch.get_num_threads())
    weights = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    assert found[serving.PEAK][0] == weights + found[serving.OVER][0]
    assert found[serving.OVER] == again[serving.OVER]
    assert found[serving.TOKENS] == (6, "")
    assert not any(one.requires_grad for one in model.parameters()), "frozen as it was before"
    assert 1000 < found[serving.OVER][0] < weights


def test_speeds_are_medians_of_rounds_in_turn_with_the_dense_model():
    found = serving.in_turn([[4.0, 2.0], [8.0, 2.0], [6.0, 1.0]], 8)
    assert found["tokens/s"] == (4.0, "1/s")
    assert found[serving.DENSE] == (pytest.approx(8 / 6), "1/s")
    assert [found[one][0] for one in (serving.SPEEDUP, serving.LEAST, serving.LARGEST)] == [4.0, 2.0, 6.0]
    assert list(serving.in_turn([[2.0]], 8)) == ["tokens/s"]


def test_memory_of_a_gpu_is_counted_beside_a_timed_call(monkeypatch):
    """In no call of its own, and no other model's."""
    calls, counted = [], []
    monkeypatch.setattr(
        serving, "by_transformers", lambda model, ids, new: (calls.append(model) or len(calls), ids)
    )

    def most(device, work):
        work()
        counted.append(calls[-1])
        return 7

    monkeypatch.setattr(serving, "most_allocated", most)

    class Ids:
        device = torch.device("cuda")

    rounds, over = serving.timed_rounds(["base", "own"], Ids(), 6)
    assert rounds == [[1, 2], [3, 4], [5, 6]]
    assert (over, counted) == (7, ["own"] * 3)
    calls.clear()
    Ids.device = torch.device("cpu")
    assert serving.timed_rounds(["base", "own"], Ids(), 6)[0] == [[2, 3], [4, 5], [6, 7]]


def test_the_dense_model_of_many_lines_is_warmed_up_once(tmp_path, monkeypatch):
    """Calls of one line and of the next, by model and new tokens."""
    folder, calls = of_folder(save_lm(tmp_path / "model")), []
    base, *others = (causal_lm.load(folder, "cpu") for _ in range(3))
    named = {id(model): name for model, name in zip((base, *others), "bxy", strict=True)}
    real = serving.by_transformers

    def noted(model, ids, new):
        calls.append((named[id(model)], new))
        return real(model, ids, new)

    monkeypatch.setattr(serving, "by_transformers", noted)
    monkeypatch.setattr(serving, "timed_threads", lambda device, work: None)
    monkeypatch.setattr(serving, "most_allocated", lambda device, work: None)
    prompt = torch.zeros(1, 16, dtype=torch.int64)
    for other in others:
        serving.generation(other, prompt, 4, base)
    rounds = [[("b", 4), (name, 4)] * serving.ROUNDS for name in "xy"]
    assert calls == [("b", 2), ("x", 2), *rounds[0], ("y", 2), *rounds[1]]
