"""An HTML page taken apart, for the tests of pages."""

import re
from html.parser import HTMLParser
from typing import Any

VOID = ("meta", "br", "img", "link", "input")


class Page(HTMLParser):
    """A page taken apart: elements with attributes, the text of each section, and whether tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, str] = {}
        self._open: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        values = {name: value or "" for name, value in attrs}
        self.elements.append((tag, values))
        if tag not in VOID:
            self._open.append((tag, values.get("id", "")))

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self._open.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        for _, name in self._open:
            if name:
                self.texts[name] = self.texts.get(name, "") + data

    def all(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        found = [values for name, values in self.elements if name == tag]
        return [values for values in found if all(values.get(key) == value for key, value in wanted.items())]


def cells(text: str, section: str) -> list[list[str]]:
    """Return the texts of a table's rows below its head."""
    inside = re.search(rf'<section id="{section}">.*?</section>', text, re.DOTALL)
    assert inside is not None
    body = inside[0].split("<tbody>")[1]
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    return [[re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[hd]\b.*?</t[hd]>", row)] for row in rows]
