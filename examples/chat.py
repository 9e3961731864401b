"""A chat with a Hugging Face model that remembers what it has read, also after a restart.

    python examples/chat.py /tmp/chat                        # a small random hybrid model talks nonsense
    python examples/chat.py /tmp/chat --model /models/qwen   # your model, with its own tokenizer

End it with Ctrl-D or kill it, and start it again: it goes on, and reads only what you say from then on.
Each turn says how many tokens were restored, from where, and how many had to be computed.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

from tiercache.integrations.transformers import Worker


class Letters:
    """Tokenizer of the small model: a token is a byte."""

    def encode(self, text: str, **_: object) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: list[int], **_: object) -> str:
        """Return the text of some bytes."""
        return bytes(tokens).decode("latin-1")


def main() -> None:
    """Talk until the input ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="what is remembered: the store and the conversation")
    parser.add_argument("--model", help="path or name of a causal language model")
    parser.add_argument("--tokens", type=int, default=48, help="length of an answer")
    parser.add_argument("--memory", default="256MiB", help="size of the device pools, and of the host memory")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else Letters()
    history = options.directory / "conversation.json"
    tokens = json.loads(history.read_text()) if history.exists() else []
    store = f"file://{options.directory.absolute()}/store?capacity=4GiB"
    model, page = options.model, 64
    if not model:
        from tiercache_lab.demo.small import build_small_hybrid  # only the small model needs the lab

        # Threads that share small products wait for each other: on a busy CPU that takes ten times as long.
        torch.set_num_threads(1)
        model, page = (
            build_small_hybrid(),
            16,
        )  # whole pages are restored: of small ones, a short turn has some
    sizes = {"device_bytes": options.memory, "host_bytes": options.memory, "page_size": page}
    with Worker(model, storage=store, **sizes) as worker:
        print(f"{len(tokens)} tokens of conversation so far")
        while True:
            try:
                said = input("you> ")
            except EOFError:
                break
            prompt = tokens + tokenizer.encode(said + "\n", add_special_tokens=not tokens)
            answer = worker.serve(prompt, new_tokens=options.tokens)
            computed = len(prompt) - answer.restored
            print("model>", ascii(tokenizer.decode(answer.answer.tolist(), skip_special_tokens=True)))
            where = f" from {answer.tier}" if answer.restored else ""
            print(f"       {answer.restored} tokens restored{where}, {computed} computed")
            tokens = answer.tokens.tolist()
            history.write_text(json.dumps(tokens))


if __name__ == "__main__":
    main()
