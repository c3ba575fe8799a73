"""What a language model knows of a text: perplexity, next-token accuracy, and how far a quantized model is from its base.

All in one pass over windows of tokens that do not overlap. Where the tokenizer puts a token before a text (BOS), each window
begins with it, and predicts all of its text; models that were trained so are lost without (Gemma's perplexity doubles). Other
windows predict all of their tokens but the first. lm-evaluation-harness puts BOS before the first window alone, and gives later
ones a token of context, so that its numbers are a little different.

Sums are float64, logarithms of probabilities float32, whatever the model's dtype, so that two models are compared by their own
numbers.

Text to measure models on: a file of one's own, WikiText-2 by name, or text that every installation has, the source of sympy.

WikiText-2 is read from a folder of the corpus `prose`. That holds the release of the paper, wikitext-2-v1 (words and
punctuation apart, rare words as <unk>), not wikitext-2-raw-v1, which perplexities of language models are mostly published of.

Of sympy those files count whose path's hash falls into a tenth (as the experiments keep them from training), in the order of
their paths. Its version and hash name it, because another version is another text.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import lzma
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.install.extras import needed
from ao_lab.intervals import half_interval, rounded
from ao_lab.tensor.quantized_tensor import QuantizedTensor

SKIPPED = frozenset({"tests", "benchmarks"})
SHARE = 0.1
SAME = "runs on the same text with the same --limit and --length"
PER_TOKEN = "token_perplexity and accuracy of models with one tokenizer"
PROSE = f"{SAME}: {PER_TOKEN}, word_perplexity and bits_per_byte of any"


@dataclass(frozen=True)
class Text:
    """Text, its name and what numbers on it compare with, which results carry.

    code: whether it is a program's source, where white space separates no words.
    """

    name: str
    text: str
    compares: str = PROSE
    code: bool = False


@dataclass(frozen=True)
class NamedText:
    """A text that has a name: the file of a corpus that holds it, its release, and the SHA-256 of its uncompressed bytes."""

    corpus: str
    file: str
    release: str
    sha256: str
    compares: str


NAMED = {
    "wikitext2": NamedText(
        corpus="prose",
        file="wikitext2-test.txt.xz",
        release="wikitext-2-v1-test",
        sha256="d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        compares=(
            f"{PROSE}. "
            "This is wikitext-2-v1 (tokenized, with <unk>); published perplexities of language models are mostly of "
            "wikitext-2-raw-v1, another text: give its wiki.test.raw by --text FILE"
        ),
    )
}


def text_of(given: str | None, corpus: Path | None = None) -> Text:
    """The text of a name or a file, or the built-in one.

    given: a name of `NAMED`, else a file's path, None for the built-in text. corpus: the folder that named texts are read from.
    ValueError where the text is missing, empty, no UTF-8, not the one of its name, or sympy is not installed.
    """
    check_text(given, corpus)
    if given is None:
        return built_in()
    if given in NAMED and corpus is not None:
        return named(given, corpus)
    path = Path(given)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no UTF-8 text ({error.reason} at byte {error.start}); convert it"
        ) from error
    if not text.strip():
        raise ValueError(f"{path} is empty; give a file with some thousand words")
    return Text(f"{path.name}-{digest(text)}", text)


def check_text(given: str | None, corpus: Path | None) -> None:
    """ValueError for a file, or a folder of a named text, that is not there; nothing is read."""
    if given in NAMED:
        one = NAMED[given]
        if corpus is None or not (corpus / one.file).is_file():
            found = "give its folder by --corpus-path" if corpus is None else f"{corpus} has no {one.file}"
            raise ValueError(
                f"--text {given} is a text of the corpus {one.corpus}: {found} (`ao-lab corpus {one.corpus}` says where it "
                f"comes from, --build DIR makes it)"
            )
    elif corpus is not None:
        raise ValueError(
            f"--corpus-path is the folder of named texts; with it goes --text {' or '.join(NAMED)}"
        )
    elif given is not None and not Path(given).is_file():
        raise ValueError(
            f"--text {given} is no file; give one with some thousand words, or a name: {', '.join(NAMED)}"
        )


def named(name: str, folder: Path) -> Text:
    """The text of a name; ValueError where the file holds another."""
    one = NAMED[name]
    path = folder / one.file
    try:
        data = lzma.decompress(path.read_bytes())
    except lzma.LZMAError as error:
        raise ValueError(f"{path} is no xz file ({error}); copy it again") from error
    if (found := hashlib.sha256(data).hexdigest()) != one.sha256:
        raise ValueError(
            f"{path} is not {one.release}: its SHA-256 is {found}, not {one.sha256}; copy it again"
        )
    return Text(f"{one.release}-{found[:8]}", data.decode(), one.compares)


def built_in() -> Text:
    """A tenth of the source of the installed sympy, about a megabyte."""
    spec = importlib.util.find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the built-in text is the source of sympy, which is not installed; give --text FILE")
    root = Path(spec.submodule_search_locations[0])
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    chosen = [path for path in paths if held_out(path) and not SKIPPED.intersection(path.split("/"))]
    text = "".join((root / path).read_text(encoding="utf-8").replace("\r\n", "\n") for path in chosen)
    return Text(
        f"sympy-{importlib.metadata.version('sympy')}-{digest(text)}",
        text,
        f"{SAME}: {PER_TOKEN}, bits_per_byte of any. It is Python source: no "
        "published perplexity compares, and there is none per word",
        code=True,
    )


def held_out(path: str) -> bool:
    """Whether a file is of the tenth that is measured on."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") < SHARE * 2**64


