"""Undercroft keeps the attention KV cache of inference engines below the accelerator."""

__all__: list[str] = []
