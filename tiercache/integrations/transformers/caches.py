"""How a model takes its cache and gives it back: the argument, the class, and a cache of the model's own.

Most models take a `DynamicCache` as `past_key_values`, and Mamba takes one as `cache_params`. Some keep
nothing for single tokens, and bring a cache of their own: RWKV a list of tensors, xLSTM an object. Such a
cache is served if its tensors are all that it holds, apart from values that are the same after any number of
tokens. This module reads and rebuilds it, tensor by tensor, without knowing the class.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from tiercache.errors import UnsupportedModelError
from tiercache.integrations.transformers.layout import StateCache

ARGUMENTS: Final = ("past_key_values", "cache_params", "state")
"""Names under which models take their cache, in order of precedence; the output has the same name."""
_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device)
_MAX_DEPTH: Final = 8
"""Maximum nesting of a cache of a model's own."""


class CacheForm:
    """Form in which one model takes its cache.

    `argument` is one of `ARGUMENTS`. `template` is None for a model with a `DynamicCache`. For another model
    it is the cache that the model made itself; the cache here then is a `StateCache` with one layer, whose
    recurrent states are the tensors of the model's own cache, in the order of `_parts`. Each has a batch
    dimension in front.
    """

    def __init__(self, argument: str, template: object = None) -> None:
        self.argument = argument
        self._template = template
        self._count = len(list(_parts(template))) if template is not None else 0

    @property
    def is_own(self) -> bool:
        """Whether the model has a cache of its own."""
        return self._template is not None

    def new(self, config: PretrainedConfig, *, counts: bool) -> DynamicCache:
        """Return an empty cache for one sequence; one that `counts` its tokens, if the layers do not."""
        if not self.is_own:
            return StateCache(config=config) if counts else DynamicCache(config=config)
        cache = StateCache()
        cache.layers = [LinearAttentionLayer(self._count)]
        return cache

    def given(self, cache: DynamicCache) -> object:
        """Return what the model is given for `cache`: the cache, or its own one with the same tensors.

        None for an empty cache of its own, which the model then makes.
        """
        if not self.is_own:
            return cache
        states = _states(cache)
        if not any(state is not None for state in states.values()):
            return None
        tensors = iter(states.values())
        return _rebuilt(self._template, lambda _: next(tensors)[0])

    def take_back(self, cache: DynamicCache, given: object, found: object, model: str) -> None:
        """Let `cache` hold what the model has made of the cache that it was given.

        Raises UnsupportedModelError if the model gave back something else.
        """
        if not self.is_own:
            if found is not given:
                raise UnsupportedModelError(
                    f"{model} does not return the cache that it was given, so it keeps its past elsewhere"
                )
            return
        if difference := _difference(self._template, found):
            raise UnsupportedModelError(
                f"{model} keeps its cache in a {type(found).__name__}, of which {difference} is not the same"
                " after any number of tokens; only tensors of fixed shapes are served"
            )
        layer: Any = cache.layers[0]
        for n, (_, tensor) in enumerate(_parts(found)):
            layer.recurrent_states[n] = tensor[None]
            layer.is_recurrent_states_initialized[n] = layer.has_previous_state[n] = True


def warm_up(model: Any) -> None:
    """Run a model once that has a cache of its own, because RWKV rescales its weights in its first forward.

    A model that takes `past_key_values` is left alone. Whatever is wrong with the model shows later.
    """
    if ARGUMENTS[0] not in inspect.signature(model.forward).parameters:
        model.train(False)
        with torch.inference_mode(), suppress(Exception):
            model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), use_cache=False)


def form_of(model: Any, takes: frozenset[str], run: Callable[[Mapping[str, Any]], Any]) -> CacheForm:
    """Return the form in which a model takes its cache, which it makes itself if `run` gives it none.

    `takes` are the parameters of its forward. `run(arguments)` runs it on a few tokens. Raises
    UnsupportedModelError for a model that takes no cache, and for a cache that cannot be read completely.
    """
    name = type(model).__name__
    argument = next((one for one in ARGUMENTS if one in takes), None)
    if argument is None:
        raise UnsupportedModelError(
            f"{name}.forward takes no {' or '.join(ARGUMENTS)}, so its cache cannot be handed to it"
        )
    if argument == "past_key_values":
        return CacheForm(argument)
    made = getattr(run({}), argument, None)
    if isinstance(made, Cache):
        return CacheForm(argument)
    if made is None:
        raise UnsupportedModelError(f"{name} returns no {argument}, so it keeps its past elsewhere")
    kind = type(made).__name__
    parts = list(_parts(made, lambda path, value: _refuse(name, kind, path, value)))
    if not parts:
        raise UnsupportedModelError(f"{name} keeps its cache in a {kind}, which has no tensors")
    if len({tensor.untyped_storage().data_ptr() for _, tensor in parts}) < len(parts):
        raise UnsupportedModelError(
            f"{name} keeps its cache in a {kind}, whose tensors share memory; only separate ones are served"
        )
    return CacheForm(argument, _rebuilt(made, torch.clone))


def _refuse(model: str, kind: str, path: str, value: object) -> None:
    raise UnsupportedModelError(
        f"{model} keeps its cache in a {kind}, whose {path or 'content'} is a {type(value).__name__}, which"
        " may hold more than tensors"
    )


def _states(cache: DynamicCache) -> dict[int, Any]:
    layer: Any = cache.layers[0]
    states: dict[int, Any] = layer.recurrent_states
    return states


def _ignore(path: str, value: object) -> None:
    """Do nothing: the template was checked when it was made."""


def _children(value: Any) -> Mapping[str, Any] | None:
    """Return the named parts of a container or of an object; None for a value whose parts are not known.

    An object of a class with slots, or derived from a container, holds more than its attributes.
    """
    if type(value) is dict:
        return {f"[{key!r}]": item for key, item in value.items()}
    if type(value) in (list, tuple):
        return {f"[{n}]": item for n, item in enumerate(value)}
    known = (*_PLAIN, torch.Tensor, PretrainedConfig, dict, list, tuple)
    has_slots = any(vars(kind).get("__slots__") for kind in type(value).__mro__)
    if isinstance(value, known) or has_slots or not hasattr(value, "__dict__"):
        return None
    return {f".{name}": item for name, item in vars(value).items()}


def _parts(
    value: Any, refuse: Callable[[str, object], None] = _ignore, path: str = "", depth: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in a cache with its path; `refuse` a value that may hold something else."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    children = _children(value)
    if children is None or depth > _MAX_DEPTH:
        if not isinstance(value, (*_PLAIN, PretrainedConfig)):
            refuse(path, value)
        return
    for name, item in children.items():
        yield from _parts(item, refuse, f"{path}{name}", depth + 1)


def _rebuilt(value: Any, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a cache with other tensors, called for in the order of `_parts`."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, dict):
        return {key: _rebuilt(item, tensor) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_rebuilt(item, tensor) for item in value])
    if _children(value) is None:
        return value
    made = copy.copy(value)
    vars(made).update({name: _rebuilt(item, tensor) for name, item in vars(value).items()})
    return made


def _difference(a: Any, b: Any, path: str = "") -> str:
    """Return the path of the first part in which two caches differ in more than the values of tensors."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        return "" if same else path or "its tensor"
    ours, theirs = _children(a), _children(b)
    if type(a) is not type(b) or ours is None or theirs is None:
        same = type(a) is type(b) and (isinstance(a, PretrainedConfig) or a == b)
        return "" if same else path or "the type"
    if list(ours) != list(theirs):
        return path or "the list of parts"
    return next((d for name in ours if (d := _difference(ours[name], theirs[name], path + name))), "")
