import pickle

import numpy as np
import pytest

from undercroft.engines.vllm.transfer_spec import SlotSpec
from undercroft.errors import Bug


def test_a_slot_spec_travels_between_processes() -> None:
    """It is pickled from scheduler to worker; and it refuses counts that do not add up."""
    spec = pickle.loads(pickle.dumps(SlotSpec(np.array([4096, 0]), (1, 1), 12)))
    assert spec.offsets.tolist() == [4096, 0]
    assert spec.offsets.dtype == np.int64
    assert (spec.group_chunks, spec.store_id) == ((1, 1), 12)
    assert "store_id=12" in repr(spec)
    with pytest.raises(Bug, match="offsets"):
        SlotSpec([0], (1, 1))
