"""Cards of every architecture: class, task of the Hub, code that a stranger can paste, and vLLM where it serves the model."""

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from ao_lab import SchemeConfig, quantize_, save_pretrained
from ao_lab.checkpoint.model_card import CARD, SERVED_ARCHITECTURES, TASKS, is_ours, loader_of, model_card

transformers = pytest.importorskip("transformers")
yaml = pytest.importorskip("yaml")
from tests.ao_lab.quantization.test_models import MODELS  # noqa: E402
from tests.support.models.hf_models import dense_model, outputs, quantized_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
transformers.utils.logging.disable_progress_bar()
#: Class, auto class, task, whether vLLM serves it in compressed-tensors' formats.
CARDS = [
    ("LlamaForCausalLM", "AutoModelForCausalLM", "text-generation", True),
    ("GPT2LMHeadModel", "AutoModelForCausalLM", "text-generation", False),
    ("BertForMaskedLM", "AutoModelForMaskedLM", "fill-mask", False),
    ("WhisperForConditionalGeneration", "AutoModelForSpeechSeq2Seq", "automatic-speech-recognition", False),
    ("ViTForImageClassification", "AutoModelForImageClassification", "image-classification", False),
    ("T5ForConditionalGeneration", "AutoModelForSeq2SeqLM", None, False),
    ("Wav2Vec2ForCTC", "AutoModelForCTC", "automatic-speech-recognition", False),
    ("CLIPVisionModelWithProjection", "CLIPVisionModelWithProjection", None, False),
]


def matter_of(card):
    return yaml.safe_load(card.split("---\n", 2)[1])


def run(card, folder):
    """The models of a card's blocks of Python, each run as it stands."""
    made = []
    for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        names = {}
        exec(block, names)
        made.append(names["model"])
    return made


@pytest.mark.parametrize(("kind", "auto", "task", "served"), CARDS, ids=lambda x: str(x))
def test_code_of_every_architecture(kind, auto, task, served, tmp_path, monkeypatch):
    """In our layout and in compressed-tensors'. What is loaded is of the class that was saved, and computes."""
    monkeypatch.chdir(tmp_path)
    model, inputs = dense_model(kind)
    quantize_(model, SchemeConfig(scheme="int8_rowwise"))
    linear = any(isinstance(m, nn.Linear) for m in model.modules())
    # transformers cannot load T5 and Wav2Vec2 with packed weights (tests/ao_lab/checkpoint/test_loadable.py).
    ours = not linear or kind in ("GPT2LMHeadModel", "T5ForConditionalGeneration", "Wav2Vec2ForCTC")
    for layout in ("ao_lab",) if ours else ("ao_lab", "compressed-tensors"):
        save_pretrained(model, tmp_path / "little", layout=layout)
        card = (tmp_path / "little" / CARD).read_text()
        assert matter_of(card).get("pipeline_tag") == task
        assert f"from transformers import {auto}" in card
        assert ("vllm serve little" in card) == (served and layout == "compressed-tensors")
        loaded = run(card, tmp_path)
        assert [type(m).__name__ for m in loaded] == [kind, kind]
        if layout == "ao_lab":
            assert all(torch.equal(outputs(m, inputs), outputs(model, inputs)) for m in loaded)
        assert ("is not among the models that vLLM lists" in card) == (
            not served and layout == "compressed-tensors"
        )


def test_a_stranger_pastes_it(tmp_path):
    """In a process of its own, which knows the folder and nothing else."""
    save_pretrained(quantized_model("BertForMaskedLM", "nf4")[0], tmp_path / "little", layout="ao_lab")
    block = re.search(r"```python\n(.*?)```", (tmp_path / "little" / CARD).read_text(), re.DOTALL)[1]
    script = (
        block
        + "\nprint(type(model).__name__, type(model.bert.encoder.layer[0].output.dense.weight).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split() == ["BertForMaskedLM", "QuantizedTensor"], done.stderr[-2000:]


def test_dtype_is_explained(tmp_path):
    """Scales in float32 are rounded by readers of a bfloat16 model; power-of-two scales are not."""
    for scheme, said in (("int8_rowwise", True), ("mxfp4", False)):
        save_pretrained(quantized_model("LlamaForCausalLM", scheme)[0], tmp_path, layout="compressed-tensors")
        assert ("float32 scales" in (tmp_path / CARD).read_text()) == said
    save_pretrained(quantized_model("LlamaForCausalLM", "nf4")[0], tmp_path, layout="ao_lab")
    assert "`dtype=` is what layers compute in" in (tmp_path / CARD).read_text()


def test_cards_of_others_stay(tmp_path):
    """save_pretrained writes over its own cards alone."""
    model, _ = quantized_model("LlamaForCausalLM", "nf4")
    saved = save_pretrained(model, tmp_path, layout="ao_lab")
    assert tmp_path / CARD in saved.files
    assert is_ours((tmp_path / CARD).read_text())
    (tmp_path / CARD).write_text("# A card of one's own\n")
    saved = save_pretrained(model, tmp_path, layout="ao_lab")
    assert tmp_path / CARD not in saved.files
    assert (tmp_path / CARD).read_text() == "# A card of one's own\n"


def test_models_of_ones_own(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64))
    quantize_(model, SchemeConfig(scheme="nf4"))
    save_pretrained(model, tmp_path / "little")
    card = model_card(tmp_path / "little")
    assert "`ao_lab.load_pretrained('little', model)` fills a model of the same structure." in card
    assert "pipeline_tag" not in matter_of(card)
    assert "```" not in card


def test_the_tables():
    """Every auto class and every served class is one of transformers'."""
    assert [name for name in TASKS if not hasattr(transformers, name)] == []
    assert [name for name in SERVED_ARCHITECTURES if not hasattr(transformers, name)] == []
    for kind, auto in (("MixtralForCausalLM", "AutoModelForCausalLM"), ("BertModel", "AutoModel")):
        given = {
            "model_type": kind.removesuffix("ForCausalLM").removesuffix("Model").lower(),
            "architectures": [kind],
        }
        assert loader_of(given).name == auto
    assert (
        loader_of({"model_type": "llama", "architectures": ["SomebodysLlama"]}).name == "AutoModelForCausalLM"
    )
    assert loader_of({"model_type": "llama"}).name == "AutoModelForCausalLM"
    assert loader_of({}) is None
    for kind in MODELS:
        fields = getattr(transformers, kind).config_class(**MODELS[kind][0]).to_dict()
        assert loader_of({**fields, "architectures": [kind]}) is not None
