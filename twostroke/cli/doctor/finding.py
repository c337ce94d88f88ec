"""What the doctor says: findings, and the report that holds them. Names and meanings are documented; keep them."""

import enum

import msgspec

REPORT_VERSION = 1
"""Raised when a field changes its meaning or leaves; new fields and findings do not raise it."""


class Status(enum.StrEnum):
    """How good a finding is.

    `OK`: as it should be. `NOTE`: worth knowing. `WARNING`: it serves, but slowly, or less safely than it could.
    `PROBLEM`: it cannot serve.
    """

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        name: Which, the same in every run: `ucx.binding`, `model.memory`.
        status: How good it is.
        found: What was found, with the value.
        todo: What to do; "" where nothing needs to be done.
    """

    name: str
    status: Status
    found: str
    todo: str = ""


class Report(msgspec.Struct, frozen=True):
    """All findings of one run.

    Attributes:
        report_version: Of these fields.
        twostroke: Version of the package.
        can_serve: No finding is a problem.
        findings: In the order in which they were looked at.
    """

    report_version: int
    twostroke: str
    can_serve: bool
    findings: tuple[Finding, ...]


def make_report(version: str, findings: tuple[Finding, ...]) -> Report:
    """The report of `findings` by twostroke `version`."""
    can_serve = all(finding.status is not Status.PROBLEM for finding in findings)
    return Report(REPORT_VERSION, version, can_serve, findings)
