"""Causal language models in folders of transformers: by the name of a record or by a path, loaded, copied, evaluated.

A model is evaluated in bfloat16, window by window, so that where one scale is over a whole input no window sees another.
Predictions of the model as it was (`Remembered`) are held in memory where they fit, since every quantized copy is compared with
them on the same windows.

`published_name` says which published model a folder is: its shapes are those of the model, and its name says so too. Published
values stand beside no other.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ao_lab.checkpoint.export import export_of
from ao_lab.checkpoint.io.shards import has_weights, look_at
from ao_lab.checkpoint.model_builder import dense_model, read_config
from ao_lab.cli.terminal import WrongInput
from ao_lab.eval import Sums, exponential, measured
from ao_lab.install.extras import needed
from ao_lab.measure.folders import check_vocabulary, encoder, longest
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.low_rank import FACTORS, residual_layers
from experiments.data.evaluation import Stored, stored, stored_plain
from experiments.data.texts import EvaluationText, TextWindows, mean_and_error, token_windows
from experiments.harness.measuring import Values
from experiments.models.conversion import quietly
from experiments.models.pretrained import FACTS, LANGUAGE, MODELS, Step, pretrained, task_of

DTYPE = torch.bfloat16
#: How the kind of a real model's tables begins.
REAL = "real "
#: The data of what is of no text, and the setting and method of what is of no scheme.
MODEL, FILE = "model", "file"
BASE = "bfloat16"
#: Bytes of predictions that are held, on a CPU and on a GPU; beyond, the model predicts again.
HELD = {"cpu": 2 << 30, "cuda": 40 << 30}
#: What a folder says nothing of.
UNKNOWN_GRID = "not stated: the folder's own weights"


@dataclass(frozen=True)
class RealModel:
    """A model in a folder. name: in rows. grid: what its weights had been rounded to. published: see the module text. task: one
    of `experiments.models.pretrained`."""

    name: str
    folder: Path
    grid: str
    published: str = ""
    task: str = LANGUAGE


def real_model(
    given: str, cache: Path, accept: Collection[str] = (), step: Step = lambda word: None
) -> RealModel:
    """The model of a record's name, fetched where it is not in the cache, or of a folder. accept, step: as for `pretrained`.

    ValueError for a name that is neither, for a folder without a dense model of transformers, and where a package cannot be
    had.
    """
    if given in MODELS:
        return of_folder(pretrained(given, cache, accept=accept, step=step))
    folder = Path(given)
    if not folder.is_dir():
        raise ValueError(
            f"--model {given} is no folder and no name of a pretrained model; those are {', '.join(MODELS)}"
        )
    return of_folder(folder)


def of_folder(folder: Path) -> RealModel:
    """The model of a folder; ValueError as `real_model`."""
    if not (folder / "config.json").is_file() or not has_weights(folder):
        raise ValueError(
            f"{folder} holds no model of transformers (config.json and weights); give the folder of one"
        )
    config = read_config(folder)
    look_at(folder)
    if config.get("quantization_config") is not None:
        raise ValueError(f"{folder} is quantized already; the tables start from a dense model, give its base")
    if (folder / FACTS).is_file():
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        return RealModel(facts["title"], folder, facts["grid"], task=task_of(folder))
    name = model_name(folder)
    return RealModel(
        name,
        folder,
        UNKNOWN_GRID,
        published_name(name, config),
        task_of(folder),
    )


def model_name(folder: Path) -> str:
    """The name of a folder's model: the folder's, or of a snapshot in the cache of Hugging Face's hub, which is named by its
    commit, the repository's."""
    whole = folder.resolve()
    repository = whole.parent.parent.name if whole.parent.name == "snapshots" else ""
    return plain_name(repository.split("--")[-1] if repository.startswith("models--") else whole.name)


def plain_name(name: str) -> str:
    """A folder's name as part of a table's."""
    return re.sub(r"[^\w.+-]+", "_", name) or "model"


@dataclass(frozen=True)
class Shape:
    """What tells a published model: hidden width, layers, tokens, whether rotary frequencies are scaled; and words of its
    name. The names are those of `experiments/published`."""

    name: str
    width: int
    layers: int
    tokens: int
    scaled: bool
    words: tuple[str, ...]


SHAPES = (
    Shape("Llama-3.1-8B", 4096, 32, 128256, True, ("llama", "3.1", "8b")),
    Shape("Llama-3-8B", 4096, 32, 128256, False, ("llama", "3", "8b")),
    Shape("Llama-3.2-1B", 2048, 16, 128256, True, ("llama", "3.2", "1b")),
    Shape("Llama-3.2-3B", 3072, 28, 128256, True, ("llama", "3.2", "3b")),
    Shape("Llama-2-7B(-chat)", 4096, 32, 32000, False, ("llama", "2", "7b", "chat")),
)


