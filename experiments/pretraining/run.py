"""Experiment `pretraining`: byte-level language models trained from random weights, in bfloat16 on a GPU.

Stand-ins for models of the sizes that people train: about 30 million parameters, for paired seeds, and about 120 million.
Tokens are bytes, so no number is published beside these rows. Measured are bits per byte of each text that was held out (each
book, and the validation and test texts of WikiText-2 where the corpus has them), the loss of training along the way, bytes of
text a second, and the share of the GPU's dense bfloat16 peak (`experiments.pretraining.run` has the formula).

Floating-point operations of a training step, as the field counts them, and the share of a GPU's peak that they come to.

Per byte (a token) of a model with N parameters in linear layers, L layers of width w, and sequences of T bytes:

    6 N + 6 L T w

A linear layer takes 2 operations a parameter in the forward pass, and twice as many backward. Causal attention takes 2 products
(queries by keys, probabilities by values) of 2 w operations for each of the T / 2 bytes that a byte attends to on average:
2 L T w forward, and twice as many backward. Embedding, norms, rotary positions, softmax, loss and optimizer are not counted,
and neither is what a recipe of low precision adds (casts) or runs again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from torch import Tensor, nn

from experiments.data.corpus import Corpus, evaluation_texts
from experiments.harness.revision import state
from experiments.harness.rows import Journal, Row, library_versions, table_name
from experiments.models.llama import ModelSettings
from experiments.models.pretraining import (
    SIZES,
    Budget,
    Pretrained,
    PretrainSettings,
    TextBits,
    bits_by_text,
    bits_per_byte,
    common_bytes,
    pretrain,
)
from experiments.models.train import Checkpoint
from experiments.runs.settings import Settings
from reference.arrays.namespace import and_nearest

EXPERIMENT = "pretraining"
RUNS, CURVES = "runs", "curves"
BITS = "bits per byte"
#: Rare bytes are those that the training text has less than once in a million. Of the others of a text, as it is; of the text
#: from which rare bytes are deleted, so that they stand in no context either; and their share.
COMMON_BITS, LEFT_BITS, RARE = "bits per common byte", "bits without rare bytes", "share of rare bytes"
FLOAT32 = "float32"
#: Points of a loss curve.
POINTS = 20
#: Seconds between checkpoints: those of the larger model are 1.5 GB.
CHECKPOINT_SECONDS = 60.0

Values = dict[str, tuple[float, str]]


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the corpus."""
    return settings.corpus.name


