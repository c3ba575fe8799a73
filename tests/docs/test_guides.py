"""The pages as a stranger types them: Python blocks, commands, names; and the words that they do not use."""

import csv
import importlib.util
import json
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import torch

import ao_lab
from tests.ao_lab.checkpoint.formats.test_compressed_tensors import packed_folder
from tests.support.models.hf_models import save_llama
from tests.support.runs import forks

ROOT = Path(__file__).resolve().parents[2]
#: Pages for users; others are about the repository.
PAGES = sorted(
    path
    for path in (ROOT / "docs").rglob("*.md")
    if path.name not in ("ARCHITECTURE.md", "SECURITY.md") and "generated" not in path.parts
)
TEXTS = [ROOT / "README.md", *PAGES]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOTTED = re.compile(r"\b(?:ao_lab|reference|fast)(?:\.(?!py\b)[A-Za-z_]\w*)+")
WITH_BLOCKS = [path for path in PAGES if "```python\n" in path.read_text()]
#: Before blocks that speak of a model without loading one: a dense one, and inputs.
DENSE = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("MODEL_DIR").eval()
tokens = torch.arange(20).reshape(2, 10)
step = model.forward
"""
#: Each page with variables of its own.
RUN = """
import json, sys, traceback, warnings
warnings.simplefilter("ignore")
for page, text in json.load(open("pages.json")):
    try:
        exec(compile(text, page, "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        sys.exit(f"{page} does not run")
"""
#: What transformers alone computes is what ao_lab computed.
ALONE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from transformers import AutoModelForCausalLM
assert "ao_lab" not in sys.modules
with torch.no_grad():
    found = AutoModelForCausalLM.from_pretrained("OUT_DIR").eval()(torch.arange(20).reshape(2, 10)).logits
assert torch.equal(found, torch.load("out.pt")), "transformers computes another model"
"""
#: Words with a meaning of this project alone, in which no page explains itself.
PRIVATE = re.compile(
    r"stand-in|\btold\b|\bwhoever\b|\bhas the bits\b|\bbits of (?:the|its)\b|\bcodes by codes\b"
    r"|\bplain (?:reader|step|layer|transformers)\b"
    r"|\bproducts? of (?:one|the|a|inputs|codes|few|many)\b|\bby rows\b|\bso has\b|\bare too\b|\bgo by\b",
    re.IGNORECASE,
)


def blocks(page, language):
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def run(folder, *arguments):
    """`python` with these arguments, in a process that has imported transformers and nothing of ours."""
    done = forks.python(*arguments, server="transformers", cwd=folder)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def program(page, count=None):
    """The first blocks of a page, or all, one after the other."""
    script = ""
    for text in blocks(page, "python")[:count]:
        script += DENSE if re.search(r"\bmodel\b", text) and "from_pretrained" not in text else ""
        script += "import ao_lab\n" + text
    return script


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the stranger sits: a model in MODEL_DIR, one of another library in GPTQ_DIR."""
    pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    where = tmp_path_factory.mktemp("stranger")
    save_llama(where / "MODEL_DIR")
    (where / "README.txt").write_text("a text of one's own " * 20)
    packed_folder(where / "GPTQ_DIR", "gptq")
    return where


def test_the_first_block_of_each_page(folder):
    """In one process, each with variables of its own; the blocks behind it run at night."""
    assert len(WITH_BLOCKS) >= 20
    pages = [(path.name, program(path, 1)) for path in WITH_BLOCKS]
    (folder / "pages.json").write_text(json.dumps(pages))
    run(folder, "-c", RUN)


@pytest.mark.nightly
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda path: path.stem)
def test_all_blocks_of_a_page(folder, page):
    """Alone in its process."""
    (folder / "pages.json").write_text(json.dumps([(page.name, program(page))]))
    run(folder, "-c", RUN)


def test_commands_of_the_first_steps(folder):
    """As they stand, then transformers alone on what they have written."""
    lines = [line for text in blocks(ROOT / "docs" / "get_started.md", "") for line in text.splitlines()]
    typed = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("ao-lab ")]
    assert [one[0] for one in typed] == ["quantize", "eval"]
    shown = "".join(run(folder, "-m", "ao_lab", *one) for one in typed)
    assert "layout: compressed-tensors" in shown
    model = ao_lab.load_pretrained(folder / "OUT_DIR").eval()
    with torch.no_grad():
        torch.save(model(torch.arange(20).reshape(2, 10)).logits, folder / "out.pt")
    run(folder, "-c", ALONE)


def typed_commands():
    """Command lines of all pages."""
    for page in TEXTS:
        for text in blocks(page, ""):
            for line in text.splitlines():
                if "ao-lab " in line:
                    yield page, line[line.index("ao-lab ") :]


def unknown(line, commands):
    """Words of a command line that its command does not have."""
    words = shlex.split(line, comments=True)[1:]
    if words[0] in {name for one in commands.params for name in one.opts}:  # of the program, with its value
        words = words[2:]
    context = commands.make_context("ao-lab", [], resilient_parsing=True)
    named = words[0] in commands.list_commands(context)
    command = commands.get_command(context, words[0]) if named else None
    if command is None:
        return words[:1]
    if hasattr(command, "commands"):
        return unknown(" ".join(["ao-lab", *map(shlex.quote, words[1:])]), command)
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    return [word for word in words[1:] if word.startswith("-") and word not in known]


def test_commands_have_their_options():
    import typer

    from ao_lab.cli import app

    commands = typer.main.get_command(app.app)
    lines = list(typed_commands())
    assert len(lines) > 35
    assert [(page.name, line) for page, line in lines if unknown(line, commands)] == []
    assert unknown("ao-lab eval OUT --no-such", commands) == ["--no-such"]
    assert unknown("ao-lab evaluate OUT", commands) == ["evaluate"]
    assert unknown("ao-lab --import FILE evaluate OUT", commands) == ["evaluate"]


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.stem)
def test_dotted_names_exist(page):
    """Of text and of blocks that no test runs, too."""
    assert [name for name in sorted(set(DOTTED.findall(page.read_text()))) if not exists(name)] == []


def exists(name):
    """Whether a dotted name is that of a module, also one whose extra is not installed, or in one."""
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ModuleNotFoundError):
        return importlib.util.find_spec(name) is not None
    return True


def test_a_name_that_is_not_there_is_seen():
    assert not exists("ao_lab.no_such_name")


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.stem)
def test_links_lead_to_files(page):
    """Of the repository, as they are read there; the builder of the site looks at anchors too."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.stem)
def test_words_are_those_of_the_field(page):
    assert PRIVATE.findall(page.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "A configuration has the bits of the default schemes",
        "int8 by rows",
        "Stand-ins alone",
        "products of one input",
    ],
)
def test_a_private_word_is_seen(text):
    assert PRIVATE.search(text)


def test_times_of_calibration_are_those_of_the_rows():
    """The table of calibrate.md, seconds of an H200."""
    rows = csv.DictReader((ROOT / "reports" / "data" / "calibration.csv").read_text().splitlines())
    setting = ("real SmolLM2-135M-Instruct/full/model", "int4_g64", "time to quantize")
    found = {
        row["method"]: float(row["value"])
        for row in rows
        if (row["table"], row["setting"], row["metric"]) == setting
    }
    page = (ROOT / "docs" / "guides" / "calibrate.md").read_text()
    for method, name in (("gptq", "GPTQ"), ("awq + gptq", "AWQ, GPTQ")):
        assert f"| H200 | {name} | 131,072 tokens | {found[method]:.0f} s |" in page
