"""Both quantized copies of a matrix, along its rows and along its columns, from one read."""
