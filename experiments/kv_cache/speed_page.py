"""What the page of `kv_cache` says of times: decode attention by recipe and context, and tokens of a whole model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.kv_cache.decode_attention import PEERS, Size
from experiments.kv_cache.generation import COMPILED, FIRST, GENERATE, OWN, PREPARED, STEP
from experiments.kv_cache.speed import BASE, COPY, SPEED, TIME
from experiments.report.content import Drawing, Section, Table, member
from experiments.report.plots import NARROW, curves
from experiments.report.results import Results, Where, best_run, by_run, number
from experiments.report.targets import BASELINE_TOLERANCE, RunTargets, Target, limits

EXPERIMENT = "kv_cache"
OVER_PEER, BREAK_EVEN, OVER_OWN, OVER_BASE = (
    "speed over the best peer", "break-even with bfloat16", "speed over transformers' cache", "speed over bfloat16",
)  # fmt: skip
SPEED_TEXT = (
    "One layer, one query of every head over a cache of exactly the context, microseconds, all methods of a size in turn, on "
    "a GPU in CUDA graphs over caches beyond its L2. Peers read bfloat16; transformers' attention has the mask "
    "of its static cache. A copy of a cache's bytes is the time in which a copy "
    "moves as many bytes, half of them read and half written; reading alone is up to a tenth quicker.",
)
EVEN_TEXT = (
    "The context from which a recipe's attention takes no longer than that over bfloat16, at this one and at all longer "
    "contexts measured, interpolated between two of them; writing is not in it.",
)
GENERATE_TEXT = (
    "transformers' compiled generate() on random weights, all methods in turn, milliseconds a token: the median step of an "
    "answer behind its first ones, the median of answers. The first call compiles, as transformers does by default, or as "
    "prepare_for_generate_ has it; what is prepared is compared with bfloat16 that is. Where the cache was filled before, no "
    "prompt is read.",
)
STEP_TEXT = (
    "A step of a loop of one's own on random weights, all methods in turn, on a GPU in CUDA graphs: layer by layer as "
    "transformers' model is called, or compiled, as ao_lab.GreedyDecoding decodes. Compiled steps are compared with that of "
    "bfloat16 that is compiled too.",
)


def tokens_of(results: Results, batch: int) -> list[int]:
    """Contexts of a number of sequences, ascending."""
    sizes = [Size.of(one) for one in results.settings]
    return sorted(one.tokens for one in sizes if one.batch == batch)


def batches(results: Results) -> list[int]:
    """Numbers of sequences, ascending."""
    return sorted({Size.of(one).batch for one in results.settings})


def over_best_peer(results: Results, setting: str, method: str) -> float | None:
    """The time of the quickest peer over a method's."""
    times = [results.value(setting, peer, TIME) for peer in PEERS]
    best, mine = (
        min((one for one in times if one is not None), default=None),
        results.value(setting, method, TIME),
    )
    return None if best is None or mine is None else best / mine


def break_even(tokens: Sequence[int], mine: Sequence[float], base: Sequence[float]) -> float:
    """The context from which `mine` is at most `base` to the longest; the shortest where it always is, infinity where it is not
    at the longest. Between two contexts times are straight lines."""
    more = [one - other for one, other in zip(mine, base, strict=True)]
    behind = [number for number, one in enumerate(more) if one > 0]
    if not behind:
        return float(tokens[0])
    last = behind[-1]
    if last == len(tokens) - 1:
        return math.inf
    return tokens[last] + (tokens[last + 1] - tokens[last]) * more[last] / (more[last] - more[last + 1])


def even_of(results: Results, batch: int, method: str) -> float | None:
    """The break-even of a recipe with bfloat16 at so many sequences; None where they share no context."""
    times = [
        (
            tokens,
            results.value(Size(batch, tokens).name, method, TIME),
            results.value(Size(batch, tokens).name, BASE, TIME),
        )
        for tokens in tokens_of(results, batch)
    ]
    found = [(tokens, mine, base) for tokens, mine, base in times if mine is not None and base is not None]
    return break_even(*zip(*found, strict=True)) if found else None  # type: ignore[arg-type]


