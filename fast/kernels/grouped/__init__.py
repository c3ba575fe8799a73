"""Rows sorted by expert: gathered into padded columns, and zeros where a grouped product writes nothing."""
