"""Bugs in the client, the server, the plugins and the emulator."""

from __future__ import annotations

from tests.planted.bug import Bug

__all__ = ["HOST_BUGS"]

CLIENT = "client/tilewright"
SERVER = "server/tilewright_server"
KIT = "plugins/kit/tilewright_kit"
FMHA = "plugins/fmha/tilewright_fmha"
CONV = "plugins/grouped_conv/tilewright_grouped_conv"
EMULATOR = "emulator/tilewright_emulator"

HOST_BUGS = [
    # the client
    Bug(
        "client: free ranges are not joined with what lies behind them",
        f"{CLIENT}/session/free_ranges.py",
        "self._starts[index] == offset + length:",
        "self._starts[index] == offset - length:",
        "tests/client/test_memory.py",
    ),
    Bug(
        "client: an aligned range may reach beyond the free one",
        f"{CLIENT}/session/free_ranges.py",
        "if slack + need > length:",
        "if need > length:",
        "tests/client/test_memory.py",
    ),
    Bug(
        "client: the offset of a DLPack tensor is forgotten",
        f"{CLIENT}/tensor/dlpack.py",
        "(tensor.data or 0) + tensor.byte_offset,",
        "(tensor.data or 0),",
        "tests/client/test_dlpack.py",
    ),
    Bug(
        "client: a read-only DLPack tensor is taken for a writable one",
        f"{CLIENT}/tensor/dlpack.py",
        "READ_ONLY, COPIED = 1, 2",
        "READ_ONLY, COPIED = 4, 2",
        "tests/client/test_device_arrays.py",
    ),
    Bug(
        "client: a container's memory limit does not count",
        f"{CLIENT}/session/available_memory.py",
        "return max(0, min(rooms, default=sys.maxsize))",
        "return max(0, max(rooms, default=sys.maxsize))",
        "tests/client/test_memory.py",
    ),
    Bug(
        "client: a transposed convolution is padded on one side",
        f"{CLIENT}/operations/conv_sizes.py",
        "whole - begin - end for whole",
        "whole - begin for whole",
        "tests/client/test_conv_calls.py -k transposed",
    ),
    Bug(
        "client: what may have happened is done again",
        f"{CLIENT}/session/recovery.py",
        "begun = begun or (_has_effect(step) and not _is_unbegun(error))",
        "begun = False",
        "tests/client/test_surviving.py",
    ),
    Bug(
        "client: what took effect is done again",
        f"{CLIENT}/session/recovery.py",
        "begun = begun or (_has_effect(step) and _took_effect(reply))",
        "begun = begun or False",
        "tests/client/test_surviving.py",
    ),
    # the server
    Bug(
        "server: a newcomer may catch up with all that others used",
        f"{SERVER}/clients/fair_queue.py",
        "                node.used = max(node.used, node.parent.now)\n            node.queued += 1",
        "                pass\n            node.queued += 1",
        "tests/server/build/test_fair_queue.py",
    ),
    Bug(
        "server: what is given back stays on the books",
        f"{SERVER}/session/quotas.py",
        "self._add(what, client, -amount)",
        "self._add(what, client, 0)",
        "tests/server/memory/test_client_quotas.py",
    ),
    Bug(
        "server: what is used often is forgotten first",
        f"{SERVER}/engine/lru.py",
        "            self._items.move_to_end(key)\n            return item[0]",
        "            return item[0]",
        "tests/server/engine/test_bounds.py",
    ),
    Bug(
        "server: a session registers the memory of another",
        f"{SERVER}/memory/regions.py",
        "if current is not owner:",
        "if current is None:",
        "tests/server/memory/test_sessions.py tests/server/rpc/test_shared_memory.py",
    ),
    Bug(
        "server: a file that its owner may shrink is mapped",
        f"{SERVER}/memory/regions.py",
        "        if opened.sealed:\n",
        "        if opened.bytes:\n",
        "tests/server/rpc/test_shared_memory.py",
    ),
    Bug(
        "server: another file under the descriptor's number is opened",
        f"{SERVER}/memory/shm.py",
        "if now != wanted or os.fstat(opened)",
        "if os.fstat(opened)",
        "tests/server/memory tests/server/rpc/test_shared_memory.py",
    ),
    Bug(
        "server: a kernel is not built again when a header changes",
        f"{SERVER}/build/cache/artifacts.py",
        "        toolchain.headers.closure(unit.text),\n",
        "",
        "tests/server/build/test_keys.py",
    ),
    Bug(
        "server: a damaged kernel is loaded",
        f"{SERVER}/build/cache/artifacts.py",
        "if len(data) != meta.binary_bytes or hashlib.sha256(data).hexdigest() != meta.binary_sha256:",
        "if len(data) != meta.binary_bytes:",
        "tests/server/build/test_artifacts.py",
    ),
    Bug(
        "server: values are checked where their owner may change them meanwhile",
        f"{SERVER}/engine/execution/value_check.py",
        "_view(desc, memory).copy()",
        "_view(desc, memory)",
        "tests/server/engine/test_values.py",
    ),
    Bug(
        "server: a failed packet looks like one that did well",
        f"{SERVER}/protocol/frames.py",
        "return packet(kind | REPLY_KIND, flags,",
        "return packet(kind | REPLY_KIND, 0,",
        "tests/server/local/test_hostile_local.py",
    ),
    Bug(
        "server: a user whom the policy does not name gets in",
        f"{SERVER}/endpoints/rpc/access/gate.py",
        "if policy is None or not policy.uids or role is None:",
        "if policy is None or policy.uids or role is None:",
        "tests/server/app/test_tls.py",
    ),
    # the kit and the plugins
    Bug(
        "kit: a tensor without elements has strides of zero",
        f"{KIT}/types/tensor.py",
        "strides[axis + 1] * max(shape[axis + 1], 1)",
        "strides[axis + 1] * shape[axis + 1]",
        "tests/kit/test_tensor.py",
    ),
    Bug(
        "kit: elements that were not written pass for right ones",
        f"{KIT}/numerics/compare.py",
        "return self.unwritten == 0 and self.misplaced == 0",
        "return self.misplaced == 0",
        "tests/kit/test_compare.py",
    ),
    Bug(
        "attention: a causal query does not see its own key",
        f"{FMHA}/problem/masks.py",
        "seen &= j <= i + self.right",
        "seen &= j < i + self.right",
        "tests/fmha/test_fmha_problem.py tests/fmha/test_fmha_reference.py",
    ),
    Bug(
        "attention: sinks are not counted among the visible pairs",
        f"{FMHA}/problem/masks.py",
        "return total - hidden + _sum_clipped(off - self.left, min(self.sink, keys), queries)",
        "return total - hidden",
        "tests/fmha/test_fmha_problem.py tests/fmha/test_fmha_cost.py",
    ),
    Bug(
        "convolution: the taps of a dilated filter lie side by side",
        f"{CONV}/problem/implicit_gemm.py",
        "tap_step=geometry.dilation[index],",
        "tap_step=1,",
        "tests/conv/test_conv_conformance.py",
    ),
    # the emulator, which finds bugs in kernels
    Bug(
        "emulator: registers are read before their load is there",
        f"{EMULATOR}/decode/program.py",
        'raise MissingWait(f"reads ',
        'str(f"reads ',
        "tests/emulator/test_checks.py",
    ),
]
