"""The model card: README.md of a quantized folder, as Hugging Face reads it, made of what the folder itself says.

Front matter in YAML, then what was quantized and how, what stayed, sizes, results of `ao-lab eval` where eval.json is there,
and the commands that load and serve it. `save_pretrained` writes it where no other card is, `ao-lab quantize` one that knows
the command, and `ao-lab eval --save` puts its results into it.

How a model is loaded and served by others: the class that transformers loads it by, the Hub's name of its task, vLLM.

`AutoModelForX.from_pretrained` takes the class that X's table has for the configuration's model_type. It is right for a folder
where that is the class that config.json names under "architectures"; where no table has it, the class itself is.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from ao_lab.checkpoint.card_origin import MOST_LAYERS, NOTHING, History, made_of, quantized_before
from ao_lab.checkpoint.formats import quantization_of, records_of
from ao_lab.checkpoint.io.files import ON_HUB, links_out, page, write_text
from ao_lab.checkpoint.io.markdown import (
    base_name,
    code,
    hub_name,
    licence,
    note,
    number,
    one_line,
    prose,
    span,
    table,
)
from ao_lab.checkpoint.io.shards import Folder, look_at
from ao_lab.checkpoint.io.strict_json import read_object
from ao_lab.checkpoint.model_builder import CONFIG, configuration
from ao_lab.checkpoint.plain_readers import ROUNDS_INPUTS, grouped
from ao_lab.checkpoint.records import Records, Weight
from ao_lab.config.compressed_tensors import common_name, element_name, short_name, unserved
from ao_lab.config.recipe import Recipe
from ao_lab.eval import told_values
from ao_lab.install.versions import __version__, address
from ao_lab.intervals import MEANING
from ao_lab.kv_cache.static_scales import cache_scheme_of
from ao_lab.transforms.layers import full_name
from ao_lab.transforms.low_rank import FACTORS, residual_paths
from ao_lab.transforms.report import folded_names

#: Auto classes of transformers and the tasks of the Hub, those first that say most. None: the Hub has no name for all of them.
TASKS: dict[str, str | None] = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSeq2SeqLM": None,
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": None,
    "AutoModelForNextSentencePrediction": None,
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForZeroShotImageClassification": "zero-shot-image-classification",
    "AutoModelForObjectDetection": "object-detection",
    "AutoModelForZeroShotObjectDetection": "zero-shot-object-detection",
    "AutoModelForSemanticSegmentation": "image-segmentation",
    "AutoModelForUniversalSegmentation": "image-segmentation",
    "AutoModelForDepthEstimation": "depth-estimation",
    "AutoModelForMaskGeneration": "mask-generation",
    "AutoModelForVideoClassification": "video-classification",
    "AutoModelForAudioClassification": "audio-classification",
    "AutoModelForTextToWaveform": "text-to-audio",
    "AutoModelForTextToSpectrogram": "text-to-speech",
    "AutoModelForVisualQuestionAnswering": "visual-question-answering",
    "AutoModelForDocumentQuestionAnswering": "document-question-answering",
    "AutoModelForMaskedImageModeling": None,
    "AutoModelForPreTraining": None,
    "AutoModel": "feature-extraction",
}
#: Classes of transformers that vLLM's registry has for text generation with layers that its quantization covers
#: (_TEXT_GENERATION_MODELS of vllm/model_executor/models/registry.py, commit 0002bff0). It may serve others too.
SERVED_ARCHITECTURES = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Apertus", "Arcee", "Bamba", "Bloom", "Cohere", "Cohere2", "Dbrx", "DeepseekV2", "DeepseekV3", "Dots1", "Ernie4_5",
        "Ernie4_5_Moe", "Exaone4", "Falcon", "FalconH1", "FlexOlmo", "GPTBigCode", "GPTJ", "GPTNeoX", "Gemma", "Gemma2",
        "Gemma3", "Gemma3n", "Glm", "Glm4", "Glm4Moe", "Granite", "GraniteMoe", "GraniteMoeHybrid", "GraniteMoeShared",
        "HunYuanDenseV1", "HunYuanMoEV1", "Jamba", "Lfm2", "Lfm2Moe", "Llama", "Llama4", "LongcatFlash", "MiniMax",
        "Mistral", "Mixtral", "Mpt", "Nemotron", "OPT", "Olmo", "Olmo2", "Olmo3", "Olmoe", "Persimmon", "Phi", "Phi3",
        "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Qwen3Next", "SeedOss", "StableLm", "Starcoder2", "Zamba2",
    )
)  # fmt: skip


#: Model types that GGUF is written for (`ao_lab.clients.gguf.architectures`).
GGUF_MODELS = ("llama", "mistral", "qwen2", "qwen3")
#: What the name of their embedding ends in.
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Loader:
    """A class of transformers, and the Hub's name of what its models do."""

    name: str
    task: str | None


