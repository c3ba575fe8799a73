"""Self-speculation: the first layers of a model draft tokens that the whole model checks (LayerSkip, arXiv 2404.16710).

    speculation = ao_lab.SelfSpeculation(model, exit_layer=8, drafts=4)
    tokens = speculation.generate(input_ids, max_new_tokens=256)

Draft and check share weights, output layer and one `KVCache`. A round: `drafts` steps of the first layers, each the choice of
the output layer after them; their keys and values are forgotten by a counter; one pass of all layers over the last token and
the drafts; of its choices those up to the first that differs from its draft are the new tokens, so that they are what greedy
decoding would choose. Whether a draft was right is decided on the device, and a round may be one CUDA graph.

A model drafts well after training with layer dropout and losses of early exits; another one's drafts cost time, and change no
token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ao_lab.greedy_decoding import check_tokens, ends_of, one_program
from ao_lab.install.versions import cache_argument
from ao_lab.kv_cache.attention import inner, reader_of_caches
from ao_lab.kv_cache.cache import KVCache, check_attention
from ao_lab.kv_cache.layer import KVLayer

#: Rounds before a capture.
WARMUP = 2


@dataclass(frozen=True)
class Speculated:
    """What a call has generated. tokens: (1, prompt and new ones). rounds: passes of all layers after the prompt. accepted:
    drafts that were right in them, those beyond the last token of the call too."""

    tokens: Tensor
    rounds: int
    accepted: int
    drafts: int

    @property
    def acceptance(self) -> float:
        """Share of drafts that were right; those after the first wrong one of a round count as wrong."""
        return self.accepted / max(1, self.rounds * self.drafts)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a round gave."""
        return 1 + self.accepted / max(1, self.rounds)


