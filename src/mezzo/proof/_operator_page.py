"""The HTML page of a recording: dtypes and times of operators, module by module."""

from __future__ import annotations

from pathlib import Path

from mezzo.files import write_text
from mezzo.proof._recording_parts import TOOLS, count_computed_inside, count_products
from mezzo.record import OperatorStats
from mezzo.report import bytes_text, percent, plural, render_page, time_text


def write_operator_page(stats: OperatorStats, path: Path | str, *, title: str = "") -> None:
    """Write a recording as a single HTML file.

    The page starts with the share of products in half, the share of time on Tensor Cores, casts and leaks. Then it shows
    the time by class of work (or calls, if kernels were not timed), operators, the tree of modules, casts, leaks and
    kernels.

    Args:
        stats: From `collect_operator_stats`; `kernels=True` adds times to the page, `leaks=True` leaks.
        path: Written atomically; its folder is created.
        title: Name of the recording.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    write_text(Path(path), page_text(stats, title=title))


def page_text(stats: OperatorStats, *, title: str = "") -> str:
    """Return the page."""
    content = {"tools": TOOLS, "title": title, "stats": stats, "state": state(stats), "lines": verdict(stats)}
    return render_page("mezzo.proof", "operators.html.jinja", content, style="recording.css")


def state(stats: OperatorStats) -> str:
    """Return the colour of the verdict: failed if no product was half, late with leaks, passed; empty without products."""
    half, products = count_products(stats)
    if not products:
        return ""
    if not half and not count_computed_inside(stats):
        return "failed"
    return "late" if stats.leaks else "passed"


def verdict(stats: OperatorStats) -> list[str]:
    """Return the summary."""
    if not stats.rows and not stats.kernels:
        return ["Nothing was recorded."]
    return [_of_products(stats), _of_time(stats), _of_casts(stats), _of_leaks(stats)]


def _of_products(stats: OperatorStats) -> str:
    half, products = count_products(stats)
    if not products:
        return "No matrix product or convolution ran."
    inside = count_computed_inside(stats)
    text = f"{half:,} of {plural(products, 'product')} ({percent(half, products)}) ran in half"
    return text + (
        f"; {inside:,} of the forward pass computed in float32 between casts, as on a CPU without half units."
        if inside
        else "."
        if half
        else ": auto_cast was off, or the policy chose float32."
    )


def _of_time(stats: OperatorStats) -> str:
    if not stats.kernels:
        return "Kernels were not timed."
    share = stats.tensor_core_share
    total = time_text(stats.kernel_time_us / 1e6)
    return (
        f"Operators took {total} on a CPU." if share is None else f"Kernels took {total}, {share:.0%} on Tensor Cores."
    )


def _of_casts(stats: OperatorStats) -> str:
    count = sum(row.calls for row in stats.casts)
    if not count:
        return "No casts."
    spent = sum(kernel.time_us for kernel in stats.kernels if kernel.is_cast)
    share = f", {percent(spent, stats.kernel_time_us)} of the time" if stats.kernels else ""
    return f"{plural(count, 'cast')} of {plural(sum(row.elements for row in stats.casts), 'element')}{share}."


def _of_leaks(stats: OperatorStats) -> str:
    if not stats.leaks:
        return "No float32 leaks."
    extra = bytes_text(sum(leak.extra_bytes for leak in stats.leaks))
    return f"{plural(len(stats.leaks), 'float32 leak')}: the forward pass wrote {extra} more than in half."