def trainings_of(settings: Settings) -> Sequence[Training]:
    """What a run trains: what it was told, or the plan of its scale; on a CPU in float32."""
    plan = getattr(settings, "trainings", ()) or PLANS[settings.scale]
    if settings.device == "cuda":
        return plan
    return [replace(one, settings=replace(one.settings, method=FLOAT32)) for one in plan]


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all trainings; rows in the journal are not measured again, and a killed training is resumed."""
    journal = journal if journal is not None else Journal()
    table = table_name(RUNS, settings.scale, settings.corpus.name)
    for one in trainings_of(settings):
        if not journal.finished(table, one.setting, one.method, one.settings.seed):
            checkpoint = checkpoint_of(settings, one)
            journal.add(measure(settings, one, checkpoint))
            checkpoint.done()
    return journal.rows


def checkpoint_of(settings: Settings, training: Training) -> Checkpoint:
    """The checkpoint of a training, in the cache, by a hash of everything that determines its weights."""
    parts = [
        json.dumps(asdict(training.settings), sort_keys=True),
        settings.corpus.sha256,
        state(),
        library_versions(),
        settings.device_name,
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return Checkpoint(settings.cache / "models" / f"pretraining-{key}.checkpoint", CHECKPOINT_SECONDS)


def measure(settings: Settings, training: Training, checkpoint: Checkpoint) -> list[Row]:
    """Train a model; all rows of it."""
    made = pretrain(training.settings, settings.corpus, settings.device, checkpoint=checkpoint)
    found = evaluated(made.model, settings.corpus, training.settings.model.context, EVALUATED[settings.scale])
    values = {**found, **speed(made, training, settings.device_name)}
    curve = loss_curve(made.losses)
    of_seed = replace(settings, seed=training.settings.seed)
    where = settings.corpus.name, training.setting, training.method
    return [
        of_seed.row(EXPERIMENT, kind, *where, metric, value, unit)
        for kind, table in ((RUNS, values), (CURVES, curve))
        for metric, (value, unit) in table.items()
    ]


def evaluated(model: nn.Module, corpus: Corpus, context: int, limit: int | None) -> Values:
    """`quality`, `common_quality` and `left_quality` of a model on the evaluation texts of a corpus.

    limit: first bytes of each; None: all.
    """
    texts = {name: text[:limit] for name, text in evaluation_texts(corpus).items()}
    common = common_bytes(corpus)
    found = bits_by_text(model, texts, context, common)
    per_byte = {name: one.bits / one.bytes for name, one in found.items()}
    left = left_quality(model, texts, context, common, per_byte)
    return {**quality(per_byte, texts), **common_quality(found), **left}


def left_quality(
    model: nn.Module, texts: Mapping[str, bytes], context: int, common: Tensor, known: Mapping[str, float]
) -> Values:
    """Bits per byte of each text and split after its rare bytes were deleted; none of a text without common bytes.

    known: of whole texts, which hold where nothing is deleted.
    """
    rare = bytes((~common).nonzero().flatten().tolist())
    left = {name: kept for name, text in texts.items() if (kept := text.translate(None, rare))}
    changed = {name: text for name, text in left.items() if len(text) < len(texts[name])}
    found = {**{name: known[name] for name in left}, **bits_per_byte(model, changed, context)}
    return {metric.replace(BITS, LEFT_BITS, 1): value for metric, value in quality(found, left).items()}


def quality(found: Mapping[str, float], texts: Mapping[str, bytes]) -> Values:
    """Bits per byte of each text, and of each split's bytes where it has several texts."""
    values = {f"{BITS}, {name}": (value, "bit") for name, value in found.items()}
    for split in dict.fromkeys(name.partition("/")[0] for name in found):
        mine = [name for name in found if name.partition("/")[0] == split]
        total = sum(len(texts[name]) for name in mine)
        values[f"{BITS}, {split}"] = sum(found[name] * len(texts[name]) for name in mine) / total, "bit"
    return values


def common_quality(found: Mapping[str, TextBits]) -> Values:
    """Of each text and split the bits of common bytes over their number, and the percentage of other bytes.

    A byte that a training never has to predict is only pushed down: what it costs in another text, many bits, depends on the
    training's path. A text without common bytes has no bits of them.
    """
    groups: dict[str, list[TextBits]] = {}
    for name, one in found.items():
        for part in dict.fromkeys((name, name.partition("/")[0])):
            groups.setdefault(part, []).append(one)
    values: Values = {}
    for name, group in groups.items():
        count = sum(one.common_bytes for one in group)
        values[f"{RARE}, {name}"] = 100 * (1 - count / sum(one.bytes for one in group)), "%"
        if count:
            values[f"{COMMON_BITS}, {name}"] = sum(one.common_bits for one in group) / count, "bit"
    return values


def of_common(metrics: Sequence[str]) -> list[str]:
    """Those of `common_quality` and `left_quality` of whole splits."""
    return [one for one in metrics if one.startswith((COMMON_BITS, LEFT_BITS, RARE)) and "/" not in one]


def speed(made: Pretrained, training: Training, device: str) -> Values:
    """Size, bytes, time, rate and the share of the peak; the share only on a GPU whose peak is listed."""
    one = training.settings
    flops = training_flops(linear_parameters(made.model), one.model)
    share = share_of_peak(flops, made.bytes_per_second, device)
    values = {
        "parameters": (sum(parameter.numel() for parameter in made.model.parameters()), ""),
        "steps": (len(made.losses), ""),
        "trained bytes": (len(made.losses) * one.step_bytes, "byte"),
        f"training {BITS} at the end": (made.last_loss, "bit"),
        "time of steps": (made.seconds, "s"),
        "tokens a second": (made.bytes_per_second, "byte/s"),
        "operations a trained byte": (flops, "FLOP"),
    }
    return values if share is None else {**values, "share of the bfloat16 peak": (share, "%")}


