"""The store keeps an object alive, per thread, and autograd carries it into its threads."""

import gc
import threading
import weakref

from mezzo._torch import thread_store
from mezzo._torch.references import add_reference

KEY = "mezzo.test"


class Thing:
    pass


def stash(thing: object) -> None:
    if thread_store.STASH_STEALS:
        add_reference(thing)
    thread_store.stash(KEY, thing)


def test_what_is_stashed_is_found_and_lives() -> None:
    thing = Thing()
    alive = weakref.ref(thing)
    stash(thing)
    try:
        del thing
        gc.collect()
        assert alive() is not None, "torch's store no longer keeps its objects alive: STASH_STEALS is wrong"
        assert thread_store.is_stashed(KEY)
        assert thread_store.stashed(KEY) is alive()
    finally:
        stash(None)
    assert thread_store.stashed(KEY) is None


def test_another_thread_does_not_see_it() -> None:
    stash(Thing())
    seen: list[bool] = []
    try:
        thread = threading.Thread(target=lambda: seen.append(thread_store.is_stashed(KEY)))
        thread.start()
        thread.join()
    finally:
        stash(None)
    assert seen == [False]
