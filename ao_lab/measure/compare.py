"""`compare`: configurations of one model side by side: loss, size, speed, memory, and distance from the unquantized model."""

from __future__ import annotations

import copy
import gc
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from ao_lab.calibration.methods import ordered
from ao_lab.checkpoint.api import LAYOUTS
from ao_lab.checkpoint.io.files import rewrite_text, write_text
from ao_lab.checkpoint.model_card import unserved_weights
from ao_lab.checkpoint.size import Written, written_as
from ao_lab.config.compressed_tensors import unserved
from ao_lab.eval import (
    NAMED,
    Harness,
    HarnessOptions,
    Sums,
    Text,
    Windows,
    harness_results,
    measured,
    results_of,
)
from ao_lab.install.extras import WrongInput, lacking, wrong_input
from ao_lab.install.revision import commit, processor, utc_now, versions_of
from ao_lab.install.versions import __version__
from ao_lab.measure.asked import LIBRARIES, PROMPT
from ao_lab.measure.base_weights import other_weights
from ao_lab.measure.comparison import COMPRESSED, TOLERANCE, Compared, Comparison
from ao_lab.measure.configurations import (
    BASE,
    USUAL,
    Given,
    check_calibration,
    check_same_model,
    check_same_tokens,
    configurations,
    files_of,
    made_from,
    observes,
    reasons_of,
)
from ao_lab.measure.evaluate import (
    conditions_of,
    digest_of,
    fingerprint,
    in_memory,
    name_of,
    source_of,
    tasks_of,
    told_of,
)
from ao_lab.measure.folders import (
    check_folder,
    check_generates,
    check_language_model,
    check_vocabulary,
    device_of,
    evaluating,
    loaded,
    on_device,
    vocabulary_of,
    windows_for,
)
from ao_lab.measure.memory import by_transformers, held_bytes, most_allocated, out_of_memory
from ao_lab.measure.times import FAILED, OK, crowded, differing, drift_of, speedup_of
from ao_lab.measure.turns import timed_threads, with_threads
from ao_lab.quantization.api import quantize_
from ao_lab.quantization.groups import told_elsewhere
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.layers import is_linear
from reference.arrays.namespace import choice

#: Called with what is under way, and how many configurations are done of how many.
Progress = Callable[[str, int, int], None]
#: Files of a comparison's folder.
FILE, TABLE, PICTURE, DARK = "comparison.json", "comparison.md", "comparison.svg", "comparison-dark.svg"
#: Bytes of the unquantized model's logits that are kept; beyond, it predicts again for each configuration.
KEPT = 1 << 30
#: Calls of generate() that are timed.
ROUNDS = 3
#: New tokens, at most, of the calls before them.
WARM = 4
#: generate() is not compiled, whatever the model's generation_config says.
UNCOMPILED = {"disable_compile": True}
#: Windows of a batch of calibration.
BATCH = 8
#: Characters of a reason, and the function's name at its beginning.
LONGEST, WHERE = 600, re.compile(r"^quantize_: ")


