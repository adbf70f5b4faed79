"""Fuzzes one target, or plays files through it: `fuzz_run.py TARGET --seconds S` or `fuzz_run.py TARGET FILE...`.

Between `scripts/check-fuzz.sh` and atheris (libFuzzer for Python), which sees the branches of what is plain Python: that is why
the script puts a copy of the package with uncompiled hot modules first on the path. Playing files needs no atheris.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

RSS_MOST_MIB = 2048
INPUT_MOST_BYTES = 8192
ONE_INPUT_MOST_S = 30  # a decoder that hangs; the machine may stop us for a while


def fuzz(name: str, seconds: int, work: Path, seed: int) -> None:
    """Does not come back: libFuzzer ends the process, with status 77 and a file under `work/findings` on a finding."""
    import atheris  # type: ignore[import-not-found, unused-ignore]

    with atheris.instrument_imports(include=["pp1q_transport", "fuzz_targets", "fuzz_streams"]):
        import fuzz_targets
    target = fuzz_targets.TARGETS[name]
    corpus, findings = lay_out(work / "corpus" / name, fuzz_targets.corpus(name)), work / "findings"
    findings.mkdir(parents=True, exist_ok=True)

    def one(data: bytes) -> None:
        fuzz_targets.play(target, data)

    options = (
        f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={INPUT_MOST_BYTES}", f"-rss_limit_mb={RSS_MOST_MIB}",
        f"-timeout={ONE_INPUT_MOST_S}", f"-artifact_prefix={findings}/{name}-", "-print_final_stats=1",
    )  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], one)
    atheris.Fuzz()


def lay_out(folder: Path, inputs: Iterable[bytes]) -> Path:
    """Puts inputs beside what earlier runs left."""
    folder.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (folder / hashlib.sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)
    return folder


def play(name: str, files: list[Path]) -> int:
    """Plays each file (those of a folder, if it is one); says what fails and why."""
    import fuzz_targets

    target, failed, played = fuzz_targets.TARGETS[name], 0, 0
    for path in files:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            played += 1
            print(file, file=sys.stderr, flush=True)  # the last one, if the process dies of it
            try:
                fuzz_targets.play(target, file.read_bytes())
            except Exception as fault:  # noqa: BLE001 - any is a finding
                failed += 1
                print(f"{file}: {type(fault).__name__}: {fault}")
    print(f"played {played}, failed {failed}")
    return 1 if failed else 0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("target")
    options.add_argument("files", nargs="*", type=Path)
    options.add_argument("--seconds", type=int)
    options.add_argument("--work", type=Path, default=Path(".cache/fuzz"))
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    if given.target == "kernels":  # fuzzed by the binary of fuzz_kernels.c: only its seeds are made here
        import fuzz_targets

        lay_out(given.work / "corpus" / "kernels", fuzz_targets.corpus("kernels"))
        return 0
    if given.seconds is None:
        return play(given.target, given.files)
    fuzz(given.target, given.seconds, given.work, given.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
