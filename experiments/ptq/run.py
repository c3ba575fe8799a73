"""Experiment `ptq`: post-training quantization of a stand-in, a small language model trained here on the source of sympy.

Every scheme quantizes the weights of all linear layers (lm_head too; the embedding and the norms stay float32), alone, and
together with each layer's input, found dynamically. The two baselines are float32 and bfloat16. Measured are held-out bits per
byte, multiple-choice accuracy (`experiments.data.multiple_choice`), the model's size, and per layer the signal to noise of
its output when its input is that of the float32 model.

All methods sit the same exam, so differences to float32 are paired: the mean over windows of (method - float32), with its
standard error over windows, each from another file. A difference within two standard errors is noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import functional

from experiments.data.errors import Error, mean_and_error
from experiments.data.multiple_choice import Exam, Scores, make_exam, score
from experiments.harness.progress import bar
from experiments.harness.rows import Journal, Row, table_name
from experiments.harness.settings import Settings
from experiments.harness.workers import measure_all
from experiments.models.activation_schemes import activation_scheme, setting_name
from experiments.models.quantized_model import PLAIN, QuantizedModel, layer_inputs, quantized_model

EXPERIMENT = "ptq"
TITLE = "Post-training quantization of a stand-in: a small model trained here on the source of sympy"
QUALITY, LAYERS = "quality", "layers"
LAYER_WINDOWS = 2


@dataclass(frozen=True)
class Task:
    """One method to measure: a scheme for the weights, and one for the activations or None."""

    method: str
    activations: str | None

    @property
    def setting(self) -> str:
        """As rows call it."""
        return setting_name(self.activations)


@dataclass(frozen=True)
class Subject:
    """What all methods are measured on and against, and what models with the same weights were found to do."""

    settings: Settings
    exam: Exam
    baseline: Scores
    inputs: Mapping[str, Tensor]
    seen: dict[str, tuple[Scores, dict[str, float]]] = field(default_factory=dict)


def subject(settings: Settings) -> str:
    """What the rows are about, and so what a journal can be resumed for."""
    return settings.model_key


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all schemes and baselines; those that the journal has are not measured again."""
    journal = journal if journal is not None else Journal()
    table = table_name(QUALITY, settings.scale, settings.corpus.name)
    tasks = [task for task in all_tasks(settings) if not journal.finished(table, task.setting, task.method)]
    if not tasks:
        return journal.rows
    about = subject_of(settings)
    with bar("quantized models", len(tasks)) as step:
        for task, rows in measure_all(tasks, lambda task: measure(about, task), settings.device):
            journal.add(rows)
            step(f"{task.method}, {task.setting}")
    return journal.rows


def all_tasks(settings: Settings) -> list[Task]:
    """Baselines, then every scheme; each with float32 activations and with quantized ones."""
    made = [Task(method, None) for method in PLAIN] + [Task("bfloat16", "bfloat16")]
    for scheme in (*settings.schemes, *settings.served):
        made += [Task(scheme, None), Task(scheme, activation_scheme(scheme))]
    return made


def subject_of(settings: Settings) -> Subject:
    """The exam, and how the float32 model does in it."""
    model = settings.trained.model
    exam = make_exam(settings.corpus, settings.exam)
    text = exam.tokens[:LAYER_WINDOWS, : settings.exam.context].to(settings.device)
    # On one thread, as the methods: the baseline then differs from itself by exactly zero.
    ((_, baseline),) = measure_all(["float32"], lambda _: score(model, exam), settings.device)
    return Subject(settings, exam, baseline, layer_inputs(model, text))


def measure(about: Subject, task: Task) -> list[Row]:
    """All rows of one method."""
    model = about.settings.trained.model
    made = quantized_model(model, task.method, task.activations)
    scores, decibels = answers(about, made)
    values = {
        **quality(scores, about.baseline),
        **size(made, sum(w.weight.numel() for w in model.linears().values())),
    }
    data = about.settings.corpus.name
    rows = [
        about.settings.row(EXPERIMENT, QUALITY, data, task.setting, task.method, metric, value, unit)
        for metric, (value, unit) in values.items()
    ]
    return rows + [
        about.settings.row(EXPERIMENT, LAYERS, data, task.setting, task.method, name, decibel, "dB")
        for name, decibel in decibels.items()
    ]


def answers(about: Subject, made: QuantizedModel) -> tuple[Scores, dict[str, float]]:
    """The exam's scores, and signal to noise per layer.

    Many conventions round ordinary weights to the same values as a house scheme; with float32 activations such models are one
    model, and sit the exam once.
    """
    if made.round_input is not None:
        return score(made.model, about.exam), layer_snr(about, made)
    digest = hashlib.sha256()
    for layer in made.model.linears().values():
        digest.update(layer.weight.cpu().numpy().tobytes())
    key = digest.hexdigest()
    if key not in about.seen:
        about.seen[key] = score(made.model, about.exam), layer_snr(about, made)
    return about.seen[key]


def quality(scores: Scores, baseline: Scores) -> dict[str, tuple[float, str]]:
    """Means, and paired differences to the baseline with standard errors over windows."""
    bits, _ = mean_and_error(scores.bits_per_byte)
    bits_change, bits_error = mean_and_error(scores.bits_per_byte - baseline.bits_per_byte)
    right = scores.correct.mean(axis=1) * 100
    accuracy, accuracy_error = mean_and_error(right)
    change, change_error = mean_and_error(right - baseline.correct.mean(axis=1) * 100)
    return {
        "bits per byte": (bits, "bit"),
        "bits per byte, change": (bits_change, "bit"),
        "bits per byte, standard error of the change": (bits_error, "bit"),
        "accuracy": (accuracy, "%"),
        "accuracy, standard error": (accuracy_error, "%"),
        "accuracy, change": (change, "points"),
        "accuracy, standard error of the change": (change_error, "points"),
    }


def size(made: QuantizedModel, parameters: int) -> dict[str, tuple[float, str]]:
    """Decimal bytes of the whole model, and bits per weight of its linear layers, scales and all."""
    return {
        "size": (made.linears.total + made.others.total, "byte"),
        "size of scales and zero points": (made.linears.total - made.linears.elements, "byte"),
        "bits per weight": (8 * made.linears.total / parameters, "bit"),
    }


def layer_snr(about: Subject, made: QuantizedModel) -> dict[str, float]:
    """Signal to noise of each linear layer's output, given the float32 model's input."""
    exact = about.settings.trained.model.linears()
    found, rounded = {}, {}
    for name, layer in made.model.linears().items():
        x = about.inputs[name]
        if made.round_input is not None:
            # q, k and v read one tensor, which is rounded once.
            if x.data_ptr() not in rounded:
                rounded[x.data_ptr()] = made.round_input(x)
            x = rounded[x.data_ptr()]
        y = functional.linear(about.inputs[name], exact[name].weight)
        found[name] = Error.of(y, functional.linear(x, layer.weight)).snr_db
    return found
