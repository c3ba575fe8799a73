"""`ao-lab reproduce decode --model DIR`: small checkpoints end to end, the loop beside generate(), and what is refused."""

import json
from dataclasses import replace

import pytest
import torch

from ao_lab.cli.app import main
from ao_lab.measure import memory
from ao_lab.measure.memory import by_transformers
from experiments.data import texts
from experiments.decode import real
from experiments.decode.real import DENSE_OWN, OwnLoop
from experiments.decode.real_page import IN_OWN, real_findings, real_sections
from experiments.harness.paths import Paths
from experiments.harness.rows import read
from experiments.models import causal_lm
from experiments.models.causal_lm import linears, of_folder
from experiments.report.real_runs import real_runs
from experiments.report.results import Results
from tests.support.models.hf_models import ARCHITECTURES, save_lm

pytest.importorskip("transformers")


def reproduce(folder, place, *only, patch):
    patch.setenv("AO_LAB_CACHE", str(place / "cache"))
    patch.delenv(texts.VARIABLE, raising=False)
    options = ["--reports", str(place / "reports"), "--device", "cpu", "--length", "32", "--json"]
    named = [word for name in only for word in ("--only", name)]
    code = main(["reproduce", "decode", "--model", str(folder), *named, *options])
    return code, read(Paths(place / "cache", place / "reports").rows("decode"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_lm(tmp_path_factory.mktemp("models") / "tiny", tied=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def rows(folder, place):
    """A configuration of ours, a scheme that no configuration serves, and one that leaves layers dense."""
    with pytest.MonkeyPatch.context() as patch:
        code, found = reproduce(folder, place, "int8wo", "int3_g32", "int4_g128", patch=patch)
    assert code == 0
    return found


def values(rows, data, method):
    return {
        row.metric: row.value
        for row in rows
        if row.table == f"real tiny/quick/{data}" and row.method == method
    }


def test_each_configuration_has_speeds_sizes_and_memory(rows):
    assert {row.table.split("/")[2] for row in rows} == {"model", "batch 1", "batch 4"}
    for method in ("bfloat16", "int8wo", "int3_g32"):
        whole = values(rows, "model", method)
        assert whole["status: ok"] == 1
        taken = [values(rows, batch, method)["memory of generating"] for batch in ("batch 1", "batch 4")]
        # Of the weights in memory, whose float32 scales may take more than those of files.
        assert whole["peak memory"] >= whole["size"] + max(taken)
        for batch in ("batch 1", "batch 4"):
            found = values(rows, batch, method)
            rates = [found[f"tokens/s, {loop}"] for loop in ("generate()", "own loop")]
            times = [found[f"time to first token, {loop}"] for loop in ("generate()", "own loop")]
            assert min(*rates, *times, found["threads"]) > 0
    for name in ("speedup of the own loop", "speedup of generate()"):
        eight = values(rows, "batch 4", "int8wo")
        assert eight[f"{name}, lowest"] <= eight[name] <= eight[f"{name}, highest"]
        assert name not in values(rows, "batch 4", "bfloat16")
    dense, eight = (values(rows, "model", method) for method in ("bfloat16", "int8wo"))
    assert eight["size"] < dense["size"]
    assert (dense["logits, change"], eight["logits, change"] > 0) == (0, True)
    # A tied head stays with the embedding: seven layers in each of two blocks.
    assert values(rows, "model", "file")["quantized layers"] == 14


def test_a_scheme_whose_blocks_divide_no_layer_says_so(rows):
    (reason,) = values(rows, "model", "int4_g128")
    assert reason.startswith("status: missing: int4_g128 leaves 12 of 14 layers dense")


def test_the_page_has_a_table_of_each_batch(rows):
    (section,) = real_sections(rows)
    captions = [table.caption.split("; timed with ") for table in section.tables]
    assert [len(one) for one in captions] == [1, 2, 2]
    assert [one[0] for one in captions] == [
        "tiny: size and memory",
        "tiny, batch 1",
        "tiny, batch 4",
    ]
    names = [line[0] for line in section.tables[1].lines]
    # torchao's configuration of that name is measured where it is installed.
    assert [name for name in names if "torchao" not in name] == ["bfloat16", "ours: int8wo", "ours: int3_g32"]
    assert "int4_g128" in " ".join(section.paragraphs)
    (finding,) = real_findings(rows)
    assert finding.startswith(
        "tiny, its own weights, batch 1 in this experiment's own loop (short run, CPU): bfloat16 "
    )


@pytest.mark.usefixtures("rows")
def test_what_was_measured_is_not_measured_again(folder, place, monkeypatch, capsys):
    monkeypatch.setattr(real, "measure", lambda *_: pytest.fail("measured again"))
    assert reproduce(folder, place, "int8wo", patch=monkeypatch)[0] == 0
    assert "0 of them measured now" in json.loads(capsys.readouterr().out)["written"][0]["what"]


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_loop_generates_the_tokens_of_generate(kind, tied, tmp_path):
    """Every architecture, with a head of its own or a tied one, and with windows that are shorter than the text."""
    model = causal_lm.load(of_folder(save_lm(tmp_path / kind, kind, tied=tied)), "cpu")
    assert ("lm_head" in linears(model)) is not tied
    prompt = torch.arange(2 * 9).reshape(2, 9) * 7 % 300
    loop = OwnLoop(model, prompt, new=6)
    for _ in range(2):
        _, _, ours = loop.generate()
        _, theirs = by_transformers(model, prompt, 6)
        assert ours.tolist() == theirs.tolist()


def test_windows_shorter_than_the_text_are_not_captured(tmp_path, monkeypatch):
    """What such a cache does is decided on the host, token by token."""
    model = causal_lm.load(of_folder(save_lm(tmp_path / "gemma", "gemma3")), "cpu")
    prompt = torch.zeros(1, 4, dtype=torch.int64)
    cuda = property(lambda tensor: True)
    loops = [OwnLoop(model, prompt, new) for new in (4, 5)]
    monkeypatch.setattr(torch.Tensor, "is_cuda", cuda)
    assert [loop.capturable for loop in loops] == [True, False]


def test_memory_is_what_was_taken_beyond_the_beginning(monkeypatch):
    peak = memory.Peak(torch.device("cpu"))
    peak.begin()
    held = torch.ones(100_000_000)
    del held
    over = peak.over()
    # Linux counts resident pages by processor and adds up late: by 134 MB at 128 processors.
    assert over is None or 200_000_000 < over < 800_000_000
    monkeypatch.setattr(memory, "STATUS", memory.STATUS.with_name("nowhere"))
    peak.begin()
    assert peak.over() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no weights", "holds no model of transformers (config.json and weights)"),
        ("no tokenizer", "has no tokenizer.json and its model has 320 tokens"),
        ("encoder", "is no language model but encoder"),
        ("unknown name", "unknown part 'int9wo' of decode; the nearest is int8wo"),
    ],
)
def test_what_is_no_model_is_refused(folder, tmp_path, monkeypatch, capsys, change, message):
    given, only = tmp_path / "given", ()
    given.mkdir()
    names = {one.name for one in folder.iterdir()}
    names -= {"no weights": {"model.safetensors"}, "no tokenizer": {"tokenizer.json"}}.get(change, set())
    for name in names:
        (given / name).write_bytes((folder / name).read_bytes())
    if change == "encoder":
        config = {**json.loads((given / "config.json").read_text()), "model_type": "bert"}
        (given / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    if change == "unknown name":
        only = ("int9wo",)
    assert reproduce(given, tmp_path, *only, patch=monkeypatch)[0] == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_rates_stand_beside_the_dense_models_in_turn(rows):
    """One pair of numbers for each ratio, on the page and in the finding; a dense model that was slower makes it noisy."""
    (section,) = real_sections(rows)
    table = section.tables[1]
    (line,) = [dict(zip(table.columns, one, strict=True)) for one in table.lines if one[0] == "ours: int8wo"]
    found = values([row for row in rows if row.setting == "ours"], "batch 1", "int8wo")
    for name, metric in ((", own loop", "own loop"), ("", "generate()")):
        rate = found[f"tokens/s, {metric}, bfloat16 in turn"]
        assert line[f"bfloat16 in turn{name} (tokens/s)"] == f"{rate:.1f}"
    assert (
        f"({found['tokens/s, own loop']:.1f} over {found[DENSE_OWN]:.1f} in turn tokens/s)"
        in real_findings(rows)[0]
    )
    results = real_runs(rows)[0].texts["batch 1"]
    calm = [replace(row, value=2.0) for row in results.rows if row.metric.startswith(IN_OWN.speedup)]
    rates = [
        replace(row, value=(50.0 if row.metric == DENSE_OWN else 100.0))
        for row in results.rows
        if row.metric in (DENSE_OWN, IN_OWN.rate) and row.method == "int8wo"
    ]
    others = [replace(row, method="other", value=80.0) for row in rates if row.metric == DENSE_OWN]
    line = ("ours", "int8wo")
    assert IN_OWN.told(Results([*calm, *rates]), line) == "2.00x"
    assert IN_OWN.told(Results([*calm, *rates, *others]), line) == "2.00x (noisy)"