def published_name(name: str, config: dict[str, Any]) -> str:
    """The published model that a folder is, by its shapes and its name; "" where it is none, or another training of one."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaled = isinstance(rope, dict) and rope.get("rope_type", "default") != "default"
    found = (config.get("hidden_size"), config.get("num_hidden_layers"), config.get("vocab_size"), scaled)
    # Words of the base model's name, so that "-Instruct" and other trainings are none of it.
    words = tuple(word for word in re.split(r"[-_\s]+", name.lower()) if word not in ("meta", "hf", "bf16"))
    words = tuple(word.removeprefix("meta") for word in words)
    for shape in SHAPES:
        if found == (shape.width, shape.layers, shape.tokens, shape.scaled) and words == shape.words:
            return shape.name
    return ""


def check_usable(model: RealModel) -> None:
    """ValueError for a folder whose model is no causal language model, and for one without a tokenizer; no weight is read.

    Encoders and speech models are looked at when they are loaded.
    """
    if model.task != LANGUAGE:
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    config = read_config(model.folder)
    named = config.get("architectures") or [CAUSAL.get(str(config.get("model_type")))]
    if not set(named) & set(CAUSAL.values()):
        said = ", ".join(map(str, named))
        raise ValueError(f"{model.folder} holds {said}, no causal language model; give the folder of one")
    encoding_of(model)


def encoding_of(model: RealModel) -> tuple[Any, list[int]]:
    """How a model's tokenizer reads text, and the tokens that it puts before one; ValueError without a tokenizer."""
    try:
        encode, _, beginning = encoder(model.folder)
    except WrongInput as error:
        raise ValueError(str(error)) from error
    return encode, list(beginning.values())


def load(model: RealModel, device: str) -> nn.Module:
    """The model in bfloat16, to be evaluated."""
    with quietly():
        made: nn.Module = dense_model(model.folder, dtype=DTYPE)
    if not made.can_generate():  # type: ignore[operator]
        raise ValueError(f"{model.folder} holds {type(made).__name__}, no causal language model")
    return made.eval().requires_grad_(False).to(device)


def windows_for(
    model: RealModel, texts: Sequence[EvaluationText], length: int, count: int
) -> list[TextWindows]:
    """Windows of each text by the model's tokenizer, no longer than the model takes; ValueError without a tokenizer."""
    encode, beginning = encoding_of(model)
    length = min(length, longest(model.folder))
    return [token_windows(text, encode, length, count, beginning) for text in texts]


@contextmanager
def one_sequence_each() -> Iterator[None]:
    """transformers does not look whether positions are of several sequences packed into one, for which an eager forward waits
    for the GPU before its first layer. Of windows they never are: what it would find is None."""
    masks: Any = needed("transformers.masking_utils")
    look = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = lambda ids: look(ids) if torch.compiler.is_compiling() else None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = look


class Uncached(nn.Module):
    """A model's logits of whole sequences, without keys and values that nobody reads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary)."""
        with one_sequence_each():
            logits: Tensor = self.model(ids, use_cache=False).logits
        return logits


class Remembered(nn.Module):
    """A module that returns logits: those of the same ids are computed once, as long as they take no more than `limit` bytes
    together. Ids that lie where those did whose logits are known are not looked at, for which the host would wait."""

    def __init__(self, model: nn.Module, limit: int) -> None:
        super().__init__()
        self.model, self.left = model, limit
        self.known: dict[object, Tensor] = {}
        #: Ids whose logits are known: as long as they are held, no others lie where they do.
        self.held: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary)."""
        place = (
            None
            if ids.is_inference()
            else (ids.device, ids.data_ptr(), ids.shape, ids.stride(), ids._version)
        )
        if place in self.known:
            return self.known[place]
        key = ids.cpu().numpy().tobytes()
        if key in self.known:
            return self.known[key]
        logits: Tensor = self.model(ids)
        if logits.nbytes <= self.left:
            self.left -= logits.nbytes
            self.known[key] = logits
            if place is not None:
                self.known[place] = logits
                self.held.append(ids)
        return logits


@dataclass(frozen=True)
class Bench:
    """A loaded model with the windows of its texts and its own predictions of them."""

    model: RealModel
    base: nn.Module
    remembered: Remembered
    windows: tuple[TextWindows, ...]

    #: The method of the dense model's rows.
    baseline = BASE

    @classmethod
    def of(
        cls, model: RealModel, texts: Sequence[EvaluationText], length: int, count: int, device: str
    ) -> Bench:
        """Load a model and cut the texts into windows; ValueError where its tokenizer makes tokens that it lacks."""
        windows = windows_for(model, texts, length, count)
        base = load(model, device)
        for one in windows:
            check_vocabulary(base, one.ids, model.folder)
        there = tuple(replace(one, ids=one.ids.to(device)) for one in windows)
        return cls(model, base, Remembered(Uncached(base), HELD[device]), there)

    def copy(self) -> nn.Module:
        """A copy of the model that may be changed."""
        return copy.deepcopy(self.base)

    def results(self, model: nn.Module) -> dict[str, Values]:
        """What a model does on each text, by the text's name."""
        return {windows.text.name: quality(self, windows, model) for windows in self.windows}


