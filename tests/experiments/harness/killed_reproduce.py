"""Kills runs of `reproduce` at random moments, and looks at what is on disk after each; a program of its own.

`python -m tests.experiments.harness.killed_reproduce FOLDER KILLS SEED` prints one JSON document. Every run is a fork of
this process, which has imported everything, so that a run takes about a second and its whole length is a target.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from experiments.data import corpus
from experiments.formats import page as formats_page
from experiments.formats import run as formats
from experiments.harness import registry, revision
from experiments.harness.paths import Paths
from experiments.harness.rows import PARTIAL, read
from experiments.models import train
from experiments.ptq import page as ptq_page
from experiments.ptq import run as ptq
from experiments.report import pages
from experiments.runs import run as harness_run
from experiments.runs.settings import Settings
from tests.experiments.harness import tiny

NAMES = ("formats", "ptq")
IMPORTED = (corpus, formats, formats_page, pages, ptq, ptq_page)


def tiny_settings(scale, device, cache):
    """As `settings_for` gives them; the model is trained, with a checkpoint at every step."""
    return Settings(
        scale=scale,
        device="cpu",
        cache=cache,
        train=tiny.replace(tiny.TRAIN, steps=6),
        multiple_choice=tiny.MULTIPLE_CHOICE,
        schemes=("mxfp4", "int4_g32_asymmetric"),
        shape=(256, 256),
        text=tiny.corpus(),
    )


def run(folder):
    """One run, in a fork of this process; its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        harness_run.reproduce(NAMES, paths=Paths(folder / "cache", folder / "reports"))
        code = 0
    finally:
        os._exit(code)


def values(folder):
    """Numbers of the published rows by experiment and key; a key that is there twice is an error."""
    found = {}
    for name in NAMES:
        rows = read(Paths(folder / "cache", folder / "reports").rows(name))
        for row in rows:
            found.setdefault(name, {})["/".join(map(str, row.key))] = str(row.value)
        assert len(rows) == len(found.get(name, {})), f"{name} has rows twice"
    return found


def journals(folder):
    """How many rows the journals hold; every file is whole, no row is there twice."""
    count = 0
    for path in (folder / "cache" / "rows").glob("*.csv"):
        rows = read(path)
        assert len({row.key for row in rows}) == len(rows), f"{path.name} has rows twice"
        count += len(rows)
    return count


def length_of(folder):
    """Seconds of a whole run, after one that warms up what the first use of a library costs; both give the same rows."""
    assert os.waitpid(run(folder / "whole"), 0)[1] == 0
    pages.write_pages(Paths(folder / "whole" / "cache", folder / "whole" / "reports"))
    started = time.monotonic()
    assert os.waitpid(run(folder / "timed"), 0)[1] == 0
    assert values(folder / "timed") == values(folder / "whole")
    return time.monotonic() - started


def main(folder, kills, seed):
    """Kill so many runs; what was seen."""
    torch.set_num_threads(1)
    revision.state()  # the commit that all runs are of, whatever happens to the tree meanwhile
    harness_run.settings_for = tiny_settings
    # Naming ptq runs its parts as well, which take minutes.
    registry.chosen = lambda tables: list(tables)
    train.Checkpoint.__init__.__defaults__ = (None, 0.0)
    length = length_of(folder)
    whole, place, draws = values(folder / "whole"), folder / "killed", random.Random(seed)
    killed = finished = 0
    rows, lost = 0, []
    while killed < kills:
        process = run(place)
        time.sleep(draws.uniform(0, length))
        os.kill(process, signal.SIGKILL)
        if os.WIFSIGNALED(os.waitpid(process, 0)[1]):
            killed += 1
            before, rows = rows, journals(place)
            lost += [killed] * (rows < before)
            values(place)
        if values(place) == whole:
            # Nothing is left to kill: begin again.
            finished, rows = finished + 1, 0
            shutil.rmtree(place)
    assert os.waitpid(run(place), 0)[1] == 0
    partial = [path.name for path in place.rglob(f"*{PARTIAL}")]
    made = {"killed": killed, "finished": finished, "lost": lost, "partial": partial}
    made["same"] = values(place) == whole
    return {**made, "rows": {name: len(found) for name, found in whole.items()}, "seconds": length}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
