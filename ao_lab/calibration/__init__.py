"""Methods that read data, and static activation scales. Importing any of it registers the configurations that need them.

The records of methods are public names of `ao_lab` (`ao_lab.GPTQ`) and can be imported from here too.
"""

from typing import TYPE_CHECKING, Any

from ao_lab.calibration import static as static
from ao_lab.calibration.methods import AWQ as AWQ
from ao_lab.calibration.methods import GPTQ as GPTQ
from ao_lab.calibration.methods import HQQ as HQQ
from ao_lab.calibration.methods import AutoRound as AutoRound
from ao_lab.calibration.methods import BiasCorrection as BiasCorrection
from ao_lab.calibration.methods import Clip as Clip
from ao_lab.calibration.methods import LowRank as LowRank
from ao_lab.calibration.methods import Rotate as Rotate
from ao_lab.calibration.methods import Smooth as Smooth
from ao_lab.calibration.methods import StaticKV as StaticKV

if TYPE_CHECKING:
    from ao_lab.calibration.ranks import DistributedBatches as DistributedBatches


def __getattr__(name: str) -> Any:
    """`DistributedBatches`, whose module imports what a program that calibrates nothing has no use for."""
    if name != "DistributedBatches":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ao_lab.calibration.ranks import DistributedBatches

    return DistributedBatches
