"""What users ask first, each with what rows say to it, what was not measured, and where to read on.

Numbers are of rows; a sentence whose row is missing is left out. What stands without a number is a property of the code (which
sums a kernel has) or advice, and what was not measured is said beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import ao_lab
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import Row
from experiments.models.llama import LLAMA_3_1_8B
from experiments.report import behind
from experiments.report.content import device_name
from experiments.report.questions import GAP_TEXTS
from experiments.report.real_runs import CHANGE as LOSS
from experiments.report.results import Results, Where, best_run, by_run, decoding
from experiments.report.targets import limit_of

#: Published rows of each experiment by name.
Rows = Mapping[str, Sequence[Row]]
SPEED = "speed over bfloat16"
#: Data of `generate` by what a page calls them, and how its settings end.
LAYERS, COMPILED = {layers: f"llama-3.1-8b-{layers}-layers" for layers in (32, 8)}, "compiled"
#: The two forms of INT4 in groups of 128, as answers and as rows call them.
FORMS = {"symmetric": "int4 g128", "with zero points": "int4 g128, zero points"}
#: The setting of `fp8_training` that speeds are told of.
STEP = "compiled, 2 x 8192, checkpointing none"
TEXT, CHANGE = "wikitext-2-v1-test", "perplexity, change"


@dataclass(frozen=True)
class Asked:
    """A question; what is said to it, which begins in bold; what was not measured; where to read on: all in Markdown."""

    title: str
    said: Sequence[str]
    missing: str
    links: str


def asked(rows: Rows, compared: Sequence[behind.Compared]) -> list[Asked]:
    """All of them. compared: what stands beside another library's."""
    return [
        four_bits(rows), generating(rows), training(rows), caching(rows), long_attention(rows), against_others(compared),
    ]  # fmt: skip


def pages(name: str) -> Any:
    """The page module of an experiment, whose sentences are told here too."""
    return EXPERIMENTS[name].page_module()


def last(rows: Sequence[Row], kind: str, data: str = "") -> tuple[Where, Results]:
    """The run of a kind, and of these data, that findings speak of; an empty one without any."""
    found = {where: one for where, one in by_run(rows, kind).items() if where.data == data or not data}
    return best_run(found) or (Where("full", "", data), Results([]))


def numbers(text: str, /, **values: Any) -> list[str]:
    """A sentence with the numbers in it; none where one of them is missing."""
    return [] if None in values.values() else [text.format(**values)]


def four_bits(rows: Rows) -> Asked:
    """Which 4-bit weights."""
    said = [
        "**Start with `Int4WeightOnlyConfig(group_size=128)`, calibrated with GPTQ**, and take smaller groups (64, 32) or "
        "`NVFP4WeightOnlyConfig` if the loss of your model is too large: `ao-lab compare MODEL_DIR` measures it.",
        two_forms(),
        *(
            f"Times bfloat16 in transformers' generate(), compiled, {one}"
            for one in both_forms(rows["generate"], 1)
        ),
        *lean(rows["decode"]),
        *small_models(rows["calibration"]),
        *published(),
    ]
    missing = (
        f"the loss of a model of 8B parameters, by any scheme or method{unmeasured_groups(rows['calibration'])}. Small models "
        "lose more than large ones, so the order of methods may hold for yours, the numbers do not."
    )
    links = "[choose](../docs/choose.md), [calibration](calibration.md), [decode](decode.md), [generate](generate.md)"
    return Asked("Which 4-bit weights for a language model of 8B parameters?", said, missing, links)


def two_forms() -> str:
    """What the recommended configuration is in Python, and what `ao-lab quantize` makes of it; bits of the largest layer."""
    ours = ao_lab.Int4WeightOnlyConfig(group_size=128)
    largest = (LLAMA_3_1_8B.feed_forward, LLAMA_3_1_8B.width)
    zeros, symmetric = (
        8 * ao_lab.weight_size(largest, one.recipe()).bytes / math.prod(largest)
        for one in (ours, ours.for_layout("compressed-tensors"))
    )
    return (
        f"`quantize_` and `--layout ao_lab` give it zero points ({zeros:.2f} bits per weight); `ao-lab quantize` by default "
        f"writes it for vLLM and transformers, which is symmetric ({symmetric:.2f} bits). Numbers say which they are of."
    )


