"""What the page of `loka` says of times on a GPU: steps of exact shapes, tables, norm and block norm beside a matmul, mods."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.loka import shape_speed
from experiments.loka.dense_speed import (
    BOTH,
    FORWARD,
    GRAPH,
    MEMORY,
    METHODS,
    MOD_SPEED,
    MODS,
    NONE,
    PUBLISHED,
    SPEED,
    STORED,
    TOGETHER,
)
from experiments.loka.fused_speed import ALONE, EPILOGUE, NORM, PLAIN, TIME
from experiments.loka.table_speed import BYTES, DENSE, TABLES, UNIFORM
from experiments.loka.table_speed import MEMORY as HELD
from experiments.loka.table_speed import STORED as TABLE_SCHEMES
from experiments.report.content import Drawing, Headline, Section, Table, member
from experiments.report.plots import dots
from experiments.report.results import Results, Where, best_run, by_run, number, sections_by_run
from experiments.report.targets import RunTargets, Target, limit_of

EXPERIMENT = "loka"
BASE, OURS = "bfloat16", "dispatch"
#: Methods of training that are the same in every layer.
EVERYWHERE = (*(one for one in METHODS if one not in (OURS, STORED)), *PUBLISHED)
SPEED_TEXT = (
    "The dense part at exact shapes behind random embeddings, compiled; times of one GPU, methods in turn. Training casts "
    f"weights in each step; `{STORED}` is inference with weights that are stored so. Steps of DLRMv2 are replayed from CUDA "
    "graphs; launched one by one, they can wait for the host. LoKA publishes 1.19x of training and 1.4x of inference on "
    "clusters, for models with its mods already.",
)
NORM_TEXT = (
    "36032 tokens through a norm and the linear layer behind it, inputs x outputs of HSTU's layers. In bfloat16 both are "
    "compiled; in FP8 the norm writes codes with a scale a token, and the weight is stored so. CUDA graphs, methods in turn.",
)
EPILOGUE_TEXT = (
    "An FP8 matmul, rows x inputs x outputs, with block norm over 256 columns and hard swish in its epilogue, which writes "
    "bfloat16 or codes with scales of 128 columns; and the same as a kernel behind the matmul that torch.compile makes.",
)
SHAPE_TEXT = (
    "Matmuls of tokens x inputs x outputs, from the shortest to the longest sum of LoKA's 27 of production, of which the ends "
    "alone are public. The 25 between are a sweep of ours, so that the published means (1.6x with casts, casts above 30 "
    "percent of the time, the best rate below 20 percent of the peak) are of other shapes. Training casts both operands, "
    "inference inputs alone; the share of the peak, 1979 TFLOP/s, is that of a matmul with both casts.",
)

TABLE_TEXT = (
    "Bags of DLRMv2's tables, all 204 million rows on one GPU, batch 8192; the rate of the bytes that have to move is over "
    "that of a copy. Ids that are drawn by Zipf repeat, and some of their rows are found in the cache.",
)


def ratio(
    results: Results, setting: str, base: str, method: str, metric: str, graph: bool = True
) -> float | None:
    """How many times quicker than a base; as CUDA graphs where both were captured."""
    pairs = [
        (results.value(setting, base, one), results.value(setting, method, one))
        for one in ([metric + GRAPH, metric] if graph else [metric])
    ]
    return next((first / mine for first, mine in pairs if first and mine), None)


def times_as_quick(value: float | None, digits: int = 2) -> str:
    """How many times quicker, as a cell; empty where that is not known."""
    return f"{number(value, digits)}x" if value else ""


def quickest_norm(results: Results, setting: str) -> tuple[str, float] | None:
    """The FP8 method that gains most over bfloat16, and how much."""
    found = {
        method: gain
        for one, method in results.lines
        if one == setting and method != BASE and (gain := ratio(results, setting, BASE, method, TIME))
    }
    name = max(found, key=lambda one: found[one], default=None)
    return None if name is None else (name, found[name])


def slower(results: Results, setting: str) -> float | None:
    """Time of the quicker epilogue over that of the quicker plain matmul."""
    plain = [value for one in ALONE if (value := results.value(setting, one, TIME))]
    fused = [
        value
        for one, method in results.lines
        if one == setting and method.endswith("in the epilogue")
        if (value := results.value(setting, method, TIME))
    ]
    return min(fused) / min(plain) if plain and fused else None


def over_uniform(results: Results, setting: str) -> float | None:
    """The quickest uniform method's time over that of the choice by layers."""
    found = [gain for one in EVERYWHERE if (gain := ratio(results, setting, one, OURS, BOTH))]
    return min(found, default=None)


