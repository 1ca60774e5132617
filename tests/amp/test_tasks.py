"""Regions of tasks that share a thread: each task keeps its own policy, and none is left behind."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch

from mezzo.amp import auto_cast, current_policy, thread_state

X = torch.rand(4, 4)


@pytest.fixture(autouse=True)
def no_state_is_left() -> Iterator[None]:
    before = state()
    yield
    assert state() == before
    assert thread_state.regions == []
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


def state() -> list[object]:
    flags = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return [current_policy(), thread_state.policy, *flags]


def dtypes() -> tuple[torch.dtype, torch.dtype]:
    return torch.mm(X, X).dtype, torch.softmax(X.half(), 0).dtype


def expected(level: str, half: str) -> tuple[torch.dtype, torch.dtype]:
    low = getattr(torch, half)
    return {"O0": (torch.float32, torch.float16), "O1": (low, torch.float32), "O2": (low, low)}[level]


OUTSIDE = expected("O0", "float16")


async def work(level: str, half: str, waits: int, seen: list[bool]) -> None:
    """Look at the policy before, between and after waits, which let the other tasks run."""
    for _ in range(waits):
        seen.append(dtypes() == OUTSIDE)
        with auto_cast(level=level, dtype=half):
            seen.append(dtypes() == expected(level, half))
            await asyncio.sleep(0)
            seen.append(dtypes() == expected(level, half))
            with auto_cast(enable=False):
                await asyncio.sleep(0.001)
                seen.append(dtypes() == OUTSIDE)
            await asyncio.sleep(0)
            seen.append(dtypes() == expected(level, half))
        await asyncio.sleep(0)


KINDS = [(level, half) for level in ("O1", "O2") for half in ("float16", "bfloat16")] * 2


def test_eight_interleaved_tasks_each_keep_their_policy() -> None:
    """Before tasks were followed, none of the eight was right."""
    seen: list[list[bool]] = [[] for _ in KINDS]

    async def main() -> None:
        await asyncio.gather(*(work(*kind, 3, s) for kind, s in zip(KINDS, seen, strict=True)))
        assert dtypes() == OUTSIDE

    asyncio.run(main())
    assert [all(s) for s in seen] == [True] * 8
    assert all(len(s) == 15 for s in seen)


def test_tasks_around_which_a_region_is_open_see_it_and_leave_it_open() -> None:
    seen: list[Any] = []

    async def plain() -> None:
        seen.append(dtypes())
        await asyncio.sleep(0)
        with auto_cast(dtype="bfloat16"):
            await asyncio.sleep(0)
            seen.append(dtypes())
        await asyncio.sleep(0)
        seen.append(dtypes())

    async def main() -> None:
        await asyncio.gather(plain(), plain())

    with auto_cast(level="O2", dtype="float16"):
        asyncio.run(main())
        assert dtypes() == expected("O2", "float16")
    wanted = [expected("O2", "float16"), expected("O1", "bfloat16"), expected("O2", "float16")]
    assert sorted(map(str, seen)) == sorted(map(str, wanted * 2))


def test_a_task_inherits_the_region_in_which_it_was_created() -> None:
    seen: list[Any] = []

    async def child(event: asyncio.Event) -> None:
        seen.append(dtypes())
        await event.wait()
        with auto_cast(level="O2", dtype="float16"):
            seen.append(dtypes())
            await asyncio.sleep(0)
        seen.append(dtypes())

    async def main() -> None:
        event = asyncio.Event()
        with auto_cast(dtype="bfloat16"):
            task = asyncio.create_task(child(event))
            await asyncio.sleep(0)
        assert dtypes() == OUTSIDE
        event.set()
        await task
        assert dtypes() == OUTSIDE

    asyncio.run(main())
    inherited = expected("O1", "bfloat16")
    assert seen == [inherited, expected("O2", "float16"), inherited]


def test_a_cancelled_or_failing_task_takes_its_region_with_it() -> None:
    async def stuck() -> None:
        with auto_cast(level="O2"):
            await asyncio.sleep(60)

    async def fails() -> None:
        with auto_cast(level="O2", dtype="bfloat16"):
            await asyncio.sleep(0)
            raise KeyError("from inside")

    async def main() -> None:
        tasks = [asyncio.create_task(stuck()), asyncio.create_task(fails())]
        await asyncio.sleep(0)
        assert dtypes() == OUTSIDE
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError, KeyError]
        assert dtypes() == OUTSIDE

    asyncio.run(main())


def test_gradients_and_cached_weights_belong_to_the_task() -> None:
    """Torch caches cast weights while a region is open; a task must not meet those of another dtype."""
    layer = torch.nn.Linear(4, 4)
    seen: list[torch.dtype] = []

    async def train(half: str) -> None:
        with auto_cast(dtype=half, cpu_compute="native"):
            for _ in range(3):
                out = layer(X)
                seen.append(out.dtype)
                await asyncio.sleep(0)
                out.float().sum().backward()

    async def main() -> None:
        await asyncio.gather(train("float16"), train("bfloat16"))

    asyncio.run(main())
    assert seen == [torch.float16, torch.bfloat16] * 3


def test_async_generators_and_decorated_coroutines_run_in_their_region() -> None:
    async def batches() -> AsyncIterator[Any]:
        with auto_cast(dtype="bfloat16"):
            for _ in range(2):
                yield dtypes()
                await asyncio.sleep(0)

    @auto_cast(level="O2", dtype="float16")
    async def infer() -> Any:
        await asyncio.sleep(0)
        return dtypes()

    async def consume() -> list[Any]:
        return [seen async for seen in batches()]

    async def main() -> list[Any]:
        return await asyncio.gather(consume(), infer())

    assert asyncio.run(main()) == [[expected("O1", "bfloat16")] * 2, expected("O2", "float16")]


def test_loops_in_two_threads_do_not_disturb_each_other() -> None:
    seen: list[list[bool]] = [[] for _ in KINDS]

    async def main(chosen: slice) -> None:
        await asyncio.gather(*(work(*k, 2, s) for k, s in list(zip(KINDS, seen, strict=True))[chosen]))

    threads = [threading.Thread(target=lambda c=c: asyncio.run(main(c))) for c in (slice(0, 4), slice(4, 8))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [all(s) for s in seen] == [True] * 8


def test_stock_autocast_in_a_task_is_left_as_torch_has_it() -> None:
    async def main() -> None:
        with auto_cast():
            await asyncio.sleep(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            await asyncio.sleep(0)
            assert torch.mm(X, X).dtype is torch.bfloat16
        with auto_cast(level="O2", dtype="float16"), torch.autocast("cpu", enabled=False):
            await asyncio.sleep(0)
            assert torch.mm(X, X).dtype is torch.float32

    asyncio.run(main())


def suspended(level: str, half: str) -> Iterator[Any]:
    with auto_cast(level=level, dtype=half):
        yield dtypes()
        yield dtypes()


def test_generators_that_take_turns_end_in_one_clear_line_and_the_right_state() -> None:
    first, second = suspended("O1", "bfloat16"), suspended("O2", "float16")
    assert next(first) == expected("O1", "bfloat16")
    assert next(second) == expected("O2", "float16")
    next(first)  # under the policy of the second, which its end reports
    with pytest.raises(RuntimeError, match="left while one that was entered later is still open"):
        next(first)
    assert dtypes() == expected("O2", "float16")
    assert list(second) == [expected("O2", "float16")]
    assert dtypes() == OUTSIDE


def test_a_generator_that_is_thrown_away_inside_another_region_is_closed_in_silence() -> None:
    generator = suspended("O1", "bfloat16")
    next(generator)
    with auto_cast(level="O2", dtype="float16"):
        del generator
        gc.collect()
        assert dtypes() == expected("O2", "float16")
    assert dtypes() == OUTSIDE


def test_a_generator_finished_in_another_thread_says_so() -> None:
    generator, errors = suspended("O1", "bfloat16"), []

    def finish() -> None:
        try:
            list(generator)
        except RuntimeError as error:
            errors.append(str(error))

    def enter_and_go() -> None:
        next(generator)

    for target in (enter_and_go, finish):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "another thread or task" in errors[0]


def test_a_decorated_generator_is_in_its_region_only_while_it_runs() -> None:
    @auto_cast(level="O2", dtype="bfloat16")
    def batches() -> Iterator[Any]:
        yield dtypes()
        yield dtypes()

    seen = []
    for inside in batches():
        seen += [inside, dtypes()]
    assert seen == [expected("O2", "bfloat16"), OUTSIDE] * 2


class ForeignLoop:
    """Runs coroutines in turn as uvloop does: not through asyncio's handles."""

    @staticmethod
    def run(*coroutines: Coroutine[Any, Any, Any]) -> None:
        waiting = list(coroutines)
        while waiting:
            coroutine = waiting.pop(0)
            with contextlib.suppress(StopIteration):
                coroutine.send(None)
                waiting.append(coroutine)


