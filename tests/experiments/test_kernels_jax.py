"""Calls from JAX beside torch's: what is timed, what becomes of it, and what is not timed."""

import types
from dataclasses import replace

import pytest

import fast
from experiments.kernels import jax_calls, jax_page, page
from experiments.rows import Journal
from tests.experiments.fake_watch import bench

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
            "SCHEMES": ("int8_rowwise",),
        }.items():
            patch.setattr(jax_calls, name, value)
        yield


@pytest.fixture(scope="module")
def journal(short, tmp_path_factory):
    made = Journal()
    assert jax_calls.measure(bench(tmp_path_factory.mktemp("jax"), fast=fast), made, SIZES) == []
    return made


def test_rows_have_every_way_to_call(journal):
    values = {row.metric: row.value for row in journal.rows}
    assert values["status: ok"] == 1
    for way in jax_calls.WAYS:
        assert values[f"{way} over torch"] == pytest.approx(values[way] / values["torch"])
        assert values[f"bar: {way} over torch"] == 1.1


def test_a_second_run_takes_them_from_the_journal(journal, tmp_path):
    before = journal.rows
    assert jax_calls.measure(bench(tmp_path, fast=None), journal, SIZES) == []
    assert journal.rows == before


def test_other_bits_get_no_time(tmp_path):
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


def test_the_page_names_what_takes_longer(journal):
    fixed = {"eager over torch": 1.5, "jit over torch": 1.05, "program over torch": 1.0}
    rows = [replace(row, value=fixed.get(row.metric, row.value)) for row in journal.rows]
    (section,) = jax_page.jax_sections(rows)
    assert (
        "**More than 1.1 times torch's time: 1.** int8_rowwise of a little (eager 1.50)."
        in section.paragraphs
    )
    (line,) = section.tables[0].lines
    assert line[:2] == ["int8_rowwise", "a little"]
    assert line[-4:] == ["1.50", "1.05", "1.00", ""]
    assert page.sections(rows)[-1].title == section.title
    assert jax_page.jax_sections([]) == []
