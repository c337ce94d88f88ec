"""`python -m tests.support.streaming_frontend CONTEXT GENERATION FILE`: a frontend that streams until killed."""

import asyncio
import sys
from pathlib import Path

from tests.support.two_roles import Frontend

STREAMS = 4
OUTPUT_TOKENS = 200


async def main(context: str, generation: str, secret: bytes) -> None:
    """Attach, and start all streams."""
    frontend = await Frontend.attach(context, generation, secret)
    await asyncio.gather(*(frontend.generate([5 + number] * 9, OUTPUT_TOKENS) for number in range(STREAMS)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).read_bytes()))
