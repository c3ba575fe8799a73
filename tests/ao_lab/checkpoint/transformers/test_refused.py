"""Without `import ao_lab` transformers refuses folders in our layout, of every architecture, and says what to do."""

import json

import pytest

from ao_lab import save_pretrained
from ao_lab.checkpoint.api import REFUSAL

pytest.importorskip("transformers")
from tests.support.models.hf_models import KINDS, quantized_model
from tests.support.runs import forks

#: In a process that has not imported ao_lab and cannot, wherever it is installed: every way to a model, and what came of it.
SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.modules["ao_lab"] = None
import transformers
told = {}
def tried(name, load, *args, **kwargs):
    try:
        told[name] = type(load(*args, **kwargs)).__name__
    except Exception as error:
        told[name] = [type(error).__name__, str(error)]
for kind, folder in json.loads(sys.argv[1]).items():
    tried(kind, getattr(transformers, kind).from_pretrained, folder)
    tried(kind + " trunk", transformers.AutoModel.from_pretrained, folder)
folder = json.loads(sys.argv[1])["LlamaForCausalLM"]
auto = transformers.AutoModelForCausalLM
tried("pipeline", transformers.pipeline, "text-generation", model=folder)
tried("safetensors", auto.from_pretrained, folder, use_safetensors=True)
tried("pickles", auto.from_pretrained, folder, use_safetensors=False)
tried("variant", auto.from_pretrained, folder, variant="fp16")
tried("configuration of one's own", auto.from_pretrained, folder, config=transformers.LlamaConfig())
tried("another head", transformers.AutoModelForSequenceClassification.from_pretrained, folder)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What transformers says without ao_lab, by what was tried."""
    root = tmp_path_factory.mktemp("folders")
    folders = {}
    for kind in KINDS:
        folders[kind] = str(root / kind)
        limit = 50_000 if kind == "GPT2LMHeadModel" else 10**9
        save_pretrained(
            quantized_model(kind, "nf4")[0], folders[kind], layout="ao_lab", max_shard_bytes=limit
        )
    done = forks.python("-c", SCRIPT, json.dumps(folders), server="transformers", cwd=root)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-200:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 2 * len(KINDS) + 6
    return found


def test_nothing_is_loaded(told):
    assert [name for name, what in told.items() if not isinstance(what, list)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_says_what_to_do(kind, told):
    for name in (kind, f"{kind} trunk"):
        assert told[name][0] in ("ValueError", "OSError")
        assert REFUSAL in told[name][1]


def test_other_ways(told):
    for name in ("pipeline", "safetensors", "pickles", "variant", "another head"):
        assert REFUSAL in told[name][1], name
    # There the folder's configuration is not read: the files are missing by their names.
    assert "no file named model.safetensors" in told["configuration of one's own"][1]
