"""Tables of the documentation's pages, by name: a comment `<!-- table: NAME -->` stands before each."""

import ast
import re
from functools import cache

from doc_pages import DOCS, ROOT

Row = dict[str, str]


def read_page(name: str) -> str:
    """Return the text of a page of docs/."""
    return (DOCS / name).read_text(encoding="utf-8")


def read_table(page: str, name: str) -> list[Row]:
    """Return the rows of a table, each by column."""
    _, found, rest = read_page(page).partition(f"<!-- table: {name} -->\n")
    assert found, f"{page} has no table {name!r}"
    lines = rest.partition("\n\n")[0].strip().splitlines()
    head, _, *body = [_cells(line) for line in lines]
    return [dict(zip(head, cells, strict=True)) for cells in body]


def table_names(page: str) -> list[str]:
    """Return the names of all tables of a page that have one."""
    return re.findall(r"<!-- table: (.+?) -->", read_page(page))


def code_spans(cell: str) -> list[str]:
    """Return what stands between backquotes."""
    return re.findall(r"`([^`]+)`", cell)


@cache
def functions_of(path: str) -> frozenset[str]:
    """Return the names of the functions of a file of this repository."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def _cells(line: str) -> list[str]:
    assert line.startswith("|"), line
    assert line.endswith("|"), line
    return [cell.strip() for cell in line[1:-1].split("|")]
