"""Operations of the installed plugins without a server, and problems of theirs with operands and right results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    import tilewright
    from tilewright_kit.commands.cases import Case
    from tilewright_kit.commands.problem_command import ProblemCommand
    from tilewright_kit.contract.operation import Operation
    from tilewright_kit.contract.problem import OperationRequest

    Array = npt.NDArray[Any]

__all__ = [
    "Loaded",
    "case_of",
    "default_operation",
    "installed_operations",
    "load",
    "load_operation",
    "operands",
    "prepared",
    "specs",
]


@dataclass(frozen=True)
class Loaded:
    """A case as its operation sees it."""

    command: ProblemCommand
    case: Case
    operation: Operation[Any, Any]
    problem: Any
    request: OperationRequest

    def truth(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Right outputs by name, in float64 (of whole numbers: exact)."""
        found = self.operation.reference(self.problem, inputs)
        outputs = {item.name for item in self.problem.operands}
        return {name: array for name, array in found.items() if name in outputs}


@cache
def installed_operations() -> Mapping[str, Operation[Any, Any]]:
    """Operations of the installed plugins by name."""
    from tilewright_kit.loading.loader import PluginManager

    manager = PluginManager()
    manager.load_entry_points()
    return manager.operations


def load_operation(name: str) -> Operation[Any, Any]:
    """An operation of the installed plugins; without a name the default one. Raises ``NotFoundError``."""
    from tilewright_kit.types.errors import NotFoundError

    operations, name = installed_operations(), name or default_operation()
    if name not in operations:
        raise NotFoundError(
            f"no installed plugin offers the operation {name!r}",
            field="operation",
            value=name,
            rule="operation_known",
            fix=f"use one of {', '.join(operations) or '(none are installed)'}",
        )
    return operations[name]


def default_operation() -> str:
    """The operation that commands take where none is named: that of the first installed command."""
    from tilewright_kit.commands.discovery import installed_commands

    return next((command.family().operations[0] for command in installed_commands().values()), "")


def case_of(command: ProblemCommand, given: Mapping[str, Any]) -> Case:
    """The case that values from the command line mean. Raises ``InvalidArgumentError`` with the option's name."""
    from tilewright_kit.types.errors import InvalidArgumentError

    try:
        return command.case(given)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            error.reason,
            field=error.field.removeprefix("shapes."),
            value=error.value,
            rule=f"{command.name}_arguments",
            fix=error.fix,
        ) from None


def load(command: ProblemCommand, case: Case) -> Loaded:
    """The case with its operation. Raises what the operation raises for a problem that it cannot compute."""
    command.screen(case)
    request = case.request()
    operation = load_operation(request.operation)
    return Loaded(command, case, operation, operation.parse(request), request)


def specs(request: OperationRequest) -> dict[str, tilewright.Spec]:
    """Descriptions of the inputs, without memory."""
    from tilewright import Spec

    return {name: Spec.of(desc.shape, desc.dtype.value, desc.strides) for name, desc in request.inputs.items()}


def operands(client: tilewright.Client, loaded: Loaded, seed: int = 0) -> dict[str, Array]:
    """The inputs in the client's shared memory, laid out as the request says: those that must make sense (lengths,
    pages, results of another operation) as the operation samples them, the rest at random.
    """
    import numpy as np

    from tilewright_kit.contract.abilities import SamplesInputs
    from tilewright_kit.numerics.contents import contents, view

    rng, operation, request = np.random.default_rng(seed), loaded.operation, loaded.request
    sampled = operation.sample_inputs(request, rng) if isinstance(operation, SamplesInputs) else {}
    found = {}
    for name, desc in request.inputs.items():
        memory: Array = client.empty((desc.span,), desc.dtype.value)
        found[name] = view(memory, desc)
        if name in sampled:
            found[name][...] = sampled[name]
        else:
            memory[...] = contents(desc, "normal", rng)
    return found


def prepared(
    client: tilewright.Client,
    loaded: Loaded,
    inputs: Mapping[str, Any],
    device: str | None,
    *,
    required: bool = True,
) -> dict[str, Any]:
    """The inputs, arrays or descriptions, with those in their place that are prepared once.

    A device that prepares none gets an operand as it is, unless that is ``required``: then
    ``tilewright.UnsupportedError`` is raised.
    """
    import numpy as np

    from tilewright import Spec, UnsupportedError

    given: dict[str, Any] = dict(inputs)
    for name, step in loaded.command.prepared(loaded.case).items():
        operand = inputs[name]
        if isinstance(operand, Spec):  # only its form matters
            operand = np.zeros(operand.shape, operand.dtype)
        try:
            packed = client.run(step.operation, {step.operand: operand}, attributes=step.attributes, device=device)
            (given[name],) = packed.values()
        except UnsupportedError:
            if required:
                raise
    return given
