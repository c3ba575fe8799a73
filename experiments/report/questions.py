"""The four questions that the TorchAO paper (arXiv 2507.16099) leaves open, as claims that rows decide by rule.

Which rows answer what is here; how they decide it, and what a page says, is in `experiments.report.answers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from experiments.harness.rows import Row, interval
from experiments.models.pretrained import MODELS
from experiments.models.quantized_model import WEIGHTS
from experiments.report.accuracies import only
from experiments.report.answers import (
    Claim,
    Interval,
    Question,
    between,
    difference,
    exact,
    ratio,
    with_error,
    with_half,
)
from experiments.report.content import readable
from experiments.report.real_runs import CHANGE, CHANGE_ERROR, RECOVERED, RECOVERED_ERROR, RealRun, best_runs
from experiments.report.results import Results, Where, by_run
from experiments.report.targets import limit_of

PAPER = "Open in the TorchAO paper (arXiv 2507.16099)"
#: A model that packages carry, for commands where no real model was measured.
MODEL = "smollm2-135m"
#: Published rows of each experiment by name.
Rows = Mapping[str, Sequence[Row]]


def questions(rows: Rows) -> list[Question]:
    """All four, answered by the rows of the experiments."""
    return [
        make(rows) for make in (qat_without_lora, two_and_three_bits, mx_against_fp8, sparse_language_models)
    ]


def full(rows: Sequence[Row], kind: str) -> dict[Where, Results]:
    """The runs of a table at full scale."""
    return {where: results for where, results in by_run(rows, kind).items() if where.scale == "full"}


# What QAT of all weights costs, where adapters beside frozen weights are no option.

PLAIN, TRAINED = "bfloat16", ("int8 dynamic, int4 g32", "int4 weight-only g128")
TIMES = ("time, 20%", "time", "time, 80%")


def qat_without_lora(rows: Rows) -> Question:
    """Time and memory of a step with fake quantization of all weights, and the loss of what it trains."""
    asked = (
        f"{PAPER}: what does quantization-aware training of all weights cost, where LoRA is no option? Times are of forward "
        "and backward, intervals from their 20% and 80% quantiles; memory repeats exactly."
    )
    overhead = list(overhead_claims(full(rows["qat_overhead"], "qat_overhead")))
    trained = [*real_qat_claims(rows["qat"], "int4_g32"), *trained_claims(rows["qat"], "int4")]
    return Question("QAT without LoRA: what it costs", asked, [*overhead, *trained])


def overhead_claims(runs: Mapping[Where, Results]) -> Iterator[Claim]:
    """Over plain training, and over torchao's QAT."""
    command = "ao-lab reproduce qat_overhead --scale full"
    for where, results in runs.items() or [(None, Results([]))]:
        for setting in results.settings or ["compiled"]:
            for recipe in TRAINED:
                of = f"{recipe}, {setting}" + (f", {readable(where.data)}" if where else "")
                ours, theirs = (
                    step_time(results, setting, f"{who}, {recipe}") for who in ("ours", "torchao")
                )
                plain = step_time(results, setting, PLAIN)
                if where is not None and ours is None:
                    continue
                over = ratio(ours, plain)
                percent = None if over is None else over.scaled(100.0, -1.0)
                yield Claim(
                    "A step of QAT takes at most the time of a training step without it",
                    of,
                    percent,
                    0.0,
                    "%",
                    command,
                    1,
                    "<=",
                )
                memory = exact(results, setting, f"ours, {recipe}", "peak memory over plain")
                yield Claim(
                    "A step of QAT takes at most the memory of a training step without it",
                    of,
                    memory,
                    0.0,
                    "%",
                    command,
                    2,
                    "<=",
                )
                yield Claim(
                    "A step of QAT takes less time than torchao's", of, ratio(ours, theirs), 1.0, "x", command
                )


def step_time(results: Results, setting: str, method: str) -> Interval | None:
    """The time of a step between its quantiles."""
    return between(results, setting, method, *TIMES)


