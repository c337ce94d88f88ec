"""A bounded memory of names that ended, so that late messages about them are recognised."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)
Fate = TypeVar("Fate")


class Tombstones(Generic[Name, Fate]):
    """Remembers the fate of the last `limit` names."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._fates: OrderedDict[Name, Fate] = OrderedDict()

    def __len__(self) -> int:
        return len(self._fates)

    def bury(self, name: Name, fate: Fate) -> None:
        """Remember `fate`, forgetting the oldest name if there are too many."""
        self._fates[name] = fate
        self._fates.move_to_end(name)
        if len(self._fates) > self._limit:
            self._fates.popitem(last=False)

    def fate(self, name: Name) -> Fate | None:
        """The fate of `name`, or None if it never ended or is forgotten."""
        return self._fates.get(name)
