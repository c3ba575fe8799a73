"""`ao-lab eval`: what a folder's model knows of a text, how far it is from its base, and tasks of lm-evaluation-harness.

Reads folders of `save_pretrained` (either layout) and of torchao as they are, others of compressed-tensors dequantized, and
dense ones of transformers. Nothing is fetched: models, tokenizers and text are local.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.io.files import links_out, page
from ao_lab.checkpoint.io.shards import has_weights, look_at
from ao_lab.checkpoint.io.strict_json import read_object, shown
from ao_lab.checkpoint.model_builder import dense_model, read_config
from ao_lab.cli.listings import known
from ao_lab.cli.terminal import (
    WrongInput,
    check_device,
    check_writable,
    console,
    print_json,
    print_table,
    strict,
    track_progress,
    without_model,
)
from ao_lab.eval import (
    PAIRED,
    TASKS,
    Harness,
    HarnessOptions,
    Text,
    Tokens,
    check_text,
    harness_note,
    harness_results,
    measured,
    prepared,
    results_of,
    text_of,
    weight_errors,
    windows_of,
)
from ao_lab.install.extras import needed, pip_install
from ao_lab.install.versions import __version__

BYTES = 256
#: A text that every tokenizer has tokens for.
PROBE = "a"
LENGTH = 512


def run_eval(
    folder: Path,
    tasks: list[str],
    *,
    limit: int,
    length: int,
    text: str | None,
    corpus: Path | None,
    harness: HarnessOptions,
    against: Path | None,
    device: str | None,
    save: bool,
    as_json: bool,
) -> None:
    """Measure, show, and with `save` keep the results beside the model."""
    check_folder(folder)
    local, foreign = split_tasks(tasks, against)
    check_before(folder, against, device, save)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        check_text(text, corpus)
        run = prepared(foreign, harness, folder)
        if run is not None:
            check_known(run)
        source = text_of(text, corpus) if local else None
        results = (
            local_results(folder, local, limit, length, source, against, where, as_json) if source else {}
        )
        if run is not None:
            results = with_harness(results, folder, run, limit, where)
    except (ValueError, TypeError) as error:
        raise WrongInput(str(error)) from error
    if save:
        keep(folder, results)
    show(results, as_json)


def split_tasks(tasks: list[str], against: Path | None) -> tuple[tuple[str, ...], list[str]]:
    """Our tasks and those of lm-evaluation-harness; WrongInput where the base or the harness is missing."""
    wanted = tasks or [task for task in TASKS if against is not None or task not in PAIRED]
    local = tuple(task for task in TASKS if task in wanted)
    foreign = [task for task in wanted if task not in TASKS]
    alone = [task for task in local if task in PAIRED and against is None]
    if alone:
        raise WrongInput(f"{alone[0]} compares with the model's base; give its folder with --against")
    if foreign and importlib.util.find_spec("lm_eval") is None:
        raise WrongInput(
            f"{', '.join(foreign)}: tasks of lm-evaluation-harness, which is not installed; {pip_install('eval')}, or use "
            f"{', '.join(TASKS)}, which need nothing"
        )
    return local, foreign


def check_known(run: Harness) -> None:
    """WrongInput, with the nearest names, for tasks that the harness lacks; a YAML file is a task."""
    for name in run.tasks:
        if name not in run.manager.all_tasks and not Path(name).exists():
            known(name, {**dict.fromkeys(TASKS), **dict.fromkeys(run.manager.all_tasks)}, "task")


def check_before(folder: Path, against: Path | None, device: str | None, save: bool) -> None:
    """WrongInput for what would only be found after the work: a device, a base, a folder that cannot be written."""
    check_device(device)
    if against is not None:
        check_folder(against)
    if save:
        check_places(folder)


def check_places(folder: Path) -> None:
    """WrongInput, or OSError, where `keep` could not write: results are put into a card, which is written anew."""
    from ao_lab.checkpoint.io.files import refuse_folders
    from ao_lab.checkpoint.model_card import CARD, RESULTS

    check_writable(folder, "--save into MODEL_DIR")
    refuse_folders(folder / name for name in (CARD, RESULTS))
    if links_out(folder, [CARD]):
        raise WrongInput(f"{folder / CARD} is a link out of the model's folder; copy the file there")


def check_folder(folder: Path) -> None:
    """WrongInput where there is no model, or files that cannot be read."""
    if not (folder / "config.json").is_file():
        raise WrongInput(without_model(folder, "ao-lab quantize or transformers"))
    try:
        read_config(folder)
        if has_weights(folder):
            look_at(folder)
    except ValueError as error:
        raise WrongInput(str(error)) from error


def local_results(
    folder: Path,
    tasks: tuple[str, ...],
    limit: int,
    length: int,
    source: Text,
    against: Path | None,
    device: str,
    as_json: bool,
) -> dict[str, Any]:
    """The results of our tasks and their conditions."""
    if limit < 1 or length < 2:
        raise WrongInput(
            f"--limit is at least 1 window and --length at least 2 tokens, got {limit} and {length}"
        )
    encode, tokenizer, beginning = encoder(folder)
    length = min(length, longest(folder))
    windows = windows_of(source.text, encode, length, limit, list(beginning.values()))
    model = loaded(folder, device)
    base = None if against is None or not set(tasks) & set(PAIRED) else loaded_base(against, device, folder)
    check_vocabulary(model, windows.ids, folder)
    numbers: dict[str, Any] = {}
    if set(tasks) - {"weights"}:
        check_language_model(model, folder)
        with track_progress("eval", plain=as_json, transient=True) as work:
            sums = measured(model, windows, base, lambda done, total: work.at(done, "windows", total))
        numbers = dict(results_of(sums, windows, tasks, words=not source.code))
    if "weights" in tasks and base is not None:
        numbers["weights"] = weight_errors(model, base)
    return {
        "model": folder.resolve().name,
        "against": None if against is None else against.resolve().name,
        "tasks": numbers,
        "text": source.name,
        "comparable": source.compares,
        "tokenizer": tokenizer,
        "windows_begin_with": "".join(beginning) or None,
        "windows": len(windows.ids),
        "length": length,
        "tokens": windows.predicted,
        "device": device,
        "versions": {"ao_lab": __version__, "torch": torch.__version__},
    }


def encoder(folder: Path) -> tuple[Any, str, dict[str, int]]:
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
    if size == BYTES:
        return _bytes, "bytes", {}
    raise WrongInput(
        f"{folder} has no tokenizer.json and its model has {size} tokens; copy the tokenizer of the base model into it "
        f"(models of {BYTES} tokens read bytes)"
    )


def beginning_of(folder: Path, fast: Any) -> dict[str, int]:
    """The tokens that a tokenizer puts before a text, by name: what add_bos_token of tokenizer_config.json says, or else what
    tokenizer.json does."""
    file = folder / "tokenizer_config.json"
    fields = read_object(file, nonfinite=True, huge=True) if file.is_file() else {}
    wanted, bos = fields.get("add_bos_token"), fields.get("bos_token")
    if wanted is False:
        return {}
    alone = fast(PROBE, add_special_tokens=False)["input_ids"]
    whole = fast(PROBE, add_special_tokens=True)["input_ids"]
    places = [at for at in range(len(whole)) if whole[at : at + len(alone)] == alone]
    found = whole[: places[0]] if places else []
    bos = bos.get("content") if isinstance(bos, dict) else bos
    if not found and wanted is True and isinstance(bos, str):
        found = [one] if (one := fast.get_vocab().get(bos)) is not None else []
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
    """The longest input that the model takes."""
    given = read_config(folder).get("max_position_embeddings")
    return given if isinstance(given, int) and given > 1 else LENGTH


def check_language_model(model: nn.Module, folder: Path) -> None:
    """WrongInput where the model gives no probabilities of the next token of its input."""
    config = getattr(model, "config", None)
    generates: Any = getattr(model, "can_generate", lambda: True)
    if not generates() or getattr(config, "is_encoder_decoder", False):
        raise WrongInput(
            f"{folder} holds {type(model).__name__}, no causal language model; --tasks weights compares any"
        )


def check_vocabulary(model: nn.Module, ids: torch.Tensor, folder: Path) -> None:
    """WrongInput where the tokenizer makes tokens that the model lacks."""
    table: Any = getattr(model, "get_input_embeddings", lambda: None)()
    size = None if table is None else table.weight.shape[0]
    if size is not None and int(ids.max()) >= size:
        raise WrongInput(
            f"the tokenizer of {folder} makes token {int(ids.max())}, the model has {size}; it is another model's"
        )


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
            return load_pretrained(folder).to(device)
    return by_transformers(folder, quantization).to(device)


def loaded_base(folder: Path, device: str, quantized: Path) -> nn.Module:
    """The base; WrongInput where it is the model itself."""
    if folder.resolve() == quantized.resolve():
        raise WrongInput(f"--against {folder} is the model itself; give the folder of its base")
    return loaded(folder, device)


def by_transformers(folder: Path, quantization: Any) -> nn.Module:
    """A dense folder, or one of compressed-tensors that another program wrote: dequantized."""
    transformers = needed("transformers")
    more: dict[str, Any] = {}
    if quantization is not None:
        if quantization.get("quant_method") != "compressed-tensors":
            raise WrongInput(
                f"{folder} is quantized by {shown(quantization.get('quant_method'))}, which ao_lab does not read"
            )
        needed("compressed_tensors")
        more["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    hide_progress: Any = transformers.utils.logging.disable_progress_bar
    hide_progress()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result: nn.Module = dense_model(folder, dtype="auto", **more)
    return result.eval()


def with_harness(
    results: dict[str, Any], folder: Path, run: Harness, limit: int, device: str
) -> dict[str, Any]:
    """The results of lm-evaluation-harness beside ours."""
    found = harness_results(loaded(folder, device), run, limit)
    base = results or {"model": folder.resolve().name, "device": device, "tasks": {}}
    return {**base, **found, "tasks": {**base["tasks"], **found["tasks"]}}


def keep(folder: Path, results: dict[str, Any]) -> None:
    """eval.json, and the results in the card where there is one."""
    from ao_lab.checkpoint.io.files import write_text
    from ao_lab.checkpoint.model_card import CARD, RESULTS, with_results

    write_text(folder / RESULTS, json.dumps(strict(results), indent=2, allow_nan=False) + "\n")
    if (text := page(folder / CARD)) is not None:
        write_text(folder / CARD, with_results(text, results))


def show(results: dict[str, Any], as_json: bool) -> None:
    """The numbers, as a table or as JSON."""
    if as_json:
        print_json(results)
        return
    rows = [
        [task, name, f"{value:.6g}"]
        for task, numbers in results["tasks"].items()
        for name, value in numbers.items()
    ]
    begun = results.get("windows_begin_with")
    title = f"{results['model']} on {results.get('text', 'tasks')}"
    print_table(
        f"{title}{f', each window behind {begun}' if begun else ''}",
        ["task", "number", "value"],
        rows,
        ["value"],
    )
    if "comparable" in results:
        console().print(f"comparable with {results['comparable']}", markup=False, highlight=False)
    if note := harness_note(results):
        console().print(note, markup=False, highlight=False)
