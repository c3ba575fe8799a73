"""Texts that experiments can run on: a module each, with a record of itself."""
