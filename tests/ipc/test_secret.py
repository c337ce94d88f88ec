"""The secret file."""

from pathlib import Path

import pytest

from twostroke.ipc.secret import load_secret, new_secret, save_secret
from twostroke.protocol.errors import ConfigError


def test_a_saved_secret_is_loaded_again_and_is_its_owners_alone(tmp_path: Path) -> None:
    """Mode 0600."""
    secret, file = new_secret(), tmp_path / "secret"
    save_secret(secret, file)
    assert load_secret(file) == secret
    assert file.stat().st_mode & 0o777 == 0o600


def test_an_existing_secret_is_not_overwritten(tmp_path: Path) -> None:
    """Parts of a running cluster may hold it."""
    save_secret(new_secret(), tmp_path / "secret")
    with pytest.raises(FileExistsError):
        save_secret(new_secret(), tmp_path / "secret")


@pytest.mark.parametrize("text", ["", "abcd", "zz" * 32, "ab" * 33])
def test_a_file_without_a_secret_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    """The message says how to make one; it does not repeat what the file holds."""
    file = tmp_path / "secret"
    file.write_text(text)
    with pytest.raises(ConfigError, match="openssl rand -hex 32") as refused:
        load_secret(file)
    assert not text or text not in str(refused.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    """With the setting's path."""
    with pytest.raises(ConfigError, match=r"^security.secret_file: cannot read .*nothing-here"):
        load_secret(tmp_path / "nothing-here")
