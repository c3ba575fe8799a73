"""What is saved of unusual models, and which model a folder is loaded into."""

import contextlib
import json
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ao_lab import (
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    NVFP4WeightOnlyConfig,
    QuantizedTensor,
    compile_options,
    load_pretrained,
    prepare_for_generate_,
    quantize_,
    save_pretrained,
)
from ao_lab.checkpoint import model_builder
from ao_lab.checkpoint.model_builder import fill, limited_time, read_settings

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
from tests.support.models.hf_models import assert_same_weights, dense_model, quantized_model  # noqa: E402

X = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
TINY = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
TOKENS = torch.arange(12).reshape(2, 6)


def layers(*names, outputs=128):
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(128, outputs, bias=False) for name in names})


def llama(kind="LlamaForCausalLM", **more):
    torch.manual_seed(0)
    # Not .to(bfloat16): that rounds tables of positions, which no file holds.
    config = transformers.LlamaConfig(**TINY, **more)
    model = getattr(transformers, kind)._from_config(config, dtype=torch.bfloat16).eval()
    quantize_(model, Int8WeightOnlyConfig())
    return model


def test_parts_in_common_are_not_one_weight(tmp_path):
    """The same codes read the other way round, or by another kernel, are other weights."""
    model = layers("a", "turned", "kernel")
    quantize_(model, Int8WeightOnlyConfig())
    weight = model["a"].weight.detach()
    model["turned"].weight = nn.Parameter(weight.t(), requires_grad=False)
    model["kernel"].weight = nn.Parameter(weight.with_recipe(kernel="reference"), requires_grad=False)
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(tmp_path, layers("a", "turned", "kernel"))
    assert loaded["kernel"].weight.recipe.kernel == "reference"
    with torch.no_grad():
        for name in model:
            assert torch.equal(loaded[name](X), model[name](X))


def test_models_without_numbers_are_refused(tmp_path):
    with torch.device("meta"):
        model = layers("a")
    quantize_(model, Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match="on the meta device, without values"):
        save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_have_a_size(tmp_path):
    model = layers("a")
    quantize_(model, Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match="max_shard_bytes is at least 1"):
        save_pretrained(model, tmp_path, max_shard_bytes=0)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    "config", [Int8WeightOnlyConfig(), Int8StaticActivationInt8WeightConfig(act_quant_scale=1.0)]
)
def test_layers_without_rows(tmp_path, config):
    model, other = (nn.Sequential(nn.Linear(128, 64), nn.Linear(128, 0)) for _ in range(2))
    quantize_(model, config)
    save_pretrained(model, tmp_path)
    load_pretrained(tmp_path, other)
    with torch.no_grad():
        assert torch.equal(other[0](X), model[0](X))
        assert other[1](X).shape == (4, 0)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaModel", {}),
        ("LlamaForSequenceClassification", {"pad_token_id": 0, "num_labels": 3}),
        ("LlamaForTokenClassification", {"num_labels": 5}),
    ],
)
def test_the_class_that_was_saved_is_built(tmp_path, kind, more):
    model = llama(kind, **more)
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(tmp_path)
    assert type(loaded) is type(model)
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS)[0], model(TOKENS)[0])


