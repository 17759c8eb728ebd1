"""Models of the Open Inference Protocol: every operation, described by the samples of its own plugin."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import Role
from tilewright_kit.types.errors import NotFoundError, TilewrightError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_proto.inference import inference_pb2 as pb
from tilewright_server.endpoints.kserve.counters import ModelCounters
from tilewright_server.endpoints.kserve.tensors import datatype_of

__all__ = [
    "PLATFORM",
    "PREFIX",
    "VERSION",
    "Model",
    "Models",
    "Tensor",
    "check_version",
    "tensor_of",
    "unknown_model",
]

PREFIX = "tilewright."
VERSION = "1"
PLATFORM = "tilewright"
CONFIG_TYPES = {
    "FP32": pb.TYPE_FP32,
    "FP16": pb.TYPE_FP16,
    "BF16": pb.TYPE_BF16,
    "UINT8": pb.TYPE_UINT8,
    "INT8": pb.TYPE_INT8,
    "INT32": pb.TYPE_INT32,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a model, with -1 for sizes that requests choose."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """An operation or a prepared plan, as clients see it."""

    name: str
    inputs: tuple[Tensor, ...]
    """Inputs that every request gives."""
    outputs: tuple[Tensor, ...]
    counters: ModelCounters = field(default_factory=ModelCounters, compare=False)

    def metadata(self) -> pb.ModelMetadataResponse:
        kind = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=self.name,
            versions=[VERSION],
            platform=PLATFORM,
            inputs=[kind(name=item.name, datatype=item.datatype, shape=item.shape) for item in self.inputs],
            outputs=[kind(name=item.name, datatype=item.datatype, shape=item.shape) for item in self.outputs],
        )

    def config(self) -> pb.ModelConfig:
        return pb.ModelConfig(
            name=self.name,
            platform=PLATFORM,
            backend=PLATFORM,
            input=[
                pb.ModelInput(name=item.name, data_type=CONFIG_TYPES[item.datatype], dims=item.shape)
                for item in self.inputs
            ],
            output=[
                pb.ModelOutput(name=item.name, data_type=CONFIG_TYPES[item.datatype], dims=item.shape)
                for item in self.outputs
            ],
            model_transaction_policy=pb.ModelTransactionPolicy(decoupled=False),
        )


class Models:
    """Models of all operations. Thread-safe."""

    def __init__(self, operations: Mapping[str, Operation[Any, Any]]) -> None:
        self._operations = operations
        self._lock = threading.Lock()
        self._made: dict[str, Model | None] = {}

    def all(self) -> list[Model]:
        """By name."""
        found = (self._model(name) for name in sorted(self._operations))
        return [model for model in found if model is not None]

    def get(self, name: str) -> Model:
        """Raises ``NotFoundError``."""
        operation = name.removeprefix(PREFIX)
        found = self._model(operation) if name.startswith(PREFIX) and operation in self._operations else None
        if found is None:
            raise unknown_model(name)
        return found

    def _model(self, name: str) -> Model | None:
        with self._lock:
            if name not in self._made:
                self._made[name] = _described(name, self._operations[name])
            return self._made[name]


def tensor_of(name: str, desc: TensorDesc, shape: Iterable[int]) -> Tensor:
    """The tensor in the words of the protocol."""
    return Tensor(name, datatype_of(desc.dtype)[0], tuple(shape))


def _described(name: str, operation: Operation[Any, Any]) -> Model | None:
    """The model of an operation by its first sample; inputs that not every sample has are left out, as they are
    optional. None for an operation whose tensors have packed formats, which this protocol cannot describe.
    """
    samples = list(operation.samples())
    try:
        operands = operation.parse(samples[0]).operands if samples else ()
    except TilewrightError:
        return None
    if not operands or any(item.desc.packing for item in operands):
        return None

    def dynamic(role: Role) -> tuple[Tensor, ...]:
        return tuple(
            tensor_of(item.name, item.desc, (-1,) * len(item.desc.shape))
            for item in operands
            if item.role is role and (role is Role.OUTPUT or item.name in samples[0].inputs)
        )

    return Model(PREFIX + name, dynamic(Role.INPUT), dynamic(Role.OUTPUT))


def check_version(name: str, version: str) -> None:
    """Raise ``NotFoundError`` for a version that there is not."""
    if version not in ("", VERSION):
        raise NotFoundError(
            f"{name} has one version, {VERSION}",
            field="model_version",
            value=version,
            rule="model_version",
            fix=f"leave the version out, or ask for {VERSION}",
        )


def unknown_model(name: str) -> NotFoundError:
    return NotFoundError(
        "there is no such model",
        field="model_name",
        value=name,
        rule="model_name",
        fix="use one that RepositoryIndex lists",
    )
