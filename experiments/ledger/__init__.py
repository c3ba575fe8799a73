"""The GPU ledger."""
