"""Static activation scales from data. Importing any of it registers the configurations that need them."""

from ao_lab.calibration import static as static
