"""Engine tensors of every shape the engine hands over, and the stored bytes they must give.

`block_bytes` reads through torch, independently of the code under test.
"""

import importlib
import warnings
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

with warnings.catch_warnings():
    # Importing the engine's connector makes torch warn about itself.
    warnings.simplefilter("ignore")
    importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler")

NUM_BLOCKS = 96
KINDS = ("overlaid", "padded", "interleaved", "packed", "odd", "big")


def _tensor(
    num_blocks: Any, page: Any, stride: Any = None, storage: Any = None, offset: Any = 0
) -> Any:
    stride = page if stride is None else stride
    if storage is None:
        storage = torch.zeros(num_blocks * stride, dtype=torch.int8).untyped_storage()
    tensor = torch.tensor([], dtype=torch.int8)
    tensor.set_(storage, offset, (num_blocks, page), (stride, 1))
    return CanonicalKVCacheTensor(tensor, page)


def kv_caches(kind: Any, seed: Any = 0) -> Any:
    """Caches with random bytes; 1 to 3 groups, several of them over the same tensors."""
    if kind == "overlaid":  # groups overlay each other's tensors, as Gemma 3
        tensors = [_tensor(NUM_BLOCKS, 512) for _ in range(3)]
        refs = [[(0, 512), (1, 512), (2, 512)], [(0, 512), (1, 512)], [(2, 512)]]
    elif kind == "padded":  # recurrent state in rows as wide as attention's, as Qwen3-Next
        tensors = [_tensor(NUM_BLOCKS, 640), _tensor(NUM_BLOCKS, 640)]
        refs = [[(0, 640), (1, 640)], [(0, 520), (1, 520)], [(1, 96)]]
    elif kind == "interleaved":  # layers side by side in each block of one storage
        storage = torch.zeros(NUM_BLOCKS * 1024, dtype=torch.int8).untyped_storage()
        tensors = [_tensor(NUM_BLOCKS, 256, 1024, storage, 256 * i) for i in range(4)]
        refs = [[(i, 256) for i in range(4)], [(3, 256), (1, 128)]]
    elif kind == "packed":  # one row holds all layers of a block, whatever the group
        tensors = [_tensor(NUM_BLOCKS, 2048)]
        refs = [[(0, 2048)], [(0, 2048)]]
    elif kind == "odd":  # nothing is a multiple of eight
        tensors = [_tensor(NUM_BLOCKS, 101), _tensor(NUM_BLOCKS, 77, 93)]
        refs = [[(0, 101), (1, 77)], [(1, 75)]]
    elif kind == "big":
        tensors = [_tensor(NUM_BLOCKS, 32 << 10) for _ in range(2)]
        refs = [[(0, 32 << 10), (1, 32 << 10)]]
    else:
        raise ValueError(kind)
    caches = CanonicalKVCaches(
        tensors, [[CanonicalKVCacheRef(i, size) for i, size in group] for group in refs]
    )
    scramble(caches, seed)
    return caches


def scramble(caches: Any, seed: Any) -> None:
    """Fill all of the engine's bytes, padding included, with new random ones."""
    rng = np.random.default_rng(seed)
    for cache in caches.tensors:
        storage = cache.tensor.untyped_storage()
        whole = torch.tensor([], dtype=torch.uint8).set_(storage)
        whole.copy_(torch.from_numpy(rng.integers(0, 256, len(whole), np.uint8)))


def block_bytes(caches: Any, group: Any, block_id: Any) -> Any:
    """The bytes of one block that count for `group`: a list, one `bytes` per ref."""
    return [
        caches.tensors[ref.tensor_idx].tensor[block_id, : ref.page_size_bytes].numpy().tobytes()
        for ref in caches.group_data_refs[group]
    ]


def chunk_page(caches: Any, group: Any, chunk: Any, position: Any, blocks_per_chunk: Any) -> Any:
    """The pages at `position` of a stored chunk (bytes), as docs/reference/chunk-layout.md says."""
    pages, offset = [], 0
    for ref in caches.group_data_refs[group]:
        start = offset + position * ref.page_size_bytes
        pages.append(bytes(chunk[start : start + ref.page_size_bytes]))
        offset += blocks_per_chunk * ref.page_size_bytes
    return pages


def all_bytes(caches: Any) -> Any:
    """A copy of all of the engine's bytes, padding included, one array per storage."""
    storages = {
        cache.tensor.untyped_storage().data_ptr(): cache.tensor.untyped_storage()
        for cache in caches.tensors
    }
    return [
        torch.tensor([], dtype=torch.uint8).set_(storage).numpy().copy()
        for storage in storages.values()
    ]
