"""A router in front of workers: each prompt goes where the least of it is left to compute, and to wait for.

    python examples/router.py 127.0.0.1:8080 NAMESPACE http://127.0.0.1:9464 \
        pod-1=http://10.0.0.1:8000 pod-2=http://10.0.0.2:8000

It passes on completions of OpenAI's API whose `prompt` is a list of token ids. What a worker can restore is
asked of a daemon at /score, whose `[score]` names the workers; `TOKEN` in the environment is its token.
"""

import asyncio
import os
import sys
from array import array

from aiohttp import ClientError, ClientSession, ClientTimeout, web

SAVED = {"GPU": 1.0, "CPU": 0.95, "STORAGE": 0.8}
"""Part of a token's computation that a restore from there saves."""
PATIENCE = ClientTimeout(total=0.2)  # without an answer by then, the load alone decides


class Router:
    """Choice of a worker for each prompt, by what it can restore and by what it has still to compute."""

    def __init__(self, namespace: str, daemon: str, workers: dict[str, str]) -> None:
        self.namespace, self.daemon, self.workers = namespace, daemon, workers
        self.waiting = dict.fromkeys(workers, 0.0)
        """Tokens that each worker has to compute for requests under way."""

    async def work(self, client: ClientSession, tokens: list[int]) -> dict[str, float]:
        """Return how many tokens each worker would have to compute for a prompt."""
        left = dict.fromkeys(self.workers, float(len(tokens)))
        headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get("TOKEN")) else {}
        body = array("I", tokens).tobytes()
        try:
            asked = client.post(
                f"{self.daemon}/score?namespace={self.namespace}",
                data=body,
                headers=headers,
                timeout=PATIENCE,
            )
            async with asked as answer:
                answer.raise_for_status()
                told = (await answer.json())["workers"]
        except (ClientError, TimeoutError) as error:
            print(f"no scores: {error!r}", file=sys.stderr)
            return left
        for name in left.keys() & told.keys():
            saved = before = 0.0
            for medium, depth in told[name].items():  # ascending, each with what comes before it
                saved += SAVED[medium] * (depth - before)
                before = depth
            left[name] -= saved
        return left

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on, and its answer back as it comes."""
        body = await request.read()
        try:
            tokens = [int(token) for token in (await request.json())["prompt"]]
        except (ValueError, TypeError, KeyError):
            raise web.HTTPBadRequest(text="give the prompt as a list of token ids\n") from None
        async with ClientSession() as client:
            left = await self.work(client, tokens)
            name = min(self.workers, key=lambda one: self.waiting[one] + left[one])
            self.waiting[name] += left[name]
            try:
                kind = {"Content-Type": "application/json"}
                url = self.workers[name] + request.path
                async with client.post(url, data=body, headers=kind) as answer:
                    passed = web.StreamResponse(status=answer.status)
                    passed.content_type, passed.headers["X-Worker"] = answer.content_type, name
                    await passed.prepare(request)
                    async for part in answer.content.iter_any():
                        await passed.write(part)
                    return passed
            finally:
                self.waiting[name] -= left[name]


async def main(listen: str, namespace: str, daemon: str, *workers: str) -> None:
    router = Router(namespace, daemon, dict(worker.split("=", 1) for worker in workers))
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/completions", router.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    host, _, port = listen.rpartition(":")
    site = web.TCPSite(runner, host, int(port))
    await site.start()
    print("routing on", *runner.addresses[0], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit("give an address, a namespace, the URL of a daemon's HTTP port, and workers as NAME=URL")
    asyncio.run(main(*sys.argv[1:]))