def loss_curve(losses: Tensor) -> Values:
    """Means of the training loss over equal parts of the steps, in order."""
    parts = losses.tensor_split(min(POINTS, len(losses)))
    return {
        f"training {BITS}, part {number} of {len(parts)}": (float(part.mean()), "bit")
        for number, part in enumerate(parts, start=1)
    }


# Which models experiment `pretraining` trains, and for how long: at each scale, or as a command names them.


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training: the name of a size, and its settings."""

    size: str
    settings: PretrainSettings

    @property
    def setting(self) -> str:
        """The setting of its rows: size and budget."""
        return f"{self.size}, {self.settings.budget}"

    @property
    def method(self) -> str:
        """The method of its rows: number format, peak learning rate, bytes a step."""
        one = self.settings
        return f"{one.method}, rate {one.rate:g}, {one.step_bytes} bytes a step"


def training(
    size: str, budget: Budget, rate: float | None = None, seed: int = 0, batch: int | None = None
) -> Training:
    """A training of a size, with the size's rate and batch where none are given; ValueError for an unknown size."""
    if size not in SIZES:
        near = and_nearest(size, SIZES, cutoff=0.4)
        raise ValueError(f"unknown size {size!r}{near}; the sizes are {', '.join(SIZES)}")
    known = SIZES[size]
    settings = PretrainSettings(
        model=known.model, budget=budget, batch=batch or known.batch, rate=rate or known.rate, seed=seed
    )
    return Training(size=size, settings=settings)


def sweep(
    size: str,
    budget: Budget,
    rates: Sequence[float] = (),
    seeds: Sequence[int] = (0,),
    batch: int | None = None,
) -> tuple[Training, ...]:
    """A training for each rate and seed; without rates, the size's own."""
    return tuple(training(size, budget, rate, seed, batch) for rate in rates or (None,) for seed in seeds)


#: What each scale trains where no command names it, and the first bytes of each text that it is evaluated on (None: all).
PLANS = {
    "quick": sweep("tiny", Budget(bytes=60_000), (2e-3, 4e-3)),
    "full": (*sweep("30m", Budget(seconds=60), (1e-3, 2e-3, 4e-3)), *sweep("120m", Budget(seconds=240))),
}
EVALUATED = {"quick": 4096, "full": None}


@dataclass(frozen=True, kw_only=True)
class PretrainingSettings(Settings):
    """Settings of a run that was told what to train."""

    trainings: tuple[Training, ...] = ()


def settings_with(settings: Settings, trainings: Sequence[Training]) -> PretrainingSettings:
    """The same settings for these trainings alone: published rows of others stay."""
    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    names = tuple(f"{one.setting}, {one.method}" for one in trainings)
    return PretrainingSettings(**{**given, "only": names, "trainings": tuple(trainings)})


#: Dense bfloat16 products, operations a second, by the name that torch gives the GPU: NVIDIA's data sheets, without sparsity.
BFLOAT16_PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}


def linear_parameters(model: nn.Module) -> int:
    """Parameters of the weights of all linear layers, the output layer too."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def training_flops(parameters: int, settings: ModelSettings) -> int:
    """Operations for each trained byte of a model with so many parameters in linear layers, by the formula above."""
    return 6 * parameters + 6 * settings.layers * settings.context * settings.width


def share_of_peak(flops: float, bytes_per_second: float, device: str) -> float | None:
    """Percent of the GPU's dense bfloat16 peak, of operations a byte; None for a device whose peak is not listed."""
    peak = BFLOAT16_PEAK.get(device)
    return None if peak is None else 100 * flops * bytes_per_second / peak
