"""What other projects' own code makes of the same model, sequences and schemes, beside our methods: a table for each text."""

from __future__ import annotations

import math

from experiments.calibration.peers.records import INSTALL, PEERS
from experiments.calibration.run import ARMS, ROUNDING
from experiments.report.content import Table
from experiments.report.real_runs import RealRun, with_error
from experiments.report.results import Results, number

PERPLEXITY = "perplexity"
CHANGE, CHANGE_ERROR = "loss, change", "loss, standard error of the change"
KL, KL_ERROR = "KL", "KL, standard error"
#: Our methods of the same kind as a peer's: like beside like.
LIKE = {
    "llm-compressor GPTQ": "gptq",
    "llm-compressor GPTQ, imatrix": "gptq",
    "llm-compressor AWQ": "awq + search",
    "GPTQModel": "gptq",
    "GPTQModel, mse": "gptq",
    "auto-round": "gptq + autoround",
    "auto-round, alg_ext": "gptq + autoround",
    "auto-round, best": "gptq + autoround",
    "auto-round, no steps": "search by inputs",
    "hqq library": "search by inputs",
}
COLUMNS = (
    "scheme", "peer", "perplexity", "loss, change", "KL", "bits per weight", "minutes", "ours of that kind", "its perplexity",
    "our best", "its perplexity ", "ours is no worse",
)  # fmt: skip
ABOUT = (
    "Other projects' arms run their own code from a loaded model to a quantized one, on the same sequences, and our windows "
    'judge what they dequantize. "No worse": perplexity of our best method of the scheme is at most the peer\'s and one '
    "standard error of the change that the peer makes of the loss. "
)


def measured(run: RealRun) -> list[tuple[str, str]]:
    """Settings and arms of peers that have results."""
    found = dict.fromkeys((row.setting, row.method) for row in run.whole.rows if row.method in PEERS)
    return [one for one in found if run.whole.value(*one, "time to quantize") is not None]


def tables(run: RealRun) -> list[Table]:
    """A table for each text; none where no peer was measured."""
    if not measured(run):
        return []
    made = []
    for text, results in run.texts.items():
        lines = [line(run, results, *one) for one in measured(run)]
        made.append(
            Table(
                f"{run.model}, {text}: other projects", list(COLUMNS), lines, [*results.rows, *run.whole.rows]
            )
        )
    return made


def line(run: RealRun, results: Results, setting: str, peer: str) -> list[str]:
    """A peer in a scheme, beside ours."""
    seconds = run.whole.value(setting, peer, "time to quantize")
    own, like = best(results, setting), LIKE[peer]
    return [
        setting,
        peer,
        number(results.value(setting, peer, PERPLEXITY), 2),
        with_error(results, setting, peer, CHANGE, CHANGE_ERROR),
        with_error(results, setting, peer, KL, KL_ERROR),
        number(run.whole.value(setting, peer, "bits per weight"), 2),
        number(None if seconds is None else seconds / 60, 2),
        like,
        number(results.value(setting, like, PERPLEXITY), 2),
        own,
        number(results.value(setting, own, PERPLEXITY), 2),
        verdict(results, setting, own, peer),
    ]


def best(results: Results, setting: str) -> str:
    """Our method of least loss in a scheme; "" where none was measured."""
    known = [
        (change, name)
        for name in ARMS
        if name != ROUNDING
        and (change := results.value(setting, name, CHANGE)) is not None
        and math.isfinite(change)
    ]
    return min(known)[1] if known else ""


def verdict(results: Results, setting: str, own: str, peer: str) -> str:
    """Whether our loss is at most the peer's and one standard error."""
    ours, theirs = (results.value(setting, name, CHANGE) for name in (own, peer))
    error = results.value(setting, peer, CHANGE_ERROR)
    if ours is None or theirs is None or error is None:
        return ""
    return "yes" if ours <= theirs + error else "no"


def about(run: RealRun) -> list[str]:
    """What the tables are; without results the command that makes them."""
    if measured(run):
        arms = dict.fromkeys(arm for _, arm in measured(run))
        said = "; ".join(f"{arm}: {PEERS[arm].about}" for arm in arms)
        versions = dict.fromkeys(
            row.metric.removeprefix("computed by: ")
            for row in run.whole.rows
            if row.metric.startswith("computed by: ")
        )
        return [f"{ABOUT}{said}. Computed by {' / '.join(versions)}."]
    return [f"**Other projects' own code is not measured here yet.** {command()}"]


def command() -> str:
    """How rows of peers are made."""
    installs = ", ".join(f"`{one}`" for one in INSTALL.values())
    return (
        f"In environments of their own {installs}; then `ao-lab reproduce calibration --model DIR --peer-python PATH`, a "
        "PATH for each environment's Python."
    )