def compare(
    model: str | Path | nn.Module,
    configs: Sequence[Given] | Mapping[str, Given] = USUAL,
    *,
    text: str | Path | Text | None = None,
    corpus: str | Path | None = None,
    calibration: str | Path | Text | None = None,
    methods: Iterable[Any] = (),
    calibration_windows: int = 128,
    tokenizer: Any = None,
    limit: int = 32,
    length: int | None = None,
    new_tokens: int = 32,
    tasks: Sequence[str] = (),
    harness: HarnessOptions | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    progress: Progress = lambda what, done, total: None,
    changes: Mapping[str, str] | None = None,
    tolerance: float = TOLERANCE,
    layout: str = "auto",
) -> Comparison:
    """Quantize copies of a causal language model by each configuration, and measure them beside the model itself.

    model: a dense folder of transformers, or a model in memory with `tokenizer` (as for `evaluate`); it stays as it is.
    configs: names of configurations ("Int4WeightOnlyConfig") or of schemes ("mxfp4"), configurations, or folders that hold a
    version of the model already quantized; a mapping gives rows names of your own. text, corpus, limit, length, device: as
    for `evaluate`. calibration, methods: as for `quantize_(methods=...)`, with `calibration_windows` windows of a text;
    static scales of inputs are found from it too. new_tokens: of generate(), for speed and memory; 0 leaves them out. tasks:
    of lm-evaluation-harness (extra `[eval]`), of a folder alone, with the options `harness` and at most `limit` examples of
    each. out: a folder for comparison.json, after each configuration and its losses, so that the same call goes on where one
    was stopped; and for the table and the picture (extra `[plot]`). progress: called with a name, configurations done, and of
    how many. changes: by the name of a row, in what its configuration differs from what the name says; told below the table.
    tolerance: how many percent of perplexity the configuration that is called best may lose (`Comparison.choice`). layout: that
    of `save_pretrained`, whose files are counted; of folders it is what they have.

    A configuration that cannot be applied, or for which memory does not suffice, has the status "failed" and a reason, and
    the others go on. Holds the model and one quantized copy of it at a time.

    ValueError for what is not there or does not fit (a folder of another model, too), unknown configurations with the nearest
    names, and a folder `out` with a comparison under other conditions; nothing has been computed then.
    """
    name, wanted = name_of(model), configurations(configs)
    with wrong_input():
        asked = ordered(tuple(methods))
    check_calibration(asked, calibration, wanted)
    if new_tokens < 0 or calibration_windows < 1:
        raise WrongInput(
            f"new_tokens is 0 or more and calibration_windows at least 1, got {new_tokens} and {calibration_windows}"
        )
    if not 0 <= tolerance < math.inf:
        raise WrongInput(f"tolerance is a number of percent, 0 or more, got {tolerance!r}")
    choice(layout, LAYOUTS, "layout")
    check_model_folder(model)
    check_same_model(model, wanted)
    if new_tokens:
        check_generates(model, PROMPT + new_tokens)
    run = tasks_of(model, tasks, harness or HarnessOptions())
    where, (source, data) = device_of(device, model), texts_of(text, calibration, corpus)
    windows, reading = windows_for(model, tokenizer, source, limit, length)
    check_same_tokens(wanted, source, windows, limit, length)
    batches = _batches(model, tokenizer, data, calibration_windows, length) if data else None
    conditions = {
        **conditions_of(source, windows, reading),
        "weights": fingerprint(model),
        "token_ids": digest_of([windows.ids, *(batches or ())]),
        **host(where),
        "prompt_tokens": min(PROMPT, windows.ids.shape[1]),
        "new_tokens": new_tokens,
        "layout": layout,
        "methods": [repr(one) for one in asked],
        "calibration": None if data is None else f"{data.name}, {calibration_windows} windows",
        "tasks": None if run is None else told_of(run, limit),
        "notes": notes_of(source, data),
        "versions": {"ao_lab": __version__, **versions_of(LIBRARIES)},
    }
    store = replace(
        Store.of(name, conditions, wanted, None if out is None else Path(out)), tolerance=tolerance
    )
    work = Work(model, where, windows, asked, batches, new_tokens, run, limit, changes or {}, layout)
    with on_device(where):
        return work.run(wanted, store, progress)


def texts_of(
    text: str | Path | Text | None, calibration: str | Path | Text | None, corpus: str | Path | None
) -> tuple[Text, Text | None]:
    """The text that is measured on, and that of calibration; a corpus is the folder of those that have a name."""
    has_name = [str(one) in NAMED for one in (text, calibration)]
    source = source_of(text, corpus if has_name[0] or not has_name[1] else None)
    if calibration is None:
        return source, None
    try:
        return source, source_of(calibration, corpus if has_name[1] else None)
    except WrongInput as error:
        raise WrongInput(str(error).replace("--text", "--calibration")) from error


def check_model_folder(model: str | Path | nn.Module) -> None:
    """WrongInput for no folder of a model, and for one that is quantized already."""
    from ao_lab.checkpoint.streaming import is_quantized

    if isinstance(model, nn.Module):
        if any(isinstance(one, QuantizedTensor) for one in model.parameters()):
            raise WrongInput("the model is quantized already; give its unquantized base model")
        return
    check_folder(Path(model))
    if is_quantized(Path(model)):
        raise WrongInput(
            f"{model} is quantized already; give its unquantized base model, and this folder among the configurations"
        )


