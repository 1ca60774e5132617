"""Write the tables of the pages that follow from the code, between their markers.

python docs/_tables.py            # writes them
python docs/_tables.py --check    # exit code 1 if a page is not up to date
"""

import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from mezzo._options import options_of
from mezzo.amp import Decision, GradScaler, Policy, operator_names
from mezzo.amp import _ops as ops
from mezzo.amp._names import ALIASES, OPERATOR_GROUPS, WITHOUT_OPERATOR
from mezzo.export import EngineOptions, ExportOptions
from mezzo.vision.options import InferOptions, RecipeOptions, RunOptions

PAGES = Path(__file__).resolve().parent
HALF = torch.float16

#: The operators in the groups that the lists are made of.
FAMILIES: dict[str, Sequence[ops.Op]] = {
    "matrix products": [*ops.MATRIX_PRODUCTS, ops.EINSUM],
    "convolutions": ops.CONVOLUTIONS,
    "attention": ops.ATTENTION,
    "max pooling with indices": ops.INDEXED_MAX_POOLING,
    "fake quantisation": ops.FAKE_QUANTISATION,
    "losses": ops.LOSSES,
    "sums": ops.SUMS,
    "norms of tensors": ops.NORMS,
    "other reductions": ops.OTHER_REDUCTIONS,
    "softmax": ops.SOFTMAXES,
    "LayerNorm, GroupNorm, RMSNorm": ops.AFFINE_NORMS,
    "scans": ops.SCANS,
    "distances": ops.DISTANCES,
    "sensitive functions": ops.SENSITIVE_POINTWISE,
    "powers": ops.POWER,
    "embedding": ops.EMBEDDINGS,
    "scattering": ops.SCATTERING,
    "upsampling": ops.UPSAMPLING,
    "grids of coordinates": ops.GRIDS,
    "sampling by a grid": ops.GRID_SAMPLING,
    "recurrent networks": ops.RECURRENT,
    "element-wise, pooling, joining, ...": ops.GRAY,
    "no half kernel": ops.NO_HALF_KERNEL,
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def wrapped(text: str) -> str:
    """Return prose in lines of at most 100 columns."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def result(decision: Decision) -> str:
    """Return what comes out of a call, and how it was computed where that differs."""
    if decision.dtype is None or decision.compute is None:
        return "unchanged"
    names = {HALF: "half", torch.float32: "float32"}
    inside = "" if decision.compute is decision.dtype else f", computed in {names[decision.compute]}"
    return names[decision.dtype] + inside


# ------------------------------------------------------------------------------------------------------- the levels


def group_of(policy: Policy, variant: str) -> str:
    """Return the list that a variant is on."""
    if variant in ops.WITHOUT_HALF_KERNEL:
        return "no half kernel"
    lists = {"white": policy.white, "black": policy.black, "fp32 inside, low out": policy.inside}
    return next((name for name, members in lists.items() if variant in members), "gray")


def level_rows(policy: Policy, name: str) -> Iterator[list[str]]:
    """Yield a row for each group of a level: its size, and its results from half, float32 and mixed inputs."""
    if policy.level == "O0":
        yield [name, "all", str(len(ops.VARIANTS)), *["unchanged"] * 3]
        return
    groups: dict[str, list[str]] = {}
    for variant in ops.VARIANTS:
        groups.setdefault(group_of(policy, variant), []).append(variant)
    for group in ("white", "black", "fp32 inside, low out", "gray", "no half kernel"):
        members = groups.get(group, [])
        results = set()
        for variant in members:
            # The first tensor of an operator whose first tensor decides is the data.
            inputs = ([HALF], [torch.float32], [HALF, torch.float32])
            if ops.VARIANTS[variant].weights == "decide":
                results.add(tuple(result(policy.decide(variant, dtypes)) for dtypes in inputs))
        assert len(results) <= 1, f"{group} at {name} has several rules"
        for row in results:
            yield [name, group, str(len(members)), *row]


def levels() -> str:
    """Return the table of levels, groups and results."""
    policies = [(level, Policy.create(level)) for level in ("O0", "OD", "O1", "O2")]
    policies.append(("O2, `use_promote=False`", Policy.create("O2", use_promote=False)))
    rows = [row for name, policy in policies for row in level_rows(policy, name)]
    return table(["level", "group", "operators", "from half", "from float32", "from half and float32"], rows)


_PHRASES = {
    ("half", "half"): "half",
    ("float32", "float32"): "float32",
    ("half", "float32"): "as its inputs",
    ("half, computed in float32", "half, computed in float32"): "half, computed in float32",
    ("half, computed in float32", "float32"): "as its inputs, computed in float32",
    ("float32, computed in half", "float32, computed in half"): "float32, computed in half",
}


def families() -> str:
    """Return the table of all operators by group, and what each level makes of them."""
    policies = [Policy.create(level) for level in ("OD", "O1", "O2")]
    rows: dict[tuple[str, ...], list[str]] = {}
    for family, members in FAMILIES.items():
        for variant in (variant for op in members for variant in op.variants if not variant.startswith("_")):
            cells = [
                _PHRASES[result(policy.decide(variant, [HALF])), result(policy.decide(variant, [torch.float32]))]
                for policy in policies
            ]
            rows.setdefault((family, *cells), []).append(f"`{variant}`")
    return table(
        ["operators", "OD", "O1", "O2", "names"],
        [[family, *cells, " ".join(names)] for (family, *cells), names in rows.items()],
    )


def bfloat16() -> str:
    """Return the sentence that says which operators bfloat16 treats otherwise than float16."""
    others = []
    for level in ("OD", "O1", "O2"):
        here, there = Policy.create(level, "float16"), Policy.create(level, "bfloat16")
        others += [variant for variant in ops.VARIANTS if group_of(here, variant) != group_of(there, variant)]
    names = ", ".join(f"`{variant}`" for variant in dict.fromkeys(others))
    return wrapped(
        f"The tables are those of float16. bfloat16 has the same ones, except for {names}, which are gray there."
    )


# -------------------------------------------------------------------------------------------------------- the names


def groups() -> str:
    """Return the table of names that stand for several operators."""
    rows = [
        [f"`{name}`", " ".join(f"`{v}`" for v in sorted(variants) if not v.startswith("_"))]
        for name, variants in sorted(OPERATOR_GROUPS.items())
    ]
    return table(["name", "operators"], rows)


def aliases() -> str:
    """Return the table of the documents' names."""
    rows = [[f"`{name}`", " ".join(f"`{target}`" for target in targets)] for name, targets in sorted(ALIASES.items())]
    nothing = ", ".join(f"`{name}`" for name in sorted(WITHOUT_OPERATOR))
    rest = wrapped(
        f"Accepted with a warning, without effect, since torch has no operator for them: {nothing}. "
        f"`operator_names()` has all {len(operator_names())} names."
    )
    return f"{table(['name in the documents', 'name here'], rows)}\n\n{rest}"


# -------------------------------------------------------------------------------------------------- the loss scale


def scale_over_time() -> str:
    """Return the figure of the scale in a run whose gradients overflow above a limit, which falls in the middle."""
    scaler = GradScaler(init_loss_scaling=2.0**15, incr_every_n_steps=12)
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales, is_skipped = [], []
    for step in range(96):
        scales.append(round(math.log2(scaler.get_scale())))
        limit = 2.0**13 if step < 48 else 2.0**11
        loss = weight * (math.inf if scaler.get_scale() > limit else 1.0)
        scaler.scale(loss).backward()
        before = scaler.skipped_steps
        scaler.minimize(optimizer)
        optimizer.zero_grad()
        is_skipped.append(scaler.skipped_steps > before)
    lines = []
    for power in range(max(scales), min(scales) - 1, -1):
        marks = ("x" if bad else "-" for bad in is_skipped)
        cells = "".join(mark if scale == power else " " for mark, scale in zip(marks, scales, strict=True))
        lines.append(f"2^{power:<3d}|{cells.rstrip()}")
    axis = "".join(f"{step:<12d}" for step in range(0, len(scales), 12))
    return "\n".join(["```text", *lines, f"     +{'-' * len(scales)}", f"step  {axis.rstrip()}", "```"])


# ------------------------------------------------------------------------------------------------------ the options


def options(*owners: type) -> str:
    """Return the table of the options of some dataclasses."""
    rows = []
    for each in (each for owner in owners for each in options_of(owner)):
        names = ", ".join(f"`{name}`" for name in sorted(each.spellings, key=len, reverse=True))
        rows.append([names, each.default_text, each.option.help])
    return table(["option", "default", "meaning"], rows)


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("levels.md", "levels"): levels,
    ("levels.md", "families"): families,
    ("levels.md", "bfloat16"): bfloat16,
    ("lists.md", "groups"): groups,
    ("lists.md", "aliases"): aliases,
    ("loss_scaling.md", "scale over time"): scale_over_time,
    ("training.md", "what is trained"): lambda: options(RecipeOptions),
    ("training.md", "options of a run"): lambda: options(RunOptions),
    ("export.md", "options of an export"): lambda: options(ExportOptions),
    ("export.md", "options of predictions"): lambda: options(EngineOptions, InferOptions),
}


def filled(text: str, name: str, body: str) -> str:
    """Return a page with the part between the markers of a name replaced.

    Raises:
        ValueError: The page does not have these markers exactly once.
    """
    begin, end = f"<!-- made by docs/_tables.py: {name} -->", f"<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the markers of {name!r} must stand once in the page: {begin} and {end}")
    head, rest = text.split(begin)
    return f"{head}{begin}\n\n{body}\n\n{end}{rest.split(end)[1]}"


def pages() -> dict[Path, str]:
    """Return the pages with tables as they should be."""
    texts: dict[Path, str] = {}
    for (page, name), make in TABLES.items():
        path = PAGES / page
        text = texts.get(path) or path.read_text(encoding="utf-8")
        texts[path] = filled(text, name, make())
    return texts


def main(arguments: Sequence[str]) -> int:
    """Write or compare; return the exit code."""
    is_stale = False
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") == text:
            continue
        is_stale = True
        if "--check" in arguments:
            print(f"{path.name}: its tables are not those of the code; run python docs/_tables.py", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return int(is_stale and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
