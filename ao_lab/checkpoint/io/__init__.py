"""Files: safetensors and JSON from elsewhere, read with checks and written whole."""
