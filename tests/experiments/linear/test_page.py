"""The page of times and targets, from rows by hand."""

from experiments.harness.rows import Row
from experiments.linear import page
from experiments.linear.methods import BASE, OF_OURS, PEERS, TORCHAO
from experiments.report import plots
from experiments.report.plots import svg
from experiments.report.results import by_run
from experiments.report.targets import limits


def rows_of(part, rows, times, device="NVIDIA H200", data="14336x4096"):
    found = []
    for method, time in times.items():
        values = {
            "relative error": 2e-3, "status: ok": 1.0, "time": time,
            "speed over bfloat16": times["bfloat16"] / time,
        }  # fmt: skip
        found += [
            Row(
                experiment="linear", table=f"{part}/full/{data}", setting=page.setting_of(rows), method=method,
                metric=metric, value=value, unit="", device=device, seed=0, kernel="fused",
            )
            for metric, value in values.items()
        ]  # fmt: skip
    return found


ROWS = [
    *rows_of("weights", 1, {"bfloat16": 31.0, "int4 g128": 10.4, "int8": 15.4, "nvfp4": 20.0}),
    *rows_of("weights", 128, {"bfloat16": 30.0, "int4 g128": 31.0, "int8": 30.0}),
    *rows_of(TORCHAO, 16, {"bfloat16": 30.0, "fp8 dynamic, rows": 20.0, "torchao fp8dq, rows": 22.1}),
]


def test_targets_are_met_or_missed():
    assert page.findings(ROWS) == [
        "weights (14336x4096, NVIDIA H200): 2 of 5 targets are met; missed: int4 g128 at 128; int8 at 1; nvfp4 at 1 rows.",
        "weights (14336x4096, NVIDIA H200), slower than bfloat16: int4 g128 at 128 rows.",
        "torchao (14336x4096, NVIDIA H200): 1 of 1 targets are met.",
    ]
    section, beside = page.sections(ROWS)
    first, *others = section.tables
    lines = {line[0]: line[1:] for line in first.lines}
    assert lines["int4 g128, 1 row"] == ["at most 10.4 us", "10.4", "yes"]
    assert lines["int4 g128, 128 rows"] == ["at least 0.98 times bfloat16", "0.97", "no"]
    assert lines["int4 g128, 2 rows"] == ["at most 10.4 us", "", ""]
    assert lines["nvfp4, 1 row"][0] == "at least 2 times bfloat16"
    assert [one.caption for one in others] == ["1 row", "128 rows"]
    assert others[0].lines[1] == ["int4 g128", "10.4", "", "", "2.98", "", "", "fused", "2.0e-03"]
    assert beside.tables[0].lines[1] == [
        "fp8 dynamic, rows, 16 rows",
        "at least 1.1 times torchao",
        "1.10",
        "yes",
    ]
    (drawing,) = section.drawings
    assert drawing.name == page.FEATURED[0]


def test_times_are_targets_of_one_device_and_all_of_one_shape():
    def names(device, data):
        found = rows_of("weights", 1, {"bfloat16": 31.0, "int4 g128": 10.0, "nf4": 15.0}, device, data)
        ((where, results),) = by_run(found, "weights").items()
        return {one.name for one in page.targets_of("weights", where, results)}

    assert "int4 g128, 1 row" in names("NVIDIA H200", "14336x4096")
    elsewhere = names("NVIDIA H100 80GB HBM3", "14336x4096")
    assert "int4 g128, 1 row" not in elsewhere
    assert {"nf4, 1 row", "int4 g128, 128 rows"} <= elsewhere
    assert names("NVIDIA H200", "4096x4096") == set()


def test_every_target_is_of_a_method_and_of_rows_that_are_measured():
    for one in limits("linear"):
        assert one.parts[0].removeprefix(page.OF_EXPERTS) in OF_OURS
        assert page.rows_of(one)
    assert set(PEERS.values()) <= set(OF_OURS)
    assert BASE.name not in OF_OURS


def test_a_method_that_failed_is_named():
    failed = Row(
        experiment="linear", table="weights/full/14336x4096", setting=page.setting_of(1), method="nf4",
        metric="status: wrong: no", value=0.0, unit="", device="NVIDIA H200", seed=0,
    )  # fmt: skip
    (section,) = page.sections([*ROWS[:20], failed])
    assert "**Not measured: 1.** nf4, 1 row, CUDA graph (wrong: no)." in section.paragraphs
    (alone,) = page.sections([failed])
    assert alone.drawings == ()


def test_a_map_has_the_value_in_each_cell_and_the_same_distance_on_both_sides():
    picture = svg(plots.ratio_map(["a", "b"], ["1", "2"], [[0.5, 2.0], [None, 1.04]], "speed"))
    assert all(f">{text}<" in picture for text in ("0.50", "2.00", "1.04"))
    assert plots.power_of(2.0) == -plots.power_of(0.5) == 1
    assert all(plots.power_of(value) != plots.power_of(value) for value in (None, 0.0, float("inf")))
