"""The vLLM adapter: `spec_name: UndercroftSpec`, `spec_module_path: undercroft.engines.vllm`."""

from undercroft.engines.vllm.spec import UndercroftSpec

__all__ = ["UndercroftSpec"]
