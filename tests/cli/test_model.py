"""The cache of models: what counts as whole, and that a model appears in one step; and the demo model itself."""

import os
from pathlib import Path

import pytest

from twostroke.cli.model import cache, demo
from twostroke.protocol.errors import ModelError


@pytest.fixture(autouse=True)
def cache_folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, but for the tests of the real one."""
    if "real_cache" not in request.fixturenames:
        monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model() -> Path:
    """A small whole model in the cache."""
    folder = cache.models_folder() / "m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    cache.record(folder, "recipe 1")
    return folder


def nobody_waits() -> None:
    """For locks that are free."""
    raise AssertionError("waited for a lock that nobody holds")


def test_a_recorded_model_is_whole(model: Path) -> None:
    """By its own recipe, or by any."""
    assert cache.fault(model) is None
    assert cache.fault(model, "recipe 1") is None


def test_what_is_missing_changed_or_cut_short_is_named(model: Path) -> None:
    """Each in the words that a person needs."""
    weights = model / "model.safetensors"
    assert cache.fault(model, "recipe 2") == "made by recipe 1, not by recipe 2"
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(1, 1))
    assert cache.fault(model) == "model.safetensors: its content has changed"
    weights.write_bytes(b"weig")
    assert cache.fault(model) == "model.safetensors: 4 bytes, 7 expected"
    weights.unlink()
    assert cache.fault(model) == "model.safetensors: No such file or directory"
    (model / cache.MANIFEST).write_text("{")
    assert str(cache.fault(model)).startswith("no readable manifest")
    assert cache.fault(model.parent / "other") == "not fetched yet"


def test_a_copied_model_whose_times_differ_is_whole(model: Path) -> None:
    """Then the digests decide."""
    for file in model.iterdir():
        os.utime(file, ns=(1, 1))
    assert cache.fault(model) is None


def test_a_model_replaces_a_broken_one_in_one_step(model: Path) -> None:
    """And nothing of the work stays behind."""
    (model.parent / ".m-abandoned").mkdir()
    with cache.exclusive(nobody_waits), cache.replacing(model) as fresh:
        (fresh / "config.json").write_text("new")
        assert (model / "config.json").read_text() == "{}"
    assert (model / "config.json").read_text() == "new"
    assert sorted(path.name for path in model.parent.iterdir()) == [".lock", "m"]


def test_a_failed_conversion_leaves_the_cache_as_it_was(model: Path) -> None:
    """The next try begins anew."""

    def fail() -> None:
        with cache.exclusive(nobody_waits), cache.replacing(model) as fresh:
            (fresh / "config.json").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert cache.fault(model) is None
    assert sorted(path.name for path in model.parent.iterdir()) == [".lock", "m"]


def test_a_missing_converter_is_said_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """90 MB would be for nothing."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"needs gguf and accelerate: pip install 'twostroke\[demo\]'"):
        demo.fetch(lambda _: None)


@pytest.mark.usefixtures("real_cache")
def test_the_demo_model_is_what_servers_expect() -> None:
    """Set-up has fetched it; tokenizer, end of turn, chat template and weights agree."""
    assert cache.fault(demo.folder(), demo.RECIPE) is None
    demo.check(demo.folder())


@pytest.fixture
def real_cache() -> None:
    """Marks a test that looks into the cache that set-up filled."""
