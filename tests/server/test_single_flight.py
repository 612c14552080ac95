"""One piece of work for all who ask for the same at the same time."""

import asyncio

import pytest

from server.single_flight import SingleFlight
from tests.server.pipelines import run


def test_single_flight() -> None:
    async def main() -> None:
        flights: SingleFlight[int] = SingleFlight()
        started = 0

        async def work() -> int:
            nonlocal started
            started += 1
            await asyncio.sleep(0.01)
            if started == 2:
                raise ValueError("once")
            return started

        assert await asyncio.gather(*(flights.run("a", work) for _ in range(5))) == [1] * 5
        failed = await asyncio.gather(*(flights.run("a", work) for _ in range(5)), return_exceptions=True)
        assert [str(error) for error in failed] == ["once"] * 5
        assert await flights.run("a", work) == 3
        assert len(flights) == 0
        task = asyncio.create_task(flights.run("a", work))
        await asyncio.sleep(0)
        await flights.aclose()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