def both_forms(rows: Sequence[Row], *batches: int) -> list[str]:
    """Speeds in generate() of groups of 128 at these batches, symmetric and with zero points, a sentence for each model."""
    said = []
    for data in LAYERS.values():
        where, results = last(rows, "generate", data)
        told = []
        for form, method in FORMS.items():
            speeds = {one: results.value(f"batch {one}, {COMPILED}", method, SPEED) for one in batches}
            known = [f"{speed:.2f} at batch {one}" for one, speed in speeds.items() if speed is not None]
            told += [f"{form} {', '.join(known)}"] if known else []
        day = results.day(f"batch {batches[0]}, {COMPILED}", next(iter(FORMS.values())))
        said += [f"{where}{f', {day}' if day else ''}: {'; '.join(told)}."] if told else []
    return said


def lean(rows: Sequence[Row]) -> list[str]:
    """Speeds of other configurations than the recommended one, in the loop without overhead."""
    where, results = last(rows, "decode")
    page = pages("decode")
    return numbers(
        "The lean loop has no groups of 128. What it has, batch 1, Llama-3.1-8B's shapes, {device}, {day}, times the fastest "
        "bfloat16: INT4 in groups of 64 with zero points in bfloat16 {int4:.2f} (linear layers {int4_size:.2f} GB for "
        "{dense:.2f}), NVFP4 {nvfp4:.2f} ({nvfp4_size:.2f} GB).",
        device=device_name(where.device),
        day=results.day(page.OURS, "nvfp4wo") or None,
        int4=page.over_fastest(results, page.OURS, "int4wo-64"),
        nvfp4=page.over_fastest(results, page.OURS, "nvfp4wo"),
        int4_size=results.value(page.OURS, "int4wo-64", page.SIZE),
        nvfp4_size=results.value(page.OURS, "nvfp4wo", page.SIZE),
        dense=results.value(page.BASELINE, page.BFLOAT16, page.SIZE),
    )


def unmeasured_groups(rows: Sequence[Row]) -> str:
    """That no trained model was calibrated in groups of 128, where rows have none; they name a scheme in their setting."""
    real = (row.setting for row in rows if row.table.startswith("real "))
    return (
        ""
        if any(one.startswith("int4_g128") for one in real)
        else ", and of calibrated groups of 128 in any trained one"
    )


#: Schemes and methods that are told of small models, by what answers call them.
SMALL = {
    "int4_g128": "symmetric INT4 in groups of 128",
    "int4_g64": "symmetric INT4 in groups of 64",
    "nvfp4": "NVFP4",
}
METHODS = {
    "rounding": "rounded",
    "gptq": "GPTQ",
    "awq + gptq": "AWQ and GPTQ",
    "rotate + gptq": "Rotate and GPTQ",
}


def small_models(rows: Sequence[Row]) -> list[str]:
    """What rounding loses and methods leave in trained models, a sentence for each; and by which method INT4 loses least."""
    kinds = dict.fromkeys(row.table.split("/")[0] for row in rows if row.table.startswith("real "))
    said, best = list[str](), list[str]()
    for kind in kinds:
        where, results = last(rows, kind, TEXT)
        told = []
        for scheme, name in SMALL.items():
            found = {one: results.value(scheme, one, CHANGE) for one in METHODS}
            known = {one: value for one, value in found.items() if value is not None}
            if len(known) > 1:
                told.append(
                    f"{name} {', '.join(f'{METHODS[one]} {value:+.1f}%' for one, value in known.items())}"
                )
                best += [min(known, key=lambda one: known[one])] * (scheme != "nvfp4")
        if told and where.scale == "full":
            said.append(f"Change of perplexity, {kind.removeprefix('real ')} ({where}): {'; '.join(told)}.")
    if said and set(best) == {"rotate + gptq"}:
        said.append(
            "In each of these models INT4 loses least by Rotate and GPTQ. `Rotate()` needs layout `ao_lab`; "
            '`Rotate("offline")`, which any layout takes, was not measured.'
        )
    return said


def published() -> list[str]:
    """What torchao published of Llama-3.1-8B."""
    found = {
        one.method: one.value
        for one in decoding()
        if (one.model, one.hardware, one.metric) == ("Llama-3.1-8B", "H100", "wikitext_word_perplexity")
    }
    return numbers(
        "Published by torchao, not measured here: Llama-3.1-8B in INT4 with groups of 64 and zero points in bfloat16, rounded "
        "without data, has a word perplexity of {ours:.2f} for bfloat16's {dense:.2f} on WikiText.",
        ours=found.get("int4wo-64"),
        dense=found.get("bfloat16"),
    )


