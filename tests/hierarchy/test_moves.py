from __future__ import annotations

from random import Random

from undercroft.hierarchy.moves import Move, MoveQueue
from undercroft.hierarchy.outcome import Op
from undercroft.testing.tier_suite import key_of


class Numbers:
    """Makes moves with consecutive tickets."""

    def __init__(self) -> None:
        self.last = 0

    def move(self, op: Op, label: object = None) -> Move:
        self.last += 1
        move = Move(op, key_of(self.last if label is None else label), None, 10, 0.0)
        move.ticket = self.last
        return move


def take_all(queue: MoveQueue, *, others_allowed: bool = True) -> list[Move]:
    taken = []
    while (move := queue.take(others_allowed=others_allowed)) is not None:
        taken.append(move)
        queue.leave(move)
    return taken


def test_reads_go_before_deletes_before_writes() -> None:
    """Each kind in the order of submission."""
    queue, numbers = MoveQueue(max_in_a_row=100), Numbers()
    kinds = [Op.WRITE, Op.DELETE, Op.READ]
    moves = [numbers.move(kinds[i % 3]) for i in range(9)]
    for move in moves:
        queue.add(move)
    assert (queue.num_reads, queue.num_deletes, queue.num_writes) == (3, 3, 3)
    assert queue.write_bytes == 30
    assert take_all(queue) == moves[2::3] + moves[1::3] + moves[0::3]
    assert len(queue) == 0
    assert queue.write_bytes == 0


def test_nothing_starves() -> None:
    """With two in a row at most, every third goes to those who wait."""
    queue, numbers = MoveQueue(max_in_a_row=2), Numbers()
    for op in (Op.READ,) * 8 + (Op.DELETE,) * 4 + (Op.WRITE,) * 4:
        queue.add(numbers.move(op))
    taken = "".join(move.op.name[0] for move in take_all(queue))
    assert taken == "RRDRRDRRWRRDDWWW"


def test_only_reads_when_others_must_wait() -> None:
    """`has_ready` and `take` agree."""
    queue, numbers = MoveQueue(max_in_a_row=1), Numbers()
    for op in (Op.WRITE, Op.DELETE, Op.READ, Op.READ, Op.READ):
        queue.add(numbers.move(op))
    assert queue.has_ready(others_allowed=False)
    assert [move.op for move in take_all(queue, others_allowed=False)] == [Op.READ] * 3
    assert not queue.has_ready(others_allowed=False)
    assert queue.has_ready(others_allowed=True)
    assert len(queue) == 2


def test_moves_of_one_key_wait_for_each_other() -> None:
    """The next of a key is ready only once the one before has let go."""
    queue, numbers = MoveQueue(max_in_a_row=4), Numbers()
    write, delete, read = (numbers.move(op, "k") for op in (Op.WRITE, Op.DELETE, Op.READ))
    for move in (write, delete, read):
        queue.add(move)
    assert queue.take(others_allowed=True) is write
    assert queue.take(others_allowed=True) is None
    assert not queue.has_ready(others_allowed=True)
    queue.leave(write)
    assert queue.take(others_allowed=True) is delete
    queue.leave(delete)
    assert queue.take(others_allowed=True) is read
    queue.leave(read)
    assert queue._last == {}


def test_order_holds_under_random_use() -> None:
    """Moves of one key start in order and never together, whatever is removed; nothing is left."""
    random = Random(3)
    for _ in range(50):
        queue, numbers = MoveQueue(max_in_a_row=3), Numbers()
        waiting: list[Move] = []
        running: list[Move] = []
        for _ in range(200):
            step = random.random()
            if step < 0.45:
                move = numbers.move(random.choice(list(Op)), random.randrange(5))
                queue.add(move)
                waiting.append(move)
            elif step < 0.55 and waiting:
                queue.remove(waiting.pop(random.randrange(len(waiting))))
            elif step < 0.8:
                taken = queue.take(others_allowed=random.random() < 0.8)
                if taken is not None:
                    same_key = [each for each in waiting if each.key == taken.key]
                    assert taken is same_key[0], "not the first of its key"
                    assert all(each.key != taken.key for each in running), "two of one key run"
                    waiting.remove(taken)
                    running.append(taken)
            elif running:
                queue.leave(running.pop(random.randrange(len(running))))
            assert len(queue) == len(waiting)
            assert queue.write_bytes == 10 * sum(move.op is Op.WRITE for move in waiting)
        for move in running:
            queue.leave(move)
        assert sorted(move.ticket for move in take_all(queue)) == [m.ticket for m in waiting]
        assert queue._last == {}
