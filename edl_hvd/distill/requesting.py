"""The student's requests to servers of the Open Inference Protocol, which somebody else runs.

Such a server does not pull. Each request that a student may have there stands for a teacher: a thread with a connection
of its own, which takes a task when it is free. So the window decides as it does for teachers of this package: the
server with the shortest queue gets the next task, and the oldest task is given to a second one.
"""

from __future__ import annotations

import queue
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from edl_hvd import events
from edl_hvd.distill import conversation as say
from edl_hvd.distill import window_events
from edl_hvd.distill.address_book import Fault
from edl_hvd.distill.call import LastingError, check_equal
from edl_hvd.distill.conversation import Address
from edl_hvd.distill.holding import Holding, Terms
from edl_hvd.distill.inference_client import Convert, InferenceClient, ServedModel, ServerBusyError
from edl_hvd.errors import ProtocolError, UsageError
from edl_hvd.frames import Array
from edl_hvd.open_inference import ModelUrl
from edl_hvd.silence import UNANSWERED_S

_LOOK_EVERY_S = 0.1
_OWN_PAUSE_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 1.0
# Between two calls, as for teachers of this package; and after what a person has to change:
_LASTING_PAUSE_S, _LONGEST_LASTING_PAUSE_S = 10.0, 160.0
_CLOSE_S = 5.0


@dataclass
class _Server:
    """A server as its requests share it.

    Attributes:
        model: Model.
        lock: Held while a request asks who the server is.
        hello: What was sent when that was asked.
        served: What it is then.
        ready: Number of requests that may be made.
    """

    model: ModelUrl
    lock: threading.Lock = field(default_factory=threading.Lock)
    hello: say.Hello | None = None
    served: ServedModel | None = None
    ready: int = 0

    @property
    def address(self) -> Address:
        return Address(self.model.host, self.model.port)


