"""Changes of a model that make low precision stable or quick: records, and `apply_mods_`."""

from ao_lab.mods.api import ModReport as ModReport
from ao_lab.mods.api import apply_mods_ as apply_mods_
from ao_lab.mods.api import undo_mods_ as undo_mods_
from ao_lab.mods.modules import BlockNorm as BlockNorm
from ao_lab.mods.records import MODS as MODS
from ao_lab.mods.records import Mod as Mod
from ao_lab.mods.records import in_low_precision as in_low_precision
from ao_lab.mods.records import register as register
