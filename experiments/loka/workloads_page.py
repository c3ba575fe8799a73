"""What the page of `loka` says of workloads: quality over paired seeds, and policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.harness.rows import Interval, Row, interval
from experiments.loka.policies import BOUND, FITS, MOVED, OURS, POLICIES, SECONDS
from experiments.loka.trajectory import AUC, BASE, ENTROPY, LOG_LOSS, RECIPES, TRAJECTORY
from experiments.report.content import Drawing, Headline, Section, Table
from experiments.report.plots import dots
from experiments.report.results import Results, Where, best_run, by_run, number, sections_by_run, seeds_in
from experiments.report.targets import RunTargets, limit_of

EXPERIMENT = "loka"
DENSE = "uniform dense"
QUALITY_TEXT = (
    "Trainings of one seed begin alike and see the same impressions in the same order; the relative log loss of a pair is 100 "
    "(log loss / log loss of the base - 1) percent of held-out, later examples, with Student's interval of 95% over seeds. "
    "A training is one epoch; HSTU ranks candidates behind a history. "
    "On a CPU the base is float32 and recipes are emulated, on a GPU bfloat16. Normalised entropy is log loss over that of the "
    "held-out share of ones. Drawn ratings are synthetic; the data set of purchases is simulated on real patterns. At scale "
    "quick, of a few steps, this shows that it runs, not how well it trains.",
    "Mods (no bias, block norm over 256 columns, hard swish) change the function; what the paper's are exactly is not public.",
)
POLICY_TEXT = (
    (
        "One network's layers, each with a recipe (or none) in each of its three matmuls: the same everywhere, by "
        "LoKA's rule (mean relative error below 0.2, faster by 1.05; our reconstruction), and by the knapsack of "
        "`dispatch_`: least time while the change of the logits stays within a budget. The last column is how far its "
        "time is above a bound of all choices within the budget."
    ),
    "Times on a CPU are modelled: multiply-adds, bytes and casts of one H200 at batch 8192, for layers eight times as long.",
)


#: What impressions of other people's data are.
DATA = {
    "complete-journey": "complete-journey (purchases of households)",
    "movielens-100k": "movielens-100k (ratings of films)",
}


def findings(rows: Sequence[Row]) -> list[str]:
    """Sentences of the best run of each part."""
    words: list[str] = []
    parts: dict[str, list[str]] = {}
    for where, results in by_run(rows, TRAJECTORY).items():
        for one in qualities(results) if where.scale == "full" else []:
            if one.method == "rowwise" and one.gap:
                subject = f"{one.setting} on {DATA.get(where.data, where.data)}"
                said = f"{subject} {number(one.gap.mean, 2)} ± {number(one.gap.half, 2)}%"
                parts.setdefault(f"{where.run}, {seeds_in([one.seeds])}", []).append(said)
    told = "; ".join(f"{', '.join(found)} ({run})" for run, found in parts.items())
    words.append(f"Relative log loss of rowwise over paired seeds: {told}." if parts else "")
    if (best := best_run(by_run(rows, POLICIES))) is not None:
        where, results = best
        modelled = " (modelled times, not measured)" if where.device == "cpu" else ""
        for setting in results.settings:
            ours, quickest = (results.value(setting, OURS, SECONDS), quickest_uniform(results, setting))
            if ours and quickest:
                words.append(
                    f"On {setting} the knapsack's step takes {number(ours / quickest[1], 3)} of the quickest uniform "
                    f"policy's that keeps the budget ({quickest[0]}){modelled}."
                )
    return [word for word in words if word]


@dataclass(frozen=True)
class PairedQuality:
    """A model with a change: means over the seeds whose base trained too, the relative log loss of these pairs (percent), and
    how many they are."""

    setting: str
    method: str
    entropy: float
    auc: float
    seeds: int
    gap: Interval | None

    @property
    def reach(self) -> float | None:
        """The farther end of the interval from 0."""
        return None if self.gap is None else abs(self.gap.mean) + self.gap.half


def qualities(results: Results) -> list[PairedQuality]:
    """Of every model and change."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in results.rows:
        found.setdefault((row.setting, row.method, row.metric), {})[row.seed] = row.value
    made = []
    for setting, method in results.lines:
        base, mine = (found.get((setting, one, LOG_LOSS), {}) for one in (BASE, method))
        both = sorted(base.keys() & mine.keys())
        if both:
            gap = interval([100 * (mine[one] / base[one] - 1) for one in both]) if len(both) > 1 else None
            means = [fmean(found[setting, method, one][seed] for seed in both) for one in (ENTROPY, AUC)]
            made.append(PairedQuality(setting, method, *means, len(both), None if method == BASE else gap))
    return made


