"""Input names as identifiers, which generated code and files need; users may choose any string."""

from __future__ import annotations

import keyword
import re

_ESCAPED = re.compile(r"\w+_named_hex_([0-9a-f]*)", re.ASCII)


def escaped(name: str) -> str:
    """Return a unique identifier for a name: its readable part, then the whole name in hexadecimal.

    The identifier is lower-case, because `torch.export` lower-cases names. It has no double
    underscore, because the loader refuses files with one in a text.

    >>> escaped("y:0")
    'y_0_named_hex_793a30'
    """
    readable = re.sub(r"[\W_]+", "_", name.lower(), flags=re.ASCII).strip("_")
    start = "" if readable[:1].isalpha() else "input_" if readable else "input"
    return f"{start}{readable}_named_hex_{name.encode(errors='surrogatepass').hex()}"


def identifier_of(name: str) -> str:
    """Return the name if it is valid in generated code and in a file, otherwise `escaped(name)`.

    >>> identifier_of("label"), identifier_of("class")
    ('label', 'class_named_hex_636c617373')
    """
    is_usable = name.isascii() and name.isidentifier() and name == name.lower() and name != "self" and "__" not in name
    return name if is_usable and not keyword.iskeyword(name) and not _ESCAPED.fullmatch(name) else escaped(name)


def name_of(identifier: str) -> str:
    """Return the original name of an identifier; any identifier not made by `escaped` is unchanged.

    >>> name_of("y_0_named_hex_793a30"), name_of("label"), name_of("x_named_hex_793a30")
    ('y:0', 'label', 'x_named_hex_793a30')
    """
    found = _ESCAPED.fullmatch(identifier)
    if found is None:
        return identifier
    try:
        name = bytes.fromhex(found[1]).decode(errors="surrogatepass")
    except ValueError:  # not written by mezzo
        return identifier
    return name if escaped(name) == identifier else identifier
