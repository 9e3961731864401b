"""Common parts of the tests of parked requests: requests in mid-decode, and what their slots hold."""

import numpy as np

from tests.controller.harness import KV, P, prompt
from tests.controller.test_interleavings import ask
from tiercache.controller import ControllerOptions
from tiercache.core import as_tokens

TAIL = [77, 78]
PROMPT = [*prompt(1, 2, 3), *TAIL]
"""Three pages, and two tokens of a fourth one."""


def options(**kwargs):
    return ControllerOptions(restore_deadline=20.0, **{"park_share": 0.9, "piece_bytes": 1, **kwargs})


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
    engine.compute_tail(admission, tokens)
    return admission, (engine.take_state(admission, tokens) if engine.hybrid else None)


def parked(engine, tokens=PROMPT, *, ttl=3600.0, below=False, fence=None, **kwargs):
    admission, live = computed(engine, tokens, **kwargs)
    return engine.controller.park(admission, tokens, live, ttl=ttl, below=below, fence=fence)


def verify(engine, admission, tokens=PROMPT):
    engine.verify_resumed(admission, as_tokens(tokens))


def resume(engine, held):
    """Resume a request, which is whole, and end it."""
    admission = engine.controller.resume(held)
    admission.wait()
    verify(engine, admission)
    engine.controller.release(admission)


def scribble(engine):
    """Overwrite every free device slot, so that nothing is right by chance."""
    for name, pool in engine.pools.items():
        free = np.flatnonzero(~pool.source.allocated(np.arange(pool.capacity)))
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
