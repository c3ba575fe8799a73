"""Models and tokenizers of folders, as they are measured: quantized by us or others, or dense. Nothing is fetched.

Folders of `save_pretrained` (either layout) and of torchao are read as they are, others of compressed-tensors dequantized, and
dense ones by transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.io.files import without
from ao_lab.checkpoint.io.shards import has_weights, look_at
from ao_lab.checkpoint.io.strict_json import read_object, shown
from ao_lab.checkpoint.model_builder import dense_model, read_config
from ao_lab.eval import Encode, Text, Tokens, Windows, windows_of
from ao_lab.install.extras import WrongInput, needed, wrong_input
from ao_lab.measure.asked import (
    BYTES,
    LENGTH,
    as_fields,
    check_length,
    check_reach,
    check_reads,
    context_of,
)

#: A text that every tokenizer has tokens for.
PROBE = "a"


def without_model(folder: Path, writers: str) -> str:
    """What to say of a folder that has no config.json; of a name on the Hub, the command that fetches it."""
    return without(folder, "no config.json", writers)


def check_folder(folder: Path) -> None:
    """WrongInput where there is no model, or files that cannot be read."""
    if not (folder / "config.json").is_file():
        raise WrongInput(without_model(folder, "ao-lab quantize or transformers"))
    with wrong_input():
        read_config(folder)
        if has_weights(folder):
            look_at(folder)


def loaded(folder: Path, device: str) -> nn.Module:
    """The model of a folder, quantized as it is where ao_lab can read it."""
    from ao_lab.checkpoint.api import load_pretrained
    from ao_lab.checkpoint.formats import TORCHAO_KEY
    from ao_lab.checkpoint.records import KEY

    check_folder(folder)
    quantization = read_config(folder).get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise WrongInput(
            f"quantization_config of {folder / 'config.json'} is an object, got {shown(quantization)}; fetch it again"
        )
    if quantization is not None:
        metadata = look_at(folder).metadata
        if KEY in metadata or TORCHAO_KEY in metadata:
            with wrong_input():
                model = load_pretrained(folder)
            return model.to(device)
    return by_transformers(folder, quantization).to(device)


def by_transformers(folder: Path, quantization: Any) -> nn.Module:
    """A dense folder, or one of compressed-tensors that another program wrote: dequantized."""
    transformers = needed("transformers")
    more: dict[str, Any] = {}
    if quantization is not None:
        if quantization.get("quant_method") != "compressed-tensors":
            raise WrongInput(
                f"{folder} is quantized by {shown(quantization.get('quant_method'))}, which ao_lab cannot load"
            )
        needed("compressed_tensors")
        more["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    hide_progress: Any = transformers.utils.logging.disable_progress_bar
    hide_progress()
    with warnings.catch_warnings(), wrong_input():
        warnings.simplefilter("ignore")
        try:
            result: nn.Module = dense_model(folder, dtype="auto", **more)
        except RuntimeError as error:
            # What transformers tells of weights that do not fit into the model of config.json.
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise WrongInput(
                f"{folder}: config.json describes weights of other shapes than the files have; fetch the folder again"
            ) from error
    return result.eval()


@dataclass(frozen=True)
class Reading:
    """How text becomes tokens: a function, its name, tokens that each window begins with, and the longest window (None: no
    configuration says it)."""

    encode: Encode
    name: str
    beginning: dict[str, int]
    longest: int | None


def windows_for(
    model: str | Path | nn.Module, tokenizer: Any, source: Text, limit: int, length: int | None
) -> tuple[Windows, Reading]:
    """Windows of a text for a model; WrongInput for windows that are none, or longer than the model's context."""
    if limit < 1 or (length is not None and length < 2):
        given = f"--limit {limit}" if limit < 1 else f"--length {length}"
        raise WrongInput(f"{given}: --limit is at least 1 sequence and --length at least 2 tokens")
    reading = reading_of(model, tokenizer)
    check_length(length, reading.longest)
    length = min(LENGTH, reading.longest or LENGTH) if length is None else length
    with wrong_input():
        windows = windows_of(source.text, reading.encode, length, limit, list(reading.beginning.values()))
    return windows, reading


def reading_of(model: str | Path | nn.Module, tokenizer: Any) -> Reading:
    """How a model reads text: by its folder, or by the tokenizer that is given beside a model in memory."""
    if isinstance(model, (str, Path)):
        if tokenizer is not None:
            raise WrongInput("tokenizer= goes with a model in memory; a folder has its own")
        return Reading(*encoder(Path(model)), context_of(fields_of(model)))
    most = context_of(fields_of(model))
    if isinstance(tokenizer, (str, Path)):
        return Reading(*encoder(Path(tokenizer)), most)
    if tokenizer is None:
        size = getattr(getattr(model, "config", None), "vocab_size", None)
        if size != BYTES:
            raise WrongInput(
                f"{type(model).__name__} is a model in memory: give tokenizer=, a folder with tokenizer.json or a fast "
                f"tokenizer of transformers (models of {BYTES} tokens read bytes)"
            )
        return Reading(_bytes, "bytes", {}, most)
    if not getattr(tokenizer, "is_fast", False):
        raise WrongInput(
            f"tokenizer= is a folder or a fast tokenizer of transformers, got {type(tokenizer).__name__}; "
            f"AutoTokenizer.from_pretrained(FOLDER) gives a fast one"
        )
    return Reading(
        lambda text: _encoded(tokenizer, text), type(tokenizer).__name__, first_tokens(tokenizer), most
    )


