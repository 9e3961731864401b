"""The engine of own_engine.py in an event loop: requests at once, one of which is given up.

    python examples/own_engine_async.py file:///tmp/engine?capacity=64MiB    # with uvloop, if it is installed

The loop's thread owns the cache. A request waits for its restore without holding up the others.
"""

import asyncio
import sys
from contextlib import suppress

from own_engine import PROMPT, Engine


class AsyncEngine(Engine):
    """An engine whose requests are tasks."""

    def __init__(self, store: str) -> None:
        super().__init__(store)
        self.turns = asyncio.Semaphore(2)  # requests for which the device has room

    async def answer(self, tokens: list[int]) -> tuple[int, int]:
        """Return how many tokens were restored, and the token that the model would say next.

        A task that is cancelled, while it waits or computes, leaves no slot and no pin behind.
        """
        lookup = self.controller.lookup(tokens)  # storage is asked already
        async with self.turns, self.controller.admit(lookup, states=4) as admission:
            restored, state = self.restored(admission)
            for begin, end in self.steps(admission, tokens):
                state = self.compute(admission, tokens[:end], begin, state)
                await asyncio.sleep(0)  # between two steps, other requests have their turn
            return restored, self.said(admission, tokens, state)


async def main(store: str) -> None:
    engine = AsyncEngine(store)
    async with engine.controller:  # applies what ends in the background, and waits for it at the end
        prompts = (PROMPT, PROMPT[:144] + [7] * 40, [3] * 100)
        requests = [asyncio.create_task(engine.answer(tokens)) for tokens in prompts]
        await asyncio.sleep(0)
        requests[2].cancel()  # its client has gone
        for tokens, request in zip(prompts, requests, strict=True):
            with suppress(asyncio.CancelledError):
                restored, said = await request
                print(f"{len(tokens)} tokens, {restored} restored; the next token is {said}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("give the URL of a store, such as file:///tmp/engine?capacity=64MiB")
    try:
        from uvloop import run
    except ImportError:
        from asyncio import run
    run(main(sys.argv[1]))
