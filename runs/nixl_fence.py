"""What stops a NIXL write? For each thing that one could do, how many bytes arrive after it.

    python runs/nixl_fence.py [--runs 3] [--mib 256] [CASE ...]

A source process writes MIB of ones into a target process's zeros, over UCX on TCP. Once a tenth
has arrived, the case does its thing; this process, which maps the target's memory too and so needs
nothing of NIXL, counts what has arrived when the thing is done, and watches for `WATCH_S` more.
Arrivals are counted by one byte in every 4 KiB. The results are in docs/nixl-fence.md.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from stanchion.kv.arena import Address, Arena, attach

WATCH_S = 3.0
STRIDE = 4096
Kilo = 1024


class End:
    """A child: either end of the write. `ask` returns what it answered."""

    def __init__(self, role: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--role", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"UCX_TLS": "tcp,self", "NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
            | os.environ,
        )

    def tell(self, *words: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(msgspec.json.encode(words) + b"\n")
        self.process.stdin.flush()

    def ask(self, *words: Any) -> Any:
        self.tell(*words)
        assert self.process.stdout
        return msgspec.json.decode(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill(self) -> None:
        """SIGKILL, and the kernel's word that it has ended."""
        watch = os.pidfd_open(self.process.pid)
        os.kill(self.process.pid, signal.SIGKILL)
        select.select([watch], [], [])
        os.close(watch)


@dataclass
class Bench:
    target: End
    source: End
    memory: np.ndarray
    notes: list[str]

    def arrived(self) -> int:
        return int(self.memory[::STRIDE].sum()) * STRIDE

    def settle(self) -> None:
        """Until nothing more has arrived for half a second."""
        last, since = self.arrived(), time.monotonic()
        while time.monotonic() - since < 0.5:
            if (now := self.arrived()) != last:
                last, since = now, time.monotonic()


def stop(end: End) -> None:
    os.kill(end.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, end.process.pid, os.WSTOPPED | os.WNOWAIT)


def nothing(bench: Bench) -> None:
    pass


def release(bench: Bench) -> None:
    bench.notes.append(str(bench.source.ask("release")))


def source_agent(bench: Bench) -> None:
    bench.notes.append(str(bench.source.ask("delete")))


def kill_source(bench: Bench) -> None:
    bench.source.kill()


def kill_source_of_stopped_target(bench: Bench) -> None:
    """The target goes on only after the end of the source was seen."""
    stop(bench.target)
    bench.settle()
    bench.source.kill()
    bench.notes.append(f"{bench.arrived() / 2**20:.1f} MiB when killed")
    os.kill(bench.target.process.pid, signal.SIGCONT)


def source_agent_of_stopped_target(bench: Bench) -> None:
    stop(bench.target)
    bench.settle()
    bench.notes.append(str(bench.source.ask("delete")))
    bench.notes.append(f"{bench.arrived() / 2**20:.1f} MiB then")
    os.kill(bench.target.process.pid, signal.SIGCONT)


def remove_remote(bench: Bench) -> None:
    bench.notes.append(str(bench.target.ask("remove")))


def deregister(bench: Bench) -> None:
    bench.notes.append(str(bench.target.ask("deregister")))


def target_agent(bench: Bench) -> None:
    bench.notes.append(str(bench.target.ask("delete")))


def target_agent_renewed(bench: Bench) -> None:
    """Does the source, which lives, find the new agent by the old one's address?"""
    bench.notes.append(str(bench.target.ask("delete")))
    bench.notes.append(str(bench.target.ask("renew")))
    bench.notes.append(f"source: {bench.source.ask('state')}")


def deregister_and_delete(bench: Bench) -> None:
    bench.notes.append(str(bench.target.ask("deregister")))
    bench.notes.append(str(bench.target.ask("delete")))


def stop_then_kill_source(bench: Bench) -> None:
    stop(bench.source)
    before = bench.arrived()
    bench.settle()
    bench.notes.append(f"{(bench.arrived() - before) / 2**20:.1f} MiB came while it was stopped")
    bench.source.kill()


