"""A rank: the process that runs cases beside others of its host, and what all of them agree on.

Ranks of one host tell each other in files of a folder how a case ended, so that no word of it depends on the collective that
may hang. A rank that failed waits for the others; these end where they have not followed within `GRACE` seconds, or where a
case takes longer than its limit: a thread ends the process, whatever it waits for. The first rank writes rows as cases end,
and before a case begins its name into a file: what began and did not end has ended its ranks; that is written down, and the
next ones go on behind it (`experiments.distributed.launch`).
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ao_lab.cli.terminal import say
from experiments.distributed.cases import LINE, NEEDS_GPUS, RANKS, SECONDS, Case, Rank, Tally
from experiments.harness.measuring import LATE, Values, Wrong, free, status
from experiments.harness.rows import NOT_RUN, Row, read, table_name, write
from experiments.runs.settings import Settings

EXPERIMENT = "distributed"
#: Seconds that ranks have to follow one that failed, and by which the slowest of them may be late.
GRACE, PATIENCE = 5.0, 20.0
POLL = 0.05
#: The variable by which a process knows that `launch` started it.
STARTED = "AO_LAB_DISTRIBUTED_RANK"
#: Folders in which ranks meet, files in which they say why they end, and what is said where there is none.
FOLDER, ENDED = ".ranks-", "ended."
NO_ANSWER, BEGAN = "error: a rank died", "error: it began, and did not end"
#: Exit codes: some case failed; ranks have to be started again to go on.
FAILED, AGAIN = 1, 75
#: On CPUs ranks share cores, and everything takes longer.
CPU_FACTOR = 4.0


@dataclass(frozen=True)
class Plan:
    """What ranks run, and where rows go. seconds: after which nothing more starts."""

    cases: Sequence[Case]
    settings: Settings
    out: Path
    seconds: float | None = None

    @property
    def path(self) -> Path:
        """The rows."""
        return self.out / "data" / f"{EXPERIMENT}.csv"

    @property
    def begun(self) -> Path:
        """The name of the case that runs."""
        return self.out / f".{EXPERIMENT}.begun"

    def data(self, ranks: int) -> str:
        """The data of the tables."""
        return f"{ranks}-ranks"

    def rows(self, case: Case, ranks: int, values: Values) -> list[Row]:
        """Rows of a case; of several methods that it measures a line each, whose setting is the case."""
        data, lines = self.data(ranks), dict[str, Values]()
        tried = not any(metric.startswith(NOT_RUN) for metric in values)
        found: Values = {RANKS: (float(ranks), "")} if tried else {}
        for metric, value in values.items():
            method, line, own = metric.rpartition(LINE)
            if line:
                lines.setdefault(method, {})[own] = value
            else:
                found[metric] = value
        made = self.settings.rows(EXPERIMENT, case.kind, data, case.expected, case.name, found)
        for method, own_values in lines.items():
            made += self.settings.rows(EXPERIMENT, case.kind, data, case.name, method, own_values)
        return made

    def add(self, case: Case, ranks: int, values: Values) -> None:
        """Put rows of a case in the place of older ones, at once."""
        new = self.rows(case, ranks, values)
        line = {(row.line, row.seed) for row in new}
        write(self.path, [row for row in read(self.path) if (row.line, row.seed) not in line] + new)

    def left(self, ranks: int) -> list[str]:
        """Names of cases without rows of this run."""
        done = {row.method for row in read(self.path) if row.date >= self.since}
        return [case.name for case in self.cases if case.name not in done]

    @property
    def run(self) -> Path:
        """When this run began and when nothing more starts: ranks that start again go on with it."""
        return self.out / f".{EXPERIMENT}.run"

    @property
    def since(self) -> str:
        """When this run began, as dates of rows are."""
        return str(json.loads(self.run.read_text())["since"])

    @property
    def late(self) -> bool:
        """Whether nothing more starts."""
        until = json.loads(self.run.read_text())["until"]
        return until is not None and time.time() > until

    def begin(self) -> None:
        """A run that begins now."""
        until = None if self.seconds is None else time.time() + self.seconds
        since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.out.mkdir(parents=True, exist_ok=True)
        self.begun.unlink(missing_ok=True)
        whole(self.run, json.dumps({"since": since, "until": until}))


def in_need(
    cases: Iterable[Case], known: Iterable[Row], settings: Settings, ranks: int, alone: bool = False
) -> list[Case]:
    """Cases that are not known to have passed first, in their order; the others behind them, or (alone) not at all.

    known: rows of which those of this device, scale and number of ranks count.
    """
    passed = {
        (row.table, row.setting, row.method)
        for row in known
        if row.metric == "status: ok" and row.device == settings.device_name
    }
    cases, data = list(cases), f"{ranks}-ranks"
    done = {
        case.name
        for case in cases
        if (table_name(case.kind, settings.scale, data), case.expected, case.name) in passed
    }
    first = [case for case in cases if case.name not in done]
    return first if alone else [*first, *(case for case in cases if case.name in done)]


def take_over(plan: Plan, ranks: int, codes: Sequence[int] = ()) -> None:
    """Write down what began and did not end, since its ranks ended, with what they said; remove their folders.

    codes: with which they ended, where that is known.
    """
    folders = list(plan.out.glob(f"{FOLDER}*"))
    said = [path.read_text() for folder in folders for path in sorted(folder.glob(f"{ENDED}*"))]
    if plan.begun.exists():
        name = plan.begun.read_text()
        for case in plan.cases:
            if case.name == name:
                how = f" (exit codes {', '.join(map(str, codes))})" if codes else ""
                plan.add(case, ranks, status(next(iter(said), f"{NO_ANSWER}{how}")))
        plan.begun.unlink()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def joined(device: str, folder: Path, longest: float) -> Rank:
    """This process as a rank of the group that torchrun's variables name."""
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    where = torch.device(device, local) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    else:
        torch.set_num_threads(1)
    # Longer than any case: what hangs is ended by its limit.
    options: dict[str, Any] = {"device_id": where} if device == "cuda" else {}
    timeout = timedelta(seconds=longest + 2 * PATIENCE)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout, **options)
    folder.mkdir(parents=True, exist_ok=True)
    made = [tempfile.mkdtemp(dir=folder, prefix=FOLDER) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0)
    return Rank(dist.get_rank(), dist.get_world_size(), where, Path(str(made[0])))


