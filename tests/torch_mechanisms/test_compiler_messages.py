"""Inductor's messages about operators without a lowering are written only if they are read."""

from mezzo._torch.compiler_messages import write_messages_lazily


class Argument:
    """Counts how often it is described."""

    described = 0

    def __str__(self) -> str:
        self.described += 1
        return "argument"

    __repr__ = __str__


def test_an_operator_without_a_lowering_is_described_when_its_message_is_read() -> None:
    from torch._inductor.exc import MissingOperatorWithoutDecomp

    write_messages_lazily()
    write_messages_lazily()
    argument = Argument()
    message = MissingOperatorWithoutDecomp.operator_str("mezzo.batch_norm", [argument], {})
    assert argument.described == 0
    assert f"{message}".splitlines() == ["  target: mezzo.batch_norm", "  args[0]: argument"]
    assert argument.described == 1
    error = MissingOperatorWithoutDecomp("mezzo.batch_norm", [argument], {})
    assert str(error).splitlines()[1:] == str(message).splitlines()
