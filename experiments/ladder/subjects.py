"""Models of the ladder: exact shapes as records of transformers' own configurations, random weights built where they stay.

A subject says how a unit of its work is called, which batches it is measured at, which levers it does not have and why. At test
scale the same classes have tiny sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

import ao_lab
from experiments.ladder.rungs import Levers
from experiments.linear.tables import float8_dynamic, integers
from experiments.models.hstu import DLRM_V3, HSTU, TINY, HSTUConfig

#: Bytes that stay free at the largest batch: workspaces, programs, outputs.
FREE = 8e9
#: Tokens in the cache before the steps that are timed, and how many steps there are.
CONTEXT, STEPS = 1024, 32


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with its work.

    name: in rows, and of `--only`. unit: what is timed, in words. batches: 0 stands for the largest. refused: levers that
    it does not have, with the reason; `Levers` fields, or an option as "weights: int4". weights: of its rungs, in 8 and in 4
    bits. seconds: of a configuration that is not compiled and of one that is, on an H200.
    """

    name: str
    unit: str
    batches: tuple[int, ...] = (1, 0)
    refused: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[str, str] = ("int8", "int4")
    seconds: tuple[float, float] = (15.0, 60.0)

    def build(self, device: str, seed: int) -> Any:
        """The model in bfloat16 with random weights."""
        raise NotImplementedError

    def refusal(self, levers: Levers, batch: int, device: str) -> str | None:
        """Why a configuration does not apply; None where it does."""
        if levers.graphs and device == "cpu":
            return "CUDA graphs need a GPU"
        for lever in levers.on:
            reason = self.refused.get(lever) or self.refused.get(f"{lever}: {getattr(levers, lever)}")
            if reason:
                return reason
        if levers.speculation and batch > 1:
            return "sequences of a batch accept different numbers of drafts, and the cache has one length"
        if levers.cache and not levers.attention:
            return "a cache by a recipe is read by its own attention alone"
        return None


@contextmanager
def building(device: str, seed: int) -> Iterator[None]:
    """Modules are created on the device in bfloat16, never in float32 or on the host first."""
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True, kw_only=True)
class Decoder(Subject):
    """A decoder that generates token by token: `steps` tokens behind `context` tokens.

    architecture: the class of transformers; shape: arguments of its configuration. image: tokens are those of an image, and
    guidance makes two sequences of each (Chameleon). exit_layer: of self-speculation.
    """

    architecture: str
    shape: Mapping[str, Any]
    image: bool = False
    context: int = CONTEXT
    steps: int = STEPS
    exit_layer: int = 8
    drafts: int = 4

    def config(self) -> Any:
        """transformers' configuration."""
        import transformers

        name = self.architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
        return getattr(transformers, f"{name}Config")(**self.shape)

    def build(self, device: str, seed: int) -> Any:
        """The model, in evaluation mode."""
        import transformers

        with building(device, seed):
            model = getattr(transformers, self.architecture)._from_config(self.config(), dtype=torch.bfloat16)
        return model.eval().requires_grad_(False)

    @property
    def positions(self) -> int:
        """Tokens that a cache has room for; a round of self-speculation goes beyond the last."""
        return self.context + 2 * self.steps + 2 * self.drafts

    @property
    def sequences(self) -> int:
        """Sequences of a unit of the batch."""
        return 2 if self.image else 1

    def largest(self, free: float) -> int:
        """The largest power of two that fits beside the weights in bfloat16, with eager attention, which repeats the keys of a
        layer for every query head. free: bytes."""
        c = self.config()
        head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        one = 2 * 2 * c.num_key_value_heads * head * self.positions
        repeated = c.num_attention_heads // c.num_key_value_heads
        each = self.sequences * (one * (c.num_hidden_layers + 2 + 2 * repeated) + 16 * c.vocab_size)
        return power_of_two((free - FREE) / each)


@dataclass(frozen=True, kw_only=True)
class Ranker(Subject):
    """HSTU: one call ranks the candidates of a batch of users."""

    config: HSTUConfig
    candidates: int

    def build(self, device: str, seed: int) -> Any:
        """The model, in evaluation mode."""
        with building(device, seed):
            model = HSTU(self.config)
        return model.eval().requires_grad_(False)

    def largest(self, free: float) -> int:
        """The largest power of two whose padded scores fit: the eager form holds four (scores, SiLU, mask, their product)."""
        return power_of_two((free - FREE) / (4 * 2 * self.config.heads * self.config.length**2))


@dataclass(frozen=True, kw_only=True)
class Seamless(Subject):
    """Speech to speech: one call translates the utterances of a batch (`experiments.ladder.seamless`).

    shape: arguments of transformers' configuration. frames: of speech, 20 ms each; tokens: of the translation; characters: of
    a token; duration: units of a character.
    """

    shape: Mapping[str, Any] = field(default_factory=dict)
    beams: int = 1
    frames: int = 500
    tokens: int = 40
    characters: int = 4
    duration: int = 3

    def build(self, device: str, seed: int) -> Any:
        """The model, in evaluation mode."""
        import transformers

        config = transformers.SeamlessM4Tv2Config(**self.shape)
        with building(device, seed):
            model = transformers.SeamlessM4Tv2ForSpeechToSpeech._from_config(config, dtype=torch.bfloat16)
        return model.eval().requires_grad_(False)

    def largest(self, free: float) -> int:
        """The largest power of two with 2 GB for each utterance: logits of all beams, and convolutions of the vocoder."""
        return power_of_two((free - FREE) / 2e9)


