"""Who may hold a connection that is not authenticated yet, and who loses it first.

Invariants: never more than ``limit`` places in all nor ``per_address`` at one address; the next
to lose a place is the oldest one of the address that holds the most.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class HasAddress(Protocol):
    """What can hold a place."""

    @property
    def address(self) -> str:
        """Where it comes from."""
        ...


T = TypeVar("T", bound=HasAddress)


class Places(Generic[T]):
    """Holders of places, by address and age."""

    def __init__(self, limit: int, per_address: int) -> None:
        self._limit = limit
        self._per_address = per_address
        self._by_address: dict[str, OrderedDict[int, T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def in_the_way(self, address: str) -> T | None:
        """Whose place one more from this address would need; None if there is room."""
        same = self._by_address.get(address, OrderedDict())
        if len(same) >= self._per_address:
            return next(iter(same.values()))
        return self.first_to_go() if self._count >= self._limit else None

    def first_to_go(self) -> T | None:
        """The oldest of the address with the most places; None if there is nobody."""
        most = max(self._by_address.values(), key=len, default=None)
        return next(iter(most.values())) if most else None

    def add(self, holder: T) -> None:
        """Gives a place, for which there must be room."""
        self._by_address.setdefault(holder.address, OrderedDict())[id(holder)] = holder
        self._count += 1

    def remove(self, holder: T) -> None:
        """Takes it back, if the holder has one."""
        same = self._by_address.get(holder.address)
        if same is None or same.pop(id(holder), None) is None:
            return
        self._count -= 1
        if not same:
            del self._by_address[holder.address]

    def all(self) -> list[T]:
        """Every holder."""
        return [holder for same in self._by_address.values() for holder in same.values()]
