"""Pages: single HTML files that load nothing from the network.

Pages may show untrusted text: jinja2 escapes it, `plain` removes control characters, and the page's security policy
allows only its own script and loads nothing. A page consists of a template that extends `page_base.html.jinja`, a style
sheet that follows `page_base.css`, and a script; its files lie in the package that makes the page.
"""

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from mezzo._version import version_of
from mezzo.errors import require
from mezzo.files import plain
from mezzo.report._numbers import duration, number

_PACKAGE = "mezzo.report"
BASE_TEMPLATE = "page_base.html.jinja"
FILTER_TEMPLATE = "page_filter.html.jinja"
OWN_TEMPLATES = (BASE_TEMPLATE, FILTER_TEMPLATE)
BASE_STYLE = "page_base.css"
FILTER_SCRIPT = "page_filter.js"


def render_page(
    package: str,
    template: str,
    content: Mapping[str, Any],
    *,
    style: str | None = None,
    script: str | None = None,
    with_filter: bool = False,
) -> str:
    """Return a page.

    The template also has `version`, and the filters `duration` and `number`. An undefined name in it is an error.

    Args:
        package: Package of the files, such as `mezzo.tipc`.
        template: Extends `page_base.html.jinja` and fills its blocks `title` and `body`.
        content: Variables of the template. Text is escaped; the template marks trusted markup `|safe`.
        style: Style sheet of the page, added to `page_base.css`.
        script: The only script that may run, at the end of the page.
        with_filter: Put the script of the filter before it; the template then calls `filter_form` of
            `page_filter.html.jinja`.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    require("jinja2", extra="report")
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(lambda name: read_asset(_PACKAGE if name in OWN_TEMPLATES else package, name)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters["duration"] = duration
    environment.filters["number"] = number
    script_text = read_asset(_PACKAGE, FILTER_SCRIPT) if with_filter else ""
    script_text += read_asset(package, script) if script else ""
    frame = {
        "version": version_of() or "(from its sources)",
        "page_style": read_asset(_PACKAGE, BASE_STYLE) + (read_asset(package, style) if style else ""),
        "page_script": script_text,
        "security_policy": security_policy(script_text),
    }
    return environment.get_template(template).render({**content, **frame})


def security_policy(script: str) -> str:
    """Return the security policy of a page with one script (or none): nothing else runs, nothing is loaded.

    Pictures may only be inside the page, as `data:` addresses.

    >>> security_policy("")
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; " if script else ""
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; {allowed}base-uri 'none'; form-action 'none'"


def read_asset(package: str, name: str) -> str:
    """Return the text of a file of a package."""
    return files(package).joinpath(name).read_text("utf-8")


def _finalize(value: Any) -> Any:
    """Remove control characters from text; leave trusted markup alone."""
    return plain(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
