"""Every architecture that transformers can build small: quantized by the command, read by transformers and by ao_lab, run.

`architectures.csv` says what each does under the pinned versions: whether the dense model could be built and run, and for
two configurations the layout and who reads it, or why the command refuses. It is written by

    python -m tests.support.models.architectures > tests/ao_lab/checkpoint/architectures.csv
"""

import csv
import re
from pathlib import Path

import pytest

pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers")

from tests.support.models.architectures import architectures, in_fork, row

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
with (Path(__file__).parent / "architectures.csv").open() as file:
    TABLE = {one["type"]: one for one in csv.DictReader(file)}
#: What must not come of a command that ends well.
WRONG = re.compile("CRASH|NOT LOADED|NOT WHOLE|NOT RUN|APART")
#: Its forward joins weights of two layers, one of them dense: ao_lab refuses that by name, and transformers dequantizes first.
JOINS_WEIGHTS = "mobilebert"
PARTS = 16


def in_short(one):
    """A row without the words of errors."""
    return [
        one["dense"].partition(":")[0],
        *(re.sub("^refused.*", "refused", one[name]) for name in ("int8", "int4")),
    ]


def test_every_folder_loads():
    """Of the table: whatever ends well is read whole by transformers and by ao_lab, which agree."""
    assert {kind for kind, one in TABLE.items() if WRONG.search(one["int8"] + one["int4"])} <= {JOINS_WEIGHTS}
    built = [one for one in TABLE.values() if not re.match("not (built|saved)", one["dense"])]
    assert len(built) > 500
    assert sum(one["dense"] == "runs" for one in built) > 350


@pytest.mark.parametrize(
    "kind",
    [
        "deepseek_v4",  # a mapping renames `weight`, and not the parts that stand for it
        "glm5_next_text",  # transformers joins dense tensors while it reads quantized experts
        "idefics",  # modules that have a dictionary called config
        "musicgen",  # a list of heads
        "qwen3_vl_moe",  # experts that transformers turns while it reads
        "xlnet",  # parameters with three axes that are no experts
    ],
)
def test_odd_architectures(kind):
    assert in_short(row(kind, ["int8"]))[:2] == in_short(TABLE[kind])[:2]


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_the_table(part):
    """All of it again, a process each; what was not done in time or is not built on this machine is no difference."""
    assert set(TABLE) == set(architectures())
    made = {kind: in_fork(kind, 120) for kind in list(TABLE)[part::PARTS]}
    done = {
        kind: one for kind, one in made.items() if not one["dense"].startswith(("not within", "not built"))
    }
    assert {kind: in_short(one) for kind, one in done.items()} == {
        kind: in_short(TABLE[kind]) for kind in done
    }
    assert len(done) > 0.8 * sum(not TABLE[kind]["dense"].startswith("not built") for kind in made)
