"""The protocol: clients of the released one go on working, other languages have packages, JavaScript holds every id."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tilewright_server.session.objects import new_id

PROTO = Path(__file__).resolve().parents[2] / "proto"


@pytest.fixture(scope="module")
def compatibility() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compatibility", PROTO / "compatibility.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_clients_of_the_released_protocol_go_on_working(compatibility: ModuleType) -> None:
    assert compatibility.breaks(compatibility.released(), compatibility.present()) == []


def message(files: Any, name: str) -> Any:
    return next(item for file in files.file for item in file.message_type if item.name == name)


def service(files: Any, name: str) -> Any:
    return next(item for file in files.file for item in file.service if item.name == name)


def remove_field(files: Any) -> None:
    del message(files, "RunRequest").field[2]


def renumber(files: Any) -> None:
    message(files, "RunRequest").field[2].number = 99


def rename(files: Any) -> None:
    message(files, "RunRequest").field[2].name = "tensors"


def retype(files: Any) -> None:
    message(files, "TensorSpec").field[4].type = 5


def unlist(files: Any) -> None:
    message(files, "RunRequest").field[2].label = 1


def leave_oneof(files: Any) -> None:
    message(files, "Location").field[0].ClearField("oneof_index")


def remove_message(files: Any) -> None:
    for file in files.file:
        for index, item in enumerate(file.message_type):
            if item.name == "Timing":
                del file.message_type[index]


def remove_nested(files: Any) -> None:
    del message(files, "SessionEvent").nested_type[0]


def rename_value(files: Any) -> None:
    next(item for file in files.file for item in file.enum_type if item.name == "DType").value[1].name = "FLOAT"


def remove_call(files: Any) -> None:
    del service(files, "Dispatch").method[0]


def stream_call(files: Any) -> None:
    service(files, "Dispatch").method[0].server_streaming = True


def remove_file(files: Any) -> None:
    del files.file[0]


def renumber_inference(files: Any) -> None:
    message(files, "ModelInferRequest").field[6].number = 99


def remove_inference_call(files: Any) -> None:
    del service(files, "GRPCInferenceService").method[5]


def remove_inference(files: Any) -> None:
    kept = [file for file in files.file if file.package != "inference"]
    del files.file[:]
    files.file.extend(kept)


BREAKS = [
    remove_field, renumber, rename, retype, unlist, leave_oneof, remove_message, remove_nested, rename_value,
    remove_call, stream_call, remove_file, renumber_inference, remove_inference_call, remove_inference,
]  # fmt: skip


@pytest.mark.parametrize("change", BREAKS, ids=lambda change: change.__name__)
def test_a_change_that_breaks_clients_is_found(change: Callable[[Any], None], compatibility: ModuleType) -> None:
    changed = compatibility.present()
    change(changed)
    assert compatibility.breaks(compatibility.released(), changed)


def test_additions_and_reserved_fields_break_nobody(compatibility: ModuleType) -> None:
    changed = compatibility.present()
    request = message(changed, "RunRequest")
    request.field.add(name="more", number=77, type=9, label=1, json_name="more")
    gone = request.field[5]
    request.reserved_range.add(start=gone.number, end=gone.number + 1)
    request.reserved_name.append(gone.name)
    del request.field[5]
    assert compatibility.breaks(compatibility.present(), changed) == []


def test_the_open_inference_protocol_is_a_part_of_the_published_one(compatibility: ModuleType) -> None:
    """Every message, field, value and call of ours is in the files that Triton's own client is made from."""
    grpc = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient")
    published = compatibility.files_of({"inference/inference.proto": (grpc.service_pb2, grpc.model_config_pb2)})
    ours = compatibility.files_of({"inference/inference.proto": (compatibility.stubs_of("inference", "inference"),)})
    assert ours.file[0].service and compatibility.breaks(ours, published) == []
    message(ours, "ModelInferRequest").field[6].number = 5
    assert compatibility.breaks(ours, published)


def test_every_file_names_packages_for_other_languages(compatibility: ModuleType) -> None:
    for file in compatibility.present().file:
        for option in ("go_package", "java_package", "java_multiple_files", "csharp_namespace", "ruby_package"):
            assert file.options.HasField(option), f"{file.name} has no {option}"


def test_a_double_holds_every_id() -> None:
    ids = [new_id() for _ in range(10_000)]
    assert len(set(ids)) == len(ids) and all(0 < item < 2**53 and int(float(item)) == item for item in ids)


def buf_or_skip(folder: Path) -> str:
    """The command of buf; where there is none, npm is asked for it."""
    if found := shutil.which("buf"):
        return found
    install = ["npm", "install", "--no-audit", "--no-fund", "--fetch-retries=0", "--fetch-timeout=20000"]
    install += ["--prefix", str(folder), "@bufbuild/buf@1"]
    try:
        subprocess.run(install, capture_output=True, check=True, timeout=100)
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("buf is not installed (npm install -g @bufbuild/buf), and npm does not fetch it")
    return str(folder / "node_modules" / ".bin" / "buf")


@pytest.mark.extended
def test_buf_finds_nothing_wrong(tmp_path: Path, compatibility: ModuleType) -> None:
    buf = buf_or_skip(tmp_path)
    against = [str(path.relative_to(PROTO)) for path in compatibility.RELEASED.values()]
    for command in (["lint"], *(["breaking", "--against", path] for path in against)):
        done = subprocess.run([buf, *command], cwd=PROTO, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