def findings(rows: Sequence[Row]) -> list[str]:
    """Sentences of the best run of each part."""
    made = (
        (SPEED, _steps_found),
        (MOD_SPEED, _mods_found),
        (TABLES, _tables_found),
        (NORM, _norms_found),
        (EPILOGUE, _epilogues_found),
        (shape_speed.SHAPES, _shapes_found),
    )
    words = []
    for kind, tell in made:
        best = best_run(by_run(rows, kind))
        words += [] if best is None else tell(best[1])
    return words


def _steps_found(results: Results) -> list[str]:
    words = []
    for title, method, metric in (
        ("Forward and backward by dispatch", OURS, BOTH),
        ("Inference with FP8 weights", STORED, FORWARD),
    ):
        parts = [
            f"{setting} {number(gain, 2)}x"
            for setting in results.settings
            if (gain := ratio(results, setting, BASE, method, metric))
        ]
        words += [f"{title} over bfloat16: {', '.join(parts)}."] if parts else []
    return words


def _mods_found(results: Results) -> list[str]:
    parts = [
        f"{number(gain, 2)}x at {setting}"
        for setting in results.settings
        if (gain := ratio(results, setting, NONE, TOGETHER, BOTH))
    ]
    words = "Forward and backward of DLRMv2-DCN with norms and SiLU by all three mods over none, in bfloat16"
    return (
        [f"{words}: {', '.join(parts)} (published: above 2x at batch 1024, of a model that is not named)."]
        if parts
        else []
    )


def _tables_found(results: Results) -> list[str]:
    parts = [
        f"{name} {number(gain, 2)}x, {number(share, 2)} of a copy's rate"
        for name in TABLE_SCHEMES
        if (gain := ratio(results, UNIFORM, DENSE, name, TIME, graph=False))
        and (share := results.value(UNIFORM, name, BYTES))
    ]
    return (
        [f"Bags of 204 million rows on one GPU over torch's of bfloat16: {'; '.join(parts)}."]
        if parts
        else []
    )


def _norms_found(results: Results) -> list[str]:
    parts = [
        f"{number(best[1], 2)}x at {member(setting)} by {member(best[0])}"
        for setting in results.settings
        if (best := quickest_norm(results, setting))
    ]
    return [f"A norm and the matmul behind it in FP8 over bfloat16: {', '.join(parts)}."] if parts else []


def _epilogues_found(results: Results) -> list[str]:
    parts = [
        f"{number(one, 3)} at {setting}" for setting in results.settings if (one := slower(results, setting))
    ]
    return (
        [f"Block norm in the epilogue, over the time of the plain matmul: {', '.join(parts)}."]
        if parts
        else []
    )


def time_of(results: Results) -> shape_speed.Value:
    """The time of a shape and a method."""
    return lambda setting, method: results.value(setting, method, TIME)


