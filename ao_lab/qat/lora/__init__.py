"""Low-rank adapters beside frozen quantized weights."""
