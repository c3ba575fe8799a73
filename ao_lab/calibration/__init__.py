"""Static activation scales from data. Importing any of it registers the configurations that need them."""

from ao_lab.calibration import static as static
from ao_lab.calibration.hooks import Watch

# Files written before this was a package ask for `Watch` here.
__all__ = ["Watch"]
