"""Times of a table: each method generates with a copy of one bfloat16 model, all of them in turn.

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

from experiments.generate.methods import BASE, Method
from experiments.generate.stage import PROMPT
from experiments.generate.tables import PREFILL, Table
from experiments.harness.outcome import Values, Wrong, attempt, free, status
from experiments.harness.timing import summary
from experiments.models.output_check import COMPILED_LIMIT, SCHEME_LIMIT, relative_change

TIME, SPEED, RATE, WARM, REPEAT, CHANGE = (
    "time", "speed over bfloat16", "tokens/s", "warm-up", "time again over the first", "logits, change"
)  # fmt: skip
#: Of calls before the timed ones: two where a program is compiled and its graph recorded.
COMPILING, EAGERLY = 2, 1
PREFILLS, OK = 8, next(iter(status("ok")))


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
            found = {one.name: attempt(partial(self.prepare, table, one, ready)) for one in table.methods}
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
        ready[method.name] = model
        return {CHANGE: (changed, "ratio"), WARM: (warm, "s")}


@contextmanager
def several_compiled() -> Iterator[None]:
    """Each model is compiled as if it were the process's only one: not for any size since another's sizes differ, and
    not refused for their number."""
    with torch._dynamo.config.patch(recompile_limit=64, automatic_dynamic_shapes=False):
        yield


def in_turn(table: Table, ready: Mapping[str, Any], found: dict[str, Values]) -> None:
    """Times of the methods that are ready, into `found`; one that fails has a status instead, and no more calls."""
    taken: dict[str, list[list[float]]] = {name: [] for name in ready}
    for _ in range(PREFILLS if table.part == PREFILL else table.stage.calls):
        for name, model in ready.items():
            if taken.get(name) is not None:
                call = attempt(partial(one_call, table, model, taken[name]))
                if OK not in call:
                    found[name] = call
                    del taken[name]
    for name, calls in taken.items():
        found[name] |= times_of(table, [one for call in calls for one in call])
    if BASE.name in taken:
        compare(found, taken[BASE.name])


def one_call(table: Table, model: Any, taken: list[list[float]]) -> Values:
    """One more call's seconds, of its prompt or of each token, at the end of `taken`."""
    if table.part == PREFILL:
        found = [table.stage.prefill(model, table.length, table.compiled)]
    else:
        found = table.stage.steps(model, table.batch, table.compiled)
    if not found:
        raise Wrong("no step was timed")
    taken.append(found)
    return {}


def compare(found: dict[str, Values], base: Sequence[list[float]]) -> None:
    """Speeds over bfloat16, whose last call's median over its first's stands beside."""
    time = found[BASE.name][TIME][0]
    found[BASE.name][REPEAT] = (summary(base[-1]).median / summary(base[0]).median, "ratio")
    for values in found.values():
        if TIME in values:
            values[SPEED] = (time / values[TIME][0], "ratio")


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
    return relative_change(logits(model, prompt), expected, limit, "from those of its weights in bfloat16")[0]


def logits(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Those of the last token of each row of tokens, in float32."""
    found: torch.Tensor = model(prompt, logits_to_keep=1).logits
    return found.float()


def warmed(table: Table, model: Any) -> float:
    """Seconds of the calls before anything is timed: compilation, and recording a graph."""
    started, taken = time.perf_counter(), list[list[float]]()
    for _ in range(COMPILING if table.compiled and table.part != PREFILL else EAGERLY):
        one_call(table, model, taken)
    return time.perf_counter() - started


def times_of(table: Table, taken: Sequence[float]) -> Values:
    """Milliseconds of a token, or of a prompt up to its first token: median and quantiles."""
    timing, count = summary(taken), table.length if table.part == PREFILL else table.batch
    return {
        TIME: (timing.median * 1e3, "ms"),
        f"{TIME}, 20%": (timing.low * 1e3, "ms"),
        f"{TIME}, 80%": (timing.high * 1e3, "ms"),
        RATE: (count / timing.median, "tokens/s"),
    }


__all__ = ["CHANGE", "RATE", "REPEAT", "SPEED", "TIME", "WARM", "Bench"]
