"""Workers of a DataLoader: known to run, and ended at once."""

from torch.utils.data import DataLoader

from mezzo._torch.data_loaders import end_workers, has_workers


def test_persistent_workers_are_seen_and_ended():
    loader = DataLoader(list(range(4)), num_workers=1, persistent_workers=True)
    assert not has_workers(loader)
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    assert has_workers(loader)
    workers = loader._iterator._workers
    end_workers(loader)
    assert not has_workers(loader)
    assert not any(worker.is_alive() for worker in workers)
    end_workers(loader)  # a second time does nothing
