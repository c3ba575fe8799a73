"""`ao-lab corpus`, and `--corpus` of the commands that train."""

import json
from types import SimpleNamespace

import pytest

from ao_lab.cli.app import main
from experiments.__main__ import main as module_main
from experiments.data import corpora as assemble
from experiments.harness.registry import Experiment
from tests.experiments.harness import tiny
from tests.support.models.hf_models import save_llama


def complaint(capsys, *arguments):
    """The one line on stderr of a command that refuses its input."""
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_corpora_are_listed_and_described(capsys):
    assert main(["corpus", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["default"], one["can_be_built"]) for one in listed] == [
        ("sympy", True, False),
        ("prose", False, True),
    ]
    assert main(["corpus", "prose"]) == 0
    out = capsys.readouterr().out
    for word in ("Standard Ebooks", "--corpus prose --corpus-path DIR", listed[1]["files"][0]["sha256"]):
        assert word in out


def test_what_cannot_be_built_says_why(capsys, monkeypatch, tmp_path):
    def offline(address, timeout):
        raise TimeoutError("nobody answers")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    err = complaint(capsys, "corpus", "prose", "--build", str(tmp_path / "out"))
    assert "nobody answers" in err
    assert not (tmp_path / "out").exists()
    assert "takes the name of a corpus" in complaint(capsys, "corpus", "--build", str(tmp_path))
    assert "not built" in complaint(capsys, "corpus", "sympy", "--build", str(tmp_path))
    assert "the corpora are sympy, prose" in complaint(capsys, "corpus", "prosa")
    assert assemble.TIMEOUT > 0


def test_reproduce_takes_a_corpus(capsys, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr("experiments.runs.run.reproduce", lambda names, **more: given.append(more) or [])
    monkeypatch.setattr("experiments.runs.run.load", lambda name, path: (name, path, tiny.corpus())[2])
    assert main(["reproduce", "ptq", "--corpus", "prose", "--corpus-path", str(tmp_path)]) == 0
    assert main(["reproduce", "ptq"]) == 0
    assert [one.get("text") for one in given] == [tiny.corpus(), None]
    capsys.readouterr()
    assert "the corpora are sympy, prose" in complaint(capsys, "reproduce", "ptq", "--corpus", "pros")


@pytest.mark.parametrize("arguments", [["--corpus", "pros"], ["ptq", "--corpus", "prose"]])
def test_the_module_refuses_as_well(capsys, arguments):
    assert module_main(arguments) == 2
    assert "prose" in capsys.readouterr().err


def test_what_was_found_of_ones_own_model_is_shown(capsys, monkeypatch, tmp_path):
    """The findings that name it, and where the page is; with --json one document alone."""
    save_llama(tmp_path / "Mine")
    page = SimpleNamespace(findings=lambda rows: ["Mine, perplexity +1.0%.", "Another, perplexity +9.0%."])
    monkeypatch.setattr(Experiment, "page_module", lambda self: page)
    monkeypatch.setattr("experiments.runs.run.reproduce", lambda names, **more: [])
    given = ["reproduce", "ptq", "--model", str(tmp_path / "Mine"), "--reports", str(tmp_path / "out")]
    assert main(given) == 0
    out, err = capsys.readouterr()
    assert "Mine, perplexity +1.0%." in out
    assert "Another" not in out
    assert "index.html" in err
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["written"], found["rows"]) == ([], [])
    assert found["findings"] == ["Mine, perplexity +1.0%."]
    page.findings = lambda rows: ["Another, perplexity +9.0%."]
    assert main(given) == 0
    assert "no finding: so few tokens" in capsys.readouterr().err
