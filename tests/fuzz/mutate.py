"""Ways to damage what a program wrote, and numbers and names that break readers."""

from __future__ import annotations

import copy
import random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400,
    0.5, 1.5, -0.0, 1e300, -1e300, 5e-324, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS: tuple[str, ...] = (
    "", " ", "\0", "..", "../../etc/passwd", "/dev/zero", "/etc/passwd", "a" * 5000, "\x1b[31mred\x1b[0m", "\x1b]0;title\x07",
    "\ud800", "\u202eabc", "nan", "inf", "1e999", "__class__", "__import__('os').system('true')", "9**9**9", "[" * 400,
    "None", "true", "é", "\n\nRun successfully\n", "%s%s%n", "{0.__class__}", "CON", "\ufeff", "-" * 300, "0x10", "1_000",
)  # fmt: skip
LEAVES: tuple[Any, ...] = (*NUMBERS, *TEXTS, None, True, False, [], {}, [[]], [0] * 50)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return data with a few changes: flipped bits, cut, repeated, swapped or foreign pieces, numbers of extreme size."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        if not out:
            break
        at = rng.randrange(len(out))
        kind = rng.randrange(8)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del out[at : at + rng.choice((1, 2, 4, 8, 64, 1000))]
        elif kind == 3:
            out = out[:at]
        elif kind == 4:
            piece = out[at : at + rng.choice((1, 4, 16, 200))]
            out[at:at] = piece * rng.choice((1, 2, 10))
        elif kind == 5:
            size = rng.choice((1, 2, 4, 8))
            value = rng.choice((0, 1, (1 << 8 * size) - 1, 1 << (8 * size - 1), rng.getrandbits(8 * size)))
            out[at : at + size] = value.to_bytes(size, rng.choice(("little", "big")))
        elif kind == 6:
            other = rng.randrange(len(out))
            size = rng.choice((1, 4, 30))
            out[at : at + size], out[other : other + size] = out[other : other + size], out[at : at + size]
        else:
            out[at:at] = rng.choice(TEXTS).encode("utf-8", "surrogatepass")[:600]
    return bytes(out)


def mutate_text(rng: random.Random, text: str) -> str:
    """Return a text with lines dropped, repeated, swapped, joined or replaced, or with foreign words in it."""
    lines = text.split("\n")
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines)) if lines else 0
        kind = rng.randrange(7)
        if not lines or kind == 0:
            lines.insert(at, rng.choice(TEXTS))
        elif kind == 1:
            del lines[at]
        elif kind == 2:
            lines[at:at] = lines[at : at + 3] * rng.choice((1, 3, 50))
        elif kind == 3:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == 4:
            words = lines[at].split(" ")
            words[rng.randrange(len(words))] = str(_shown(rng.choice(LEAVES)))
            lines[at] = " ".join(words)
        elif kind == 5:
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + rng.choice(TEXTS) + lines[at][place:]
        else:
            lines[at] = "  " * rng.randrange(4) + lines[at].lstrip()
    return "\n".join(lines)


def mutate_tree(rng: random.Random, tree: Any) -> Any:
    """Return a copy of JSON-like data with some nodes replaced, removed, repeated, renamed or nested."""
    made = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        spots = list(_spots(made))
        if not spots:
            return rng.choice(LEAVES)
        holder, key = rng.choice(spots)
        kind = rng.randrange(6)
        if kind <= 2:
            holder[key] = copy.deepcopy(rng.choice(LEAVES))
        elif kind == 3:
            del holder[key]
        elif kind == 4 and isinstance(holder, dict):
            holder[rng.choice(TEXTS)] = holder.pop(key)
        elif kind == 5 and isinstance(holder, list):
            holder[key:key] = [holder[key]] * rng.choice((1, 3, 100))
        else:
            value: Any = holder[key]
            for _ in range(rng.choice((1, 3, 150))):
                value = [value] if rng.random() < 0.5 else {"x": value}
            holder[key] = value
    return made


def _spots(tree: Any) -> Any:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            yield node, key
            waiting.append(value)


def _shown(value: Any) -> str:
    try:
        return str(value)
    except ValueError:  # a number of too many digits
        return "1" + "0" * 5000
