"""Other projects as arms: what a job says, which interpreter gets it, what comes back; the driver on a stand-in."""

import json
import os
import subprocess
import sys

import pytest
import torch

from experiments.calibration import page, run
from experiments.calibration.cases import ARMS, Case, peers_of
from experiments.calibration.peers import driver, exchange
from experiments.calibration.peers.records import INSTALL, PEERS, PeerScheme, bits_per_weight, peer_scheme
from experiments.data import texts
from experiments.harness.rows import table_parts
from experiments.models.causal_lm import Undivided
from experiments.runs.settings import RealModels, Settings

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

#: A package of the name and the calls that the driver makes of auto-round; weights are rounded to sixteenths.
STAND_IN = {
    "auto_round-0.16.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: auto-round\nVersion: 0.16.1\n",
    "auto_round/__init__.py": """
from torch import nn


class AutoRound:
    def __init__(self, model, tokenizer, scheme, dataset, seqlen, nsamples, batch_size, **more):
        ids = [batch["input_ids"] for batch in dataset]
        assert scheme["group_size"] == 64 and sum(map(len, ids)) == nsamples and ids[0].shape[1] == seqlen
        self.model, self.step = model, 2.0 ** -scheme["bits"]

    def quantize(self):
        for name, layer in self.model.named_modules():
            if isinstance(layer, nn.Linear) and name != "lm_head":
                layer.weight.copy_((layer.weight / self.step).round() * self.step)
        return self.model, {}
""",
}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """auto_round is importable in processes that are started."""
    for name, text in STAND_IN.items():
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"))
    exchange.interpreters.cache_clear()
    yield
    exchange.interpreters.cache_clear()


def settings(folder, tmp_path, *only):
    asked = RealModels(models=(str(folder),), windows=2, length=32)
    return Settings(
        scale="quick", device="cpu", cache=tmp_path, models=asked.models, asked=asked, only=only
    )  # fmt: skip


@pytest.fixture
def expected(monkeypatch):
    """Whether every weight that came back is what the stand-in makes of it: bit for bit."""
    seen, put = [], exchange.put_weights

    def spy(model, weights):
        before = {name: one.clone() for name, one in model.named_parameters()}
        put(model, weights)
        for name, one in model.named_parameters():
            is_layer = name.endswith("proj.weight")
            wanted = (before[name] / 2**-4).round() * 2**-4 if is_layer else before[name]
            seen.append(torch.equal(one, wanted))

    monkeypatch.setattr(exchange, "put_weights", spy)
    return seen


def test_a_peer_is_measured_from_its_own_process(folder, tmp_path, monkeypatch, stand_in, expected):
    """The driver's weights are those that the model is judged with, and a row names what computed them."""
    monkeypatch.delenv(texts.VARIABLE, raising=False)
    monkeypatch.setitem(run.SEQUENCES, "quick", 2)
    rows = run.run(settings(folder, tmp_path, "int4_g64_asymmetric", "auto-round"))
    assert len(expected) == 11, [row.metric for row in rows if row.metric.startswith("status")]
    assert all(expected)
    of = [row for row in rows if row.method == "auto-round"]
    assert {row.metric for row in of if row.metric.startswith("status")} == {"status: ok"}
    whole = {row.metric: row.value for row in of if table_parts(row.table)[2] == "model"}
    assert whole["bits per weight"] == 4 + 20 / 64
    assert whole["tokens seen"] == 2 * 64
    assert any(metric.startswith("computed by: auto-round 0.16.1; torch") for metric in whole)
    shares = {row.metric: row.value for row in of if table_parts(row.table)[2] != "model"}
    assert shares["KL"] > 0
    assert "KL, recovered" in shares
    (section,) = [one for one in page.sections(rows) if "tiny-llama" in one.title]
    (lines,) = [one.lines for one in section.tables if one.caption.endswith("other projects")]
    assert [line[:2] for line in lines] == [["int4_g64_asymmetric", "auto-round"]]
    assert any("Computed by auto-round 0.16.1" in text for text in section.paragraphs)


