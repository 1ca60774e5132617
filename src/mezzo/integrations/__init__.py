"""Plugins for training frameworks: one module per framework, imported only when asked for."""
