"""The benchmark of kernels without a GPU: what is measured, how bytes are counted, and what rows come of it."""

import json
import types
from dataclasses import replace

import pytest
import torch

import reference
from ao_lab.cli.app import main
from experiments.harness.paths import Paths
from experiments.harness.rows import Journal, publish, read
from experiments.kernels import bench as command
from experiments.kernels import operations as floors
from experiments.kernels import page, run
from experiments.kernels.baselines import BASELINES
from experiments.kernels.cases import CASES, chosen, convention_cases, of_sparsity
from experiments.kernels.figures import roof_of, roofline
from experiments.kernels.operations import LARGE, SHAPES, SHOWN
from experiments.kernels.results import CaseResult, results_of
from experiments.report import plots
from experiments.report.results import FAMILIES, family
from experiments.report.targets import Target
from reference import SCHEMES
from tests.experiments.harness.tiny import SHAPE, TINY, FakeWatch, bench, broken, flipped, measured, values_of

# What is made of rows: the roofline, the page, the command line.


@pytest.fixture(scope="module")
def sample_rows(tmp_path_factory):
    names = ["quantize.fp8_rowwise", "quantize.mxfp4.packed", "swiglu.fp8_rowwise", "small.fp8_rowwise"]
    with pytest.MonkeyPatch.context() as patch:
        for name in (*LARGE, "16x4096"):
            patch.setitem(SHAPES, name, (64, 512))
        fast = broken("swiglu_quantize", flipped("codes"))
        made = bench(tmp_path_factory.mktemp("bench"), fast=fast, baselines=BASELINES[:1])
        shapes = {name: SHAPES[name] for name in (*LARGE, "16x4096")}
        rows = run.measure(made, run.pairs([CASES[name] for name in names], shapes))
        # The host of a test is whatever it is.
        return [replace(row, value=10.0) if row.metric == "host time" else row for row in rows]


def test_the_roofline_is_drawn_from_rows(sample_rows):
    (found,) = results_of(sample_rows).values()
    text = plots.svg(roofline(found))
    for word in (
        "quantize.fp8_rowwise",
        "swiglu.fp8_rowwise",
        "fastest baseline",
        "target",
        "copy",
        "16384x14336",
    ):
        assert f"{word}</text>" in text.replace("\n", ""), word
    assert "small.fp8_rowwise" not in text
    slow = [replace(row, value=0.2) if row.metric == "fraction" else row for row in sample_rows]
    (below,) = results_of(slow).values()
    assert "below a target" in plots.svg(roofline(below))
    assert "below a target" not in text
    plots.svg(roofline([]))


def test_the_roof_is_the_copies(sample_rows):
    (found,) = results_of(sample_rows).values()
    ok = [line for line in found if line.ok and line.shape in LARGE]
    roof = roof_of(ok)
    assert [size for size, _ in roof] == [2 * 2 * 64 * 512 / 1e9]
    assert (
        min(line.values["copy rate"] for line in ok)
        <= roof[0][1]
        <= max(line.values["copy rate"] for line in ok)
    )


def test_the_page_shows_misses_and_slow_rows(sample_rows, tmp_path):
    slow = [
        replace(row, value=0.2) if row.metric == "fraction" and row.method == "quantize.mxfp4.packed" else row
        for row in sample_rows
    ]
    slow = [
        replace(row, value=0.5) if row.metric == "ratio" and row.setting.startswith("quantize.fp8") else row
        for row in slow
    ]
    places = Paths(tmp_path / "cache", tmp_path / "reports")
    publish(places.rows("kernels"), slow)
    assert len(read(places.rows("kernels"))) == len(slow)
    from experiments.report.pages import write_pages

    write_pages(places)
    text = (places.reports / "kernels.md").read_text()
    assert "**Missed targets: 4.**" in text
    assert "quantize.mxfp4.packed at 16384x4096 (fraction 0.2 of 0.9)" in text
    assert "swiglu.fp8_rowwise at 16384x14336 (wrong: codes" in text
    assert "**Slower than a baseline: 2.**" in text
    assert "SLOWER than torch eager" in text
    assert "(figures/kernels-roofline.svg)" in text
    assert "(figures/kernels-operations.svg)" in text
    assert (places.figures / "kernels-roofline.svg").exists()
    assert "(kernels.md)" in (places.reports / "README.md").read_text()


def test_tables_name_the_rows_of_their_lines(sample_rows):
    floors, baselines, *_ = page.sections(sample_rows)
    assert {row.method for row in floors.tables[0].rows} >= {"quantize.fp8_rowwise"}
    assert baselines.tables[0].rows


