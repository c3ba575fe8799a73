"""The page of experiment `decode`: published values beside the real shapes alone, and missed targets."""

from dataclasses import replace

import pytest

from experiments.decode import page as decode_page
from experiments.decode.methods import CONFIGS, OUR_CONFIGS
from experiments.decode.page import missed, published_speedup
from experiments.harness.paths import Paths
from experiments.harness.rows import Row, publish, read
from experiments.report import pages
from experiments.report.results import Results, decoding, published
from experiments.runs import run as harness

SPEEDS = {"int8wo": 1.6, "float8wo": 1.3, "int4wo-64": 2.0}


def row(setting, method, metric, value, data="llama-3.1-8b-random", beside=None):
    return Row(
        experiment="decode",
        table=f"decode/full/{data}",
        setting=setting,
        method=method,
        metric=metric,
        value=value,
        unit="",
        published=beside,
        device="a GPU",
        seed=0,
    )


def rows(data="llama-3.1-8b-random", beside=True):
    made = []
    for config in CONFIGS:
        if config.method == "nvfp4wo":
            made.append(row(config.setting, config.method, "status: error: Oops", 0.0, data))
            continue
        speed = SPEEDS.get(config.method, 1.0) * (1.1 if config.setting == "torchao" else 1.0)
        values = {
            "status: ok": 1.0,
            "tokens/s": 200 * speed,
            "speedup over bfloat16": speed,
            "model size": 4.1 if "4" in config.method else 7.51,
            "peak memory": 9.0,
            "quantize time": 2.0,
            "quantize peak memory": 1.2 if config.method == "int8dq" else 1.05,
        }
        given = published(config.method) if beside else {}
        made += [
            row(config.setting, config.method, metric, value, data, given.get(metric))
            for metric, value in values.items()
        ]
    return made


def test_published_ratios_are_those_of_the_paper():
    ratios = {"int8wo": 1.57, "float8wo": 1.41, "int4wo-64": 1.90, "float8dq per-row": 1.22}
    assert {method: round(published_speedup(method), 2) for method in ratios} == ratios
    assert published("int4wo-64")["model size"] == 4.22
    assert published_speedup("int8dq") is None
    assert published("int8dq", "Llama-3-8B", "A100-80GB")["tokens/s"] == 8.61
    assert all(one.source for one in decoding())


def test_missed_targets():
    results = Results(rows())
    assert missed(results, "int8wo") == ["torchao's tokens/s 320 of 345"]
    assert missed(results, "float8wo") == ["published speedup 1.3 of 1.41", "torchao's tokens/s 260 of 280"]
    assert missed(results, "int8dq") == ["torchao's tokens/s 200 of 216", "peak of quantization 1.2 of 1.1"]
    assert missed(results, "nvfp4wo") == missed(results, "mxfp8wo") == []
    grown = [
        *rows(),
        row("ours", "int8wo", "model size", 7.60),
        row("ours", "int8wo", "tokens/s", 360.0),
    ]
    assert missed(Results(grown), "int8wo") == ["published size 7.6 of 7.595"]


def test_the_page_of_the_real_shapes():
    (section,) = decode_page.sections(rows())
    text = " ".join(section.paragraphs)
    assert text.startswith("**Missed targets: 6 configurations.** int8wo (torchao's")
    assert "**Not measured: 2.** nvfp4wo of ours (error: Oops)" in text
    assert "library products**" not in text
    speed, memory, beside = section.tables
    by_name = {tuple(line[:2]): dict(zip(speed.columns, line, strict=True)) for line in speed.lines}
    line = by_name["int4wo-64", "ours"]
    assert (line["published tokens/s (H100)"], line["published over bfloat16"]) == ("241.4", "1.90")
    assert by_name["mxfp8wo", "ours"]["published tokens/s (H100)"] == ""
    assert by_name["nvfp4wo", "ours"]["tokens/s"] == ""
    assert [line[:2] for line in speed.lines[:2]] == [
        ["bfloat16", "baseline"],
        ["bfloat16, library products", "baseline"],
    ]
    pairs = [line[:2] for line in speed.lines]
    assert pairs.index(["int8wo", "torchao"]) == pairs.index(["int8wo", "ours"]) + 1
    line = next(line for line in memory.lines if line[:2] == ["int8wo", "ours"])
    assert line[2:6] == ["7.510", "7.52", "9.000", "11.05"]
    assert ["int8dq", "Llama-3-8B", "A100-80GB", "8.61", "0.09"] in [line[:5] for line in beside.lines]
    assert len(section.drawings) == 1


