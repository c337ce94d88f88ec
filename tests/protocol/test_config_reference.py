"""docs/configuration.md says what the code says."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_configuration_page_is_up_to_date() -> None:
    """Run `.venv/bin/python scripts/document-config` if it is not."""
    page = runpy.run_path(str(ROOT / "scripts" / "document-config"))["page"]()
    assert (ROOT / "docs" / "configuration.md").read_text() == page
