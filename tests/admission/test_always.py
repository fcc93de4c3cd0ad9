from undercroft.admission.always import Always
from undercroft.admission.base import Admission
from undercroft.keys import ChunkKey


def test_admits_every_chunk() -> None:
    """Whatever its key, its size, and however often it is offered."""
    rule: Admission = Always()
    assert rule.name == "always"
    assert all(rule.admit(ChunkKey(b"key"), num_bytes) for num_bytes in (1, 1, 2**40))