def notes_of(source: Text, data: Text | None) -> list[str]:
    """What has to be said of the texts."""
    same = data is not None and data.name == source.name
    told = (
        ["Calibrated on the text that is measured: losses of calibrated rows are too good."] if same else []
    )
    kind = " It is Python source: no published perplexity compares." if source.code else ""
    if source.name.startswith(tuple(one.release for one in NAMED.values())):
        kind = " It is wikitext-2-v1 (with <unk>); most published perplexities are of wikitext-2-raw-v1, another text."
    return [
        *told,
        f"Perplexities compare between models of one tokenizer on the same text with the same --limit and --length.{kind}",
    ]


def host(device: str) -> dict[str, str]:
    """The device, a GPU by its name, and the name of the host's processor."""
    gpu = torch.device(device).type == "cuda"
    return {"device": torch.cuda.get_device_name(device) if gpu else device, "processor": processor()}


def _batches(model: Any, tokenizer: Any, data: Text, count: int, length: int | None) -> list[torch.Tensor]:
    windows, _ = windows_for(model, tokenizer, data, count, length)
    return list(torch.split(windows.ids, BATCH))


@dataclass
class Store:
    """Rows that are measured, in a folder where one was given: a stopped call goes on from there."""

    model: str
    conditions: dict[str, Any]
    made_by: dict[str, str]
    folder: Path | None
    rows: dict[str, Compared] = field(default_factory=dict)
    #: What is measured of rows that are not whole yet.
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    tolerance: float = TOLERANCE

    @classmethod
    def of(
        cls, model: str, conditions: dict[str, Any], wanted: Mapping[str, Any], folder: Path | None
    ) -> Store:
        """The store; ValueError for a folder with a comparison of another model or under other conditions."""
        made_by = {BASE: "", **{name: made_from(one) for name, one in wanted.items()}}
        store = cls(model, json.loads(json.dumps(conditions)), made_by, folder)
        if folder is None:
            return store
        if folder.exists() and not folder.is_dir():
            raise WrongInput(f"--out {folder} is a file; choose a folder")
        if not (folder / FILE).is_file():
            return store
        try:
            kept = json.loads((folder / FILE).read_text(encoding="utf-8"))
            found = Comparison.from_dict(kept)
            before, parts = dict(kept["made_by"]), dict(kept.get("parts", {}))
        except (ValueError, KeyError, TypeError) as error:
            raise WrongInput(f"{folder / FILE} is no comparison: {error}; choose another folder") from error
        if other := differing(
            {"model": found.model, **found.conditions}, {"model": model, **store.conditions}
        ):
            raise WrongInput(
                f"--out {folder} holds a comparison of other conditions: {other}; choose another folder, or remove "
                f"{folder / FILE}"
            )
        # Rows of names that are not asked for now, and losses of rows that are not whole, stay in the file.
        same = {name for name in before if made_by.get(name, before[name]) == before[name]}
        store.rows = {row.name: row for row in found.rows if row.name in same and row.status == OK}
        store.parts = {name: part for name, part in parts.items() if name in same}
        store.made_by = {**before, **made_by}
        return store

    def add(self, row: Compared) -> None:
        """Keep a row, with its date and the commit."""
        self.rows[row.name] = replace(row, date=utc_now(), commit=commit())
        self.parts.pop(row.name, None)
        self.write()

    def add_part(self, name: str, values: dict[str, Any]) -> None:
        """Keep numbers of a row of which others are still to be measured."""
        self.parts[name] = values
        self.write()

    def write(self) -> None:
        """Write everything, where there is a folder, with what another call has measured there meanwhile."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            rewrite_text(self.folder / FILE, self.text)

    def text(self) -> str:
        """What the file is to hold."""
        self.take_others()
        told = {**self.comparison(self.rows).to_dict(), "made_by": self.made_by, "parts": self.parts}
        return json.dumps(_strict(told), indent=2, allow_nan=False) + "\n"

    def take_others(self) -> None:
        """Rows and parts that the file has under the same conditions and this store lacks: those of a call beside this one. Of
        the same configuration alone where both calls measure a name, and not where it failed there."""
        try:
            now = json.loads((Path(self.folder or "") / FILE).read_text(encoding="utf-8"))
            found, made_by, parts = Comparison.from_dict(now), dict(now["made_by"]), dict(now["parts"])
        except (OSError, ValueError, KeyError, TypeError):
            return
        if differing({"model": found.model, **found.conditions}, {"model": self.model, **self.conditions}):
            return
        same = {
            name for name, one in made_by.items() if self.made_by.get(name, one) == one
        } - self.rows.keys()
        both = same & self.made_by.keys()
        self.made_by |= {name: made_by[name] for name in same}
        self.rows |= {
            r.name: r for r in found.rows if r.name in same and (r.status == OK or r.name not in both)
        }
        left = same - self.rows.keys() - self.parts.keys()
        self.parts |= {name: part for name, part in parts.items() if name in left}

    def comparison(self, names: Iterable[str]) -> Comparison:
        """The rows of these names, as far as there are any."""
        rows = [self.rows[name] for name in names if name in self.rows]
        return Comparison(self.model, tuple(doubtful(rows)), self.conditions, self.tolerance)


def doubtful(rows: Sequence[Compared]) -> list[Compared]:
    """Rows, those noisy too whose speeds the host's other work or a slow baseline make worthless, the unquantized model's own
    among them: its tokens a second are then too few, though its speedup is 1."""
    rates = [row.baseline_tokens_per_second for row in rows]
    baselines = [1 / rate if rate else None for rate in rates]
    found = []
    for row, baseline in zip(rows, baselines, strict=True):
        why = row.doubt or drift_of(baseline, baselines) or crowded(row.load, row.cores)
        found.append(replace(row, doubt=why))
    return found


def _strict(value: Any) -> Any:
    """Plain values without NaN and infinities, which JSON lacks: None."""
    if isinstance(value, dict):
        return {key: _strict(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Remembered(nn.Module):
    """A model that keeps its logits by input while they fit; each configuration is compared with the same ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.kept, self.bytes = model, dict[bytes, torch.Tensor](), 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (batch, tokens, vocabulary)."""
        key = ids.cpu().numpy().tobytes()
        if key in self.kept:
            return self.kept[key]
        made: Any = self.model(ids)
        logits: torch.Tensor = getattr(made, "logits", made)
        if self.bytes + logits.nbytes <= KEPT:
            self.kept[key] = logits
            self.bytes += logits.nbytes
        return logits


def refused(error: BaseException) -> bool:
    """Whether an error is the answer of a configuration, a kernel or a model, or says that memory does not suffice.

    Any other, such as a RuntimeError of torch or of a GPU, is a fault of ours or of a library, and keeps its traceback.
    """
    return isinstance(error, (ValueError, TypeError, NotImplementedError)) or out_of_memory(error)


def reason(error: BaseException) -> str:
    """An error in a line, whole words of it; the name of its class where the message is not written for users."""
    text = WHERE.sub("", shorten(str(error), LONGEST, placeholder="..."))
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def _said(progress: Progress, name: str, done: int, total: int, word: str) -> None:
    """Call `progress` with a configuration's name, and a word about it."""
    progress(f"{name}, {word}" if word else name, done, total)


