"""What the benchmark of routers asks for, and when it takes a figure of paced streams for none."""

from pathlib import Path

import msgspec
import pytest

from benchmarks import router_overhead
from benchmarks.router_contenders import STEP_MS, Contender
from benchmarks.router_overhead import Sizes, Window, per_chunk
from benchmarks.router_peers import INSTALL, missing

SIZES = Sizes(prompt_tokens=8, tokens=4, requests=1, paced_s=0.1)


def patch_windows(monkeypatch: pytest.MonkeyPatch, *windows: Window) -> None:
    """Let the tries at paced streams see `windows`, one after the other."""
    waiting = list(windows)

    async def paced(*_: object) -> Window:
        return waiting.pop(0)

    monkeypatch.setattr(router_overhead, "paced", paced)


async def test_shared_chunks_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first window with a chunk for each token counts."""
    patch_windows(monkeypatch, Window(500.0, 50, 100.0), Window(900.0, 99, 100.0))
    assert await per_chunk(Contender("ours", 1, 1), SIZES, 64) == pytest.approx(900 / 99)


async def test_chunks_shared_time_and_again_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the contender and both counts; one whose workers keep a pace of their own is not asked."""
    patch_windows(monkeypatch, *[Window(500.0, 50, 100.0)] * 4)
    with pytest.raises(RuntimeError, match="ours: 50 chunks for 100 tokens of 64 paced streams"):
        await per_chunk(Contender("ours", 1, 1), SIZES, 64)
    assert await per_chunk(Contender("other", 1, 1, keeps_pace=False), SIZES, 64) == 10.0


def test_requests_say_their_pace_and_carry_the_key() -> None:
    """As the seed; a contender that takes no token ids gets as many words."""
    ours = Contender("ours", 1, 1, api_key="k")
    head, _, body = ours.request(8, 4, stream=True, step_ms=STEP_MS).partition(b"\r\n\r\n")
    assert b"authorization: Bearer k" in head
    fields = msgspec.json.decode(body)
    assert (fields["seed"], fields["max_tokens"], len(fields["prompt"])) == (STEP_MS, 4, 8)
    body = Contender("other", 1, 1, takes_token_ids=False).request(8, 4, stream=False).partition(b"\r\n\r\n")[2]
    assert len(msgspec.json.decode(body)["prompt"].split()) == 8


def test_a_missing_peer_says_what_to_install(tmp_path: Path) -> None:
    """And where."""
    for peer, command in INSTALL.items():
        reason = missing(peer, tmp_path)
        assert reason is not None
        assert str(tmp_path) in reason
        assert command in reason
