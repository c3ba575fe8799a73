"""Weight-only linears of 2 to 128 rows: the weight in the order of the tensor core's registers, decoded there."""