@dataclass
class Work:
    """The model, what is measured of it, and how."""

    model: str | Path | nn.Module
    device: str
    windows: Windows
    methods: Sequence[Any]
    batches: Sequence[torch.Tensor] | None
    new_tokens: int
    tasks: Harness | None = None
    examples: int = 0
    changes: Mapping[str, str] = field(default_factory=dict)
    layout: str = "auto"
    say: Callable[[str], None] = field(default=lambda word: None, repr=False)
    store: Store = field(default_factory=lambda: Store("", {}, {}, None))

    def run(self, wanted: Mapping[str, Any], store: Store, progress: Progress) -> Comparison:
        """Measure what the store lacks, and write what it holds."""
        self.store, names = store, [BASE, *wanted]
        if any(name not in store.rows for name in names):
            base = self.base()
            with evaluating(base.model):
                for name in names:
                    if name not in store.rows:
                        self.say = partial(
                            _said, progress, name, sum(one in store.rows for one in names), len(names)
                        )
                        self.say("")
                        store.add(self.row(name, wanted.get(name), base))
        progress("", len(names), len(names))
        found = store.comparison(names)
        if store.folder is not None:
            publish(found, store.folder)
        return found

    def base(self) -> Remembered:
        """The unquantized model."""
        model = in_memory(self.model, self.device)
        check_vocabulary(model, self.windows.ids, name_of(self.model))
        check_language_model(model, name_of(self.model))
        return Remembered(model)

    def row(self, name: str, config: Any, base: Remembered) -> Compared:
        """One configuration; its status where it cannot be applied or run. Errors of the model itself are raised."""
        if name == BASE:
            row = self.measure(name, base.model, base, written_as(base.model))
            return replace(row, vocabulary=vocabulary_of(base.model))
        try:
            self.say("loading" if isinstance(config, Path) else "quantizing")
            started = time.perf_counter()
            model, left = self.quantized(config, base.model)
            seconds = time.perf_counter() - started
            files = files_of(config) if isinstance(config, Path) else written_as(model, self.layout)
            row = self.measure(name, model, base, files, seconds)
            differs = other_weights(model, base.model) if isinstance(config, Path) else ""
            why = unserved_of(model, config) if files.layout == COMPRESSED else ""
            told = "" if isinstance(config, Path) else " + ".join(one.text for one in self.methods)
            row = replace(row, left=left, changes=self.changes.get(name, ""), methods=told)
            return replace(row, differs=differs, unserved=why)
        except Exception as error:
            if not refused(error):
                raise
            return Compared(name, FAILED, reason=reason(error))
        finally:
            gc.collect()
            if self.device.startswith("cuda"):
                torch.cuda.empty_cache()

    def quantized(self, config: Any, base: nn.Module) -> tuple[nn.Module, dict[str, int]]:
        """A quantized copy, or the model of a folder; and why how many linear layers of the copy stayed as they were."""
        if isinstance(config, Path):
            return loaded(config, self.device), {}
        model, device = copy.deepcopy(base), next(base.parameters()).device
        reads = observes(config) or any(one.calibrates for one in self.methods)
        given = [{"input_ids": ids.to(device)} for ids in self.batches or ()] if reads else None
        with told_elsewhere():
            report = quantize_(
                model, config, calibration=given, methods=tuple(self.methods),
                progress=lambda word, done, total: self.say(f"quantizing {done} of {total}, {word}"))  # fmt: skip
        return model, reasons_of(report)

    @torch.no_grad()
    def measure(
        self, name: str, model: nn.Module, base: Remembered, files: Written, seconds: float | None = None
    ) -> Compared:
        """All numbers of a model."""
        found = self.store.parts.get(name)
        if found is None:
            found = self.losses(model, base)
            self.store.add_part(name, found)
        found = {**found, "differences": tuple(found.get("differences", ()))}
        table: Any = getattr(model, "get_input_embeddings", lambda: None)()
        tied = getattr(table, "weight", None)
        # A head that is the embedding is none of the layers that could be quantized.
        every = (module.weight for module in model.modules() if is_linear(module))
        layers = [weight for weight in every if weight is not tied]
        return Compared(
            name,
            bytes=files.bytes,
            layout=files.layout,
            bits_per_parameter=8 * files.bytes / sum(one.numel() for one in base.model.parameters()),
            seconds=seconds,
            layers=sum(isinstance(one, QuantizedTensor) for one in layers),
            of_layers=len(layers),
            **found,
            **(self.speed(model, base.model) if self.new_tokens else {}),
            tasks=self.harness(model),
        )

    def losses(self, model: nn.Module, base: Remembered) -> dict[str, Any]:
        """Loss, and the distance from the unquantized model."""
        itself = model is base.model
        sums = measured(
            base if itself else model,
            self.windows,
            None if itself else base,
            lambda done, total: self.say(f"sequence {done} of {total}"),
        )
        return quality(sums, self.windows, itself)

    def harness(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """The numbers of tasks of lm-evaluation-harness."""
        if self.tasks is None:
            return {}
        self.say(", ".join(self.tasks.tasks))
        found: dict[str, dict[str, float]] = harness_results(model, self.tasks, self.examples)["tasks"]
        return found

    def speed(self, model: nn.Module, base: nn.Module) -> dict[str, Any]:
        """Tokens a second of generate(), beside the unquantized model's in turn, and peak memory."""
        self.say("generate()")
        device = next(model.parameters()).device
        prompt = self.windows.ids[:1, :PROMPT].to(device)
        both = [model] if model is base else [base, model]
        for one in both:
            by_transformers(one, prompt, min(self.new_tokens, WARM), **UNCOMPILED)
        threads = self.threads_of(base, prompt)
        with with_threads(threads):
            over = most_allocated(
                device, lambda: by_transformers(model, prompt, self.new_tokens, **UNCOMPILED)
            )
            times = [
                [by_transformers(one, prompt, self.new_tokens, **UNCOMPILED)[0] for one in both]
                for _ in range(ROUNDS)
            ]
        return {
            "threads": threads,
            "all_threads": None if threads is None else torch.get_num_threads(),
            "tokens_per_second": self.new_tokens / median(one[-1] for one in times),
            "baseline_tokens_per_second": self.new_tokens / median(one[0] for one in times),
            **speedup_of([(one[0], one[-1]) for one in times]),
            "peak_bytes": None if over is None else held_bytes(model) + over,
        }

    def threads_of(self, base: nn.Module, prompt: torch.Tensor) -> int | None:
        """Threads of a CPU that generate() of all rows is timed with: of rows kept before, or found by the model itself."""
        kept = [row.threads for row in self.store.rows.values() if row.threads is not None]
        if kept:
            return kept[0]
        call = partial(by_transformers, base, prompt, min(self.new_tokens, WARM), **UNCOMPILED)
        return timed_threads(prompt.device, call)


def unserved_of(model: nn.Module, source: Any) -> str:
    """What vLLM lists no kernel for in a model's files, in words, as their card says; source: their folder, if there is one."""
    if isinstance(source, Path):
        return unserved_weights(source)
    weights = (one for one in model.parameters() if isinstance(one, QuantizedTensor))
    return "; ".join(sorted({why for one in weights if (why := unserved(one.recipe))}))


def quality(sums: Sums, windows: Windows, itself: bool) -> dict[str, Any]:
    """Loss, and the distance from the unquantized model, which the model may be `itself`."""
    found = results_of(sums, windows, ("perplexity",) if itself else ("perplexity", "agreement"), words=False)
    loss, far = found["perplexity"], found.get("agreement")
    values: dict[str, Any] = {name: loss.get(name) for name in ("loss", "loss_stderr")}
    values["windows"] = len(windows.ids)
    if far is None:
        return values
    values |= {"difference": far["loss_difference"], "difference_stderr": far.get("loss_difference_stderr")}
    values["differences"] = tuple(a - b for a, b in zip(sums.losses, sums.base_losses, strict=True))
    return values | {name: far.get(name) for name in ("kl", "kl_stderr", "agreement")}


def publish(found: Comparison, folder: Path) -> None:
    """The table, and the picture for light and dark pages where the folder has none of this table; none without matplotlib."""
    table, (file, *pictures) = found.to_markdown(), [folder / name for name in (TABLE, PICTURE, DARK)]
    kept = file.is_file() and file.read_text("utf-8") == table and all(one.is_file() for one in pictures)
    write_text(file, table)
    if lacking("plot"):
        return
    from ao_lab.plot.style import save

    for one, theme in zip(pictures, ("light", "dark"), strict=True) if not kept else ():
        save(found.plot(theme=theme), one, f"Loss against size of configurations of {found.model}.")


__all__ = ["compare"]
