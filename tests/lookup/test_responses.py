"""Responses of lookup nodes: recorded ones of both generations, and invalid ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import LookupFailed, LookupUnreachable, NotLookupd, NsqError, TopicNotFound, TopicNotReady
from nsqext.lookup import responses
from nsqext.lookup.responses import LookupAnswer, LookupNode, read_lookup, read_lookup_nodes, unwrap
from nsqext.protocol.names import MAX_PARTITION
from nsqext.types import Address, TopicMeta
from tests.support.fake_lookupd import list_json, lookup_json, node_json, recorded

SOURCE = Address("lookup", 4161)
REDESIGNED = recorded("redesigned.json")
ORIGINAL = recorded("original.json")


def read(answer: dict[str, Any]) -> LookupAnswer:
    """Parse a recorded response to ``/lookup``."""
    return read_lookup(unwrap(answer["status"], answer["body"].encode(), SOURCE), SOURCE)


def find(answers: list[dict[str, Any]], path: str, *, bare: bool = False) -> dict[str, Any]:
    """Return the recorded response to a request."""
    return next(answer for answer in answers if answer["path"] == path and bool(answer["accept"]) == bare)


@pytest.mark.parametrize("bare", [False, True])
def test_both_envelopes_of_the_redesigned_server_say_the_same(bare: bool) -> None:
    answer = read(find(REDESIGNED, "/lookup?topic=k_lookup_ok_t&access=w&metainfo=true", bare=bare))
    assert answer.found
    assert {partition: str(node.tcp) for partition, node in answer.partitions.items()} == {
        0: "127.0.0.1:5350",
        1: "127.0.0.1:5352",
    }
    assert [str(node.http) for node in answer.partitions.values()] == ["127.0.0.1:5351", "127.0.0.1:5353"]
    assert answer.nodes == ()
    assert answer.channels == ("ch",)
    assert answer.meta == TopicMeta(partition_num=2, replica=1)
    assert {node.version for node in answer.partitions.values()} == {"0.3.7-HA.1.13.0"}


@pytest.mark.parametrize(
    ("topic", "ordered", "extend"),
    [("k_lookup_ok_o", True, False), ("k_lookup_ok_x", False, True), ("k_lookup_ok_y", True, True)],
)
def test_meta_is_read(topic: str, ordered: bool, extend: bool) -> None:
    meta = read(find(REDESIGNED, f"/lookup?topic={topic}&access=w&metainfo=true")).meta
    assert meta is not None
    assert (meta.ordered, meta.extend_support) == (ordered, extend)


def test_several_partitions_on_one_node() -> None:
    answer = read(find(REDESIGNED, "/lookup?topic=k_lookup_more_parts_than_nodes_o&access=w&metainfo=true"))
    assert list(answer.partitions) == [0, 1, 2, 3]
    assert len({node.tcp for node in answer.partitions.values()}) == 3


def test_an_answer_without_meta() -> None:
    assert read(find(REDESIGNED, "/lookup?topic=k_lookup_ok_t")).meta is None


@pytest.mark.parametrize("bare", [False, True])
def test_a_topic_without_channel_is_not_ready(bare: bool) -> None:
    with pytest.raises(TopicNotReady, match=r"has no channel.*create a channel:"):
        read(find(REDESIGNED, "/lookup?topic=k_lookup_no_channel_t&metainfo=true&access=w", bare=bare))


@pytest.mark.parametrize(
    "path", ["/lookup?topic=k_topic_delete_t&access=r&metainfo=true", "/lookup?topic=k_topic_delete_t&access=w"]
)
def test_a_removed_topic_is_not_found_for_reading_and_writing(path: str) -> None:
    with pytest.raises(TopicNotFound, match="does not know the topic"):
        read(find(REDESIGNED, path))


def test_a_topic_whose_leaders_are_lost_is_found() -> None:
    answer = read_lookup(lookup_json({}, num=2), SOURCE)
    assert answer.found
    assert answer.partitions == {}
    assert answer.meta is not None


def test_the_original_server() -> None:
    answer = read(find(ORIGINAL, "/lookup?topic=orders&access=w&metainfo=true"))
    assert (answer.meta, answer.partitions, answer.channels) == (None, {}, ("billing",))
    assert [(str(node.tcp), str(node.http), node.version) for node in answer.nodes] == [
        ("127.0.0.1:14150", "127.0.0.1:14151", "1.3.0")
    ]
    empty = read(find(ORIGINAL, "/lookup?topic=empty&access=w&metainfo=true"))
    assert empty.found
    assert empty.nodes == ()
    with pytest.raises(TopicNotFound):
        read(find(ORIGINAL, "/lookup?topic=missing&access=w&metainfo=true"))
    with pytest.raises(LookupFailed, match="400 MISSING_ARG_TOPIC"):
        read(find(ORIGINAL, "/lookup"))


def test_the_old_envelope_of_the_original_server() -> None:
    body = b'{"status_code":500,"status_txt":"TOPIC_NOT_FOUND","data":null}'
    with pytest.raises(TopicNotFound):
        unwrap(200, body, SOURCE)
    data = unwrap(200, b'{"status_code":200,"status_txt":"OK","data":{"channels":[],"producers":[]}}', SOURCE)
    assert data == {"channels": [], "producers": []}


def test_producers_that_lead_nothing_are_nodes_without_partitions() -> None:
    answer = read_lookup(lookup_json({0: "n1:4150"}, num=1, nodes=["o1:4150", "o1:4150"]), SOURCE)
    assert [str(node.tcp) for node in answer.nodes] == ["o1:4150"]


@pytest.mark.parametrize("leaders", [{}, {0: "n1:4150"}], ids=["no leader", "another leader"])
def test_a_redesigned_node_without_a_partition_has_nothing_of_the_topic(leaders: dict[int, str]) -> None:
    data = lookup_json(leaders, num=1, nodes=["o1:4150"])
    data["producers"].append(node_json("former:4150"))
    assert [str(node.tcp) for node in read_lookup(data, SOURCE).nodes] == ["o1:4150"]


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (
            200,
            b"<html><body>Welcome</body></html>",
            "not a response of nsqlookupd: HTTP 200 with b'<html>.*nsqlookupd's HTTP",
        ),
        (502, b"<html>Bad Gateway</html>", "HTTP 502 with b'<html>"),
        (404, b'{"message":"NOT_FOUND"}', "HTTP 404 NOT_FOUND.*nsqlookupd's HTTP"),
        (404, b"404 page not found", "HTTP 404 with b'404 page"),
        (500, b"", "responded 500 \\(no text\\)"),
        (302, b"", "responded 302"),
        (400, b'{"message":"INVALID_ARG_TOPIC"}', "responded 400 INVALID_ARG_TOPIC"),
        (500, b'{"message":"strconv.Atoi: parsing "x": invalid syntax"}', "responded 500 .*invalid syntax"),
        (200, b'{"status_code":"x","status_txt":7}', "responded x 7"),
        (200, b"\xff\xfe\x00", "not a response of nsqlookupd"),
        (200, b"[" * 100_000, "not a response of nsqlookupd"),
        (200, b'{"channels":["a"', "not a response of nsqlookupd: HTTP 200 with b'{"),
    ],
)
def test_unexpected_responses_are_refused_with_a_hint(status: int, body: bytes, text: str) -> None:
    with pytest.raises(LookupFailed, match=text) as caught:
        unwrap(status, body, SOURCE)
    assert caught.value.node == "lookup:4161"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "change",
    [
        {"partitions": {"x": {}}},
        {"partitions": {"0": {}}},
        {"partitions": {"-1": {"broadcast_address": "n1", "tcp_port": 4150}}},
        {"partitions": {"1024": {"broadcast_address": "n1", "tcp_port": 4150}}},
        {"partitions": {"0": {"broadcast_address": "", "tcp_port": 4150}}},
        {"partitions": {"0": {"broadcast_address": "n1", "tcp_port": 0}}},
        {"partitions": {"0": {"broadcast_address": "n1", "tcp_port": 65536}}},
        {"partitions": {"0": {"broadcast_address": "n1", "tcp_port": 4150, "http_port": -1}}},
        {"partitions": {"0": {"broadcast_address": "n1", "tcp_port": 28899.7}}},
        {"partitions": {"0": {"broadcast_address": "n1", "tcp_port": True}}},
        {"partitions": {"0": {"broadcast_address": "n1", "tcp_port": 4150, "http_port": True}}},
        {"partitions": {"0": {"broadcast_address": "n\n1", "tcp_port": 4150}}},
        {"partitions": {"0": {"broadcast_address": "n\x1b[2J", "tcp_port": 4150}}},
        {"partitions": {"0": {"broadcast_address": "n\u202e1", "tcp_port": 4150}}},
        {"partitions": {"0": {"broadcast_address": "n" * 1_000_000, "tcp_port": 4150}}},
        {"partitions": [1]},
        {"producers": "x"},
        {"producers": [None]},
        {"meta": []},
        {"meta": {"partition_num": -1}},
        {"meta": {"partition_num": 1e300}},
        {"channels": 7},
    ],
)
def test_nonsense_inside_an_answer_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(LookupFailed, match="not a response of nsqlookupd") as caught:
        read_lookup(lookup_json({0: "n1:4150"}, num=1) | change, SOURCE)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


_ODD = st.sampled_from(
    ["n1", "n\n1", "n\x1b[2J", "n\u202e1", "n" * 1000, "", 4150, 28899.7, True, None, -1, 1e300, [1], {"a": 1}]
)
_ODD_NODES = st.dictionaries(
    st.sampled_from(["broadcast_address", "tcp_port", "http_port", "version", "hostname", "remote_address"]), _ODD
)


@given(
    partitions=st.dictionaries(st.sampled_from(["0", "1", "x"]), _ODD_NODES | _ODD, max_size=2) | _ODD,
    others=st.dictionaries(
        st.sampled_from(["channels", "producers", "meta"]), st.lists(_ODD | _ODD_NODES, max_size=2) | _ODD
    ),
)
def test_an_answer_of_any_content_is_read_or_refused_with_a_printable_text(
    partitions: object, others: dict[str, object]
) -> None:
    answer: Any = lookup_json({0: "n1:4150"}, num=1) | {"partitions": partitions} | others
    try:
        found = read_lookup(answer, SOURCE)
    except LookupFailed as error:
        assert str(error).isprintable()
        assert len(str(error)) < 1000
        return
    for node in (*found.partitions.values(), *found.nodes):
        assert (node.version + node.hostname).isprintable()
        for address in filter(None, (node.tcp, node.http)):
            assert str(address).isprintable()
            assert type(address.port) is int
            assert 0 < address.port < 65536
    assert all(name.isprintable() and len(name) <= 501 for name in found.channels)


@given(status=st.sampled_from([200, 400, 404, 500]), text=st.text(), field=st.sampled_from(["status_txt", "message"]))
def test_texts_of_lookup_nodes_are_printable_and_bounded(status: int, text: str, field: str) -> None:
    body = orjson.dumps({field: text.encode(errors="replace").decode() * 50, "status_code": 500})
    with pytest.raises(LookupFailed) as caught:
        unwrap(status, body, SOURCE)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (499, b"<html>", NotLookupd, "HTTP 499"),
        (500, b"<html>", LookupUnreachable, "HTTP 500"),
        (502, b"{}", LookupUnreachable, "responded 502"),
        (500, b"{}", LookupFailed, "responded 500"),
        (401, b"{}", LookupFailed, "refuses access: 401"),
        (403, b"{}", LookupFailed, "refuses access: 403"),
        (402, b"{}", LookupFailed, "responded 402"),
        (404, b"{}", NotLookupd, "HTTP 404"),
    ],
)
def test_a_status_says_what_failed(status: int, body: bytes, kind: type[LookupFailed], text: str) -> None:
    with pytest.raises(LookupFailed, match=text) as caught:
        unwrap(status, body, SOURCE)
    assert type(caught.value) is kind


def test_numbers_that_meta_lacks_are_zero() -> None:
    assert read_lookup(lookup_json({0: "n1:4150"}, num=1) | {"meta": {}}, SOURCE).meta == TopicMeta()


@pytest.mark.parametrize(("count", "valid"), [(0, True), (MAX_PARTITION + 1, True), (MAX_PARTITION + 2, False)])
def test_a_topic_has_at_most_so_many_partitions(count: int, valid: bool) -> None:
    data = {**lookup_json({0: "n1:4150"}, num=1), "meta": {"partition_num": count, "replica": 1}}
    if not valid:
        with pytest.raises(LookupFailed):
            read_lookup(data, SOURCE)
        return
    meta = read_lookup(data, SOURCE).meta
    assert meta is not None
    assert meta.partition_num == count


@pytest.mark.parametrize("data", [{}, {"channels": None, "partitions": None, "producers": None, "meta": None}])
def test_empty_answers_are_not_found(data: dict[str, Any]) -> None:
    with pytest.raises(TopicNotFound):
        read_lookup(data, SOURCE)


@pytest.mark.parametrize("bare", [False, True])
def test_listlookup_of_the_redesigned_server(bare: bool) -> None:
    answer = find(REDESIGNED, "/listlookup", bare=bare)
    nodes = read_lookup_nodes(unwrap(answer["status"], answer["body"].encode(), SOURCE), SOURCE)
    assert nodes == (LookupNode(Address("127.0.0.1", 5361), epoch=0, leader=True),)


def test_listlookup_with_epochs_and_no_leader() -> None:
    nodes = read_lookup_nodes(list_json("a:4161", "b:4161", epochs={"b:4161": 7}), SOURCE)
    assert nodes == (LookupNode(Address("a", 4161)), LookupNode(Address("b", 4161), epoch=7))
    assert read_lookup_nodes({}, SOURCE) == ()
    assert read_lookup_nodes({"lookupdnodes": None, "lookupdleader": None}, SOURCE) == ()


@pytest.mark.parametrize(
    "data", ["OK", [], {"lookupdnodes": [{}]}, {"lookupdnodes": [{"NodeIP": "a", "HttpPort": "x"}]}]
)
def test_listlookup_nonsense_is_refused(data: Any) -> None:
    with pytest.raises(LookupFailed, match="not a response of nsqlookupd"):
        read_lookup_nodes(data, SOURCE)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "meta",
                    "partitions",
                    "producers",
                    "channels",
                    "0",
                    "1",
                    "tcp_port",
                    "broadcast_address",
                    "partition_num",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(data=json_values)
def test_any_json_gives_an_answer_or_a_documented_error(data: Any) -> None:
    for reader in (read_lookup, read_lookup_nodes):
        with suppress(NsqError):
            reader(unwrap(200, orjson.dumps(data), SOURCE), SOURCE)


@given(status=st.integers(100, 599), body=st.binary(max_size=100))
def test_any_bytes_give_data_or_a_documented_error(status: int, body: bytes) -> None:
    try:
        unwrap(status, body, SOURCE)
    except NsqError:
        assert status != 200 or body.strip()


def _counted(count: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[int, LookupAnswer]:
    """Parse a response with many nodes; return the number of parsed nodes and the answer."""
    parsed = 0
    read_one = responses.read_node

    def counting(data: Any, source: Address, mapped: Callable[[Address], Address] | None) -> responses.NodeInfo:
        nonlocal parsed
        parsed += 1
        return read_one(data, source, mapped)

    monkeypatch.setattr(responses, "read_node", counting)
    data = lookup_json({0: "n0:4150"}, num=1, nodes=[f"o{number}:4150" for number in range(count)])
    answer = read_lookup(data, SOURCE, 0, **options)
    monkeypatch.undo()
    return parsed, answer


def test_nodes_beyond_the_cap_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    few, answer = _counted(1000, monkeypatch)
    assert (few, len(answer.nodes)) == (1000 + 2, 1000)  # the leader is listed in two places
    many, answer = _counted(8000, monkeypatch)
    assert (many, len(answer.nodes)) == (1024 + 2, 1024)
    everything, answer = _counted(8000, monkeypatch, max_nodes=10_000)
    assert (everything, len(answer.nodes)) == (8000 + 2, 8000)  # linear


def test_partitions_that_are_written_in_many_ways_are_not_all_parsed() -> None:
    data = lookup_json({0: "n0:4150"}, num=1)
    leader = data["partitions"]["0"]
    data["partitions"] = {"0" * length: leader for length in range(1, 3000)} | {"1": leader}
    data["channels"] = [f"c{number}" for number in range(20_000)]
    answer = read_lookup(data, SOURCE)
    assert list(answer.partitions) == [0]
    assert len(answer.channels) == 10_000


@pytest.mark.parametrize("count", [1000, 8000])
def test_the_list_of_lookup_nodes_is_capped_and_has_the_leader(count: int) -> None:
    listed = [{"ID": str(number), "NodeIP": f"l{number}", "HttpPort": "4161", "Epoch": 1} for number in range(count)]
    nodes = read_lookup_nodes({"lookupdnodes": listed, "lookupdleader": listed[-1]}, SOURCE)
    assert len(nodes) == 64
    assert [node.address.host for node in nodes if node.leader] == [f"l{count - 1}"]


def test_a_list_of_lookup_nodes_keeps_its_order_up_to_the_cap() -> None:
    listed = [{"ID": str(number), "NodeIP": f"l{number}", "HttpPort": "4161", "Epoch": 1} for number in range(4)]
    data = {"lookupdnodes": listed, "lookupdleader": listed[-1]}
    for most, hosts in ((5, ["l0", "l1", "l2", "l3"]), (4, ["l0", "l1", "l2", "l3"]), (3, ["l3", "l0", "l1"])):
        assert [node.address.host for node in read_lookup_nodes(data, SOURCE, most)] == hosts


def test_a_node_hides_the_topics_with_a_tombstone() -> None:
    node = {**node_json("n1:4150"), "topics": ["kept", "hidden", "later"], "tombstones": [False, True]}
    assert responses.read_node(node, SOURCE).tombstoned == ("hidden",)


def test_partitions_of_a_node_are_in_order() -> None:
    node = {**node_json("n1:4150"), "topics": ["t", "u"], "partitions": {"t": ["10", "2", "0"]}}
    assert responses.read_node(node, SOURCE).topics == {"t": (0, 2, 10), "u": ()}


def test_lookup_nodes_that_list_the_same_nodes_share_them() -> None:
    """Memory of 64 lookup nodes that list 1,000 nodes of each topic grew by 300 MiB."""
    node = {"broadcast_address": "nsqd-1", "tcp_port": 4150, "http_port": 4151, "hostname": "h", "version": "1.3.0"}
    assert responses.read_node(dict(node), SOURCE) is responses.read_node(dict(node), SOURCE)
    assert responses.read_node({**node, "topics": ["orders"]}, SOURCE).topics == {"orders": ()}
    long = {**node, "hostname": "h" * 1000}
    assert responses.read_node(long, SOURCE) == responses.read_node(long, SOURCE)
    assert responses.read_node(long, SOURCE) is not responses.read_node(long, SOURCE)
