"""What the configuration file and the files that it names mean."""

import stat

from twostroke.cli.doctor.facts import SecretFile
from twostroke.cli.doctor.finding import Finding, Status

CONFIG = "config.file"
SECRET_FILE = "config.secret_file"  # noqa: S105  (the finding's name)
API_KEYS_FILE = "config.api_keys_file"


def check_config(file: str | None, fault: str) -> Finding:
    """Whether the configuration can be read.

    Args:
        file: Its path; None without one.
        fault: What is wrong with it, in the words of the commands that would refuse it; "" if nothing is.
    """
    if fault:
        todo = "docs/configuration.md lists every setting; the other findings are about the defaults"
        return Finding(CONFIG, Status.PROBLEM, fault, todo)
    if file is None:
        return Finding(CONFIG, Status.NOTE, "none was given; the defaults are looked at")
    return Finding(CONFIG, Status.OK, f"{file}: every setting is known and has a proper value")


def check_cluster_secret(file: SecretFile | None) -> Finding:
    """The file with the cluster's secret."""
    return _check_file(
        SECRET_FILE,
        "security.secret_file",
        file,
        "`twostroke up` makes a secret for itself, parts that are started one by one need a common one",
    )


def check_api_keys(file: SecretFile | None) -> Finding:
    """The file with the clients' keys."""
    return _check_file(API_KEYS_FILE, "security.api_keys_file", file, "clients need no key")


def _check_file(name: str, setting: str, file: SecretFile | None, without: str) -> Finding:
    if file is None:
        return Finding(name, Status.NOTE, f"{setting} is not set: {without}")
    if file.error:
        return Finding(name, Status.PROBLEM, file.error, f"correct {setting}")
    found = f"{file.path} with mode {file.mode:04o}"
    if file.mode & (stat.S_IRWXG | stat.S_IRWXO):
        todo = f"`chmod 600 {file.path}`; for a mounted Kubernetes secret, defaultMode 0400"
        return Finding(name, Status.WARNING, f"{found}: others than its owner may open it", todo)
    return Finding(name, Status.OK, found)