def trained_claims(rows: Sequence[Row], *words: str) -> Iterator[Claim]:
    """QAT against the trained model quantized with searched scales, on the stand-in."""
    statement = "QAT loses less than full-precision training and rounding with searched scales (proxy model)"
    command = "ao-lab reproduce qat --scale full"
    found = False
    for where, results in full(rows, "recovery").items():
        for setting, method in dict.fromkeys((row.setting, row.method) for row in results.rows):
            if method.startswith(words):
                losses = [
                    with_half(results, setting, method, f"loss, {how}", f"loss, {how}, 95% interval")
                    for how in ("QAT", "PTQ clipped")
                ]
                found = True
                yield Claim(
                    statement,
                    f"{method}, {setting}, {readable(where.data)}",
                    difference(*losses),
                    0.0,
                    "bits per byte",
                    command,
                    4,
                )
    if not found:
        yield Claim(statement, ", ".join(words), None, 0.0, "bits per byte", command)


# 2 and 3 bits.

LOW = ("int2", "int3")
CASES = ("int3_g64_asymmetric", "int2_g64_asymmetric")
#: The best arm with AutoRound, and the arms that it is held against.
ROUNDED, OTHERS = (
    ("autoround", "search + autoround", "gptq + autoround", "rotate + gptq + autoround"),
    ("gptq", "rotate + gptq"),
)


def two_and_three_bits(rows: Rows) -> Question:
    """AutoRound against rounding and GPTQ, and training with learned scales against searched ones."""
    asked = (
        f"{PAPER}: at 2 and 3 bits, is training with learned scales (ParetoQ) better than AutoRound, and AutoRound than "
        "round-to-nearest? Real models: KL from the dense model on a text that methods do not see, of the method of each kind "
        "that does best on the run's other text."
    )
    real = real_qat_claims(rows["qat"], "int2_g32", "int3_g32")
    claims = [
        *autoround_claims(rows["calibration"]),
        *real,
        *trained_claims(rows["qat"], *LOW, "ternary"),
    ]
    return Question("ParetoQ, AutoRound and round-to-nearest at 2 and 3 bits", asked, claims)


def autoround_claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """Of each real model, scheme and text: the best arm with AutoRound against rounding, and against the best without."""
    for scheme in CASES:
        for run, text in texts_of(rows):
            command = f"ao-lab reproduce calibration --model {model_of(run)} --scale full --only {scheme}"
            of = ", ".join(filter(None, (scheme, run.model if run else "", text)))
            ours, theirs = (best(run, text, scheme, methods) for methods in (ROUNDED, OTHERS))
            claimed = "AutoRound recovers KL that rounding costs"
            yield Claim(claimed, of, ours, 0.0, "%", command + only(ROUNDED), 1, ">")
            gain = difference(ours, theirs)
            claimed = "AutoRound recovers more of rounding's KL than GPTQ"
            yield Claim(claimed, of, gain, 0.0, "points", command + only((*ROUNDED, *OTHERS)), 1, ">")


def best(run: RealRun | None, text: str, scheme: str, methods: Sequence[str]) -> Interval | None:
    """What is recovered of rounding's KL on a text by that of some methods which recovers most on the other text."""
    if run is None:
        return None
    chosen = run.chosen(text, scheme, methods, RECOVERED, most=True)
    return with_error(run.texts[text], scheme, chosen, RECOVERED, RECOVERED_ERROR)


WITHOUT = ("PTQ", "PTQ, clipped", "PTQ, GPTQ")
AUTOROUND, LEARNED, PARETOQ, PLAIN_QAT = "PTQ, AutoRound", "QAT, learned scales", "QAT, ParetoQ", "QAT"


def real_qat_claims(rows: Sequence[Row], *schemes: str) -> Iterator[Claim]:
    """Of each real model and text, over paired seeds: training against the best way without, and at 2 and 3 bits against
    AutoRound of the fine-tuned model."""
    for scheme in schemes:
        for run, text in texts_of(rows):
            results = run.texts[text] if run else Results([])
            of = ", ".join(filter(None, (scheme, run.model if run else "", text)))
            command = f"ao-lab reproduce qat --model {model_of(run)} --scale full --only {scheme}"
            losses = {
                arm: paired(results, scheme, arm)
                for arm in (*WITHOUT, AUTOROUND, LEARNED, PARETOQ, PLAIN_QAT)
            }
            best_way = losses.get(best_without(run, text, scheme), {})
            statement = (
                "Training with learned scales loses less than the best of rounding, searched scales and GPTQ"
            )
            yield Claim(statement, of, over_seeds(losses[LEARNED], best_way), 0.0, "nats", command, 4)
            if scheme.startswith(LOW):
                for arm, name in (
                    (LEARNED, "Training with learned scales"),
                    (PARETOQ, "Training by ParetoQ"),
                ):
                    statement, gain = (
                        f"{name} loses less than AutoRound",
                        over_seeds(losses[arm], losses[AUTOROUND]),
                    )
                    yield Claim(statement, of, gain, 0.0, "nats", command, 4)
            statement = "Learned scales lose less than scales of the largest magnitude, both trained"
            yield Claim(
                statement, of, over_seeds(losses[LEARNED], losses[PLAIN_QAT]), 0.0, "nats", command, 4
            )


