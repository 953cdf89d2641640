"""The pool's end of a connection to one of its processes: questions out, answers in, whatever their order."""

import asyncio
import contextlib
from collections.abc import Callable

from vertumnus.engine.errors import PoolError, WireError
from vertumnus.engine.messages import Message
from vertumnus.engine.wire import frame, receive_from


class PeerGone(PoolError):
    """The connection closed before the answer came. The pool says what that means."""


class Peer:
    """Questions may be asked at any time. on_gone is called once, when the connection ends; on_message with what the
    process says unasked."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_gone: Callable[[], None],
        on_message: Callable[[Message], None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._on_gone = on_gone
        self._on_message = on_message
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._num_calls = 0
        self.is_gone = False
        self._task = asyncio.create_task(self._receive())

    def ask(self, message: Message) -> asyncio.Future[Message]:
        """Sends at once, so that questions reach the process in the order of the calls; the answer comes later, or
        PeerGone. Raises WireError if the message cannot be sent."""
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        data = frame(self._num_calls + 1, message)
        self._num_calls += 1
        if self.is_gone or self._writer.is_closing():  # the latter is known a moment before `_receive` sees the end
            answer.set_exception(PeerGone("the connection is closed"))
            answer.exception()  # not everybody who asks waits
            return answer
        self._answers[self._num_calls] = answer
        self._writer.write(data)
        return answer

    def tell(self, message: Message) -> None:
        """Sends what has no answer."""
        if not (self.is_gone or self._writer.is_closing()):
            self._writer.write(frame(0, message))

    def drop(self) -> None:
        """Closes the connection as if the other end had."""
        self._task.cancel()
        self._end()

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._end()

    def abort(self) -> None:
        """After `close`: gives up what the process has not read, for which the connection would stay open."""
        self._writer.transport.abort()

    async def _receive(self) -> None:
        try:
            while True:
                call_id, message = await receive_from(self._reader)
                answer = self._answers.pop(call_id, None)
                if answer is None:
                    self._on_message(message)
                elif not answer.done():
                    answer.set_result(message)
        except (EOFError, WireError):
            # A process that sends what is no message is as good as gone: nothing it says can be relied on.
            self._end()

    def _end(self) -> None:
        if self.is_gone:
            return
        self.is_gone = True
        self._writer.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(PeerGone("the connection closed before the answer came"))
                answer.exception()  # whoever asked may have stopped waiting
        self._answers.clear()
        self._on_gone()
