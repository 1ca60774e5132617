"""Mixed-precision training on PyTorch."""
