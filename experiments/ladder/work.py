"""What is timed of a subject: units of its work with the levers of a rung, behind one interface, `Work`."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

import ao_lab
from ao_lab.quantization.groups import told_elsewhere
from experiments.harness.measuring import Values, Wrong
from experiments.ladder.decoding import Loop, captured, compiled, is_quantized, require_levers
from experiments.ladder.rungs import Levers
from experiments.ladder.seamless import Utterances
from experiments.ladder.subjects import WEIGHTS, Decoder, Ranker, Seamless, Subject
from experiments.models.hstu import candidate_index, fused_attention, padded_attention, random_batch

#: Rounds of self-speculation that are timed together.
ROUNDS = 8
#: Acceptances of one draft, for which the time of a token follows from that of a round.
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


class Work(Protocol):
    """Units of work. `units`: how many a run has. Between `begin` and the end of `run` nothing waits for the GPU."""

    units: int
    model: Any

    def prepare(self) -> None:
        """Compile and record."""

    def begin(self) -> None:
        """The state before a run."""

    def run(self) -> None:
        """All units."""

    def outputs(self) -> Tensor:
        """Outputs of the first unit, float32."""

    def evidence(self) -> None:
        """Wrong where a lever is on and has changed nothing."""

    def values(self, seconds: float) -> Values:
        """What follows from the seconds of a unit."""


class Tokens(Loop):
    """Steps of a decoder."""

    @property
    def units(self) -> int:
        """Tokens of each sequence."""
        return self.subject.steps

    def run(self) -> None:
        """All tokens."""
        self.steps(self.units)

    def outputs(self) -> Tensor:
        """Logits of the first token; the tokens of an image that are allowed."""
        self.begin()
        logits = self.call().clone()
        return logits[:, logits[0].isfinite()]

    def values(self, seconds: float) -> Values:
        """Tokens a second of the whole batch; an image has one of its two sequences."""
        return {"tokens/s": (self.batch / seconds, "tokens/s")}


class Speculation:
    """Rounds of self-speculation. Random weights accept nothing that says something: a round's time is measured, and a token's
    follows from how many tokens a round gives, which a trained model says (`experiments.ladder.acceptance`)."""

    units = ROUNDS

    def __init__(self, subject: Decoder, model: Any, levers: Levers, device: str, seed: int) -> None:
        self.subject, self.model, self.levers = subject, model, levers
        self.prompt = torch.full((1, subject.context), 5, dtype=torch.int64, device=device)
        self.speculation = ao_lab.SelfSpeculation(
            model,
            exit_layer=subject.exit_layer,
            drafts=subject.drafts,
            max_length=subject.context + (ROUNDS + 2) * (subject.drafts + 1),
            kv_cache=levers.cache,
            compiled=levers.compiled,
            captured=levers.graphs,
        )

    def prepare(self) -> None:
        """A call, in which a round is compiled and recorded."""
        self.speculation.generate(self.prompt, 2)
        self.begin()

    def begin(self) -> None:
        """Behind the prompt."""
        self.speculation.begin(self.prompt)

    def run(self) -> None:
        """All rounds."""
        for _ in range(ROUNDS):
            self.speculation.step()

    def outputs(self) -> Tensor:
        """Logits of the first token behind the prompt."""
        self.begin()
        last = self.speculation.tokens[:, self.subject.context : self.subject.context + 1]
        return self.speculation.check(last, self.speculation.cache)[:, -1].float()

    def evidence(self) -> None:
        """Wrong where no round was counted, or a recorded one was not replayed."""
        self.begin()
        self.run()
        if int(self.speculation.rounds) != ROUNDS:
            raise Wrong(
                f"{ROUNDS} rounds counted {int(self.speculation.rounds)}: they are not what was timed"
            )
        if self.levers.graphs != self.speculation.is_recorded:
            raise Wrong("graphs did not change the model: the row would be of another rung")

    def values(self, seconds: float) -> Values:
        """A token's time at acceptances of a draft: tokens a round are (1 - a^(k + 1)) / (1 - a)."""
        k = self.subject.drafts
        tokens = {a: (1 - a ** (k + 1)) / (1 - a) for a in ACCEPTANCES}
        return {f"time at acceptance {a:g}": (1e3 * seconds / n, "ms") for a, n in tokens.items()}


class Requests:
    """Requests of an HSTU: one pass over the histories and candidates of a batch of users."""

    units = 1

    def __init__(
        self, subject: Ranker, model: Any, levers: Levers, batch: int, device: str, seed: int
    ) -> None:
        self.subject, self.model, self.levers, self.users = subject, model, levers, batch
        self.batch = random_batch(subject.config, batch, subject.candidates, seed, device)
        self.layout, self.index = self.batch.layout(), candidate_index(self.batch).to(device)
        model.use_attention(fused_attention if levers.attention else padded_attention)
        rank = compiled(model.rank, device) if levers.compiled else model.rank
        self.call = lambda: rank(self.layout, self.index)
        self.captured = False

    def prepare(self) -> None:
        """Compile and record."""
        self.call()
        if self.levers.graphs:
            self.call, self.captured = captured(self.call, self.begin), True

    def begin(self) -> None:
        """A request has no state."""

    def run(self) -> None:
        """One request."""
        self.call()

    def outputs(self) -> Tensor:
        """Logits of all candidates."""
        return self.call().float().flatten(1)

    def evidence(self) -> None:
        """Wrong where a lever is on and has changed nothing."""
        wanted = fused_attention if self.levers.attention else padded_attention
        layers = self.model.layers
        require_levers(self, attention=all(layer.attention.function is wanted for layer in layers))

    def values(self, seconds: float) -> Values:
        """Users a second, and tokens of theirs."""
        tokens = sum(self.batch.lengths)
        return {"users/s": (self.users / seconds, "users/s"), "tokens/s": (tokens / seconds, "tokens/s")}


def work_of(subject: Subject, model: Any, levers: Levers, batch: int, device: str, seed: int) -> Work:
    """The work of a subject with these levers; the model has its weights already."""
    if isinstance(subject, Ranker):
        return Requests(subject, model, levers, batch, device, seed)
    if isinstance(subject, Seamless):
        return Utterances(subject, model, levers, batch, device, seed)
    if not isinstance(subject, Decoder):
        raise TypeError(f"no work is known of {type(subject).__name__}")
    if levers.speculation:
        return Speculation(subject, model, levers, device, seed)
    return Tokens(subject, model, levers, batch, device, seed)


def weights_in(subject: Subject, model: Any, weights: str) -> Any:
    """The model with its weights in low precision, in place; Wrong where no weight has changed."""
    if weights:
        with told_elsewhere():  # stand-ins are narrow; that no weight has changed is told here
            ao_lab.quantize_(model, WEIGHTS[weights]())
        if not any(map(is_quantized, model.parameters())):
            raise Wrong(
                f"{weights} did not change a weight of {subject.name}: the row would be of another rung"
            )
    return model