def _shapes_found(results: Results) -> list[str]:
    value, methods = time_of(results), (BASE, shape_speed.ALONE, shape_speed.BOTH)
    timed = [one for one in results.settings if all(value(one, method) for method in methods)]
    if not timed:
        return []
    told = shape_speed.summary_of(value, timed)
    return [
        f"Over {len(timed)} shapes FP8 matmuls are {number(told[shape_speed.ALONE], 2)}x bfloat16 alone and "
        f"{number(told[shape_speed.BOTH], 2)}x with both casts, which take {number(100 * told['casts'], 0)}% of the time; "
        f"the best rate is {number(100 * told['peak'], 0)}% of the peak."
    ]


def sections(rows: Sequence[Row]) -> list[Section]:
    """Steps, mods, norms, epilogues; run by run."""
    made = (
        (SPEED, "Steps of exact shapes", SPEED_TEXT, speed_table),
        (MOD_SPEED, "Steps with mods", (), mod_table),
        (TABLES, "Embedding tables", TABLE_TEXT, table_table),
        (NORM, "Norm, FP8 and matmul", NORM_TEXT, norm_table),
        (EPILOGUE, "Block norm in the epilogue", EPILOGUE_TEXT, epilogue_table),
        (shape_speed.SHAPES, "Shapes of recommendation models", SHAPE_TEXT, shape_table),
    )
    return sections_by_run(rows, made, drawings_of)


def drawings_of(kind: str, where: Where, results: Results) -> list[Drawing]:
    """Steps over bfloat16."""
    if kind != SPEED:
        return []
    timed = [line for line in results.lines if line[1] != BASE]
    series = {
        one: [ratio(results, setting, BASE, method, one) for setting, method in timed]
        for one in (BOTH, FORWARD)
    }
    names = [f"{setting}, {method}" for setting, method in timed]
    figure = dots(names, series, "times as fast as bfloat16", base=1.0)
    words = "Steps of the dense part over compiled bfloat16."
    return [Drawing(f"loka-speed-{where.scale}{where.device_ending}", words, figure)]


def speed_table(results: Results) -> Table:
    """A line for every model and method."""
    body = []
    for setting, method in results.lines:
        cells = [
            number(results.value(setting, method, one), 2)
            for one in (BOTH + GRAPH, BOTH, FORWARD + GRAPH, FORWARD)
        ]
        gains = [times_as_quick(ratio(results, setting, BASE, method, one)) for one in (BOTH, FORWARD)]
        memory = number(results.value(setting, method, MEMORY), 1)
        body.append([method, setting, *cells[:2], gains[0], *cells[2:], gains[1], memory])
    columns = [
        "method", "model", "step, graph (ms)", "step (ms)", "over bfloat16", "forward, graph (ms)", "forward (ms)",
        "over bfloat16", "memory (GB)",
    ]  # fmt: skip
    return Table("Dense part, compiled", columns, body, results.rows)


def mod_table(results: Results) -> Table:
    """A line for every batch: the step without mods, and how many times quicker it is with them."""
    names = list(MODS)
    body = []
    for setting in results.settings:
        base = results.value(setting, names[0], BOTH + GRAPH) or results.value(setting, names[0], BOTH)
        gains = [times_as_quick(ratio(results, setting, names[0], name, BOTH)) for name in names[1:]]
        body.append([setting, number(base, 3), *gains])
    title = "DLRMv2-DCN with norms and SiLU: forward and backward, over the step without mods"
    return Table(title, ["batch", "step (ms)", *names[1:]], body, results.rows)


def norm_table(results: Results) -> Table:
    """A line for every shape and method."""
    body = [
        [
            method,
            setting,
            number(results.value(setting, method, TIME), 1),
            times_as_quick(ratio(results, setting, BASE, method, TIME)),
        ]
        for setting, method in results.lines
    ]
    return Table("Norm and matmul", ["method", "shape", "time (us)", "over bfloat16"], body, results.rows)


