"""Tables: what all methods are timed at, in turn in one process, whole or not at all.

The stage: a Llama of transformers with random weights, and the time of each step of its own `generate()`.

A static cache, with which transformers compiles the decoding step by itself (mode "reduce-overhead"), is all that is asked for.
A token's time is that between two steps of the loop, so sampling (argmax) is in and the prompt out; the first quarter of the
steps of a call is left out. No profiler runs here: once one has, every later launch of the process takes the host longer.

What generates: bfloat16 and our configurations, both after `ao_lab.prepare_for_generate_` too, and torchao's.

That call spares the host's time of any model. Names are those of experiment `linear`. Nothing is switched on but what a method
names.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import ao_lab
from experiments.decode.configs import FLOAT8_DYNAMIC, torchao_config
from experiments.harness import revision
from experiments.linear.tables import Build, float8_dynamic, integers

TRANSFORMERS, TORCHAO = "transformers", revision.TORCHAO


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to store the weights of a model's linear layers, the output layer too.

    build: its configuration, None for bfloat16. library: whose `quantize_`. frozen: None, or that of `prepare_for_generate_`,
    which has something to do where the model is compiled alone. deep: whether it is measured of all 32 layers, too. dynamic:
    whether inputs are rounded too. peer: the name of torchao's method of its recipe.
    """

    name: str
    build: Build | None = None
    library: str = "ao_lab"
    frozen: bool | None = None
    deep: bool = False
    dynamic: bool = False
    peer: str = ""

    def apply(self, model: nn.Module) -> None:
        """Quantize and prepare a model in place."""
        if self.build is not None:
            self._quantize(model, self.build())
        if self.frozen is not None:
            ao_lab.prepare_for_generate_(model, frozen=self.frozen)

    def _quantize(self, model: nn.Module, config: Any) -> None:
        if self.library != TORCHAO:
            ao_lab.quantize_(model, config)
            return
        from torchao.quantization import quantize_

        quantize_(model, config)

    @property
    def missing(self) -> str | None:
        """Why it cannot be measured here; None where it can."""
        found = revision.missing(TRANSFORMERS)
        return found or (revision.missing(TORCHAO) if self.library == TORCHAO else None)


AO_INT4, AO_INT8, AO_FP8 = AO = "torchao int4wo", "torchao int8wo", "torchao fp8dq, rows"
INT4, INT4_ZERO = integers(4, 128), lambda: ao_lab.Int4WeightOnlyConfig(group_size=128)
BASE = Method(name="bfloat16", deep=True)
METHODS = (
    BASE,
    Method(name="int4 g128", build=INT4, deep=True, peer=AO_INT4),
    Method(name="int4 g128, prepared", build=INT4, frozen=False, deep=True),
    Method(name="int4 g128, prepared and frozen", build=INT4, frozen=True, deep=True),
    Method(name="bfloat16, prepared", frozen=False, deep=True),
    Method(name="bfloat16, prepared and frozen", frozen=True, deep=True),
    Method(name="int8", build=lambda: ao_lab.Int8WeightOnlyConfig(), deep=True, peer=AO_INT8),
    Method(name="fp8 dynamic, rows", build=float8_dynamic(ao_lab.PerRow()), dynamic=True, peer=AO_FP8),
    Method(name="int4 g128, zero points", build=INT4_ZERO, peer=AO_INT4),
    Method(name="mxfp4", build=lambda: ao_lab.MXWeightOnlyConfig("float4_e2m1fn")),
    Method(
        name=AO_INT4,
        build=torchao_config("Int4WeightOnlyConfig", group_size=128, int4_packing_format="tile_packed_to_4d"),
        library=TORCHAO,
    ),
    Method(name=AO_INT8, build=torchao_config("Int8WeightOnlyConfig"), library=TORCHAO),
    Method(
        name=AO_FP8, build=torchao_config(FLOAT8_DYNAMIC, granularity="PerRow"), library=TORCHAO, dynamic=True
    ),
)