def paired(results: Results, scheme: str, arm: str) -> dict[int, Row]:
    """The rows of a way's loss by seed."""
    method = f"{scheme}: {arm}"
    return {row.seed: row for row in results.rows if (row.method, row.metric) == (method, "loss")}


def best_without(run: RealRun | None, text: str, scheme: str) -> str:
    """The way without training of the least loss, mean over seeds, on the texts that do not judge it; "" for none."""

    def mean(results: Results, arm: str) -> float | None:
        rows = paired(results, scheme, arm)
        return fmean(row.value for row in rows.values()) if rows else None

    return "" if run is None else run.chosen_by(text, WITHOUT, mean)


def over_seeds(ours: Mapping[int, Row], theirs: Mapping[int, Row]) -> Interval | None:
    """The paired difference over the seeds that both have, with Student's interval; None for fewer than two."""
    seeds = sorted(ours.keys() & theirs.keys())
    if len(seeds) < 2:
        return None
    found = interval([ours[seed].value - theirs[seed].value for seed in seeds])
    return Interval.around(found.mean, found.half, *(rows[seed] for rows in (ours, theirs) for seed in seeds))


def texts_of(rows: Sequence[Row]) -> list[tuple[RealRun | None, str]]:
    """The texts of each real model's largest run; without any run one that has nothing."""
    return [(run, text) for run in best_runs(rows) for text in run.texts] or [(None, "")]


def model_of(run: RealRun | None) -> str:
    """A run's model as `--model` takes it: the name of a package's, else a folder's."""
    names = {record.title: name for name, record in MODELS.items()}
    return MODEL if run is None else names.get(run.model, run.model)


# MX against FP8.

EIGHT = ("mxfp8_e4m3_rceil", "fp8_rowwise")
HELD_OUT = "bits per byte, heldout"


def mx_against_fp8(rows: Rows) -> Question:
    """Scales of 32 values, powers of two, against one float32 scale a row: inference and training in 8-bit floats."""
    asked = (
        f"{PAPER}: are MX formats as accurate as FP8 with a scale for each row, in inference and in training?"
    )
    return Question(
        "MX against FP8", asked, [*inference_claims(rows["ptq"]), *training_claims(rows["fp8_training"])]
    )


def inference_claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """Loss by rounding weights and inputs: of real models, and of the stand-in."""
    statement = "Rounding weights and inputs to MXFP8 loses less than to rowwise FP8"
    settings = [f"weights + activations in {scheme}" for scheme in EIGHT]
    for run, text in texts_of(rows):
        results = run.texts[text] if run else Results([])
        lost = [
            with_error(results, setting, scheme, CHANGE, CHANGE_ERROR)
            for setting, scheme in zip(settings, EIGHT, strict=True)
        ]
        of = f"{run.model}, {text}" if run else f"{MODEL}"
        command = f"ao-lab reproduce ptq --model {model_of(run)} --scale full{only(EIGHT)}"
        yield Claim(statement, of, difference(*lost), 0.0, "nats", command, 4)
    for where, results in full(rows, "quality").items():
        lost = [
            with_error(
                results,
                setting,
                scheme,
                "bits per byte, change",
                "bits per byte, standard error of the change",
            )
            for setting, scheme in zip(settings, EIGHT, strict=True)
        ]
        command = "ao-lab reproduce ptq --scale full"
        yield Claim(
            statement,
            f"proxy model, {readable(where.data)}",
            difference(*lost),
            0.0,
            "bits per byte",
            command,
            5,
        )


