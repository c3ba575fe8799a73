"""`prepare_for_generate_`: what it leaves in a generation_config, and transformers' `generate()` with it, compiled on a CPU."""

import copy
import inspect
import io
import json
import pickle

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional

import ao_lab
from ao_lab.compile.fused_linears import FuseLinears
from ao_lab.compile.generation import WithoutModules, WithoutParts, guard_options
from tests.support.runs import forks

# What importing Inductor says of torch's own modules.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
transformers = pytest.importorskip("transformers")
PASS = "post_grad_custom_pre_pass"


def llama():
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    model.generation_config.pad_token_id = 0
    return model


def test_what_is_set():
    model = llama()
    said = ao_lab.prepare_for_generate_(model)
    config = model.generation_config
    assert config.cache_implementation == "static"
    made = config.compile_config
    assert (made.mode, made.backend, made.options["triton.cudagraphs"]) == (None, "inductor", True)
    assert isinstance(made.options[PASS], FuseLinears)
    assert set(ao_lab.compile_options()) < set(made.options)
    assert (said.cache, said.before, said.options) == ("static", None, tuple(sorted(made.options)))
    assert str(said) == (
        "generate() has a static cache (before: None) and is compiled by transformers, on GPUs alone, with the options "
        + ", ".join(sorted(made.options))
    )
    config.validate()
    torch.compile(model, **made.to_dict())  # torch takes them, before it compiles anything


def test_twice_is_once():
    """A copy, which each call of `generate` makes, is equal too: else transformers would compile in each."""
    model = llama()
    ao_lab.prepare_for_generate_(model)
    first = model.generation_config.compile_config
    said = ao_lab.prepare_for_generate_(model)
    assert said.before == said.cache == "static"
    assert "as before" in str(said)
    assert model.generation_config.compile_config == first == copy.deepcopy(first)
    other = llama()
    ao_lab.prepare_for_generate_(other)
    assert other.generation_config.compile_config == first


def test_frozen_models_have_programs_of_their_own():
    """torch finds a program by options and guards: without those of modules one would answer for another model."""
    models = [llama(), llama()]
    made = []
    for model in models:
        ao_lab.prepare_for_generate_(model, frozen=True)
        made.append(model.generation_config.compile_config)
    # What torch compares of two calls: the options without the filter of guards, which it takes out first.
    first, second, again = (
        torch._TorchCompileInductorWrapper(
            None, {k: v for k, v in options.items() if k != "guard_filter_fn"}, None
        )
        for options in (made[0].options, made[1].options, copy.deepcopy(made[0].options))
    )
    assert first != second
    assert first == again
    ao_lab.prepare_for_generate_(models[0], frozen=True)
    assert models[0].generation_config.compile_config == made[0]
    # Looked at again, it is as any other.
    ao_lab.prepare_for_generate_(models[0])
    ao_lab.prepare_for_generate_(other := llama())
    assert models[0].generation_config.compile_config == other.generation_config.compile_config


