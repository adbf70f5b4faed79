"""`make demo-model`: speculative decoding of SmolLM2-135M in two processes, over TCP and through daemons, and its checks.

Between a shell and the loops of this example. Starts the draft process and the daemons, streams the text, prints the report. The
target runs in this process. Exit status 0 means: nine of ten proposals or more were ready (one that is not costs time alone), at
temperature 0 every text is the one that the target writes alone, at others the tokens are distributed as the target's.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from cut import Cut
from generating import Account, Task, alone, generate, seeds
from judging import P_VALUE_LEAST, first_tokens, judge_first, judge_texts
from logits import Remembered
from reporting import Stream, report

from pp1q_transport import PeerFault, Reason, attach_receiver, open_receiver
from pp1q_transport.cli._common import OneLineCommand, StageLine, command_errors, setup_logging
from pp1q_transport.cli.demo import end_draft, wait_for_draft
from pp1q_transport.errors import ConfigError
from pp1q_transport.toy.pit import MIN_TOKENS
from pp1q_transport.toy.sidecar import Deployment, Shape

START_S = 600.0  # a model is loaded meanwhile, perhaps on a busy machine
QUESTION = "Explain how a letter travels from one town to another."
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # how the model was taught to be asked
VIAS = ("tcp", "sidecars")
FIRST_SEEDS = 7
DISCARDED_MOST = 0.1


@dataclass(frozen=True)
class Options:
    """What a run does; every process gets its part on the command line."""

    prompt: str
    tokens: int
    depth: int
    support: int | None
    cut: str
    draft_temperature: float | None
    temperatures: tuple[float, ...]
    vias: tuple[str, ...]
    first: int
    seed: int
    as_json: bool


@dataclass
class Run:
    """One text, the way it came and what it cost."""

    via: str
    temperature: float
    account: Account
    model_ns: dict[int, int]
    bytes_ready: int
    wire_bytes: int | None = None


@dataclass
class Outcome:
    """All texts of a run and what they were checked for."""

    runs: list[Run] = field(default_factory=list)
    tail_us: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)


class Stages:
    """What goes on while nothing else is seen: one line on a terminal, taken away when text comes."""

    def __init__(self, options: Options) -> None:
        self._line = StageLine(not options.as_json)
        self._total = 2 + 2 * len(options.vias)
        self._number = 0

    def next(self, what: str) -> None:
        """A new stage."""
        self._number += 1
        self.say(what)

    def say(self, what: str) -> None:
        """The same stage, further on."""
        self._line(what, self._number - 1, self._total)

    def clear(self) -> None:
        """Text comes."""
        self._line.clear()


class Via:
    """One way for q to come: a receiver in this process, the draft process, and the account that the draft keeps."""

    def __init__(self, name: str, receiver: Any, account: Path, deployment: Deployment | None) -> None:
        self.name = name
        self.receiver = receiver
        self._account = account
        self._deployment = deployment

    def model_ns(self, request: int) -> dict[int, int]:
        """What the draft's model took in each round of a request."""
        lines = [json.loads(line) for line in self._account.read_text(encoding="utf-8").splitlines()]
        return {line["round"]: line["model_ns"] for line in lines if line["request"] == request}

    def bytes_ready(self) -> int:
        """Bytes of q and tokens in ready proposals so far."""
        if self._deployment is not None:
            return self._deployment.status("receiver0")["bytes_ready"]
        return int(self.receiver.totals()["bytes_ready"])

    def wire_bytes(self) -> int | None:
        """All bytes of the data link so far, both ways; known of an embedded engine only."""
        link = None if self._deployment is not None else self.receiver.engine.link
        return None if link is None else link.bytes_in + link.bytes_out

    def tail_us(self, accounts: list[Account]) -> float:
        """From the last row's last byte to q-ready: the mean over all proposals, as the receiver measured it."""
        if self._deployment is not None:
            tail = self._deployment.status("receiver0")["tail"]
            return tail["sum_ns"] / max(1, sum(tail["counts"])) / 1e3
        tails = [ns for account in accounts for ns in account.tail_ns]
        return sum(tails) / max(1, len(tails)) / 1e3


