"""Which samples make up which batch."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.vision.data import DataError, Shard, Stream

sizes = st.integers(1, 60)


@given(
    length=sizes, batch=st.integers(1, 8), world=st.integers(1, 4), seed=st.integers(0, 2**31), epoch=st.integers(0, 3)
)
def test_processes_share_an_epoch_without_overlap(length: int, batch: int, world: int, seed: int, epoch: int) -> None:
    if batch * world > length:
        return
    streams = [Stream(length, batch, seed=seed, rank=rank, world_size=world) for rank in range(world)]
    steps = streams[0].steps_per_epoch
    seen = [key for s in streams for step in range(epoch * steps, (epoch + 1) * steps) for key in s.batch(step)]
    assert len(seen) == len(set(seen)) == steps * batch * world > length - batch * world
    assert all(e == epoch and 0 <= index < length for e, index in seen)


@given(length=st.integers(4, 60), batch=st.integers(1, 2), seed=st.integers(0, 99), step=st.integers(0, 50))
def test_two_processes_have_together_the_batch_of_one_with_twice_the_size(
    length: int, batch: int, seed: int, step: int
) -> None:
    one = Stream(length, 2 * batch, seed=seed)
    two = [Stream(length, batch, seed=seed, rank=rank, world_size=2) for rank in range(2)]
    assert one.batch(step) == two[0].batch(step) + two[1].batch(step)


def test_a_stream_goes_on_at_any_step() -> None:
    whole = list(itertools.islice(Stream(10, 3, seed=5), 12))
    assert list(itertools.islice(Stream(10, 3, seed=5, first_step=7), 5)) == whole[7:]


def test_every_epoch_has_another_order() -> None:
    stream = Stream(50, 50, seed=1)
    assert [i for _, i in stream.batch(0)] != [i for _, i in stream.batch(1)]
    assert sorted(i for _, i in stream.batch(1)) == list(range(50))


@given(length=sizes, batch=st.integers(1, 80), world=st.integers(1, 4), epoch=st.integers(0, 3))
def test_a_set_below_one_batch_is_one_short_batch_shared_equally(
    length: int, batch: int, world: int, epoch: int
) -> None:
    if length < world or batch * world <= length:
        return
    streams = [Stream(length, batch, seed=0, rank=rank, world_size=world) for rank in range(world)]
    parts = [stream.batch(epoch) for stream in streams]
    seen = [index for part in parts for _, index in part]
    assert all(stream.is_short and stream.steps_per_epoch == 1 for stream in streams)
    assert {len(part) for part in parts} == {length // world}
    assert len(seen) == len(set(seen)) == streams[0].global_batch_size


@pytest.mark.parametrize(
    ("length", "batch", "world", "word"),
    [(0, 4, 1, "no samples"), (1, 1, 2, "at most 1 processes"), (3, 0, 1, "batch_size=0")],
)
def test_what_makes_no_batch_at_all_is_refused(length: int, batch: int, world: int, word: str) -> None:
    with pytest.raises(DataError, match=word):
        Stream(length, batch, seed=0, world_size=world, name="train.txt")


@given(length=st.integers(0, 60), batch=st.integers(1, 8), world=st.integers(1, 5))
def test_evaluation_sees_every_sample_once(length: int, batch: int, world: int) -> None:
    shards = [Shard(length, batch, rank=rank, world_size=world) for rank in range(world)]
    assert sorted(index for shard in shards for keys in shard for _, index in keys) == list(range(length))
    assert all(len(list(shard)) == len(shard) for shard in shards)
