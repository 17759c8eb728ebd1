"""Threads that serve calls: some from the start, more while calls wait for one, fewer when they idle.

Calls wait in lines of their principal, its processes and their sessions, which take turns. One process runs on at most
as many threads as it leaves free, so however many calls it makes, another's call finds a thread. Whoever submits a call
never starts a thread: that is asked of another one, which may be refused.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from tilewright_kit.types.errors import ResourceExhaustedError, UnavailableError
from tilewright_server.clients.client import Client
from tilewright_server.clients.fair_queue import is_full

__all__ = ["UNLIMITED", "Starter", "Threads"]

log = logging.getLogger("tilewright.rpc.threads")

Job = Callable[[], None]
IDLE_S = 30.0
"""Idle time after which a thread ends, unless it is one of those that were there from the start."""
REFUSED_S = 1.0
"""Time between attempts while the system refuses threads."""
RETRY_S = 0.05
"""Time after which a call that found the line full is to be sent again."""
UNLIMITED = 1 << 40


class Starter:
    """Starts threads for whoever must not."""

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[Callable[[], bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="starter", daemon=True)
        self._thread.start()

    def ask(self, start: Callable[[], bool]) -> None:
        """Have ``start`` called soon, and again while it returns False."""
        self._wanted.put(start)

    def close(self) -> None:
        self._wanted.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (start := self._wanted.get()) is not None:
            try:
                done = start()
            except Exception:
                log.exception("a thread could not be started")
                done = False
            if not done:
                time.sleep(REFUSED_S)
                self._wanted.put(start)


class _Node:
    """A principal, a process or a session, with those below it."""

    __slots__ = ("below", "key", "lined", "parent", "queued", "ready", "running", "waiting")

    def __init__(self, parent: _Node | None, key: object) -> None:
        self.parent = parent
        self.key = key
        self.below: dict[object, _Node] = {}
        self.ready: deque[_Node] = deque()
        """Those below with waiting calls, in the order of their turns."""
        self.waiting: deque[Job] = deque()
        self.lined = False
        """In the parent's ``ready``."""
        self.queued = 0
        self.running = 0

    def child(self, key: object) -> _Node:
        found = self.below.get(key)
        if found is None:
            found = self.below[key] = _Node(self, key)
        return found


class _Worker:
    __slots__ = ("job", "leaf", "wake")

    def __init__(self) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()
        self.job: Job | None = None
        self.leaf: _Node | None = None