#: Llama-3.1-8B, and tokens of a prompt.
HIDDEN, INNER, HEADS, KEYS, WORDS, PROMPT = 4096, 14336, 32, 8, 128256, 32


@dataclass(frozen=True)
class Stage:
    """Which model generates how much. divide: of widths and vocabulary, for a stand-in. new: tokens of a call; calls: timed.

    Many short calls: a host has slow and fast seconds, and a round of calls of all methods should lie in one of them.
    """

    layers: int
    device: str
    divide: int = 1
    new: int = 64
    calls: int = 12

    @property
    def data(self) -> str:
        """How rows call the model."""
        name = "llama-3.1-8b" if self.divide == 1 else "tiny-stand-in"
        return f"{name}-{self.layers}-layer{'s' * (self.layers > 1)}"

    def model(self, seed: int) -> Any:
        """Normal weights in bfloat16, made where the model stays."""
        import transformers

        config = transformers.LlamaConfig(
            hidden_size=HIDDEN // self.divide,
            intermediate_size=INNER // self.divide,
            num_attention_heads=HEADS // min(self.divide, 8),
            num_key_value_heads=KEYS // min(self.divide, 8),
            vocab_size=WORDS // self.divide,
            num_hidden_layers=self.layers,
            max_position_embeddings=4096,
            dtype=torch.bfloat16,
        )
        torch.manual_seed(seed)
        with torch.device(self.device):
            model: Any = transformers.LlamaForCausalLM(config)
        model = model.to(torch.bfloat16).eval().requires_grad_(False)
        model.generation_config.pad_token_id = 0
        return model

    def steps(self, model: Any, batch: int, compiled: bool, *watches: Any) -> list[float]:
        """Seconds of the steps of one call. watches: transformers' stopping criteria, called after each step, too."""
        times: list[float] = []

        def clock(input_ids: torch.Tensor, scores: torch.Tensor, **rest: Any) -> torch.Tensor:
            # transformers has waited for the token of the step before.
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        self.generate(model, self.prompt(batch, PROMPT), self.new, compiled, clock, *watches)
        return [after - before for before, after in pairwise(times)][self.new // 4 :]

    def prefill(self, model: Any, length: int, compiled: bool) -> float:
        """Seconds from a prompt of this length to its first token, the GPU done."""
        prompt = self.prompt(1, length)
        self.synchronize()
        started = time.perf_counter()
        self.generate(model, prompt, 1, compiled)
        self.synchronize()
        return time.perf_counter() - started

    def logits(self, model: Any, batch: int, compiled: bool) -> torch.Tensor:
        """Those of the last step of a call, float32 (batch, words). Its tokens are given, so that they are the same for all."""

        def draw(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            given = (torch.arange(batch, device=self.device) * 31 + tokens.shape[1] * 7) % scores.shape[1]
            return torch.full_like(scores, float("-inf")).scatter_(1, given[:, None], 0.0)

        options = {"return_dict_in_generate": True, "output_logits": True, "logits_processor": [draw]}
        made = self.generate(model, self.prompt(batch, PROMPT), self.new, compiled, **options)
        found: torch.Tensor = made.logits[-1].float()
        return found

    def prompt(self, batch: int, length: int) -> torch.Tensor:
        """Tokens (batch, length)."""
        return torch.arange(batch * length, device=self.device).reshape(batch, length) % 97 + 3

    def generate(
        self, model: Any, prompt: torch.Tensor, new: int, compiled: bool, *watches: Any, **more: Any
    ) -> Any:
        """transformers' own call. more: of its arguments."""
        import transformers

        options: dict[str, Any] = {"disable_compile": not compiled, **more}
        if compiled and self.device == "cpu":
            config = model.generation_config.compile_config or transformers.CompileConfig()
            options["compile_config"] = copy.copy(config)
            options["compile_config"]._compile_all_devices = True
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            cache_implementation="static",
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            stopping_criteria=transformers.StoppingCriteriaList(watches),
            **options,
        )

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device == "cuda":
            torch.cuda.synchronize()


KIND = "generate"
DECODE, EAGER_DECODE, PREFILL = "decode", "eager", "prefill"
#: The whole model, of which those that say most are measured; a quarter of it, with more methods; and one layer, whose
#: token takes hardly more than transformers' own loop on the host, below which no weights bring a step.
WHOLE, DEPTH, LEAST = 32, 8, 1
LONG = 2048
COMPILED, EAGER = "compiled", "not compiled"


@dataclass(frozen=True)
class Table:
    """What is timed. part: one of the names of `--only`; length: of a prefill. needed: seconds of a method.

    beside: what it is one more run of a setting with, torchao or one of its methods, whose compilers take minutes; of ours it
    has their recipes.
    """

    stage: Stage
    part: str
    methods: tuple[Method, ...]
    batch: int = 1
    length: int = 0
    beside: str = ""

    @property
    def kind(self) -> str:
        """The kind of its rows' table."""
        return KIND

    @property
    def data(self) -> str:
        """How its rows call the model."""
        return self.stage.data

    @property
    def compiled(self) -> bool:
        """Whether transformers compiles the steps of decoding."""
        return self.part == DECODE

    @property
    def setting(self) -> str:
        """The setting of its rows."""
        if self.part == PREFILL:
            return f"prefill of {self.length} tokens"
        return f"batch {self.batch}, {COMPILED if self.compiled else EAGER}" + (
            f", beside {self.beside}" if self.beside else ""
        )

    @property
    def needed(self) -> float:
        """About how many seconds it takes on an H200: compiling takes a method one and a fifth a layer."""
        each = 6.0 + (1.2 * self.stage.layers if self.compiled else 0.0)
        others = [one for one in self.methods if one.library == TORCHAO]
        return each * len(self.methods) + (70.0 * len(others) if self.compiled else 0.0)


def beside(*names: str) -> tuple[Method, ...]:
    """bfloat16, these methods of torchao's, and ours of their recipes."""
    return tuple(one for one in METHODS if one is BASE or one.peer in names or one.name in names)


def tables_of(parts: Sequence[str], device: str) -> Iterator[Table]:
    """At full scale: what is not compiled comes first, in a process that has compiled nothing, as its users have it."""
    least, stage, whole = Stage(LEAST, device), Stage(DEPTH, device), Stage(WHOLE, device)
    eager = replace(stage, new=32, calls=16)
    deep = tuple(one for one in METHODS if one.deep)
    ours = tuple(one for one in METHODS if one.library != TORCHAO)
    unprepared = tuple(one for one in METHODS if one.frozen is None)
    found = (
        Table(eager, EAGER_DECODE, unprepared, 1),
        Table(replace(stage, calls=24), PREFILL, unprepared, length=LONG),
        Table(eager, EAGER_DECODE, unprepared, 16),
        Table(eager, EAGER_DECODE, unprepared, 64),
        Table(whole, DECODE, deep, 1),
        Table(whole, DECODE, deep, 16),
        Table(stage, DECODE, ours, 1),
        Table(stage, DECODE, ours, 16),
        Table(stage, DECODE, ours, 64),
        Table(least, DECODE, deep, 1),
        Table(stage, DECODE, beside(*AO), 1, beside=TORCHAO),
        Table(stage, DECODE, beside(*AO), 16, beside=TORCHAO),
        # Its methods by themselves, each of which compiles for minutes; int8 takes half a second a token there.
        *(Table(replace(stage, new=16, calls=8), DECODE, beside(one), 64, beside=one) for one in AO),
    )
    return (one for one in found if one.part in parts)


def stand_ins(parts: Sequence[str], device: str) -> Iterator[Table]:
    """A tiny model's, whose times mean nothing: what is measured at full scale runs here too, but for the compiler."""
    stage = Stage(1, device, divide=32, new=8, calls=1)
    ours = tuple(one for one in METHODS if one.frozen is None and one.library == BASE.library)
    found = (Table(stage, EAGER_DECODE, ours, 2), Table(stage, PREFILL, ours, length=64))
    return (one for one in found if one.part in parts)
