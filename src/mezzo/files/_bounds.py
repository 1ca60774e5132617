"""How much is accepted from elsewhere."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """How large an archive may be: more is a mistake or an attack. The defaults fit ImageNet, 138 GB in 1.4 M files."""

    archive_bytes: int = 200 << 30
    unpacked_bytes: int = 400 << 30
    files: int = 2_000_000
    ratio: int | None = None
    """Unpacked bytes per byte of the archive; None: any. Archives that unpack to less than 256 MiB are exempt."""
    advice: str = "pass --data DIR"
    """Completes the sentence 'unpack it yourself and ...'."""

    def room_for(self, archive: Path) -> int:
        """Return the number of bytes that an archive may unpack to."""
        if self.ratio is None:
            return self.unpacked_bytes
        return min(self.unpacked_bytes, max(256 << 20, self.ratio * archive.stat().st_size))


#: Trained weights compress by less than 2, pruned ones by 20; zeros by 1000.
WEIGHTS = Bounds(
    archive_bytes=8 << 30, unpacked_bytes=8 << 30, files=10_000, ratio=100, advice="give the file of weights"
)