class Threads:
    """Threads of one class of calls. Thread-safe."""

    def __init__(self, name: str, starter: Starter, *, least: int, most: int, waiting: int = UNLIMITED) -> None:
        """Start ``least`` threads. ``waiting`` calls may wait for one; one process has at most half of them.

        Raises ``RuntimeError`` if not even one can be started.
        """
        self._name = name
        self._starter = starter
        self._least = least
        self._most = most
        self._limit = waiting
        self._lock = threading.Lock()
        self._root = _Node(None, "")
        self._idle: list[_Worker] = []
        self._threads: set[threading.Thread] = set()
        self._growing = self._closed = self._refused = False
        self._capacity = most
        for _ in range(least):
            if not self._start() and not self._threads:
                raise RuntimeError(f"no thread for {name} can be started")

    def __len__(self) -> int:
        """Threads that there are."""
        return len(self._threads)

    @property
    def waiting(self) -> int:
        """Calls that wait for a thread."""
        return self._root.queued

    def of_session(self, client: Client) -> tuple[int, int]:
        """Calls of the client's session that wait for a thread, and that run."""
        with self._lock:
            node: _Node | None = self._root
            for key in (client.principal, client.process, client.session):
                node = node.below.get(key) if node is not None else None
            return (node.queued, node.running) if node is not None else (0, 0)

    def submit(self, job: Job, client: Client) -> None:
        """Have ``job`` run. Raises ``ResourceExhaustedError`` if the line is full, ``UnavailableError`` after
        ``close``."""
        with self._lock:
            if self._closed:
                raise UnavailableError("the server is shutting down", rule="draining", fix="use another server")
            leaf = self._root.child(client.principal).child(client.process).child(client.session)
            if self._idle and not leaf.waiting and self._may_run(leaf):
                self._give(self._idle.pop(), job, leaf)
                return
            if self._full_for(leaf):
                self._prune(leaf)
                raise self._full(leaf)
            leaf.waiting.append(job)
            self._count_waiting(leaf, 1)
            if not self._idle and not self._growing and len(self._threads) < self._most:
                self._growing = True
                self._starter.ask(self._grow)

    def close(self, timeout: float = 5.0) -> None:
        """Let those end that are idle, and the others after their present call. Calls that wait are forgotten."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            threads = list(self._threads)
        for worker in idle:
            worker.wake.release()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # Who may

    def _may_run(self, leaf: _Node) -> bool:
        process = leaf.parent
        assert process is not None
        principal = process.parent
        assert principal is not None
        share = self._capacity - self._capacity // 8  # the rest is left to other principals
        free = min(self._capacity - self._root.running, share - principal.running)
        return process.running < free and leaf.running < max(1, share // 2 - process.running)

    def _full_for(self, leaf: _Node) -> bool:
        process = leaf.parent
        assert process is not None and process.parent is not None
        return is_full(self._limit, self._root.queued, process.parent.queued, process.queued)

    def _full(self, leaf: _Node) -> ResourceExhaustedError:
        process = leaf.parent
        assert process is not None and process.parent is not None
        return ResourceExhaustedError(
            f"{self._root.queued} calls wait for a thread already, {process.queued} of them of this client's process,"
            f" {process.parent.queued} of its user's",
            field=f"{self._name}_calls_waiting",
            value=self._limit,
            rule="quota",
            fix="send fewer calls at a time, and again those that were refused after the time that is said",
            retry_after_s=RETRY_S,
        )

    # Books; lock held

    @staticmethod
    def _count_waiting(leaf: _Node, change: int) -> None:
        node = leaf
        node.queued += change
        while node.parent is not None:
            parent = node.parent
            if node.queued and not node.lined:
                parent.ready.append(node)
                node.lined = True
            parent.queued += change
            node = parent

    def _give(self, worker: _Worker, job: Job, leaf: _Node) -> None:
        worker.job, worker.leaf = job, leaf
        node: _Node | None = leaf
        while node is not None:
            node.running += 1
            node = node.parent
        worker.wake.release()

    def _left(self, leaf: _Node) -> None:
        node: _Node | None = leaf
        while node is not None:
            node.running -= 1
            node = node.parent
        self._prune(leaf)

    @staticmethod
    def _prune(leaf: _Node) -> None:
        """Forget those that have nothing left."""
        node = leaf
        while node.parent is not None and not (node.running or node.queued or node.below):
            node.parent.below.pop(node.key, None)
            node = node.parent

    def _pick(self, node: _Node) -> tuple[Job, _Node] | None:
        """The next call that may run: those below ``node`` take turns."""
        for _ in range(len(node.ready)):
            child = node.ready.popleft()
            child.lined = False
            if not child.queued:
                continue
            node.ready.append(child)
            child.lined = True
            if not child.waiting:
                found = self._pick(child)
                if found is not None:
                    return found
            elif self._may_run(child):
                job = child.waiting.popleft()
                self._count_waiting(child, -1)
                return job, child
        return None

    def _hand_out(self) -> None:
        """Give idle threads what waits and may run."""
        while self._idle and self._root.queued and (found := self._pick(self._root)) is not None:
            self._give(self._idle.pop(), *found)

    # Threads

    def _grow(self) -> bool:
        """Start a thread for each call that waits. In the starter's thread; False if the system refuses."""
        while True:
            with self._lock:
                missing = self._root.queued > len(self._idle) and len(self._threads) < self._most
                if self._closed or not missing:
                    self._growing = False
                    return True
            if not self._start():
                with self._lock:
                    # What can be had is what is divided, or those who hold it all would pass for a small part.
                    self._capacity = max(1, len(self._threads))
                return False
            with self._lock:
                self._capacity = self._most
                self._hand_out()
                if not self._idle or not self._root.queued:
                    continue
                self._growing = False  # what still waits may not run now, however many threads there are
                return True

    def _start(self) -> bool:
        worker = _Worker()
        thread = threading.Thread(target=self._work, args=(worker,), name=self._name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            if not self._refused:
                log.warning("the system refuses a thread for %s calls, there are %d: %s", self._name, len(self), error)
            self._refused = True
            return False
        self._refused = False
        with self._lock:
            self._threads.add(thread)
            self._idle.append(worker)
        return True

    def _work(self, worker: _Worker) -> None:
        while self._wait(worker):
            job, leaf = worker.job, worker.leaf
            worker.job = worker.leaf = None
            if job is None or leaf is None:
                break
            try:
                job()
            except BaseException:
                log.exception("a call of %s failed outside of its method", self._name)
            del job  # what it holds is not to live until the next
            with self._lock:
                self._left(leaf)
                if self._closed:
                    break
                self._idle.append(worker)
                self._hand_out()
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _wait(self, worker: _Worker) -> bool:
        """Wait for a call; False when the thread is to end."""
        while not worker.wake.acquire(timeout=IDLE_S):
            with self._lock:
                if worker in self._idle and len(self._threads) > self._least:
                    self._idle.remove(worker)
                    self._threads.discard(threading.current_thread())
                    return False
        return True
