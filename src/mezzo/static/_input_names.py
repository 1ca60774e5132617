"""Names of inputs as identifiers: generated code and saved files need identifiers, a user may choose any string."""

from __future__ import annotations

import keyword
import re

_ESCAPED = re.compile(r"\w*__named_([0-9a-f]*)", re.ASCII)


def escaped(name: str) -> str:
    """Return an identifier that no other name has: the readable part of the name, then all of it in hexadecimal.

    It survives `torch.export`, which changes capitals to small letters.

    >>> escaped("y:0")
    'y_0__named_793a30'
    """
    readable = re.sub(r"\W", "_", name.lower(), flags=re.ASCII)
    return f"{'' if readable[:1].isalpha() else 'input_'}{readable}__named_{name.encode(errors='surrogatepass').hex()}"


def identifier_of(name: str) -> str:
    """Return the name where it can stand in generated code and in a file, otherwise `escaped(name)`.

    >>> identifier_of("label"), identifier_of("class")
    ('label', 'class__named_636c617373')
    """
    is_usable = name.isascii() and name.isidentifier() and name == name.lower() and name != "self"
    return name if is_usable and not keyword.iskeyword(name) and not _ESCAPED.fullmatch(name) else escaped(name)


def name_of(identifier: str) -> str:
    """Return the name that an identifier stands for.

    >>> name_of("y_0__named_793a30"), name_of("label")
    ('y:0', 'label')
    """
    found = _ESCAPED.fullmatch(identifier)
    if found is None:
        return identifier
    try:
        return bytes.fromhex(found[1]).decode(errors="surrogatepass")
    except ValueError:  # a file may come from anyone
        return identifier
