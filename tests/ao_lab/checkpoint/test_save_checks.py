"""Models that are not what their weights say are not saved, in no layout, and the message names the step that finishes them."""

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import (
    Int4WeightOnlyConfig,
    Int8StaticActivationInt8WeightConfig,
    LoRA,
    NF4WeightOnlyConfig,
    QATConfig,
    QuantizedTensor,
    load_pretrained,
    quantize_,
    save_pretrained,
)
from tests.support.models.hf_models import save_llama

CONFIG = Int4WeightOnlyConfig(group_size=32).for_layout("compressed-tensors")
#: Of torch.compile's own imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LAYOUTS = ("auto", "compressed-tensors", "ao_lab")


def net():
    torch.manual_seed(0)
    layers = {"first": nn.Linear(64, 64), "second": nn.Linear(64, 32), "table": nn.Embedding(8, 64)}
    return nn.ModuleDict(layers).to(torch.bfloat16).eval()


def only(*names):
    return lambda module, name: name in names


def refused(model, folder, match):
    for layout in LAYOUTS:
        with pytest.raises(ValueError, match=match):
            save_pretrained(model, folder / layout, layout=layout)
    assert not any(folder.iterdir())


def test_advice_is_not_impossible(tmp_path):
    """`for_layout` is advised where it has something for the scheme, and not where it would refuse it."""
    for config, advised in ((Int4WeightOnlyConfig(group_size=32), True), (NF4WeightOnlyConfig(), False)):
        model = net()
        quantize_(model, config, only("first"))
        with pytest.warns(UserWarning, match="wrote layout 'ao_lab'") as told:
            save_pretrained(model, tmp_path / type(config).__name__)
        assert ("for_layout(" in str(told[0].message)) is advised
    with pytest.raises(ValueError, match="no format for") as error:
        save_pretrained(model, tmp_path / "refused", layout="compressed-tensors")
    assert "for_layout(" not in str(error.value)


def test_layers_in_training(tmp_path):
    model = net()
    quantize_(model, CONFIG, only("first"))
    quantize_(model, QATConfig(CONFIG, step="prepare"), only("second"))
    refused(model, tmp_path, r"second: prepared for quantization-aware training; step='convert'")
    quantize_(model, QATConfig(CONFIG, step="convert"))
    assert save_pretrained(model, tmp_path).layout == "compressed-tensors"


def test_layers_that_train_sparse(tmp_path):
    model = net()
    ao_lab.sparsify_(model, ao_lab.SparseTrainingConfig(masks="recomputed"), only("second"))
    quantize_(model, CONFIG, only("first"))
    refused(model, tmp_path, r"second: trains with a sparse weight; call finish_sparsity_")
    ao_lab.finish_sparsity_(model)
    assert save_pretrained(model, tmp_path).layout == "compressed-tensors"


def test_embeddings_in_training_and_models_without_a_quantized_weight(tmp_path):
    model = net()
    quantize_(model, QATConfig(CONFIG, step="prepare"), only("first", "table"))
    refused(model, tmp_path, r"first, table: prepared for quantization-aware training; step='convert'")


@pytest.mark.parametrize("rounds", ["base", "sum"])
def test_adapters(tmp_path, rounds):
    model = net()
    quantize_(model, CONFIG, only("first"))
    quantize_(model, QATConfig(CONFIG, step="prepare", lora=LoRA(rank=4, rounds=rounds)), only("second"))
    with torch.no_grad():
        model.second.lora_b.fill_(0.1)
    refused(model, tmp_path, r"second: .*step='convert'")
    quantize_(model, QATConfig(CONFIG, step="convert"))
    assert save_pretrained(model, tmp_path).layout == "compressed-tensors"
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(load_pretrained(tmp_path, net()).second(x), model.second(x))


def test_layers_that_are_watched(tmp_path):
    model = net()
    quantize_(model, CONFIG, only("first"))
    quantize_(model, Int8StaticActivationInt8WeightConfig(step="prepare"), only("second"))
    refused(model, tmp_path, r"second: its inputs are watched; .*step='convert'")
    model.second(torch.randn(2, 64, dtype=torch.bfloat16))
    quantize_(model, Int8StaticActivationInt8WeightConfig(step="convert"), only("second"))
    save_pretrained(model, tmp_path)


def test_parametrizations(tmp_path):
    model = net()
    quantize_(model, CONFIG, only("first"))
    nn.utils.parametrizations.weight_norm(model.second)
    refused(model, tmp_path, "second: a parametrization computes a weight; .*remove_parametrizations")
    nn.utils.parametrize.remove_parametrizations(model.second, "weight")
    # One of a convolution, as Wav2Vec2 has it, is a part of the architecture.
    model["convolution"] = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3))
    save_pretrained(model, tmp_path)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("place", ["second", "table"])
def test_norms_that_are_hooks(tmp_path, norm, place):
    model = net().float()
    quantize_(model, CONFIG, only("first"))
    getattr(nn.utils, norm)(model[place])
    refused(model, tmp_path, rf"{place}: a \w+Norm hook computes a weight; torch\.nn\.utils\.remove_{norm} ")
    getattr(nn.utils, f"remove_{norm}")(model[place])
    model["convolution"] = getattr(nn.utils, norm)(nn.Conv1d(4, 4, 3))
    # Hooks of other kinds are code, which no file holds.
    model.first.register_forward_pre_hook(lambda module, inputs: None)
    save_pretrained(model, tmp_path, layout="ao_lab")


def test_fake_quantizers_of_others(tmp_path):
    model = net()
    quantize_(model, CONFIG, only("first"))
    model["observed"] = nn.Sequential(type("FakeQuantize", (nn.Identity,), {})())
    refused(model, tmp_path, r"observed\.0: a FakeQuantize rounds what passes through it")


