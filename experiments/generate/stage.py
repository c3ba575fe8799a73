"""The stage: a Llama of transformers with random weights, and the time of each step of its own `generate()`.

A static cache, with which transformers compiles the decoding step by itself (mode "reduce-overhead"), is all that is asked for.
A token's time is that between two steps of the loop, so sampling (argmax) is in and the prompt out; the first quarter of the
steps of a call is left out. No profiler runs here: once one has, every later launch of the process takes the host longer.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

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


__all__ = ["PROMPT", "Stage"]