class Requesting(Holding):
    """Requests to servers; any thread, and nothing blocks but ``close``.

    Args:
        terms: See ``Holding``; without a context, https is verified by the certificates of this machine.
        models: Models, each on a server of its own.
        convert: Makes an answer of the outputs of a server; raises ``UsageError`` where it cannot.
    """

    def __init__(self, terms: Terms, models: tuple[ModelUrl, ...], convert: Convert) -> None:
        super().__init__(terms)
        self.convert = convert
        self.is_closing = threading.Event()
        servers = [_Server(model) for model in models]
        self._book.list({server.address: server.model.host for server in servers})
        self._slots = {
            slot.name: slot
            for server in servers
            for slot in (_Slot(self, server, number, terms.context) for number in range(server.model.requests))
        }
        self._begin(threading.Thread(target=self._watch, name="edl_hvd servers", daemon=True))
        for slot in self._slots.values():
            slot.thread.start()

    def close(self) -> None:
        """End all requests and threads."""
        self.is_closing.set()
        for slot in self._slots.values():
            slot.inbox.put(None)
            slot.client.cut()
        with self.changed:
            self.changed.notify_all()
        for thread in (self._thread, *(slot.thread for slot in self._slots.values())):
            if thread is not threading.current_thread():
                thread.join(_CLOSE_S)

    def close_in_child(self) -> None:
        """In a forked process: close the copies of the sockets."""
        for slot in self._slots.values():
            slot.client.close()

    def _ring(self) -> None:
        """Bring what follows to the requests that it concerns."""
        with self.changed:
            if self._must_renew:
                self._must_renew, self._teaching = False, None
                for slot in self._slots.values():
                    slot.inbox.put(None)
            while self._outbox:
                action = self._outbox.popleft()
                there = self._slots.get(getattr(action, "teacher", ""))
                if there is not None:
                    if isinstance(action, window_events.Withdraw):
                        there.withdraw(action.number)
                    else:
                        there.inbox.put(action)
            self.changed.notify_all()

    def _watch(self) -> None:
        """What time brings, and hosts that are gone."""
        looked_s = self._clock.monotonic_s()
        while not self.is_closing.wait(_LOOK_EVERY_S):
            now_s = self._clock.monotonic_s()
            slept, looked_s = now_s - looked_s > _OWN_PAUSE_S, now_s
            self.handle(window_events.Passed())
            for slot in self._slots.values():
                if not slept and slot.client.silent_s > UNANSWERED_S:
                    slot.client.cut()

    # --- for the threads of the requests ---

    def hello_now(self) -> say.Hello | None:
        """What will be sent; waits for it, and returns ``None`` at the end."""
        with self.changed:
            while self._hello is None and not self.is_closing.is_set():
                self.changed.wait(_LOOK_EVERY_S)
            return None if self.is_closing.is_set() else self._hello

    def is_hello(self, hello: say.Hello) -> bool:
        """Whether that is what is sent now."""
        return self._hello is hello

    @property
    def fingerprint(self) -> str:
        """The fingerprint that the script vouches for, as the protocol has none; empty without."""
        return self._wishes.fingerprint

    def arrays_of(self, number: int) -> tuple[Array, ...] | None:
        """The input of a task that was just given; ``None`` if it is needed no more."""
        with self.changed:
            if number not in self._arrays:
                return None
            self._stages.given(number, self._clock.monotonic_s())
            return self._arrays[number][0]

    def welcome(self, slot: _Slot, teaching: say.Teaching) -> None:
        """A request may be made.

        Raises:
            LastingError: The server answers otherwise than the first one.
        """
        server = slot.server
        with self.changed:
            self._ring()
            check_equal(teaching, self._teaching, self._wishes)
            if self._teaching is None:
                self._teaching = teaching
                self._terms.met(teaching.fingerprint)
            self._book.joined(server.address)
            server.ready += 1
            is_first = server.ready == 1
        if is_first:
            self._terms.tell(events.TeacherJoined(str(server.address), teaching.model, teaching.fingerprint))
        self.handle(window_events.TeacherReady(slot.name, teaching.process))
        self.handle(window_events.Wanted(slot.name))

    def part(self, slot: _Slot, why: str, tasks: int, kindly: bool) -> None:
        """A request that was welcome may not be made any more."""
        with self.changed:
            slot.server.ready -= 1
            is_last = not slot.server.ready
            self._handle(window_events.Left(slot.name, kindly))
            if not self._window.teachers:
                self._ready_s = self._clock.monotonic_s()
        if is_last and not self.is_closing.is_set():
            self._terms.tell(events.TeacherLost(str(slot.server.address), why, tasks))

    def blame_server(self, server: _Server, fault: Fault) -> None:
        """Note why a server gives no answers."""
        with self.changed:
            known, self._book.faults[server.address] = self._book.faults.get(server.address), fault
            self.changed.notify_all()
        if fault.is_lasting and known != fault and not self.is_closing.is_set():
            self._terms.tell(events.TeacherRefused(str(server.address), fault.why))

    def accept(self, slot: _Slot, answer: say.Answer, arrays: tuple[Array, ...]) -> None:
        """An answer has come."""
        self._take_answer(slot.name, answer, arrays)

    @property
    def now_s(self) -> float:
        """Now."""
        return self._clock.monotonic_s()


