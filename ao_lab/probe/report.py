"""`ProbeReport`: the table of sites and candidates, which of them are safe, and why; as text, JSON and a figure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import log10, nan
from pathlib import Path
from typing import Any

from ao_lab.install.extras import needed
from reference.probe.drift import difference
from reference.probe.estimates import Estimate

FORMAT = 1
#: What the model's outputs may move by without `budget`, in their own standard deviations.
BUDGET = 0.05
#: The largest ratio of a gradient's error to the noise of its minibatch.
MOST_NOISE = 0.1
#: An output channel is told of from this many times the error of its layer.
BROKEN = 4.0
#: Candidates up to which a figure has a line for each.
LINES = 10
#: Inputs are told of from this largest magnitude of a token over its root mean square.
PEAK = 12.0


@dataclass(frozen=True)
class SiteErrors:
    """One candidate at one site. reason: why it cannot run there; then nothing else is known.

    norm_ratio, median, worst_channel, bias and mere: of the output (`reference.probe.errors`). inputs, weights: the norm ratio
    with this operand alone quantized, to first order. gradients: the norm ratio of each gradient. variance: what the layer
    adds to the mean square change of the model's outputs. noise: the weight gradient's error over its minibatch's noise. speed:
    the time of 16-bit products over the candidate's by a model of the GPU.
    """

    reason: str = ""
    norm_ratio: Estimate | None = None
    median: Estimate | None = None
    worst_channel: Estimate | None = None
    bias: Estimate | None = None
    mere: Estimate | None = None
    inputs: float = 0.0
    weights: float = 0.0
    gradients: Mapping[str, Estimate] = field(default_factory=dict)
    variance: Estimate | None = None
    noise: Estimate | None = None
    speed: float | None = None
    safe: bool = False
    why: str = ""


@dataclass(frozen=True)
class SiteLine:
    """One site: its name, weight (N, K), tokens that were measured on, the median over tokens of the largest input over their
    root mean square, and its candidates."""

    name: str
    shape: tuple[int, int]
    tokens: int
    peak: float
    candidates: Mapping[str, SiteErrors]


@dataclass(frozen=True)
class ModelErrors:
    """One candidate for all sites: the root mean square change of an output, predicted and (None: not run) measured.

    independent: predicted as if layers erred independently. outputs: the standard deviation of the outputs themselves. error:
    the standard error of what is predicted, from few examples and directions a large one.
    """

    predicted: float
    independent: float
    outputs: float
    measured: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class ProbeReport:
    """What `probe_` and `Probe.report` found."""

    sites: tuple[SiteLine, ...]
    models: Mapping[str, ModelErrors] = field(default_factory=dict)
    steps: int = 0
    notes: tuple[str, ...] = ()

    @property
    def candidates(self) -> tuple[str, ...]:
        """The names of candidates."""
        return tuple(self.sites[0].candidates) if self.sites else ()

    def site(self, name: str) -> SiteLine:
        """The line of a site; KeyError with the names that there are."""
        found = next((line for line in self.sites if line.name == name), None)
        if found is None:
            raise KeyError(
                f"{name!r} is no site of this report; sites are {', '.join(line.name for line in self.sites)}"
            )
        return found

    def safe(self, candidate: str) -> tuple[str, ...]:
        """Names of the sites that are safe with a candidate: what a filter_fn may ask for."""
        if candidate not in self.candidates:
            raise KeyError(
                f"{candidate!r} is no candidate of this report; there are {', '.join(self.candidates)}"
            )
        return tuple(line.name for line in self.sites if line.candidates[candidate].safe)

    def check_shared(self, candidates: Iterable[str]) -> None:
        """ValueError where this report has no candidate of a later one."""
        names = list(candidates)
        if not set(self.candidates) & set(names):
            raise ValueError(
                f"the earlier report has no candidate of this one: {', '.join(self.candidates)} there, "
                f"{', '.join(names)} here; probe one in both"
            )

    def moved(
        self, before: ProbeReport, sigmas: float = 5.0, share: float = 0.1
    ) -> dict[tuple[str, str], float]:
        """Of sites and candidates whose error has moved since an earlier report: by how many standard errors of both.

        Counted are changes beyond `sigmas` of them and beyond `share` of the error before. ValueError for a report of other
        sites, or without a candidate of this one. `reference.probe.drift.Hysteresis` keeps what reacts to it from reacting too
        often.
        """
        if [(line.name, line.shape) for line in before.sites] != [
            (line.name, line.shape) for line in self.sites
        ]:
            raise ValueError(
                "the earlier report is of other sites; compare reports of one model and one filter_fn"
            )
        before.check_shared(self.candidates)
        found = {}
        for old, new in zip(before.sites, self.sites, strict=True):
            for name in set(old.candidates) & set(new.candidates):
                one, two = old.candidates[name].norm_ratio, new.candidates[name].norm_ratio
                if one is None or two is None:
                    continue
                size = difference(one, two)
                if abs(size) > sigmas and abs(two.value - one.value) > share * one.value:
                    found[new.name, name] = size
        return found

    def heading(self, candidate: str) -> str:
        """A candidate in a line."""
        text = f"{candidate}: {len(self.safe(candidate))} of {len(self.sites)} sites are safe"
        model = self.models.get(candidate)
        if model is None:
            return text
        measured = "" if model.measured is None else f", measured {model.measured:.3g}"
        give = "" if model.error is None else f" ± {model.error:.1g}"
        moved = f"{model.predicted:.3g}{give} (predicted{measured}; outputs have sd {model.outputs:.3g})"
        return f"{text}; all in it move an output by {moved}"

    def cells(self, candidate: str) -> list[list[str]]:
        """A line of text for each site, of `COLUMNS`."""
        total = sum(_variance(line.candidates[candidate]) for line in self.sites)
        return [_cells(line, line.candidates[candidate], total) for line in self.sites]

    def __str__(self) -> str:
        blocks = []
        for name in self.candidates:
            table = [list(COLUMNS), *self.cells(name)]
            widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
            lines = [
                "  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
                for row in table
            ]
            blocks.append("\n".join([self.heading(name), *lines]))
        return "\n\n".join([*blocks, *self.notes])

    def to_json(self, path: str | Path | None = None) -> str:
        """All of it as JSON; into a file too where a path is given."""
        text = json.dumps(_plain({"ao_lab_probe": FORMAT, **asdict(self)}), indent=1, allow_nan=False) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, text: str | Path) -> ProbeReport:
        """What `to_json` wrote: its text, or a file's path (a str that does not begin with a brace is one). ValueError where
        there is no such file or text."""
        named = isinstance(text, Path) or not text.lstrip().startswith("{")
        try:
            given = Path(text).read_text(encoding="utf-8") if named else str(text)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{text!s:.100} is no file of a report that can be read: {error}") from error
        try:
            told = json.loads(given)
            if told.pop("ao_lab_probe") != FORMAT:
                raise ValueError(f"it is of another version than {FORMAT}")
            sites = tuple(_line(one) for one in told["sites"])
            models = {name: _model(one) for name, one in told["models"].items()}
            return cls(sites, models, told["steps"], tuple(told["notes"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"this is no report as ProbeReport.to_json writes it: {error}") from error

    def plot(self, axes: Any = None) -> Any:
        """The norm ratio of each site with its interval, a line a candidate, on axes of matplotlib; returns them. Of more than
        `LINES` candidates a map of sites and candidates, without intervals."""
        axes = needed("matplotlib.pyplot").subplots()[1] if axes is None else axes
        axes.set_xticks(range(len(self.sites)), [line.name for line in self.sites], rotation=90)
        if len(self.candidates) > LINES:
            return self._map(axes)
        for name in self.candidates:
            known = [
                (i, e)
                for i, line in enumerate(self.sites)
                if (e := line.candidates[name].norm_ratio) is not None
            ]
            at, found = [i for i, _ in known], [e for _, e in known]
            spread = [[e.value - e.low for e in found], [e.high - e.value for e in found]]
            axes.errorbar(at, [e.value for e in found], yerr=spread, fmt="o-", label=name)
        axes.set(yscale="log", ylabel="relative error of the output")
        axes.legend()
        return axes

    def _map(self, axes: Any) -> Any:
        """A cell for each candidate and site, coloured by the logarithm of the norm ratio; empty where it cannot run."""
        values = [
            [
                log10(found.value) if (found := line.candidates[name].norm_ratio) and found.value > 0 else nan
                for line in self.sites
            ]
            for name in self.candidates
        ]
        picture = axes.imshow(values, aspect="auto")
        axes.set_yticks(range(len(self.candidates)), self.candidates)
        axes.figure.colorbar(picture, ax=axes, label="log10 of the relative error of the output")
        return axes


#: roofline: the speedup that `ao_lab.probe.measure` predicts, no measurement.
COLUMNS = ("site", "weight", "error", "inputs", "weights", "share", "noise", "roofline", "safe", "why")


def _cells(line: SiteLine, errors: SiteErrors, total: float) -> list[str]:
    shape = "x".join(map(str, line.shape))
    if errors.norm_ratio is None:
        return [line.name, shape, *["-"] * 6, "no", errors.why]
    noise = "-" if errors.noise is None else f"{errors.noise.value:.2g}"
    speed = "-" if errors.speed is None else f"~{errors.speed:.2f}x"
    share = "-" if errors.variance is None or not total else f"{100 * errors.variance.value / total:.0f}%"
    parts = (f"{errors.inputs:.2g}", f"{errors.weights:.2g}", share, noise, speed)
    return [line.name, shape, str(errors.norm_ratio), *parts, "yes" if errors.safe else "no", errors.why]


def judged(
    sites: Sequence[SiteLine], models: Mapping[str, ModelErrors], budget: float = BUDGET
) -> tuple[SiteLine, ...]:
    """The lines with what is safe, and why.

    Of a candidate whose variances are known the sites with the smallest ones are safe, as many as together stay within
    (budget * sd of the outputs)^2; a site that no gradient of the outputs reaches is not, since its share is unknown. Of one
    whose gradients' noise is known those are safe where it is at most `MOST_NOISE`. Where neither is known (a `Probe` without
    gradients=True, schemes of weights in training) no site is called safe: `probe_` knows what they cost the outputs.
    """
    verdicts: dict[tuple[str, str], tuple[bool, str]] = {}
    for name in sites[0].candidates if sites else ():
        room = (budget * models[name].outputs) ** 2 if name in models else float("inf")
        spent = 0.0
        for line in sorted(sites, key=lambda line: _variance(line.candidates[name])):
            errors = line.candidates[name]
            spent += _variance(errors)
            against = "beyond the budget" if spent > room else ""
            if name in models and errors.variance is None:
                against = "no gradient of the outputs reaches it"
            elif name not in models and errors.noise is None:
                against = (
                    "not judged: neither its share of the outputs' change nor its gradient's noise is known"
                )
            verdicts[line.name, name] = _verdict(line, errors, against)
    return tuple(
        replace(line, candidates={name: replace(errors, safe=verdicts[line.name, name][0], why=verdicts[line.name, name][1])
                                  for name, errors in line.candidates.items()})
        for line in sites
    )  # fmt: skip


def _variance(errors: SiteErrors) -> float:
    return 0.0 if errors.variance is None else errors.variance.value


def _verdict(line: SiteLine, errors: SiteErrors, against: str) -> tuple[bool, str]:
    if errors.norm_ratio is None:
        return False, errors.reason
    told = [against] if against else []
    noisy = errors.noise is not None and errors.noise.value > MOST_NOISE
    if noisy and errors.noise is not None:
        told.append(f"its gradient's error is {errors.noise.value:.2g} of the batch's noise")
    if errors.inputs > 2 * errors.weights:
        told.append(
            f"inputs decide: the largest is {line.peak:.0f} times their rms"
            if line.peak > PEAK
            else "inputs decide"
        )
    elif errors.weights > 2 * errors.inputs > 0:
        told.append("the weight decides")
    worst = errors.worst_channel
    if worst is not None and worst.low > BROKEN * errors.norm_ratio.value:
        told.append(f"one channel errs by {worst.value:.2g} of its size")
    return not against and not noisy, "; ".join(told) or "-"


def _plain(value: Any) -> Any:
    """JSON's values: NaN and infinities as text, which `_estimate` reads again."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    odd = isinstance(value, float) and (value != value or value in (float("inf"), -float("inf")))
    return str(value) if odd else value


def _estimate(told: Any) -> Estimate | None:
    return (
        None
        if told is None
        else Estimate(float(told[0]), float(told[1]), float(told[2]), float(told[3]), int(told[4]))
    )


def _model(told: dict[str, Any]) -> ModelErrors:
    values: dict[str, Any] = {name: None if x is None else float(x) for name, x in told.items()}
    return ModelErrors(**values)


def _line(told: dict[str, Any]) -> SiteLine:
    candidates = {name: _errors(one) for name, one in told["candidates"].items()}
    n, k = told["shape"]
    return SiteLine(told["name"], (n, k), told["tokens"], float(told["peak"]), candidates)


def _errors(told: dict[str, Any]) -> SiteErrors:
    names = ("norm_ratio", "median", "worst_channel", "bias", "mere", "variance", "noise")
    estimates = {name: _estimate(told[name]) for name in names}
    gradients = {
        name: found for name, one in told["gradients"].items() if (found := _estimate(one)) is not None
    }
    parts = {name: float(told[name]) for name in ("inputs", "weights")}
    return SiteErrors(**{**told, **estimates, **parts, "gradients": gradients})


__all__ = ["ProbeReport"]