def training_claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """The gap to bfloat16 after paired trainings: of each recipe against the margin, and of one against the other."""
    margin, command = (
        limit_of("fp8_training", "paired", "gap").bound,
        "ao-lab reproduce fp8_training --scale full --only paired",
    )
    for where, results in full(rows, "gaps").items() or [(None, Results([]))]:
        for setting in results.settings or [""]:
            of = f"proxy model, {setting}, {readable(where.data)}" if where else "a proxy model"
            for text in GAP_TEXTS:
                yield from gap_claims(results, setting, of, text, margin, command)


#: Texts of gaps, by metric: of the kind that is trained on, and of another.
GAP_TEXTS = {
    HELD_OUT: "held-out books",
    "bits per byte, wikitext2-test": "wikitext2-test, unlike the training text",
}


def gap_claims(
    results: Results, setting: str, of: str, text: str, margin: float, command: str
) -> Iterator[Claim]:
    """Those of one text."""
    on = f"on {GAP_TEXTS[text]}"
    gaps = {
        name: with_half(results, setting, recipe, f"gap, {text}", f"gap, {text}, 95% interval")
        for name, recipe in {"MXFP8": "mxfp8", "rowwise FP8": "rowwise"}.items()
    }
    for name, found in gaps.items():
        statement = f"Training in {name} ends within {margin:g}% of bfloat16's loss {on}"
        yield Claim(statement, of, found, margin, "%", command, 2)
    statement = f"Training in MXFP8 ends at less loss than in rowwise FP8 {on}"
    yield Claim(statement, of, difference(*gaps.values()), 0.0, "%", command, 2)


# 2:4 on language models.

SPARSE = (
    "one-shot, magnitude", "one-shot, wanda", "one-shot, sparsegpt", "fine-tuned, fixed masks", "fine-tuned, SR-STE",
    "fine-tuned, SR-STE + int4",
)  # fmt: skip


def sparse_language_models(rows: Rows) -> Question:
    """The gap of 2:4 models to dense ones over paired seeds, against none and against the margin."""
    asked = (
        f"{PAPER}: what do two zeros in every four weights cost a language model, and does training mend it? Pretrained "
        "models are pruned without training; the models that train are proxy models, whose margin was named before."
    )
    margin, command = (
        limit_of("sparsity", "language", "gap").bound,
        "ao-lab reproduce sparsity --scale full --only language",
    )
    claims = []
    for where, results in full(rows["sparsity"], "language gaps").items() or [(None, Results([]))]:
        for setting in results.settings or [""]:
            for method in SPARSE:
                gap = with_half(results, setting, method, "gap", "gap, 95% interval")
                of = ", ".join(filter(None, (method, setting, readable(where.data) if where else "")))
                claims.append(
                    Claim(
                        f"A 2:4 model lies less than {margin:g}% behind the dense one",
                        of,
                        gap,
                        margin,
                        "%",
                        command,
                        2,
                    )
                )
                claims.append(Claim("A 2:4 model is as good as the dense one", of, gap, 0.0, "%", command, 2))
    claims = [*real_sparse_claims(rows["sparsity"]), *sorted(claims, key=lambda one: one.statement)]
    return Question("2:4 sparsity on language models", asked, claims)


PRUNED = ("2:4, magnitude", "2:4, wanda", "2:4, sparsegpt", "2:4, sparsegpt + int4")


def real_sparse_claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """Of each pretrained model and text: what pruning without training costs, and whether scores that read data cost less."""
    for run, text in texts_of(rows):
        results = run.texts[text] if run else Results([])
        of = f"{run.model}, {text}" if run else MODEL
        command = f"ao-lab reproduce sparsity --model {model_of(run)} --scale full"
        lost = {arm: with_error(results, WEIGHTS, arm, CHANGE, CHANGE_ERROR) for arm in PRUNED}
        for arm, found in lost.items():
            statement = (
                "A pretrained model that is pruned to 2:4 without training is as good as the dense one"
            )
            yield Claim(statement, f"{arm}, {of}", found, 0.0, "nats", command + only([arm]), 3, "<=")
        gain = difference(lost["2:4, sparsegpt"], lost["2:4, magnitude"])
        yield Claim(
            "SparseGPT loses less than pruning by magnitude",
            of,
            gain,
            0.0,
            "nats",
            command + only([PRUNED[0], PRUNED[2]]),
            3,
        )


#: What reads rows of which experiments.
READ: tuple[str, ...] = ("calibration", "fp8_training", "ptq", "qat", "qat_overhead", "sparsity")
