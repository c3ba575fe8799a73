"""A frozen model's steps, replayed: with a recorder that replays by calling, since there is no GPU here."""

import copy
import gc
import pickle
import threading
import time
import weakref

import pytest
import torch

import ao_lab
from ao_lab.compile import captured_forward, joined_linears
from ao_lab.compile.captured_forward import GRAPHS, TRIES, CapturedForward, FrozenCalls, leaves, mapped

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
transformers = pytest.importorskip("transformers")
NEW = 7


class Calls:
    """Stands in for CUDA graphs on a CPU. Recording computes nothing, a replay reads and writes what was recorded where it
    lies, as on a GPU."""

    device = "cpu"

    def __init__(self, waits=0):
        self.waits, self.watched_runs, self.recorded, self.replays = waits, 0, 0, 0

    def watched(self, run):
        self.watched_runs += 1
        return run(), self.watched_runs <= self.waits

    def record(self, run, device):
        self.recorded += 1
        cache = run.keywords["past_key_values"]
        state = [t for layer in cache.layers for t in tensors_of(layer)]
        before = [t.clone() for t in state]
        result = mapped(run(), lambda one: one.clone() if isinstance(one, torch.Tensor) else one)
        for tensor, one in zip(state, before, strict=True):
            tensor.copy_(one)
        for tensor in buffers(result):
            tensor.fill_(float("nan"))  # nothing was computed

        def replay():
            self.replays += 1
            for held, made in zip(buffers(result), buffers(run()), strict=True):
                held.copy_(made)

        return replay, result


def buffers(value):
    return [one for _, one in leaves("", value) if isinstance(one, torch.Tensor)]


def tensors_of(layer):
    kept = getattr(layer, "recorded", lambda: [layer.keys, layer.values, layer.cumulative_length])
    return kept()


def llama(**more):
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def asked(batch=1, length=5, **more):
    """Of `generate()`; a batch has padding."""
    prompt = torch.arange(batch * length).reshape(batch, length) * 7 % 90 + 3
    mask = torch.ones_like(prompt)
    mask[1:, :2] = 0
    return {
        "input_ids": prompt, "attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "output_logits": True,
        "output_hidden_states": True, "return_dict_in_generate": True, "cache_implementation": "static", **more,
    }  # fmt: skip


@pytest.fixture
def uncompiled(monkeypatch):
    """torch.compile gives the function back, and notes its options."""
    noted = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: noted.append(options) or call)
    return noted


def prepared(model, recorder, **more):
    """A frozen model that is compiled on a CPU, too, by a recorder of ours."""
    ao_lab.prepare_for_generate_(model, frozen=True, **more)
    model.generation_config.compile_config._compile_all_devices = True
    model.get_compiled_call = FrozenCalls(model, recorder)
    return model.get_compiled_call


