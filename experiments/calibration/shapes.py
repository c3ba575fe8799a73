"""What calibration takes at the shapes of large models: seconds and memory of methods at those of Llama-3.1-8B, and of a whole
`ao-lab reproduce ptq --model DIR` at those of Llama-3.2-1B.

Weights and tokens are random: they say nothing of accuracy, and times do not depend on them. A method first quantizes a model
of the first few blocks, which gives the time of a block and an estimate of all of them: what is before the second block, the
others as long as the blocks after the first, and what the first pass of all data takes for each block more. Then it quantizes a
model of all blocks, where the seconds that are left suffice for the estimate. A whole time stands in place of its estimate. On
a CPU, and at quick scale, shapes are tiny.

Loading is not counted. Memory is what was allocated at most beyond the dense model; of blocks that are read from files one at
a time ("from files") it is all that was allocated. `ptq` has a byte-level tokenizer here and the texts of any run.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ao_lab.calibration.methods import AWQ, GPTQ, HQQ, AutoRound, Clip, Method
from ao_lab.calibration.run import FIRST_PASS
from ao_lab.checkpoint.streaming import quantize_pretrained
from ao_lab.config.base import SchemeConfig
from ao_lab.measure.memory import Peak, synchronize
from ao_lab.quantization.api import quantize_
from experiments.harness.measuring import Deadline, Values, attempt, bar, is_late, keep, status
from experiments.harness.rows import Journal, Row, table_name
from experiments.runs.run import published_shapes
from experiments.runs.settings import RealModels, Settings

EXPERIMENT = "calibration"
#: Parts of the experiment, by the names that `--only` takes.
LARGE, PTQ = "8B shapes", "1B shapes"
PARTS = (LARGE, PTQ)
#: The kind of the tables, and their data.
KIND, DATA = "shapes", "random weights"
TIME, ESTIMATE, BLOCK = "time", "time, estimated", "time of a block"
#: Of all data through the blocks of a model as it is; estimates without such a line leave it out of the other blocks.
PASS = "time of the first pass"
MEMORY, IN_ALL = "memory over the model", "memory in all"
#: What is measured of a whole run of `ptq`, behind its shapes, and its method.
PTQ_SETTING, PTQ_METHOD = "reproduce ptq --model", "all schemes"
#: Sequences of a batch.
BATCH = 4


@dataclass(frozen=True)
class Shapes:
    """Sizes of a Llama, and of the data: sequences, and tokens of each."""

    name: str
    layers: int
    sequences: int
    tokens: int
    fields: dict[str, Any]

    def config(self, layers: int) -> Any:
        """transformers' configuration of a model of so many blocks."""
        from transformers import LlamaConfig

        return LlamaConfig(num_hidden_layers=layers, max_position_embeddings=8192, **self.fields)


def _llama(
    width: int, inner: int, heads: int, shared: int, vocabulary: int, tied: bool = False
) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return {
        **dict(zip(names, (width, inner, heads, shared, vocabulary), strict=True)),
        "tie_word_embeddings": tied,
    }


LLAMA_8B = Shapes("8B shapes", 32, 128, 2048, _llama(4096, 14336, 32, 8, 128256))
LLAMA_1B = Shapes("1B shapes", 16, 128, 2048, _llama(2048, 8192, 32, 8, 128256, True))
TINY = Shapes("tiny shapes", 4, 10, 32, _llama(128, 256, 4, 2, 320))


@dataclass(frozen=True)
class Arm:
    """A method at large shapes. first: blocks of the model that is measured first; 0: all of them at once. files: whether
    blocks are read from files one at a time. whole: whether all blocks are measured where there is time."""

    scheme: str
    methods: tuple[Method, ...]
    first: int = 3
    files: bool = False
    whole: bool = True

    @property
    def calibrates(self) -> bool:
        """Whether it reads data."""
        return any(method.calibrates for method in self.methods)


#: By the names of rows, the shortest first.
ARMS: dict[str, Arm] = {
    "hqq": Arm("hqq.int4_g64", (HQQ(),), first=0),
    "gptq": Arm("int4_g128", (Clip(), GPTQ())),
    "awq + search": Arm("int4_g128", (AWQ(), Clip())),
    "gptq, from files": Arm("int4_g128", (Clip(), GPTQ()), first=2, files=True, whole=False),
    "autoround": Arm("int4_g128", (AutoRound(),), first=2, whole=False),
    "gptq, mxfp4": Arm("mxfp4_rceil", (Clip(), GPTQ()), whole=False),
}


def shapes_of(settings: Settings) -> Shapes:
    """The shapes of a run."""
    return LLAMA_8B if published_shapes(settings) else TINY


def ptq_shapes(settings: Settings) -> Shapes:
    """The shapes of the model on which all of `ptq` is run."""
    return LLAMA_1B if published_shapes(settings) else TINY