def own_methods(results: Results) -> list[str]:
    """Recipes, in the order of rows."""
    return [method for method in results.methods if method not in PEERS]


def findings(rows: Sequence[Row]) -> list[str]:
    """Times at the largest size, and tokens of whole models, at full scale."""
    words = []
    for kind, said in ((SPEED, _said_of_speed), (GENERATE, _said_of_models), (STEP, _said_of_models)):
        best = best_run(by_run(rows, kind))
        if best is not None and best[0].scale != "quick":
            words.append(f"{best[0]}: {said(best[1])}.")
    return words


def _said_of_speed(results: Results) -> str:
    setting = "64 x 8192" if "64 x 8192" in results.settings else results.settings[-1]
    times = {method: results.value(setting, method, TIME) for method in results.methods}
    parts = [f"{member(method)} {number(value, 0)}" for method, value in times.items() if value is not None]
    return f"decode attention of one layer at {setting} tokens, us a call: {', '.join(parts)}"


def _said_of_models(results: Results) -> str:
    said = []
    for setting in results.settings:
        times = {method: results.value(setting, method, TIME) for method in results.methods}
        parts = [
            f"{member(method)} {number(value, 2)}" for method, value in times.items() if value is not None
        ]
        said.append(f"{setting}: {', '.join(parts)}")
    return f"decoding, ms a token, of {'; of '.join(said)}"


def sections(rows: Sequence[Row]) -> list[Section]:
    """Attention, generate() and steps, run by run."""
    return [
        *(speed_section(where, results) for where, results in by_run(rows, SPEED).items()),
        *(model_section(where, results, GENERATE) for where, results in by_run(rows, GENERATE).items()),
        *(model_section(where, results, STEP) for where, results in by_run(rows, STEP).items()),
    ]


def speed_section(where: Where, results: Results) -> Section:
    """A picture over the context, a table for each number of sequences, and break-evens."""
    tables = [speed_table(results, batch) for batch in batches(results)]
    evens = [method for method in own_methods(results) if method != BASE]
    lines = [
        [str(batch), *(_context(even_of(results, batch, method)) for method in evens)]
        for batch in batches(results)
    ]
    tables.append(Table("Break-even with bfloat16 (tokens)", ["sequences", *evens], lines, results.rows))
    return Section(
        f"Decode attention ({where})", SPEED_TEXT + EVEN_TEXT, [speed_drawing(where, results)], tables
    )


def _context(value: float | None) -> str:
    """A break-even as a cell."""
    return "" if value is None else "none" if math.isinf(value) else number(value, 0)


def speed_table(results: Results, batch: int) -> Table:
    """Times of all methods at so many sequences, and a copy of bfloat16's bytes."""
    lines = []
    for tokens in tokens_of(results, batch):
        name = Size(batch, tokens).name
        times = [number(results.value(name, method, TIME), 1) for method in results.methods]
        lines.append([str(tokens), *times, number(results.value(name, BASE, COPY), 1)])
    columns = ["tokens", *results.methods, "copy of bfloat16's bytes"]
    return Table(f"{batch} sequence{'s' * (batch != 1)} (us)", columns, lines, results.rows)


def speed_drawing(where: Where, results: Results) -> Drawing:
    """Times over the context at the most sequences, with copies of 16 and 8 bits."""
    batch = batches(results)[-1]
    tokens = tokens_of(results, batch)

    def series(method: str, metric: str) -> list[float | None]:
        return [results.value(Size(batch, one).name, method, metric) for one in tokens]

    shown = {method: series(method, TIME) for method in results.methods}
    copies = {
        f"copy of {method}'s bytes": series(method, COPY) for method in (BASE, "fp8") if method in shown
    }
    names = [f"{one:,}" for one in tokens]
    figure, narrow = (
        curves(shown | copies, "tokens of the context", "time of a call (us)", names=names, width=width)
        for width in (7.6, NARROW)
    )
    for one in (figure, narrow):
        one.axes[0].set_yscale("log")
    return Drawing(
        f"kv-cache-decode-attention-{where.ending}",
        f"Decode attention of {batch} sequences over the context.",
        figure,
        narrow,
    )


