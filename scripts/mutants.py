#!/usr/bin/env python3
"""Puts one deliberate bug at a time into a copy of the package and runs the tests that must notice. Exit 1 if one lives.

    scripts/mutants.py                       every mutant, JOBS at a time (two)
    scripts/mutants.py key_reuse no_fence    these
    scripts/mutants.py --list                their names and what they break

The copies run uncompiled, their kernels aside; a bug in a kernel is compiled in. A mutant is a text that stands exactly once in
its file, and names the tests that must kill it: where either is not there any more, the code has moved on, and the lane fails as
it does for a mutant that lives. Those tests must pass without it, or what they say of it would mean nothing.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "pp1q_transport"
TIMEOUT_S = 900
JOBS = 2
KILLED = 1  # pytest's status: tests failed. Any other, of no test or of no such test, is no kill.


class Mutant(NamedTuple):
    """`before` becomes `after` in `file`. `tests` are each FILE::PART, for the tests of the file with PART in their names; every
    one of them must choose a test."""

    name: str
    breaks: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    @property
    def native(self) -> bool:
        """Whether it must be compiled."""
        return self.file.endswith(".c")


GOLDEN = "tests/protocol/test_golden.py"
ROWS = "tests/native/test_kernel_rows.py"
EXCHANGES = ("tests/session/test_exchanges.py::", "tests/protocol/test_cases.py::[whole-")


def case(number: str) -> str:
    """The numbered case of tests/protocol, its streams whole."""
    return f"tests/protocol/test_cases.py::[whole-{number} "


MUTANTS = (
    Mutant("digest_without_identity", "SPEC 2: the payload digest's seed", "wire.py",
           "return xxh3_64(b, 0, 45, 0)", "return xxh3_64(b, 0, 1, 0)",
           (f"{GOLDEN}::identity[reply_dense_0]", case("4.045"))),
    Mutant("header_digest_ignored", "SPEC 2: headers have a digest", "wire.py",
           "if xxh3_64(buf, offset, 120, 0) != self.header_digest:", "if False:", (case("2.10"), case("2.11"))),
    Mutant("unknown_flag_accepted", "SPEC 2: unknown flags are refused", "wire.py", "if self.flags != 0:", "if False:",
           (case("2.15"), case("2.16"))),
    Mutant("stale_boot_nonce", "SPEC 2: frames of an earlier life", "session/machine.py",
           "if header.boot_nonce != self._theirs_nonce:", "if False:", (case("2.45"), case("2.47"))),
    Mutant("other_session", "SPEC 4: session", "session/machine.py",
           "if header.session != self.terms.session:", "if False:", (case("2.50"), case("2.51"))),
    Mutant("stale_generation", "SPEC 4: a late reply lands nowhere", "session/landing.py",
           "if slot.generation != header.slot_generation or slot.state < 1 or slot.state > 2:",
           "if slot.state < 1 or slot.state > 2:", (case("4.129"), case("4.201"), case("4.202"))),
    Mutant("request_ignored", "SPEC 4: the right request", "session/landing.py",
           "if header.request != slot.request:", "if False:", (case("4.001"), case("4.106"))),
    Mutant("round_ignored", "SPEC 4: the right round", "session/landing.py",
           "if header.round != slot.round:", "if False:", (case("4.003"), case("4.108"))),
    Mutant("context_ignored", "SPEC 4: the right context", "session/landing.py",
           "if header.context != slot.context:", "if False:", (case("4.007"), case("4.111"))),
    Mutant("position_twice", "SPEC 4: position_duplicate", "session/landing.py",
           "if (slot.rows_done >> row) & 1:", "if False:", (case("4.012"), case("4.014"))),
    Mutant("ready_before_the_last_row", "SPEC 4: all or nothing", "session/landing.py",
           "if slot.rows_done != full or header.positions != slot.depth:", "if header.positions != slot.depth:",
           (case("4.127"), case("4.128"), case("4.206"))),
    Mutant("reply_digest_ignored", "SPEC 2: COMPLETION's digest", "session/landing.py",
           "if xxh3_64(slot.digests, 0, slot.depth * 16, 0) != header.reply_digest:", "if False:", (case("4.118"),)),
    Mutant("reply_size_ignored", "SPEC 4: exact reply size", "session/landing.py",
           "if header.reply_size != slot.reply_bytes:", "if False:", (case("4.115"), case("4.117"))),
    Mutant("payload_digest_ignored", "SPEC 4: payload digest", "session/landing.py",
           "if xxh3_64(self.memory, at, header.payload_length, seed) != header.payload_digest:", "if False:",
           (case("4.058"), case("4.059"))),
    Mutant("draw_proof_skipped", "SPEC 5: draw proof", "session/landing.py", "if self.terms.draw_proof:", "if False:",
           (case("4.084"), case("4.104"))),
    Mutant("budget_never_spent", "SPEC 2: budget_us", "session/watchdog.py",
           "if self.deadlines[slot] <= now_ns]", "if self.deadlines[slot] < 0]", (case("2.202"), case("2.203"))),
    Mutant("free_without_a_fence", "SPEC 4: invalidate before reuse", "session/landing.py",
           "        self.watchdog.disarm(slot.index)\n        self.fences.append(slot.index)",
           "        self.watchdog.disarm(slot.index)\n        slot.move(st.FENCED)", (case("4.202"), case("4.218"))),
    Mutant("no_fence", "DESIGN 2.5: the fence", "links/stream.py",
           "        return self.assembler.landing.abandon(slot)", "        return False",
           ("tests/links/test_conformance.py::test_nothing_lands_behind_a_fence[tcp-",)),
    Mutant("quarantine_unbounded", "SPEC 4: QUARANTINE is bounded", "session/landing.py",
           "            self.broken = _OVERLOAD", "            pass", (case("4.219"), case("4.221"))),
    Mutant("release_before_the_last_consumer", "SPEC 4: release", "session/slots.py",
           "            slot.consumers &= ~bit\n            if slot.consumers == 0:\n                slot.move(_RELEASE_LAST)",
           "            slot.consumers &= ~bit\n            slot.move(_RELEASE_LAST)",
           ("tests/session/test_slots.py::test_a_slot_is_free_after_its_last_consumer_and_no_earlier", case("4.224"))),
    Mutant("overdue_to_free", "SPEC 4: never to FREE", "session/slots.py",
           "(READY, OVERDUE): QUARANTINE,", "(READY, OVERDUE): FREE,",
           ("tests/session/test_slots.py::test_the_table_keeps_what_the_contract_says", case("4.220"))),
    Mutant("generation_not_raised", "SPEC 2: request_generation rises", "session/requests.py",
           "        self.generation += 1\n        self.in_flight = False", "        self.in_flight = False",
           ("tests/session/test_requests.py::test_a_discard_ends_the_flight", case("2.211"))),
    Mutant("key_reuse", "SPEC 5: a key is never used twice", "session/leader.py",
           "if not request.may_draw(header.request_generation, header.round):", "if False:", (case("5.01"), case("5.04"))),
    Mutant("shared_noise", "SPEC 5: domains", "rng.py",
           "    ACCEPT = 2 ", "    ACCEPT = 1 ", ("tests/test_rng.py::test_names_are_the_contract_s", case("5.11"))),
    Mutant("draw_off_by_one", "SPEC 3: the first whose cumulative count exceeds u", "_native/pp1q_row.c",
           "    if (u24 != PP1Q_NO_DRAW && (u24 < before || u24 >= before + count))",
           "    if (u24 != PP1Q_NO_DRAW && (u24 < before || u24 > before + count))",
           (f"{ROWS}::test_validate_dense_equals_oracle", f"{ROWS}::test_cursor_equals_oracle_at_any_split")),
    Mutant("mass_in_32_bits", "SPEC 3: the sum in uint64", "_native/pp1q_row.c",
           "static int judge(uint64_t mass, uint64_t expected_mass, int has_token,",
           "static int judge(uint32_t mass, uint64_t expected_mass, int has_token,",
           (f"{ROWS}::test_validate_dense_equals_oracle",)),
    Mutant("padding_unread", "SPEC 3: padding is zero", "_native/pp1q_row.c",
           "    if (!is_zero(row + 4 * entries, row_bytes - 4 * entries))", "    if (0)",
           (f"{ROWS}::test_validate_dense_equals_oracle",)),
    Mutant("proof_unread", "SPEC 2: HMAC proof", "session/negotiate.py",
           "    return hmac.compare_digest(bytes(given), proof(secret, role, rank, session, nonces, transcript))",
           "    return True", (case("2.401"), case("2.402"), case("2.403"))),
    Mutant("decides_without_all_votes", "SPEC 4: every rank agrees", "session/group.py",
           "any(proposal.votes.get(rank) != READY for rank in range(self.size))", "proposal.votes.get(0) != READY",
           ("tests/session/test_group.py::test_ready_takes_every_vote_in_any_order",)),
    Mutant("commits_across_epochs", "SPEC 4: the epoch rule", "session/group.py",
           "            and epoch == proposal.epoch == self.epoch\n", "",
           ("tests/session/test_group.py::test_a_death_ends_the_epoch", "tests/session/test_group.py::test_the_end_of_an_epoch")),
    Mutant("member_decides_alone", "SPEC 4: rank 0 decides", "session/member.py",
           "        slot.move(st.VOTE)\n        self._vote(slot, READY)",
           "        slot.move(st.DECIDE_READY)\n        self._vote(slot, READY)", (case("4.301"), case("4.319"))),
    Mutant("masses_unchained", "SPEC 4: masses chain from 0 to M", "session/shards.py",
           "            if mass_before != mass:", "            if False:",
           ("tests/session/test_shards.py::test_claims_that_do_not", case("4.532"))),
    Mutant("target_may_write", "DESIGN 2.8: the target's map is read-only", "staging.py",
           "_seal(self.fd, _SEAL_SIZE | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)",
           "_seal(self.fd, _SEAL_SIZE | fcntl.F_SEAL_SEAL)",
           ("tests/daemon/test_hostile_clients.py::test_memory_can_be_neither_shrunk_nor_written",)),
    Mutant("exchange_told_early", "SPEC 4: nobody is told before all have spoken", "session/exchanges.py",
           "if len(parts) == self.size - 1 else []", "if len(parts) >= self.size - 2 and len(parts) else []", EXCHANGES),
    Mutant("exchange_out_of_order", "SPEC 7: ranks are in one exchange", "session/exchanges.py",
           "        if part.sequence != due:", "        if False:", EXCHANGES),
    Mutant("exchange_unbounded", "SPEC 2: what is under way is bounded", "session/exchanges.py",
           "if at >= WINDOW:", "if False:", EXCHANGES),
    Mutant("exchange_unasked", "SPEC 4: one decision", "session/exchanges.py",
           "if self.rank and part.sequence >= self._next[self.rank]:", "if False:", EXCHANGES),
    Mutant("exchange_of_others", "SPEC 7: one thing for all ranks", "session/exchanges.py",
           "        if ours != theirs:", "        if False:", EXCHANGES),
    Mutant("exchange_kept_over_epochs", "SPEC 4: nothing outlives its epoch", "session/exchanges.py",
           "        self._next = [0] * self.size\n        self._under_way.clear()", "        self._under_way.clear()", EXCHANGES),
    Mutant("exchange_kept_at_rank_0", "SPEC 4: nothing outlives its epoch", "session/group_exchanges.py",
           "        self.done.clear()\n", "", EXCHANGES),
    Mutant("exchange_kept_at_a_member", "SPEC 4: nothing outlives its epoch", "session/member.py",
           "        self.exchanges.end()\n        self.exchanged.clear()", "        self.exchanges.end()", EXCHANGES),
    Mutant("exchange_of_an_old_epoch", "SPEC 4: nothing outlives its epoch", "session/group_exchanges.py",
           "if header.epoch < group.epoch:", "if False:", EXCHANGES),
    Mutant("exchange_of_a_coming_epoch", "SPEC 4: nothing outlives its epoch", "session/group_exchanges.py",
           "if header.epoch > group.epoch or group.links.get(rank) is not link:", "if False:", EXCHANGES),
    Mutant("exchange_digest_ignored", "SPEC 2: payload digest", "session/exchange_frames.py",
           "if payload and xxh3_64(", "if False and xxh3_64(", EXCHANGES),
    Mutant("exchange_sizes_ignored", "SPEC 2: lengths against bounds", "session/exchange_frames.py",
           "if header.payload_length != size or size > PART_BYTES_MOST or not", "if not", EXCHANGES),
    Mutant("exchange_digest_of_nothing", "SPEC 2: canonical frames", "session/exchange_frames.py",
           "if header.payload_digest and not size else 0", "if False else 0", EXCHANGES),
    Mutant("exchange_rank_ignored", "SPEC 7: a rank speaks for itself", "session/hub.py",
           "Reason.RANK_DISAGREE.code if header.shard != self.rank else judge_header(header)", "judge_header(header)", EXCHANGES),
    Mutant("exchange_range_beyond", "SPEC 7: ranges of the vocabulary", "session/parts.py",
           "Reason.ID_RANGE if not part.first_id <= part.end_id <= vocab_size else purpose.judge(part)", "purpose.judge(part)",
           EXCHANGES),
    Mutant("exchange_ranges_do_not_tile", "SPEC 7: ranges of the vocabulary", "session/parts.py",
           "        if part.first_id != edge:", "        if False:", EXCHANGES),
    Mutant("exchange_ranges_end_early", "SPEC 7: ranges of the vocabulary", "session/parts.py",
           "    if edge != vocab_size:", "    if False:", EXCHANGES),
    Mutant("exchange_winner_elsewhere", "SPEC 7: winners of the own shard", "session/parts.py",
           "return None if ((none & (values == -np.inf)) | (inside & (values != -np.inf))).all() else Reason.ID_RANGE",
           "return None", EXCHANGES),
    Mutant("exchange_noise_of_all", "SPEC 5: noise is rank 0's", "session/parts.py",
           "return Reason.RANK_DISAGREE if part.rank != NOISE_OWNER and noise else None", "return None", EXCHANGES),
    Mutant("exchange_tokens_of_two", "SPEC 6: one rank knows the token", "session/parts.py",
           "return Reason.RANK_DISAGREE if sum(bool(part.values[0]) for part in parts) > 1 else None", "return None", EXCHANGES),
    Mutant("exchange_owners_two", "SPEC 6: one rank holds the token", "session/parts.py",
           "return Reason.RANK_DISAGREE if sum(bool(part.values[2:].any()) for part in parts) > 1 else None", "return None",
           EXCHANGES),
    Mutant("exchange_rows_differ", "SPEC 7: one winner a row", "session/parts.py",
           "return Reason.LENGTH_BOUNDS if len({len(part.values) for part in parts}) > 1 else None", "return None", EXCHANGES),
)  # fmt: skip


def make_copy(folder: Path) -> None:
    """The package with only its kernels compiled, and the tests."""
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for compiled in (folder / PACKAGE).rglob("*.so"):
        if compiled.parent.name != "_native":
            compiled.unlink()
    for types in (folder / PACKAGE).rglob("*.pxd"):  # what is not to be compiled has none here
        if types.parent.name != "_native":
            types.unlink()
    for binding in (folder / PACKAGE / "_native").glob("*.pyx"):  # nor its binding
        if binding.stem != "kernels":
            binding.unlink()
    for name in ("tests", "proto", "include", "examples", "scripts", "deploy"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy2(ROOT / name, folder / name)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A Python command in a copy, with the copy's own package, uncompiled."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PP1Q_EXPECT_PURE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)


def run_tests(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """pytest up to the first failure."""
    return run(folder, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *words)


def build_kernels(folder: Path) -> None:
    """Compiles the copy's kernels anew, and nothing else."""
    done = run(folder, "setup.py", "build_ext", "--inplace", "--force")
    if done.returncode:
        raise SystemExit(f"the copy does not build:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def find_tests(folder: Path, mutants: list[Mutant]) -> dict[str, list[str]]:
    """The tests of each mutant, by its name. Exits when one names none."""
    files = sorted({words.partition("::")[0] for mutant in mutants for words in mutant.tests})
    done = run_tests(folder, "--collect-only", *files)
    if done.returncode:
        raise SystemExit(f"the tests can't be collected:\n{done.stdout[-3000:]}")
    known = [line for line in done.stdout.splitlines() if "::" in line]
    found: dict[str, list[str]] = {}
    for mutant in mutants:
        found[mutant.name] = []
        for words in mutant.tests:
            file, _, part = words.partition("::")
            chosen = [test for test in known if test.startswith(file + "::") and part in test.partition("::")[2]]
            if not chosen:
                raise SystemExit(f"{mutant.name}: no test is {words!r}")
            found[mutant.name] += chosen
    return found


def first_failure(output: str) -> str:
    """The test that noticed."""
    return next((line.split(" - ")[0].removeprefix("FAILED ") for line in output.splitlines() if line.startswith("FAILED")), "?")


def try_mutant(folder: Path, mutant: Mutant, tests: list[str]) -> bool:
    """Whether the tests kill it. Leaves the copy as it was."""
    path = folder / PACKAGE / mutant.file
    text = path.read_text(encoding="utf-8")
    started = time.monotonic()
    path.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    try:
        if mutant.native:
            build_kernels(folder)
        done = run_tests(folder, *tests)
    finally:
        path.write_text(text, encoding="utf-8")
        if mutant.native:
            for source in (ROOT / PACKAGE / "_native").glob("*.so"):
                shutil.copy2(source, folder / PACKAGE / "_native" / source.name)
    killed = done.returncode == KILLED
    seconds = time.monotonic() - started
    verdict = first_failure(done.stdout) if killed else f"pytest's status {done.returncode}\n{done.stdout[-1500:]}"
    print(f"{'killed' if killed else 'LIVES '} {mutant.name:34} {seconds:5.1f} s  {verdict}", flush=True)
    return killed


def try_all(mutants: list[Mutant], folders: list[Path]) -> int:
    """The exit status: 0 when every mutant is killed."""
    for mutant in mutants:
        count = (ROOT / PACKAGE / mutant.file).read_text(encoding="utf-8").count(mutant.before)
        if count != 1:
            raise SystemExit(f"{mutant.name}: its text stands {count} times in {mutant.file}, not once")
    tests = find_tests(folders[0], mutants)
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for folder in folders:
        free.put(folder)

    def inside(mutant: Mutant) -> bool:
        folder = free.get()
        try:
            return try_mutant(folder, mutant, tests[mutant.name])
        finally:
            free.put(folder)

    wanted = sorted({test for chosen in tests.values() for test in chosen})
    done = run_tests(folders[0], *wanted)
    if done.returncode:
        print(f"the tests fail without any mutant:\n{done.stdout[-3000:]}")
        return 1
    print(f"{len(wanted)} tests pass without a mutant", flush=True)
    with ThreadPoolExecutor(len(folders)) as pool:  # those that are to be compiled take longest: first
        ordered = sorted(mutants, key=lambda mutant: not mutant.native)
        alive = [mutant.name for mutant, killed in zip(ordered, pool.map(inside, ordered), strict=True) if not killed]
    print(f"{len(mutants) - len(alive)} of {len(mutants)} mutants killed" + (f"; alive: {', '.join(alive)}" if alive else ""))
    return 1 if alive else 0


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Deliberate bugs that the tests must notice.")
    parser.add_argument("names", nargs="*", help="mutants to try (all)")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"how many at a time ({JOBS})")
    arguments = parser.parse_args()
    known = {mutant.name: mutant for mutant in MUTANTS}
    if arguments.list:
        for mutant in MUTANTS:
            print(f"{mutant.name:34} {mutant.breaks}")
        return 0
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no mutant is named {unknown[0]}; --list names them")
    chosen = [known[name] for name in arguments.names] or list(MUTANTS)
    with tempfile.TemporaryDirectory(prefix="pp1q-mutants-") as name:
        folders = [Path(name) / str(number) for number in range(max(1, min(arguments.jobs, len(chosen))))]
        for folder in folders:
            make_copy(folder)
        return try_all(chosen, folders)


if __name__ == "__main__":
    raise SystemExit(main())
