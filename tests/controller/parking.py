"""Common parts of the tests of parked requests: requests in mid-decode, and what their slots hold."""

import numpy as np

from tests.controller.harness import KV, MAMBA, PAGES, P, as_bytes, content, prompt
from tests.controller.test_interleavings import ask
from tiercache.core import as_tokens

TAIL = [77, 78]
PROMPT = [*prompt(1, 2, 3), *TAIL]
"""Three pages, and two tokens of a fourth one."""


def fill_tail(engine, admission, tokens):
    """Write the page that is not full: the same function of the tokens up to its end."""
    if not engine.kv or not len(tokens) % P:
        return
    slot = int(admission.pages[KV][len(tokens) // P])
    for segment in PAGES.segments:
        rows = engine.tensors[KV][segment.layer, segment.name][slot * P : (slot + 1) * P]
        rows.copy_(content(tokens, segment).view(rows.dtype).view(segment.shape))


def computed(engine, tokens=PROMPT, *, commit=True, **kwargs):
    """A request in mid-decode, with its live state; committed up to its last whole page, if at all."""
    tokens = as_tokens(tokens)
    whole = len(tokens) // P * P
    admission = ask(engine, tokens, **{"states": 3 if engine.hybrid else 0, **kwargs})
    depth = engine.restore(admission, tokens)
    engine.compute(admission, tokens, depth, whole)
    if commit and whole > depth:
        states = {whole: engine.take_state(admission, tokens[:whole])} if engine.hybrid else {}
        engine.controller.commit(admission, tokens[:whole], states)
    fill_tail(engine, admission, tokens)
    return admission, (engine.take_state(admission, tokens) if engine.hybrid else None)


def parked(engine, tokens=PROMPT, *, ttl=3600.0, below=False, fence=None, **kwargs):
    admission, live = computed(engine, tokens, **kwargs)
    return engine.controller.park(admission, tokens, live, ttl=ttl, below=below, fence=fence)


def verify(engine, admission, tokens=PROMPT):
    """A resumed request has every byte that it had, the page that is not full and its live state too."""
    tokens = as_tokens(tokens)
    assert admission.depth == len(tokens)
    engine.verify(admission, tokens, len(tokens) // P)
    if engine.kv and len(tokens) % P:
        slot = int(admission.pages[KV][len(tokens) // P])
        for segment in PAGES.segments:
            rows = engine.tensors[KV][segment.layer, segment.name][slot * P : (slot + 1) * P]
            assert (as_bytes(rows) == content(tokens, segment)).all(), f"the tail in {segment.name}"
    if engine.hybrid:
        engine.verify_state(admission.live_states[MAMBA], tokens)


def scribble(engine):
    """Overwrite every free device slot, so that nothing is right by chance."""
    for name, pool in engine.pools.items():
        free = np.flatnonzero(~pool.allocator.allocated(np.arange(pool.capacity)))
        step = P if name is KV else 1
        for tensor in engine.tensors[name].values():
            for slot in free.tolist():
                tensor[slot * step : (slot + 1) * step] = 7


def go_on(engine, admission, tokens=PROMPT, answer=9):
    """Compute one more page behind a resumed or ordinary admission, commit and release."""
    longer = as_tokens([*tokens, *prompt(answer)])
    whole = len(longer) // P * P
    start = admission.depth // P * P
    admission.extend(len(longer), 1 if engine.hybrid else 0)
    engine.compute(admission, longer, start, whole)
    states = {whole: engine.take_state(admission, longer[:whole])} if engine.hybrid else {}
    engine.controller.commit(admission, longer[:whole], states)
    engine.verify(admission, longer, whole // P)
    engine.controller.release(admission)
    return longer
