"""Which precision each operator runs in."""
