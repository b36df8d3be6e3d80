"""Places for connections that are not authenticated yet, limited in all and per address.

Invariants: never more than ``limit`` places in all nor ``per_address`` at one address; the next
to lose a place is the oldest one of the address that holds the most.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class HasAddress(Protocol):
    """Object that can hold a place, such as a pending connection."""

    @property
    def address(self) -> str:
        """Address of the connection's other end."""


T = TypeVar("T", bound=HasAddress)


class Places(Generic[T]):
    """Holders of places, by address and age."""

    def __init__(self, limit: int, per_address: int) -> None:
        self._limit = limit
        self._per_address = per_address
        self._by_address: dict[str, OrderedDict[int, T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_address.values()))

    def in_the_way(self, address: str) -> T | None:
        """Returns the holder to remove before another from this address is added; None if there
        is room."""
        same = self._by_address.get(address, OrderedDict())
        if len(same) >= self._per_address:
            return next(iter(same.values()))
        return self.first_to_go() if len(self) >= self._limit else None

    def first_to_go(self) -> T | None:
        """Returns the oldest holder of the address with the most places; None if there is none."""
        most = max(self._by_address.values(), key=len, default=None)
        return next(iter(most.values())) if most else None

    def add(self, holder: T) -> None:
        """Gives the holder a place; there must be room."""
        self._by_address.setdefault(holder.address, OrderedDict())[id(holder)] = holder

    def remove(self, holder: T) -> None:
        """Takes the holder's place back, if it has one."""
        same = self._by_address.get(holder.address)
        if same is None or same.pop(id(holder), None) is None:
            return
        if not same:
            del self._by_address[holder.address]

    def all(self) -> list[T]:
        """Returns every holder."""
        return [holder for same in self._by_address.values() for holder in same.values()]