def generating(rows: Rows) -> Asked:
    """int4 in transformers' own loop, by batch."""
    mine = rows["generate"]
    said = both_forms(mine, 1, 16, 64)
    head = "**Times bfloat16, INT4 in groups of 128, compiled as transformers does by default**: "
    said = [f"{head}{said[0]}", *said[1:]] if said else []
    links = "[generate](generate.md) has all batches in its first table, torchao's beside ours, eager mode and prefill"
    whole = last(mine, "generate", LAYERS[32])[1]
    measured = f"batch 64, {COMPILED}" in whole.settings
    missing = (
        "batches of more than 64"
        if measured
        else "all 32 layers at batch 64, where the 8 layers are what is known"
    )
    zeros = whole.value(f"batch 1, {COMPILED}", FORMS["with zero points"], SPEED)
    missing += "." if zeros is not None else "; all 32 layers with zero points."
    return Asked("How fast is INT4 in transformers' generate(), at batch 1 to 64?", said, missing, links)


def training(rows: Rows) -> Asked:
    """What MXFP8 gives."""
    mine = rows["fp8_training"]
    where, gaps = last(mine, "gaps")
    setting = next(iter(gaps.settings), "")
    told, speeds = list[str](), list[float]()
    for run, results in by_run(mine, "blocks").items():
        both = {recipe: results.value(STEP, f"ours, {recipe}", SPEED) for recipe in ("mxfp8", "rowwise")}
        told += numbers(
            "{mxfp8:.2f} on {device} (rowwise FP8 {rowwise:.2f})", device=device_name(run.device), **both
        )
        speeds += [one for one in (both["mxfp8"],) if one is not None]
    said = (
        [
            f"**{min(speeds):.2f} to {max(speeds):.2f} times bfloat16's speed on Hopper GPUs, which have no MX instructions**: "
            f"a compiled step of two blocks of Llama-3-8B, {', '.join(told)}."
        ]
        if told
        else []
    )
    said += [f"{one}." for one in pages("fp8_training").speeds_found(mine)]
    for metric, text in GAP_TEXTS.items():
        gap, half = (gaps.value(setting, "mxfp8", f"gap, {metric}{end}") for end in ("", ", 95% interval"))
        said += numbers(
            "Loss of a small Llama over bfloat16's on {text}, paired seeds ({where}): {gap:+.2f} ± {half:.2f}%, {verdict}.",
            gap=gap, half=half, text=text, where=where, verdict=verdict(gap, half),
        )  # fmt: skip
    said += [f"Longer, {one}." for one in pages("fp8_training").longest_training(mine)]
    said += pages("fp8_training").rare_bytes(mine)
    missing = (
        "speed on Blackwell, whose tensor cores multiply MXFP8, and models of more than 120M parameters."
    )
    return Asked(
        "What does training in MXFP8 give?",
        said,
        missing,
        "[fp8_training](fp8_training.md), [guide](../docs/guides/training.md)",
    )


def verdict(gap: float | None, half: float | None) -> str:
    """Of a gap and half of its interval, in percent, whether it keeps the margin."""
    margin = limit_of("fp8_training", "paired", "gap").bound
    if gap is None or half is None or abs(gap) - half <= margin < abs(gap) + half:
        return f"undecided whether within the margin of {margin:g}%"
    return f"{'within' if abs(gap) + half <= margin else 'beyond'} the margin of {margin:g}%"


#: Recipes whose largest change of perplexity is told first.
CACHES = ("int8_channels", "int8", "fp8_residual", "fp8", "int4")


def caching(rows: Rows) -> Asked:
    """What a quantized KV cache costs in quality."""
    mine = rows["kv_cache"]
    said = [*least_change(mine), *pages("kv_cache").predictions_found(mine)]
    missing = (
        "other models. Keys with a bias, as Qwen2.5's, are hard for one scale a token; compare before use."
    )
    links = "[kv_cache](kv_cache.md), [guide](../docs/guides/kv_cache.md)"
    return Asked("What does a KV cache in low precision cost in quality?", said, missing, links)


