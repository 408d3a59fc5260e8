"""The faults of ranks that a lab can bring back."""

FAILPOINTS = {
    "scratch_refilled_under_reader": "a layer is sent into the slot that another is read from",
    "broadcast_before_load": "an owner sends a layer before its load from a tier has ended",
    "index_broadcast_skipped": "index keys of earlier passes are not sent",
}
