"""`ao-lab probe`: the table, its JSON, the figure, and wrong input."""

import json

import numpy as np
import pytest
import torch

from ao_lab import ProbeReport
from ao_lab.cli.app import main
from ao_lab.probe.report import SiteErrors, SiteLine
from tests.ao_lab.cli.test_choose import folder  # noqa: F401  a small Llama and a text

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """A small vision transformer, and images."""
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16,
        patch_size=8, num_labels=4,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("vision")
    transformers.utils.logging.disable_progress_bar()
    transformers.ViTForImageClassification(config).save_pretrained(path)
    images = np.random.default_rng(0).standard_normal((24, 3, 16, 16))  # float64, as NumPy has it
    np.savez(path / "images.npz", pixel_values=images)
    return path


def test_a_table_of_sites(folder, tmp_path, capsys):  # noqa: F811
    out, figure = tmp_path / "probe.json", tmp_path / "probe.png"
    words = ["--data", str(folder / "words.txt"), "--windows", "16", "--length", "24", "--tokens", "64"]
    more = ["--candidate", "nf4", "--candidate", "Int8DynamicActivationInt8WeightConfig", "--skip", "lm_head"]
    assert main(["probe", str(folder), *words, *more, "-o", str(out), "--plot", str(figure)]) == 0
    said = capsys.readouterr().out
    report = ProbeReport.from_json(out)
    assert report.candidates == ("nf4", "Int8DynamicActivationInt8WeightConfig")
    assert len(report.sites) == 14
    assert "14 sites are safe" in said.replace("\n", " ")
    assert "self_attn.q_proj" in said
    assert figure.stat().st_size > 1000


def test_a_vision_transformer(vision, capsys, tmp_path):
    """Images, and what has moved since an earlier report, one of whose errors is made another here."""
    data, first = ["--data", str(vision / "images.npz"), "--tokens", "64"], tmp_path / "first.json"
    assert main(["probe", str(vision), *data, "--out", str(first)]) == 0
    assert "moved" not in capsys.readouterr().out
    before = json.loads(first.read_text())
    ratio = before["sites"][1]["candidates"]["rowwise"]["norm_ratio"]
    ratio[:] = [2 * ratio[0], *ratio[1:]]
    (tmp_path / "other.json").write_text(json.dumps(before))
    assert main(["probe", str(vision), *data, "--json", "--compare", str(tmp_path / "other.json")]) == 0
    told = json.loads(capsys.readouterr().out)
    (moved,) = told["moved"]
    assert (moved["site"], moved["candidate"]) == (before["sites"][1]["name"], "rowwise")
    assert float(moved["error now"]) == pytest.approx(float(moved["error before"]) / 2, rel=1e-3)
    assert float(moved["standard errors"]) < -5
    # A report that cannot be compared is written all the same.
    before["sites"] = before["sites"][1:]
    (tmp_path / "fewer.json").write_text(json.dumps(before))
    again = ["--out", str(tmp_path / "again.json"), "--compare", str(tmp_path / "fewer.json")]
    assert main(["probe", str(vision), *data, *again]) == 2
    assert "is of other sites" in capsys.readouterr().err
    assert ProbeReport.from_json(tmp_path / "again.json").candidates == ("rowwise",)
    report = ProbeReport.from_json(json.dumps(told))
    assert report.candidates == ("rowwise",)
    names = {line.name.rpartition(".")[2] for line in report.sites}
    assert {"classifier"} < names
    # Four classes are no multiple of sixteen, and recipes take any number of outputs.
    assert all(0 < line.candidates["rowwise"].norm_ratio.value < 0.1 for line in report.sites)
    assert report.models["rowwise"].measured > 0


def test_wrong_input(folder, vision, tmp_path, capsys, monkeypatch):  # noqa: F811
    text = ["--data", str(folder / "words.txt")]
    (tmp_path / "none.json").write_text("{}")
    sites = [SiteLine("of another model", (4, 4), 1, 1.0, {"nf4": SiteErrors()})]
    ProbeReport(tuple(sites)).to_json(tmp_path / "other.json")
    monkeypatch.setattr(
        "ao_lab.probe.api.probe_", lambda *_, **__: pytest.fail("measured before it was refused")
    )
    np.savez(tmp_path / "odd.npz", images=np.zeros((2, 3, 16, 16), np.float32))
    for arguments, said in (
        ([str(folder), *text, "--candidate", "rowwyse"], "rowwyse"),
        ([str(folder), "--data", str(tmp_path / "none.npz")], "is no file"),
        ([str(vision), "--data", str(tmp_path / "odd.npz")], "has no argument images; it takes pixel_values"),
        ([str(vision), *text], "takes a .safetensors or .npz of its"),
        ([str(tmp_path), *text], "config.json"),
        ([str(folder), *text, "--compare", str(tmp_path / "none.json")], "--compare"),
        (
            [str(folder), *text, "--compare", str(tmp_path / "other.json")],
            "no candidate of this one: nf4 there",
        ),
    ):
        assert main(["probe", *arguments]) == 2
        assert said in capsys.readouterr().err
