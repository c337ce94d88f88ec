"""A storm of clients on a cluster: requests of mixed shapes, some of which leave at random moments."""

import asyncio
import enum
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

MAX_MODEL_LEN = 512
PATIENCE_S = 60.0
AT_ONCE = 48


class Ending(enum.Enum):
    """How a client's request ended, as the client saw it."""

    ANSWERED = enum.auto()
    REFUSED = enum.auto()  # one error: a status, or the last event of a stream
    LEFT = enum.auto()  # the client closed the connection
    CUT = enum.auto()  # the server's connection broke: only a killed router may do that
    HUNG = enum.auto()


@dataclass
class Answer:
    """What one client saw.

    Attributes:
        choices: How many choices were asked for; each has its own finish reason.
        ending: How it ended.
        status: The HTTP status; 0 before there was one.
        finishes: Finish reasons.
        errors: Error events; one ends all choices.
        late: Events after the end, but for usage and the end mark.
        error: The error's message.
    """

    choices: int = 1
    ending: Ending = Ending.ANSWERED
    status: int = 0
    finishes: int = 0
    errors: int = 0
    late: int = 0
    error: str = ""

    @property
    def ended(self) -> bool:
        """Whether everything has had its final event."""
        return self.errors > 0 or self.finishes >= self.choices

    @property
    def ended_once(self) -> bool:
        """Exactly one final event: one error, or one finish reason a choice."""
        return self.errors == 1 or (self.errors == 0 and self.finishes == self.choices)

    def take(self, body: dict[str, Any]) -> None:
        """Note one event of a stream, or a whole body."""
        choices = body.get("choices") or []
        self.late += bool(self.ended and (choices or "error" in body))
        self.finishes += sum(choice.get("finish_reason") is not None for choice in choices)
        if "error" in body:
            self.ending, self.error = Ending.REFUSED, body["error"]["message"]
            self.errors += 1


@dataclass
class Outcome:
    """What all clients of a storm saw."""

    answers: list[Answer] = field(default_factory=list)

    def endings(self) -> Counter[Ending]:
        """How many requests ended in each way."""
        return Counter(answer.ending for answer in self.answers)

    def wrong(self) -> list[Answer]:
        """Answers that no failure excuses: hung, not exactly one final event, or a status that blames the server."""
        whole = [answer for answer in self.answers if answer.ending not in (Ending.LEFT, Ending.CUT)]
        return [
            answer
            for answer in whole
            if answer.ending is Ending.HUNG
            or not answer.ended_once
            or answer.late
            or answer.status not in (httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE)
        ]


SHAPES: list[dict[str, Any]] = [
    *[{}] * 6,
    {"n": 2},
    {"n": 3, "seed": 7},
    {"logprobs": 2, "min_p": 0.05},
    {"echo": True, "logprobs": 1, "stream": False},
    {"stop": [" t", "e"], "frequency_penalty": 0.5},
    {"guided_regex": "[ab]{1,12}", "ignore_eos": False},
    {"response_format": {"type": "json_object"}, "ignore_eos": False, "n": 2},
]
"""Further fields of a request; most have none."""


def draw_body(draw: random.Random, model: str) -> dict[str, Any]:
    """A completion request: short or long up to the model's limit, shared prefixes, and fields of all kinds."""
    kind = draw.random()
    length = draw.choice((1, 15, 16, 17, 32, 33)) if kind < 0.1 else draw.randrange(1, 200)
    if kind > 0.95:
        length = draw.randrange(300, MAX_MODEL_LEN - 1)
    start = draw.randrange(3)
    shared = draw.random() < 0.4
    prompt = [3 + (start * 13 + 7 * i) % 250 if shared else draw.randrange(3, 250) for i in range(length)]
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": min(MAX_MODEL_LEN - length, draw.choice((1, 2, 5, 16, 40, 80))),
        "temperature": draw.choice((0, 0.7)),
        "stream": draw.random() < 0.6,
        "ignore_eos": draw.random() < 0.7,
        **draw.choice(SHAPES),
    }


def storm(
    url: str, bodies: Sequence[dict[str, Any]], draw: random.Random, disturb: dict[int, Callable[[], None]]
) -> Outcome:
    """Send all `bodies`, about a third of them by clients that leave; blocks until every one has ended.

    Args:
        url: The endpoint.
        bodies: The requests.
        draw: Who leaves and when, and the pauses between requests.
        disturb: What to do after so many requests were begun.
    """
    return asyncio.run(_storm(url, bodies, draw, disturb))


async def _storm(
    url: str, bodies: Sequence[dict[str, Any]], draw: random.Random, disturb: dict[int, Callable[[], None]]
) -> Outcome:
    room = asyncio.Semaphore(AT_ONCE)
    running: list[asyncio.Task[Answer]] = []
    async with httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:  # noqa: S113 - `_ask` has the deadline
        for number, body in enumerate(bodies):
            await room.acquire()
            leave_s = 2.0 * draw.random() ** 3 if draw.random() < 0.33 else None
            task = asyncio.create_task(_ask(client, url, body, leave_s))
            task.add_done_callback(lambda _: room.release())
            running.append(task)
            if number in disturb:
                await asyncio.to_thread(disturb[number])
            await asyncio.sleep(draw.random() * 0.02)
        return Outcome(list(await asyncio.gather(*running)))


async def _ask(client: httpx.AsyncClient, url: str, body: dict[str, Any], leave_s: float | None) -> Answer:
    answer = Answer(choices=body.get("n", 1))
    try:
        async with asyncio.timeout(PATIENCE_S if leave_s is None else leave_s):
            await _read(client, url, body, answer)
    except TimeoutError:
        answer.ending = Ending.HUNG if leave_s is None else Ending.LEFT
    except httpx.TransportError as error:
        answer.ending, answer.error = Ending.CUT, repr(error)
    return answer


async def _read(client: httpx.AsyncClient, url: str, body: dict[str, Any], answer: Answer) -> None:
    async with client.stream("POST", url, json=body) as response:
        answer.status = response.status_code
        rest = b""
        async for piece in response.aiter_bytes():
            # Not `aiter_lines`: random text holds characters that count as ends of lines in Unicode, not in events.
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                _take_line(line, answer)
        _take_line(rest, answer)


def _take_line(line: bytes, answer: Answer) -> None:
    event = line.removeprefix(b"data: ")
    if event.startswith(b"{"):
        answer.take(json.loads(event))
