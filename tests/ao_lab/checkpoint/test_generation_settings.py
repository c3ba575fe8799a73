"""generation_config.json of `save_pretrained` and `load_pretrained`: what `generate()` is to do is a part of the model."""

import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ao_lab import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    compile_options,
    load_pretrained,
    prepare_for_generate_,
    quantize_,
    save_pretrained,
)
from ao_lab.checkpoint.model_builder import read_settings

transformers = pytest.importorskip("transformers")
from tests.support.models.hf_models import assert_same_weights, dense_model, quantized_model  # noqa: E402

# What importing Inductor says of torch's own modules.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
transformers.utils.logging.disable_progress_bar()
SETTINGS, PASS = "generation_config.json", "post_grad_custom_pre_pass"
CONFIGS = {
    "compressed-tensors": Int8DynamicActivationInt8WeightConfig().for_layout("compressed-tensors"),
    "ao_lab": Int8WeightOnlyConfig(),
}
CHAT = {"eos_token_id": [3, 5], "do_sample": True, "temperature": 0.6, "top_p": 0.9}


def chat_model(config=CONFIGS["ao_lab"], **settings):
    """A quantized Llama with generation settings of a chat model, or with others."""
    model, _ = dense_model("LlamaForCausalLM", dtype=torch.bfloat16)
    quantize_(model, config)
    for name, value in (settings or CHAT).items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.parametrize("layout", CONFIGS)
def test_settings_are_saved_and_read(layout, tmp_path):
    """As transformers writes them, in both layouts; the compile_config is left out; all readers have the same."""
    model = chat_model(CONFIGS[layout])
    prepare_for_generate_(model)
    saved = save_pretrained(model, tmp_path, layout=layout)
    assert saved.layout == layout
    assert [file.name for file in saved.files[1:]] == ["config.json", SETTINGS, "README.md"]
    model.generation_config.save_pretrained(tmp_path / "theirs")
    assert (tmp_path / SETTINGS).read_bytes() == (tmp_path / "theirs" / SETTINGS).read_bytes()
    ours = load_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for read in (ours, theirs):
        assert {name: getattr(read.generation_config, name) for name in CHAT} == CHAT
        assert read.generation_config.cache_implementation == "static"
        assert read.generation_config.compile_config is None
    assert ours.generation_config == theirs.generation_config
    # The model is as it was.
    assert PASS in model.generation_config.compile_config.options


def test_a_given_model_keeps_its_settings(tmp_path):
    model = chat_model()
    save_pretrained(model, tmp_path, layout="ao_lab")
    target, _ = dense_model("LlamaForCausalLM", dtype=torch.bfloat16)
    before = target.generation_config
    assert load_pretrained(tmp_path, target) is target
    assert target.generation_config is before
    assert before.eos_token_id != CHAT["eos_token_id"]


def test_models_without_settings(tmp_path):
    """No file for models of other libraries and for those that generate nothing; a folder without one is read as before."""
    plain = nn.Sequential(nn.Linear(64, 64))
    quantize_(plain, CONFIGS["ao_lab"])
    bert, _ = quantized_model("BertForMaskedLM", "int8_rowwise")
    for number, model in enumerate((plain, bert)):
        # Nor another model's, saved there before.
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / SETTINGS).write_text("{}")
        save_pretrained(model, tmp_path / str(number), layout="ao_lab")
        assert not (tmp_path / str(number) / SETTINGS).exists()
    save_pretrained(chat_model(), tmp_path / "chat", layout="ao_lab")
    (tmp_path / "chat" / SETTINGS).unlink()
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "chat")
    assert load_pretrained(tmp_path / "chat").generation_config == read.generation_config


@pytest.mark.parametrize(
    "wrong", [{"cache_implementation": "none"}, {"max_new_tokens": -1}, {"stop_strings": object()}]
)
@pytest.mark.parametrize("own", [True, False])
def test_settings_that_cannot_be_read_are_refused_before_any_file(wrong, own, tmp_path):
    """By transformers' own save_pretrained too."""
    model, folder = chat_model(**wrong), tmp_path / "out"
    told = r"model\.generation_config cannot be saved, and nothing has been written: .*; correct it"
    with pytest.raises(ValueError, match=f"(?s){told}"):
        save_pretrained(model, folder) if own else model.save_pretrained(folder)
    assert not folder.exists()


@pytest.mark.parametrize("own", [True, False])
def test_settings_that_are_ignored_are_saved_with_a_warning(own, tmp_path):
    """A temperature without do_sample is no reason to lose a quantized model."""
    model = chat_model(temperature=0.6)
    with pytest.warns(UserWarning, match=r"generate\(\) ignores a part of it.*(?s:.*)`temperature`") as told:
        save_pretrained(model, tmp_path, layout="ao_lab") if own else model.save_pretrained(tmp_path)
    assert not own or told[0].filename == __file__
    assert json.loads((tmp_path / SETTINGS).read_text())["temperature"] == 0.6
    read = load_pretrained(tmp_path)
    assert_same_weights(model, read)
    assert read.generation_config.temperature == 0.6
    # Unchanged since it was read, it is saved without a word, as transformers saves it.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_pretrained(read, tmp_path / "again", layout="ao_lab")
    assert (tmp_path / SETTINGS).read_text() == (tmp_path / "again" / SETTINGS).read_text()


def test_options_that_are_no_text_are_left_out(tmp_path):
    """transformers hashes what it saves, the compile_config with it, and cannot write such a model."""
    model = chat_model()
    model.generation_config.compile_config = transformers.CompileConfig(options=compile_options())
    save_pretrained(model, tmp_path, layout="ao_lab")
    assert load_pretrained(tmp_path).generation_config.eos_token_id == CHAT["eos_token_id"]


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        '{"eos_token_id": 1, "eos_token_id": 2}',
        '{"cache_implementation": "none"}',
        '{"max_new_tokens": "many"}',
        '{"validate": 1}',
        '{"__class__": {}}',
    ],
)
def test_wrong_files_are_refused(text, tmp_path):
    save_pretrained(chat_model(), tmp_path, layout="ao_lab")
    (tmp_path / SETTINGS).write_text(text)
    with pytest.raises(ValueError, match=rf"{SETTINGS}.*; fetch it again"):
        load_pretrained(tmp_path)


def test_a_compile_config_of_a_file_is_not_read(tmp_path):
    """It names a compiler."""
    save_pretrained(chat_model(), tmp_path, layout="ao_lab")
    fields = json.loads((tmp_path / SETTINGS).read_text())
    (tmp_path / SETTINGS).write_text(json.dumps({**fields, "compile_config": {"backend": "inductor"}}))
    assert load_pretrained(tmp_path).generation_config.compile_config is None


def test_a_setting_that_names_a_method_is_refused(tmp_path):
    """It would take the method's place in the settings of the model."""
    model = SimpleNamespace(generation_config=transformers.GenerationConfig())
    (tmp_path / SETTINGS).write_text('{"max_length": 7, "to_dict": "x"}')
    with pytest.raises(ValueError, match=r"to_dict.* is no setting"):
        read_settings(tmp_path, model)
    (tmp_path / SETTINGS).write_text('{"max_length": 7}')
    assert read_settings(tmp_path, model).max_length == 7
