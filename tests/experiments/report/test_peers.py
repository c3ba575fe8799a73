"""Comparisons whose peer has no value are listed, with the reason that rows give and a command."""

import shlex

import typer

from ao_lab.cli.app import app
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import Row
from experiments.report.peers import EXPECTED, missing, peer_of


def row(method, metric, value=1.0, setting="128 rows", device="cpu"):
    return Row(experiment="linear", table="torchao/quick/layer", setting=setting, method=method, metric=metric, value=value,
               unit="", device=device, seed=0)  # fmt: skip


def lines(*rows):
    return [line for line in missing({"linear": rows}).lines if line[0] == "linear"]


def test_a_peer_without_a_value_is_listed_with_its_reason():
    absent = row("torchao int8wo", "status: missing: torchao is not installed")
    command = "`ao-lab reproduce linear --scale quick --device cpu --changed`"
    assert lines(absent) == [
        ["linear", "torchao", "torchao, quick", "cpu", "1", "1", "missing: torchao is not installed", command]
    ]
    other = [row("torchao int4wo", "time", 2.0), row("torchao int4wo", "status: ok")]
    assert lines(absent, *other)[0][4:6] == ["1", "2"]
    assert lines(*other) == []


def test_a_later_value_of_the_same_comparison_counts():
    assert (
        lines(row("torchao int8wo", "status: not run: the time was over"), row("torchao int8wo", "time"))
        == []
    )


def test_an_expected_peer_without_any_row_is_listed():
    (line,) = lines(row("int8", "time"))
    assert (line[1], line[4], line[6]) == ("torchao", "all", "not run")
    assert {line[0] for line in missing({}).lines} == {one.experiment for one in EXPECTED}


def test_times_that_a_cpu_does_not_measure_are_no_missing_comparison():
    assert lines(row("torchao int8wo", "status: not run: times are of a GPU at full scale")) == []


def test_conventions_of_others_are_our_code():
    assert peer_of(row("quantize.torchao.nf4", "time")) == ""
    assert peer_of(row("torchao.nf4", "time")) == ""
    assert peer_of(row("after_torchao", "time")) == ""
    assert peer_of(row("ours", "time", setting="torchao")) == "torchao"
    assert peer_of(row("2:4, cuSPARSELt searched", "time")) == "cuSPARSELt"


def test_commands_are_taken_by_the_command_line():
    group = typer.main.get_command(app)
    for one in EXPECTED:
        assert one.experiment in EXPERIMENTS
        if one.command.startswith("ao-lab "):
            _, name, *words = shlex.split(one.command)
            command = group.get_command(group.make_context("ao-lab", [name], resilient_parsing=True), name)
            assert command.make_context(name, words).params["tables"] == [one.experiment]
