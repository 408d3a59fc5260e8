"""Who may import whom, and which modules may touch the world. This file is the architecture."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "stanchion"

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "device": {"core"},
    "kv": {"core", "device"},
    "parallel": {"core", "device", "kv"},
    "model": {"core", "device", "kv"},
    "engine": {"core", "device", "kv", "parallel", "model"},
    "gateway": {"core"},
    "disagg": {"core", "device", "kv", "parallel", "engine"},
    # pure modules alone
    "sim": {"core", "device", "kv", "parallel", "engine", "disagg", "gateway"},
    "lab": {"core", "gateway", "sim"},
    "cli": {
        *("core", "device", "kv", "parallel", "model", "engine", "disagg", "gateway", "sim", "lab"),
    },
}

# Modules not listed here touch none of these: given the same calls they do the same things.
WORLD = {
    "torch", "numba", "asyncio", "threading", "concurrent", "multiprocessing", "subprocess",
    "socket", "zmq", "aiohttp", "uvicorn", "uvloop", "starlette", "time", "random", "os",
    "signal", "secrets", "uuid", "tempfile", "select", "urllib", "http", "mmap", "fcntl", "nixl",
    "llguidance",
}  # fmt: skip
MAY_TOUCH: dict[str, set[str]] = {
    "core/matching.py": {"llguidance"},  # a pure function of grammar and tokens, in Rust
    "core/peerkey.py": {"zmq"},  # keys are zmq's to derive; no socket is opened there
    "sim/choices.py": {"random"},
    "device/cpu.py": {"threading"},
    "engine/tierplan.py": {"time"},
    "kv/arena.py": {"fcntl", "mmap", "os", "secrets"},
    "kv/digest.py": {"torch"},
    "kv/diskfile.py": {"fcntl", "os"},
    "kv/poison.py": {"torch"},
    "kv/store.py": {"torch"},
    "kv/transfer/bell.py": {"os"},
    "kv/transfer/courier.py": {"threading", "time"},
    "kv/transfer/fence.py": {"os", "select"},
    "kv/transfer/inbox.py": {"threading", "time"},
    "kv/transfer/nixl.py": {"nixl", "os", "secrets"},
    "parallel/board.py": {"mmap", "os", "select", "torch"},
    "parallel/exchange.py": {"torch"},
    "parallel/group.py": {"torch"},
    "parallel/scratch.py": {"torch"},
    "parallel/shared.py": {"torch"},
    "parallel/visit.py": {"torch"},
    "model/text.py": {"torch"},
    "model/hashed.py": {"torch", "numba"},
    "engine/request.py": {"torch"},  # a name for the type checker alone
    "engine/follower.py": {"torch"},
    "engine/ranks.py": {"torch"},
    "engine/runner.py": {"torch"},
    "engine/sample.py": {"torch"},
    "disagg/assemble.py": {"os", "secrets"},
    "disagg/link.py": {"zmq"},
    "disagg/worker.py": {"os", "signal", "time", "zmq"},
    "gateway/app.py": {"asyncio", "time"},
    "gateway/attempts.py": {"asyncio"},
    "gateway/fleet.py": {"asyncio", "zmq"},
    "gateway/generate.py": {"asyncio", "time", "uuid"},
    "gateway/intake.py": {"asyncio", "concurrent"},
    "gateway/join.py": {"asyncio", "zmq"},
    "gateway/link.py": {"asyncio", "zmq"},
    "gateway/members.py": {"asyncio", "zmq"},
    "gateway/protocol.py": {"uvicorn"},
    "gateway/record/files.py": {"os"},
    "gateway/record/recorder.py": {"secrets", "threading", "time"},
    "gateway/serve.py": {"asyncio", "signal", "socket", "uvicorn", "uvloop"},
    "gateway/waiting.py": {"asyncio"},
    "gateway/upstream/client.py": {"aiohttp"},
    "gateway/upstream/link.py": {"asyncio"},
    "gateway/upstream/place.py": {"urllib"},  # an address is taken apart; nothing is opened
    "gateway/upstream/watch.py": {"asyncio"},
    "gateway/web.py": {"asyncio"},
    "lab/burnin.py": {"random"},
    "lab/burnin_run.py": {"asyncio", "uuid"},
    "lab/replay_client.py": {"aiohttp"},
    "lab/replay_run.py": {"asyncio"},
    "cli/bench/gateway.py": {"aiohttp"},
    "cli/bench/processes.py": {"aiohttp", "socket"},
    "cli/bench/madeup.py": {"random"},
    "cli/bench/streams.py": {"uvicorn"},
    "cli/burnin.py": {"asyncio"},
    "cli/chat.py": {"http", "time", "urllib"},
    "cli/drive.py": {"asyncio", "tempfile", "time"},
    "cli/lab.py": {"secrets"},
    "cli/front.py": {"tempfile"},
    "cli/main.py": {"os"},
    "cli/rank.py": {
        "multiprocessing",
        "os",
        "select",
        "signal",
        "threading",
        "time",
        "torch",
    },
    "cli/ranks.py": {
        "fcntl",
        "multiprocessing",
        "os",
        "select",
        "subprocess",
        "tempfile",
        "threading",
    },
    "cli/arms.py": {"signal", "subprocess"},
    "cli/replay.py": {"asyncio", "subprocess", "time"},
    "cli/run.py": {"os"},
    "cli/serve.py": {"os", "tempfile", "time"},
    "cli/storm.py": {"torch"},
    "cli/supervisor.py": {"asyncio", "os", "signal", "subprocess"},
    "cli/top.py": {"http", "time", "urllib"},
    "cli/verify.py": {"asyncio", "os", "signal", "time"},
    "cli/worker.py": {"os", "torch", "zmq"},
}
FOLDERS_MAY_TOUCH: dict[str, set[str]] = {
    "device/kernels/": {"torch", "numba"},
    "model/": {"torch"},
    "cli/bench/": {"asyncio", "os", "select", "subprocess", "tempfile", "time", "torch"},
}
# No object deserialisation, nowhere.
FORBIDDEN = {"pickle", "marshal", "dill", "shelve", "cloudpickle"}

# Words that belong to these files alone. An arena is memory without doors: those who copy behind
# the doors that they opened have it, and those who say to peers where it is.
ONLY_IN = {
    "wait_event": ("device/cuda.py",),
    "record_event": ("device/cuda.py",),
    "_value": ("device/stream.py",),
    "_free": ("kv/pages.py",),
    "arena": (
        "kv/store.py",
        "kv/copy.py",
        "kv/transfer/shm.py",
        "kv/transfer/nixl.py",
        "disagg/assemble.py",
        "engine/assemble.py",
        "engine/tierplan.py",
        "cli/bench/handoff.py",
        "cli/bench/hostcopy.py",
        "cli/bench/memory.py",
        "cli/bench/target.py",
    ),
}

LINES_PER_FILE = 450
LINES_PER_FUNCTION = 60


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "write imports out in full"
            yield node.module


def test_rooms_import_downwards() -> None:
    for name, tree in modules():
        room = name.split("/")[0]
        if room not in MAY_IMPORT:
            continue
        for target in imports(tree):
            parts = target.split(".")
            if parts[0] == ROOT.name and parts[1:]:
                assert parts[1] == room or parts[1] in MAY_IMPORT[room], f"{name}: {target}"


def test_every_room_is_listed() -> None:
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert rooms == set(MAY_IMPORT)


def test_the_layers_have_no_circle() -> None:
    order: list[str] = []
    while len(order) < len(MAY_IMPORT):
        free = [
            room for room, below in MAY_IMPORT.items() if room not in order and below <= {*order}
        ]
        assert free, "a circle"
        order += free


def test_the_world_is_touched_where_we_said() -> None:
    for name, tree in modules():
        touched = {target.split(".")[0] for target in imports(tree)} & WORLD
        allowed = set(MAY_TOUCH.get(name, set()))
        for folder, words in FOLDERS_MAY_TOUCH.items():
            allowed |= words if name.startswith(folder) else set()
        assert touched <= allowed, f"{name} touches {touched - allowed}"


def test_nothing_deserialises_objects() -> None:
    for name, tree in modules():
        assert not {target.split(".")[0] for target in imports(tree)} & FORBIDDEN, name
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile"}, f"{name}:{node.lineno}"


def test_some_words_live_in_one_file() -> None:
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ONLY_IN:
                assert name in ONLY_IN[node.attr], f"{name}:{node.lineno} says {node.attr}"


def test_no_task_is_an_orphan() -> None:
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("create_task", "ensure_future"):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                assert owner in ("group", "tasks"), f"{name}:{node.lineno}: use a TaskGroup"


def test_everything_fits_on_a_screen() -> None:
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < LINES_PER_FUNCTION, f"{name}: {node.name}"
        assert (ROOT / name).read_text().count("\n") <= LINES_PER_FILE, name


def test_the_gateway_and_the_simulator_run_without_torch() -> None:
    blocked = "import sys; sys.modules['torch'] = sys.modules['numba'] = None\n"
    imported = "import stanchion.gateway.serve, stanchion.sim.choices, stanchion.cli.main\n"
    imported += "import stanchion.cli.serve, stanchion.cli.chat, stanchion.cli.front\n"
    imported += "import stanchion.engine.scheduler, stanchion.engine.loop\n"
    imported += "import stanchion.disagg.handoff, stanchion.disagg.prefill\n"
    imported += "import stanchion.disagg.decode, stanchion.sim.hunt\n"
    imported += "import stanchion.lab.formats.sniff, stanchion.lab.anonymise.export\n"
    imported += "import stanchion.lab.stats_sessions, stanchion.lab.replay_client\n"
    imported += "import stanchion.lab.detect_table, stanchion.lab.ablate, stanchion.lab.report\n"
    imported += "import stanchion.cli.replay, stanchion.cli.ablate, stanchion.cli.report\n"
    imported += "import stanchion.cli.supervisor, stanchion.cli.plan"
    done = subprocess.run(
        [sys.executable, "-c", blocked + imported], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
