"""`ao-lab plot`: files are written and say what they show; wrong inputs are one line, and nothing is written."""

import json

import numpy as np
import pytest

from ao_lab.cli.app import main
from tests.support.models.hf_models import save_llama

pytest.importorskip("matplotlib")


def test_figures_of_formats(tmp_path, capsys):
    out = tmp_path / "new" / "values.svg"
    assert main(["plot", "values", "int4", "-o", str(out)]) == 2
    assert f"there is no folder {out.parent}" in capsys.readouterr().err
    out.parent.mkdir()
    assert main(["plot", "values", "float4_e2m1fn", "int4", "--out", str(out), "--theme", "dark"]) == 0
    assert "Values of float4_e2m1fn, int4." in out.read_text()
    assert str(out) in capsys.readouterr().out
    assert main(["plot", "error", "mxfp4", "--octaves", "4", "-o", str(tmp_path / "error.png")]) == 0
    assert (tmp_path / "error.png").read_bytes().startswith(b"\x89PNG")


def test_figures_of_tensors_and_models(tmp_path, capsys):
    pytest.importorskip("transformers")
    save_llama(tmp_path / "model")
    out = str(tmp_path / "schemes.svg")
    assert (
        main(["plot", "schemes", str(tmp_path / "model"), "--scheme", "int8_rowwise", "-o", out, "--json"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["figure"] == out
    assert 0 < told["schemes"]["int8_rowwise"]["error"] < 0.02
    name = "model.layers.0.mlp.up_proj.weight"
    out = str(tmp_path / "tensor.svg")
    assert (
        main(["plot", "tensor", str(tmp_path / "model"), "--name", name, "--scheme", "mxfp4", "-o", out]) == 0
    )
    assert f"scales of {name} in mxfp4" in (tmp_path / "tensor.svg").read_text()
    capsys.readouterr()
    assert (
        main(["plot", "tensor", str(tmp_path / "model"), "--name", "up_proj", "--scheme", "mxfp4", "-o", out])
        == 2
    )
    assert f"unknown tensor 'up_proj'; the nearest is {name}" in capsys.readouterr().err


def test_a_name_stands_for_the_folder_that_was_made(tmp_path, monkeypatch, capsys):
    """As in every other command that takes a model's folder; a mistyped one gets the nearest."""
    pytest.importorskip("transformers")
    save_llama(tmp_path / "model")
    monkeypatch.setattr("ao_lab.cli.options.made", lambda name: tmp_path / name)
    out = str(tmp_path / "schemes.svg")
    assert main(["plot", "schemes", "model", "--scheme", "int8_rowwise", "-o", out]) == 0
    monkeypatch.undo()
    for command in (["plot", "schemes"], ["compare"], ["export"]):
        rest = ["-o", out] if command[0] == "plot" else ["x.gguf"]
        assert main([*command, "smolm2-135m", *rest]) == 2
        assert "the nearest is smollm2-135m" in capsys.readouterr().err


def test_figures_of_comparisons(tmp_path):
    from ao_lab.measure.comparison import Compared, Comparison

    rows = (Compared("unquantized", bytes=16, loss=2.0), Compared("nf4", bytes=5, loss=2.5, difference=0.5))
    told = Comparison("m", rows, {"text": "a text"}).to_dict()
    (tmp_path / "comparison.json").write_text(json.dumps(told))
    assert main(["plot", "comparison", str(tmp_path), "-o", str(tmp_path / "x.svg")]) == 0
    assert ">nf4<" in (tmp_path / "x.svg").read_text()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["values", "float4", "-o", "x.svg"], "unknown format 'float4'; the nearest are float4_e2m1fn"),
        (["values", "int4", "-o", "x.jpg"], "ends in .svg, .png, .pdf"),
        (["schemes", "nowhere", "-o", "x.svg"], "nowhere is no folder of a model"),
        (["schemes", ".", "-o", "x.svg"], "has no config.json"),
        (["schemes", "w.npy", "--scheme", "mxfp5", "-o", "x.svg"], "unknown scheme 'mxfp5'"),
        (["comparison", "nowhere", "-o", "x.svg"], "nowhere is no file; ao-lab compare"),
        (["comparison", "w.json", "-o", "x.svg"], "this is no comparison"),
        (["tensor", "v.npy", "--scheme", "mxfp4", "-o", "x.svg"], "v.npy is no file"),
        (["tensor", "t.txt", "--scheme", "mxfp4", "-o", "x.svg"], "no .safetensors file"),
        (["tensor", "w.npy", "--scheme", "int4_g128", "-o", "x.svg"], "not divisible by the block size 128"),
        (
            ["tensor", "n.npy", "--scheme", "mxfp4", "-o", "x.svg"],
            "the tensor is of int64; give one of floats",
        ),
        (
            ["schemes", "n.npy", "--scheme", "mxfp4", "-o", "x.svg"],
            "the tensor is of int64; give one of floats",
        ),
        (["tensor", "b.npy", "--scheme", "mxfp4", "-o", "x.svg"], "b.npy cannot be read"),
        (["comparison", "b.json", "-o", "x.svg"], "b.json cannot be read"),
    ],
)
def test_wrong_inputs(tmp_path, monkeypatch, capsys, given, said):
    monkeypatch.chdir(tmp_path)
    np.save("w.npy", np.ones((4, 96), np.float32))
    np.save("n.npy", np.ones((4, 96), np.int64))
    (tmp_path / "w.json").write_text("{}")
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "b.npy").write_text("")
    assert main(["plot", *given]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("x.*"))


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_a_fault_of_drawing_is_no_wrong_input(tmp_path, monkeypatch, kind):
    """It keeps its traceback, and no file has been made."""
    from ao_lab import plot

    def broken(*formats, **options):
        raise kind("shapes do not match")

    monkeypatch.setattr(plot, "values", broken)
    with pytest.raises(kind, match="shapes do not match") as found:
        main(["plot", "values", "int4", "-o", str(tmp_path / "x.svg")])
    assert type(found.value) is kind
    assert not list(tmp_path.iterdir())