def stop_source(bench: Bench) -> None:
    stop(bench.source)


def kill_then_delete(bench: Bench) -> None:
    bench.source.kill()
    bench.notes.append(str(bench.target.ask("delete")))


def stopped_target_then_kill_then_delete(bench: Bench) -> None:
    """As bad as it gets: the sockets are full when the source ends."""
    stop(bench.target)
    bench.settle()
    bench.source.kill()
    bench.target.tell("delete")
    os.kill(bench.target.process.pid, signal.SIGCONT)
    assert bench.target.process.stdout
    bench.notes.append(str(msgspec.json.decode(bench.target.process.stdout.readline())))


CASES: dict[str, Callable[[Bench], None]] = {
    "nothing": nothing,
    "source: release handle": release,
    "source: agent deleted": source_agent,
    "target stopped, source's agent deleted, continued": source_agent_of_stopped_target,
    "source: SIGSTOP": stop_source,
    "source: SIGKILL": kill_source,
    "source: SIGSTOP, then SIGKILL": stop_then_kill_source,
    "target stopped, source killed, target continued": kill_source_of_stopped_target,
    "target: remove_remote_agent": remove_remote,
    "target: deregister_memory": deregister,
    "target: agent deleted": target_agent,
    "target: agent deleted, a new one made": target_agent_renewed,
    "target: memory deregistered, agent deleted": deregister_and_delete,
    "source killed, target's agent deleted": kill_then_delete,
    "target stopped, source killed, agent deleted": stopped_target_then_kill_then_delete,
}


def play(case: str, mib: int, kib: int) -> str:
    target, source = End("target"), End("source")
    try:
        pid, descriptor, size, token = target.ask("memory", mib)
        memory = attach(Address(pid, descriptor, size, bytes.fromhex(token)))
        name, metadata, address = target.ask("agent")
        back = source.ask("post", name, metadata, address, mib, kib)
        target.ask("meet", back)
        bench = Bench(target, source, memory, [])
        started = time.monotonic()
        source.tell("go")
        while bench.arrived() < size / 10:
            assert time.monotonic() - started < 20, "nothing arrives"
        begun = time.monotonic()
        CASES[case](bench)
        done = time.monotonic()
        first = bench.arrived()
        last, last_at = first, done
        while time.monotonic() - done < WATCH_S:
            if (now := bench.arrived()) != last:
                last, last_at = now, time.monotonic()
        whole = "" if last < size else " (all of it)"
        return (
            f"{first / 2**20:7.1f} MiB when done ({(done - begun) * 1e3:.1f} ms), "
            f"{(last - first) / 2**20:7.1f} MiB after{whole}, "
            f"the last {(last_at - done) * 1e3:.0f} ms after. {'; '.join(bench.notes)}"
        )
    finally:
        target.end()
        source.end()


def done_means_there(kib: int) -> str:
    """A write of one descriptor to a stopped target: may it say DONE before it is there?"""
    target, source = End("target"), End("source")
    try:
        pid, descriptor, size, token = target.ask("memory", 64)
        memory = attach(Address(pid, descriptor, size, bytes.fromhex(token)))
        name, metadata, address = target.ask("agent")
        target.ask("meet", source.ask("post", name, metadata, address, 1, 1024))
        source.tell("go")
        while source.ask("state") != "DONE":
            pass
        memory[:] = 0
        source.ask("post more", name, address, kib)
        stop(target)
        source.tell("go")
        states = set()
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            states.add(source.ask("state"))
        early = int(memory.sum())
        os.kill(target.process.pid, signal.SIGCONT)
        while (state := source.ask("state")) == "PROC":
            pass
        there = int(memory.sum())
        return (
            f"said {sorted(states)} while {early} of {kib * Kilo} bytes were there; "
            f"then {state}, {there} bytes there"
        )
    finally:
        target.end()
        source.end()


# ---- in the children ------------------------------------------------------------------------


