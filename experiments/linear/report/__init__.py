"""The page of experiment `linear`."""
