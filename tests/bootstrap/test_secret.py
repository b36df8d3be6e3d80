"""The secret: where it may come from, and that it stays one."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path

import pytest

from ringcomm.bootstrap import secret as secret_module
from ringcomm.bootstrap.secret import Secret, check_exposed, load, parse
from ringcomm.config import Config
from ringcomm.errors import ConfigError
from ringcomm.tools import keygen

HEX = "00112233445566778899aabbccddeeff" * 2


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_module, "_taken", {})
    monkeypatch.delenv(secret_module.VARIABLE, raising=False)


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_no_source_no_secret() -> None:
    assert load(Config()) is None


def test_order_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_fd, by_file, by_variable = (f"a secret {word}" * 4 for word in ("fd", "file", "variable"))
    file = write(tmp_path / "key", by_file)
    with open(write(tmp_path / "fd", by_fd), "rb") as stream:
        monkeypatch.setenv(secret_module.VARIABLE, by_variable)
        both = Config(secret_file=file, secret_fd=stream.fileno())
        assert load(both) == parse_equal(by_fd)
    monkeypatch.setenv(secret_module.VARIABLE, by_variable)
    assert load(Config(secret_file=file)) == parse_equal(by_file)
    assert secret_module.VARIABLE not in os.environ  # taken out even though the file won
    monkeypatch.setenv(secret_module.VARIABLE, by_variable)
    assert load(Config()) == parse_equal(by_variable)
    assert secret_module.VARIABLE not in os.environ


class parse_equal:  # noqa: N801 - reads as a value
    """Compares a Secret with the text it should have come from."""

    def __init__(self, text: str) -> None:
        self.expected = parse(text.encode(), "test").material()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other.material() == self.expected


def test_variable_is_popped_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret_module.VARIABLE, HEX)
    first = load(Config())
    assert secret_module.VARIABLE not in os.environ
    assert first is not None
    assert load(Config()) is first


def test_a_bad_variable_is_refused_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret_module.VARIABLE, HEX[:-1])
    for _ in range(2):
        with pytest.raises(ConfigError, match="odd number"):
            load(Config())
    monkeypatch.setenv(secret_module.VARIABLE, HEX)
    assert load(Config()) == parse_equal(HEX)


def test_a_descriptor_that_is_another_files_now_is_not_read(tmp_path: Path) -> None:
    with open(write(tmp_path / "key", HEX), "rb") as stream:
        settings = Config(secret_fd=stream.fileno())
        first = load(settings)
        other = os.open(write(tmp_path / "data", "data of the program " * 3), os.O_RDONLY)
        os.dup2(other, stream.fileno())
        assert load(settings) is first
        assert os.lseek(other, 0, os.SEEK_CUR) == 0  # dup2 shares the offset
        os.close(other)


def test_a_long_secret_is_the_same_or_refused_from_every_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("k9!xyzQ~" * 512, "k9!xyzQ~" * 512 + "more"):
        path = write(tmp_path / "key", text)
        with open(path, "rb") as stream:
            monkeypatch.setattr(secret_module, "_taken", {})
            by_fd, by_file = Config(secret_fd=stream.fileno()), Config(secret_file=path)
            monkeypatch.setenv(secret_module.VARIABLE, text)
            if len(text) == 4096:
                assert all(load(one) == parse_equal(text) for one in (by_fd, by_file, Config()))
                continue
            with pytest.raises(ConfigError, match="RINGCOMM_SECRET has more than 4096 bytes"):
                load(Config())
            monkeypatch.delenv(secret_module.VARIABLE)
            for one in (by_fd, by_file):
                with pytest.raises(ConfigError, match=r"secret_f.* has more than 4096 bytes"):
                    load(one)


def test_pipe_is_read_once_and_remembered() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, HEX.encode() + b"\n")
        os.close(writing)
        first = load(Config(secret_fd=reading))
        assert first is not None
        assert load(Config(secret_fd=reading)) is first
    finally:
        os.close(reading)
    assert load(Config(secret_fd=reading)) is first


def test_pipe_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_module, "_FD_PATIENCE", 0.05)
    reading, writing = os.pipe()
    try:
        os.write(writing, HEX.encode())
        with pytest.raises(ConfigError, match="no end of file"):
            load(Config(secret_fd=reading))
    finally:
        os.close(reading)
        os.close(writing)


def test_fd_that_is_not_open() -> None:
    with pytest.raises(ConfigError, match="secret_fd 900 cannot be read"):
        load(Config(secret_fd=900))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_file_that_others_can_read(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "a key", HEX, mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600 '{path}'"):
        load(Config(secret_file=path))


def test_file_that_may_only_be_read(tmp_path: Path) -> None:
    assert load(Config(secret_file=write(tmp_path / "key", HEX, 0o400))) is not None


def test_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(Config(secret_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="not a regular file"):
        load(Config(secret_file=str(tmp_path)))
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        load(Config(secret_file=str(tmp_path / "fifo")))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_file_of_another_user(tmp_path: Path) -> None:
    path = write(tmp_path / "key", HEX)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        load(Config(secret_file=path))


@pytest.mark.parametrize("text", ["short", HEX[:62], "xyz" * 10])
def test_short_secret(text: str) -> None:
    with pytest.raises(ConfigError, match=r"at least 32.*python -m ringcomm keygen") as raised:
        parse(text.encode(), "RINGCOMM_SECRET")
    assert text not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEX[:-1].encode(), "odd number of hexadecimal digits \\(63\\)"),
        (HEX.encode() + b"7", "odd number"),
        (HEX[:40].encode() + bytes(24), "not written to its end"),
        (HEX.encode().replace(b"8", b"?"), "4 other characters"),
        (HEX[:30].encode() + b"\n" + HEX[30:].encode(), "1 other character"),
        (bytes(32), "one byte over and over"),
        (b"00" * 32, "one byte over and over"),
        (b"x" * 40, "one byte over and over"),
    ],
)
def test_damaged_secret(text: bytes, words: str) -> None:
    told = rf"the file.*{words}.*python -m ringcomm keygen"
    with pytest.raises(ConfigError, match=told) as raised:
        parse(text, "the file")
    assert text.decode() not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "correct horse battery staple, and more",
        "550e8400-e29b-41d4-a716-446655440000-6ba7b810-9dad-11d1-80b4-00c04fd430c8",
        "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA=",
        "faded facade, deaf babe: a bad decade",
        HEX.upper(),
        HEX + "0123",
    ],
)
def test_passphrases_and_longer_keys(text: str) -> None:
    assert len(parse(text.encode(), "x").material()) >= 32


def test_empty_secret() -> None:
    with pytest.raises(ConfigError, match="holds no secret"):
        parse(b" \n", "RINGCOMM_SECRET")


def test_hexadecimal_and_plain_text() -> None:
    assert parse(HEX.encode() + b"\n", "x").material() == bytes.fromhex(HEX)
    assert parse(b"not hexadecimal, but thirty-two bytes", "x").material().startswith(b"not hex")


def test_secret_shows_only_its_key_id() -> None:
    secret = Secret(bytes.fromhex(HEX))
    shown = f"{secret} {secret!r} {[secret]}"
    assert secret.key_id.hex() in shown
    assert len(secret.key_id) == 4
    assert HEX[:8] not in shown
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    assert not hasattr(secret, "__dict__")


def test_exposed_without_a_secret() -> None:
    check_exposed(["127.0.0.1", "127.1.2.3", "::1"], None, insecure=False)
    check_exposed(["192.0.2.1"], Secret(b"k" * 32), insecure=False)
    with pytest.raises(ConfigError, match=r"192.0.2.1.*python -m ringcomm keygen FILE"):
        check_exposed(["127.0.0.1", "192.0.2.1"], None, insecure=False)
    check_exposed(["192.0.2.1"], None, insecure=True)


def test_keygen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.key"
    assert keygen.main([str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made = load(Config(secret_file=str(path)))
    assert made is not None
    assert len(made.material()) == 32
    said = capsys.readouterr().out
    assert made.key_id.hex() in said
    assert f"RINGCOMM_SECRET_FILE={path}" in said
    assert path.read_text().strip() not in said


def test_keygen_shows_a_path_that_works_from_every_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert keygen.main(["my key"]) == 0
    assert f"RINGCOMM_SECRET_FILE='{tmp_path}/my key'" in capsys.readouterr().out


def test_home_folder_in_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "key", HEX)
    assert load(Config(secret_file="~/key")) == parse_equal(HEX)


def test_keygen_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.key"
    path.write_text("precious")
    assert keygen.main([str(path)]) == 1
    assert path.read_text() == "precious"
    assert "exists" in capsys.readouterr().err
    assert keygen.main([str(tmp_path / "no" / "such")]) == 1


def test_keygen_ignores_a_wide_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert keygen.main([str(tmp_path / "key")]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
