"""Facts about a model: a text for everything that a forward could read, so that changes can be detected.

`state_dict()` is not enough: it lacks the active adapter and its scale, the attention function, the
frequencies of rotary embeddings, and the hooks of a layer. Therefore the whole object is walked: modules,
parameters, persistent and other buffers, plain attributes, configurations, and functions (by their code).
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3
from torch.nn.modules import module as torch_module
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tiercache.errors import UnsupportedModelError
from tiercache.integrations.transformers.runner import first_line

UNREAD: Final = 1 << 20
"""Size in bytes up to which the content of a tensor is always read.

With `contents=False`, larger tensors are not read; the caller has named the weights in the identity instead.
"""
CHUNK: Final = 4 << 20
"""Maximum bytes of a tensor that are copied to the host at a time, to be hashed."""

_NOT_COMPUTED: Final = frozenset({
    # notes of saving, loading and generating
    "_name_or_path", "name_or_path", "base_model_name_or_path", "architectures", "dtype", "torch_dtype",
    "transformers_version",
    "_commit_hash", "_auto_class", "auto_mapping", "generation_config", "warnings_issued",
    "_is_hf_initialized", "_post_init_done",
    "id2label", "label2id", "problem_type", "loss_type", "_loss_function", "_init_kwargs", "inference_mode",
    "model_type", "_use_kernels",
    # how weights are loaded, saved, distributed and trained
    "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan", "_tp_size", "_ep_size", "_device_mesh",
    "all_tied_weights_keys", "_tied_weights_keys",
    "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_no_split_modules",
    "_skip_keys_device_placement",
    "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_save",
    "_weight_conversions",
    "_non_persistent_buffers_set", "_is_full_backward_hook", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "initializer_range",
    "gradient_checkpointing", "_gradient_checkpointing_func", "__weakref__",
})  # fmt: skip
"""Names of attributes without effect on the results of a forward; the walk leaves them out."""
_HOOKS: Final = frozenset({
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs"
})  # fmt: skip
"""Names of the attributes in which a module keeps the hooks that run in a forward."""
_REWRITTEN: Final = re.compile(r"(?<!original_)(?<!long_)inv_freq$")
"""Pattern of the name of the frequencies that a switching rotary embedding (longrope) uses.

