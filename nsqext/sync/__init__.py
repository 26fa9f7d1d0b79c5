"""Producer and consumer for blocking code, with the names and parameters of the asynchronous ones.

The asynchronous clients do the work, in one event loop in a thread of its own, which all objects of this module share;
it runs while one of them is open. Every object may be used from any number of threads.

Errors are those of the asynchronous methods of the same names; besides, every method raises `InvalidState` where its
object is not open, or where it is called in the thread of the event loop. A call that waits cannot be cancelled
from another thread; an exception in the waiting thread, such as KeyboardInterrupt, cancels it.
"""

from __future__ import annotations

from nsqext.sync.admin import Admin
from nsqext.sync.consumer import Consumer
from nsqext.sync.message import Message, MessageBatch
from nsqext.sync.producer import Batcher, Producer

__all__ = ("Admin", "Batcher", "Consumer", "Message", "MessageBatch", "Producer")
