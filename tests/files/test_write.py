"""Files are written whole, and never through a link."""

import pytest

from mezzo.files import write_file, write_text


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "run.json").symlink_to(tmp_path / "victim")
    write_text(tmp_path / "run.json", "new")
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "run.json").is_symlink()
    assert (tmp_path / "run.json").read_text() == "new"


def test_a_folder_that_is_a_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_file(tmp_path / "link" / "a", b"x")
    assert (tmp_path / "real" / "a").read_bytes() == b"x"


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_an_older_file_keeps_its_permissions(tmp_path, mode):
    (tmp_path / "a").touch(mode)
    (tmp_path / "a").chmod(mode)
    write_file(tmp_path / "a", b"x")
    assert (tmp_path / "a").stat().st_mode & 0o777 == mode
