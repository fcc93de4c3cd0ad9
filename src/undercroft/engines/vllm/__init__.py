"""The vLLM adapter: `spec_name: UndercroftSpec`, `spec_module_path: undercroft.engines.vllm`."""

from undercroft.engines.vllm.version import explain

try:
    from undercroft.engines.vllm.spec import UndercroftSpec
except ImportError as error:
    raise explain(error) from error

__all__ = ["UndercroftSpec"]
