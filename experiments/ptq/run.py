"""Experiment `ptq`: what every scheme costs real pretrained models (`experiments.ptq.real`), and a stand-in in more detail:
bits per byte, multiple-choice accuracy, size and layer errors.

Stand-in: a small language model trained here on the source of sympy, so no published number stands beside these rows; speed
and size of a published model are those of experiment `decode`. Every scheme quantizes the weights of all linear layers (lm_head
too; the embedding and the norms stay float32), alone, and together with each layer's input, with dynamic scales. Baselines are
float32 and bfloat16. Errors per layer are the signal to noise of its output when its input is that of the float32 model.

All methods are evaluated on the same windows and questions (`experiments.data.evaluation`), so differences to float32 are
paired: the mean over windows of (method - float32), with its standard error over windows, each from another file. A difference
within two standard errors is noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import functional

from experiments.data.evaluation import Error, MultipleChoice, Scores, mean_and_error, multiple_choice, score
from experiments.harness.measuring import Deadline, bar, measure_all
from experiments.harness.rows import Journal, Row, table_name
from experiments.models.quantized_model import (
    PLAIN,
    QuantizedModel,
    activation_scheme,
    layer_inputs,
    quantized_model,
)
from experiments.ptq.real import Task, check_parts, check_schemes, of_parts, run_real
from experiments.runs.real_models import real_subject
from experiments.runs.run import all_rows
from experiments.runs.settings import Settings

EXPERIMENT = "ptq"
QUALITY, LAYERS = "quality", "layers"
LAYER_WINDOWS = 2


@dataclass(frozen=True)
class Shared:
    """What all methods share: questions, scores and layer inputs of the float32 model, and results by hash of the weights."""

    settings: Settings
    questions: MultipleChoice
    baseline: Scores
    inputs: Mapping[str, Tensor]
    by_weights: dict[str, tuple[Scores, dict[str, float]]] = field(default_factory=dict)


#: What `--only` names beside a model.
check_models = check_schemes


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the trained model where one is measured, and the real models."""
    trained = [settings.model_key] if has_stand_in(settings) else []
    real = of_parts(settings)
    return "-".join([*trained, *([real_subject(real)] if real.models else [])])


