"""What a language model writes for programming problems, and how many of its programs pass.

Greedy, at most TOKENS tokens, BATCH problems at a time, padded on the left; a scale that is over a whole input (NVFP4's outer
one) is over such a batch. A model with a chat template is asked for a script in a block of Markdown, and its answer is begun
for it; the program is what stands in the block. One without is given the head of the function, and its body ends where the next
statement begins at the margin. "pass@1" is the share of problems whose one program passes (`experiments.data.programs.passes`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ao_lab.eval import standard_error
from ao_lab.install.extras import needed
from experiments.data.programs import Problem, passes
from experiments.harness.measuring import Values

TOKENS = 320
BATCH = {"cpu": 8, "cuda": 82}
ASK = "Please write a self-contained Python script that solves the following problem, in a Markdown code block:\n```\n{}\n```\n"
BEGUN = "Here is a Python script that solves the problem:\n```python\n"
#: Where a body ends: a line that begins at the margin.
MARGIN = re.compile(r"\n(?=[^\s)\]}])")
NAME = "HumanEval"


@dataclass
class Programs:
    """Problems for a model's tokenizer, and which of them the dense model solves, once it was asked."""

    problems: tuple[Problem, ...]
    tokenizer: Any
    base: nn.Module
    solved: list[float] = field(default_factory=list)

    def values(self, model: nn.Module) -> Values:
        """pass@1 of a model, and its change from the dense one, paired by problem."""
        if not self.solved:
            self.solved = self.outcomes(self.base)
        found = self.solved if model is self.base else self.outcomes(model)
        change = [ours - base for ours, base in zip(found, self.solved, strict=True)]
        count = len(found)
        return {
            f"{NAME}: pass@1": (100 * sum(found) / count, "%"),
            f"{NAME}: pass@1, standard error": (100 * standard_error(found), "%"),
            f"{NAME}: pass@1, change": (100 * sum(change) / count, "points"),
            f"{NAME}: pass@1, standard error of the change": (100 * standard_error(change), "points"),
            f"{NAME}: problems": (count, ""),
        }

    def outcomes(self, model: nn.Module) -> list[float]:
        """1 for each problem whose program passes, else 0."""
        batch = BATCH[next(model.parameters()).device.type]
        written = [
            answer
            for start in range(0, len(self.problems), batch)
            for answer in answers(model, self.tokenizer, self.problems[start : start + batch])
        ]
        chat = self.tokenizer.chat_template is not None
        return [
            float(passes(one.program(code_of(one, answer, chat))))
            for one, answer in zip(self.problems, written, strict=True)
        ]


def programs_of(folder: Any, base: nn.Module, problems: tuple[Problem, ...]) -> Programs:
    """Problems for the model of a folder, padded on the left; ValueError without a token to pad with."""
    tokenizer = needed("transformers").AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, padding_side="left"
    )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(f"the tokenizer of {folder} names neither pad_token nor eos_token; name one")
        tokenizer.pad_token = tokenizer.eos_token
    return Programs(problems, tokenizer, base)


def prompt_of(problem: Problem, tokenizer: Any) -> str:
    """What a model is given to go on from."""
    if tokenizer.chat_template is None:
        return problem.prompt
    asked = [{"role": "user", "content": ASK.format(problem.prompt.strip())}]
    return str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)) + BEGUN


def answers(model: Any, tokenizer: Any, problems: Sequence[Problem]) -> list[str]:
    """What a model writes for each problem."""
    chat = tokenizer.chat_template is not None
    given = tokenizer(
        [prompt_of(one, tokenizer) for one in problems],
        return_tensors="pt",
        padding=True,
        # A chat template writes the tokens that begin a text itself.
        add_special_tokens=not chat,
    ).to(next(model.parameters()).device)
    with torch.no_grad():
        ids = model.generate(
            input_ids=given["input_ids"],
            attention_mask=given["attention_mask"],
            do_sample=False,
            max_new_tokens=TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            stop_strings=["\n```"] if chat else None,
            tokenizer=tokenizer if chat else None,
        )
    return [
        str(text)
        for text in tokenizer.batch_decode(ids[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    ]


def code_of(problem: Problem, answer: str, chat: bool) -> str:
    """The program in an answer: what stands before the block's end, behind the imports of the problem; without a chat template
    the head of the function and the body up to the next line at the margin."""
    if not chat:
        return problem.prompt + MARGIN.split(answer, maxsplit=1)[0]
    code = answer.partition("\n```")[0]
    head = problem.prompt.partition("def ")[0]
    # A model may go on in the middle of the function that it was shown.
    return head + code if f"def {problem.entry}" in code else problem.prompt + code
