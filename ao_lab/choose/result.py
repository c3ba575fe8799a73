"""`Choice`: what `choose_` found, as a plan for `quantize_`, with what was predicted and measured beside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ao_lab.calibration.methods import METHODS, Method
from ao_lab.checkpoint.transformers.config import config_from, config_values
from ao_lab.config.base import Config, FqnToConfig
from ao_lab.install.extras import needed

FORMAT = 1


@dataclass(frozen=True)
class ChosenLayer:
    """One weight: all its full names, its option (None: it stays dense), what that costs, and the score of each option."""

    names: tuple[str, ...]
    option: str | None
    cost: float
    scores: Mapping[str, float]
    #: A number that tied layers share.
    group: int

    @property
    def predicted(self) -> float:
        """What its option adds to the divergence."""
        return 0.0 if self.option is None else self.scores[self.option]


@dataclass(frozen=True)
class Trial:
    """A candidate that was measured: its cost, the sum of its scores, the KL divergence from the model as it was."""

    name: str
    cost: float
    predicted: float
    measured: float
    #: Whether it is within the budget.
    fits: bool


@dataclass(frozen=True)
class Choice:
    """The configuration of each layer under a budget.

    options: the configurations by name; methods: those to quantize with. source: the trial that was chosen: "mixed", "mixed,
    corrected", or the name of an option if that option for all layers was no worse. predicted: the sum of scores, measured: the
    KL divergence in nats per prediction, both relative to the original model. bound: no choice within the budget has a smaller
    sum of scores. frontier: (cost, sum of scores) of the best choices of all budgets, on their convex hull. budget, cost: as
    texts.
    """

    options: Mapping[str, Config | None]
    layers: tuple[ChosenLayer, ...]
    source: str
    budget: str
    cost: str
    bound: float
    trials: tuple[Trial, ...]
    frontier: tuple[tuple[float, float], ...]
    methods: tuple[Method, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> FqnToConfig:
        """What `quantize_` takes, and `HfConfig`: the configuration of each weight by its full name."""
        return FqnToConfig(
            {
                name: None if layer.option is None else self.options[layer.option]
                for layer in self.layers
                for name in layer.names
            }
        )

    @property
    def trial(self) -> Trial:
        """The candidate that was taken."""
        return next(one for one in self.trials if one.name == self.source)

    @property
    def predicted(self) -> float:
        """The sum of scores."""
        return self.trial.predicted

    @property
    def measured(self) -> float:
        """The KL divergence, measured."""
        return self.trial.measured

    def heading(self) -> str:
        """The result in a line."""
        counts = Counter("dense" if layer.option is None else layer.option for layer in self.layers)
        chosen = ", ".join(f"{count} {option}" for option, count in counts.items())
        return (
            f"{self.source}: {chosen}; {self.cost} of {self.budget}; KL {self.measured:.4g} measured, {self.predicted:.4g} "
            f"predicted (at least {self.bound:.4g} within the budget)"
        )

    def __str__(self) -> str:
        width = max(len(layer.names[0]) for layer in self.layers)
        lines = [
            f"  {layer.names[0]:<{width}}  {layer.option or 'dense'}  {layer.predicted:.3g}"
            for layer in self.layers
        ]
        trials = [
            f"  {one.name}: cost {one.cost:,.0f}, KL {one.measured:.4g} measured, {one.predicted:.4g} predicted"
            f"{'' if one.fits else ', beyond the budget'}"
            for one in self.trials
        ]
        return "\n".join([self.heading(), *lines, "measured:", *trials, *self.notes])

    def __rich__(self) -> Any:
        """The trials and the layers' options as a table of rich."""
        table: Any = needed("rich.table").Table(title=self.heading())
        for column in ("layer", "option", "predicted"):
            table.add_column(column, justify="right" if column == "predicted" else "left")
        for layer in self.layers:
            table.add_row(layer.names[0], layer.option or "dense", f"{layer.predicted:.3g}")
        return table

    def to_json(self, path: str | Path | None = None) -> str:
        """All of it as JSON; into a file too where a path is given."""
        options = {name: None if one is None else config_values(one) for name, one in self.options.items()}
        methods = [{"method": one.name, **asdict(one)} for one in self.methods]
        record = {"ao_lab_choice": FORMAT, **asdict(self), "options": options, "methods": methods}
        text = json.dumps(record, indent=1) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, text: str | Path) -> Choice:
        """What `to_json` wrote: its text, or a file's path. ValueError where it is no such text."""
        content = text.read_text(encoding="utf-8") if isinstance(text, Path) else text
        try:
            record = json.loads(content)
            if record.pop("ao_lab_choice") != FORMAT:
                raise ValueError(f"it is of another version than {FORMAT}")
            options: Any = {
                name: None if one is None else config_from(one) for name, one in record.pop("options").items()
            }
            layers = tuple(
                ChosenLayer(**{**one, "names": tuple(one["names"])}) for one in record.pop("layers")
            )
            trials = tuple(Trial(**one) for one in record.pop("trials"))
            frontier = tuple((float(cost), float(score)) for cost, score in record.pop("frontier"))
            methods = tuple(METHODS[one.pop("method")](**one) for one in record.pop("methods"))
            return cls(
                options=options,
                layers=layers,
                trials=trials,
                methods=methods,
                frontier=frontier,
                **{**record, "notes": tuple(record["notes"])},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"this is no choice as Choice.to_json writes it: {error}") from error

    def plot(self, axes: Any = None) -> Any:
        """Sum of scores against cost of the best choices, and what was measured, on axes of matplotlib; returns them."""
        axes = needed("matplotlib.pyplot").subplots()[1] if axes is None else axes
        axes.plot(*zip(*self.frontier, strict=True), label="best choices, predicted")
        for one in self.trials:
            axes.scatter([one.cost], [one.measured], label=f"{one.name}, measured")
        axes.set(xlabel="cost", ylabel="KL divergence, nats", yscale="log")
        axes.legend()
        return axes


__all__ = ["Choice"]
