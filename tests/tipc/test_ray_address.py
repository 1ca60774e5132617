"""Addresses of `--on ray://HOST:PORT`, checked before Ray is asked."""

import pytest

from mezzo.errors import MezzoError
from mezzo.tipc._on_ray import _check_address


@pytest.mark.parametrize(
    ("address", "status"),
    [("host:²", 2), ("host:99999", 2), ("host", 2), ("..:6379", 1), ("a" * 70 + ".b:6379", 1), ("127.0.0.1:9", 1)],
)
def test_a_bad_address_is_one_line(address, status):
    with pytest.raises(MezzoError) as caught:
        _check_address(address)
    assert caught.value.exit_code == status
    assert address in str(caught.value)
    assert "\n" not in str(caught.value)