def digest(text: str) -> str:
    """The first letters of a hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


#: Tasks that need no extra: those of `ao_lab.measure.asked`.
TASKS = ("perplexity", "accuracy", "agreement", "weights")
#: What the name of a number's standard error ends in.
STDERR = "_stderr"
Encode = Callable[[str], "Tokens"]


@dataclass(frozen=True)
class Tokens:
    """Tokens of a text, and where in the text each ends (characters)."""

    ids: torch.Tensor
    ends: list[int]


@dataclass(frozen=True)
class Windows:
    """Tokens in windows of one length, and how many bytes and words of text they stand for.

    beginning: how many tokens at the start of each are none of the text.
    """

    ids: torch.Tensor
    bytes: int
    words: int
    beginning: int = 0

    @property
    def first(self) -> int:
        """The place of the first token that is predicted."""
        return max(self.beginning, 1)

    @property
    def predicted(self) -> int:
        """How many tokens are predicted."""
        return int(self.ids.shape[0] * (self.ids.shape[1] - self.first))

    @property
    def share(self) -> float:
        """The part of the text's tokens that is predicted."""
        length = self.ids.shape[1]
        return (length - self.first) / (length - self.beginning)


@dataclass
class Sums:
    """Sums over predicted tokens."""

    #: Of each window, means over its tokens: -log p, of the model and of the base, and the KL divergence from the base.
    losses: list[float] = field(default_factory=list)
    base_losses: list[float] = field(default_factory=list)
    kls: list[float] = field(default_factory=list)
    right: int = 0
    agreed: int = 0


#: Characters of a token that are encoded at first, and tokens at the end of a text that is cut which are not read.
CHARACTERS, EDGE = 6, 256