@pytest.mark.parametrize("frozen", [False, True])
def test_a_prepared_model_can_be_pickled(frozen):
    """The pass is of a class that is made at its first use; what is read is one that the compiler takes and knows."""
    model = llama()
    ao_lab.quantize_(model, ao_lab.Int8WeightOnlyConfig())
    ao_lab.prepare_for_generate_(model, frozen=frozen)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    config = model.generation_config
    models = (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False))
    configs = [
        pickle.loads(pickle.dumps(config, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ]
    for read in (*(one.generation_config for one in models), *configs):
        first, second = read.compile_config.options, config.compile_config.options
        assert type(first[PASS]) is type(second[PASS])
        assert first[PASS].uuid() == second[PASS].uuid()
        assert {**first, PASS: None} == {**second, PASS: None}
        # The number of a frozen model is of one process: what is read has another, so that it has programs of its own.
        assert (first[PASS] == second[PASS]) is not frozen
        assert (read == config) is not frozen
        assert read.compile_config == copy.deepcopy(read.compile_config) == copy.copy(read.compile_config)
        hash(read)


def test_a_pickle_is_read_where_nothing_was_prepared(tmp_path):
    model = llama()
    ao_lab.prepare_for_generate_(model, frozen=True)
    with open(tmp_path / "config.pt", "wb") as file:
        pickle.dump((model.generation_config, ao_lab.compile_options()), file)
    code = (
        "import pickle, sys; assert 'ao_lab' not in sys.modules; config, options = pickle.load(open(sys.argv[1], 'rb'));"
        f"from torch._inductor.custom_graph_pass import CustomGraphPass; one = config.compile_config.options['{PASS}'];"
        f"assert isinstance(one, CustomGraphPass) and isinstance(options['{PASS}'], CustomGraphPass);"
        "print(one)"
    )
    ran = forks.python("-c", code, tmp_path / "config.pt", server="transformers")
    assert "FuseLinears of frozen model 1" in ran.stdout, ran.stderr


def test_frozen_is_a_bool():
    model = llama()
    with pytest.raises(TypeError, match="frozen is True or False, got 'yes'; "):
        ao_lab.prepare_for_generate_(model, frozen="yes")
    assert model.generation_config.cache_implementation is None


def test_calls_that_a_static_cache_does_not_take():
    """Docstring and guide say which calls are lost, and that cache_implementation=None in the call is the way out."""
    model, assistant, prompt = llama(), llama(), torch.arange(3, 9)[None]
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(prompt, **given)
    ao_lab.prepare_for_generate_(model)
    cache = next(
        name for name in ("cache", "past_key_values") if name in inspect.signature(model.forward).parameters
    )
    assisted_too = cache == "cache"  # from transformers 5.24 on
    for make, taken in (
        (lambda: {"assistant_model": assistant}, assisted_too),
        (lambda: {"prompt_lookup_num_tokens": 2}, assisted_too),
        (lambda: {cache: transformers.DynamicCache()}, False),
    ):
        if taken:
            assert torch.equal(model.generate(prompt, **given, **make()), wanted)
        else:
            with pytest.raises(ValueError, match=r"Static cache|past_key_values|`cache`"):
                model.generate(prompt, **given, **make())
        assert torch.equal(model.generate(prompt, **given, **make(), cache_implementation=None), wanted)


def test_what_was_set_stays():
    model = llama()
    options = {"max_autotune": True, "epilogue_fusion": False}
    given = transformers.CompileConfig(mode="default", dynamic=False, fullgraph=True, options=options)
    model.generation_config.compile_config, model.generation_config.disable_compile = given, True
    model.generation_config.cache_implementation = "offloaded_static"
    assert ao_lab.prepare_for_generate_(model).cache == "offloaded_static"
    config = model.generation_config
    made = config.compile_config
    assert (made.dynamic, made.fullgraph, made.mode, config.disable_compile) == (False, True, None, False)
    assert made.options.items() >= options.items()
    assert "triton.cudagraphs" not in made.options  # its mode has none
    assert (given.mode, given.options) == ("default", options)


def test_other_models_caches_and_backends_are_refused():
    with pytest.raises(TypeError, match=r"generation_config, got Linear; .*compile_options"):
        ao_lab.prepare_for_generate_(nn.Linear(2, 2))
    model = llama()
    model.generation_config.cache_implementation = "quantized"
    with pytest.raises(ValueError, match="cache_implementation='quantized'"):
        ao_lab.prepare_for_generate_(model)
    model = llama()
    model.generation_config.compile_config = transformers.CompileConfig(backend="eager")
    with pytest.raises(ValueError, match="backend 'eager'"):
        ao_lab.prepare_for_generate_(model)
    assert model.generation_config.cache_implementation is None


def test_of_the_settings_the_cache_alone_is_saved(tmp_path):
    """The options hold functions; transformers leaves a compile_config out of files. Docstring and guide say so."""
    model = llama()
    ao_lab.prepare_for_generate_(model)
    model.save_pretrained(tmp_path)
    assert PASS not in (tmp_path / "generation_config.json").read_text()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert (loaded.generation_config.cache_implementation, loaded.generation_config.compile_config) == (
        "static",
        None,
    )
    said = ao_lab.prepare_for_generate_(loaded)
    assert "FuseLinears" in repr(loaded.generation_config)
    assert said.cache == "static"
    assert "FuseLinears" in repr(model.generation_config)
    hash(model.generation_config)


def test_generate():
    """The same tokens; compiled once for two calls; products were joined."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    model, prompt = llama(), torch.arange(3, 9)[None]
    ao_lab.quantize_(model, ao_lab.Int8WeightOnlyConfig())
    options = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "do_sample": False,
    }
    wanted = model.generate(prompt, **options)
    ao_lab.prepare_for_generate_(model)
    made = model.generation_config.compile_config
    made._compile_all_devices = True
    seen, original = [], FuseLinears.__call__

    def noted(self, graph):
        original(self, graph)
        seen.append([str(node.target) for node in graph.nodes])

    # A graph from the compiler's caches would not meet the pass; what the host's compiler made of one may serve again.
    caches = inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False)
    with pytest.MonkeyPatch.context() as patch, caches[0], caches[1]:
        patch.setattr(FuseLinears, "__call__", noted)
        assert torch.equal(model.generate(prompt, **options), wanted)
        compiled, count = model._compiled_call, len(seen)
        assert torch.equal(model.generate(prompt, **options), wanted)
    assert model._compiled_call is compiled
    assert len(seen) == count > 0
    assert any("ao_lab" in target for target in seen[-1]), seen[-1]
    del model._compiled_call  # which nobody can pickle: the guide says so
    pickle.dumps(model)


# Guards that are left out: what is exchanged in a compiled model is still seen; what a description settles is not compared.


class Noted(WithoutParts):
    """Notes the guards that it leaves out."""

    left_out: list = []  # noqa: RUF012

    def __call__(self, entries):
        kept = super().__call__(entries)
        self.left_out += [entry.name for entry, keep in zip(entries, kept, strict=True) if not keep]
        return kept


def network(seed=0, width=64, config=None):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 8)).requires_grad_(False)
    ao_lab.quantize_(net, config or ao_lab.Int4WeightOnlyConfig(group_size=32))
    return net


def compiled(net, **options):
    """The compiled network, and the programs that were compiled so far."""
    from torch._dynamo.backends.common import aot_autograd

    torch.compiler.reset()
    programs = []

    def compiler(program, inputs):
        programs.append(program)
        return make_boxed_func(program.forward)

    call = torch.compile(net, backend=aot_autograd(fw_compiler=compiler), dynamic=False, options=options)
    return call, programs


def plain(net, x):
    for layer in net:
        x = functional.linear(x, layer.weight.dequantize(), layer.bias)
    return x


def agree(call, net, x):
    with torch.no_grad():
        torch.testing.assert_close(call(x), plain(net, x), rtol=1e-4, atol=1e-4)


def test_only_parts_are_left_out():
    Noted.left_out.clear()
    net, x = network(), torch.randn(3, 64)
    call, _ = compiled(net, guard_filter_fn=Noted("not empty, which torch would take for none"))
    agree(call, net, x)
    names = {name.rpartition("_parameters")[2] for name in Noted.left_out}
    assert names == {f"['weight'].{part}" for part in ("codes", "scale", "zero")}
    assert len(Noted.left_out) == 6


def test_what_is_exchanged_is_seen():
    """Other numbers without a program anew; another scheme, another shape and a dense weight with one."""
    net, x = network(), torch.randn(3, 64)
    call, programs = compiled(net, **guard_options(frozen=False))
    agree(call, net, x)
    net[0].weight = network(seed=1)[0].weight
    agree(call, net, x)
    assert len(programs) == 1
    net[0].weight = network(seed=2, config=ao_lab.Int8WeightOnlyConfig())[0].weight
    agree(call, net, x)
    assert len(programs) == 2
    net[1] = nn.Sequential(nn.Linear(64, 5), nn.Identity())[0].requires_grad_(False)
    with torch.no_grad():
        assert call(x).shape == (3, 5)
    assert len(programs) == 3


def test_static_scales_of_inputs_are_compared():
    """They are there or not, whatever the description says."""
    entries = [entry("weight", "TENSOR_SUBCLASS_METADATA_MATCH", network()[0].weight)]
    parts = ("codes", "scale", "outer", "zero", "input_scale", "input_zero")
    entries += [entry(f"weight.{part}", "TENSOR_MATCH", None) for part in parts]
    assert WithoutParts()(entries) == [True, False, False, False, False, True, True]
    # The same names in a tensor that is none of ours.
    entries[0] = entry("weight", "TENSOR_SUBCLASS_METADATA_MATCH", nn.Parameter(torch.ones(1)))
    assert all(WithoutParts()(entries))


def entry(name, kind, value):
    from types import SimpleNamespace

    return SimpleNamespace(name=name, guard_type=kind, value=value)


def test_frozen_modules_are_not_looked_at():
    net, x = network(), torch.randn(3, 64)
    call, programs = compiled(net, **guard_options(frozen=True))
    agree(call, net, x)
    net[0].weight.copy_(torch.randn(64, 64))  # the same tensors
    agree(call, net, x)
    with torch.no_grad():
        assert call(torch.randn(4, 64)).shape == (4, 8)  # inputs are looked at
    assert len(programs) == 2


@pytest.mark.parametrize("kind", [WithoutParts, WithoutModules])
def test_options_are_equal_to_their_copies(kind):
    one = guard_options(frozen=kind is WithoutModules)["guard_filter_fn"]
    assert type(one) is kind
    assert copy.deepcopy(one) == one
    assert type(copy.deepcopy(one)) is kind
    assert json.loads(json.dumps(one)) == one
    assert guard_options(frozen=False) != guard_options(frozen=True)
