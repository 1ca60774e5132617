"""Reports settings that have no effect in a run."""

from __future__ import annotations

from mezzo.model.parallel import World
from mezzo.vision.options import RunOptions
from mezzo.vision.recipes import Recipe


def find_notices(recipe: Recipe, options: RunOptions, world: World) -> list[str]:
    """Return a line for each setting of recipe and command line that has no effect."""
    level, precision = options.amp_level, options.precision
    resumes = options.resume is not None
    said = {
        f"--amp_level {level} has no effect at fp32; add --precision fp16 or bf16": (
            precision == "fp32" and level not in ("O0", None)
        ),
        f"--precision {precision} has no effect at --amp_level O0; use OD, O1, O2 or O3": (
            precision != "fp32" and level == "O0"
        ),
        "--amp_use_promote has no effect below level O2; add --amp_level O2 and --precision fp16 or bf16": (
            options.amp_use_promote is not None and (precision == "fp32" or level not in ("O2", "O3"))
        ),
        "--early_stop_intervals has no effect without --do_eval": (
            options.early_stop_after is not None and not options.do_eval
        ),
        "--start-epoch has no effect with --resume": resumes and options.start_epoch > 0,
        "--pretrained has no effect with --resume": resumes and options.pretrained is not None,
        "--sync-bn has no effect in one process": options.sync_bn and world.size == 1,
        "--to_static_training: sharded weights (--fsdp) are not captured; the step runs eagerly": (
            options.to_static and options.fsdp
        ),
        "--to_static_training with --sync-bn: synchronised batch norms send inside the forward pass; only this pass is "
        "captured, not the whole step": options.to_static and options.sync_bn and not options.fsdp and world.size > 1,
    }
    return [*recipe.ignored, *(text for text, applies in said.items() if applies)]