def windows_of(text: str, encode: Encode, length: int, limit: int, beginning: Sequence[int] = ()) -> Windows:
    """The first `limit` windows of a text, of `length` tokens with those of `beginning`; ValueError where there is not one.

    Only as much text is encoded as the windows need, four times more where it was too little; and EDGE tokens beyond
    them, since the last tokens of a text that is cut may be others than those of the whole.
    """
    own = length - len(beginning)
    if own < 1:
        raise ValueError(
            f"a window of {length} tokens has no room for text after the {len(beginning)} that the tokenizer starts with; "
            f"give a larger --length"
        )
    end = own * limit * CHARACTERS
    tokens = encode(text[:end])
    while len(tokens.ids) < own * limit + EDGE and end < len(text):
        end *= 4
        tokens = encode(text[:end])
    count = min(len(tokens.ids) // own, limit)
    if count == 0:
        raise ValueError(
            f"the text has {len(tokens.ids)} tokens, one window has {own}; give more text or a smaller --length"
        )
    used = text[: tokens.ends[count * own - 1]]
    ids = tokens.ids[: count * own].reshape(count, own)
    first = torch.tensor(list(beginning), dtype=ids.dtype, device=ids.device).expand(count, -1)
    return Windows(torch.cat([first, ids], 1), len(used.encode()), len(used.split()), len(beginning))


def measured(
    model: nn.Module,
    windows: Windows,
    base: nn.Module | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Sums:
    """The sums of a model, and of its distance from a base, over all windows. The host waits for a GPU once, at the end."""
    device, there = (None if one is None else next(one.parameters()).device for one in (model, base))
    ids, same = windows.ids.to(device), None if base is None else windows.ids.to(there)
    found = []
    with torch.inference_mode():
        for index in range(len(ids)):
            progress(index, len(ids))
            row, wanted = ids[index : index + 1], ids[index, windows.first :]
            logp = log_probabilities(model, row, windows.first)
            first = logp.argmax(1)
            numbers = [_mean(logp, wanted), (first == wanted).sum()]
            if base is not None and same is not None:
                other = log_probabilities(base, same[index : index + 1], windows.first).to(device)
                numbers += _compared(logp, first, other, wanted)
            found.append(torch.stack([one.double() for one in numbers]))
        sums = _summed(torch.stack(found).tolist(), windows.ids.shape[1] - windows.first)
    progress(len(ids), len(ids))
    return sums


def _mean(logp: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean log probability of the tokens that follow, float64."""
    return logp.gather(1, wanted[:, None]).double().mean()


def _compared(
    logp: torch.Tensor, first: torch.Tensor, base: torch.Tensor, wanted: torch.Tensor
) -> list[torch.Tensor]:
    """One window's distance from the base: its mean log probability, first choices that agree, the sum of KL divergences."""
    return [_mean(base, wanted), (first == base.argmax(1)).sum(), divergence(base, logp).sum()]


def _summed(found: list[list[float]], predicted: int) -> Sums:
    """Of each window the numbers of the model, and of the base where there is one. predicted: tokens of a window."""
    loss, right, *others = (list(column) for column in zip(*found, strict=True))
    sums = Sums(losses=[-one for one in loss], right=int(sum(right)))
    if others:
        base, agreed, kl = others
        sums.base_losses, sums.agreed = [-one for one in base], int(sum(agreed))
        sums.kls = [one / predicted for one in kl]
    return sums


def divergence(base: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    """KL divergences from the base, (tokens,) float64, of log probabilities (tokens, vocabulary)."""
    # Where the base gives a token no probability at all, it adds nothing.
    terms = (base - logp).masked_fill_(base.isneginf(), 0.0)
    return terms.mul_(base.exp()).sum(-1, dtype=torch.float64)


def log_probabilities(model: nn.Module, ids: torch.Tensor, first: int = 1) -> torch.Tensor:
    """Of each token from the place `first` on, in float32: (tokens - first, vocabulary)."""
    result: Any = model(ids)
    logits: torch.Tensor = getattr(result, "logits", result)
    return torch.log_softmax(logits[0, first - 1 : -1].float(), dim=-1)


def results_of(
    sums: Sums, windows: Windows, tasks: tuple[str, ...], *, words: bool = True
) -> dict[str, dict[str, float]]:
    """The numbers of each task. words: whether the text has words, which white space separates; source code has none.

    Of a single window there are no standard errors, which it does not say.
    """
    count, n = windows.predicted, len(windows.ids)
    loss = sum(sums.losses) / n
    result: dict[str, dict[str, float]] = {}
    if "perplexity" in tasks:
        share = windows.share  # text counts in proportion
        result["perplexity"] = {
            "token_perplexity": exponential(loss),
            **(
                {"word_perplexity": exponential(loss * count / max(windows.words * share, 1.0))}
                if words
                else {}
            ),
            "bits_per_byte": loss * count / (windows.bytes * share * math.log(2)),
            "loss": loss,
            "loss_stderr": standard_error(sums.losses),
        }
    if "accuracy" in tasks:
        result["accuracy"] = {"accuracy": sums.right / count}
    if "agreement" in tasks:
        base = sum(sums.base_losses) / n
        differences = [a - b for a, b in zip(sums.losses, sums.base_losses, strict=True)]
        result["agreement"] = {
            "agreement": sums.agreed / count,
            "kl": sum(sums.kls) / n,
            "kl_stderr": standard_error(sums.kls),
            "base_token_perplexity": exponential(base),
            "loss_difference": loss - base,
            "loss_difference_stderr": standard_error(differences),
        }
    return result if n > 1 else {task: without_errors(found) for task, found in result.items()}


def without_errors(found: dict[str, float]) -> dict[str, float]:
    """The numbers of a task but their standard errors."""
    return {name: value for name, value in found.items() if not name.endswith("_stderr")}


def exponential(value: float) -> float:
    """e to the value; infinite where that is too large, NaN of NaN."""
    return math.inf if value >= 700 else math.exp(value)


def standard_error(values: list[float]) -> float:
    """Of the mean of values; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def weight_errors(model: nn.Module, base: nn.Module) -> dict[str, float]:
    """Relative RMS error of quantized weights against those of the base, by recipe: sqrt(sum (w - b)^2 / sum b^2)."""
    sums: dict[str, tuple[float, float]] = {}
    dense = dict(base.named_parameters(remove_duplicate=False))
    for name, weight in quantized_weights(model):
        if name in dense and dense[name].shape == weight.shape:
            wanted = dense[name].detach().to(weight.device, torch.float32)
            error = (weight.dequantize(torch.float32) - wanted).double().square().sum()
            before = sums.get(str(weight.recipe), (0.0, 0.0))
            sums[str(weight.recipe)] = (
                before[0] + float(error),
                before[1] + float(wanted.double().square().sum()),
            )
    return {name: math.sqrt(error / size) if size else 0.0 for name, (error, size) in sums.items()}


def changed_beside(model: nn.Module, base: nn.Module) -> list[str]:
    """Unquantized parameters, biases left out, that are others than the base's, which is cast to their dtype first.

    Where there are any, scales have moved between layers (AWQ, Smooth), the model was rotated, or it was trained: its weights
    approximate others than the base's.
    """
    dense = dict(base.named_parameters(remove_duplicate=False))
    return [
        name
        for name, one in model.named_parameters()
        if name in dense
        and not name.endswith("bias")
        and not isinstance(one, QuantizedTensor)
        and not isinstance(dense[name], QuantizedTensor)
        and one.shape == dense[name].shape
        and not torch.equal(one.detach(), dense[name].detach().to(one.device, one.dtype))
    ]


def told_values(tasks: Mapping[str, Any], windows: int | None) -> Iterator[tuple[str, str, str]]:
    """Task, name and value of each number as text, rounded to its error, with half of its 95% interval where it has one."""
    for task, name, value, half in with_halves(tasks, windows):
        yield task, name, str(value) if type(value) is int else rounded(value, half)


def with_halves(
    tasks: Mapping[str, Any], windows: int | None
) -> Iterator[tuple[str, str, float, float | None]]:
    """Task, name and value of each number, and half of its 95% interval, None where it has none.

    By Student's t over the windows, or over the examples of a task of lm-evaluation-harness. What is no number is left out.
    """
    for task, found in tasks.items():
        given = found if isinstance(found, Mapping) else {}
        values = {str(name): value for name, value in given.items() if type(value) in (int, float)}
        count = windows if task in TASKS else values.get("sample_len")
        for name, value in values.items():
            if not name.endswith(STDERR):
                half = half_interval(values.get(f"{name}{STDERR}"), count if type(count) is int else None)
                yield str(task), name, value, half


def quantized_weights(model: nn.Module) -> Iterator[tuple[str, QuantizedTensor]]:
    """Names and values of the quantized parameters."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedTensor):
            yield name, parameter


# Tasks of lm-evaluation-harness (lm_eval), by the options of its own command: `--num_fewshot`, `--batch_size`,
# `--apply_chat_template`, `--include_path`.

BATCH_SIZE = re.compile(r"[1-9][0-9]*|auto(:[1-9][0-9]*)?", re.ASCII)


@dataclass(frozen=True)
class HarnessOptions:
    """Options of the harness; None and False are its defaults.

    num_fewshot: examples before each question, the task's own number by default. batch_size: requests at once, a number, "auto"
    or "auto:N", 1 by default. apply_chat_template: whether requests are put into the tokenizer's chat template, examples as
    turns of it. include_path: a folder of tasks beside those of the harness.
    """

    num_fewshot: int | None = None
    batch_size: str | None = None
    apply_chat_template: bool = False
    include_path: Path | None = None

    def given(self) -> list[str]:
        """The options that are not at their default, as the command spells them."""
        return [
            f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value not in (None, False)
        ]


def check_options(options: HarnessOptions, tasks: list[str]) -> None:
    """ValueError for options without a task of the harness, values that it does not take, and a folder that is not there."""
    if options.given() and not tasks:
        raise ValueError(
            f"{', '.join(options.given())}: for tasks of lm-evaluation-harness alone, and --tasks names none"
        )
    if options.num_fewshot is not None and options.num_fewshot < 0:
        raise ValueError(f"--num-fewshot is a number of examples, 0 or more, got {options.num_fewshot}")
    if options.batch_size is not None and not BATCH_SIZE.fullmatch(options.batch_size):
        raise ValueError(
            f"--batch-size is 1 or more, auto or auto:N (looked for N times), got {options.batch_size!r}"
        )
    if options.include_path is not None and not options.include_path.is_dir():
        raise ValueError(
            f"--include-path {options.include_path} is no folder; give the one of the tasks' YAML files"
        )


@dataclass(frozen=True)
class Harness:
    """What a run needs beside the model: names or YAML files of tasks, options, the harness's `TaskManager`, a tokenizer."""

    tasks: list[str]
    options: HarnessOptions
    manager: Any
    tokenizer: Any


def prepared(tasks: list[str], options: HarnessOptions, folder: Path) -> Harness | None:
    """The harness for tasks on the model of a folder, before weights are read; None without tasks.

    ValueError as `check_options`, and for a folder without a tokenizer that the harness can work with.
    """
    check_options(options, tasks)
    if not tasks:
        return None
    tokenizer = tokenizer_of(folder, options.apply_chat_template)
    path = options.include_path
    manager = needed("lm_eval.tasks").TaskManager(include_path=None if path is None else str(path))
    return Harness(tasks, options, manager, tokenizer)


def tokenizer_of(folder: Path, by_template: bool) -> Any:
    """The tokenizer of a folder; ValueError where there is none, or no token that the harness can begin a text with.

    by_template: whether it has to have a chat template.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(
            f"{folder} has no tokenizer, which tasks of lm-evaluation-harness need; copy that of the base model into it"
        )
    load: Any = needed("transformers").AutoTokenizer.from_pretrained
    tokenizer = load(folder, local_files_only=True, trust_remote_code=False)
    if by_template and tokenizer.chat_template is None:
        raise ValueError(
            f"--apply-chat-template: the tokenizer of {folder} has no chat template; leave it out, or copy chat_template.jinja "
            f"of the base model into the folder"
        )
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {folder} names neither bos_token nor eos_token, one of which lm-evaluation-harness begins "
            f"a text with; name one in tokenizer_config.json"
        )
    return tokenizer


def harness_results(model: nn.Module, run: Harness, limit: int | None) -> dict[str, Any]:
    """The numbers of each task ("tasks") and the conditions of the harness.

    limit: how many examples of each task, None: all. What the harness prints goes to stderr, because stdout may be one JSON
    document.
    """
    options = run.options
    harness, models = needed("lm_eval"), needed("lm_eval.models.huggingface")
    with contextlib.redirect_stdout(sys.stderr):
        wrapped = models.HFLM(pretrained=model, tokenizer=run.tokenizer, batch_size=options.batch_size or 1)
        result = harness.simple_evaluate(
            model=wrapped,
            tasks=run.tasks,
            limit=limit,
            num_fewshot=options.num_fewshot,
            apply_chat_template=options.apply_chat_template,
            task_manager=run.manager,
        )
    return {
        "tasks": {task: numbers(found) for task, found in result["results"].items()},
        "harness_limit": limit,
        "harness_num_fewshot": dict(result.get("n-shot", {})),
        "harness_chat_template": options.apply_chat_template,
        "harness_version": getattr(harness, "__version__", None),
    }


def numbers(found: dict[str, Any]) -> dict[str, float]:
    """The numbers among a task's results, without the name of a filter that filters nothing."""
    return {
        key.removesuffix(",none"): value for key, value in found.items() if isinstance(value, (int, float))
    }


def harness_note(results: dict[str, Any]) -> str | None:
    """What the numbers of the harness are of; None where there are none."""
    if "harness_limit" not in results:
        return None
    shots = results["harness_num_fewshot"]
    said = ", ".join(f"{task} {count}-shot" for task, count in shots.items())
    template = ", by the chat template" if results["harness_chat_template"] else ""
    return (
        f"tasks of lm-evaluation-harness: at most {results['harness_limit']} examples of each (--limit)"
        f"{f'; {said}' if said else ''}{template}"
    )
