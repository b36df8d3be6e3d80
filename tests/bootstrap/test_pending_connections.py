"""Who holds a place among connections that are not authenticated yet, and who loses it."""

from __future__ import annotations

import dataclasses

from ringcomm.bootstrap.pending_connections import Places


@dataclasses.dataclass(eq=False)
class Knock:
    """A connection."""

    address: str


def test_the_address_with_the_most_loses_its_oldest() -> None:
    places: Places[Knock] = Places(limit=6, per_address=4)
    few, many = [Knock("a"), Knock("a")], [Knock("b") for _ in range(4)]
    for knock in [few[0], *many, few[1]]:
        assert places.in_the_way(knock.address) is None
        places.add(knock)
    assert len(places) == 6
    assert places.in_the_way("b") is many[0]  # its own address is full
    assert places.in_the_way("c") is many[0]  # all places are taken
    places.remove(many[0])
    places.remove(many[0])
    assert len(places) == 5
    assert places.in_the_way("c") is None
    assert places.first_to_go() is many[1]
    for knock in places.all():
        places.remove(knock)
    assert len(places) == 0
    assert places.first_to_go() is None


def test_addresses_alike_the_oldest_first() -> None:
    places: Places[Knock] = Places(limit=2, per_address=8)
    knocks = [Knock(address) for address in "ab"]
    for knock in knocks:
        places.add(knock)
    assert places.in_the_way("c") is knocks[0]
