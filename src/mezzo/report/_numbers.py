"""Numbers as text: times, sizes, shares."""


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours.

    >>> duration(0.25), duration(59.6), duration(200), duration(7300)
    ('0.25 s', '59.6 s', '3 min 20 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with a fixed number of decimals, or an empty text for None.

    >>> number(0.5), number(None)
    ('0.500', '')
    """
    return "" if value is None else f"{value:.{digits}f}"


def time_text(seconds: float) -> str:
    """Return a time with three digits and its unit.

    >>> time_text(0.0000123), time_text(0.00123), time_text(0.25), time_text(1.5)
    ('12.3 µs', '1.23 ms', '250 ms', '1.50 s')
    """
    if seconds >= 60:
        return duration(seconds)
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 0.9995 or unit == "µs":
            break
    value = seconds * factor
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def bytes_text(count: int) -> str:
    """Return a number of bytes with a fitting unit.

    >>> bytes_text(512), bytes_text(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def percent(part: float, whole: float) -> str:
    """Return a share in percent; 0 % if the whole is 0.

    >>> percent(1, 3), percent(1, 0)
    ('33%', '0%')
    """
    return f"{part / whole:.0%}" if whole else "0%"


def plural(count: int, one: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "leak"), plural(2000, "cast")
    ('1 leak', '2,000 casts')
    """
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"
