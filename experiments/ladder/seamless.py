"""Seamless M4T v2 from speech to speech: six programs between which the host reads how long the next one's input is.

The programs are transformers' modules: speech encoder; text decoder, a step of beam search for each token; text decoder once
more over the best sequence; encoder and decoder of text to units; vocoder. Durations are predicted by both of the last, and
with random weights mean nothing, so that every character lasts `duration` units and every unit one frame, and the predictors'
results are computed and not used. Beams are reordered by one device-side index of the cache. Weights of convolutions have no
weight norm, as in a checkpoint that is served.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ao_lab
from ao_lab.install.versions import cache_argument
from ao_lab.measure.memory import synchronize
from experiments.harness.measuring import Values
from experiments.ladder.decoding import WARMUP, attention_of, captured, compiled, require_levers
from experiments.ladder.rungs import Levers
from experiments.ladder.subjects import Seamless

ENCODER, TOKENS, HIDDEN, UNITS, VOCODER = PROGRAMS = (
    "speech encoder", "text decoder", "text decoder, once more", "text to units", "vocoder",
)  # fmt: skip
#: The decoder's first token, and one of the sequence that the decoder reads once more.
FIRST, ANY = 3, 5


class Encode(nn.Module):
    """Features (batch, frames, 160) to states of speech."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.speech_encoder

    def forward(self, features: Tensor) -> Tensor:
        """(batch, positions, width)."""
        states: Tensor = self.encoder(input_features=features).last_hidden_state
        return states


class Decode(nn.Module):
    """Logits of the next token of each beam, or states of all tokens without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.head = model.text_decoder, model.lm_head
        self.cache_argument = cache_argument(model.text_decoder)

    def forward(self, ids: Tensor, states: Tensor, cache: Any) -> Tensor:
        """Log probabilities (sequences, vocabulary), float32."""
        hidden = self.decoder(
            input_ids=ids, encoder_hidden_states=states, **{self.cache_argument: cache}, use_cache=True
        ).last_hidden_state
        return self.head(hidden[:, -1]).float().log_softmax(-1)

    def hidden(self, ids: Tensor, states: Tensor) -> Tensor:
        """States of all tokens (sequences, tokens, width)."""
        found: Tensor = self.decoder(
            input_ids=ids, encoder_hidden_states=states, use_cache=False
        ).last_hidden_state
        return found


class ToUnits(nn.Module):
    """States of text to units: as transformers' model, with durations that do not depend on what is predicted."""

    def __init__(self, model: Any, characters: int, duration: int) -> None:
        super().__init__()
        inner = model.t2u_model.model
        self.encoder, self.decoder, self.head = inner.encoder, inner.decoder, model.t2u_model.lm_head
        self.characters, self.duration = characters, duration

    def forward(self, states: Tensor, characters: Tensor) -> tuple[Tensor, Tensor]:
        """Unit ids (batch, tokens * characters * duration), and the logarithms of predicted durations."""
        decoder = self.decoder
        hidden = self.encoder(inputs_embeds=states).last_hidden_state.repeat_interleave(self.characters, 1)
        places = decoder.pos_emb_alpha_char * decoder.embed_char_positions(inputs_embeds=hidden)
        hidden = decoder.embed_char(characters) * decoder.embed_scale + places + hidden
        predicted = decoder.duration_predictor(hidden, padding_mask=torch.ones_like(characters))
        hidden = hidden.repeat_interleave(self.duration, 1)
        hidden = hidden + decoder.pos_emb_alpha * decoder.embed_positions(inputs_embeds=hidden)
        for layer in decoder.layers:
            hidden = layer(hidden, attention_mask=None, padding_mask=None)
        return self.head(decoder.layer_norm(hidden)).argmax(-1), predicted


class Vocode(nn.Module):
    """Units to a waveform: as transformers' module, a frame a unit."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vocoder = model.vocoder

    def forward(self, units: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, samples), and the logarithms of predicted durations."""
        vocoder = self.vocoder
        hidden = vocoder.unit_embedding(units)
        predicted = vocoder.dur_predictor(hidden)
        hidden = hidden.transpose(1, 2)
        first = torch.zeros_like(units[:, :1])
        speaker, language = (
            table(first).transpose(1, 2).expand(-1, -1, hidden.shape[-1])
            for table in (vocoder.speaker_embedding, vocoder.language_embedding)
        )
        return vocoder.hifi_gan(torch.cat([language, hidden, speaker], 1)), predicted


