"""Converts Python objects to and from the skeleton of a message: msgpack with extension types. Arrays become separate frames.

Use it through `frames`. Extension types: 1 tensor index, 2 tuple, 3 record [name, fields], 4 numpy array index, 5 numpy scalar, 6 index of
a large `bytes` value. Nothing is pickled and no type is converted silently: a value that cannot be encoded raises at the sender with its
path, and malformed data raise FrameError at the receiver.
"""

import threading
from collections.abc import Callable
from typing import Any

import msgpack

from rl_core.api import identity as api_identity
from rl_core.api import records as api_records
from rl_core.api.errors import FrameError
from rl_core.messages.registry import REGISTRY, register_record
from rl_core.transports import dtypes

TENSOR, TUPLE, RECORD, ARRAY, SCALAR, BYTES = 1, 2, 3, 4, 5, 6
MAX_DEPTH = 64
LARGE_BYTES = 64 * 1024
"""`bytes` values of this size and more travel as a frame of their own, so that they are not copied into the header."""
_INT64 = range(-(2**63), 2**63)
_ATOMS = frozenset({str, float, bool, type(None)})

Frame = tuple[int, tuple[int, ...], memoryview]
"""(dtype code, shape, bytes) of one array."""


class _Refused(Exception):
    """Raised for a value that cannot be encoded. Its path is completed while the exception passes the enclosing containers."""

    def __init__(self, kind: type[Exception], what: str, rule: str) -> None:
        super().__init__(rule)
        self.kind, self.what, self.rule = kind, what, rule
        self.path: list[str] = []

    def error(self) -> Exception:
        path = "".join(reversed(self.path)).removeprefix(".") or "the root"
        return self.kind(f"{self.what} at {path} {self.rule}")


_local = threading.local()


def _pack(value: Any) -> bytes:
    packer = getattr(_local, "packer", None)
    if packer is None:
        packer = _local.packer = msgpack.Packer(strict_types=True)
    try:
        packed: bytes = packer.pack(value)
    except BaseException:
        del _local.packer  # it holds half a value
        raise
    return packed


class Encoder:
    """Encodes one object: `skeleton` is its msgpack form, `frames` are its arrays in the order in which they were found."""

    def __init__(self, value: Any) -> None:
        self.frames: list[Frame] = []
        self._active: list[int] = []
        try:
            self.skeleton = _pack(self._plain(value))
        except _Refused as refusal:
            raise refusal.error() from None
        except UnicodeEncodeError as error:
            raise ValueError(
                f"a text in the message is not valid unicode: {error}; replace surrogates before sending"
            ) from error

    def _plain(self, node: Any) -> Any:
        kind = type(node)
        if kind in _ATOMS:
            return node
        if kind is int:
            return self._integer(node)
        if kind is list:
            return self._list(node)
        if kind is dict:
            return self._dict(node)
        if kind is bytes:
            return node if len(node) < LARGE_BYTES else self._frame(BYTES, (0, (len(node),), memoryview(node)))
        if kind is tuple:
            return msgpack.ExtType(TUPLE, _pack(self._list(node)))
        return self._special(node, kind)

    def _special(self, node: Any, kind: type) -> Any:
        name = REGISTRY.by_type.get(kind)
        if name is not None:
            return self._record(node, name)
        if dtypes.is_array(node):
            return self._array(node, ARRAY, dtypes.array_bytes, "array")
        if dtypes.is_scalar(node):
            try:
                return msgpack.ExtType(SCALAR, dtypes.scalar_bytes(node))
            except ValueError as error:
                raise _Refused(ValueError, "numpy scalar", str(error)) from error
        if dtypes.is_tensor(node):
            return self._array(node, TENSOR, dtypes.tensor_bytes, "tensor")
        if isinstance(node, str) and hasattr(kind, "__members__"):
            return str(node)  # a StrEnum equals its text
        raise _Refused(
            TypeError,
            f"{kind.__module__}.{kind.__qualname__}",
            "cannot travel; send plain values, arrays, tensors or a type given to frames.register_record",
        )

    def _integer(self, node: int) -> int:
        if node not in _INT64:
            raise _Refused(ValueError, "integer", f"must fit into int64, got {node}; send it as text")
        return node

    def _frame(self, code: int, frame: Frame) -> msgpack.ExtType:
        self.frames.append(frame)
        return msgpack.ExtType(code, (len(self.frames) - 1).to_bytes(4, "little"))

    def _array(self, node: Any, code: int, view: Callable[[Any], Frame], what: str) -> msgpack.ExtType:
        try:
            return self._frame(code, view(node))
        except ValueError as error:
            raise _Refused(ValueError, what, str(error)) from error
        except RuntimeError as error:
            # torch raises it for a tensor that has no plain memory (freed, wrapped by a transform)
            raise _Refused(ValueError, what, f"cannot be read: {error}; send a plain dense tensor") from error

    def _enter(self, node: Any) -> None:
        if len(self._active) == MAX_DEPTH:
            if id(node) in self._active:
                raise _Refused(ValueError, type(node).__name__, "contains itself; a message must be a tree")
            raise _Refused(
                ValueError, type(node).__name__, f"is nested deeper than {MAX_DEPTH} levels; flatten the message"
            )
        self._active.append(id(node))

    def _list(self, node: Any) -> Any:
        self._enter(node)
        kinds = set(map(type, node))
        if kinds <= _ATOMS or (kinds == {int} and min(node) in _INT64 and max(node) in _INT64):
            plain = list(node) if type(node) is tuple else node
        else:
            plain = []
            try:
                for value in node:
                    plain.append(value if type(value) in _ATOMS else self._plain(value))
            except _Refused as refusal:
                refusal.path.append(f"[{len(plain)}]")
                raise
        self._active.pop()
        return plain

    def _dict(self, node: dict[Any, Any]) -> dict[Any, Any]:
        self._enter(node)
        plain: dict[Any, Any] = {}
        for key, value in node.items():
            if type(key) is not str and (type(key) is not int or key not in _INT64):
                kind = ValueError if type(key) is int else TypeError
                raise _Refused(kind, "dict", f"has the key {key!r}; keys must be str or int64")
            try:
                plain[key] = value if type(value) in _ATOMS else self._plain(value)
            except _Refused as refusal:
                refusal.path.append(f".{key}" if type(key) is str else f"[{key}]")
                raise
        self._active.pop()
        return plain

    def _record(self, node: Any, name: str) -> msgpack.ExtType:
        names = REGISTRY.fields[type(node)]
        fields = node.wire_fields() if names is None else {field: getattr(node, field) for field in names}
        return msgpack.ExtType(RECORD, _pack([name, self._dict(fields)]))


