"""The optimizer step: check, update, rescale."""
