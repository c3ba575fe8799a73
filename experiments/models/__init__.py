"""The small language model that experiments train, and how."""