Such an embedding has two tables of frequencies, for short and for long sequences. Every forward first makes a
copy of one table under this name, and then reads the copy. The walk covers the tables and leaves out the
copy.
"""
_SCALARS: Final = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_NAMED: Final = (Enum, torch.dtype, torch.layout, torch.memory_format, np.generic, np.dtype, range)
_FUNCTIONS: Final = (
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, partial
)  # fmt: skip


class Facts:
    """Facts of one object, by path, and a record of the places inside the object that were read.

    To check cheaply whether the facts still hold, read each place again.

    `known` holds digests of tensors from an earlier walk, by the `id` of the tensor. `contents=False` leaves
    tensors of more than `UNREAD` bytes unread.
    """

    def __init__(
        self, root: object, *, contents: bool = True, known: Mapping[int, str] | None = None
    ) -> None:
        self.values: dict[str, str] = {}
        """A short text for each path; the text of a tensor holds a digest of its content."""
        self.tensors: dict[str, torch.Tensor] = {}
        """The tensors by path."""
        self.digests: dict[int, str] = {}
        """Digest of the content of each tensor that was read, by the tensor's `id`.

        An `id` stays valid, because `tensors` keeps the tensor alive.
        """
        self.read: list[tuple[Callable[[], Collection[Any]], tuple[Any, ...]]] = []
        """Each place that was read: a function that reads it again, and the objects that it had in order.

        The places are lists, sets, keys and values of mappings, and names that were looked up. Of the
        attributes of a module the keys are left out.
        """
        self._classes: set[type] = set()
        self._contents = contents
        self._known = known or {}
        self._seen: dict[int, str] = {}  # the first path of each walked object, by its `id`
        self._kept: list[object] = []  # keeps all walked objects alive, so that no `id` is used twice
        self._walk("", root)
        for name in ("_global_forward_pre_hooks", "_global_forward_hooks"):
            self._hooks(f"torch.nn.modules.module.{name}", getattr(torch_module, name))
        self._interfaces()

    def digest(self) -> str:
        """Return a hexadecimal digest of all facts; equal facts give equal digests, in any process."""
        hasher = blake3()
        for path, value in sorted(self.values.items()):
            hasher.update(f"{len(path)} {path} {len(value)} {value}\n".encode())
        return hasher.hexdigest()

    def _walk(self, path: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, _SCALARS) and not isinstance(value, Enum):
            self.values[path] = repr(value) if kind in _SCALARS else f"{kind.__qualname__} {value!r}"
            return
        if isinstance(value, _NAMED):
            self.values[path] = f"{kind.__qualname__} {value!s}"
            return
        if isinstance(value, torch.device):
            self.values[path] = value.type  # the number of the device does not change what is computed
            return
        # Python may use one object for two equal tuples, or two objects. So it means nothing whether two
        # paths lead to the same tuple, and each tuple is walked as often as it is found.
        if not isinstance(value, tuple | frozenset):
            if id(value) in self._seen:
                self.values[path] = f"as {self._seen[id(value)]}"
                return
            self._seen[id(value)] = path
            self._kept.append(value)
        self._walk_object(path, value)

    def _walk_object(self, path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, np.ndarray):
            digest = blake3(np.ascontiguousarray(value).tobytes()).hexdigest()
            self.values[path] = f"array {value.dtype} {value.shape} {digest}"
        elif isinstance(value, torch.nn.Module):
            self._module(path, value)
        elif isinstance(value, Mapping):
            self.values[path] = f"mapping of {len(value)}"
            self._items(path, value)
        elif isinstance(value, list | tuple):
            self.values[path] = f"sequence of {len(value)}"
            if isinstance(value, list):
                self.read.append((partial(tuple, value), tuple(value)))
            for n, item in enumerate(value):
                self._walk(f"{path}[{n}]", item)
        elif isinstance(value, set | frozenset):
            is_plain = all(isinstance(item, _SCALARS) for item in value)
            self.values[path] = f"set {sorted(map(repr, value))}" if is_plain else "set"
            self.read.append((partial(lambda *sets: (sets[0] == sets[1],), value, frozenset(value)), (True,)))
        elif isinstance(value, type):
            self.values[path] = _name(value)
        elif isinstance(value, _FUNCTIONS):
            self._function(path, value)
        else:
            self._other(path, value)

    def _module(self, path: str, module: torch.nn.Module) -> None:
        self.values[path] = self._class(type(module))
        switching = "longrope" in str(getattr(module, "rope_type", ""))
        self._items(path, vars(module), names=False, without=_REWRITTEN if switching else None)

    def _class(self, kind: type) -> str:
        """Return the name of a class, and walk its forward, which a patch may have replaced."""
        if kind not in self._classes:
            self._classes.add(kind)
            self._walk(f"class {_name(kind)}.forward", self._look_up(partial(getattr, kind, "forward", None)))
        return _name(kind)

    def _items(
        self,
        path: str,
        items: Mapping[Any, Any],
        *,
        names: bool = True,
        without: re.Pattern[str] | None = None,
    ) -> None:
        self._read_mapping(items, names=names)
        for key, item in items.items():
            if key in _NOT_COMPUTED:
                continue
            name = _key_text(key)
            if name in _HOOKS:
                self._hooks(f"{path}.{name}", item)
            elif name in ("_modules", "_parameters", "_buffers"):
                self._items(path, item, without=without)
            elif without is None or not without.search(name):
                self._walk(f"{path}.{name}" if path else name, item)

    def _hooks(self, path: str, hooks: Mapping[Any, Any]) -> None:
        """Walk hooks by their order; their keys are numbers that differ between processes."""
        self._read_mapping(hooks)
        for n, hook in enumerate(hooks.values()):
            self._walk(f"{path}[{n}]", hook)

    def _read_mapping(self, items: Mapping[Any, Any], *, names: bool = True) -> None:
        if names:
            self.read.append((items.keys, tuple(items)))
        self.read.append((items.values, tuple(items.values())))

    def _look_up(self, look: Callable[[], Any]) -> Any:
        """Return what a function finds by a name, which may stand for something else later."""
        found = look()
        self.read.append((lambda: (look(),), (found,)))
        return found

    def _interfaces(self) -> None:
        """Walk the attention and mask functions that the configurations name.

        A forward looks them up in global tables, whose entries may be replaced at any time.
        """
        end = "._attn_implementation_internal"
        chosen = {value.strip("'") for path, value in self.values.items() if path.endswith(end)}
        tables = {"attention": ALL_ATTENTION_FUNCTIONS, "mask": ALL_MASK_ATTENTION_FUNCTIONS}
        for table, functions in tables.items():
            for name in sorted(chosen):
                self._walk(f"{table} function {name}", self._look_up(partial(functions.get, name)))

    def _function(self, path: str, value: Any) -> None:
        if isinstance(value, functools.partial):
            self.values[path] = "partial"
            self._walk(f"{path}.func", value.func)
            self._walk(f"{path}.arguments", [value.args, value.keywords])
            return
        self.values[path] = f"{_name(value)} {_code(value)}"
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            self._walk(f"{path}.self", owner)
        for n, cell in enumerate(getattr(value, "__closure__", None) or ()):
            try:
                held = cell.cell_contents
            except ValueError:  # the variable of the closure has no value yet
                continue
            self._walk(f"{path}.closure[{n}]", held)
        self._walk(f"{path}.defaults", getattr(value, "__defaults__", None))
        self._walk(f"{path}.keyword defaults", getattr(value, "__kwdefaults__", None))
        self._globals(f"{path}.globals", value)

    def _globals(self, path: str, function: Any) -> None:
        """Walk the numbers and texts that a function reads from its module by name."""
        table, code = getattr(function, "__globals__", {}), getattr(function, "__code__", None)
        for name in sorted(_names(code)) if isinstance(code, types.CodeType) else ():
            if isinstance(table.get(name), int | float | complex | str | bytes):
                self._walk(f"{path}.{name}", self._look_up(partial(table.get, name)))

    def _other(self, path: str, value: Any) -> None:
        kind = type(value)
        self.values[path] = _name(kind)
        if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
            return
        if callable(value):
            self.values[path] += f" {_code(vars(kind).get('__call__'))}"
        if hasattr(value, "__dict__"):
            self._items(path, vars(value))
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                self._walk(f"{path}.{field.name}", getattr(value, field.name, None))

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        inner = getattr(type(tensor), "__tensor_flatten__", None)
        if inner is not None and type(tensor) is not torch.nn.Parameter:
            names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            self.values[path] = _name(type(tensor))
            self._walk(f"{path}.context", context)
            for name in names:
                self._walk(f"{path}.{name}", getattr(tensor, name))
            return
        self.tensors[path] = tensor
        about = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        if not self._contents and tensor.numel() * tensor.element_size() > UNREAD:
            self.values[path] = about
        else:
            self.digests[id(tensor)] = digest = self._known.get(id(tensor)) or _content_of(tensor, path)
            self.values[path] = f"{about} {digest}"
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            self.values[path] += f" {_name(type(tensor))}"
            self._items(path, getattr(tensor, "__dict__", {}))


def _content_of(tensor: torch.Tensor, path: str) -> str:
    """Return the hexadecimal digest of a tensor's elements in order, read `CHUNK` bytes at a time.

    Raises UnsupportedModelError for a tensor that cannot be read.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    try:
        flat = tensor.detach().reshape(-1)
        step = max(1, CHUNK // max(1, flat.element_size()))
        for first in range(0, flat.numel(), step):
            raw: Any = flat[first : first + step].cpu().contiguous().view(torch.uint8).numpy()
            hasher.update(raw)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"{path} is a {type(tensor).__name__} on {tensor.device} whose content cannot be read"
            f" ({first_line(error)}), so the cache could not be bound to it; load the weights into memory,"
            " unpacked"
        ) from error
    return hasher.hexdigest()


def _key_text(key: Any) -> str:
    """Return a key of a mapping as text; for an object without a stable text, return its type."""
    if isinstance(key, str):
        return key
    return repr(key) if isinstance(key, _SCALARS) else _name(type(key))


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', type(value).__qualname__)}"


@functools.lru_cache(maxsize=4096)
def _code_digest(code: types.CodeType) -> str:
    hasher = blake3(code.co_code)
    for part in _constants(code):
        hasher.update(part.encode())
    return hasher.hexdigest()[:16]


def _names(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in the byte code of a function and its inner functions."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _constants(code: types.CodeType) -> Iterator[str]:
    # Byte code refers to names and constants by index. So two functions with equal byte code may do different
    # things, unless their names and constants are equal too.
    yield repr((code.co_names, code.co_varnames, code.co_argcount))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield _code_digest(constant)
        else:
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _code(value: Any) -> str:
    """Return a digest of a function's byte code and constants; empty if the function has no Python code.

    For a wrapper, a digest of the wrapped function's code follows.
    """
    wrapped = getattr(value, "__wrapped__", None)
    code = getattr(value, "__code__", None)
    own = _code_digest(code) if isinstance(code, types.CodeType) else ""
    return f"{own} {_code(wrapped)}" if wrapped is not None else own
