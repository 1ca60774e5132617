"""Names of inputs as identifiers: generated code and saved files need identifiers, a user may choose any string."""

from __future__ import annotations

import keyword
import re

_ESCAPED = re.compile(r"\w+_named_hex_([0-9a-f]*)", re.ASCII)


def escaped(name: str) -> str:
    """Return an identifier that no other name has: the readable part of the name, then all of it in hexadecimal.

    It survives `torch.export`, which changes capitals to small letters. It has no double underscore, because a file whose
    texts have one is not loaded.

    >>> escaped("y:0")
    'y_0_named_hex_793a30'
    """
    readable = re.sub(r"[\W_]+", "_", name.lower(), flags=re.ASCII).strip("_")
    start = "" if readable[:1].isalpha() else "input_" if readable else "input"
    return f"{start}{readable}_named_hex_{name.encode(errors='surrogatepass').hex()}"


def identifier_of(name: str) -> str:
    """Return the name where it can stand in generated code and in a file, otherwise `escaped(name)`.

    >>> identifier_of("label"), identifier_of("class")
    ('label', 'class_named_hex_636c617373')
    """
    is_usable = name.isascii() and name.isidentifier() and name == name.lower() and name != "self" and "__" not in name
    return name if is_usable and not keyword.iskeyword(name) and not _ESCAPED.fullmatch(name) else escaped(name)


def name_of(identifier: str) -> str:
    """Return the name that an identifier stands for; one that `escaped` did not make stands for itself.

    >>> name_of("y_0_named_hex_793a30"), name_of("label"), name_of("x_named_hex_793a30")
    ('y:0', 'label', 'x_named_hex_793a30')
    """
    found = _ESCAPED.fullmatch(identifier)
    if found is None:
        return identifier
    try:
        name = bytes.fromhex(found[1]).decode(errors="surrogatepass")
    except ValueError:  # a file may come from anyone
        return identifier
    return name if escaped(name) == identifier else identifier
