"""`ao-lab quantize --calibration TEXT --method NAME`: a dense model calibrated with windows of a text; --stream: from files."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ao_lab.cli.terminal import WrongInput, check_device, say

if TYPE_CHECKING:
    from ao_lab.config.base import Config
    from ao_lab.transforms.plan import Progress

#: Windows of a batch.
BATCH = 8


@dataclass(frozen=True)
class Calibration:
    """What the command line says of it."""

    #: A text file, or a named text; None: methods without data.
    text: str | None = None
    methods: list[str] = field(default_factory=list)
    windows: int = 128
    length: int = 512
    corpus: Path | None = None
    device: str | None = None
    resume: Path | None = None
    #: Whether one block at a time is on the device, its weights from the files.
    stream: bool = False

    def checked(self) -> tuple[Any, ...]:
        """The methods; WrongInput, before any work, where something does not fit."""
        from ao_lab.calibration.methods import ordered
        from ao_lab.eval import check_text

        if self.windows < 1 or self.length < 2:
            raise WrongInput(
                f"--windows is at least 1 and --length at least 2 tokens, got {self.windows} and {self.length}"
            )
        check_device(self.device)
        try:
            methods = ordered(self.methods)
            if self.text is not None:
                check_text(self.text, self.corpus)
        except ValueError as error:
            raise WrongInput(str(error).replace("--text", "--calibration")) from error
        reading = [method.name for method in methods if method.calibrates]
        if reading and self.text is None:
            raise WrongInput(
                f"--method {reading[0]} needs calibration data; give --calibration TEXT, a text file"
            )
        if self.text is not None and not reading:
            raise WrongInput("--calibration is used by methods only; give --method too, such as clip or gptq")
        if self.text is None and self.resume is not None:
            raise WrongInput(
                "--resume stores the blocks that calibration has finished; give --calibration too"
            )
        if self.text is None and self.stream:
            raise WrongInput("--stream is a mode of calibration; give --calibration too")
        return methods

    def loader(self) -> Callable[[Path, Config, Any, Progress | None], Any]:
        """What makes the quantized model of a folder; checks first."""
        methods = self.checked()

        def load(source: Path, config: Config, accepts: Any, progress: Progress | None) -> Any:
            return self._quantized(source, config, accepts, progress, methods)

        return load

    def _quantized(
        self, source: Path, config: Config, accepts: Any, progress: Progress | None, methods: tuple[Any, ...]
    ) -> Any:
        from ao_lab.checkpoint.streaming import dense_of_files
        from ao_lab.cli.layout import check_layers
        from ao_lab.measure.folders import by_transformers, check_language_model
        from ao_lab.quantization.api import quantize_
        from ao_lab.quantization.groups import told_elsewhere

        say_phase = progress or (lambda word, done, total: None)
        say_phase("loading the model", 0, 0)
        model = dense_of_files(source) if self.stream else by_transformers(source, None)
        check_layers(source, model)
        options: dict[str, Any] = {}
        if self.text is not None:
            check_language_model(model, source)
            say_phase("tokens of the calibration text", 0, 0)
            options = {"calibration": self.batches(source, model), "resume": self.resume}
        if self.stream:
            options |= {"offload": True, "device": self.device or "cpu"}
        else:
            model = model.to(self.device or "cpu")
        with told_elsewhere():
            quantize_(model, config, accepts, methods=methods, progress=progress, **options)
        return model.to("cpu")

    def batches(self, source: Path, model: Any) -> list[dict[str, Any]]:
        """Windows of the text as batches of the model's tokens."""
        import torch

        from ao_lab.eval import text_of, windows_of
        from ao_lab.measure.folders import check_vocabulary, encoder, longest

        encode, _, beginning = encoder(source)
        text = text_of(self.text, self.corpus).text
        length = min(self.length, longest(source))
        windows = windows_of(text, encode, length, self.windows, list(beginning.values()))
        check_vocabulary(model, windows.ids, source)
        if (count := len(windows.ids)) < self.windows:
            say(
                f"the calibration text fills {count} sequences of {length} tokens, {windows.ids.numel():,} tokens, and "
                f"--windows asks for {self.windows}; methods read these, give a longer text for more"
            )
        device = self.device or "cpu"
        return [{"input_ids": ids.to(device)} for ids in torch.split(windows.ids, BATCH)]

    def command(self) -> list[str]:
        """Its options, as they were given."""
        words = [f"--calibration {self.text}"] if self.text is not None else []
        words += [f"--method {shlex.quote(one)}" for one in self.methods]
        if self.text is not None:
            words += [f"--windows {self.windows} --length {self.length}", *["--stream"] * self.stream]
        return words
