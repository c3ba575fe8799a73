"""Seconds and memory at large shapes: which models are measured by when, what an estimate is of, and what the page says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.calibration import page, run, shapes
from experiments.calibration.shapes import ARMS, ESTIMATE, KIND, LARGE, PTQ, TIME, Stopwatch, told
from experiments.harness.measuring import status
from experiments.harness.rows import Journal
from experiments.runs.settings import Settings

pytest.importorskip("transformers")
HERE = Settings(scale="quick", device="cpu", cache=Path("nowhere"), only=(LARGE,))


SMALL = replace(
    shapes.TINY, layers=2, tokens=8, fields=shapes.TINY.fields | {"hidden_size": 64, "intermediate_size": 64}
)


@pytest.fixture
def few(monkeypatch):
    """Two methods, whose seconds nobody measures: a block takes one, a model three more."""
    monkeypatch.setattr(shapes, "TINY", replace(SMALL, layers=5))
    monkeypatch.setattr(shapes, "random_model", lambda shapes, layers, device: layers)
    for name in [name for name in ARMS if name not in ("hqq", "gptq")]:
        monkeypatch.delitem(ARMS, name)

    def quantized(layers, arm, of, device):
        return {TIME if layers == of.layers else ESTIMATE: (3.0 + of.layers, "s")}, None

    monkeypatch.setattr(shapes, "quantized", quantized)


def values(rows, setting, method):
    return {row.metric: row.value for row in rows if (row.setting, row.method) == (setting, method)}


def test_first_blocks_then_all_where_there_is_time(few):
    first, whole = (f"tiny shapes, int4_g128, {count} of 5 blocks" for count in (3, 5))
    journal = Journal()
    rows = run.run(replace(HERE, seconds=7.0), journal)
    assert values(rows, first, "gptq") == {ESTIMATE: 8.0, "status: ok": 1.0}
    assert values(rows, "tiny shapes, hqq.int4_g64, 5 of 5 blocks", "hqq")[TIME] == 8.0
    # What was not reached is no row where the seconds are limited, and the next run measures it alone.
    assert not values(rows, whole, "gptq")
    assert {row.setting for row in run.run(replace(HERE, seconds=9.0), journal)[len(rows) :]} == {whole}


@pytest.mark.parametrize("files", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_model_is_made_and_quantized(files):
    arm = replace(ARMS["gptq"], scheme="int4_g32", first=2, files=files)
    found = shapes.measured(arm, SMALL, 2, "cpu")
    assert 0 < found[shapes.BLOCK][0] < found[TIME][0]
    assert found["tokens seen"] == (10 * 8, "")


def test_an_estimate_is_the_first_block_and_the_others_like_those_after_it():
    watch = Stopwatch(torch.device("cpu"), ends={"0": 5.0, "1": 7.0, "2": 10.0})
    assert (watch.block, watch.of_layers(32)) == (2.5, 5.0 + 31 * 2.5)
    # Four batches, the last three of which take 0.5 s in a model of three blocks.
    watch.batches = [1.0, 3.0, 3.5, 4.0]
    assert watch.of_layers(32) == 5.0 + 31 * 2.5 + 29 * 2.0 / 3
    # The last three take 0.5 s in each block, one after the other.
    watch.blocks = [0.5] * 3
    assert watch.of_layers(32) == 5.0 + 31 * 2.5 + 29 * 2.0 / 3


def test_blocks_of_a_first_pass_end_where_something_else_begins(monkeypatch):
    """Such a word is of no weight."""
    times = iter([0.0, 1.0, 2.0, 4.0, 4.5, 7.0, 9.0])
    monkeypatch.setattr(Stopwatch, "now", lambda self: next(times))
    watch = Stopwatch(torch.device("cpu"))
    words = ["inputs of the blocks, batch 1 of 2", "inputs of the blocks, batch 2 of 2"]
    words += ["inputs of the blocks: model.layers.0", "inputs of the blocks: model.layers.1"]
    for word in [*words, "model.layers.0: statistics of its inputs", "model.layers.0.mlp.up_proj.weight"]:
        watch(word, 0, 7)
    assert watch.batches == [0.0, 1.0]
    assert watch.blocks == [2.0, 2.5]
    assert watch.first_pass == 4.5 * 2
    # A block is one line of the estimate, which ends with its last weight.
    assert watch.ends == {"0": 9.0}


def test_a_calibration_tells_of_each_batch_of_its_first_pass(monkeypatch):
    told = []
    monkeypatch.setattr(Stopwatch, "now", lambda self: told.append(len(self.batches)) or float(len(told)))
    model = shapes.random_model(SMALL, 2, "cpu")
    shapes.quantized(model, replace(ARMS["gptq"], scheme="int4_g32", first=2), SMALL, "cpu")
    assert told[:4] == [0, 1, 2, 3]


def test_a_method_that_fails_is_a_row_and_the_others_go_on(few, monkeypatch):
    def full(model, arm, shapes, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(shapes, "quantized", full)
    rows = run.run(HERE)
    assert {row.metric for row in rows} == {"status: error: OutOfMemoryError: CUDA out of memory"}
    assert {row.method for row in rows} == {"hqq", "gptq"}


def test_a_run_that_was_ended_is_estimated_by_the_lines_that_it_reached():
    def row(method, word):
        return HERE.rows("ptq", "real x", "model", "weights", method, status(word))

    late = "not run: the 60 s of this run did not reach it"
    ended = told([*row("a", "ok"), *row("b", "ok")], [*row("c", "error: no"), *row("d", late)], 60.0)
    assert ended == {
        "lines": (4, ""), "lines measured": (2, ""), "lines that failed": (1, ""), ESTIMATE: (80.0, "s"),
        "failed, error: no": (1.0, ""),
    }  # fmt: skip
    assert told([*row("a", "ok")], [], 5.0)[TIME] == (5.0, "s")


@pytest.mark.nightly
def test_a_whole_run_of_ptq_on_a_random_model():
    (found,) = {row.setting for row in run.run(replace(HERE, only=(PTQ,)))}
    assert found == "tiny shapes, reproduce ptq --model"


@pytest.mark.parametrize(
    ("scale", "device", "name"), [("full", "cuda", "1B shapes"), ("full", "cpu", "tiny shapes")]
)
def test_rows_name_the_shapes_of_the_model_that_ptq_ran_on(monkeypatch, scale, device, name):
    monkeypatch.setattr(shapes, "ptq_values", lambda settings, deadline: {TIME: (1.0, "s")})
    monkeypatch.setattr(Settings, "device_name", device)
    rows = run.run(replace(HERE, scale=scale, device=device, only=(PTQ,)))
    assert {row.setting for row in rows} == {f"{name}, reproduce ptq --model"}


def test_the_page_holds_times_to_their_targets(monkeypatch):
    here = replace(HERE, scale="full")
    monkeypatch.setattr(Settings, "device_name", "NVIDIA H200")
    estimated = {ESTIMATE: (91.0, "s"), shapes.MEMORY: (15e9, "byte"), **status("ok")}
    rows = here.rows("calibration", KIND, shapes.DATA, "8B shapes, 3 of 32 blocks", "gptq", estimated)
    (run_,) = page.targets_by_run(rows)
    assert [(str(one), one.reached) for one in run_.targets] == [
        ("gptq: time, estimated 91.0 of 90 s", False),
        ("gptq: memory over the model, 3 of 32 blocks 15.0 of 16 GB", True),
    ]
    low = here.rows(
        "calibration", KIND, shapes.DATA, "8B shapes, 3 of 32 blocks", "gptq", {ESTIMATE: (89.0, "s")}
    )
    assert page.targets_by_run(low)[0].targets[0].reached is None
    known = here.rows(
        "calibration", KIND, shapes.DATA, "8B shapes, 3 of 32 blocks", "gptq", {shapes.PASS: (0.6, "s")}
    )
    assert page.targets_by_run([*low, *known])[0].targets[0].reached
    whole = here.rows(
        "calibration", KIND, shapes.DATA, "8B shapes, 32 of 32 blocks", "gptq", {TIME: (80.0, "s")}
    )
    assert str(page.targets_by_run([*rows, *whole])[0].targets[0]) == "gptq: time 80.0 of 90 s"
    section = page.sections([*rows, *whole])[0]
    assert [line[:2] for line in section.tables[0].lines] == [
        ["gptq", "8B shapes, 3 of 32 blocks"], ["gptq", "8B shapes, 32 of 32 blocks"],
    ]  # fmt: skip


def test_parts_stand_alone():
    run.check_parts([LARGE, PTQ])
    with pytest.raises(ValueError, match="8B shapes and 1B shapes have methods and schemes of their own"):
        run.check_parts([LARGE, "gptq"])