def test_adapters_of_peft(tmp_path):
    model = net()
    quantize_(model, CONFIG, only("first"))
    model["second"] = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})(64, 32)
    refused(model, tmp_path, r"second: Linear of peft; merge_and_unload")


def test_a_refused_quantize_leaves_nothing_to_finish(tmp_path):
    model = nn.Sequential(net()["first"])
    with pytest.raises(ValueError, match=r"no nn\.ModuleList of blocks"):
        quantize_(model, CONFIG, calibration=["text"], methods=(ao_lab.GPTQ(),))
    refused(model, tmp_path, "the model has no quantized weights; call quantize_ first")


def test_an_interrupted_quantize(tmp_path):
    model = net()

    def stop(name, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_(model, CONFIG, only("first", "second"), progress=stop)
    refused(model, tmp_path, r"second\.weight: quantize_ was interrupted before it; call it again")
    quantize_(model, CONFIG, only("first", "second"))
    save_pretrained(model, tmp_path)


def test_hooks_that_drop_or_rename_weights(tmp_path):
    model = net()
    quantize_(model, CONFIG, only("first"))

    def drop(module, state, *_):
        state.pop("first.weight", None)

    hook = model._register_state_dict_hook(drop)
    refused(model, tmp_path, r"first\.weight: state_dict\(\) does not hold them")
    hook.remove()
    save_pretrained(model, tmp_path)


def test_weights_without_numbers(tmp_path):
    with torch.device("meta"):
        model = net()
    quantize_(model, CONFIG, only("first"))
    refused(model, tmp_path, "on the meta device, without values")


def test_wrappers_of_the_whole_model_come_off(tmp_path):
    model = net()
    quantize_(model, CONFIG, only("first", "second"))
    for number, wrapper in enumerate((torch.compile, nn.DataParallel)):
        saved = save_pretrained(wrapper(model), tmp_path / str(number))
        assert saved.layout == "compressed-tensors"
        again = load_pretrained(tmp_path / str(number), net())
        assert isinstance(again.first.weight, QuantizedTensor)
        assert torch.equal(again.first.weight, model.first.weight)


def test_wrappers_inside_are_refused(tmp_path):
    model = net()
    quantize_(model, CONFIG, only("first", "second"))
    model["second"] = torch.compile(model["second"])
    refused(model, tmp_path, r"second\._orig_mod\.weight.*a wrapper inside the model renames weights")
    model["second"] = model["second"]._orig_mod
    model["second"].compile()
    assert save_pretrained(model, tmp_path).layout == "compressed-tensors"


def test_distributed_models(tmp_path):
    """DistributedDataParallel comes off; distributed tensors have to be gathered."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = net()
        quantize_(model, CONFIG, only("first"))
        saved = save_pretrained(nn.parallel.DistributedDataParallel(model, init_sync=False), tmp_path / "ddp")
        assert torch.equal(load_pretrained(tmp_path / "ddp", net()).first.weight, model.first.weight)
        assert saved.layout == "compressed-tensors"
        mesh = init_device_mesh("cpu", (1,))
        model.second.weight = nn.Parameter(distribute_tensor(model.second.weight.detach(), mesh))
        with pytest.raises(ValueError, match=r"second\.weight are distributed: gather"):
            save_pretrained(model, tmp_path / "dtensor")
    finally:
        dist.destroy_process_group()


def test_a_finished_model_is_finished():
    model = net()
    quantize_(model, CONFIG, only("first"))
    from ao_lab.checkpoint.save_checks import check_finished

    check_finished(model)
    assert "QATConfig" in ao_lab.__all__


class WithState(nn.Linear):
    """A layer with a state beside its parameters, as FP8 libraries have them."""

    kept: object = torch.tensor([1, 2, 3], dtype=torch.uint8)

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


def test_extra_states(tmp_path):
    """Tensors are saved and given back; files hold nothing else, which is said before anything is written."""
    model = nn.Sequential(WithState(64, 64), nn.Linear(64, 32))
    quantize_(model, CONFIG, only("1"))
    other = nn.Sequential(WithState(64, 64), nn.Linear(64, 32))
    other[0].kept = torch.zeros(3, dtype=torch.uint8)
    for layout in LAYOUTS[1:]:
        save_pretrained(model, tmp_path / layout, layout=layout)
        loaded = load_pretrained(tmp_path / layout, other)
        assert loaded[0].kept.tolist() == [1, 2, 3]
        assert set(dict(loaded[0].named_parameters())) == {"weight", "bias"}
    model[0].kept = other[0].kept = {"a": 1}
    (tmp_path / "more").mkdir()
    refused(
        model,
        tmp_path / "more",
        r"0\._extra_state: state_dict\(\) holds a dict there.*get_extra_state return a tensor",
    )
    with pytest.raises(ValueError, match=r"0\._extra_state of the model are no tensors"):
        load_pretrained(tmp_path / "ao_lab", other)


def test_the_folder_of_the_unquantized_model(tmp_path):
    """It keeps its weights; a quantized model goes over itself, and over what was cleared."""
    transformers = pytest.importorskip("transformers")
    save_llama(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    quantize_(model, CONFIG)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(
        ValueError, match=r"unquantized weights that this model was read from.*another folder"
    ):
        save_pretrained(model, str(tmp_path))
    assert (tmp_path / "model.safetensors").read_bytes() == before
    (tmp_path / "model.safetensors").unlink()
    for _ in range(2):
        save_pretrained(model, tmp_path)
    save_pretrained(load_pretrained(tmp_path), tmp_path)