class Decoder:
    """Decodes one skeleton; `frames` are the received arrays as (dtype code, shape, bytes)."""

    def __init__(self, frames: list[Frame], *, copy: bool) -> None:
        self._frames = frames
        self._copy = copy
        self._nested = 0

    def value(self, skeleton: bytes | memoryview) -> Any:
        """Return the object. Raises FrameError for any malformed skeleton."""
        try:
            value = self._unpack(skeleton)
        except FrameError:
            raise
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException, RecursionError, MemoryError) as error:
            raise FrameError(f"message skeleton is malformed: {error}") from error
        _check_tree(value)
        return value

    def _unpack(self, data: bytes | memoryview) -> Any:
        return msgpack.unpackb(data, ext_hook=self._extension, strict_map_key=False)

    def _extension(self, code: int, data: bytes) -> Any:
        if code == TUPLE:
            return tuple(self._inner(data, list))
        if code == RECORD:
            return self._record(self._inner(data, list))
        if code == SCALAR:
            return dtypes.scalar_from_bytes(data)
        if code in (TENSOR, ARRAY, BYTES):
            return self._array(code, int.from_bytes(data, "little"))
        raise FrameError(f"extension type {code} is unknown; sender and receiver run different versions")

    def _inner(self, data: bytes, kind: type) -> Any:
        self._nested += 1
        if self._nested > MAX_DEPTH:
            raise FrameError(f"message is nested deeper than {MAX_DEPTH} levels")
        value = self._unpack(data)
        self._nested -= 1
        if type(value) is not kind:
            raise FrameError(f"extension must hold a {kind.__name__}, got {type(value).__name__}")
        return value

    def _array(self, code: int, index: int) -> Any:
        if index >= len(self._frames):
            raise FrameError(f"frame {index} is named but the message has {len(self._frames)}")
        dtype, shape, buffer = self._frames[index]
        if code == TENSOR:
            return dtypes.tensor_view(buffer, dtype, shape, copy=self._copy)
        if code == ARRAY:
            return dtypes.array_view(buffer, dtype, shape, copy=self._copy)
        return bytes(buffer)

    def _record(self, parts: list[Any]) -> Any:
        if len(parts) != 2 or type(parts[0]) is not str or type(parts[1]) is not dict:
            raise FrameError("a record must be [name, fields]")
        name, fields = parts
        cls = REGISTRY.by_name.get(name)
        if cls is None:
            raise FrameError(f"record {name!r} is not registered here; import the module that calls register_record")
        try:
            return _build(cls, name, fields)
        except (TypeError, ValueError, KeyError) as error:
            raise FrameError(
                f"record {name!r} cannot be built from fields {sorted(map(str, fields))}: {error}"
            ) from error


def _build(cls: Any, name: str, fields: dict[str, Any]) -> Any:
    names = REGISTRY.fields[cls]
    if names is None:
        return cls.from_wire(fields)
    unknown = fields.keys() - names
    if unknown and not getattr(cls, "wire_tolerant", False):
        raise FrameError(
            f"record {name!r} has no fields {sorted(map(str, unknown))}; sender and receiver run different versions"
        )
    return cls(**{key: fields[key] for key in fields.keys() - unknown} if unknown else fields)


def _check_tree(root: Any) -> None:
    """Raise FrameError when containers nest deeper than MAX_DEPTH or a dict has a key that is neither str nor int."""
    level, depth = [root], 0
    while level:
        containers = [node for node in level if type(node) in (list, tuple, dict)]
        if containers and depth >= MAX_DEPTH:
            raise FrameError(f"message is nested deeper than {MAX_DEPTH} levels")
        level = []
        for node in containers:
            if type(node) is dict:
                if not set(map(type, node)) <= {str, int}:
                    raise FrameError("dict keys must be str or int")
                level.extend(node.values())
            else:
                level.extend(node)
        depth += 1


_API: tuple[type, ...] = (
    api_records.Completion,
    api_records.PromptGroupRecord,
    api_records.GroupTimes,
    api_records.EnvironmentReturn,
    api_records.EnvOutput,
    api_records.ChunkStepResult,
    api_records.Trajectory,
    api_identity.Identity,
    api_identity.WorkerAddress,
    api_identity.WorkerInfo,
)
for _cls in _API:
    register_record(_cls)
