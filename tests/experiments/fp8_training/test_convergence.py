"""The seam that watches a layer changes no bit; each fault is what it says, and counters show it."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import fast
from ao_lab import convert_for_training_
from experiments.fp8_training import blocks, convergence, convergence_page, page
from experiments.fp8_training import convergence_findings as findings
from experiments.fp8_training.convergence import (
    BAD,
    BEYOND,
    FAULTS,
    LOST,
    SATURATED,
    SCALE_STEP,
    SQNR,
    UNDECIDED,
    WITHIN,
    Fault,
    Gap,
    Watcher,
    counted,
    gap,
    plant,
)
from experiments.fp8_training.convergence_findings import RATE
from experiments.harness.rows import Row
from experiments.report.results import Results, Where
from reference.training.recipe import RECIPES

# Targets of made-up rows: limits, what is compared with what, what was not measured.

GPU = "a GPU"
EAGER, COMPILED = (blocks.blocks(2, compiled=one).setting for one in (False, True))


def results(*values):
    """Rows of (setting, method, metric, value)."""
    facts = {"experiment": "fp8_training", "table": "k/full/d", "unit": "", "device": GPU, "seed": 0}
    names = ("setting", "method", "metric", "value")
    return Results(Row(**dict(zip(names, one, strict=True)), **facts) for one in values)


def reached(found):
    return {one.name: one.verdict for one in found if one.value is not None}


def test_each_accumulation_has_its_limit():
    where = Where("full", GPU, "16384x4096x14336")
    values = [
        ("eager", f"ours, {name}", convergence_page.TIME_RATIO, 0.62)
        for name in ("rowwise", "rowwise, fast sums", "mxfp8")
    ]
    found = convergence_page.of_linear(where, results(*values))
    assert len(found) == 2 * 5
    assert reached(found) == {
        "ours, rowwise, fast sums, eager: time over bfloat16": "no",
        "ours, rowwise, eager: time over bfloat16": "yes",
        "ours, mxfp8, eager: time over bfloat16": "yes",
    }
    assert convergence_page.of_linear(Where("full", "cpu", where.data), results(*values)) == []
    assert convergence_page.verdict(found) == [
        "**Missed targets: 1 of 3, 7 more not measured.** ours, rowwise, fast sums, eager: time over bfloat16 0.620 of 0.6."
    ]
    rows = [replace(row, table=f"linear/full/{where.data}") for row in results(*values).rows]
    assert convergence_page.finding(rows) == [
        "Targets reached on a GPU: 2 of 3, 39 more not measured; of speed and memory alone 2 of 3, 39 more not measured."
    ]
    assert convergence_page.finding([replace(row, metric="other") for row in rows]) == []
    assert convergence_page.finding([]) == []
    assert convergence_page.verdict([one for one in found if one.reached]) == [
        "All 2 values that have a target meet it."
    ]
    assert convergence_page.verdict([one for one in found if one.value is None]) == [
        "None of the 7 targets was measured."
    ]
    assert convergence_page.verdict([]) == []
    (table,) = convergence_page.target_table(found)
    assert ["ours, mxfp8, eager: time over bfloat16", "0.620", "≤ 1.11", "yes"] in table.lines
    assert ["ours, mxfp8, CUDA graph: time over bfloat16", "", "≤ 1.11", ""] in table.lines


@pytest.mark.parametrize(("compiled", "verdict"), [(1.0, "yes"), (0.5, "no"), (None, "yes")])
def test_small_layers_are_compared_with_the_best_of_torchao(compiled, verdict):
    values = [("eager", "ours, rowwise", "time", 0.4), ("eager", "torchao, rowwise", "time", 0.9)]
    values += [] if compiled is None else [("eager", "torchao, rowwise, compiled", "time", compiled)]
    found = convergence_page.of_linear(Where("full", GPU, "2048x1024x1024"), results(*values))
    assert len(found) == 3
    assert reached(found) == {"ours, rowwise, eager: time over torchao's best": verdict}


def test_blocks():
    name, where = "ours, rowwise", Where("full", GPU, blocks.LLAMA_3_8B_TWO_LAYERS.name)
    times = {
        (EAGER, "bfloat16"): 13.0,
        (COMPILED, "bfloat16"): 12.0,
        (EAGER, name): 9.0,
        (COMPILED, name): 10.0,
    }
    values = [(*key, "time", value) for key, value in times.items()]
    values += [
        (COMPILED, name, convergence_page.SPEED_RATIO, 1.2),
        (EAGER, name, convergence_page.MEMORY_RATIO, 1.001),
    ]
    found = convergence_page.of_blocks(where, results(*values))
    assert len(found) == 4 * 4 + 2 * 2
    best, against, memory = (one for one in found if one.value is not None)
    # Eager is ours at its best, compiled bfloat16's.
    assert (best.value, best.verdict) == (12.0 / 9.0, "yes")
    assert (against.value, against.verdict) == (0.9, "yes")
    assert memory.verdict == "no"
    assert str(memory).endswith("1.001 of 1")
    assert convergence_page.of_blocks(Where("full", GPU, "another"), results(*values)) == []


def test_gaps_that_are_decided_have_a_target():
    """A gap whose interval holds the margin of 0.5 percent neither reaches nor misses it."""
    gaps = {"rowwise": (0.04, 0.2), "mxfp4": (2.4, 0.4), "nvfp4": (1.0, 0.6)}
    facts = {"experiment": "fp8_training", "table": "gaps/full/books", "unit": "%", "device": GPU, "seed": 0}
    rows = [
        Row(setting="30m", method=method, metric=f"gap, bits per byte, heldout{end}", value=value, date="2026-11-26T", **facts)
        for method, (mean, half) in gaps.items()
        for end, value in (("", mean), (", 95% interval", half), (", seeds", 5.0))
    ]  # fmt: skip
    (run,) = convergence_page.targets_by_run(rows)
    assert {one.name: (one.verdict, one.day) for one in run.targets} == {
        "rowwise, bits per byte, heldout (95% interval ± 0.20)": ("yes", "2026-11-26"),
        "mxfp4, bits per byte, heldout (95% interval ± 0.40)": ("no", "2026-11-26"),
    }
    assert convergence_page.targets_by_run([replace(row, table="gaps/quick/books") for row in rows]) == []


# Findings of made-up rows: which run, what is beyond the margin, missing seeds, the best rate, distances from bfloat16.

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
    assert second == "Beyond the margin on wiki, a GPU, d: nvfp4 +3.00 ± 0.50% (3 of 5 seeds)."


def test_bfloat16_on_another_device_says_what_one_base_can_say():
    rows = gap_rows("rowwise", HELD, 0.1, 0.2, 5)
    losses = {"a GPU": (1.0, 2.0, 4.0), "another": (1.01, 2.02, 4.04)}
    rows += [
        replace(row("paired", "30m", "bfloat16", HELD, value, seed), device=device)
        for device, values in losses.items()
        for seed, value in enumerate(values)
    ]
    _, sentence = page.of_trainings(rows)
    assert (
        "the same seeds and text on another differs from bfloat16 here by +1.00 ± 0.00% on held-out books:"
        in sentence
    )
    # One seed alone has no interval; another text is another training.
    assert len(page.of_trainings([one for one in rows if one.device == "a GPU" or one.seed == 0])) == 1
    others = [replace(one, table="paired/full/e") if one.device == "another" else one for one in rows]
    assert len(page.of_trainings(others)) == 1


def test_losses_are_told_of_each_text_and_of_single_trainings():
    """The first sentence has the text that is unlike the training text; a further one, of trainings of one seed, how far
    bfloat16 on two GPUs lies apart on each."""
    text = "bits per byte, wikitext2-test"
    rows = [
        *gap_rows("mxfp8", HELD, 0.1, 0.2, 5),
        *gap_rows("mxfp8", text, 3.0, 4.0, 5),
        *gap_rows("mxfp6", text, 6, 1, 5),
    ]
    losses = {"bfloat16": (2.0, 3.0), "mxfp8": (2.02, 3.6)}
    rows += [
        row("long", "120m", name, metric, value)
        for name, pair in losses.items()
        for metric, value in zip((HELD, text), pair, strict=True)
    ]
    first = page.findings(rows)[0]
    assert "on held-out books mxfp8 +0.10 ± 0.20%;" in first
    assert first.endswith("unlike the training text (undecided: mxfp8; beyond the margin: mxfp6).")
    again = [
        replace(one, device="another", value=1.1 * one.value) for one in rows if one.method == "bfloat16"
    ]
    (sentence,) = (one for one in page.findings([*rows, *again]) if "one seed" in one)
    assert "differs by 10.00% on held-out books and 10.00% on wikitext2-test." in sentence


def split(kind, method, seed, losses, device="cpu"):
    """Rows of a training whose loss was split: bits of `findings.SPLIT`, in order."""
    values = dict(zip(findings.SPLIT, losses, strict=True)) | {"share of rare bytes, wikitext2-test": 4.0}
    made = [row(kind, "micro", method, name, one, seed) for name, one in values.items()]
    return [replace(one, device=device) for one in made]


def test_rare_bytes_are_told_with_how_far_trainings_lie_apart_without_them():
    """Seeds of the base by the largest over the smallest loss, a recipe against the base of its own seed."""
    losses = {
        ("float32", 0): (4.0, 3.0, 3.0, 2.0),
        ("float32", 1): (4.4, 3.03, 3.0, 2.02),
        ("mxfp8", 0): (4.2, 3.0, 3.006, 2.002),
    }
    rows = [one for (name, seed), found in losses.items() for one in split("paired", name, seed, found)]
    (sentence,) = findings.rare_bytes(rows)
    assert sentence.startswith("4.0% of the bytes of wikitext2-test")
    assert "In trainings of micro (CPU, d) they are 31% of the loss there, and" in sentence
    seeds, recipe = sentence.partition(", and 2 seeds of float32 lie apart by ")[2].split("; ")
    assert re.findall(r"[\d.+-]+%", seeds) == ["10.0%", "1.0%", "0.0%", "1.0%"]
    assert recipe.startswith("mxfp8 differs from float32 by ")
    assert re.findall(r"[\d.+-]+%", recipe) == ["+5.0%", "+0.0%", "+0.2%", "+0.1%"]
    # A single training on a GPU whose loss was split is told in place of those of a CPU; one whose loss was not says so.
    longer = [
        *split("long", "bfloat16", 0, (2.0, 1.0, 1.0, 1.0), "gpu"),
        *split("long", "mxfp8", 0, (2.5, 1.01, 1.02, 1.001), "gpu"),
    ]
    (sentence,) = findings.rare_bytes([*rows, *longer])
    assert "In trainings of micro (gpu, d)" in sentence
    assert re.findall(r"[\d.+-]+%", sentence.partition("mxfp8")[2]) == ["+25.0%", "+1.0%", "+2.0%", "+0.1%"]
    whole = [one for one in longer if one.metric in (findings.SPLIT[0], findings.SPLIT[3])]
    (sentence,) = findings.rare_bytes([*rows, *whole])
    assert sentence.endswith("Losses of the longer trainings are not split yet.")
    assert findings.rare_bytes([one for one in rows if not one.metric.startswith("bits per common")]) == []


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


def test_two_trainings_of_a_model_are_one_speed_measured_twice(monkeypatch):
    """Their days stand beside both, and what disturbed one."""
    rates = {"60 MB": {"bfloat16": 5e5, "rowwise": 4e5}, "210 MB": {"bfloat16": 5e5, "rowwise": 6e5}}
    rows = [
        replace(row("long", f"120m, {size}", name, RATE, value), date="2026-11-26T08:35:52Z", commit="abc")
        for size, found in rates.items()
        for name, value in found.items()
    ]
    assert findings.speeds_found(rows) == [
        "Whole trainings (2026-11-26), speed over bfloat16's: rowwise 0.80 (120m, 60 MB) and 1.20 (120m, 210 MB)"
    ]
    (apart,) = findings.speeds_apart(rows)
    assert "one quantity measured twice" in apart
    assert "600 (120m, 210 MB, 2026-11-26 at abc), which nothing explains." in apart
    known = ("120m, 60 MB", "rowwise", rows[0].device, "abc")
    monkeypatch.setitem(findings.DISTURBED, known, "beside two other jobs on its host")
    assert "nothing explains" not in findings.speeds_apart(rows)[0]
    assert (
        findings.beside_card(rows, "rowwise") == "whole trainings 1.20x (120M parameters on 210 MB of text)"
    )
    alone = [row for row in rows if row.setting == known[0]]
    assert (
        "0.80x (120M parameters on 60 MB of text, beside two other jobs on its host)"
        in findings.beside_card(alone, "rowwise")
    )
    assert findings.speeds_apart(rows[:2]) == []


def test_the_larger_model_is_compared_on_other_texts():
    rows = [
        row("long", "120m", name, HELD, value) for name, value in {"bfloat16": 2.0, "mxfp8": 2.02}.items()
    ]
    others = [
        row("long", "120m", name, OTHER, value) for name, value in {"bfloat16": 3.0, "mxfp8": 3.3}.items()
    ]
    (sentence,) = page.of_trainings([*others, *rows])
    assert sentence.endswith("mxfp8 2.0200 bits per byte held out, +1.00% (+10.0% on wiki).")


def test_faults_are_compared_with_the_training_without_one():
    rows = [
        row(convergence.KIND, "30m", "a fault", HELD, 2.1),
        row(convergence.KIND, "30m", convergence.HEALTHY, HELD, 2.0),
    ]
    assert page.of_trainings(rows)[0].endswith("a fault +5.00%.")
    assert page.of_trainings(rows[:1]) == []


# Gaps over paired seeds: values by hand, the three verdicts, what cannot be compared.


def test_a_gap_is_paired_and_in_percent():
    # Gaps of 1%, 2% and 3%: mean 2, standard deviation 1, and Student's 4.3027 / sqrt(3).
    found = gap([1.0, 2.0, 4.0], [1.01, 2.04, 4.12])
    assert (found.mean, found.half, found.seeds) == (pytest.approx(2), pytest.approx(2.4842, abs=1e-4), 3)
    # Seeds that differ far more than recipes do not widen a paired interval.
    assert gap([1.0, 5.0, 9.0], [1.001, 5.005, 9.009]).half == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [
        (0.1, 0.3, WITHIN),
        (-3.0, 1.0, WITHIN),
        (0.4, 0.2, UNDECIDED),
        (0.9, 0.3, BEYOND),
        (0.5, 0.0, UNDECIDED),
    ],
)
def test_the_whole_interval_decides(mean, half, verdict):
    assert Gap(mean, half, 5).verdict(0.5) == verdict


def test_what_cannot_be_compared_is_refused():
    for base, recipe in (([1.0], [1.0]), ([0.0, 1.0], [1.0, 1.0]), ([], [])):
        with pytest.raises(ValueError, match="got"):
            gap(base, recipe)
    with pytest.raises(ValueError, match="zip"):
        gap([1.0, 2.0], [1.0])


def layer(recipe, seed=0):
    """A converted layer and its output, input gradient and weight gradient."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    x, g = torch.randn(128, 128).requires_grad_(), torch.randn(128, 128)
    convert_for_training_(model, recipe)

    def step(size=1.0):
        y = model(x)
        return [y.detach(), *torch.autograd.grad(y, (x, model[0].weight), g * size)]

    return model[0], step


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "rowwise_with_gw_hp"])
def test_a_watched_layer_without_a_fault_is_the_layer(recipe):
    module, step = layer(recipe)
    expected, watcher = step(), Watcher()
    undo = plant(module, watcher)
    assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    undo()
    places = ["output.a", "output.b", "input_grad.a", "input_grad.b"]
    dense = recipe == "rowwise_with_gw_hp"
    assert list(watcher.counters.values) == places + ([] if dense else ["weight_grad.a", "weight_grad.b"])
    step()
    assert {len(found) for place in watcher.counters.values.values() for found in place.values()} == {1}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.place)
