"""Experiment `generate`: transformers' `generate()` on shapes of Llama-3.1-8B, as users call it.

Random weights; 8 layers, and all 32 where it says most. Parts, by the names of `--only`: "eager" (a token's time at batch 1,
16 and 64, not compiled), "prefill" (a prompt of 2048 tokens) and "decode" (a token's time, compiled as transformers does by
itself). At quick scale, and without a GPU: a tiny stand-in. A run that has a limit of seconds starts no table after it and
publishes what it has; the same call goes on from there.

Times of a table: each method generates with a copy of one bfloat16 model, all of them in turn.

A host is slower in one minute than in the next by more than some differences that are asked for, so every round has one call
of each method. Before that its logits are compared with those of a bfloat16 model that has what the method stores as weights:
rounding to 4 bits moves the logits of random layers by nearly their size (0.8 at 8 layers), and would hide a product that is
wrong. Where inputs are rounded too, the limit is wider.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters

from ao_lab.measure.turns import REPEAT, summary
from experiments.generate.tables import (
    BASE,
    DECODE,
    EAGER_DECODE,
    PREFILL,
    PROMPT,
    TORCHAO,
    TRANSFORMERS,
    Method,
    Table,
    stand_ins,
    tables_of,
)
from experiments.harness.measuring import Deadline, Values, Wrong, attempt, bar, free, status
from experiments.harness.registry import check_known
from experiments.harness.revision import seed_and_libraries, version_of
from experiments.harness.rows import Journal, Row
from experiments.models.llama import COMPILED_LIMIT, SCHEME_LIMIT, relative_change
from experiments.runs.run import all_rows, published_shapes, put_table, where_of
from experiments.runs.settings import Settings

EXPERIMENT = "generate"
PARTS = (EAGER_DECODE, PREFILL, DECODE)
OK = "status: ok"


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the seed, and the libraries that compile, generate or are compared."""
    return f"{seed_and_libraries(settings.seed)}-{TRANSFORMERS}{version_of(TRANSFORMERS)}"


def measured_whole(row: Row) -> tuple[str, str]:
    """What a row is measured together with."""
    return row.table, row.setting


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all parts, or of those that `settings.only` names; rows in the journal are not measured again."""
    journal = journal if journal is not None else Journal()
    deadline, failed, bench = Deadline(settings.seconds), list[Row](), Bench(settings.seed)
    tables = (tables_of if published_shapes(settings) else stand_ins)(settings.only or PARTS, settings.device)
    todo = [table for table in tables if not is_whole(settings, journal, table)]
    with bar("generate()", len(todo)) as step:
        for table in todo:
            put_table(EXPERIMENT, table, values_of(table, bench, deadline), settings, journal, failed)
            step(f"{table.stage.data}, {table.setting}")
    return all_rows(settings, journal, failed)


def values_of(table: Table, bench: Bench, deadline: Deadline) -> dict[str, Values]:
    """Values of each method, or the reason why there are none."""
    reasons = {one.name: deadline.reason(table.needed) or one.missing for one in table.methods}
    here = [one for one in table.methods if reasons[one.name] is None]
    found = bench.measure(Table(**{**vars(table), "methods": tuple(here)})) if here else {}
    return {name: status(reason) if reason else found[name] for name, reason in reasons.items()}


def is_whole(settings: Settings, journal: Journal, table: Table) -> bool:
    """Whether nothing is missing that can be measured here; what torchao refused is not asked for again."""
    own = [one for one in table.methods if one.library != TORCHAO and one.missing is None]
    return bool(own) and all(journal.finished(*where_of(settings, table), one.name) for one in own)


check_parts = partial(check_known, EXPERIMENT, PARTS)


TIME, SPEED, RATE, WARM = "time", "speed over bfloat16", "tokens/s", "warm-up"
CHANGE, COMPILED_CHANGE = "logits, change", "logits, change by compiling"
#: What torchao's `quantize_` sets.
OPTIONS = (
    "coordinate_descent_tuning", "coordinate_descent_check_all_directions", "force_fuse_int_mm_with_mul", "fx_graph_cache",
    "triton.unique_kernel_names",
)  # fmt: skip
#: Of calls before the timed ones: two where a program is compiled and its graph recorded.
COMPILING, EAGERLY = 2, 1


@dataclass
class Bench:
    """The bfloat16 model that others are copies of, made when it is first needed; one at a time."""

    seed: int
    _model: tuple[str, Any] | None = field(default=None)

    def base(self, table: Table) -> Any:
        """The model of a table's stage."""
        if self._model is None or self._model[0] != table.stage.data:
            self._model = None
            free()
            self._model = (table.stage.data, table.stage.model(self.seed))
        return self._model[1]

    @torch.no_grad()
    def measure(self, table: Table) -> dict[str, Values]:
        """Values of each method; one that fails has a status instead."""
        torch.compiler.reset()
        ready: dict[str, Any] = {}
        with several_compiled():
            found = {}
            for one in table.methods:
                with kept_options():
                    found[one.name] = attempt(partial(self.prepare, table, one, ready))
            in_turn(table, ready, found)
        ready.clear()
        torch.compiler.reset()
        return found

    def prepare(self, table: Table, method: Method, ready: dict[str, Any]) -> Values:
        """A method's model, checked and warm; what that took."""
        base = self.base(table)
        # The base never generates: transformers keeps the compiled call with the model, and copies would run that.
        model = copy.deepcopy(base)
        method.apply(model)
        dense = None if method.build is None else dense_copy(base, model)
        changed = max(change(method, model, dense, prompt) for prompt in prompts(table))
        del dense
        free()
        warm = warmed(table, model)
        values = {CHANGE: (changed, "ratio"), WARM: (warm, "s")}
        if table.compiled:
            values[COMPILED_CHANGE] = (change_by_compiling(table, method, model), "ratio")
        ready[method.name] = model
        return values


