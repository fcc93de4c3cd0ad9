"""Traces of requests, as numbered prefixes: what reads, writes and records them."""