def ratio(results: Results, setting: str, method: str, base: str) -> float | None:
    """How many times as quick as another method."""
    mine, other = (results.value(setting, one, TIME) for one in (method, base))
    return None if mine is None or other is None else other / mine


def base_of(method: str) -> str:
    """What a method of a model is compared with: bfloat16, compiled or prepared where the method is."""
    return BASE + next((form for form in (COMPILED, PREPARED) if method.endswith(form)), "")


def model_section(where: Where, results: Results, kind: str) -> Section:
    """A line for every cache, with its speed over transformers' own and over bfloat16."""
    lines = [
        [
            setting, method, number(results.value(setting, method, TIME), 2),
            *(number(ratio(results, setting, method, base), 2) for base in (OWN, base_of(method))),
            *([number(results.value(setting, method, FIRST), 1)] if kind == GENERATE else []),
        ]
        for setting in results.settings
        for method in results.methods
        if results.value(setting, method, TIME) is not None
    ]  # fmt: skip
    columns = ["model", "cache", "ms a token", "over transformers'", "over bfloat16"]
    table = Table(
        "A token", [*columns, *(["first call (s)"] if kind == GENERATE else [])], lines, results.rows
    )
    title, text = (
        ("generate()", GENERATE_TEXT) if kind == GENERATE else ("A step over a long context", STEP_TEXT)
    )
    return Section(f"{title} ({where})", text, [], [table])


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Of runs at full scale on a GPU."""
    made = (
        (SPEED, speed_targets, "decode attention"),
        (GENERATE, model_targets, "generate()"),
        (STEP, model_targets, "a step"),
    )
    return [
        RunTargets(where, targets(results), about)
        for kind, targets, about in made
        for where, results in by_run(rows, kind).items()
        if where.scale != "quick" and where.device != "cpu"
    ]


def speed_targets(results: Results) -> list[Target]:
    """Times, speed over the best peer at every size, break-even of one sequence."""
    targets = []
    for limit in limits(EXPERIMENT):
        key = limit.parts
        if limit.metric == TIME:
            shown = {
                "unit": "us",
                "value_format": ".0f",
                "limit_format": ".0f",
                "day": results.day(key[0], key[1]),
            }
            targets.append(
                limit.target(f"{key[1]} at {key[0]}", results.value(key[0], key[1], TIME), **shown)
            )
        elif limit.metric == BREAK_EVEN:
            even = even_of(results, int(key[0]), key[1])
            targets.append(limit.target(f"{key[1]}: {BREAK_EVEN}, one sequence", even, unit="tokens", value_format=".0f",
                                        limit_format=".0f"))  # fmt: skip
        elif limit.metric == OVER_PEER:
            targets += [
                limit.target(f"{method}, {Size.of(setting).batch} sequences: {OVER_PEER}, {Size.of(setting).tokens} tokens",
                             value, 1 - BASELINE_TOLERANCE, unit="x", value_format=".2f", limit_format=".2f",
                             day=results.day(setting, method))
                for method in own_methods(results)
                for batch in batches(results)
                for setting in [Size(batch, tokens).name for tokens in tokens_of(results, batch)]
                if (value := over_best_peer(results, setting, method)) is not None
            ]  # fmt: skip
    return targets


def model_targets(results: Results) -> list[Target]:
    """Speed of tokens over transformers' cache or over bfloat16, at settings that have a limit."""
    targets = []
    for limit in limits(EXPERIMENT):
        if limit.metric not in (OVER_OWN, OVER_BASE) or limit.parts[0] not in results.settings:
            continue
        setting, method = limit.parts
        value = ratio(results, setting, method, OWN if limit.metric == OVER_OWN else base_of(method))
        shown = {
            "unit": "x",
            "value_format": ".2f",
            "limit_format": ".2f",
            "day": results.day(setting, method),
        }
        targets.append(limit.target(f"{method}, {setting}: {limit.metric}", value, **shown))
    return targets


__all__ = ["break_even", "findings", "sections", "targets_by_run"]