@contextmanager
def several_compiled() -> Iterator[None]:
    """Models are not compiled for any size since another's sizes differ, and not refused for their number."""
    with torch._dynamo.config.patch(recompile_limit=64, automatic_dynamic_shapes=False):
        yield


@contextmanager
def kept_options() -> Iterator[None]:
    """The compiler's options, which torchao's `quantize_` sets for the process, are put back: models that are compiled after
    its own would be other programs."""
    import torch._inductor.config as inductor

    current = inductor.get_config_copy()
    with inductor.patch({name: current[name] for name in OPTIONS}):
        yield


def in_turn(table: Table, ready: Mapping[str, Any], found: dict[str, Values]) -> None:
    """Times of the methods that are ready, into `found`; one that fails has a status instead, and no more calls.

    Each round begins with another method, so that none always follows the same one.
    """
    taken: dict[str, list[list[float]]] = {name: [] for name in ready}
    for at in range(table.stage.calls):
        names = [*taken]
        for name in [*names[at % len(names) :], *names[: at % len(names)]] if names else ():
            try:
                taken[name].append(one_call(table, ready[name]))
            except Exception as error:  # noqa: BLE001
                found[name] = attempt(partial(again, error))
                del taken[name]
    for name, calls in taken.items():
        found[name] |= times_of(table, [one for call in calls for one in call])
    if BASE.name in taken:
        compare(found, taken)


def again(error: Exception) -> Values:
    """For `attempt`, whose words say what failed. Memory is given back there, and not between calls: asking for it again is a
    part of none."""
    raise error


def one_call(table: Table, model: Any) -> list[float]:
    """Seconds of one more call: of its prompt, or of each token."""
    if table.part == PREFILL:
        return [table.stage.prefill(model, table.length, table.compiled)]
    if not (found := table.stage.steps(model, table.batch, table.compiled)):
        raise Wrong("no step was timed")
    return found


