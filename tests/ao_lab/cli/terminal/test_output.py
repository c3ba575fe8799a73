"""What is shown is shown whole: brackets and colons of names and commands are no markup."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ao_lab.cli import app
from ao_lab.cli import doctor as checks
from ao_lab.cli.terminal.output import WrongInput, console, print_table
from ao_lab.install.extras import is_clone

ROOT = Path(__file__).resolve().parents[4]
TRICKY = ("pip install -e '.[hf]'", "layers[0]", "[red]x[/red]", "[/]", ":smile:", "a\\[b]")


def test_tables_show_brackets(capsys):
    print_table("of [hf]", ["[name]", "v"], [[text, text] for text in TRICKY])
    out = capsys.readouterr().out
    assert "of [hf]" in out
    assert "[name]" in out
    assert [text for text in TRICKY if out.count(text) != 2] == []


def test_errors_show_brackets(monkeypatch, capsys):
    def refuse(*_):
        raise WrongInput("'[hf]' [/] :smile:")

    monkeypatch.setattr("ao_lab.cli.formats.show_formats", refuse)
    assert app.main(["formats", "int4"]) == 2
    assert capsys.readouterr().err == "ao-lab: '[hf]' [/] :smile:\n"
    assert app.main(["formats", "[hf]"]) == 2


@pytest.mark.parametrize("clone", [True, False])
def test_the_doctor_gives_commands_that_work(monkeypatch, capsys, clone):
    """From a wheel there is no clone to install, and no make."""
    assert is_clone()
    monkeypatch.setattr("ao_lab.install.extras.is_clone", lambda root=None: clone)
    monkeypatch.setattr("ao_lab.cli.doctor.is_clone", lambda: clone)
    find_spec = checks.importlib.util.find_spec
    absent = ("jax", "torchao", "transformers", "compressed_tensors", "lm_eval", "triton")
    monkeypatch.setattr(
        checks.importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name)
    )
    assert app.main(["doctor"]) == 0
    # Cells wrap: lines are put together by dropping what wraps them.
    out = capsys.readouterr().out
    for extra in ("hf", "jax", "ao", "eval"):
        assert (f"pip install -e '.[{extra}]'" in out) == clone
        assert (f"pip install 'ao_lab[{extra}]'" in out) == (not clone)
    assert ("make test" in out) == clone


def test_without_arguments_there_is_help_and_nothing_else():
    done = subprocess.run([sys.executable, "-m", "ao_lab"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "reproduce" in done.stdout + done.stderr
    assert "ao-lab: " not in done.stderr


def test_a_reader_that_leaves_is_no_error():
    """As in `ao-lab schemes | head -1`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "ao_lab", "schemes"], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_nothing_on_a_terminal_is_a_command_to_it(monkeypatch, capsys):
    """Names of layers and files are anybody's: no colours, titles, links or half surrogates."""
    name = "a\x1b]8;;http://evil\x07\x9b31m\u202e\udcff"
    told = "a\\x1b]8;;http://evil\\x07\\x9b31m\\u202e\\udcff"
    print_table(name, ["name"], [[name]])
    console().print(f"layout: {name}\nnext")

    def refuse(*_):
        raise WrongInput(name)

    monkeypatch.setattr(checks, "report", refuse)
    assert app.main(["doctor"]) == 2
    out, err = capsys.readouterr()
    assert (out.count(told), err) == (3, f"ao-lab: {told}\n")
    assert (out + err).replace("\n", "").isprintable()