class _Slot:
    """One request that a student may have at a server: a thread, its connection, and what it is told.

    Args:
        owner: All requests.
        server: Server.
        number: Number of the request there.
        context: How the server is verified.
    """

    def __init__(self, owner: Requesting, server: _Server, number: int, context: ssl.SSLContext | None) -> None:
        self.owner, self.server, self.name = owner, server, f"{server.address}#{number + 1}"
        self.client = InferenceClient(server.model, context)
        # ``None``: look at what has changed.
        self.inbox: queue.SimpleQueue[window_events.Action | None] = queue.SimpleQueue()
        self._at_work: int | None = None
        self._unwanted: set[int] = set()
        self.thread = threading.Thread(target=self._run, name=f"edl_hvd request {self.name}", daemon=True)

    def withdraw(self, number: int) -> None:
        """The answer to a task is needed no more; any thread."""
        self._unwanted.add(number)
        if self._at_work == number:
            self.client.cut()

    def _run(self) -> None:
        pause_s = lasting_s = 0.0
        while (hello := self.owner.hello_now()) is not None:
            is_lasting, why = False, ""
            try:
                self._meet(hello)
            except (LastingError, ProtocolError, UsageError) as error:
                is_lasting, why = True, str(error)
            except (ServerBusyError, OSError) as error:
                why = getattr(error, "strerror", None) or str(error)
            if not why:
                pause_s = lasting_s = 0.0
                why = self._work(hello)
                if not why:
                    continue
            self.client.close()
            self.server.hello = None
            self.owner.blame_server(self.server, Fault(why, is_lasting))
            if is_lasting:
                wait_s = lasting_s = min(_LONGEST_LASTING_PAUSE_S, max(_LASTING_PAUSE_S, 2 * lasting_s))
            else:
                wait_s = pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause_s))
            self._rest(hello, wait_s)
        self.client.close()

    def _rest(self, hello: say.Hello, wait_s: float) -> None:
        """Wait, unless something else is to be sent meanwhile."""
        until_s = self.owner.now_s + wait_s
        while self.owner.now_s < until_s and self.owner.is_hello(hello) and not self.owner.is_closing.is_set():
            with suppress(queue.Empty):
                self.inbox.get(timeout=min(_LOOK_EVERY_S, wait_s))

    # --- who the server is ---

    def _meet(self, hello: say.Hello) -> None:
        server = self.server
        with server.lock:
            if self.owner.is_closing.is_set():
                raise OSError("the student ended")
            if server.hello is not hello:
                server.served = self.client.introduce(hello, self.owner.fingerprint, self.owner.convert)
                server.hello = hello
            served = server.served
        assert served is not None
        self.owner.welcome(self, served.teaching)

    # --- its answers ---

    def _work(self, hello: say.Hello) -> str:
        """Make requests until the server is gone, and return why; an empty text if something else is to be sent."""
        why, kindly, tasks = "", True, 0
        while not why and self.owner.is_hello(hello) and not self.owner.is_closing.is_set():
            action = self.inbox.get()
            if isinstance(action, window_events.GiveTask):
                tasks = 1
                try:
                    self._answer(action.number)
                    tasks = 0
                    self.owner.handle(window_events.Wanted(self.name))
                except ServerBusyError as error:
                    why = str(error)
                except OSError as error:
                    why, kindly = error.strerror or str(error), False
            elif isinstance(action, window_events.Invite):
                self.owner.handle(window_events.Wanted(self.name))
        self.owner.part(self, why or "the inputs have changed", tasks, kindly)
        return why

    def _answer(self, number: int) -> None:
        """Have a task answered.

        Raises:
            OSError: The server is gone.
            ServerBusyError: It takes no requests now.
        """
        served = self.server.served
        assert served is not None
        arrays = self.owner.arrays_of(number)
        if arrays is None:
            self._unwanted.discard(number)
            return
        began_s, self._at_work = self.owner.now_s, number
        try:
            if number in self._unwanted:
                return
            reply = self.client.infer(served, arrays)
        except (OSError, ProtocolError) as error:
            if number in self._unwanted:
                self.client.close()
                return
            if isinstance(error, ProtocolError):
                self._decline(number, str(error))
                return
            raise
        finally:
            self._at_work = None
            self._unwanted.discard(number)
        try:
            answer = served.read(reply, arrays[0].type.shape[0], self.owner.convert)
        except (ProtocolError, UsageError) as error:
            self._decline(number, str(error))
            return
        self.owner.accept(self, say.Answer(number, 0.0, self.owner.now_s - began_s), answer)

    def _decline(self, number: int, why: str) -> None:
        self.owner.handle(window_events.Declined(self.name, number, say.shorten(why)))