def quickest_uniform(results: Results, setting: str) -> tuple[str, float] | None:
    """Name and time of the quickest uniform policy within the budget."""
    able = {
        method: seconds
        for one, method in results.lines
        if one == setting and method.startswith("uniform") and results.value(setting, method, FITS)
        if (seconds := results.value(setting, method, SECONDS)) is not None
    }
    name = min(able, key=lambda method: able[method], default=None)
    return None if name is None else (name, able[name])


def sections(rows: Sequence[Row]) -> list[Section]:
    """Quality and policies, run by run."""
    made = (
        (TRAJECTORY, "Quality over paired seeds", QUALITY_TEXT, quality_table),
        (POLICIES, "Policies of training", POLICY_TEXT, policy_table),
    )
    return sections_by_run(rows, made, drawings_of)


def drawings_of(kind: str, where: Where, results: Results) -> list[Drawing]:
    """The figure of a kind of table, where there is one."""
    if kind == TRAJECTORY and (shown := [one for one in qualities(results) if one.gap]):
        gaps = [one.gap.mean if one.gap else None for one in shown]
        halves = [one.gap.half if one.gap else None for one in shown]
        figure = dots(
            [f"{one.setting}, {one.method}" for one in shown], {"relative log loss": gaps}, "percent of the base's log loss",
            errors={"relative log loss": halves}, base=0.0,
        )  # fmt: skip
        name = f"loka-log-loss-{where.scale}-{where.data}{where.device_ending}"
        return [Drawing(name, "Relative log loss over paired seeds, with its interval of 95%.", figure)]
    return []


def quality_table(results: Results) -> Table:
    """A line for every model and change."""
    body = [
        [
            one.method, one.setting, number(one.entropy, 4), number(one.auc, 4), number(one.gap and one.gap.mean, 3),
            number(one.gap and one.gap.half, 3), str(one.seeds),
        ]
        for one in qualities(results)
    ]  # fmt: skip
    columns = ["change", "model", "normalised entropy", "AUC", "relative log loss (%)", "±", "seeds"]
    return Table("Held-out examples, means over seeds", columns, body, results.rows)


def policy_table(results: Results) -> Table:
    """A line for every model and policy."""
    body = []
    for setting, method in results.lines:
        fits = results.value(setting, method, FITS)
        dense, mine = (results.value(setting, one, SECONDS) for one in (DENSE, method))
        body.append([
            method, setting, number(mine, 0), number(dense / mine if dense and mine else None, 3) + "x",
            number(results.value(setting, method, MOVED), 2), "yes" if fits else "no",
            number(results.value(setting, method, BOUND), 2),
        ])  # fmt: skip
    columns = [
        "policy",
        "model",
        "time (us)",
        "of dense",
        "change of a logit over the budget",
        "allowed",
        "above the bound (%)",
    ]
    return Table("All layers, forward and backward", columns, body, results.rows)


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """None: the first page has ten."""
    return []


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Loss at full scale, and policies against uniform ones."""
    found = []
    for where, results in by_run(rows, TRAJECTORY).items():
        if where.scale == "full":
            limit = limit_of(EXPERIMENT, "trajectory", "reach of the interval")
            targets = [
                limit.target(
                    f"{one.setting}, {one.method}: farther end of the interval",
                    one.reach,
                    unit="%",
                    value_format=".2f",
                    limit_format=".2f",
                    day=results.day(one.setting, one.method),
                )
                for one in qualities(results)
                if one.method in RECIPES and one.method != BASE
            ]
            found.append(RunTargets(where, targets, "relative log loss"))
    for where, results in by_run(rows, POLICIES).items():
        limit, targets = limit_of(EXPERIMENT, "policies", "time over the quickest uniform"), []
        for setting in results.settings:
            ours, quickest = results.value(setting, OURS, SECONDS), quickest_uniform(results, setting)
            targets.append(limit.target(setting, ours / quickest[1] if ours and quickest else None))
        found.append(RunTargets(where, targets, "policies of training"))
    return found
