"""Calls from JAX beside torch's: what is timed, what becomes of it, and what is not timed."""

import types
from dataclasses import replace

import pytest
import torch

import fast
from experiments.harness.measuring import Wrong
from experiments.harness.rows import Journal
from experiments.kernels import page, run
from tests.experiments.harness.fake_watch import bench

SIZES = {"a little": 32}


@pytest.fixture(scope="module", autouse=True)
def short():
    """Few calls of one scheme."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "ROUNDS": 2,
            "WARMUP": 1,
            "PROGRAM": 2,
            "QUEUED": 0,
            "JAX_SCHEMES": ("int8_rowwise",),
        }.items():
            patch.setattr(run, name, value)
        yield


@pytest.fixture(scope="module")
def journal(short, tmp_path_factory):
    made = Journal()
    assert run.jax_measure(bench(tmp_path_factory.mktemp("jax"), fast=fast), made, SIZES) == []
    return made


def test_rows_have_every_way_to_call(journal):
    values = {row.metric: row.value for row in journal.rows}
    assert values["status: ok"] == 1
    for way in run.WAYS:
        assert values[f"{way} over torch"] == pytest.approx(values[way] / values["torch"])
        assert values[f"target: {way} over torch"] == 1.1


def test_a_second_run_takes_them_from_the_journal(journal, tmp_path):
    before = journal.rows
    assert run.jax_measure(bench(tmp_path, fast=None), journal, SIZES) == []
    assert journal.rows == before


def test_other_bits_get_no_time(tmp_path):
    def wrong(x, scheme):
        q = fast.quantize(x, scheme)
        return replace(q, codes=q.codes ^ 1)

    journal = Journal()
    failed = run.jax_measure(bench(tmp_path, fast=types.SimpleNamespace(quantize=wrong)), journal, SIZES)
    assert journal.rows == []
    (said,) = [row.metric for row in failed if row.metric.startswith("status")]
    assert said.startswith("status: wrong: eager: codes of tensor 0")
    assert not [row for row in failed if row.unit == "us"]


@pytest.mark.parametrize("way", run.WAYS)
def test_every_result_of_every_way_is_compared(way, monkeypatch):
    """One that is wrong in its last tensor alone is found, in the one way that has it."""
    from ao_lab import jax as functions

    tensors = [torch.full((2, 8), float(number), dtype=torch.bfloat16) for number in range(3)]
    right, seen = functions.quantize, []

    def one_wrong(x, scheme):
        q = right(x, scheme)
        seen.append(1)
        # Traced once for `jit` and once for each tensor of `program`, in the order of `calls_of`.
        number = {3: "eager", 4: "jit", 7: "program"}.get(len(seen))
        return replace(q, codes=q.codes ^ 1) if number == way else q

    monkeypatch.setattr(functions, "quantize", one_wrong)
    first = 0 if way == "jit" else 2
    with pytest.raises(Wrong, match=f"^{way}: codes of tensor {first}:"):
        run.jax_calls_of(fast, "int8_rowwise", tensors)


def test_torch_quantizes_as_many_tensors_as_a_program():
    taken = []

    def quantize(x, scheme):
        taken.append(x)
        return fast.quantize(x, scheme)

    tensors = [torch.ones(2, 8, dtype=torch.bfloat16) for _ in range(3)]
    calls, divisors = run.jax_calls_of(types.SimpleNamespace(quantize=quantize), "int8_rowwise", tensors)
    taken.clear()
    calls[run.TORCH]()
    assert [id(x) for x in taken] == [id(x) for x in tensors]
    assert set(divisors.values()) == {3}


def test_without_jax_there_are_no_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "installed", lambda: False)
    assert run.jax_measure(bench(tmp_path), Journal(), SIZES) == []


def test_queued_calls_are_timed_per_quantization():
    ticks = iter(range(10_000))

    class Done:
        def block_until_ready(self):
            pass

    calls = {"one": Done, "eight": Done}
    times = run.queued(calls, {"one": 1, "eight": 8}, 16, lambda: float(next(ticks)))
    # A tick passes from the first call to the last: of 16 calls, or of two that are eight each.
    assert times == {"one": 1 / 16, "eight": 1 / 16}


def test_the_page_names_what_takes_longer(journal):
    fixed = {"eager over torch": 1.5, "jit over torch": 1.05, "program over torch": 1.0}
    rows = [replace(row, value=fixed.get(row.metric, row.value)) for row in journal.rows]
    (section,) = page.jax_sections(rows)
    assert (
        "**More than 1.1 times torch's time: 1.** int8_rowwise of a little (eager 1.50)."
        in section.paragraphs
    )
    (line,) = section.tables[0].lines
    assert line[:2] == ["int8_rowwise", "a little"]
    assert line[-4:] == ["1.50", "1.05", "1.00", ""]
    assert page.sections(rows)[-1].title == section.title
    assert page.jax_sections([]) == []