class FixedPositions(nn.Module):
    """The decoder's positions, looked up without asking the host whether the table is long enough: the cache's length is on the
    device, and the table covers it."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def forward(self, input_ids: Tensor, past_key_values_length: Any = 0) -> Tensor:
        """(sequences, tokens, width); no token is padding."""
        at = torch.arange(input_ids.shape[1], device=input_ids.device) + past_key_values_length
        found: Tensor = self.table.weights[at + self.table.padding_idx + 1]
        return found.expand(len(input_ids), -1, -1)


@dataclass
class Beams:
    """State of beam search: tokens (sequences, 1), sums of log probabilities (batch, beams), and the cache."""

    token: Tensor
    sums: Tensor
    offsets: Tensor
    cache: Any


class Utterances:
    """Speech to speech of a batch, with the levers of a rung; a unit is the batch's utterances."""

    units = 1

    def __init__(
        self, subject: Seamless, model: Any, levers: Levers, batch: int, device: str, seed: int
    ) -> None:
        self.subject, self.model, self.levers, self.batch, self.device = subject, model, levers, batch, device
        self.sequences = batch * subject.beams
        draw = torch.Generator().manual_seed(seed)
        like = model.text_decoder.embed_tokens.weight
        width = model.config.feature_projection_input_dim
        self.features = torch.randn(batch, subject.frames, width, generator=draw).to(like)
        shape = (batch, subject.tokens * subject.characters)
        self.characters = torch.randint(model.config.char_vocab_size, shape, generator=draw).to(device)
        decode = Decode(model)
        programs: dict[str, Any] = {
            ENCODER: Encode(model), TOKENS: decode, HIDDEN: decode.hidden,
            UNITS: ToUnits(model, subject.characters, subject.duration), VOCODER: Vocode(model),
        }  # fmt: skip
        self.programs = {
            name: compiled(one, device) if levers.compiled else one for name, one in programs.items()
        }
        positions = model.text_decoder.embed_positions
        positions = positions.table if isinstance(positions, FixedPositions) else positions
        model.text_decoder.embed_positions = FixedPositions(positions) if levers.fixed else positions
        self.states = Encode(model)(self.features).repeat_interleave(subject.beams, 0)
        self.beams = self.new_beams()
        # A cache by a recipe registers its attention.
        model.set_attn_implementation(attention_of(levers))
        self.calls: dict[str, Callable[[], Any]] = {}
        self.captured = False

    def new_beams(self) -> Beams:
        """An empty cache of the kind that the levers say, and the first token."""
        subject = self.subject
        zeros = torch.zeros(self.sequences, 1, dtype=torch.int64, device=self.device)
        # All but the first beam of a sequence begin with nothing, so that beams differ.
        sums = torch.full((self.batch, subject.beams), float("-inf"), device=self.device)
        sums[:, 0] = 0
        offsets = torch.arange(self.batch, device=self.device)[:, None] * subject.beams
        return Beams(zeros + FIRST, sums, offsets, self.new_cache())

    def new_cache(self) -> Any:
        """Of self attention, and of cross attention, whose keys are those of the speech."""
        import transformers
        from transformers.cache_utils import EncoderDecoderCache

        from ao_lab.kv_cache.cache import CachePair

        config, length = self.model.text_decoder.config, self.subject.tokens + 2 * WARMUP
        speech = self.states.shape[1]
        if self.levers.cache:
            caches = [ao_lab.KVCache(config, self.levers.cache, n, cross=True) for n in (length, speech)]
            return CachePair(*caches)
        if self.levers.fixed:
            caches = [transformers.StaticCache(config=config, max_cache_len=n) for n in (length, speech)]
        else:
            caches = [transformers.DynamicCache(config=config) for _ in range(2)]
        return EncoderDecoderCache(*caches)

    def begin_tokens(self) -> None:
        """Beam search from the first token: memory of a cache of fixed length stays where it is."""
        if not self.levers.fixed or not any(self.beams.cache.is_updated.values()):
            self.beams = self.new_beams()
        else:
            sums = torch.full_like(self.beams.sums, float("-inf"))
            sums[:, 0] = 0
            self.beams.sums.copy_(sums)
            self.beams.token.fill_(FIRST)
            self.beams.cache.self_attention_cache.reset()
        # The first token writes the keys of the speech where there are none; later ones read them.
        self.step()

    def step(self) -> None:
        """One token of each beam: the best continuations, and the cache of the beams that they continue."""
        beams = self.beams
        scores = self.programs[TOKENS](beams.token, self.states, beams.cache)
        total = beams.sums[..., None] + scores.view(self.batch, self.subject.beams, -1)
        best, index = total.flatten(1).topk(self.subject.beams, 1)
        vocabulary = scores.shape[-1]
        beams.sums.copy_(best)
        beams.token.copy_((index % vocabulary).view(-1, 1))
        if self.subject.beams > 1:
            reorder(beams.cache.self_attention_cache, (index // vocabulary + beams.offsets).flatten())

    def prepare(self) -> None:
        """Compile and record each program, on the outputs of the one before."""
        programs, subject = self.programs, self.subject
        tokens = torch.full((self.batch, subject.tokens), ANY, dtype=torch.int64, device=self.device)
        speech = programs[ENCODER](self.features)
        hidden = programs[HIDDEN](tokens, speech)
        units = programs[UNITS](hidden, self.characters)[0]
        units = units.clamp(max=self.model.config.unit_hifi_gan_vocab_size - 1)
        self.calls = {
            ENCODER: lambda: programs[ENCODER](self.features),
            TOKENS: self.step,
            HIDDEN: lambda: programs[HIDDEN](tokens, speech),
            UNITS: lambda: programs[UNITS](hidden, self.characters),
            VOCODER: lambda: programs[VOCODER](units),
        }
        self.begin_tokens()
        for call in self.calls.values():
            call()
        if self.levers.graphs:
            for name, call in self.calls.items():
                self.calls[name] = captured(call, self.begin_tokens if name == TOKENS else lambda: None)
            self.captured = True

    def begin(self) -> None:
        """Before an utterance."""
        self.begin_tokens()

    def run(self) -> None:
        """All programs, the token's as often as there are tokens."""
        for name, call in self.calls.items():
            for _ in range(self.times(name)):
                call()

    def outputs(self) -> Tensor:
        """States of speech, probabilities after the first token, and waveforms, each of length 1."""
        self.begin_tokens()
        found = [
            self.programs[TOKENS](self.beams.token, self.states, self.beams.cache).exp().view(self.batch, -1),
            *(self.calls[name]() for name in (ENCODER, VOCODER)),
        ]
        parts = [(one[0] if isinstance(one, tuple) else one).float().flatten(1) for one in found]
        return torch.cat([one / one.norm() for one in parts], 1)

    def evidence(self) -> None:
        """Wrong where a lever is on and has changed nothing."""
        kinds = {type(layer).__name__ for layer in self.beams.cache.self_attention_cache.layers}
        require_levers(
            self,
            attention=self.model.text_decoder.config._attn_implementation == attention_of(self.levers),
            cache=not self.levers.cache or kinds == {"KVLayer"},
        )

    def values(self, seconds: float) -> Values:
        """Utterances a second, and milliseconds of each program, by itself, the text decoder's of all tokens."""
        parts = {f"time, {name}": (1e3 * self.alone(name), "ms") for name in PROGRAMS}
        return {"utterances/s": (self.batch / seconds, "utterances/s"), **parts}

    def times(self, name: str) -> int:
        """How often a program is called: begin has chosen the first token."""
        return self.subject.tokens - 1 if name == TOKENS else 1

    def alone(self, name: str) -> float:
        """Seconds of all calls of a program."""
        self.begin()
        device = torch.device(self.device)
        synchronize(device)
        started = time.perf_counter()
        for _ in range(self.times(name)):
            self.calls[name]()
        synchronize(device)
        return time.perf_counter() - started


def reorder(cache: Any, index: Tensor) -> None:
    """Sequence i of every layer becomes what index[i] was, in the same memory."""
    for layer in cache.layers:
        if hasattr(layer, "expected"):  # a layer of ours
            layer.reorder_cache(index)
        elif layer.is_initialized and layer.keys.numel():
            layer.keys.copy_(layer.keys.index_select(0, index))
            layer.values.copy_(layer.values.index_select(0, index))
