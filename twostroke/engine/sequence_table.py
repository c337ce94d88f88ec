"""The sequences that an engine knows, by key, by client id and by request id."""

from collections.abc import Iterator

from twostroke.engine.sequence import Sequence
from twostroke.protocol.ids import SequenceKey


class SequenceTable:
    """Every sequence from its arrival until it has ended and no transfer can touch its blocks."""

    def __init__(self) -> None:
        self._by_key: dict[SequenceKey, Sequence] = {}
        self._by_request_id: dict[int, Sequence] = {}
        self._keys_of_client: dict[int, set[SequenceKey]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_key.values())

    def get(self, key: SequenceKey) -> Sequence | None:
        """The sequence named `key`, if it is known."""
        return self._by_key.get(key)

    def by_request_id(self, request_id: int) -> Sequence | None:
        """The sequence with the engine's own id, if it is known."""
        return self._by_request_id.get(request_id)

    def of_client(self, client_id: int, index: int | None) -> list[Sequence]:
        """All sequences of a request, or those of one index, oldest first."""
        keys = self._keys_of_client.get(client_id, set())
        found = [self._by_key[key] for key in keys if index is None or key.index == index]
        return sorted(found, key=lambda sequence: sequence.request_id)

    def add(self, sequence: Sequence) -> None:
        """Know a sequence; its key must be new."""
        self._by_key[sequence.key] = sequence
        self._by_request_id[sequence.request_id] = sequence
        self._keys_of_client.setdefault(sequence.key.client_id, set()).add(sequence.key)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        del self._by_key[sequence.key], self._by_request_id[sequence.request_id]
        keys = self._keys_of_client[sequence.key.client_id]
        keys.discard(sequence.key)
        if not keys:
            del self._keys_of_client[sequence.key.client_id]