def least_change(rows: Sequence[Row]) -> list[str]:
    """Of the recipes that all real models were measured with, the one whose largest change of perplexity is least, and what all
    recipes change, model by model; none where no recipe was measured on all of them."""
    found = changes_of(rows)
    shared = [name for name in CACHES if found and all(name in known for known in found.values())]
    if len(shared) < 2:
        return []
    least = min(shared, key=lambda name: max(abs(known[name]) for known in found.values()))
    default = signature(ao_lab.use_kv_cache_).parameters["recipe"].default
    own = "" if least != default else ", the default of `use_kv_cache_`"
    other = "" if least == default else f" (the default of `use_kv_cache_` is `{default}`)"
    told = "; ".join(
        f"{model} " + ", ".join(f"`{name}` {one:+.2f}%" for name, one in known.items())
        for model, known in found.items()
    )
    return [f"**Take `{least}`{own}**{other}. Change of perplexity, intervals aside: {told}."]


def changes_of(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By real model and text, what each recipe of CACHES changes perplexity by, in percent; models without any are left out."""
    page, found = pages("kv_cache"), dict[str, dict[str, float]]()
    for kind in page.kinds(rows):
        where, results = page.largest_run(by_run(rows, kind))
        changes = {name: results.value(page.ALL, name, LOSS) for name in CACHES}
        known = {name: 100 * math.expm1(one) for name, one in changes.items() if one is not None}
        if known:
            found[f"{kind.removeprefix('real ')} on {where.data}"] = known
    return found


#: Tokens of the context that is asked about.
LONGEST = 131072


def long_attention(rows: Rows) -> Asked:
    """FP8 attention over a long context."""
    mine = rows["kv_cache"]
    said = [
        "**Its sums are, by a model of the tensor core; whether a trained model's predictions are is unknown**. The known "
        "failure, sums of FP8 products in one chain, is not in ao_lab's kernels: attention in 8 bits (`use_attention_`) adds "
        "chains of 128 tokens in float32; decoding over an FP8 cache multiplies in 16 bits.",
        *(
            f"{one} (By a model of the tensor core's 14-bit sums, of equal scores.)"
            for one in pages("kv_cache").sums_found(mine)
        ),
        *pages("kv_cache").needles_found(mine),
        *short_attention(rows["prefill_attention"]),
    ]
    needles = f", needles at {LONGEST} tokens" * (
        str(LONGEST) not in last(mine, pages("kv_cache").NEEDLE)[1].settings
    )
    missing = f"a trained model's predictions at that length{needles}: sums alone were computed; compare with your own text."
    links = "[kv_cache](kv_cache.md), [prefill_attention](prefill_attention.md), [guide](../docs/guides/attention.md)"
    return Asked("Is FP8 attention safe at 128k tokens?", said, missing, links)


def short_attention(rows: Sequence[Row]) -> list[str]:
    """What attention in 8 bits loses on the text that was measured, which is short."""
    found = pages("prefill_attention").main_finding(rows)
    return [f"Attention in 8 bits at short lengths. {found}."] if found else []


def against_others(compared: Sequence[behind.Compared]) -> Asked:
    """Where another library is ahead."""
    count = sum(one.behind for one in compared)
    lines = [f"{line[0]} {line[2]} of {line[1]}" for line in behind.counts(compared) if line[2] != "0"]
    said = [
        f"**{count} of {len(compared)} comparisons with another library's code are lost**: {', '.join(lines)}; each with both "
        "names, by how much and where: [Behind another library](limits.md#behind).",
        *furthest(compared),
    ]
    links = "[limits](limits.md)"
    missing = (
        "comparisons that have not run, which the same page lists, calibration by other libraries among them."
    )
    return Asked(
        "Where is ao_lab slower or less exact than torchao and torch?",
        said if compared else [],
        missing,
        links,
    )


def furthest(compared: Sequence[behind.Compared]) -> list[str]:
    """Of each experiment that is behind somewhere, the comparison that is furthest, those first that are furthest of all."""
    worst: dict[str, behind.Compared] = {}
    for one in sorted(compared, key=lambda one: -one.worse):
        if one.behind:
            worst.setdefault(one.experiment, one)
    told = []
    for one in worst.values():
        page, ours, theirs, metric, subject, times, *_ = behind.cells([one])
        told.append(f"{page} {metric} {times} ({ours} beside {theirs}; {subject})")
    return [f"Furthest behind of each page, ours over theirs: {', '.join(told)}."] if told else []
