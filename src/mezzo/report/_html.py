"""Pages: single HTML files that ask nothing of the network.

What a page shows may be foreign text: jinja2 escapes all of it, `plain` takes control characters out, and the page's
security policy lets no script run but its own, and nothing be loaded from anywhere. A page of a package is a template that
extends `page_base.html.jinja`, a style sheet that follows `page_base.css`, and a script; its files lie in the package.
"""

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from mezzo._version import version_of
from mezzo.errors import require
from mezzo.files import plain

_PACKAGE = "mezzo.report"
BASE_TEMPLATE = "page_base.html.jinja"
BASE_STYLE = "page_base.css"


def render_page(
    package: str, template: str, content: Mapping[str, Any], *, style: str | None = None, script: str | None = None
) -> str:
    """Return a page.

    The template also has `version`, and the filters `duration` and `number`. A name that it uses and nobody gives is an error.

    Args:
        package: Where the files lie, such as `mezzo.tipc`.
        template: Extends `page_base.html.jinja` and fills its blocks `title` and `body`.
        content: What the template shows. Texts are escaped; markup of one's own is marked `|safe` in the template.
        style: Style sheet of the page, after the one that all pages have.
        script: The one script that may run; it stands at the end of the page.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    require("jinja2", extra="report")
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(lambda name: read_asset(_PACKAGE if name == BASE_TEMPLATE else package, name)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters["duration"] = duration
    environment.filters["number"] = number
    script_text = read_asset(package, script) if script else ""
    frame = {
        "version": version_of() or "(from its sources)",
        "page_style": read_asset(_PACKAGE, BASE_STYLE) + (read_asset(package, style) if style else ""),
        "page_script": script_text,
        "security_policy": security_policy(script_text),
    }
    return environment.get_template(template).render({**content, **frame})


def security_policy(script: str) -> str:
    """Return the policy of a page with one script (empty: with none): nothing is loaded, nothing else runs.

    >>> security_policy("")
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; " if script else ""
    return f"default-src 'none'; style-src 'unsafe-inline'; {allowed}base-uri 'none'; form-action 'none'"


def read_asset(package: str, name: str) -> str:
    """Return the text of a file that lies in a package."""
    return files(package).joinpath(name).read_text("utf-8")


def duration(seconds: float) -> str:
    """Return a time for people.

    >>> duration(0.25), duration(59.6), duration(200), duration(7300)
    ('0.25 s', '59.6 s', '3 min 20 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with a fixed count of decimals; nothing for None.

    >>> number(0.5), number(None)
    ('0.500', '')
    """
    return "" if value is None else f"{value:.{digits}f}"


def _finalize(value: Any) -> Any:
    """Take control characters out of every text that is set into the page; markup of our own is left alone."""
    return plain(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
