"""What a stranger's `import mezzo.proof` loads."""

from test_layers import EXTRAS, loaded_by


def test_importing_proof_loads_no_extra_and_no_command_line_library() -> None:
    assert not (loaded_by("import mezzo.proof") - loaded_by("import torch")) & set(EXTRAS)
