"""A service on a GPU whose driver is simulated, and what a framework would do beside it in the client's process."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "kernels"))  # for processes that tests start, too

from driver_calls import DriverCalls

HERE = Path(__file__).parent
SIMULATED = HERE.parent / "server" / "devices" / "cuda_simulated"
PART = 1 << 17
TAG = f"c{os.getpid() % 10**6}"
SERVE = """
import os, sys
from tilewright_server.devices.cuda import discovery
discovery._LIBRARIES = (os.environ["TW_SIMULATED_CUDA"],)
from tilewright_tools.cli import main
sys.argv[0] = "tilewright"
main()
"""


def built(source: Path, target: Path) -> Path:
    flags = ["-O1", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", f"-I{SIMULATED}"]
    subprocess.run(["cc", *flags, "-o", str(target), str(source), "-lpthread", "-lrt"], check=True)
    return target


@contextmanager
def service(libraries: tuple[Path, Path], folder: Path, cache: Path, *more: str) -> Iterator[str]:
    driver = {"LD_LIBRARY_PATH": str(libraries[0].parent), "TW_SIMULATED_CUDA": str(libraries[0])}
    flags = ["--listen", f"unix:{folder}/s", "--cache-dir", str(cache), "--device", "cuda:0"]
    command = [sys.executable, "-c", SERVE, "serve", *flags, "--log-level", "warning", *more]
    environment = {**os.environ, **driver, "TW_SIM_TAG": TAG, "TW_SIM_DEVICES": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready")
        yield f"unix:{folder}/s"
        process.terminate()


class Gpu(DriverCalls):
    """What a framework would do in this process: streams, memory, and holding a stream."""

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def stream(self) -> int:
        return self.made("cuStreamCreate", 1)

    def allocate(self, nbytes: int) -> int:
        return self.made("cuMemAlloc_v2", ctypes.c_size_t(nbytes))

    def pooled(self, nbytes: int, stream: int) -> int:
        properties = (ctypes.c_int * 64)(1, 1, 1, 0)
        pool = self.made("cuMemPoolCreate", properties)
        self.call("simPool", ctypes.c_uint64(pool))
        size, handle = ctypes.c_size_t(nbytes), ctypes.c_uint64(stream)
        return self.made("cuMemAllocFromPoolAsync", size, ctypes.c_uint64(pool), handle)

    def mapped(self, nbytes: int) -> int:
        size, zero = ctypes.c_size_t(nbytes), ctypes.c_uint64()
        handle = self.made("cuMemCreate", size, (ctypes.c_int * 32)(1, 1, 1, 0), zero)
        address = self.made("cuMemAddressReserve", size, zero, zero, zero)
        self.call("cuMemMap", ctypes.c_uint64(address), size, zero, ctypes.c_uint64(handle), zero)
        self.call("cuMemSetAccess", ctypes.c_uint64(address), size, (ctypes.c_int * 3)(1, 0, 3), ctypes.c_size_t(1))
        return address

    def parts(self, count: int) -> int:
        """Allocations of 2 MiB, mapped one behind the other, as PyTorch's expandable segments are."""
        size, zero = ctypes.c_size_t(2 << 20), ctypes.c_uint64()
        whole = ctypes.c_size_t(count * (2 << 20))
        address = self.made("cuMemAddressReserve", whole, zero, zero, zero)
        for at in range(address, address + whole.value, 2 << 20):
            handle = self.made("cuMemCreate", size, (ctypes.c_int * 32)(1, 1, 1, 0), zero)
            self.call("cuMemMap", ctypes.c_uint64(at), size, zero, ctypes.c_uint64(handle), zero)
        self.call("cuMemSetAccess", ctypes.c_uint64(address), whole, (ctypes.c_int * 3)(1, 0, 3), ctypes.c_size_t(1))
        return address

    def hold(self, stream: int) -> Callable[[], None]:
        event = ctypes.c_uint64(self.made_behind("simHold", stream))
        return lambda: self.call("simRelease", event)

    def made_behind(self, name: str, stream: int) -> int:
        found = ctypes.c_uint64()
        self.call(name, ctypes.c_uint64(stream), ctypes.byref(found))
        return found.value

    def idle(self, stream: int) -> bool:
        return bool(self.library.cuStreamQuery(ctypes.c_uint64(stream)) == 0)

    def comes_to_rest(self, stream: int) -> bool:
        deadline = time.monotonic() + 30
        while not self.idle(stream) and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.idle(stream)