def same(one, other):
    """Tokens, and the bits of what generate() kept."""
    assert torch.equal(one.sequences, other.sequences)
    for x, y in zip(
        buffers([one.logits, one.hidden_states]), buffers([other.logits, other.hidden_states]), strict=True
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("recipe", [None, "bfloat16", "fp8", "int4"])
def test_steps_are_those_that_are_not_captured(recipe, uncompiled):
    """Tokens, logits and hidden states, which generate() keeps, of calls of several forms, one after the other."""
    model, recorder = llama(), Calls()
    if recipe:
        ao_lab.use_kv_cache_(model, recipe)
    calls = [asked(), asked(length=9), asked(batch=2), asked()]
    wanted = [model.generate(**one, disable_compile=True) for one in calls]
    prepared(model, recorder)
    for one, right in zip(calls, wanted, strict=True):
        same(model.generate(**one), right)
    # The prompt's call chooses a token, and the first step of a cache is run.
    assert recorder.recorded == recorder.watched_runs <= len(calls)
    assert recorder.replays == len(calls) * (NEW - 1) - recorder.watched_runs
    assert len(uncompiled) == 1
    assert uncompiled[0]["options"]["triton.cudagraphs"] is False


def test_a_cache_of_the_callers_is_recorded_once(uncompiled):
    model, recorder = llama(), Calls()
    prepared(model, recorder)
    cache = ao_lab.KVCache(model, "bfloat16", 32)
    model.set_attn_implementation("ao_lab")
    given = asked(past_key_values=cache)
    given["cache_implementation"] = None
    first = model.generate(**given)
    assert first.past_key_values is cache
    cache.reset()
    same(model.generate(**given), first)
    assert (recorder.recorded, recorder.watched_runs) == (1, 1)
    cache.reset()
    cache.layers[1].batch_select_indices(torch.tensor([0]))  # in new memory
    same(model.generate(**given), first)
    assert recorder.recorded == 2


def test_hooks_are_called_at_every_token(uncompiled):
    """A replay runs no Python. transformers' own hooks put hidden states into results, which are recorded."""
    model, recorder, seen = llama(), Calls(), []
    calls = prepared(model, recorder)
    hook = model.model.layers[1].register_forward_hook(lambda module, given, made: seen.append(made.clone()))
    model.generate(**asked())
    model.generate(**asked())
    assert (len(seen), calls._forward, recorder.watched_runs) == (2 * NEW, None, 0)
    assert "layers.1 has a hook" in ao_lab.prepare_for_generate_(model, frozen=True).graphs
    hook.remove()
    prepared(model, recorder)
    model.generate(**asked())
    assert recorder.replays


def test_another_state_of_torch_is_recorded_anew(uncompiled):
    """For which torch.compile compiles anew, too."""
    model, recorder = llama(), Calls()
    prepared(model, recorder)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    given = asked(past_key_values=cache)
    given["cache_implementation"] = None
    for wanted, precision in ((1, "highest"), (1, "highest"), (2, "high")):
        cache.reset()
        torch.set_float32_matmul_precision(precision)
        try:
            model.generate(**given)
        finally:
            torch.set_float32_matmul_precision("highest")
        assert recorder.recorded == recorder.watched_runs == wanted


class Alone(Calls):
    """Raises where two threads are at work in it."""

    busy = False

    def watched(self, run):
        return self.alone(super().watched, run)

    def record(self, run, device):
        return self.alone(super().record, run, device)

    def alone(self, work, *given):
        if Alone.busy:
            raise RuntimeError("operation not permitted when stream is capturing")
        Alone.busy = True
        try:
            time.sleep(0.05)
            return work(*given)
        finally:
            Alone.busy = False


def test_threads_record_one_after_the_other(uncompiled):
    models = [llama(), llama()]
    for model in models:
        prepared(model, Alone())
    failed = []

    def work(model):
        try:
            model.generate(**asked())
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failed
    assert all(model.get_compiled_call.recorder.replays for model in models)


def test_what_waits_is_not_recorded(uncompiled):
    """Once, as where it is compiled: recorded later. In each run: given up, with a warning."""
    model, recorder = llama(), Calls(waits=2)
    right = model.generate(**asked(), disable_compile=True)
    calls = prepared(model, recorder)
    same(model.generate(**asked()), right)
    assert (recorder.watched_runs, recorder.recorded, recorder.replays) == (3, 1, NEW - 1 - 3)
    calls.recorder.waits = recorder.watched_runs + NEW
    calls._forward.forget()
    with pytest.warns(UserWarning, match="of LlamaForCausalLM waits for the device"):
        same(model.generate(**asked()), right)
    assert (recorder.watched_runs, recorder.recorded) == (3 + TRIES, 1)
    assert uncompiled[-1]["options"]["triton.cudagraphs"] is True


def test_what_cannot_be_recorded_says_so(uncompiled, monkeypatch):
    model, recorder = llama(), Calls()
    prepared(model, recorder)

    def record(run, device):
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(recorder, "record", record)
    with pytest.raises(
        RuntimeError, match=r"LlamaForCausalLM could not be recorded .*not permitted; .*frozen"
    ):
        model.generate(**asked())


def step_of(model, cache, mask=None, **more):
    token = torch.full((1, 1), 5)
    return {"input_ids": token, "attention_mask": mask, "past_key_values": cache, "use_cache": True, **more}


@torch.no_grad()
def test_forms_and_their_number():
    """Each mask, flag, shape and cache has a step of its own; the one that was called longest ago is forgotten."""
    model, recorder = llama(), Calls()
    forward = CapturedForward(model.__call__, lambda: pytest.fail, recorder)
    caches = [transformers.StaticCache(config=model.config, max_cache_len=16 + i) for i in range(GRAPHS)]
    for cache in caches:
        model(torch.arange(4)[None], past_key_values=cache)
    mask = torch.ones((1, 1, 1, 16), dtype=torch.bool)
    different = [
        step_of(model, caches[0]), step_of(model, caches[0], mask), step_of(model, caches[0], mask, other={"a": mask}),
        step_of(model, caches[0], mask.float()), step_of(model, caches[0], logits_to_keep=1), step_of(model, caches[1]),
    ]  # fmt: skip
    for number, one in enumerate(different, 1):
        forward(**one)
        assert len(forward.steps) == number
        forward(**one)
        assert len(forward.steps) == number
    forward.begin("another attention")
    forward(**different[0])
    with torch.inference_mode():
        forward(**different[0])
    assert len(forward.steps) == len(different) + 2 == GRAPHS
    kept = list(forward.steps)[1:]
    forward(**step_of(model, caches[2]))
    assert list(forward.steps)[:-1] == kept


def test_calls_that_are_not_captured():
    """Several tokens, gradients, caches that grow, slide or may count, inputs elsewhere: the model's own call, told nothing
    else."""
    model, recorder, plain = llama(), Calls(), []
    forward = CapturedForward(model.__call__, lambda: lambda **given: plain.append(given), recorder)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    fresh = transformers.StaticCache(config=model.config, max_cache_len=16)
    empty, sliding = ao_lab.KVCache(model, "bfloat16", 16), copy.deepcopy(model.config)
    sliding.sliding_window, sliding.layer_types = 4, ["sliding_attention", "full_attention"]
    with torch.no_grad():
        model(torch.arange(4)[None], past_key_values=cache)
        slides = transformers.StaticCache(config=sliding, max_cache_len=16)
        model(torch.arange(4)[None], past_key_values=slides)
        counts = type("Counting", (transformers.StaticCache,), {})(config=model.config, max_cache_len=16)
        model(torch.arange(4)[None], past_key_values=counts)
        several = {**step_of(model, cache), "input_ids": torch.full((1, 2), 5)}
        elsewhere = step_of(model, cache, torch.ones((1, 1, 1, 16), device="meta"))
        calls = [
            several, elsewhere, step_of(model, fresh), step_of(model, empty), step_of(model, slides),
            step_of(model, counts),
            step_of(model, transformers.DynamicCache()), step_of(model, None), step_of(model, cache, other=object()),
        ]  # fmt: skip
        for number, one in enumerate(calls, 1):
            forward(**one)
            forward.begin(None)
            assert len(plain) == number, one
            assert plain[-1].keys() == one.keys()
    forward(**step_of(model, cache))
    assert len(plain) == len(calls) + 1
    assert not forward.steps


@torch.no_grad()
def test_results_are_the_callers():
    """The next step does not overwrite them, and the cache is the one that was given, which nothing keeps."""
    model = llama()
    forward = CapturedForward(model.__call__, lambda: pytest.fail, Calls())
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    model(torch.arange(4)[None], past_key_values=cache)
    made = [forward(**step_of(model, cache, output_hidden_states=True)) for _ in range(4)]
    kept = [[t.clone() for t in buffers([one.logits, one.hidden_states])] for one in made]
    again = forward(**step_of(model, cache, output_hidden_states=True))
    assert all(one.past_key_values is cache for one in (*made, again))
    assert type(again) is type(made[0])
    for one, before in zip(made, kept, strict=True):
        for x, y in zip(buffers([one.logits, one.hidden_states]), before, strict=True):
            assert torch.equal(x, y)
    for step in forward.steps.values():
        assert not any(isinstance(one, transformers.Cache) for _, one in leaves("", step.result))
        step.replay = None  # a graph holds addresses alone
    alive = weakref.ref(cache)
    del cache, made, again, one
    gc.collect()
    assert alive() is None


def test_forgotten_with_weights_elsewhere_and_after_a_reset(uncompiled):
    model, recorder = llama(), Calls()
    calls = prepared(model, recorder)
    assert calls._forward is None  # before a call nothing is there
    model.generate(**asked())
    steps = calls._forward.steps
    assert steps
    assert calls(model.generation_config.compile_config) is calls._forward
    assert steps
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.clone()
    calls(model.generation_config.compile_config)
    assert not steps
    model.generate(**asked())
    assert steps
    torch.compiler.reset()
    calls(model.generation_config.compile_config)
    assert not steps
    model.generate(**asked())
    calls(model.generation_config.compile_config)
    assert steps


def test_parts_of_quantized_weights_are_looked_at():
    model = llama()
    ao_lab.quantize_(model, ao_lab.Int8WeightOnlyConfig())
    before = captured_forward.addresses(model)
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.scale = weight.scale.clone()
    assert len(before) > len(list(model.parameters()))
    assert before != captured_forward.addresses(model)


def test_copies_and_pickles_have_steps_of_their_own(uncompiled):
    model, recorder = llama(), Calls()
    calls = prepared(model, recorder)
    given = asked(output_hidden_states=False)  # for which transformers keeps hooks that nobody can pickle
    right = model.generate(**given)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        its = other.get_compiled_call
        assert (its.model, its._forward) == (other, None)
        its.recorder = Calls()
        other.generation_config.compile_config._compile_all_devices = True
        for parameter in other.parameters():
            parameter.data.mul_(2)
        doubled = other.generate(**given)
        assert not torch.equal(doubled.logits[-1], right.logits[-1])
        assert its.recorder.replays
    assert calls._forward.steps
    same(model.generate(**given), right)


def test_what_is_said():
    """And what an unfrozen model, which is prepared again, goes back to."""
    model = llama()
    assert str(ao_lab.prepare_for_generate_(model, frozen=True)).endswith(
        "; the forward of a token is replayed from one CUDA graph"
    )
    assert isinstance(model.get_compiled_call, FrozenCalls)
    assert ao_lab.prepare_for_generate_(model).graphs == ""
    assert "get_compiled_call" not in vars(model)
    off = llama()
    off.generation_config.compile_config = transformers.CompileConfig(mode="default")
    assert ao_lab.prepare_for_generate_(off, frozen=True).graphs.endswith("turns CUDA graphs off")
    assert "get_compiled_call" not in vars(off)
    sliding = transformers.MistralForCausalLM(
        transformers.MistralConfig(
            vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, sliding_window=8,
        )
    )  # fmt: skip
    said = ao_lab.prepare_for_generate_(sliding, frozen=True)
    assert "those of torch.compile, since caches of its layers count" in said.graphs
    both = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=96, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    )
    assert "encoder-decoder" in ao_lab.prepare_for_generate_(both, frozen=True).graphs


