"""The whole experiment at quick scale, and the command."""

from dataclasses import replace

import pytest

from ao_lab.cli.app import main
from experiments.harness.rows import Journal, table_parts
from experiments.linear import page, tables
from experiments.linear import run as experiment
from experiments.linear.methods import ACTIVATIONS, EXPERTS, PARTS, PEERS, WEIGHTS
from tests.experiments.harness import tiny


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """One small shape."""
    monkeypatch.setattr(tables, "STAND_INS", ((128, 256),))
    monkeypatch.setattr(tables, "EXPERT_STAND_IN", (128, 256))


@pytest.fixture
def settings(tmp_path):
    return tiny.settings(tmp_path)


def test_rows_of_all_parts_and_their_page(settings):
    rows = experiment.run(settings, journal := Journal())
    assert len({row.key for row in rows}) == len(rows)
    found = {
        (table_parts(row.table)[0], row.setting, row.method) for row in rows if row.metric == "status: ok"
    }
    counts = ("1 row, outputs", "4 rows, outputs", "33 rows, outputs")
    parts = {"weights": WEIGHTS, "activations": ACTIVATIONS}
    assert found == {
        (part, rows, one.name) for part, all_of in parts.items() for rows in counts for one in all_of
    } | {(EXPERTS, f"{rows} rows, outputs", one.name) for rows in (2, 32) for one in PARTS[EXPERTS][1:]}
    errors = {row.value for row in rows if row.metric == "relative error"}
    # Outputs are rounded to bfloat16 at least, and nothing computes anything else than what is stored.
    assert min(errors) > 1e-3
    assert max(errors) < 4e-3
    kernels = {row.method: row.kernel for row in rows if row.metric == "relative error"}
    assert kernels["int8 dynamic"] == "int8"
    assert kernels["fp8"] == "dequantize"
    assert not any(row.metric.startswith("kernel") for row in rows)
    # A CPU times nothing, and rows say so of torchao's.
    absent = [row for row in rows if table_parts(row.table)[0] == "torchao"]
    assert {row.method for row in absent} == {one.name for one in PEERS}
    assert {row.metric for row in absent} == {f"status: {tables.NO_TIMES}"}
    first, second = page.findings(rows)
    assert first == page.NOTHING
    assert second.startswith(
        "83 layers on a CPU: outputs differ from the product of what is stored by at most "
    )
    sections = page.sections(rows)
    assert [one.title.partition(" (")[0] for one in sections] == [
        "Outputs: weights", "Outputs: activations", "Outputs: experts", "Outputs: torchao"
    ]  # fmt: skip
    (table,) = sections[0].tables
    assert table.lines[0][2::2] == ["fused", "dequantize", "dequantize"]
    before = {row.key: row.value for row in journal.rows}
    assert {row.key: row.value for row in experiment.run(settings, journal) if row.key in before} == before


def test_a_part_alone_and_nothing_after_the_limit(settings):
    rows = experiment.run(replace(settings, only=("activations",)))
    assert {table_parts(row.table)[0] for row in rows} == {"activations"}
    assert experiment.run(replace(settings, seconds=1e-9)) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "x"], "the parts are weights, activations, experts, torchao"),
        (["--seconds", "0"], "--seconds is a positive limit"),
        (["--workers", "2"], "--workers is a positive number of processes"),
    ],
)
def test_wrong_input_is_one_line(capsys, arguments, words):
    assert main(["reproduce", "linear", *arguments, "--device", "cpu"]) == 2
    assert words in capsys.readouterr().err