def random_model(shapes: Shapes, layers: int, device: str) -> Any:
    """A random Llama of so many blocks in bfloat16, the same in every call, made on its device."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model: Any = LlamaForCausalLM(shapes.config(layers))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def batches(shapes: Shapes, device: str) -> list[dict[str, torch.Tensor]]:
    """Tokens at random."""
    generator = torch.Generator().manual_seed(1)
    size = (shapes.sequences, shapes.tokens)
    ids = torch.randint(0, shapes.fields["vocab_size"], size, generator=generator).to(device)
    return [{"input_ids": ids[start : start + BATCH]} for start in range(0, len(ids), BATCH)]


@dataclass
class Stopwatch:
    """Seconds until each weight was placed, as `progress` is told of them; a block is over with its last weight."""

    device: torch.device
    begin: float = field(default_factory=time.perf_counter)
    ends: dict[str, float] = field(default_factory=dict)
    #: When each batch of the first pass began, which goes through all blocks as they are.
    batches: list[float] = field(default_factory=list)
    #: Where all batches but the first run through a block before the next: seconds of each block, and when one began.
    blocks: list[float] = field(default_factory=list)
    block_began: float | None = None

    def now(self) -> float:
        """Since the call, the device's work done."""
        synchronize(self.device)
        return time.perf_counter() - self.begin

    def __call__(self, name: str, done: int, total: int) -> None:
        """Of a batch, or a block, of the first pass that begins, of a block whose statistics begin, or of a weight that was
        placed."""
        if self.block_began is not None:
            self.blocks.append(self.now() - self.block_began)
            self.block_began = None
        if name.startswith(f"{FIRST_PASS}: "):
            self.block_began = self.now()
            return
        if name.startswith(f"{FIRST_PASS}, batch"):
            self.batches.append(self.now())
        # What is told of a block before its statistics ("model.layers.3: statistics of its inputs") is no weight of it.
        parts = [] if ": " in name else name.split(".")
        if "layers" in parts:
            self.ends[parts[parts.index("layers") + 1]] = self.now()

    @property
    def block(self) -> float:
        """From the end of the first block to that of the last, a block: with what it takes to run data to it."""
        ends = sorted(self.ends.values())
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    @property
    def first_pass(self) -> float:
        """All batches, by those between the first, which compiles, and the last; 0 where there are none between. By the blocks
        where batches run through these together, the first batch as long as another."""
        count = len(self.batches)
        if self.blocks and count > 1:
            return sum(self.blocks) / (count - 1) * count
        return (self.batches[-1] - self.batches[1]) / (count - 2) * count if count > 2 else 0.0

    def of_layers(self, count: int) -> float:
        """A model of so many: all that is before the second block, the others as long as the blocks after the first, and the
        first pass through those that this model lacks."""
        here = len(self.ends)
        return min(self.ends.values()) + (count - 1) * self.block + (count - here) * self.first_pass / here


def quantized(model: Any, arm: Arm, shapes: Shapes, device: str) -> tuple[Values, Any]:
    """Seconds and memory of a method, and the quantized model. model: dense, or the folder of its files."""
    from_files, where = isinstance(model, Path), torch.device(device)
    layers = len(model.model.layers) if not from_files else arm.first
    given: dict[str, Any] = {"methods": arm.methods}
    given |= {"calibration": batches(shapes, device)} if arm.calibrates else {}
    config, peak = SchemeConfig(scheme=arm.scheme), Peak(where)
    gc.collect()
    peak.begin()
    watch = Stopwatch(where)
    if from_files:
        model = quantize_pretrained(model, config, device=device, progress=watch, **given)
    else:
        quantize_(model, config, progress=watch, **given)
    seconds, whole = watch.now(), layers == shapes.layers
    found: Values = {"blocks": (layers, ""), BLOCK: (watch.block, "s")}
    found[TIME if whole else ESTIMATE] = (seconds if whole else watch.of_layers(shapes.layers), "s")
    found |= {PASS: (watch.first_pass, "s")} if watch.first_pass else {}
    # What is resident on a CPU is the whole process's.
    if where.type == "cuda" and (over := peak.over()) is not None:
        found[IN_ALL if from_files else MEMORY] = (over, "byte")
    found["tokens seen"] = (shapes.sequences * shapes.tokens * arm.calibrates, "")
    return found, model


def measured(arm: Arm, shapes: Shapes, layers: int, device: str) -> Values:
    """A model of so many blocks, made and quantized."""
    model = random_model(shapes, layers, device)
    if not arm.files:
        return quantized(model, arm, shapes, device)[0]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        return quantized(Path(folder), arm, shapes, device)[0]


@dataclass(frozen=True)
class Task:
    """A method on a model of so many blocks."""

    name: str
    layers: int


def setting_of(shapes: Shapes, task: Task) -> str:
    """The setting of rows."""
    return f"{shapes.name}, {ARMS[task.name].scheme}, {task.layers} of {shapes.layers} blocks"


def tasks_of(shapes: Shapes) -> list[Task]:
    """Every method on its first blocks, then those on all blocks, each in the order of ARMS."""
    first = [Task(name, arm.first or shapes.layers) for name, arm in ARMS.items()]
    return first + [Task(name, shapes.layers) for name, arm in ARMS.items() if arm.whole and arm.first]


