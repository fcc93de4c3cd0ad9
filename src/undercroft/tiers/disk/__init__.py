"""Chunks on a local disk."""

from undercroft.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
