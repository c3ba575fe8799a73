"""Times without a GPU: the same code on small shapes by the host's clock, what is wrong, and published values beside rows."""

from functools import partial

import pytest
import torch

from experiments.fp8_training.deadline import Deadline
from experiments.fp8_training.speed.watch import CpuWatch
from experiments.harness.outcome import Wrong
from experiments.harness.rows import Journal, Row
from experiments.harness.timing import Plan
from experiments.models.sam_encoder import TINY, VIT_H, VIT_L
from experiments.sparsity.report import published_tables, speed
from experiments.sparsity.speed import decode, encoders, linear, sides
from experiments.sparsity.speed.sides import DENSE, Side, Table
from tests.experiments.harness import tiny

ONCE = Plan(rounds=2, warmup=0, seconds=0.1, fewest=1, span=0.0, most_calls=1)
SHAPE = (16, 64, 32)


def test_sides_are_timed_in_turn_and_one_that_fails_says_why():
    def broken():
        raise Wrong("no")

    def pause(work):
        return lambda: torch.randn(work).sum()

    table = Table(
        "k", "d", "s",
        (
            Side(DENSE, lambda: pause(10)),
            Side("more", lambda: pause(10)),
            Side("broken", broken),
            Side("absent", broken, "missing: it"),
        ),
        ONCE, images=4,
    )  # fmt: skip
    found = sides.measure(CpuWatch(), table, 0.0)
    assert found["broken"] == {"status: wrong: no": (0.0, "")}
    assert found["absent"] == {"status: missing: it": (0.0, "")}
    assert found[DENSE]["speed over dense"] == (1.0, "ratio")
    more = found["more"]
    assert more["images/s"][0] == pytest.approx(4e3 / more["time"][0])
    assert more["speed over dense"][0] == pytest.approx(found[DENSE]["time"][0] / more["time"][0])


def test_nothing_is_measured_after_the_limit_or_without_a_gpu(tmp_path, monkeypatch):
    settings, failed = tiny.settings(tmp_path), []
    table = Table("linear", "d", "s", (Side(DENSE, lambda: pytest.fail("built")),), ONCE)
    monkeypatch.setattr("experiments.runs.settings.row_hash", lambda *_: "")
    sides.run_tables("t", [table], settings, Journal(), failed, Deadline(None))
    assert [row.metric for row in failed] == [f"status: {sides.NO_GPU}"]
    monkeypatch.setattr(sides, "published_shapes", lambda settings: True)
    sides.run_tables("t", [table], settings, Journal(), failed := [], Deadline(-1.0))
    assert [row.metric for row in failed] == ["status: not run: the -1 s of this run did not reach it"]


def test_a_step_of_a_sparse_layer_has_the_masked_weights_product():
    step = linear.sparse(SHAPE, "cpu", 0, "dense", torch.float32, renew=True)
    dx, dw, db = step()
    assert [tuple(one.shape) for one in (dx, dw, db)] == [(16, 64), (32, 64), (32,)]
    # Straight through: the weight gradient is dense, that of the input is of the masked weight.
    _, plain, _ = linear.dense(SHAPE, "cpu", 0, torch.float32)()
    assert torch.equal(dw, plain)
    assert not torch.equal(dx, linear.dense(SHAPE, "cpu", 0, torch.float32)()[0])


def test_a_wrong_product_gets_no_time(monkeypatch):
    real = linear.expected
    monkeypatch.setattr(linear, "expected", lambda weight, x: -real(weight, x))
    with pytest.raises(Wrong, match=r"differs by 2\.0e"):
        linear.sparse(SHAPE, "cpu", 0, "dense", torch.float32, renew=False)


def test_the_tables_have_the_published_shapes():
    assert [one.data for one in linear.tables("cpu", 0)] == ["13008x1024x4096", "13008x4096x1024"]
    assert encoders.training_tables("cpu", 0)[0].data == VIT_L.name
    assert encoders.inference_tables("cpu", 0)[0].data == VIT_H.name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_encoders_run_at_a_small_size():
    made = partial(encoders.trained, TINY, 2, "cpu", 0, torch.float32, "aot_eager")
    assert made(products="dense")() is None
    encode = partial(encoders.encoded, TINY, 2, "cpu", 0, torch.float32, "eager")
    dense = encode(convert=encoders.CONVERSIONS[DENSE])()
    int8 = encode(convert=encoders.CONVERSIONS[encoders.INT8])()
    # 8 bits change values by some percent.
    assert 0 < float((int8 - dense).norm() / dense.norm()) < 0.1


def test_generation_says_what_a_copy_cannot_store(monkeypatch):
    sparse = decode.CONFIGS["int4 + 2:4"]
    monkeypatch.delattr(decode.ao_lab, "SparseQuantizedTensor", raising=False)
    monkeypatch.setattr(decode, "hasattr", lambda *_: False, raising=False)
    assert decode.missing(sparse) == "missing: this copy stores 2:4 weights dense, with zeros"
    assert decode.missing(decode.CONFIGS["int4"]) is None


def row(kind, data, method, metric, value):
    return Row(
        experiment="sparsity", table=f"{kind}/full/{data}", setting="s", method=method, metric=metric, value=value, unit="",
        device="a GPU", seed=0, source_hash="",
    )  # fmt: skip


def test_published_values_stand_beside_the_same_shape(monkeypatch):
    monkeypatch.setattr("experiments.report.results.is_stale", lambda row: False)
    rows = [
        row("linear", "13008x1024x4096", linear.SPARSE, "speed over dense", 1.3),
        row("vit", VIT_L.name, encoders.MLP, "time", 100.0),
        row("sam", VIT_H.name, DENSE, "images/s", 70.0),
    ]
    found = published_tables.comparisons(rows)
    assert len(found) == len(published_tables.values()) == 55
    beside = {(one.measured, one.published) for one in found if one.measured is not None}
    assert beside == {(1.3, 1.24), (100.0, 675.275311), (70.0, 22.75)}
    assert speed.findings(rows) == [
        "Linear layers in training (full scale, a GPU, 13008x1024x4096), speed over dense: 2:4 1.30."
    ]
    assert {one.measured for one in published_tables.comparisons([])} == {None}
    titles = [section.title.partition(" (")[0] for section in speed.sections(rows)]
    assert titles == [speed.TITLES[kind] for kind in ("linear", "vit", "sam")]