class Child:
    def __init__(self, role: str) -> None:
        self.role = role
        self.agent: Any = None
        self.handle: Any = None

    def build(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(backends=["UCX"])
        self.agent = nixl_agent(f"{self.role}-{os.getpid()}", config)

    def register(self, memory: np.ndarray) -> None:
        self.start = memory.ctypes.data
        regions = [(self.start, len(memory), 0, "")]
        self.registered = self.agent.register_memory(regions, "DRAM")

    def hear(self, word: str, *rest: Any) -> Any:
        started = time.monotonic()
        try:
            answer = getattr(self, "on_" + word.replace(" ", "_"))(*rest)
        except Exception as error:  # noqa: BLE001  reported to the parent
            answer = f"{type(error).__name__}: {error}"
        took_ms = (time.monotonic() - started) * 1e3
        return f"ok in {took_ms:.1f} ms" if answer is None else answer

    def on_memory(self, mib: int) -> Any:
        self.arena = Arena.shared(mib * 2**20)
        self.arena.memory[:] = 0
        self.build()
        self.register(self.arena.memory)
        address = self.arena.address
        return address.pid, address.descriptor, address.size, address.token.hex()

    def on_agent(self) -> Any:
        return self.agent.name, self.agent.get_agent_metadata().hex(), self.start

    def on_post(self, name: str, metadata: str, address: int, mib: int, kib: int) -> Any:
        self.build()
        self.memory = np.ones(max(mib, 16) * 2**20, np.uint8)
        self.register(self.memory)
        self.agent.add_remote_agent(bytes.fromhex(metadata))
        self._prepare(name, address, mib, kib)
        return self.agent.get_agent_metadata().hex()

    def on_post_more(self, name: str, address: int, kib: int) -> Any:
        self._prepare(name, address, 1, kib, 1)

    def _prepare(self, name: str, address: int, mib: int, kib: int, count: int = 0) -> None:
        offsets = np.arange(count or mib * 2**20 // (kib * Kilo), dtype=np.uint64) * np.uint64(
            kib * Kilo
        )
        sizes, device = (
            np.full(len(offsets), kib * Kilo, np.uint64),
            np.zeros(len(offsets), np.uint64),
        )
        sides = [
            self.agent.get_xfer_descs(np.stack([offsets + start, sizes, device], 1), "DRAM")
            for start in (np.uint64(self.start), np.uint64(address))
        ]
        self.handle = self.agent.initialize_xfer("WRITE", *sides, name)

    def on_meet(self, metadata: str) -> Any:
        self.other = self.agent.add_remote_agent(bytes.fromhex(metadata))

    def on_go(self) -> Any:
        return self.agent.transfer(self.handle)

    def on_renew(self) -> Any:
        self.build()
        self.register(self.arena.memory)

    def on_state(self) -> Any:
        return self.agent.check_xfer_state(self.handle)

    def on_release(self) -> Any:
        state = self.agent.check_xfer_state(self.handle)
        self.handle.release()
        return f"was {state}"

    def on_remove(self) -> Any:
        self.agent.remove_remote_agent(self.other)

    def on_deregister(self) -> Any:
        self.agent.deregister_memory(self.registered)

    def on_delete(self) -> Any:
        self.handle = self.agent = None
        gc.collect()


def serve(role: str) -> None:
    child = Child(role)
    for line in sys.stdin.buffer:
        answer = child.hear(*msgspec.json.decode(line))
        word = msgspec.json.decode(line)[0]
        if word == "go":
            continue
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--kib", type=int, default=256, help="of one descriptor")
    parser.add_argument("--role", choices=["target", "source"])
    chosen = parser.parse_args()
    if chosen.role:
        serve(chosen.role)
        return
    for kib in () if chosen.cases else (4, 64, 256, 1024):
        print(f"DONE? {kib:5d} KiB {done_means_there(kib)}", flush=True)
    for case in chosen.cases or CASES:
        for _ in range(chosen.runs):
            print(f"{case:50s} {play(case, chosen.mib, chosen.kib)}", flush=True)


if __name__ == "__main__":
    main()
