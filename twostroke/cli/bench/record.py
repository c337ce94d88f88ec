"""What was seen of one request, in seconds of the monotonic clock."""

import enum
from dataclasses import dataclass, field


class Outcome(enum.StrEnum):
    """How a request ended."""

    DONE = "done"
    FAILED = "failed"
    UNFINISHED = "unfinished"  # the run was stopped first


@dataclass(slots=True)
class RequestRecord:
    """One request.

    Attributes:
        due: When it should have been sent. Latencies count from here, so that a late sender does not flatter a server.
        chunk_times: Arrival of each chunk that carried output.
        ended: When its end was seen; None while it runs.
        prompt_tokens: As the server counts, 0 if it does not.
        output_tokens: Likewise; the number of chunks if it does not.
        error: What failed, as a short kind such as `http 429`; None if nothing did.
    """

    due: float
    chunk_times: list[float] = field(default_factory=list)
    ended: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        if self.error is not None:
            return Outcome.FAILED
        return Outcome.UNFINISHED if self.ended is None else Outcome.DONE

    @property
    def tokens(self) -> int:
        """Output tokens so far; those of a request that did not finish are counted by its chunks."""
        return self.output_tokens or len(self.chunk_times)

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return self.chunk_times[0] - self.due if self.chunk_times else None

    @property
    def e2e_s(self) -> float | None:
        """Time to the end."""
        return None if self.ended is None else self.ended - self.due

    @property
    def itl_s(self) -> list[float]:
        """Times between chunks."""
        return [later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if self.tokens < 2 or not self.chunk_times:  # noqa: PLR2004 - there is no second token
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.tokens - 1)