def run_rank(plan: Plan) -> int:
    """Run all cases that have no rows yet; the exit code of this process."""
    faulthandler.enable()  # says where a signal ends this process
    longest = max((limit_of(case, plan.settings.device) for case in plan.cases), default=0.0)
    rank = joined(plan.settings.device, plan.out, longest)
    meeting, cases = Meeting(rank), {case.name: case for case in plan.cases}
    names = plan.left(rank.size)
    rank.wait()
    for number, name in enumerate(names):
        run_case(plan, meeting, number, cases[name])
    rank.wait()  # until all have read what is in the folder
    if rank.first:
        shutil.rmtree(rank.folder, ignore_errors=True)
    dist.destroy_process_group()
    return FAILED if failed(plan) else 0


def run_case(plan: Plan, meeting: Meeting, number: int, case: Case) -> None:
    """Run a case, or say why not; the process ends where the ranks have to be started again."""
    reason = meeting.told(number, not_run(plan, case))
    values = status(reason) if reason else meeting.run(plan, number, case)
    if meeting.rank.first:
        plan.add(case, meeting.rank.size, values)
        plan.begun.unlink(missing_ok=True)
        say(f"{case.name}: {', '.join(name for name in values if name.startswith('status'))}")
    if meeting.broken:
        os._exit(AGAIN)


def not_run(plan: Plan, case: Case) -> str:
    """Why a case does not start here; nothing where it does."""
    if case.gpus and plan.settings.device != "cuda":
        return f"{NEEDS_GPUS}: {case.gpus}"
    if plan.late:
        return f"not run: the {plan.seconds or 0:.0f} {LATE}"
    return ""


def limit_of(case: Case, device: str) -> float:
    """Seconds after which a case counts as hung on a device."""
    return case.limit * (1.0 if device == "cuda" else CPU_FACTOR)


def failed(plan: Plan) -> list[str]:
    """Names of cases of this run that did not pass; what needs GPUs has not failed."""
    names, since = {case.name for case in plan.cases}, plan.since
    said = [row for row in read(plan.path) if row.metric.startswith("status: ") and row.date >= since]
    passed = ("status: ok", f"status: {NEEDS_GPUS}")
    return [row.method for row in said if row.method in names and not row.metric.startswith(passed)]


@dataclass
class Answer:
    """How a case ended on a rank. follows: whether the ranks can go on together after it."""

    said: str = "ok"
    follows: bool = True
    tally: dict[str, Any] = field(default_factory=dict)


