#!/usr/bin/env python3
"""Puts one deliberate bug at a time into a copy of the package and runs the tests that must notice. Exit 1 if one lives.

    scripts/mutants.py                       every mutant (minutes)
    scripts/mutants.py key_reuse no_fence    these
    scripts/mutants.py --list                their names and what they break

The copy runs uncompiled, its kernels aside; a bug in a kernel is compiled in. A mutant is a text that stands exactly once in its
file: where it does not any more, the code has moved on, and that is an error here, not a mutant that lives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "pp1q_transport"
TIMEOUT_S = 900


class Mutant(NamedTuple):
    """`before` becomes `after` in `file`; `tests` are pytest's arguments."""

    name: str
    breaks: str
    file: str
    before: str
    after: str
    tests: str


CASES = "tests/protocol/test_cases.py"
GOLDEN = "tests/protocol/test_golden.py"
EXCHANGES = "tests/session/test_exchanges.py tests/protocol/test_cases.py"
MUTANTS = (
    Mutant("digest_without_identity", "SPEC 2: the payload digest's seed", "wire.py",
           "return xxh3_64(b, 0, 45, 0)", "return xxh3_64(b, 0, 1, 0)", GOLDEN),
    Mutant("header_digest_ignored", "SPEC 2: headers have a digest", "wire.py",
           "if xxh3_64(buf, offset, 120, 0) != self.header_digest:", "if False:", CASES),
    Mutant("unknown_flag_accepted", "SPEC 2: unknown flags are refused", "wire.py", "if self.flags != 0:", "if False:", CASES),
    Mutant("stale_boot_nonce", "SPEC 2: frames of an earlier life", "session/machine.py",
           "if header.boot_nonce != self._theirs_nonce:", "if False:", CASES),
    Mutant("other_session", "SPEC 4: session", "session/machine.py",
           "if header.session != self.terms.session:", "if False:", CASES),
    Mutant("stale_generation", "SPEC 4: a late reply lands nowhere", "session/landing.py",
           "if slot.generation != header.slot_generation or slot.state < 1 or slot.state > 2:",
           "if slot.state < 1 or slot.state > 2:", CASES),
    Mutant("request_ignored", "SPEC 4: the right request", "session/landing.py",
           "if header.request != slot.request:", "if False:", CASES),
    Mutant("round_ignored", "SPEC 4: the right round", "session/landing.py",
           "if header.round != slot.round:", "if False:", CASES),
    Mutant("context_ignored", "SPEC 4: the right context", "session/landing.py",
           "if header.context != slot.context:", "if False:", CASES),
    Mutant("position_twice", "SPEC 4: position_duplicate", "session/landing.py",
           "if (slot.rows_done >> row) & 1:", "if False:", CASES),
    Mutant("ready_before_the_last_row", "SPEC 4: all or nothing", "session/landing.py",
           "if slot.rows_done != full or header.positions != slot.depth:", "if header.positions != slot.depth:", CASES),
    Mutant("reply_digest_ignored", "SPEC 2: COMPLETION's digest", "session/landing.py",
           "if xxh3_64(slot.digests, 0, slot.depth * 16, 0) != header.reply_digest:", "if False:", CASES),
    Mutant("reply_size_ignored", "SPEC 4: exact reply size", "session/landing.py",
           "if header.reply_size != slot.reply_bytes:", "if False:", CASES),
    Mutant("payload_digest_ignored", "SPEC 4: payload digest", "session/landing.py",
           "if xxh3_64(self.memory, at, header.payload_length, seed) != header.payload_digest:", "if False:", CASES),
    Mutant("draw_proof_skipped", "SPEC 5: draw proof", "session/landing.py", "if self.terms.draw_proof:", "if False:", CASES),
    Mutant("budget_never_spent", "SPEC 2: budget_us", "session/watchdog.py",
           "if self.deadlines[slot] <= now_ns]", "if self.deadlines[slot] < 0]", CASES),
    Mutant("free_without_a_fence", "SPEC 4: invalidate before reuse", "session/landing.py",
           "        self.watchdog.disarm(slot.index)\n        self.fences.append(slot.index)",
           "        self.watchdog.disarm(slot.index)\n        slot.move(st.FENCED)",
           f"{CASES} tests/session"),
    Mutant("no_fence", "DESIGN 2.5: the fence", "links/stream.py",
           "        return self.assembler.landing.abandon(slot)", "        return False", "tests/links/test_conformance.py"),
    Mutant("quarantine_unbounded", "SPEC 4: QUARANTINE is bounded", "session/landing.py",
           "            self.broken = _OVERLOAD", "            pass", f"{CASES} tests/session/test_receiver.py"),
    Mutant("release_before_the_last_consumer", "SPEC 4: release", "session/slots.py",
           "            slot.consumers &= ~bit\n            if slot.consumers == 0:\n                slot.move(_RELEASE_LAST)",
           "            slot.consumers &= ~bit\n            slot.move(_RELEASE_LAST)", "tests/session/test_slots.py"),
    Mutant("overdue_to_free", "SPEC 4: never to FREE", "session/slots.py",
           "(READY, OVERDUE): QUARANTINE,", "(READY, OVERDUE): FREE,",
           "tests/session/test_slots.py tests/session/test_receiver.py"),
    Mutant("generation_not_raised", "SPEC 2: request_generation rises", "session/requests.py",
           "        self.generation += 1\n        self.in_flight = False", "        self.in_flight = False",
           f"tests/session/test_requests.py {CASES}"),
    Mutant("key_reuse", "SPEC 5: a key is never used twice", "session/leader.py",
           "if not request.may_draw(header.request_generation, header.round):", "if False:", CASES),
    Mutant("shared_noise", "SPEC 5: domains", "rng.py",
           "    ACCEPT = 2 ", "    ACCEPT = 1 ", "tests/test_rng.py tests/test_verify.py"),
    Mutant("draw_off_by_one", "SPEC 3: the first whose cumulative count exceeds u", "_native/pp1q_row.c",
           "    if (u24 != PP1Q_NO_DRAW && (u24 < before || u24 >= before + count))",
           "    if (u24 != PP1Q_NO_DRAW && (u24 < before || u24 > before + count))", "tests/native/test_kernel_rows.py"),
    Mutant("mass_in_32_bits", "SPEC 3: the sum in uint64", "_native/pp1q_row.c",
           "static int judge(uint64_t mass, uint64_t expected_mass, int has_token,",
           "static int judge(uint32_t mass, uint64_t expected_mass, int has_token,", "tests/native"),
    Mutant("padding_unread", "SPEC 3: padding is zero", "_native/pp1q_row.c",
           "    if (!is_zero(row + 4 * entries, row_bytes - 4 * entries))", "    if (0)",
           "tests/native/test_kernel_rows.py"),
    Mutant("proof_unread", "SPEC 2: HMAC proof", "session/negotiate.py",
           "    return hmac.compare_digest(bytes(given), proof(secret, role, rank, session, nonces, transcript))",
           "    return True", f"tests/test_negotiate.py {CASES}"),
    Mutant("decides_without_all_votes", "SPEC 4: every rank agrees", "session/group.py",
           "any(proposal.votes.get(rank) != READY for rank in range(self.size))", "proposal.votes.get(0) != READY",
           "tests/session/test_group.py tests/session/test_group_sim.py"),
    Mutant("commits_across_epochs", "SPEC 4: the epoch rule", "session/group.py",
           "            and epoch == proposal.epoch == self.epoch\n", "", "tests/session"),
    Mutant("member_decides_alone", "SPEC 4: rank 0 decides", "session/member.py",
           "        slot.move(st.VOTE)\n        self._vote(slot, READY)",
           "        slot.move(st.DECIDE_READY)\n        self._vote(slot, READY)",
           "tests/session/test_group_sim.py tests/protocol/test_cases.py"),
    Mutant("masses_unchained", "SPEC 4: masses chain from 0 to M", "session/shards.py",
           "            if mass_before != mass:", "            if False:", f"tests/session/test_shards.py {CASES}"),
    Mutant("target_may_write", "DESIGN 2.8: the target's map is read-only", "staging.py",
           "_seal(self.fd, _SEAL_SIZE | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)",
           "_seal(self.fd, _SEAL_SIZE | fcntl.F_SEAL_SEAL)",
           "tests/daemon/test_hostile_clients.py"),
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
           "return Reason.RANK_DISAGREE if part.rank != NOISE_OWNER and int(part.values[0]) else None", "return None", EXCHANGES),
    Mutant("exchange_tokens_of_two", "SPEC 6: one rank knows the token", "session/parts.py",
           "return Reason.RANK_DISAGREE if sum(bool(part.values[0]) for part in parts) > 1 else None", "return None", EXCHANGES),
    Mutant("exchange_owners_two", "SPEC 6: one rank holds the token", "session/parts.py",
           "return Reason.RANK_DISAGREE if sum(bool(part.values[1:].any()) for part in parts) > 1 else None", "return None",
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
    for name in ("tests", "proto", "include", "examples", "scripts", "deploy"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy2(ROOT / name, folder / name)


def build_kernels(folder: Path) -> None:
    """Compiles the copy's kernels anew, and nothing else."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace", "--force"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment(folder))
    if done.returncode:
        raise SystemExit(f"the copy does not build:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def environment(folder: Path) -> dict[str, str]:
    """For the copy's own package, uncompiled."""
    return os.environ | {"PYTHONPATH": str(folder), "PP1Q_EXPECT_PURE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def run_tests(folder: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """pytest up to the first failure."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment(folder))


def first_failure(output: str) -> str:
    """The test that noticed."""
    return next((line.split(" - ")[0].removeprefix("FAILED ") for line in output.splitlines() if line.startswith("FAILED")), "?")


def try_mutant(folder: Path, mutant: Mutant) -> bool:
    """Whether the tests kill it. Leaves the copy as it was."""
    path = folder / PACKAGE / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.before) != 1:
        raise SystemExit(f"{mutant.name}: its text stands {text.count(mutant.before)} times in {mutant.file}, not once")
    native = path.suffix == ".c"
    started = time.monotonic()
    path.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    try:
        if native:
            build_kernels(folder)
        done = run_tests(folder, mutant.tests.split())
    finally:
        path.write_text(text, encoding="utf-8")
        if native:
            for source in (ROOT / PACKAGE / "_native").glob("*.so"):
                shutil.copy2(source, folder / PACKAGE / "_native" / source.name)
    killed = done.returncode == 1
    seconds = time.monotonic() - started
    verdict = first_failure(done.stdout) if killed else f"LIVES (pytest's status {done.returncode})\n{done.stdout[-1500:]}"
    print(f"{'killed' if killed else 'LIVES '} {mutant.name:34} {seconds:5.1f} s  {verdict}", flush=True)
    return killed


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Deliberate bugs that the tests must notice.")
    parser.add_argument("names", nargs="*", help="mutants to try (all)")
    parser.add_argument("--list", action="store_true", help="only say which there are")
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
        folder = Path(name)
        make_copy(folder)
        tests = sorted({test for mutant in chosen for test in mutant.tests.split()})
        done = run_tests(folder, tests)
        if done.returncode:
            print(f"the tests fail without any mutant:\n{done.stdout[-3000:]}")
            return 1
        alive = [mutant.name for mutant in chosen if not try_mutant(folder, mutant)]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants killed" + (f"; alive: {', '.join(alive)}" if alive else ""))
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
