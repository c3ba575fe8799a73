"""A program without ao_lab: reads folders as anyone would, and says how far outputs are from those beside them."""

import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig  # noqa: E402

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def compared(folder: Path) -> str:
    """Empty where outputs are equal, else what is wrong."""
    config = json.loads((folder / "config.json").read_text())
    QuantizationConfig.model_validate(config["quantization_config"])
    wanted = torch.load(folder / "expected.pt")
    model = getattr(transformers, config["architectures"][0]).from_pretrained(folder).eval()
    with torch.no_grad():
        found = model(**wanted["inputs"]).logits
    if found.dtype != wanted["logits"].dtype:
        return f"dtype {found.dtype}"
    far = (found - wanted["logits"]).float().norm() / wanted["logits"].float().norm()
    return "" if torch.equal(found, wanted["logits"]) else f"differs by {far:.2e}"


def main() -> None:
    told = {}
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        try:
            told[folder.name] = compared(folder)
        except Exception as error:  # noqa: BLE001  (whatever the client raises is told)
            told[folder.name] = f"{type(error).__name__}: {error}"
    if "ao_lab" in sys.modules:
        raise SystemExit("ao_lab was imported")
    print("RESULT" + json.dumps(told))


if __name__ == "__main__":
    main()
