"""The guards of an exported program can be read and changed; a failed export leaves no hooks."""

import pytest
import torch
from torch import nn

from mezzo._torch.exported_programs import guards_of, no_hooks_left


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


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


def test_a_failed_export_leaves_no_hook_on_modules() -> None:
    hooks = nn.modules.module._global_buffer_registration_hooks
    own = nn.modules.module.register_module_buffer_registration_hook(lambda module, name, buffer: None)
    try:
        before = dict(hooks)
        with pytest.raises(ValueError, match="no"), no_hooks_left():
            torch.export.export(Failing(), (torch.ones(2),), strict=False)
        assert dict(hooks) == before, "an export leaves hooks of another module of torch"
    finally:
        own.remove()