def test_what_did_not_run_is_not_measured_and_a_wrong_result_is_a_miss():
    target = Target("fraction", None, 0.9, **SHOWN)
    failed, wrong = (
        CaseResult("compress", "8x8", status, {}, (target,))
        for status in ("error: AcceleratorError: CUDA error: stopped Search for `x' in y", "wrong: codes")
    )
    assert (failed.missed, failed.verdict) == ([], "not measured: CUDA error: stopped")
    assert wrong.verdict == "MISSED: wrong: codes"
    first, second = page.missed_paragraphs([failed, wrong])
    assert first == "**Missed targets: 1.** compress at 8x8 (wrong: codes)."
    assert second == "**Not measured: 1.** compress at 8x8 (CUDA error: stopped)."


def test_a_miss_by_little_shows_enough_digits():
    assert str(Target("speedup", 1.7958, 1.8, **SHOWN)) == "speedup 1.796 of 1.8"


def test_list_needs_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench-kernels", "--list", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [case["name"] for case in shown] == list(CASES)
    assert shown[0]["targets"] == {"fraction": 0.95}
    assert main(["bench-kernels", "dequantize.mxfp4", "--list"]) == 0
    assert "dequantize.mxfp4.packed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench-kernels"], "ao-lab doctor"),
        (["bench-kernels", "mxfp4", "--shape", "16384x4096"], "ao-lab doctor"),
        (["bench-kernels", "mxfp5"], "mxfp4"),
        (["bench-kernels", "--shape", "large"], "ROWSxCOLUMNS"),
        (["bench-kernels", "small", "--shape", "16384x4096"], "none of these"),
    ],
)
def test_without_a_gpu_bench_is_one_line_and_code_2(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_reproduce_without_a_gpu_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    monkeypatch.setenv("AO_LAB_REPORTS", str(tmp_path))
    assert main(["reproduce", "kernels"]) == 1
    assert "torch sees none" in capsys.readouterr().err


def test_bench_shows_what_it_measured(monkeypatch, capsys, tmp_path, sample_rows):
    (found,) = results_of(sample_rows).values()
    monkeypatch.setattr(command, "has_device", lambda: True)
    monkeypatch.setattr(command, "part", lambda work, with_baselines: found if with_baselines else [])
    assert main(["bench-kernels", "mxfp4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["lines"]
    assert shown[0]["case"] == found[0].case
    assert main(["bench-kernels", "mxfp4"]) == 0
    assert "MISSED" in capsys.readouterr().out
    assert main(["bench-kernels", "mxfp4", "--no-baselines", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lines"] == []


def test_a_complete_run_is_published(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "CASES", {name: CASES[name] for name in ("quantize.mxfp4", "small.fp8_rowwise")})
    for name in SHAPES:
        monkeypatch.setitem(SHAPES, name, (64, 512))
    made = bench(tmp_path)
    monkeypatch.setattr(command, "settings_for", lambda *arguments: replace(made.settings, scale="full"))
    monkeypatch.setattr(run, "CudaWatch", FakeWatch)
    monkeypatch.setattr(run, "PLAN", made.plan)
    monkeypatch.setattr(run, "host_times", lambda calls, *arguments, **options: dict.fromkeys(calls, 1e-6))
    # Calls from JAX have a test of their own, of a size for a CPU.
    monkeypatch.setattr(run, "installed", lambda: False)
    monkeypatch.setitem(__import__("sys").modules, "fast", reference)
    places = Paths(tmp_path / "cache", tmp_path / "reports")
    found, written = command.complete(with_baselines=False, paths=places)
    assert {line.case for line in found} == {"quantize.mxfp4", "small.fp8_rowwise"}
    assert all(line.ok for line in found)
    assert {row.table for row in read(places.rows("kernels"))} == {"kernels/full/random-normal"}
    assert (places.reports / "kernels.md").exists()
    assert any("kernels.csv.gz" in where for _, where in written)


# The list of targets, written down once more: (names, fraction of the copy rate).
FRACTIONS = {
    0.95: [
        *(f"quantize.{name}" for name in ("fp8_rowwise", "fp8_1x128", "mxfp8_e4m3", "mxfp8_e4m3_rceil")),
        *(f"quantize.{name}" for name in ("int8_rowwise", "int4_g32", "int4_g128")),
        "fake_quantize.int4_g32",
    ],
    0.92: [
        *(f"dequantize.{name}" for name in ("fp8_rowwise", "mxfp8_e4m3", "int4_g128", "int8_rowwise")),
        *(f"dequantize.{name}.packed" for name in ("mxfp4", "nvfp4")),
        "quantize.fp8_tensorwise",
    ],
    0.90: [
        *(f"quantize.{name}.packed" for name in ("mxfp6_e2m3", "mxfp6_e3m2", "mxfp4")),
        "both.fp8_tensorwise.given",
        *(
            "prune.bfloat16",
            "prune.bfloat16.4of8",
            "compress.bfloat16",
            "compress.float8_e4m3fn",
            "decompress.bfloat16",
        ),
        *("quantize_compressed.fp8_rowwise", "compress_transposable.bfloat16"),
    ],
    0.85: [
        "quantize.nvfp4.packed.given",
        "quantize.nvfp4.packed",
        "both.mxfp8_e4m3",
        *(
            f"{operation}.{name}"
            for operation in ("rms_norm", "swiglu")
            for name in ("fp8_rowwise", "mxfp8_e4m3")
        ),
    ],
}


def fraction_of(case):
    """The target of the fraction of the copy rate, if the case has one."""
    return next((target.limit for target in case.targets if target.name == "fraction"), None)


def test_every_target_has_its_case():
    stated = {name: limit for limit, names in FRACTIONS.items() for name in names}
    # Weights are quantized by HQQ once, with scales that are searched: no target.
    stated |= {c.name: 0.85 for c in convention_cases() if not c.name.startswith("quantize.hqq.")}
    found = {name: fraction_of(case) for name, case in CASES.items() if fraction_of(case)}
    assert found == stated
    for name in stated:
        assert set(LARGE) <= set(CASES[name].shapes)


def test_targets_that_are_no_fraction():
    faster = Target("speedup over unfused", None, 1.8, **SHOWN)
    fused = [name for name, case in CASES.items() if faster in case.targets]
    assert fused == [
        f"{operation}.{name}"
        for operation in ("rms_norm", "swiglu")
        for name in ("fp8_rowwise", "mxfp8_e4m3")
    ]
    small = CASES["small.fp8_rowwise"]
    assert small.targets == (
        Target("time over elementwise", None, 1.2, at_least=False, **SHOWN),
        Target("host time", None, 15.0, at_least=False, **SHOWN),
    )
    assert (small.shapes, small.host, list(small.beside)) == (("16x4096",), True, ["elementwise"])


def test_every_family_of_the_house_appears():
    found = {family(case.scheme) for case in CASES.values() if case.scheme in SCHEMES}
    assert found == set(FAMILIES) - {"plain"}
    bases = {
        name.removesuffix("_rceil").removesuffix("_asymmetric").split("_g")[0]
        for name in SCHEMES
        if "." not in name
    } - {f"fp8_{block}_e5m2" for block in ("tensorwise", "1x128", "128x128")}
    assert bases - {case.scheme.split("_g")[0] for case in CASES.values()} == set()
    operations = {case.operation for case in CASES.values()}
    assert {"encode", "decode", "pack", "unpack", "stochastic", "fake_quantize_vjp"} <= operations
    assert sum("axis0" in name for name in CASES) >= 3


def test_more_than_2_31_elements_are_measured():
    rows, columns = SHAPES["524289x4096"]
    assert rows * columns == 2**31 + 4096
    assert sum("524289x4096" in case.shapes for case in CASES.values()) >= 3


def test_names_are_chosen_by_parts():
    assert [case.name for case in chosen(["small"])] == [
        "small.fp8_rowwise",
        "small.mxfp8_e4m3",
        "small.int4_g32",
    ]
    assert [case.name for case in chosen(["dequantize.mxfp4"])] == ["dequantize.mxfp4.packed"]
    assert len(chosen([])) == len(CASES)
    with pytest.raises(ValueError, match="mxfp4"):
        chosen(["mxfp5"])


@pytest.mark.parametrize(
    ("name", "per_element"),
    [
        ("quantize.fp8_rowwise", 2 + 1 + 4 / 4096),
        ("quantize.fp8_1x128", 2 + 1 + 4 / 128),
        ("quantize.mxfp8_e4m3", 2 + 1 + 1 / 32),
        ("quantize.mxfp6_e2m3.packed", 2 + 0.75 + 1 / 32),
        ("quantize.mxfp4.packed", 2 + 0.5 + 1 / 32),
        ("quantize.nvfp4.packed.given", 2 + 0.5 + 1 / 16),
        ("quantize.nvfp4.packed", 4 + 0.5 + 1 / 16),
        ("quantize.fp8_tensorwise", 5),
        ("quantize.int4_g32", 2 + 1 + 4 / 32),
        ("quantize.int8_rowwise_asymmetric", 2 + 1 + 5 / 4096),
        ("quantize.nf4", 2 + 1 + 1 / 64 + 4 / 64 / 256),
        ("quantize.fp8_128x128", 2 + 1 + 4 / 128 / 128),
        ("quantize.fp8_rowwise.axis0", 2 + 1 + 4 / 16384),
        ("quantize.mxfp8_e4m3.stochastic", 2 + 4 + 1 + 1 / 32),
        ("fake_quantize.int4_g32", 4),
        ("fake_quantize_vjp.int4_g32", 6),
        ("dequantize.mxfp4.packed", 0.5 + 1 / 32 + 2),
        ("both.fp8_tensorwise.given", 4),
        ("both.mxfp8_e4m3", 4 + 2 / 32),
        ("rms_norm.fp8_rowwise", 3 + 4 / 4096 + 2 / 16384),
        ("rms_norm.fp8_rowwise.residual", 7 + 4 / 4096 + 2 / 16384),
        ("swiglu.mxfp8_e4m3", 5 + 1 / 32),
        ("pack.float6_e2m3fn", 1.75),
        ("unpack.float4_e2m1fn", 1.5),
        ("decode.float8_e4m3fn", 5),
        ("prune.bfloat16", 3),
        ("compress.bfloat16", 2 + 1 + 1 / 8),
        ("compress.float8_e4m3fn", 1 + 0.5 + 1 / 8),
        ("decompress.bfloat16", 2 + 1 + 1 / 8),
        ("quantize_compressed.fp8_rowwise", 2 + 0.5 + 1 / 8 + 4 / 4096),
        ("compress_transposable.bfloat16", 2 + 2 + 2 / 8),
    ],
)
def test_floors_by_hand(name, per_element):
    # A scale of the whole tensor is 4 bytes in 67 million elements.
    assert CASES[name].moved_per_element((16384, 4096)) == pytest.approx(per_element, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("quantize.")])
def test_floors_are_the_bytes_of_what_is_stored(name):
    case = CASES[name]
    inputs = case.make(reference, SHAPE, "cpu", 0)
    q = case.call(reference, inputs)
    stored = sum(part.nbytes for part in (q.codes, q.scale, q.outer, q.zero) if part is not None)
    readings = 2 if per_tensor(case) else 1
    words = inputs["words"].nbytes if "words" in inputs else 0
    center = 4 if case.scheme.endswith("nf4") else 0  # the mean of the scales, which the floor leaves out
    assert case.moved(SHAPE) == readings * inputs["x"].nbytes + words + stored - center
    assert case.read(SHAPE) == inputs["x"].nbytes


@pytest.mark.parametrize("name", [case.name for case in of_sparsity()])
def test_floors_of_sparsity_are_the_bytes_of_what_is_stored(name):
    case = CASES[name]
    inputs = case.make(reference, SHAPE, "cpu", 0)
    given = [part for value in inputs.values() for part in (value if isinstance(value, tuple) else (value,))]
    made = case.call(reference, inputs)
    parts = [
        part
        for each in (made if isinstance(made, tuple) else (made,))
        for part in (each if isinstance(each, tuple) else (each,))
    ]
    assert case.moved(SHAPE) == sum(part.nbytes for part in (*given, *parts))


def per_tensor(case):
    scheme = SCHEMES.get(case.scheme)
    if scheme is None or case.options.get("given"):
        return False
    outer = scheme.outer is not None and scheme.outer.statistic == "absmax_elements"
    return outer or scheme.scale.block == "tensor"


def test_fractions():
    # 3 bytes in 1 s where a copy moves 4 a second.
    assert floors.fraction(3.0, 1.0, 4.0) == 0.75


def test_rows_of_a_case(tmp_path):
    rows = measured(tmp_path, ["rms_norm.fp8_rowwise"])
    values = values_of(rows, "rms_norm.fp8_rowwise")
    assert {row.setting for row in rows} == {"256x512"}
    # The fake watch gives the n-th call n times the first one's time: ours, unfused, copy.
    assert values["speedup over unfused"] == pytest.approx(2.0)
    copy = 2 * 2 * 256 * 512 / (3 * values["time"] / 1e6)
    assert values["copy rate"] == pytest.approx(copy / 1e12)
    moved = CASES["rms_norm.fp8_rowwise"].moved(SHAPE)
    assert values["fraction"] == pytest.approx(moved / (values["time"] / 1e6) / copy)
    assert values["status: ok"] == 1
    # Targets are stated for the shapes of the list.
    assert not any(metric.startswith("target") for metric in values)


def test_targets_are_rows_and_judged(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "16384x4096", SHAPE)
    case = CASES["quantize.fp8_rowwise"]
    rows = run.measure(bench(tmp_path), run.pairs([case], {"16384x4096": SHAPE}))
    assert values_of(rows, case.name)["target: fraction"] == 0.95
    ((line,),) = results_of(rows).values()
    assert line.verdict == "yes"
    slow = [replace(row, value=0.5) if row.metric == "fraction" else row for row in rows]
    ((line,),) = results_of(slow).values()
    assert line.verdict == "MISSED: fraction 0.5 of 0.95"


def test_less_is_better_for_times():
    small = Target("host time", None, 15.0, at_least=False, **SHOWN)
    assert replace(small, value=14.0).reached
    assert not replace(small, value=16.0).reached
    assert str(replace(small, value=16.0)) == "host time 16 of 15"
    assert small.reached is None


def test_host_time_is_measured_for_small_tensors(tmp_path):
    rows = run.measure(bench(tmp_path), run.pairs([CASES["small.fp8_rowwise"]], {"16x4096": (16, 4096)}))
    values = values_of(rows, "small.fp8_rowwise")
    assert values["host time"] > 0
    assert values["time over elementwise"] == pytest.approx(0.5)
    assert values["target: host time"] == 15.0


def test_what_a_layer_adds_on_the_host_is_measured(tmp_path):
    rows = run.measure(
        bench(tmp_path), run.pairs([CASES["linear.int8_rowwise.wrapped"]], {"16x512": (16, 512)})
    )
    values = values_of(rows, "linear.int8_rowwise.wrapped")
    assert {"host time", "host time, added"} <= set(values)


def test_missing_functions_are_rows(tmp_path):
    old = types.SimpleNamespace(quantize=lambda x, scheme: None)
    rows = measured(tmp_path, ["quantize.mxfp4.packed", "both.mxfp8_e4m3"], fast=old)
    assert values_of(rows, "quantize.mxfp4.packed") == {"status: missing: fast has no quantize:packed": 0}
    assert values_of(rows, "both.mxfp8_e4m3") == {"status: missing: fast has no quantize_both": 0}


def test_an_error_is_a_row_and_ends_nothing(tmp_path):
    def fail(values):
        raise RuntimeError("out of\nregisters")

    rows = measured(
        tmp_path, ["fake_quantize.int4_g32", "quantize.mxfp4"], fast=broken("fake_quantize", fail)
    )
    assert values_of(rows, "fake_quantize.int4_g32") == {"status: error: RuntimeError: out of registers": 0}
    assert values_of(rows, "quantize.mxfp4")["status: ok"] == 1


def test_finished_cases_are_not_measured_again_and_failed_ones_are(tmp_path):
    path, names = tmp_path / "journal.csv", ["quantize.mxfp4", "fake_quantize.int4_g32"]
    work = run.pairs([CASES[name] for name in names], TINY)
    run.measure(bench(tmp_path, fast=broken("fake_quantize", lambda y: -y)), work, Journal(path))
    watch = FakeWatch()
    rows = run.measure(bench(tmp_path, watch=watch), work, Journal(path))
    assert len(watch.captured) == 2  # ours and the copy, of the one that was wrong
    assert [row.method for row in rows if row.metric == "status: ok"] == names


def test_shapes_of_the_list_belong_to_the_cases_that_name_them():
    found = run.pairs(list(CASES.values()))
    assert ("quantize.fp8_rowwise", "524289x4096") in {(case.name, name) for case, name, _ in found}
    assert {case.name for case, name, _ in found if name == "16x4096"} == {
        name for name in CASES if name.startswith("small.")
    }
    assert not any(case.operation == "small" for case, _, _ in run.pairs(list(CASES.values()), TINY))


def test_a_figure_of_bandwidth_is_red_where_its_own_target_is_missed():
    """Another target, such as speed over unfused kernels, is no matter of its axis."""
    speed, fraction = Target("speedup over unfused", 1.7, 1.8), Target("fraction", 0.98, 0.85)
    line = CaseResult("swiglu.mxfp8", "16384x4096", "ok", {"fraction": 0.98}, (speed, fraction))
    assert line.missed
    assert not line.below
    assert replace(line, targets=(replace(fraction, value=0.8),)).below