@contextlib.contextmanager
def opened(name: str, options: Options, capacity: int) -> Iterator[Via]:
    """Everything of one way, ready to go; ended afterwards."""
    from model import VOCAB_SIZE

    with tempfile.TemporaryDirectory(prefix="pp1q-") as room:
        account = Path(room) / "draft.jsonl"
        account.touch()
        draft = [sys.executable, str(Path(__file__).with_name("drafting.py")), "--cut", options.cut]
        draft += ["--capacity", str(capacity), "--account", str(account)]
        if options.draft_temperature is not None:
            draft += ["--temperature", str(options.draft_temperature)]
        models = f"smollm2-135m-{options.cut}"
        if name == "tcp":
            hello = {"vocab_size": VOCAB_SIZE, "depth": options.depth, "support": options.support or 32}
            hello |= {"draft_identity": models + "-draft", "target_identity": models + "-target"}
            with open_receiver(listen="tcp://127.0.0.1:0", **hello) as receiver:
                process = subprocess.Popen([*draft, "--connect", receiver.endpoint, "--hello", json.dumps(hello)])
                try:
                    wait_for_draft(receiver, process, START_S)
                    yield Via(name, receiver, account, None)
                finally:
                    receiver.close()
                    process.terminate()
                    end_draft(process)
            return
        shape = Shape(
            depth=options.depth, vocab_size=VOCAB_SIZE, support=options.support, requests=1, ranks=1, models=models
        )
        with Deployment(shape) as deployment:
            deployment.parts["draft"].command = [*draft, "--attach", deployment.socket("leader")]
            for daemon in deployment.daemons:
                deployment.start(daemon)
            for daemon in deployment.daemons:
                deployment.wait_for_daemon(daemon)
            deployment.start("draft")
            _wait_for_attached(deployment)
            with attach_receiver(deployment.socket("receiver0")) as receiver:
                receiver.wait_for_peer(START_S)
                yield Via(name, receiver, account, deployment)


def _wait_for_attached(deployment: Deployment) -> None:
    """Until the draft has its model and is beside its daemon; `PeerFault` with the end of its log when it ended instead."""
    deadline = time.monotonic() + START_S
    while not deployment.status("leader")["clients"]:
        if not deployment.parts["draft"].running:
            raise PeerFault(Reason.PEER_LOST, f"the draft ended: {deployment.tail('draft')}")
        if time.monotonic() >= deadline:
            raise PeerFault(Reason.TIMEOUT, f"the draft did not attach within {START_S:g} s: {deployment.tail('draft')}")
        time.sleep(0.1)


def texts(via: Via, model: Any, tokenizer: Any, prompt: list[int], options: Options, outcome: Outcome, stages: Stages) -> None:
    """One text at each temperature, streamed."""
    stages.clear()
    own_seeds = seeds(options.seed, len(VIAS) * len(options.temperatures))
    for temperature in options.temperatures:
        number = len(outcome.runs) + 1
        task = Task(
            prompt, options.tokens, options.depth, temperature, options.support, own_seeds[(number - 1) % len(own_seeds)], number
        )
        stream = Stream(tokenizer, quiet=options.as_json)
        stream.heading(f"over {via.name}, temperature {temperature:g}", prompt)
        bytes_before, wire_before = via.bytes_ready(), via.wire_bytes()
        account = generate(via.receiver, model, task, stream.add)
        stream.end()
        run = Run(via.name, temperature, account, via.model_ns(number), via.bytes_ready() - bytes_before)
        wire = via.wire_bytes()
        if wire is not None and wire_before is not None:
            run.wire_bytes = wire - wire_before
        outcome.runs.append(run)
        discarded = sum(account.reasons.values())
        if discarded > DISCARDED_MOST * (discarded + len(account.rounds)):
            outcome.problems.append(f"over {via.name}: {discarded} proposals were discarded ({dict(account.reasons)})")
    outcome.tail_us[via.name] = via.tail_us([run.account for run in outcome.runs if run.via == via.name])


def check(forward: Any, prompt: list[int], options: Options, outcome: Outcome, stages: Stages) -> None:
    """Texts at temperature 0 against the target alone, all others against its distribution."""
    for temperature in options.temperatures:
        made = [(run.via, run.account.tokens) for run in outcome.runs if run.temperature == temperature]
        if temperature == 0:
            stages.say("the target alone, for comparison")
            due = alone(forward, Task(prompt, options.tokens, options.depth, 0.0))
            for name, tokens in made:
                same = sum(ours == theirs for ours, theirs in zip(tokens, due, strict=True))
                outcome.checks.append(f"T=0 over {name}: {same} of {len(due)} tokens as the target alone writes them")
                if tokens != due:
                    outcome.problems.append(f"the text at temperature 0 over {name} is not the target's")
        elif len(made) * options.tokens < MIN_TOKENS:
            outcome.checks.append(f"T={temperature:g}: too few tokens to judge their distribution (at least {MIN_TOKENS})")
        else:
            stages.say(f"the distribution of what was written at temperature {temperature:g}")
            p_value = judge_texts(forward, [(prompt, tokens) for _, tokens in made], temperature, options.depth + 1)
            total = sum(len(tokens) for _, tokens in made)
            outcome.checks.append(f"T={temperature:g}: {total} tokens of all ways, p = {p_value:.3g} (PIT in 64 bins)")
            if p_value <= P_VALUE_LEAST:
                outcome.problems.append(f"the tokens at temperature {temperature:g} are not distributed as the target's")