def on_device(device: str) -> AbstractContextManager[Any]:
    """A GPU is the current one inside, whose stream events are recorded on and whose graphs are captured."""
    return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode inside; every module is in the mode of before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def device_of(device: str | None, model: object = None) -> str:
    """The device that is meant, by default cuda where there is a GPU; WrongInput for a GPU that is not there.

    model: where it is in memory, its own device, which is the only one that may be named.
    """
    try:
        named = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise WrongInput(f"--device {device}: {str(error).splitlines()[0]}") from error
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    if first is not None:
        own = first.device
        if named is not None and (named.type != own.type or named.index not in (None, own.index)):
            raise WrongInput(
                f"--device {device}: the model in memory is on {own}; move it there, or name none"
            )
        return str(own)
    if named is None or device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if named.type == "cuda" and not torch.cuda.is_available():
        raise WrongInput(
            f"--device {device}: torch sees no GPU here; use --device cpu, or see why with ao-lab doctor"
        )
    return device


def encoder(folder: Path) -> tuple[Encode, str, dict[str, int]]:
    """How the folder's model reads text, the name of that, and the tokens that it puts before a text; WrongInput where the
    folder does not say it.

    A model with 256 tokens and no tokenizer reads bytes.
    """
    read: Any = needed("transformers").PreTrainedTokenizerFast
    if (folder / "tokenizer.json").is_file():
        try:
            fast = read(tokenizer_file=str(folder / "tokenizer.json"))
        except Exception as error:
            # The tokenizers library raises plain Exception for files that it cannot read.
            raise WrongInput(f"{folder / 'tokenizer.json'} is no tokenizer: {error}") from error
        return lambda text: _encoded(fast, text), "tokenizer.json", beginning_of(folder, fast)
    size = read_config(folder).get("vocab_size")
    check_reads(folder, False, size)
    return _bytes, "bytes", {}


def beginning_of(folder: Path, fast: Any) -> dict[str, int]:
    """The tokens that a tokenizer puts before a text, by name: what add_bos_token of tokenizer_config.json says, or else what
    tokenizer.json does."""
    file = folder / "tokenizer_config.json"
    fields = read_object(file, nonfinite=True, huge=True) if file.is_file() else {}
    wanted, bos = fields.get("add_bos_token"), fields.get("bos_token")
    if wanted is False:
        return {}
    if found := first_tokens(fast):
        return found
    bos = bos.get("content") if isinstance(bos, dict) else bos
    token = fast.get_vocab().get(bos) if wanted is True and isinstance(bos, str) else None
    return {} if token is None else {fast.convert_ids_to_tokens(token): token}


def first_tokens(fast: Any) -> dict[str, int]:
    """The tokens that a tokenizer puts before a text by itself, by name."""
    alone = fast(PROBE, add_special_tokens=False)["input_ids"]
    whole = fast(PROBE, add_special_tokens=True)["input_ids"]
    places = [at for at in range(len(whole)) if whole[at : at + len(alone)] == alone]
    found = whole[: places[0]] if places else []
    return {fast.convert_ids_to_tokens(token): token for token in found}


def _encoded(tokenizer: Any, text: str) -> Tokens:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return Tokens(
        torch.tensor(result["input_ids"], dtype=torch.int64), [end for _, end in result["offset_mapping"]]
    )


def _bytes(text: str) -> Tokens:
    ends = [index + 1 for index, letter in enumerate(text) for _ in letter.encode()]
    return Tokens(torch.tensor(list(text.encode()), dtype=torch.int64), ends)


def longest(folder: Path) -> int:
    """The longest input that the model takes; LENGTH where its config.json does not say."""
    return context_of(read_config(folder)) or LENGTH


def fields_of(model: str | Path | nn.Module) -> Mapping[str, Any]:
    """The fields of the configuration of a model in memory, or of a folder."""
    if isinstance(model, nn.Module):
        return as_fields(getattr(model, "config", None))
    return read_config(Path(model))


def check_generates(model: str | Path | nn.Module, tokens: int) -> None:
    """WrongInput where transformers' generate() is not there, or cannot reach so many tokens, those of the prompt included."""
    if isinstance(model, nn.Module) and not callable(getattr(model, "generate", None)):
        raise WrongInput(
            f"{type(model).__name__} has no generate() of transformers to time; leave it out with new_tokens=0"
        )
    check_reach(tokens, context_of(fields_of(model)))


def check_language_model(model: nn.Module, folder: Path | str) -> None:
    """WrongInput where the model gives no probabilities of the next token of its input."""
    config = getattr(model, "config", None)
    generates: Any = getattr(model, "can_generate", lambda: True)
    if not generates() or getattr(config, "is_encoder_decoder", False):
        raise WrongInput(
            f"{folder} holds {type(model).__name__}, not a causal language model; --tasks weights works for any model"
        )


def vocabulary_of(model: nn.Module) -> int | None:
    """Rows of a model's table of tokens; None where it has none that it names."""
    table: Any = getattr(model, "get_input_embeddings", lambda: None)()
    return None if table is None else int(table.weight.shape[0])


def check_vocabulary(model: nn.Module, ids: torch.Tensor, folder: Path | str) -> None:
    """WrongInput where the tokenizer makes tokens that the model lacks."""
    size = vocabulary_of(model)
    if size is not None and int(ids.max()) >= size:
        raise WrongInput(
            f"the tokenizer of {folder} makes token ids up to {int(ids.max())}, the model's embedding has {size} rows; "
            "it belongs to another model, give the model its own"
        )
