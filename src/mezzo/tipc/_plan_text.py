"""A plan as text for reading and as a shell script."""

import shlex

from mezzo.files import plain
from mezzo.tipc._plan import CVD, Plan, PlanStep
from mezzo.tipc._text import evaluated


def plan_text(plan: Plan, why_profile: str) -> str:
    """Return the plan for reading, one paragraph per step."""
    lines = [f"{plan.model}, mode {plan.mode}, profile {plan.profile} ({why_profile}): {len(plan.steps)} steps"]
    for step in plan.steps:
        needs = f", after {', '.join(step.needs)}" if step.needs else ""
        labels = ", ".join(f"{name} {value}" for name, value in step.labels.items() if value)
        lines += ["", f"{step.name}{needs}{f' ({labels})' if labels else ''}"]
        lines += [
            f"  {part}" for part in (_environment(step), f"in {'/'.join(step.enter)}" if step.enter else "") if part
        ]
        lines.append(f"  {evaluated(step.text).strip()}")
        lines += [f"  ! {notice}" for notice in step.notices]
        if step.skip:
            lines.append(f"  skipped: {step.skip}")
    if plan.left_out:
        lines += ["", "left out:", *(f"  {combination}" for combination in plan.left_out)]
    if plan.missing:
        lines += ["", "missing:", *(f"  {what}" for what in plan.missing)]
    if plan.failure:
        lines += ["", f"ends with status 1: {plan.failure}"]
    return "\n".join(lines)


def plan_script(plan: Plan) -> str:
    """Return the plan as a script that runs the same commands in the same order."""
    lines = [
        "#!/bin/bash",
        f"# {plan.model}, mode {plan.mode}, profile {plan.profile}",
        *(f"# missing: {what}" for what in plan.missing),
        f"mkdir -p {shlex.quote(plan.log_dir)}",
    ]
    value: str | None = "unknown"
    if plan.adapted:
        return "\n".join([*lines, *map(_in_subshell, plan.steps)])
    for step in plan.steps:
        lines += [f"cd {shlex.quote(change)}" for change in step.enter]
        if step.skip:
            lines.append(f"# {step.name} skipped: {step.skip}")
            continue
        if CVD in step.env and step.env[CVD] != value:
            value = step.env[CVD]
            lines.append(f"unset {CVD}" if value is None else f"export {CVD}={shlex.quote(value)}")
        lines += [f"export {name}={shlex.quote(given or '')}" for name, given in step.env.items() if name != CVD]
        lines.append(_with_output(step))
    return "\n".join(lines)


def _in_subshell(step: PlanStep) -> str:
    """Return a step of an adapted plan, which starts from the root with its own environment."""
    if step.skip:
        return f"# {step.name} skipped: {step.skip}"
    settings = [f"export {name}={shlex.quote(value)}" for name, value in step.env.items() if value is not None]
    settings += [f"unset {name}" for name, value in step.env.items() if value is None]
    moves = [f"cd {shlex.quote(change)}" for change in step.enter]
    notices = "".join(f"# {step.name}: {plain(notice)}\n" for notice in step.notices)
    return f"{notices}( {'; '.join((*settings, *moves, _with_output(step)))} )"


def _with_output(step: PlanStep) -> str:
    limit = f"timeout {step.time_limit:g} " if step.time_limit is not None else ""
    command = limit + evaluated(step.text).strip()
    log = shlex.quote(step.log)
    return command + {"tee": f" 2>&1 | tee {log}", "file": f" > {log} 2>&1"}.get(step.output, "")


def _environment(step: PlanStep) -> str:
    return " ".join(f"{name}={value}" for name, value in step.env.items() if value is not None)