@dataclass
class Meeting:
    """What ranks tell each other in files."""

    rank: Rank
    #: Whether the ranks have to be started again.
    broken: bool = False

    def told(self, number: int, reason: str) -> str:
        """What the first rank says before a case."""
        path = self.rank.folder / f"{number}.told"
        if self.rank.first:
            whole(path, reason)
        if not appears(path, PATIENCE):
            os._exit(AGAIN)
        return path.read_text()

    def run(self, plan: Plan, number: int, case: Case) -> Values:
        """Values of a case, of all ranks together."""
        if self.rank.first:
            plan.add(
                case, self.rank.size, status(BEGAN)
            )  # what remains where everything is ended from outside
            plan.begun.write_text(case.name)
        limit, started = limit_of(case, plan.settings.device), time.perf_counter()
        folder = self.rank.folder / f"{number}"
        folder.mkdir(exist_ok=True)
        rank = Rank(self.rank.rank, self.rank.size, self.rank.device, folder)
        with Watch(self.rank, limit):
            mine = answer_of(case, rank)
        if not mine.follows:
            whole(self.rank.folder / f"{ENDED}{rank.rank}", mine.said)
        whole(self.path(number, str(rank.rank)), json.dumps(asdict(mine)))
        patience = PATIENCE if mine.follows else GRACE + 1
        answers = [self.answer(number, other, patience) for other in range(rank.size)]
        self.broken = not all(answer.follows for answer in answers)
        return {**merged(answers), SECONDS: (time.perf_counter() - started, "s")}

    def path(self, number: int, word: str) -> Path:
        """The file of a rank, or of all, about a case."""
        return self.rank.folder / f"{number}.{word}"

    def answer(self, number: int, rank: int, patience: float) -> Answer:
        """What a rank found; where it does not say, that."""
        path = self.path(number, str(rank))
        if not appears(path, patience):
            return Answer(f"error: rank {rank} gave no answer", follows=False)
        return Answer(**json.loads(path.read_text()))


def answer_of(case: Case, rank: Rank) -> Answer:
    """Run a case on this rank."""
    tally = Tally()
    try:
        case.work(rank, tally)
        if rank.device.type == "cuda":
            torch.cuda.synchronize()
        return Answer(tally=asdict(tally))
    except Wrong as error:
        return Answer(f"wrong: {error}")
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return Answer(f"error: rank {rank.rank}: {type(error).__name__}: {error}", follows=False)
    finally:
        torch.compiler.reset()
        free()


def merged(answers: Iterable[Answer]) -> Values:
    """Values of all ranks: counts added, the largest difference, measured values of the first; the first that failed else."""
    answers = list(answers)
    said = sorted((a.said for a in answers if a.said != "ok"), key=lambda word: "gave no answer" in word)
    if said:
        return status(said[0])
    total = Tally()
    for answer in answers:
        one = Tally(**answer.tally)
        total.compared += one.compared
        total.different += one.different
        total.largest, total.bound = max(total.largest, one.largest), max(total.bound, one.bound)
        total.wrong += one.wrong
        total.values = total.values or {name: (value, unit) for name, (value, unit) in one.values.items()}
    try:
        return {**total.as_values(), **status("ok")}
    except Wrong as error:
        return status(f"wrong: {error}")


class Watch:
    """Ends this process where its work outlasts a limit, or another rank failed and this one does not follow."""

    def __init__(self, rank: Rank, limit: float) -> None:
        self.rank, self.limit, self.done = rank, limit, threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self.look, daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self.done.set()

    def look(self) -> None:
        """Until the work is done."""
        started, failed = time.monotonic(), float("inf")
        while not self.done.wait(POLL * 4):
            now = time.monotonic()
            if any(self.rank.folder.glob(f"{ENDED}*")):
                failed = min(failed, now)
            if now > started + self.limit:
                said = f"error: rank {self.rank.rank} did not end within {self.limit:.0f} s"
                whole(self.rank.folder / f"{ENDED}{self.rank.rank}", said)
            if now > min(started + self.limit, failed + GRACE):
                os._exit(AGAIN)


def appears(path: Path, patience: float) -> bool:
    """Wait for a file."""
    until = time.monotonic() + patience
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(POLL)
    return True


def whole(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all."""
    made = path.with_suffix(f"{path.suffix}.{os.getpid()}")
    made.write_text(text)
    made.replace(path)
