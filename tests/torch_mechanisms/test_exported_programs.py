"""The guards of an exported program can be read and changed."""

import torch
from torch import nn

from mezzo._torch.exported_programs import guards_of


class Even(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 3 else x


def test_guards_are_texts_in_a_list_of_the_program() -> None:
    sizes = {"x": {0: torch.export.Dim("n", min=4)}}
    program = torch.export.export(Even(), (torch.ones(6),), dynamic_shapes=sizes)
    guards = guards_of(program)
    assert all(isinstance(guard, str) for guard in guards)
    if hasattr(program, "_guards_code"):
        assert guards_of(program) is guards, "the guards of an ExportedProgram are no longer a list of its own"


def test_what_has_no_guards_gives_an_empty_list() -> None:
    assert guards_of(object()) == []
