"""The errors of mezzo. Each message says in one line what was wrong, what is allowed and what to do."""

from mezzo.errors._extras import MissingExtra
from mezzo.errors._extras import require as require
from mezzo.errors._kinds import DeployError, MezzoError, OptionError, RunError
from mezzo.errors._kinds import unknown_choice as unknown_choice
from mezzo.errors._plain import one_line as one_line
from mezzo.errors._plain import plain as plain
from mezzo.errors._plain import printable as printable
from mezzo.errors._plain import short_repr as short_repr

# For users. The names imported `as` themselves above are for other packages of mezzo.
__all__ = ["MezzoError", "RunError", "OptionError", "DeployError", "MissingExtra"]
