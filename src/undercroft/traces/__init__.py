"""Traces of real requests, as prefixes of blocks, by which policies are judged."""

from undercroft.traces.base import Trace, TraceBuilder, TraceReader
from undercroft.traces.opening import load

__all__ = ["Trace", "TraceBuilder", "TraceReader", "load"]
