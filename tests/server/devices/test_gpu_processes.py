"""GPUs in processes that end: kernels that fault, clients that die, and the process that servers open a device in.

See ``test_gpu.py``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_device_harness import ADD, HERE, WAYS, Client, Gpu, N, get, put, stage

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import Pointer, Struct
from tilewright_kit.types.errors import UnavailableError
from tilewright_server.devices.contract import TIME, SharingDevice
from tilewright_server.devices.gpu.device import GpuDevice
from tilewright_server.devices.registry import DeviceRegistry

pytestmark = pytest.mark.gpu

FAULT = """
import json, sys
from pathlib import Path
from gpu_device_harness import GPUS, stage
from tilewright_kit.types.errors import TilewrightError
from tilewright_kit.contract.plan import Pointer, Struct
provider = GPUS[sys.argv[3]].provider
gpu = provider.open(provider.discover()[0])
entry = gpu.load(Path(sys.argv[1])).function
out = gpu.allocate(8)
program = gpu.program([stage(entry("fault"), Struct((Pointer("out"),)))], ["out"])
said = []
stream = gpu.open_stream()
uses = [lambda: program.run([out.address], 0)] if sys.argv[2] == "run" else [
    lambda: stream.launch(program, (out.address,), 0, 0), stream.synchronize]
for use in (*uses, lambda: gpu.allocate(8), gpu.open_stream, lambda: program.run([out.address], 0)):
    try:
        use()
        said.append("")
    except TilewrightError as error:
        said.append(f"{type(error).__name__} {error.rule} {error.field} {error.reason}")
stream.close()
gpu.close()
print(json.dumps(said))
"""


@pytest.mark.parametrize("how", ["run", "launch"])
def test_fault_of_a_kernel_is_recognised_and_final(how: str, kind: Gpu, binary: Path, gpu: GpuDevice) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", FAULT, str(binary), how, kind.kind],
        capture_output=True,
        text=True,
        cwd=HERE,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    said = json.loads(answer.stdout.splitlines()[-1])
    first = said[0] or said[1]
    assert first.startswith("DeviceLostError device_lost device")
    assert kind.fault in first
    assert all(text.startswith("DeviceLostError") for text in said[1 + (how == "launch") :])
    gpu.free(gpu.allocate(100))  # other processes go on


DEATH = """
import sys, time
from pathlib import Path
import numpy as np
from gpu_device_harness import ADD, Client, GPUS, N, get, put, stage
from tilewright_server.devices.contract import WAIT
provider, client = GPUS[sys.argv[2]].provider, Client(sys.argv[2], Path(sys.argv[1]))
gpu = provider.open(provider.discover()[0])
entry = gpu.load(Path(sys.argv[1])).function
x, stream = gpu.import_memory(client.handle("ipc")), gpu.open_stream()
stream.open_event(1, bytes.fromhex(client.ask("produce", values=[3.0] * N)["event"]))
add = gpu.program([stage(entry("add"), ADD)], ["x", "y", "out"])
stream.launch(add, (x.address,) * 3, WAIT, 1)
client.process.kill()
client.process.wait()
begin = time.monotonic()
stream.close()
gpu.release_memory(x)
buffer = put(gpu, np.ones(N, np.float32))
add.run([buffer.address] * 3, 0)
assert (get(gpu, buffer) == 2).all()
gpu.close()
assert time.monotonic() - begin < 30
print("went on")
"""


def test_client_that_dies_holds_up_nobody_else(kind: Gpu, binary: Path, gpu: GpuDevice) -> None:
    """In a process of its own: nothing can take the launch that waits off its stream again, and CUDA loads no module
    into a process meanwhile. Servers replace the device's process."""
    answer = subprocess.run(
        [sys.executable, "-c", DEATH, str(binary), kind.kind], capture_output=True, text=True, cwd=HERE, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["went", "on"]


# In a process of its own, as servers open it


@pytest.mark.parametrize("way", WAYS)
def test_worker_maps_and_shares_memory(
    way: str, registry: DeviceRegistry, info: DeviceInfo, binary: Path, client: Client
) -> None:
    device: Any = registry.get(info.id)
    assert isinstance(device, SharingDevice)
    assert device.uuid == info.attributes["uuid"]
    handle = client.handle(way)
    client.ask("put", offset=0, values=[1.0] * N)
    x, shared = device.import_memory(handle), device.allocate_shared(4 * N)
    if handle.fd >= 0:
        os.close(handle.fd)
    program = device.program([stage(device.load(binary).function("add"), ADD)], ["x", "y", "out"])
    program.run([x.address, x.address, shared.address], 0)
    assert (get(device, shared) == 2).all()
    exported = device.export_memory(shared)
    client.ask("open", data=exported.data.hex(), offset=exported.offset)
    assert client.ask("get", offset=0, count=N)["values"] == [2.0] * N
    stream = device.open_stream()
    assert stream.launch(program, (x.address, x.address, x.address), TIME, 0) > 0
    stream.close()
    device.release_memory(x)


def test_worker_is_replaced_when_a_kernel_faults(registry: DeviceRegistry, info: DeviceInfo, binary: Path) -> None:
    device: Any = registry.get(info.id)
    out = device.allocate(8)
    fault = stage(device.load(binary).function("fault"), Struct((Pointer("out"),)))
    with pytest.raises(UnavailableError) as caught:
        device.program([fault], ["out"]).run([out.address], 0)
    assert caught.value.rule == "device_lost"
    assert caught.value.retry_after_s
    x = np.ones(N, np.float32)
    buffers = [put(device, x), device.allocate(x.nbytes)]
    program = device.program([stage(device.load(binary).function("add"), ADD)], ["x", "y", "out"])
    program.run([buffers[0].address, buffers[0].address, buffers[1].address], 0)
    assert (get(device, buffers[1]) == 2).all()
