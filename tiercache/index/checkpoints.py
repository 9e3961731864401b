"""Where the engine should take states during a prefill. Which states exist matters more to the hit rate than which are evicted."""

from __future__ import annotations

from tiercache.core import full_pages, reusable_pages


def checkpoint_depths(depth: int, path_depth: int, prompt_tokens: int, page_size: int) -> tuple[int, ...]:
    """Depths in pages, ascending, all beyond the restored `depth`, at which a prompt of `prompt_tokens` tokens should leave a state.

    - The branch point: `path_depth`, where the prompt leaves what is known. Another prompt shares the pages up to there, so that a third
      one probably will; without a state there, none of them could restore it.
    - The prompt's end, as far as a repeat of the prompt may restore: a hit is strictly shorter than the prompt.
    - The page that ends exactly with the prompt, if there is one: no cut is needed for it, and a continuation may restore it. This is what
      conversations continue from when a chat template drops the answer's reasoning.
    """
    last = reusable_pages(prompt_tokens, page_size)
    wanted = {min(path_depth, last), last}
    if prompt_tokens % page_size == 0:
        wanted.add(full_pages(prompt_tokens, page_size))
    return tuple(sorted(at for at in wanted if at > depth))
