"""How NCCL_RAS_ADDR is read."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.adapters.node_part import parse_ras_addr


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("", ("localhost", 28028)),
        ("localhost", ("localhost", 28028)),
        ("localhost:28029", ("localhost", 28029)),
        ("node-7.cluster.local:1", ("node-7.cluster.local", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]", ("::1", 28028)),
        ("[::1]:28029", ("::1", 28029)),
        ("[fe80::1%eth0]:28029", ("fe80::1%eth0", 28029)),
        ("0.0.0.0", ("127.0.0.1", 28028)),
        ("0.0.0.0:28029", ("127.0.0.1", 28029)),
        ("[::]", ("::1", 28028)),
        ("[0:0:0:0:0:0:0:0]:28029", ("::1", 28029)),
    ],
)
def test_allowed(text, pair):
    assert parse_ras_addr(text) == pair


@pytest.mark.parametrize(
    "text",
    [
        "::1",
        "::1:28028",
        "fe80::1%eth0",
        "host:0",
        "host:65536",
        "host:028028",
        "host:http",
        "host:-1",
        "host:+1",
        "host:1_0",
        "host:٣",
        "host:",
        ":28028",
        ":",
        " ",
        " host:1",
        "host:1 ",
        "host :1",
        "host:1\n",
        "two words:1",
        "[::1",
        "[]:1",
        "[::1]:",
        "[::1]28028",
        "[::1]:0",
        "[::1] :1",
        "[127.0.0.1]:1",
        "[node]:1",
        "::1]:1",
        "-h:1",
        "http://host:1",
    ],
)
def test_refused_with_the_value_and_what_is_allowed(text):
    with pytest.raises(ValueError, match="Allowed: host, host:port") as caught:
        parse_ras_addr(text)
    assert repr(text) in str(caught.value)


@given(st.one_of(st.text(), st.text(alphabet="[]:.0123456789afx% -\n\t")))
def test_any_text_gives_a_pair_or_a_value_error(text):
    try:
        host, port = parse_ras_addr(text)
    except ValueError as error:
        refusal = str(error)
    else:
        assert host
        assert host not in ("0.0.0.0", "::")
        assert not set("[] \n\t") & set(host)
        assert 1 <= port <= 65535
        return
    assert repr(text) in refusal


@given(st.integers(1, 65535), st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True))
def test_what_is_written_is_read_back(port, host):
    assert parse_ras_addr(f"{host}:{port}") == (host, port)


@given(st.integers(1, 65535), st.ip_addresses(v=6).filter(lambda address: not address.is_unspecified))
def test_ipv6_is_read_back(port, address):
    host, read_port = parse_ras_addr(f"[{address}]:{port}")
    assert (ipaddress.ip_address(host), read_port) == (address, port)
