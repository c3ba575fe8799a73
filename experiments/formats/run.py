"""Experiment `formats`: quantization error and bits per element of every scheme, on synthetic data and trained tensors.

No numbers are published beside these rows. Every scheme of `reference.SCHEMES`, ours and other projects', quantizes the same
float32 tensors along the last axis. Synthetic tensors: normal; heavy-tailed (Student's t with three degrees of freedom); and
normal with eight outlier channels, 50 times as large, in the last axis, as in activations of large language models. Trained
tensors, a stand-in for those of published models: weights and linear-layer inputs, on held-out text, of the small language
model that is trained here on the source of sympy, by kind of layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

import fast
from experiments.data.evaluation import Error, multiple_choice, stored
from experiments.harness.measuring import bar, measure_all
from experiments.harness.rows import Journal, Row
from experiments.models.quantized_model import layer_inputs
from experiments.runs.settings import Settings

EXPERIMENT = "formats"
OUTLIER_CHANNELS = 8
OUTLIER_FACTOR = 50.0
TEXT_WINDOWS = 2
SNR = "signal to noise"
BITS = "bits per element"
METRICS = {SNR: "dB", "cosine distance": "", "largest error": "of the largest value", BITS: "bit"}

Data = Mapping[str, Sequence[Tensor]]


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the trained model."""
    return settings.model_key


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all schemes; rows in the journal are not measured again."""
    journal = journal if journal is not None else Journal()
    tables = {("synthetic", "synthetic"): synthetic(settings)}
    tables["trained", settings.corpus.name] = trained(settings)
    tasks = [
        (kind, data, scheme)
        for kind, data in tables
        for scheme in settings.schemes
        if not journal.finished(f"{kind}/{settings.scale}/{data}", next(iter(tables[kind, data])), scheme)
    ]

    def measure(task: tuple[str, str, str]) -> list[Row]:
        kind, data, scheme = task
        return rows_of(settings, kind, data, scheme, tables[kind, data])

    with bar("formats", len(tasks)) as step:
        for task, rows in measure_all(tasks, measure, settings.device):
            journal.add(rows)
            step(task[2])
    return journal.rows


def rows_of(settings: Settings, kind: str, data: str, scheme: str, tensors: Data) -> list[Row]:
    """All rows of one scheme in one table."""
    rows = []
    # A tensor belongs to several groups (all weights, one kind of weights), and is quantized once.
    distinct = unique(tensor for group in tensors.values() for tensor in group)
    errors = {tensor.data_ptr(): quantization_error(scheme, tensor) for tensor in distinct}
    for setting, group in tensors.items():
        parts = [errors[tensor.data_ptr()] for tensor in group]
        error = sum((part for part, _ in parts), Error())
        bits = 8 * sum(size for _, size in parts) / sum(tensor.numel() for tensor in group)
        values = {
            SNR: error.snr_db,
            "cosine distance": error.cosine_distance,
            "largest error": error.max_error,
            # Scales over a whole tensor weigh more in a small one, so that each group has bits of its own.
            BITS: bits,
        }
        if " of " in setting:
            # A kind of layer: one measure of the error is enough to compare kinds.
            values = {SNR: error.snr_db, BITS: bits}
        rows += [
            settings.row(EXPERIMENT, kind, data, setting, scheme, metric, value, METRICS[metric])
            for metric, value in values.items()
        ]
    return rows


def quantization_error(scheme: str, tensor: Tensor) -> tuple[Error, int]:
    """Error of one tensor, and its stored bytes, scales and zero points included."""
    q = fast.quantize(tensor, scheme)
    return Error.of(tensor, fast.dequantize(q)), stored(q).total


def synthetic(settings: Settings) -> Data:
    """Three random tensors, drawn on the CPU so that every device has the same values."""
    generator = torch.Generator().manual_seed(settings.seed)
    normal = torch.randn(settings.shape, generator=generator)
    # Student's t: a normal over the root of a mean of three squares.
    squares = torch.randn((3, *settings.shape), generator=generator).square().mean(dim=0)
    heavy = torch.randn(settings.shape, generator=generator) / squares.sqrt()
    outliers = torch.randn(settings.shape, generator=generator)
    channels = torch.randperm(settings.shape[1], generator=generator)[:OUTLIER_CHANNELS]
    outliers[:, channels] *= OUTLIER_FACTOR
    tensors = {"normal": normal, "heavy-tailed": heavy, "outlier channels": outliers}
    return {name: [tensor.to(settings.device)] for name, tensor in tensors.items()}


def trained(settings: Settings) -> Data:
    """Weights and inputs of all linear layers of the trained model, by kind of layer and all together."""
    model = settings.trained.model
    questions = multiple_choice(settings.corpus, settings.multiple_choice)
    text = questions.tokens[:TEXT_WINDOWS, : settings.multiple_choice.context].to(settings.device)
    weights = {name: layer.weight.detach() for name, layer in model.linears().items()}
    inputs = {name: x.flatten(0, 1) for name, x in layer_inputs(model, text).items()}
    groups: dict[str, list[Tensor]] = {
        "weights": list(weights.values()),
        "activations": unique(inputs.values()),
    }
    for name in weights:
        groups.setdefault(f"weights of {kind_of(name)}", []).append(weights[name])
        groups.setdefault(f"input of {kind_of(name)}", []).append(inputs[name])
    return groups


def kind_of(layer: str) -> str:
    """The last part of a layer's name: q_proj of model.layers.0.self_attn.q_proj."""
    return layer.rpartition(".")[2]


def unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor once: q, k and v read the same input."""
    return list({tensor.data_ptr(): tensor for tensor in tensors}.values())
