"""Mistakes in outbox, relay, inbox and positions."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "the rows of a failed batch are deleted",
        "transactions/relay.py",
        "                if not isinstance(outcome, NsqError)\n",
        "                if outcome is not None\n",
    ),
    Mistake(
        "stored messages of a failed batch stay in the outbox",
        "transactions/relay.py",
        "        await self._delete(stored)\n        if failure is None:\n            return True\n",
        "        if failure is None:\n            await self._delete(stored)\n            return True\n",
    ),
    Mistake(
        "the lease ignores the timeout of a publish",
        "transactions/relay.py",
        "        lease = lease_time(timeout)\n",
        "        lease = lease_time(0.0)\n",
    ),
    Mistake(
        "the lease is not renewed while messages are published",
        "transactions/relay.py",
        "                tasks.start_soon(self._renew, shards, lease, leased, errors)\n",
        "",
    ),
    Mistake(
        "the lease is renewed when it has ended",
        "transactions/relay.py",
        "        pause = lease / 3\n        while True:\n",
        "        pause = lease\n        while True:\n",
    ),
    Mistake(
        "publishes continue when a part of the lease is lost",
        "transactions/relay.py",
        "                    leased.cancel()\n                leased.deadline",
        "                    pass\n                leased.deadline",
    ),
    Mistake(
        "publishes continue until their lease has ended",
        "transactions/relay.py",
        "                leased.deadline = began + lease - _MARGIN\n",
        "                leased.deadline = began + 2 * lease\n",
    ),
    Mistake(
        "a renewal does not extend the deadline of publishes",
        "transactions/relay.py",
        "                leased.deadline = began + lease - _MARGIN\n",
        "",
    ),
    Mistake(
        "a deadline of publishes is longer than the lease",
        "transactions/relay.py",
        "        with anyio.CancelScope(deadline=began + lease - _MARGIN) as leased:",
        "        with anyio.CancelScope() as leased:",
    ),
    Mistake(
        "an error of a final kind in a renewal is dropped",
        "transactions/relay.py",
        "                if outage_of(error) is None:\n"
        "                    errors.append(error)\n"
        "                    leased.cancel()\n",
        "",
    ),
    Mistake(
        "a relay ends at an outage",
        "transactions/relay.py",
        "                if outage_of(error) is None:\n"
        "                    raise\n"
        '                logger.warning("the database of',
        "                if not isinstance(error, OSError):\n"
        "                    raise\n"
        '                logger.warning("the database of',
    ),
    Mistake(
        "a relay tries again after a final error",
        "transactions/relay.py",
        "                if outage_of(error) is None:\n"
        "                    raise\n"
        '                logger.warning("the database of',
        '                logger.warning("the database of',
    ),
    Mistake(
        "a cancelled relay keeps its leases",
        "transactions/relay.py",
        "            self._store.leave(self._owner)\n",
        "",
    ),
    Mistake(
        "the leases of a cancelled relay are not returned",
        "transactions/relay.py",
        "            with anyio.CancelScope(shield=True):\n"
        "                await to_thread.run_sync(self._leave, listener)\n",
        "            await to_thread.run_sync(self._leave, listener)\n",
    ),
    Mistake(
        "the deletion of published rows is cancelled",
        "transactions/relay.py",
        "            with anyio.CancelScope(shield=True):\n"
        "                await to_thread.run_sync(self._store.delete, stored)\n",
        "            await to_thread.run_sync(self._store.delete, stored)\n",
    ),
    Mistake(
        "a relay that leaves ends with the error of its database",
        "transactions/relay.py",
        "            self._store.leave(self._owner)\n"
        "        except Exception as error:\n"
        "            if outage_of(error) is None:\n"
        "                raise\n",
        "            self._store.leave(self._owner)\n        except OSError:\n            pass\n",
    ),
    Mistake(
        "topics are published one after the other",
        "transactions/relay.py",
        "                        publishes.start_soon(self._publish, producer, topic, listed, until, "
        "timeout, errors)\n",
        "                        await self._publish(producer, topic, listed, until, timeout, errors)\n",
    ),
    Mistake(
        "a resting topic is read again at once",
        "transactions/relay.py",
        "self._store.rows, shards, self._resting, self._batch",
        "self._store.rows, shards, (), self._batch",
    ),
    Mistake(
        "a topic rests for ever",
        "transactions/relay.py",
        "{topic: again for topic, again in self._resting.items() if again > began}",
        "dict(self._resting)",
    ),
    Mistake(
        "a message that is refused holds up its topic",
        "transactions/relay.py",
        "            await self._refuse(rows[0], failure)\n            return True\n",
        "            await self._refuse(rows[0], failure)\n"
        "            self._rest(topic, failure, 1)\n"
        "            return False\n",
    ),
    Mistake(
        "a batch with a refused message is set aside as a whole",
        "transactions/relay.py",
        "            if len(rows) > 1:\n"
        "                self._alone.add(topic)\n"
        "                return False\n"
        "            await self._refuse(rows[0], failure)\n"
        "            return True\n",
        "            for row in rows:\n                await self._refuse(row, failure)\n            return True\n",
    ),
    Mistake(
        "messages are published one by one for ever",
        "transactions/relay.py",
        "        self._alone.discard(topic)\n",
        "",
    ),
    Mistake(
        "headers that a topic never stores are tried again",
        "transactions/relay.py",
        "        return any(row.headers or row.tag for row in rows)\n",
        "        return False\n",
    ),
    Mistake(
        "an identity that the topic does not store any more sets messages aside",
        "transactions/relay.py",
        "        return any(row.headers or row.tag for row in rows)\n",
        "        return True\n",
    ),
    Mistake(
        "a tag that a topic never stores is tried again",
        "transactions/relay.py",
        "any(row.headers or row.tag for row in rows)",
        "any(row.headers for row in rows)",
    ),
    Mistake(
        "of a batch, the first message alone is judged",
        "transactions/relay.py",
        "any(row.headers or row.tag for row in rows)",
        "any(row.headers or row.tag for row in rows[:1])",
    ),
    Mistake(
        "the reason is that of the first refused message",
        "transactions/store.py",
        "WHERE error IS NOT NULL ORDER BY sequence DESC LIMIT 1",
        "WHERE error IS NOT NULL ORDER BY sequence LIMIT 1",
    ),
    Mistake(
        "a batch that takes too long does not get smaller",
        "transactions/relay.py",
        "            self._size = min(size, self._size) // 2\n",
        "            pass\n",
    ),
    Mistake(
        "a batch does not grow on a fast link",
        "transactions/relay.py",
        "            self._size = min(MOST_BYTES, max(2 * self._size, size))\n",
        "            pass\n",
    ),
    Mistake(
        "the size of a batch grows after a failure",
        "transactions/relay.py",
        "elif not failed and seconds",
        "elif seconds",
    ),
    Mistake(
        "a slow batch counts as a failed topic",
        "transactions/relay.py",
        "if slow and len(rows) > 1:",
        "if False:",
    ),
    Mistake(
        "rows of a read are published for longer than the timeout",
        "transactions/relay.py",
        "while left and anyio.current_time() < until:",
        "while left:",
    ),
    Mistake(
        "the identity is not sent",
        "transactions/relay.py",
        "{**trace_context, **headers, IDENTITY_HEADER: row.identity}",
        "{**trace_context, **headers}",
    ),
    Mistake(
        "a header of the program gives way to the trace context",
        "transactions/relay.py",
        "{**trace_context, **headers, IDENTITY_HEADER",
        "{**headers, **trace_context, IDENTITY_HEADER",
    ),
    Mistake(
        "headers are sent to topics without extend support",
        "transactions/relay.py",
        "    if extend:\n",
        "    if row.trace_context:\n",
    ),
    Mistake(
        "the key of a message is dropped",
        "transactions/relay.py",
        "None if row.key is None else bytes(row.key)",
        "None",
    ),
    Mistake(
        "the tag of a message is dropped",
        "transactions/relay.py",
        "row.tag, None, None if",
        "None, None, None if",
    ),
    Mistake(
        "messages of a relay belong to the span that started it",
        "transactions/relay.py",
        "            with without_active_span():\n"
        "                await self._publish_all(producer, listener, timeout)\n",
        "            await self._publish_all(producer, listener, timeout)\n",
    ),
    Mistake(
        "a call behind a lost connection has no BEGIN",
        "transactions/store.py",
        "            self._connection = self.connect()\n            self._connection.execute(begin)\n",
        "            self._connection = self.connect()\n",
    ),
    Mistake(
        "a connection that the database ended is kept",
        "transactions/store.py",
        "            self._connection.close()\n"
        "            self._connection = self.connect()\n"
        "            self._connection.execute(begin)\n",
        "            raise\n",
    ),
    Mistake(
        "a connection to a server that only reads is kept",
        "transactions/store.py",
        '        if getattr(error, "sqlstate", None) == _READ_ONLY:\n            self._connection.close()\n',
        "",
    ),
    Mistake(
        "a rollback after a full disk raises",
        "transactions/store.py",
        "            if self._connection.in_transaction:  # a full disk has rolled back already\n"
        '                self._connection.execute("ROLLBACK")\n',
        '            self._connection.execute("ROLLBACK")\n',
    ),
    Mistake(
        "leases are measured by the clock of the host",
        "transactions/store.py",
        "            ((now,),) = self._run(f\"SELECT {DIALECTS[self.dialect]['now']}\", {})\n",
        "            import time\n\n            now = time.time()\n",
    ),
    Mistake(
        "relays that ended are counted for ever",
        "transactions/store.py",
        '            self._run("DELETE FROM nsqext_outbox_relay WHERE until < :now", values)\n',
        "",
    ),
    Mistake(
        "a relay that leases again keeps its old time",
        "transactions/store.py",
        "DO UPDATE SET until = excluded.until, publishing",
        "DO UPDATE SET publishing",
    ),
    Mistake(
        "a relay leases what others have leased",
        "transactions/store.py",
        "FROM nsqext_outbox_shard WHERE until < :now ORDER",
        "FROM nsqext_outbox_shard WHERE owner <> '' OR until < :now ORDER",
    ),
    Mistake(
        "a relay takes more than its share",
        "transactions/store.py",
        '"count": max(0, share - own)',
        '"count": share',
    ),
    Mistake(
        "the shares of relays leave parts without a relay",
        "transactions/store.py",
        "ceil(SHARDS / relays)",
        "SHARDS // relays",
    ),
    Mistake(
        "a relay gives nothing away",
        "transactions/store.py",
        '"count": max(0, own - share)',
        '"count": 0',
    ),
    Mistake(
        "a lease renews the parts of all relays",
        "transactions/store.py",
        'self._run("UPDATE nsqext_outbox_shard SET until = :until WHERE owner = :owner", values)',
        "self._run(\"UPDATE nsqext_outbox_shard SET until = :until WHERE owner <> ''\", values)",
    ),
    Mistake(
        "a leased part is not extended",
        "transactions/store.py",
        'self._run("UPDATE nsqext_outbox_shard SET until = :until WHERE owner = :owner", values)',
        "pass",
    ),
    Mistake(
        "a renewal forgets the relay",
        "transactions/store.py",
        "UPDATE nsqext_outbox_relay SET until = :until WHERE owner = :owner RETURNING",
        "UPDATE nsqext_outbox_relay SET until = until WHERE owner = :owner RETURNING",
    ),
    Mistake(
        "a renewal does not report a lost part",
        "transactions/store.py",
        "return bool(known) and {*shards} <= {shard for (shard,) in held}",
        "return bool(known and held)",
    ),
    Mistake(
        "a renewal compares the wrong way",
        "transactions/store.py",
        "{*shards} <= {shard",
        "{*shards} >= {shard",
    ),
    Mistake(
        "a relay that leaves is counted",
        "transactions/store.py",
        '            self._run("DELETE FROM nsqext_outbox_relay WHERE owner = :owner", {"owner": owner})\n',
        "",
    ),
    Mistake(
        "a relay that leaves returns the parts of all",
        "transactions/store.py",
        'SET owner = \'\', until = 0 WHERE owner = :owner", {"owner": owner}',
        'SET owner = \'\', until = 0", {"owner": owner}',
    ),
    Mistake(
        "rows are read in the order of the clock",
        "transactions/store.py",
        "AND sequence <= :last ORDER BY sequence LIMIT",
        "AND sequence <= :last ORDER BY added, sequence LIMIT",
    ),
    Mistake(
        "sizes are read in the order of the clock",
        "transactions/store.py",
        "SELECT sequence, length(body) {chosen} ORDER BY sequence",
        "SELECT sequence, length(body) {chosen} ORDER BY added, sequence",
    ),
    Mistake(
        "rows that were set aside are read",
        "transactions/store.py",
        "FROM nsqext_outbox WHERE error IS NULL AND shard IN",
        "FROM nsqext_outbox WHERE shard IN",
    ),
    Mistake(
        "rows of other relays are read",
        "transactions/store.py",
        "AND shard IN {_listed(parts)}{others}",
        "AND (1 = 1 OR shard IN {_listed(parts)}){others}",
    ),
    Mistake(
        "a read is not bound by bytes",
        "transactions/store.py",
        "if last is not None and total > limit:",
        "if False:",
    ),
    Mistake(
        "a body beyond the bound of a read is never read",
        "transactions/store.py",
        "if last is not None and total > limit:",
        "if total > limit:",
    ),
    Mistake(
        "the columns key and tag are swapped",
        "transactions/store.py",
        '"sequence, identity, topic, key, tag, headers',
        '"sequence, identity, topic, tag, key, headers',
    ),
    Mistake(
        "only the first 500 rows are deleted",
        "transactions/store.py",
        "for first in range(0, len(sequences), 500):",
        "for first in range(0, min(1, len(sequences)), 500):",
    ),
    Mistake(
        "a refused message loses its reason",
        "transactions/store.py",
        "SET error = :error WHERE sequence = :sequence",
        "SET error = '' WHERE sequence = :sequence",
    ),
    Mistake(
        "a cancellation is too late for no message",
        "transactions/store.py",
        "return Cancellation.TOO_LATE if sequence in publishing else Cancellation.CANCELLED",
        "return Cancellation.CANCELLED",
    ),
    Mistake(
        "a cancellation does not wait for a read",
        "transactions/store.py",
        '            self._lock_shards({"s0": shard})\n',
        "",
    ),
    Mistake(
        "a read does not wait for a cancellation",
        "transactions/store.py",
        "            if owner is not None:\n                self._lock_shards(parts)\n",
        "",
    ),
    Mistake(
        "a message that is too late is published again after a failure",
        "transactions/store.py",
        '"DELETE FROM nsqext_outbox WHERE sequence = :n RETURNING sequence"',
        '"SELECT sequence FROM nsqext_outbox WHERE sequence = :n"',
    ),
    Mistake(
        "what a relay has published stays marked",
        "transactions/store.py",
        ", publishing = excluded.publishing",
        "",
    ),
    Mistake(
        "a relay that was killed publishes for ever",
        "transactions/store.py",
        "SELECT publishing FROM nsqext_outbox_relay WHERE until >= {clock}",
        "SELECT publishing FROM nsqext_outbox_relay WHERE {clock} > 0",
    ),
    Mistake(
        "a relay without a lease publishes",
        "transactions/store.py",
        'if not self._run(_PUBLISHING, {"publishing": publishing, "owner": owner}):',
        'if self._run(_PUBLISHING, {"publishing": publishing, "owner": owner}) is None:',
    ),
    Mistake(
        "messages of all topics are cancelled",
        "transactions/store.py",
        'f"{chosen} AND topic = :topic", {',
        "chosen, {",
    ),
    Mistake(
        "a relay does not say what it publishes",
        "transactions/relay.py",
        "self._batch, MOST_BYTES, self._owner)",
        "self._batch, MOST_BYTES)",
    ),
    Mistake(
        "all messages are refused with the first",
        "transactions/store.py",
        "SET error = :error WHERE sequence = :sequence",
        "SET error = :error WHERE sequence <= :sequence",
    ),
    Mistake(
        "the oldest message is the newest",
        "transactions/store.py",
        "min(added) FROM nsqext_outbox WHERE error IS NULL",
        "max(added) FROM nsqext_outbox WHERE error IS NULL",
    ),
    Mistake(
        "the summary counts relays that ended",
        "transactions/store.py",
        "SELECT count(*) FROM nsqext_outbox_relay WHERE until >= {clock}",
        "SELECT count(*) FROM nsqext_outbox_relay WHERE {clock} > 0",
    ),
    Mistake(
        "waiting messages are discarded with the refused",
        "transactions/store.py",
        "WHERE error IS NOT NULL AND added < :before",
        "WHERE added < :before",
    ),
    Mistake(
        "a discard deletes the younger messages",
        "transactions/store.py",
        "AND added < :before RETURNING",
        "AND added > :before RETURNING",
    ),
    Mistake(
        "a listener does not listen",
        "transactions/listener.py",
        '                self._connection.execute(f"LISTEN {CHANNEL}")\n',
        '                self._connection.execute("SELECT 1")\n',
    ),
    Mistake(
        "a listener keeps its lost connection",
        "transactions/listener.py",
        "            for _ in self._connection.notifies(timeout=timeout, stop_after=1):\n"
        "                pass\n"
        "        except Exception:\n"
        "            self.close()\n"
        "            raise\n",
        "            for _ in self._connection.notifies(timeout=timeout, stop_after=1):\n"
        "                pass\n"
        "        except Exception:\n"
        "            raise\n",
    ),
    Mistake(
        "an outbox does not notify",
        "transactions/outbox.py",
        "RETURNING 1) SELECT pg_notify('{CHANNEL}', '') FROM added",
        "RETURNING 1) SELECT 1 FROM added",
    ),
    Mistake(
        "an outbox notifies another channel",
        "transactions/outbox.py",
        "pg_notify('{CHANNEL}', '')",
        "pg_notify('{CHANNEL}_', '')",
    ),
    Mistake(
        "connections of psycopg do not notify",
        "transactions/outbox.py",
        "_INSERT_AND_NOTIFY if is_postgresql(connection) else _INSERT",
        "_INSERT_AND_NOTIFY if is_postgresql(connection) and hasattr(connection, 'get_bind') else _INSERT",
    ),
    Mistake(
        "keys are spread without their topic",
        "transactions/outbox.py",
        'crc32(topic.encode() + b"\\0" + (identity.encode() if data is None else data))',
        "crc32(os.urandom(4))",
    ),
    Mistake(
        "keys of a topic share a part",
        "transactions/outbox.py",
        'crc32(topic.encode() + b"\\0" + (identity.encode() if data is None else data))',
        "crc32(topic.encode())",
    ),
    Mistake(
        "the parts of keys depend on the identity",
        "transactions/outbox.py",
        "(identity.encode() if data is None else data)",
        "identity.encode()",
    ),
    Mistake(
        "a given identity is replaced",
        "transactions/outbox.py",
        "os.urandom(16).hex() if identity is None else check_identity(identity)",
        "os.urandom(16).hex()",
    ),
    Mistake(
        "an identity is not checked",
        "transactions/outbox.py",
        "else check_identity(identity)",
        "else identity",
    ),
    Mistake(
        "an empty body is added",
        "transactions/outbox.py",
        "    if not value:\n        raise InvalidBody",
        "    if value is None:\n        raise InvalidBody",
    ),
    Mistake(
        "a header nsqext_id of the program is sent",
        "transactions/outbox.py",
        "if headers and IDENTITY_HEADER in headers:",
        "if False:",
    ),
    Mistake(
        "headers that cannot be sent are added",
        "transactions/outbox.py",
        "    _check_headers(headers, identity, tag, data)\n    trace",
        "    trace",
    ),
    Mistake(
        "a key that cannot be sent is added",
        "transactions/outbox.py",
        "    if key is not None:\n        add_key(header, key)\n",
        "",
    ),
    Mistake(
        "a message is refused for its trace",
        "transactions/outbox.py",
        "        except InvalidHeader:  # a message is not lost for its trace\n            trace_context = {}\n",
        "        except InvalidHeader:\n            raise\n",
    ),
    Mistake(
        "an asynchronous connection adds nothing without an error",
        "transactions/outbox.py",
        "        if is_asynchronous(connection):\n",
        "        if not connection:\n",
    ),
    Mistake(
        "a blocking connection is awaited",
        "transactions/outbox.py",
        "        if not is_asynchronous(connection):\n",
        "        if not connection:\n",
    ),
    Mistake(
        "an inbox does not check its identities",
        "transactions/inbox.py",
        "return (_REMOVE, values) if await opened.begin(_INSERT, values) else None",
        "await opened.begin(_INSERT, values)\n        return _REMOVE, values",
    ),
    Mistake(
        "channels share their identities",
        "transactions/inbox.py",
        'values = {"channel": channel, "identity"',
        'values = {"channel": "", "identity"',
    ),
    Mistake(
        "topics share their identities",
        "transactions/inbox.py",
        'f"{message.topic}/{message.id',
        'f"/{message.id',
    ),
    Mistake(
        "an identity of the body is ignored",
        "transactions/inbox.py",
        "given = None if self._identity is None else self._identity(message)",
        "given = None",
    ),
    Mistake(
        "the header goes before the identity of the body",
        "transactions/inbox.py",
        "        given = None if self._identity is None else self._identity(message)\n"
        "        if given is None:\n"
        "            given = message.header_value(IDENTITY_HEADER)\n",
        "        given = message.header_value(IDENTITY_HEADER)\n"
        "        if given is None and self._identity is not None:\n"
        "            given = self._identity(message)\n",
    ),
    Mistake(
        "a place in the log goes before an identity",
        "transactions/inbox.py",
        "if given is None and message.offset >= 0:",
        "if message.offset >= 0:",
    ),
    Mistake(
        "identities are stored as they are",
        "transactions/inbox.py",
        "if len(identity) <= MAX_IDENTITY and is_storable(identity) and",
        "if not",
    ),
    Mistake(
        "long identities are stored as they are",
        "transactions/inbox.py",
        "len(identity) <= MAX_IDENTITY and is_storable",
        "is_storable",
    ),
    Mistake(
        "an identity may be taken for a digest",
        "transactions/inbox.py",
        " and not identity.startswith(_DIGEST)",
        "",
    ),
    Mistake(
        "a lone surrogate has no digest",
        "transactions/inbox.py",
        'identity.encode("utf-8", "surrogatepass")',
        "identity.encode()",
    ),
    Mistake(
        "identities are forgotten too early",
        "transactions/inbox.py",
        '{"before": now - self._keep}',
        '{"before": now}',
    ),
    Mistake(
        "identities are never forgotten",
        "transactions/inbox.py",
        "if now - self._forgotten > _FORGET_EVERY:",
        "if self._forgotten > now:",
    ),
    Mistake(
        "ranges are never forgotten",
        "transactions/inbox.py",
        "            await self._ranges.forget(opened.connection, now - self._keep)\n",
        "",
    ),
    Mistake(
        "ranges are never merged",
        "transactions/inbox.py",
        "                await self._merge(key)\n",
        "",
    ),
    Mistake(
        "an error of a merge is that of the message",
        "transactions/inbox.py",
        "        except Exception as error:  # the message that was handled is committed\n",
        "        except OSError as error:\n",
    ),
    Mistake(
        "ranges that touch are not joined",
        "transactions/handled_ranges.py",
        "elif last is not None and part.first == last.next and",
        "elif last is not None and part.first < last.next and",
    ),
    Mistake(
        "ranges with a gap are joined",
        "transactions/handled_ranges.py",
        "elif last is not None and part.first == last.next and",
        "elif last is not None and part.first >= last.next and",
    ),
    Mistake(
        "ranges of two logs are joined",
        "transactions/handled_ranges.py",
        " and _are_of_one_log(last, part, now)",
        "",
    ),
    Mistake(
        "a joined range has the time of its first message",
        "transactions/handled_ranges.py",
        "max(last.stored, part.stored), max(",
        "last.stored, max(",
    ),
    Mistake(
        "a newer message counts as handled",
        "transactions/handled_ranges.py",
        "        if newest >= message.timestamp:\n            return None\n",
        "        if newest is not None:\n            return None\n",
    ),
    Mistake(
        "a message of a covered range is handled again",
        "transactions/handled_ranges.py",
        "        if newest >= message.timestamp:\n            return None\n",
        "",
    ),
    Mistake(
        "ranges of an older log are kept",
        "transactions/handled_ranges.py",
        "        await execute(opened.connection, _REPLACED, values)\n",
        "",
    ),
    Mistake(
        "ranges of all partitions are merged",
        "transactions/handled_ranges.py",
        "DELETE FROM nsqext_inbox_range WHERE {OF_PARTITION} RETURNING",
        "DELETE FROM nsqext_inbox_range WHERE topic = :topic RETURNING",
    ),
    Mistake(
        "a range ends at its first byte",
        "transactions/handled_ranges.py",
        '"next": message.offset + message.size,',
        '"next": message.offset + 1,',
    ),
    Mistake(
        "the end of a range belongs to it",
        "transactions/handled_ranges.py",
        "next > :first AND first <= :first AND NOT",
        "next >= :first AND first <= :first AND NOT",
    ),
    Mistake(
        "two processes merge at once",
        "transactions/handled_ranges.py",
        "            if not free:\n                return\n",
        "",
    ),
    Mistake(
        "repeatable read is accepted",
        "transactions/handled_ranges.py",
        'if level == "repeatable read":',
        'if level == "repeatable":',
    ),
    Mistake(
        "the commit of a blocking session is cancelled",
        "transactions/handler_transaction.py",
        "        with CancelScope(shield=True):\n"
        "            await to_thread.run_sync(manager.__exit__, None, None, None)\n",
        "        await to_thread.run_sync(manager.__exit__, None, None, None)\n",
    ),
    Mistake(
        "the rollback of a blocking session is cancelled",
        "transactions/handler_transaction.py",
        "            with CancelScope(shield=True):\n"
        "                await to_thread.run_sync(manager.__exit__, type(error), error, error.__traceback__)\n",
        "            await to_thread.run_sync(manager.__exit__, type(error), error, error.__traceback__)\n",
    ),
    Mistake(
        "a cancelled blocking handler is committed",
        "transactions/handler_transaction.py",
        "        except BaseException as error:\n"
        "            with CancelScope(shield=True):\n"
        "                await to_thread",
        "        except Exception as error:\n"
        "            with CancelScope(shield=True):\n"
        "                await to_thread",
    ),
    Mistake(
        "the signal that a message is done rolls back",
        "transactions/handler_transaction.py",
        "            except Finish as signal:  # the message is done: commit\n                finish = signal\n",
        "            except Finish:\n                raise\n",
    ),
    Mistake(
        "the signal that a message is done is dropped",
        "transactions/handler_transaction.py",
        "        if finish is not None:\n            raise finish\n",
        "",
    ),
    Mistake(
        "a handler that ended its transaction is finished",
        "transactions/handler_transaction.py",
        "            if end is not End.OPEN:\n"
        "                undo.append(removal)\n"
        "                raise end_error(end, handling.message.topic)\n",
        "",
    ),
    Mistake(
        "a failed transaction is finished",
        "transactions/handler_transaction.py",
        "            if end is not End.OPEN:\n                undo.append(removal)\n                raise end_error",
        "            if end is End.ENDED:\n                undo.append(removal)\n                raise end_error",
    ),
    Mistake(
        "an identity that was committed alone stays after an error",
        "transactions/handler_transaction.py",
        "                if end is not End.OPEN:\n                    undo.append(removal)\n                if end",
        "                if end",
    ),
    Mistake(
        "an identity that was committed alone stays",
        "transactions/handler_transaction.py",
        "            if undo:\n                await self._undo(undo[0])\n",
        "            pass\n",
    ),
    Mistake(
        "an identity that is committed at once stays",
        "transactions/handler_transaction.py",
        "            undo.append(removal)\n            await opened.guard()\n            undo.clear()\n",
        "            await opened.guard()\n",
    ),
    Mistake(
        "the removal of an identity is cancelled",
        "transactions/handler_transaction.py",
        "            with CancelScope(shield=True):\n"
        "                async with self._transaction() as session:\n"
        "                    await execute(session, *removal)\n",
        "            async with self._transaction() as session:\n                await execute(session, *removal)\n",
    ),
    Mistake(
        "batches are accepted",
        "transactions/handler_transaction.py",
        "        if handling.batch:\n",
        "        if handling.batch and not handling.messages:\n",
    ),
    Mistake(
        "begin is not checked before the first message",
        "transactions/handler_transaction.py",
        "        if not self._checked:\n            await self.check()\n        undo",
        "        undo",
    ),
    Mistake(
        "a handler has the session of the last message",
        "transactions/handler_transaction.py",
        "                self._session.reset(token)\n",
        "                pass\n",
    ),
    Mistake(
        "a probe stays behind",
        "transactions/handler_transaction.py",
        "            committed = await self._remove_probe(session, name)\n        if",
        "            committed = True\n        if",
    ),
    Mistake(
        "autocommit is not found by the check",
        "transactions/handler_transaction.py",
        "        if stayed:\n            raise autocommit_error()\n",
        "",
    ),
    Mistake(
        "a start fails without its database",
        "transactions/handler_transaction.py",
        '        except Exception as error:\n            logger.warning("%s cannot check',
        '        except OSError as error:\n            logger.warning("%s cannot check',
    ),
    Mistake(
        "a wrong setting is a warning at the start",
        "transactions/handler_transaction.py",
        "        except (InvalidInput, InvalidSetting):\n            raise\n",
        "",
    ),
    Mistake(
        "a savepoint of a longer transaction is accepted",
        "transactions/boundaries.py",
        "    if found.in_nested_transaction() or (",
        "    if (",
    ),
    Mistake(
        "a connection that has begun is accepted",
        "transactions/boundaries.py",
        ' or (hasattr(bind, "in_transaction") and bind.in_transaction())',
        "",
    ),
    Mistake(
        "autocommit is not noticed",
        "transactions/boundaries.py",
        "        if _is_idle(self._driver):\n            raise autocommit_error()\n",
        "",
    ),
    Mistake(
        "another transaction of SQLAlchemy is not noticed",
        "transactions/boundaries.py",
        "            if _blocking(self.connection).get_transaction() is not self._mark:\n"
        "                return End.ENDED\n",
        "",
    ),
    Mistake(
        "a failed statement is not noticed",
        "transactions/boundaries.py",
        "        if _status(self._driver) == _IN_ERROR:\n            return End.FAILED\n",
        "",
    ),
    Mistake(
        "a failed flush is not noticed",
        "transactions/boundaries.py",
        "            if not self._mark.is_active:  # a flush has failed\n                return End.FAILED\n",
        "",
    ),
    Mistake(
        "another transaction of psycopg is not noticed",
        "transactions/boundaries.py",
        "return End.OPEN if await self._is_marked() else End.ENDED",
        "return End.OPEN",
    ),
    Mistake(
        "another transaction of SQLite is not noticed",
        "transactions/boundaries.py",
        "                raise\n            return End.ENDED\n        return End.OPEN",
        "                raise\n        return End.OPEN",
    ),
    Mistake(
        "a session stays guarded",
        "transactions/boundaries.py",
        "            _blocking(self.connection).info.pop(_GUARDED, None)\n",
        "            pass\n",
    ),
    Mistake(
        "a second database is accepted",
        "transactions/boundaries.py",
        "    if own is None or transaction.nested or (",
        "    if own is None or transaction is own or transaction.nested or (",
    ),
    Mistake(
        "a savepoint of a handler is refused",
        "transactions/boundaries.py",
        "if own is None or transaction.nested or",
        "if own is None or",
    ),
    Mistake(
        "two-phase commits are refused",
        "transactions/boundaries.py",
        " or (session.twophase and transaction is own)",
        "",
    ),
    Mistake(
        "scoped sessions are accepted",
        "transactions/boundaries.py",
        '    if hasattr(connection, "registry") and not hasattr(connection, "run_sync"):\n',
        "    if False:\n",
    ),
    Mistake(
        "the mark is the flag that the session has",
        "transactions/boundaries.py",
        '"off" if self._driver.pgconn.parameter_status(_FLAG.encode()) == b"on" else "on"',
        '"on" if self._driver.pgconn.parameter_status(_FLAG.encode()) == b"on" else "off"',
    ),
    Mistake(
        "the isolation level of a connection is dropped",
        "transactions/round_trip.py",
        "    if driver.isolation_level is not None:\n",
        "    if False:\n",
    ),
    Mistake(
        "BEGIN is sent in a transaction",
        "transactions/round_trip.py",
        '"" if driver.autocommit or driver.pgconn.transaction_status != _IDLE else',
        '"" if driver.autocommit else',
    ),
    Mistake(
        "BEGIN is sent on connections that commit each statement",
        "transactions/round_trip.py",
        "driver.autocommit or driver.pgconn.transaction_status",
        "driver.pgconn.transaction_status",
    ),
    Mistake(
        "the error of a statement behind the first is hidden",
        "transactions/round_trip.py",
        "    for result in results:\n",
        "    for result in results[:1]:\n",
    ),
    Mistake(
        "a position advances from anywhere",
        "transactions/positions.py",
        "WHERE {OF_PARTITION} AND next = :last\n",
        "WHERE {OF_PARTITION}\n",
    ),
    Mistake(
        "last and next of a position are swapped",
        "transactions/positions.py",
        "SET last = :last, next = :next, identity",
        "SET last = :next, next = :last, identity",
    ),
    Mistake(
        "a position that was committed alone stays",
        "transactions/positions.py",
        "SET next = last WHERE {OF_PARTITION} AND last = :last AND identity = :identity",
        "SET next = next WHERE {OF_PARTITION} AND last = :last AND identity = :identity",
    ),
    Mistake(
        "a log that ends before the position is not noticed",
        "transactions/positions.py",
        '        if log.end < row.next:\n            raise _replaced(key, row, f"it ends at byte {log.end}")\n',
        "",
    ),
    Mistake(
        "messages that were removed are skipped",
        "transactions/positions.py",
        "        if log.begin > row.next:\n            raise",
        "        if log.begin > log.end:\n            raise",
    ),
    Mistake(
        "a partition is read from behind the last message",
        "transactions/positions.py",
        "return Position.offset(max(log.begin, row.last))",
        "return Position.offset(row.next)",
    ),
    Mistake(
        "the first message after a move is not checked",
        "transactions/positions.py",
        "        if log.begin <= row.last:\n            self._sought[key] = row\n",
        "",
    ),
    Mistake(
        "a database that does not respond at the start ends the consumer",
        "transactions/positions.py",
        '            raise PartitionUnavailable(\n                f"its position',
        '            raise InvalidSetting(\n                f"its position',
    ),
    Mistake(
        "forget keeps what was lost",
        "transactions/positions.py",
        "            del self._lost[key]\n",
        "            pass\n",
    ),
    Mistake(
        "forget takes all channels",
        "transactions/positions.py",
        "DELETE FROM nsqext_position WHERE topic = :topic AND channel = :channel",
        "DELETE FROM nsqext_position WHERE topic = :topic OR channel = :channel",
    ),
    Mistake(
        "a message after a gap is handled",
        "transactions/positions.py",
        "        if message.offset > row.last:  # the channel was moved: it has to be moved back\n"
        "            raise _again(",
        "        if message.offset < 0:\n            raise _again(",
    ),
    Mistake(
        "a message of a new log is taken for a handled one",
        "transactions/positions.py",
        "        if not known or (message.offset == row.last and message.id.hex() != row.identity):\n",
        "        if False:\n",
    ),
    Mistake(
        "a new message at the last place is taken for the handled one",
        "transactions/positions.py",
        " or (message.offset == row.last and message.id.hex() != row.identity)",
        "",
    ),
    Mistake(
        "consumers without order are accepted",
        "transactions/positions.py",
        "        if not message.in_order:\n            raise",
        "        if message.offset < 0:\n            raise",
    ),
    Mistake(
        "settings that leave messages out are accepted",
        "transactions/positions.py",
        "            if settings[name] not in allowed:\n",
        "            if settings[name] is Ellipsis:\n",
    ),
    Mistake(
        "positions without start are accepted",
        "transactions/positions.py",
        '        if settings["start"] is not self:\n',
        '        if settings["start"] is None and False:\n',
    ),
    Mistake(
        "a server that only reads is final",
        "transactions/outages.py",
        '    "25006": "the server only reads, as after a failover",\n',
        "",
    ),
    Mistake(
        "too many connections are final",
        "transactions/outages.py",
        '    "53": "the disk, memory, locks or connections are used up",\n',
        "",
    ),
    Mistake(
        "an operator that ends a backend is final",
        "transactions/outages.py",
        '    "57": "an operator or a timeout has ended the statement or the server",\n',
        "",
    ),
    Mistake(
        "errors of an address are outages",
        "transactions/outages.py",
        "if state.startswith(begin)",
        "if state",
    ),
    Mistake(
        "a lost connection is final",
        "transactions/outages.py",
        'return POSTGRESQL["08"] if isinstance(error, psycopg.OperationalError) else None',
        "return None",
    ),
    Mistake(
        "every error of psycopg without a code is an outage",
        "transactions/outages.py",
        'return POSTGRESQL["08"] if isinstance(error, psycopg.OperationalError) else None',
        'return POSTGRESQL["08"]',
    ),
    Mistake(
        "extended codes of SQLite are final",
        "transactions/outages.py",
        "SQLITE.get(code & _PRIMARY)",
        "SQLITE.get(code)",
    ),
    Mistake(
        "a missing table of SQLite is final",
        "transactions/outages.py",
        'return POSTGRESQL["42P01"]',
        "return None",
    ),
    Mistake(
        "psycopg gets SQLite's parameters",
        "transactions/schema.py",
        'return _PARAMETER.sub(r"%(\\1)s", sql) if package == "psycopg" else sql',
        "return sql",
    ),
    Mistake(
        "relays do not skip locked parts",
        "transactions/schema.py",
        '"unlocked": "FOR UPDATE SKIP LOCKED",',
        '"unlocked": "",',
    ),
    Mistake(
        "SQLite begins transactions that only read",
        "transactions/schema.py",
        '"begin": "BEGIN IMMEDIATE",',
        '"begin": "BEGIN",',
    ),
    Mistake(
        "PostgreSQL's clock stands still in a transaction",
        "transactions/schema.py",
        "extract(epoch FROM clock_timestamp())",
        "extract(epoch FROM date_trunc('day', now()))",
    ),
    Mistake(
        "SQLite's clock is an hour late",
        "transactions/schema.py",
        "(julianday('now') - 2440587.5) * 86400.0",
        "(julianday('now') - 2440587.5) * 86400.0 - 3600",
    ),
    Mistake(
        "a table is created although it exists",
        "transactions/schema.py",
        "CREATE TABLE IF NOT EXISTS nsqext_position (",
        "CREATE TABLE nsqext_position (",
    ),
    Mistake(
        "the index contains messages that were set aside",
        "transactions/schema.py",
        "ON nsqext_outbox (sequence) WHERE error IS NULL;",
        "ON nsqext_outbox (sequence);",
    ),
    Mistake(
        "the context of a span is not stored",
        "transactions/trace_context.py",
        "        propagate.inject(carrier)\n",
        "        pass\n",
    ),
    Mistake(
        "OpenTelemetry is loaded",
        "transactions/trace_context.py",
        '    if "opentelemetry.trace" not in sys.modules:\n        return {}\n',
        "",
    ),
    Mistake(
        "the password is shown in an error of the driver",
        "transactions/address.py",
        '            text = text.replace(part, "***")\n',
        "            pass\n",
    ),
    Mistake(
        "a password with percent signs is shown",
        "transactions/address.py",
        'for text in (value.strip("\'"), unquote(value.strip("\'"))):',
        'for text in (value.strip("\'"),):',
    ),
    Mistake(
        "an error of libpq shows the address",
        "transactions/address.py",
        "    except (ProgrammingError, UnicodeError, ValueError):\n"
        '        raise InvalidSetting(f"libpq cannot read the address of the database: {shown}", '
        "hint=_HINT) from None\n",
        "    except (UnicodeError, ValueError):\n"
        '        raise InvalidSetting(f"libpq cannot read the address of the database: {shown}", '
        "hint=_HINT) from None\n",
    ),
)