def check_first(via: Via, forward: Any, prompt: list[int], options: Options, outcome: Outcome, stages: Stages) -> None:
    """The first token after the prompt, at temperature 1, under many seeds."""
    task = Task(prompt, 1, 1, 1.0, options.support)
    model = Remembered(forward)
    stages.say(f"the first token of {options.first} requests")
    counted = first_tokens(via.receiver, model, task, seeds(options.seed + FIRST_SEEDS, options.first))
    p_value, cells = judge_first(model.after(prompt)[0], counted, 1.0)
    outcome.checks.append(f"T=1: first token of {options.first} requests over {via.name}, p = {p_value:.3g} ({cells} cells)")
    if p_value <= P_VALUE_LEAST:
        outcome.problems.append("first tokens at temperature 1 are not distributed as the target's")


def run(options: Options) -> Outcome:
    """Everything, in order."""
    stages = Stages(options)
    try:
        stages.next("loading SmolLM2-135M")
        try:
            from model import Forward, load_model, load_tokenizer
        except ModuleNotFoundError as error:
            how = f"scripts/setup-model.sh model, then .venv-model/bin/python {sys.argv[0]}"
            raise ConfigError(f"there is no {error.name} here: {how}") from None
        tokenizer = load_tokenizer()
        prompt = tokenizer(options.prompt).input_ids
        capacity = -(-(len(prompt) + options.tokens + 2 * options.depth + 32) // 64) * 64
        forward = Forward(load_model(), (options.depth + 1,), capacity)
        outcome = Outcome()
        for name in options.vias:
            stages.next(f"{name}: the draft process loads its model")
            with opened(name, options, capacity) as via:
                texts(via, forward, tokenizer, prompt, options, outcome, stages)
                stages.next(f"{name}: done")
                if options.first and name == options.vias[0]:
                    check_first(via, forward, prompt, options, outcome, stages)
        stages.next("checking what was written")
        check(forward, prompt, options, outcome, stages)
    finally:
        stages.clear()
    return outcome


def _cut(_context: click.Context, _param: click.Parameter, text: str) -> str:
    try:
        Cut.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return text


@click.command(cls=OneLineCommand, context_settings={"show_default": True})
@click.option("--ask", default=QUESTION, help="What the model is asked.")
@click.option("--prompt", help="Text that it goes on with instead, as it stands.")
@click.option("--tokens", type=click.IntRange(1, 2000), default=200, help="Tokens to add.")
@click.option("--depth", type=click.IntRange(1, 16), default=4, help="Drafted tokens a round.")
@click.option("--sparse", "support", type=click.IntRange(1, 4096), metavar="K", help="Carry the top K of q instead of all of it.")
@click.option("--draft", "cut", default="layers=28", callback=_cut, help="none, layers=N, bits=N, or both with a comma.")
@click.option("--draft-temperature", type=click.FloatRange(0.05, 10), help="The draft's own, where the target's is not 0.")
@click.option("--temperature", "temperatures", type=click.FloatRange(0, 10), multiple=True, default=(0.0, 1.0))
@click.option("--via", "vias", type=click.Choice(VIAS), multiple=True, default=VIAS, help="How q comes.")
@click.option("--first", type=click.IntRange(0, 100_000), default=1500, help="Requests for the test of first tokens; 0: none.")
@click.option("--seed", type=click.IntRange(0, (1 << 62) - 1), default=1, help="Same seed, same tokens.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text and report.")
@click.option("-v", "--verbose", count=True, help="Log what happens.")
@command_errors
def main(verbose: int, ask: str, prompt: str | None, **given: Any) -> None:
    """Speculative decoding of SmolLM2-135M: draft and target in two processes, real q between them."""
    setup_logging(verbose)
    started = time.monotonic()
    options = Options(prompt=CHAT.format(ask) if prompt is None else prompt, **given)
    outcome = run(options)
    if options.as_json:
        told = {"options": asdict(options), "checks": outcome.checks, "problems": outcome.problems, "tail_us": outcome.tail_us}
        told["runs"] = [{**asdict(one), "shares": one.account.shares(one.model_ns)} for one in outcome.runs]
        click.echo(json.dumps(told))
    else:
        click.echo(report(options, outcome, time.monotonic() - started))
    if outcome.problems:
        raise PeerFault(Reason.INCOMPLETE, "; ".join(outcome.problems))


if __name__ == "__main__":
    main()