class SelfSpeculation:
    """Self-speculative greedy decoding of one sequence by a transformers decoder (`model.model.layers`, `model.lm_head`).

    exit_layer: number of layers that draft, 1 to one less than the model's. drafts: tokens drafted per round. max_length:
    tokens of prompt and answer together. kv_cache: a recipe of `use_kv_cache_`. compiled: run both passes with torch.compile.
    captured: record a round as a CUDA graph. Default: on a GPU. The model's attention is set to "ao_lab"; its weights are
    unchanged and may be quantized.

    Tokens are those of greedy decoding with the same cache. If the two largest logits are closer than rounding, a pass over
    several tokens may choose the other, as in any speculative decoding; and with a recipe that keeps the last tokens
    unquantized (`residual`), those that rejected drafts pushed out come back quantized.

    TypeError for a model without such layers. ValueError for numbers out of range, and for layers with sliding windows, with
    states of a recurrence or convolution, with latent states, or with attention sinks.
    """

    def __init__(
        self,
        model: Any,
        *,
        exit_layer: int,
        drafts: int = 4,
        max_length: int = 4096,
        kv_cache: Any = "bfloat16",
        compiled: bool = False,
        captured: bool | None = None,
    ) -> None:
        model = inner(model)
        layers = _layers(model)
        check_attention(model)
        if not 1 <= exit_layer < len(layers):
            raise ValueError(
                f"exit_layer is at least 1 and below this model's {len(layers)} layers, got {exit_layer}; the first "
                "layers draft and all of them check"
            )
        if drafts < 1:
            raise ValueError(f"drafts is 1 or more tokens a round, got {drafts}")
        self.model, self.exit_layer, self.drafts, self.max_length = model, exit_layer, drafts, max_length
        self.cache = KVCache(model, kv_cache, max_length + drafts + 1)
        if not all(isinstance(layer, KVLayer) for layer in self.cache.layers):
            raise ValueError(
                f"{type(model).__name__} has layers with sliding windows or states, from which rejected drafts cannot be "
                "taken back"
            )
        device = next(model.parameters()).device
        self.captured = device.type == "cuda" if captured is None else captured
        if self.captured and device.type != "cuda":
            raise ValueError(
                f"captured=True needs a model on a GPU, this one is on {device.type}; leave it out"
            )
        model.set_attn_implementation(reader_of_caches(model))
        whole, early = NextTokens(model), NextTokens(_first_layers(model, exit_layer))
        self.check: Callable[..., Tensor] = one_program(whole) if compiled else whole
        self.draft: Callable[..., Tensor] = one_program(early) if compiled else early
        self._prefill = whole
        self.places = torch.arange(max_length + drafts + 1, device=device)
        #: All tokens so far, with room for a round beyond the last; their number; accepted drafts; rounds.
        self.tokens = torch.zeros(1, max_length + drafts + 1, dtype=torch.int64, device=device)
        self.length, self.accepted, self.rounds = (
            torch.zeros((), dtype=torch.int64, device=device) for _ in range(3)
        )
        self._replay: Callable[[], None] | None = None

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, max_new_tokens: int, eos_token_id: int | Sequence[int] | None = None
    ) -> Speculated:
        """Tokens (1, prompt) to (1, prompt + new); fewer new ones where eos_token_id came, or one of several (as of a model's
        `generation_config`), which is the last then.

        ValueError for more than one sequence, an empty prompt, and tokens beyond `max_length`.
        """
        ends = ends_of(eos_token_id, self.places.device)
        self.begin(input_ids, max_new_tokens)
        if self.captured and self._replay is None and max_new_tokens > 1:
            self._capture(input_ids)
        prompt, wanted = input_ids.shape[1], input_ids.shape[1] + max_new_tokens
        known = int(self.length)
        end = self._end(prompt, known, ends)
        while known < wanted and end is None:
            self.step()
            before, known = known, int(self.length)
            end = self._end(before, known, ends)
        tokens = self.tokens[:, : min(known, wanted, end or wanted)].clone()
        return Speculated(tokens, int(self.rounds), int(self.accepted), self.drafts)

    @torch.no_grad()
    def begin(self, input_ids: Tensor, max_new_tokens: int = 1) -> None:
        """Read the prompt, and choose the first token."""
        check_tokens(input_ids, max_new_tokens)
        batch, prompt = input_ids.shape
        if batch != 1 or prompt < 1:
            raise ValueError(
                f"self-speculation takes one sequence of at least a token, got {tuple(input_ids.shape)}: sequences of a batch "
                "accept different numbers of drafts"
            )
        if max_new_tokens < 1 or prompt + max_new_tokens > self.max_length:
            raise ValueError(
                f"{prompt} tokens and {max_new_tokens} new ones do not fit max_length={self.max_length}; make another "
                "SelfSpeculation, or ask for fewer"
            )
        self.cache.reset()
        for counter in (self.length, self.accepted, self.rounds):
            counter.zero_()
        self.tokens[:, :prompt] = input_ids
        self.tokens[:, prompt] = self._prefill(input_ids, self.cache, logits_to_keep=1)[:, -1].argmax(-1)
        self.length.add_(prompt + 1)

    @property
    def is_recorded(self) -> bool:
        """Whether a round is replayed from a CUDA graph."""
        return self._replay is not None

    def step(self) -> None:
        """One more round, replayed where it was recorded."""
        if self._replay is None:
            self.round()
        else:
            self._replay()

    @torch.no_grad()
    def round(self) -> None:
        """Drafts, check, and what is right of them, without a word to the host."""
        # An index of one dimension stays on the device.
        last = self.tokens.index_select(1, (self.length - 1).view(1))
        drafted = [last]
        for _ in range(self.drafts):
            drafted.append(self.draft(drafted[-1], self.cache)[:, -1:].argmax(-1))
        self._forget(self.drafts, self.exit_layer)
        asked = torch.cat(drafted, 1)
        chosen = self.check(asked, self.cache, self._visible()).argmax(-1)
        right = (chosen[:, :-1] == asked[:, 1:]).to(torch.int64).cumprod(1).sum()
        # Those after the first wrong draft are written too, and overwritten by the next round.
        at = self.length + torch.arange(self.drafts + 1, device=chosen.device)
        self.tokens.index_copy_(1, at, chosen)
        self.length.add_(right + 1)
        self._forget(self.drafts - right, len(self.cache.layers))
        self.accepted.add_(right)
        self.rounds.add_(1)

    def _visible(self) -> Tensor:
        """Which tokens of the cache each token of a check sees, (1, 1, drafts + 1, room): transformers, which makes a mask for
        several tokens otherwise, asks the host whether the cache is empty."""
        last = self.length - 1 + torch.arange(self.drafts + 1, device=self.places.device)
        return (self.places <= last[:, None])[None, None]

    def _forget(self, count: Any, layers: int) -> None:
        """Take the last tokens back from the first layers of the cache."""
        for layer in self.cache.layers[:layers]:
            layer.forget(count)

    def _end(self, first: int, known: int, ends: Tensor) -> int | None:
        """How many tokens there are up to the first of `ends` among those from `first` on; None without one."""
        if not ends.numel():
            return None
        places = torch.isin(self.tokens[0, first:known], ends).nonzero()
        return first + int(places[0]) + 1 if len(places) else None

    def _capture(self, input_ids: Tensor) -> None:
        """Record a round, and read the prompt again, whose state the recording's warm-up has used."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self.begin(input_ids)
                self.round()
        torch.cuda.current_stream().wait_stream(stream)
        self.begin(input_ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.round()
        self._replay = graph.replay
        self.begin(input_ids)


class NextTokens(nn.Module):
    """Logits of a decoder (1, tokens, vocabulary) after each token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.cache_argument = cache_argument(model.model)

    def forward(
        self, ids: Tensor, cache: Any, visible: Tensor | None = None, logits_to_keep: int = 0
    ) -> Tensor:
        """Tokens (1, n), written into the cache. visible: (1, 1, n, room), bool; None: each sees those before it.
        logits_to_keep: after how many of the last tokens; 0: after all."""
        hidden = self.model.model(
            input_ids=ids, attention_mask=visible, **{self.cache_argument: cache}, use_cache=True
        ).last_hidden_state
        logits: Tensor = self.model.lm_head(hidden[:, -logits_to_keep:])
        return logits


def _layers(model: Any) -> nn.ModuleList:
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(model, "lm_head"):
        raise TypeError(
            f"self-speculation takes a decoder of transformers with model.layers and lm_head, got {type(model).__name__}"
        )
    return layers


def _first_layers(model: Any, count: int) -> Any:
    """The model with its first layers alone: the same parameters, in other modules around them."""
    early, inner = _shallow(model), _shallow(model.model)
    inner.layers = nn.ModuleList(list(model.model.layers)[:count])
    early.model = inner
    return early


def _shallow(module: nn.Module) -> Any:
    """A module of its own with the same children, parameters and buffers."""
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__ = {
        name: dict(value) if name in ("_modules", "_parameters", "_buffers") else value
        for name, value in module.__dict__.items()
    }
    return copied


__all__ = ["SelfSpeculation", "Speculated"]
