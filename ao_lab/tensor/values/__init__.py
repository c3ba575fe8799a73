"""Operations on the values that a `QuantizedTensor` stands for: changes in place, and arithmetic whose results are dense."""

from ao_lab.tensor.values import averages as averages
from ao_lab.tensor.values import in_place as in_place
from ao_lab.tensor.values import reads as reads
from ao_lab.tensor.values import scaling as scaling

__all__: list[str] = []
