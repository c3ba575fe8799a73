"""`ao-lab eval`: what a folder's model knows of a text, how far it is from its base, and tasks of lm-evaluation-harness.

What is measured is `ao_lab.measure.evaluate`'s; here stand its options, the table, and what is kept beside the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ao_lab.checkpoint.io.files import links_out, page
from ao_lab.cli.terminal import (
    WrongInput,
    check_device,
    check_writable,
    console,
    print_json,
    print_table,
    strict,
    track_progress,
)
from ao_lab.eval import HarnessOptions
from ao_lab.measure.evaluate import Evaluation, evaluate, split_tasks
from ao_lab.measure.folders import check_folder


def run_eval(
    folder: Path,
    tasks: list[str],
    *,
    limit: int,
    length: int | None,
    text: str | None,
    corpus: Path | None,
    harness: HarnessOptions,
    against: Path | None,
    device: str | None,
    save: bool,
    as_json: bool,
) -> None:
    """Measure, show, and with `save` keep the results beside the model."""
    check_folder(folder)
    split_tasks(tasks, against is not None)
    check_before(folder, against, device, save)
    with track_progress("eval", plain=as_json, transient=True) as work:
        results = evaluate(
            folder,
            text=text,
            corpus=corpus,
            against=against,
            tasks=tasks,
            limit=limit,
            length=length,
            harness=harness,
            device=device,
            progress=lambda done, total: work.at(done, "windows", total),
        )
    if save:
        keep(folder, results.to_dict())
    show(results, as_json)


def check_before(folder: Path, against: Path | None, device: str | None, save: bool) -> None:
    """WrongInput for what would only be found after the work: a device, a base, a folder that cannot be written."""
    check_device(device)
    if against is not None:
        check_folder(against)
    if save:
        check_places(folder)


def check_places(folder: Path) -> None:
    """WrongInput, or OSError, where `keep` could not write: results are put into a card, which is written anew."""
    from ao_lab.checkpoint.io.files import refuse_folders
    from ao_lab.checkpoint.model_card import CARD, RESULTS

    check_writable(folder, "--save into MODEL_DIR")
    refuse_folders(folder / name for name in (CARD, RESULTS))
    if links_out(folder, [CARD]):
        raise WrongInput(f"{folder / CARD} is a link out of the model's folder; copy the file there")


def keep(folder: Path, results: dict[str, Any]) -> None:
    """eval.json, and the results in the card where there is one."""
    from ao_lab.checkpoint.io.files import write_text
    from ao_lab.checkpoint.model_card import CARD, RESULTS, with_results

    write_text(folder / RESULTS, json.dumps(strict(results), indent=2, allow_nan=False) + "\n")
    if (text := page(folder / CARD)) is not None:
        write_text(folder / CARD, with_results(text, results))


#: Units of the numbers; perplexities and relative errors have none.
UNITS = {
    "loss": "nats per token", "loss_difference": "nats per token", "kl": "nats per token", "bits_per_byte": "bits",
    "accuracy": "share of tokens", "agreement": "share of tokens",
}  # fmt: skip


def show(results: Evaluation, as_json: bool) -> None:
    """The numbers, as a table or as JSON."""
    if as_json:
        print_json(results.to_dict())
        return
    rows = [
        [task, f"relative error, {name}" if task == "weights" else name, value, UNITS.get(name, "")]
        for task, name, value in results.lines()
    ]
    begun = results.conditions.get("windows_begin_with")
    title = f"{results.model} on {results.conditions.get('text', 'tasks')}"
    print_table(
        f"{title}{f', each sequence starts with {begun}' if begun else ''}",
        ["task", "metric", "value", "unit"],
        rows,
        ["value"],
    )
    for note in results.notes:
        console().print(note, markup=False, highlight=False)
