"""The first page: headlines with number, device and date, a line for each experiment, and no more than is read in a minute."""

import re

import pytest

from experiments.harness.paths import Paths
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import ROOT, Row, read
from experiments.report import pages
from experiments.report.content import Headline, headlines_of

REPORTS = ROOT / "reports"
PAGE = (REPORTS / "README.md").read_text()
MOST_BYTES, HEADLINES = 12_000, 10
#: All but those whose rows take long to read.
SMALL = ("decode", "fp8_training", "generate", "kernels", "qat", "qat_overhead", "sparsity", "speed")


def row(value, device="NVIDIA H200", date="2026-11-26T10:00:00Z"):
    return Row(
        experiment="linear", table="weights/full/x", setting="1 row", method="int4", metric="time", value=value, unit="us",
        device=device, seed=0, date=date,
    )  # fmt: skip


def test_a_headline_has_the_values_device_and_days_of_its_rows():
    (found,) = headlines_of(
        "int4 takes {a:.1f} us, int8 {b:.1f}", a=row(10.52), b=row(15.6, date="2026-11-27T")
    )
    assert str(found) == "int4 takes 10.5 us, int8 15.6 (NVIDIA H200, 2026-11-26 to 2026-11-27)."
    assert headlines_of("{a} {b}", a=row(1.0), b=None) == []
    assert str(Headline("x", [row(1.0, date="")])) == "x (NVIDIA H200)."


def test_the_first_page_is_short():
    assert len(PAGE.encode()) <= MOST_BYTES
    headlines = re.findall(r"^- .+ \((?:NVIDIA .+|cpu), \d{4}-.+\)\. \[\w+\]\(\w+\.md\)$", PAGE, re.MULTILINE)
    assert len(headlines) == HEADLINES
    assert all(re.search(r"\d", one) for one in headlines)
    for name in EXPERIMENTS:
        if Paths.default(REPORTS).rows(name).exists():
            assert f"| {EXPERIMENTS[name].page_module().QUESTION} | " in PAGE
            assert PAGE.count(f" | [{name}]({name}.md) | ") == 1


@pytest.mark.parametrize("name", SMALL)
def test_headlines_are_of_the_committed_rows(name):
    module, rows = EXPERIMENTS[name].page_module(), read(Paths.default(REPORTS).rows(name))
    for headline in pages.optional(module, "headlines", rows):
        assert f"- {headline} [{name}]({name}.md)" in PAGE
    said = module.main_finding(rows)
    assert f"| {said[:1].upper()}{said[1:]} | [{name}]" in PAGE
