"""The whole experiment at quick scale, and the command."""

from dataclasses import replace

import pytest
import torch

from ao_lab.cli.app import main
from experiments.harness.measuring import Wrong
from experiments.harness.rows import Journal, Row, table_parts
from experiments.linear import page, tables
from experiments.linear import run as experiment
from experiments.linear.tables import (
    ACTIVATIONS,
    BASE,
    EXPERTS,
    OF_OURS,
    PARTS,
    PEERS,
    TORCHAO,
    WEIGHTS,
    ExpertLayers,
    Experts,
    checked,
    ends_of,
    kernel_of,
)
from experiments.report import ratio_maps
from experiments.report.plots import svg
from experiments.report.results import by_run
from experiments.report.targets import limits
from tests.experiments.harness import tiny

# The page of times and targets, from rows by hand.


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
                metric=metric, value=value, unit="", device=device, seed=0, kernel="fused" if part == "weights" else "",
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
        "Quantized weights (NVIDIA H200, 14336 x 4096): 2 of 5 targets are met; 3 missed: int4 g128 at 128; int8 at 1; nvfp4 "
        "at 1 tokens.",
        "Quantized weights (NVIDIA H200), slower than bfloat16 at some shape: int4 g128 from 128 tokens on.",
        "Beside torchao (NVIDIA H200, 14336 x 4096): 1 of 1 targets are met.",
    ]
    section, beside = page.sections(ROWS)
    first, *others = section.tables
    lines = {line[0]: line[1:] for line in first.lines}
    assert lines["int4 g128, 1 token"] == ["at most 10.4 us", "10.4", "yes"]
    assert lines["int4 g128, 128 tokens"] == ["at least 0.98 times bfloat16", "0.97", "no"]
    assert lines["int4 g128, 2 tokens"] == ["at most 10.4 us", "", ""]
    assert lines["nvfp4, 1 token"][0] == "at least 2 times bfloat16"
    assert [one.caption for one in others] == ["1 token", "128 tokens"]
    assert others[0].lines[1] == ["int4 g128", "10.4", "", "", "2.98", "", "", "fused", "2.0e-03"]
    assert beside.tables[0].lines[1] == [
        "fp8 dynamic, rows, 16 tokens",
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

    assert "int4 g128, 1 token" in names("NVIDIA H200", "14336x4096")
    elsewhere = names("NVIDIA H100 80GB HBM3", "14336x4096")
    assert "int4 g128, 1 token" not in elsewhere
    assert {"nf4, 1 token", "int4 g128, 128 tokens"} <= elsewhere
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
    picture = svg(
        ratio_maps.ratio_map(ratio_maps.Ratios(["a", "b"], ["1", "2"], [[0.5, 2.0], [None, 1.04]], "speed"))
    )
    assert all(f">{text}<" in picture for text in ("0.50", "2.00", "1.04"))
    assert ratio_maps.power_of(2.0) == -ratio_maps.power_of(0.5) == 1
    assert all(
        ratio_maps.power_of(value) != ratio_maps.power_of(value) for value in (None, 0.0, float("inf"))
    )


# Experts: each row by the weight of its own expert, and what of the weights is read.

CPU = torch.device("cpu")


def layers(experts=4):
    return ExpertLayers((64, 128), "cpu", 0, experts=experts)


def test_every_row_is_multiplied_by_its_expert():
    made = layers()
    one, (x,) = made.of(BASE, 10)[0], made.inputs(10, 1)
    counts = ends_of(10, 4, CPU).diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    assert sum(counts) == 10
    assert len(set(counts)) > 1
    wanted = [x[row].float() @ one.weight[expert].float().t() for row, expert in enumerate(of_rows(counts))]
    assert torch.allclose(one.product(x, one.weight), torch.stack(wanted), atol=1e-5)
    assert made.data == "4x64x128"


def of_rows(counts):
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize("name", ["int4 g128", "fp8", "mxfp4"])
def test_what_is_stored_is_compared_and_another_order_is_wrong(name):
    made, method = layers(), OF_OURS[name]
    one, (x,) = made.of(method, 12)[0], made.inputs(12, 1)
    dense = made.of(BASE, 12)[0].weight
    assert isinstance(one, Experts)
    assert checked(method, one, one(x), x, dense) < 4e-3
    assert kernel_of(method, one, 12) == "dequantize"
    with pytest.raises(Wrong, match="outputs differ"):
        checked(method, one, one(x).flip(0), x, dense)


def test_rows_of_which_weights_are_made_dense(monkeypatch):
    """More than 64 an expert."""
    made, method = layers(), OF_OURS["int4 g128"]
    one = made.of(method, 8)[0]
    monkeypatch.setattr("experiments.linear.tables.groups_reason", lambda w, dtype: None)
    assert [kernel_of(method, one, rows) for rows in (8, 256, 257)] == ["fused", "fused", "dequantize"]


def test_floors_read_experts_that_have_rows():
    made = layers(8)
    assert made.share_read(2) == 2 / 8
    assert made.share_read(512) == 1.0


# Every method is the configuration that its name says; torchao's are of the same weights as ours beside them.

#: Schemes of weight and inputs.
SCHEMES = {
    "int4 g128": ("int4_g128", None),
    "int4 g32": ("int4_g32", None),
    "int4 g32, zero points": ("int4_g32_asymmetric", None),
    "int4 g128, zero points": ("int4_g128_asymmetric", None),
    "int8": ("int8_rowwise", None),
    "int8 g128": ("int8_g128", None),
    "fp8": ("fp8_rowwise", None),
    "mxfp8": ("mxfp8_e4m3_rceil", None),
    "mxfp4": ("mxfp4_rceil", None),
    "nvfp4": ("nvfp4", None),
    "nf4": ("nf4", None),
    "int2 g32": ("int2_g32", None),
    "int3 g32": ("int3_g32", None),
    "int6 g32": ("int6_g32", None),
    "int8 dynamic": ("int8_rowwise", "int8_rowwise"),
    "int8 dynamic, zero points": ("int8_rowwise", "int8_rowwise_asymmetric"),
    "fp8 dynamic, tensor": ("fp8_tensorwise", "fp8_tensorwise"),
    "fp8 dynamic, rows": ("fp8_rowwise", "fp8_rowwise"),
    "fp8 dynamic, blocks": ("fp8_128x128", "fp8_1x128"),
    "int8 dynamic, int4 g32 weight": ("int4_g32", "int8_rowwise_asymmetric"),
    "fp8 dynamic, int4 g128 weight": ("int4_g128", "fp8_rowwise"),
    "mxfp8 dynamic": ("mxfp8_e4m3_rceil", "mxfp8_e4m3_rceil"),
    "mxfp4 dynamic": ("mxfp4_rceil", "mxfp4_rceil"),
    "nvfp4 dynamic": ("nvfp4", "nvfp4"),
}


def test_methods_have_the_schemes_of_their_names():
    recipes = {name: method.build().recipe() for name, method in OF_OURS.items()}
    found = {
        name: (one.weight.name, one.activation.name if one.activation else None)
        for name, one in recipes.items()
    }
    assert found == SCHEMES
    # The rules of layers choose the kernel: that is what is measured.
    assert {one.kernel for one in recipes.values()} == {"auto"}


def test_bfloat16_stands_first_in_every_part_and_names_are_unique():
    for methods in PARTS.values():
        assert methods[0] == BASE
        assert len({one.name for one in methods}) == len(methods)
    names = [one.name for one in PARTS[TORCHAO][1:]]
    assert dict(zip(names[1::2], names[::2], strict=True)) == {one.name: ours for one, ours in PEERS.items()}


def test_torchaos_configurations_are_built():
    pytest.importorskip("torchao")
    classes = [type(peer.build()).__name__ for peer in PEERS]
    assert classes == [
        "Int4WeightOnlyConfig", "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig",
        "Float8DynamicActivationFloat8WeightConfig",
    ]  # fmt: skip
    assert next(iter(PEERS)).build().group_size == 128


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
        "86 layers on a CPU: outputs differ from the matmul of the dequantized weight by at most "
    )
    sections = page.sections(rows)
    assert [one.title.partition(" (")[0] for one in sections] == [
        "Outputs: weights", "Outputs: activations", "Outputs: experts", "Outputs: torchao"
    ]  # fmt: skip
    (table,) = sections[0].tables
    assert table.lines[0][2::2] == ["fused", "fused", "fused"]
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
