"""Who may draw which noise, and that no key is ever drawn twice: a guard to hand to the verifiers as their `draw`.

Between a verifier or sampler and `rng`, whose draws are pure functions and so would repeat themselves without complaint. Keeps
one key a domain and request, makes no seeds. SPEC section 5: one owner a domain, and no key used twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..errors import LocalMisuse, Reason
from ..rng import Domain, draw24, draw64

Key = tuple[int, int, int]
"""(generation, round, position)"""

_NEVER: Final[Key] = (-1, -1, -1)


class KeyReuse(LocalMisuse):
    """A noise key that was used before, or one at or before the last used: drawing it again would reuse noise."""

    reason: Final = Reason.KEY_REUSE


class KeyGuard:
    """The owner of some domains of one request's noise. Keys (generation, round, position) must rise within each domain.

    Rising keys are what rounds give anyway: positions rise within a round, rounds within a generation, and a discard raises the
    generation. So one key a domain is all the memory that "never twice" takes. `after` is the last key used before, where a
    request goes on in another process.
    """

    def __init__(self, seed: int, domains: Iterable[Domain], after: Key = _NEVER) -> None:
        self.seed = seed
        self._last: dict[Domain, Key] = {Domain(domain): after for domain in domains}

    @property
    def domains(self) -> frozenset[Domain]:
        """What this guard owns."""
        return frozenset(self._last)

    def _use(self, seed: int, domain: int, key: Key) -> None:
        owned = Domain(domain)
        if owned not in self._last:
            raise LocalMisuse(f"domain {owned.name} belongs to another owner; this one has {sorted(d.name for d in self._last)}")
        if seed != self.seed:
            raise LocalMisuse("this guard is another request's: the seeds differ")
        last = self._last[owned]
        if key <= last:
            raise KeyReuse(f"{owned.name} key (generation, round, position) {key} is not after {last}")
        self._last[owned] = key

    def draw64(self, seed: int, domain: int, generation: int, round: int, position: int) -> int:
        """`rng.draw64`, once a key. Raises `KeyReuse` for a key not after the last, `LocalMisuse` for another's domain or
        seed."""
        noise = draw64(seed, domain, generation, round, position)  # refuses what is out of range before the key is spent
        self._use(seed, domain, (generation, round, position))
        return noise

    def draw24(self, seed: int, domain: int, generation: int, round: int, position: int) -> int:
        """`rng.draw24`, once a key; as `draw64`."""
        noise = draw24(seed, domain, generation, round, position)
        self._use(seed, domain, (generation, round, position))
        return noise


class NoiseOwners:
    """Who owns which domain of which request, in one process: a domain is claimed once."""

    def __init__(self) -> None:
        self._owned: dict[tuple[int, Domain], KeyGuard] = {}

    def claim(self, request: int, seed: int, domains: Iterable[Domain], after: Key = _NEVER) -> KeyGuard:
        """The guard of `domains` of `request`. Raises `LocalMisuse` if any is owned already (none is taken then)."""
        wanted = [Domain(domain) for domain in domains]
        taken = [domain.name for domain in wanted if (request, domain) in self._owned]
        if taken or not wanted:
            raise LocalMisuse(f"request {request}: {', '.join(taken) or 'no domain'} cannot be claimed")
        guard = KeyGuard(seed, wanted, after)
        self._owned.update(((request, domain), guard) for domain in wanted)
        return guard

    def end(self, request: int) -> None:
        """Forgets a request that is closed; request IDs are unique in a target's life."""
        for domain in Domain:
            self._owned.pop((request, domain), None)