def test_what_fails_says_so_and_changes_nothing(folder, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho ValueError: no such group >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(exchange, "interpreters", lambda pythons: {"hqq": str(broken)})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    before = {name: one.clone() for name, one in model.named_parameters()}
    batches = [torch.zeros(1, 8, dtype=torch.int64)]
    with pytest.raises(RuntimeError, match="hqq ended with 3: ValueError: no such group"):
        exchange.quantized_by_peer("hqq library", PeerScheme(3, 64, False), model, folder, batches, 0, ())
    with pytest.raises(Undivided, match="groups of 96 leave"):
        exchange.quantized_by_peer("hqq library", PeerScheme(3, 96, False), model, folder, batches, 0, ())
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())


@pytest.mark.parametrize("broken", ["name", "shape", "nan"])
def test_weights_that_do_not_fit_are_refused_whole(broken):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 2, bias=False))
    before = [one.clone() for one in model.parameters()]
    weights = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    if broken == "name":
        del weights["1.weight"]
    else:
        weights["1.weight"] = torch.zeros(2, 2) if broken == "shape" else torch.full((2, 4), torch.nan)
    with pytest.raises(RuntimeError, match=r"do not fit the model: 1\.weight"):
        exchange.put_weights(model, weights)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


def test_an_absent_peer_is_a_row_with_the_command(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "interpreters", lambda pythons: {})
    assert peers_of(settings(folder, tmp_path), Case("int4_g64", None)) == []
    here = settings(folder, tmp_path, "auto-round")
    assert peers_of(here, Case("int4_g64", None)) == ["auto-round"]
    assert exchange.missing("auto-round", ()).endswith(
        "pip install auto-round==0.16.1, then --peer-python PATH"
    )


def test_an_interpreter_that_is_none():
    with pytest.raises(ValueError, match=r"--peer-python .*no-such-python cannot be run"):
        exchange.interpreters(("/no-such-python",))


def test_peers_are_measured_in_their_schemes_alone(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "interpreters", lambda pythons: {arm.peer: "" for arm in PEERS.values()})
    here = settings(folder, tmp_path)
    names = {
        scheme: peers_of(here, Case(scheme, None)) for scheme in ("int4_g64", "nvfp4", "fp8_rowwise", "nf4")
    }
    assert "hqq library" not in names["int4_g64"]
    assert "GPTQModel" in names["int4_g64"]
    assert set(names["nvfp4"]) == {name for name, arm in PEERS.items() if len(arm.elements) == 3} - {
        "auto-round, best"
    }
    assert names["fp8_rowwise"] == names["nf4"] == []
    assert peers_of(here, Case("mxfp4_rceil", "mxfp4_rceil")) == []
    assert peers_of(settings(folder, tmp_path, "gptq"), Case("int4_g64", None)) == []


@pytest.mark.parametrize(
    ("name", "scheme", "bits"),
    [
        ("int3_g64_asymmetric", PeerScheme(3, 64, False), 3 + 19 / 64),
        ("int4_g128", PeerScheme(4, 128, True), 4 + 16 / 128),
        ("int2_g64_asymmetric_bf16", PeerScheme(2, 64, False), 2 + 18 / 64),
        ("mxfp4_rceil", PeerScheme(4, 32, True, "mxfp4"), 4.25),
        ("nvfp4", PeerScheme(4, 16, True, "nvfp4"), 4.5),
        ("int8_rowwise", None, 0),
        ("hqq.int4_g64", None, 0),
        ("ternary_g32", None, 0),
        ("torchao.int4_g64_tinygemm", None, 0),
        ("mxfp8_e4m3_rceil", None, 0),
    ],
)
def test_schemes_of_peers(name, scheme, bits):
    assert peer_scheme(name) == scheme
    if scheme is not None:
        assert bits_per_weight(PEERS["auto-round"], scheme) == bits


def test_the_driver_knows_every_peer():
    assert (
        set(driver.WORK) == set(driver.DISTRIBUTIONS) == set(INSTALL) == {arm.peer for arm in PEERS.values()}
    )
    assert not set(PEERS) & set(ARMS)


def test_the_driver_imports_nothing_of_ours(tmp_path):
    """It must run where this project is not importable."""
    code = f"import runpy, sys; sys.argv = ['driver']; runpy.run_path({str(exchange.DRIVER)!r}, run_name='__main__')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)