def loader_of(config: Mapping[str, Any]) -> Loader | None:
    """What loads the model of a configuration; None for one that describes no model of transformers.

    Where transformers is not installed nobody can say which of its tables has a class: then it is the class itself.
    """
    name = architecture_of(config)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return None
    if find_spec("transformers") is None:
        return Loader(name, None) if name is not None else None
    import transformers

    for auto, task in TASKS.items():
        tables: Any = getattr(transformers, auto, None)
        found = None if tables is None else tables._model_mapping._model_mapping.get(kind)
        first = found[0] if isinstance(found, (tuple, list)) else found
        if found is not None and first == name:
            return Loader(auto, task)
    known = name is not None and name in dir(transformers)
    # A class of somebody's own: what a plain language model is loaded by, as `ao_lab.load_pretrained` does.
    return Loader(str(name), None) if known else Loader("AutoModelForCausalLM", "text-generation")


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """The class that a configuration names first; None where it names none, or what can be none."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name.isidentifier() else None


def is_served(config: Mapping[str, Any]) -> bool:
    """Whether vLLM lists the architecture that a configuration names."""
    return architecture_of(config) in SERVED_ARCHITECTURES


CARD, RESULTS = "README.md", "eval.json"
#: What the last line of a card of ours begins with.
WRITTEN = "Written by ao_lab "
BEGIN, END = "<!-- results of ao-lab eval -->", "<!-- end of results -->"
#: What numbers are called.
LABELS = {
    "token_perplexity": "perplexity per token", "word_perplexity": "perplexity per word", "bits_per_byte": "bits per byte",
    "accuracy": "next-token accuracy", "agreement": "top-1 agreement with the base model",
    "kl": "KL divergence from the base model (nats)",
    "base_token_perplexity": "perplexity per token of the base model", "loss": "loss (nats per token)",
    "loss_difference": "loss above the base model's (nats per token)",
}  # fmt: skip
#: The texts that ao_lab measures on, by the beginnings of their names.
TEXTS = {"sympy-": "Python source code of SymPy, the default of `ao-lab eval`"}

#: What plain readers do with packed weights.
PLAIN_SPEED = (
    "transformers dequantizes the weights when loading, or at the first forward pass: the files are smaller, but the model in "
    "memory is neither smaller nor faster."
)
SERVED = " Servers with kernels for the format, such as vLLM, compute with the stored weights."
VLLM = "With vLLM (ao_lab's authors ran it on a CPU, not on a GPU):"
CONDITIONS = {
    "windows": "sequences", "length": "tokens per sequence", "windows_begin_with": "each sequence starts with",
    "tokens": "predicted tokens", "device": "device", "against": "base model",
}  # fmt: skip


@dataclass(frozen=True)
class Contents:
    """What a card says of a folder: records, headers, configuration and results."""

    folder: Folder
    records: Records
    config: Mapping[str, Any]
    results: Mapping[str, Any]


def model_card(
    folder: str | Path,
    *,
    base_model: str | None = None,
    command: str | None = None,
    notes: Sequence[str] = (),
    beside: Sequence[str] = (),
    base_folder: Path | None = None,
    measured: bool = True,
    history: History = NOTHING,
) -> str:
    """The text of a card for a folder of quantized weights; ValueError as `load_pretrained` for one that is none.

    base_model: the model it was quantized from (a name on the Hub, or a folder, of which only the last part is shown). Default:
    what config.json says. command: how it was made. notes: why the layout is not compressed-tensors, or what loaders of it
    need to know. beside: sentences on tensors that are not part of the model. base_folder: folder of the base model, whose card
    gives the licence if this folder's does not. measured: whether eval.json belongs to these weights. history: what calibration
    and training did, as the model remembers it. Links out of a folder are not followed.
    """
    path = Path(folder)
    found = look_at(path)
    has_results = measured and (path / RESULTS).is_file() and not links_out(path, [RESULTS])
    results = read_object(path / RESULTS, nonfinite=True) if has_results else {}
    contents = Contents(found, records_of(found), configuration(path), results)
    kept = licence(path / CARD) or ([] if base_folder is None else licence(base_folder / CARD))
    named = "" if base_folder is None else hub_name(base_folder / CARD)
    asked = base_model or str(contents.config.get("_name_or_path") or "")
    base = named or base_name(asked)
    local = not ON_HUB.fullmatch(base) and (Path(asked).is_dir() or len(Path(asked).parts) > 1)
    parts = [
        front_matter(contents, base, kept, history.trained, local),
        f"# {prose(path.resolve().name)}",
        made_of(contents.records.weights.values(), base, command, history, local),
        "## What was quantized",
        *quantized_before((base_folder, path)),
        scheme_table(contents),
        left_text(contents),
        *cache_text(contents),
        *(f"{note(sentence)}." for sentence in beside),
        "## Results",
        results_section(contents.results),
        "## How to load it",
        loading(contents, path.resolve().name, notes),
        *generating(contents, path.resolve(), "" if local else base),
        *differences(contents, notes),
        f"{WRITTEN}{__version__}{f' ({address()})' if address() else ''}.",
    ]
    return "\n\n".join(parts) + "\n"


def write_card(
    folder: str | Path,
    *,
    base_model: str | None = None,
    command: str | None = None,
    notes: Sequence[str] = (),
    beside: Sequence[str] = (),
    base_folder: Path | None = None,
    history: History = NOTHING,
) -> Path:
    """Write README.md into a folder of quantized weights; see `model_card`. What an earlier one says of a licence stays."""
    path = Path(folder) / CARD
    given: dict[str, Any] = {
        "base_model": base_model,
        "command": command,
        "notes": notes,
        "beside": beside,
        "base_folder": base_folder,
        "history": history,
    }
    write_text(path, model_card(folder, **given))
    return path


def card_beside(folder: str | Path, **given: Any) -> Path | None:
    """The card of a folder that was just saved; arguments of `model_card`. None, and nothing is written, where somebody
    else's README.md is there.
    """
    path = Path(folder) / CARD
    if path.is_file() and not is_ours(page(path) or ""):
        return None
    # Results that lie there are of other weights: these were just written.
    write_text(path, model_card(folder, **given, measured=False))
    return path


def is_ours(card: str) -> bool:
    """Whether a card was written here, and not by somebody who keeps it."""
    return any(line.startswith(WRITTEN) for line in card.splitlines()[-3:])


def with_results(text: str, results: Mapping[str, Any]) -> str:
    """A card with its results replaced; one without a place for them gets it at its end."""
    section = results_section(results)
    before, begin, rest = text.partition(BEGIN)
    if not begin:
        return f"{text.rstrip()}\n\n## Results\n\n{section}\n"
    return before + section + rest.partition(END)[2]


def front_matter(
    contents: Contents, base: str, kept: Sequence[str], trained: str = "", local: bool = False
) -> str:
    """What the Hub reads, without a base model that is a folder (`local`). Values are JSON, which is YAML."""
    weights = contents.records.weights.values()
    methods, schemes = {w.method for w in weights}, {w.meta.recipe.weight.name for w in weights}
    common = {name(w.meta.recipe).lower() for w in weights for name in (short_name, _element)}
    # The Hub refuses what is no repository's name.
    fields: dict[str, Any] = (
        {"base_model": base, "base_model_relation": "quantized"} if base and not local else {}
    )
    fields |= {
        "library_name": "transformers" if "compressed-tensors" in methods else "ao_lab",
        "quantized_by": f"ao_lab {__version__}",
        "tags": [
            "quantized",
            *([trained] if trained else []),
            *sorted({*methods, "ao_lab"}),
            *sorted(common | schemes),
        ],
    }
    loader = loader_of(contents.config)
    if loader is not None and loader.task is not None:
        fields["pipeline_tag"] = loader.task
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join(["---", *kept, *lines, "---"])


def _element(recipe: Recipe) -> str:
    """INT4, FP8, MXFP4 ... without its exponent bits."""
    return element_name(recipe.weight).partition(" ")[0]


def scheme_table(contents: Contents) -> str:
    """Layers, weights and bytes by recipe, and the sums."""
    groups: dict[str, list[Weight]] = {}
    for weight in contents.records.weights.values():
        groups.setdefault(str(weight.meta.recipe), []).append(weight)
    rows = [["scheme", "layers", "weights", "bytes before", "bytes"]]
    for name, weights in groups.items():
        known = prose(common_name(weights[0].meta.recipe))
        rows.append([f"{known}: {span(name)}", str(len(weights)), *map(number, sizes(weights))])
    factors = residual_names(contents)
    names = [name for name in contents.records.dense if name not in factors]
    dense, beside = (sum(contents.folder.specs[name].bytes for name in found) for found in (names, factors))
    every = sizes(contents.records.weights.values())
    if factors:
        rows.append(["low-rank residuals", str(len(factors) // 2), "", "0", number(beside)])
    rows.append(["unquantized", str(len(names)), "", number(dense), number(dense)])
    rows.append(["all", "", "", number(every[1] + dense), number(every[2] + dense + beside)])
    return table(rows)


def residual_names(contents: Contents) -> set[str]:
    """The tensors that are factors of low-rank residuals."""
    paths = residual_paths(contents.records.dense)
    return {full_name(path, name) for path in paths for name in FACTORS}


def sizes(weights: Iterable[Weight]) -> tuple[int, int, int]:
    """How many weights, their bytes before and now."""
    count = before = now = 0
    for weight in weights:
        elements = prod(weight.shape)
        count += elements
        before += elements * weight.meta.dtype.itemsize
        now += sum(spec.bytes for spec in weight.specs.values())
    return count, before, now


def left_text(contents: Contents) -> str:
    """Which matrices stayed."""
    specs = contents.folder.specs
    factors = residual_names(contents)
    left = [name for name in contents.records.dense if len(specs[name].shape) > 1 and name not in factors]
    matrices = dict.fromkeys(left, "")
    names = folded_names(matrices)
    shown = ", ".join(map(span, names[:MOST_LAYERS]))
    more = f" and {len(names) - MOST_LAYERS} more" if len(names) > MOST_LAYERS else ""
    return f"Matrices left unquantized: {shown}{more}." if names else "Every matrix is quantized."


def cache_text(contents: Contents) -> list[str]:
    """What the folder says of keys and values, and the call that lets generate() store them so; [] where it says nothing."""
    scheme = cache_scheme_of((quantization_of(contents.folder.path) or {}).get("kv_cache_scheme"))
    if scheme is None:
        return []
    element, per = scheme
    return [
        f"KV cache: static {'INT8' if element == 'int8' else 'FP8'} scales for keys and values, one per {per}, for loaders of "
        'kv_cache_scheme (vLLM); with ao_lab `ao_lab.use_kv_cache_(model, "calibrated")` applies them in `generate()`.'
    ]


def results_section(results: Mapping[str, Any]) -> str:
    """The results of `ao-lab eval` between marks that a later one finds."""
    tasks = results.get("tasks")
    if not isinstance(tasks, dict) or not tasks:
        body = "Accuracy was not measured; measure it on your task before you rely on it: `ao-lab eval FOLDER --save`."
    else:
        rows = [["task", "metric", "value"]]
        rows += result_rows(results)
        body = "\n\n".join([table(rows), conditions(results)])
    return f"{BEGIN}\n\n{body}\n\n{END}"


def result_rows(results: Mapping[str, Any]) -> list[list[str]]:
    """Task, metric and value, as `ao-lab eval` prints them."""
    count = results.get("windows")
    lines = told_values(results["tasks"], count if type(count) is int else None)
    named = (
        (task, name, prose(f"relative RMS error of {name}" if task == "weights" else name), told)
        for task, name, told in lines
    )
    return [[prose(task), LABELS.get(name, known), told] for task, name, known, told in named]


def conditions(results: Mapping[str, Any]) -> str:
    """Under which the numbers were measured."""
    named = []
    if results.get("text") is not None:
        known = next((what for start, what in TEXTS.items() if str(results["text"]).startswith(start)), "")
        named.append(f"text {prose(results['text'])}{f' ({known})' if known else ''}")
    named += [
        f"{name} {prose(results[key])}" for key, name in CONDITIONS.items() if results.get(key) is not None
    ]
    end = f" {MEANING} (Student's t)." if any(" ± " in told for *_, told in result_rows(results)) else ""
    return f"Measured by ao-lab eval: {', '.join(named)}.{end}" if named else f"Measured by ao-lab eval.{end}"


def loading(contents: Contents, name: str, notes: Sequence[str]) -> str:
    """Code and commands that work for the folder's layout."""
    loader = loader_of(contents.config)
    weights, plain = list(contents.records.weights.values()), is_plain(contents)
    if loader is None:
        called = span(f"ao_lab.load_pretrained({name!r}, model)")
        return f"{called} loads it into a model of the same architecture.{_why(notes)}"
    literal = json.dumps(name)
    ours = code("python", "import ao_lab", f"model = ao_lab.load_pretrained({literal})")
    if not plain:
        return "\n\n".join(
            [
                f"transformers loads this layout after `import ao_lab`, and refuses it without.{_why(notes)}",
                code(
                    "python",
                    "import ao_lab",
                    f"from transformers import {loader.name}",
                    f"model = {loader.name}.from_pretrained({literal})",
                ),
                "`dtype=` is the dtype of the computation; quantized weights and scales stay as stored. Or with ao_lab alone:",
                ours,
                *exported(contents, name),
            ]
        )
    return "\n\n".join(
        [
            f"{span(name)} is this folder; on the Hub put its repository there, owner/name.",
            "With transformers and `pip install compressed-tensors` (ao_lab is not needed):",
            _plainly(contents, weights, loader.name, name),
            *_before_generating(contents),
            *([f"I{ROUNDS_INPUTS[1:]}."] if any(weight.meta.recipe.activation for weight in weights) else []),
            PLAIN_SPEED + ("" if _refused(weights, contents.folder.path) else SERVED),
            VLLM,
            _served(contents, weights, name),
            "With ao_lab, which keeps the weights quantized in memory:",
            ours,
            *exported(contents, name),
        ]
    )


