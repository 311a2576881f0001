"""Certificates for engines that speak TLS, made for one test."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import trustme

if TYPE_CHECKING:
    from pathlib import Path


def serving_tls(folder: Path, host: str = "127.0.0.1") -> tuple[ssl.SSLContext, Path]:
    """What a server at ``host`` needs, and the file of the authority that vouches for it."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(host).configure_cert(context)
    file = folder / "ca.pem"
    authority.cert_pem.write_to_path(file)
    return context, file