def test_one_row_has_the_sums_of_plain_transformers_by_its_kernel(tmp_path):
    """A pooler sees one row of a single text, for which a CPU has a kernel of ours; transformers dequantizes."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: name == "bert.pooler.dense")
    save_pretrained(model, tmp_path, layout="compressed-tensors")
    loaded, plain = load_pretrained(tmp_path), type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        for rows in (TOKENS, TOKENS[:1]):
            assert torch.equal(loaded(rows).logits, model(rows).logits)
        weight = loaded.bert.pooler.dense.weight.with_recipe(kernel="dequantize")
        loaded.bert.pooler.dense.weight = nn.Parameter(weight, requires_grad=False)
        assert torch.equal(loaded(TOKENS[:1]).logits, plain(TOKENS[:1]).logits)


@pytest.mark.parametrize(
    "architectures", [None, [], [3], ["pipeline"], ["AutoConfig"], ["NoSuchModel"], "LlamaModel", {"a": 1}]
)
def test_other_names_give_a_language_model(tmp_path, architectures):
    """Only models of transformers are classes that a file may name."""
    save_pretrained(llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
    assert type(load_pretrained(tmp_path)) is transformers.LlamaForCausalLM


def test_the_class_of_another_configuration_is_an_error(tmp_path):
    save_pretrained(llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    with pytest.raises(ValueError, match="give"):
        load_pretrained(tmp_path)


def test_dtypes_are_said_and_can_be_chosen(tmp_path):
    model = llama()
    save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    same, wide = load_pretrained(tmp_path), load_pretrained(tmp_path, dtype=torch.float32)
    assert {value.dtype for value in same.state_dict().values()} == {torch.bfloat16}
    assert {value.dtype for value in wide.state_dict().values()} == {torch.float32}
    for name, parameter in wide.named_parameters():
        ours = same.get_parameter(name)
        if isinstance(parameter, QuantizedTensor):
            assert torch.equal(parameter.codes, ours.codes)
        assert torch.equal(parameter.to(torch.bfloat16), ours)
    model.float()
    with torch.no_grad():
        assert torch.equal(wide(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("size", [3e38, 1e30, 1e-38])
def test_weights_of_any_size_come_back(tmp_path, size):
    model = layers("a")
    with torch.no_grad():
        model["a"].weight.mul_(size)
    quantize_(model, NVFP4WeightOnlyConfig())
    save_pretrained(model, tmp_path)
    assert torch.equal(load_pretrained(tmp_path, layers("a"))["a"].weight, model["a"].weight)


# Code on data of others ends in time, and only then is it stopped.


def count(most):
    done = 0
    while done < most:
        with contextlib.suppress(Exception):  # as libraries do
            done += 1
    return done


def test_what_takes_too_long_is_stopped():
    started = time.thread_time()
    with pytest.raises(ValueError, match="far too large"), limited_time(0.1, ValueError("far too large")):
        count(10**12)
    assert time.thread_time() - started < 1
    assert count(10**5) == 10**5  # nothing arrives afterwards


def test_waiting_costs_nothing():
    """A machine that is busy with others is no reason."""
    with limited_time(0.05, ValueError("too long")):
        time.sleep(0.2)


def test_other_errors_pass_and_threads_end():
    before = threading.active_count()
    with pytest.raises(KeyError), limited_time(10, ValueError("too long")):
        raise KeyError
    time.sleep(0.12)
    assert threading.active_count() <= before


@pytest.mark.parametrize("seconds", [0.0501, 0.0499])
def test_an_end_at_the_limit_is_either(seconds):
    for _ in range(3):
        with contextlib.suppress(ValueError), limited_time(seconds, ValueError("too long")):
            started = time.thread_time()
            while time.thread_time() - started < 0.05:
                pass
    assert count(10**5) == 10**5


@pytest.mark.parametrize("seconds", [10, 1e-9], ids=["in time", "too late"])
def test_the_interpreter_is_left_as_it_was(monkeypatch, seconds):
    """An asynchronous error that is taken back leaves CPython looking for one before each step: some code never ends."""
    given, raising = [], model_builder.ctypes.pythonapi.PyThreadState_SetAsyncExc

    def raised(thread, error):
        given.append(error)
        return raising(thread, error)

    monkeypatch.setattr(model_builder.ctypes.pythonapi, "PyThreadState_SetAsyncExc", raised)
    with contextlib.suppress(ValueError), model_builder.limited_time(seconds, ValueError("too long")):
        count(10**6 if seconds < 1 else 10)
    assert all(error is not None for error in given)


# generation_config.json of `save_pretrained` and `load_pretrained`: what `generate()` is to do is a part of the model.


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
    # Flags that are off are False or None, by whether a configuration or its file was asked.
    mine, theirs = (
        {name: value for name, value in one.generation_config.to_dict().items() if value not in (None, False)}
        for one in (load_pretrained(tmp_path / "chat"), read)
    )
    assert mine == theirs


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


def test_tensors_are_put_on_the_devices_of_those_before_them():
    """Shared parameters stay shared; what lay on the meta device is on a CPU. Tensors of a GPU stand in, without memory."""
    with FakeTensorMode():
        model = nn.Module()
        model.first = nn.Parameter(torch.empty(4, 4, device="cuda"))
        model.shared = model.first
        model.later = nn.Parameter(torch.empty(4, device="meta"))
        model.register_buffer("count", torch.empty((), dtype=torch.int64, device="cuda"))
        model.register_buffer("seen", torch.empty(2))
        state = {
            "first": torch.zeros(4, 4),
            "later": torch.zeros(4),
            "count": torch.tensor(3),
            "seen": torch.ones(2),
        }
        fill(model, state)
    devices = {name: value.device.type for name, value in model.state_dict().items()}
    assert devices == {"first": "cuda", "shared": "cuda", "later": "cpu", "count": "cuda", "seen": "cpu"}
    assert model.shared is model.first