class Turn:
    def __await__(self) -> Iterator[None]:
        yield


def test_a_loop_that_cannot_be_followed_ends_in_one_clear_line() -> None:
    async def waits(half: str) -> None:
        with auto_cast(dtype=half):
            await Turn()

    with pytest.raises(RuntimeError, match="before `await` in loops other than asyncio's"):
        ForeignLoop.run(first := waits("float16"), second := waits("bfloat16"))
    first.close()
    second.close()
    assert current_policy() is None


@pytest.mark.parametrize("make", [lambda: asyncio.new_event_loop(), lambda: asyncio.SelectorEventLoop()])
def test_a_region_may_be_open_from_one_run_of_a_loop_to_the_next(make: Callable[[], Any]) -> None:
    loop = make()

    async def region(go: asyncio.Event) -> Any:
        with auto_cast(level="O2", dtype="bfloat16"):
            await go.wait()
            return dtypes()

    async def start(go: asyncio.Event) -> Any:
        task = asyncio.ensure_future(region(go))
        await asyncio.sleep(0)
        return task

    async def end(task: Any, go: asyncio.Event) -> Any:
        go.set()
        return await task

    go = asyncio.Event()
    task = loop.run_until_complete(start(go))
    assert dtypes() == OUTSIDE
    assert loop.run_until_complete(end(task, go)) == expected("O2", "bfloat16")
    loop.close()


def losses_of_a_training() -> list[float]:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4, 1), torch.randn(8, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        with auto_cast(dtype="bfloat16", cpu_compute="native"):
            loss = layer(x).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for param in layer.parameters():
                param -= 0.1 * param.grad
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_task_that_waits_inside_a_region_keeps_no_old_weights_alive_for_others() -> None:
    alone = losses_of_a_training()
    assert len(set(alone)) == 4

    async def both() -> list[float]:
        event = asyncio.Event()

        async def wait() -> None:
            with auto_cast(dtype="bfloat16", cpu_compute="native"):
                await event.wait()

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        losses = losses_of_a_training()
        event.set()
        await task
        return losses

    assert asyncio.run(both()) == alone


def test_a_generator_closed_in_another_thread_is_told() -> None:
    def numbers() -> Iterator[int]:
        with auto_cast():
            yield 1

    generator = numbers()
    next(generator)
    thread = threading.Thread(target=generator.close)
    with pytest.warns(UserWarning, match="in another thread or task"):
        thread.start(), thread.join()
    region = thread_state.regions[-1][0]
    region.__exit__(None, None, None)  # type: ignore[attr-defined]
