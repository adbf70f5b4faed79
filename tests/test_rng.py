"""Random numbers: published answers, the counter's layout, and what is refused (SPEC section 5)."""

from __future__ import annotations

import pytest

from pp1q_transport import rng
from pp1q_transport.errors import LocalMisuse
from pp1q_transport.rng import Domain

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "output"),
    (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ),
)
def test_published_answers(counter: tuple[int, ...], key: tuple[int, ...], output: tuple[int, ...]) -> None:
    assert rng.philox4x32(counter, key) == output


def test_names_are_the_contract_s() -> None:
    assert rng.RNG_ABI == "philox4x32-10-pp1q-1"
    assert {domain.name: int(domain) for domain in Domain} == {"PROPOSAL": 1, "ACCEPT": 2, "CORRECTION": 3}


@pytest.mark.parametrize("domain", Domain)
def test_the_counter_s_layout(domain: Domain) -> None:
    seed, generation, round, position = 0x1122334455667788, 0xA, 0xB, 0xC
    words = rng.philox4x32((domain << 24, position, round, generation), (0x55667788, 0x11223344))
    assert rng.draw24(seed, domain, generation, round, position) == words[0] >> 8
    assert rng.draw64(seed, domain, generation, round, position) == words[0] << 32 | words[1]


def test_every_part_of_the_place_matters() -> None:
    place = [7, Domain.ACCEPT, 3, 4, 5]
    draws = {rng.draw64(*place)}
    for index, other in enumerate((8, Domain.CORRECTION, 9, 9, 9)):
        moved = [*place[:index], other, *place[index + 1 :]]
        draws.add(rng.draw64(*moved))
    draws.add(rng.draw64(7, Domain.ACCEPT, 4, 3, 5))
    draws.add(rng.draw64(7 << 32, Domain.ACCEPT, 3, 4, 5))
    assert len(draws) == 8


def test_edges_of_the_ranges() -> None:
    for seed in (0, 2**64 - 1):
        for word in (0, ONES):
            assert 0 <= rng.draw24(seed, Domain.PROPOSAL, word, word, word) < 2**24
            assert 0 <= rng.draw64(seed, Domain.PROPOSAL, word, word, word) < 2**64


@pytest.mark.parametrize("draw", (rng.draw24, rng.draw64))
@pytest.mark.parametrize(
    "place",
    (
        (-1, 1, 0, 0, 0),
        (2**64, 1, 0, 0, 0),
        (0, 0, 0, 0, 0),
        (0, 4, 0, 0, 0),
        (0, 1, -1, 0, 0),
        (0, 1, 2**32, 0, 0),
        (0, 1, 0, 2**32, 0),
        (0, 1, 0, 0, 2**32),
        (0, 1, 0, 0, -1),
        (0, 1, 0, 0, 0.5),
        (0, 1, 0, 0, 0, 1),
        ("0", 1, 0, 0, 0),
    ),
)
def test_refused_places(draw: object, place: tuple[int, ...]) -> None:
    assert callable(draw)
    with pytest.raises(LocalMisuse):
        draw(*place)


@pytest.mark.parametrize(
    ("counter", "key"),
    (((0, 0, 0), (0, 0)), ((0,) * 4, (0,)), ((0, 0, 0, 2**32), (0, 0)), ((0,) * 4, (0, -1)), ((0,) * 4, (0, "1"))),
)
def test_refused_words(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    with pytest.raises(LocalMisuse):
        rng.philox4x32(counter, key)