def compare(found: dict[str, Values], taken: Mapping[str, Sequence[list[float]]]) -> None:
    """Speeds over bfloat16, the median over rounds of what each round says; bfloat16's last call over its first."""
    base = [summary(one).median for one in taken[BASE.name]]
    found[BASE.name][REPEAT] = (base[-1] / base[0], "ratio")
    for name, calls in taken.items():
        ratios = summary([of / summary(one).median for of, one in zip(base, calls, strict=True)])
        found[name][SPEED] = (ratios.median, "ratio")


def dense_copy(base: Any, model: Any) -> Any:
    """A copy of `base` with the linear layers of `model`, whose weights are those that its own products multiply by."""
    made = copy.deepcopy(base)
    for layer, stored in zip(linear_layers(made), linear_layers(model), strict=True):
        layer.weight.copy_(dense_weight(stored.weight))
    return made


def linear_layers(model: Any) -> list[torch.nn.Linear]:
    """All of them, in their order."""
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def dense_weight(weight: torch.Tensor) -> torch.Tensor:
    """What a weight stands for, in bfloat16; of a library that does not say so, the layer's outputs of the unit vectors."""
    if hasattr(weight, "dequantize"):
        with suppress(NotImplementedError):
            return weight.dequantize().to(torch.bfloat16)
    units = torch.eye(weight.shape[1], dtype=torch.bfloat16, device=weight.device)
    return torch.nn.functional.linear(units, weight).t()


def prompts(table: Table) -> list[torch.Tensor]:
    """Tokens whose rows are those of the products that are timed: of the prompt, and of a step of decoding."""
    if table.part == PREFILL:
        return [table.stage.prompt(1, table.length)]
    return [table.stage.prompt(table.batch, PROMPT), table.stage.prompt(table.batch, 1)]


def change(method: Method, model: Any, dense: Any, prompt: torch.Tensor) -> float:
    """How far the last tokens' logits are from those of the dense weights, of their size."""
    expected = None if dense is None else logits(dense, prompt)
    limit = SCHEME_LIMIT if method.dynamic else COMPILED_LIMIT
    return checked(logits(model, prompt), expected, limit, "from those of its weights in bfloat16")


def checked(outputs: torch.Tensor, expected: torch.Tensor | None, limit: float, cause: str) -> float:
    """The relative change of all; Wrong where that of any row of the batch is beyond the limit: of 64 rows, all of one wrong
    would be an eighth of the whole."""
    if expected is not None:
        for one, other in zip(outputs, expected, strict=True):
            relative_change(one, other, limit, f"in a row {cause}")
    return relative_change(outputs, expected, limit, cause)[0]


def change_by_compiling(table: Table, method: Method, model: Any) -> float:
    """How far logits of the compiled step are from those of the same model, not compiled, of their size; the last of a call's
    steps, so that errors of all of them are in the cache."""
    compiled, plain = (table.stage.logits(model, table.batch, one) for one in (True, False))
    limit = SCHEME_LIMIT if method.dynamic else COMPILED_LIMIT
    return checked(compiled, plain, limit, "from those of the same model, not compiled")


def logits(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Those of the last token of each row of tokens, in float32."""
    found: torch.Tensor = model(prompt, logits_to_keep=1).logits
    return found.float()


def warmed(table: Table, model: Any) -> float:
    """Seconds of the calls before anything is timed: compilation, and recording a graph. Wrong where another model's program
    answered: programs of several models are beside each other, and what tells two of them apart may be left out."""
    started, graphs, compiles = time.perf_counter(), unique_graphs(), table.compiled
    for _ in range(COMPILING if compiles else EAGERLY):
        one_call(table, model)
    if compiles and unique_graphs() == graphs:
        raise Wrong("nothing was compiled: another model's program answered")
    return time.perf_counter() - started


def unique_graphs() -> int:
    """Programs that were compiled so far."""
    return counters["stats"]["unique_graphs"]


def times_of(table: Table, taken: Sequence[float]) -> Values:
    """Milliseconds of a token, or of a prompt up to its first token: median and quantiles."""
    timing, count = summary(taken), table.length if table.part == PREFILL else table.batch
    return {**timing.values(), RATE: (count / timing.median, "tokens/s")}
