"""Greedy decoding of a transformers model without its `generate()`: a token is one compiled program in one CUDA graph.

    decoding = ao_lab.GreedyDecoding(model, max_length=131072, kv_cache="int8")
    tokens = decoding.generate(input_ids, max_new_tokens=256)

`generate()` prepares every token on the host. Here tokens, how many there are, and keys and values stay on the device at
addresses that do not change: a step of the whole model is recorded once and replayed, and the host waits for tokens only where
it looks for an end. No sequence is padded, so that attention reads no mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from math import isqrt
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ao_lab.compile.fused_linears import compile_options
from ao_lab.compile.joined_linears import join_weights_, step_options
from ao_lab.install.versions import cache_argument
from ao_lab.kv_cache.attention import inner, reader_of_caches, takes_functions
from ao_lab.kv_cache.cache import KVCache, check_attention
from ao_lab.kv_cache.layer import KVLayer
from fast.ops import constant_result

#: Steps before a capture, the first of which compiles; steps between two looks for an end.
WARMUP, LOOK = 2, 8


class GreedyDecoding:
    """Greedy decoding of sequences of one length, none of them padded, by a transformers decoder.

    max_length: tokens of prompt and answer together. kv_cache: a recipe of `use_kv_cache_`. compiled: run a step with
    torch.compile and `compile_options`, which takes some seconds at the first call. captured: record a step as a CUDA graph.
    Default of both: on a GPU. The model's attention is set to "ao_lab"; its weights keep their values and may be quantized, but
    not be replaced once a step was recorded. Where a step is compiled on a GPU, unquantized 16-bit weights of queries, keys and
    values, and those of a gate and what it gates, are moved next to each other in memory (`ao_lab.compile.joined_linears`), so
    that a step multiplies by them at once: a CUDA graph that someone else recorded of the model has to be recorded again. Its
    `generation_config` is not read: a token is the one of the largest logit, without penalties or forced tokens, and end tokens
    are the caller's.

    TypeError for anything but a transformers decoder. ValueError for a max_length below 2, an unknown recipe or one that the
    model's heads do not support, captured=True on a CPU, a model whose attention cannot be replaced or has sinks or latent
    states, and one with layers that have a sliding window or a state of another kind.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_length: int = 4096,
        kv_cache: Any = "bfloat16",
        compiled: bool | None = None,
        captured: bool | None = None,
    ) -> None:
        model = inner(model)
        _check(model, max_length)
        self.cache = KVCache(model, kv_cache, max_length)
        if not all(isinstance(layer, KVLayer) for layer in self.cache.layers):
            raise ValueError(
                f"{type(model).__name__} has layers with sliding windows or states, which count tokens on the host; use "
                "generate()"
            )
        self.device = next(model.parameters()).device
        on_gpu = self.device.type == "cuda"
        self.captured = on_gpu if captured is None else captured
        if self.captured and not on_gpu:
            raise ValueError(
                f"captured=True needs a model on a GPU, this one is on {self.device.type}; leave it out"
            )
        model.set_attn_implementation(reader_of_caches(model))
        self.max_length = max_length
        self._eager = NextToken(model)
        self._mask = self.cache.no_padding
        wanted = on_gpu if compiled is None else compiled
        self._next: Callable[..., Tensor] = self._eager
        if wanted:
            join_weights_(model)
            self._next = one_program(self._eager, step_options())
        #: All tokens so far (sequences, max_length), and their number, 0-d int64 on the device.
        self.tokens = torch.zeros((0, max_length), dtype=torch.int64, device=self.device)
        self.length = torch.zeros((), dtype=torch.int64, device=self.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, max_new_tokens: int, eos_token_id: int | Sequence[int] | None = None
    ) -> Tensor:
        """Tokens (B, prompt) to (B, prompt + new). With eos_token_id, one or several, it ends where every sequence has one,
        and what a sequence has behind its own stays.

        input_ids: integers, none of them padding. TypeError for anything else, and for numbers that are none. ValueError for
        another shape, an empty prompt, tokens beyond `max_length`, and another number of sequences than before.
        """
        self._check_room(input_ids, max_new_tokens)
        ends = ends_of(eos_token_id, self.device)
        if self.captured and self._graph is None:
            self._capture(input_ids)
        self.begin(input_ids)
        prompt, wanted = input_ids.shape[1], input_ids.shape[1] + max_new_tokens
        for known in range(prompt + 1, wanted + 1):
            if ends.numel() and ((known - prompt) % LOOK == 0 or known == wanted):
                end = self._end(prompt, known, ends)
                if end is not None:
                    return self.tokens[:, :end].clone()
            if known < wanted:
                self.step()
        return self.tokens[:, :wanted].clone()

    @torch.no_grad()
    def begin(self, input_ids: Tensor) -> None:
        """Read a prompt (B, tokens), and choose the token behind it."""
        self._check_room(input_ids, 1)
        batch, prompt = input_ids.shape
        self.cache.reset()
        chosen = self._eager(input_ids, self.cache, self._mask)
        if not len(self.tokens):
            self.tokens = self.tokens.new_zeros((batch, self.max_length))
        self.tokens[:, :prompt] = input_ids
        self.tokens[:, prompt : prompt + 1] = chosen
        self.length.fill_(prompt + 1)

    @property
    def is_recorded(self) -> bool:
        """Whether a step is replayed from a CUDA graph."""
        return self._graph is not None

    def step(self) -> None:
        """One more token of each sequence, replayed where it was recorded; nobody counts whether there is room. ValueError
        before a prompt."""
        if not len(self.tokens):
            raise ValueError("there is no prompt for a step to go on from; call begin(input_ids) first")
        if self._graph is None:
            self.run()
        else:
            self._graph.replay()

    @torch.no_grad()
    def run(self) -> None:
        """A step as it is recorded: launches alone, nothing that waits for the device."""
        # Indices of one dimension stay on the device.
        at = self.length.view(1)
        chosen = self._next(self.tokens.index_select(1, at - 1), self.cache, self._mask)
        self.tokens.index_copy_(1, at, chosen)
        self.length.add_(1)

    def _check_room(self, input_ids: Tensor, new: int) -> None:
        check_tokens(input_ids, new)
        batch, prompt = input_ids.shape
        if prompt < 1 or new < 1 or prompt + new > self.max_length:
            raise ValueError(
                f"{prompt} tokens and {new} new ones, at least one each, do not fit max_length={self.max_length}; make another "
                "GreedyDecoding, or ask for fewer"
            )
        if len(self.tokens) not in (0, batch):
            raise ValueError(
                f"this GreedyDecoding has {len(self.tokens)} sequences and got {batch}; make another one for them"
            )

    def _end(self, first: int, known: int, ends: Tensor) -> int | None:
        """How many tokens there are up to where the last sequence ends; None where one has not ended."""
        found = torch.isin(self.tokens[:, first:known], ends)
        if not bool(found.any(1).all()):
            return None
        return first + int(found.int().argmax(1).max()) + 1

    def _capture(self, input_ids: Tensor) -> None:
        """Record a step behind a prompt of one token, which leaves nothing that `begin` does not overwrite."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self.begin(input_ids[:, :1])
                self.run()
        torch.cuda.current_stream().wait_stream(stream)
        self.begin(input_ids[:, :1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.run()
        self._graph = graph


class NextToken(nn.Module):
    """The most likely token behind the last one of each sequence, int64 (B, 1)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.cache_argument = cache_argument(model)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def forward(self, ids: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
        """ids: (B, tokens), written into the cache, at positions that some models would take from a mask."""
        places: dict[str, Any] = {self.cache_argument: cache}
        if self.takes_positions:
            places["position_ids"] = (
                cache.get_seq_length() + torch.arange(ids.shape[1], device=ids.device)[None]
            )
        logits: Tensor = self.model(
            input_ids=ids,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **places,
        ).logits
        return most_likely(logits[:, -1:])


def most_likely(logits: Tensor) -> Tensor:
    """`logits.argmax(-1)`, int64, the same bits: of equal logits the first, of those with NaN the first NaN.

    The vocabulary is divided into parts that are searched at once: the compiler gives a whole one of a sequence to one program,
    which takes 34 us for 128,256 logits.
    """
    parts = parts_of(logits.shape[-1])
    largest, at = logits.reshape(*logits.shape[:-1], parts, -1).max(-1)
    part = largest.argmax(-1, keepdim=True)
    chosen: Tensor = part * (logits.shape[-1] // parts) + at.gather(-1, part)
    return chosen.squeeze(-1)


@constant_result
def parts_of(vocabulary: int) -> int:
    """The largest divisor of a vocabulary that is at most its root."""
    return next(parts for parts in range(isqrt(vocabulary), 0, -1) if vocabulary % parts == 0)


def one_program(step: nn.Module, options: dict[str, Any] | None = None) -> Callable[..., Tensor]:
    """A step by torch.compile with programs of its own. An older torch counts all objects' together: a ninth is eager.

    options: of the compiler, by default `compile_options`.
    """
    given: dict[str, Any] = {"dynamic": False, "options": compile_options() if options is None else options}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        given["isolate_recompiles"] = True
    compiled: Callable[..., Tensor] = torch.compile(step, **given)
    return compiled


def check_tokens(input_ids: Any, new: Any) -> None:
    """TypeError or ValueError for what is no tokens (B, prompt), or no number of new ones."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(
            f"input_ids are a tensor of int64 or int32, got {got}; pass tokenizer(...).input_ids as one"
        )
    if input_ids.dim() != 2 or not len(input_ids):
        raise ValueError(
            f"input_ids have shape (sequences, tokens), got {tuple(input_ids.shape)}; input_ids[None] is one sequence"
        )
    if type(new) is bool or not isinstance(new, Integral):
        raise TypeError(f"max_new_tokens is a number of tokens, an integer, got {new!r}")


def ends_of(eos_token_id: Any, device: Any) -> Tensor:
    """End tokens as a tensor, an empty one of None. TypeError for others than integers."""
    given = eos_token_id.tolist() if isinstance(eos_token_id, Tensor) else eos_token_id
    ends = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(end, Integral) for end in ends):
        raise TypeError(
            f"eos_token_id is one token or several, as integers, got {eos_token_id!r}; tokenizer.convert_tokens_to_ids has a "
            "word's"
        )
    return torch.tensor(ends, dtype=torch.int64, device=device)


def _check(model: Any, max_length: int) -> None:
    config = getattr(model, "config", None)
    if not hasattr(model, "generate") or config is None or config.is_encoder_decoder:
        raise TypeError(
            f"GreedyDecoding takes a transformers decoder that generates, got {type(model).__name__}; for others there is "
            "ao_lab.use_kv_cache_ and generate()"
        )
    if not takes_functions(model):
        raise ValueError(
            f"the attention of {type(model).__name__} cannot be replaced, and its own does not read an ao_lab cache; use "
            "transformers' generate()"
        )
    check_attention(model)
    if type(max_length) is not int or max_length < 2:
        raise ValueError(f"max_length is a number of tokens, 2 or more; got {max_length!r}")


__all__ = ["GreedyDecoding", "check_tokens", "ends_of", "one_program"]
