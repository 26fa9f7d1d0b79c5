"""Producer, consumer and admin client for blocking code, with the names and parameters of the asynchronous ones.

They call the asynchronous clients in one event loop, which all objects of this module share; its thread runs while one
of them is open. All objects are thread-safe.

Methods raise the errors of the asynchronous methods of the same names, and `InvalidState` if the object is not open or
if they are called in the thread of the event loop. A blocked call cannot be cancelled from another thread; an exception
in its own thread, such as KeyboardInterrupt, cancels it.
"""

from __future__ import annotations

from nsqext.sync.admin import Admin
from nsqext.sync.consumer import Consumer
from nsqext.sync.message import Message, MessageBatch
from nsqext.sync.producer import Batcher, Producer

__all__ = ("Admin", "Batcher", "Consumer", "Message", "MessageBatch", "Producer")
