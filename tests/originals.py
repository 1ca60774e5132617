"""Where the documents and their own files lie: beside the repository, never in it."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared" / "spec"
ORIGINALS = SHARED / "originals"
DOCUMENTS = SHARED / "source"

needs_originals = pytest.mark.skipif(
    not (ORIGINALS / "commands.jsonl").is_file(), reason="the documents' own files are not beside the repository"
)
needs_documents = pytest.mark.skipif(not DOCUMENTS.is_dir(), reason="the documents are not beside the repository")
