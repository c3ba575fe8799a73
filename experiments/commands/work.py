"""What the commands of the experiments do; their options are in `experiments.commands.cli`.

What computes is imported when it runs, so that a command that only lists something is quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ao_lab.cli.listings import known
from ao_lab.cli.terminal import (
    WrongInput,
    check_device,
    check_writable,
    print_json,
    print_table,
    say,
    track_progress,
    when_stopped,
)
from ao_lab.install.extras import check_extra, is_clone
from experiments.commands.found import show_findings, told_of
from experiments.harness.paths import Paths
from experiments.harness.registry import EXPERIMENTS, LIMITED, SEVERAL, check_only
from experiments.models.pretrained import MODELS

if TYPE_CHECKING:
    from experiments.data.corpus import CorpusRecord


def run_experiments(
    names: list[str],
    scale: str,
    device: str | None,
    only: list[str],
    as_json: bool,
    *,
    reports: Path | None = None,
    corpus: tuple[str, Path | None] | None = None,
    seconds: float | None = None,
    workers: int = 1,
    changed: bool = False,
    real: Any = None,
) -> bool:
    """Run the named experiments, or those that always run; progress goes to stderr, the outcome to stdout.

    corpus: its name, and its folder where it has one; None: the default. real: models that are measured alone
    (`real_models`). seconds: after which nothing more starts, where that can be. workers: how many trainings run at once,
    likewise. changed: rows whose code has not changed since are taken as measured. Returns whether no measurement was lost,
    and something measured of each.
    """
    from experiments.harness.measuring import LOST
    from experiments.runs.outcome import NOTHING
    from experiments.runs.run import reproduce

    check_names(names, only, ())
    parts = partly(names, only) if real is None else {}
    check_device(device)
    if real is None:
        more: dict[str, Any] = {**parts, **limited(names, seconds)}
    else:
        more = for_real_models(names, real, only, seconds)
    given = {} if corpus is None else other_text(names, *corpus)
    more |= {**given, **shared(names, workers), "changed": changed}
    folders = paths(reports, own=real is not None)
    LOST.clear()
    NOTHING.clear()
    say(f"reproduce writes to {folders.reports} and keeps what it has measured in {folders.cache}")
    with when_stopped(
        lambda: f"what was measured is kept in {folders.cache}; the same command goes on from there"
    ):
        try:
            written = reproduce(names or None, scale=scale, device=device, paths=folders, **more)
        except ValueError as error:
            # What models and texts are asked of, such as a text that is shorter than a window; measurements have a status.
            if real is None:
                raise
            raise WrongInput(str(error)) from error
    if as_json:
        found = {} if real is None else told_of(names, real.models, folders)
        print_json({"written": [{"what": what, "where": where} for what, where in written], **found})
    else:
        show_written("Reproduced", written, False)
        if real is not None:
            show_findings(names, real.models, folders, [what for what, _ in written])
    if LOST:
        say(
            f"{len(LOST)} measurements were lost, {LOST[0]} first (errors are above); the same command goes on with them"
        )
    for said in NOTHING:
        say(said)
    return not LOST and not NOTHING


def check_names(names: Sequence[str], only: Sequence[str], models: Sequence[str]) -> None:
    """WrongInput, without torch, for experiments, parts, schemes and models that are none."""
    from reference.arrays.namespace import and_nearest

    try:
        for name in names:
            known(name, EXPERIMENTS, "experiment")
            check_only(name, only, bool(models))
    except ValueError as error:
        raise WrongInput(str(error) if isinstance(error, WrongInput) else f"--only: {error}") from error
    check_extra("experiments")
    for given in models:
        if given not in MODELS and not Path(given).is_dir():
            near = and_nearest(given, MODELS, cutoff=0.4)
            raise WrongInput(
                f"--model {given} is no folder and no name of a pretrained model{near}; the models are {', '.join(MODELS)}"
            )


def partly(names: list[str], only: list[str]) -> dict[str, list[str]]:
    """The configurations or parts to which a run is limited; WrongInput for unknown ones, and for experiments without any."""
    if not only:
        return {}
    if names not in (["decode"], *([name] for name in LIMITED)):
        raise WrongInput("--only names parts of one experiment: ao-lab reproduce decode --only NAME")
    try:
        if names == ["decode"]:
            from experiments.decode.configs import chosen

            chosen(tuple(only))
        else:
            EXPERIMENTS[names[0]].run_module().check_parts(only)
    except ValueError as error:
        raise WrongInput(f"--only: {error}") from error
    return {"only": only}


def real_models(
    models: list[str],
    tasks: list[str],
    windows: int | None,
    length: int | None,
    accept: list[str],
    text: Path | None = None,
    peers: Sequence[str] = (),
    execute: bool = False,
    names: Sequence[str] = (),
) -> Any:
    """What was asked for of real models; None where nothing was. WrongInput for options without a model. names: of the
    experiments; ptq evaluates on all of the text, ptq and calibration on no other."""
    from experiments.data.texts import OwnText
    from experiments.runs.settings import RealModels

    given = tuple(models), tuple(tasks), windows, length, tuple(accept), tuple(peers)
    if not models:
        if any(given) or text is not None or execute:
            raise WrongInput(
                "--task, --windows, --length, --accept, --text, --execute and --peer-python go with --model DIR"
            )
        return None
    try:
        own = None
        if text is not None:
            own = OwnText.of(text, list(names) == ["ptq"], list(names) == ["calibration"])
        fields = ("models", "tasks", "windows", "length", "accept", "peers")
        return RealModels(**dict(zip(fields, given, strict=True)), own_text=own, execute=execute)
    except ValueError as error:
        raise WrongInput(str(error)) from error


def for_real_models(names: list[str], real: Any, only: list[str], seconds: float | None) -> dict[str, Any]:
    """Arguments of a run on real models; WrongInput for experiments without them, unknown schemes and what is not there."""
    from experiments.models.causal_lm import check_usable, real_model
    from experiments.models.pretrained import LANGUAGE, check_task
    from experiments.models.serving import tasks_of
    from experiments.runs.run import check_asked

    try:
        check_asked(names, real, only)
        for given in real.models:
            model = real_model(given, paths().cache, real.accept, step=say)
            check_usable(model)
            for name in names:
                check_task(model.task, EXPERIMENTS[name].tasks, model.name, name)
            if real.tasks:
                check_task(model.task, (LANGUAGE,), model.name, "lm-evaluation-harness")
                tasks_of(real.tasks, model.folder)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    if seconds is not None and not seconds > 0:
        raise WrongInput(f"--seconds is positive, got {seconds}")
    return {"real": real, "only": only, "seconds": seconds}


def limited(names: list[str], seconds: float | None) -> dict[str, float]:
    """The limit of a run; WrongInput for one that is not positive, and for experiments that cannot stop in between."""
    if seconds is None:
        return {}
    if names not in ([name] for name in LIMITED) or not seconds > 0:
        raise WrongInput(
            f"--seconds is a positive limit of one experiment, of {', '.join(LIMITED)}: "
            "ao-lab reproduce fp8_training --seconds 480"
        )
    return {"seconds": seconds}


def shared(names: list[str], workers: int) -> dict[str, int]:
    """How many trainings run at once; WrongInput for none, and for experiments whose trainings do not."""
    if workers == 1:
        return {}
    if names not in ([name] for name in SEVERAL) or workers < 1:
        raise WrongInput(
            "--workers is a positive number of processes of one experiment: ao-lab reproduce fp8_training --workers 4"
        )
    return {"workers": workers}


def other_text(names: list[str], corpus: str, path: Path | None) -> dict[str, Any]:
    """The corpus of a run that is not given the default; WrongInput where there is no such text."""
    from experiments.runs.run import text_for

    try:
        text = text_for(names, corpus, path)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    return {} if text is None else {"text": text}


def write_pages_alone(names: list[str], changed: bool, reports: Path | None, as_json: bool) -> None:
    """Write pages and figures of all published rows, and measure nothing."""
    from experiments.report.pages import write_pages

    if names or changed:
        raise WrongInput(
            "--pages measures nothing and writes the pages of all experiments: ao-lab reproduce --pages"
        )

    folders = paths(reports)
    with folders.alone():
        written = write_pages(folders)
    show_written("Written", written, as_json)


def run_merge(folders: Sequence[Path], reports: Path | None, as_json: bool) -> None:
    """Take the rows, write the pages again, and list both."""
    check_extra("experiments")
    from experiments.report.pages import write_pages
    from experiments.runs.run import merge

    places = paths(reports)
    try:
        written = merge(folders, places)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    written += write_pages(places) if written else []
    nothing = [] if as_json else [("nothing: all their rows are here", str(places.reports))]
    show_written("Merged", written or nothing, as_json)


@dataclass(frozen=True)
class Wanted:
    """What to train: the name of a size, rates (none: the size's own), seeds, the budget, sequences a step."""

    size: str
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    seconds: float | None
    megabytes: float | None
    batch: int | None


def run_pretrain(
    wanted: Wanted,
    scale: str,
    device: str | None,
    corpus: tuple[str, Path | None],
    reports: Path | None,
    as_json: bool,
) -> None:
    """Train and publish; what an interrupted run trained is not trained again."""
    from experiments.models.pretraining import Budget
    from experiments.pretraining.run import settings_with, sweep
    from experiments.runs.run import run_all, text_for
    from experiments.runs.settings import settings_for

    check_device(device)
    try:
        size = None if wanted.megabytes is None else round(wanted.megabytes * 1e6)
        budget = Budget(bytes=size, seconds=wanted.seconds)
        trainings = sweep(wanted.size, budget, wanted.rates, wanted.seeds, wanted.batch)
        text = text_for(["pretraining"], *corpus)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    folders = paths(reports)
    settings = replace(settings_with(settings_for(scale, device, folders.cache), trainings), text=text)
    say(f"pretrain writes to {folders.reports} and keeps checkpoints in {folders.cache}")
    with when_stopped(lambda: f"checkpoints are in {folders.cache}; the same command goes on from there"):
        written = run_all(["pretraining"], settings, folders)
    show_written("Trained", written, as_json)


def run_corpus(name: str | None, build: Path | None, as_json: bool) -> None:
    """List all corpora, describe one, or build one into a folder."""
    from experiments.data.corpora import corpora, corpus_record

    if name is None:
        if build is not None:
            raise WrongInput("corpus --build takes the name of a corpus: ao-lab corpus prose --build DIR")
        show_corpora(list(corpora().values()), as_json)
        return
    try:
        record = corpus_record(name)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    if build is not None:
        run_build(record, build, as_json)
    elif as_json:
        print_json(record.describe())
    else:
        show_corpus(record)


def run_build(record: CorpusRecord, folder: Path, as_json: bool) -> None:
    """Build a corpus; WrongInput where it is not built, cannot be fetched, or comes out as another text."""
    if record.build is None:
        raise WrongInput(f"corpus {record.name} is not built: {record.origin}")
    try:
        with track_progress("documents", None) as work:
            written = record.build(folder, work.step)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    if as_json:
        print_json([str(path) for path in written])
    else:
        print_table(f"Built {record.name}", ["file"], [[str(path)] for path in written])


def show_corpora(records: list[CorpusRecord], as_json: bool) -> None:
    """A line per corpus."""
    if as_json:
        print_json([record.describe() for record in records])
        return
    rows = [[one.name, one.about, usage(one)] for one in records]
    print_table("Corpora", ["name", "text", "use"], rows)


def show_corpus(record: CorpusRecord) -> None:
    """What a record says."""
    facts = [
        ["text", record.about],
        *([f"split {name}", what] for name, what in record.splits.items()),
        ["licence", record.licence],
        ["origin", record.origin],
        ["identity", record.identity],
        ["use", usage(record)],
        *([["build", f"ao-lab corpus {record.name} --build DIR (online)"]] if record.build else []),
    ]
    print_table(f"Corpus {record.name}", ["field", "value"], facts)
    if record.files:
        rows = [[one.name, str(one.documents), str(one.bytes), one.sha256] for one in record.files]
        columns = ["file", "documents", "bytes, uncompressed", "SHA-256, uncompressed"]
        print_table("Files", columns, rows, columns[1:3])


def usage(record: CorpusRecord) -> str:
    """How a run is given the corpus."""
    return f"--corpus {record.name} --corpus-path DIR" if record.files else "the default"


def run_bench(names: list[str], shapes: list[str], baselines: bool, listed: bool, as_json: bool) -> None:
    """List the kernels, measure all of them and publish, or measure some and only show them."""
    from experiments.kernels import bench

    try:
        work = bench.choose(names, shapes)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    if listed:
        show_cases(
            [case for case in bench.listing() if case["name"] in {one[0].name for one in work}], as_json
        )
        return
    if not bench.has_device():
        raise WrongInput("bench: kernels are timed on a GPU and torch sees none here; ao-lab doctor says why")
    written: Sequence[tuple[str, str]] = ()
    if names or shapes:
        with when_stopped(lambda: "measurements of a part are not stored; the same command starts again"):
            lines = bench.part(work, with_baselines=baselines)
    else:
        folders = paths()
        with when_stopped(lambda: f"what was measured is in {folders.cache}; the same command goes on"):
            lines, written = bench.complete(with_baselines=baselines, paths=folders)
    show_bench(lines, [bench.as_json(line) for line in lines], written, as_json)


def show_cases(cases: list[dict[str, Any]], as_json: bool) -> None:
    """What can be measured."""
    if as_json:
        print_json(cases)
        return
    rows = [
        [
            case["name"],
            " ".join(case["shapes"]),
            f"{case['bytes_per_element']:.3f}",
            ", ".join(f"{metric} {value:g}" for metric, value in case["targets"].items()),
            ", ".join(case["missing"]),
        ]
        for case in cases
    ]
    print_table("Kernels", ["name", "shapes", "bytes/element", "targets", "missing"], rows, ["bytes/element"])


def show_bench(
    lines: Sequence[Any], records: list[dict[str, Any]], written: Sequence[tuple[str, str]], as_json: bool
) -> None:
    """What was measured, and where it was written."""
    if as_json:
        print_json({"lines": records, "written": [{"what": what, "where": where} for what, where in written]})
        return
    columns = ["kernel", "shape", "us", "TB/s", "of copy", "best baseline", "target met"]
    rows = [[line.case, line.shape, *numbers(line), baseline(line), line.verdict] for line in lines]
    print_table("Bench", columns, rows, ["us", "TB/s", "of copy"])
    if written:
        print_table("Written", ["what", "where"], written)


def numbers(line: Any) -> list[str]:
    """Time, rate and fraction; nothing where they were not measured."""
    found = [line.values.get(metric) for metric in ("time", "rate", "fraction")]
    return [
        "" if value is None else f"{value:.{digits}f}" for value, digits in zip(found, (1, 2, 3), strict=True)
    ]


def baseline(line: Any) -> str:
    """The best baseline with its time over ours, and whether it is faster."""
    best = line.best_baseline
    return "" if best is None else f"{best.baseline} {best.ratio:.2f}x{' FASTER' if line.slower_than else ''}"


def run_ledger(
    check: bool,
    refresh: bool,
    as_json: bool,
    *,
    seconds: float,
    add: Path | None = None,
    names: Sequence[str] = (),
) -> bool:
    """Show the table, check it, remake it, or add to it. False where something was not reached or not put in; where --check or
    --refresh asked for it, also where something was never validated, or differed."""
    from experiments.runs import validations

    if check and refresh:
        raise WrongInput("ledger takes --check or --refresh, not both")
    check_clone("ledger", "the table lies in its reports/, the tests that make it in its tests/gpu/")
    if names and not refresh:
        raise WrongInput("ledger --function goes with --refresh")
    late = validate(seconds, names) if refresh else []
    if add is not None:
        try:
            added, left = validations.add(add)
        except ValueError as error:
            raise WrongInput(f"ledger --add: {error}") from error
        say(f"{len(added)} lines put in: {', '.join(added) or 'none'}")
        late += (kept := [f"{name} ({why})" for name, why in left.items()])
        if kept:
            say(f"left as they were: {', '.join(kept)}")
    problems, changes = validations.problems(), validations.changes()
    if as_json:
        lines = {name: asdict(one) for name, one in validations.read().items()}
        print_json({"validations": lines, "problems": problems, "changes": changes, "not reached": late})
    elif check or refresh:
        show_check(problems, changes, late)
    else:
        show_ledger(changes)
    return not late and not (problems and (check or refresh))


def validate(seconds: float, names: Sequence[str] = ()) -> list[str]:
    """Validate on this GPU everything, or these functions; whose tests the time did not reach."""
    import torch

    from experiments.runs import validations

    if not torch.cuda.is_available():
        raise WrongInput("ledger --refresh runs on a GPU and torch sees none here; ao-lab doctor says why")
    try:
        return validations.refresh(seconds, names=names)[1]
    except ValueError as error:
        raise WrongInput(f"ledger --function: {error}") from error


def show_check(problems: dict[str, str], changes: list[str], late: list[str]) -> None:
    """What has to be validated, as a table, and what has changed since the rest was, as information."""
    from experiments.runs import validations

    if problems:
        title = "Ledger: validate with ao-lab ledger --refresh on a GPU"
        print_table(title, ["function", "problem"], problems.items())
    late = [f"not reached in time, as they were: {', '.join(late)}"] if late else []
    for line in [f"{len(validations.functions())} functions, {len(problems)} problems", *changes, *late]:
        say(line)


def show_ledger(changes: list[str]) -> None:
    """One line per function or family, and what has changed since."""
    from experiments.runs import validations
    from experiments.runs.validations import COUNTS

    rows = [
        [one.name, *(f"{getattr(one, name):,}" for name in COUNTS), one.date[:10], one.commit, one.device]
        for one in validations.read().values()
    ]
    print_table("Ledger", ["function", *COUNTS, "date", "commit", "device"], rows, COUNTS)
    for line in changes:
        say(line)


def paths(reports: Path | None = None, *, own: bool = False) -> Paths:
    """Where a run writes, `reports` instead of its default, which is another for a user's own models; WrongInput where that
    cannot be written."""
    folders = Paths.default(reports, own=own)
    check_writable(folders.reports, "the folder of reports")
    check_writable(folders.cache, "the cache (AO_LAB_CACHE names another)")
    return folders


def check_clone(command: str, why: str) -> None:
    """WrongInput where ao_lab was installed from a wheel, which lacks what a command needs."""
    if not is_clone():
        raise WrongInput(f"{command} needs a clone of ao_lab: {why}")


def show_written(title: str, written: Sequence[tuple[str, str]], as_json: bool) -> None:
    """What was written, and where."""
    if as_json:
        print_json([{"what": what, "where": where} for what, where in written])
    else:
        print_table(title, ["what", "where"], written)
