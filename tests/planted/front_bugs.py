"""Undone mends of the front door: the numbers are rows of the table in docs/security.md."""

from __future__ import annotations

from tests.planted.bug import Bug

__all__ = ["FRONT_BUGS"]

SERVER = "server/tilewright_server"
THREADS = f"{SERVER}/endpoints/rpc/transport/threads.py"

FRONT_BUGS = [
    Bug(
        "front door 1: threads are started in gRPC's own thread",
        f"{SERVER}/endpoints/rpc/transport/event_loop.py",
        "            entry.accept(call)\n",
        "            threading.Thread(target=entry.accept, args=(call,)).start()\n",
        "tests/hostile/test_threads.py -k refused_thread",
    ),
    Bug(
        "front door 2: health waits behind other calls",
        f"{SERVER}/endpoints/rpc/server.py",
        "partial(Reception, identify, lanes, self.streams)",
        "partial(Reception, identify, lanes | {Lane.HEALTH: lanes[Lane.WORK]}, self.streams)",
        "tests/hostile/test_threads.py -k health",
    ),
    Bug(
        "front door 2: one process has all threads",
        THREADS,
        "return process.running < free and leaf.running < max(1, share // 2 - process.running)",
        "return self._root.running < self._capacity",
        "tests/server/rpc/test_worker_threads.py",
    ),
    Bug(
        "front door 3: replies that nobody reads are not counted",
        f"{SERVER}/endpoints/rpc/transport/calls.py",
        "if nbytes <= SMALL_BYTES:\n            return _nothing\n        client",
        "if nbytes:\n            return _nothing\n        client",
        "tests/hostile/test_memory.py -k replies",
    ),
    Bug(
        "front door 4: the server makes pages of a sparse operand",
        f"{SERVER}/memory/populated.py",
        "if any(not page & 1 for page in found):",
        "if not found:",
        "tests/hostile/test_sparse.py -k no_page",
    ),
    Bug(
        "front door 4: nobody hears of pages that were taken away while they were used",
        f"{SERVER}/memory/guard.py",
        "return self._slot >= 0 and bool(_library().tw_guard_holes(self._slot))",
        "return False",
        "tests/server/memory/test_guard.py",
    ),
    Bug(
        "front door 4: pages that the server made are forgotten with their region",
        f"{SERVER}/endpoints/kserve/charges.py",
        "        if owed:\n",
        "        if not owed:\n",
        "tests/kserve/test_charges.py",
    ),
    Bug(
        "front door 8: one large take may have more than half",
        f"{SERVER}/session/quotas.py",
        "elif 2 * (process + amount) + principal - process > share + 1:",
        "elif 2 * (process + 1) + principal - process > share + 1:",
        "tests/server/memory/test_client_quotas.py",
    ),
    Bug(
        "front door 5: what nobody waits for any more is built",
        f"{SERVER}/build/pool.py",
        "if job.held or job.lasting or job.begun:\n                return\n            self._drop(job)",
        "if job.begun or job.build is build:\n                return\n            self._drop(job)",
        "tests/server/build/test_fair_builds.py tests/hostile/test_fair_builds.py",
    ),
    Bug(
        "front door 6: a compiler killed from outside is remembered as a refusal",
        f"{SERVER}/build/pool.py",
        "if error is None:\n                    raise\n                pause",
        "if error is None or raised:\n                    raise\n                pause",
        "tests/server/build/test_pool.py",
    ),
    Bug(
        "front door 7: turns go by call, and not by process",
        f"{SERVER}/clients/fair_queue.py",
        "for key in (party.principal, party.process, party.session):",
        'for key in ("all", "all", b""):',
        "tests/server/engine/test_executor.py tests/server/build/test_fair_queue.py",
    ),
    Bug(
        "front door 8: one process may have all of a quota",
        f"{SERVER}/session/quotas.py",
        "elif 2 * (process + amount) + principal - process > share + 1:",
        "elif process + amount > limit:",
        "tests/hostile/test_quotas.py -k 'sessions or mappings'",
    ),
    Bug(
        "front door 9: what cannot be loaded is published",
        f"{SERVER}/build/toolchains/toolchain.py",
        "        self._trial.load(unit.name, binary, tuple(unit.entries.values()), abort)\n",
        "",
        "tests/server/build/test_trial.py",
    ),
    Bug(
        "front door 10: compilers outlive a killed server",
        f"{SERVER}/build/workers/lifeline.py",
        "fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)",
        "fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK)",
        "tests/server/build/test_killed_server.py",
    ),
    Bug(
        "front door 10: a link in the place of an entry stays",
        f"{SERVER}/build/cache/artifacts.py",
        "if folder.is_symlink():  # an entry is a folder: what a link leads to may change",
        "if folder is None:",
        "tests/server/build/test_cache_links.py",
    ),
    Bug(
        "front door 10: threads that idle stay",
        THREADS,
        "len(self._threads) > self._least:",
        "len(self._threads) > self._most:",
        "tests/server/rpc/test_worker_threads.py",
    ),
    Bug(
        "front door 10: the end of a terminal ends the server",
        f"{SERVER}/hosting/lifecycle/signals.py",
        "for number in (*ENDS, *OTHERS)}",
        "for number in ENDS}",
        "tests/hostile/test_signals.py",
    ),
    Bug(
        "front door 10: the time of parallel builds is subtracted",
        f"{SERVER}/engine/kernels/store.py",
        "call.build_ns += min(sum(build.build_ns for build in builds), time.perf_counter_ns() - begin)",
        "call.build_ns += sum(build.build_ns for build in builds)",
        "tests/server/engine/test_engine_builds.py",
    ),
]