def exported(contents: Contents, name: str) -> list[str]:
    """The command that makes a file for llama.cpp, where all weights are blocks of one; [] for others."""
    recipes = [weight.meta.recipe for weight in contents.records.weights.values()]
    if contents.config.get("model_type") not in GGUF_MODELS or not all(map(is_gguf_block, recipes)):
        return []
    command = f"ao-lab export {shlex.quote(one_line(name))} model.gguf"
    if any(key.endswith(EMBEDDING) for key in contents.records.weights):
        return ["For llama.cpp:", code("sh", command)]
    return [
        "For llama.cpp (`--embedding` stores the embedding in 8 bits, as llama.cpp's own files do; without it in its dtype):",
        code("sh", f"{command} --embedding int8_g32_f16"),
    ]


def is_gguf_block(recipe: Recipe) -> bool:
    """Whether weights of a recipe are blocks of GGUF: integers under float16 scales for 32 elements or more, or MXFP4."""
    scheme, block = recipe.weight, recipe.weight.scale.block
    if (
        recipe.activation is not None
        or recipe.rotation
        or scheme.zero is not None
        or not isinstance(block, int)
    ):
        return False
    integers = scheme.format.kind == "int" and scheme.scale.storage == "float16"
    mxfp4 = (scheme.element, scheme.scale.storage) == ("float4_e2m1fn", "float8_e8m0fnu")
    return (integers or mxfp4) and block > 0 and block % 32 == 0