def power_of_two(most: float) -> int:
    """The largest that is not above a number; at least 1."""
    return 1 << max(0, int(most).bit_length() - 1) if most >= 1 else 1


#: What `quantize_` gets for the weights of a rung.
WEIGHTS = {
    "int8": lambda: ao_lab.Int8WeightOnlyConfig(),
    "int4": integers(4, 128),
    "fp8": float8_dynamic(ao_lab.PerRow()),
}
LLAMA = partial(Decoder, architecture="LlamaForCausalLM", unit="token")
CHAMELEON = partial(Decoder, architecture="ChameleonForConditionalGeneration", unit="token")


def image_names(count: int, first: int = 4) -> dict[str, int]:
    """A vocabulary map as the checkpoint's: the codes of an image are called IMGIMG and letters for their digits."""
    names = {
        f"IMGIMG{''.join(chr(ord('A') + int(digit)) for digit in str(code))}Z": first + code
        for code in range(count)
    }
    return {"<image>": first + count, **names}


CHAMELEON_7B = {"vocab_size": 65536, "vocabulary_map": image_names(8192), "max_position_embeddings": 4096}
#: Inputs are quantized too: a request has so many tokens that its matmuls are bound by arithmetic.
HSTU_WEIGHTS = ("fp8", "int4")
HSTU_REFUSED = {
    "weights: int4": "matmuls over a hundred thousand tokens are bound by arithmetic, of which 4-bit weights save nothing",
    "cache": "a request is one pass over all tokens, which stores no keys for a next one",
    "speculation": "nothing is generated token by token",
}
SEAMLESS_REFUSED = {
    "speculation": "beams continue different sequences, and no decoder of speech was trained with early exits here",
}

MODELS: tuple[Subject, ...] = (
    LLAMA(
        name="llama-3.1-8b",
        shape={
            "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        },
    ),
    LLAMA(
        name="code-llama-34b",
        shape={
            "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 22016, "num_hidden_layers": 48,
            "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 16384,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        exit_layer=12, seconds=(25.0, 90.0),
    ),
    CHAMELEON(name="chameleon-7b-text", shape=CHAMELEON_7B),
    CHAMELEON(name="chameleon-7b-image", shape=CHAMELEON_7B, image=True, context=544),
    Seamless(name="seamless-m4t-v2", unit="utterance", refused=SEAMLESS_REFUSED, seconds=(30.0, 150.0)),
    Seamless(
        name="seamless-m4t-v2-beams", unit="utterance", beams=5, refused=SEAMLESS_REFUSED, batches=(1,), seconds=(30.0, 150.0)
    ),
    Ranker(
        name="hstu-dlrmv3", unit="request", config=DLRM_V3, candidates=2048, refused=HSTU_REFUSED,
        weights=HSTU_WEIGHTS,
    ),
)  # fmt: skip

_TINY_LLAMA = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
_TINY_VQ = {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "base_channels": 32, "resolution": 16,
            "channel_multiplier": [1], "num_res_blocks": 1}  # fmt: skip
_TINY_CHAMELEON = {
    **_TINY_LLAMA,
    "num_key_value_heads": 4,
    "vocabulary_map": image_names(16),
    "vq_config": _TINY_VQ,
}
_SMALL = {"context": 8, "steps": 3, "exit_layer": 1, "drafts": 2, "seconds": (0.0, 0.0)}
_TINY_SEAMLESS = {
    "vocab_size": 64, "t2u_vocab_size": 40, "char_vocab_size": 30, "hidden_size": 128, "encoder_layers": 1, "decoder_layers": 2,
    "speech_encoder_layers": 1, "speech_encoder_attention_heads": 2, "speech_encoder_intermediate_size": 128,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "t2u_encoder_layers": 1, "t2u_decoder_layers": 1, "t2u_encoder_attention_heads": 2, "t2u_decoder_attention_heads": 2,
    "t2u_encoder_ffn_dim": 128, "t2u_decoder_ffn_dim": 128, "feature_projection_input_dim": 20,
    "t2u_variance_predictor_embed_dim": 128, "t2u_variance_predictor_hidden_dim": 16, "unit_embed_dim": 16,
    "unit_hifi_gan_vocab_size": 40, "lang_embed_dim": 8, "spkr_embed_dim": 8, "vocoder_num_langs": 2, "vocoder_num_spkrs": 2,
    "upsample_initial_channel": 32, "upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4], "max_position_embeddings": 64,
    "t2u_max_position_embeddings": 64,
}  # fmt: skip
STAND_INS: tuple[Subject, ...] = (
    LLAMA(name="llama-tiny", shape=_TINY_LLAMA, **_SMALL),
    CHAMELEON(name="chameleon-tiny-image", shape=_TINY_CHAMELEON, image=True, batches=(1,), **_SMALL),
    Seamless(
        name="seamless-tiny-beams", unit="utterance", shape=_TINY_SEAMLESS, beams=2, frames=32, tokens=3, characters=2,
        duration=2, refused=SEAMLESS_REFUSED, batches=(1,), seconds=(0.0, 0.0),
    ),
    Ranker(
        name="hstu-tiny", unit="request", config=replace(TINY, width=128, heads=2, qk_width=64, v_width=64), candidates=8,
        refused=HSTU_REFUSED, weights=HSTU_WEIGHTS, batches=(1,), seconds=(0.0, 0.0),
    ),
)  # fmt: skip