def quality(bench: Bench, windows: TextWindows, model: nn.Module) -> Values:
    """Loss and perplexity of a model on a text, and how far it is from the base model there; see `values_of`."""
    return values_of(evaluated(bench, windows, model), windows)


def evaluated(bench: Bench, windows: TextWindows, model: nn.Module) -> Sums:
    """What a model predicts of a text, beside what the base model does, window by window."""
    return measured(Uncached(model), windows, bench.remembered)  # type: ignore[arg-type]


def changes_of(sums: Sums) -> list[float]:
    """Of each window the change of the loss from the base model's."""
    return [ours - base for ours, base in zip(sums.losses, sums.base_losses, strict=True)]


def values_of(sums: Sums, windows: TextWindows) -> Values:
    """Means over windows, with standard errors.

    "loss, change" is paired by window; "KL" is the divergence of the model's next-token distribution from the base model's,
    in nats, the mean over predicted tokens; "perplexity, change" in percent of the base model's.
    """
    loss, _ = mean_and_error(sums.losses, windows.documents)
    change, error = mean_and_error(changes_of(sums), windows.documents)
    kl, kl_error = mean_and_error(sums.kls, windows.documents)
    nats = loss * windows.predicted / (windows.bytes * windows.share)
    return {
        "perplexity": (exponential(loss), ""),
        "perplexity, change": (100 * (exponential(change) - 1), "%"),
        "loss": (loss, "nat"),
        "loss, change": (change, "nat"),
        "loss, standard error of the change": (error, "nat"),
        "KL": (kl, "nat"),
        "KL, standard error": (kl_error, "nat"),
        "bits per byte": (nats / math.log(2), "bit"),
        "same first choice": (100 * sums.agreed / windows.predicted, "%"),
        "windows": (len(windows.ids), ""),
        "tokens of a window": (windows.ids.shape[1], ""),
        "windows begin with BOS": (float(windows.first == 1 and windows.share == 1.0), ""),
    }


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers by name, without a head whose weight is the embedding's."""
    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    shared = None if table is None else table.weight
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight is not shared
    }


class Undivided(ValueError):
    """A scheme's blocks do not divide every layer."""


def check_whole(scheme: str, layers: Mapping[str, nn.Linear]) -> None:
    """Undivided where a layer is not quantized: half a model would stand beside whole ones."""
    dense = [name for name, layer in layers.items() if not isinstance(layer.weight, QuantizedTensor)]
    if dense:
        raise Undivided(f"{scheme} leaves {len(dense)} of {len(layers)} layers dense, {dense[0]} first")


#: How statuses begin of schemes whose groups do not divide what they have to.
UNFIT = (f"status: error: {Undivided.__name__}: ", "status: error: ValueError: quantize_: groups of ")
#: What a status says instead, and what stands in it for callers of `quantize_` alone.
MISSING, OPTION = (
    ("status: missing: ", "status: missing: groups of "),
    re.compile("; use (group_size|one scale).*$"),
)


def not_tried(values: Values) -> Values:
    """Values of a measurement; where a scheme leaves layers dense, or fits none, that it is missing and no error."""
    return {missing_metric(metric): value for metric, value in values.items()}


def missing_metric(metric: str) -> str:
    """A metric, or the status of a scheme that does not fit a model as one that is missing."""
    for error, missing in zip(UNFIT, MISSING, strict=True):
        if metric.startswith(error):
            return OPTION.sub("", metric.replace(error, missing))
    return metric


def in_files(weight: QuantizedTensor, parts: Stored) -> Stored:
    """Bytes of a weight in the files that `ao-lab quantize` writes: scales that were rounded to the weight's dtype are in it
    there, in compressed-tensors' layout, and float32 in memory. parts: the bytes of what is stored."""
    scale = weight.scheme.scale
    if scale.compute != "input" or scale.storage != "float32" or export_of(weight.recipe) is None:
        return parts
    return replace(parts, scales=parts.scales * weight.dtype.itemsize // torch.float32.itemsize)


#: The bytes of a model in memory, where they are others than those of its files.
IN_MEMORY = "size in memory"


def sizes(model: nn.Module) -> Values:
    """Decimal bytes of the whole model in files, weights that two layers share once, and bits per quantized weight: scales,
    zero points and the factors of low-rank residuals included; and the bytes in memory where these are others."""
    quantized, others, count, held = Stored(0), Stored(0), 0, 0
    factors = {id(layer.get_parameter(name)) for layer in residual_layers(model).values() for name in FACTORS}
    for parameter in model.parameters():
        if isinstance(parameter, QuantizedTensor):
            parts = stored(parameter.quantized)
            written = in_files(parameter, parts)
            quantized += written
            held += parts.total - written.total
            count += parameter.numel()
        elif id(parameter) in factors:
            quantized += stored_plain(parameter)
        else:
            others += stored_plain(parameter)
    found: Values = {"size": (quantized.total + others.total, "byte")}
    if held:
        found[IN_MEMORY] = (quantized.total + others.total + held, "byte")
    if count:
        found["bits per weight"] = (8 * quantized.total / count, "bit")
    return found
