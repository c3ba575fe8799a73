"""Choices by problem: found again in another process, never half written, for one device and its versions."""

import json

import pytest
import torch

from ao_lab.gemm import choices
from ao_lab.gemm.choices import Candidate, Choice, Choices, Problem, rows_range

CPU = torch.device("cpu")
PROBLEM = Problem("output", "fp8_rowwise", "fp8_rowwise", 4096, 1024, 64, "torch.bfloat16")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    choices.forget()
    yield tmp_path
    choices.forget()


def test_rows_of_a_range():
    assert [rows_range(rows) for rows in (0, 1, 2, 3, 4, 5, 16384, 16385)] == [1, 1, 2, 4, 4, 8, 16384, 32768]


def test_what_is_saved_is_read_again():
    mine = choices.choices_for(CPU)
    assert mine.kernel(PROBLEM) is None
    mine.add(
        Choice(
            PROBLEM,
            "emulate",
            (Candidate("scaled_mm", reason="no GPU"), Candidate("emulate", 1e-3, 1e-5, 0.03)),
        )
    )
    choices.save(mine, choices.path_of(CPU))
    choices.forget()
    again = choices.choices_for(CPU)
    assert again is not mine
    assert again.found == mine.found
    assert (
        choices.tuned("output", "fp8_rowwise", "fp8_rowwise", (33, 4096, 1024), torch.bfloat16, CPU)
        == "emulate"
    )
    for other in ((32, 4096, 1024), (65, 4096, 1024), (64, 4096, 1025)):
        assert choices.tuned("output", "fp8_rowwise", "fp8_rowwise", other, torch.bfloat16, CPU) is None
    assert choices.tuned("output", "fp8_rowwise", "fp8_rowwise", (64, 4096, 1024), torch.float16, CPU) is None


def test_other_versions_have_another_file(monkeypatch):
    first = choices.path_of(CPU)
    monkeypatch.setattr(choices, "_version", lambda package: "9.9")
    assert choices.path_of(CPU) != first


def test_a_file_of_another_format_says_so(cache):
    path = choices.path_of(CPU)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"format": 0}))
    with pytest.raises(ValueError, match="tune again"):
        choices.choices_for(CPU)


def test_a_write_that_fails_leaves_the_old_file(cache, monkeypatch):
    path = choices.path_of(CPU)
    choices.save(Choices("cpu"), path)
    before = path.read_text()
    monkeypatch.setattr(choices.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        choices.save(Choices("other"), path)
    assert path.read_text() == before