#: What a tokenizer brings along for conversations: a file of its own, or a field of its settings.
TEMPLATE, TOKENIZER_SETTINGS = "chat_template.jinja", "tokenizer_config.json"

#: Where the tokenizer is from. It may be saved into the folder after the card.
TOKENIZER_OF_BASE = ", with the base model's tokenizer (or this folder's, if it is saved here)"
TOKENIZER_HERE = ", once its tokenizer is in this folder (`tokenizer.save_pretrained(FOLDER)`)"


def generating(contents: Contents, folder: Path, base: str) -> list[str]:
    """Code that lets a language model generate text, by its chat template where it has one; [] for other models."""
    loader = loader_of(contents.config)
    if loader is None or loader.task != "text-generation":
        return []
    beside = any(
        (folder / name).is_file() for name in (TOKENIZER_SETTINGS, "tokenizer.json", "tokenizer.model")
    )
    name = folder.name if beside or not base else base
    told = "" if beside else TOKENIZER_OF_BASE if base else TOKENIZER_HERE
    chats = (folder / TEMPLATE).is_file() or '"chat_template"' in (page(folder / TOKENIZER_SETTINGS) or "")
    inputs = ['inputs = tokenizer("The capital of France is", return_tensors="pt")']
    if chats:
        inputs = [
            'chat = [{"role": "user", "content": "What is the capital of France?"}]',
            "inputs = tokenizer.apply_chat_template("
            'chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)',
        ]
    last = "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0], skip_special_tokens=True))"
    first = [
        "from transformers import AutoTokenizer",
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)})",
    ]
    return [f"To generate text{told}:", code("python", *first, *inputs, last)]


