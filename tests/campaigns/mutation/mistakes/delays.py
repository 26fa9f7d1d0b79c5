"""Mistakes in the relay of delayed messages and its store."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "a cancelled message comes back after a failure",
        "delays/store.py",
        '            run.execute(f"UPDATE delayed SET {_END} WHERE identity=? AND state=?", (identity, '
        "_ENDING))  # noqa: S608\n",
        "",
    ),
    Mistake(
        "a cancellation of a message that is published is forgotten",
        "delays/store.py",
        '            run.execute("UPDATE delayed SET state=? WHERE identity=?", (_ENDING, identity))\n',
        "",
    ),
    Mistake(
        "cancel says cancelled of a message that is published",
        "delays/store.py",
        "        if found[0] != _WAITING:\n",
        "        if found[0] == _ENDING:\n",
    ),
    Mistake(
        "cancel says unknown of a message that is published",
        "delays/store.py",
        "            return Cancellation.TOO_LATE\n",
        "            return Cancellation.UNKNOWN\n",
    ),
    Mistake(
        "a cancellation that comes before its message is dropped",
        "delays/store.py",
        "            run.execute(\n"
        "                \"INSERT INTO delayed (identity, topic, due, record) VALUES (?, '', ?, '') ON "
        'CONFLICT DO NOTHING",\n'
        "                (identity, now),\n"
        "            )\n",
        "",
    ),
    Mistake(
        "a cancelled message keeps its record",
        "delays/store.py",
        "_END = \"next=NULL, record='', state=0, until=NULL\"",
        '_END = "next=NULL, state=0, until=NULL"',
    ),
    Mistake(
        "every message is cancelled",
        "delays/store.py",
        'run.execute(f"UPDATE delayed SET {_END} WHERE identity=?", (identity,))',
        'run.execute(f"UPDATE delayed SET {_END} WHERE identity>=?", (identity,))',
    ),
    Mistake(
        "the partition of a message is dropped",
        "delays/relay.py",
        "        partition=record.partition,\n",
        "        partition=None,\n",
    ),
    Mistake(
        "the key of a message is dropped",
        "delays/relay.py",
        "        key=record.key,\n",
        "",
    ),
    Mistake(
        "the tag of a message is dropped",
        "delays/relay.py",
        "        tag=record.tag,\n",
        "",
    ),
    Mistake(
        "the trace id of a message is dropped",
        "delays/relay.py",
        "        trace_id=record.trace_id,\n",
        "",
    ),
    Mistake(
        "the raw header of a message is dropped",
        "delays/relay.py",
        "        header=record.header,\n",
        "",
    ),
    Mistake(
        "the identity is not sent",
        "delays/relay.py",
        "{IDENTITY_HEADER: record.identity, **(headers or {})}",
        "dict(headers or {})",
    ),
    Mistake(
        "a header of the program gives way to the identity",
        "delays/relay.py",
        "{IDENTITY_HEADER: record.identity, **(headers or {})}",
        "{**(headers or {}), IDENTITY_HEADER: record.identity}",
    ),
    Mistake(
        "headers are sent to topics without extend support",
        "delays/relay.py",
        "if record.header is None and (await producer.meta(record.topic)).extend_support:",
        "if record.header is None:",
    ),
    Mistake(
        "the store is not synchronous",
        "delays/store.py",
        "PRAGMA synchronous=FULL",
        "PRAGMA synchronous=NORMAL",
    ),
    Mistake(
        "the store has no log before writes",
        "delays/store.py",
        "PRAGMA journal_mode=WAL",
        "PRAGMA journal_mode=DELETE",
    ),
    Mistake(
        "a store waits for no other process",
        "delays/store.py",
        "path, timeout=_BUSY, isolation",
        "path, timeout=0, isolation",
    ),
    Mistake(
        "a transaction takes its lock late",
        "delays/store.py",
        'self._database.execute("BEGIN IMMEDIATE")',
        'self._database.execute("BEGIN")',
    ),
    Mistake(
        "an error leaves the transaction open",
        "delays/store.py",
        "            except BaseException:\n                if self._database.in_transaction:",
        "            except ZeroDivisionError:\n                if self._database.in_transaction:",
    ),
    Mistake(
        "a failed commit leaves the transaction open",
        "delays/store.py",
        '                self._database.execute("COMMIT")\n            except',
        "                commit = self._database.execute\n            except",
    ),
    Mistake(
        "a full disk ends the relay",
        "delays/relay.py",
        "            except sqlite3.OperationalError as error:\n"
        '                logger.warning("the store of delayed messages cannot',
        "            except ZeroDivisionError as error:\n"
        '                logger.warning("the store of delayed messages cannot',
    ),
    Mistake(
        "an error commits the transaction",
        "delays/store.py",
        '                    self._database.execute("ROLLBACK")\n',
        '                    self._database.execute("COMMIT")\n',
    ),
    Mistake(
        "threads share a transaction",
        "delays/store.py",
        '        with self._lock:\n            try:\n                self._database.execute("BEGIN',
        '        with threading.Lock():\n            try:\n                self._database.execute("BEGIN',
    ),
    Mistake(
        "each start of a store has a new name",
        "delays/store.py",
        "SELECT ? WHERE NOT EXISTS (SELECT * FROM store)",
        "SELECT ? WHERE (SELECT count(*) FROM store) < 9",
    ),
    Mistake(
        "a message that is received again replaces the first",
        "delays/store.py",
        'VALUES (?, ?, ?, ?, ?) "\n                        "ON CONFLICT DO NOTHING",',
        'VALUES (?, ?, ?, ?, ?) "\n'
        '                        "ON CONFLICT DO UPDATE SET next=excluded.next, record=excluded.record",',
    ),
    Mistake(
        "messages are due when they are stored",
        "delays/store.py",
        "(record.identity, record.topic, record.due, record.due, encode",
        "(record.identity, record.topic, record.due, 0, encode",
    ),
    Mistake(
        "messages are published a second early",
        "delays/store.py",
        '"due": int(now * 1000),',
        '"due": int(now * 1000) + 1000,',
    ),
    Mistake(
        "messages are due in seconds",
        "delays/store.py",
        '"due": int(now * 1000),',
        '"due": int(now),',
    ),
    Mistake(
        "the last due is published first",
        "delays/store.py",
        "WHERE next<=:due AND until IS NULL ORDER BY next LIMIT",
        "WHERE next<=:due AND until IS NULL ORDER BY next DESC LIMIT",
    ),
    Mistake(
        "every message is taken",
        "delays/store.py",
        "WHERE next<=:due AND until IS NULL ORDER BY next LIMIT",
        "WHERE next IS NOT NULL AND until IS NULL ORDER BY next LIMIT",
    ),
    Mistake(
        "a taken message has no lease",
        "delays/store.py",
        "SET until=:clock + :lease, span",
        "SET until=:clock, span",
    ),
    Mistake(
        "a taken message is never taken again",
        "delays/store.py",
        "SET until=:clock + :lease, span=:lease",
        "SET next=NULL, until=:clock + :lease, span=:lease",
    ),
    Mistake(
        "a taken message seems to wait",
        "delays/store.py",
        '"state": _PUBLISHING,',
        '"state": _WAITING,',
    ),
    Mistake(
        "published messages are taken again",
        "delays/store.py",
        "run.executemany(f\"UPDATE delayed SET {_END}, error='' WHERE identity=?\", ended)",
        "run.executemany(\"UPDATE delayed SET until=NULL, error='' WHERE identity=?\", ended)",
    ),
    Mistake(
        "published messages are forgotten at once",
        "delays/store.py",
        "run.executemany(f\"UPDATE delayed SET {_END}, error='' WHERE identity=?\", ended)",
        'run.executemany("DELETE FROM delayed WHERE identity=?", ended)',
    ),
    Mistake(
        "a failed message is tried again at once",
        "delays/store.py",
        "values = (self._clock() + pause, pause, error, identity)",
        "values = (0.0, pause, error, identity)",
    ),
    Mistake(
        "a failed message has no reason",
        "delays/store.py",
        "values = (self._clock() + pause, pause, error, identity)",
        "values = (self._clock() + pause, pause, '', identity)",
    ),
    Mistake(
        "a failed message stays with its relay",
        "delays/store.py",
        "SET until=?, span=?, error=?, state=0 WHERE identity=? AND next IS NOT NULL",
        "SET until=?, span=?, error=? WHERE identity=? AND next IS NOT NULL",
    ),
    Mistake(
        "a message that cannot be published delays its topic",
        "delays/store.py",
        "            if not alone:\n",
        "            if alone:\n",
    ),
    Mistake(
        "every topic waits after a failure",
        "delays/store.py",
        'WHERE next<? AND state=0 AND topic="\n                    "(SELECT topic FROM delayed WHERE identity=?)',
        "WHERE next<? AND state=0 AND ''<>\"\n                    \"(SELECT topic FROM delayed WHERE identity=?)",
    ),
    Mistake(
        "a failure delays messages that are published now",
        "delays/store.py",
        "WHERE next<? AND state=0 AND topic=",
        "WHERE next<? AND topic=",
    ),
    Mistake(
        "a failure calls later messages back",
        "delays/store.py",
        "WHERE next<? AND state=0 AND topic=",
        "WHERE next IS NOT ? AND state=0 AND topic=",
    ),
    Mistake(
        "waiting messages are forgotten",
        "delays/store.py",
        "DELETE FROM delayed WHERE next IS NULL AND due<?",
        "DELETE FROM delayed WHERE due<?",
    ),
    Mistake(
        "identities are forgotten at once",
        "delays/relay.py",
        "store.forget, time.time() - self._keep",
        "store.forget, time.time()",
    ),
    Mistake(
        "the next due is the last",
        "delays/store.py",
        "    SELECT min(next) AS next FROM delayed WHERE",
        "    SELECT max(next) AS next FROM delayed WHERE",
    ),
    Mistake(
        "the next due is in milliseconds",
        "delays/store.py",
        "return None if found is None else found / 1000",
        "return found",
    ),
    Mistake(
        "ended messages are counted",
        "delays/store.py",
        "SELECT count(*) FROM delayed WHERE next IS NOT NULL",
        "SELECT count(*) FROM delayed",
    ),
    Mistake(
        "ended messages are listed",
        "delays/store.py",
        "WHERE next IS NOT NULL AND (? IS NULL OR topic=?)",
        "WHERE (? IS NULL OR topic=?)",
    ),
    Mistake(
        "messages of all topics are listed",
        "delays/store.py",
        "AND (? IS NULL OR topic=?)",
        "AND (? IS NULL OR ?<>'')",
    ),
    Mistake(
        "every message seems to wait",
        "delays/store.py",
        "error, state != _WAITING)",
        "error, state == _ENDING)",
    ),
    Mistake(
        "the oldest refused records are kept",
        "delays/store.py",
        "WHERE number <= (SELECT max(number) FROM refused) - ?",
        "WHERE number > (SELECT min(number) FROM refused) + ? - 1",
    ),
    Mistake(
        "refused records are kept without a bound",
        "delays/store.py",
        '            run.execute("DELETE FROM refused WHERE number <= (SELECT max(number) FROM refused) '
        '- ?", (_MOST_REFUSED,))\n',
        "",
    ),
    Mistake(
        "refused records are listed oldest first",
        "delays/store.py",
        "FROM refused ORDER BY number DESC LIMIT",
        "FROM refused ORDER BY number LIMIT",
    ),
    Mistake(
        "a relay handles cancellations of all channels as messages",
        "delays/relay.py",
        "            if isinstance(record[0], kind):\n",
        "            if record:\n",
    ),
    Mistake(
        "a bad record fails its batch",
        "delays/relay.py",
        "            except ProtocolError as error:\n",
        "            except RuntimeError as error:\n",
    ),
    Mistake(
        "bad records are dropped",
        "delays/relay.py",
        "            await to_thread.run_sync(self._store.refuse, refused)\n",
        "",
    ),
    Mistake(
        "a relay that waits is not woken",
        "delays/relay.py",
        "            await to_thread.run_sync(self._store.add, records)\n            self._changed.wake()\n",
        "            await to_thread.run_sync(self._store.add, records)\n",
    ),
    Mistake(
        "a full relay takes too many",
        "delays/relay.py",
        "            free = _AT_ONCE - self._publishing\n",
        "            free = _AT_ONCE\n",
    ),
    Mistake(
        "published messages are not recorded",
        "delays/relay.py",
        "            self._published.append(identity)\n",
        "",
    ),
    Mistake(
        "published messages are recorded before the publish",
        "delays/relay.py",
        "            await publish_record(producer, data)\n            self._published.append(identity)\n",
        "            self._published.append(identity)\n            await publish_record(producer, data)\n",
    ),
    Mistake(
        "failed messages are not recorded",
        "delays/relay.py",
        "            await self._in_store(failed, identity, str(error), time.time(), _RETRY)\n",
        "",
    ),
    Mistake(
        "an error of a publish ends the relay",
        "delays/relay.py",
        "        except NsqError as error:\n            logger",
        "        except InvalidInput as error:\n            logger",
    ),
    Mistake(
        "a relay that ends forgets what it published",
        "delays/relay.py",
        "                self._store.take(published, 0, 0.0, 0.0)\n",
        "            pass\n",
    ),
    Mistake(
        "the lease ignores the timeout of a publish",
        "delays/relay.py",
        "lease = lease_time(publish_timeout(producer))",
        "lease = 5.0",
    ),
    Mistake(
        "a finished publish frees no place",
        "delays/relay.py",
        "            self._publishing -= 1\n",
        "            pass\n",
    ),
    Mistake(
        "stores of machines share the channel of cancellations",
        "delays/relay.py",
        'check_channel(f"{channel}-cancel-{store.name}")',
        'check_channel(f"{channel}-cancel")',
    ),
    Mistake(
        "a relay waits for the next due without a bound",
        "delays/relay.py",
        "min(_POLL, max(0.0, due - time.time()))",
        "max(0.0, due - time.time())",
    ),
    Mistake(
        "a file without the state of messages is refused",
        "delays/store.py",
        "                    if name not in columns:\n                        run.execute(statement)\n",
        "                    pass\n",
    ),
    Mistake(
        "a store is created although it must exist",
        "delays/store.py",
        "        if not create and not Path(path).is_file():\n",
        "        if not create and Path(path).is_dir():\n",
    ),
    Mistake(
        "a failure is counted in milliseconds",
        "delays/store.py",
        "values = (self._clock() + pause, pause, error, identity)",
        "values = (self._clock() + 1000 * pause, 1000 * pause, error, identity)",
    ),
    Mistake(
        "a lease goes by the time of day",
        "delays/store.py",
        '            values = {\n                "clock": self._clock(),',
        '            values = {\n                "clock": now,',
    ),
    Mistake(
        "a lease of an earlier start of the machine is kept",
        "delays/store.py",
        "(until <= :clock OR until > :clock + span)",
        "(until <= :clock)",
    ),
    Mistake(
        "a lease is kept when it is over",
        "delays/store.py",
        "(until <= :clock OR until > :clock + span)",
        "(until > :clock + span)",
    ),
    Mistake(
        "a leased message is due before the end of its lease",
        "delays/store.py",
        "ELSE max(next, :now + 1000 * (until - :clock)) END",
        "ELSE next END",
    ),
    Mistake(
        "a message that is not due is taken when its lease is over",
        "delays/store.py",
        "FROM delayed WHERE next<=:due AND {_FREE}",
        "FROM delayed WHERE next IS NOT NULL AND {_FREE}",
    ),
)