def has_stand_in(settings: Settings) -> bool:
    """Whether a run measures the stand-in: neither models nor parts were asked for."""
    return settings.asked is None and not settings.only


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of real models, and of the stand-in unless real ones or parts were asked for; rows in the journal are not measured
    again. With a limit of seconds no real model begins a scheme after it, and the stand-in does not begin."""
    journal, deadline = journal if journal is not None else Journal(), Deadline(settings.seconds)
    failed = run_real(of_parts(settings), journal)
    if has_stand_in(settings) and deadline.reason() is None:
        run_stand_in(settings, journal)
    return all_rows(settings, journal, failed)


def run_stand_in(settings: Settings, journal: Journal) -> list[Row]:
    """Rows of all schemes and baselines on the model that is trained here."""
    table = table_name(QUALITY, settings.scale, settings.corpus.name)
    tasks = [task for task in all_tasks(settings) if not journal.finished(table, task.setting, task.method)]
    if not tasks:
        return journal.rows
    shared = shared_by_tasks(settings)
    with bar("quantized models", len(tasks)) as step:
        for task, rows in measure_all(tasks, lambda task: measure(shared, task), settings.device):
            journal.add(rows)
            step(f"{task.method}, {task.setting}")
    return journal.rows


def all_tasks(settings: Settings) -> list[Task]:
    """Baselines, then every scheme; each with float32 activations and with quantized ones."""
    tasks = [Task(method, None) for method in PLAIN] + [Task("bfloat16", "bfloat16")]
    for scheme in (*settings.schemes, *settings.served):
        tasks += [Task(scheme, None), Task(scheme, activation_scheme(scheme))]
    return tasks


def shared_by_tasks(settings: Settings) -> Shared:
    """Questions, and scores of the float32 model."""
    model = settings.trained.model
    questions = multiple_choice(settings.corpus, settings.multiple_choice)
    text = questions.tokens[:LAYER_WINDOWS, : settings.multiple_choice.context].to(settings.device)
    # On one thread, as the methods: the baseline then differs from itself by exactly zero.
    ((_, baseline),) = measure_all(["float32"], lambda _: score(model, questions), settings.device)
    return Shared(settings, questions, baseline, layer_inputs(model, text))


def measure(shared: Shared, task: Task) -> list[Row]:
    """All rows of one method."""
    model = shared.settings.trained.model
    quantized = quantized_model(model, task.method, task.activations)
    scores, decibels = evaluate(shared, quantized)
    values = {
        **quality(scores, shared.baseline),
        **size(quantized, sum(w.weight.numel() for w in model.linears().values())),
    }
    data = shared.settings.corpus.name
    rows = [
        shared.settings.row(EXPERIMENT, QUALITY, data, task.setting, task.method, metric, value, unit)
        for metric, (value, unit) in values.items()
    ]
    return rows + [
        shared.settings.row(EXPERIMENT, LAYERS, data, task.setting, task.method, name, decibel, "dB")
        for name, decibel in decibels.items()
    ]


def evaluate(shared: Shared, quantized: QuantizedModel) -> tuple[Scores, dict[str, float]]:
    """Scores, and signal to noise per layer.

    Many conventions round ordinary weights to the same values as an unprefixed scheme; with float32 activations such models are
    the same model and evaluated once.
    """
    if quantized.round_input is not None:
        return score(quantized.model, shared.questions), layer_snr(shared, quantized)
    digest = hashlib.sha256()
    for layer in quantized.model.linears().values():
        digest.update(layer.weight.cpu().numpy().tobytes())
    key = digest.hexdigest()
    if key not in shared.by_weights:
        shared.by_weights[key] = score(quantized.model, shared.questions), layer_snr(shared, quantized)
    return shared.by_weights[key]


def quality(scores: Scores, baseline: Scores) -> dict[str, tuple[float, str]]:
    """Means, and paired differences to the baseline with standard errors over windows."""
    bits, _ = mean_and_error(scores.bits_per_byte)
    bits_change, bits_error = mean_and_error(scores.bits_per_byte - baseline.bits_per_byte)
    correct = scores.correct.mean(axis=1) * 100
    accuracy, accuracy_error = mean_and_error(correct)
    change, change_error = mean_and_error(correct - baseline.correct.mean(axis=1) * 100)
    return {
        "bits per byte": (bits, "bit"),
        "bits per byte, change": (bits_change, "bit"),
        "bits per byte, standard error of the change": (bits_error, "bit"),
        "accuracy": (accuracy, "%"),
        "accuracy, standard error": (accuracy_error, "%"),
        "accuracy, change": (change, "points"),
        "accuracy, standard error of the change": (change_error, "points"),
    }


def size(quantized: QuantizedModel, parameters: int) -> dict[str, tuple[float, str]]:
    """Decimal bytes of the whole model, and bits per weight of its linear layers, scales and all."""
    return {
        "size": (quantized.linears.total + quantized.others.total, "byte"),
        "size of scales and zero points": (quantized.linears.total - quantized.linears.elements, "byte"),
        "bits per weight": (8 * quantized.linears.total / parameters, "bit"),
    }


def layer_snr(shared: Shared, quantized: QuantizedModel) -> dict[str, float]:
    """Signal to noise of each linear layer's output, given the float32 model's input."""
    exact = shared.settings.trained.model.linears()
    found, rounded = {}, {}
    for name, layer in quantized.model.linears().items():
        x = shared.inputs[name]
        if quantized.round_input is not None:
            # q, k and v read one tensor, which is rounded once.
            if x.data_ptr() not in rounded:
                rounded[x.data_ptr()] = quantized.round_input(x)
            x = rounded[x.data_ptr()]
        y = functional.linear(shared.inputs[name], exact[name].weight)
        found[name] = Error.of(y, functional.linear(x, layer.weight)).snr_db
    return found


__all__ = ["check_models", "check_parts", "run", "subject"]
