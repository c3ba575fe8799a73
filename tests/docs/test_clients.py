"""docs/CLIENTS.md is its table, and the table is what clients do that are installed here."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def clients():
    """The program that writes the page."""
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("clients_page", ROOT / "docs" / "clients.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def test_the_page_is_the_table(clients):
    table = clients.rows()
    assert clients.page(table) == clients.PAGE.read_text(encoding="utf-8")
    pairs = [(client, scheme) for client in clients.CLIENTS for scheme in clients.SCHEMES]
    assert [(one["client"], one["scheme"]) for one in table] == pairs


def test_every_row_says_what_was_seen_and_none_is_another_model(clients):
    for one in clients.rows():
        assert one["outcome"] in clients.MARKS
        assert one["outcome"] != clients.WRONG, one
        assert one["version"]
        assert one["date"] >= "2026-11-29"
        seen = one["outcome"] in clients.OUTCOMES
        assert bool(one["difference"]) == seen
        assert bool(one["said"]) != seen


def test_seven_clients_load_and_agree(clients):
    agree = {one["client"] for one in clients.rows() if one["outcome"] in clients.OUTCOMES}
    assert len(agree) >= 7


@pytest.mark.parametrize(
    ("client", "scheme"),
    [
        ("transformers, GGUF", "mxfp4"),
        ("transformers, GGUF", "int8_rowwise"),
        pytest.param("PEFT", "nvfp4 by nvfp4", marks=pytest.mark.nightly),
    ],
)
def test_what_is_seen_now_is_what_the_table_says(clients, client, scheme):
    pytest.importorskip(clients.CLIENTS[client].module)
    (stored,) = (one for one in clients.rows() if (one["client"], one["scheme"]) == (client, scheme))
    now = clients.row(client, scheme)
    assert (now["outcome"], now["said"]) == (stored["outcome"], stored["said"])


@pytest.mark.nightly
def test_every_row_of_the_clients_that_are_installed(clients):
    """In one Python after the other: those that `make test` installs."""
    for one in clients.rows():
        if importlib.util.find_spec(clients.CLIENTS[one["client"]].module):
            assert clients.row(one["client"], one["scheme"])["outcome"] == one["outcome"], one


def test_another_model_is_seen(clients, monkeypatch):
    """A client that multiplies a weight by two."""

    def wrong(case):
        model = case.model
        model.model.layers[0].mlp.up_proj.weight.scale.mul_(2)
        return "all", model(case.ids).logits

    record = clients.CLIENTS["PEFT"]._replace(run=wrong)
    monkeypatch.setitem(clients.CLIENTS, "PEFT", record)
    assert clients.row("PEFT", "int8_rowwise")["outcome"] == clients.WRONG
