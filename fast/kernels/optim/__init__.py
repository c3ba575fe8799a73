"""One optimizer step of many parameters in one launch."""
