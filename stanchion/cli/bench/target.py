"""The other end of a transfer: a process that holds a pool and says where it is, on one line.

`python -m stanchion.cli.bench.target shm|nixl LAYERS PAGES`; it ends with its standard input.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from stanchion.core.errors import Bug
from stanchion.kv.arena import Arena
from stanchion.kv.layout import Layout
from stanchion.kv.schema import Buffer, Schema
from stanchion.kv.transfer.shm import shm_invitation
from stanchion.kv.transfer.words import Invitation, decode_invitation, encode_invitation

PAGE_TOKENS = 64
LATENT_BYTES = 656  # 512 of fp8, their 4 scales as float32, and 64 of the rope key as bfloat16
INDEX_BYTES = 132  # a key of 128 in fp8, and its scale
PEER = 1


def glm5_pages(layers: int) -> Schema:
    """What a page of a GLM-5 in fp8 is made of, byte for byte."""
    buffers = []
    for layer in range(layers):
        buffers.append(Buffer("index", layer, "index", "float8_e4m3fn", INDEX_BYTES))
        buffers.append(Buffer("latent", layer, "attend", "float8_e4m3fn", LATENT_BYTES))
    return Schema("glm5 pages", PAGE_TOKENS, layers, False, tuple(buffers))


@contextmanager
def target(kind: str, layers: int, pages: int) -> Iterator[Invitation]:
    """Such a process, and its invitation."""
    command = [sys.executable, "-m", "stanchion.cli.bench.target", kind, str(layers), str(pages)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise Bug(f"the target process for {kind} ended before it said where its pool is")
            yield decode_invitation(bytes.fromhex(line))
        finally:
            process.stdin.close()


def main(kind: str, layers: int, pages: int) -> None:
    layout = Layout.of(glm5_pages(layers), pages)
    arena = Arena.shared(layout.total)
    arena.memory.fill(1)  # faulted in
    if kind == "shm":
        said = shm_invitation(arena, layout)
    else:
        from stanchion.kv.transfer.nixl import NixlTarget  # an extra: not everywhere installed

        pool = NixlTarget(arena, layout)
        said = pool.invitation(PEER)
    print(encode_invitation(said).hex(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
