"""The vLLM adapter.

`kv_connector: UndercroftConnector`, `kv_connector_module_path: undercroft.engines.vllm`; or, with
vLLM's own `OffloadingConnector`, `spec_name: UndercroftSpec`,
`spec_module_path: undercroft.engines.vllm`.
"""

from undercroft.engines.vllm.version import explain

try:
    from undercroft.engines.vllm.connector import UndercroftConnector
    from undercroft.engines.vllm.spec import UndercroftSpec
except ImportError as error:
    raise explain(error) from error

__all__ = ["UndercroftConnector", "UndercroftSpec"]
