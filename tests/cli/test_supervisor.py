"""Worker processes kept alive: evidence comes from the kernel, and no life is taken for another."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from stanchion.cli.plan import WorkerPlan, armed
from stanchion.cli.supervisor import Supervisor, wanted
from stanchion.core.config import Cluster, Config, load
from stanchion.core.messages import Hello, Suspected

WAIT_S = 20.0
SLEEPS = "import signal; signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"


def hello(name: str, incarnation: int, pid: int) -> Hello:
    return Hello(
        name=name, role="both", incarnation=incarnation, pid=pid, peer_address="", identity={},
        model="m", revision="1", schema="s", page_tokens=16, pages=1, context_max=1, vocabulary=1,
        draft_tokens=0, eos_ids=(), failpoints=(),
    )  # fmt: skip


@dataclass
class Gateway:
    """What a supervisor sees of one; tests say who has joined, and when it was heard."""

    join: str = "ipc:///nowhere"
    draining: bool = False
    joined: dict[str, Hello] = field(default_factory=dict)
    heard: Callable[[], float] = lambda: 0.0
    expected: Sequence[str] = ()
    endings: list[tuple[str, int, str]] = field(default_factory=list)
    why: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    on_suspected: Callable[[Suspected], None] = lambda said: None

    def expect(self, names: Sequence[str]) -> None:
        self.expected = names

    def who_is(self, name: str) -> Hello | None:
        return self.joined.get(name)

    def heard_at(self, name: str) -> float:
        return self.heard()

    def ended(self, name: str, pid: int, why: str) -> None:
        self.endings.append((name, pid, why))
        self.changed.set()

    def give_up(self, why: str) -> None:
        self.why = why
        self.changed.set()

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not met():
                await self.changed.wait()
                self.changed.clear()


def supervisor(gateway: Gateway, program: str, **cluster: object) -> Supervisor:
    def command(plan: WorkerPlan) -> Sequence[str]:
        gateway.changed.set()
        return [sys.executable, "-c", program, plan.name, plan.role]

    config = replace(Config(), cluster=replace(Cluster(), **cluster))  # type: ignore[arg-type]
    return Supervisor(config, "ipc:///nowhere", dict(os.environ), gateway, command)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_failpoint_can_be_for_one_worker() -> None:
    config = load(Config(), "", ["lab.failpoints=door_removed@decode-1,foreign_write"])
    assert armed(config, "decode-1").lab.failpoints == "door_removed,foreign_write"
    assert armed(config, "decode-0").lab.failpoints == "foreign_write"


def test_who_is_wanted():
    assert wanted(Cluster()) == {"both-0": "both"}
    assert wanted(Cluster(join="tcp://127.0.0.1:5")) == {}
    assert wanted(Cluster(prefill=1, decode=2)) == {
        "prefill-0": "prefill",
        "decode-0": "decode",
        "decode-1": "decode",
    }


def test_one_that_ended_is_told_and_restarted_and_all_have_ended_after():
    async def check() -> None:
        gateway = Gateway()
        keeper = supervisor(gateway, SLEEPS, both=2)
        async with keeper.running():
            assert gateway.expected == ["both-0", "both-1"]
            await gateway.until(lambda: len(keeper.processes) == 2)
            first = keeper.processes["both-0"].pid
            os.kill(first, signal.SIGKILL)
            await gateway.until(lambda: bool(gateway.endings))
            assert gateway.endings[0][:2] == ("both-0", first) and "signal 9" in str(
                gateway.endings
            )
            assert not alive(first), "it was told before it was reaped"
            await gateway.until(lambda: keeper.processes["both-0"].pid != first)
            pids = [process.pid for process in keeper.processes.values()]
            assert all(map(alive, pids))
        assert not any(map(alive, pids)) and not gateway.why

    asyncio.run(check())


@pytest.mark.parametrize(
    ("program", "settings", "why", "lives"),
    [
        ("raise SystemExit(2)", {}, "cannot run", 1),
        ("raise SystemExit(1)", {"restarts_max": 2}, "restarted 2 times", 3),
        ("raise SystemExit(0)", {"restarts_max": 0}, "restarted 0 times", 1),
    ],
)
def test_one_that_cannot_live_is_given_up(program, settings, why, lives, capfd):
    async def check() -> None:
        gateway = Gateway()
        async with supervisor(gateway, program, both=1, **settings).running():
            await gateway.until(lambda: bool(gateway.why))
        assert why in gateway.why and len(gateway.endings) == lives

    asyncio.run(check())
    assert why in capfd.readouterr().err


def test_the_suspected_life_is_killed_and_no_other(capfd):
    async def check() -> None:
        gateway = Gateway()
        keeper = supervisor(gateway, SLEEPS, both=1)
        async with keeper.running():
            await gateway.until(lambda: "both-0" in keeper.processes)
            pid = keeper.processes["both-0"].pid
            gateway.on_suspected(Suspected("both-0", 7, "it has not joined"))
            gateway.joined["both-0"] = hello("both-0", 7, pid)
            gateway.on_suspected(Suspected("both-0", 6, "an older life"))
            gateway.on_suspected(Suspected("both-1", 7, "another"))
            gateway.joined["both-0"] = hello("both-0", 7, pid + 1)
            gateway.on_suspected(Suspected("both-0", 7, "not our process"))
            assert alive(pid) and not gateway.endings
            gateway.joined["both-0"] = hello("both-0", 7, pid)
            gateway.on_suspected(Suspected("both-0", 7, "no answer"))
            await gateway.until(lambda: bool(gateway.endings))
            assert gateway.endings == [
                ("both-0", pid, "the worker process both-0 was killed by signal 9")
            ]
            await gateway.until(lambda: keeper.processes["both-0"].pid != pid)

    asyncio.run(check())
    assert capfd.readouterr().err.count("is suspected") == 1


def test_a_hung_one_is_killed_once_it_has_joined_and_one_that_speaks_is_not():
    async def check() -> None:
        gateway = Gateway(heard=asyncio.get_running_loop().time)
        keeper = supervisor(gateway, SLEEPS, both=1, silence_s=0.5)
        async with keeper.running():
            await gateway.until(lambda: "both-0" in keeper.processes)
            process = keeper.processes["both-0"]
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(0.8)  # time itself is what is under test
            assert not gateway.endings, "killed before it had joined"
            gateway.joined["both-0"] = hello("both-0", 1, process.pid)
            await asyncio.sleep(0.8)
            assert not gateway.endings, "killed while it spoke"
            last = asyncio.get_running_loop().time()
            gateway.heard = lambda: last
            await gateway.until(lambda: bool(gateway.endings))
            assert asyncio.get_running_loop().time() - last > 0.5

    asyncio.run(check())


def test_while_draining_nobody_is_restarted_and_prefill_goes_last(capfd):
    async def check() -> None:
        gateway = Gateway()
        keeper = supervisor(gateway, SLEEPS, prefill=1, decode=1)
        stopped: list[list[str]] = []
        stop = keeper._stop

        async def watched(processes):  # type: ignore[no-untyped-def]
            stopped.append([process.role for process in processes])
            await stop(processes)
            assert all(process.over.is_set() for process in processes)

        keeper._stop = watched  # type: ignore[method-assign]
        async with keeper.running():
            await gateway.until(lambda: len(keeper.processes) == 2)
            gateway.draining = True
            os.kill(keeper.processes["decode-0"].pid, signal.SIGKILL)
            await gateway.until(lambda: bool(gateway.endings))
        assert len(gateway.endings) == 1 and stopped == [["decode"], ["prefill"]]

    asyncio.run(check())
    assert "started again" not in capfd.readouterr().err


def test_one_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("stanchion.cli.supervisor.STOP_S", 0.3)

    async def check() -> None:
        gateway = Gateway()
        keeper = supervisor(gateway, STUBBORN, both=1)
        async with keeper.running():
            await gateway.until(lambda: "both-0" in keeper.processes)
        assert keeper.processes["both-0"].over.is_set()

    asyncio.run(check())


def test_a_gateway_that_fails_leaves_no_process_behind():
    async def check() -> None:
        gateway = Gateway()
        keeper = supervisor(gateway, SLEEPS, both=2)
        with pytest.raises(ExceptionGroup):
            async with keeper.running():
                await gateway.until(lambda: len(keeper.processes) == 2)
                raise RuntimeError("it failed")
        assert all(process.over.is_set() for process in keeper.processes.values())

    asyncio.run(check())
