"""Certificates for tests, made by the `openssl` of this computer, so that no key is in git."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import absent

_DAYS = "3"
_LEAF = "basicConstraints=CA:FALSE\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, both in PEM."""

    cert: Path
    key: Path


class Authority:
    """A CA of its own in a folder. `cert` is what those who trust it are given."""

    def __init__(self, folder: Path, name: str) -> None:
        if shutil.which("openssl") is None:
            absent("openssl (makes the certificates of the TLS tests)")
        self._folder = folder
        self._own = self._pair(name)
        _openssl(
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", _DAYS, "-subj", f"/CN={name}",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign",
            "-keyout", self._own.key, "-out", self._own.cert,
        )  # fmt: skip

    @property
    def cert(self) -> Path:
        """Its own certificate."""
        return self._own.cert

    def issue(self, file: str, name: str, *, hosts: tuple[str, ...] = ()) -> Pair:
        """A certificate in the name of a person or a computer, in files of that name."""
        made = self._pair(file)
        request, extensions = self._folder / f"{file}.csr", self._folder / f"{file}.ext"
        names = "".join(f",DNS:{host}" for host in hosts)
        extensions.write_text(_LEAF + (f"subjectAltName={names[1:]}\n" if names else ""))
        _openssl(
            "req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}",
            "-keyout", made.key, "-out", request,
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-days", _DAYS, "-in", request, "-extfile", extensions,
            "-CA", self._own.cert, "-CAkey", self._own.key, "-CAcreateserial", "-out", made.cert,
        )  # fmt: skip
        return made

    def _pair(self, file: str) -> Pair:
        return Pair(self._folder / f"{file}.crt", self._folder / f"{file}.key")


def encrypted(pair: Pair, password: str) -> Path:
    """The same key in another file, encrypted."""
    locked = pair.key.with_suffix(".locked")
    _openssl("rsa", "-aes256", "-in", pair.key, "-out", locked, "-passout", f"pass:{password}")
    return locked


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(
        ["openssl", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
