"""Devices of this machine: steps run at the same time if their GPUs and cores are free."""

from mezzo.tipc._plan import CVD, PlanStep


class DevicePool:
    """GPUs and cores that steps take and give back."""

    def __init__(self, gpus: int, cores: int, jobs: int) -> None:
        self.cards, self.cores, self.jobs, self.all_cores = set(range(gpus)), cores, jobs, cores
        self.held: dict[str, tuple[set[int], int]] = {}

    def take(self, step: PlanStep) -> bool:
        """Take the devices of a step and return True; return False if they are not free."""
        if len(self.held) >= self.jobs:
            return False
        cards, cores = needed_devices(step, self.all_cores)
        if self.held and (not cards <= self.cards or cores > self.cores):
            return False
        self.cards -= cards
        self.cores -= cores
        self.held[step.name] = (cards, cores)
        return True

    def give_back(self, step: PlanStep) -> None:
        """Give back the devices of a step."""
        cards, cores = self.held.pop(step.name)
        self.cards |= cards
        self.cores += cores


def needed_devices(step: PlanStep, all_cores: int) -> tuple[set[int], int]:
    """Return the GPUs and the number of cores that a step uses; a step that names neither uses all cores."""
    visible = step.env.get(CVD) or ""
    cards = {int(card) for card in visible.split(",") if card.isdigit()}
    if step.labels.get("device") == "cpu":
        threads = step.labels.get("threads", "1")
        return set(), min(int(threads) if threads.isdigit() else 1, all_cores)
    if cards:
        return cards, 1
    return set(), all_cores
