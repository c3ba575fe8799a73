"""`ao-lab choose`: a plan of which configuration each layer of a folder's model gets; `ao-lab quantize --plan` follows it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ao_lab.cli.calibration import Calibration
from ao_lab.cli.early import DENSE
from ao_lab.cli.layout import (
    SelectedLayout,
    SkippedLayers,
    check_layers,
    in_words,
    without_weights,
)
from ao_lab.cli.terminal import (
    WrongInput,
    check_device,
    check_writable,
    console,
    lines,
    print_json,
    print_table,
    short_number,
    track_progress,
)
from ao_lab.install.extras import wrong_input
from ao_lab.measure.comparison import COMPRESSED, OWN

if TYPE_CHECKING:
    from ao_lab.choose.budgets import Budget
    from ao_lab.choose.result import Choice
    from ao_lab.config.base import Config


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    calibration: Calibration
    #: "NAME" or "NAME key=value ..." of each option.
    configs: list[str] = field(default_factory=list)
    bits: float | None = None
    bytes: int | None = None
    microseconds: float | None = None
    rows: int | None = None
    layout: str = "auto"
    seed: int = 0
    skip: list[str] | None = None

    def budget(self) -> Budget:
        """The budget; WrongInput where there is none, or more than one."""
        from ao_lab.choose.budgets import Bits, Bytes, Microseconds

        given = {"--bits": self.bits, "--bytes": self.bytes, "--microseconds": self.microseconds}
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            raise WrongInput(f"give one budget, {' or '.join(given)}; got {' and '.join(named) or 'none'}")
        if self.rows is not None and self.microseconds is None:
            raise WrongInput("--rows applies to --microseconds only; drop it")
        try:
            if self.bits is not None:
                return Bits(self.bits)
            if self.bytes is not None:
                return Bytes(self.bytes)
            return Microseconds(self.microseconds or 0.0, self.rows or 1)
        except ValueError as error:
            raise WrongInput(str(error)) from error

    def options(self) -> dict[str, Any]:
        """Configurations, with methods where there are some, by what was typed; WrongInput where they are none."""
        from ao_lab.calibration.methods import ordered
        from ao_lab.cli.named_config import config_of, with_options

        if len(set(self.configs)) < 2:
            raise WrongInput("give --config at least twice, once for each candidate configuration")
        found: dict[str, Any] = {}
        for text in dict.fromkeys(self.configs):
            name, settings = with_options(text, [])
            config = None if name == DENSE else self.for_layout(text, config_of(name, None, settings))
            methods = ordered(self.calibration.methods)
            found[text] = (config, methods) if methods and config is not None else config
        return found

    def for_layout(self, text: str, config: Config) -> Config:
        """A configuration as the readers of the layout compute it."""
        if self.layout != COMPRESSED:
            return config
        try:
            return config.for_layout(COMPRESSED)
        except ValueError as error:
            raise WrongInput(f"--config {text}: {error}") from error


def run_choose(source: Path, out: Path, wanted: Wanted, as_json: bool) -> None:
    """Choose, write the plan, and show it."""
    from ao_lab.choose.api import choose_
    from ao_lab.measure.folders import by_transformers, check_language_model
    from ao_lab.transforms.layers import is_linear

    budget, options = wanted.budget(), wanted.options()
    data = wanted.calibration
    if data.text is None:
        raise WrongInput("give --calibration TEXT, a text file on which candidates are scored")
    replace(data, methods=data.methods or ["clip"]).checked()
    check_device(data.device)
    check_writable(out.parent, "the folder of --out")
    skipped = SkippedLayers(wanted.skip)

    def linear(module: Any, path: str) -> bool:
        return skipped(module, path) and is_linear(module)

    linear.leaves_routers = linear.leaves_tied = True  # type: ignore[attr-defined]
    model = by_transformers(source, None)
    check_layers(source, model)
    skipped.check_in(model)
    check_language_model(model, source)
    model = model.to(data.device or "cpu")
    batches = data.batches(source, model)
    try:
        with track_progress("choose", plain=as_json, transient=True) as work:
            choice = choose_(
                model, batches, options, budget, filter_fn=linear, seed=wanted.seed,
                progress=lambda what, done, total: work.at(done, what, total),
            )  # fmt: skip
    except ValueError as error:
        raise WrongInput(str(error)) from error
    choice.to_json(out)
    show(choice, source, out, as_json)


def show(choice: Choice, source: Path, out: Path, as_json: bool) -> None:
    """The layers and what was measured, as tables or as JSON."""
    rows = [
        {"layer": layer.names[0], "option": layer.option or DENSE, "cost": layer.cost, "predicted": layer.predicted}
        for layer in choice.layers
    ]  # fmt: skip
    trials = [vars(one) for one in choice.trials]
    if as_json:
        told = {"model": str(source), "plan": str(out), "chosen": choice.source, "budget": choice.budget}
        more = {
            "cost": choice.cost,
            "bound": choice.bound,
            "layers": rows,
            "trials": trials,
            "notes": choice.notes,
        }
        print_json({**told, "measured": choice.measured, "predicted": choice.predicted, **more})
        return
    cells = [[one.names[0], one.option or DENSE, short_number(one.predicted)] for one in choice.layers]
    print_table("Layers", ["layer", "option", "predicted"], cells, numbers=["predicted"])
    found = [
        [one.name, f"{one.cost:,.0f}", short_number(one.predicted), short_number(one.measured), "yes" if one.fits else "no"]
        for one in choice.trials
    ]  # fmt: skip
    columns = ["measured", "cost", "KL predicted", "KL measured", "within the budget"]
    print_table("KL divergence from the model", columns, found, numbers=columns[1:4])
    for line in (
        choice.heading(),
        *choice.notes,
        f"{out} is the plan: ao-lab quantize {source} OUT_DIR --plan {out}",
    ):
        console().print(line, markup=False)


def read_plan(path: Path) -> Choice:
    """The choice of a file; WrongInput where it is none."""
    from ao_lab.choose.result import Choice

    if not path.is_file():
        raise WrongInput(f"--plan {path} is no file; ao-lab choose MODEL_DIR --out FILE writes one")
    try:
        return Choice.from_json(path)
    except ValueError as error:
        raise WrongInput(f"--plan {path}: {error}") from error


def run_plan(
    source: Path,
    target: Path,
    path: Path,
    *,
    layout: str,
    calibration: Calibration,
    as_json: bool,
    base_model: str | None = None,
) -> None:
    """Quantize as a plan says, save, and say what became of each layer."""
    from ao_lab.calibration.methods import ordered
    from ao_lab.checkpoint.card_origin import history_of
    from ao_lab.checkpoint.model_card import write_card
    from ao_lab.cli import quantize
    from ao_lab.quantization.api import report_of

    quantize.check_folders(source, target)
    choice = read_plan(path)
    with wrong_input():
        asked = ordered(calibration.methods)
    if asked and asked != choice.methods:
        raise WrongInput("--method is part of the plan; drop it")
    data = replace(calibration, methods=[one.text for one in choice.methods])
    try:
        where = plan_layout(source, choice, layout)
        with quantize.progress_bar(as_json) as progress:
            load: Any = data.loader() if data.methods or data.text is not None else quantize.loaded
            model = load(source, where.config, None, progress)
        report, before = report_of(model), quantize.stored_bytes(source, model)
        beside, tensors = quantize.unloaded(source, model)
        with lines("quantize: writing the folder", always=as_json):
            where, saved = where.saved(model, target, beside)
    except (ValueError, FileNotFoundError) as error:
        raise WrongInput(str(error)) from error
    files = quantize.copy_the_rest(source, target)
    command = " ".join(["ao-lab quantize --plan", path.name, *data.command()])
    notes = (choice.heading(), *where.reasons, *saved.limits)
    base = base_model or str(source)
    write_card(
        target,
        base_model=base,
        command=command,
        notes=notes,
        beside=tensors,
        base_folder=source,
        history=history_of(model),
    )
    told = {**where.told(saved.limits, target), "tensors": tensors, "beside": files, "plan": choice.heading()}
    told["bits_per_parameter"] = quantize.bits_per_parameter(saved, model)
    quantize.show(report, saved, before, SkippedLayers(None), told, as_json)


def plan_layout(source: Path, choice: Choice, layout: str) -> SelectedLayout:
    """compressed-tensors where its readers compute what the plan says, unless --layout ao_lab is asked for."""
    from ao_lab.checkpoint.api import obstacles
    from ao_lab.quantization.api import quantize_

    config: Any = choice.plan
    model = without_weights(source)
    if layout == OWN or model is None:
        return SelectedLayout(OWN, config)
    check_layers(source, model)
    quantize_(model, config)
    found = obstacles(model)
    if not found:
        return SelectedLayout(COMPRESSED, config, given=config if layout == "auto" else None)
    if layout == COMPRESSED:
        raise WrongInput(
            f"--plan: {in_words(found)}; drop --layout, or run ao-lab choose with --layout {COMPRESSED}"
        )
    return SelectedLayout(OWN, config, reasons=(in_words(found),), given=config)
