"""A leader that forms a real session over rdma and then turns on it: whatever it was given, it uses when it likes.

A process of its own, told what to do in lines of JSON (`rdma_world.Hostile` is the other end). It keeps each address and key that
the receiver ever told it, and writes with them through the session's own queue pair, by the verbs library itself.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha1
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from pyverbs import enums
from pyverbs.mr import MR
from pyverbs.wr import SGE, SendWR

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "system"))

from system_rig import draft

from pp1q_transport.client import Leader, Role, Step, configure
from pp1q_transport.links.rdma import RdmaLink
from pp1q_transport.links.rdma_config import RdmaConfig
from pp1q_transport.staging import SlotViews
from pp1q_transport.toy.models import ToyModels
from pp1q_transport.wire import HEADER_BYTES

BUFFER_BYTES = 1 << 24
OURS = 99  # the work request that is not the link's


class Writer:
    """The session, what was stolen from it, and a buffer of its own registered in the session's protection domain."""

    def __init__(self, leader: Leader, models: ToyModels) -> None:
        self.leader = leader
        self.models = models
        self.step: Step | None = None
        self.stolen: list[tuple[int, int]] = []
        self.buffer = mmap.mmap(-1, BUFFER_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self.region: Any = None

    @property
    def link(self) -> RdmaLink:
        link = self.leader.engine.link
        assert isinstance(link, RdmaLink)
        return link

    @property
    def views(self) -> SlotViews:
        """The rows as this side has them."""
        staging = self.leader._staging
        assert staging is not None
        return staging.views

    def serve_until(self, done: Callable[[], object]) -> None:
        while not done():
            self.leader.poll()
            time.sleep(0.0005)

    def leave(self) -> None:
        """The end of the session, as of a process that dies: nothing is said."""
        if self.region is not None:
            self.region.close()
        if self.leader.engine.link is not None:
            self.leader.engine.link.close()
        self.leader.close()

    # ---- what may be asked --------------------------------------------------------------------------------------

    def up(self) -> dict[str, Any]:
        """Until there is a session; then steals."""
        self.serve_until(lambda: self.leader.up and self.link.connection.up)
        return self.steal()

    def recover(self) -> dict[str, Any]:
        """Until there is a session whose queue pair works: a write that was refused has cost it the last one."""
        self.serve_until(lambda: self.leader.up and self.link.connection.up and self.link.connection.pair.state == "RTS")
        return {}

    def steal(self) -> dict[str, Any]:
        """Keeps addresses and keys as they are now."""
        link = self.link
        self.stolen = [(target.address, target.key) for target in link.targets._targets]
        if self.region is not None:
            self.region.close()
        self.region = MR(link.connection.domain.pd, BUFFER_BYTES, enums.IBV_ACCESS_LOCAL_WRITE, address=self.address)
        shape = link.targets.shape
        return {"slots": len(self.stolen), "stride": shape.stride, "rows": shape.rows, "slot_bytes": shape.slot_bytes}

    def next_step(self) -> dict[str, Any]:
        """Until a STEP is here; it is kept and not answered."""
        found: list[Step] = []

        def look() -> bool:
            step = self.leader.next_step(0)
            if step is not None:
                found.append(step)
            return bool(found)

        self.serve_until(look)
        self.step = found[0]
        return {"slot": self.step.slot, "generation": self.step.slot_generation}

    def draft(self, rows: int | None = None) -> dict[str, Any]:
        """Answers the kept STEP as an honest leader does, until all of it is at the peer's device."""
        assert self.step is not None
        tokens = draft(self.models, self.step, rows)
        self.serve_until(lambda: self.link.outbox.empty() and not self.link.connection.pair.unfinished)
        views = self.views
        digests = [sha1(views.dense(self.step.slot, row).tobytes()).hexdigest() for row in range(len(tokens))]
        return {"tokens": tokens, "digests": digests}

    def serve(self, turns: int) -> dict[str, Any]:
        """Serves the session as it comes."""
        for _ in range(turns):
            self.leader.poll()
            time.sleep(0.0005)
        return {"up": self.leader.up}

    def post(self, slot: int, offset: int, length: int, fill: int, imm: int | None, key: str) -> dict[str, Any]:
        """Posts a write of `length` bytes of `fill` (-1: of the buffer as it is) to a slot's landing memory, by the stolen or the
        present key."""
        target = self.link.targets._targets[slot]
        address, rkey = self.stolen[slot] if key == "stolen" else (target.address, target.key)
        if fill >= 0:
            self.buffer[:length] = bytes([fill]) * length
        opcode = enums.IBV_WR_RDMA_WRITE if imm is None else enums.IBV_WR_RDMA_WRITE_WITH_IMM
        request = SendWR(wr_id=OURS, opcode=opcode, num_sge=1, sg=[SGE(self.address, length, self.region.lkey)])
        request.set_wr_rdma(rkey, address + offset)
        if imm is not None:
            request.imm_data = imm
        self.link.connection.pair._pair.post_send(request)
        return {}

    def completion(self) -> dict[str, Any]:
        """Waits for the write that was posted last: its status, and the queue pair's state after it."""
        pair = self.link.connection.pair
        while True:
            count, found = pair._send_queue.poll(1)
            if count and found[0].wr_id == OURS:
                return {"status": int(found[0].status), "state": pair.state}
            if count:
                pair._unfinished -= 1  # the link's own
            else:
                time.sleep(0.0005)

    def write(self, **where: Any) -> dict[str, Any]:
        """`post` and `completion`."""
        self.post(**where)
        return self.completion()


    def write_one_hot(self, slot: int, row: int, token: int) -> dict[str, Any]:
        """Writes a row that is valid in itself, and yields this token whatever was drawn, over the payload of a landing row."""
        vocab = self.views.vocab_size
        row_values = np.zeros(vocab, np.float32)
        row_values[token] = 1.0
        self.buffer[: 4 * vocab] = row_values.tobytes()
        offset = row * self.link.targets.shape.stride + HEADER_BYTES
        return self.write(slot=slot, offset=offset, length=4 * vocab, fill=-1, imm=None, key="present")

    def hammer(self, times: int) -> dict[str, Any]:
        """Answers the kept STEP, and writes over the payloads of its landing rows all the while."""
        assert self.step is not None
        answered = self.draft()
        shape = self.link.targets.shape
        for turn in range(times):
            for row in range(shape.rows):
                offset = row * shape.stride + HEADER_BYTES
                length = shape.stride - HEADER_BYTES
                self.write(slot=self.step.slot, offset=offset, length=length, fill=turn & 0xFF, imm=None, key="present")
        return answered


def open_session(connect: str, device: str, options: dict[str, Any], settings: dict[str, Any]) -> Writer:
    """A leader that will connect there."""
    config = configure(Role.LEADER, connect=connect, link="rdma", **options)
    leader = Leader(replace(config, rdma=RdmaConfig(device=device, **settings)))
    return Writer(leader, ToyModels.of(7, options["vocab_size"]))


def main() -> None:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    writer: Writer | None = None
    for line in sys.stdin:
        order = json.loads(line)
        what = order.pop("do")
        answer: dict[str, Any] = {}
        if what == "open":
            writer = open_session(**order)
        elif what == "leave":
            if writer is not None:
                writer.leave()
            writer = None
        else:
            answer = getattr(writer, what)(**order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