def test_on_a_cpu_as_before(uncompiled):
    """transformers compiles nothing there by itself; where it is made to, with the options as they are."""
    model = llama()
    ao_lab.prepare_for_generate_(model, frozen=True)
    config = model.generation_config.compile_config
    assert model.get_compiled_call(config) == model.__call__
    assert uncompiled[0]["options"]["triton.cudagraphs"] is True
    theirs = transformers.CompileConfig()
    prepared(model, Calls())(theirs)
    assert uncompiled[-1]["mode"] == theirs.mode


def test_weights_are_joined(monkeypatch, uncompiled):
    """By the call that prepares, and again in a copy, whose weights lie apart."""
    monkeypatch.setattr(joined_linears, "DEVICES", ("cpu",))
    model = llama()
    prepared(model, Calls())

    def joined(model):
        layer = model.model.layers[0].self_attn
        return joined_linears.whole_of([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight])

    assert joined(model) is not None
    other = copy.deepcopy(model)
    assert joined(other) is None
    prepared(other, Calls())
    other = copy.deepcopy(other)
    other.get_compiled_call.recorder = Calls()
    other.generate(**asked())
    assert joined(other) is not None


@pytest.mark.nightly
def test_a_step_compiled():
    """By the compiler, on a CPU: the same bits as its program gives without a recording."""
    model, recorder = llama(), Calls()
    calls = prepared(model, recorder)
    model.generate(**asked())
    forward = calls._forward
    cache = transformers.StaticCache(config=model.config, max_cache_len=model._previous_max_cache_length)
    with torch.no_grad():
        model(torch.arange(4)[None], past_key_values=cache)
        other = copy.deepcopy(cache)
        mask = torch.ones((1, 1, 1, cache.get_max_length()), dtype=torch.bool)
        replays = recorder.replays
        made = [forward(**step_of(model, cache, mask, return_dict=True)).logits for _ in range(4)]
        right = [forward.call(**step_of(model, other, mask, return_dict=True)).logits for _ in range(4)]
    assert recorder.replays > replays
    assert all(torch.equal(x, y) for x, y in zip(made, right, strict=True))
