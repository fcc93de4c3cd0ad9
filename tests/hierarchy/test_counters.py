"""What is kept of durations: bounded, evenly spread, and gone once taken."""

from itertools import pairwise

from undercroft.hierarchy.counters import Samples


def test_few_are_kept_as_they_came() -> None:
    """Below the bound nothing is left out, and labels are apart."""
    samples = Samples()
    for seconds in (0.1, 0.2, 0.3):
        samples.see(seconds, "disk")
    samples.see(9.0, "far")
    samples.see(5.0)
    assert samples.take() == {"disk": [0.1, 0.2, 0.3], "far": [9.0], "": [5.0]}
    assert samples.take() == {}


def test_of_many_a_part_that_is_spread_evenly() -> None:
    """A burst whose later chunks wait longer: the kept ones have the same quantiles."""
    samples = Samples()
    for number in range(100_000):
        samples.see(float(number))
    kept = samples.take()[""]
    assert 32 <= len(kept) <= 64
    gaps = {later - earlier for earlier, later in pairwise(kept)}
    assert len(gaps) == 1
    assert abs(sum(kept) / len(kept) - 50_000) < 2_000


def test_a_burst_does_not_thin_out_what_comes_after_it() -> None:
    """Each taking begins anew."""
    samples = Samples()
    for number in range(1000):
        samples.see(float(number))
    samples.take()
    samples.see(1.0)
    samples.see(2.0)
    assert samples.take() == {"": [1.0, 2.0]}
