"""Targets of 2:4 sparsity, by rows by hand: published speeds, memory of a step, margins of what was trained on."""

import pytest

from experiments.harness.rows import Row
from experiments.models.encoders import VIT_L
from experiments.sparsity import encoders, products
from experiments.sparsity.page import targets_by_run

FACTS = {"unit": "", "device": "GPU", "seed": 0, "experiment": "sparsity", "date": "2026-11-27T"}


def row(table, setting, method, metric, value):
    return Row(table=table, setting=setting, method=method, metric=metric, value=value, **FACTS)


@pytest.mark.parametrize(("speed", "verdict"), [(1.26, "no"), (1.28, "yes")])
def test_layers_are_held_to_the_published_speed_as_a_graph(speed, verdict):
    table = "linear/full/13008x4096x1024"
    rows = [
        row(table, setting, products.LINEAR_OWN, "speed over dense", value)
        for setting, value in ((products.EAGER, 0.5), (products.GRAPH, speed))
    ]
    (run,) = targets_by_run(rows)
    (target,) = run.targets
    assert (target.limit, target.value, target.verdict, target.day) == (1.27, speed, verdict, "2026-11-27")
    assert (
        targets_by_run([row(table, products.GRAPH, products.LINEAR_OWN, "time", 1.0)])[0].targets[0].value
        is None
    )


def test_a_step_is_held_to_speed_and_memory():
    table, setting = f"{encoders.TRAINING}/full/{VIT_L.name}", encoders.training_setting()
    values = {
        (encoders.OWN, "speed over dense"): 1.04, (encoders.OWN, "peak memory"): 9.0, ("dense", "peak memory"): 10.0,
    }  # fmt: skip
    (run,) = targets_by_run([row(table, setting, *key, value) for key, value in values.items()])
    assert [(one.limit, one.value, one.verdict) for one in run.targets] == [
        (1.06, 1.04, "no"),
        (1.0, 0.9, "yes"),
    ]


def test_what_was_trained_on_is_held_to_the_margin_where_that_is_decided():
    gaps = {
        "one-shot, magnitude": (4.0, 0.5), "fine-tuned, fixed masks": (0.1, 0.1), "fine-tuned, SR-STE": (0.9, 0.9),
        "fine-tuned, SR-STE + int4": (2.0, 0.5),
    }  # fmt: skip
    rows = [
        row("vision gaps/full/collages", "vit", method, f"gap{end}", value)
        for method, (mean, half) in gaps.items()
        for end, value in (("", mean), (", 95% interval", half), (", seeds", 5.0))
    ]
    (run,) = targets_by_run(rows)
    assert [(one.name.partition(":")[0], one.verdict) for one in run.targets] == [
        ("fine-tuned, fixed masks", "yes"),
        ("fine-tuned, SR-STE + int4", "no"),
    ]
