"""Helpers of these tests import their framework: they are looked at only where it is installed."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("lightning_utilities") else ["lightning_*.py"]
