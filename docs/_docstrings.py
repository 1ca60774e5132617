"""Docstrings as the reference shows them: doctests are code, and methods that Python calls are left out."""

import re
from typing import Any

from griffe import Class, Extension, Object

_DOCTEST = re.compile(r"^>>> .*(?:\n.*\S.*)*", flags=re.MULTILINE)
_OPTION = re.compile(r"  # doctest: .*")
_PLUMBING = ("__reduce__", "__new__", "__enter__", "__exit__", "__post_init__")


def fence_doctests(text: str) -> str:
    """Return a docstring with every doctest fenced: Markdown takes `>>>` for quotations in quotations.

    >>> print(fence_doctests("Return 1.\\n\\n>>> one()\\n1"))
    Return 1.
    <BLANKLINE>
    ```pycon
    >>> one()
    1
    ```
    """
    return _DOCTEST.sub(lambda found: f"```pycon\n{_OPTION.sub('', found[0])}\n```", text)


class Readable(Extension):
    """Rewrites what is documented, once it is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Fence the doctests of an object."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = fence_doctests(obj.docstring.value)

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Leave out methods that nobody calls by name."""
        for name in _PLUMBING:
            cls.members.pop(name, None)
