"""Calls from JAX beside torch's: what is timed, what becomes of it, and what is not timed."""

import types
from dataclasses import replace

import pytest

import fast
from experiments.kernels import jax_calls, jax_page, page
from experiments.rows import Journal
from tests.experiments.fake_watch import bench

SIZES = {"a little": 32}


@pytest.fixture
def short(monkeypatch):
    """Few calls, and XLA's slow first compilations once."""
    monkeypatch.setattr(jax_calls, "ROUNDS", 2)
    monkeypatch.setattr(jax_calls, "WARMUP", 1)
    monkeypatch.setattr(jax_calls, "PROGRAM", 2)
    monkeypatch.setattr(jax_calls, "QUEUED", 0)
    monkeypatch.setattr(jax_calls, "SCHEMES", ("mxfp8_e4m3",))


def test_rows_have_every_way_to_call(tmp_path, short):
    journal = Journal()
    assert jax_calls.measure(bench(tmp_path, fast=fast), journal, SIZES) == []
    values = {row.metric: row.value for row in journal.rows}
    assert values["status: ok"] == 1
    for way in jax_calls.WAYS:
        assert values[f"{way} over torch"] == pytest.approx(values[way] / values["torch"])
        assert values[f"bar: {way} over torch"] == 1.1
    # A second run takes them from the journal.
    before = journal.rows
    jax_calls.measure(bench(tmp_path, fast=fast), journal, SIZES)
    assert journal.rows == before


def test_other_bits_get_no_time(tmp_path, short):
    def wrong(x, scheme):
        q = fast.quantize(x, scheme)
        return replace(q, codes=q.codes ^ 1)

    journal = Journal()
    failed = jax_calls.measure(bench(tmp_path, fast=types.SimpleNamespace(quantize=wrong)), journal, SIZES)
    assert journal.rows == []
    (said,) = [row.metric for row in failed if row.metric.startswith("status")]
    assert said.startswith("status: wrong: eager: codes")
    assert not [row for row in failed if row.unit == "us"]


def test_without_jax_there_are_no_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(jax_calls, "installed", lambda: False)
    assert jax_calls.measure(bench(tmp_path), Journal(), SIZES) == []


def test_queued_calls_are_timed_per_quantization():
    ticks = iter(range(10_000))

    class Done:
        def block_until_ready(self):
            pass

    calls = {"one": Done, "eight": Done}
    times = jax_calls.queued(calls, {"one": 1, "eight": 8}, 16, lambda: float(next(ticks)))
    # A tick passes from the first call to the last: of 16 calls, or of two that are eight each.
    assert times == {"one": 1 / 16, "eight": 1 / 16}


def test_the_page_names_what_takes_longer(tmp_path, short):
    journal = Journal()
    jax_calls.measure(bench(tmp_path, fast=fast), journal, SIZES)
    fixed = {"eager over torch": 1.5, "jit over torch": 1.05, "program over torch": 1.0}
    rows = [replace(row, value=fixed.get(row.metric, row.value)) for row in journal.rows]
    (section,) = jax_page.jax_sections(rows)
    assert (
        "**More than 1.1 times torch's time: 1.** mxfp8_e4m3 of a little (eager 1.50)." in section.paragraphs
    )
    (line,) = section.tables[0].lines
    assert line[:2] == ["mxfp8_e4m3", "a little"]
    assert line[-4:] == ["1.50", "1.05", "1.00", ""]
    assert page.sections(rows)[-1].title == section.title
    assert jax_page.jax_sections([]) == []
