"""What Dynamo does while it traces a program, as far as it depends on torch's version."""

from torch._dynamo.source import ConstantSource
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from reference import Scheme


def keys_without_origin(monkeypatch):
    """A list that gets the key of every record that a traced program asks for its key and a constant function gave it.

    Dynamo of torch 2.13 reads it, that of torch 2.11 cannot: "can't reconstruct arbitrary frozen dataclass instances".
    """
    read, getattr_of = [], UserDefinedObjectVariable.var_getattr

    def var_getattr(self, tx, name):
        if name == "key" and isinstance(self.value, Scheme) and isinstance(self.source, ConstantSource):
            read.append(self.value.key)
        return getattr_of(self, tx, name)

    monkeypatch.setattr(UserDefinedObjectVariable, "var_getattr", var_getattr)
    return read
