"""Runs convolution kernels on an NVIDIA GPU, beside cuDNN through PyTorch. Imported by conv_gpu_harness.py alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from conv_gpu_case import ConvArgs, ConvCase
from conv_gpu_config import ConvGpuConfig
from conv_gpu_emulation import CONVERT_SHARED, CONVERT_THREADS, launches
from cuda.bindings import driver
from gpu_device import TORCH, Arena, check
from gpu_emulation import LaunchHead
from native_harness import DTYPES

COUNTERS = 1 << 16
_COUNTERS = torch.zeros(COUNTERS, dtype=torch.int32, device="cuda")


class ConvKernel:
    """A loaded kernel, and the one that adds its partial sums."""

    def __init__(self, config: ConvGpuConfig, cubin: bytes) -> None:
        self.config = config
        self.module = check(driver.cuModuleLoadData(cubin))
        self.function = check(driver.cuModuleGetFunction(self.module, b"kernel"))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self.function, attribute, 200 * 1024))
        self.convert = None
        if config.converts:
            self.convert = check(driver.cuModuleGetFunction(self.module, b"kernel_convert"))

    def launcher(self, case: ConvCase, block: bytes, shared: int) -> Callable[[], None]:
        """Launches with these parameters on PyTorch's current stream."""
        raw = ctypes.create_string_buffer(block, len(block))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(raw))
        grid, convert = launches(case)

        def launch(keep: object = raw) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            place = ctypes.addressof(arguments)
            check(driver.cuLaunchKernel(
                self.function, grid, 1, 1, self.config.threads, 1, 1, shared, stream, place, 0
            ))  # fmt: skip
            if self.convert is not None:
                check(
                    driver.cuLaunchKernel(
                        self.convert, convert, 1, 1, CONVERT_THREADS, 1, 1, CONVERT_SHARED, stream, place, 0
                    )
                )

        return launch


def parameters(case: ConvCase, workspace: int, keep: list[Any]) -> bytes:
    """The parameter block of a case whose pointers are those of the device."""
    tasks = case.tasks()
    head = LaunchHead(0, len(case.table), sum(case.tiles()), workspace, _COUNTERS.data_ptr(), case.split_k, 0, 0)
    if case.config.grouped:
        table = torch.frombuffer(bytearray(tasks), dtype=torch.uint8).cuda()
        keep.append(table)
        head.tasks = table.data_ptr()
        return bytes(head)
    return bytes(head) + tasks


def run_case(arena: Arena, kernel: ConvKernel, case: ConvCase) -> str:
    """One launch; the result comes back into the case's host memory. Says what was wrong beyond the results."""
    arena.reset()
    for memory in case.guards():
        arena.put(memory)
    host = case.table
    case.table = (ConvArgs * len(host))()
    for args, plain in zip(case.table, host, strict=True):
        ctypes.memmove(ctypes.addressof(args), ctypes.addressof(plain), ctypes.sizeof(args))
        for name in ("a", "b", "c"):
            setattr(args.gemm, name, arena.address(getattr(plain.gemm, name)))
        args.gemm.bias.ptr = arena.address(plain.gemm.bias.ptr)
        args.acc = arena.address(plain.acc)
        for i in range(len(case.config.d)):  # shared by all products of the case
            args.gemm.d[i].ptr = arena.address(plain.gemm.d[i].ptr) or plain.gemm.d[i].ptr
    workspace = arena.take(case.workspace())
    kept: list[Any] = []
    block = parameters(case, arena.memory.data_ptr() + workspace, kept)
    kernel.launcher(case, block, case.shared_bytes())()
    torch.cuda.synchronize()
    fault = arena.fetch(int(host[0].gemm.c))
    if bool(_COUNTERS.any()):
        fault += "; counters left"
        _COUNTERS.zero_()
    return fault


class _Tensor:
    """A tensor in device memory with what ``ConvCase`` asks of an array."""

    def __init__(self, tensor: torch.Tensor, dtype: str) -> None:
        self.tensor, self.dtype = tensor, DTYPES[dtype]
        self.shape, self.itemsize, self.size = tuple(tensor.shape), tensor.element_size(), tensor.numel()
        self.strides = tuple(stride * self.itemsize for stride in tensor.stride())
        self.ctypes = SimpleNamespace(data=tensor.data_ptr())


class TimedCase(ConvCase):
    """A convolution of random tensors in device memory. ``tensors``: to be used instead of new ones."""

    def __init__(self, config: ConvGpuConfig, shape: Any, split_k: int = 1, tensors: ConvCase | None = None) -> None:
        self._others = iter([] if tensors is None else [tensors.x, tensors.y, tensors.w, tensors.before])
        super().__init__(config, shape, None, split_k=split_k)  # type: ignore[arg-type]

    def _tensor(self, dtype: str | None, shape: tuple[int, ...], gap: int) -> Any:
        other = next(self._others, None)
        if other is not None:
            return other
        assert dtype is not None
        return _Tensor(torch.randn(shape, device="cuda").to(TORCH[dtype]), dtype)

    def _poison(self) -> None:
        self.result.tensor.fill_(float("nan"))  # type: ignore[attr-defined]

    def call(self, kernel: ConvKernel) -> Callable[[], None]:
        space = torch.empty(max(self.workspace(), 16), dtype=torch.uint8, device="cuda")
        kept: list[Any] = [space]
        block = parameters(self, space.data_ptr(), kept)
        launch = kernel.launcher(self, block, self.shared_bytes())

        def run(keep: object = kept) -> None:
            launch()

        return run

    def peer(self) -> Callable[[], torch.Tensor]:
        """The same by cuDNN, which chooses its fastest kernel."""
        g, n = self.geometry, self.geometry.ndim
        drop = 3 - n

        def image(array: Any) -> torch.Tensor:  # [N, D, H, W, C] as PyTorch's [N, C, ...] in channels-last order
            tensor: torch.Tensor = array.tensor
            tensor = tensor.reshape(tensor.shape[0], *tensor.shape[1 + drop :])
            return tensor.movedim(-1, 1)

        x, y, w = image(self.x), image(self.y), image(self.w)
        settings: tuple[Any, ...] = (g.stride[drop:], g.pad_begin[drop:], g.dilation[drop:])
        if self.config.direction == "forward":
            return lambda: torch.ops.aten.convolution(x, w, None, *settings, False, [0] * n, g.groups)
        mask = [self.config.direction == "backward_data", self.config.direction == "backward_weight", False]

        def backward() -> torch.Tensor:
            found = torch.ops.aten.convolution_backward(y, x, w, None, *settings, False, [0] * n, g.groups, mask)
            return found[0] if mask[0] else found[1]

        return backward

    def difference(self, peer: torch.Tensor) -> float:
        """Of the results, relative to their size."""
        own = self.result.tensor  # type: ignore[attr-defined]
        drop = 3 - self.geometry.ndim
        own = own.reshape(own.shape[0], *own.shape[1 + drop :]).movedim(-1, 1).float()
        return float((own - peer.float()).norm() / peer.float().norm())
