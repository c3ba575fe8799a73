"""Times without a GPU: the same code on a small shape by the host's clock; what is wrong gets none."""

import pytest
import torch

from ao_lab.measure.turns import HostWatch, Plan
from experiments.harness.bench import Rates
from experiments.harness.measuring import Deadline, Wrong, status
from experiments.harness.rows import Journal
from experiments.linear import run, tables
from experiments.linear.tables import (
    BASE,
    EXPERTS,
    OF_OURS,
    PARTS,
    PEERS,
    TIMES,
    TORCH,
    TORCHAO,
    Layers,
    Method,
    Table,
    checked,
    kernel_of,
    stored_bytes,
)
from tests.experiments.harness import tiny

ONCE = Plan(rounds=2, warmup=0, seconds=0.1, fewest=1, span=0.0, most_calls=1)
SHAPE = (64, 128)
INT8, FP8_DYNAMIC = OF_OURS["int8"], OF_OURS["fp8 dynamic, rows"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(run, "PLAN", ONCE)
    monkeypatch.setattr(run, "SETTLED", ONCE)
    monkeypatch.setattr(run, "SETTLE", 0.0)
    monkeypatch.setattr(run, "BATCH", 1)


def no_configuration():
    raise Wrong("no configuration")


def table(monkeypatch, *methods, rows=1):
    monkeypatch.setitem(PARTS, "weights", methods)
    return Table("weights", Layers(SHAPE, "cpu", 0), rows, TIMES)


@pytest.mark.parametrize("rows", [1, 1024])
def test_methods_are_timed_in_turn_and_one_that_fails_says_why(monkeypatch, rows):
    broken = Method("broken", no_configuration)
    rates = Rates(float8=2e12, bfloat16=1e12, copy=1e12)
    one = table(monkeypatch, BASE, INT8, FP8_DYNAMIC, broken, rows=rows)
    found = run.Bench(HostWatch(), rates).measure(one)
    assert list(found) == ["bfloat16", "int8", "fp8 dynamic, rows", "broken"]
    assert found["broken"] == {"status: wrong: no configuration": (0.0, "")}
    base, int8 = found["bfloat16"]["time"][0], found["int8"]
    assert found["bfloat16"]["speed over bfloat16"] == (1.0, "ratio")
    assert int8["speed over bfloat16"][0] == pytest.approx(base / int8["time"][0])
    least = run.floor_seconds(one.layers, INT8, rows, rates)
    assert int8["fraction of the floor"][0] == pytest.approx(least * 1e6 / int8["time"][0])
    assert ("host time" in int8) == (rows == 1)
    assert f"kernel: {kernel_of(INT8, one.layers.of(INT8, rows)[0], rows)}" in int8


def test_floors_by_hand(monkeypatch):
    made, rates = Layers(SHAPE, "cpu", 0), Rates(float8=2e9, bfloat16=1e9, copy=1e9)
    # Codes and a float32 scale a row; inputs and outputs in bfloat16.
    assert stored_bytes(made.of(INT8, 1)[0]) == 64 * 128 + 64 * 4
    assert stored_bytes(made.of(BASE, 1)[0]) == 2 * 64 * 128
    moved = 64 * 128 + 64 * 4 + 2 * (64 + 128)
    slow = Rates(float8=1e15, bfloat16=1e15, copy=1e9)
    assert run.floor_seconds(made, INT8, 1, slow) == pytest.approx(moved / 1e9)
    work = 2 * 512 * 64 * 128
    assert run.floor_seconds(made, INT8, 512, rates) == pytest.approx(work / 1e9)
    assert run.floor_seconds(made, FP8_DYNAMIC, 512, rates) == pytest.approx(work / 2e9)
    # Scales of MX change along the sum: no 8-bit unit adds them.
    assert run.rate_of(made.of(OF_OURS["mxfp8 dynamic"], 1)[0].weight, rates) == rates.bfloat16
    assert run.rate_of(made.of(OF_OURS["int8 dynamic, int4 g32 weight"], 1)[0].weight, rates) == rates.float8


def test_layers_exceed_the_cache_on_a_gpu(monkeypatch):
    made = Layers(SHAPE, "cpu", 0)
    assert len(made.of(INT8, 1)) == 1
    monkeypatch.setattr(made, "device", "cuda")
    monkeypatch.setattr(Layers, "_layer", lambda self, method, number: made.made["int8"][0])
    monkeypatch.setattr(tables, "cache_bytes", lambda: 10 * 64 * 128)
    moved = stored_bytes(made.of(INT8, 1)[0]) + 2 * (64 + 128)
    count = len(made.of(INT8, 1))
    assert (count - 1) * moved < 30 * 64 * 128 <= count * moved
    assert len(made.of(INT8, 1024)) < count


def test_the_layers_of_a_number_have_the_same_weights():
    made = Layers(SHAPE, "cpu", 0)
    dense, int8 = (made.of(one, 1)[0].weight for one in (BASE, INT8))
    assert float((int8.dequantize() - dense).abs().max()) < float(dense.abs().max()) / 127
    assert not torch.equal(dense, Layers(SHAPE, "cpu", 1).of(BASE, 1)[0].weight)


def test_a_wrong_output_gets_no_time():
    made = Layers(SHAPE, "cpu", 0)
    layer, (x,), dense = made.of(FP8_DYNAMIC, 200)[0], made.inputs(200, 1), made.of(BASE, 1)[0].weight
    y = layer(x)
    assert checked(FP8_DYNAMIC, layer, y, x, dense) < 3e-3
    # Rows at both ends are looked at, and the inputs' rounding is part of what is computed.
    for row in (0, -1):
        wrong = y.clone()
        wrong[row] = -wrong[row]
        with pytest.raises(Wrong, match="more than"):
            checked(FP8_DYNAMIC, layer, wrong, x, dense)
    with pytest.raises(Wrong, match="more than"):
        checked(FP8_DYNAMIC, layer, (x.float() @ layer.weight.dequantize().float().t()).bfloat16(), x, dense)
    y[100] = torch.nan
    with pytest.raises(Wrong, match="not finite"):
        checked(FP8_DYNAMIC, layer, y, x, dense)


def test_another_librarys_layer_is_compared_with_the_dense_one():
    made = Layers(SHAPE, "cpu", 0)
    layer, (x,) = made.of(BASE, 1)[0], made.inputs(1, 1)
    theirs = Method("torchao x", library=TORCHAO)
    assert checked(theirs, layer, layer(x) * 1.1, x, layer.weight) == pytest.approx(0.1, abs=0.01)
    with pytest.raises(Wrong, match=r"more than 0\.25"):
        checked(theirs, layer, layer(x) * 1.3, x, layer.weight)


def test_a_table_is_measured_whole(tmp_path, monkeypatch):
    settings, journal, measured = tiny.settings(tmp_path), Journal(), []
    other = Method("other", library=TORCH)
    works = {"int8": status("error: no")}

    def measure(one):
        measured.append(one.rows)
        return {
            method.name: works.get(method.name) or {"time": (1.0, "us"), **status("ok")}
            for method in one.methods
        }

    whole = table(monkeypatch, BASE, INT8, other)
    more = Table("weights", whole.layers, 4, TIMES)
    tables.run_tables([whole], measure, settings, journal, failed := [], Deadline(None))
    assert [row.metric for row in failed] == ["status: error: no"]
    # What was never measured comes first; a method that is missing has all measured again, in the place of the older rows.
    monkeypatch.setitem(PARTS, "weights", (BASE, INT8))
    tables.run_tables([whole, more], measure, settings, journal, [], Deadline(None))
    assert measured == [1, 4, 1]
    assert {(row.setting, row.method) for row in journal.rows} == {
        ("1 row, CUDA graph", "bfloat16"), ("4 rows, CUDA graph", "bfloat16")
    }  # fmt: skip
    works.clear()
    tables.run_tables([whole, more], measure, settings, journal, [], Deadline(None))
    tables.run_tables([whole, more], measure, settings, journal, [], Deadline(None))
    assert measured == [1, 4, 1, 1, 4]
    # Nothing that was measured goes where nothing can be measured any more.
    monkeypatch.setitem(PARTS, "weights", (BASE, INT8, other))
    tables.run_tables(
        [whole], lambda one: {"int8": status("error: no")}, settings, journal, [], Deadline(None)
    )
    assert len({row.method for row in journal.rows}) == 2


def test_torchao_is_left_out_with_a_reason_where_it_is_missing(tmp_path, monkeypatch):
    peer = next(iter(PEERS))
    one = table(monkeypatch, BASE, peer)
    monkeypatch.setattr("experiments.harness.revision.version_of", lambda name: "none")
    assert [method.name for method in one.methods] == ["bfloat16"]
    tables.run_tables(
        [one],
        lambda one: {"bfloat16": status("ok")},
        tiny.settings(tmp_path),
        Journal(),
        failed := [],
        Deadline(None),
    )
    assert [(row.method, row.metric) for row in failed] == [
        (peer.name, "status: missing: torchao is not installed")
    ]


def test_tables_are_of_the_issues_shapes_and_rows():
    made = list(tables.tables_of(tuple(PARTS), "cpu", 0))
    assert [one.data for one in made if one.part == "weights" and one.rows == 1] == [
        "14336x4096", "4096x14336", "4096x4096", "1024x4096"
    ]  # fmt: skip
    assert [one.data for one in made if one.part == EXPERTS and one.rows == 128] == [
        "8x14336x4096",
        "8x4096x14336",
    ]
    assert tables.ROWS == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
    assert {one.data for one in made if one.part == TORCHAO} == {"14336x4096", "4096x14336"}
    # All of a shape comes before the next, whose time may not come.
    first = [one.data for one in made]
    order = ["14336x4096", "4096x14336", "4096x4096", "1024x4096", "8x14336x4096", "8x4096x14336"]
    assert first == sorted(first, key=order.index)
    assert not made[0].layers.made
