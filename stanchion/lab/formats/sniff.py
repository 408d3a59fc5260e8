"""Any trace, read by what is in it: a recording of ours, or one of five public formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from stanchion.core.errors import TraceError
from stanchion.core.recording import HEADER
from stanchion.lab.formats import azure, mooncake, otel, own, tracelab, weka
from stanchion.lab.formats.lines import opened
from stanchion.lab.formats.options import Options
from stanchion.lab.formats.trace import Trace

HEAD_BYTES = 2**20
KNOWN = (
    "Mooncake (JSON lines), Weka (JSON lines), Azure (CSV), TraceLab (JSON lines), OpenTelemetry"
)
Reader = Callable[[Path, Options], Trace]
# By fields that a format has and no other one.
FIELDS: Mapping[Reader, tuple[bytes, ...]] = {
    mooncake.read: (b'"hash_ids"', b'"timestamp"', b'"input_length"'),
    weka.read: (b'"block_size"', b'"requests"', b'"hash_ids"'),
    tracelab.read: (b'"timing_events"', b'"round_index"'),
    otel.read: (b'"spans"', b'"attributes"'),
}


def read(path: Path, options: Options | None = None) -> Trace:
    """Raise TraceError that names the file, and where it is known line and field."""
    options = options or Options()
    if options.block_tokens is not None and options.block_tokens < 1:
        raise TraceError(path, None, f"block_tokens is {options.block_tokens}; at least 1")
    if path.is_dir():
        return own.read(path)
    if path.name == HEADER:
        return own.read(path.parent)
    with opened(path) as stream:
        head = stream.read(HEAD_BYTES)
    if head.lstrip(b"\xef\xbb\xbf").startswith(azure.COLUMNS[0].encode()):
        return azure.read(path, options)
    if head.lstrip()[:1] == b"{":
        for reader, fields in FIELDS.items():
            if all(field in head for field in fields):
                return reader(path, options)
    raise TraceError(path, 1, f"no trace that is known: a folder of ours, {KNOWN}")
