"""Keeps a gateway's own workers alive: spawns them, ends those that hang, restarts what ended.

Promises: a process is taken for ended on the evidence of its pidfd alone; a successor has the same
name and is another life; a worker that cannot live (it exits with 2, or ends more than
`restarts_max` times within a minute) stops the gateway with a reason; and when the gateway has
drained, every process that was spawned has ended, prefill workers last.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from stanchion.cli.plan import WorkerPlan, armed, encode
from stanchion.core.config import Cluster, Config
from stanchion.core.messages import Role, Suspected
from stanchion.gateway.supervise import Watched

TICK_S = 0.1
WINDOW_S = 60.0
BACKOFF_S = 0.1  # before the first restart; twice as long before each other one in the window
BACKOFF_S_MAX = 5.0
STOP_S = 30.0
UNFIT = 2  # a worker's exit code: its settings do not fit the machine, or the cluster

Command = Callable[[WorkerPlan], Sequence[str]]


def wanted(cluster: Cluster) -> dict[str, Role]:
    """The name and role of each worker that is ours to run. One that does both, by default; none
    where others are told where to join and no number is given."""
    counts: dict[Role, int] = {
        "both": cluster.both,
        "prefill": cluster.prefill,
        "decode": cluster.decode,
    }
    if not any(counts.values()) and not cluster.join:
        counts["both"] = 1
    return {f"{role}-{at}": role for role, count in counts.items() for at in range(count)}


def worker_command(plan: WorkerPlan) -> Sequence[str]:
    return [sys.executable, "-m", "stanchion.cli.worker", encode(plan).decode()]


class Process:
    """One spawned worker. `over` is set when the kernel says that it ended, and it is reaped."""

    def __init__(self, role: Role, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # A session of its own: the terminal's Ctrl-C reaches the gateway, which drains first.
        self._popen = subprocess.Popen(command, env=environment, start_new_session=True)
        self._descriptor = os.pidfd_open(self._popen.pid)
        self.role = role
        self.over = asyncio.Event()
        self.heard_at = 0.0
        self.silent_s = 0.0  # of the time that we were looking
        asyncio.get_running_loop().add_reader(self._descriptor, self._ended)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, number: signal.Signals) -> None:
        if not self.over.is_set():
            signal.pidfd_send_signal(self._descriptor, number)

    def how(self) -> str:
        code = self._popen.returncode
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    @property
    def unfit(self) -> bool:
        return self._popen.returncode == UNFIT

    def _ended(self) -> None:
        self._popen.wait()
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.over.set()


@dataclass
class Supervisor:
    """`listen` is where the workers' own sockets go; `environment` is all that they get of ours."""

    config: Config
    listen: str
    environment: Mapping[str, str]
    fleet: Watched
    command: Command = worker_command
    processes: dict[str, Process] = field(default_factory=dict)  # by name, the last one

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        workers = wanted(self.config.cluster)
        self.fleet.expect(list(workers))
        self.fleet.on_suspected = self._suspected
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._keep(name, workers[name])) for name in workers]
                tasks.append(group.create_task(self._watch()))
                try:
                    yield
                finally:
                    for task in tasks:
                        task.cancel()
        finally:
            try:
                await self._stop([one for one in self.processes.values() if one.role != "prefill"])
                await self._stop([one for one in self.processes.values() if one.role == "prefill"])
            finally:
                for process in self.processes.values():
                    process.send(signal.SIGKILL)

    # ---- one worker, life after life --------------------------------------------------------

    async def _keep(self, name: str, role: Role) -> None:
        ended_at: deque[float] = deque()
        loop = asyncio.get_running_loop()
        while True:
            process = self.processes[name] = self._spawn(name, role)
            await process.over.wait()
            self.fleet.ended(name, process.pid, f"the worker process {name} {process.how()}")
            if self.fleet.draining:
                return
            while ended_at and loop.time() - ended_at[0] > WINDOW_S:
                ended_at.popleft()
            if reason := self._hopeless(process, len(ended_at)):
                _say(f"{name} {process.how()}: {reason}")
                self.fleet.give_up(f"{name}: {reason}")
                return
            pause_s = min(BACKOFF_S * 2 ** len(ended_at), BACKOFF_S_MAX)
            ended_at.append(loop.time())
            _say(f"{name} {process.how()}; it is started again")
            await asyncio.sleep(pause_s)

    def _spawn(self, name: str, role: Role) -> Process:
        plan = WorkerPlan(
            name=name,
            role=role,
            join=self.fleet.join,
            listen=self.listen,
            parent=os.getpid(),
            config=armed(self.config, name),
        )
        return Process(role, self.command(plan), self.environment)

    def _hopeless(self, process: Process, restarts: int) -> str:
        if process.unfit:
            return "it cannot run with these settings, so the server stops"
        if restarts >= self.config.cluster.restarts_max:
            return f"it was restarted {restarts} times within {WINDOW_S:g} s, so the server stops"
        return ""

    # ---- the hung and the suspected ---------------------------------------------------------

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        looked_at = loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            before, looked_at = looked_at, loop.time()
            for name, process in self.processes.items():
                # Were this process held up, all workers would seem silent: a tick counts for two
                # ticks at most.
                self._look(name, process, min(looked_at - before, 2 * TICK_S))

    def _look(self, name: str, process: Process, passed_s: float) -> None:
        hello = self.fleet.who_is(name)
        if hello is None or hello.pid != process.pid or process.over.is_set():
            return  # it has not joined yet: loading takes what it takes
        heard_at = self.fleet.heard_at(name)
        if heard_at > process.heard_at:
            process.heard_at, process.silent_s = heard_at, 0.0
            return
        process.silent_s += passed_s
        if process.silent_s > self.config.cluster.silence_s:
            process.silent_s = 0.0
            _say(f"{name} said nothing for {self.config.cluster.silence_s:g} s: it is killed")
            process.send(signal.SIGKILL)

    def _suspected(self, said: Suspected) -> None:
        """Ends that life for good; never a later one of the same name."""
        process, hello = self.processes.get(said.name), self.fleet.who_is(said.name)
        if process is None or hello is None or hello.pid != process.pid:
            return
        if hello.incarnation == said.incarnation and not process.over.is_set():
            _say(f"{said.name} is suspected ({said.why}): it is killed")
            process.send(signal.SIGKILL)

    # ---- the end ----------------------------------------------------------------------------

    async def _stop(self, processes: Sequence[Process]) -> None:
        for process in processes:
            process.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                for process in processes:
                    await process.over.wait()
        except TimeoutError:
            for process in processes:
                process.send(signal.SIGKILL)
            for process in processes:
                await process.over.wait()


def _say(line: str) -> None:
    print(f"stanchion: {line}", file=sys.stderr, flush=True)