def is_plain(contents: Contents) -> bool:
    """Whether all weights are those of compressed-tensors."""
    return all(weight.method == "compressed-tensors" for weight in contents.records.weights.values())


def differences(contents: Contents, notes: Sequence[str]) -> list[str]:
    """In what the files of plain readers differ from the configuration that was asked for, for whoever uses ao_lab too."""
    notes = [one for one in notes if one != ROUNDS_INPUTS]
    if not notes or not is_plain(contents) or loader_of(contents.config) is None:
        return []
    told = "\n".join(f"- {note(one)}" for one in grouped(notes))
    return ["## Notes for ao_lab", f"What differs from the configuration, and from ao_lab:\n\n{told}"]


def _why(notes: Sequence[str]) -> str:
    return f" Why not compressed-tensors: {'; '.join(map(note, grouped(notes)[:3]))}." if notes else ""


def _plainly(contents: Contents, weights: Sequence[Weight], loader: str, name: str) -> str:
    """Code that loads a folder in compressed-tensors' formats; packed zero points want `dequantize`, there or here."""
    asked = (quantization_of(contents.folder.path) or {}).get("dequantize")
    packed = any(weight.format == "pack-quantized" and weight.meta.recipe.weight.zero for weight in weights)
    one = len({weight.format for weight in weights}) == 1
    config = (
        ", quantization_config=CompressedTensorsConfig(dequantize=True)"
        if packed and one and not asked
        else ""
    )
    return code(
        "python",
        f"from transformers import {loader}" + (", CompressedTensorsConfig" if config else ""),
        f"model = {loader}.from_pretrained({json.dumps(name)}{config})",
    )