def epilogue_table(results: Results) -> Table:
    """A line for every shape and method, over torch's plain matmul."""
    body = []
    for setting, method in results.lines:
        mine, plain = (results.value(setting, one, TIME) for one in (method, PLAIN))
        over = number(mine / plain if mine and plain else None, 3)
        body.append([method, setting, number(mine, 1), over])
    columns = ["method", "shape", "time (us)", "over torch's matmul alone"]
    return Table("Matmul and block norm", columns, body, results.rows)


def shape_table(results: Results) -> Table:
    """A line for every shape: how many times quicker than bfloat16, the share of casts and of the peak."""
    body, value = [], time_of(results)
    for setting in results.settings:
        methods = (shape_speed.ALONE, shape_speed.INPUTS, shape_speed.BOTH)
        found = [ratio(results, setting, BASE, one, TIME) for one in methods]
        one = shape_speed.summary_of(value, [setting])
        shares = [None if one[name] is None else 100 * one[name] for name in ("casts", "peak")]
        body.append([
            setting, number(value(setting, BASE), 1), *map(times_as_quick, found),
            *(number(share, 0) for share in shares),
        ])  # fmt: skip
    columns = [
        "shape",
        "bfloat16 (us)",
        "fp8 alone",
        "inputs cast",
        "both cast",
        "casts (%)",
        "of the peak (%)",
    ]
    return Table("FP8 matmuls over bfloat16", columns, body, results.rows)


def table_table(results: Results) -> Table:
    """A line for every kind of ids and method."""
    body = [
        [
            method,
            setting,
            number(results.value(setting, method, TIME), 1),
            times_as_quick(ratio(results, setting, DENSE, method, TIME, graph=False)),
            number(results.value(setting, method, BYTES), 2),
            number(results.value(setting, method, HELD), 1),
        ]
        for setting, method in results.lines
    ]
    columns = ["method", "ids", "time (us)", "over torch's bags", "bytes over a copy's", "table (GB)"]
    return Table("Bags of a batch of 8192", columns, body, results.rows)


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """None: the first page has ten."""
    return []


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Of each part."""
    parts = (
        (SPEED, "steps of exact shapes", _step_targets),
        (TABLES, "embedding tables", _table_targets),
        (NORM, "norm and matmul", _norm_targets),
        (EPILOGUE, "block norm in the epilogue", _epilogue_targets),
    )
    return [
        RunTargets(where, targets, name)
        for kind, name, find in parts
        for where, results in by_run(rows, kind).items()
        if (targets := find(results))
    ]


def _step_targets(results: Results) -> list[Target]:
    found = []
    for setting in results.settings:
        gains = (
            ("dispatch over bfloat16", ratio(results, setting, BASE, OURS, BOTH)),
            ("dispatch over the quickest uniform method", over_uniform(results, setting)),
        )
        found += [
            limit_of(EXPERIMENT, setting, name).target(f"{setting}: {name}", one) for name, one in gains
        ]
        if "22" in setting:
            name = "inference over bfloat16"
            gain = ratio(results, setting, BASE, STORED, FORWARD)
            found.append(limit_of(EXPERIMENT, setting, name).target(f"{setting}: {name}", gain))
    return found


def _table_targets(results: Results) -> list[Target]:
    name = TABLE_SCHEMES[0]
    limit = limit_of(EXPERIMENT, f"bags of {name}", BYTES)
    return [limit.target(f"{name}, {UNIFORM}", results.value(UNIFORM, name, BYTES))]


def _norm_targets(results: Results) -> list[Target]:
    found = []
    for setting in results.settings:
        best = quickest_norm(results, setting)
        limit = limit_of(EXPERIMENT, setting, "fp8 over bfloat16")
        found.append(limit.target(setting, best and best[1]))
    return found


def _epilogue_targets(results: Results) -> list[Target]:
    limit = limit_of(EXPERIMENT, "block norm in the epilogue", "time over the plain matmul")
    return [limit.target(setting, slower(results, setting)) for setting in results.settings[:1]]


__all__ = ["findings", "headlines", "sections", "targets_by_run"]
