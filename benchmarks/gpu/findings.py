"""What one part has found so far, in a file that is whole at any moment: a part may be killed at its deadline."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.report import Better, Report


class Findings:
    """Writes a part's report to a file after each figure.

    Args:
        part: The part's name.
        path: Of the file.
    """

    def __init__(self, part: str, path: Path) -> None:
        self._report = Report(part, part, {})
        self._path = path
        self._save()

    def add(self, case: str, unit: str, samples: Mapping[str, Sequence[float]]) -> None:
        """See `Report.add`."""
        self._report.add(case, unit, samples)
        self._save()

    def compare(self, case: str, ours: str, peer: str, *, better: Better, limit: float, aim: float) -> None:
        """See `Report.compare`."""
        self._report.compare(case, ours, peer, better=better, limit=limit, aim=aim)
        self._save()

    def note(self, text: str) -> None:
        """Something that a reader has to know beside the figures."""
        self._report.notes.append(text)
        self._save()

    def _save(self) -> None:
        beside = self._path.with_suffix(".tmp")
        beside.write_bytes(msgspec.json.encode(self._report))
        beside.replace(self._path)


def read_findings(path: Path) -> Report | None:
    """What a part has written; None if it did not come so far."""
    return msgspec.json.decode(path.read_bytes(), type=Report) if path.is_file() else None
