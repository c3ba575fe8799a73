"""What other projects' own code makes of the same model, sequences and schemes, beside our methods: a table for each text."""

from __future__ import annotations

from experiments.calibration.cases import ARMS, ROUNDING
from experiments.calibration.peers.records import INSTALL, PEERS
from experiments.report.content import Table
from experiments.report.real_runs import CHANGE, CHANGE_ERROR, RealRun, quality_cells
from experiments.report.results import Results, number

PERPLEXITY, BITS = "perplexity", "bits per weight"
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
    "hqq library": "search",
}
COLUMNS = (
    "scheme", "peer", "perplexity", "loss, change", "KL", "bits per weight", "minutes", "ours of that kind", "its perplexity",
    "our best", "its perplexity ", "its bits per weight", "ours is no worse",
)  # fmt: skip
ABOUT = (
    "Other projects' arms run their own code from a loaded model to a quantized one, on the same sequences, and our windows "
    "judge what they dequantize. Our best is the method of the least loss on the other text, so that no text chooses what it "
    "judges (of a run on one text: on that). \"No worse\": our best's loss is at most the peer's and one standard error of the "
    "change that the peer makes. Bits of integers differ by their scales: peers store bfloat16, our schemes float32 unless "
    "they end in _bf16. "
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
        lines = [line(run, text, *one) for one in measured(run)]
        made.append(
            Table(
                f"{run.model}, {text}: other projects", list(COLUMNS), lines, [*results.rows, *run.whole.rows]
            )
        )
    return made


def line(run: RealRun, text: str, setting: str, peer: str) -> list[str]:
    """A peer in a scheme, beside ours."""
    results, like = run.texts[text], LIKE[peer]
    seconds = run.whole.value(setting, peer, "time to quantize")
    own = run.chosen(text, setting, [name for name in ARMS if name != ROUNDING], CHANGE)
    return [
        setting,
        peer,
        *quality_cells(results, setting, peer),
        number(run.whole.value(setting, peer, BITS), 2),
        number(seconds, 2, 1 / 60),
        like,
        number(results.value(setting, like, PERPLEXITY), 2),
        own,
        number(results.value(setting, own, PERPLEXITY), 2),
        number(run.whole.value(setting, own, BITS), 2),
        verdict(results, setting, own, peer),
    ]


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
    return [f"**Other projects' own code has not been measured yet.** {command()}"]


def command() -> str:
    """How rows of peers are made."""
    installs = ", ".join(f"`{one}`" for one in INSTALL.values())
    return (
        f"In environments of their own {installs}; then `ao-lab reproduce calibration --model DIR --peer-python PATH`, a "
        "PATH for each environment's Python."
    )
