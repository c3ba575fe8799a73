"""Findings of made-up rows: which run, what is beyond the margin, missing seeds, the best rate, distances from bfloat16."""

from dataclasses import replace

from experiments.fp8_training import faults, page
from experiments.harness.rows import Row

FACTS = {"experiment": "fp8_training", "unit": "", "device": "a GPU"}
HELD, OTHER = "bits per byte, heldout", "bits per byte, wiki"


def row(kind, setting, method, metric, value, seed=0):
    return Row(
        table=f"{kind}/full/d", setting=setting, method=method, metric=metric, value=value, seed=seed, **FACTS
    )


def gap_rows(method, metric, mean, half, seeds):
    ends = {"": mean, ", 95% interval": half, ", seeds": seeds}
    return [row("gaps", "30m", method, f"gap, {metric}{end}", value) for end, value in ends.items()]


def test_gaps_are_of_held_out_text_and_of_others_where_they_are_beyond_the_margin():
    rows = [
        *gap_rows("rowwise", HELD, 0.1, 0.2, 5), *gap_rows("rowwise", OTHER, 1.0, 2.0, 5),
        *gap_rows("nvfp4", HELD, 0.7, 0.1, 3), *gap_rows("nvfp4", OTHER, 3.0, 0.5, 3),
        *gap_rows("nvfp4", f"{OTHER}/one", 9.0, 0.5, 3),
    ]  # fmt: skip
    first, second = page.of_trainings(rows)
    assert first.endswith(
        "rowwise +0.10 ± 0.20% (within the margin); nvfp4 +0.70 ± 0.10% (beyond the margin, 3 of 5 seeds)."
    )
    assert second == "Beyond the margin on wiki, full scale, a GPU, d: nvfp4 +3.00 ± 0.50% (3 of 5 seeds)."


def test_bfloat16_on_another_device_says_what_one_base_can_say():
    rows = gap_rows("rowwise", HELD, 0.1, 0.2, 5)
    losses = {"a GPU": (1.0, 2.0, 4.0), "another": (1.01, 2.02, 4.04)}
    rows += [
        replace(row("paired", "30m", "bfloat16", HELD, value, seed), device=device)
        for device, values in losses.items()
        for seed, value in enumerate(values)
    ]
    _, sentence = page.of_trainings(rows)
    assert sentence.startswith("bfloat16 against itself, the same seeds and text on another: +1.00 ± 0.00%.")
    # One seed alone has no interval; another text is another training.
    assert len(page.of_trainings([one for one in rows if one.device == "a GPU" or one.seed == 0])) == 1
    others = [replace(one, table="paired/full/e") if one.device == "another" else one for one in rows]
    assert len(page.of_trainings(others)) == 1


def test_the_best_rate_of_each_size_is_by_held_out_text():
    bits = {"0.001": 1.9, "0.0001": 1.8, "0.0002": 1.7}
    rows = [row("sweep", "30m", f"bfloat16, rate {rate}", HELD, value) for rate, value in bits.items()]
    (sentence,) = page.of_trainings(
        [*rows, *(row("sweep", "30m", one.method, OTHER, -one.value) for one in rows)]
    )
    assert sentence.endswith("30m: 0.0002 (0.0001: 1.800; 0.0002: 1.700; 0.001: 1.900).")


def test_the_larger_model_is_compared_with_bfloat16():
    rows = [
        row("long", "120m", name, HELD, value) for name, value in {"bfloat16": 2.0, "mxfp8": 2.02}.items()
    ]
    (sentence,) = page.of_trainings([*rows, row("long", "120m", "mxfp8", "tokens a second", 5e5)])
    assert sentence.endswith(
        "bfloat16 2.0000 bits per byte held out; mxfp8 2.0200 bits per byte held out, +1.00%, 500 thousand tokens a second."
    )
    assert "+" not in page.of_trainings(rows[1:])[0]
    others = [
        row("long", "120m", name, OTHER, value) for name, value in {"bfloat16": 3.0, "mxfp8": 3.3}.items()
    ]
    (sentence,) = page.of_trainings([*others, *rows])
    assert sentence.endswith("mxfp8 2.0200 bits per byte held out, +1.00% (+10.0% on wiki).")


def test_faults_are_compared_with_the_training_without_one():
    rows = [
        row(faults.KIND, "30m", "a fault", HELD, 2.1),
        row(faults.KIND, "30m", faults.HEALTHY, HELD, 2.0),
    ]
    assert page.of_trainings(rows)[0].endswith("a fault +5.00%.")
    assert page.of_trainings(rows[:1]) == []