def test_a_fault_reaches_the_product_of_its_place_alone(fault):
    module, step = layer("tensorwise")
    expected = step()
    plant(module, Watcher(replace(fault, stale=min(fault.stale, 1))))
    step(1e-3)
    changed = [not torch.equal(a, b) for a, b in zip(step(), expected, strict=True)]
    assert changed == [fault.place.startswith(name) for name in ("output", "input_grad", "weight_grad")]


def test_counters_of_a_known_operand():
    scheme = RECIPES["tensorwise"].output.a.scheme
    x = torch.full((16, 16), 448.0)
    x[0, 0], x[0, 1], x[1] = 1e-9, 0.0, -448.0
    found = counted(x, fast.quantize(x, scheme))
    assert found[LOST] == pytest.approx(100 / 255)
    assert found[SATURATED] == pytest.approx(100 * 254 / 256)
    assert found[BAD] == 0
    half = fast.quantize(x, scheme)
    half = replace(half, scale=half.scale * 0.5)
    assert counted(x, half)[SQNR] == pytest.approx(10 * math.log10(4), rel=1e-5)
    x[3, 3] = math.nan
    assert counted(x, fast.quantize(x, scheme))[BAD] == 100


def test_e8m0_scales_are_counted_and_spoiled_by_powers_of_two():
    x, operand = torch.randn(32, 64), RECIPES["mxfp8"].output.a
    fine = Watcher(Fault(name="", place="output.a"))
    q, small = (
        one("output.a", x, operand) for one in (fine, Watcher(Fault(name="", place="output.a", scale_power=-4)))
    )  # fmt: skip
    assert torch.equal(small.scale.int(), q.scale.int() - 4)
    x[0, 0] = math.nan
    assert fine("output.a", x, operand) is not None
    assert fine.counters.values["output.a"][BAD] == [0.0, 100 / 64]


def test_stale_scales_are_those_of_earlier_steps():
    watcher = Watcher(Fault(name="", place="output.a", stale=2))
    operand = RECIPES["tensorwise"].output.a
    scales = [float(watcher("output.a", torch.full((16, 16), 2.0**n), operand).scale) for n in range(5)]
    assert [one / scales[0] for one in scales] == [1, 1, 1, 2, 4]
    assert watcher.counters.values["output.a"][SCALE_STEP][1:] == pytest.approx([0, 0, 1, 1])


def test_what_cannot_be_watched_is_refused():
    module, step = layer("nvfp4")
    plant(module, Watcher())
    with pytest.raises(ValueError, match="drawn"):
        step()
    with pytest.raises(ValueError, match="converted layers without bias"):
        plant(nn.Linear(2, 2), Watcher())
    with pytest.raises(ValueError, match="place is one of"):
        plant(module, Watcher(Fault(name="", place="x")))