def run(settings: Settings, journal: Journal) -> list[Row]:
    """Measure what the journal lacks of the parts that `settings.only` names, in its order; returns rows of what failed or was
    not reached."""
    deadline, failed = Deadline(settings.seconds), list[Row]()
    works: dict[str, Callable[[Settings, Journal, Deadline, list[Row]], None]] = {
        LARGE: large,
        PTQ: whole_ptq,
    }
    for part in settings.only:
        works[part](settings, journal, deadline, failed)
    return failed


def large(settings: Settings, journal: Journal, deadline: Deadline, failed: list[Row]) -> None:
    """The methods at 8B shapes, whole models last, where the estimate of each is in time."""
    shapes, table = shapes_of(settings), table_name(KIND, settings.scale, DATA)
    left = [
        one
        for one in tasks_of(shapes)
        if not journal.finished(table, setting_of(shapes, one), one.name, settings.seed)
    ]
    with bar(LARGE, len(left)) as step:
        for one in left:
            needed = estimate(journal, settings, shapes, one) if one.layers == shapes.layers else 0.0
            reason = deadline.reason(needed)
            work = partial(measured, ARMS[one.name], shapes, one.layers, settings.device)
            values = status(reason) if reason else attempt(work)
            keep(journal, failed, rows_of(settings, setting_of(shapes, one), one.name, values))
            step(f"{one.name}, {one.layers} blocks")


def estimate(journal: Journal, settings: Settings, shapes: Shapes, task: Task) -> float:
    """The seconds that a whole model is going to take by what its first blocks took; 0 where that is not known."""
    table = table_name(KIND, settings.scale, DATA)
    setting = setting_of(shapes, replace(task, layers=ARMS[task.name].first))
    known = [
        row.value
        for row in journal.rows
        if (row.table, row.setting, row.method, row.metric) == (table, setting, task.name, ESTIMATE)
    ]
    return known[-1] if known else 0.0


def rows_of(settings: Settings, setting: str, method: str, values: Values) -> list[Row]:
    """Rows of a measurement."""
    return settings.rows(EXPERIMENT, KIND, DATA, setting, method, values)


def whole_ptq(settings: Settings, journal: Journal, deadline: Deadline, failed: list[Row]) -> None:
    """A whole run of `ptq --model` on a random model: its seconds, and how many lines it measured."""
    table = table_name(KIND, settings.scale, DATA)
    setting = f"{ptq_shapes(settings).name}, {PTQ_SETTING}"
    if journal.finished(table, setting, PTQ_METHOD, settings.seed):
        return
    reason = deadline.reason()
    values = status(reason) if reason else attempt(lambda: ptq_values(settings, deadline))
    keep(journal, failed, rows_of(settings, setting, PTQ_METHOD, values))


def ptq_values(settings: Settings, deadline: Deadline) -> Values:
    """What the run took; where the deadline ended it, an estimate by the share of the lines that it reached."""
    from experiments.ptq.real import run_real

    shapes = ptq_shapes(settings)
    few: dict[str, Any] = {} if shapes is LLAMA_1B else {"windows": 2, "length": 32}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "random-model"
        random_model(shapes, shapes.layers, settings.device).save_pretrained(folder)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer()), encoding="utf-8")
        asked = RealModels(models=(str(folder),), **few)
        seconds = None if settings.seconds is None else deadline.left()
        started = time.perf_counter()
        inner = replace(settings, asked=asked, models=asked.models, only=(), seconds=seconds)
        journal = Journal()
        lost = run_real(inner, journal)
        took = time.perf_counter() - started
    return told(journal.rows, lost, took)


def told(rows: list[Row], lost: list[Row], seconds: float) -> Values:
    """Lines that were measured, that failed and that were not reached; seconds of all of them."""
    statuses = [row for row in (*rows, *lost) if row.metric.startswith("status: ")]
    lines = {(row.setting, row.method): row.metric for row in statuses if row.table.endswith("/model")}
    good = sum(metric == "status: ok" for metric in lines.values())
    late = sum(map(is_late, lines.values()))
    share = (len(lines) - late) / len(lines)
    found: Values = {
        "lines": (len(lines), ""),
        "lines measured": (good, ""),
        "lines that failed": (len(lines) - late - good, ""),
        ESTIMATE if late else TIME: (seconds / share if share else float("inf"), "s"),
    }
    reasons = dict.fromkeys(
        metric for metric in lines.values() if metric != "status: ok" and not is_late(metric)
    )
    return {**found, **{f"failed, {one.removeprefix('status: ')}": (1.0, "") for one in [*reasons][:4]}}


def tokenizer() -> dict[str, Any]:
    """Bytes as tokens, as a `tokenizer.json` says it: printable bytes stand for themselves, others for letters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = sorted([*map(chr, printable), *(chr(256 + place) for place in range(len(others)))])
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {letter: place for place, letter in enumerate(letters)}, "merges": []}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}