def test_the_fastest_bfloat16_is_said():
    text = " ".join(decode_page.sections(rows())[0].paragraphs)
    assert "**The fastest bfloat16 is 'bfloat16', 200.0 tokens/s**" in text
    (section,) = decode_page.sections(with_rates({"bfloat16, library products": 250.0}))
    assert "**The fastest bfloat16 is 'bfloat16, library products', 250.0 tokens/s**" in section.paragraphs[1]
    speed = section.tables[0]
    lines = {tuple(line[:2]): dict(zip(speed.columns, line, strict=True)) for line in speed.lines}
    assert lines["int4wo-64", "ours"]["over the fastest"] == "1.60"


def with_rates(rates):
    """Rows with other tokens a second of some forms of bfloat16."""
    kept = [one for one in rows() if one.metric != "tokens/s" or one.method not in rates]
    return kept + [row("baseline", form, "tokens/s", rate) for form, rate in rates.items()]


def test_targets_are_compared_with_the_fastest_bfloat16():
    """Its fastest form, or the baseline as it ran beside any configuration."""
    assert len(missed(Results(with_rates({"bfloat16": 203.0})), "int8wo")) == 1
    for slow in (
        {"bfloat16": 205.0},
        {"bfloat16, library products": 205.0},
        {"bfloat16, dependent launches": 205.0},
    ):
        assert missed(Results(with_rates(slow)), "int8wo")[0].startswith("published speedup")
    beside = [*rows(), row("ours", "mxfp8wo", "bfloat16 before", 205.0)]
    assert missed(Results(beside), "int8wo")[0].startswith("published speedup")


def test_a_stand_in_is_beside_no_published_value():
    (section,) = decode_page.sections(rows("tiny-stand-in-random", beside=False))
    assert "stand-in" in section.title
    assert "**A stand-in**" in section.paragraphs[0]
    assert not section.drawings
    assert not any("published" in column for column in section.tables[0].columns)
    words = " ".join(cell for table in section.tables for line in table.lines for cell in line)
    assert "11.05" not in words
    assert "241.4" not in words


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    places = Paths(folder / "cache", folder / "reports")
    older = row("ours", "nvfp4wo", "tokens/s", 1.0, "tiny-stand-in-random")
    older = replace(older, table=older.table.replace("full", "quick"), device="cpu")
    publish(places.data / "decode.csv", [older])
    made = harness.reproduce(["decode"], "quick", "cpu", places, only=["int8wo", "bfloat16"])
    assert older in read(places.data / "decode.csv")
    return places, made


def test_a_part_is_reproduced_from_the_command(reproduced):
    places, made = reproduced
    assert any("of them measured now" in what for what, _ in made)
    page = (places.reports / "decode.md").read_text()
    assert "A tiny stand-in (quick scale, cpu, tiny-stand-in-random)" in page
    assert set(OUR_CONFIGS) & set(page.split()) == {"int8wo", "nvfp4wo"}


def test_rows_of_several_runs_are_told_apart():
    mixed = [
        replace(one, commit="0832d6b6") if one.method in ("int8dq", "nvfp4wo") else one for one in rows()
    ]
    words = " ".join(decode_page.sections(mixed)[0].paragraphs)
    assert "**Not all at one commit**" in words
    assert "nvfp4wo of ours (error: Oops)" in words
    assert "Not all at one commit" not in " ".join(decode_page.sections(rows())[0].paragraphs)


def test_the_figure_is_drawn():
    (section,) = decode_page.sections(rows())
    picture = pages.svg(section.drawings[0].figure)
    assert "published (torchao), H100" in picture
    assert "int4wo-64" in picture


def test_comparisons_and_findings():
    found = decode_page.comparisons(rows())
    one = next(one for one in found if (one.method, one.metric) == ("int8wo", "tokens/s"))
    assert (one.model, one.published, one.published_on, one.measured, one.measured_on) == (
        "Llama-3.1-8B",
        198.85,
        "H100",
        320.0,
        "a GPU",
    )
    assert one.ratio == pytest.approx(320 / 198.85)
    assert {
        one.measured
        for one in found
        if one.model != "Llama-3.1-8B" or one.metric == "wikitext word perplexity"
    } == {None}
    speedup = next(
        one for one in found if one.metric == "tokens/s over bfloat16" and one.method == "int4wo-64"
    )
    assert (round(speedup.published, 2), speedup.measured) == (1.90, 2.0)
    told = decode_page.findings(rows())
    assert "int8wo generates 320 tokens/s on an a GPU" in told[0]
    assert "(published: 1.57 times, on an H100)" in told[0]
    assert decode_page.findings(rows("tiny-stand-in-random", beside=False)) == []