def _before_generating(contents: Contents) -> list[str]:
    """Of an encoder-decoder whose weights transformers decompresses in the first call alone: that there has to be one."""
    asked = (quantization_of(contents.folder.path) or {}).get("dequantize")
    if contents.config.get("is_encoder_decoder") is not True or asked:
        return []
    return [
        "**Call the model once before `generate()`**: transformers decompresses the weights in the first call of the whole "
        "model, and `generate()` of an encoder-decoder begins with the encoder alone."
    ]


def _served(contents: Contents, weights: Sequence[Weight], name: str) -> str:
    if not is_served(contents.config):
        kind = architecture_of(contents.config) or "this model"
        return f"vLLM does not list {kind} among its models for text generation."
    if refused := _refused(weights, contents.folder.path):
        return f"vLLM lists no kernel for {refused}."
    return code("sh", f"vllm serve {shlex.quote(one_line(name))}")


def _refused(weights: Iterable[Weight], folder: Path) -> str:
    told = {refused for weight in weights if (refused := unserved(weight.meta.recipe))}
    groups = (quantization_of(folder) or {}).get("config_groups")
    inputs = (
        [one.get("input_activations") or {} for one in groups.values()] if isinstance(groups, dict) else []
    )
    # Those of MX have bytes as scales.
    if any(one.get("strategy") == "group" and not one.get("scale_dtype") for one in inputs):
        told.add("inputs in groups, which stand for rows of inputs with two axes")
    return "; ".join(sorted(told))


def unserved_weights(folder: Path) -> str:
    """What vLLM lists no kernel for in a folder of layout compressed-tensors, in words; "" where it lists one for each."""
    return _refused(records_of(look_at(folder)).weights.values(), folder)


__all__ = [
    "CARD", "CONFIG", "RESULTS", "SERVED_ARCHITECTURES", "TASKS", "architecture_of", "card_beside", "is_ours",
    "loader_of", "model_card", "unserved_weights", "with_results", "write_card",
]  # fmt: skip
