"""What is done with a tile of blocks: scales, codes, values; by a fast path where the record permits it, else by the rules."""
