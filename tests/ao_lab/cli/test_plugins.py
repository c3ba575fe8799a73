"""`ao-lab --import FILE`: formats and schemes of one's own on the command line; models by their names."""

from pathlib import Path

import pytest

from ao_lab.cli.app import main
from ao_lab.cli.options import model_folder
from ao_lab.measure.evaluate import name_of
from experiments.models.pretrained import FACTS, MODELS
from reference.formats import formats
from reference.schemes import schemes


def test_a_file_of_ones_own_registers_schemes_first(tmp_path, capsys, monkeypatch):
    for names in (formats.FORMATS, schemes.SCHEMES):  # what is registered here is forgotten behind the test
        for name in ("imported_levels", "imported_scheme"):
            monkeypatch.setitem(names, name, None)
            del names[name]
    (tmp_path / "mine.py").write_text(
        "import ao_lab\n"
        "f = ao_lab.register(ao_lab.Format(name='imported_levels', kind='codebook', bits=1, table=(-1.0, 1.0)))\n"
        "ao_lab.register(ao_lab.Scheme(name='imported_scheme', element=f, scale=ao_lab.Scale(block=32, target=1.0)))\n"
    )
    assert main(["schemes", "imported_scheme"]) == 2
    assert main(["--import", str(tmp_path / "mine.py"), "schemes", "imported_scheme"]) == 0
    assert "imported_levels" in capsys.readouterr().out
    (tmp_path / "wrong.py").write_text(
        "import ao_lab\nao_lab.Format(name='x', kind='codebook', bits=1, table=(1.0,))\n"
    )
    for name, said in (("wrong.py", "a codebook of 1 bits"), ("none.py", "is no file; give a Python file")):
        assert main(["--import", str(tmp_path / name), "schemes"]) == 2
        assert said in capsys.readouterr().err


def test_a_name_is_a_model_in_every_command(tmp_path, capsys, monkeypatch):
    """owner/name of the Hub's cache, and a name of `ao-lab pretrained`; one that has not been made says how it is."""
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--me--tiny"
    snapshot = place / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    assert model_folder("me/tiny") == snapshot
    assert name_of(snapshot) == "tiny", "the name that experiments have in their tables"
    (tmp_path / "fetched-0a1b").mkdir()
    (tmp_path / "fetched-0a1b" / "README.md").write_text("---\nmodel_id: me/Tiny-1B\n---\n")
    assert name_of(tmp_path / "fetched-0a1b") == "Tiny-1B"
    assert model_folder("me/other") == Path("me/other")
    monkeypatch.setattr("experiments.models.pretrained.default_cache", lambda: tmp_path)
    for command in (
        ["quantize", "smollm2-135m", str(tmp_path / "out"), "--config", "mxfp4"],
        ["eval", "smollm2-135m"],
    ):
        assert main(command) == 2
        assert (
            "smollm2-135m is not in the cache; ao-lab pretrained smollm2-135m fetches it"
            in capsys.readouterr().err
        )
    record = MODELS["smollm2-135m"]
    (tmp_path / "pretrained" / record.key).mkdir(parents=True)
    (tmp_path / "pretrained" / record.key / FACTS).write_text("{}")
    assert model_folder("smollm2-135m") == tmp_path / "pretrained" / record.key
