"""How this copy is installed, which extras it has, and what shadows it."""
