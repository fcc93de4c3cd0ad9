"""Copies between an accelerator and host memory. Knows torch, and no engine."""
