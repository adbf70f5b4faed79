"""A peer made of bare verbs: one queue pair that writes where, when and what it likes. Knows nothing of frames or sessions.

Between tests and pyverbs. Stands for a faulty or hostile implementation, so it shares no code with the link under test.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import time
from dataclasses import dataclass

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

ONE = os.environ.get("RXE_ONE", "rxe0")
A, B = os.environ.get("RXE_A", "rxe_a"), os.environ.get("RXE_B", "rxe_b")
# The first is the link-local address, which is not routed; the second is the configured IPv4 address.
GID_INDEX = 1
DEPTH = 256
PAGE = mmap.PAGESIZE
WRITABLE = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
STATES = {getattr(e, f"IBV_QPS_{name}"): name for name in ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")}


@dataclass(frozen=True)
class Place:
    """Where a queue pair can be reached."""

    qp_number: int
    gid: str
    psn: int


class Memory:
    """Registered pages of this process."""

    def __init__(self, pd: PD, length: int, access: int = WRITABLE) -> None:
        self.map = mmap.mmap(-1, -(-length // PAGE) * PAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.mr = MR(pd, length, access, address=self.address)

    @property
    def rkey(self) -> int:
        return int(self.mr.rkey)


class RawPeer:
    """One end with a completion queue of its own. Small timeouts, so that a lost peer is known soon."""

    def __init__(self, device: str = ONE, timeout: int = 12, retry: int = 3) -> None:
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 2 * DEPTH)
        self.psn = random.getrandbits(24)
        self.timeout, self.retry = timeout, retry
        cap = QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH, max_send_sge=1, max_recv_sge=1)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap))

    @property
    def place(self) -> Place:
        return Place(self.qp.qp_num, str(self.context.query_gid(1, GID_INDEX)), self.psn)

    def connect(self, peer: Place, mtu: int = e.IBV_MTU_1024) -> None:
        """To RTS."""
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = WRITABLE
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = peer.qp_number, peer.psn, self.psn
        attributes.path_mtu = mtu
        attributes.timeout, attributes.retry_cnt = self.timeout, self.retry
        attributes.rnr_retry, attributes.min_rnr_timer = 6, 12
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        route = GlobalRoute(dgid=GID(peer.gid), sgid_index=GID_INDEX, hop_limit=64)
        attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route, dlid=0)
        self.qp.to_rts(attributes)

    def state(self) -> str:
        return STATES[self.qp.query(e.IBV_QP_STATE)[0].qp_state]

    def fail(self) -> None:
        """Into the error state."""
        self.qp.modify(QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)

    def expect(self, count: int = 1) -> None:
        """Posts receives without memory: enough for a WRITE_WITH_IMM each."""
        for _ in range(count):
            self.qp.post_recv(RecvWR(0, 1, [SGE(0, 0, 0)]))

    def post_write(self, source: Memory, length: int, address: int, rkey: int, imm: int | None = 0, offset: int = 0) -> None:
        """RDMA WRITE, with immediate data unless `imm` is None."""
        opcode = e.IBV_WR_RDMA_WRITE if imm is None else e.IBV_WR_RDMA_WRITE_WITH_IMM
        request = SendWR(wr_id=1, opcode=opcode, num_sge=1, sg=[SGE(source.address + offset, length, source.mr.lkey)])
        request.set_wr_rdma(rkey, address)
        if imm is not None:
            request.imm_data = imm
        self.qp.post_send(request)

    def completion(self) -> tuple[int, int]:
        """Waits for the next completion: (status, immediate data). The test's own timeout bounds it."""
        while True:
            count, found = self.cq.poll(1)
            if count:
                return int(found[0].status), int(found[0].imm_data)
            time.sleep(0.001)


def joined(first: str = ONE, second: str = ONE) -> tuple[RawPeer, RawPeer]:
    """Two ends that can write to each other."""
    one, two = RawPeer(first), RawPeer(second)
    one.connect(two.place)
    two.connect(one.place)
    return one, two
