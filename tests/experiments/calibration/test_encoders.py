"""Methods with data on a sentence encoder: the whole command on a random one, and what "recovered" is of."""

from dataclasses import replace

import pytest

from ao_lab.cli.app import main
from experiments.calibration import encoders
from experiments.calibration.cases import Case
from experiments.calibration.encoders import RECOVERED, prepared, recovered
from experiments.calibration.page import sections
from experiments.data import texts
from experiments.harness.paths import Paths
from experiments.harness.rows import read
from experiments.models.causal_lm import of_folder
from experiments.models.sentence_encoder import REVIEWS, Judged
from experiments.runs import benches
from experiments.runs.settings import RealModels, Settings
from tests.experiments.ptq.test_tasks import reviews
from tests.support.models.hf_models import save_mpnet

pytest.importorskip("transformers")
SCHEME = "int3_g64_asymmetric"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Rows of `ao-lab reproduce calibration --model DIR`."""
    made = tmp_path_factory.mktemp("encoder")
    save_mpnet(made / "tiny-mpnet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AO_LAB_CACHE", str(made / "cache"))
        patch.delenv(texts.VARIABLE, raising=False)
        patch.setattr(benches, "reviews", reviews)
        patch.setitem(encoders.SEQUENCES, "quick", 8)
        only = [word for name in (SCHEME, "search by inputs", "gptq") for word in ("--only", name)]
        command = ["reproduce", "calibration", "--model", str(made / "tiny-mpnet"), *only, "--device", "cpu"]
        assert main([*command, "--reports", str(made / "reports"), "--json"]) == 0
    return made


def test_methods_stand_beside_rounding(place):
    rows = read(Paths(place / "cache", place / "reports").rows("calibration"))
    table = f"encoder tiny-mpnet/quick/{REVIEWS}"
    found = {
        (row.method, row.metric): row.value for row in rows if row.table == table and row.setting == SCHEME
    }
    assert {method for method, _ in found} == {"rounding", "search by inputs", "gptq"}
    assert ("rounding", RECOVERED) not in found
    for method in ("search by inputs", "gptq"):
        part = 1 - found[method, "cosine distance"] / found["rounding", "cosine distance"]
        assert found[method, RECOVERED] == pytest.approx(100 * part, abs=1e-4)
    assert {row.metric for row in rows if row.metric.startswith("status")} == {"status: ok"}
    (made,) = [one for one in sections(rows) if one.title == "tiny-mpnet, encoder (short run, CPU)"]
    assert [line[:2] for line in made.tables[0].lines] == [
        [SCHEME, name] for name in ("rounding", "search by inputs", "gptq")
    ]


def test_sequences_are_whole_texts_of_books_and_rounding_is_measured_once(place, tmp_path, monkeypatch):
    """As long as the others, so that none is padded; they end as texts of the tokenizer do."""
    monkeypatch.delenv(texts.VARIABLE, raising=False)
    monkeypatch.setattr(benches, "reviews", reviews)
    monkeypatch.setitem(encoders.SEQUENCES, "quick", 3)
    asked = RealModels(models=(str(place / "tiny-mpnet"),))
    run = prepared(
        Settings(scale="quick", device="cpu", cache=tmp_path, asked=asked), of_folder(place / "tiny-mpnet")
    )
    (batch,) = run.batches
    assert batch.shape == (3, encoders.LENGTH)
    # What rounding does is kept for a run that goes on with this one.
    found = encoders.rounding(run, case := Case(SCHEME, None))
    monkeypatch.setattr(encoders, "quantized", lambda *_: pytest.fail("measured again"))
    assert encoders.rounding(replace(run, judged={}), case) == found


def test_the_share_is_of_rounding_distance():
    ours, rounding = (Judged([x, 3 * x], [], {}, (0, 0)) for x in (1.0, 4.0))
    assert recovered(ours, rounding)[RECOVERED] == (75.0, "%")
